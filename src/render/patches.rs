//! Patches: changes to rendered objects that no block covers.
//!
//! A file `NAME.patch.yaml` of a template set holds one or more documents, each a patch:
//!
//! ```yaml
//! target:
//!   kind: Pod          # and apiVersion, if the kind alone is not enough
//!   name: "*"          # * stands for any text; all names if absent
//!   optional: true     # no error if there is no such object
//! mergePatch:          # RFC 7386, or
//!   spec: {hostNetwork: true}
//! jsonPatch:           # RFC 6902
//!   - {op: add, path: /spec/containers/0/env/-, value: {name: A, value: b}}
//! ```
//!
//! A file `NAME.patch.yaml.j2` is rendered first, for each machine. Patches are applied in the order of their files' names,
//! before the operator's labels and owner are set and before the guard rails are looked at.

use serde::Deserialize;
use serde_json::Value;
use wildmatch::WildMatch;

use super::TemplateError;

/// What a file is called that holds patches.
pub const SUFFIX: &str = ".patch.yaml";
/// What one is called that is rendered first.
pub const TEMPLATE_SUFFIX: &str = ".patch.yaml.j2";

/// A change to objects.
#[derive(Clone, Debug)]
pub struct Patch {
    /// The file.
    file: String,
    /// The line of its target, from 1, where that can be told.
    line: Option<usize>,
    /// The line of each of its operations, where that can be told.
    operations: Vec<usize>,
    /// Which of the file's documents, from 1.
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
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    target: Target,
    #[serde(default)]
    json_patch: Option<json_patch::Patch>,
    #[serde(default)]
    merge_patch: Option<Value>,
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
}

impl Patch {
    /// Reads the patches of a file.
    ///
    /// # Errors
    /// With the place in the file, where the text of the file is what was written by a person.
    pub fn parse(file: &str, text: &str) -> Result<Vec<Self>, TemplateError> {
        let mut patches = Vec::new();
        let mut targets = text.lines().zip(1..).filter(|(line, _)| line.starts_with("target:")).map(|(_, line)| line);
        for (index, document) in serde_yaml::Deserializer::from_str(text).enumerate() {
            let wrong = |error: serde_yaml::Error| TemplateError::yaml(file, "not a patch: ", &error);
            let Some(Document { target, json_patch, merge_patch }) =
                Option::<Document>::deserialize(document).map_err(wrong)?
            else {
                continue;
            };
            let line = targets.next();
            let change = match (json_patch, merge_patch) {
                (Some(patch), None) => Change::Json(patch),
                (None, Some(patch)) => Change::Merge(patch),
                _ => {
                    let message = format!("patch {} for {target} must have either jsonPatch or mergePatch", index + 1);
                    return Err(TemplateError { line, ..TemplateError::refused(file, message) });
                }
            };
            let operations = line.map(|line| operations(text, line)).unwrap_or_default();
            patches.push(Self { file: file.to_owned(), line, operations, number: index + 1, target, change });
        }
        Ok(patches)
    }

    /// Its line is one of a rendered text, so that it says nothing to whoever wrote the file.
    pub(super) fn without_line(self) -> Self {
        Self { line: None, operations: Vec::new(), ..self }
    }

    /// Changes the objects that it is meant for, and notes its file with each.
    ///
    /// # Errors
    /// If there is none, unless that is allowed; or if an operation can't be carried out: then with that operation.
    pub fn apply<'a>(
        &self,
        objects: impl IntoIterator<Item = (&'a mut Value, &'a mut Vec<String>)>,
    ) -> Result<(), TemplateError> {
        let refused =
            |message: String| TemplateError { line: self.line, ..TemplateError::refused(&self.file, message) };
        let (mut found, mut similar) = (false, None);
        for (object, patches) in objects {
            if !self.target.is(object) {
                let kind = object["kind"].as_str().filter(|kind| kind.eq_ignore_ascii_case(&self.target.kind));
                similar = similar.or(kind.filter(|kind| *kind != self.target.kind).map(str::to_owned));
                continue;
            }
            found = true;
            patches.push(self.file.clone());
            match &self.change {
                Change::Merge(patch) => json_patch::merge(object, patch),
                Change::Json(patch) => json_patch::patch(object, patch).map_err(|error| {
                    let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
                    let operation = patch.0.get(error.operation).map(ToString::to_string).unwrap_or_default();
                    let missing = missing(object, &error.path.to_string());
                    let why =
                        missing.map_or_else(|| error.kind.to_string(), |missing| format!("there is no {missing}"));
                    let refusal = refused(format!(
                        "patch {} for {} can't be applied to {} {name}: {why} (operation {}: {operation})",
                        self.number,
                        self.target,
                        self.target.kind,
                        error.operation + 1,
                    ));
                    // Only if each was found; a value may have a line that looks like one.
                    let line = self.operations.get(error.operation).filter(|_| self.operations.len() == patch.0.len());
                    TemplateError { line: line.copied().or(refusal.line), ..refusal }
                })?,
            }
        }
        if found || self.target.optional {
            return Ok(());
        }
        let hint = match similar {
            Some(kind) => format!("did you mean the kind {kind}?"),
            None => "if it need not be there, say `optional: true` in its target".to_owned(),
        };
        Err(refused(format!("patch {} for {} finds no such object; {hint}", self.number, self.target)))
    }
}

/// The lines on which operations stand, in the document whose target stands on that line.
fn operations(text: &str, target: usize) -> Vec<usize> {
    let is_operation = |line: &str| {
        let line = line.trim_start().trim_start_matches(['-', '{', '[', ' ']);
        ["op:", "\"op\":", "'op':"].iter().any(|key| line.starts_with(key))
    };
    let lines: Vec<&str> = text.lines().collect();
    let from = lines[..target].iter().rposition(|line| line.starts_with("---")).map_or(0, |line| line + 1);
    let document = lines.iter().enumerate().skip(from).take_while(|(_, line)| !line.starts_with("---"));
    document.filter(|(_, line)| is_operation(line)).map(|(index, _)| index + 1).collect()
}

/// The first part of a JSON pointer that leads nowhere, if its last part is not all that is missing or must be there.
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
    fn both_kinds_change_what_they_are_for() {
        let text = "target: {kind: Pod}\nmergePatch: {spec: {hostNetwork: true}}\n---\n\
                    target: {kind: Secret, name: '*-cloud-init'}\njsonPatch: [{op: add, path: /immutable, value: true}]\n---\n\
                    target: {kind: Service, optional: true}\nmergePatch: {}\n";
        let objects = apply(text).unwrap();
        assert_eq!(objects[0]["spec"], json!({ "containers": [{}], "hostNetwork": true }));
        assert_eq!(objects[1]["immutable"], true);
    }

    #[test]
    fn errors_name_patch_target_and_operation() {
        insta::assert_snapshot!(apply("target: {kind: Service, name: a*}\nmergePatch: {}\n").unwrap_err(), @"x.patch.yaml:1: patch 1 for Service a* finds no such object; if it need not be there, say `optional: true` in its target");
        insta::assert_snapshot!(apply("target: {kind: Pod}\njsonPatch:\n- {op: test, path: /kind, value: Pod}\n- {op: remove, path: /spec/nodeName}\n").unwrap_err(), @r#"x.patch.yaml:4: patch 1 for Pod * can't be applied to Pod apple: there is no /spec/nodeName (operation 2: {"op":"remove","path":"/spec/nodeName"})"#);
        insta::assert_snapshot!(apply("target: {kind: Pod}\n").unwrap_err(), @"x.patch.yaml:1: patch 1 for Pod * must have either jsonPatch or mergePatch");
        insta::assert_snapshot!(apply("mergePatch: {}\n").unwrap_err(), @"x.patch.yaml:1:1: not a patch: missing field `target`");
        insta::assert_snapshot!(apply("target: {kind: Pod}\njsonPatch:\n- {op: ad, path: /a}\n").unwrap_err(), @"x.patch.yaml:3:8: not a patch: jsonPatch[0].op: unknown variant `ad`, expected one of `add`, `remove`, `replace`, `move`, `copy`, `test` at line 3 column 8");
        insta::assert_snapshot!(apply("target: {kind: Pod}\nmergepatch: {}\n").unwrap_err(), @"x.patch.yaml:2:1: not a patch: unknown field `mergepatch`, expected one of `target`, `jsonPatch`, `mergePatch` at line 2 column 1");
    }
}
