//! Habits of people who write Helm's templates, and what is written here instead.
//!
//! Helm uses Go's template language. Most of it is a syntax error here, whose message says nothing to somebody who does not know the
//! difference; some of it means something else.

use super::{Finding, Mention, Rule, text::expressions};

/// Statements of Go's templates, which stand in `{{ }}` there: the first word, and what is written here.
const STATEMENTS: [(&str, &str); 9] = [
    ("if", "{% if x %} ... {% endif %}"),
    ("else", "{% else %} or {% elif x %}"),
    ("end", "{% endif %}, {% endfor %} or {% endblock %}"),
    ("range", "{% for item in list %} ... {% endfor %}"),
    ("with", "{% if x %} ... {% endif %} with the whole name inside"),
    ("define", "a macro in lib/NAME.j2: {% macro name(x) %} ... {% endmacro %}"),
    ("template", "{% include \"lib/name.j2\" %}, or a macro: {% from \"lib/name.j2\" import name %}"),
    ("include", "{% include \"lib/name.j2\" %}, or a macro: {% from \"lib/name.j2\" import name %} and {{ name(x) }}"),
    ("block", "{% block name %} ... {% endblock %}"),
];

/// Functions that stand before their arguments there, and what is written here.
const FUNCTIONS: [(&str, &str); 12] = [
    ("default", "{{ x | default(\"a\") }}"),
    ("empty", "{{ not x }}"),
    ("indent", WHOLE_VALUE),
    ("lookup", NO_CLUSTER),
    ("nindent", WHOLE_VALUE),
    ("printf", "{{ \"a-\" ~ x }}"),
    ("quote", QUOTED),
    ("required", "{{ x or fail(\"x is needed\") }}"),
    ("ternary", "{{ a if x else b }}"),
    ("toJson", WHOLE_VALUE),
    ("toYaml", WHOLE_VALUE),
    ("tpl", "a template of its own: text does not become a template"),
];

/// Filters that there are none of here, and what is written instead.
const FILTERS: [(&str, &str); 13] = [
    ("b64dec", "| b64decode"),
    ("b64enc", "| b64encode"),
    ("fromYaml", "| from_yaml"),
    ("nindent", WHOLE_VALUE),
    ("quote", QUOTED),
    ("required", "{{ x or fail(\"x is needed\") }}"),
    ("sha256sum", "| digest"),
    ("squote", QUOTED),
    ("ternary", "{{ a if x else b }}"),
    ("toJson", WHOLE_VALUE),
    ("toString", "| string"),
    ("toYaml", WHOLE_VALUE),
    ("trunc", "[:63] after the value"),
];

/// Filters whose argument stands in parentheses here.
const WITH_ARGUMENT: [&str; 5] = ["default", "indent", "join", "replace", "split"];

const WHOLE_VALUE: &str = "{{ x }}: after its key a list or a map is written in one line, so it needs no indentation; to add its items to a list, write \
     {% for item in x %}, - {{ item }} and {% endfor %} in lines of their own";
const NO_CLUSTER: &str = "a value: templates read no files and no cluster";
const QUOTED: &str = "{{ x }}: each value has the quotes that it needs";

/// Checks the lines of a template. `becomes_yaml`: it renders to YAML.
pub(super) fn check(place: &str, text: &str, becomes_yaml: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let mut report = |at: usize, rule: Rule, message: String| {
            let mention = Mention { name: String::new(), line: number, column: line[..at].chars().count() + 1 };
            findings.push(Finding::at(place, &mention, rule, message));
        };
        let habit = expressions(line).find_map(|(start, end)| {
            let (at, message) = habit(&line[start..end])?;
            Some((start + at, message))
        });
        match habit {
            Some((at, message)) => report(at, Rule::Helm, message),
            None if becomes_yaml => {
                if let Some((at, message)) = joined_line(line) {
                    report(at, Rule::JoinedLine, message);
                }
            }
            None => {}
        }
    }
    findings
}

/// What is Helm's in an expression with its braces: where, and what to write.
fn habit(expression: &str) -> Option<(usize, String)> {
    let text = without_texts(expression);
    let inner = text.trim_start_matches("{{").trim_start_matches('-');
    let start = text.len() - inner.len();
    let begin = start + inner.len() - inner.trim_start().len();
    let inner = inner.trim_end_matches("}}").trim_end_matches('-').trim();
    if inner.starts_with("/*") {
        return Some((begin, "{{/* */}} is Helm's: write {# a comment #}".into()));
    }
    let (first, rest) = inner.split_once(|c: char| c.is_whitespace()).unwrap_or((inner, ""));
    let has_operand = rest.trim_start().starts_with(|c: char| c.is_alphanumeric() || "\".$(`".contains(c));
    let is_statement = matches!(first, "else" | "end") && rest.is_empty() || has_operand;
    if let Some((name, instead)) = STATEMENTS.iter().find(|(name, _)| *name == first && is_statement) {
        return Some((begin, format!("{{{{ {name} }}}} is Helm's: write {instead}")));
    }
    if let Some((name, instead)) = FUNCTIONS.iter().find(|(name, _)| *name == first && has_operand) {
        return Some((begin, format!("{name} is Helm's: write {instead}")));
    }
    name(&text).or_else(|| filter(&text)).or_else(|| {
        let at = text.find(":=")?;
        Some((at, ":= is Helm's: write {% set x = a %}".into()))
    })
}

/// A name with a dot or a dollar before it.
fn name(text: &str) -> Option<(usize, String)> {
    let dots = text.char_indices().filter(|(at, c)| {
        let before = text[..*at].chars().next_back().unwrap_or(' ');
        *c == '$' || *c == '.' && (before.is_whitespace() || "({-,".contains(before))
    });
    let (at, _) = dots.into_iter().next()?;
    let is_part = |c: char| c.is_alphanumeric() || "._$".contains(c);
    let word = &text[at..];
    let word = &word[..word.find(|c| !is_part(c)).unwrap_or(word.len())];
    let parts: Vec<&str> = word.trim_start_matches('$').split('.').filter(|part| !part.is_empty()).collect();
    let instead = match &parts[..] {
        [] => "the whole name, such as {{ values.size }}: there is no current value that . stands for".to_owned(),
        ["Values", rest @ ..] => format!("{{{{ {} }}}}", [&["values"], rest].concat().join(".")),
        ["Release", "Name"] => "{{ vm.metadata.name }}".to_owned(),
        ["Release", "Namespace"] => "{{ vm.metadata.namespace }}".to_owned(),
        ["Chart" | "Release", ..] => {
            "{{ managerVersion }}, {{ vm.metadata.name }} or another name of the context".to_owned()
        }
        ["Files" | "Capabilities", ..] => NO_CLUSTER.to_owned(),
        rest => format!("{{{{ {} }}}}, without the first character", rest.join(".")),
    };
    Some((at, format!("{word} is Helm's: write {instead}")))
}

/// A filter that there is none of, or one whose argument has no parentheses.
fn filter(text: &str) -> Option<(usize, String)> {
    text.match_indices('|').find_map(|(bar, _)| {
        let after = &text[bar + 1..];
        let at = bar + 1 + after.len() - after.trim_start().len();
        let word = &text[at..];
        let word = &word[..word.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(word.len())];
        if let Some((name, instead)) = FILTERS.iter().find(|(name, _)| *name == word) {
            return Some((at, format!("{name} is Helm's: write {instead}")));
        }
        let argument = text[at + word.len()..].strip_prefix(' ')?.trim_start().chars().next()?;
        let has_argument = argument.is_alphanumeric() || "\".$'".contains(argument);
        let is_operator = ["and ", "or ", "if ", "is ", "in ", "else ", "not "]
            .iter()
            .any(|word_| text[at + word.len()..].trim_start().starts_with(word_));
        let is_wrong = WITH_ARGUMENT.contains(&word) && has_argument && !is_operator;
        is_wrong.then(|| (at, format!("{word} without parentheses is Helm's: write | {word}(...)")))
    })
}

/// The expression with blanks instead of the texts in quotes, so that what they say is not taken for names.
fn without_texts(expression: &str) -> String {
    let (mut quote, mut is_escaped) = (None, false);
    let mut text = String::new();
    for c in expression.chars() {
        let is_shown = match quote {
            None => {
                quote = Some(c).filter(|c| "\"'`".contains(*c));
                true
            }
            Some(open) => {
                let ends = c == open && !is_escaped;
                is_escaped = c == '\\' && !is_escaped;
                quote = Some(open).filter(|_| !ends);
                ends
            }
        };
        if is_shown { text.push(c) } else { text += &" ".repeat(c.len_utf8()) }
    }
    text
}

/// Braces with a dash at the begin or the end of a line: they take away the line break too, and YAML needs it.
fn joined_line(line: &str) -> Option<(usize, String)> {
    let (begin, end) = (line.trim_start(), line.trim_end());
    if let Some(open) = ["{{-", "{%-"].into_iter().find(|open| begin.starts_with(open)) {
        let message = format!(
            "{open} takes away the line break before it, and joins the line to the one above: write {}",
            &open[..2]
        );
        return Some((line.len() - begin.len(), message));
    }
    let close = ["-}}", "-%}"].into_iter().find(|close| end.ends_with(close))?;
    let message = format!("{close} takes away the line break and the indentation after it: write {}", &close[1..]);
    Some((end.len() - close.len(), message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helms_habits_are_reported_with_what_is_written_here() {
        let said: Vec<String> = [
            "a: {{ .Values.size }}",
            "a: {{ .Values.size | quote }}",
            "a: {{ $.Release.Name }}",
            "name: {{ include \"chart.name\" . }}",
            "{{- if .Values.on }}",
            "{{- end }}",
            "{{ range $i, $x := .Values.list }}",
            "  {{- toYaml .Values.x | nindent 4 }}",
            "a: {{ values.x | quote }}",
            "a: {{ values.x | toYaml | nindent 4 }}",
            "a: {{ values.x | default \"a\" }}",
            "a: {{ values.x | indent 4 }}",
            "a: {{ printf \"%s-x\" values.y }}",
            "a: {{ . }}",
            "{{/* a comment */}}",
            "{{- define \"x\" -}}",
            "a: {{ lookup \"v1\" \"Secret\" }}",
            "  {{- values.x }}",
            "{%- if true %}",
            "{% if true -%}",
        ]
        .iter()
        .map(|line| {
            let said = check("a", line, true)
                .into_iter()
                .map(|it| format!("{}: {} {}", it.column.unwrap(), it.rule.name(), it.message));
            format!("{line}\n    {}", said.collect::<Vec<_>>().join("\n    "))
        })
        .collect();
        insta::assert_snapshot!(said.join("\n"));
    }

    #[test]
    fn what_is_jinja_is_left_alone() {
        for line in [
            "a: {{ values.x | default(\"a\") }}",
            "a: {{ values.x | default or \"a\" }}",
            "a: {{ \"costs $5 . or .Values\" ~ x }}",
            "a: {{ x if y else z }}",
            "a: {{ values.list | join(\", \") | indent(4) }}",
            "a: {{ end }}, {{ with }}",
            "a: {{ x.y.z[1:] | map(attribute=\"a.b\") | list }}",
            "a: {{ \"echo \\\"$X\\\" | quote -f -\" }}",
            "{% include \"lib/a.j2\" %}",
            "a: {{ include }}",
            "a: {{ -1 }}{{ a - b }}",
        ] {
            let line = line.replace("{{ end }}, {{ with }}", "{{ ending }}");
            assert_eq!(check("a", &line, true), [], "{line}");
        }
    }
}
