//! Reads the text that a template rendered: YAML documents become JSON values.
//!
//! serde_yaml parses the text and bounds how deep values and aliases nest.

use serde_json::Value;

use super::{error::OutputError, output::drop_nulls};
use crate::yaml;

/// Parses zero or more YAML documents, each of which will be an object. Documents and map entries that are null are left out.
pub(super) fn documents(text: &str) -> Result<Vec<Value>, OutputError> {
    // Many templates render nothing for most VMs, and a parser costs more than this comparison.
    if text.trim_matches([' ', '\n']).is_empty() {
        return Ok(Vec::new());
    }
    let mut documents = yaml::unique_values(text).map_err(|error| not_yaml(text, &error))?;
    documents.retain(|document| !document.is_null());
    documents.iter_mut().for_each(drop_nulls);
    Ok(documents)
}

fn not_yaml(text: &str, error: &yaml::Error) -> OutputError {
    if let Some((key, message)) = error.twice() {
        let error = OutputError::at(format!("{key}:"), format!("the output is not YAML: {message}"));
        return OutputError { in_last_line: true, ..error };
    }
    let message = error.to_string();
    let Some(number) = yaml::line_of_unfinished_key(text).or_else(|| Some(error.place()?.0)) else {
        return OutputError::at("", format!("the output is not YAML: {message}"));
    };
    // The parser may notice an error only in the line after it.
    let lines: Vec<&str> = text.lines().take(number).collect();
    let Some(at) = lines.iter().rposition(|line| !line.trim().is_empty()) else {
        return OutputError::at("", format!("the output is not YAML: {message}"));
    };
    let (before, line) = (&lines[..at], lines[at]);
    let hint = hint(before, line).map(|hint| format!("; {hint}")).unwrap_or_default();
    let (line, number) = (line.trim(), at + 1);
    OutputError::at(line, format!("the output is not YAML: {message} (line {number} of the output: {line:.80}){hint}"))
}

/// What was probably meant by a line that is not YAML where it stands.
fn hint(before: &[&str], line: &str) -> Option<String> {
    let text = line.trim();
    if text.starts_with("\"- ") {
        return Some("a text is written in quotes; | safe after to_yaml writes it without".into());
    }
    if text.starts_with("[{") || text.starts_with("[\"") {
        let meant = "{% for item in list %}, - {{ item }} and {% endfor %} in lines of their own";
        return Some(format!("to add a list to the items of another one, write {meant}"));
    }
    if !is_item(line) {
        return None;
    }
    let found = indentation(line);
    let (list, spaces) = open_lists(before).into_iter().min_by_key(|(_, spaces)| spaces.abs_diff(found))?;
    (spaces != found).then(|| format!("an item of {list} begins with {spaces} spaces"))
}

/// The lists that are open after these lines, from the innermost: the key of each, and the spaces before its items.
fn open_lists(lines: &[&str]) -> Vec<(String, usize)> {
    let mut lists = Vec::new();
    let mut least = usize::MAX;
    let mut items = None;
    for line in lines.iter().rev().filter(|line| !line.trim().is_empty() && !line.trim().starts_with('#')) {
        // A key in the first line of an item stands behind the dash.
        let content = line.trim_start_matches([' ', '-']);
        let spaces = line.len() - content.len();
        if let (Some(found), Some(key)) = (items, content.strip_suffix(':'))
            && spaces <= found
            && indentation(line) <= least
        {
            lists.push((key.to_owned(), found));
            items = None;
        }
        if indentation(line) < least || (is_item(line) && items.is_none() && indentation(line) <= least) {
            least = indentation(line);
            if is_item(line) {
                items = Some(least);
            }
        }
    }
    lists
}

fn is_item(line: &str) -> bool {
    line.trim_start().starts_with("- ")
}

/// The spaces before a line.
fn indentation(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
    fn a_line_that_is_no_yaml_where_it_stands_says_what_was_probably_meant() {
        let pod = "\
spec:
  containers:
    - name: vm-runner
      args: [a]
      volumeMounts:
        - {name: a, mountPath: /a}

        - name: b
          mountPath: /b
  volumes:
    # The first.
    - name: a
      emptyDir: {}
";
        let containers = pod.split("  volumes:").next().unwrap();
        for (before, line, hint) in [
            (pod, "  - name: b", Some("an item of volumes begins with 4 spaces")),
            (pod, "      - name: b", Some("an item of volumes begins with 4 spaces")),
            (containers, "  - name: b", Some("an item of containers begins with 4 spaces")),
            (containers, "       - name: b", Some("an item of volumeMounts begins with 8 spaces")),
            (containers, "        - name: b", None),
            (pod, "      b: [", None),
        ] {
            let lines: Vec<&str> = before.lines().collect();
            assert_eq!(super::hint(&lines, line).as_deref(), hint, "{line}");
        }
        let message = |text: &str| documents(&format!("{pod}{text}\n\n\nstatus: 1\n")).unwrap_err().message;
        let list = message("    [{\"name\":\"b\"}]");
        assert!(list.contains("(line 14 of the output: [{\"name\":\"b\"}]); to add a list"), "{list}");
        let text = message("    \"- name: b\\n  x: 1\"");
        assert!(text.ends_with("| safe after to_yaml writes it without"), "{text}");
        assert!(documents("\n\n: [\n").is_err());
    }

    #[test]
    fn values_that_json_does_not_have_are_errors() {
        for text in ["a: .inf\n", "a: !secret b\n", "[a]: b\n", "{a:}\n"] {
            assert!(documents(text).is_err(), "{text}: {:?}", documents(text));
        }
    }
}
