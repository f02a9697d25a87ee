//! One page about a VM: what is wanted, what is, what it waits for, and what belongs to it.

use std::fmt;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use serde_json::Value;

use super::{Explanation, Facts, Stage, explain, guest, time};
use crate::{
    api::{
        PendingChange, PowerState, Quantity,
        status::{DeviceStatus, StateOverride, whole_seconds},
    },
    object::STATE_UNTIL_ANNOTATION,
    observed::Object,
};

/// The most events on the page.
const EVENTS: usize = 5;

/// The page.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Page {
    /// Whether it is as wanted, and if not, why.
    pub explanation: Explanation,
    /// What the spec wants.
    pub wanted: Size,
    /// The power state that outranks the spec's, and until when.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_override: Option<StateOverride>,
    /// What there is.
    pub is: Present,
    /// The claims with the VM's data. `None`: they could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<Vec<Disk>>,
    /// The Pod. `None`: there is none, or it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,
    /// The template set and its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub templates: Option<String>,
    /// What takes effect at the next start.
    pub pending: Vec<PendingChange>,
    /// The guest's disks, CD drives and network cards, and those of its next start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceStatus>,
    /// The last events about the VM, its Pod and its claims, the newest last.
    pub events: Vec<Happening>,
}

/// How large a VM is, and whether it runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Size {
    /// Running or Stopped.
    pub state: PowerState,
    /// CPUs now, and at most.
    pub cpus: [u32; 2],
    /// Memory now, and at most.
    pub ram: [String; 2],
}

/// What there is of a VM, as its status says.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Present {
    /// Running, Stopped, ...
    pub phase: String,
    /// The node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// kvm or tcg.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
    /// The CPUs of the guest.
    pub cpus: u32,
    /// The memory of the guest.
    pub ram: String,
    /// The addresses.
    pub addresses: Vec<String>,
    /// What the guest waits for, if it runs and has not booted as far as is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// The guest's operating system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Who is logged in in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The address of a viewer of the display.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub viewer: Option<String>,
}

/// A claim.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Disk {
    /// The claim's name.
    pub claim: String,
    /// Bound, Pending, Lost.
    pub phase: String,
    /// The size of its volume, or the size that it wants.
    pub size: String,
    /// The storage class.
    pub class: String,
    /// What is not as the spec wants it: reasons of the condition StorageReady.
    pub findings: Vec<&'static str>,
}

/// The Pod.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// Kind and name of what made it, if that is not the manager.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub made_by: Option<String>,
    /// Its containers.
    pub containers: Vec<Container>,
}

/// A container.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// running, waiting (with the reason), terminated (with the reason).
    pub state: String,
    /// How often it was started again.
    pub restarts: i64,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Happening {
    /// How long ago it was seen last.
    pub age: String,
    /// Normal or Warning.
    #[serde(rename = "type")]
    pub type_: String,
    /// Its reason.
    pub reason: String,
    /// Kind and name of the object.
    pub object: String,
    /// Its words.
    pub message: String,
}

impl Page {
    /// The page of a VM.
    pub fn of(facts: &Facts) -> Self {
        let status = facts.vm.status.clone().unwrap_or_default();
        let templates = status.templates.as_ref().map(|from| {
            let set = from.set.as_deref().unwrap_or("the default set");
            from.version.as_ref().map_or_else(|| set.to_owned(), |version| format!("{set}, version {version}"))
        });
        let claims = facts.claims.as_ref();
        Self {
            explanation: explain(facts),
            wanted: wanted(facts),
            state_override: facts.overriding().cloned(),
            is: present(facts),
            disks: claims.map(|claims| claims.iter().map(|claim| disk(facts, claim)).collect()),
            pod: facts.pod().map(pod),
            templates,
            pending: status.pending_changes,
            devices: status.runner.devices,
            events: events(facts),
        }
    }
}

fn wanted(facts: &Facts) -> Size {
    let machine = &facts.vm.spec.vm;
    let ram = |quantity: &Quantity| Quantity::with_unit(quantity.bytes()).to_string();
    Size {
        state: machine.state,
        cpus: [machine.cpus(), machine.most_cpus()],
        ram: [ram(machine.ram()), ram(&machine.maximum_ram)],
    }
}

fn present(facts: &Facts) -> Present {
    let Some(status) = &facts.vm.status else { return Present::default() };
    let system = |key: &str| status.runner.osinfo.as_ref()?[key].as_str().map(str::to_owned);
    Present {
        phase: status.phase.clone().unwrap_or_default(),
        node: status.node_name.clone(),
        accelerator: status.runner.accelerator.clone(),
        cpus: status.runner.cpus.unwrap_or_default(),
        ram: status.runner.ram.as_deref().map(readable).unwrap_or_default(),
        addresses: status.addresses.iter().flatten().map(|it| it.address.clone()).collect(),
        guest: Some(guest::state(facts)).filter(|(state, _)| facts.is_up() && *state == "waits").map(|(_, text)| text),
        system: system("pretty-name").or_else(|| system("name")),
        user: status.runner.logged_in_user.clone(),
        viewer: status.runner.console_client.clone(),
    }
}

/// An amount of memory with a unit that people read. What is no amount stays.
fn readable(text: &str) -> String {
    Quantity::parse(text).map_or_else(|_| text.to_owned(), |quantity| Quantity::with_unit(quantity.bytes()).to_string())
}

fn disk(facts: &Facts, claim: &Object) -> Disk {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let size = Some(&claim.status["capacity"]["storage"]).filter(|size| !size.is_null());
    let of_claim = facts.vm.status.iter().flat_map(|it| &it.claims).find(|it| it.name == claim.key.name);
    Disk {
        claim: claim.key.name.clone(),
        phase: text(&claim.status["phase"]),
        size: text(size.unwrap_or(&claim.spec["resources"]["requests"]["storage"])),
        class: text(&claim.spec["storageClassName"]),
        findings: of_claim.iter().flat_map(|it| &it.findings).map(|finding| finding.reason.as_str()).collect(),
    }
}

fn pod(pod: &Object) -> Pod {
    let listed = |key: &str| pod.status[key].as_array().cloned().unwrap_or_default();
    let container = |status: &Value| {
        let state = status["state"].as_object().and_then(|state| state.iter().next());
        let (word, more) = state.map_or(("not started", &Value::Null), |(word, more)| (word.as_str(), more));
        Container {
            name: status["name"].as_str().unwrap_or_default().to_owned(),
            state: more["reason"].as_str().map_or_else(|| word.to_owned(), |reason| format!("{word} ({reason})")),
            restarts: status["restartCount"].as_i64().unwrap_or_default(),
        }
    };
    let containers = [listed("containerStatuses"), listed("initContainerStatuses")].concat();
    Pod {
        name: pod.key.name.clone(),
        made_by: pod.maker.as_ref().map(|maker| maker.key.to_string()),
        containers: containers.iter().map(container).collect(),
    }
}

fn events(facts: &Facts) -> Vec<Happening> {
    let own = |uid: Option<&String>| {
        let is_claim = |uid: &String| facts.claims.iter().flatten().any(|claim| claim.uid == *uid);
        uid.is_some_and(|uid| {
            facts.vm.uid().as_ref() == Some(uid) || facts.pod().is_some_and(|pod| pod.uid == *uid) || is_claim(uid)
        })
    };
    let mut found: Vec<_> = facts.events.iter().filter(|event| own(event.involved_object.uid.as_ref())).collect();
    found.sort_by_key(|event| time(event));
    let last = found.len().saturating_sub(EVENTS);
    let happening = |event: &&k8s_openapi::api::core::v1::Event| Happening {
        age: time(event).map_or_else(|| "?".to_owned(), |time| age(facts.now, time)),
        type_: event.type_.clone().unwrap_or_default(),
        reason: event.reason.clone().unwrap_or_default(),
        object: format!(
            "{}/{}",
            event.involved_object.kind.as_deref().unwrap_or_default(),
            event.involved_object.name.as_deref().unwrap_or_default()
        ),
        message: event.message.as_deref().unwrap_or_default().lines().next().unwrap_or_default().to_owned(),
    };
    found[last..].iter().map(happening).collect()
}

/// A time that has passed, in the largest unit of which there are two: `90s`, `47h`, `3d`.
pub(crate) fn age(now: Timestamp, time: Timestamp) -> String {
    let seconds = now.duration_since(time).as_secs().max(0);
    let units = [("d", 86_400), ("h", 3_600), ("m", 60)];
    let unit = units.iter().find(|(_, length)| seconds >= 2 * length);
    unit.map_or_else(|| format!("{seconds}s"), |(unit, length)| format!("{}{unit}", seconds / length))
}

/// A line with a title in a column of its own.
fn line(f: &mut fmt::Formatter<'_>, title: &str, text: &str) -> fmt::Result {
    writeln!(f, "{}", format!("{title:<12}{text}").trim_end())
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |now: &str, most: &str| if now == most { now.to_owned() } else { format!("{now} of {most}") };
        let [cpus, most] = self.cpus.map(|number| number.to_string());
        let [ram, most_ram] = &self.ram;
        let unit = if most == "1" { "CPU" } else { "CPUs" };
        write!(f, "{:?}, {} {unit}, {} of memory", self.state, of(&cpus, &most), of(ram, most_ram))
    }
}

impl fmt::Display for Present {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.phase.is_empty() { "not known yet" } else { &self.phase })?;
        if let Some(node) = &self.node {
            write!(f, " on node {node}")?;
        }
        if let Some(accelerator) = &self.accelerator {
            write!(f, " with {accelerator}")?;
        }
        if self.cpus > 0 {
            let unit = if self.cpus == 1 { "CPU" } else { "CPUs" };
            write!(f, ", {} {unit}, {} of memory", self.cpus, self.ram)?;
        }
        Ok(())
    }
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.explanation.line)?;
        line(f, "Wanted", &self.wanted.to_string())?;
        if let Some(StateOverride { state, until }) = &self.state_override {
            let end = whole_seconds(until.0);
            line(f, "But", &format!("{} until {end}, by the annotation {STATE_UNTIL_ANNOTATION}", state.as_str()))?;
        }
        line(f, "Is", &self.is.to_string())?;
        let guest = [
            self.is.system.clone(),
            self.is.guest.clone(),
            self.is.user.as_ref().map(|user| format!("{user} is logged in")),
            self.is.viewer.as_ref().map(|viewer| format!("a viewer at {viewer}")),
        ];
        let guest: Vec<String> = guest.into_iter().flatten().collect();
        if !guest.is_empty() {
            line(f, "Guest", &guest.join(", "))?;
        }
        if !self.is.addresses.is_empty() {
            line(f, "Addresses", &self.is.addresses.join(" "))?;
        }
        if let Some(git) = self.explanation.chain.iter().find(|link| link.stage == Stage::Git) {
            line(f, "Git", &git.text)?;
        }
        if let Some(templates) = &self.templates {
            line(f, "Templates", templates)?;
        }
        let mut title = "Next start";
        for PendingChange { path, subject: _, current, wanted, reason } in &self.pending {
            let text = |value: &Option<Value>| value.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
            line(f, title, &format!("{path}: {} -> {} ({reason})", text(current), text(wanted)))?;
            title = "";
        }
        title = "Devices";
        for device in self.devices.iter().filter(|device| device.is_notable()) {
            line(f, title, &device.to_string())?;
            title = "";
        }
        title = "Disks";
        for disk in self.disks.iter().flatten() {
            let Disk { claim, phase, size, class, findings } = disk;
            line(f, title, &format!("{claim:<28} {phase:<8} {size:<8} {class} {}", findings.join(" ")))?;
            title = "";
        }
        if let Some(Pod { name, made_by, containers }) = &self.pod {
            let made_by = made_by.as_ref().map(|maker| format!(", made by {maker}")).unwrap_or_default();
            line(f, "Pod", &format!("{name}{made_by}"))?;
            let width = containers.iter().map(|it| it.name.len()).max().unwrap_or_default().max(12);
            for Container { name, state, restarts } in containers {
                let again = if *restarts > 0 { format!(", started again {restarts} times") } else { String::new() };
                line(f, "", &format!("{name:<width$} {state}{again}"))?;
            }
        }
        title = "Events";
        for Happening { age, type_: _, reason, object, message } in &self.events {
            line(f, title, &format!("{age:<5} {reason:<22} {object}: {message}"))?;
            title = "";
        }
        for line in &self.explanation.unread {
            writeln!(f, "not known: {line}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::explain::tests::{EARLIER, JUST_NOW, facts, healthy};

    #[test]
    fn the_page_shows_what_there_is() {
        let mut value = healthy();
        let event = |kind: &str, uid: &str, time: &str, reason: &str, message: &str| {
            json!({ "metadata": { "name": reason.to_lowercase() }, "type": "Normal", "reason": reason, "message": message,
                "lastTimestamp": time, "involvedObject": { "kind": kind, "name": "apple", "uid": uid } })
        };
        value["events"] = json!([
            event("VirtualMachine", "apple-uid", JUST_NOW, "Started", "the guest has started on node node-1\nmore"),
            event("Pod", "pod-uid", EARLIER, "Pulled", "the image is there"),
            event("Pod", "uid-of-an-earlier-pod", JUST_NOW, "Killing", "it was another Pod"),
        ]);
        value["claims"][0]["spec"]["resources"] = json!({ "requests": { "storage": "10Gi" } });
        value["vm"]["spec"]["vm"]["currentRam"] = json!("1Gi");
        value["vm"]["spec"]["vm"]["maximumRam"] = json!("4 GiB");
        let status = &mut value["vm"]["status"];
        status["nodeName"] = json!("node-1");
        status["accelerator"] = json!("kvm");
        (status["cpus"], status["ram"]) = (json!(2), json!("1Gi"));
        status["osinfo"] = json!({ "pretty-name": "Debian GNU/Linux 13 (trixie)" });
        status["loggedInUser"] = json!("alice");
        status["addresses"] = json!([{ "type": "PodIP", "address": "10.42.0.7" }]);
        status["templates"] = json!({ "version": "0123abcd" });
        status["pendingChanges"] = json!([{ "path": "config.yaml/vm.maximumCpus", "current": 2, "wanted": 4, "reason": "QEMU reads it at its start" }]);
        status["claims"] = json!([{ "name": "apple-core-disk", "findings": [{ "reason": "Resizing" }] }]);
        value["pod"]["status"]["containerStatuses"][0]["restartCount"] = json!(2);
        value["pod"]["status"]["initContainerStatuses"] =
            json!([{ "name": "agent", "image": "runner:1", "state": { "waiting": { "reason": "ImagePullBackOff" } } }]);
        insta::assert_snapshot!(Page::of(&facts(&value)).to_string(), @"
        apple runs, but not as its spec wants it: node node-1 can't get the image runner:1:  (runnerImage of the configuration, or a template, since 2027-01-15T06:00:00Z) -> correct the image, or let the node pull it (registry, pull secret, tag)

        Wanted      Running, 2 CPUs, 1Gi of 4Gi of memory
        Is          Running on node node-1 with kvm, 2 CPUs, 1Gi of memory
        Guest       Debian GNU/Linux 13 (trixie), alice is logged in
        Addresses   10.42.0.7
        Templates   the default set, version 0123abcd
        Next start  config.yaml/vm.maximumCpus: 2 -> 4 (QEMU reads it at its start)
        Disks       apple-core-disk              Bound    10Gi     fast Resizing
        Pod         apple
                    vm-runner    running, started again 2 times
                    agent        waiting (ImagePullBackOff)
        Events      2h    Pulled                 Pod/apple: the image is there
                    2s    Started                VirtualMachine/apple: the guest has started on node node-1
        ");
        // Without rights on anything but the VM.
        for part in ["claims", "classes", "nodes", "limits", "quotas", "namespace", "deployments", "leases"] {
            value[part] = Value::Null;
        }
        (value["pod"], value["events"]) = (json!("not read"), json!([]));
        let text = Page::of(&facts(&value)).to_string();
        assert!(text.contains("\nIs          Running on node node-1 with kvm") && !text.contains("\nDisks"), "{text}");
    }
}
