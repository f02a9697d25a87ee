//! The commands of `kubectl vm` for every day, on a real API server with a manager. The tests play the runner and the kubelet.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, play_node, vm_manifest},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use vm_operator::{
    api::{PowerState, VirtualMachine},
    object::{FORCE_STOP_ANNOTATION, RESTARTED_ANNOTATION},
    ownership::COMMAND_MANAGER,
};

/// The node of VMs that run. It answers, but Pods on it are gone only when the test says so.
pub const NODE: &str = "node-1";

/// What a command printed.
#[derive(Debug)]
pub struct Printed {
    pub code: i32,
    pub data: String,
    pub talk: String,
}

pub fn command(ns: &ManagedNamespace, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-vm"));
    command.args(arguments).args(["--namespace", ns.namespace.name()]).env("KUBECONFIG", ns.cluster.kubeconfig());
    command
}

pub fn run(ns: &ManagedNamespace, arguments: &[&str]) -> Printed {
    printed(command(ns, arguments).output().unwrap())
}

pub fn printed(output: std::process::Output) -> Printed {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Printed { code: output.status.code().unwrap(), data: text(output.stdout), talk: text(output.stderr) }
}

/// Runs a command that succeeds, and returns its data.
pub fn succeeds(ns: &ManagedNamespace, arguments: &[&str]) -> String {
    let printed = run(ns, arguments);
    assert_eq!(printed.code, 0, "{arguments:?}: {printed:?}");
    printed.data
}

pub async fn ns(test: &str) -> ManagedNamespace {
    let ns = ManagedNamespace::new(test).await;
    play_node(&ns.client, NODE).await;
    ns
}

/// Creates a VM whose guest runs.
pub async fn up(ns: &ManagedNamespace, name: &str, edit: impl FnOnce(&mut Value)) {
    ns.create_vm(name, |vm| {
        vm["spec"]["nodeName"] = json!(NODE);
        edit(vm);
    })
    .await;
    ns.vm_with_reason(name, "Starting").await;
    ns.report(name, true, "Started").await;
    ns.vm_with_reason(name, "Running").await;
}

pub async fn vm(ns: &ManagedNamespace, name: &str) -> VirtualMachine {
    ns.api::<VirtualMachine>().get(name).await.unwrap()
}

/// A table without the age, which changes from second to second.
fn without_age(table: &str) -> Vec<Vec<String>> {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let is_age = |word: &str| word.ends_with(['s', 'm']) && word.starts_with(|char: char| char.is_ascii_digit());
    table.lines().map(|line| words(line).into_iter().filter(|word| !is_age(word)).collect()).collect()
}

#[tokio::test]
async fn list_prints_what_kubectl_prints() {
    let ns = ns("list").await;
    let empty = run(&ns, &["list"]);
    assert_eq!((empty.code, empty.data.as_str()), (0, ""));
    assert_eq!(empty.talk, format!("no VMs in the namespace {}\n", ns.namespace));
    up(&ns, "apple", |vm| vm["metadata"]["labels"] = json!({ "tier": "web" })).await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;
    for (ours, kubectl) in [
        (&["list"] as &[&str], &["get", "vms"] as &[&str]),
        (&["ls", "-o", "wide"], &["get", "vms", "-o", "wide"]),
        (&["list", "-l", "tier=web", "--no-headers"], &["get", "vms", "-l", "tier=web", "--no-headers"]),
        (&["list", "vm/pear", "apple"], &["get", "vms", "pear", "apple"]),
        (&["list", "-o", "name"], &["get", "vms", "-o", "name"]),
    ] {
        let table = succeeds(&ns, ours);
        assert_eq!(without_age(&table), without_age(&ns.namespace.kubectl(kubectl)), "{ours:?}\n{table}");
        assert!(table.contains("apple"), "{table}");
    }
    let everywhere = succeeds(&ns, &["list", "-A"]);
    let place = ns.namespace.name();
    assert!(everywhere.starts_with("NAMESPACE ") && everywhere.contains(&format!("{place}   ")), "{everywhere}");
    let list: Value = serde_json::from_str(&succeeds(&ns, &["list", "-o", "json"])).unwrap();
    assert_eq!(list["items"][1]["kind"], "VirtualMachine");
    let one: Value = serde_yaml::from_str(&succeeds(&ns, &["list", "pear", "-o", "yaml"])).unwrap();
    assert_eq!(one, json!(vm(&ns, "pear").await), "nothing is lost");

    let some = run(&ns, &["list", "pear", "plum"]);
    assert_eq!(some.code, 5, "{some:?}");
    assert!(some.data.contains("pear") && some.talk.starts_with("vm/plum: there is none in the namespace"), "{some:?}");
    assert_eq!(run(&ns, &["list", "plum"]).code, 1);
    let none = run(&ns, &["list", "-l", "tier=db"]);
    assert_eq!((none.code, none.talk), (0, format!("no VM in the namespace {place} has the labels tier=db\n")));

    // A watch has a line for each change.
    let mut watch = command(&ns, &["list", "-w"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(watch.stdout.take().unwrap()));
    for word in ["NAME", "apple", "pear"] {
        assert!(lines.next().unwrap().unwrap().starts_with(word));
    }
    succeeds(&ns, &["start", "pear"]);
    assert!(lines.any(|line| line.unwrap().split_whitespace().take(2).eq(["pear", "Running"])));
    watch.kill().unwrap();
    watch.wait().unwrap();
}

/// The real kubectl prints the same with each template.
#[tokio::test]
async fn templates_print_what_kubectl_prints() {
    let ns = ns("jsonpath").await;
    for name in ["apple", "pear"] {
        up(&ns, name, |vm| {
            vm["metadata"]["labels"] = json!({ "app.kubernetes.io/part-of": name });
            vm["metadata"]["annotations"] = json!({ "note": "a<b & 'c'" });
        })
        .await;
    }
    ns.create_vm("plum", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("plum", "StoppedAsRequested").await;
    let same = |arguments: &[&str], template: &str| {
        let format = format!("jsonpath={template}");
        let kubectl = ns.namespace.kubectl(&[&["get", "vms", "-o", &format], arguments].concat());
        let printed = run(&ns, &[&["list", "-o", &format], arguments].concat());
        assert_eq!((printed.code, printed.data), (0, kubectl.clone()), "{template}: {}", printed.talk);
        kubectl
    };
    let mut with_output = 0;
    for template in [
        "{.items[*].metadata.name}",
        "{.items[0].metadata.name}{.items[-1:].metadata.name}",
        "{.items[0:2].metadata.name}{.items[::2].metadata.name}",
        "{$.items[0,2].metadata['name']}",
        "{.items[0]['metadata']['name','namespace']}",
        r"{.items[*].metadata.labels.app\.kubernetes\.io/part-of}",
        r"{.items[1].metadata.labels['app\.kubernetes\.io/part-of']}",
        r#"{range .items[*]}{.metadata.name}{"\t"}{.status.phase}{"\n"}{end}"#,
        "{range .items[*]}{.metadata.name}:{range .status.conditions[*]}{.type}={.status},{end};{end}",
        r#"{.items[*].status.conditions[?(@.type=="Ready")].status}"#,
        "{.items[*].status.conditions[?(@.type=='Ready')].reason}",
        r#"{.items[?(@.metadata.name!="pear")].metadata.name}"#,
        "{.items[?(@.status.cpus>0)].metadata.name} and {.items[?(@.status.cpus<=0)].metadata.name}",
        "{.items[?(@.status.ready==true)].metadata.name}",
        "{.items[?(@.status.nodeName)].metadata.name}",
        "{.items[0].spec.vm.disks}",
        "{.items[0].metadata.annotations}",
        "{.items[0].spec.vm.maximumCpus} {.items[0].status.ready}",
        "{.items[*].spec.vm.disks[*].volumeClaimTemplate.spec.resources.requests.*}",
        "{..metadata.labels}",
        "{.items[*].nothing}{.items[0].status.nothing[3]}",
        "name: {.kind} {'}'} {\"a\\\"b\"}",
        "without braces",
        "{.items[*].metadata.name}{\"\\n\"}",
    ] {
        with_output += usize::from(!same(&[], template).is_empty());
    }
    assert_eq!(with_output, 23, "all but one print something");
    for template in ["{.metadata.name}", "{.spec.vm}", "{@.status.phase}", "{.kind}/{.metadata.name}"] {
        assert!(!same(&["apple"], template).is_empty());
    }
    for wrong in ["jsonpath={.items", "jsonpath={items}", "jsonpath"] {
        let refused = run(&ns, &["list", "-o", wrong]);
        assert_eq!((refused.code, refused.data.as_str()), (2, ""), "{wrong}: {refused:?}");
    }
    let beyond = run(&ns, &["list", "-o", "jsonpath={.items[7]}"]);
    let told = "jsonpath: array index out of bounds: index 7, length 3\n";
    assert_eq!((beyond.code, beyond.talk.as_str()), (1, told));
    assert_eq!(succeeds(&ns, &["status", "apple", "-o", "jsonpath={.is.phase}"]), "Running");
}

#[tokio::test]
async fn vms_are_started_stopped_restarted_and_reset() {
    let ns = ns("commands").await;
    up(&ns, "apple", |vm| vm["metadata"]["labels"] = json!({ "tier": "web" })).await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;

    assert_eq!(run(&ns, &["start"]).code, 2);
    assert_eq!(succeeds(&ns, &["start", "apple"]), "vm/apple unchanged (runs already)\n");
    assert_eq!(succeeds(&ns, &["stop", "pear"]), "vm/pear unchanged (is stopped already)\n");
    for (how, what) in [("client", "dry run"), ("server", "server dry run")] {
        let how = format!("--dry-run={how}");
        assert_eq!(
            succeeds(&ns, &["start", "--all", &how]),
            format!("vm/apple unchanged (runs already)\nvm/pear started ({what})\n")
        );
    }
    assert_eq!(vm(&ns, "pear").await.spec.vm.state, PowerState::Stopped);
    let some = run(&ns, &["start", "pear", "plum"]);
    assert_eq!((some.code, some.data.as_str()), (5, "vm/pear started\n"), "{some:?}");
    let pear = ns.vm_with_reason("pear", "Starting").await;
    assert_eq!(pear.spec.vm.state, PowerState::Running);
    assert!(pear.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(COMMAND_MANAGER)));

    // A restart, and how it is waited for.
    let refused = run(&ns, &["reset", "pear"]);
    assert_eq!((refused.code, refused.talk.as_str()), (1, "vm/pear: its guest does not run (Starting)\n"));
    let former = ns.api::<Pod>().get("apple").await.unwrap();
    let arguments = ["restart", "-l", "tier=web", "--wait"];
    let restart = command(&ns, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    ns.pod_when("apple", "going", |pod| pod.metadata.deletion_timestamp.is_some()).await;
    ns.remove_pod("apple").await;
    ns.pod_when("apple", "another", |pod| pod.uid() != former.uid()).await;
    ns.report("apple", true, "Started").await;
    let restart = printed(restart.wait_with_output().unwrap());
    assert!(restart.code == 0 && restart.data.starts_with("vm/apple restarted (now Running, "), "{restart:?}");
    assert!(restart.talk.starts_with("vm/apple: ") && restart.talk.contains(" s)\n"), "{restart:?}");
    assert!(vm(&ns, "apple").await.annotations().contains_key(RESTARTED_ANNOTATION));
    ns.vm_with_reason("apple", "Running").await;
    assert_eq!(succeeds(&ns, &["reset", "apple", "-o", "name"]), "virtualmachine.vmoperator.jdrupes.org/apple\n");
    assert_eq!(vm(&ns, "apple").await.spec.vm.reset_count, Some(1));

    // A stop takes as long as the guest.
    let late = run(&ns, &["stop", "apple", "--wait", "--timeout", "1s"]);
    assert_eq!((late.code, late.data.as_str()), (4, ""), "{late:?}");
    assert!(late.talk.contains("vm/apple: not stopped after 1 s: "), "{late:?}");
    let waiting = run(&ns, &["wait", "apple", "--for=stopped", "--timeout=0s"]);
    assert_eq!(waiting.code, 4, "{waiting:?}");
    assert_eq!(succeeds(&ns, &["stop", "apple"]), "vm/apple unchanged (is stopping already)\n");
    assert_eq!(succeeds(&ns, &["stop", "apple", "--force"]), "vm/apple stopped\n");
    let pod = ns.pod_when("apple", "going soon", |pod| pod.metadata.deletion_grace_period_seconds < Some(30)).await;
    assert_eq!(vm(&ns, "apple").await.annotations()[FORCE_STOP_ANNOTATION], pod.uid().unwrap());
    ns.remove_pod("apple").await;
    let stopped = succeeds(&ns, &["wait", "apple", "--for=stopped"]);
    assert!(stopped.starts_with("vm/apple: stopped (now Stopped, "), "{stopped}");
    assert_eq!(
        run(&ns, &["restart", "apple"]).talk,
        "vm/apple: it is stopped; a start is what it needs: kubectl vm start apple\n"
    );
    assert_eq!(run(&ns, &["wait", "plum", "--for=deleted"]).code, 0);
    assert_eq!(run(&ns, &["wait", "plum", "--for=running"]).code, 1);
}

#[tokio::test]
async fn a_stop_has_the_time_that_a_person_gives_it() {
    let ns = ns("grace").await;
    up(&ns, "apple", |_| ()).await;
    assert_eq!(succeeds(&ns, &["stop", "apple", "--grace-period=400s"]), "vm/apple stopped\n");
    let has =
        |most: i64| move |pod: &Pod| pod.metadata.deletion_grace_period_seconds.is_some_and(|seconds| seconds <= most);
    ns.pod_when("apple", "has 400 s", has(400)).await;
    // It is stopping already, and is to be down sooner.
    let unchanged = "vm/apple unchanged (is stopping already)\n";
    assert_eq!(succeeds(&ns, &["stop", "apple", "--grace-period=30s", "--dry-run=client"]), unchanged);
    assert_eq!(succeeds(&ns, &["stop", "apple", "--grace-period=30s"]), "vm/apple: its guest has 30 s from now\n");
    ns.pod_when("apple", "has 30 s from now", has(300)).await;
    let no_more = "vm/apple unchanged (is stopping already, and its guest has no more time than that)\n";
    assert_eq!(succeeds(&ns, &["stop", "apple", "--grace-period=300s"]), no_more);
    ns.remove_pod("apple").await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
}

#[tokio::test]
async fn what_git_applies_is_left_to_git() {
    let ns = ns("git-owner").await;
    let mut manifest = vm_manifest("apple");
    manifest["spec"]["nodeName"] = json!(NODE);
    let git = PatchParams::apply("kustomize-controller").force();
    ns.api::<VirtualMachine>().patch("apple", &git, &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    // Git says nothing about a pause, and then it does.
    assert_eq!(succeeds(&ns, &["pause", "apple"]), "vm/apple paused\n");
    assert_eq!(succeeds(&ns, &["resume", "apple"]), "vm/apple resumed\n");
    manifest["spec"]["vm"]["paused"] = json!(false);
    ns.api::<VirtualMachine>().patch("apple", &git, &Patch::Apply(&manifest)).await.unwrap();
    let refused = run(&ns, &["pause", "apple"]);
    assert!(
        refused.code == 1
            && refused.talk.starts_with("vm/apple: kustomize-controller applies spec.vm.paused from Git (")
            && refused.talk.ends_with("; change it in Git, or give --yes to do it until the next sync\n"),
        "{refused:?}"
    );
    let refused = run(&ns, &["stop", "apple"]);
    assert_eq!((refused.code, refused.data.as_str()), (1, ""), "{refused:?}");
    let who = "vm/apple: kustomize-controller applies spec.vm.state from Git (its last change: 20";
    assert!(
        refused.talk.starts_with(who) && refused.talk.contains("or give --for 2h to do it for that time, or --yes"),
        "{refused:?}"
    );
    assert_eq!(vm(&ns, "apple").await.spec.vm.state, PowerState::Running);
    let insisted = run(&ns, &["stop", "apple", "--yes"]);
    assert_eq!((insisted.code, insisted.data.as_str()), (0, "vm/apple stopped\n"), "{insisted:?}");
    assert!(
        insisted.talk.contains("kustomize-controller applies spec.vm.state too, which takes this back"),
        "{insisted:?}"
    );
    assert_eq!(vm(&ns, "apple").await.spec.vm.state, PowerState::Stopped);
}

/// The page about security says which rights the commands need.
#[tokio::test]
async fn a_missing_right_is_named_with_its_rule() {
    let ns = ns("commands-rights").await;
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    let as_alice = |arguments: &[&str]| run(&ns, &[arguments, &["--as", "alice"]].concat());
    let place = ns.namespace.name();
    let lacks = |verb: &str| {
        format!(
            "alice may not {verb} vms.vmoperator.jdrupes.org in the namespace {place}; a Role in that namespace with the rule \
             - {{apiGroups: [vmoperator.jdrupes.org], resources: [vms], verbs: [{verb}]}} allows it\n"
        )
    };
    let list = as_alice(&["list"]);
    assert_eq!((list.code, list.talk), (3, format!("VMs: {}", lacks("list"))));
    let start = as_alice(&["start", "apple"]);
    assert_eq!((start.code, start.talk), (1, format!("vm/apple: {}", lacks("get"))));
    let allow = |role: &str, verbs: &str| {
        let resource = "--resource=vms.vmoperator.jdrupes.org";
        ns.namespace.kubectl(&["create", "role", role, verbs, resource]);
        ns.namespace.kubectl(&["create", "rolebinding", role, &format!("--role={role}"), "--user=alice"]);
    };
    allow("readers", "--verb=get,list,watch");
    let start = eventually("alice to read", LIMIT, async || {
        Some(as_alice(&["start", "apple"])).filter(|start| !start.talk.contains("may not get"))
    })
    .await;
    assert_eq!((start.code, start.talk), (1, format!("vm/apple: {}", lacks("patch"))));
    assert_eq!(as_alice(&["list"]).code, 0);
    let stop = as_alice(&["stop", "apple", "--force"]);
    let lacks_pods =
        lacks("get").replace("vms.vmoperator.jdrupes.org", "pods").replace("vmoperator.jdrupes.org", "\"\"");
    assert_eq!((stop.code, stop.talk), (1, format!("vm/apple: {}", lacks_pods.replace("[vms]", "[pods]"))));
    allow("writers", "--verb=patch");
    eventually("alice to write", LIMIT, async || (as_alice(&["start", "apple"]).code == 0).then_some(())).await;
}

/// What kubectl gets when somebody presses TAB.
#[tokio::test]
async fn names_of_vms_and_namespaces_are_completed() {
    let ns = ns("tab").await;
    for name in ["apple", "apricot", "banana"] {
        ns.create_vm(name, |_| {}).await;
    }
    let link = tempfile::tempdir().unwrap();
    let program = link.path().join("kubectl_complete-vm");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kubectl-vm"), &program).unwrap();
    let complete = |words: &[&str], kubeconfig: &Path| {
        let output = Command::new(&program).args(words).env("KUBECONFIG", kubeconfig).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let (name, kubeconfig) = (ns.namespace.name(), ns.cluster.kubeconfig());
    assert_eq!(complete(&["stop", "-n", name, "ap"], kubeconfig), "apple\napricot\n:4\n");
    assert_eq!(complete(&["console", &format!("--namespace={name}"), "b"], kubeconfig), "banana\n:4\n");
    assert_eq!(complete(&["list", "-n", name], kubeconfig), format!("{name}\n:4\n"));
    assert_eq!(complete(&["ssh", "-n", name, "ada@ba"], kubeconfig), "ada@banana\n:4\n");
    // A path comes next, or it is a file.
    assert_eq!(complete(&["scp", "-n", name, "ap"], kubeconfig), "apple:\napricot:\n:6\n");
    assert_eq!(complete(&["scp", "-n", name, "./ap"], kubeconfig), ":0\n");
    // Errors are silent: somebody is typing.
    assert_eq!(complete(&["console", "a"], Path::new("/nowhere")), ":0\n");
}
