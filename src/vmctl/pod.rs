//! What vmctl is told about its Pod: by options, by variables, or by files of a volume of type downwardAPI
//! (<https://kubernetes.io/docs/concepts/workloads/pods/downward-api/>). So it needs no right to find out who it is.

use std::{fs, path::PathBuf};

use super::derive::PodFacts;

/// Where every container with a token finds the namespace of its Pod.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Where the facts about the Pod come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodSource {
    /// The folder with the files `name`, `uid` and `namespace`.
    pub podinfo: PathBuf,
    /// The name, instead of its file.
    pub name: Option<String>,
    /// The UID, instead of its file.
    pub uid: Option<String>,
    /// The namespace, instead of its file or that of the service account.
    pub namespace: Option<String>,
    /// The name of the node, which such a volume can't have.
    pub node: Option<String>,
}

/// A fact that nobody told.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {what} is not known: {how}")]
pub struct Missing {
    what: &'static str,
    how: String,
}

impl PodSource {
    /// All facts.
    ///
    /// # Errors
    /// If one is missing.
    pub fn facts(&self) -> Result<PodFacts, Missing> {
        let namespace = self.fact("namespace", "POD_NAMESPACE", self.namespace.as_ref());
        let node = self.node.as_ref().filter(|node| !node.is_empty()).cloned().ok_or_else(|| Missing {
            what: "node of this Pod",
            how: "give the container the variable NODE_NAME from the field spec.nodeName, or use --node".into(),
        })?;
        Ok(PodFacts {
            name: self.fact("name", "POD_NAME", self.name.as_ref())?,
            uid: self.uid()?,
            namespace: namespace.or_else(|missing| read(NAMESPACE_FILE.into()).ok_or(missing))?,
            node,
        })
    }

    /// The UID alone.
    ///
    /// # Errors
    /// If it is missing.
    pub fn uid(&self) -> Result<String, Missing> {
        self.fact("uid", "POD_UID", self.uid.as_ref())
    }

    fn fact(&self, field: &'static str, variable: &str, given: Option<&String>) -> Result<String, Missing> {
        let given = given.filter(|given| !given.is_empty()).cloned();
        let file = self.podinfo.join(field);
        given.or_else(|| read(file.clone())).ok_or_else(|| Missing {
            what: match field {
                "name" => "name of this Pod",
                "uid" => "UID of this Pod",
                _ => "namespace of this Pod",
            },
            how: format!(
                "mount a volume of type downwardAPI with the item {{path: {field}, fieldRef: {{fieldPath: metadata.{field}}}}} so that there is \
                 the file {}, or give the container the variable {variable} from that field",
                file.display()
            ),
        })
    }
}

/// The first line of a file, if it is there and not empty.
fn read(file: PathBuf) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().next().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_variables_come_before_files_and_what_is_missing_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let source = PodSource { podinfo: folder.path().to_owned(), node: Some("a".into()), ..PodSource::default() };
        let missing = |source: &PodSource| source.facts().unwrap_err().to_string();
        let said = missing(&source);
        assert!(said.starts_with("the name of this Pod is not known: mount a volume of type downwardAPI"), "{said}");
        assert!(said.contains(&format!("{}/name", folder.path().display())) && said.contains("POD_NAME"), "{said}");
        for (field, text) in [("name", "web-0\n"), ("uid", "u-1"), ("namespace", "orchard")] {
            fs::write(folder.path().join(field), text).unwrap();
        }
        let facts = |name: &str| PodFacts {
            name: name.into(),
            uid: "u-1".into(),
            namespace: "orchard".into(),
            node: "a".into(),
        };
        assert_eq!(source.facts(), Ok(facts("web-0")));
        assert_eq!(PodSource { name: Some("web-1".into()), ..source.clone() }.facts(), Ok(facts("web-1")));
        assert_eq!(PodSource { name: Some(String::new()), ..source.clone() }.facts(), Ok(facts("web-0")));
        assert!(missing(&PodSource { node: None, ..source }).contains("NODE_NAME"));
    }
}
