//! How the values of expressions are written into a template's output, so that any value is valid YAML.

use std::fmt::{self, Write as _};

use minijinja::{ErrorKind, Output, State, Value, value::ValueKind};

/// Writes a value as JSON on one line. Every YAML parser reads it back as the same value.
///
/// JSON is valid YAML except for a few characters: YAML reads U+0085, U+2028 and U+2029 as line breaks and refuses other control
/// characters, the byte order mark, U+FFFE and U+FFFF (<https://yaml.org/spec/1.2.2/#51-character-set>). These are escaped.
/// Characters above U+FFFF are not, because YAML has no surrogate pairs. A key of more than 1024 characters needs a `?` before it.
pub(super) fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), minijinja::Error> {
    if value.is_undefined() {
        return minijinja::escape_formatter(out, state, value);
    }
    if value.is_safe() {
        return out.write_str(&value.to_string()).map_err(minijinja::Error::from);
    }
    write_json(out, value)
}

fn write_json(out: &mut Output<'_>, value: &Value) -> Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default())?,
        ValueKind::Seq | ValueKind::Iterable => {
            out.write_char('[')?;
            for (index, item) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.write_str(", ")?;
                }
                write_json(out, &item)?;
            }
            out.write_char(']')?;
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.write_str(", ")?;
                }
                let name = key.as_str().map_or_else(|| key.to_string(), str::to_owned);
                if name.len() > 200 {
                    out.write_str("? ")?;
                }
                write_string(out, &name)?;
                out.write_str(": ")?;
                write_json(out, &value.get_item(&key)?)?;
            }
            out.write_char('}')?;
        }
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            let json = serde_json::to_string(value)
                .map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))?;
            out.write_str(&json)?;
        }
        kind => {
            return Err(minijinja::Error::new(
                ErrorKind::BadSerialization,
                format!("a value of type {kind} can't be written"),
            ));
        }
    }
    Ok(())
}

fn write_string(out: &mut Output<'_>, string: &str) -> fmt::Result {
    out.write_char('"')?;
    let mut rest = string;
    // In a character that is not ASCII, this finds the first byte.
    while let Some(at) = rest.bytes().position(|byte| matches!(byte, b'"' | b'\\' | ..b' ' | 0x7f..)) {
        out.write_str(&rest[..at])?;
        let mut characters = rest[at..].chars();
        match characters.next() {
            Some('\n') => out.write_str("\\n")?,
            Some('\r') => out.write_str("\\r")?,
            Some('\t') => out.write_str("\\t")?,
            Some(character @ ('"' | '\\')) => write!(out, "\\{character}")?,
            Some(character) if is_refused(character) => write!(out, "\\u{:04x}", u32::from(character))?,
            Some(character) => out.write_char(character)?,
            None => {}
        }
        rest = characters.as_str();
    }
    out.write_str(rest)?;
    out.write_char('"')
}

/// Whether YAML reads a character as a line break or refuses it.
fn is_refused(character: char) -> bool {
    matches!(
        character,
        '\0'..'\u{20}' | '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}'
    )
}
