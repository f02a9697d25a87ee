//! `kubectl vm dump`: all that a bug report about a VM needs, in one archive, without secrets ([`mask`]).
//!
//! ```text
//!  VM ─▶ facts, objects, events, logs, templates, manager ─▶ masked ─▶ NAME.tar.gz
//!         └▶ what could not be read ─▶ unread.txt
//! ```

use std::{
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use flate2::{Compression, write::GzEncoder};
use k8s_openapi::{
    api::core::v1::{ConfigMap, Event, Pod, Secret},
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, LogParams, TypeMeta},
};
use serde_json::{Value, json};

use super::{
    belongings,
    display::PrivateFile,
    events::{self, OfVm},
    explain,
    in_pod::Target,
    input::Settings,
    installed::Installed,
    output::{Exit, Failure, Output, note, yaml},
    vms::{self, refused, title, understood},
};
use crate::{
    actions::{FoundVm, VmHandle},
    client::discovery::Resources,
    config::{Allowed, ReconcilerConfig},
    explain::{Facts, page::Page},
    mask,
    object::{CONFIG_MAP, SET_LABEL, TEMPLATES_MAP},
    process::ErrorChain,
    render::first_start,
};

/// The kinds of objects that VMs have with the built-in templates and those of former releases.
const KINDS: [(&str, &str); 6] = [
    ("v1", "Pod"),
    ("v1", "PersistentVolumeClaim"),
    ("v1", "ConfigMap"),
    ("v1", "Secret"),
    ("v1", "Service"),
    ("apps/v1", "StatefulSet"),
];
/// The last lines of each log.
const LINES: i64 = 20_000;

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    target: Target,
    /// The archive, which only you can read; - is standard output. Default: NAME.tar.gz.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The manager's namespace, with its templates and configuration. Default: that of a manager that is found, or the VM's.
    #[arg(long, value_name = "NS")]
    manager_namespace: Option<String>,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let vm = options.target.handle().await?;
    let name = vm.name().to_owned();
    let to_stdout = options.output.as_deref() == Some(Path::new("-"));
    if to_stdout && std::io::stdout().is_terminal() {
        return Err(Failure::usage("an archive is not for a terminal: give a file by --output"));
    }
    let path = options.output.clone().unwrap_or_else(|| format!("{name}.tar.gz").into());
    // First of all, so that nothing is read for a file that can't be written.
    let file = if to_stdout { None } else { Some(PrivateFile::new(&path)?) };
    let found = match vms::api(vm.client(), vm.namespace()).get(&name).await {
        Ok(object) => understood(object)?,
        Err(error) => {
            let line = refused(vm.client(), &title(&name), &["get"], Some(vm.namespace()), &error).await;
            return Err(vms::failure(line, &error));
        }
    };
    let mut dump = Dump::default();
    dump.gather(&vm, &found, options.manager_namespace.as_deref()).await;
    let unread = dump.unread.len();
    let archive = dump.archive(&name, Timestamp::now()).map_err(|error| Failure::new(format!("{name}: {error}")))?;
    match file {
        Some(file) => file.replace(&archive)?,
        None => {
            output.flush()?;
            // It is no text, in which the output would look for colours.
            std::io::stdout().write_all(&archive).map_err(Failure::Output)?;
        }
    }
    if !to_stdout {
        note(&format!(
            "{} is in {}; look through it before you give it away: README.txt in it says what is masked",
            title(&name),
            path.display()
        ));
    }
    if unread > 0 {
        note(&format!("{unread} things could not be read: unread.txt in it names them"));
    }
    Ok(Exit::Success)
}

/// What goes into the archive.
#[derive(Default)]
struct Dump {
    files: Vec<(String, String)>,
    unread: Vec<String>,
    known: mask::KnownSecrets,
}

impl Dump {
    fn add(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.files.push((name.into(), text.into()));
    }

    fn add_object(&mut self, folder: &str, object: Value) {
        let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default().to_owned();
        let file = format!("{folder}/{}-{}.yaml", object["kind"].as_str().unwrap_or("object"), text("name"));
        let object = mask::object(object);
        match yaml(&object) {
            Ok(text) => self.add(file, text),
            Err(failure) => self.unread.push(format!("{file}: {}", failure.words())),
        }
    }

    /// Adds a ConfigMap of the manager, with its packed templates as they are.
    fn add_map(&mut self, mut map: ConfigMap) {
        map.data = map.data.map(crate::files::unpacked);
        self.add_object("manager", typed(json!(map), "v1", "ConfigMap"));
    }

    /// Keeps what was read, and notes what was not.
    fn read<T>(&mut self, what: &str, result: kube::Result<T>) -> Option<T> {
        match result {
            Ok(found) => Some(found),
            Err(kube::Error::Api(answer)) => {
                self.unread.push(format!("{what}: {}", answer.message));
                None
            }
            Err(error) => {
                self.unread.push(format!("{what}: {}", ErrorChain(&error)));
                None
            }
        }
    }

    async fn gather(&mut self, vm: &VmHandle, found: &FoundVm, home: Option<&str>) {
        let (client, namespace, name) = (vm.client(), vm.namespace(), vm.name());
        self.add_object("vm", typed(json!(found.object), "vmoperator.jdrupes.org/v1", "VirtualMachine"));
        match explain::gather(client, namespace, name).await {
            Ok(facts) => self.add_facts(&facts),
            Err(failure) => self.unread.push(failure.words()),
        }
        let pods = self.objects(client, namespace, found).await;
        let of_vm = OfVm::new(&found.vm);
        let events = events::list(&Api::<Event>::namespaced(client.clone(), namespace)).await;
        if let Some(events) = self.read("events", events) {
            self.add("events.txt", events::page(&of_vm.sorted(events), Timestamp::now()));
        }
        for pod in &pods {
            self.logs("logs", client, namespace, pod).await;
        }
        let managers = self.managers(client, namespace).await;
        let home = home.map(str::to_owned).or(managers).unwrap_or_else(|| namespace.to_owned());
        self.templates(client, &home, found).await;
        let server = client.apiserver_version().await.map(|version| version.git_version);
        let server = self.read("the API server's version", server).unwrap_or_else(|| "not known".into());
        self.add("versions.txt", format!("kubectl-vm {}\nAPI server {server}\n", env!("CARGO_PKG_VERSION")));
    }

    fn add_facts(&mut self, facts: &Facts) {
        self.add("explain.txt", crate::explain::explain(facts).to_string());
        self.add("status.txt", Page::of(facts).to_string());
        for node in facts
            .nodes
            .as_deref()
            .into_iter()
            .flatten()
            .filter(|node| facts.pod().and_then(|pod| pod.node_name()) == Some(&node.name_any()))
        {
            self.add_object("cluster", typed(json!(node), "v1", "Node"));
        }
        for class in facts.classes.iter().flatten() {
            self.add_object("cluster", typed(json!(class), "storage.k8s.io/v1", "StorageClass"));
        }
        self.unread.extend(facts.unread.iter().cloned());
    }

    /// The VM's objects, and its Pods.
    async fn objects(&mut self, client: &Client, namespace: &str, found: &FoundVm) -> Vec<Pod> {
        let status = found.vm.status.iter().flat_map(|status| status.object_kinds.clone());
        let built_in = KINDS.map(|(version, kind)| TypeMeta { api_version: version.into(), kind: kind.into() });
        let resources = Resources::new(client.clone());
        let mut pods = Vec::new();
        for types in built_in.into_iter().chain(status.map(TypeMeta::from)) {
            let what = format!("objects of the kind {}", types.kind);
            let Some(resource) = self.read(&what, resources.of(&types).await) else { continue };
            let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
            let objects = belongings::of_kind(&api, &types, &found.vm).await;
            for object in self.read(&what, objects).into_iter().flatten() {
                let value = typed(json!(object), &types.api_version, &types.kind);
                match types.kind.as_str() {
                    "Pod" => pods.extend(serde_json::from_value::<Pod>(value.clone())),
                    "Secret" => {
                        if let Ok(secret) = serde_json::from_value::<Secret>(value.clone()) {
                            self.known.add(&secret);
                        }
                    }
                    _ => {}
                }
                self.add_object("objects", value);
            }
        }
        pods
    }

    /// The logs of the containers of a Pod, also those before their last restart.
    async fn logs(&mut self, folder: &str, client: &Client, namespace: &str, pod: &Pod) {
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let status = pod.status.clone().unwrap_or_default();
        let containers = [status.init_container_statuses, status.container_statuses];
        for container in containers.into_iter().flatten().flatten() {
            for previous in [false, true].into_iter().take(if container.restart_count > 0 { 2 } else { 1 }) {
                let parameters = LogParams {
                    container: Some(container.name.clone()),
                    previous,
                    tail_lines: Some(LINES),
                    timestamps: true,
                    ..LogParams::default()
                };
                let of = if previous { ".previous" } else { "" };
                let file = format!("{folder}/{}-{}{of}.log", pod.name_any(), container.name);
                let log = api.logs(&pod.name_any(), &parameters).await;
                if let Some(log) = self.read(&file, log) {
                    self.add(file, log);
                }
            }
        }
    }

    /// The managers that can be found, and the namespace of one.
    async fn managers(&mut self, client: &Client, namespace: &str) -> Option<String> {
        let deployments = explain::deployments(client, namespace).await;
        let deployments = self.read("the manager's Deployment", deployments).unwrap_or_default();
        let home = deployments.first().and_then(ResourceExt::namespace);
        for deployment in deployments {
            self.add_object("manager", typed(json!(deployment), "apps/v1", "Deployment"));
        }
        let Some(place) = &home else { return home };
        let pods = Api::<Pod>::namespaced(client.clone(), place).list(&explain::pods_of_managers()).await;
        for pod in self.read("the manager's Pods", pods).into_iter().flatten() {
            self.logs("manager", client, place, &pod).await;
        }
        home
    }

    /// The manager's configuration and templates, and what a new VM like this one would be rendered to.
    async fn templates(&mut self, client: &Client, home: &str, found: &FoundVm) {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), home);
        let named = [CONFIG_MAP, TEMPLATES_MAP];
        for name in named {
            let map = api.get_opt(name).await;
            if let Some(map) = self.read(&format!("ConfigMap {name} in the namespace {home}"), map).flatten() {
                self.add_map(map);
            }
        }
        let sets = api.list(&ListParams::default().labels(SET_LABEL)).await;
        for map in self.read(&format!("template sets in the namespace {home}"), sets).into_iter().flatten() {
            self.add_map(map);
        }
        let settings = Settings { templates: None, values: None, config: None };
        let installed = match Installed::read(client, home, &settings).await {
            Ok(installed) => installed,
            Err(failure) => return self.unread.push(format!("what is rendered: {}", failure.words())),
        };
        let library = installed.library();
        // Also of a VM that is refused: explain.txt says what is not allowed.
        let config = ReconcilerConfig { allowed: Allowed::everything(), ..installed.config.clone() };
        let rendered = library.get(found.vm.template_set()).and_then(|set| first_start(&found.vm, &config, set));
        match rendered {
            Ok(objects) => objects.iter().for_each(|object| self.add_object("rendered", Value::clone(&object.value))),
            Err(error) => self.add("rendered/error.txt", error.to_string()),
        }
    }

    /// The archive: all files in a folder of the VM's name, with secrets masked.
    fn archive(mut self, name: &str, now: Timestamp) -> std::io::Result<Vec<u8>> {
        self.add("README.txt", README);
        if !self.unread.is_empty() {
            let lines: Vec<String> = self.unread.iter().map(|line| line.replace('\n', " ")).collect();
            self.add("unread.txt", lines.join("\n") + "\n");
        }
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        for (file, text) in &self.files {
            let text = self.known.mask(text);
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o600);
            header.set_mtime(u64::try_from(now.as_second()).unwrap_or_default());
            archive.append_data(&mut header, format!("{name}/{file}"), text.as_bytes())?;
        }
        let mut bytes = archive.into_inner()?.finish()?;
        bytes.flush()?;
        Ok(bytes)
    }
}

/// An object of a list, with its kind.
fn typed(mut object: Value, version: &str, kind: &str) -> Value {
    object["apiVersion"] = version.into();
    object["kind"] = kind.into();
    object
}

/// What the archive says of itself.
const README: &str = "\
This is what kubectl vm dump has found about a VM:

explain.txt, status.txt  why it is as it is, and a page about it
vm, objects, cluster     the VM, its objects, its node, the storage classes
events.txt, logs         what happened, and what its containers and its guest have written
manager                  the manager, with its log, configuration and templates, where they could be read
rendered                 what the manager would make for a new VM with this spec
unread.txt               what could not be read

Masked are: what Secrets contain, wherever it stands; user-data for cloud-init; texts under names such as password or token; names,
passwords and signatures in URLs. NOT masked is what else the guest has written on its console, and what people have put elsewhere. Look through it.
";

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_archive_has_all_files_without_secrets() {
        let mut dump = Dump::default();
        dump.known.add(&serde_json::from_value(json!({ "data": { "p": "aGVsbG8gd29ybGQ=" } })).unwrap());
        dump.add("logs/a.log", "it is hello world\n");
        dump.add_object(
            "objects",
            json!({ "kind": "Secret", "metadata": { "name": "s" }, "data": { "p": "aGVsbG8gd29ybGQ=" } }),
        );
        dump.unread.push("nodes: you may not\nget them".into());
        let archive = dump.archive("apple", crate::test_support::noon()).unwrap();
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive.as_slice()));
        let mut files = std::collections::BTreeMap::new();
        for file in archive.entries().unwrap() {
            let mut file = file.unwrap();
            let (name, mut text) = (file.path().unwrap().display().to_string(), String::new());
            file.read_to_string(&mut text).unwrap();
            files.insert(name, text);
        }
        let names: Vec<&str> = files.keys().map(String::as_str).collect();
        assert_eq!(names, ["apple/README.txt", "apple/logs/a.log", "apple/objects/Secret-s.yaml", "apple/unread.txt"]);
        assert_eq!(files["apple/logs/a.log"], "it is (masked)\n");
        assert!(!files["apple/objects/Secret-s.yaml"].contains("aGVs"), "{files:?}");
        assert_eq!(files["apple/unread.txt"], "nodes: you may not get them\n");
    }
}
