//! What a trial of KVM has shown on a node. `vm-runner try-kvm` writes it to a file, `vm-operator node-devices` reads that file and hands
//! the result to the runners of the node's VMs, so that they need no trials of their own.

use serde::{Deserialize, Serialize};

/// The name of the file with the result.
pub const FILE: &str = "kvm.json";
/// The environment variable of a VM's container that has the result.
pub const VARIABLE: &str = "VM_RUNNER_KVM_TRIAL";
/// The most bytes of a result that are read.
pub const LONGEST: usize = 4096;
/// The most characters of a problem. It becomes an environment variable of a Pod and a part of a VM's status.
const LONGEST_PROBLEM: usize = 300;

/// The result of a trial.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialResult {
    /// What does not work, for people. `None`: KVM works.
    pub problem: Option<String>,
}

impl TrialResult {
    /// KVM does not work, for this reason. A long one is cut.
    pub fn failed(problem: &str) -> Self {
        let printable = problem.chars().filter(|character| !character.is_control());
        Self { problem: Some(printable.take(LONGEST_PROBLEM).collect()) }
    }

    /// Reads the text of a file or of the environment variable.
    ///
    /// # Errors
    /// If it is longer than [`LONGEST`], or not such a text.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > LONGEST {
            return Err(format!("longer than {LONGEST} bytes"));
        }
        let result: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        Ok(result.problem.map_or_else(Self::default, |problem| Self::failed(&problem)))
    }

    /// The text of a file or of the environment variable.
    pub fn text(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Whether KVM works.
    pub fn works(&self) -> bool {
        self.problem.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_as_it_was_written() {
        for result in [TrialResult::default(), TrialResult::failed("no \"such\" CPU")] {
            assert_eq!(TrialResult::parse(&result.text()), Ok(result));
        }
        assert_eq!(TrialResult::default().text(), r#"{"problem":null}"#);
    }

    #[test]
    fn what_is_no_result_is_refused_and_a_long_problem_is_cut() {
        let long = format!(r#"{{"problem": "{}"}}"#, "x".repeat(LONGEST));
        assert_eq!(TrialResult::parse(&long), Err("longer than 4096 bytes".to_owned()));
        for text in ["", "true", r#"{"problem": 1}"#] {
            assert!(TrialResult::parse(text).is_err(), "{text}");
        }
        let problem = TrialResult::parse(&format!(r#"{{"problem": "a\nb{}"}}"#, "x".repeat(2000))).unwrap().problem;
        assert_eq!(problem.map(|problem| (problem.len(), problem.starts_with("abx"))), Some((300, true)));
    }
}
