//! Compares the configuration with the running VM. [`changes`] returns the operations that the agent carries out, [`pending`] what takes effect at
//! QEMU's next start. Pure.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    cd::Answer,
    config::{Configuration, Password},
    go_on::{GuestState, Who},
    operation::{DisplayPassword, Operation, not_inserted},
    qmp::CpuSlot,
    state::{MachineState, Orders, StartedWith},
};
use crate::{
    api::{Firmware, PendingChange, Subject},
    render::command_line::{DeviceId, Hardware},
    runner_config::{
        Drive, LATEST_HARDWARE, VmSection,
        at_start::{self, Attachment},
    },
};

/// The part of the configuration that can change while QEMU runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// The number of CPUs.
    pub cpus: usize,
    /// The memory in bytes.
    pub ram: u64,
    /// The password of the display, if there is a display and it has one.
    pub password: Option<DisplayPassword>,
    /// The CDs in the drives, in the order of the drives.
    pub cds: Vec<WantedCd>,
    /// The sizes of disks, as far as they are known.
    pub disks: Vec<WantedDisk>,
    /// The counter of resets. If it is higher than before, the agent resets the VM.
    pub reset_counter: u64,
    /// The counter of reboots. If it is higher than before, the agent asks the guest to reboot.
    pub reboot_counter: u64,
    /// Whether the guest is paused.
    pub paused: bool,
}

/// What a CD drive of the configuration holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedCd {
    /// The drive's slot.
    pub slot: u32,
    /// The drive as people know it: its name, or its number among the CD drives, counted from 0.
    pub drive: String,
    /// The CD as the configuration names it. Empty: none.
    pub text: String,
}

/// The size that a disk of the running QEMU should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedDisk {
    /// The disk's slot.
    pub slot: u32,
    /// The disk as people know it.
    pub disk: String,
    /// Its size if it has grown since QEMU was started: of a file in a claim that of the configuration, of a device that which it has now.
    pub bytes: u64,
}

/// The size of a disk is a multiple of this: the largest sector of disks.
const SECTOR: u64 = 4096;

/// The disks with which QEMU was started and that have grown since, unless another disk takes the place at the next start. What a QEMU template makes
/// of a disk that has not grown is the template's.
fn wanted_disks(machine: &MachineState, vm: &VmSection) -> Vec<WantedDisk> {
    let started = machine.started_with.iter().flat_map(|started| started.vm.disks());
    let wanted = started.filter_map(|(slot, drive)| {
        let size = |drive: &Drive| match drive {
            Drive::Raw { size, .. } => *size,
            Drive::Qcow2 { .. } | Drive::IdeCd { .. } => None,
        };
        let now = vm.disks().find(|(_, now)| now.resource() == drive.resource());
        let of_file = now.and_then(|(_, now)| size(now)).zip(size(drive));
        let device = machine.devices.iter().find(|device| device.slot == slot);
        let (now, at_start) = of_file.or_else(|| device.map(|device| (device.bytes, device.at_start)))?;
        let bytes = Some(now / SECTOR * SECTOR).filter(|_| now > at_start)?;
        Some(WantedDisk { slot, disk: drive.label(usize::try_from(slot).unwrap_or_default()), bytes })
    });
    wanted.collect()
}

impl Desired {
    /// What the configuration says, and `machine` of the devices.
    pub fn of(Configuration { config, password, .. }: &Configuration, machine: Option<&MachineState>) -> Self {
        let vm = &config.vm;
        Self {
            cpus: usize::try_from(vm.current_cpus).unwrap_or(usize::MAX),
            ram: vm.current_ram.as_ref().unwrap_or(&vm.maximum_ram).bytes(),
            password: vm
                .display
                .open_protocol()
                .zip(password.clone())
                .map(|(protocol, password)| DisplayPassword { protocol, password }),
            cds: vm
                .cds()
                .enumerate()
                .map(|(number, (slot, drive))| WantedCd {
                    slot,
                    drive: drive.label(number),
                    text: drive.cd().unwrap_or_default().to_owned(),
                })
                .collect(),
            disks: machine.map(|machine| wanted_disks(machine, vm)).unwrap_or_default(),
            reset_counter: config.reset_counter,
            reboot_counter: config.reboot_counter,
            paused: config.paused,
        }
    }
}

/// A CD drive of the running QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CdDrive {
    /// Its slot.
    pub slot: u32,
    /// The CD in it. `None`: the drive is empty.
    pub inserted: Option<Inserted>,
}

/// A CD in a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// The path or URL of the image.
    pub text: String,
    /// The name of QEMU's node for it.
    pub node: String,
}

/// What the CDs of the configuration are, as the machine role has answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Media {
    /// The CDs that it was asked about, in the order of the drives.
    pub cds: Vec<WantedCd>,
    /// What they are, or why they are refused.
    pub answers: Vec<Answer>,
}

/// The CD drives in an answer of `query-block`.
pub fn cd_drives(blocks: &Value) -> Vec<CdDrive> {
    let drives = blocks.as_array().into_iter().flatten().filter_map(|block| {
        let DeviceId::Cd(slot) = DeviceId::at(block["qdev"].as_str()?)? else { return None };
        let text = |key: &str| block["inserted"][key].as_str().map(str::to_owned);
        let inserted = text("file").map(|file| Inserted { text: file, node: text("node-name").unwrap_or_default() });
        Some(CdDrive { slot, inserted })
    });
    drives.collect()
}

/// A disk of the running QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its slot.
    pub slot: u32,
    /// The name of QEMU's node for it.
    pub node: String,
    /// Its size, as the guest sees it.
    pub bytes: u64,
}

/// The disks in an answer of `query-block`.
pub fn disks(blocks: &Value) -> Vec<Disk> {
    let disks = blocks.as_array().into_iter().flatten().filter_map(|block| {
        let DeviceId::Disk(slot) = DeviceId::at(block["qdev"].as_str()?)? else { return None };
        // Of another format or a part of a file the size is not that of the device.
        let inserted = Some(&block["inserted"]).filter(|inserted| inserted["drv"] == "raw")?;
        let node = inserted["node-name"].as_str()?.to_owned();
        Some(Disk { slot, node, bytes: inserted["image"]["virtual-size"].as_u64()? })
    });
    disks.collect()
}

/// What this agent knows about the running QEMU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Actual {
    /// The slots for CPUs.
    pub slots: Vec<CpuSlot>,
    /// What may become of the number of CPUs.
    pub cpu_rule: CpuRule,
    /// The memory in bytes that this agent has set. `None`: this agent has not set it yet.
    pub ram: Option<u64>,
    /// The password that this agent has set.
    pub password: Option<Password>,
    /// The CD drives.
    pub cds: Vec<CdDrive>,
    /// The disks.
    pub disks: Vec<Disk>,
    /// What the CDs of the configuration are, as far as it is known.
    pub media: Media,
    /// What was asked for once, and carried out.
    pub orders: Orders,
    /// What the guest does. `None`: QEMU was not asked yet.
    pub guest: Option<GuestState>,
    /// Whether a guest that has not run may begin to: this agent has found it so, or it was reset after a panic.
    pub may_start: bool,
    /// Whether somebody has pressed the power button.
    pub powers_down: bool,
    /// Whether QEMU's guest agent answers.
    pub answers: bool,
}

/// The prefix of the names of CPUs that the runner has plugged. Only a CPU with a name can be unplugged; those of QEMU's start have
/// none. With the standard template QEMU starts with one CPU.
const CPU_PREFIX: &str = "vmop-cpu-";
/// The path of devices with a name in QEMU's object tree.
const NAMED: &str = "/machine/peripheral/";

/// What counts as carried out when a counter in the configuration has become smaller; `None` if none has. A tool that syncs with Git has taken
/// the order back, so the same count is a new order when somebody asks for it again.
pub fn taken_back(desired: &Desired, orders: &Orders) -> Option<Orders> {
    let counter = orders.counter.min(desired.reset_counter);
    let reboots = orders.reboots.min(desired.reboot_counter);
    let follows = Orders { counter, reboots, ..orders.clone() };
    (follows != *orders).then_some(follows)
}

/// What counts as carried out with an operation that is asked for once.
pub fn carried_out(operation: &Operation, desired: &Desired, orders: &Orders) -> Option<Orders> {
    match operation {
        // The guest boots anew, so it needs no reboot.
        Operation::Reset => {
            Some(Orders { counter: desired.reset_counter, reboots: desired.reboot_counter, ..orders.clone() })
        }
        Operation::Reboot => Some(Orders { reboots: desired.reboot_counter, ..orders.clone() }),
        Operation::Pause => Some(Orders { paused: true, is_in_doubt: false, ..orders.clone() }),
        Operation::GoOn(Who::Spec) => Some(Orders { paused: false, is_in_doubt: false, ..orders.clone() }),
        Operation::Plug { .. }
        | Operation::Unplug { .. }
        | Operation::Balloon(_)
        | Operation::Password(_)
        | Operation::Insert { .. }
        | Operation::Eject { .. }
        | Operation::Grow { .. }
        | Operation::GoOn(_)
        | Operation::Powerdown
        | Operation::Quit
        | Operation::Kill => None,
    }
}

/// The operations that bring QEMU to the desired state and are allowed now, in order. The guest begins to run when it has its CPUs, its memory and
/// its password. The reset comes last, so that the guest boots with the other changes. As long as it is not known what the CDs are ([`must_ask`]),
/// they stay, and there is no reset.
pub fn changes(desired: &Desired, actual: &Actual) -> Vec<Operation> {
    let Some(guest) = actual.guest else { return Vec::new() };
    let mut changes = wanted(desired, actual, guest);
    changes.retain(|operation| operation.is_allowed(guest, actual.powers_down));
    changes
}

fn wanted(desired: &Desired, actual: &Actual, guest: GuestState) -> Vec<Operation> {
    let present = present(&actual.slots);
    let mut changes = match actual.cpu_rule.refuses(present, desired.cpus) {
        Some(_) => Vec::new(),
        None => cpu_changes(desired.cpus, &actual.slots),
    };
    if actual.ram != Some(desired.ram) {
        changes.push(Operation::Balloon(desired.ram));
    }
    if let Some(display) = &desired.password
        && actual.password.as_ref() != Some(&display.password)
    {
        changes.push(Operation::Password(display.clone()));
    }
    changes.extend(growth(desired, actual));
    if actual.may_start && guest == GuestState::NotStarted && !actual.orders.paused {
        changes.push(Operation::GoOn(Who::Agent));
    }
    if desired.paused != actual.orders.paused || actual.orders.is_in_doubt {
        changes.push(if desired.paused { Operation::Pause } else { Operation::GoOn(Who::Spec) });
    }
    if must_ask(desired, actual) {
        return changes;
    }
    for (CdDrive { slot, inserted }, WantedCd { drive, .. }, answer) in drives_with_media(actual) {
        let (slot, drive, inserted) = (*slot, drive.clone(), inserted.as_ref());
        match (answer, inserted) {
            (Some(Ok(medium)), inserted) if inserted.is_none_or(|inserted| inserted.text != medium.text()) => {
                let former = inserted.map(|inserted| inserted.node.clone());
                changes.push(Operation::Insert { slot, drive, medium: medium.clone(), former });
            }
            (None, Some(inserted)) => {
                changes.push(Operation::Eject { slot, drive, former: inserted.node.clone() });
            }
            // What is refused leaves the drive as it is.
            _ => {}
        }
    }
    if desired.reset_counter > actual.orders.counter {
        changes.push(Operation::Reset);
    } else if desired.reboot_counter > actual.orders.reboots && actual.answers {
        changes.push(Operation::Reboot);
    }
    changes
}

/// The disks that are smaller than they should be.
fn growth(desired: &Desired, actual: &Actual) -> impl Iterator<Item = Operation> {
    desired.disks.iter().filter_map(|WantedDisk { slot, disk, bytes }| {
        let found = actual.disks.iter().find(|found| found.slot == *slot && found.bytes < *bytes)?;
        Some(Operation::Grow { disk: disk.clone(), node: found.node.clone(), bytes: *bytes })
    })
}

/// What may become of the number of CPUs of a guest that runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuRule {
    /// CPUs may be plugged and unplugged.
    #[default]
    Any,
    /// CPUs may only be plugged. QEMU ends if it emulates the CPUs and one is unplugged: 7.2 with `double free or corruption`, 10.0 with a failed
    /// assertion (`tcg_register_thread`) when the next one is plugged.
    OnlyMore,
    /// The number stays. Firmware with secure boot handles such a change in system management mode, in which emulated CPUs never come together
    /// (seen with QEMU 7.2 and 10.0): the guest would hang.
    Fixed,
}

impl CpuRule {
    /// The rule for the QEMU that runs.
    pub fn of(machine: &MachineState) -> Self {
        let is_secure = |started: &StartedWith| matches!(started.vm.firmware, Firmware::Secure | Firmware::Secure4m);
        match machine.accelerator.as_str() {
            "tcg" if machine.started_with.as_ref().is_some_and(is_secure) => Self::Fixed,
            "tcg" => Self::OnlyMore,
            _ => Self::Any,
        }
    }

    /// Why the number of CPUs stays although another one is wanted, as a sentence; `None`: it does not stay.
    fn refuses<N: PartialOrd>(self, present: N, wanted: N) -> Option<&'static str> {
        match self {
            Self::Fixed if wanted != present => {
                Some("a guest with secure boot hangs if an emulated CPU is plugged (with KVM it does not)")
            }
            Self::OnlyMore if wanted < present => {
                Some("QEMU ends if an emulated CPU is unplugged (with KVM it does not)")
            }
            _ => None,
        }
    }
}

/// Why the guest is not asked to reboot yet, as a sentence.
pub fn refused_reboot(desired: &Desired, actual: &Actual) -> Option<String> {
    let wanted = desired.reboot_counter;
    let cause = match actual.guest? {
        _ if wanted <= actual.orders.reboots => return None,
        GuestState::Executes if actual.answers => return None,
        GuestState::Executes => "QEMU's guest agent does not answer in it",
        GuestState::StoppedByDisk => "a disk has stopped the guest",
        GuestState::ShutDown => "the guest has shut down",
        GuestState::NotStarted | GuestState::Panicked | GuestState::Hung | GuestState::Stopped => "the guest is paused",
    };
    Some(format!(
        "the guest can't be asked to reboot (rebootCount {wanted}): {cause}; it is asked as soon as it can be, or reset it with resetCount, or \
         lower rebootCount to take that back"
    ))
}

/// Whether the machine role must be asked what the CDs of the configuration are.
pub fn must_ask(desired: &Desired, actual: &Actual) -> bool {
    actual.media.cds != desired.cds
}

/// The CDs that the machine role has refused, each as a sentence.
pub fn refused_media(actual: &Actual) -> Vec<String> {
    let refused = |(_, wanted, answer): (&CdDrive, &WantedCd, Option<&Answer>)| {
        let refusal = answer?.as_ref().err()?;
        Some(format!("{}: {refusal}", not_inserted(&wanted.text, &wanted.drive)))
    };
    drives_with_media(actual).filter_map(refused).collect()
}

/// The CD drives that QEMU has, each with the CD that it should hold, and what is known about that (`None`: the drive should be empty). A
/// drive that QEMU does not have yet is a pending change.
fn drives_with_media(actual: &Actual) -> impl Iterator<Item = (&CdDrive, &WantedCd, Option<&Answer>)> {
    let media = actual.media.cds.iter().zip(&actual.media.answers);
    media.filter_map(|(wanted, answer)| {
        let drive = actual.cds.iter().find(|drive| drive.slot == wanted.slot)?;
        Some((drive, wanted, Some(answer).filter(|_| !wanted.text.is_empty())))
    })
}

/// The changes of the configuration that take effect at QEMU's next start. The guest has `cpus` CPUs now; 0: that is not known.
pub fn pending(machine: &MachineState, cpus: u32, configuration: &Configuration) -> Vec<PendingChange> {
    let Some(started) = &machine.started_with else { return Vec::new() };
    let desired = StartedWith::from(configuration);
    let [current, wanted] = compared(machine, started, configuration);
    let mut pending = at_start::at_start(&current, &wanted);
    let wanted = desired.vm.powerdown_timeout;
    if let Some(longest) = started.longest_powerdown.filter(|longest| wanted > *longest) {
        pending.push(PendingChange {
            path: "config.yaml/vm.powerdownTimeout".into(),
            subject: Some(Subject::Setting("powerdownTimeout".into())),
            current: Some(json!(longest)),
            wanted: Some(json!(wanted)),
            reason: "the Pod keeps the grace period with which it was made".into(),
        });
    }
    let wanted = desired.vm.current_cpus;
    if let Some(reason) = CpuRule::of(machine).refuses(cpus, wanted).filter(|_| cpus > 0) {
        pending.push(PendingChange {
            path: "config.yaml/vm.currentCpus".into(),
            subject: Some(Subject::Cpus),
            current: Some(json!(cpus)),
            wanted: Some(json!(wanted)),
            reason: reason.into(),
        });
    }
    if started.template != desired.template {
        let text = |text: &Option<String>| text.clone().map(Value::String);
        pending.push(at_start::template(text(&started.template), text(&desired.template)));
    }
    // A VM that keeps its template does not notice another one.
    if configuration.config.update_template && started.qemu != desired.qemu {
        pending.push(at_start::qemu_file());
    }
    if started.cloud_init != desired.cloud_init {
        pending.push(at_start::cloud_init());
    }
    pending
}

/// The devices that QEMU has, and those of its next start.
pub fn attachments(machine: &MachineState, configuration: &Configuration) -> Vec<Attachment> {
    let Some(started) = &machine.started_with else { return Vec::new() };
    let [current, wanted] = compared(machine, started, configuration);
    at_start::attachments(&current, &wanted)
}

/// The section `vm` with which QEMU was started, and that of its next start, so that they can be compared.
fn compared(machine: &MachineState, started: &StartedWith, configuration: &Configuration) -> [VmSection; 2] {
    [&started.vm, &configuration.config.vm].map(|vm| with_identity(vm, machine))
}

/// The section `vm` with what the VM has chosen itself.
fn with_identity(vm: &VmSection, machine: &MachineState) -> VmSection {
    let mut vm = vm.clone();
    // A VM without an identity in the configuration has chosen its own. It is no change if the configuration contains it later.
    vm.uuid = Some(vm.uuid.unwrap_or_else(|| machine.uuid.clone()).to_lowercase());
    vm.machine_type.get_or_insert_with(|| machine.machine_type.clone());
    // What the VM asks for, it has already.
    let has_latest = vm.hardware.as_deref() == Some(LATEST_HARDWARE) && machine.hardware == Hardware::NEWEST.name();
    vm.hardware = vm.hardware.filter(|_| !has_latest).or_else(|| Some(machine.hardware.clone()));
    let own: BTreeMap<u32, &String> = machine.interfaces().map(|(slot, _, mac)| (slot, mac)).collect();
    for (index, network) in vm.network.iter_mut().enumerate() {
        if let Some(mac) =
            network.mac().map(str::to_owned).or_else(|| own.get(&network.slot(index)).map(|mac| (*mac).clone()))
        {
            network.set_mac(mac.to_lowercase());
        }
    }
    vm
}

/// How many CPUs the guest has.
pub fn present(slots: &[CpuSlot]) -> usize {
    slots.iter().filter(|slot| slot.occupant.is_some()).count()
}

/// The changes that lead to the desired number of CPUs. QEMU lists the highest slot first; the runner plugs and unplugs CPUs at the
/// high end.
pub fn cpu_changes(desired: usize, slots: &[CpuSlot]) -> Vec<Operation> {
    let present = present(slots);
    let numbered = || slots.iter().rev().enumerate();
    if desired >= present {
        numbered()
            .filter(|(_, slot)| slot.occupant.is_none())
            .take(desired - present)
            .map(|(number, slot)| Operation::Plug { id: format!("{CPU_PREFIX}{number}"), slot: slot.clone() })
            .collect()
    } else {
        slots
            .iter()
            .filter_map(|slot| slot.occupant.as_deref()?.strip_prefix(NAMED))
            .filter(|id| id.starts_with(CPU_PREFIX))
            .take(present - desired)
            .map(|id| Operation::Unplug { id: id.to_owned() })
            .collect()
    }
}

#[cfg(test)]
mod tests;
