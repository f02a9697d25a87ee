//! How values are written into the output: YAML-safe by construction.

use std::fmt::{self, Write as _};

use minijinja::{ErrorKind, Output, State, Value, value::ValueKind};

/// Writes an interpolated value as JSON that every YAML parser reads back as that value, on one line.
///
/// JSON is YAML but for a few characters: YAML takes U+0085, U+2028 and U+2029 for line breaks and refuses other control
/// characters, the byte order mark and U+FFFE, U+FFFF (<https://yaml.org/spec/1.2.2/#51-character-set>). They are
/// escaped. Characters beyond U+FFFF stay, because YAML knows no surrogate pairs. A key of a map may be longer than the
/// 1024 characters that YAML allows only after an explicit `?`.
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
    // Of the bytes of a character beyond ASCII this finds the first.
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

/// Whether YAML takes a character for a line break, or does not take it at all.
fn is_refused(character: char) -> bool {
    matches!(
        character,
        '\0'..'\u{20}' | '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}'
    )
}
