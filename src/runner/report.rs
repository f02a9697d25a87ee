//! The VM's status, as far as the runner knows it: derived from what the agent has seen (pure), and applied when it changes.
//!
//! Server-side apply by the field manager `vm-runner` owns exactly what it sends, and removes what it does not send any more;
//! so each report is whole. Conditions are a map by type, so the manager's stay untouched.

use std::time::Duration;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use tracing::{info, warn};

use super::{
    files::{End, MachineState, Phase},
    login::Login,
    qmp::Viewer,
};
use crate::{
    api::{
        Identity, PendingChange, Reason, VirtualMachine, VirtualMachineStatus,
        conditions::{self, NewCondition, with_times},
    },
    object::FORCE_STOP_ANNOTATION,
    process::ErrorChain,
};

/// The field manager.
const MANAGER: &str = "vm-runner";
/// The first and the longest pause after an attempt that failed.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// So many reports are written at once, then one in [`SPACING`]: what they tell may be what a guest wants them to.
const AT_ONCE: u32 = 10;
const SPACING: Duration = Duration::from_secs(1);

/// A balloon that is blown up tells of itself each second; its size is worth a write when it stays.
const SETTLE: Duration = Duration::from_secs(3);

/// What the agent has seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// The machine's own words; `None`: it was not started yet.
    pub machine: Option<MachineState>,
    /// Whether the guest executes; `None`: not known.
    pub running: Option<bool>,
    /// CPUs.
    pub cpus: u32,
    /// Memory in bytes.
    pub ram: u64,
    /// What the guest's agent told of the operating system.
    pub os_info: Option<Value>,
    /// The login agent and its user.
    pub login: Login,
    /// Who looks at the display.
    pub viewers: Vec<Viewer>,
    /// How often this agent has set the display's password.
    pub password_changes: u64,
    /// When the password that was set last ends.
    pub password_expiry: Option<String>,
    /// The counter of the last reset.
    pub reset_counter: Option<u64>,
    /// What waits for the next start.
    pub pending: Vec<PendingChange>,
    /// The UID of the resource: a new one must be told everything anew.
    pub resource_uid: Option<String>,
}

/// The part of the status that the runner owns, without times.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    conditions: Vec<NewCondition>,
    cpus: u32,
    ram: u64,
    accelerator: Option<String>,
    os_info: Option<Value>,
    logged_in_user: Option<String>,
    console_client: Option<String>,
    password_changes: u64,
    password_expiry: Option<String>,
    identity: Option<Identity>,
    reset_counter: Option<u64>,
    pending: Vec<PendingChange>,
    resource_uid: Option<String>,
}

/// Derives the status; `None`: there is nothing to tell yet.
pub fn report(seen: &Seen) -> Option<Report> {
    let machine = seen.machine.as_ref()?;
    let running = running(machine, seen.running)?;
    let is_running = running.status || running.reason == Reason::Paused;
    let of_guest = |type_, (status, reason, message): (bool, &str, String)| {
        let (status, reason, message) = if is_running {
            (status, reason, message)
        } else {
            (false, "NotRunning", "The machine does not run.".into())
        };
        NewCondition { type_, status, reason: Reason::parse(reason).unwrap_or(Reason::Unknown), message }
    };
    let (agent, user) = login(&seen.login);
    let viewer = seen.viewers.first().filter(|_| is_running);
    Some(Report {
        conditions: vec![
            running,
            of_guest(conditions::BOOTED, booted(seen.os_info.as_ref())),
            of_guest(conditions::VMOP_AGENT_CONNECTED, agent),
            of_guest(conditions::USER_LOGGED_IN, user),
            of_guest(conditions::CONSOLE_CONNECTED, console(viewer)),
        ],
        logged_in_user: seen.login.user.clone().filter(|_| is_running),
        console_client: viewer.map(|viewer| viewer.host.clone()),
        password_changes: seen.password_changes,
        password_expiry: seen.password_expiry.clone(),
        cpus: if is_running { seen.cpus } else { 0 },
        ram: if is_running { seen.ram } else { 0 },
        accelerator: Some(machine.accelerator.clone()).filter(|name| !name.is_empty()),
        os_info: seen.os_info.clone().filter(|_| is_running),
        identity: Some(machine).filter(|machine| !machine.uuid.is_empty()).map(|machine| Identity {
            uuid: Some(machine.uuid.clone()),
            macs: machine.macs.clone(),
            machine_type: Some(machine.machine_type.clone()),
        }),
        reset_counter: seen.reset_counter,
        pending: if is_running { seen.pending.clone() } else { Vec::new() },
        resource_uid: seen.resource_uid.clone(),
    })
}

/// Status, reason and message of a condition of the guest that runs.
type OfGuest = (bool, &'static str, String);

fn booted(os_info: Option<&Value>) -> OfGuest {
    match os_info {
        Some(info) => {
            let name = info.get("pretty-name").and_then(Value::as_str).unwrap_or("an operating system");
            (true, "GuestAgentAnswered", format!("The guest agent answers; it runs on {name}."))
        }
        None => (false, "NoGuestAgent", "The guest agent has not answered yet.".into()),
    }
}

/// The agent, and its user.
fn login(login: &Login) -> (OfGuest, OfGuest) {
    let nobody = "No user was logged in";
    if !login.connected {
        let silent = "The login agent has not answered yet.".to_owned();
        return ((false, "NoLoginAgent", silent), (false, "NoLoginAgent", format!("{nobody}.")));
    }
    let refused = login.refusal.as_deref().map(|words| format!("the login agent refused: {}", end_of(words, 4000)));
    let user = match (&login.user, refused) {
        (Some(user), None) => (true, "LoggedIn", format!("{user} was logged in.")),
        // Who was there before still is.
        (Some(user), Some(refused)) => (true, "Refused", format!("{user} was logged in; then {refused}")),
        (None, Some(refused)) => (false, "Refused", format!("{nobody}: {refused}")),
        (None, None) => (false, "NobodyLoggedIn", format!("{nobody}.")),
    };
    ((true, "LoginAgentAnswered", "The login agent answers.".into()), user)
}

fn console(viewer: Option<&Viewer>) -> OfGuest {
    match viewer {
        Some(Viewer { host, .. }) => (true, "Connected", format!("The display is shown at {host}.")),
        None => (false, "NobodyConnected", "Nobody looks at the display.".into()),
    }
}

fn running(machine: &MachineState, executes: Option<bool>) -> Option<NewCondition> {
    let condition = |status: bool, reason: &str, message: String| {
        Some(NewCondition {
            type_: conditions::RUNNING,
            status,
            reason: Reason::parse(reason).unwrap_or(Reason::Unknown),
            message,
        })
    };
    let what = || {
        let MachineState { machine_type, accelerator, accelerator_reason, .. } = machine;
        format!("QEMU runs a {machine_type} with {accelerator} ({accelerator_reason}).")
    };
    match &machine.phase {
        Phase::Starting => condition(false, "Starting", "QEMU is being started.".into()),
        Phase::Running => match executes {
            // The agent is about to find out. A new agent must not report a running guest as stopped meanwhile.
            None => None,
            Some(true) => condition(true, "Started", what()),
            Some(false) => condition(false, "Paused", format!("The guest is paused. {}", what())),
        },
        Phase::Ended { reason, code, last_words, held: _ } => {
            let message = match reason {
                End::GuestShutdown => "The guest has shut down.".into(),
                End::PoweredDown => "The guest has shut down, as it was asked to.".into(),
                End::PoweredOff => "The guest did not shut down in time and was powered off.".into(),
                End::QemuFailed => {
                    let code = code.map_or_else(String::new, |code| format!(" (exit code {code})"));
                    // A condition's message has at most 32768 characters; the last ones say what went wrong.
                    format!("QEMU failed{code}: {}", end_of(last_words, 4000))
                }
            };
            condition(false, &reason.to_string(), message)
        }
    }
}

fn end_of(text: &str, most: usize) -> &str {
    let from = text.len().saturating_sub(most);
    (from..text.len()).find_map(|at| text.get(at..)).unwrap_or_default()
}

fn only_ram_differs(report: &Report, last: Option<&Report>) -> bool {
    last.is_some_and(|last| Report { ram: last.ram, ..report.clone() } == *last)
}

/// What the resource's status says without this agent.
#[derive(Clone, Debug, Default)]
struct Before {
    /// Conditions, whose times may stay.
    conditions: Vec<Condition>,
    /// How often the display's password was set by the agents before this one.
    password_serial: i64,
}

/// The object to apply.
fn document(report: &Report, name: &str, pod_uid: Option<&str>, before: &Before, now: Timestamp) -> Value {
    let Report {
        conditions,
        cpus,
        ram,
        accelerator,
        os_info,
        logged_in_user,
        console_client,
        password_changes,
        password_expiry,
        identity,
        reset_counter,
        pending,
        resource_uid: _,
    } = report;
    let mut status = json!({
        "conditions": with_times(conditions.clone(), &before.conditions, None, now),
        "cpus": cpus,
        "ram": ram.to_string(),
        "runnerVersion": env!("CARGO_PKG_VERSION"),
        "displayPasswordSerial": before.password_serial.saturating_add_unsigned(*password_changes),
    });
    if let Some(user) = logged_in_user {
        status["loggedInUser"] = json!(user);
    }
    if let Some(expiry) = password_expiry {
        status["displayPasswordExpiry"] = json!(expiry);
    }
    if let Some(client) = console_client {
        status["consoleClient"] = json!(client);
    }
    if let Some(accelerator) = accelerator {
        status["accelerator"] = json!(accelerator);
    }
    if let Some(identity) = identity {
        status["identity"] = json!(identity);
    }
    if let Some(counter) = reset_counter {
        status["resetCount"] = json!(counter);
    }
    if !pending.is_empty() {
        status["pendingChanges"] = json!(pending);
    }
    if let Some(uid) = pod_uid {
        status["podUid"] = json!(uid);
    }
    if let Some(os_info) = os_info {
        status["osinfo"] = os_info.clone();
    }
    json!({
        "apiVersion": format!("{}/v1", crate::api::GROUP),
        "kind": "VirtualMachine",
        "metadata": { "name": name },
        "status": status,
    })
}

/// The VM's resource, as far as its runner has to do with it.
#[derive(Clone, Debug)]
pub struct Resource {
    /// Without: reports are only logged.
    api: Option<Api<VirtualMachine>>,
    name: String,
    pod_uid: Option<String>,
}

impl Resource {
    /// Of the VM of that name, for the Pod of that UID. Without a client there is nobody to report to.
    pub fn new(client: Option<Client>, namespace: &str, name: &str, pod_uid: Option<String>) -> Self {
        Self { api: client.map(|client| Api::namespaced(client, namespace)), name: name.into(), pod_uid }
    }

    /// Whether a person wants this Pod to end without its guest. The manager shortens the Pod's grace period for that, but
    /// a kubelet that waits already goes on waiting as long as before (<https://github.com/kubernetes/kubernetes/issues/83916>),
    /// nor does it refresh the files of a Pod that ends. So this is the one thing that a runner asks.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub async fn is_forced(&self) -> Result<bool, kube::Error> {
        let (Some(api), Some(uid)) = (&self.api, &self.pod_uid) else { return Ok(false) };
        Ok(api.get_status(&self.name).await?.annotations().get(FORCE_STOP_ANNOTATION) == Some(uid))
    }
}

/// Writes the status of one VM.
pub struct Reporter(Resource);

impl Reporter {
    /// For that resource.
    pub fn new(resource: Resource) -> Self {
        Self(resource)
    }

    /// Writes each report that differs from the last, until the sender is gone and the last report is written.
    pub async fn follow(self, mut reports: watch::Receiver<Option<Report>>) {
        let mut written = None;
        let mut before = None;
        let mut pause = PAUSES.0;
        // When nothing would be left of what was written at once.
        let mut free_at = Instant::now();
        loop {
            let report = reports.borrow_and_update().clone();
            let mut open = true;
            if report == written {
                open = reports.changed().await.is_ok();
            } else if let Some(new) = &report {
                if only_ram_differs(new, written.as_ref())
                    && let Ok(Ok(())) = timeout(SETTLE, reports.changed()).await
                {
                    continue;
                }
                match self.write(new, written.as_ref(), &mut before).await {
                    Ok(()) => {
                        (written, pause) = (report, PAUSES.0);
                        let now = Instant::now();
                        free_at = free_at.max(now) + SPACING;
                        let wait_until = free_at - SPACING * AT_ONCE;
                        // What comes meanwhile is looked at afterwards; with the sender gone the last one is due at once.
                        while let Ok(Ok(())) = timeout_at(wait_until, reports.changed()).await {}
                    }
                    Err(error) => {
                        warn!(error = %ErrorChain(&error), retry_s = pause.as_secs(), "cannot write the VM's status");
                        // A newer report is worth an attempt at once, but it must not make a storm of them.
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(PAUSES.1);
                    }
                }
            }
            if !open && *reports.borrow() == written {
                return;
            }
        }
    }

    async fn write(
        &self,
        report: &Report,
        last: Option<&Report>,
        before: &mut Option<Before>,
    ) -> Result<(), kube::Error> {
        for condition in &report.conditions {
            if last.is_none_or(|last| !last.conditions.contains(condition)) {
                let NewCondition { type_, status, reason, message } = condition;
                info!(condition = type_, status, reason = reason.as_str(), "{message}");
            }
        }
        let Resource { api, name, pod_uid } = &self.0;
        let Some(api) = api else { return Ok(()) };
        if last.is_some_and(|last| last.resource_uid != report.resource_uid) {
            *before = None;
        }
        let before = match before {
            Some(before) => before,
            None => {
                let status = api.get_status(name).await?.status.unwrap_or_default();
                let password_serial = status.display_password_serial.unwrap_or_default();
                let mut conditions = status.conditions;
                if last.is_none() {
                    // What an earlier runner has said of its guest does not go on, even if it is said again.
                    conditions.retain(|condition| condition.type_ != conditions::RUNNING);
                }
                before.insert(Before { conditions, password_serial })
            }
        };
        let document = document(report, name, pod_uid.as_deref(), before, Timestamp::now());
        let params = PatchParams::apply(MANAGER).force();
        let vm = api.patch_status(name, &params, &Patch::Apply(&document)).await?;
        let VirtualMachineStatus { conditions: written, .. } = vm.status.unwrap_or_default();
        before.conditions = written;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(phase: Phase) -> Option<MachineState> {
        Some(MachineState {
            pid: 1,
            machine_type: "pc-q35-7.2".into(),
            accelerator: "tcg".into(),
            accelerator_reason: "asked for".into(),
            uuid: "u-1".into(),
            macs: vec!["52:54:00:00:00:01".into()],
            started_with: None,
            phase,
        })
    }

    fn ended(reason: End, last_words: &str) -> Option<MachineState> {
        machine(Phase::Ended { reason, code: Some(1), last_words: last_words.into(), held: false })
    }

    #[test]
    fn what_is_told_of_a_machine() {
        let up =
            Seen { machine: machine(Phase::Running), running: Some(true), cpus: 2, ram: 1 << 30, ..Seen::default() };
        let pending = PendingChange {
            path: "config.yaml/vm.maximumCpus".into(),
            current: Some(json!(2)),
            wanted: Some(json!(4)),
            reason: "why".into(),
        };
        let login = |lines: &[&str]| {
            let mut login = Login::default();
            for line in lines {
                login.hear(line);
                login.next(Some("alice"));
            }
            login
        };
        let viewer = Viewer { host: "10.0.0.7".into(), port: "40000".into(), channel_type: None };
        let before = Before { conditions: vec![], password_serial: 4 };
        let stories = [
            ("not started", Seen::default()),
            ("starting", Seen { machine: machine(Phase::Starting), ..Seen::default() }),
            ("found by a new agent", Seen { running: None, ..up.clone() }),
            ("up", up.clone()),
            ("booted", Seen { os_info: Some(json!({ "pretty-name": "Debian 12" })), ..up.clone() }),
            ("reset, with a change that waits", Seen { reset_counter: Some(4), pending: vec![pending], ..up.clone() }),
            ("with a login agent", Seen { login: login(&["220 hello"]), ..up.clone() }),
            ("refused", Seen { login: login(&["220 hello", "501 who?"]), ..up.clone() }),
            (
                "used",
                Seen {
                    login: login(&["220 hello", "201 done"]),
                    viewers: vec![viewer.clone()],
                    password_changes: 2,
                    password_expiry: Some("never".into()),
                    ..up.clone()
                },
            ),
            ("paused", Seen { running: Some(false), ..up.clone() }),
            ("ended by the guest", Seen { machine: ended(End::GuestShutdown, ""), ..up.clone() }),
            ("ended as asked", Seen { machine: ended(End::PoweredDown, ""), ..up.clone() }),
            ("powered off", Seen { machine: ended(End::PoweredOff, ""), ..up.clone() }),
            (
                "failed",
                Seen {
                    machine: ended(End::QemuFailed, "qemu: no"),
                    os_info: Some(json!({})),
                    viewers: vec![viewer],
                    ..up
                },
            ),
        ];
        let told = stories.map(|(story, seen)| {
            let status = report(&seen).map(|report| {
                let mut document = document(&report, "vm1", Some("pod-uid"), &before, Timestamp::UNIX_EPOCH);
                document["status"]["runnerVersion"] = "VERSION".into();
                document["status"].take()
            });
            (story, status)
        });
        insta::assert_yaml_snapshot!(told);
    }

    #[test]
    fn last_words_are_cut_between_characters() {
        assert_eq!(end_of("äöü", 3), "ü");
        assert_eq!(end_of("abc", 9), "abc");
    }
}
