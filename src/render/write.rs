//! How values are written into the output: YAML-safe by construction.

use std::fmt::Write as _;

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
    let mut text = String::new();
    write_json(&mut text, value)?;
    out.write_str(&text).map_err(minijinja::Error::from)
}

fn write_json(text: &mut String, value: &Value) -> Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::String => write_string(text, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                if index > 0 {
                    text.push_str(", ");
                }
                write_json(text, &item)?;
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    text.push_str(", ");
                }
                let name = key.as_str().map_or_else(|| key.to_string(), str::to_owned);
                if name.len() > 200 {
                    text.push_str("? ");
                }
                write_string(text, &name);
                text.push_str(": ");
                write_json(text, &value.get_item(&key)?)?;
            }
            text.push('}');
        }
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            let json = serde_json::to_string(value)
                .map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))?;
            text.push_str(&json);
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

fn write_string(text: &mut String, string: &str) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\0'..'\u{20}' | '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                let _ = write!(text, "\\u{:04x}", u32::from(character));
            }
            character => text.push(character),
        }
    }
    text.push('"');
}
