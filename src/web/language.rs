//! The languages of the pages: Fluent texts in `src/web/languages`, one file for each language.

use fluent_bundle::{FluentArgs, FluentResource, FluentValue, concurrent::FluentBundle};
use unic_langid::langid;

/// A language of the pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Language {
    /// English.
    #[default]
    English,
    /// German.
    German,
}

impl Language {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::English, Self::German];

    /// The tag of the language (BCP 47).
    pub const fn tag(self) -> &'static str {
        match self {
            Self::English => "en",
            Self::German => "de",
        }
    }

    /// The one that a browser wants most, by its header `Accept-Language` (RFC 9110, 12.5.4).
    pub fn wanted(header: &str) -> Self {
        let mut best = (0.0, Self::default());
        for range in header.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let tag = parts.next().unwrap_or_default().to_ascii_lowercase();
            let quality = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok()).unwrap_or(1.0);
            let primary = tag.split('-').next().unwrap_or_default();
            let language = Self::ALL.into_iter().find(|language| language.tag() == primary);
            if let Some(language) = language
                && quality > best.0
            {
                best = (quality, language);
            }
        }
        best.1
    }

    const fn source(self) -> &'static str {
        match self {
            Self::English => include_str!("languages/en.ftl"),
            Self::German => include_str!("languages/de.ftl"),
        }
    }
}

/// The texts of all languages.
pub(super) struct Texts(Vec<FluentBundle<FluentResource>>);

impl Texts {
    /// Reads the built-in texts.
    pub fn new() -> Self {
        let bundle = |language: Language| {
            let tag = match language {
                Language::English => langid!("en"),
                Language::German => langid!("de"),
            };
            let mut bundle = FluentBundle::new_concurrent(vec![tag]);
            // Pages isolate names from text by their elements.
            bundle.set_use_isolating(false);
            // A test reads the texts without an error.
            let resource =
                FluentResource::try_new(language.source().to_owned()).unwrap_or_else(|(readable, _)| readable);
            let _ = bundle.add_resource(resource);
            bundle
        };
        Self(Language::ALL.map(bundle).into())
    }

    /// The text of that name, with its arguments. A text that does not exist is its name.
    pub fn text<'a>(
        &self,
        language: Language,
        name: &str,
        arguments: impl IntoIterator<Item = (&'a str, FluentValue<'a>)>,
    ) -> String {
        let arguments: FluentArgs<'_> = arguments.into_iter().collect();
        let bundle = self.0.get(language as usize);
        let text = bundle.and_then(|bundle| {
            let pattern = bundle.get_message(name)?.value()?;
            Some(bundle.format_pattern(pattern, Some(&arguments), &mut Vec::new()).into_owned())
        });
        text.unwrap_or_else(|| name.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::api::status::{DeviceChange, DeviceKind, DevicePhase};

    #[test]
    fn the_language_that_is_wanted_most() {
        for (header, expected) in [
            ("", "en"),
            ("de", "de"),
            ("de-AT,de;q=0.9,en;q=0.8", "de"),
            ("fr,en;q=0.5,de;q=0.7", "de"),
            ("en-GB,de;q=0.9", "en"),
            ("de;q=0,en;q=0.1", "en"),
            ("fr, es", "en"),
            ("DE", "de"),
            (";;,q=,\u{1f600}", "en"),
        ] {
            assert_eq!(Language::wanted(header).tag(), expected, "{header}");
        }
    }

    /// The names of the texts in a file, which has one text in a line.
    fn names(language: Language) -> BTreeSet<&'static str> {
        FluentResource::try_new(language.source().to_owned()).unwrap();
        let lines = language.source().lines().filter(|line| !line.starts_with([' ', '#', '}']));
        lines.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name).collect()
    }

    #[test]
    fn whatever_a_device_can_be_has_a_text() {
        fn values<T: schemars::JsonSchema>() -> Vec<String> {
            let schema = serde_json::to_value(schemars::schema_for!(T)).unwrap();
            // With comments each value has a schema of its own.
            let all = schema["oneOf"].as_array().unwrap().iter().map(|it| it["const"].as_str().unwrap().to_lowercase());
            all.collect()
        }
        let all = [values::<DeviceKind>(), values::<DevicePhase>(), values::<DeviceChange>()].concat();
        assert!(all.len() >= 10, "{all:?}");
        for value in all {
            assert!(names(Language::English).contains(format!("device-{value}").as_str()), "device-{value}");
        }
    }

    #[test]
    fn all_languages_have_the_same_texts_and_those_that_templates_use() {
        assert_eq!(names(Language::English), names(Language::German));
        let texts = names(Language::English);
        let mut used = BTreeSet::new();
        for (name, template) in super::super::pages::TEMPLATES {
            let calls = template.match_indices("t(\"");
            let calls = calls.filter(|(at, _)| !template[..*at].ends_with(char::is_alphanumeric));
            for (_, rest) in calls.map(|(at, start)| template.split_at(at + start.len())) {
                let key = rest.split('"').next().unwrap();
                // Names that end with a hyphen have the rest from a value.
                let is_there = if key.ends_with('-') {
                    texts.iter().any(|text| text.starts_with(key))
                } else {
                    texts.contains(key)
                };
                assert!(is_there, "{name}: there is no text {key}");
                used.insert(key);
            }
        }
        let unused: Vec<_> = texts
            .iter()
            .filter(|text| !used.iter().any(|key| *text == key || key.ends_with('-') && text.starts_with(key)))
            .collect();
        assert!(unused.is_empty(), "no template uses {unused:?}");
    }

    #[test]
    fn a_text_has_its_arguments() {
        let texts = Texts::new();
        let text = |language| texts.text(language, "console-asks", [("user", FluentValue::from("ann"))]);
        assert!(text(Language::English).contains("ann") && text(Language::German).contains("ann"));
        assert_ne!(text(Language::English), text(Language::German));
        assert_eq!(texts.text(Language::German, "no-such-text", []), "no-such-text");
    }
}
