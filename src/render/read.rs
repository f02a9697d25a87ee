//! Reads the text that a template rendered: YAML documents become JSON values.
//!
//! serde_yaml parses the text and bounds how deep values and aliases nest. It does not report a key that a map has twice, so
//! [`Unique`] does.

use std::fmt;

use serde::{Deserialize, Deserializer, de};
use serde_json::{Map, Value, json, map};

use super::{error::OutputError, output::drop_nulls};

/// Parses zero or more YAML documents, each of which will be an object. Documents and map entries that are null are left out.
pub(super) fn documents(text: &str) -> Result<Vec<Value>, OutputError> {
    // Many templates render nothing for most VMs, and a parser costs more than this comparison.
    if text.trim_matches([' ', '\n']).is_empty() {
        return Ok(Vec::new());
    }
    let mut documents = Vec::new();
    for document in serde_yaml::Deserializer::from_str(text) {
        let Unique(mut value) = Unique::deserialize(document).map_err(|error| not_yaml(text, &error))?;
        if !value.is_null() {
            drop_nulls(&mut value);
            documents.push(value);
        }
    }
    Ok(documents)
}

fn not_yaml(text: &str, error: &serde_yaml::Error) -> OutputError {
    let message = error.to_string();
    // The position of a key that occurs twice is that of its map.
    if let Some(key) = message.split_once("the key \"").and_then(|(_, rest)| rest.split('"').next()) {
        let message = message.split(" at line ").next().unwrap_or(&message);
        let error = OutputError::at(format!("{key}:"), format!("the output is not YAML: {message}"));
        return OutputError { in_last_line: true, ..error };
    }
    let Some(number) = error.location().map(|position| position.line()) else {
        return OutputError::at("", format!("the output is not YAML: {message}"));
    };
    let line = text.lines().nth(number.saturating_sub(1)).unwrap_or_default().trim();
    OutputError::at(line, format!("the output is not YAML: {message} (line {number} of the output: {line:.80})"))
}

/// A JSON value that was read from YAML in which no map has a key twice.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> de::Visitor<'de> for UniqueVisitor {
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
                    return Err(de::Error::custom(format!("the key {key:?} occurs twice")));
                }
            }
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_that_are_empty_are_left_out() {
        assert!(documents("---\n# nothing\n---\n\n").unwrap().is_empty());
    }

    #[test]
    fn entries_that_are_null_are_left_out() {
        for text in ["a: null\nb: [{c: , d: 1}, ~]\n", "a: &a null\nb: [{c: *a, d: 1}, ~]\n"] {
            assert_eq!(documents(text), Ok(vec![json!({ "b": [{ "d": 1 }, null] })]), "{text}");
        }
    }

    #[test]
    fn a_key_that_occurs_twice_in_a_map_is_an_error() {
        for text in
            ["a: 1\na: 1\n", "a: {b: null, 'b': 1}\n", "- {1: a, \"1\": b}\n", "---\na: 1\n---\n? a\n: 1\n? a\n: 2\n"]
        {
            let message = documents(text).unwrap_err().message;
            assert!(message.contains("occurs twice"), "{text}: {message}");
        }
    }

    #[test]
    fn values_that_json_does_not_have_are_errors() {
        for text in ["a: .inf\n", "a: !secret b\n", "[a]: b\n", "{a:}\n"] {
            assert!(documents(text).is_err(), "{text}: {:?}", documents(text));
        }
    }
}
