//! The reasons of conditions and events. Each is declared once.
//!
//! A line of the table below defines a reason: its name, where it is used, whether a person must act, and what it means. The
//! documentation's table, the events and the commands are derived from it. A reason without one of these does not compile.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Whether a reason needs a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing is wrong.
    Fine,
    /// Nothing is wrong, but people want to know it: an event of type Normal reports it.
    Notice,
    /// Something is not as wanted yet, and will be without a person. No event.
    Passing,
    /// Something is wrong: an event of type Warning reports it.
    Warning,
}

macro_rules! reasons {
    ($($name:ident, $uses:literal, $effect:ident, $meaning:literal;)*) => {
        /// The reason of a condition or of an event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason {
            $(#[doc = $meaning] $name,)*
        }

        impl Reason {
            /// All reasons, in the order of the documentation.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The name in conditions and events.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// Where it is used: `TYPE=STATUS` of a condition, or `event`, separated by commas.
            pub const fn uses(self) -> &'static str {
                match self { $(Self::$name => $uses,)* }
            }

            /// Whether it needs a person.
            pub const fn effect(self) -> Effect {
                match self { $(Self::$name => Effect::$effect,)* }
            }

            /// What it means, in a sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }
        }
    };
}

reasons! {
    Pending, "Ready=Unknown", Passing, "No manager has reconciled the VM yet.";
    Running, "Ready=True", Fine, "The VM runs, as its spec wants it.";
    StoppedAsRequested, "Ready=True", Fine, "The VM is down, as its spec wants it.";
    GuestShutdown, "Ready=True, Running=False, event", Notice, "The guest shut itself down. With `guestShutdownStops` the VM stays down; the message of Ready explains how to start it.";
    Starting, "Ready=False, Running=False", Passing, "The VM is being started: the manager waits for the Pod, or the runner for QEMU.";
    Stopping, "Ready=False", Passing, "The guest is being shut down.";
    Restarting, "Ready=False, event", Passing, "The manager replaces the Pod, because a restart was requested or the Pod has ended.";
    WaitingForDeletion, "Ready=False, ObjectsReady=False", Passing, "An object that is being deleted, for example of an earlier VM with the same name, must be gone first.";
    BeingDeleted, "Ready=False", Passing, "The VM is being deleted: nothing is started for it, or finalizers of other programs keep it.";
    Unschedulable, "Ready=False, event", Warning, "No node can take the Pod, or a claim is not bound. The message names what keeps it from each node, or is the scheduler's.";
    ImagePullFailed, "Ready=False, event", Warning, "The kubelet can't get the container's image. The message has the kubelet's words.";
    InvalidImageName, "Ready=False, event", Warning, "The name of the container's image is not valid, so no registry can have it.";
    ContainerWaiting, "Ready=False, event", Warning, "The kubelet can't start the container. The message has the kubelet's words.";
    StartDelayed, "Ready=False, event", Warning, "The Pod has had a node for two minutes, and its containers are not created: the image is still being fetched, or a Secret, a ConfigMap or a volume is missing. Or the node has not taken the Pod for 30 seconds: it does not exist, does not answer, or is very busy. The message names what is missing, where an event of the kubelet does.";
    RunnerFailed, "Ready=False, event", Warning, "QEMU or the runner failed. The message is the last one that it logged, with the time of the next try, or says that it was killed for its memory.";
    ContainerFailed, "Ready=False, event", Warning, "A container that a template adds to the Pod failed, so no guest runs. The message has its last words, if its `terminationMessagePolicy` is FallbackToLogsOnError, and the time of the next try.";
    HelperNotReady, "Ready=False, event", Warning, "A Pod that a template makes to help the guest is not ready. The message names it, says why, and has the time of the next try. The guest starts when it is ready; one that runs may lack what the helper serves.";
    PodFailed, "Ready=False, event", Warning, "The Pod failed. The message has the cause and the time of the next try.";
    PodSucceeded, "Ready=False, event", Notice, "The Pod's containers ended without an error. The message has the time of the next try.";
    NodeNotResponding, "Ready=False, event", Warning, "The VM's node does not answer, so nobody knows whether the guest still runs.";
    PodNotEnded, "Ready=False, event", Warning, "The Pod should have ended, and its node has not ended it. Nothing says that the node is down: the guest may still be powering down.";
    PodNotRemoved, "Ready=False, event", Warning, "Nothing runs in the Pod any more, but something keeps the object, usually a finalizer.";
    NameTaken, "Ready=False, ObjectsReady=False, event", Warning, "An object with the needed name belongs to someone else. The manager does not take it over.";
    ClaimTaken, "Ready=False, StorageReady=False, event", Warning, "A claim with the name of a disk belongs to another VM, or to somebody else. The message says to whom, and what to do.";
    ClaimReplaced, "Ready=False, StorageReady=False, event", Warning, "Under the name of a claim with the VM's data there is another claim. The message says what to do.";
    ClaimInUse, "Ready=False, StorageReady=False, event", Warning, "Another Pod mounts one of the VM's claims and can write to it. The VM starts when that Pod is gone, or runs beside it: the manager does not delete the other Pod.";
    ApplyFailed, "Ready=False, ObjectsReady=False, event", Warning, "The API server refused an object, or could not store it three times in a row, for example because a webhook does not answer. The message is the API server's.";
    Restless, "ObjectsReady=False, event", Warning, "The manager has written the VM's objects or its status again and again although nobody has changed the VM, so it waits between two writes: a template renders something else after each write, or another client changes the same fields.";
    MountMissing, "Ready=False, event", Warning, "The Pod would mount a Secret or a ConfigMap that does not exist, or lacks the key; the message names it. The VM starts when it is there.";
    SecretRefused, "Ready=False, event", Warning, "The VM takes cloud-init data from a Secret or ConfigMap that is not meant for VMs, or from a Secret that does not exist. The message has the label that the object needs.";
    WatchFailed, "Ready=False, event", Warning, "The manager can't watch a kind of object that the templates create, because it lacks the right or the kind does not exist. The VM can still be stopped.";
    TemplateError, "Ready=False, TemplatesValid=False, event", Warning, "A template can't be rendered, so nothing shows whether the VM is as its newest spec wants it. The message has file, line and column.";
    InvalidSpec, "Ready=False, TemplatesValid=False, event", Warning, "The spec has fields that can't be read; the message names them. Nothing of the VM's objects is changed, but the VM can be stopped.";
    NotAllowed, "Ready=False, TemplatesValid=False, event", Warning, "The VM has a part that reaches further than a VM, such as a network of the node or an image of its own, and no administrator has allowed that. The message has the field, its value and the list of the configuration. Nothing is applied for the VM; what runs goes on, and is not started again.";
    Rendered, "TemplatesValid=True", Fine, "The templates render this VM.";
    NewerRefused, "TemplatesValid=True", Fine, "The templates in use render this VM, but newer ones are not used. The message explains why.";
    ConfigurationRefused, "TemplatesValid=True, event", Warning, "The manager's newest configuration is not used, because VMs that are rendered now would not be. The message names its keys; the event is that of the VM with which it was seen.";
    ValuesRefused, "TemplatesValid=True, event", Warning, "The VM's `templateValues` do not match the schema of the newest templates. The VM keeps the version that it has; other VMs use the newest one.";
    Changed, "RestartRequired=True", Fine, "A change waits for the next start. `status.pendingChanges` lists its path, current and wanted value.";
    ClaimsBound, "StorageReady=True", Fine, "All disks are available.";
    ClaimMissing, "Ready=False, StorageReady=False, event", Warning, "A claim with the VM's data does not exist any more. The manager creates no empty one in its place; the message says what to do.";
    ClaimLost, "StorageReady=False, event", Warning, "A claim's volume is lost.";
    ClaimDeleting, "Ready=False, StorageReady=False, event", Warning, "Someone deleted a claim. It is removed, with its data, when no Pod uses it any more. Ready=False: a restart is requested, and the guest is not restarted.";
    GrowthRefused, "StorageReady=False, event", Warning, "The API server refused to let a claim grow, or a GitOps tool syncs the claim's size. The VM runs with the claim as it is.";
    ChangeRefused, "StorageReady=False, event", Warning, "The spec wants a claim to be different in a way that can't be changed in a claim that exists. The VM runs with the claim as it is.";
    ClaimPending, "StorageReady=False", Passing, "A claim is not bound to a volume yet.";
    GrowthPending, "StorageReady=False", Passing, "A claim is not asked to grow yet.";
    Resizing, "StorageReady=False", Passing, "A claim's volume grows.";
    ClaimOwned, "StorageReady=True, event", Warning, "Something else than the VM owns a claim, such as a Job or a DataVolume, and the claim is deleted together with it. The message names it.";
    ShrinkRefused, "StorageReady=True, event", Warning, "The spec wants a claim to be smaller than it is, which no volume can become. The VM runs with the larger disk.";
    CloudInitUnusable, "SpecQuestionable=True, event", Warning, "cloud-init will ignore some or all of the VM's data: a cloud-config that is no YAML or has keys that do not exist, or a kind of data that it does not know. The message has field and line. The VM starts all the same.";
    MemoryLimitTooLow, "SpecQuestionable=True, event", Warning, "The limit of memory has no room for QEMU beside the guest's memory, so the VM will be killed for its memory. The message has the limit that suffices.";
    StateNotSet, "PowerUnmanaged=True", Fine, "Nobody sets `spec.vm.state`; the VM keeps its last power state.";
    Overridden, "StateOverridden=True, event", Notice, "The annotation `stateUntil` outranks `spec.vm.state`. The message says until when.";
    OverrideIgnored, "StateOverridden=False, event", Warning, "The annotation `stateUntil` is ignored: it is no state and time, or its time is more than 30 days off.";
    OverrideEnded, "event", Notice, "The time of the annotation `stateUntil` has passed, or it was removed: `spec.vm.state` is in force again.";
    ChangeFailed, "Ready=False, ChangesApplied=False, event", Warning, "QEMU refused a change of the running VM, such as a CD that can't be inserted. The message has QEMU's words. The runner tries again with the next change of the spec, and to grow a disk each minute.";
    StorageFull, "Ready=False, DevicesReady=False, event", Warning, "The storage of a disk is full, so QEMU has stopped the guest before it loses data. The message names the disk. The runner lets the guest go on when there is space.";
    StorageFailed, "Ready=False, DevicesReady=False, event", Warning, "The storage of a disk has another error for which the QEMU template stops the guest (`werror`, `rerror`). The runner tries again to let it go on.";
    TpmLost, "Ready=False, DevicesReady=False, event", Warning, "The program that emulates the TPM has ended. The guest goes on without a TPM until the VM is restarted; what the TPM had stored is kept.";
    NetworkLost, "Ready=False, DevicesReady=False, event", Warning, "The program passt has ended. The guest goes on without its network of type pod until passt runs again, or, if passt ran beside QEMU, until the VM is restarted.";
    Started, "Running=True, event", Notice, "QEMU runs and the guest executes.";
    Paused, "Ready, Running=False", Fine, "QEMU runs, but the guest is paused. Ready is True if `spec.vm.paused` wants that.";
    Pausing, "Ready=False", Passing, "`spec.vm.paused` is set, and the guest runs: the runner pauses it next, or somebody has let it go on with `vm-runner ctl resume`.";
    Resuming, "Ready=False", Passing, "The guest is paused, and the spec does not want that any more: the runner lets it go on next.";
    PoweredDown, "Running=False", Fine, "The guest shut down because the runner asked it to.";
    PoweredOff, "Running=False", Fine, "The guest did not shut down in time, or was not executing, and the runner ended QEMU.";
    QemuFailed, "Running=False", Warning, "QEMU could not be started, failed, or was ended by somebody other than the runner. The message has its last output.";
    GuestPanicked, "Ready=False, Running=False, event", Warning, "The guest's kernel has panicked, or its watchdog was not fed in time, and the guest is paused. `spec.vm.onPanic` says what follows.";
    StoppedAfterPanic, "Ready=True, Running=False, event", Warning, "The guest has panicked, or its watchdog was not fed in time, and the VM is down, because `spec.vm.onPanic` is `stop`. The message of Ready explains how to start it.";
    GuestAgentAnswered, "Booted=True", Fine, "QEMU's guest agent in the guest has answered.";
    NoGuestAgent, "Booted=False", Fine, "QEMU's guest agent in the guest has not answered yet.";
    LoginAgentAnswered, "VmopAgentConnected=True", Fine, "The login agent in the guest has answered.";
    NoLoginAgent, "VmopAgentConnected=False, UserLoggedIn=False", Fine, "The login agent in the guest has not answered yet, so it can't log in anybody.";
    LoggedIn, "UserLoggedIn=True", Fine, "A user is logged in in the guest. `status.loggedInUser` is the user.";
    NobodyLoggedIn, "UserLoggedIn=False", Fine, "No user is logged in in the guest.";
    Refused, "UserLoggedIn", Fine, "The login agent refused the last request. The message is the agent's; the status says whether an earlier user is still logged in.";
    Connected, "ConsoleConnected=True", Fine, "A viewer is connected to the display. `status.consoleClient` is its address, or its user.";
    NobodyConnected, "ConsoleConnected=False", Fine, "No viewer is connected to the display.";
    NotRunning, "Booted=False, ConsoleConnected=False, VmopAgentConnected=False, UserLoggedIn=False", Fine, "The VM does not run, so nothing is known of its guest.";
    Stopped, "Running=False, and conditions of the guest", Fine, "There is no Pod, so no guest runs.";
    Failed, "Running=False, and conditions of the guest", Warning, "The VM can't be started, so no guest runs.";
    Unknown, "Running=Unknown, and conditions of the guest", Warning, "The VM's node does not answer, so nothing is known of its guest.";
    SuccessfulCreate, "event", Notice, "The manager created the Pod.";
    SuccessfulDelete, "event", Notice, "The manager deleted the Pod to stop the VM.";
    GuestRestarts, "event", Notice, "The guest shut itself down, and its node starts it again in the same Pod.";
    Reset, "event", Notice, "The guest is reset, because `resetCount` was increased.";
    Reboot, "event", Notice, "The guest is asked to reboot, because `rebootCount` was increased.";
    Evicted, "event", Notice, "The cluster removes the Pod, for example because its node is drained. The message has the cause.";
    Forced, "event", Notice, "The manager ends the Pod without waiting for the guest.";
    StatusRefused, "event", Warning, "The API server refuses what the manager writes to the VM's status, for example because of a webhook, a policy or a missing right. So the status and its conditions are old. The message is the API server's.";
    ForceStopIgnored, "event", Warning, "The annotation `forceStop` is ignored: it was set while the VM should run, or it is not the UID of the VM's Pod.";
    AgentReplaced, "event", Notice, "The runner's agent gets another image. The guest goes on, and the agent reports again a moment later.";
    RestartRequired, "event", Notice, "The condition RestartRequired became True, or other changes wait.";
    PowerUnmanaged, "event", Warning, "The condition PowerUnmanaged became True.";
    ClaimAdopted, "event", Notice, "The VM uses a claim that existed already, that the manager has not made, and that was nobody's.";
    DiskKept, "event", Notice, "A disk was removed from the spec; its claim still exists.";
    TemplatesChanged, "event", Notice, "The VM's objects are now rendered with another version of the templates.";
    TemplatesRefused, "event", Warning, "A newer version of the templates is not used because of this VM. The message explains why.";
    Unreadable, "event", Warning, "The VM has no name that the manager can read. Nothing is done for it.";
}

impl Reason {
    /// The reason with that name; `None` for a reason of another program.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == name)
    }

    /// Whether, as a reason of Ready or ObjectsReady, it is something that time alone does not mend: a person or another client has to do
    /// something. Then the VM is Stalled, and tools that wait for it give up.
    pub const fn is_stalled(self) -> bool {
        matches!(
            self,
            Self::ApplyFailed
                | Self::ChangeFailed
                | Self::ClaimMissing
                | Self::ClaimReplaced
                | Self::ClaimTaken
                | Self::ContainerFailed
                | Self::ContainerWaiting
                | Self::GuestPanicked
                | Self::InvalidImageName
                | Self::InvalidSpec
                | Self::NameTaken
                | Self::NetworkLost
                | Self::NotAllowed
                | Self::NodeNotResponding
                | Self::PodNotRemoved
                | Self::RunnerFailed
                | Self::StorageFailed
                | Self::StorageFull
                | Self::TemplateError
                | Self::TpmLost
                | Self::WatchFailed
        )
    }

    /// The table of all reasons in the documentation, as Markdown.
    pub fn markdown() -> String {
        let rows = Self::ALL.iter().map(|reason| {
            let effect = match reason.effect() {
                Effect::Fine => "",
                Effect::Notice => "event",
                Effect::Passing => "ends by itself",
                Effect::Warning => "warning",
            };
            format!("| {reason} | {} | {effect} | {} |\n", reason.uses(), reason.meaning())
        });
        format!("| reason | condition or event | | meaning |\n|---|---|---|---|\n{}", rows.collect::<String>())
    }
}

/// An event about an object, before it has a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened. Its [`Effect`] says whether the event is a warning.
    pub reason: Reason,
    /// A sentence for people.
    pub note: String,
    /// What the manager did or tried, in a word.
    pub action: &'static str,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Reason {
    /// A reason of another version becomes [`Reason::Unknown`], because a status that another program wrote must not make the VM
    /// unreadable.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(Self::parse(&name).unwrap_or(Self::Unknown))
    }
}

impl JsonSchema for Reason {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Reason".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_found_by_its_name_and_says_where_it_is_used() {
        assert!(Reason::ALL.len() > 50);
        for reason in Reason::ALL {
            assert_eq!(Reason::parse(reason.as_str()), Some(*reason));
            assert!(reason.meaning().ends_with('.') && !reason.uses().is_empty(), "{reason}");
        }
        assert_eq!(Reason::parse("SomethingElse"), None);
        assert_eq!(serde_json::from_str::<Reason>("\"SomethingElse\"").unwrap(), Reason::Unknown);
    }

    #[test]
    fn every_warning_of_ready_and_storage_ready_causes_an_event() {
        let is_warning = |reason: &&Reason| reason.effect() == Effect::Warning;
        let conditions =
            |reason: &&Reason| ["Ready=", "StorageReady="].iter().any(|type_| reason.uses().contains(type_));
        let warnings: Vec<_> = Reason::ALL.iter().filter(is_warning).filter(conditions).collect();
        assert!(warnings.len() > 15);
        assert_eq!(warnings.iter().find(|reason| !reason.uses().contains("event")), None);
    }
}
