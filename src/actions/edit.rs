//! Changes CPUs, memory, CDs and disks of a VM: what is to be written, decided from the VM as it is.
//!
//! | the person says | what is written |
//! |---|---|
//! | CPUs or memory up to the maximum | `currentCpus`, `currentRam` |
//! | more than the maximum | nothing: an error; or if the person wants it, `maximumCpus`, `maximumRam`, and the current value where the spec has one |
//! | insert or eject a CD | the list of disks, with another `image` in one of its CD drives |
//! | add a disk | the list of disks with one more at its end, so that no other disk gets another name |
//! | grow a disk | the list of disks with another `storage` in one of them; never a smaller one |
//!
//! A list is written as a whole, so what is written names the version of the VM that it was made of: if somebody has changed the VM since,
//! the API server refuses it, and it is decided again.
//!
//! If a GitOps controller applies the field, its next sync would take the change back, so that is an error unless the person insists.

use kube::ResourceExt;
use serde_json::{Value, json};

use super::{Change, Decision, FoundVm, create::LEAST_DISK, from_git};
use crate::{
    api::{
        PendingChange, Quantity, Reason, Subject, VirtualMachine, VirtualMachineStatus, conditions,
        status::{DeviceKind, DevicePhase, DeviceStatus},
    },
    claims,
    ownership::{self, Applier},
};

/// The least memory that the CustomResourceDefinition allows.
const LEAST_RAM: u64 = 1 << 20;

/// What a person wants to change.
#[derive(Clone, Debug, PartialEq)]
pub enum Edit {
    /// The guest's CPUs.
    Cpus {
        /// How many.
        number: u32,
        /// Whether the maximum is raised, if it is lower.
        raise: bool,
    },
    /// The guest's memory.
    Ram {
        /// How much.
        size: Quantity,
        /// Whether the maximum is raised, if it is lower.
        raise: bool,
    },
    /// What is in a CD drive.
    Cd {
        /// The CD, as in `spec.vm.disks[].cdrom.image`; empty: none.
        image: String,
        /// The drive: its name, or its number among the CD drives, counted from 0. `None`: the only one.
        drive: Option<String>,
    },
    /// Another disk.
    AddDisk {
        /// Its size.
        size: Quantity,
        /// Its name. `None`: `data`, or with a number behind it.
        name: Option<String>,
        /// Its storage class. `None`: the default one.
        class: Option<String>,
    },
    /// A larger disk.
    GrowDisk {
        /// Its name, or the name of its volume or claim.
        disk: String,
        /// Its new size.
        size: Quantity,
    },
}

/// When a change reaches a guest that runs, if nothing comes in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// While it runs.
    AtOnce,
    /// At its next start.
    NextStart,
}

/// What the person expects of a change.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// What is different then, for people: `4 CPUs (before: 2)`.
    pub what: String,
    /// When the guest gets it, if it runs.
    pub effect: Effect,
    /// What it is about.
    pub about: About,
    /// What the person should know.
    pub note: Option<String>,
}

/// What a change is about. By this it is found in the VM's status, among other changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum About {
    /// The CPUs.
    Cpus,
    /// The memory.
    Ram,
    /// The CD drive with this name, or this number among the CD drives, counted from 0.
    Drive(String),
    /// The disk with this volume of the Pod.
    Disk {
        /// The volume's name.
        volume: String,
        /// The guest has it already, and it becomes larger.
        grows: bool,
    },
}

impl About {
    /// Whether a change that waits for the next start is this one, or a part of it. What takes effect at once is no part of a maximum.
    pub fn is(&self, pending: &PendingChange, effect: Effect) -> bool {
        let Some(subject) = &pending.subject else { return false };
        match (self, subject) {
            (Self::Cpus, Subject::MaximumCpus) | (Self::Ram, Subject::MaximumRam) => effect == Effect::NextStart,
            (Self::Cpus, Subject::Cpus) => true,
            // A drive that the guest has already gets its CD at once.
            (Self::Drive(name), Subject::CdDrive(other)) => name == other && pending.current.is_none(),
            (Self::Disk { volume, grows }, Subject::Disk(other)) => volume == other && !grows,
            (Self::Disk { volume, grows: _ }, Subject::Volume(other)) => volume == other,
            (
                _,
                Subject::Cpus
                | Subject::MaximumCpus
                | Subject::MaximumRam
                | Subject::Disk(_)
                | Subject::CdDrive(_)
                | Subject::Volume(_)
                | Subject::Object(_)
                | Subject::Network(_)
                | Subject::Setting(_)
                | Subject::QemuTemplate
                | Subject::CloudInit,
            ) => false,
        }
    }

    /// The volume of the disk that it is about.
    fn volume(&self) -> Option<&str> {
        match self {
            Self::Disk { volume, grows: _ } => Some(volume),
            Self::Cpus | Self::Ram | Self::Drive(_) => None,
        }
    }
}

/// Whether the guest has the CPUs or the memory that its spec wants now. A CD counts as there when the runner has read that it should be.
pub fn is_there(vm: &VirtualMachine, about: &About) -> bool {
    let Some(status) = &vm.status else { return false };
    match about {
        About::Cpus => status.runner.cpus == Some(vm.spec.vm.cpus()),
        About::Ram => status
            .runner
            .ram
            .as_deref()
            .is_some_and(|ram| Quantity::parse(ram).is_ok_and(|ram| ram == *vm.spec.vm.ram())),
        About::Drive(_) | About::Disk { .. } => true,
    }
}

/// Why a change is refused. The texts name no object; the caller does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what they are")]
pub enum EditRefusal {
    #[error("it is being deleted")]
    Deleted,
    #[error("its spec has values that can't be read: {0}")]
    Unreadable(String),
    #[error("{}", from_git(applier, field))]
    Git { applier: Applier, field: &'static str },
    #[error("its guest can have {most} at most (spec.vm.{field})")]
    OverMaximum { most: String, field: &'static str },
    #[error("its CPUs are given by spec.vm.cpuTopology ({most} of them): change that")]
    Topology { most: u32 },
    #[error("{0} is too little: a number without a unit is in bytes; write for example 2Gi")]
    TooLittle(String),
    #[error("it has no CD drive: add one to spec.vm.disks, such as - cdrom: {{image: \"\"}}, which takes a restart")]
    NoDrive,
    #[error("it has {0} CD drives")]
    WhichDrive(usize),
    #[error("it has no CD drive {drive}; it has {drives}")]
    NoSuchDrive { drive: String, drives: String },
    #[error("it has a disk {0} already")]
    DiskExists(String),
    #[error("it has no disk {disk}{}", if known.is_empty() { String::new() } else { format!("; it has {}", known.join(", ")) })]
    NoDisk { disk: String, known: Vec<String> },
    #[error("the disk {disk} has {now} already, and a claim can't become smaller")]
    Smaller { disk: String, now: String },
}

/// Decides what is written: a merge patch, which has the version of the VM if it replaces a list. With `insist` a field is also written if a GitOps
/// controller applies it.
///
/// # Errors
/// Why the change is refused.
pub fn decide(found: &FoundVm, edit: &Edit, insist: bool) -> Result<Decision<Expected>, EditRefusal> {
    let FoundVm { object, vm } = found;
    if vm.metadata.deletion_timestamp.is_some() {
        return Err(EditRefusal::Deleted);
    }
    if let Some(invalid) = &vm.spec.invalid {
        return Err(EditRefusal::Unreadable(invalid.message.clone()));
    }
    let disks = || match &object.data["spec"]["vm"]["disks"] {
        Value::Array(disks) => disks.clone(),
        _ => Vec::new(),
    };
    let change = match edit {
        Edit::Cpus { number, raise } => cpus(vm, *number, *raise)?,
        Edit::Ram { size, raise } => ram(vm, size, *raise)?,
        Edit::Cd { image, drive } => cd(disks(), image, drive.as_deref())?,
        Edit::AddDisk { size, name, class } => add_disk(vm, disks(), size, name.as_deref(), class.as_deref())?,
        Edit::GrowDisk { disk, size } => grow_disk(vm, disks(), disk, size)?,
    };
    let (fields, expected) = match change {
        Ok(change) => change,
        Err(unchanged) => return Ok(Decision::Unchanged(unchanged)),
    };
    let appliers = fields.iter().filter_map(|(field, _)| Some((ownership::applier(vm, field)?, *field)));
    let applier = appliers.max_by_key(|(applier, _)| applier.is_gitops);
    if let Some((applier, field)) = applier.clone().filter(|(applier, _)| applier.is_gitops && !insist) {
        return Err(EditRefusal::Git { applier, field });
    }
    let mut patch = json!({ "metadata": { "uid": vm.uid() }, "spec": { "vm": {} } });
    for (field, value) in fields {
        if value.is_array() {
            patch["metadata"]["resourceVersion"] = json!(vm.resource_version());
        }
        patch["spec"]["vm"][field] = value;
    }
    Ok(Decision::Write { change: Change::Merge(patch), applier, expected })
}

/// Fields of `spec.vm`, with what is written there.
type Fields = Vec<(&'static str, Value)>;

/// A change, or why there is none.
type Changed = Result<(Fields, Expected), String>;

fn change(fields: Fields, what: String, effect: Effect, about: About) -> Changed {
    Ok((fields, Expected { what, effect, about, note: None }))
}

fn cpus(vm: &VirtualMachine, number: u32, raise: bool) -> Result<Changed, EditRefusal> {
    let machine = &vm.spec.vm;
    let (now, most) = (machine.cpus(), machine.most_cpus());
    let counted = |number: u32| format!("{number} {}", if number == 1 { "CPU" } else { "CPUs" });
    let what = format!("{} (before: {now})", counted(number));
    if number == now {
        return Ok(Err(format!("has {} already", counted(now))));
    }
    if number <= most {
        return Ok(change(vec![("currentCpus", json!(number))], what, Effect::AtOnce, About::Cpus));
    }
    if machine.cpu_topology.is_some() {
        return Err(EditRefusal::Topology { most });
    }
    if !raise {
        return Err(EditRefusal::OverMaximum { most: counted(most), field: "maximumCpus" });
    }
    let current = machine.current_cpus.map(|_| ("currentCpus", json!(number)));
    Ok(change(
        [("maximumCpus", json!(number))].into_iter().chain(current).collect(),
        format!("{what}, which is also the new maximum"),
        Effect::NextStart,
        About::Cpus,
    ))
}

fn ram(vm: &VirtualMachine, size: &Quantity, raise: bool) -> Result<Changed, EditRefusal> {
    let machine = &vm.spec.vm;
    let (now, most) = (machine.ram(), &machine.maximum_ram);
    if size.bytes() < LEAST_RAM {
        return Err(EditRefusal::TooLittle(size.to_string()));
    }
    let what = format!("{size} of memory (before: {now})");
    if size == now {
        return Ok(Err(format!("has {now} of memory already")));
    }
    if size.bytes() <= most.bytes() {
        return Ok(change(vec![("currentRam", json!(size))], what, Effect::AtOnce, About::Ram));
    }
    if !raise {
        return Err(EditRefusal::OverMaximum { most: most.to_string(), field: "maximumRam" });
    }
    let current = machine.current_ram.as_ref().map(|_| ("currentRam", json!(size)));
    Ok(change(
        [("maximumRam", json!(size))].into_iter().chain(current).collect(),
        format!("{what}, which is also the new maximum"),
        Effect::NextStart,
        About::Ram,
    ))
}

/// `drive`: its name, or its number among the CD drives.
fn cd(mut disks: Vec<Value>, image: &str, drive: Option<&str>) -> Result<Changed, EditRefusal> {
    let mut drives: Vec<&mut Value> = disks.iter_mut().filter_map(|disk| disk.get_mut("cdrom")).collect();
    let count = drives.len();
    let at = match (drive, count) {
        (_, 0) => return Err(EditRefusal::NoDrive),
        (None, 1) => 0,
        (None, count) => return Err(EditRefusal::WhichDrive(count)),
        (Some(drive), _) => {
            let named = drives.iter().position(|it| it["name"] == drive);
            let numbered = || drive.parse().ok().filter(|number| *number < count);
            let names = || drives.iter().zip(0..).map(|(it, at)| drive_name(it, at)).collect::<Vec<_>>().join(", ");
            let refusal = || EditRefusal::NoSuchDrive { drive: drive.to_owned(), drives: names() };
            named.or_else(numbered).ok_or_else(refusal)?
        }
    };
    let Some(drive) = drives.get_mut(at) else { return Err(EditRefusal::NoDrive) };
    let name = drive_name(drive, at);
    let before = drive["image"].as_str().unwrap_or_default().to_owned();
    let which = if count > 1 { format!(" {at}") } else { String::new() };
    if before == image {
        return Ok(Err(match image {
            "" => format!("CD drive{which} is empty already"),
            image => format!("CD drive{which} has {image} already"),
        }));
    }
    drive["image"] = json!(image);
    let what = match (image, before.as_str()) {
        ("", before) => format!("CD drive{which} is empty (before: {before})"),
        (image, "") => format!("CD drive{which} has {image}"),
        (image, before) => format!("CD drive{which} has {image} (before: {before})"),
    };
    Ok(change(vec![("disks", json!(disks))], what, Effect::AtOnce, About::Drive(name)))
}

/// The name of the CD drive that is the `at`th one, or its number.
fn drive_name(drive: &Value, at: usize) -> String {
    drive["name"].as_str().map_or_else(|| at.to_string(), str::to_owned)
}

fn add_disk(
    vm: &VirtualMachine,
    mut disks: Vec<Value>,
    size: &Quantity,
    name: Option<&str>,
    class: Option<&str>,
) -> Result<Changed, EditRefusal> {
    if size.bytes() < LEAST_DISK {
        return Err(EditRefusal::TooLittle(size.to_string()));
    }
    let volumes: Vec<String> = claims::volumes(vm).flatten().collect();
    let is_used = |name: &str| volumes.contains(&format!("{name}-disk"));
    let claim = |name: &str| format!("{}-{name}-disk", vm.name_any());
    let is_kept = |name: &str| {
        let mut known = vm.status.iter().flat_map(|status| &status.claims);
        known.any(|known| known.name == claim(name))
    };
    // A name that is chosen here never leads to the data of a disk that the VM had once.
    let is_free = |name: &String| !is_used(name) && !is_kept(name);
    let names = std::iter::once("data".to_owned()).chain((2..).map(|number| format!("data-{number}")));
    let chosen = match name {
        Some(name) if is_used(name) => return Err(EditRefusal::DiskExists(name.to_owned())),
        Some(name) => Some(name.to_owned()),
        None => names.take(disks.len() + 1 + vm.status.iter().flat_map(|it| &it.claims).count()).find(is_free),
    };
    let name = chosen.unwrap_or_default();
    let mut spec = json!({ "resources": { "requests": { "storage": of_claim(size) } } });
    if let Some(class) = class {
        spec["storageClassName"] = json!(class);
    }
    disks.push(json!({ "volumeClaimTemplate": { "metadata": { "name": name }, "spec": spec } }));
    let note = is_kept(&name).then(|| {
        format!(
            "the VM had a disk {name} before: if its claim {} is still there, it gets that, with its data",
            claim(&name)
        )
    });
    let what = format!("a new disk {name} of {size} (claim {})", claim(&name));
    let (fields, about) = (vec![("disks", json!(disks))], About::Disk { volume: format!("{name}-disk"), grows: false });
    Ok(Ok((fields, Expected { what, effect: Effect::NextStart, about, note })))
}

fn grow_disk(vm: &VirtualMachine, mut disks: Vec<Value>, disk: &str, size: &Quantity) -> Result<Changed, EditRefusal> {
    let volumes: Vec<Option<String>> = claims::volumes(vm).collect();
    let short = |volume: &str| volume.strip_suffix("-disk").unwrap_or(volume).to_owned();
    let claim = |volume: &str| format!("{}-{volume}", vm.name_any());
    let is_it = |volume: &Option<String>| {
        volume.as_ref().is_some_and(|volume| [short(volume), volume.clone(), claim(volume)].contains(&disk.to_owned()))
    };
    let found = volumes.iter().position(is_it);
    let template = found.and_then(|at| disks.get_mut(at)?.get_mut("volumeClaimTemplate"));
    let Some(template) = template else {
        let known = volumes.iter().flatten().map(|volume| short(volume)).collect();
        return Err(EditRefusal::NoDisk { disk: disk.to_owned(), known });
    };
    let now = template["spec"]["resources"]["requests"]["storage"].clone();
    let (words, bytes) = (now.as_str().map_or_else(|| now.to_string(), str::to_owned), Quantity::bytes_of(&now));
    if bytes == Some(size.bytes()) {
        return Ok(Err(format!("disk {disk} has {words} already")));
    }
    if bytes.is_some_and(|bytes| bytes > size.bytes()) {
        return Err(EditRefusal::Smaller { disk: disk.to_owned(), now: words });
    }
    json_patch::merge(template, &json!({ "spec": { "resources": { "requests": { "storage": of_claim(size) } } } }));
    let before = if bytes.is_some() { format!(" (before: {words})") } else { String::new() };
    let what = format!("disk {disk} of {size}{before}");
    let volume = found.and_then(|at| volumes.get(at)?.clone()).unwrap_or_default();
    // A runner of the VM-Operator, which reports no devices, looks at the size when it starts the guest.
    let is_it = |device: &DeviceStatus| device.kind == DeviceKind::Disk && device.name == volume;
    let devices = vm.status.iter().flat_map(|status| &status.runner.devices);
    let is_live = devices.filter(|device| is_it(device)).any(|device| device.phase != DevicePhase::Waiting);
    let effect = if is_live { Effect::AtOnce } else { Effect::NextStart };
    Ok(change(vec![("disks", json!(disks))], what, effect, About::Disk { volume, grows: true }))
}

/// The size as Kubernetes writes it: it does not know `4 GiB`.
fn of_claim(size: &Quantity) -> String {
    size.to_string().replace([' ', 'B'], "").replace("ki", "Ki")
}

/// The parts of a change that wait for the next start, as paths.
fn waiting<'a>(status: &'a VirtualMachineStatus, about: &About, effect: Effect) -> Vec<&'a str> {
    let own = status.pending_changes.iter().filter(|pending| about.is(pending, effect));
    own.map(|pending| pending.path.as_str()).collect()
}

/// Whether the running guest was asked for a change, and has not got it. It may need a moment to give memory or a CPU back, or never do it.
pub fn is_asked(vm: &VirtualMachine, about: &About, effect: Effect) -> bool {
    let asks = |status: &VirtualMachineStatus| {
        status.created == Some(true) && effect == Effect::AtOnce && waiting(status, about, effect).is_empty()
    };
    vm.status.as_ref().is_some_and(asks) && !is_there(vm, about)
}

/// What became of a change, in the words of manager and runner, when they have seen it; with what the manager says about the claim of a disk. The second
/// value: it is as it should be, or will be at the next start.
pub fn outcome(vm: &VirtualMachine, about: &About, effect: Effect) -> (String, bool) {
    let Some(status) = &vm.status else { return ("no manager has seen it".into(), true) };
    let names = about.volume().map(|volume| claims::disk_names(&vm.name_any(), volume)).unwrap_or_default();
    let of_disk = status.claims.iter().filter(|claim| !claim.unused && names.contains(&claim.name));
    let findings = of_disk.flat_map(|claim| claim.findings.iter().map(move |finding| (claim, finding)));
    let is_growth_refused = findings.clone().any(|(_, finding)| finding.reason == Reason::GrowthRefused);
    // Only what is not done to CDs, pauses and reboots is in this condition.
    let refused = conditions::find(&status.conditions, conditions::CHANGES_APPLIED)
        .filter(|applied| applied.status == "False" && matches!(about, About::Drive(_)));
    let waiting = waiting(status, about, effect);
    let words = match refused {
        _ if status.created != Some(true) => "the guest gets it when it starts".into(),
        _ if !waiting.is_empty() => format!("waits for a restart: {}", waiting.join(", ")),
        _ if effect == Effect::NextStart => "waits for a restart".into(),
        Some(refused) => return (format!("not all is as it should be: {}", refused.message), false),
        None if is_asked(vm, about, effect) => {
            let has = if *about == About::Cpus {
                status.runner.cpus.map(|cpus| cpus.to_string())
            } else {
                status.runner.ram.clone()
            };
            let has = has.map(|has| format!(", and has {has} now")).unwrap_or_default();
            format!("the running guest is asked for it{has}")
        }
        None if matches!(about, About::Disk { grows: true, .. }) => {
            "the running guest has it as soon as the claim has grown".into()
        }
        None => "the running guest has it".into(),
    };
    let parts = std::iter::once(words).chain(findings.map(|(claim, finding)| claims::sentence(claim, finding)));
    (parts.collect::<Vec<_>>().join("; "), !is_growth_refused)
}

#[cfg(test)]
mod tests;
