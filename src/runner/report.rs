//! What the runner reports of its VM, derived from what the agent has observed. Pure.

use std::collections::BTreeSet;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use serde_json::Value;

use super::{
    devices::Problem,
    login::LoginState,
    qmp::Viewer,
    relay::{RelayState, at_screen},
    state::{EndReason, MachineState, Phase},
};
use crate::{
    api::{
        Identity, PendingChange, Quantity, Reason, RunnerStatus, VmReportStatus,
        conditions::{self, NewCondition, with_times},
        report::{MOST_DEVICES, MOST_USERS},
        status::{CdIdentity, DeviceKind, DevicePhase, DeviceStatus, DiskIdentity, ListEntry, NetworkIdentity},
    },
    relay::Mode,
    render::command_line::{DeviceId, Panic, Reaction, Reactions},
    runner_config::{VmSection, at_start::Attachment},
};

/// The longest part of a message that quotes QEMU after its failure, in bytes. A condition's message may have 32768 characters.
const LONGEST_QUOTE: usize = 4000;
/// The longest part of a message that quotes the guest, a viewer, or QEMU while it runs, in bytes. A guest can cause a report each second.
const LONGEST_REMARK: usize = 500;
/// The most viewers that are kept.
const MOST_VIEWERS: usize = 100;
/// The most refused changes that a message quotes, and the most pending changes.
const MOST_REFUSED: usize = 8;
/// The most problems of devices that a message names.
const MOST_PROBLEMS: usize = 8;
const MOST_PENDING: usize = 32;
/// The longest name of a Pod's volume.
const LONGEST_VOLUME: usize = 63;
/// The longest value of a pending change in bytes as JSON. A longer one is left out; the path says what changes.
const LONGEST_VALUE: usize = 500;

/// What the agent has observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// The state that the machine role has written. `None`: QEMU was not started yet.
    pub machine: Option<MachineState>,
    /// Whether the guest executes. `None`: the agent does not know it yet.
    pub is_executing: Option<bool>,
    /// Why the guest does not execute, if it is its own fault.
    pub panic: Option<Panic>,
    /// The number of CPUs.
    pub cpus: u32,
    /// The memory in bytes.
    pub ram: u64,
    /// The guest agent's answer of `guest-get-osinfo`.
    pub os_info: Option<Value>,
    /// For how many seconds the guest stood still, if nobody could set its clock after that.
    pub clock_behind: Option<u64>,
    /// The login agent and its user.
    pub login: LoginState,
    /// The viewers that are connected to the display.
    pub viewers: Vec<Viewer>,
    /// Where the relay is, and who uses it.
    pub relay: RelayState,
    /// How often this agent has set the display's password.
    pub password_changes: u64,
    /// When the display's password expires: `now`, `never`, `+SECONDS` or Unix time.
    pub password_expiry: Option<String>,
    /// The counter of the last reset.
    pub reset_counter: Option<u64>,
    /// The counter of the last reboot, if there was one or the configuration asks for one.
    pub reboot_counter: Option<u64>,
    /// What the CD drives keep for the next start: [`cds`].
    pub cds: Vec<CdIdentity>,
    /// The changes that take effect at QEMU's next start.
    pub pending: Vec<PendingChange>,
    /// The changes that QEMU refused, each as a sentence with QEMU's words.
    pub refused: Vec<String>,
    /// The disks that have stopped the guest.
    pub devices: Vec<Problem>,
    /// The devices that QEMU has, and those of its next start.
    pub attachments: Vec<Attachment>,
    /// See [`ConfigFile::digest`](crate::runner_config::ConfigFile::digest).
    pub config_digest: Option<String>,
    /// The UID of the VirtualMachine. If it changes, the VM was deleted and created again while QEMU ran, and its new status is empty.
    pub resource_uid: Option<String>,
}

impl Observation {
    /// Takes note of a viewer of the display, unless there are too many, or it is not the viewer's main connection.
    pub fn add_viewer(&mut self, viewer: Viewer) {
        if viewer.is_main() && self.viewers.len() < MOST_VIEWERS {
            self.viewers.push(viewer);
        }
    }
}

/// The status that the runner writes, without times.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The conditions, in the order of [`conditions`].
    pub conditions: Vec<NewCondition>,
    /// See [`Observation::resource_uid`].
    pub resource_uid: Option<String>,
    /// See [`MachineState::start`].
    pub start: String,
    cpus: u32,
    ram: u64,
    accelerator: Option<String>,
    os_info: Option<Value>,
    logged_in_user: Option<String>,
    console_client: Option<String>,
    serial_users: Vec<String>,
    relay_port: Option<u16>,
    password_changes: u64,
    password_expiry: Option<String>,
    identity: Option<Identity>,
    reset_counter: Option<u64>,
    reboot_counter: Option<u64>,
    pending: Vec<PendingChange>,
    devices: Vec<DeviceStatus>,
    config_digest: Option<String>,
}

/// What the networks of QEMU keep for the next start.
fn networks(machine: &MachineState) -> Vec<NetworkIdentity> {
    let position = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
    let interfaces = machine.interfaces().enumerate();
    interfaces
        .map(|(index, (slot, section, mac))| NetworkIdentity {
            name: section.name().map(str::to_owned),
            mac: mac.clone(),
            slot,
            entry: ListEntry { position: position(index), parameters: section.parameters() },
        })
        .collect()
}

/// What the disks of QEMU keep for the next start. A disk that an own template has given a name that no claim can have keeps nothing.
fn disks(machine: &MachineState) -> Vec<DiskIdentity> {
    let disks = machine.started_with.iter().flat_map(|started| started.vm.disks());
    let mut names = BTreeSet::new();
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_name = |name: &str| (1..=LONGEST_VOLUME).contains(&name.len()) && name.bytes().all(is_letter);
    disks
        .filter_map(|(slot, disk)| Some(DiskIdentity { name: disk.volume()?.to_owned(), slot }))
        .filter(|disk| is_name(&disk.name) && disk.slot < DiskIdentity::MOST && names.insert(disk.name.clone()))
        .collect()
}

/// The devices that do not work.
fn problems(observation: &Observation, machine: &MachineState) -> Vec<Problem> {
    let lost = machine.lost.iter().copied().map(Problem::Helper);
    observation.devices.iter().cloned().chain(lost).collect()
}

/// The devices of the running guest and of its next start. An own template can give two of a kind one name: only the first one is reported.
fn devices(observation: &Observation, machine: &MachineState) -> Vec<DeviceStatus> {
    let problems = problems(observation, machine);
    let of_pod: BTreeSet<u32> =
        machine.interfaces().filter(|(_, section, _)| section.is_pod()).map(|(slot, ..)| slot).collect();
    let status = |it: &Attachment| {
        let id = match it.kind {
            DeviceKind::Disk => Some((DeviceId::Disk(it.slot), false)),
            DeviceKind::CdDrive => Some((DeviceId::Cd(it.slot), false)),
            DeviceKind::Network => Some((DeviceId::Network(it.slot), of_pod.contains(&it.slot))),
            // Nothing of it can break.
            DeviceKind::Watchdog => None,
        };
        let is_its = |problem: &&Problem| id.is_some_and(|(id, is_of_pod)| problem.is_of(id, is_of_pod));
        let problem = problems.iter().filter(|_| it.is_attached).find(is_its);
        DeviceStatus {
            kind: it.kind,
            name: quote(&it.name, LONGEST_REMARK),
            phase: match (it.is_attached, problem) {
                (false, _) => DevicePhase::Waiting,
                (true, Some(_)) => DevicePhase::Failed,
                (true, None) => DevicePhase::Attached,
            },
            at_next_start: it.at_next_start,
            reason: problem.map(Problem::reason),
            message: problem.map(|problem| quote(&problem.message(), LONGEST_REMARK)),
        }
    };
    let mut names = BTreeSet::new();
    let all = observation.attachments.iter().map(status);
    all.filter(|device| names.insert((device.kind, device.name.clone()))).take(MOST_DEVICES as usize).collect()
}

/// What the CD drives keep for the next start: those of the configuration, also if QEMU does not have them yet, and those of QEMU that the configuration
/// does not have any more.
pub fn cds(machine: &MachineState, configuration: &VmSection) -> Vec<CdIdentity> {
    let wanted = kept_cds(configuration, false);
    let started = machine.started_with.iter().flat_map(|started| kept_cds(&started.vm, true));
    let mut slots = BTreeSet::new();
    wanted.chain(started).filter(|cd| cd.slot < CdIdentity::MOST && slots.insert(cd.slot)).collect()
}

fn kept_cds(vm: &VmSection, unused: bool) -> impl Iterator<Item = CdIdentity> {
    (0..).zip(vm.cds()).map(move |(position, (slot, cd))| CdIdentity {
        name: cd.cd_name().map(str::to_owned),
        slot,
        entry: ListEntry { position: position.min(CdIdentity::MOST - 1), parameters: cd.parameters() },
        unused,
    })
}

impl Report {
    /// Derives the status. `None`: nothing is known yet, so an earlier status stays.
    pub fn derive(observation: &Observation) -> Option<Self> {
        let machine = observation.machine.as_ref()?;
        let activity = Activity::derive(&machine.phase, observation.is_executing, observation.panic)?;
        let is_running = activity.is_running();
        Some(Self {
            conditions: all_conditions(observation, machine, activity),
            resource_uid: observation.resource_uid.clone(),
            start: machine.start.clone(),
            cpus: if is_running { observation.cpus } else { 0 },
            ram: if is_running { observation.ram } else { 0 },
            accelerator: Some(machine.accelerator.clone()).filter(|name| !name.is_empty()),
            os_info: observation.os_info.clone().filter(|_| is_running),
            logged_in_user: observation
                .login
                .user
                .as_deref()
                .filter(|_| is_running)
                .map(|user| quote(user, LONGEST_REMARK)),
            console_client: at_display(observation).filter(|_| is_running).map(|(client, _)| client),
            serial_users: if is_running { at_serial_console(observation) } else { Vec::new() },
            relay_port: observation.relay.port.filter(|_| is_running),
            password_changes: observation.password_changes,
            password_expiry: observation.password_expiry.as_deref().map(|expiry| quote(expiry, LONGEST_REMARK)),
            identity: Some(machine).filter(|machine| !machine.uuid.is_empty()).map(|machine| Identity {
                uuid: Some(machine.uuid.clone()),
                macs: machine.macs.clone(),
                networks: networks(machine),
                disks: Some(disks(machine)),
                cds: Some(observation.cds.clone()),
                machine_type: Some(machine.machine_type.clone()),
                hardware: Some(machine.hardware.clone()).filter(|hardware| !hardware.is_empty()),
            }),
            reset_counter: observation.reset_counter,
            reboot_counter: observation.reboot_counter,
            pending: if is_running { short_changes(&observation.pending) } else { Vec::new() },
            devices: if is_running { devices(observation, machine) } else { Vec::new() },
            config_digest: observation.config_digest.clone(),
        })
    }

    /// Whether the reports are the same but for the memory.
    pub fn differs_only_in_ram(&self, other: &Self) -> bool {
        Self { ram: other.ram, ..self.clone() } == *other
    }

    /// The status of the VmReport.
    pub fn status(&self, before: &StatusBefore, now: Timestamp) -> VmReportStatus {
        let Self {
            conditions,
            resource_uid: _,
            start: _,
            cpus,
            ram,
            accelerator,
            os_info,
            logged_in_user,
            console_client,
            serial_users,
            relay_port,
            password_changes,
            password_expiry,
            identity,
            reset_counter,
            reboot_counter,
            pending,
            devices,
            config_digest,
        } = self;
        let runner = RunnerStatus {
            cpus: Some(*cpus),
            ram: Some(Quantity::with_unit(*ram).to_string()),
            runner_version: Some(env!("CARGO_PKG_VERSION").into()),
            display_password_serial: Some(before.password_serial.saturating_add_unsigned(*password_changes)),
            display_password_expiry: password_expiry.clone(),
            logged_in_user: logged_in_user.clone(),
            console_client: console_client.clone(),
            serial_users: serial_users.clone(),
            relay_port: *relay_port,
            accelerator: accelerator.clone(),
            identity: identity.clone(),
            reset_count: reset_counter.map(|counter| u32::try_from(counter).unwrap_or(u32::MAX)),
            reboot_count: reboot_counter.map(|counter| u32::try_from(counter).unwrap_or(u32::MAX)),
            config_digest: config_digest.clone(),
            devices: devices.clone(),
            osinfo: os_info.clone(),
        };
        VmReportStatus {
            conditions: with_times(conditions.clone(), &before.conditions, None, now),
            pending_changes: pending.iter().cloned().map(Into::into).collect(),
            runner,
        }
    }
}

/// What the report is about.
#[derive(Clone, Debug)]
pub struct Target {
    /// The VM's name.
    pub name: String,
    /// The UID of the Pod that the runner runs in, if it knows it.
    pub pod_uid: Option<String>,
}

/// What this agent has to continue of earlier reports.
#[derive(Clone, Debug, Default)]
pub struct StatusBefore {
    /// The conditions. A condition keeps its time as long as its status stays the same.
    pub conditions: Vec<Condition>,
    /// How often earlier agents have set the display's password.
    pub password_serial: i64,
}

impl StatusBefore {
    /// The next report is about another start of QEMU, so Running gets a new time even if it is true again: between the two it may not have
    /// been reported. The manager compares the time with the end of the former container.
    pub fn begin_start(&mut self) {
        self.conditions.retain(|condition| condition.type_ != conditions::RUNNING);
    }
}

/// What QEMU and the guest do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    Starting,
    Executing,
    Paused,
    Panicked(Panic),
    Ended(EndReason),
}

impl Activity {
    /// `None`: QEMU runs, and the agent does not know yet whether the guest executes. An agent that has just started must not report a
    /// running guest as stopped.
    fn derive(phase: &Phase, is_executing: Option<bool>, panic: Option<Panic>) -> Option<Self> {
        Some(match phase {
            Phase::Starting => Self::Starting,
            Phase::Running => {
                if is_executing? {
                    Self::Executing
                } else {
                    panic.map_or(Self::Paused, Self::Panicked)
                }
            }
            Phase::Ended { reason, .. } => Self::Ended(*reason),
        })
    }

    /// Whether QEMU has a guest, which may be paused.
    fn is_running(self) -> bool {
        match self {
            Self::Executing | Self::Paused | Self::Panicked(_) => true,
            Self::Starting | Self::Ended(_) => false,
        }
    }
}

/// A condition without its type.
struct Finding {
    status: bool,
    reason: Reason,
    message: String,
}

impl Finding {
    fn new(status: bool, reason: Reason, message: impl Into<String>) -> Self {
        Self { status, reason, message: message.into() }
    }

    fn condition(self, type_: &'static str) -> NewCondition {
        NewCondition { type_, status: self.status, reason: self.reason, message: self.message }
    }
}

fn all_conditions(observation: &Observation, machine: &MachineState, activity: Activity) -> Vec<NewCondition> {
    let of_guest = |type_, finding: fn(&Observation) -> Finding| {
        let finding = if activity.is_running() {
            finding(observation)
        } else {
            Finding::new(false, Reason::NotRunning, "The VM does not run.")
        };
        finding.condition(type_)
    };
    let mut all = vec![
        running(observation, machine, activity).condition(conditions::RUNNING),
        of_guest(conditions::BOOTED, booted),
        of_guest(conditions::VMOP_AGENT_CONNECTED, login_agent),
        of_guest(conditions::USER_LOGGED_IN, logged_in),
        of_guest(conditions::CONSOLE_CONNECTED, console),
    ];
    // These conditions exist only while something is wrong.
    let problems = problems(observation, machine);
    if activity.is_running()
        && let Some(problem) = problems.first()
    {
        let messages: Vec<String> =
            problems.iter().take(MOST_PROBLEMS).map(|problem| quote(&problem.message(), LONGEST_REMARK)).collect();
        all.push(Finding::new(false, problem.reason(), messages.join(" ")).condition(conditions::DEVICES_READY));
    }
    if activity.is_running() && !observation.refused.is_empty() {
        let refused: Vec<String> =
            observation.refused.iter().take(MOST_REFUSED).map(|text| quote(text, LONGEST_REMARK)).collect();
        let refused = Finding::new(false, Reason::ChangeFailed, refused.join(" "));
        all.push(refused.condition(conditions::CHANGES_APPLIED));
    }
    all
}

fn running(observation: &Observation, machine: &MachineState, activity: Activity) -> Finding {
    let MachineState { machine_type, accelerator, accelerator_reason, phase, .. } = machine;
    let why = quote(accelerator_reason, LONGEST_REMARK);
    let qemu = format!("QEMU runs a {machine_type} with {accelerator} ({why}).");
    match activity {
        Activity::Starting => Finding::new(false, Reason::Starting, "QEMU is starting."),
        Activity::Executing => Finding::new(true, Reason::Started, format!("{qemu}{}", clock(observation))),
        Activity::Paused => Finding::new(false, Reason::Paused, format!("The guest is paused. {qemu}")),
        Activity::Panicked(panic) => Finding::new(false, Reason::GuestPanicked, panic_message(panic, machine)),
        Activity::Ended(reason) => Finding::new(false, reason.reason(), end_message(reason, phase)),
    }
}

/// That the guest's clock is behind.
fn clock(observation: &Observation) -> String {
    let Some(seconds) = observation.clock_behind else { return String::new() };
    format!(
        " The guest stood still for {seconds} s and its clock may be behind by as much, because QEMU's guest agent does not answer or could not set \
         it: set it in the guest, or reset the VM."
    )
}

fn panic_message(panic: Panic, machine: &MachineState) -> String {
    let what = match panic {
        Panic::Kernel => "The guest's kernel has panicked",
        Panic::Watchdog => "The guest has not fed its watchdog in time",
    };
    let reactions = machine.started_with.as_ref().map(|started| Reactions::of(&started.vm)).unwrap_or_default();
    let (reaction, field) = reactions.to(panic).unwrap_or((Reaction::Keep, "onPanic: keep"));
    let next = match reaction {
        Reaction::Reset => "the runner resets it; if that happens again and again, after up to 5 min",
        Reaction::End => "the runner ends QEMU",
        Reaction::Keep | Reaction::GoOn => {
            "it stays paused as it is: increase resetCount to reset it, or restart the VM"
        }
    };
    format!("{what}; {next} ({field}).")
}

fn end_message(reason: EndReason, phase: &Phase) -> String {
    match reason {
        EndReason::GuestShutdown => "The guest has shut down.".into(),
        EndReason::PoweredDown => "The guest has shut down, as the runner asked it to.".into(),
        EndReason::PoweredOff => "The guest did not shut down in time and was powered off.".into(),
        EndReason::StoppedAfterPanic => {
            "The guest has panicked or has not fed its watchdog, and QEMU was ended, as the spec wants it.".into()
        }
        EndReason::QemuFailed => {
            let (code, last_words) = match phase {
                Phase::Ended { code, last_words, .. } => (*code, last_words.as_str()),
                Phase::Starting | Phase::Running => (None, ""),
            };
            let code = code.map_or_else(String::new, |code| format!(" (exit code {code})"));
            // The end says what went wrong.
            format!("QEMU failed{code}: {}", quote(last_words, LONGEST_QUOTE))
        }
    }
}

fn booted(observation: &Observation) -> Finding {
    match &observation.os_info {
        Some(info) => {
            let system = info.get("pretty-name").and_then(Value::as_str).unwrap_or("an unknown operating system");
            Finding::new(true, Reason::GuestAgentAnswered, format!("The guest agent answers; the guest runs {system}."))
        }
        None => Finding::new(false, Reason::NoGuestAgent, "The guest agent has not answered yet."),
    }
}

fn login_agent(observation: &Observation) -> Finding {
    if observation.login.connected {
        Finding::new(true, Reason::LoginAgentAnswered, "The login agent answers.")
    } else {
        Finding::new(false, Reason::NoLoginAgent, "The login agent has not answered yet.")
    }
}

fn logged_in(observation: &Observation) -> Finding {
    let LoginState { connected, user, refusal, .. } = &observation.login;
    if !connected {
        return Finding::new(false, Reason::NoLoginAgent, "No user is logged in.");
    }
    let refusal =
        refusal.as_deref().map(|answer| format!("the login agent refused: {}", quote(answer, LONGEST_REMARK)));
    match (user, refusal) {
        (Some(user), None) => Finding::new(true, Reason::LoggedIn, format!("{user} is logged in.")),
        // The earlier user stays logged in.
        (Some(user), Some(refusal)) => {
            Finding::new(true, Reason::Refused, format!("{user} is logged in; then {refusal}"))
        }
        (None, Some(refusal)) => Finding::new(false, Reason::Refused, format!("No user is logged in: {refusal}")),
        (None, None) => Finding::new(false, Reason::NobodyLoggedIn, "No user is logged in."),
    }
}

fn console(observation: &Observation) -> Finding {
    match at_display(observation) {
        Some((_, message)) => Finding::new(true, Reason::Connected, message),
        None => Finding::new(false, Reason::NobodyConnected, "No viewer is connected to the display."),
    }
}

/// Who is at the serial console, each user once.
fn at_serial_console(observation: &Observation) -> Vec<String> {
    let viewers = observation.relay.viewers.iter().filter(|viewer| !viewer.console.is_exclusive());
    let users: BTreeSet<String> = viewers.map(|viewer| quote(&viewer.user, LONGEST_REMARK)).collect();
    users.into_iter().take(usize::try_from(MOST_USERS).unwrap_or(usize::MAX)).collect()
}

/// Who looks at the display: the user or the address, and a sentence about that.
fn at_display(observation: &Observation) -> Option<(String, String)> {
    let by_relay = at_screen(&observation.relay.viewers);
    // Whoever controls the display comes first.
    if let Some(viewer) = by_relay.min_by_key(|viewer| viewer.mode != Mode::Controls) {
        let user = quote(&viewer.user, LONGEST_REMARK);
        let does = if viewer.mode == Mode::Controls { "uses" } else { "watches" };
        let message = format!("{user} {does} the display.");
        return Some((user, message));
    }
    let Viewer { host, .. } = observation.viewers.first()?;
    let host = quote(host, LONGEST_REMARK);
    let message = format!("A viewer at {host} is connected to the display.");
    Some((host, message))
}

/// The end of a text as a part of the status: at most `most` bytes, and no control characters, which a terminal would obey.
fn quote(text: &str, most: usize) -> String {
    let is_obeyed = |c: char| c.is_control() && c != '\n';
    end_of(text, most).replace(is_obeyed, " ")
}

/// The pending changes without values that are long or that a terminal would obey.
fn short_changes(changes: &[PendingChange]) -> Vec<PendingChange> {
    let is_short = |value: &Value| value.to_string().len() <= LONGEST_VALUE && !has_control_characters(value);
    let short = |value: &Option<Value>| value.clone().filter(is_short);
    let changes = changes.iter().take(MOST_PENDING);
    let shortened = changes.map(|PendingChange { path, subject, current, wanted, reason }| PendingChange {
        path: path.clone(),
        subject: subject.clone(),
        current: short(current),
        wanted: short(wanted),
        reason: reason.clone(),
    });
    shortened.collect()
}

/// Whether a text in the value has control characters, other than newlines.
fn has_control_characters(value: &Value) -> bool {
    let in_text = |text: &str| text.contains(|c: char| c.is_control() && c != '\n');
    match value {
        Value::String(text) => in_text(text),
        Value::Array(list) => list.iter().any(has_control_characters),
        Value::Object(map) => map.iter().any(|(key, value)| in_text(key) || has_control_characters(value)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The last bytes of a text, at most `most`, from the beginning of a character.
fn end_of(text: &str, most: usize) -> &str {
    let from = text.len().saturating_sub(most);
    (from..text.len()).find_map(|at| text.get(at..)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        api::{Subject, status::DeviceChange},
        runner::state::Helper,
    };

    fn full_disk() -> Problem {
        Problem::Disk { device: Some(DeviceId::Disk(1)), name: "data-disk".into(), is_full: true }
    }

    fn attachment(kind: DeviceKind, name: &str, slot: u32, at_next_start: Option<DeviceChange>) -> Attachment {
        Attachment { kind, slot, name: name.into(), is_attached: true, at_next_start }
    }

    fn machine(phase: Phase) -> Option<MachineState> {
        Some(MachineState {
            start: "s-1".into(),
            pid: 1,
            machine_type: "pc-q35-7.2".into(),
            hardware: "root-ports".into(),
            accelerator: "tcg".into(),
            accelerator_reason: "as configured".into(),
            uuid: "u-1".into(),
            macs: vec!["52:54:00:00:00:01".into()],
            started_with: None,
            devices: Vec::new(),
            lost: Vec::new(),
            phase,
        })
    }

    fn ended(reason: EndReason, last_words: &str) -> Option<MachineState> {
        machine(Phase::Ended { reason, code: Some(1), last_words: last_words.into(), held: false })
    }

    #[test]
    fn the_status_for_each_situation_of_a_vm() {
        let up = Observation {
            machine: machine(Phase::Running),
            is_executing: Some(true),
            cpus: 2,
            ram: 1 << 30,
            config_digest: Some("a-digest".into()),
            ..Observation::default()
        };
        let pending = PendingChange {
            path: "config.yaml/vm.maximumCpus".into(),
            subject: Some(Subject::MaximumCpus),
            current: Some(json!(2)),
            wanted: Some(json!(4)),
            reason: "why".into(),
        };
        let login = |lines: &[&str]| {
            let mut login = LoginState::default();
            for line in lines {
                login.receive(line);
                login.next_request(Some("alice"));
            }
            login
        };
        let viewer = Viewer { host: "10.0.0.7".into(), port: "40000".into(), channel_type: None, is_inner: false };
        let before = StatusBefore { conditions: vec![], password_serial: 4 };
        let situations = [
            ("not started", Observation::default()),
            ("starting", Observation { machine: machine(Phase::Starting), ..Observation::default() }),
            ("found by a new agent", Observation { is_executing: None, ..up.clone() }),
            ("up", up.clone()),
            ("booted", Observation { os_info: Some(json!({ "pretty-name": "Debian 12" })), ..up.clone() }),
            (
                "reset, with a pending change",
                Observation { reset_counter: Some(4), pending: vec![pending], ..up.clone() },
            ),
            ("with a login agent", Observation { login: login(&["220 hello"]), ..up.clone() }),
            ("login refused", Observation { login: login(&["220 hello", "501 who?"]), ..up.clone() }),
            (
                "in use",
                Observation {
                    login: login(&["220 hello", "201 done"]),
                    viewers: vec![viewer.clone()],
                    password_changes: 2,
                    password_expiry: Some("never".into()),
                    ..up.clone()
                },
            ),
            (
                "a CD was refused",
                Observation {
                    refused: vec!["/no/such.iso can't be inserted into the CD drive 0: No such file".into()],
                    ..up.clone()
                },
            ),
            (
                "a disk is full",
                Observation {
                    devices: vec![full_disk()],
                    attachments: vec![
                        attachment(DeviceKind::Disk, "system-disk", 0, None),
                        attachment(DeviceKind::Disk, "data-disk", 1, Some(DeviceChange::Detach)),
                        Attachment {
                            is_attached: false,
                            ..attachment(DeviceKind::Network, "lan", 2, Some(DeviceChange::Attach))
                        },
                        // The API server takes each once.
                        attachment(DeviceKind::Disk, "data-disk", 3, None),
                    ],
                    ..up.clone()
                },
            ),
            (
                "a disk is full, and there is no TPM",
                Observation {
                    devices: vec![full_disk()],
                    machine: up.machine.clone().map(|machine| MachineState { lost: vec![Helper::Tpm], ..machine }),
                    ..up.clone()
                },
            ),
            ("its clock is behind", Observation { clock_behind: Some(45), ..up.clone() }),
            ("paused", Observation { is_executing: Some(false), ..up.clone() }),
            ("panicked", Observation { is_executing: Some(false), panic: Some(Panic::Watchdog), ..up.clone() }),
            ("ended after a panic", Observation { machine: ended(EndReason::StoppedAfterPanic, ""), ..up.clone() }),
            ("ended by the guest", Observation { machine: ended(EndReason::GuestShutdown, ""), ..up.clone() }),
            ("powered down", Observation { machine: ended(EndReason::PoweredDown, ""), ..up.clone() }),
            ("powered off", Observation { machine: ended(EndReason::PoweredOff, ""), ..up.clone() }),
            (
                "failed",
                Observation {
                    machine: ended(EndReason::QemuFailed, "qemu: no"),
                    os_info: Some(json!({})),
                    viewers: vec![viewer],
                    ..up
                },
            ),
        ];
        let statuses = situations.map(|(situation, observation)| {
            let status = Report::derive(&observation).map(|report| {
                let mut status = json!(report.status(&before, Timestamp::UNIX_EPOCH));
                #[cfg(feature = "schema")]
                crate::test_support::assert_is_report(&status);
                status["runnerVersion"] = "VERSION".into();
                status
            });
            (situation, status)
        });
        insta::assert_yaml_snapshot!(statuses);
    }

    #[test]
    fn users_at_the_serial_console_are_named_once() {
        use crate::relay::{Console, Viewer};
        let viewer = |user: &str, console| Viewer {
            user: user.into(),
            session: "s".into(),
            console,
            mode: Mode::Controls,
            seconds: 1,
        };
        let viewers = vec![
            viewer("bob", Console::Serial),
            viewer("ann", Console::Serial),
            viewer("bob", Console::Serial),
            viewer("eve", Console::Vnc),
        ];
        let relay = RelayState { viewers, ..RelayState::default() };
        let at = |phase| {
            let observation = Observation {
                machine: machine(phase),
                is_executing: Some(true),
                relay: relay.clone(),
                ..Observation::default()
            };
            Report::derive(&observation).unwrap().serial_users
        };
        assert_eq!(at(Phase::Running), ["ann", "bob"]);
        assert!(at(Phase::Starting).is_empty());
    }

    /// The texts are those of the guest, of a viewer, and of whoever can write into the runtime directory.
    #[test]
    fn a_report_is_small_whatever_others_say() {
        let long = |text: &str| text.repeat(100_000);
        let mut login = LoginState::connected();
        login.next_request(Some("alice"));
        login.receive(&format!("501 \u{1b}[2J{}", long("no ")));
        let change = PendingChange {
            path: "config.yaml/vm.maximumCpus".into(),
            subject: Some(Subject::MaximumCpus),
            current: Some(json!(long("x"))),
            wanted: Some(json!([{ "device": "\u{1b}[2J" }])),
            reason: "why".into(),
        };
        let observation = Observation {
            machine: machine(Phase::Running),
            is_executing: Some(true),
            login,
            viewers: vec![Viewer { host: long("\u{7}ä"), port: "1".into(), channel_type: None, is_inner: false }],
            refused: vec![long("no"); 1000],
            pending: vec![change; 1000],
            ..Observation::default()
        };
        let failed = Observation { machine: ended(EndReason::QemuFailed, &long("\u{0}é")), ..observation.clone() };
        for observation in [observation, failed] {
            let report = Report::derive(&observation).unwrap();
            let status = json!(report.status(&StatusBefore::default(), Timestamp::UNIX_EPOCH));
            #[cfg(feature = "schema")]
            crate::test_support::assert_is_report(&status);
            let text = status.to_string();
            assert!(text.len() < 16_000, "{} bytes", text.len());
            assert!(!text.contains("\\u00"), "control characters: {text}");
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(end_of("äöü", 3), "ü");
        assert_eq!(end_of("abc", 9), "abc");
    }
}
