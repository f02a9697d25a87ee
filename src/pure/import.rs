//! Makes the manifest of a VM from what another program says of one.
//!
//! ```text
//!  text ─▶ source (parts with lines) ─▶ a reader marks what it uses ─▶ draft ─▶ manifest, comments
//!                                              └▶ marks; what nobody used ─▶ findings
//! ```
//!
//! Each format has its reader. [`source`] makes sure that nothing is dropped silently: each part is used, or it is a [`Finding`].

pub mod draft;
mod guest;
mod kubevirt;
mod libvirt;
mod ovf;
mod proxmox;
pub mod source;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde_json::Value;

use self::{
    draft::{DataFile, Draft, Origin, Place, VARIABLES},
    source::{Item, SourceError},
};
use crate::{api::GROUP, exchange::Grade};

/// The largest text that is read.
pub const LARGEST: usize = 16 << 20;
/// The longest name of a VM.
const NAME: usize = 63;
/// The longest value of a label, and how the name of the Pod ends by which disks are filled.
const LABEL: usize = 63;
const IMPORT: &str = "-import";
/// The most VMs of a text.
const VMS: usize = 1000;
/// The most characters of what is said of a part: it may have names of the file.
const LONGEST: usize = 400;
/// The most bytes that an API server takes as annotations of an object, and as a whole object.
const ANNOTATIONS: usize = 256 << 10;
const OBJECT: usize = 1 << 20;

/// Who wrote the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the programs")]
pub enum Format {
    Libvirt,
    Proxmox,
    Kubevirt,
    Ovf,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 4] = [Self::Libvirt, Self::Proxmox, Self::Kubevirt, Self::Ovf];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Libvirt => "libvirt",
            Self::Proxmox => "proxmox",
            Self::Kubevirt => "kubevirt",
            Self::Ovf => "ovf",
        }
    }

    /// The format of a text, by its beginning and by words that only that format has.
    ///
    /// # Errors
    /// If it is none of them, with what to do.
    pub fn of(text: &str) -> Result<Self, SourceError> {
        let text = text.trim_start_matches('\u{feff}');
        let first = text.lines().position(|line| !line.trim().is_empty()).unwrap_or_default() + 1;
        let wrong = |what: &str| Err(SourceError::new(first, what.to_owned()));
        let begins = |start: &str| text.lines().any(|line| line.starts_with(start));
        if text.trim().is_empty() {
            return wrong("there is nothing in this file");
        }
        if text.contains("Vagrant.configure") {
            return wrong(
                "a Vagrantfile is a program in Ruby, which only Vagrant can run: `vagrant up`, then `virsh dumpxml NAME` (libvirt) or \
                 `VBoxManage export NAME -o vm.ovf` (VirtualBox) print what this command reads",
            );
        }
        if begins("config.version") && text.contains("virtualHW.version") {
            return wrong("this is VMware's own file: `ovftool NAME.vmx NAME.ovf` makes an OVF of it, which is read");
        }
        if text.trim_start().starts_with('<') {
            return match () {
                () if text.contains("<Envelope") || text.contains(":Envelope") => Ok(Self::Ovf),
                () if text.contains("<domain") => Ok(Self::Libvirt),
                () if text.contains("<VirtualBox") => wrong(
                    "this is VirtualBox's own file: `VBoxManage export NAME -o NAME.ovf` makes an OVF, which is read",
                ),
                () => wrong("this XML is neither a domain of libvirt nor an envelope of OVF"),
            };
        }
        if text.contains("kubevirt.io/v1") && (begins("kind:") || text.trim_start().starts_with('{')) {
            return Ok(Self::Kubevirt);
        }
        if begins("apiVersion:") || text.trim_start().starts_with('{') && text.contains("\"apiVersion\"") {
            return wrong(if text.contains(GROUP) {
                "these are objects of vm-operator already: `kubectl apply -f FILE` takes them as they are"
            } else {
                "these are objects of Kubernetes, and none of them is one of KubeVirt"
            });
        }
        let is_line = |line: &str| {
            // A key may have no text.
            line.split_once(": ")
                .or_else(|| Some((line.trim_end().strip_suffix(':')?, "")))
                .is_some_and(|(key, _)| key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)))
        };
        let is_other = |line: &str| line.starts_with(['#', '[']) || line.trim().is_empty();
        if text.lines().any(is_line) && text.lines().all(|line| is_line(line) || is_other(line)) {
            return Ok(Self::Proxmox);
        }
        wrong("the format can't be told: give --from libvirt, proxmox, kubevirt or ovf")
    }
}

/// A part of the source, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its lines, from 1: parts of the same name and fate are one finding.
    pub lines: Vec<usize>,
    /// What it is called.
    pub what: String,
    /// How well it is kept.
    pub grade: Grade,
    /// What it became, or why it did not.
    pub why: String,
}

impl fmt::Display for Finding {
    /// `LINE: <hostdev>: no equivalent: why`, as after the name of a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lines, what, grade, why } = self;
        write!(f, "{}: {what}: ", lines.first().copied().unwrap_or(1))?;
        match grade {
            Grade::LeftOut => f.write_str("no equivalent")?,
            grade => write!(f, "{grade}")?,
        }
        if !why.is_empty() {
            write!(f, ": {why}")?;
        }
        let others: Vec<String> = lines.iter().skip(1).map(ToString::to_string).collect();
        match others.len() {
            0 => Ok(()),
            1..=5 => write!(f, " (also {})", others.join(", ")),
            count => write!(f, " (also {}, ... {} times in all)", others[..5].join(", "), count + 1),
        }
    }
}

/// A VM that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// The name that it has if nobody wishes another one. No other VM of the text has it in that namespace.
    pub name: String,
    /// The manifest.
    pub manifest: Value,
    /// What became of each part of the source, by line.
    pub findings: Vec<Finding>,
    /// What is left to do, as lines for a comment.
    pub steps: Vec<String>,
}

impl Imported {
    /// How many parts have this fate.
    pub fn count(&self, grade: Grade) -> usize {
        self.findings.iter().filter(|finding| finding.grade == grade).map(|finding| finding.lines.len()).sum()
    }
}

/// The VMs that were read before, of this text and of others: no two of them in a namespace get the same name.
#[derive(Debug, Default)]
pub struct Before {
    /// Namespaces and names.
    names: BTreeSet<(Option<String>, String)>,
    /// The names of those that nobody wants ([`Wish::only`]).
    unwanted: Vec<String>,
}

impl Before {
    /// That the VM is not there that somebody wants. `there`: where all of them are.
    pub fn no_vm(&self, only: &str, there: &str) -> String {
        let names = listed(self.unwanted.iter().map(String::as_str));
        format!("no VM of {there} gets the name {only:?}: there are {names}")
    }
}

/// What a person says of the new VM.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish<'a> {
    /// Its name, instead of that in the source.
    pub name: Option<&'a str>,
    /// Of several VMs only the one that has this name if nobody wishes another one.
    pub only: Option<&'a str>,
    /// Its namespace, instead of that in the source.
    pub namespace: Option<&'a str>,
}

/// Reads the VMs of a text. `file` is its name without an extension, for a VM without a name of its own.
///
/// # Errors
/// If the text can't be read, describes what no VM can be, or has no VM of the name that is wanted.
pub fn read(text: &str, format: Format, file: &str, wish: Wish<'_>) -> Result<Vec<Imported>, SourceError> {
    let mut before = Before::default();
    let vms = read_after(text, format, file, wish, &mut before)?;
    match wish.only {
        Some(only) if vms.is_empty() => Err(SourceError::new(1, before.no_vm(only, "this file"))),
        _ => Ok(vms),
    }
}

/// As [`read`], where others were read `before`; these are added to them. There is none if only one is wanted and it is not in this text.
///
/// # Errors
/// If the text can't be read, or describes what no VM can be.
pub fn read_after(
    text: &str,
    format: Format,
    file: &str,
    wish: Wish<'_>,
    before: &mut Before,
) -> Result<Vec<Imported>, SourceError> {
    if text.len() > LARGEST {
        return Err(SourceError::new(
            1,
            format!("this is larger than {} MiB, so it is no description of a VM", LARGEST >> 20),
        ));
    }
    let text = text.trim_start_matches('\u{feff}');
    let (sources, between) = match (sources(text, format), unfilled(text)) {
        (_, Some(error)) => return Err(error),
        (Err(error), None) if is_placeholder(text, error.at.0) => {
            return Err(SourceError { message: TEMPLATE.into(), ..error });
        }
        (read, None) => read?,
    };
    if sources.is_empty() {
        return Err(SourceError::new(1, "there is nothing in this file"));
    }
    few_enough(sources.len())?;
    let (mut vms, mut origins) = (Vec::new(), BTreeMap::new());
    for source in &sources {
        let mut draft = Draft::default();
        let read = read_one(source, format, &mut draft);
        let name = own_name(&draft, file, wish, before);
        let shared = shared(&draft, &name, wish, &mut origins);
        // What is wrong with a VM that nobody wants is no obstacle.
        if wish.only.is_some_and(|only| only != name) {
            before.unwanted.push(name);
            continue;
        }
        read?;
        let large = large_annotations(source, &mut draft);
        let mut vm = vm(source, &draft, format, name, wish);
        if vm.manifest.to_string().len() > OBJECT {
            let what = format!("the VM would be larger than {} MiB, and no API server takes that", OBJECT >> 20);
            return Err(SourceError::new(source.line, what));
        }
        vm.findings.extend(shared.into_iter().chain(large));
        vm.findings.sort_by_key(|finding| finding.lines.first().copied());
        vms.push(vm);
    }
    if wish.only.is_none()
        && let Some(first) = vms.first_mut()
    {
        first.findings.extend(between);
        first.findings.sort_by_key(|finding| finding.lines.first().copied());
    }
    Ok(vms)
}

/// What is said of a text with places that a program has to fill in first.
const TEMPLATE: &str = "this is a template that nobody has filled in ({{ }}): render it first, Helm's for example with `helm template CHART`, and import \
                        what comes out";

/// Whether a line has a place that a program has to fill in.
fn is_placeholder(text: &str, line: usize) -> bool {
    text.lines().nth(line.saturating_sub(1)).is_some_and(|line| line.contains("{{"))
}

/// The first line with something that only Helm fills in.
fn unfilled(text: &str) -> Option<SourceError> {
    const WORDS: [&str; 6] = [".Values", ".Release", ".Chart", ".Capabilities", "include \"", "template \""];
    let is_helm = |line: &str| {
        let Some((_, inner)) = line.split_once("{{") else { return false };
        WORDS.iter().any(|word| inner.contains(word))
    };
    let line = text.lines().position(is_helm)?;
    Some(SourceError::new(line + 1, TEMPLATE))
}

/// That something is no number of CPUs, or no size of memory.
fn unreadable(item: &Item, what: &str) -> SourceError {
    let text = shortened(item.text());
    let hint = if text.contains("{{") { format!(": {TEMPLATE}") } else { String::new() };
    SourceError::new(item.line, format!("{}: {text:?} is no {what}{hint}", shortened(&item.label)))
}

/// Names for a message.
pub fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    const MOST: usize = 10;
    let more = names.len().saturating_sub(MOST);
    let names = names.take(MOST).collect::<Vec<_>>().join(", ");
    if more == 0 { names } else { format!("{names} and {more} more") }
}

/// The descriptions of VMs in a text, and what became of what is between them.
fn sources(text: &str, format: Format) -> Result<(Vec<Item>, Vec<Finding>), SourceError> {
    let sources = match format {
        Format::Libvirt => libvirt::sources(text),
        Format::Ovf => ovf::sources(text),
        Format::Proxmox => proxmox::source(text).map(|source| vec![source]),
        Format::Kubevirt => return kubevirt::sources(text),
    };
    Ok((sources?, Vec::new()))
}

/// Reads one of them.
fn read_one(source: &Item, format: Format, draft: &mut Draft) -> Result<(), SourceError> {
    match format {
        Format::Libvirt => libvirt::read(source, draft),
        Format::Proxmox => proxmox::read(source, draft),
        Format::Kubevirt => kubevirt::read(source, draft),
        Format::Ovf => ovf::read(source, draft),
    }
}

/// An error if there are too many: each is compared with the others.
fn few_enough(vms: usize) -> Result<(), SourceError> {
    if vms <= VMS {
        return Ok(());
    }
    Err(SourceError::new(1, format!("there are {vms} VMs in this file, and at most {VMS} are read: divide it")))
}

/// The name of a VM, which is a name of Kubernetes.
fn valid_name(written: &str) -> String {
    draft::word(written, NAME).unwrap_or_else(|| "vm".into())
}

/// The name that a VM has if nobody wishes another one. No VM before it has it in its namespace.
fn own_name(draft: &Draft, file: &str, wish: Wish<'_>, before: &mut Before) -> String {
    let name = valid_name(if draft.name.is_empty() { file } else { &draft.name });
    let namespace = wish.namespace.or(draft.namespace.as_deref()).map(str::to_owned);
    let numbered = (2_usize..).map(|number| {
        let end = format!("-{number}");
        let begin = name.get(..NAME - end.len()).unwrap_or(&name).trim_end_matches('-');
        format!("{begin}{end}")
    });
    let taken = &mut before.names;
    let free =
        std::iter::once(name.clone()).chain(numbered).find(|name| taken.insert((namespace.clone(), name.clone())));
    free.unwrap_or(name)
}

/// Takes annotations out that an API server would refuse.
fn large_annotations(source: &Item, draft: &mut Draft) -> Option<Finding> {
    let length = |(key, value): (&String, &Value)| key.len() + value.as_str().map_or(0, str::len);
    if draft.annotations.iter().map(length).sum::<usize>() <= ANNOTATIONS {
        return None;
    }
    draft.annotations.clear();
    let why = format!("they have more than {} KiB, and no API server takes that", ANNOTATIONS >> 10);
    Some(Finding { lines: vec![source.line], what: "metadata.annotations".into(), grade: Grade::LeftOut, why })
}

/// A text of the file for a message, without what would make it too long.
pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// The disks that a VM before it has too. `origins`: the VMs that have them, by what the text calls the disks.
fn shared(draft: &Draft, own: &str, wish: Wish<'_>, origins: &mut BTreeMap<String, String>) -> Vec<Finding> {
    let mut found = Vec::new();
    let name = wish.name.unwrap_or(own);
    for Origin { name: origin, disk, at: (line, what) } in &draft.origins {
        let first = origins.entry(origin.clone()).or_insert_with(|| own.to_owned());
        if *first != own {
            let why = format!(
                "the VM {first} has the same disk: the claim {name}-{disk}-disk is another one, and neither VM sees what the other writes"
            );
            found.push(Finding { lines: vec![*line], what: what.clone(), grade: Grade::Changed, why });
        }
    }
    found
}

fn vm(source: &Item, draft: &Draft, format: Format, own: String, wish: Wish<'_>) -> Imported {
    let why: fn(&Item) -> &'static str = match format {
        Format::Libvirt => libvirt::why,
        Format::Proxmox => proxmox::why,
        Format::Kubevirt => kubevirt::why,
        Format::Ovf => ovf::why,
    };
    let mut findings = Vec::new();
    let name = wish.name.unwrap_or(&own);
    source.visit(&mut |item, grade, text| {
        let text = if text.is_empty() { why(item) } else { text };
        let what = if item.label.is_empty() { "the file".to_owned() } else { shortened(&item.label) };
        let why = shortened(&text.replace("VM-", &format!("{name}-")));
        findings.push(Finding { lines: vec![item.line], what, grade, why });
    });
    for draft::Note { line, what, grade, why } in &draft.notes {
        let why = shortened(&why.replace("VM-", &format!("{name}-")));
        findings.push(Finding { lines: vec![*line], what: shortened(what), grade: *grade, why });
    }
    if own != draft.name && !draft.name.is_empty() && wish.name.is_none() {
        let why = if own == valid_name(&draft.name) {
            "names are of lower case letters, digits and hyphens"
        } else {
            "another VM has that name"
        };
        let why = format!("{own:?} (before: {:?}): {why}", shortened(&draft.name));
        findings.push(Finding { lines: vec![source.line], what: "metadata.name".into(), grade: Grade::Changed, why });
    }
    let namespace = wish.namespace.or(draft.namespace.as_deref());
    let steps = steps(draft, name, namespace);
    let manifest = draft.manifest(name, wish.namespace);
    Imported { name: own, manifest, findings: together(findings), steps }
}

/// Parts of the same name and fate become one finding. The order is that of the first lines.
fn together(findings: Vec<Finding>) -> Vec<Finding> {
    let mut merged: Vec<Finding> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for finding in findings {
        let key = (finding.what.clone(), finding.grade, finding.why.clone());
        match places.get(&key) {
            Some(at) => merged.get_mut(*at).into_iter().for_each(|it: &mut Finding| it.lines.extend(&finding.lines)),
            None => {
                places.insert(key, merged.len());
                merged.push(finding);
            }
        }
    }
    merged.sort_by_key(|finding| finding.lines.first().copied());
    merged
}

/// What a person has to copy.
fn steps(draft: &Draft, name: &str, namespace: Option<&str>) -> Vec<String> {
    let place = namespace.map(|namespace| format!(" -n {}", for_shell(namespace))).unwrap_or_default();
    if draft.fills.is_empty() && draft.data.is_empty() {
        return Vec::new();
    }
    // kubectl run gives the Pod its name as a label too, which has less letters than a name.
    let begin = name.get(..LABEL - IMPORT.len()).unwrap_or(name).trim_end_matches(['-', '.']);
    let pod = format!("{begin}{IMPORT}");
    let mut lines = vec![
        "To copy what the VM has, while it is stopped: apply this file, which makes its claims, and this Pod, which has them:".to_owned(),
        String::new(),
        format!("  kubectl run {pod}{place} --image=busybox --restart=Never --overrides='"),
    ];
    let (mut mounts, mut devices, mut volumes) = (Vec::new(), Vec::new(), Vec::new());
    for fill in &draft.fills {
        devices.push(format!("{{\"name\":\"{0}\",\"devicePath\":\"/dev/{0}\"}}", fill.disk));
        volumes.push(format!(
            "{{\"name\":\"{0}\",\"persistentVolumeClaim\":{{\"claimName\":\"{name}-{0}-disk\"}}}}",
            fill.disk
        ));
    }
    if !draft.data.is_empty() {
        mounts.push("{\"name\":\"data\",\"mountPath\":\"/data\"}".to_owned());
        volumes
            .push(format!("{{\"name\":\"data\",\"persistentVolumeClaim\":{{\"claimName\":\"{name}-runner-data\"}}}}"));
    }
    lines.push(format!(
        "    {{\"spec\":{{\"containers\":[{{\"name\":\"import\",\"image\":\"busybox\",\"command\":[\"sleep\",\"infinity\"],\"volumeMounts\":[{}],\"volumeDevices\":[{}]}}],",
        mounts.join(","),
        devices.join(",")
    ));
    lines.push(format!("     \"volumes\":[{}]}}}}'", volumes.join(",")));
    lines.extend([String::new(), "Then, where the VM's disks are:".to_owned(), String::new()]);
    for fill in &draft.fills {
        let disk = &fill.disk;
        let Some(from) = in_shell(&fill.from) else {
            let Place::Words(words) = &fill.from else { continue };
            lines.push(format!(
                "  kubectl exec -i {pod}{place} -- dd of=/dev/{disk} bs=1M < ...   # {}",
                printable(words)
            ));
            continue;
        };
        if !fill.is_size_known {
            lines.push(format!("  qemu-img info {from}   # the claim {name}-{disk}-disk must have its virtual size"));
        }
        let place_of_file = if matches!(fill.from, Place::OnNode(_)) { "   # on the node" } else { "" };
        lines.push(format!("  qemu-img convert -O raw {from} {disk}.raw{place_of_file}"));
        lines.push(format!("  kubectl exec -i {pod}{place} -- dd of=/dev/{disk} bs=1M < {disk}.raw"));
    }
    for DataFile { from, file, variables } in &draft.data {
        let Some(mut from) = in_shell(from) else { continue };
        let folder = file.rsplit_once('/').map(|(folder, _)| format!("mkdir -p /data/{folder}; ")).unwrap_or_default();
        let store = format!("kubectl exec -i {pod}{place} -- sh -c '{folder}cat > /data/{file}'");
        let Some(is_qcow2) = variables else {
            lines.push(format!("  {store} < {from}"));
            continue;
        };
        if *is_qcow2 {
            lines.push(format!("  qemu-img convert -f qcow2 -O raw {from} fw-vars.raw"));
            from = "fw-vars.raw".into();
        }
        // A volume is often larger than what it has.
        lines.push(format!("  head -c {VARIABLES} {from} | {store}"));
    }
    lines.extend([
        String::new(),
        "At last:".to_owned(),
        String::new(),
        format!("  kubectl delete pod {pod}{place}"),
        format!("  kubectl vm start {name}{place}"),
    ]);
    lines
}

/// How a shell finds a file there. What others wrote is never more than one word of the command.
fn in_shell(place: &Place) -> Option<String> {
    match place {
        // It is no option.
        Place::File(file) | Place::OnNode(file) if file.starts_with('-') => Some(for_shell(&format!("./{file}"))),
        Place::File(file) | Place::OnNode(file) => Some(for_shell(file)),
        Place::Volume(volume) => Some(format!("\"$(pvesm path {})\"", quoted(volume))),
        Place::Words(_) => None,
    }
}

/// A word for a shell.
fn for_shell(text: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-:+~".contains(letter);
    if !text.is_empty() && text.chars().all(is_plain) { text.to_owned() } else { quoted(text) }
}

/// A word for a shell, in quotes.
fn quoted(text: &str) -> String {
    format!("'{}'", printable(text).replace('\'', "'\\''"))
}

/// A text for one line.
fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}

#[cfg(test)]
mod tests;
