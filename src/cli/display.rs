//! `kubectl vm display`: the file with which a viewer finds a machine's display and gets in.
//!
//! ```text
//!  machine, Service ─▶ endpoint ───────────────────────────────┐
//!  display secret, time ─▶ the password in force, or a new one ┴▶ connection file ─▶ standard output, or a file
//! ```
//!
//! A new password goes into the display secret. It is in force when the runner tells its end (`status.displayPasswordExpiry`), and
//! the file is written only then.

use std::{
    fmt,
    io::{self, Write},
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use k8s_openapi::{
    ByteString,
    api::core::v1::{Pod, Secret, SecretProjection, Service},
    apimachinery::pkg::util::intstr::IntOrString,
    jiff::Timestamp,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ListParams, Patch, PatchParams},
    core::NamespaceResourceScope,
    runtime::wait::await_condition,
};
use serde_json::json;
use tempfile::NamedTempFile;
use tokio::time::timeout;

use super::{Failure, connect, print, wait_for};
use crate::{
    api::{
        VirtualMachine,
        conditions::{self, CONSOLE_CONNECTED, READY, RUNNING},
    },
    files::FileError,
    ownership::COMMAND_MANAGER,
    runner_config::{
        self,
        paths::{EXPIRY_FILE, NEVER, PASSWORD_FILE},
    },
};

/// How long a runner may take to set a new password. A kubelet that is not told takes a minute and a half to show it.
const LIMIT: Duration = Duration::from_secs(120);
/// A wait that needs no word.
const SHORT: Duration = Duration::from_secs(2);
/// A password that ends sooner is as good as ended.
const SECONDS_TO_CONNECT: i64 = 10;

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
    /// The host that the viewer connects to, without a proxy. Default: display.spice.server, the load balancer, or the Pod.
    #[arg(long, value_name = "HOST")]
    server: Option<String>,
    /// The port that the viewer connects to. Default: the display's.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// How long a new password lets viewers in; at least 10s.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = time_to_connect)]
    valid_for: Duration,
    /// Whom the file is for: noted in the machine's status.consoleUser. Another user than before gets a new password.
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Take the display over from whoever is connected now.
    #[arg(long)]
    take: bool,
}

fn time_to_connect(text: &str) -> Result<Duration, String> {
    let time: kube::core::Duration = text.parse().map_err(|error| format!("{error}"))?;
    let enough = time >= Duration::from_secs(SECONDS_TO_CONNECT.unsigned_abs());
    enough
        .then(|| time.into())
        .ok_or_else(|| format!("nobody connects within that time: give at least {SECONDS_TO_CONNECT}s"))
}

pub fn run(options: &Options, output: &mut Vec<u8>) -> Result<u8, Failure> {
    // Before a password is set for nothing.
    let file = options.output.as_deref().map(|path| new_file(path).map(|file| (path, file))).transpose()?;
    let text = wait_for(connection_file(options)).flatten().map_err(|error| Failure::plain(format!("{error:#}")))?;
    match file {
        None => print(output, &text),
        Some((path, mut file)) => {
            file.write_all(text.as_bytes()).map_err(FileError::io(path))?;
            file.persist(path).map_err(|error| FileError::io(path)(error.error))?;
        }
    }
    Ok(0)
}

/// A file beside that one, to take its place, which only its owner can read.
fn new_file(path: &Path) -> Result<NamedTempFile, FileError> {
    if path.exists() && !path.is_file() {
        return Err(FileError::io(path)(io::Error::other("this is no file")));
    }
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    NamedTempFile::new_in(folder).map_err(FileError::io(path))
}

async fn connection_file(options: &Options) -> anyhow::Result<String> {
    let (client, namespace) = connect(options.namespace.as_deref()).await?;
    let machine = Machine { client, namespace, name: &options.machine };
    let vm = machine.get().await?;
    reachable(&vm, options.take).map_err(|why| anyhow!("{machine}: {why}"))?;
    let service = match (&options.server, &vm.spec.load_balancer_service) {
        (None, Some(_)) => {
            let found = machine.api::<Service>().get_opt(&options.machine).await;
            found.with_context(|| format!("{machine}: its Service"))?
        }
        _ => None,
    };
    let endpoint = Endpoint::of(&vm, service.as_ref());
    let mut proxy = vm.spec.vm.display.spice.proxy_url.as_deref();
    let host = match (&options.server, endpoint.host) {
        (Some(server), _) => {
            proxy = None;
            server.clone()
        }
        (None, Host::Named(host)) => host,
        (None, Host::Pod(address)) => {
            if proxy.is_none() {
                let (namespace, name, port) = (&machine.namespace, machine.name, endpoint.port);
                let _ = writeln!(
                    io::stderr(),
                    "{address} is the Pod's address. Where you can't reach it: kubectl port-forward -n {namespace} pod/{name} {port}, \
                     and --server localhost"
                );
            }
            address
        }
        (None, Host::Unknown) => bail!("{machine}: it has no address yet; --server gives one"),
    };
    let password = machine.password_in_force(options).await?;
    if let Some(user) = &options.user {
        let patch = Patch::Merge(json!({ "status": { "consoleUser": user } }));
        let patched = machine.api::<VirtualMachine>().patch_status(machine.name, &params(), &patch).await;
        patched.with_context(|| format!("{machine}: status.consoleUser"))?;
    }
    let port = options.port.unwrap_or(endpoint.port);
    Ok(file(&vm, &host, port, password.as_deref(), proxy, options.output.is_some()))
}

/// Whether there is a display that nobody else uses, or why not.
fn reachable(vm: &VirtualMachine, take: bool) -> Result<(), String> {
    let Some(status) = &vm.status else { return Err("it has not been started yet".into()) };
    if !conditions::is_true(&status.conditions, RUNNING) {
        let why = conditions::find(&status.conditions, READY).map(|ready| format!(": {}", ready.message));
        return Err(format!("it does not run, and has no display{}", why.unwrap_or_default()));
    }
    if !take && conditions::is_true(&status.conditions, CONSOLE_CONNECTED) {
        let from = status.console_client.as_ref().map(|address| format!(" from {address}")).unwrap_or_default();
        return Err(format!("somebody is connected to the display{from}; --take takes it over"));
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
        if let Some(balanced) = service.and_then(|service| Self::balanced(vm, service, port)) {
            return balanced;
        }
        let addresses = vm.status.as_ref().and_then(|status| status.addresses.as_ref());
        let address = addresses.and_then(|addresses| addresses.first());
        Self { host: address.map_or(Host::Unknown, |address| Host::Pod(address.address.clone())), port }
    }

    /// Where a load balancer hands that port on, once it has an address.
    fn balanced(vm: &VirtualMachine, service: &Service, port: u16) -> Option<Self> {
        let balancer = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?.first()?;
        let host = balancer.ip.clone().or(balancer.hostname.clone())?;
        let ports = service.spec.as_ref()?.ports.as_ref()?;
        let handed_on = ports.iter().find(|it| match &it.target_port {
            Some(IntOrString::Int(target)) => *target == i32::from(port),
            Some(IntOrString::String(name)) => name == protocol(vm),
            None => it.port == i32::from(port),
        })?;
        Some(Self { host: Host::Named(host), port: handed_on.port.try_into().ok()? })
    }
}

/// A machine of the cluster.
struct Machine<'a> {
    client: Client,
    namespace: String,
    name: &'a str,
}

impl fmt::Display for Machine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vm {}/{}", self.namespace, self.name)
    }
}

impl Machine<'_> {
    fn api<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn get(&self) -> anyhow::Result<VirtualMachine> {
        self.api::<VirtualMachine>().get(self.name).await.with_context(|| self.to_string())
    }

    /// The password that lets a viewer in now, if one is needed. Where the present one does not, a new one is set.
    async fn password_in_force(&self, options: &Options) -> anyhow::Result<Option<String>> {
        let Some(name) = self.display_secret().await? else { return Ok(None) };
        let secrets = self.api::<Secret>();
        let mut renewed = false;
        let password = loop {
            let secret = secrets.get(&name).await.with_context(|| format!("{self}: its Secret {name}"))?;
            let Some(present) = Password::of(&secret) else { return Ok(None) };
            let vm = self.get().await?;
            let now = Timestamp::now().as_second();
            if renewed || !present.must_be_renewed(console_user(&vm), options.user.as_deref(), now) {
                break present;
            }
            let mut end = now + i64::try_from(options.valid_for.as_secs())?;
            if present.end() == Some(end) {
                // The runner names a password by its end.
                end += 1;
            }
            let patch = json!({
                "metadata": { "resourceVersion": secret.metadata.resource_version },
                "stringData": { PASSWORD_FILE: new_password(&vm)?, EXPIRY_FILE: end.to_string() },
            });
            match secrets.patch(&name, &params(), &Patch::Merge(patch)).await {
                Ok(_) => renewed = true,
                // Somebody else wants to look, too, and has set a password.
                Err(kube::Error::Api(refusal)) if refusal.is_conflict() => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("{self}: a new password for its Secret {name}"));
                }
            }
        };
        self.wait_until_in_force(&name, &password).await?;
        anyhow::ensure!(
            password.end().is_none_or(|end| end > Timestamp::now().as_second()),
            "{self}: its runner set the password when its time was over; give a longer --valid-for"
        );
        Ok(Some(password.text))
    }

    /// Waits until the runner has set that password.
    async fn wait_until_in_force(&self, secret: &str, password: &Password) -> anyhow::Result<()> {
        let expiry = |vm: &VirtualMachine| vm.status.as_ref().and_then(|status| status.display_password_expiry.clone());
        let is_set = |vm: Option<&VirtualMachine>| vm.is_none_or(|vm| expiry(vm).as_ref() == Some(&password.expiry));
        let mut set = pin!(await_condition(self.api(), self.name, is_set));
        let mut answer = timeout(SHORT, &mut set).await;
        if answer.is_err() {
            let _ = writeln!(io::stderr(), "{self}: waiting for its runner to set the password ...");
            answer = timeout(LIMIT, set).await;
        }
        match answer {
            Ok(vm) => vm.with_context(|| self.to_string())?.map(|_| ()).ok_or_else(|| anyhow!("{self} is gone")),
            Err(_) => bail!(
                "{self}: its runner did not set the password of Secret {secret} within {} s; kubectl logs -n {} {} may say why",
                LIMIT.as_secs(),
                self.namespace,
                self.name
            ),
        }
    }

    /// The name of the Secret that the display's password is taken from: the Pod has it. Who does not see it gets the one that
    /// the manager would take: a person's before the generated one, the first by name.
    async fn display_secret(&self) -> anyhow::Result<Option<String>> {
        match self.api::<Pod>().get_opt(self.name).await {
            Ok(Some(pod)) => return Ok(secret_of(&pod)),
            // Templates may make a Pod of another name.
            Ok(None) => {}
            Err(kube::Error::Api(refusal)) if refusal.is_forbidden() => {}
            Err(error) => return Err(error).with_context(|| format!("{self}: its Pod")),
        }
        let generated = format!("{}-display-secret", self.name);
        let labels = format!(
            "app.kubernetes.io/name=vm-runner,app.kubernetes.io/component=display-secret,app.kubernetes.io/instance={}",
            self.name
        );
        match self.api::<Secret>().list_metadata(&ListParams::default().labels(&labels)).await {
            // Who may see this Secret need not see all.
            Err(kube::Error::Api(refusal)) if refusal.is_forbidden() => Ok(Some(generated)),
            found => {
                let found = found.with_context(|| format!("{self}: its display secret"))?;
                let names = found.into_iter().map(|secret| secret.name_any());
                Ok(names.min_by_key(|name| (*name == generated, name.clone())))
            }
        }
    }
}

fn params() -> PatchParams {
    PatchParams::apply(COMMAND_MANAGER)
}

/// Who got the present password.
fn console_user(vm: &VirtualMachine) -> Option<&str> {
    vm.status.as_ref().and_then(|status| status.console_user.as_deref())
}

/// The Secret whose password is projected into a Pod.
fn secret_of(pod: &Pod) -> Option<String> {
    let volumes = pod.spec.as_ref()?.volumes.iter().flatten();
    let sources = volumes.filter_map(|volume| volume.projected.as_ref()).flat_map(|it| it.sources.iter().flatten());
    let mut secrets = sources.filter_map(|source| source.secret.as_ref());
    let has_password =
        |secret: &&SecretProjection| secret.items.iter().flatten().any(|item| item.path == PASSWORD_FILE);
    secrets.find(has_password).map(|secret| secret.name.clone())
}

/// A password that nobody can guess.
fn new_password(vm: &VirtualMachine) -> anyhow::Result<String> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)?;
    let base64 = serde_json::to_value(ByteString(bits.to_vec()))?;
    let mut text = base64.as_str().unwrap_or_default().trim_end_matches('=').to_owned();
    if vm.spec.vm.display.vnc.is_some() {
        // VNC takes no more (RFC 6143, section 7.2.2).
        text.truncate(8);
    }
    Ok(text)
}

/// The password of a display secret.
struct Password {
    text: String,
    /// As the runner takes it, and tells it.
    expiry: String,
}

impl Password {
    /// None where the display lets everybody in.
    fn of(secret: &Secret) -> Option<Self> {
        let text = |key: &str| secret.data.as_ref()?.get(key).and_then(|value| runner_config::text(&value.0));
        Some(Self { text: text(PASSWORD_FILE)?, expiry: text(EXPIRY_FILE).unwrap_or_else(|| NEVER.into()) })
    }

    /// In seconds since 1970; `None`: never. What a relative time (`+n`) counts from only the runner knows: it is as good as
    /// past.
    fn end(&self) -> Option<i64> {
        (self.expiry != NEVER).then(|| self.expiry.parse().ok().filter(|_| !self.expiry.starts_with('+')).unwrap_or(0))
    }

    fn lasts(&self, now: i64) -> bool {
        self.end().is_none_or(|end| end >= now + SECONDS_TO_CONNECT)
    }

    fn must_be_renewed(&self, last_user: Option<&str>, user: Option<&str>, now: i64) -> bool {
        let for_another = user.is_some_and(|user| last_user != Some(user));
        !self.lasts(now) || (for_another && self.end().is_some())
    }
}

fn protocol(vm: &VirtualMachine) -> &'static str {
    if vm.spec.vm.display.vnc.is_some() { "vnc" } else { "spice" }
}

/// A connection file of remote-viewer's (its manual, section CONNECTION FILE). If the viewer can be told to delete it, it is.
fn file(
    vm: &VirtualMachine,
    host: &str,
    port: u16,
    password: Option<&str>,
    proxy: Option<&str>,
    delete: bool,
) -> String {
    let display = &vm.spec.vm.display;
    let spice = Some(&display.spice).filter(|_| display.vnc.is_none());
    let values = [
        ("type", Some(protocol(vm).to_owned())),
        ("host", Some(host.to_owned())),
        ("port", Some(port.to_string())),
        ("password", password.map(str::to_owned)),
        ("proxy", spice.and(proxy).map(str::to_owned)),
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
        insta::assert_snapshot!(file(&vm, "vms.example.org", 5910, Some(" a\\b\n"), Some("http://proxy:3128"), true), @r"
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
        insta::assert_snapshot!(file(&vm, "10.0.0.1", 5901, None, Some("http://proxy:3128"), false), @"
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
        let secret = |password: &str, expiry: Option<&str>| Secret {
            data: Some(
                [("display-password", Some(password)), ("password-expiry", expiry)]
                    .into_iter()
                    .filter_map(|(key, text)| Some((key.to_owned(), ByteString(text?.into()))))
                    .collect(),
            ),
            ..Secret::default()
        };
        let last_user = Some("alice");
        for (expiry, user, renewed) in [
            (None, None, false),
            (Some(""), None, false),
            (Some("never\n"), Some("bob"), false),
            (Some("1010"), None, false),
            (Some("1010"), Some("alice"), false),
            (Some("1010"), Some("bob"), true),
            (Some("1009"), Some("alice"), true),
            (Some("+300"), None, true),
            (Some("now"), None, true),
        ] {
            let password = Password::of(&secret(" secret\n", expiry)).unwrap();
            assert_eq!(password.text, " secret");
            assert_eq!(password.must_be_renewed(last_user, user, 1_000), renewed, "{expiry:?} {user:?}");
        }
        assert!(Password::of(&secret("", Some("now"))).is_none() && Password::of(&Secret::default()).is_none());
    }

    #[test]
    fn a_new_password_has_the_length_that_viewers_take() {
        let lengths = [json!({}), json!({ "vnc": {} })].map(|it| new_password(&machine(it, json!({}))).unwrap().len());
        assert_eq!(lengths, [22, 8]);
        assert_eq!(time_to_connect("10s"), Ok(Duration::from_secs(10)));
        assert!(time_to_connect("9s").is_err() && time_to_connect("-2m").is_err() && time_to_connect("10").is_err());
    }

    #[test]
    fn a_display_that_is_not_there_or_taken_says_so() {
        let stopped =
            machine(json!({}), json!({ "conditions": [condition("Ready", "StoppedAsRequested", "it is stopped")] }));
        assert_eq!(reachable(&stopped, true), Err("it does not run, and has no display: it is stopped".into()));
        let conditions = [condition("Running", "Running", ""), condition("ConsoleConnected", "Connected", "")];
        let status = json!({ "conditions": conditions, "consoleClient": "10.0.0.9" });
        let taken = machine(json!({}), status);
        let told = "somebody is connected to the display from 10.0.0.9; --take takes it over";
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
