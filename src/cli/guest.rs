//! `kubectl vm guest`: what is known of the guest of a VM, on one page.
//!
//! ```text
//!  the VM's status ──────────────────────────────────────┐
//!  kubectl exec ... vm-runner guest ─▶ its guest agent ──┴▶ Page ─▶ text, JSON, YAML
//! ```
//!
//! Who may not run programs in the Pod gets what the status has.

use std::fmt;

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;

use super::{
    format::DataFormat,
    in_pod::{InPod, Target, start_failed},
    output::{Exit, Failure, Output, note},
};
use crate::api::{
    Quantity, VirtualMachine,
    conditions::{self, BOOTED},
    status::whole_seconds,
};

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    target: Target,
    /// Print it as data.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<DataFormat>,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let (vm, found) = options.target.read().await?;
    if !found.runs() {
        let (name, namespace) = (vm.name(), vm.namespace());
        return Err(Failure::new(format!(
            "{vm}: its guest does not run: kubectl vm explain {name} -n {namespace} says why"
        )));
    }
    let agent = match InPod::of(&vm, &found, options.target.cluster()).await {
        Ok(pod) => ask(&pod).unwrap_or_else(|failure| Err(failure.words())),
        Err(failure) => Err(failure.words()),
    };
    if let Err(why) = &agent {
        note(&format!("{vm}: the guest's agent is not asked, so this is what the VM's status has: {why}"));
    }
    output.found(&Page::of(&found, agent.as_ref().ok()), options.output.as_ref())?;
    Ok(Exit::Success)
}

/// What the guest agent says, or why it is not known.
fn ask(pod: &InPod<'_>) -> Result<Result<Value, String>, Failure> {
    let answer = pod.runner(&[], &["guest"]).output().map_err(start_failed)?;
    if answer.status.success() {
        return Ok(serde_json::from_slice(&answer.stdout).map_err(|error| error.to_string()));
    }
    let said = String::from_utf8_lossy(&answer.stderr);
    let is_talk =
        |line: &&str| !line.is_empty() && !line.starts_with("command terminated") && !line.starts_with("For more");
    let line = said.lines().map(str::trim).find(is_talk).unwrap_or("kubectl exec failed").to_owned();
    // A runner that was started before this release.
    let is_old = line.contains("unrecognized subcommand");
    Ok(Err(if is_old { "its runner can't do that yet; the next start brings one that can".into() } else { line }))
}

/// What is known of a guest. What a guest says can be anything; a field that is not as documented is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Page {
    /// Whether its agent has answered.
    is_up: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time_zone: Option<String>,
    /// The addresses under which the cluster reaches it.
    addresses: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    interfaces: Option<Vec<Interface>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    users: Option<Vec<User>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file_systems: Option<Vec<FileSystem>>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Interface {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    mac: Option<String>,
    /// With the length of their prefix: 10.0.2.15/24.
    addresses: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct User {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct FileSystem {
    mountpoint: String,
    #[serde(rename = "type")]
    type_: String,
    device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    used_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_bytes: Option<u64>,
}

fn text(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn items<T>(value: &Value, item: impl FnMut(&Value) -> Option<T>) -> Option<Vec<T>> {
    Some(value.as_array()?.iter().filter_map(item).collect())
}

impl Page {
    /// The page of a VM, with what its guest agent says, if it could be asked.
    fn of(vm: &VirtualMachine, agent: Option<&Value>) -> Self {
        let status = vm.status.clone().unwrap_or_default();
        let agent = agent.unwrap_or(&Value::Null);
        let system = agent.get("osinfo").or(status.runner.osinfo.as_ref()).unwrap_or(&Value::Null);
        let mut users = items(&agent["users"], user);
        if users.is_none() {
            users = status.runner.logged_in_user.map(|name| vec![User { name, since: None }]);
        }
        let zone = &agent["timezone"];
        let offset = zone["offset"].as_i64().map(|seconds| {
            let minutes = seconds.unsigned_abs() / 60;
            format!("UTC{}{:02}:{:02}", if seconds < 0 { '-' } else { '+' }, minutes / 60, minutes % 60)
        });
        Self {
            is_up: agent.is_object() || conditions::is_true(&status.conditions, BOOTED),
            system: text(&system["pretty-name"]).or_else(|| text(&system["name"])),
            kernel: text(&system["kernel-release"]),
            machine: text(&system["machine"]),
            host_name: text(&agent["hostname"]["host-name"]),
            time_zone: text(&zone["zone"]).or(offset),
            addresses: status.addresses.into_iter().flatten().map(|it| it.address).collect(),
            interfaces: items(&agent["interfaces"], interface),
            users,
            file_systems: items(&agent["filesystems"], file_system),
        }
    }
}

/// An interface that leads out of the guest.
fn interface(value: &Value) -> Option<Interface> {
    let name = text(&value["name"]).filter(|name| name != "lo")?;
    let address = |it: &Value| {
        let address = text(&it["ip-address"])?;
        Some(it["prefix"].as_u64().map_or_else(|| address.clone(), |prefix| format!("{address}/{prefix}")))
    };
    Some(Interface {
        name,
        mac: text(&value["hardware-address"]),
        addresses: items(&value["ip-addresses"], address).unwrap_or_default(),
    })
}

fn user(value: &Value) -> Option<User> {
    // Seconds since 1970, with a fraction.
    let since = value["login-time"].to_string();
    let since = since.split('.').next().and_then(|seconds| Timestamp::from_second(seconds.parse().ok()?).ok());
    Some(User { name: text(&value["user"])?, since: since.map(whole_seconds) })
}

fn file_system(value: &Value) -> Option<FileSystem> {
    Some(FileSystem {
        mountpoint: text(&value["mountpoint"])?,
        type_: text(&value["type"]).unwrap_or_default(),
        device: text(&value["name"]).unwrap_or_default(),
        used_bytes: value["used-bytes"].as_u64(),
        total_bytes: value["total-bytes"].as_u64(),
    })
}

fn size(bytes: u64) -> String {
    Quantity::with_unit(bytes).to_string()
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A name of the guest's can't make lines of its own.
        let mut line = |title: &str, text: &str| {
            let text: String = text.chars().map(|it| if it.is_control() { '\u{fffd}' } else { it }).collect();
            writeln!(f, "{}", format!("{title:<13}{text}").trim_end())
        };
        let kernel = self.kernel.as_ref().map(|kernel| format!("kernel {kernel}"));
        let system: Vec<String> = [self.system.clone(), kernel, self.machine.clone()].into_iter().flatten().collect();
        let unknown = if self.is_up { "its agent does not say what it is" } else { "its agent has not answered" };
        line("Guest", &if system.is_empty() { unknown.to_owned() } else { system.join(", ") })?;
        for (title, text) in [("Host name", &self.host_name), ("Time zone", &self.time_zone)] {
            if let Some(text) = text {
                line(title, text)?;
            }
        }
        if !self.addresses.is_empty() {
            line("Addresses", &self.addresses.join(" "))?;
        }
        let mut title = "Interfaces";
        for Interface { name, mac, addresses } in self.interfaces.iter().flatten() {
            line(title, &format!("{name:<12} {:<18} {}", mac.as_deref().unwrap_or("-"), addresses.join(" ")))?;
            title = "";
        }
        title = "Users";
        for User { name, since } in self.users.iter().flatten() {
            let since = since.as_ref().map(|time| format!("since {time}")).unwrap_or_default();
            line(title, &format!("{name:<12} {since}"))?;
            title = "";
        }
        if self.users.as_ref().is_some_and(Vec::is_empty) {
            line(title, "nobody is logged in")?;
        }
        title = "File systems";
        for FileSystem { mountpoint, type_, device, used_bytes, total_bytes } in self.file_systems.iter().flatten() {
            let used = match (used_bytes, total_bytes) {
                (Some(used), Some(total)) => format!("{} of {}", size(*used), size(*total)),
                (_, Some(total)) => size(*total),
                _ => "-".into(),
            };
            line(title, &format!("{mountpoint:<20} {type_:<8} {device:<10} {used}"))?;
            title = "";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support;

    fn vm() -> VirtualMachine {
        test_support::vm(|vm| {
            vm["status"] = json!({
                "osinfo": { "name": "Debian" }, "addresses": [{ "type": "PodIP", "address": "10.1.2.3" }], "loggedInUser": "ann",
            });
        })
    }

    #[test]
    fn the_page_has_what_the_agent_says() {
        let agent = json!({
            "osinfo": { "pretty-name": "Debian GNU/Linux 12", "kernel-release": "6.1.0", "machine": "x86_64" },
            "hostname": { "host-name": "apple" },
            "timezone": { "offset": -12_600 },
            "interfaces": [
                { "name": "lo", "ip-addresses": [{ "ip-address": "127.0.0.1", "prefix": 8 }] },
                { "name": "eth0", "hardware-address": "52:54:00:00:00:01", "ip-addresses": [
                    { "ip-address": "10.0.2.15", "prefix": 24 }, { "ip-address": "fe80::1" },
                ] },
            ],
            "users": [{ "user": "ben\n\u{1b}[2J", "login-time": 1_800_000_000.25 }],
            "filesystems": [
                { "mountpoint": "/", "type": "ext4", "name": "vda1", "used-bytes": 805_306_368, "total-bytes": 8_589_934_592_u64 },
                { "mountpoint": "/boot", "type": "vfat", "name": "vda2" },
            ],
        });
        insta::assert_snapshot!(Page::of(&vm(), Some(&agent)), @r"
        Guest        Debian GNU/Linux 12, kernel 6.1.0, x86_64
        Host name    apple
        Time zone    UTC-03:30
        Addresses    10.1.2.3
        Interfaces   eth0         52:54:00:00:00:01  10.0.2.15/24 fe80::1
        Users        ben��[2J     since 2027-01-15T08:00:00Z
        File systems /                    ext4     vda1       768Mi of 8Gi
                     /boot                vfat     vda2       -
        ");
        let data = json!(Page::of(&vm(), Some(&agent)));
        assert_eq!((&data["isUp"], &data["fileSystems"][0]["usedBytes"]), (&json!(true), &json!(805_306_368)));
    }

    #[test]
    fn without_the_agent_it_has_what_the_status_has() {
        insta::assert_snapshot!(Page::of(&vm(), None), @r"
        Guest        Debian
        Addresses    10.1.2.3
        Users        ann
        ");
        assert_eq!(Page::of(&test_support::vm(|_| ()), None).to_string(), "Guest        its agent has not answered\n");
    }

    #[test]
    fn what_a_guest_says_may_be_anything() {
        let odd = json!({
            "osinfo": 7, "hostname": [], "timezone": { "offset": i64::MIN, "zone": 1 }, "interfaces": [1, { "name": {} }],
            "users": [{ "user": 1 }, { "user": "a", "login-time": 1e300 }], "filesystems": "x",
        });
        let page = Page::of(&vm(), Some(&odd));
        assert_eq!((page.interfaces, page.file_systems), (Some(vec![]), None));
        assert_eq!(page.users, Some(vec![User { name: "a".into(), since: None }]));
        Page::of(&vm(), Some(&json!([])));
    }
}
