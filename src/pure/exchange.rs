//! VMs for other systems: what of a VM is the same there, what changes, and what has no equivalent. Pure.

pub mod kubevirt;
pub mod takeover;

use std::fmt;

use serde::Serialize;

/// How much of a field another system has, or how much of another system's field a VM has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Grade {
    /// The guest sees the same.
    Same,
    /// The guest sees something else, or a person has to do something.
    Changed,
    /// There is no equivalent.
    LeftOut,
}

impl fmt::Display for Grade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Same => "the same",
            Self::Changed => "changed",
            Self::LeftOut => "left out",
        })
    }
}

/// What became of a field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remark {
    /// How much of it is there.
    pub grade: Grade,
    /// The field of the VM, such as `spec.vm.firmware`.
    pub field: String,
    /// What it is now, or why it is not there; empty if it is the same.
    pub text: String,
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.field, self.grade, self.text)
    }
}

/// A VM as the objects of another system.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exported {
    /// The objects, in the order in which they are created.
    pub objects: Vec<serde_json::Value>,
    /// What became of each field that is set.
    pub remarks: Vec<Remark>,
}

impl Exported {
    fn note(&mut self, grade: Grade, field: impl Into<String>, text: impl Into<String>) {
        self.remarks.push(Remark { grade, field: field.into(), text: text.into() });
    }

    fn same(&mut self, field: impl Into<String>) {
        self.note(Grade::Same, field, "");
    }

    fn changed(&mut self, field: impl Into<String>, text: impl Into<String>) {
        self.note(Grade::Changed, field, text);
    }

    fn left_out(&mut self, field: impl Into<String>, text: impl Into<String>) {
        self.note(Grade::LeftOut, field, text);
    }

    /// The remarks about what is not the same.
    pub fn losses(&self) -> impl Iterator<Item = &Remark> {
        self.remarks.iter().filter(|remark| remark.grade != Grade::Same)
    }
}
