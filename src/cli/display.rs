//! `kubectl vm display`: the file with which a viewer finds a machine's display and gets in.
//!
//! ```text
//!  machine, Service ─▶ endpoint ───────────────────────────────┐
//!  display secret, time ─▶ the password in force, or a new one ┴▶ connection file ─▶ standard output, or a file
//! ```
//!
//! A new password goes into the display secret; it is in force when the runner has counted it
//! (`status.displayPasswordSerial`), and the file is written only then.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use k8s_openapi::{
    ByteString,
    api::core::v1::{Secret, Service},
    apimachinery::pkg::util::intstr::IntOrString,
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams},
    runtime::wait::await_condition,
};
use serde_json::json;

use super::{Failure, connect, print, wait_for};
use crate::{
    api::{
        VirtualMachine,
        conditions::{self, CONSOLE_CONNECTED, READY, RUNNING},
    },
    files::FileError,
};

/// Who writes a new password.
const FIELD_MANAGER: &str = "kubectl-vm";
/// How long a runner may take to set a new password. A kubelet that is not told takes a minute and a half to show it.
const LIMIT: Duration = Duration::from_secs(120);
/// A password that ends sooner is as good as ended.
const TIME_TO_CONNECT: i64 = 10;

#[derive(Args)]
pub struct Options {
    /// The machine.
    #[arg(value_name = "VM")]
    machine: String,
    /// The namespace. Default: that of the kubeconfig's context.
    #[arg(long, short, value_name = "NS")]
    namespace: Option<String>,
    /// Write into this file, which only you can read and which the viewer deletes. Default: standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The host that the viewer connects to. Default: display.spice.server, the load balancer, or the Pod.
    #[arg(long, value_name = "HOST")]
    server: Option<String>,
    /// The port that the viewer connects to. Default: the display's.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// How long a new password lets a viewer in.
    #[arg(long, value_name = "TIME", default_value = "2m")]
    valid_for: kube::core::Duration,
    /// Whom the file is for: noted in the machine's status.consoleUser.
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Also if somebody is connected, whom the next viewer displaces.
    #[arg(long)]
    take: bool,
}

pub fn run(options: &Options, output: &mut Vec<u8>) -> Result<u8, Failure> {
    let text = wait_for(connection_file(options)).flatten().map_err(|error| Failure::plain(format!("{error:#}")))?;
    match &options.output {
        None => print(output, &text),
        Some(file) => {
            // Another's rights, if there is such a file.
            let _ = fs::remove_file(file);
            let mut open = fs::OpenOptions::new();
            open.write(true).create_new(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut open, 0o600);
            open.open(file).and_then(|mut opened| opened.write_all(text.as_bytes())).map_err(FileError::io(file))?;
        }
    }
    Ok(0)
}

async fn connection_file(options: &Options) -> anyhow::Result<String> {
    let (client, namespace) = connect(options.namespace.as_deref()).await?;
    let machines: Api<VirtualMachine> = Api::namespaced(client.clone(), &namespace);
    let vm = machines.get(&options.machine).await.with_context(|| format!("vm {namespace}/{}", options.machine))?;
    reachable(&vm, options.take).map_err(|why| anyhow!("vm {namespace}/{}: {why}", options.machine))?;
    let service = match (&options.server, &vm.spec.load_balancer_service) {
        (None, Some(_)) => {
            let services: Api<Service> = Api::namespaced(client.clone(), &namespace);
            let found = services.get_opt(&options.machine).await;
            found.with_context(|| format!("Service {namespace}/{}", options.machine))?
        }
        _ => None,
    };
    let display = Endpoint::of(&vm, service.as_ref());
    let host = match (&options.server, display.host) {
        (Some(server), _) => server.clone(),
        (None, Host::Named(host)) => host,
        (None, Host::Pod(address)) => {
            if vm.spec.vm.display.spice.proxy_url.is_none() {
                let forward = format!("kubectl port-forward pod/{} {}", options.machine, display.port);
                let _ = writeln!(
                    io::stderr(),
                    "{address} is the Pod's address. Where you can't reach it: {forward}, and --server localhost"
                );
            }
            address
        }
        (None, Host::Unknown) => bail!("vm {namespace}/{} has no address yet; --server gives one", options.machine),
    };
    if let Some(user) = &options.user {
        let patch = Patch::Merge(json!({ "status": { "consoleUser": user } }));
        let patched = machines.patch_status(&options.machine, &PatchParams::apply(FIELD_MANAGER), &patch).await;
        patched.with_context(|| format!("vm {namespace}/{}: status.consoleUser", options.machine))?;
    }
    let password = password_in_force(&client, &vm, options.valid_for.into()).await?;
    let port = options.port.unwrap_or(display.port);
    Ok(file(&vm, &host, port, password.as_deref(), options.output.is_some()))
}

/// Whether there is a display that nobody else uses, or why not.
fn reachable(vm: &VirtualMachine, take: bool) -> Result<(), String> {
    let status = vm.status.clone().unwrap_or_default();
    if !conditions::is_true(&status.conditions, RUNNING) {
        let why = conditions::find(&status.conditions, READY).map(|ready| format!(": {}", ready.message));
        return Err(format!("it does not run, and has no display{}", why.unwrap_or_default()));
    }
    if !take && conditions::is_true(&status.conditions, CONSOLE_CONNECTED) {
        let from = status.console_client.map(|address| format!(" from {address}")).unwrap_or_default();
        return Err(format!("somebody is connected to the display{from}; --take to displace them"));
    }
    Ok(())
}

/// Where a viewer finds a display.
#[derive(Debug, PartialEq)]
struct Endpoint {
    host: Host,
    port: u16,
}

#[derive(Debug, PartialEq)]
enum Host {
    /// By the machine's spec or by a load balancer: made for viewers.
    Named(String),
    /// That of the Pod.
    Pod(String),
    Unknown,
}

impl Endpoint {
    fn of(vm: &VirtualMachine, service: Option<&Service>) -> Self {
        let display = &vm.spec.vm.display;
        let port = display.vnc.as_ref().map_or(display.spice.port, |vnc| vnc.port);
        if let Some(server) = &display.spice.server {
            return Self { host: Host::Named(server.clone()), port };
        }
        if let Some(balanced) = service.and_then(|service| Self::balanced(service, port)) {
            return balanced;
        }
        let addresses = vm.status.as_ref().and_then(|status| status.addresses.as_ref());
        let address = addresses.and_then(|addresses| addresses.first());
        Self { host: address.map_or(Host::Unknown, |address| Host::Pod(address.address.clone())), port }
    }

    /// Where a load balancer hands that port on, once it has an address.
    fn balanced(service: &Service, port: u16) -> Option<Self> {
        let balancer = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?.first()?;
        let host = balancer.ip.clone().or(balancer.hostname.clone())?;
        let ports = service.spec.as_ref()?.ports.as_ref()?;
        let handed_on = ports.iter().find(|it| match &it.target_port {
            Some(IntOrString::Int(target)) => *target == i32::from(port),
            Some(IntOrString::String(name)) => name == "spice",
            None => it.port == i32::from(port),
        })?;
        Some(Self { host: Host::Named(host), port: handed_on.port.try_into().ok()? })
    }
}

/// The password that lets a viewer in now, if one is needed. Where the present one does not, a new one is set.
async fn password_in_force(
    client: &Client,
    vm: &VirtualMachine,
    valid_for: Duration,
) -> anyhow::Result<Option<String>> {
    let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    let Some(secret) = display_secret(&secrets, &name).await? else { return Ok(None) };
    let now = Timestamp::now().as_second();
    if let Some(password) = in_force(secret.data.as_ref().unwrap_or(&BTreeMap::new()), now) {
        return Ok(Some(password));
    }
    let password = format!("{:016x}{:016x}", getrandom::u64()?, getrandom::u64()?);
    let expiry = now + i64::try_from(valid_for.as_secs())?;
    let patch = json!({
        "metadata": { "resourceVersion": secret.metadata.resource_version },
        "stringData": { "display-password": password, "password-expiry": expiry.to_string() },
    });
    let patched = secrets.patch(&secret.name_any(), &PatchParams::apply(FIELD_MANAGER), &Patch::Merge(patch)).await;
    patched.with_context(|| format!("Secret {namespace}/{}: a new password", secret.name_any()))?;
    let serial = |vm: &VirtualMachine| vm.status.as_ref().and_then(|it| it.display_password_serial).unwrap_or_default();
    let before = serial(vm);
    let machines: Api<VirtualMachine> = Api::namespaced(client.clone(), &namespace);
    let taken = await_condition(machines, &name, |vm: Option<&VirtualMachine>| vm.is_none_or(|vm| serial(vm) > before));
    match tokio::time::timeout(LIMIT, taken).await {
        Ok(vm) => match vm? {
            Some(_) => Ok(Some(password)),
            None => bail!("vm {namespace}/{name} is gone"),
        },
        Err(_) => bail!(
            "vm {namespace}/{name}: its runner did not set the new password of Secret {} within {} s: see kubectl logs {name}",
            secret.name_any(),
            LIMIT.as_secs()
        ),
    }
}

/// The machine's display secret: a person's comes before the generated one, as for the manager.
async fn display_secret(secrets: &Api<Secret>, machine: &str) -> anyhow::Result<Option<Secret>> {
    let generated = format!("{machine}-display-secret");
    let labels = format!(
        "app.kubernetes.io/name=vm-runner,app.kubernetes.io/component=display-secret,app.kubernetes.io/instance={machine}"
    );
    match secrets.list(&ListParams::default().labels(&labels)).await {
        // Who may see this Secret need not see all.
        Err(kube::Error::Api(refusal)) if refusal.is_forbidden() => {
            secrets.get_opt(&generated).await.with_context(|| format!("Secret {generated}"))
        }
        found => {
            let found = found.context("the display secret")?;
            Ok(found.into_iter().min_by_key(|secret| secret.name_any() == generated))
        }
    }
}

/// The password of a display secret, if it lets a viewer in at `now` (seconds since 1970). What a relative time (`+n`) counts
/// from only the runner knows.
fn in_force(data: &BTreeMap<String, ByteString>, now: i64) -> Option<String> {
    let text = |key| data.get(key).map(|value| String::from_utf8_lossy(&value.0).trim().to_owned());
    let lasts = match text("password-expiry").as_deref() {
        None | Some("never") => true,
        Some(time) if time.starts_with('+') => false,
        Some(time) => time.parse().is_ok_and(|end: i64| end >= now + TIME_TO_CONNECT),
    };
    text("display-password").filter(|_| lasts)
}

/// A connection file of remote-viewer's (its manual, section CONNECTION FILE). If the viewer can be told to delete it, it is.
fn file(vm: &VirtualMachine, host: &str, port: u16, password: Option<&str>, delete: bool) -> String {
    let display = &vm.spec.vm.display;
    let (type_, spice) = if display.vnc.is_some() { ("vnc", None) } else { ("spice", Some(&display.spice)) };
    let values = [
        ("type", Some(type_.to_owned())),
        ("host", Some(host.to_owned())),
        ("port", Some(port.to_string())),
        ("password", password.map(str::to_owned)),
        ("proxy", spice.and_then(|spice| spice.proxy_url.clone())),
        ("title", Some(format!("{}/{}", vm.namespace().unwrap_or_default(), vm.name_any()))),
        ("enable-usbredir", spice.filter(|spice| spice.usb_redirects > 0).map(|_| "1".to_owned())),
        ("delete-this-file", delete.then(|| "1".to_owned())),
    ];
    let lines = values.into_iter().filter_map(|(key, value)| Some(format!("{key}={}\n", escaped(&value?))));
    std::iter::once("[virt-viewer]\n".to_owned()).chain(lines).collect()
}

/// A value as GKeyFile reads it (<https://docs.gtk.org/glib/struct.KeyFile.html>): it would take spaces at the start away, and
/// a backslash for the start of an escape.
fn escaped(value: &str) -> String {
    let text = value.trim_start_matches(' ');
    let spaces = "\\s".repeat(value.len() - text.len());
    spaces + &text.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r").replace('\t', "\\t")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(display: serde_json::Value, status: serde_json::Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.jdrupes.org/v1",
            "kind": "VirtualMachine",
            "metadata": { "name": "apple", "namespace": "orchard" },
            "spec": { "vm": { "maximumRam": "1Gi", "networks": [], "disks": [], "display": display } },
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn a_spice_viewer_gets_all_that_the_spec_has_for_it() {
        let spice = json!({ "spice": { "port": 5910, "server": "vms.example.org", "proxyUrl": "http://proxy:3128" } });
        let vm = machine(spice, json!({}));
        let endpoint = Endpoint::of(&vm, None);
        assert_eq!(endpoint, Endpoint { host: Host::Named("vms.example.org".into()), port: 5910 });
        insta::assert_snapshot!(file(&vm, "vms.example.org", 5910, Some(" a\\b\n"), true), @r"
        [virt-viewer]
        type=spice
        host=vms.example.org
        port=5910
        password=\sa\\b\n
        proxy=http://proxy:3128
        title=orchard/apple
        enable-usbredir=1
        delete-this-file=1
        ");
    }

    #[test]
    fn a_vnc_viewer_knows_no_proxy() {
        let vm = machine(json!({ "vnc": { "port": 5901 }, "spice": { "proxyUrl": "http://proxy:3128" } }), json!({}));
        insta::assert_snapshot!(file(&vm, "10.0.0.1", 5901, None, false), @"
        [virt-viewer]
        type=vnc
        host=10.0.0.1
        port=5901
        title=orchard/apple
        ");
    }

    #[test]
    fn a_load_balancer_comes_before_the_pod() {
        let vm = machine(json!({}), json!({ "addresses": [{ "type": "PodIP", "address": "10.0.0.1" }] }));
        let pod = Endpoint { host: Host::Pod("10.0.0.1".into()), port: 5900 };
        assert_eq!(Endpoint::of(&vm, None), pod);
        let mut service: Service = serde_json::from_value(json!({
            "spec": { "ports": [{ "port": 22, "targetPort": 22 }, { "port": 6000, "targetPort": 5900 }] },
        }))
        .unwrap();
        assert_eq!(Endpoint::of(&vm, Some(&service)), pod, "it has no address yet");
        let balancer = json!({ "loadBalancer": { "ingress": [{ "hostname": "lb.example.org" }] } });
        service.status = serde_json::from_value(balancer).unwrap();
        let balanced = Endpoint { host: Host::Named("lb.example.org".into()), port: 6000 };
        assert_eq!(Endpoint::of(&vm, Some(&service)), balanced);
        assert_eq!(Endpoint::of(&machine(json!({}), json!({})), None).host, Host::Unknown);
    }

    #[test]
    fn a_password_is_used_again_only_while_it_lasts() {
        let force = |expiry: Option<&str>| {
            let entries = [("display-password", Some("secret")), ("password-expiry", expiry)];
            let data = entries.iter().filter_map(|(key, text)| Some((key.to_string(), ByteString((*text)?.into()))));
            in_force(&data.collect(), 1_000)
        };
        for (expiry, lasts) in [
            (None, true),
            (Some("never\n"), true),
            (Some("1010"), true),
            (Some("1009"), false),
            (Some("+300"), false),
            (Some("now"), false),
            (Some(""), false),
        ] {
            assert_eq!(force(expiry), lasts.then(|| "secret".to_owned()), "{expiry:?}");
        }
        assert_eq!(in_force(&BTreeMap::new(), 1_000), None);
    }

    #[test]
    fn a_display_that_is_not_there_or_taken_says_so() {
        let stopped =
            machine(json!({}), json!({ "conditions": [condition("Ready", "StoppedAsRequested", "it is stopped")] }));
        assert_eq!(reachable(&stopped, true), Err("it does not run, and has no display: it is stopped".into()));
        let conditions = [condition("Running", "Running", ""), condition("ConsoleConnected", "Connected", "")];
        let status = json!({ "conditions": conditions, "consoleClient": "10.0.0.9" });
        let taken = machine(json!({}), status);
        let told = "somebody is connected to the display from 10.0.0.9; --take to displace them";
        assert_eq!(reachable(&taken, false), Err(told.into()));
        assert_eq!(reachable(&taken, true), Ok(()));
    }

    fn condition(type_: &str, reason: &str, message: &str) -> serde_json::Value {
        json!({
            "type": type_, "status": "True", "reason": reason, "message": message,
            "lastTransitionTime": "2024-01-01T00:00:00Z",
        })
    }
}
