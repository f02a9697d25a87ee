//! What single lines of a file show.

use serde_json::Value;

use super::{Finding, Mention, Rule};

/// Checks the lines of a file. `becomes_yaml`: the file is a template that renders to YAML.
pub(super) fn check(place: &str, text: &str, becomes_yaml: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut report = |line: usize, remark: Remark| {
        let mention = Mention { name: String::new(), line, column: remark.column };
        findings.push(Finding::at(place, &mention, remark.rule, remark.message));
    };
    // While inside a block of text (`|` or `>`): how far the line is indented that begins it.
    let mut block: Option<usize> = None;
    for (line, number) in text.lines().zip(1..) {
        let trimmed = line.trim();
        let indent = line.len() - line.trim_start().len();
        if !trimmed.is_empty() && !trimmed.starts_with("{%") {
            block = block.filter(|begin| indent > *begin);
        }
        if becomes_yaml && let Some(remark) = joined_value(line, block.is_some()) {
            report(number, remark);
        }
        if block.is_some() {
            continue;
        }
        if ["|", "|-", "|+", ">", ">-", ">+"].iter().any(|mark| trimmed.ends_with(&format!(": {mark}"))) {
            block = Some(indent);
        }
        if let Some(remark) = plain_value(line, becomes_yaml) {
            report(number, remark);
        }
    }
    findings
}

/// A finding in a line.
struct Remark {
    column: usize,
    rule: Rule,
    message: String,
}

/// An expression whose value is put beside other text, though it is written as JSON.
fn joined_value(line: &str, in_block: bool) -> Option<Remark> {
    let (start, message) = if in_block {
        let (start, _) = expressions(line).find(|(start, end)| !is_bare(&line[*start..*end]))?;
        let message = "a value is written as JSON, with quotes of its own, also inside a block of text: write {{ x | safe }} for \
                       the bare text";
        (start, message)
    } else {
        let message = "a value is written as JSON, with quotes of its own: join it with other text inside the expression, as in \
                       {{ \"a-\" ~ x }}";
        (joined(line)?, message)
    };
    Some(Remark { column: column(line, start), rule: Rule::JoinedValue, message: message.into() })
}

/// A value without quotes that people may read differently.
fn plain_value(line: &str, becomes_yaml: bool) -> Option<Remark> {
    let (key, value) = line.trim().split_once(": ")?;
    if !key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./ ".contains(&byte)) {
        return None;
    }
    let word = value.split(" #").next().unwrap_or(value).trim();
    let (rule, message) = match word.to_ascii_lowercase().as_str() {
        "yes" | "no" | "on" | "off" | "y" | "n" => {
            let message = format!("{word} is the text {word:?} here, not a boolean: write true or false, or quote it");
            (Rule::YamlBoolean, message)
        }
        "null" | "~" if becomes_yaml => {
            (Rule::Null, format!("a field that is null is left out of the object: take {key} out"))
        }
        _ => {
            let value = odd_number(word)?;
            (Rule::YamlNumber, format!("{word} is the number {value} here: write that, or quote it"))
        }
    };
    Some(Remark { column: column(line, line.trim_end().len() - value.len()), rule, message })
}

/// The number that YAML reads from a word, if it is not written in decimal digits.
fn odd_number(word: &str) -> Option<serde_json::Number> {
    let is_plain = word.bytes().all(|byte| byte.is_ascii_digit() || b"-+.".contains(&byte));
    match crate::yaml::from_str(word) {
        Ok(Value::Number(number)) if !is_plain => Some(number),
        _ => None,
    }
}

/// The column of a byte in a line, from 1.
fn column(line: &str, byte: usize) -> usize {
    line[..byte].chars().count() + 1
}

/// Where the expressions of a line are, with their braces.
pub(super) fn expressions(line: &str) -> impl Iterator<Item = (usize, usize)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + line[from..].find("{{")?;
        let end = line[start..].find("}}").map_or(line.len(), |at| at + start + 2);
        from = end;
        Some((start, end))
    })
}

/// Whether an expression is written without quotes.
fn is_bare(expression: &str) -> bool {
    expression.trim_end_matches("}}").trim_end().ends_with("| safe") || expression.contains("super()")
}

/// Where an expression begins that touches other text and so is not a whole YAML value: `"{{ x }}"`, `{{ x }}-y`.
fn joined(line: &str) -> Option<usize> {
    let touched = |(start, end): &(usize, usize)| {
        let before = line[..*start].chars().next_back().unwrap_or(' ');
        let after = line[*end..].chars().next().unwrap_or(' ');
        !(before.is_whitespace() || "[{(,}".contains(before)) || !(after.is_whitespace() || ",]}){:".contains(after))
    };
    let mut candidates = expressions(line).filter(|(start, end)| {
        // Statements and comments are not part of the output.
        !is_bare(&line[*start..*end]) && !line[..*start].contains("{%") && !line[..*start].contains(['#'])
    });
    candidates.find(touched).map(|(start, _)| start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_must_be_a_whole_value() {
        for (line, column) in [
            ("a: \"{{ x }}\"", Some(5)),
            ("a: {{ x }}-y", Some(4)),
            ("a: x{{ x }}", Some(5)),
            ("a: {{ x }}", None),
            ("{a: [{{ x }}, {{ y }}], {{ x }}: {{ y }}}", None),
            ("- {{ x }} # text", None),
            ("a: {% if x %}{{ x }}{% endif %}", None),
            ("a: x{{ x | safe }}", None),
        ] {
            assert_eq!(joined(line).map(|at| at + 1), column, "{line}");
        }
    }
}
