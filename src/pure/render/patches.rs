//! Patches: changes to rendered objects that no block covers.
//!
//! A file `NAME.patch.yaml` of a template set holds one or more documents, each a patch:
//!
//! ```yaml
//! target:
//!   kind: Pod          # and apiVersion, if the kind alone is not enough
//!   name: "*"          # * stands for any text; all names if absent
//!   optional: true     # no error if there is no such object
//! strategicMerge:      # as `kubectl patch` and Kustomize: lists are merged by their keys, or
//!   spec: {containers: [{name: vm-runner, imagePullPolicy: Always}]}
//! mergePatch:          # RFC 7386: lists are replaced, or
//!   spec: {hostNetwork: true}
//! jsonPatch:           # RFC 6902
//!   - {op: add, path: /spec/containers/0/env/-, value: {name: A, value: b}}
//! ```
//!
//! A file `NAME.patch.yaml.j2` is rendered first, for each VM. Patches are applied in the order of their files' names, before the
//! operator sets labels and owner and before it checks the objects.

pub mod merge_keys;
mod strategic;

use serde::Deserialize;
use serde_json::Value;
use wildmatch::WildMatch;

use super::error::TemplateError;
pub use strategic::ReplacedList;

/// The end of the name of a file with patches.
pub const SUFFIX: &str = ".patch.yaml";
/// The end of the name of one that is rendered first.
pub const TEMPLATE_SUFFIX: &str = ".patch.yaml.j2";

/// A change to objects.
#[derive(Clone, Debug)]
pub struct Patch {
    /// The file.
    file: String,
    /// The line of its target, from 1, if it is known.
    line: Option<usize>,
    /// The line where its `mergePatch` begins, if it has one and that is known.
    merge_line: Option<usize>,
    /// The line of each of its operations, if they are known.
    operations: Vec<usize>,
    /// The number of its document in the file, from 1.
    number: usize,
    target: Target,
    change: Change,
}

/// Which objects are changed.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Target {
    kind: String,
    #[serde(default)]
    api_version: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    optional: bool,
}

#[derive(Clone, Debug)]
enum Change {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    target: Target,
    #[serde(default)]
    json_patch: Option<json_patch::Patch>,
    #[serde(default)]
    merge_patch: Option<Value>,
    #[serde(default)]
    strategic_merge: Option<Value>,
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.kind, self.name.as_deref().unwrap_or("*"))
    }
}

impl Target {
    fn is(&self, object: &Value) -> bool {
        let text = |pointer| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        self.kind == text("/kind")
            && self.api_version.as_deref().is_none_or(|version| version == text("/apiVersion"))
            && self.name.as_deref().is_none_or(|name| WildMatch::new(name).matches(text("/metadata/name")))
    }

    /// The object's kind, if it differs from the target's only in capitals.
    fn similar_kind(&self, object: &Value) -> Option<String> {
        let kind = object["kind"].as_str().filter(|kind| kind.eq_ignore_ascii_case(&self.kind))?;
        Some(kind.to_owned()).filter(|kind| *kind != self.kind)
    }
}

impl Patch {
    /// Reads the patches of a file.
    ///
    /// # Errors
    /// With the position in the file.
    pub fn parse(file: &str, text: &str) -> Result<Vec<Self>, TemplateError> {
        let mut patches = Vec::new();
        let mut targets = text.lines().zip(1..).filter(|(line, _)| line.starts_with("target:")).map(|(_, line)| line);
        let wrong = |error: crate::yaml::Error| TemplateError::yaml(file, "not a patch: ", &error);
        for (index, document) in crate::yaml::unique_documents(text).map_err(wrong)?.enumerate() {
            let Some(Document { target, json_patch, merge_patch, strategic_merge }) =
                Option::<Document>::deserialize(document).map_err(|error| wrong(error.into()))?
            else {
                continue;
            };
            let line = targets.next();
            let change = match (json_patch, merge_patch, strategic_merge) {
                (Some(patch), None, None) => Change::Json(patch),
                (None, Some(patch), None) => Change::Merge(patch),
                (None, None, Some(patch)) => Change::Strategic(patch),
                _ => {
                    let message = format!(
                        "patch {} for {target} must have one of strategicMerge, mergePatch and jsonPatch",
                        index + 1
                    );
                    return Err(TemplateError { line, ..TemplateError::refused(file, message) });
                }
            };
            let merge_line = line.and_then(|line| {
                let (number, _) = document_of(text, line).find(|(_, line)| line.starts_with("mergePatch:"))?;
                Some(number)
            });
            let operations = line.map(|line| operations(text, line)).unwrap_or_default();
            patches.push(Self {
                file: file.to_owned(),
                line,
                merge_line,
                operations,
                number: index + 1,
                target,
                change,
            });
        }
        Ok(patches)
    }

    /// For a patch from a rendered text, whose lines are not those of the file.
    pub(super) fn without_line(self) -> Self {
        Self { line: None, merge_line: None, operations: Vec::new(), ..self }
    }

    /// Changes the objects that its target matches, and adds its file to the list of each.
    ///
    /// # Errors
    /// If the target matches no object and is not optional, or if an operation fails.
    pub fn apply<'a>(
        &self,
        objects: impl IntoIterator<Item = (&'a mut Value, &'a mut Vec<String>)>,
    ) -> Result<(), TemplateError> {
        let (mut found, mut similar) = (false, None);
        for (object, patches) in objects {
            if self.target.is(object) {
                found = true;
                patches.push(self.file.clone());
                self.change(object)?;
            } else {
                similar = similar.or_else(|| self.target.similar_kind(object));
            }
        }
        if found || self.target.optional {
            return Ok(());
        }
        let hint = match similar {
            Some(kind) => format!("did you mean the kind {kind}?"),
            None => "if it need not be there, say `optional: true` in its target".to_owned(),
        };
        Err(self.refused(format!("patch {} for {} finds no such object; {hint}", self.number, self.target)))
    }

    /// The lists of an object that its `mergePatch` replaces although they have a merge key and other items.
    pub(super) fn replaced_lists(&self, object: &Value) -> Vec<ReplacedList> {
        match &self.change {
            Change::Merge(patch) if self.target.is(object) => strategic::replaced_lists(object, patch),
            _ => Vec::new(),
        }
    }

    /// Where its `mergePatch` is: the file, and the line if that is known.
    pub(super) fn place(&self) -> (&str, Option<usize>) {
        (&self.file, self.merge_line.or(self.line))
    }

    fn refused(&self, message: String) -> TemplateError {
        TemplateError { line: self.line, ..TemplateError::refused(&self.file, message) }
    }

    fn change(&self, object: &mut Value) -> Result<(), TemplateError> {
        match &self.change {
            Change::Merge(patch) => json_patch::merge(object, patch),
            Change::Strategic(patch) => strategic::merge(object, patch).map_err(|problem| {
                let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
                let (number, target, kind) = (self.number, &self.target, &self.target.kind);
                self.refused(format!("patch {number} for {target} can't be applied to {kind} {name}: {problem}"))
            })?,
            Change::Json(patch) => {
                json_patch::patch(object, patch).map_err(|error| self.failed_operation(patch, &error, object))?;
            }
        }
        Ok(())
    }

    fn failed_operation(
        &self,
        patch: &json_patch::Patch,
        error: &json_patch::PatchError,
        object: &Value,
    ) -> TemplateError {
        let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        let operation = patch.0.get(error.operation).map(ToString::to_string).unwrap_or_default();
        let why = match missing(object, &error.path.to_string()) {
            Some(missing) => format!("there is no {missing}"),
            None => error.kind.to_string(),
        };
        let refusal = self.refused(format!(
            "patch {} for {} can't be applied to {} {name}: {why} (operation {}: {operation})",
            self.number,
            self.target,
            self.target.kind,
            error.operation + 1,
        ));
        // The lines are right only if there is one for each operation: a value may have a line that looks like an operation.
        let line = self.operations.get(error.operation).filter(|_| self.operations.len() == patch.0.len());
        TemplateError { line: line.copied().or(refusal.line), ..refusal }
    }
}

/// The lines of the operations in the document whose target is on that line.
fn operations(text: &str, target: usize) -> Vec<usize> {
    let is_operation = |line: &str| {
        let line = line.trim_start().trim_start_matches(['-', '{', '[', ' ']);
        ["op:", "\"op\":", "'op':"].iter().any(|key| line.starts_with(key))
    };
    document_of(text, target).filter(|(_, line)| is_operation(line)).map(|(number, _)| number).collect()
}

/// The lines of the document that has that line, each with its number.
fn document_of(text: &str, line: usize) -> impl Iterator<Item = (usize, &str)> {
    let is_mark = |line: &str| line.starts_with("---");
    let from =
        text.lines().take(line).zip(1..).filter(|(line, _)| is_mark(line)).last().map_or(0, |(_, number)| number);
    let lines = text.lines().zip(1..).skip(from).take_while(move |(line, _)| !is_mark(line));
    lines.map(|(line, number)| (number, line))
}

/// The shortest beginning of a JSON pointer for which the object has no value.
fn missing(object: &Value, pointer: &str) -> Option<String> {
    let mut ends: Vec<usize> = pointer.match_indices('/').map(|(at, _)| at).skip(1).collect();
    ends.push(pointer.len());
    ends.into_iter().map(|end| &pointer[..end]).find(|part| object.pointer(part).is_none()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn objects() -> Vec<Value> {
        vec![
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "apple" }, "spec": { "containers": [{}] } }),
            json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "apple-cloud-init" } }),
        ]
    }

    fn apply(text: &str) -> Result<Vec<Value>, String> {
        let mut objects = objects();
        for patch in Patch::parse("x.patch.yaml", text).map_err(|error| error.to_string())? {
            let mut notes = vec![Vec::new(); objects.len()];
            patch.apply(objects.iter_mut().zip(&mut notes)).map_err(|error| error.to_string())?;
        }
        Ok(objects)
    }

    #[test]
    fn each_form_changes_what_it_is_for() {
        let text = "target: {kind: Pod}\nmergePatch: {spec: {hostNetwork: true}}\n---\n\
                    target: {kind: Pod}\nstrategicMerge: {spec: {volumes: [{name: a}]}}\n---\n\
                    target: {kind: Pod}\nstrategicMerge: {spec: {volumes: [{name: b}]}}\n---\n\
                    target: {kind: Secret, name: '*-cloud-init'}\njsonPatch: [{op: add, path: /immutable, value: true}]\n---\n\
                    target: {kind: Service, optional: true}\nmergePatch: {}\n";
        let objects = apply(text).unwrap();
        let volumes = json!([{ "name": "b" }, { "name": "a" }]);
        assert_eq!(objects[0]["spec"], json!({ "containers": [{}], "hostNetwork": true, "volumes": volumes }));
        assert_eq!(objects[1]["immutable"], true);
    }

    #[test]
    fn errors_name_patch_target_and_operation() {
        insta::assert_snapshot!(apply("target: {kind: Service, name: a*}\nmergePatch: {}\n").unwrap_err(), @"x.patch.yaml:1: patch 1 for Service a* finds no such object; if it need not be there, say `optional: true` in its target");
        insta::assert_snapshot!(apply("target: {kind: Pod}\njsonPatch:\n- {op: test, path: /kind, value: Pod}\n- {op: remove, path: /spec/nodeName}\n").unwrap_err(), @r#"x.patch.yaml:4: patch 1 for Pod * can't be applied to Pod apple: there is no /spec/nodeName (operation 2: {"op":"remove","path":"/spec/nodeName"})"#);
        insta::assert_snapshot!(apply("target: {kind: Pod}\nstrategicMerge: {spec: {volumes: [{emptyDir: {}}]}}\n").unwrap_err(), @"x.patch.yaml:1: patch 1 for Pod * can't be applied to Pod apple: spec.volumes[0]: it has no name, by which the list is merged");
        insta::assert_snapshot!(apply("target: {kind: Pod}\n").unwrap_err(), @"x.patch.yaml:1: patch 1 for Pod * must have one of strategicMerge, mergePatch and jsonPatch");
        insta::assert_snapshot!(apply("mergePatch: {}\n").unwrap_err(), @"x.patch.yaml:1:1: not a patch: missing field `target`");
        insta::assert_snapshot!(apply("target: {kind: Pod}\njsonPatch:\n- {op: ad, path: /a}\n").unwrap_err(), @"x.patch.yaml:3:8: not a patch: jsonPatch[0].op: unknown variant `ad`, expected one of `add`, `remove`, `replace`, `move`, `copy`, `test` at line 3 column 8");
        insta::assert_snapshot!(apply("target: {kind: Pod}\nmergepatch: {}\n").unwrap_err(), @"x.patch.yaml:2:1: not a patch: unknown field `mergepatch`, expected one of `target`, `jsonPatch`, `mergePatch`, `strategicMerge` at line 2 column 1");
    }
}
