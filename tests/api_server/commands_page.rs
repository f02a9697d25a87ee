//! What `docs/commands.md` and `docs/import.md` show is what the commands print, on a real API server with a manager. The tests play the runner and the kubelet.
//!
//! A comment before a block of the page says where its output comes from:
//!
//! | comment | where from |
//! |---|---|
//! | `<!-- recorded: NAME -->` | a test of this file runs its commands, and compares |
//! | `<!-- from a node -->` | a node with a guest; only its command lines are checked, by `src/cli.rs` |
//! | `<!-- examples -->` | nowhere: there is no output, or that of another program |
//!
//! `VM_OPERATOR_TEST_UPDATE=1` writes what is printed into the page, where it differs. A line `...` of the page stands for any lines, and stays.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use k8s_openapi::api::{
    core::v1::{ConfigMap, Pod, ResourceQuota},
    storage::v1::StorageClass,
};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use regex::Regex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use vm_operator::{
    api::{VirtualMachine, conditions},
    object::SET_LABEL,
};

use crate::{
    commands::{NODE, ns},
    support::{
        cluster::{XTASK, eventually},
        managed_namespace::{LIMIT, ManagedNamespace, SERVICES, play_kubelet, play_node, vm_manifest},
    },
};

/// The blocks that tests of this file record.
const RECORDED: [&str; 15] = [
    "alice", "create", "dump", "events", "explain", "expose", "export", "for", "git", "list", "plan", "restart",
    "rollout", "set", "start",
];
/// And those with these names.
const MORE: [&str; 3] = ["explain-alice", "ssh-config", "status"];

/// One at a time writes a page.
static PAGE: Mutex<()> = Mutex::new(());

/// The page with the block of that name.
fn page(block: &str) -> PathBuf {
    let name = if block == "import" { "docs/import.md" } else { "docs/commands.md" };
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// What differs between two runs.
fn normal(text: &str) -> Vec<String> {
    let rules = [
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
        (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
        (r"\b[0-9a-f]{8}\b", "VERSION"),
        (r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS"),
        (r"\b(\d+ min )?\d+ s\b", "DURATION"),
        (r"\b\d+(ms|s|m|h|d)\b", "AGE"),
        // How often an event was seen.
        (r" \(x\d+\)$", ""),
        (" +", " "),
    ];
    let rules = rules.map(|(pattern, name)| (Regex::new(pattern).unwrap(), name));
    let line = |line: &str| {
        rules.iter().fold(line.to_owned(), |line, (pattern, name)| pattern.replace_all(&line, *name).into_owned())
    };
    text.trim_end().lines().map(line).map(|line| line.trim_end().to_owned()).collect()
}

/// Whether the page's lines are those that were printed. Which states of a VM a command has seen on the way, if any, depends on the machine's speed, so
/// these lines need not be there. Events of the same second have no order.
fn is_same(page: &str, printed: &str) -> bool {
    let on_the_way =
        Regex::new(r"^vm/\S+: (Pending\b|Starting\b|Running\b|Stopping\b|Stopped, \w+:).*\(DURATION\)$").unwrap();
    let (mut lines, mut others) = (normal(page), normal(printed));
    let has_some = |lines: &[String]| lines.iter().any(|line| on_the_way.is_match(line));
    let is_whole = !lines.iter().any(|line| line.trim() == "...");
    if is_whole && !has_some(&lines) && has_some(&others) {
        return false;
    }
    lines.retain(|line| !on_the_way.is_match(line));
    others.retain(|line| !on_the_way.is_match(line));
    if lines.iter().any(|line| line.starts_with("LAST SEEN") || line.starts_with("Events ")) {
        for lines in [&mut lines, &mut others] {
            lines.iter_mut().for_each(|line| *line = line.trim_start_matches("Events").trim().to_owned());
            lines.sort();
        }
    }
    fits(&lines, &others)
}

fn fits(page: &[String], printed: &[String]) -> bool {
    match page.split_first() {
        None => printed.is_empty(),
        Some((first, rest)) if first.trim() == "..." => {
            (0..=printed.len()).any(|skipped| fits(rest, &printed[skipped..]))
        }
        Some((first, rest)) => printed.first() == Some(first) && fits(rest, &printed[1..]),
    }
}

/// The block of that name: where its text begins and ends in the page.
fn block(page: &str, name: &str) -> (usize, usize) {
    let comment = format!("<!-- recorded: {name} -->\n```\n");
    let begin = page.find(&comment).unwrap_or_else(|| panic!("the page has no block {comment:?}")) + comment.len();
    (begin, begin + page[begin..].find("```").unwrap())
}

/// A person at a terminal, in an empty folder, with a kubeconfig for the namespace.
struct Desk {
    namespace: String,
    home: TempDir,
    code: std::cell::Cell<i32>,
}

impl Desk {
    fn new(ns: &ManagedNamespace) -> Self {
        Self::with(ns.namespace.name(), &fs::read_to_string(ns.cluster.kubeconfig()).unwrap())
    }

    fn with(namespace: &str, kubeconfig: &str) -> Self {
        let home = tempfile::tempdir().unwrap();
        for folder in ["bin", ".kube", ".ssh", "desk"] {
            fs::create_dir(home.path().join(folder)).unwrap();
        }
        let mut kubeconfig: Value = serde_yaml::from_str(kubeconfig).unwrap();
        kubeconfig["contexts"][0]["name"] = json!("vm-operator");
        kubeconfig["current-context"] = json!("vm-operator");
        kubeconfig["contexts"][0]["context"]["namespace"] = json!(namespace);
        fs::write(home.path().join(".kube/config"), kubeconfig.to_string()).unwrap();
        let plugin = format!(
            "#!/bin/sh\nif [ \"$1\" = vm ]; then shift; exec {} \"$@\"; fi\n\
             KUBECONFIG={}/.kube/config HOME={} PATH={} exec {XTASK} kubectl -- \"$@\"\n",
            env!("CARGO_BIN_EXE_kubectl-vm"),
            home.path().display(),
            std::env::var("HOME").unwrap_or_default(),
            std::env::var("PATH").unwrap(),
        );
        let kubectl = home.path().join("bin/kubectl");
        fs::write(&kubectl, plugin).unwrap();
        fs::set_permissions(&kubectl, PermissionsExt::from_mode(0o755)).unwrap();
        Self { namespace: namespace.to_owned(), home, code: 0.into() }
    }

    /// A file of the person.
    fn write(&self, name: &str, text: &str) {
        fs::write(self.home.path().join(name), text).unwrap();
    }

    /// Types a command, and returns what it prints, as the page would have it.
    fn run(&self, command: &str) -> String {
        if command == "echo $?" {
            return format!("{}\n", self.code.get());
        }
        let place = self.namespace.as_str();
        let typed = command.replace("-n vms", &format!("-n {place}"));
        let output = Command::new("sh")
            .args(["-c", &format!("{{ {typed}\n}} 2>&1")])
            .env("PATH", format!("{}:{}", self.home.path().join("bin").display(), std::env::var("PATH").unwrap()))
            .env("HOME", self.home.path())
            .env("USER", "ann")
            .env_remove("KUBECONFIG")
            .env_remove("SSH_AUTH_SOCK")
            .current_dir(self.home.path().join("desk"))
            .output()
            .unwrap();
        self.code.set(output.status.code().unwrap());
        let text = String::from_utf8(output.stdout).unwrap();
        text.replace(place, "vms").replace(env!("CARGO_BIN_EXE_kubectl-vm"), "/usr/local/bin/kubectl-vm")
    }

    /// Types the commands of a block, and compares what they print; before the command of that number the test does something.
    async fn types(&self, name: &str, mut before: impl AsyncFnMut(usize)) {
        let text = fs::read_to_string(page(name)).unwrap();
        let (begin, end) = block(&text, name);
        let (mut new, mut wrong) = (String::new(), Vec::new());
        for (number, part) in format!("\n{}", &text[begin..end]).split("\n$ ").skip(1).enumerate() {
            let (command, expected) = part.split_once('\n').unwrap_or((part, ""));
            before(number).await;
            let printed = self.run(command);
            let expected = format!("{}\n", expected.trim_end_matches('\n'));
            let expected = if expected == "\n" { String::new() } else { expected };
            let kept = if is_same(&expected, &printed) {
                expected
            } else {
                wrong.push(format!("$ {command}\n--- the page has\n{expected}--- printed is\n{printed}"));
                printed
            };
            new += &format!("$ {command}\n{kept}");
            if !kept.is_empty() && !kept.ends_with('\n') {
                new.push('\n');
            }
        }
        assert!(!new.is_empty(), "the block {name} has no command");
        if std::env::var_os("VM_OPERATOR_TEST_UPDATE").is_some() {
            let _one = PAGE.lock().unwrap();
            let text = fs::read_to_string(page(name)).unwrap();
            let (begin, end) = block(&text, name);
            fs::write(page(name), format!("{}{new}{}", &text[..begin], &text[end..])).unwrap();
        } else {
            assert!(wrong.is_empty(), "{}, block {name}:\n{}", page(name).display(), wrong.join("\n"));
        }
    }

    async fn type_all(&self, name: &str) {
        self.types(name, async |_| ()).await;
    }
}

/// Every block of the page with commands and output is recorded, or says where it is from.
#[test]
fn each_block_of_the_page_says_where_its_output_is_from() {
    let text = fs::read_to_string(page("list")).unwrap();
    let mut recorded = BTreeSet::new();
    let parts: Vec<&str> = text.split("```").collect();
    for (before, block) in parts.iter().zip(&parts[1..]).step_by(2) {
        if !block.contains("\n$ ") {
            continue;
        }
        let comment = before.trim_end().lines().last().unwrap_or_default();
        let comment = comment.strip_prefix("<!-- ").and_then(|comment| comment.strip_suffix(" -->"));
        match comment {
            Some("from a node" | "examples") => {}
            Some(comment) if comment.starts_with("recorded: ") => {
                assert!(recorded.insert(comment.trim_start_matches("recorded: ")), "{comment} is there twice");
            }
            _ => panic!("a block of docs/commands.md has no comment that says where its output is from:\n{block}"),
        }
    }
    assert_eq!(recorded, RECORDED.into_iter().chain(MORE).collect());
}

#[test]
fn a_comparison_sees_what_matters() {
    for (page, printed, expected) in [
        ("a 10.0.0.1 b\n", "a    10.200.3.4 b\n", true),
        ("vm/a started (now Running, 41 s)", "vm/a started (now Running, 0 s)", true),
        ("vm/a started", "vm/a stopped", false),
        ("since 2026-01-01T00:00:00Z", "since 2026-11-25T21:24:41Z", true),
        ("a\n...\nd", "a\nb\nc\nd", true),
        ("a\n...\nd", "a\nb\nc", false),
        (
            "vm/a: Starting: x (0 s)\nvm/a started",
            "vm/a: Stopping: y (2 s)\nvm/a: Starting: x (3 s)\nvm/a started",
            true,
        ),
        ("vm/a: Starting: x (0 s)\nvm/a started", "vm/a started", true),
        ("vm/a started", "vm/a: Starting: x (0 s)\nvm/a started", false),
        ("...", "vm/a: Starting: x (3 s)\nvm/a started", true),
        ("vm/b: Running: x (0 s)\nvm/a: Stopped, Wanted: y (0 s)\nvm/a: z", "vm/b: Running: x (1 s)\nvm/a: z", true),
        ("", "a", false),
    ] {
        assert_eq!(is_same(page, printed), expected, "{page:?} {printed:?}");
    }
}

/// Plays kubelet and runner.
#[derive(Clone)]
struct Player {
    client: Client,
    namespace: String,
}

impl Player {
    fn of(ns: &ManagedNamespace) -> Self {
        Self { client: ns.client.clone(), namespace: ns.namespace.name().to_owned() }
    }

    /// The guest of the VM's Pod runs, with the CPUs and the memory that the VM wants.
    async fn report(&self, name: &str) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let vms: Api<VirtualMachine> = Api::namespaced(self.client.clone(), &self.namespace);
        let (Ok(pod), Ok(vm)) = (pods.get(name).await, vms.get(name).await) else { return };
        let condition = |type_: &str, reason: &str, message: &str| json!({ "type": type_, "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z" });
        let machine = &vm.spec.vm;
        let report = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": name },
            "status": {
                "podUid": pod.uid(), "cpus": machine.cpus(), "ram": machine.ram(),
                "conditions": [
                    condition("Running", "Started", "the guest has started"),
                    condition("Booted", "GuestAgentAnswered", "QEMU's guest agent in the guest has answered"),
                ],
            },
        });
        // The VM may be gone meanwhile.
        let _ = vms.patch_status(name, &PatchParams::apply("vm-runner").force(), &Patch::Apply(&report)).await;
    }

    /// Pods that are deleted go, and the guests of new ones run, but for those that fail.
    fn start(self, failing: &'static [&'static str]) -> JoinHandle<()> {
        let pods = Api::namespaced(self.client.clone(), &self.namespace);
        play_kubelet(pods, failing, move |pod| {
            let player = self.clone();
            async move { player.report(&pod.name_any()).await }
        })
    }
}

/// A VM with 2 CPUs and 2Gi whose guest runs.
async fn up(ns: &ManagedNamespace, name: &str, edit: impl FnOnce(&mut Value)) {
    ns.create_vm(name, |vm| {
        vm["spec"]["nodeName"] = json!(NODE);
        vm["spec"]["vm"]["maximumRam"] = json!("2Gi");
        edit(vm);
    })
    .await;
    ns.vm_with_reason(name, "Starting").await;
    Player::of(ns).report(name).await;
    ns.vm_with_reason(name, "Running").await;
}

async fn down(ns: &ManagedNamespace, name: &str, edit: impl FnOnce(&mut Value)) {
    ns.create_vm(name, |vm| {
        vm["spec"]["nodeName"] = json!(NODE);
        vm["spec"]["vm"]["maximumRam"] = json!("2Gi");
        vm["spec"]["vm"]["state"] = json!("Stopped");
        edit(vm);
    })
    .await;
    ns.vm_with_reason(name, "StoppedAsRequested").await;
}

fn tier(name: &'static str) -> impl Fn(&mut Value) {
    move |vm| vm["metadata"]["labels"] = json!({ "tier": name })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_and_power_are_as_on_the_page() {
    let ns = ns("page-power").await;
    up(&ns, "apple", tier("web")).await;
    down(&ns, "pear", |_| ()).await;
    let desk = Desk::new(&ns);
    desk.type_all("list").await;
    desk.types("start", async |number| {
        if number == 3 {
            ns.vm_with_reason("pear", "Starting").await;
        }
    })
    .await;
    let player = Player::of(&ns).start(&["pear"]);
    desk.type_all("restart").await;
    player.abort();
}

#[tokio::test]
async fn changes_of_hardware_are_as_on_the_page() {
    let ns = late("page-set").await;
    let drive = |vm: &mut Value| {
        vm["metadata"]["labels"] = json!({ "tier": "web" });
        vm["spec"]["vm"]["disks"].as_array_mut().unwrap().push(json!({ "cdrom": { "image": "" } }));
    };
    up(&ns, "apple", drive).await;
    down(&ns, "pear", drive).await;
    Desk::new(&ns).type_all("set").await;
}

/// A namespace whose claims wait for their Pods.
async fn late(test: &str) -> ManagedNamespace {
    let ns = ns(test).await;
    let class = json!({ "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "late" },
        "provisioner": "example.org/none", "volumeBindingMode": "WaitForFirstConsumer" });
    let classes = Api::<StorageClass>::all(ns.client.clone());
    classes.patch("late", &PatchParams::apply("test"), &Patch::Apply(&class)).await.unwrap();
    ns
}

#[tokio::test]
async fn what_is_said_of_a_vm_is_as_on_the_page() {
    let ns = late("page-status").await;
    up(&ns, "apple", |vm| {
        vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["storageClassName"] = json!("late");
    })
    .await;
    ns.wait_for_event("apple", "SuccessfulCreate").await;
    ns.wait_for_event("apple", "Started").await;
    for claim in ["apple-core-disk", "apple-runner-data"] {
        let events: Api<k8s_openapi::api::core::v1::Event> = ns.api();
        eventually("an event of the claim", LIMIT, async || {
            let all = events.list(&Default::default()).await.unwrap();
            all.into_iter().any(|event| event.involved_object.name.as_deref() == Some(claim)).then_some(())
        })
        .await;
    }
    let desk = Desk::new(&ns);
    desk.type_all("status").await;
    desk.type_all("events").await;
    desk.type_all("dump").await;

    let resource = "--resource=vms.vmoperator.jdrupes.org";
    ns.namespace.kubectl(&["create", "role", "reader", "--verb=get", resource]);
    ns.namespace.kubectl(&["create", "rolebinding", "reader", "--role=reader", "--user=alice"]);
    eventually("alice to read", LIMIT, async || {
        desk.run("kubectl vm explain apple --as alice").starts_with("apple runs").then_some(())
    })
    .await;
    desk.type_all("explain-alice").await;
    down(&ns, "pear", |_| ()).await;
    desk.type_all("alice").await;

    let quota = json!({ "metadata": { "name": "few" }, "spec": { "hard": { "pods": "1" } } });
    let quotas: Api<ResourceQuota> = ns.api();
    quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
    eventually("the quota to be counted", LIMIT, async || {
        quotas.get("few").await.unwrap().status.and_then(|status| status.used).map(drop)
    })
    .await;
    ns.create_vm("quota", |vm| {
        vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["storageClassName"] = json!("late");
    })
    .await;
    ns.vm_with_reason("quota", "ApplyFailed").await;
    desk.type_all("explain").await;
}

#[tokio::test]
async fn what_git_applies_is_as_on_the_page() {
    let ns = ns("page-git").await;
    let mut manifest = vm_manifest("apple");
    manifest["spec"]["nodeName"] = json!(NODE);
    manifest["spec"]["vm"]["maximumRam"] = json!("2Gi");
    let git = PatchParams::apply("kustomize-controller").force();
    ns.api::<VirtualMachine>().patch("apple", &git, &Patch::Apply(&manifest)).await.unwrap();
    up(&ns, "pear", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    Player::of(&ns).report("apple").await;
    ns.vm_with_reason("apple", "Running").await;
    let desk = Desk::new(&ns);
    desk.type_all("git").await;
    desk.types("for", async |number| {
        if number == 1 {
            ns.pod_when("apple", "being deleted", |pod| pod.metadata.deletion_timestamp.is_some()).await;
            ns.remove_pod("apple").await;
            ns.vm_with_reason("apple", "StoppedAsRequested").await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ways_to_a_guest_are_as_on_the_page() {
    let ns = ns("page-reach").await;
    let with_network = |vm: &mut Value| vm["spec"]["vm"]["networks"] = json!([{ "pod": {} }]);
    up(&ns, "apple", |vm| {
        with_network(vm);
        vm["spec"]["cloudInit"] = json!({ "userData": { "users": [{ "name": "ada" }] } });
    })
    .await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["networks"] = json!([{ "user": {} }])).await;
    let desk = Desk::new(&ns);
    desk.type_all("ssh-config").await;

    down(&ns, "fig", with_network).await;
    let started = async |number: usize| {
        if number == 2 {
            let ip = "10.200.0.7";
            let ready = json!([{ "type": "Ready", "status": "True" }]);
            let status = json!({ "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }], "conditions": ready });
            ns.patch_pod_status("fig", status).await;
            eventually("the Service to lead to the Pod", LIMIT, async || {
                let expose = "kubectl vm expose fig --name vmiservice --port 27017 --target-port 22";
                desk.run(expose).contains("10.200.0.7:22").then_some(())
            })
            .await;
        }
    };
    let player = Player::of(&ns).start(&[]);
    desk.types("expose", started).await;
    player.abort();
}

#[tokio::test]
async fn an_import_is_as_on_its_page() {
    let desk = Desk::with("vms", "contexts: [{context: {}}]");
    desk.write("desk/101.conf", include_str!("commands_page/101.conf"));
    desk.type_all("import").await;
}

#[tokio::test]
async fn new_vms_and_vms_for_kubevirt_are_as_on_the_page() {
    let ns = ns("page-create").await;
    let desk = Desk::new(&ns);
    desk.write(".ssh/id_ed25519.pub", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc ann@desk\n");
    desk.type_all("create").await;
    down(&ns, "web", |vm| vm["spec"]["vm"]["networks"] = json!([{ "pod": {} }])).await;
    desk.type_all("export").await;
}

/// A template of Pods that need another start, and the set of a VM.
const OTHER_SCHEDULER: &str = "{% extends 'builtin/pod.yaml.j2' %}\n{% block scheduling %}\n{{ super() }}\n  schedulerName: played\n{% endblock %}\n";
const POLICY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: {{ vm.metadata.name }}}\nspec:\n  \
                      podSelector: {matchLabels: {{ labels }}}\n  policyTypes: [Ingress]\n";

fn set(name: &str, files: &Value) -> Value {
    let metadata = json!({ "name": format!("templates-{name}"), "labels": { SET_LABEL: name } });
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_and_rollouts_are_as_on_the_page() {
    let ns = ManagedNamespace::with_templates("page-plan", &[]).await;
    play_node(&ns.client, NODE).await;
    let configuration = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator" }, "data": { "config.yaml": SERVICES } });
    ns.namespace.create(&configuration.to_string()).await;
    let maps: Api<ConfigMap> = ns.api();
    for name in ["restart", "live", "broken"] {
        let former = set(name, &json!({ "x.yaml.j2": POLICY }));
        maps.create(&PostParams::default(), &serde_json::from_value(former).unwrap()).await.unwrap();
    }
    let of_set = |set: Option<&'static str>| {
        move |vm: &mut Value| {
            tier("web")(vm);
            if let Some(set) = set {
                vm["spec"]["templates"] = json!({ "set": set });
            }
        }
    };
    up(&ns, "apple", of_set(Some("restart"))).await;
    up(&ns, "fig", of_set(Some("live"))).await;
    up(&ns, "kiwi", of_set(None)).await;
    down(&ns, "pear", of_set(Some("restart"))).await;
    up(&ns, "plum", of_set(Some("broken"))).await;
    ns.manager.wait_until_idle().await;
    let label = "{% extends 'builtin/pod.yaml.j2' %}\n{% block labels %}\n    rack: a\n{% endblock %}\n";
    let next = [
        set("restart", &json!({ "x.yaml.j2": POLICY, "pod.yaml.j2": OTHER_SCHEDULER })),
        set("live", &json!({ "x.yaml.j2": POLICY.replace("[Ingress]", "[Ingress, Egress]"), "pod.yaml.j2": label })),
        set("broken", &json!({ "x.yaml.j2": format!("{POLICY}# {{{{ nothing }}}}\n") })),
    ];
    let desk = Desk::new(&ns);
    desk.write("desk/sets.yaml", &next.map(|set| set.to_string()).join("\n---\n"));
    desk.type_all("plan").await;

    // Now something waits in all that run.
    ns.manager.change_templates(&[("pod.yaml.j2", OTHER_SCHEDULER)]);
    for name in ["apple", "fig", "kiwi", "plum"] {
        let waits = |vm: &VirtualMachine| {
            vm.status
                .as_ref()
                .is_some_and(|status| conditions::is_true(&status.conditions, conditions::RESTART_REQUIRED))
        };
        ns.vm_when(name, "waiting for a restart", waits).await;
    }
    let player = Player::of(&ns).start(&["fig"]);
    desk.type_all("rollout").await;
    player.abort();
}
