//! Notes what people do: a line in the log, and an event about the VM.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Reporter},
};
use tracing::{info, warn};

use super::{passwords::Attempt, rows::Act};
use crate::{
    api::VirtualMachine,
    client::events::EventRecorder,
    relay::{Console, Wish},
};

/// The program's name in events.
pub(super) const REPORTER: &str = "vm-operator-web";
/// The longest name of a user in an event, in characters; a note has 1024 bytes at most.
const LONGEST_USER: usize = 128;

impl Act {
    /// The reason of its event.
    pub(super) const fn reason(self) -> &'static str {
        match self {
            Self::Start => "WebStarted",
            Self::Stop => "WebStopped",
            Self::Restart => "WebRestarted",
            Self::Reset => "WebReset",
            Self::Pause => "WebPaused",
            Self::Resume => "WebResumed",
        }
    }
}

/// The beginning of a user's name, for an event.
fn short(user: &str) -> String {
    user.chars().take(LONGEST_USER).collect()
}

/// A user, as an event names her beside its text.
pub(super) fn person(user: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("rbac.authorization.k8s.io/v1".into()),
        kind: Some("User".into()),
        name: Some(short(user)),
        ..ObjectReference::default()
    }
}

/// Whether that is the user.
pub(super) fn is_of(reference: &ObjectReference, user: &str) -> bool {
    *reference == person(user)
}

/// Notes what people do.
pub(super) struct Audit(EventRecorder);

impl Audit {
    /// Writes events with the client.
    pub fn new(client: Client, instance: Option<String>) -> Self {
        Self(EventRecorder::start(client, Reporter { controller: REPORTER.into(), instance }))
    }

    /// Somebody has tried to sign in. `user`: the name that was typed, if a user has it.
    pub fn attempt(&self, user: Option<&str>, from: IpAddr, attempt: Attempt) {
        let user = user.unwrap_or("(unknown)");
        match attempt {
            Attempt::Right => info!(user, %from, "a person has signed in"),
            Attempt::Wrong => warn!(user, %from, "a person could not sign in"),
            Attempt::TooMany => warn!(user, %from, "too many attempts to sign in"),
        }
    }

    /// A person has signed in with a provider of OpenID Connect.
    pub fn signed_in_by(&self, provider: &str, user: &str, from: IpAddr) {
        info!(user, provider, %from, "a person has signed in");
    }

    /// Somebody who came from a provider of OpenID Connect was not let in.
    pub fn not_signed_in_by(&self, provider: &str, from: IpAddr, why: &str) {
        warn!(provider, %from, why, "a person could not sign in");
    }

    /// Somebody has signed out.
    pub fn signed_out(&self, user: &str) {
        info!(user, "a person has signed out");
    }

    /// A person has done something to a VM.
    pub fn acted(&self, user: &str, vm: &VirtualMachine, act: Act) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, action = act.path(), "a person has acted on a VM");
        let note = format!("{} asked for it in the web interface", short(user));
        self.event(user, vm, act.reason(), note);
    }

    /// An administrator has changed what a VM has. `what`: what is different then.
    pub fn resized(&self, user: &str, vm: &VirtualMachine, what: &str) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, what, "a person has changed a VM");
        self.event(user, vm, "WebResized", format!("{} asked for {what} in the web interface", short(user)));
    }

    /// An administrator has created a VM.
    pub fn created(&self, user: &str, vm: &VirtualMachine) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, "a person has created a VM");
        self.event(user, vm, "WebCreated", format!("{} has created it in the web interface", short(user)));
    }

    /// A person has got a VM of a pool.
    pub fn assigned(&self, user: &str, vm: &VirtualMachine, pool: &str) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, pool, "a person has got a VM of a pool");
        let note = format!("{} has got it from the pool {pool} in the web interface", short(user));
        self.event(user, vm, "WebAssigned", note);
    }

    /// A person has given a VM of a pool back, or an administrator has taken it.
    pub fn released(&self, user: &str, vm: &VirtualMachine, from: &str) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, from, "a person has released a VM of a pool");
        let reason = if user == from { "WebReleased" } else { "WebTakenBack" };
        let note = format!("{} has released it in the web interface ({} had it)", short(user), short(from));
        self.event(user, vm, reason, note);
    }

    /// Writes what is left, before the program ends.
    pub async fn flush(&self) {
        self.0.flush().await;
    }

    fn event(&self, user: &str, vm: &VirtualMachine, reason: &str, note: String) {
        let event = Event {
            type_: EventType::Normal,
            reason: reason.into(),
            note: Some(note),
            action: reason.into(),
            secondary: Some(person(user)),
        };
        self.0.publish(event, vm.object_ref(&()));
    }

    /// A person has connected to a VM's console.
    pub fn opened(&self, user: &str, vm: &VirtualMachine, console: Console, wish: Wish) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, ?console, ?wish, "a person has opened a console");
    }

    /// A person has got a connection file.
    pub fn got_connection(&self, user: &str, vm: &VirtualMachine) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, "a person has got a connection file");
        let note = format!("{} has got a connection file in the web interface", short(user));
        self.event(user, vm, "WebConnection", note);
    }

    /// What a person wanted to do to a VM was not done.
    pub fn refused(&self, user: &str, vm: &VirtualMachine, act: Act, why: &str) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, action = act.path(), why, "an action of a person on a VM was refused");
    }
}
