//! Notes what people do: a line in the log, and an event about the VM.

use std::net::IpAddr;

use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tracing::{info, warn};

use super::{passwords::Attempt, rows::Act};
use crate::{api::VirtualMachine, process::ErrorChain, relay::Wish};

/// The program's name in events.
const REPORTER: &str = "vm-operator-web";
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
        }
    }
}

/// Notes what people do.
pub(super) struct Audit(Recorder);

impl Audit {
    /// Writes events with the client.
    pub fn new(client: Client, instance: Option<String>) -> Self {
        Self(Recorder::new(client, Reporter { controller: REPORTER.into(), instance }))
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
    pub async fn acted(&self, user: &str, vm: &VirtualMachine, act: Act) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, action = act.path(), "a person has acted on a VM");
        self.publish(user, vm, act.reason()).await;
    }

    async fn publish(&self, user: &str, vm: &VirtualMachine, reason: &str) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        let event = Event {
            type_: EventType::Normal,
            reason: reason.into(),
            note: Some(format!(
                "{} asked for it in the web interface",
                user.chars().take(LONGEST_USER).collect::<String>()
            )),
            action: reason.into(),
            secondary: None,
        };
        if let Err(error) = self.0.publish(&event, &vm.object_ref(&())).await {
            warn!(namespace, vm = name, error = %ErrorChain(&error), "the web interface could not write an event");
        }
    }

    /// A person has connected to a VM's console.
    pub fn opened(&self, user: &str, vm: &VirtualMachine, wish: Wish) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, ?wish, "a person has opened a console");
    }

    /// A person has got a connection file.
    pub async fn got_connection(&self, user: &str, vm: &VirtualMachine) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, "a person has got a connection file");
        self.publish(user, vm, "WebConnection").await;
    }

    /// What a person wanted to do to a VM was not done.
    pub fn refused(&self, user: &str, vm: &VirtualMachine, act: Act, why: &str) {
        let (namespace, name) = (vm.metadata.namespace.as_deref(), vm.metadata.name.as_deref());
        info!(user, namespace, vm = name, action = act.path(), why, "an action of a person on a VM was refused");
    }
}
