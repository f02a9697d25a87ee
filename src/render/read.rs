//! How rendered text is read: YAML becomes JSON, in which no map has a key twice or an entry that is null.
//!
//! ```text
//!  text ─▶ quickly ─────────────────▶ values
//!             └─ anything unusual ─▶ thoroughly ─▶ values, or what is wrong and where
//! ```
//!
//! serde_yaml decides what a text means and what is wrong with it. But to read is the largest part of what a look at a machine
//! costs, and saphyr-parser does it in two thirds of the time: so it reads what nearly all templates render, text without
//! anchors, tags and errors. What both can read they read alike. (saphyr-parser reads a little more, by YAML 1.2, such as keys over
//! several lines.)

use std::fmt;

use saphyr_parser::{Event, Parser, ScalarStyle, StrInput};
use serde::{Deserialize, Deserializer, de};
use serde_json::{Map, Value, json, map};

use super::output::{Wrong, drop_nulls};

/// Parses what a template rendered: zero or more YAML documents, each to become an object. Entries that are null are left out.
pub(super) fn documents(text: &str) -> Result<Vec<Value>, Wrong> {
    // A parser costs more than to look.
    if text.trim_matches([' ', '\n']).is_empty() {
        return Ok(Vec::new());
    }
    let mut documents = quickly(text).map_or_else(|| thoroughly(text), Ok)?;
    documents.iter_mut().for_each(drop_nulls);
    Ok(documents)
}

/// Reads documents that are simple, without those that are null; `None` if there is an anchor, a tag, a block scalar, something
/// that is not ASCII, or something wrong.
fn quickly(text: &str) -> Option<Vec<Value>> {
    // Not `all`, which looks at one byte after the other.
    let is_ascii = text.bytes().fold(true, |all, byte| all & matches!(byte, b'\n' | b' '..=b'~'));
    let has_markers = text.starts_with(['%', '.']) || ["\n%", "\n."].iter().any(|marker| text.contains(marker));
    // YAML 1.2 takes `{a:}` for a key without a value. serde_yaml refuses it, and more likely a blank was forgotten.
    let has_tight_keys = [":,", ":]", ":}", ":?"].iter().any(|pair| text.contains(pair));
    if !is_ascii || has_markers || has_tight_keys {
        return None;
    }
    let mut events = Events(Parser::new_from_str(text));
    let mut documents = Vec::new();
    loop {
        match events.next()? {
            Event::StreamEnd => return Some(documents),
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd => {}
            event => documents.extend(Some(events.value(event, 0)?).filter(|value| !value.is_null())),
        }
    }
}

/// What saphyr-parser finds in a text. All of it yields `None` for what serde_yaml should see.
struct Events<'a>(Parser<'a, StrInput<'a>>);

impl<'a> Events<'a> {
    /// Deeper values are serde_yaml's, which has a limit.
    const DEPTH: usize = 64;

    fn next(&mut self) -> Option<Event<'a>> {
        let (event, _) = self.0.next_event()?.ok()?;
        Some(event)
    }

    /// The value that begins with an event.
    fn value(&mut self, event: Event<'a>, depth: usize) -> Option<Value> {
        match event {
            Event::Scalar(text, ScalarStyle::Plain, 0, None) => of_plain(&text),
            // Copied: saphyr-parser's strings have room for much more, and those of an object stay in memory.
            Event::Scalar(text, ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted, 0, None) => {
                Some(text.as_ref().into())
            }
            Event::SequenceStart(0, None) if depth < Self::DEPTH => {
                let mut list = Vec::new();
                loop {
                    match self.next()? {
                        Event::SequenceEnd => return Some(Value::Array(list)),
                        event => list.push(self.value(event, depth + 1)?),
                    }
                }
            }
            Event::MappingStart(0, None) if depth < Self::DEPTH => self.map(depth + 1).map(Value::Object),
            _ => None,
        }
    }

    fn map(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let mut map = Map::new();
        loop {
            let key = match self.next()? {
                Event::Scalar(key, style, 0, None)
                    if !matches!(style, ScalarStyle::Literal | ScalarStyle::Folded)
                        && !key.is_empty()
                        && !key.starts_with(INDICATORS) =>
                {
                    key.as_ref().to_owned()
                }
                Event::MappingEnd => return Some(map),
                _ => return None,
            };
            let map::Entry::Vacant(entry) = map.entry(key) else { return None };
            let event = self.next()?;
            entry.insert(self.value(event, depth)?);
        }
    }
}

/// With these characters a scalar without quotes begins only for saphyr-parser.
const INDICATORS: [char; 4] = ['|', '>', '?', ':'];

/// What a scalar without quotes is. All that may be a number but is no plain one is decided by serde_yaml.
fn of_plain(text: &str) -> Option<Value> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Some(Value::Null),
        "true" | "True" | "TRUE" => return Some(Value::Bool(true)),
        "false" | "False" | "FALSE" => return Some(Value::Bool(false)),
        _ if text.starts_with(INDICATORS) => return None,
        _ => {}
    }
    let of_numbers = |character: char| character.is_ascii_hexdigit() || "+-.xoinIN_".contains(character);
    if !text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first)) || !text.chars().all(of_numbers)
    {
        return Some(text.into());
    }
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_integer = digits.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !digits.starts_with('0'));
    // So many digits fit whatever they are.
    if is_integer && matches!(digits.len(), 1..=18) {
        return text.parse::<i64>().ok().map(Value::from);
    }
    let Unique(value) = serde_yaml::from_str(text).ok()?;
    (value.is_number() || value.as_str() == Some(text)).then_some(value)
}

/// Reads the same as serde_yaml does, and says what is wrong.
fn thoroughly(text: &str) -> Result<Vec<Value>, Wrong> {
    let mut documents = Vec::new();
    for document in serde_yaml::Deserializer::from_str(text) {
        let Unique(value) = Unique::deserialize(document).map_err(|error| not_yaml(text, &error))?;
        documents.extend(Some(value).filter(|value| !value.is_null()));
    }
    Ok(documents)
}

fn not_yaml(text: &str, error: &serde_yaml::Error) -> Wrong {
    let line = error.location().map(|place| {
        (place.line(), text.lines().nth(place.line().saturating_sub(1)).unwrap_or_default().trim().to_owned())
    });
    let place = line.as_ref().map(|(number, line)| format!(" (line {number} of the output: {line:.80})"));
    let said = error.to_string();
    // The place of a key that is there twice is that of its map.
    if let Some(key) = said.split_once("the key \"").and_then(|(_, rest)| rest.split('"').next()) {
        let said = said.split(" at line ").next().unwrap_or(&said);
        return Wrong { message: format!("the output is not YAML: {said}"), near: format!("{key}:"), last: true };
    }
    let message = format!("the output is not YAML: {said}{}", place.unwrap_or_default());
    Wrong { message, near: line.map(|(_, line)| line).unwrap_or_default(), last: false }
}

/// JSON read from YAML in which no map has a key twice.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a YAML document without tags")
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_none<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
                if value.is_finite() { Ok(json!(value)) } else { Err(E::custom("a number that JSON does not have")) }
            }
            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
                let mut list = Vec::new();
                while let Some(Unique(value)) = access.next_element()? {
                    list.push(value);
                }
                Ok(Value::Array(list))
            }
            fn visit_map<A: de::MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
                let mut map = Map::new();
                while let Some(key) = access.next_key::<String>()? {
                    match map.entry(key) {
                        map::Entry::Vacant(entry) => {
                            let Unique(value) = access.next_value()?;
                            entry.insert(value);
                        }
                        map::Entry::Occupied(entry) => {
                            let key = entry.key();
                            return Err(de::Error::custom(format!("the key {key:?} is there twice")));
                        }
                    }
                }
                Ok(Value::Object(map))
            }
        }
        deserializer.deserialize_any(Visitor).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn empty_documents_are_no_objects() {
        assert!(documents("---\n# nothing\n---\n\n").unwrap().is_empty());
    }

    #[test]
    fn entries_that_are_null_are_left_out() {
        for text in ["a: null\nb: [{c: , d: 1}, ~]\n", "a: &a null\nb: [{c: *a, d: 1}, ~]\n"] {
            assert_eq!(documents(text), Ok(vec![json!({ "b": [{ "d": 1 }, null] })]), "{text}");
        }
    }

    #[test]
    fn what_templates_render_is_read_quickly() {
        for text in
            ["a: 1\nb: [x, {c: null}]\n", "---\na: 'b'\n---\n\"c\": \"\\u0041\\n\" # d\n", "a: -5\nb: 1Gi\nc: 1.5\n"]
        {
            assert_eq!(quickly(text), thoroughly(text).ok(), "{text}");
            assert!(quickly(text).is_some(), "{text}");
        }
    }

    #[test]
    fn what_a_template_got_wrong_is_said() {
        for text in [
            "a: {b:}",
            "[a:]",
            "{a:, b: 1}",
            "[?a]",
            "{?a: {b: 1}}",
            "{a:?}",
            "[::1, ::]",
            "{b: :\"x, c: d\"}",
            "%a\n---\n",
            "a:\tb",
            // Of which serde_yaml says something else.
            "? |+\n  ",
        ] {
            assert_eq!(quickly(text), None, "{text}");
        }
    }

    fn is_read_alike(text: &str) -> Result<(), TestCaseError> {
        if let (Some(quickly), Ok(thoroughly)) = (quickly(text), thoroughly(text)) {
            prop_assert_eq!(quickly, thoroughly, "{:?}", text);
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]

        #[test]
        fn both_ways_of_reading_yield_the_same(pieces in prop::collection::vec(prop::sample::select(PIECES), 0..12)) {
            let text = pieces.concat();
            is_read_alike(&text)?;
            is_read_alike(&format!("a: [{text}]\n"))?;
            is_read_alike(&format!("a: {{{text}}}\n"))?;
        }
    }

    /// What YAML is made of, and what looks like it.
    #[rustfmt::skip]
    const PIECES: &[&str] = &[
        "a", "b", "c", "a: ", "b: ", "c:\n", "? ", ": ", ":", "- ", "-", "\n", "\n  ", "\n    ", "  ", " ", "\t", "[",
        "]", "{", "}", ", ", ",", "\"", "'", "''", "\\n", "\\", "|\n", "|-\n", "|+\n", "|2\n", ">\n", ">-\n", "# ",
        "#", "&x ", "*x", "!", "!!str ", "%", "@", "`", "---\n", "--- ", "---", "...\n", "...", "null", "~", "true",
        "False", "no", "0", "1", "-1", "+1", "007", "0x1f", "0o7", "0b1", "1e3", "1.5", ".5", "1.", ".inf", "-.nan",
        "1_0", "1Gi", "10.0.0.1", "2001-01-01", "<<: ", "=", "\u{e9}", "\u{85}", "\u{2028}", "\u{feff}", "\r\n", "\r",
        "\u{1f600}", "\u{7f}", "\0",
    ];
}
