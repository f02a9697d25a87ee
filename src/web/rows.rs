//! What pages show of a VM: facts for the templates, without a word of a language.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use super::{
    retention::kept_until,
    rights::{assigned_pool, console_user, may_open},
    store::Store,
};
use crate::{
    actions::{
        Decision,
        display::has_display,
        power::{Command, decide},
    },
    api::{
        PowerState, VirtualMachine,
        conditions::{self, CONSOLE_CONNECTED, READY},
        status::{Phase, whole_seconds},
    },
    people::{Person, Right, Rights},
};

/// A VM on a page.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row<'a> {
    /// `NAMESPACE/NAME`.
    pub id: String,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// One of the phases, or whatever a former manager wrote.
    pub phase: &'a str,
    /// How the phase is shown: `good`, `busy`, `bad`, `off` or `odd`.
    pub tone: &'static str,
    /// What it waits for, or why it is not as its spec wants it.
    pub waits: Option<&'a str>,
    /// How many changes it gets at its next start.
    pub pending: usize,
    /// The CPUs of the guest, or those that the spec wants.
    pub cpus: u32,
    /// The memory of the guest, or that which the spec wants.
    pub ram: String,
    /// The most CPUs that it can get.
    pub most_cpus: u32,
    /// The most memory that it can get.
    pub most_ram: String,
    /// Its node.
    pub node: Option<&'a str>,
    /// Its addresses.
    pub addresses: Vec<&'a str>,
    /// Whether somebody is at the console.
    pub is_console_used: bool,
    /// Who is at the console, or whom it was opened for last.
    pub console_user: Option<&'a str>,
    /// The pool that it was assigned from.
    pub pool: Option<&'a str>,
    /// To whom it is assigned.
    pub assignee: Option<&'a str>,
    /// Whether the person has it from the pool.
    pub is_own: bool,
    /// Until when it is kept for whoever has it.
    pub kept_until: Option<String>,
    /// What the person can do with it now, as the last part of the action's path.
    pub actions: Vec<&'static str>,
    /// Whether the person can open the console now.
    pub can_open_console: bool,
    /// Whether the person can get a connection file for a viewer now.
    pub can_get_file: bool,
    /// Why she can't although the guest runs: `none`, `used` or `login`.
    pub console_waits: Option<&'static str>,
}

/// An action of a person on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Start it.
    Start,
    /// Shut its guest down.
    Stop,
    /// Shut its guest down and start it again. Only administrators may.
    Restart,
    /// Reset it.
    Reset,
    /// Let its guest stand still. Only administrators may.
    Pause,
    /// Let its guest go on. Only administrators may.
    Resume,
}

impl Act {
    /// All of them, in the order of the buttons.
    pub const ALL: [Self; 6] = [Self::Start, Self::Resume, Self::Stop, Self::Restart, Self::Reset, Self::Pause];

    /// The last part of its path.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Restart => "restart",
            Self::Reset => "reset",
            Self::Pause => "pause",
            Self::Resume => "resume",
        }
    }

    /// What [`decide`] decides.
    pub const fn command(self) -> Command {
        match self {
            Self::Start => Command::Start { until: None },
            Self::Stop => Command::Stop { force: false, until: None },
            Self::Restart => Command::Restart,
            Self::Reset => Command::Reset,
            Self::Pause => Command::Pause,
            Self::Resume => Command::Resume,
        }
    }

    /// Whether a person with these rights may do it.
    pub fn is_allowed(self, rights: &Rights, is_administrator: bool) -> bool {
        match self {
            Self::Start => rights.contains(Right::Start),
            Self::Stop => rights.contains(Right::Stop),
            Self::Restart | Self::Pause | Self::Resume => is_administrator,
            Self::Reset => rights.contains(Right::Reset),
        }
    }
}

/// Whom a VM is shown to.
#[derive(Clone, Copy)]
pub(super) struct Onlooker<'a> {
    /// The person.
    pub person: &'a Person,
    /// What she may do with this VM.
    pub rights: &'a Rights,
    /// Whether she may do what only administrators may.
    pub is_administrator: bool,
}

impl<'a> Row<'a> {
    /// The VM as that person sees it.
    pub fn of(vm: &'a VirtualMachine, onlooker: Onlooker<'_>, store: &Store, now: Timestamp) -> Self {
        let Onlooker { person, rights, is_administrator } = onlooker;
        let (namespace, name) =
            (vm.metadata.namespace.as_deref().unwrap_or_default(), vm.metadata.name.as_deref().unwrap_or_default());
        let status = vm.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or(Phase::Pending.as_str());
        let is_running = vm.runs();
        let is_open = is_running && may_open(person, rights, namespace, vm, store);
        let has_relay = status.and_then(|status| status.runner.relay_port).is_some_and(|port| port > 0);
        let is_possible = |act: Act| matches!(decide(vm, act.command(), None, true, now), Ok(Decision::Write { .. }));
        let acts = Act::ALL.into_iter().filter(|act| act.is_allowed(rights, is_administrator) && is_possible(*act));
        let assignment = status.and_then(|status| status.pools.assignment.as_ref());
        let is_console_used = status.is_some_and(|status| conditions::is_true(&status.conditions, CONSOLE_CONNECTED));
        let can_open_console = has_relay && is_open;
        let console_waits = match () {
            () if !is_running || can_open_console || !rights.contains(Right::AccessConsole) => None,
            () if !has_relay => Some("none"),
            () if is_console_used && console_user(vm) != Some(person.user.as_str()) => Some("used"),
            () => Some("login"),
        };
        Self {
            id: format!("{namespace}/{name}"),
            namespace,
            name,
            phase,
            tone: tone(phase),
            waits: waits(vm, phase),
            pending: status.map_or(0, |status| status.pending_changes.len()),
            cpus: cpus(vm),
            ram: ram(vm),
            most_cpus: vm.spec.vm.most_cpus(),
            most_ram: vm.spec.vm.maximum_ram.to_string(),
            node: status.and_then(|status| status.node_name.as_deref()),
            addresses: status
                .and_then(|status| status.addresses.as_ref())
                .map(|addresses| addresses.iter().map(|address| address.address.as_str()).collect())
                .unwrap_or_default(),
            is_console_used,
            console_user: console_user(vm),
            pool: assignment.and_then(|assignment| assignment.pool.as_deref()),
            assignee: assignment.and_then(|assignment| assignment.user.as_deref()),
            is_own: assigned_pool(person, vm).is_some(),
            kept_until: kept_until(vm, store, now).map(whole_seconds),
            actions: acts.map(Act::path).collect(),
            can_open_console,
            console_waits,
            can_get_file: is_open && has_display(vm),
        }
    }
}

/// The CPUs of the guest; those that the spec wants, if it does not run.
pub(super) fn cpus(vm: &VirtualMachine) -> u32 {
    vm.status.as_ref().and_then(|status| status.runner.cpus).filter(|_| vm.runs()).unwrap_or_else(|| vm.spec.vm.cpus())
}

/// The memory of the guest; that which the spec wants, if it does not run.
pub(super) fn ram(vm: &VirtualMachine) -> String {
    let of_guest = vm.status.as_ref().and_then(|status| status.runner.ram.clone()).filter(|_| vm.runs());
    of_guest.unwrap_or_else(|| vm.spec.vm.ram().to_string())
}

fn tone(phase: &str) -> &'static str {
    let is = |phases: &[Phase]| phases.iter().any(|known| known.as_str() == phase);
    match () {
        () if is(&[Phase::Running]) => "good",
        () if is(&[Phase::Stopped]) => "off",
        () if is(&[Phase::Failed]) => "bad",
        () if is(&[Phase::Pending, Phase::Starting, Phase::Stopping]) => "busy",
        () => "odd",
    }
}

/// The message of Ready, if the VM is not what the spec wants.
fn waits<'a>(vm: &'a VirtualMachine, phase: &str) -> Option<&'a str> {
    let ready = conditions::find(&vm.status.as_ref()?.conditions, READY)?;
    let is_wanted = vm.spec.vm.state == PowerState::Running && phase == Phase::Running.as_str()
        || vm.spec.vm.state == PowerState::Stopped && phase == Phase::Stopped.as_str();
    let message = Some(ready.message.as_str()).filter(|message| !message.is_empty());
    message.filter(|_| ready.status != "True" && !is_wanted)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        people::rights_of_vm,
        test_support::{noon, vm},
    };

    fn condition(type_: &str, status: &str, message: &str) -> Value {
        json!({ "type": type_, "status": status, "reason": "R", "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z" })
    }

    fn seen<T>(may: &[&str], edit: impl FnOnce(&mut Value), look: impl FnOnce(&Row<'_>) -> T) -> T {
        let vm = vm(|vm| {
            vm["spec"]["permissions"] = json!([{ "user": "ann", "may": may }]);
            edit(vm);
        });
        let person = Person { user: "ann".into(), ..Person::default() };
        let rights = rights_of_vm(&person, &vm.spec);
        let onlooker = Onlooker { person: &person, rights: &rights, is_administrator: may == ["*"] };
        look(&Row::of(&vm, onlooker, &Store::new(0), noon()))
    }

    fn running(vm: &mut Value) {
        vm["status"] = json!({
            "phase": "Running", "cpus": 1, "ram": "512Mi", "relayPort": 10443, "nodeName": "n1",
            "addresses": [{ "type": "PodIP", "address": "10.0.0.1" }],
            "conditions": [condition("Running", "True", ""), condition("Ready", "True", "")],
        });
    }

    #[test]
    fn the_actions_are_those_that_are_allowed_and_change_something() {
        let actions = |may: &[&str], edit: &dyn Fn(&mut Value)| seen(may, edit, |row| row.actions.clone());
        let stopped = |vm: &mut Value| {
            vm["spec"]["vm"]["state"] = json!("Stopped");
            vm["status"] = json!({ "phase": "Stopped" });
        };
        assert_eq!(actions(&["*"], &running), ["stop", "restart", "reset", "pause"]);
        let paused = |vm: &mut Value| {
            running(vm);
            vm["spec"]["vm"]["paused"] = json!(true);
        };
        assert_eq!(actions(&["*"], &paused), ["resume", "stop", "restart", "reset"]);
        assert_eq!(actions(&["*"], &stopped), ["start"]);
        assert_eq!(actions(&["start", "reset"], &running), ["reset"]);
        assert_eq!(actions(&["stop"], &running), ["stop"], "only administrators restart");
        assert!(actions(&["accessConsole"], &running).is_empty());
        assert!(
            actions(&["*"], &|vm| {
                running(vm);
                vm["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            })
            .is_empty()
        );
    }

    #[test]
    fn the_console_of_a_guest_that_runs() {
        assert!(seen(&["accessConsole"], running, |row| row.can_open_console && row.can_get_file));
        assert!(!seen(&["start", "stop", "reset"], running, |row| row.can_get_file));
        let without = |vm: &mut Value| {
            running(vm);
            vm["spec"]["vm"]["display"] = json!({ "spice": { "port": 0 } });
        };
        assert!(!seen(&["*"], without, |row| row.can_get_file), "it has no display for viewers");
        assert!(!seen(&["start", "stop", "reset"], running, |row| row.can_open_console));
        assert!(!seen(
            &["*"],
            |vm| {
                running(vm);
                vm["status"]["relayPort"] = json!(0);
            },
            |row| row.can_open_console
        ));
        assert!(!seen(
            &["*"],
            |vm| {
                running(vm);
                vm["status"]["conditions"] = json!([]);
            },
            |row| row.can_open_console
        ));
    }

    #[test]
    fn what_is_shown() {
        seen(&["*"], running, |row| {
            assert_eq!((row.id.as_str(), row.phase, row.tone, row.waits), ("orchard/apple", "Running", "good", None));
            assert_eq!(
                (row.cpus, row.ram.as_str(), row.node, row.addresses.as_slice()),
                (1, "512Mi", Some("n1"), ["10.0.0.1"].as_slice())
            );
        });
        let starting = |vm: &mut Value| {
            vm["status"] =
                json!({ "phase": "Starting", "conditions": [condition("Ready", "False", "no node has KVM")] })
        };
        seen(&["*"], starting, |row| assert_eq!((row.tone, row.waits, row.cpus), ("busy", Some("no node has KVM"), 2)));
        seen(&["*"], |_| {}, |row| assert_eq!((row.phase, row.tone), ("Pending", "busy")));
        for phase in Phase::ALL {
            assert!(["good", "busy", "bad", "off", "odd"].contains(&tone(phase.as_str())));
        }
    }
}
