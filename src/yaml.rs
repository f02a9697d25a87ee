//! Reads YAML that somebody wrote: the configuration, values, patches, and what templates render.
//!
//! serde_yaml bounds how deep values nest, but only after its scanner has read all brackets that are open, for which it takes a time that
//! grows with the square of their number. And of a key that a map has twice, most types take the last one. So [`read`] looks for both first.

use std::{collections::BTreeSet, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, DeserializeSeed, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor},
};

/// How many brackets may be open. serde_yaml does not read deeper values.
const MOST_OPEN: usize = 128;

/// Why a text can't be read.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    message: String,
    /// Line and column, from 1.
    place: Option<(usize, usize)>,
}

impl Error {
    fn at(message: impl fmt::Display, (line, column): (usize, usize)) -> Self {
        Self { message: format!("{message} at line {line} column {column}"), place: Some((line, column)) }
    }

    /// The line and the column, from 1, if they are known. They are in the message as well.
    pub fn place(&self) -> Option<(usize, usize)> {
        self.place
    }
}

impl From<serde_yaml::Error> for Error {
    fn from(error: serde_yaml::Error) -> Self {
        Self {
            message: error.to_string(),
            place: error.location().map(|location| (location.line(), location.column())),
        }
    }
}

/// Reads a text with one document.
///
/// # Errors
/// If it is not YAML of that type, has a key twice in a map, or too many open brackets.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    check(text, |_| false)?;
    Ok(serde_yaml::from_str(text)?)
}

/// The documents of a text, which [`check`] lets pass.
///
/// # Errors
/// As [`check`].
pub fn documents(text: &str) -> Result<serde_yaml::Deserializer<'_>, Error> {
    check(text, |_| false)?;
    Ok(serde_yaml::Deserializer::from_str(text))
}

/// Whether a text is YAML in which no map has a key twice.
///
/// # Errors
/// If it is not. Keys for which `may_repeat` is true may occur more than once.
pub fn check(text: &str, may_repeat: fn(&str) -> bool) -> Result<(), Error> {
    check_brackets(text)?;
    for document in serde_yaml::Deserializer::from_str(text) {
        Unique(may_repeat).deserialize(document).map_err(|error| twice(text, error))?;
    }
    Ok(())
}

/// The error of a key that occurs twice, at its second place: serde_yaml has the place of the map.
fn twice(text: &str, error: serde_yaml::Error) -> Error {
    let error = Error::from(error);
    let second = || {
        let (message, _) = error.message.rsplit_once(" at line ")?;
        let (_, rest) = message.split_once("the key \"")?;
        let key = rest.strip_suffix("\" occurs twice")?;
        let (first, column) = error.place?;
        let is_it = |line: &&str| {
            let keyed = line.trim_start_matches([' ', '-']);
            let rest = ["", "\"", "'"].iter().find_map(|quote| {
                keyed.strip_prefix(quote)?.strip_prefix(key)?.strip_prefix(quote).filter(|rest| rest.starts_with(':'))
            });
            rest.is_some() && line.len() - keyed.len() + 1 == column
        };
        let mut places = text.lines().zip(1..).skip(first.saturating_sub(1)).filter(|(line, _)| is_it(line));
        let (_, line) = places.nth(1)?;
        Some(Error::at(message, (line, column)))
    };
    second().unwrap_or(error)
}

/// Reads a value to see whether a map has a key twice.
#[derive(Clone)]
struct Unique(fn(&str) -> bool);

impl<'de> DeserializeSeed<'de> for Unique {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("YAML")
    }
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_i128<E>(self, _: i128) -> Result<(), E> {
        Ok(())
    }
    fn visit_u128<E>(self, _: u128) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<(), A::Error> {
        while access.next_element_seed(self.clone())?.is_some() {}
        Ok(())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<(), A::Error> {
        let mut known = BTreeSet::new();
        while let Some(Key(key)) = access.next_key()? {
            if let Some(key) = key.filter(|key| !self.0(key))
                && !known.insert(key.clone())
            {
                return Err(de::Error::custom(format!("the key {key:?} occurs twice")));
            }
            access.next_value_seed(self.clone())?;
        }
        Ok(())
    }
    /// A value with a tag.
    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<(), A::Error> {
        let (_, value) = access.variant::<String>()?;
        value.newtype_variant_seed(self)
    }
}

/// A key as a text. None, if it is a list or a map.
struct Key(Option<String>);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(match serde_yaml::Value::deserialize(deserializer)? {
            serde_yaml::Value::Null => Some("null".to_owned()),
            serde_yaml::Value::Bool(value) => Some(value.to_string()),
            serde_yaml::Value::Number(value) => Some(value.to_string()),
            serde_yaml::Value::String(value) => Some(value),
            _ => None,
        }))
    }
}

/// Whether a text has so few open brackets that serde_yaml reads it fast.
///
/// # Errors
/// The place of the first bracket that is too deep.
pub fn check_brackets(text: &str) -> Result<(), Error> {
    let mut scanner =
        Scanner { bytes: text.as_bytes(), at: 0, line: 0, depth: 0, is_start: true, first: None, dash: None };
    while scanner.at < scanner.bytes.len() {
        scanner.step();
        if scanner.depth > MOST_OPEN {
            let before = &text.as_bytes()[..scanner.at.saturating_sub(1)];
            let line = before.split(|byte| *byte == b'\n').count();
            let column = before.rsplit(|byte| *byte == b'\n').next().unwrap_or_default().len() + 1;
            return Err(Error::at(format!("more than {MOST_OPEN} brackets are open"), (line, column)));
        }
    }
    Ok(())
}

/// Looks for the brackets of lists and maps, which are not in texts, quotes, blocks of text or comments.
struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the line begins.
    line: usize,
    /// The brackets that are open.
    depth: usize,
    /// Whether a value may begin here.
    is_start: bool,
    /// The column of the first key or value in this line, from 0.
    first: Option<usize>,
    /// The column of the last dash before it.
    dash: Option<usize>,
}

impl Scanner<'_> {
    fn peek(&self, ahead: usize) -> Option<u8> {
        self.bytes.get(self.at + ahead).copied()
    }

    fn is_blank(&self, ahead: usize) -> bool {
        self.peek(ahead).is_none_or(|byte| byte.is_ascii_whitespace())
    }

    fn column(&self) -> usize {
        self.at.saturating_sub(self.line)
    }

    fn step(&mut self) {
        let Some(byte) = self.peek(0) else { return };
        let is_after_blank = self.at == 0 || self.bytes[self.at - 1].is_ascii_whitespace();
        let is_flow = self.depth > 0;
        if is_after_blank && byte == b'#' {
            return self.skip_line();
        }
        match byte {
            b'\n' | b'\r' => {
                (self.is_start, self.first, self.dash) = (true, None, None);
                self.line = self.at + 1;
            }
            b' ' | b'\t' => {}
            b'[' | b'{' if is_flow || self.is_start => {
                (self.depth, self.is_start) = (self.depth + 1, true);
            }
            b']' | b'}' if is_flow => (self.depth, self.is_start) = (self.depth - 1, false),
            b',' if is_flow => self.is_start = true,
            b':' if is_flow || self.is_blank(1) => self.is_start = true,
            b'"' | b'\'' if self.is_start => return self.skip_quoted(byte),
            b'-' | b'?' if self.is_start && self.is_blank(1) => {
                if self.first.is_none() {
                    self.dash = Some(self.column());
                }
            }
            b'-' if is_after_blank && self.bytes[self.at..].starts_with(b"---") && self.column() == 0 => {
                self.at += 2;
                self.is_start = true;
            }
            b'!' | b'&' if self.is_start => {
                let is_end = |byte: u8| byte.is_ascii_whitespace() || is_flow && b",[]{}".contains(&byte);
                while self.peek(1).is_some_and(|byte| !is_end(byte)) {
                    self.at += 1;
                }
            }
            b'|' | b'>' if self.is_start && !is_flow => return self.skip_block(),
            _ => self.begin_text(),
        }
        self.at += 1;
    }

    /// A key or a value begins here, or goes on.
    fn begin_text(&mut self) {
        if self.is_start && self.first.is_none() && self.depth == 0 {
            self.first = Some(self.column());
        }
        self.is_start = false;
    }

    fn skip_line(&mut self) {
        while self.peek(0).is_some_and(|byte| byte != b'\n') {
            self.at += 1;
        }
    }

    /// Goes behind the end of a quoted text. A quote that is not ended is part of a text.
    fn skip_quoted(&mut self, quote: u8) {
        self.begin_text();
        let mut rest = self.bytes.iter().enumerate().skip(self.at + 1);
        while let Some((at, byte)) = rest.next() {
            if *byte == b'\\' && quote == b'"' {
                rest.next();
            } else if *byte == quote {
                self.at = at + 1;
                // A quote that is doubled is one in the text.
                self.is_start = quote == b'\'' && self.peek(0) == Some(quote);
                return;
            }
        }
        self.at += 1;
    }

    /// Goes to the end of a block of text: the lines that are empty or indented deeper than its key or dash.
    fn skip_block(&mut self) {
        let parent = self.first.or(self.dash).unwrap_or_default();
        self.skip_line();
        while self.peek(0).is_some() {
            let line = self.bytes[self.at + 1..].split(|byte| *byte == b'\n').next().unwrap_or_default();
            let spaces = line.iter().take_while(|byte| **byte == b' ').count();
            if !line.iter().all(u8::is_ascii_whitespace) && spaces <= parent {
                return;
            }
            self.at += 1 + line.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_key_that_occurs_twice_is_an_error_at_its_second_place() {
        for (text, expected) in [
            ("a: 1\nb: 2\na: 3\n", "the key \"a\" occurs twice at line 3 column 1"),
            ("a:\n  b:\n  - c: 1\n    c: 2\n", "a.b[0]: the key \"c\" occurs twice at line 4 column 5"),
            ("{a: 1, 'a': 2}\n", "the key \"a\" occurs twice at line 1 column 1"),
            ("a: {1: x, \"1\": y}\n", "a: the key \"1\" occurs twice at line 1 column 4"),
        ] {
            assert_eq!(read::<Value>(text).unwrap_err().to_string(), expected, "{text}");
        }
        assert!(check("a: 1\n---\na: 2\n", |_| false).is_ok());
        assert!(check("/a: 1\n/a: 2\n", |key| key.starts_with('/')).is_ok());
        assert!(check("a: !b {c: .inf, [d]: !e [1], ~: 2}\n", |_| false).is_ok());
        assert_eq!(read::<Option<Value>>("").unwrap(), None);
        assert_eq!(read::<Value>("a: &x [1]\nb: *x\n").unwrap(), json!({ "a": [1], "b": [1] }));
    }

    #[test]
    fn open_brackets_are_counted_before_the_text_is_read() {
        for begin in [
            "",
            "a: ",
            "- ",
            "a:\n  - b: ",
            "--- ",
            "a: !t ",
            "a: &b ",
            "[']', \"]\\\"]\", # ]\n",
            "a: |\n  text\nb: ",
            "'it''s': ",
        ] {
            for open in ["[", "{", "{a: ", "[\n", "[ # ]\n", "{\"a\":", "['[]]', ", "[it's, "] {
                let text = format!("{begin}{}", open.repeat(100_000));
                let error = read::<Value>(&text).unwrap_err();
                assert!(
                    error.to_string().starts_with("more than 128 brackets are open at line "),
                    "{begin}{open}: {error}"
                );
            }
        }
        assert_eq!(check_brackets(&format!("a:\n  b: {}", "[".repeat(200))).unwrap_err().place(), Some((2, 134)));
    }

    #[test]
    fn brackets_in_texts_do_not_count() {
        let open = "[{".repeat(1000);
        for text in [
            format!("a: |\n  [ {open}\n\n   {open}\nb: 1\n"),
            format!("a:\n- |-\n {open}\n- b: >\n    {open}\n  c: 1\n"),
            format!("a: \"{open}\n  {open}\"\nb: '{open}'\n"),
            format!("a: x{open}\nb: \\e{open}\n"),
            format!("# {open}\na: [1, # {open}\n  '{open}', \"{open}\"]\n"),
            "- [a, {b: c}]\n".repeat(1000),
            format!("{}{}\n", "[".repeat(100), "]".repeat(100)),
        ] {
            assert!(check_brackets(&text).is_ok(), "{text}");
            assert!(check(&text, |_| false).is_ok(), "{text}");
        }
    }
}
