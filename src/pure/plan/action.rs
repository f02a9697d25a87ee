//! What a plan consists of: the writes, and what must happen before them.

use serde_json::Value;

use crate::{
    claims::Foreign,
    object::{Lifetime, ObjectKey, Rendered},
};

/// A write to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Apply the object (server-side apply).
    Apply {
        /// The object.
        object: Rendered,
        /// The UID of the existing object; the API server refuses to apply to another one. `None`: create it.
        uid: Option<String>,
    },
    /// Change only the labels, annotations and owners of an existing object.
    Label {
        /// The object.
        key: ObjectKey,
        /// Its UID.
        uid: String,
        /// A merge patch of its metadata.
        patch: Value,
    },
    /// Give a container of an existing Pod another image. The kubelet starts that container again, and no other.
    Image {
        /// The Pod.
        key: ObjectKey,
        /// Its UID.
        uid: String,
        /// The sidecar, one of `initContainers`.
        container: String,
        /// The image.
        image: String,
    },
    /// Delete the object.
    Delete {
        /// The object.
        key: ObjectKey,
        /// Its UID.
        uid: String,
        /// Why it is deleted.
        reason: DeleteReason,
        /// The grace period in seconds; `None`: the object's own.
        grace: Option<i64>,
        /// The resourceVersion, if the object must not have changed since.
        version: Option<u64>,
        /// What the object owns is kept.
        keeps_owned: bool,
    },
}

impl Action {
    /// Whether the action creates what exists only while the VM runs.
    pub fn makes_running(&self) -> bool {
        matches!(self, Self::Apply { object, uid: None } if object.lifetime == Lifetime::Running)
    }

    /// Whether the action creates what runs the guest.
    pub fn starts(&self) -> bool {
        self.makes_running() && !matches!(self, Self::Apply { object, .. } if object.is_helper)
    }

    /// Whether the action takes down what runs the guest, for a restart.
    pub fn restarts(&self) -> bool {
        matches!(self, Self::Delete { reason: DeleteReason::Restart, .. })
    }

    /// Whether the action replaces the VM's agent.
    pub fn is_image(&self) -> bool {
        matches!(self, Self::Image { .. })
    }

    /// Whether the action deletes something.
    pub fn is_delete(&self) -> bool {
        matches!(self, Self::Delete { .. })
    }

    /// The object that is written.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Apply { object, .. } => &object.key,
            Self::Label { key, .. } | Self::Image { key, .. } | Self::Delete { key, .. } => key,
        }
    }
}

/// Why an object is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteReason {
    /// The VM should be down.
    Stop,
    /// A restart was requested.
    Restart,
    /// The Pod has ended, and is created again.
    Ended,
    /// A forced stop was requested: the Pod does not wait for its guest.
    Force,
    /// No guest has started in the Pod, and it is not as rendered any more.
    Changed,
    /// It is a helper, and no guest uses it now: a restart was requested, or it is not as rendered any more.
    Renewed,
    /// No template renders the object any more.
    NotRendered,
}

/// What must happen before the rest can be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The object is being deleted and must be gone first.
    Gone(ObjectKey),
    /// An object with that name belongs to someone else and must be removed first.
    NotOurs(ObjectKey),
    /// The Pod should be gone already, but its node has not reported that it has ended.
    Overdue(ObjectKey),
    /// The Pod should be gone already. It has ended, but something keeps the object, usually a finalizer.
    NotRemoved(ObjectKey),
    /// The Pod has ended and is created again later.
    Retry(ObjectKey),
    /// The Pod does not belong to this VM and can write to one of its claims.
    ClaimInUse(ObjectKey),
    /// The claim is not the VM's. A person must give the disk another name, or say whose the claim is.
    ClaimForeign(ObjectKey, Foreign),
    /// The claim existed and does not exist any more. A person must restore it or give it up.
    ClaimMissing(ObjectKey),
    /// A helper of the VM must be ready before the guest starts.
    HelperNotReady(ObjectKey),
}

impl Wait {
    /// The object that the plan waits for.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Gone(key)
            | Self::NotOurs(key)
            | Self::Overdue(key)
            | Self::NotRemoved(key)
            | Self::Retry(key)
            | Self::ClaimInUse(key)
            | Self::ClaimForeign(key, _)
            | Self::ClaimMissing(key)
            | Self::HelperNotReady(key) => key,
        }
    }
}
