//! What is wrong with rendered objects.

use super::{Finding, Rule, TemplateSet, openapi};
use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    object::Rendered,
    render::{Replacement, context::TOOL_LABELS, first_start, patches::ReplacedList, replacements},
};

/// Annotations by which tools know the objects that they own.
const TOOL_ANNOTATIONS: [&str; 4] = [
    "argocd.argoproj.io/tracking-id",
    "kubectl.kubernetes.io/last-applied-configuration",
    "meta.helm.sh/release-name",
    "meta.helm.sh/release-namespace",
];

/// The objects of a VM that are not from the built-in templates alone, and what is wrong with them.
pub(super) fn check(
    set: &TemplateSet,
    vm: &VirtualMachine,
    config: &ReconcilerConfig,
) -> (Vec<Rendered>, Vec<Finding>) {
    let mut findings = replaced_lists(set, vm, config);
    let mut objects = match first_start(vm, config, set) {
        Ok(objects) => objects,
        Err(error) => {
            findings.push(Finding::of_vm(vm, &error));
            return (Vec::new(), findings);
        }
    };
    // The built-in templates have tests of their own.
    objects.retain(|object| !object.template.starts_with("builtin/") || !object.patches.is_empty());
    for object in &objects {
        let source = set.source(&object.name).unwrap_or_default();
        let checked = Checked { object, source: &source };
        findings.extend(checked.findings().into_iter().map(|finding| blame_patch(finding, object, set)));
    }
    (objects, findings)
}

/// Lists that a patch replaces as a whole, though their items have keys.
fn replaced_lists(set: &TemplateSet, vm: &VirtualMachine, config: &ReconcilerConfig) -> Vec<Finding> {
    let finding = |Replacement { file, line, list: ReplacedList { path, key } }| {
        let message = format!(
            "mergePatch replaces the whole list {path}: write strategicMerge instead of mergePatch to merge its items by {key}"
        );
        Finding { line, column: line.map(|_| 1), ..Finding::new(&file, Rule::ReplacedList, message) }
    };
    replacements(vm, config, set).into_iter().map(finding).collect()
}

/// An object, and the text of its template.
struct Checked<'a> {
    object: &'a Rendered,
    source: &'a str,
}

impl Checked<'_> {
    fn findings(&self) -> Vec<Finding> {
        let violations = openapi::check(&self.object.value).into_iter().flat_map(each_field);
        let mut findings: Vec<Finding> = violations.map(|violation| self.schema(&violation)).collect();
        findings.extend(self.name());
        findings.extend(self.string_data());
        findings.extend(self.tool_annotations());
        findings.extend(self.tool_labels());
        findings
    }

    /// A finding about the object, where that word stands in the template.
    fn finding(&self, rule: Rule, word: &str, message: &str) -> Finding {
        let finding = Finding::new(&self.object.template, rule, format!("{}: {message}", self.object.key));
        locate(finding, self.source, word)
    }

    fn schema(&self, violation: &str) -> Finding {
        // The unknown field, or the last field of the path.
        let unknown = violation.split('\'').nth(1).filter(|_| violation.contains("Additional properties"));
        let path = violation.split(": ").next().unwrap_or_default();
        let last = path.split('.').rfind(|part| part.parse::<usize>().is_err()).unwrap_or_default();
        self.finding(Rule::Schema, unknown.unwrap_or(last), violation)
    }

    fn name(&self) -> Option<Finding> {
        let name = &self.object.key.name;
        let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        let c = name.chars().find(|c| !is_allowed(*c))?;
        let message = format!("{c:?} can't be part of a name: small letters, digits, - and . can");
        Some(self.finding(Rule::Schema, name, &message))
    }

    fn string_data(&self) -> Option<Finding> {
        self.object.value.get("stringData")?;
        let message = "the API server turns stringData into data, so the object would look changed for ever; write data with \
                       b64encode";
        Some(self.finding(Rule::StringData, "stringData", message))
    }

    fn tool_annotations(&self) -> impl Iterator<Item = Finding> {
        self.metadata("annotations").filter(|name| TOOL_ANNOTATIONS.contains(&name.as_str())).map(|name| {
            let message = format!("with the annotation {name} a tool notes what it has applied");
            self.finding(Rule::ToolLabel, name, &message)
        })
    }

    fn tool_labels(&self) -> impl Iterator<Item = Finding> {
        // Templates may use the recommended labels.
        let is_tools = |label: &&String| {
            TOOL_LABELS.iter().any(|prefix| *prefix != "app.kubernetes.io/" && label.starts_with(prefix))
        };
        self.metadata("labels").filter(is_tools).map(|label| {
            let message = format!("the label {label} belongs to a tool, which would take the object for its own");
            self.finding(Rule::ToolLabel, label, &message)
        })
    }

    /// The names of the object's labels or annotations.
    fn metadata(&self, field: &str) -> impl Iterator<Item = &String> {
        self.object.value["metadata"][field].as_object().into_iter().flatten().map(|(name, _)| name)
    }
}

/// Blames the last patch of the object for what does not come from its template.
fn blame_patch(finding: Finding, object: &Rendered, set: &TemplateSet) -> Finding {
    let Some(patch) = object.patches.last().filter(|_| finding.line.is_none()) else { return finding };
    let (layers, name) = (set.layers(), patch.rsplit('/').next().unwrap_or(patch));
    let named = layers.named.as_ref().and_then(|(_, files)| files.get(name));
    let text = named.or_else(|| layers.base.get(patch)).cloned().unwrap_or_default();
    let word = finding.message.split('\'').nth(1).unwrap_or_default().to_owned();
    locate(Finding { file: patch.clone(), ..finding }, &text, &word)
}

/// Adds the line and column of a word in a template. They stay unknown if the word is not there, because the output of a
/// template may come from elsewhere.
pub(super) fn locate(mut finding: Finding, source: &str, word: &str) -> Finding {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let whole_word = |line: &str| {
        line.match_indices(word)
            .map(|(at, _)| at)
            .find(|at| !is_part(line[..*at].chars().next_back()) && !is_part(line[at + word.len()..].chars().next()))
    };
    // Statements are not part of the output.
    let lines = source.lines().enumerate().filter(|(_, line)| !word.is_empty() && !line.trim_start().starts_with("{%"));
    let found = lines.filter_map(|(index, line)| Some((index, line[..whole_word(line)?].chars().count()))).next();
    if let Some((line, column)) = found {
        (finding.line, finding.column) = (Some(line + 1), Some(column + 1));
    }
    finding
}

/// One violation for each unknown field: the validator reports all unknown fields of a map together.
fn each_field(violation: String) -> Vec<String> {
    let names: Vec<&str> = violation.split('\'').skip(1).step_by(2).collect();
    match violation.split_once("Additional properties") {
        Some((head, _)) if names.len() > 1 => names
            .iter()
            .map(|name| format!("{head}Additional properties are not allowed ('{name}' was unexpected)"))
            .collect(),
        _ => vec![violation],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unknown_field_is_a_finding() {
        let one = |name| format!("spec: Additional properties are not allowed ('{name}' was unexpected)");
        let both = "spec: Additional properties are not allowed ('a', 'b' were unexpected)";
        assert_eq!(each_field(both.into()), [one("a"), one("b")]);
        for single in [one("a"), "spec.name: 1 is not of type 'string'".into()] {
            assert_eq!(each_field(single.clone()), [single]);
        }
    }
}
