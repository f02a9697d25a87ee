//! `-o json|yaml|name|jsonpath=TEMPLATE|jsonpath-file=FILE`, for all commands.

use std::{ffi::OsStr, fmt, fs};

use clap::{
    Arg, Command,
    builder::{PossibleValue, TypedValueParser, ValueParserFactory},
    error::ErrorKind,
};
use kube::Resource;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    jsonpath::Template,
    output::{Failure, Output, plain, yaml},
};
use crate::api::VirtualMachine;

/// How what a command found is printed in place of text.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum DataFormat {
    Json,
    Yaml,
    /// What a template prints of it.
    Template(Template),
}

/// How objects are printed in place of lines.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ObjectFormat {
    /// Kind and name.
    Name,
    Data(DataFormat),
}

/// How a list is printed.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ListFormat {
    /// With more columns.
    Wide,
    Objects(ObjectFormat),
}

/// A format that is typed on a command line.
pub(super) trait Format: Clone + Send + Sync + Sized + 'static {
    /// The words that are formats, besides the templates.
    const WORDS: &'static [&'static str];

    /// The format of one of the words.
    fn word(word: &str) -> Option<Self>;

    fn template(template: Template) -> Self;
}

impl Format for DataFormat {
    const WORDS: &'static [&'static str] = &["json", "yaml"];

    fn word(word: &str) -> Option<Self> {
        match word {
            "json" => Some(Self::Json),
            "yaml" => Some(Self::Yaml),
            _ => None,
        }
    }

    fn template(template: Template) -> Self {
        Self::Template(template)
    }
}

impl Format for ObjectFormat {
    const WORDS: &'static [&'static str] = &["json", "yaml", "name"];

    fn word(word: &str) -> Option<Self> {
        if word == "name" { Some(Self::Name) } else { DataFormat::word(word).map(Self::Data) }
    }

    fn template(template: Template) -> Self {
        Self::Data(DataFormat::Template(template))
    }
}

impl Format for ListFormat {
    const WORDS: &'static [&'static str] = &["wide", "json", "yaml", "name"];

    fn word(word: &str) -> Option<Self> {
        if word == "wide" { Some(Self::Wide) } else { ObjectFormat::word(word).map(Self::Objects) }
    }

    fn template(template: Template) -> Self {
        Self::Objects(ObjectFormat::template(template))
    }
}

/// Reads a format.
#[derive(Clone)]
pub(super) struct FormatParser<F>(std::marker::PhantomData<F>);

/// Reads a format.
///
/// # Errors
/// What is wrong with it.
fn parse<F: Format>(text: &str) -> Result<F, String> {
    let read = |template: &str| Template::parse(template).map(F::template);
    match text.split_once('=') {
        Some(("jsonpath", template)) => read(template),
        Some(("jsonpath-file", file)) => read(&fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?),
        _ => F::word(text)
            .ok_or_else(|| format!("it is one of {}, jsonpath=TEMPLATE and jsonpath-file=FILE", F::WORDS.join(", "))),
    }
}

impl<F: Format> TypedValueParser for FormatParser<F> {
    type Value = F;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<F, clap::Error> {
        let text = value.to_string_lossy();
        parse(&text).map_err(|why| {
            let option = argument.map(|argument| format!(" for '{argument}'")).unwrap_or_default();
            clap::Error::raw(ErrorKind::ValueValidation, format!("invalid value '{text}'{option}: {why}\n"))
                .with_cmd(command)
        })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(F::WORDS.iter().copied().chain(["jsonpath=", "jsonpath-file="]).map(PossibleValue::new)))
    }
}

macro_rules! typed {
    ($($format:ty),*) => {
        $(impl ValueParserFactory for $format {
            type Parser = FormatParser<Self>;

            fn value_parser() -> Self::Parser {
                FormatParser(std::marker::PhantomData)
            }
        })*
    };
}

typed!(DataFormat, ObjectFormat, ListFormat);

impl DataFormat {
    /// Prints a value.
    ///
    /// # Errors
    /// If it can't be written, or if the template does not fit it.
    pub fn print(&self, value: &Value, output: &mut Output<'_>) -> Result<(), Failure> {
        match self {
            Self::Json => writeln!(output, "{value:#}"),
            Self::Yaml => write!(output, "{}", yaml(value)?),
            Self::Template(template) => {
                let text = template.print(value).map_err(|error| Failure::new(format!("jsonpath: {error}")))?;
                write!(output, "{text}")
            }
        }
    }
}

impl Output<'_> {
    /// What a command found: as text for a terminal, or as data.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn found(
        &mut self,
        found: &(impl fmt::Display + Serialize),
        format: Option<&DataFormat>,
    ) -> Result<(), Failure> {
        match format {
            Some(format) => format.print(&json!(found), self),
            None => write!(self, "{}", plain(&found.to_string())),
        }
    }
}

/// Prints objects, such as VMs: one of which one is meant as itself, several as a list.
pub(super) fn print_objects(
    vms: &[Value],
    is_one: bool,
    format: &ObjectFormat,
    output: &mut Output<'_>,
) -> Result<(), Failure> {
    let format = match format {
        ObjectFormat::Name => {
            return vms.iter().try_for_each(|vm| {
                let name = vm["metadata"]["name"].as_str().unwrap_or_default();
                // Items of a list of VMs do not say their kind.
                let kind = vm["kind"].as_str().map_or_else(|| "virtualmachine".to_owned(), str::to_lowercase);
                writeln!(output, "{kind}.{}/{name}", VirtualMachine::group(&()))
            });
        }
        ObjectFormat::Data(format) => format,
    };
    match vms {
        [] if is_one => Ok(()),
        [vm] if is_one => format.print(vm, output),
        vms => format.print(&list(vms), output),
    }
}

/// Objects as kubectl's list of them.
pub(super) fn list(objects: &[Value]) -> Value {
    json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": objects })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_typed_as_kubectl_has_it() {
        let template = Template::parse("{.a}").unwrap();
        assert_eq!(parse("wide"), Ok(ListFormat::Wide));
        assert_eq!(parse("name"), Ok(ListFormat::Objects(ObjectFormat::Name)));
        assert_eq!(parse("jsonpath={.a}"), Ok(DataFormat::Template(template)));
        let error = "it is one of json, yaml, jsonpath=TEMPLATE and jsonpath-file=FILE";
        for text in ["name", "wide", "jsonpath", "text", ""] {
            assert_eq!(parse::<DataFormat>(text), Err(error.to_owned()), "{text}");
        }
        assert_eq!(parse::<DataFormat>("jsonpath={"), Err("a { is not closed".into()));
        let missing = parse::<DataFormat>("jsonpath-file=/nonexistent").unwrap_err();
        assert!(missing.starts_with("/nonexistent: No such file"), "{missing}");
    }

    #[test]
    fn several_vms_are_a_list_and_one_is_itself() {
        let vms = ["apple", "pear"].map(|name| json!({ "metadata": { "name": name } }));
        let printed = |vms: &[Value], format: &str| {
            let mut text = Vec::new();
            let format: ObjectFormat = parse(format).unwrap();
            print_objects(vms, vms.len() == 1, &format, &mut Output::new(&mut text)).unwrap();
            String::from_utf8(text).unwrap()
        };
        assert_eq!(printed(&vms, "jsonpath={.items[*].metadata.name}"), "apple pear");
        assert_eq!(printed(&vms[..1], "jsonpath={.metadata.name}"), "apple");
        assert_eq!(printed(&vms, "name").lines().last(), Some("virtualmachine.vmoperator.jdrupes.org/pear"));
        assert!(printed(&vms, "yaml").contains("kind: List"));
    }
}
