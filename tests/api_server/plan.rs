//! `kubectl vm plan`, compared with what the manager then does; and `kubectl vm rollout`, with a played runner.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    time::Instant,
};

use k8s_openapi::api::{
    core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Secret, Service},
    networking::v1::NetworkPolicy,
};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use vm_operator::{
    api::{VirtualMachine, conditions},
    object::{INSTANCE_LABEL, SET_LABEL},
};

use crate::{
    commands::{NODE, Printed, run, up, vm},
    support::{
        cluster::eventually,
        managed_namespace::{LIMIT, ManagedNamespace, SERVICES, play_kubelet, play_node, report_of_pod},
        manager::allowing,
    },
};

const POLICY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: {{ vm.metadata.name }}}\nspec:\n  \
                      podSelector: {matchLabels: {{ labels }}}\n  policyTypes: [Ingress]\n";
/// A Pod whose guest must be started again.
const OTHER_SCHEDULER: &str = "{% extends 'builtin/pod.yaml.j2' %}\n{% block scheduling %}\n{{ super() }}\n  schedulerName: played\n{% endblock %}\n";
const LABEL: &str = "{% extends 'builtin/pod.yaml.j2' %}\n{% block labels %}\n    tier: web\n{% endblock %}\n";
/// An object that the API server refuses.
const ODD: &str =
    "apiVersion: v1\nkind: Service\nmetadata: {name: {{ vm.metadata.name ~ '-x' }}}\nspec: {ports: [{port: 100000}]}\n";

fn set(name: &str, files: &Value) -> Value {
    let metadata = json!({ "name": format!("templates-{name}"), "labels": { SET_LABEL: name } });
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files })
}

/// The VM of each object, its kind and name, and its version.
async fn versions(ns: &ManagedNamespace) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    let labelled = ListParams::default().labels(INSTANCE_LABEL);
    macro_rules! add {
        ($($kind:ident),*) => {$(
            for object in ns.api::<$kind>().list(&labelled).await.unwrap() {
                let vm = object.labels()[INSTANCE_LABEL].clone();
                let key = (vm, format!("{} {}", stringify!($kind), object.name_any()));
                found.insert(key, object.resource_version().unwrap());
            }
        )*};
    }
    add!(ConfigMap, PersistentVolumeClaim, Pod, Secret, Service, NetworkPolicy);
    found
}

/// The objects that are new, changed or gone, by VM.
fn changed(
    before: &BTreeMap<(String, String), String>,
    after: &BTreeMap<(String, String), String>,
    name: &str,
) -> BTreeSet<String> {
    let keys = before.keys().chain(after.keys()).filter(|(vm, _)| vm == name);
    keys.filter(|key| before.get(key) != after.get(key)).map(|(_, object)| object.clone()).collect()
}

/// What a plan says of each VM.
struct Planned(BTreeMap<String, Value>);

impl Planned {
    fn of(printed: &Printed, code: i32) -> Self {
        assert_eq!(printed.code, code, "{printed:?}");
        let report: Value = serde_json::from_str(&printed.data).unwrap();
        let vms = report["vms"].as_array().unwrap().iter();
        Self(vms.map(|vm| (vm["name"].as_str().unwrap().to_owned(), vm.clone())).collect())
    }

    fn effects(&self) -> Vec<(&str, &str)> {
        self.0.iter().map(|(name, vm)| (name.as_str(), vm["effect"].as_str().unwrap())).collect()
    }

    fn at_once(&self, name: &str) -> BTreeSet<String> {
        let touched = self.0[name]["atOnce"].as_array().unwrap().iter();
        touched.map(|touched| touched["object"].as_str().unwrap().to_owned()).collect()
    }

    fn at_next_start(&self, name: &str) -> BTreeSet<String> {
        let pending = self.0[name]["atNextStart"].as_array().unwrap().iter();
        pending.map(|change| change["path"].as_str().unwrap().to_owned()).collect()
    }
}

fn pending(vm: &VirtualMachine) -> BTreeSet<String> {
    vm.status.iter().flat_map(|status| &status.pending_changes).map(|change| change.path.clone()).collect()
}

fn needs_restart(vm: &VirtualMachine) -> bool {
    vm.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, conditions::RESTART_REQUIRED))
}

async fn with_config_map(ns: &ManagedNamespace) {
    play_node(&ns.client, NODE).await;
    ns.configure_commands(SERVICES).await;
}

#[tokio::test]
async fn what_the_plan_says_of_changed_sets_is_what_happens_when_they_are_applied() {
    let ns = ManagedNamespace::with_templates("plan", &[]).await;
    with_config_map(&ns).await;
    let maps: Api<ConfigMap> = ns.api();
    let former = json!({ "x.yaml.j2": POLICY });
    for name in ["restart", "live", "broken", "odd", "same"] {
        maps.create(&PostParams::default(), &serde_json::from_value(set(name, &former)).unwrap()).await.unwrap();
    }
    // The node is only a name: nothing is bound to it.
    let of_set = |set: &'static str| move |vm: &mut Value| vm["spec"]["templates"] = json!({ "set": set });
    for (name, set) in [("apple", "restart"), ("date", "odd"), ("fig", "live"), ("plum", "broken"), ("quince", "same")]
    {
        up(&ns, name, of_set(set)).await;
    }
    up(&ns, "kiwi", |_| ()).await;
    ns.create_vm("pear", |vm| {
        vm["spec"]["vm"]["state"] = json!("Stopped");
        of_set("restart")(vm);
    })
    .await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;
    ns.manager.wait_until_idle().await;

    let next = [
        set("restart", &json!({ "x.yaml.j2": POLICY, "pod.yaml.j2": OTHER_SCHEDULER })),
        set("live", &json!({ "x.yaml.j2": POLICY.replace("[Ingress]", "[Ingress, Egress]"), "pod.yaml.j2": LABEL })),
        set("broken", &json!({ "x.yaml.j2": format!("{POLICY}# {{{{ nothing }}}}\n") })),
        set("odd", &json!({ "x.yaml.j2": POLICY, "y.yaml.j2": ODD })),
        set("same", &json!({ "x.yaml.j2": format!("{{# the same #}}\n{POLICY}") })),
    ];
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sets.yaml");
    fs::write(&file, next.iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n")).unwrap();
    let file = file.to_str().unwrap();
    let before = versions(&ns).await;
    let plan = |more: &[&str]| run(&ns, &[&["plan", "--templates", file, "-o", "json"], more].concat());
    let planned = Planned::of(&plan(&[]), 1);
    assert_eq!(
        planned.effects(),
        [
            ("apple", "restart"),
            ("date", "refused"),
            ("fig", "live"),
            ("kiwi", "nothing"),
            ("pear", "start"),
            ("plum", "refused"),
            ("quince", "nothing"),
        ]
    );
    let refused = |name: &str| planned.0[name]["refused"][0].as_str().unwrap().to_owned();
    assert!(refused("plum").starts_with("sets/broken/x.yaml.j2:7:6: undefined value"), "{}", refused("plum"));
    assert!(
        refused("date").contains("sets/odd/y.yaml.j2: the API server refuses Service date-x"),
        "{}",
        refused("date")
    );
    assert_eq!(planned.at_next_start("apple"), BTreeSet::from(["objects/Pod/spec.schedulerName".to_owned()]));
    assert_eq!(versions(&ns).await, before, "a plan changes nothing");
    // One VM alone: the others of its set are looked at nevertheless.
    assert_eq!(Planned::of(&plan(&["fig"]), 1).effects(), [("fig", "live")]);
    assert_eq!(Planned::of(&plan(&["kiwi", "quince"]), 0).effects(), [("kiwi", "nothing"), ("quince", "nothing")]);
    let text = run(&ns, &["plan", "--templates", file, "-v"]);
    assert!(text.data.ends_with("7 VMs: 2 nothing, 1 start, 1 live, 1 restart, 2 refused\n"), "{text:?}");
    println!("{}", run(&ns, &["plan", "--templates", file]).data);
    assert!(text.data.contains("\n  at once: Pod fig metadata.labels.tier: \"web\" instead of nothing\n"), "{text:?}");

    // Now it happens.
    for map in &next {
        let name = map["metadata"]["name"].as_str().unwrap();
        maps.patch(name, &PatchParams::default(), &Patch::Merge(map)).await.unwrap();
    }
    for set in ["broken", "odd"] {
        eventually(&format!("the set {set} to be refused"), LIMIT, async || {
            let log = ns.manager.log();
            let is_it =
                |line: &str| line.contains("new templates are not used") && line.contains(&format!("sets/{set}/"));
            log.lines().any(is_it).then_some(())
        })
        .await;
    }
    let apple = ns.vm_when("apple", "waiting for a restart", needs_restart).await;
    ns.pod_when("fig", "with the label", |pod| pod.labels().contains_key("tier")).await;
    ns.manager.wait_until_idle().await;
    let after = versions(&ns).await;
    for name in planned.0.keys() {
        assert_eq!(changed(&before, &after, name), planned.at_once(name), "{name}");
        assert_eq!(pending(&vm(&ns, name).await), planned.at_next_start(name), "{name}");
    }
    assert_eq!(apple.status.unwrap().templates.unwrap().set.as_deref(), Some("restart"));

    // What is in force now is no change any more, and what waits is said.
    let again = Planned::of(&plan(&["apple", "fig", "pear"]), 0);
    assert_eq!(again.0["apple"]["waitsAlready"][0]["path"], "objects/Pod/spec.schedulerName");
    // This program is that of the manager.
    let program = run(&ns, &["plan", "-o", "json", "kiwi", "fig", "quince", "apple"]);
    assert!(Planned::of(&program, 0).effects().iter().all(|(_, effect)| *effect == "nothing"), "{program:?}");
}

#[tokio::test]
async fn what_the_plan_says_of_a_changed_configuration_is_what_happens() {
    let ns = ManagedNamespace::with_templates("plan-config", &[]).await;
    with_config_map(&ns).await;
    up(&ns, "apple", |_| ()).await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;
    ns.manager.wait_until_idle().await;
    let next = r#""/Manager": {"/Controller": {"/Reconciler": {
        loadBalancerService: true, loggingProperties: "level=FINE", imageRepositoryClaim: images}}}"#;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    fs::write(&file, allowing(next)).unwrap();
    let file = file.to_str().unwrap();
    let before = versions(&ns).await;
    let planned = Planned::of(&run(&ns, &["plan", "--config", file, "-o", "json"]), 1);
    assert_eq!(planned.effects(), [("apple", "restart"), ("pear", "start")]);
    assert_eq!(planned.at_once("apple"), BTreeSet::from(["ConfigMap apple".to_owned()]));
    let fields = &planned.0["apple"]["atOnce"][0]["fields"];
    assert_eq!(fields[0]["path"], "data.logging.properties", "{fields}");
    ns.manager.change_configuration(next);
    ns.vm_when("apple", "waiting for a restart", needs_restart).await;
    ns.manager.wait_until_idle().await;
    let after = versions(&ns).await;
    for name in ["apple", "pear"] {
        // The Pod gets an annotation, so that the kubelet looks at its ConfigMap.
        let changed: BTreeSet<String> =
            changed(&before, &after, name).into_iter().filter(|object| !object.starts_with("Pod")).collect();
        assert_eq!(changed, planned.at_once(name), "{name}");
        assert_eq!(pending(&vm(&ns, name).await), planned.at_next_start(name), "{name}");
    }
    fs::write(file, "\"/Manager\": {\"/Controller\": {\"/Reconciler\": {cpuOvercommit: much}}}").unwrap();
    let wrong = run(&ns, &["plan", "--config", file]);
    assert!(wrong.code == 3 && wrong.talk.contains("config.yaml:1:"), "{wrong:?}");
}

/// How many VMs a plan has in the test of its requests. A person who measures gives more.
fn machines() -> usize {
    std::env::var("VM_OPERATOR_TEST_MACHINES").ok().and_then(|number| number.parse().ok()).unwrap_or(12)
}

#[tokio::test]
async fn a_plan_of_many_vms_lists_each_kind_once_and_a_right_that_is_missing_ends_nothing() {
    let ns = ManagedNamespace::with_templates("plan-many", &[]).await;
    with_config_map(&ns).await;
    let names: Vec<String> = (0..machines()).map(|number| format!("vm-{number:04}")).collect();
    for name in &names {
        ns.create_vm(name, |_| ()).await;
    }
    for name in &names {
        ns.vm_with_reason(name, "Starting").await;
    }
    ns.manager.wait_until_idle().await;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("pod.yaml.j2"), LABEL).unwrap();
    let templates = folder.path().to_str().unwrap();
    let begin = Instant::now();
    let text = run(&ns, &["plan", "--templates", templates]);
    println!("a plan of {} VMs took {:?}", names.len(), begin.elapsed());
    assert!(text.code == 1 && text.data.ends_with(&format!("{0} VMs: {0} live\n", names.len())), "{text:?}");

    // A person who may not list Secrets and may change nothing.
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": { "name": "reader" },
        "rules": [
            { "apiGroups": ["vmoperator.jdrupes.org"], "resources": ["vms"], "verbs": ["get", "list"] },
            { "apiGroups": [""], "resources": ["configmaps", "pods", "services", "persistentvolumeclaims"], "verbs": ["get", "list"] },
        ],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": "reader" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader" },
        "subjects": [{ "kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io" }],
    });
    ns.namespace.create(&format!("{role}\n---\n{binding}")).await;
    let few = run(&ns, &["plan", "vm-0001", "--templates", templates, "-v", "--as", "ada"]);
    assert_eq!(few.code, 3, "what becomes of the Secrets is not known: {few:?}");
    assert!(few.data.contains("at once: Pod vm-0001 metadata.labels.tier"), "{few:?}");
    assert!(few.data.contains("note: not compared, because you may not list them: Secret objects"), "{few:?}");
    assert!(few.talk.contains("# not tried on the API server: Pod objects"), "{few:?}");
    let short = run(&ns, &["plan", "vm-0001", "--templates", templates, "--as", "ada"]);
    let note = "\nnote: vm-0001: not compared, because you may not list them: Secret objects\n";
    assert!(short.code == 3 && short.data.contains(note), "{short:?}");
}

/// Plays kubelet and runner: Pods that are deleted go, and the guests of new ones run and boot, but for those that fail.
fn play(ns: &ManagedNamespace, failing: &'static [&'static str]) -> JoinHandle<()> {
    let (client, namespace) = (ns.client.clone(), ns.namespace.name().to_owned());
    play_kubelet(ns.api(), failing, move |pod| {
        let (client, namespace) = (client.clone(), namespace.clone());
        async move {
            report_of_pod(&client, &namespace, &pod.name_any(), pod.uid().as_deref(), true, "Started").await;
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_restarts_what_waits_in_waves_and_stops_at_the_first_vm_that_does_not_come_back() {
    let ns = ManagedNamespace::with_templates("rollout", &[]).await;
    play_node(&ns.client, NODE).await;
    for name in ["apple", "fig", "kiwi", "plum", "quince"] {
        up(&ns, name, |vm| vm["metadata"]["labels"] = json!({ "tier": if name == "quince" { "db" } else { "web" } }))
            .await;
    }
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;
    assert_eq!(run(&ns, &["rollout"]).code, 2, "somebody must say which");
    let nothing = run(&ns, &["rollout", "--all"]);
    assert_eq!((nothing.code, nothing.data.as_str()), (0, "nothing to restart (6 VMs without changes that wait)\n"));

    ns.manager.change_templates(&[("pod.yaml.j2", OTHER_SCHEDULER)]);
    for name in ["apple", "fig", "kiwi", "plum", "quince"] {
        ns.vm_when(name, "waiting for a restart", needs_restart).await;
    }
    let uids = async || {
        let pods = ns.api::<Pod>().list(&ListParams::default()).await.unwrap();
        pods.into_iter().map(|pod| (pod.name_any(), pod.uid().unwrap())).collect::<BTreeMap<_, _>>()
    };
    let before = uids().await;
    let dry = run(&ns, &["rollout", "-l", "tier=web", "--wave", "50%", "--dry-run"]);
    assert_eq!(
        (dry.code, dry.data.as_str()),
        (
            0,
            "vm/apple restarted in wave 1 of 2: objects/Pod/spec.schedulerName (dry run)\n\
             vm/fig restarted in wave 1 of 2: objects/Pod/spec.schedulerName (dry run)\n\
             vm/kiwi restarted in wave 2 of 2: objects/Pod/spec.schedulerName (dry run)\n\
             vm/plum restarted in wave 2 of 2: objects/Pod/spec.schedulerName (dry run)\n"
        )
    );
    assert_eq!(run(&ns, &["rollout", "-l", "tier=web", "--dry-run=server"]).code, 0);
    assert_eq!(uids().await, before);

    // The guest of fig does not come back.
    let player = play(&ns, &["fig"]);
    let stopped = run(&ns, &["rollout", "-l", "tier=web", "--wave", "2", "--timeout", "8s"]);
    assert_eq!(stopped.code, 1, "{stopped:?}");
    assert!(stopped.data.starts_with("vm/apple restarted (now Running, "), "{stopped:?}");
    for words in [
        "wave 1 of 2: vm/apple, vm/fig\n",
        "vm/fig is not Ready: the rollout stops; `kubectl vm explain fig` says why\n",
        "not touched: vm/kiwi, vm/plum\n",
        &format!("  kubectl vm rollout -n {} --wave 2 kiwi plum\n", ns.namespace),
    ] {
        assert!(stopped.talk.contains(words), "{words:?} in {stopped:?}");
    }
    let after = uids().await;
    assert_eq!((&after["kiwi"], &after["plum"]), (&before["kiwi"], &before["plum"]));
    assert_ne!(after["apple"], before["apple"]);

    // As it was called before, it first waits for what it left; then nobody is restarted twice.
    let waits = run(&ns, &["rollout", "-l", "tier=web", "--wave", "2", "--timeout", "2s"]);
    assert!(waits.code == 1 && waits.talk.contains("vm/fig: it was restarted and is not Ready yet"), "{waits:?}");
    assert_eq!(uids().await, after);
    // Somebody repairs it: the rest follows.
    player.abort();
    ns.report("fig", true, "Started").await;
    ns.vm_with_reason("fig", "Running").await;
    let player = play(&ns, &[]);
    let rest = run(&ns, &["rollout", "--all", "--wave", "10"]);
    assert_eq!(rest.code, 0, "{rest:?}");
    let lines: Vec<&str> = rest.data.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(lines, ["vm/kiwi", "vm/plum", "vm/quince"], "{rest:?}");
    let end = uids().await;
    assert_eq!((&end["apple"], &end["fig"]), (&after["apple"], &after["fig"]));
    let nothing = run(&ns, &["rollout", "--all"]);
    assert!(nothing.code == 0 && nothing.data.starts_with("nothing to restart"), "{nothing:?}");
    player.abort();
}
