//! Templates in kubectl's dialect of JSONPath (<https://kubernetes.io/docs/reference/kubectl/jsonpath/>). Pure.
//!
//! The dialect is older than RFC 9535, and differs from it: text stands outside of braces, `$` and `@` are the same and may be left out, a point
//! in a name is escaped (`\.`), `{range}` and `{end}` are a loop. A path of which nothing exists prints nothing. What follows the
//! definition only by accident, such as the order of a map's values, follows here the order of the names.

use std::{cmp::Ordering, fmt::Write};

use serde_json::Value;

/// A template that was read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Template(Vec<Item>);

/// A part of a template.
#[derive(Clone, Debug, PartialEq)]
enum Item {
    /// Text outside of braces.
    Text(String),
    /// `{PATH}`.
    Path(Path),
    /// `{range PATH}...{end}`.
    Range(Path, Vec<Item>),
}

type Path = Vec<Step>;

/// A step from values to values.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    /// `.NAME`, `['NAME']`.
    Field(String),
    /// `.*`.
    All,
    /// `..`.
    Below,
    /// `[START:END:STEP]`. `[N]` is a slice of one.
    Slice { start: Option<i64>, end: Option<i64>, step: Option<i64>, is_one: bool },
    /// `[A,B]`.
    Union(Vec<Path>),
    /// `[?(LEFT OPERATOR RIGHT)]`; without an operator what exists.
    Filter { left: Path, comparison: Option<(Comparison, Path)> },
    /// Text in quotes, a number, `true` or `false`.
    Constant(Value),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Equal,
    NotEqual,
    Less,
    AtMost,
    Greater,
    AtLeast,
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// What is wrong, for the person who typed it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut rest = text;
        // The innermost loop is last.
        let mut open: Vec<(Path, Vec<Item>)> = Vec::new();
        let mut items = Vec::new();
        while let Some(start) = rest.find('{') {
            if start > 0 {
                items.push(Item::Text(rest[..start].to_owned()));
            }
            let (action, after) = action(&rest[start + 1..])?;
            rest = after;
            match action.trim() {
                "end" => {
                    let (path, outer) = open.pop().ok_or("{end} without {range}")?;
                    let body = std::mem::replace(&mut items, outer);
                    items.push(Item::Range(path, body));
                }
                action => match action.strip_prefix("range").filter(|rest| !rest.starts_with(is_of_word)) {
                    Some(path) => open.push((Parser::parse(path)?, std::mem::take(&mut items))),
                    None => items.push(Item::Path(Parser::parse(action)?)),
                },
            }
        }
        if !rest.is_empty() {
            items.push(Item::Text(rest.to_owned()));
        }
        if open.is_empty() { Ok(Self(items)) } else { Err("{range} without {end}".into()) }
    }

    /// What the template prints of a value.
    ///
    /// # Errors
    /// What does not fit together, such as an index of a list that is shorter.
    pub fn print(&self, value: &Value) -> Result<String, String> {
        let mut text = String::new();
        print(&self.0, value, &mut text)?;
        Ok(text)
    }
}

fn print(items: &[Item], value: &Value, to: &mut String) -> Result<(), String> {
    for item in items {
        match item {
            Item::Text(text) => to.push_str(text),
            Item::Path(path) => {
                let words = walk(path, vec![value])?.into_iter().map(printed);
                to.push_str(&words.collect::<Vec<_>>().join(" "));
            }
            Item::Range(path, body) => walk(path, vec![value])?.into_iter().try_for_each(|one| print(body, one, to))?,
        }
    }
    Ok(())
}

/// A value as kubectl prints it: as JSON of Go's library if it is a list or a map.
fn printed(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(_) | Value::Object(_) => {
            let mut text = String::new();
            for letter in sorted(value).to_string().chars() {
                match letter {
                    // (https://pkg.go.dev/encoding/json#Marshal)
                    '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                        let _ = write!(text, "\\u{:04x}", u32::from(letter));
                    }
                    letter => text.push(letter),
                }
            }
            text
        }
        value => value.to_string(),
    }
}

/// The value with the names of its maps in order.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut fields: Vec<_> = map.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            Value::Object(fields.into_iter().map(|(name, value)| (name.clone(), sorted(value))).collect())
        }
        Value::Array(items) => items.iter().map(sorted).collect(),
        value => value.clone(),
    }
}

/// The values of a map in the order of their names, or the items of a list.
fn members(value: &Value) -> Vec<&Value> {
    match value {
        Value::Object(map) => {
            let mut fields: Vec<_> = map.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            fields.into_iter().map(|(_, value)| value).collect()
        }
        Value::Array(items) => items.iter().collect(),
        _ => Vec::new(),
    }
}

fn walk<'a>(path: &'a [Step], from: Vec<&'a Value>) -> Result<Vec<&'a Value>, String> {
    path.iter().try_fold(from, |values, step| match step {
        Step::Field(name) => Ok(values.into_iter().filter_map(|value| value.get(name)).collect()),
        Step::All => Ok(values.into_iter().flat_map(members).collect()),
        Step::Below => Ok(values.into_iter().flat_map(below).collect()),
        Step::Constant(constant) => Ok(vec![constant]),
        Step::Union(paths) => {
            let found = paths.iter().map(|path| walk(path, values.clone()));
            Ok(found.collect::<Result<Vec<_>, _>>()?.concat())
        }
        Step::Slice { start, end, step, is_one } => {
            let slices = values.into_iter().filter(|value| !value.is_null()).map(|value| {
                let items = value.as_array().ok_or_else(|| format!("{} is not a list", kind(value)))?;
                slice(items, *start, *end, *step, *is_one)
            });
            Ok(slices.collect::<Result<Vec<_>, String>>()?.concat())
        }
        Step::Filter { left, comparison } => {
            let mut found = Vec::new();
            for value in values {
                let items = value.as_array();
                let items = items.ok_or_else(|| format!("{} is not a list, and cannot be filtered", kind(value)))?;
                for item in items {
                    if passes(item, left, comparison.as_ref())? {
                        found.push(item);
                    }
                }
            }
            Ok(found)
        }
    })
}

/// The value and all below it that have something below them.
fn below(value: &Value) -> Vec<&Value> {
    let members = members(value);
    if members.is_empty() {
        return Vec::new();
    }
    [value].into_iter().chain(members.into_iter().flat_map(below)).collect()
}

fn slice(
    items: &[Value],
    start: Option<i64>,
    end: Option<i64>,
    step: Option<i64>,
    is_one: bool,
) -> Result<Vec<&Value>, String> {
    let length = i64::try_from(items.len()).unwrap_or(i64::MAX);
    let from_end = |index: i64| if index < 0 { index + length } else { index };
    let start = from_end(start.unwrap_or(0));
    let end = if is_one { start + 1 } else { from_end(end.unwrap_or(length)) };
    if start == end {
        return Ok(Vec::new());
    }
    let is_in = |index: i64, most: i64| (0..=most).contains(&index);
    if !is_in(start, length - 1) || !is_in(end, length) {
        let index = if is_in(start, length - 1) { end - 1 } else { start };
        return Err(format!("array index out of bounds: index {index}, length {length}"));
    }
    if start > end {
        return Err(format!("starting index {start} is greater than ending index {end}"));
    }
    let step = usize::try_from(step.unwrap_or(1)).ok().filter(|step| *step > 0).ok_or("a step must be above 0")?;
    let range = usize::try_from(start).unwrap_or_default()..usize::try_from(end).unwrap_or_default();
    Ok(items[range].iter().step_by(step).collect())
}

/// Whether an item of a list is let through.
fn passes(item: &Value, left: &Path, comparison: Option<&(Comparison, Path)>) -> Result<bool, String> {
    let lefts = walk(left, vec![item]);
    let Some((comparison, right)) = comparison else { return Ok(lefts.is_ok_and(|found| !found.is_empty())) };
    let (lefts, rights) = (lefts?, walk(right, vec![item])?);
    match (lefts.as_slice(), rights.as_slice()) {
        ([], _) | (_, []) => Ok(false),
        ([left], [right]) => {
            let ordering = order(left, right)?;
            Ok(match comparison {
                Comparison::Equal => ordering == Ordering::Equal,
                Comparison::NotEqual => ordering != Ordering::Equal,
                Comparison::Less => ordering == Ordering::Less,
                Comparison::AtMost => ordering != Ordering::Greater,
                Comparison::Greater => ordering == Ordering::Greater,
                Comparison::AtLeast => ordering != Ordering::Less,
            })
        }
        _ => Err("only one element can be compared at a time".into()),
    }
}

fn order(left: &Value, right: &Value) -> Result<Ordering, String> {
    let incompatible = || format!("{} and {} cannot be compared", kind(left), kind(right));
    match (left, right) {
        (Value::String(left), Value::String(right)) => Ok(left.cmp(right)),
        (Value::Bool(left), Value::Bool(right)) => Ok(left.cmp(right)),
        (Value::Number(one), Value::Number(other)) => match (one.as_i64(), other.as_i64()) {
            (Some(one), Some(other)) => Ok(one.cmp(&other)),
            _ => one.as_f64().partial_cmp(&other.as_f64()).ok_or_else(incompatible),
        },
        _ => Err(incompatible()),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a map",
    }
}

fn is_of_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// The text up to the closing brace, which may stand in quotes, and what follows it.
fn action(text: &str) -> Result<(&str, &str), String> {
    let mut quote = None;
    let mut is_escaped = false;
    for (index, letter) in text.char_indices() {
        match (letter, quote) {
            _ if is_escaped => is_escaped = false,
            ('\\', _) => is_escaped = true,
            ('}', None) => return Ok((&text[..index], &text[index + 1..])),
            ('"' | '\'', None) => quote = Some(letter),
            (letter, Some(open)) if letter == open => quote = None,
            _ => {}
        }
    }
    Err(if quote.is_some() { "a quoted text is not ended" } else { "a { is not closed" }.into())
}

/// Reads what stands in braces.
struct Parser<'a> {
    rest: &'a str,
    path: Path,
}

impl<'a> Parser<'a> {
    fn parse(text: &'a str) -> Result<Path, String> {
        let mut parser = Self { rest: text, path: Vec::new() };
        while let Some(letter) = parser.rest.chars().next() {
            match letter {
                ' ' | '\t' | '\n' | '\r' | '@' | '$' => parser.skip(letter),
                '.' if parser.rest.starts_with("..") => parser.below()?,
                '.' => {
                    parser.skip('.');
                    parser.field();
                }
                '[' if parser.rest.starts_with("[?(") => parser.filter()?,
                '[' => parser.brackets()?,
                '"' | '\'' => parser.text(letter)?,
                '+' | '-' | '0'..='9' => parser.number()?,
                _ => parser.word()?,
            }
        }
        Ok(parser.path)
    }

    fn skip(&mut self, letter: char) {
        self.rest = &self.rest[letter.len_utf8()..];
    }

    /// Takes what stands before the index.
    fn take(&mut self, index: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(index);
        self.rest = rest;
        taken
    }

    fn below(&mut self) -> Result<(), String> {
        if self.path.last() == Some(&Step::Below) {
            return Err("a second .. follows the first".into());
        }
        self.take(2);
        self.path.push(Step::Below);
        if self.rest.starts_with(is_of_word) {
            self.field();
        }
        Ok(())
    }

    fn field(&mut self) {
        let mut is_escaped = false;
        let ends = |letter: char| letter.is_whitespace() || ".,[]$@{}".contains(letter);
        let end = self.rest.find(|letter: char| {
            let is_end = !is_escaped && ends(letter);
            is_escaped = !is_escaped && letter == '\\';
            is_end
        });
        match self.take(end.unwrap_or(self.rest.len())) {
            "*" => self.path.push(Step::All),
            // A point alone is the value itself.
            "" => {}
            name => self.path.push(Step::Field(name.replace('\\', ""))),
        }
    }

    fn brackets(&mut self) -> Result<(), String> {
        let end = self.rest.find(']').ok_or("a [ is not closed")?;
        let text = self.take(end + 1);
        let step = bracket(&text[1..end])?;
        self.path.extend(step);
        Ok(())
    }

    fn filter(&mut self) -> Result<(), String> {
        let text = &self.rest["[?(".len()..];
        let (mut quote, mut depth) = (None, 0_usize);
        let end = text.char_indices().find(|(index, letter)| {
            let is_escaped = text[..*index].ends_with('\\');
            match (*letter, quote) {
                (letter, Some(open)) => {
                    if letter == open && !is_escaped {
                        quote = None;
                    }
                    false
                }
                ('"' | '\'', None) => {
                    quote = Some(*letter);
                    false
                }
                ('(', None) => {
                    depth += 1;
                    false
                }
                (')', None) if depth == 0 => true,
                (')', None) => {
                    depth -= 1;
                    false
                }
                _ => false,
            }
        });
        let (end, _) = end.ok_or("a filter is not closed with )]")?;
        if !text[end + 1..].starts_with(']') {
            return Err("a filter is not closed with )]".into());
        }
        self.path.push(filter(&text[..end])?);
        self.take("[?(".len() + end + ")]".len());
        Ok(())
    }

    fn text(&mut self, quote: char) -> Result<(), String> {
        self.skip(quote);
        let mut is_escaped = false;
        let end = self.rest.find(|letter: char| {
            let is_end = !is_escaped && letter == quote;
            is_escaped = !is_escaped && letter == '\\';
            is_end
        });
        let text = self.take(end.ok_or("a quoted text is not ended")?);
        self.skip(quote);
        self.path.push(Step::Constant(unquoted(text)?.into()));
        Ok(())
    }

    fn number(&mut self) -> Result<(), String> {
        let end = self.rest[1..].find(|letter: char| !letter.is_ascii_digit() && letter != '.');
        let text = self.take(end.map_or(self.rest.len(), |end| end + 1));
        let digits = text.strip_prefix('+').unwrap_or(text);
        let number = digits.parse::<i64>().map(Value::from).or_else(|_| digits.parse::<f64>().map(Value::from));
        self.path.push(Step::Constant(number.map_err(|_| format!("{text} is no number"))?));
        Ok(())
    }

    fn word(&mut self) -> Result<(), String> {
        let end = self.rest.find(|letter: char| !is_of_word(letter)).unwrap_or(self.rest.len());
        let constant = match self.take(end) {
            "true" => true,
            "false" => false,
            "" => return Err(format!("what does {} mean here?", self.rest)),
            word => return Err(format!("unknown word {word}: a field has a point before it")),
        };
        self.path.push(Step::Constant(constant.into()));
        Ok(())
    }
}

/// What stands in brackets, except a filter.
fn bracket(text: &str) -> Result<Path, String> {
    let text = text.trim();
    let invalid = || format!("invalid array index {text}");
    let parts: Vec<&str> = text.split(',').collect();
    if parts.len() > 1 {
        let paths = parts.into_iter().map(bracket).collect::<Result<_, _>>()?;
        return Ok(vec![Step::Union(paths)]);
    }
    if let Some(name) = text.strip_prefix('\'').and_then(|text| text.strip_suffix('\'')) {
        return Parser::parse(&format!(".{name}"));
    }
    let text = if text == "*" { ":" } else { text };
    let bounds: Vec<&str> = text.split(':').collect();
    let number = |index: usize| match bounds.get(index) {
        None | Some(&"") => Ok(None),
        Some(text) => text.parse::<i64>().map(Some).map_err(|_| invalid()),
    };
    if text.is_empty() || bounds.len() > 3 {
        return Err(invalid());
    }
    Ok(vec![Step::Slice { start: number(0)?, end: number(1)?, step: number(2)?, is_one: bounds.len() == 1 }])
}

/// What stands in the parentheses of a filter.
fn filter(text: &str) -> Result<Step, String> {
    let is_operator = |letter: char| "!<>=".contains(letter);
    let Some(start) = text.find(is_operator).filter(|start| *start > 0) else {
        return Ok(Step::Filter { left: Parser::parse(text)?, comparison: None });
    };
    let (left, rest) = text.split_at(start);
    let (operator, right) = rest.split_at(rest.find(|letter| !is_operator(letter)).unwrap_or(rest.len()));
    let comparison = match operator {
        "==" => Comparison::Equal,
        "!=" => Comparison::NotEqual,
        "<" => Comparison::Less,
        "<=" => Comparison::AtMost,
        ">" => Comparison::Greater,
        ">=" => Comparison::AtLeast,
        operator => return Err(format!("unknown operator {operator} in a filter")),
    };
    Ok(Step::Filter { left: Parser::parse(left)?, comparison: Some((comparison, Parser::parse(right)?)) })
}

/// A text without its quotes: `\n`, `\t` and the like become what they mean.
fn unquoted(text: &str) -> Result<String, String> {
    let mut letters = text.chars();
    let mut unquoted = String::new();
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            unquoted.push(letter);
            continue;
        }
        unquoted.push(match letters.next() {
            Some('n') => '\n',
            Some('t') => '\t',
            Some('r') => '\r',
            Some('0') => '\0',
            Some(letter @ ('\\' | '"' | '\'' | '/')) => letter,
            Some('u') => {
                let digits: String = letters.by_ref().take(4).collect();
                let code = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                code.ok_or_else(|| format!("\\u{digits} is no letter"))?
            }
            other => return Err(format!("unknown escape \\{}", other.map(String::from).unwrap_or_default())),
        });
    }
    Ok(unquoted)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vms() -> Value {
        let condition = |type_: &str, status: &str| json!({ "type": type_, "status": status, "count": 2 });
        let vm = |name: &str, conditions: Value| {
            json!({
                "metadata": { "name": name, "labels": { "app.kubernetes.io/name": format!("{name}-app") } },
                "status": { "conditions": conditions, "cpus": 2, "ready": true },
            })
        };
        json!({ "items": [
            vm("apple", json!([condition("Ready", "True"), condition("Booted", "False")])),
            vm("pear", json!([condition("Ready", "False")])),
            { "metadata": { "name": "plum" }, "note": "a<b" },
        ] })
    }

    /// A test with an API server compares many of these with what kubectl prints.
    #[test]
    fn templates_print_what_kubectl_prints() {
        for (template, expected) in [
            ("{.items[*].metadata.name}", "apple pear plum"),
            ("{$.items[0].metadata.name}", "apple"),
            ("{.items[-1:].metadata.name}|{.items[-1].metadata.name}", "plum|plum"),
            ("{.items[0:2].metadata.name} {.items[::2].metadata.name}", "apple pear apple plum"),
            ("{.items[0,2].metadata.name}", "apple plum"),
            (r"{.items[0].metadata.labels.app\.kubernetes\.io/name}", "apple-app"),
            (r"{.items[1].metadata.labels['app\.kubernetes\.io/name']}", "pear-app"),
            (r#"{range .items[*]}{.metadata.name}{"\t"}{.status.cpus}{"\n"}{end}."#, "apple\t2\npear\t2\nplum\t\n."),
            ("{range .items[*]}[{range .status.conditions[*]}{.type},{end}]{end}", "[Ready,Booted,][Ready,][]"),
            (r#"{.items[*].status.conditions[?(@.type=="Ready")].status}"#, "True False"),
            ("{.items[*].status.conditions[?(@.type=='Booted')].type}", "Booted"),
            (r#"{.items[?(@.metadata.name!="pear")].metadata.name}"#, "apple plum"),
            ("{.items[?(@.status)].metadata.name}", "apple pear"),
            ("{.items[?(@.status.cpus>1)].metadata.name} {.items[?(@.status.cpus<=1)].metadata.name}", "apple pear "),
            ("{.items[?(@.status.ready==true)].metadata.name}", "apple pear"),
            ("{..name}", "apple pear plum"),
            ("{.items[0].metadata.labels}", r#"{"app.kubernetes.io/name":"apple-app"}"#),
            ("{.items[2]}", r#"{"metadata":{"name":"plum"},"note":"a\u003cb"}"#),
            ("{.items[0].metadata['name','labels']}", r#"apple {"app.kubernetes.io/name":"apple-app"}"#),
            ("{.items[0].metadata.nothing}{.nothing[3].x}", ""),
            ("name: {'}'} {\"a\\\"b\"}", "name: } a\"b"),
            ("no braces", "no braces"),
            ("", ""),
        ] {
            let printed = Template::parse(template).and_then(|template| template.print(&vms()));
            assert_eq!(printed.as_deref(), Ok(expected), "{template}");
        }
    }

    #[test]
    fn what_is_wrong_is_told() {
        for (template, expected) in [
            ("{.items", "a { is not closed"),
            ("{\"x}", "a quoted text is not ended"),
            ("{end}", "{end} without {range}"),
            ("{range .items[*]}{.metadata.name}", "{range} without {end}"),
            ("{items}", "unknown word items: a field has a point before it"),
            ("{.items[x]}", "invalid array index x"),
            ("{.items[0}", "a [ is not closed"),
            ("{.items[?(@.a==1}", "a filter is not closed with )]"),
            ("{.items[?(@.a=1)]}", "unknown operator = in a filter"),
            (r#"{"\q"}"#, "unknown escape \\q"),
            ("{.items[7]}", "array index out of bounds: index 7, length 3"),
            ("{.items[2:1]}", "starting index 2 is greater than ending index 1"),
            ("{.items[0].metadata[0]}", "a map is not a list"),
            ("{.items[?(@.metadata.name==1)]}", "a text and a number cannot be compared"),
        ] {
            let printed = Template::parse(template).and_then(|template| template.print(&vms()));
            assert_eq!(printed, Err(expected.to_owned()), "{template}");
        }
    }
}
