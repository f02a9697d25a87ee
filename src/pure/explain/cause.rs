//! The causes that an explanation can name. Each is declared once; the documentation's table is derived from this one.

use std::fmt;

use serde::{Serialize, Serializer};

/// A step between a VM in the API server and a guest that runs, in the order in which they follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// The GitOps tool that applies the VM does so. Its result is never missing: the VM is as it was applied last.
    Git,
    /// The manager has taken the VM's newest spec.
    Manager,
    /// The templates render it.
    Template,
    /// The API server accepts the objects.
    Server,
    /// The claims have their volumes.
    Claims,
    /// The Pod has a node.
    Scheduler,
    /// The node runs the Pod's containers.
    Kubelet,
    /// QEMU runs the guest as the spec wants it.
    Qemu,
    /// The guest has booted. Its result is never missing: a guest need not have an agent that says so.
    Guest,
}

impl Stage {
    /// All stages in their order.
    pub const ALL: [Self; 9] = [
        Self::Git,
        Self::Manager,
        Self::Template,
        Self::Server,
        Self::Claims,
        Self::Scheduler,
        Self::Kubelet,
        Self::Qemu,
        Self::Guest,
    ];

    /// The name in output.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Git => "Git",
            Self::Manager => "manager",
            Self::Template => "template",
            Self::Server => "API server",
            Self::Claims => "claims",
            Self::Scheduler => "scheduler",
            Self::Kubelet => "kubelet",
            Self::Qemu => "QEMU",
            Self::Guest => "guest",
        }
    }
}

macro_rules! causes {
    ($($name:ident, $stage:ident, $meaning:literal;)*) => {
        /// Why a VM is not as its spec wants it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Cause {
            $(#[doc = $meaning] $name,)*
        }

        impl Cause {
            /// All causes, in the order of the stages.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The name in `-o json`.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// The stage whose result is missing.
            pub const fn stage(self) -> Stage {
                match self { $(Self::$name => Stage::$stage,)* }
            }

            /// What it means, in a few words.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }
        }
    };
}

causes! {
    ManagerMissing, Manager, "the cluster has no manager";
    ManagerStopped, Manager, "the manager's Deployment wants no Pod";
    ManagerUnavailable, Manager, "the manager's Deployment has no Pod that is ready";
    ManagerSilent, Manager, "no manager renews its Lease";
    NotManaged, Manager, "a manager works, and has not taken the VM: it does not watch the namespace";
    StatusRefused, Manager, "the API server refuses the VM's status";
    InvalidSpec, Template, "a stored field can't be read";
    NotAllowed, Template, "the VM has a part that no administrator has allowed: a list of the manager's configuration lacks it";
    TemplateError, Template, "a template can't be rendered";
    NamespaceTerminating, Server, "the namespace is being deleted";
    NameTaken, Server, "an object of a needed name belongs to somebody else";
    QuotaExceeded, Server, "a ResourceQuota refuses the object";
    LimitExceeded, Server, "a LimitRange refuses the Pod";
    PodSecurity, Server, "a Pod Security Standard refuses the Pod";
    WebhookRefused, Server, "an admission webhook refuses the object";
    WebhookUnavailable, Server, "an admission webhook does not answer";
    PolicyRefused, Server, "a ValidatingAdmissionPolicy refuses the object";
    ApplyFailed, Server, "the API server refuses the object otherwise, or the manager lacks a right";
    WatchFailed, Server, "the manager can't watch a kind of object";
    SecretRefused, Server, "a Secret or ConfigMap with cloud-init data is not meant for VMs, or does not exist";
    MountMissing, Server, "a Secret or ConfigMap that the Pod would mount does not exist";
    DeletionBlocked, Server, "a finalizer keeps the deleted VM";
    ClaimMissing, Claims, "a claim with the VM's data does not exist any more";
    ClaimAbsent, Claims, "a claim that the Pod mounts, and that is not the VM's own, does not exist";
    ClaimInUse, Claims, "another Pod writes to a claim";
    ClaimLost, Claims, "the volume of a claim is lost";
    ClaimDeleting, Claims, "a claim is being deleted";
    StorageClassMissing, Claims, "a claim names a StorageClass that does not exist";
    NoDefaultClass, Claims, "a claim names no StorageClass, and the cluster has no default one";
    ProvisioningFailed, Claims, "the provisioner can't make a volume";
    ClaimUnbound, Claims, "a claim has no volume, for another reason";
    SchedulerMissing, Scheduler, "no scheduler serves the Pod's schedulerName";
    SchedulingGated, Scheduler, "a scheduling gate holds the Pod";
    NoNodes, Scheduler, "the cluster has no node";
    SelectorUnmatched, Scheduler, "no node has the labels of nodeSelector, or those that nodeAffinity requires";
    Cordoned, Scheduler, "the nodes that could take the Pod are cordoned";
    Tainted, Scheduler, "the nodes that could take the Pod have a taint that it does not tolerate";
    DeviceMissing, Scheduler, "no node offers a device that the Pod needs";
    TooLarge, Scheduler, "the Pod requests more than any node has";
    VolumeElsewhere, Scheduler, "the nodes on which a volume can be used are gone, closed, or have no room";
    Unschedulable, Scheduler, "the scheduler finds no node, for another reason";
    NodeMissing, Kubelet, "the Pod's node does not exist";
    NodeNotResponding, Kubelet, "the Pod's node does not answer";
    NodeNotReady, Kubelet, "the Pod's node is not ready";
    Evicted, Kubelet, "the node has evicted the Pod";
    PodFailed, Kubelet, "the Pod failed";
    PodSucceeded, Kubelet, "the Pod's containers ended without an error";
    InvalidImageName, Kubelet, "the image's name is invalid";
    ImagePullFailed, Kubelet, "the node can't get an image";
    ContainerConfig, Kubelet, "the node can't make a container: a Secret, a ConfigMap or a key is missing";
    ContainerWaiting, Kubelet, "the node can't start a container, for another reason";
    MountFailed, Kubelet, "the node can't mount a volume";
    AttachFailed, Kubelet, "a volume can't be attached to the node";
    SandboxFailed, Kubelet, "the node can't make the Pod's network";
    UploadMissing, Kubelet, "a disk waits for a file that nobody has uploaded whole";
    ProbeFailed, Kubelet, "the node ends a container, because its probe or hook fails";
    StartDelayed, Kubelet, "the containers are not created in time";
    PodNotEnded, Kubelet, "the Pod should have ended, and its node has not ended it";
    PodNotRemoved, Kubelet, "a finalizer keeps the Pod";
    RunnerSilent, Qemu, "the Pod runs, and its runner reports nothing";
    OutOfMemory, Qemu, "the runner was killed because it used more memory than its limit";
    ContainerFailed, Qemu, "a container that a template adds failed";
    RunnerFailed, Qemu, "QEMU or the runner failed";
    StorageFull, Qemu, "the storage of a disk is full";
    StorageFailed, Qemu, "the storage of a disk has an error";
    TpmLost, Qemu, "the guest has lost its TPM";
    NetworkLost, Qemu, "the guest has lost its network";
    ChangeFailed, Qemu, "QEMU refuses a change";
    GuestPanicked, Qemu, "the guest's kernel has panicked, or its watchdog was not fed";
    PausedByHand, Qemu, "somebody has paused the guest, and the spec does not want that";
}

impl Cause {
    /// The table of all causes in the documentation, as Markdown.
    pub fn markdown() -> String {
        let rows =
            Self::ALL.iter().map(|cause| format!("| {} | {cause} | {} |\n", cause.stage().title(), cause.meaning()));
        format!("| stage | cause | meaning |\n|---|---|---|\n{}", rows.collect::<String>())
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Cause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::Cause;

    #[test]
    fn the_page_has_all_causes() {
        let page = include_str!("../../../docs/commands.md");
        assert!(page.contains(&Cause::markdown()), "docs/commands.md lacks the table\n{}", Cause::markdown());
    }
}
