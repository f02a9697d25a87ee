//! Reads YAML that somebody wrote: user data, the configuration, values, patches, and what templates render. Writes it for people.
//!
//! serde_yaml bounds how deep values nest, but only after its scanner has read the whole text, in a time that grows with the square of the number
//! of open brackets: 400 KB of them take more than a minute. So a text with many brackets is read by a parser that stops where it is too deep.

use std::{cell::RefCell, fmt};

use granit_parser::{ErrorKind, Event, Parser};
use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeSeed},
};
use serde_json::{Map, Value as Json, json, map};

/// So many brackets are read in a few milliseconds, however they nest.
const FEW: usize = 1000;
/// As deep as serde_yaml reads.
const DEEPEST: usize = 128;

/// Why a text can't be read.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    message: String,
    place: Option<(usize, usize)>,
    twice: Option<String>,
}

impl Error {
    fn at(message: impl fmt::Display, line: usize, column: usize) -> Self {
        let message = format!("{message} at line {line} column {column}");
        Self { message, place: Some((line, column)), twice: None }
    }

    /// The line and the column, from 1, if they are known. The message ends with them.
    pub fn place(&self) -> Option<(usize, usize)> {
        self.place
    }

    /// The key that a map has twice, and the message without a place, if this is what is wrong: the place is that of the map.
    pub fn twice(&self) -> Option<(&str, &str)> {
        let place = self.place.map(|(line, column)| format!(" at line {line} column {column}"));
        let message = place.and_then(|place| self.message.strip_suffix(&place)).unwrap_or(&self.message);
        Some((self.twice.as_deref()?, message))
    }
}

impl From<serde_yaml::Error> for Error {
    fn from(error: serde_yaml::Error) -> Self {
        let place = error.location().map(|place| (place.line(), place.column()));
        Self { message: error.to_string(), place, twice: None }
    }
}

/// Reads a text with one document.
///
/// # Errors
/// If it is not YAML of that type, or too deep.
pub fn from_str<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Error> {
    check_depth(text)?;
    Ok(serde_yaml::from_str(text)?)
}

/// Reads a text with one document in which no map has a key twice: most types take the last one silently.
///
/// # Errors
/// If it is not such YAML of that type, or too deep.
pub fn unique_from_str<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, Error> {
    unique_documents(text)?;
    Ok(serde_yaml::from_str(text)?)
}

/// The documents of a text in which no map has a key twice.
///
/// # Errors
/// If it is not such YAML, or too deep.
pub fn unique_documents(text: &str) -> Result<serde_yaml::Deserializer<'_>, Error> {
    unique_values(text)?;
    Ok(serde_yaml::Deserializer::from_str(text))
}

/// The documents of a text in which no map has a key twice, as JSON values.
///
/// # Errors
/// If it is not such YAML, or too deep.
pub fn unique_values(text: &str) -> Result<Vec<Json>, Error> {
    let twice = RefCell::new(None);
    let values = documents(text)?.map(|document| Unique(&twice).deserialize(document)).collect::<Result<_, _>>();
    values.map_err(|error| Error { twice: twice.take(), ..Error::from(error) })
}

/// The line, from 1, of a key without its colon, if this is what is wrong with a text. serde_yaml notices it only in a later line.
pub fn line_of_unfinished_key(text: &str) -> Option<usize> {
    let error = Parser::new_from_str(text).find_map(Result::err)?;
    (*error.kind() == ErrorKind::SimpleKeyExpected).then(|| error.marker().line())
}

/// The documents of a text.
///
/// # Errors
/// If it is too deep.
pub fn documents(text: &str) -> Result<serde_yaml::Deserializer<'_>, Error> {
    check_depth(text)?;
    Ok(serde_yaml::Deserializer::from_str(text))
}

/// A value as people get to see it. Long texts are not folded, so that a file for Git has each on its line.
///
/// # Errors
/// Never: every JSON value can be written.
pub fn unfolded(value: &Json) -> Result<String, serde_saphyr::ser::Error> {
    serde_saphyr::to_string_with_options(value, serde_saphyr::ser_options! { folded_wrap_chars: usize::MAX })
}

fn check_depth(text: &str) -> Result<(), Error> {
    if text.bytes().filter(|byte| matches!(byte, b'[' | b'{')).count() <= FEW {
        return Ok(());
    }
    let mut depth = 0_usize;
    for next in Parser::new_from_str(text) {
        let (event, span) = next.map_err(|error| {
            let place = error.marker();
            Error::at(error.info(), place.line(), place.col() + 1)
        })?;
        match event {
            Event::SequenceStart(..) | Event::MappingStart(..) => depth += 1,
            Event::SequenceEnd | Event::MappingEnd => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEEPEST {
            let what = format!("values are nested deeper than {DEEPEST}");
            return Err(Error::at(what, span.start.line(), span.start.col() + 1));
        }
    }
    Ok(())
}

/// Reads a JSON value from YAML in which no map has a key twice; if one has, the key is noted.
#[derive(Clone, Copy)]
struct Unique<'a>(&'a RefCell<Option<String>>);

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = Json;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> de::Visitor<'de> for Unique<'_> {
    type Value = Json;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML document without tags")
    }
    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }
    fn visit_none<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(value.into())
    }
    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(value.into())
    }
    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(value.into())
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Json, E> {
        if value.is_finite() { Ok(json!(value)) } else { Err(E::custom("a number that JSON does not have")) }
    }
    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(value.into())
    }
    fn visit_seq<A: de::SeqAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = access.next_element_seed(self)? {
            list.push(value);
        }
        Ok(Json::Array(list))
    }
    fn visit_map<A: de::MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            match map.entry(key) {
                map::Entry::Vacant(entry) => {
                    entry.insert(access.next_value_seed(self)?);
                }
                map::Entry::Occupied(entry) => {
                    let error = de::Error::custom(format!("the key {:?} occurs twice", entry.key()));
                    self.0.replace(Some(entry.key().clone()));
                    return Err(error);
                }
            }
        }
        Ok(Json::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn what_is_too_deep_is_refused_before_it_is_read() {
        for open in ["[", "{", "{a: ", "[ # ]\n", "{a: \"\n}}\"\n, b: ", "[']', ", "- ", "? "] {
            let text = format!("a:\n {}", open.repeat(100_000));
            let error = from_str::<Value>(&text).unwrap_err().to_string();
            assert!(error.contains(" at line "), "{open}: {error}");
            assert!(documents(&text).is_err() || ["- ", "? "].contains(&open), "{open}");
        }
        let error = from_str::<Value>(&format!("a:\n{}", "[{b: \n".repeat(1000))).unwrap_err().to_string();
        assert_eq!(error, "recursion limit exceeded at line 129 column 2");
    }

    #[test]
    fn many_brackets_that_are_not_deep_are_read() {
        for text in [
            "- [a, {b: c}]\n".repeat(1000),
            format!("a: |\n  {}\nb: '{}'\n", "[".repeat(10_000), "{".repeat(10_000)),
            format!("{}{}, {}", "[".repeat(100), "]".repeat(99), "[], ".repeat(2000)) + "]",
        ] {
            assert_eq!(from_str::<Value>(&text).unwrap(), serde_yaml::from_str::<Value>(&text).unwrap());
        }
    }

    #[test]
    fn a_key_without_its_colon_is_found() {
        for (text, line) in [
            ("a: 1\nb\nc: 2\n", Some(2)),
            ("a:\n  b: 1\n\n  \"- name: b\\n  x: 1\"\n\n\nc: 2\n", Some(4)),
            ("a: [\n", None),
            ("a: 1\na: 1\n", None),
        ] {
            assert_eq!(line_of_unfinished_key(text), line, "{text}");
        }
    }

    #[test]
    fn a_key_that_a_map_has_twice_is_refused() {
        for (text, expected) in [
            ("a: 1\nb: 2\na: 3\n", "the key \"a\" occurs twice"),
            ("a:\n  b:\n  - c: 1\n    c: 2\n", "a.b[0]: the key \"c\" occurs twice at line 3 column 5"),
        ] {
            let error = unique_from_str::<Value>(text).unwrap_err();
            assert_eq!(error.to_string(), expected);
            let key = expected.split('"').nth(1).unwrap();
            assert_eq!(error.twice(), Some((key, expected.split(" at line").next().unwrap())));
        }
        assert!(unique_from_str::<Value>("a: the key \"b\" occurs twice: c").unwrap_err().twice().is_none());
        assert_eq!(unique_from_str::<Value>("a: &x [1]\nb: *x\n").unwrap(), json!({ "a": [1], "b": [1] }));
    }
}
