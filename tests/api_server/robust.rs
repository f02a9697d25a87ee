//! Faults: an API server that cuts connections, refuses requests and loses answers, and a manager that is killed at any moment.
//! The end state is the same as without faults.

use std::{collections::BTreeMap, time::Duration};

use crate::support::{
    cluster::{Cluster, TestNamespace, eventually},
    managed_namespace::{condition, report, vm_manifest},
    manager::{Manager, install_crds},
    proxy::{Faults, Proxy},
    webhook::Webhook,
};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Secret};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, PropagationPolicy},
};
use serde_json::{Value, json};
use vm_operator::api::{PowerState, VirtualMachine};

/// How long a test waits for an end state.
const LIMIT: Duration = Duration::from_secs(300);

/// The size of a test: a variable of the environment can ask for more than the default.
fn count(variable: &str, default: usize) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

async fn namespace(cluster: &'static Cluster, name: &str) -> TestNamespace {
    install_crds(cluster).await;
    let namespace = cluster.namespace(name).await;
    namespace.create_runners_account().await;
    namespace
}

fn api<K>(client: &Client, namespace: &TestNamespace) -> Api<K>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
    K::DynamicType: Default,
{
    Api::namespaced(client.clone(), namespace.name())
}

/// Something that a person does to a VM.
#[derive(Clone, Copy, Debug)]
enum UserAction {
    Make,
    Start,
    Stop,
    Cpus(u32),
    Label(u32),
    Delete,
}

/// A random sequence of what people do; the same for the same seed.
fn user_actions(seed: u64, machines: usize, length: usize) -> Vec<(usize, UserAction)> {
    let mut random = fastrand::Rng::with_seed(seed);
    let made = (0..machines).map(|machine| (machine, UserAction::Make));
    let more = (0..length).map(|_| {
        let action = match random.u32(0..12) {
            0..3 => UserAction::Stop,
            3..6 => UserAction::Start,
            6..8 => UserAction::Cpus(random.u32(1..3)),
            8 => UserAction::Label(random.u32(0..4)),
            9 => UserAction::Delete,
            _ => UserAction::Make,
        };
        // The first two run through it all, one of them undisturbed, the other with changes that take no restart.
        match (random.usize(1..machines.max(3)), action) {
            (1, UserAction::Cpus(_) | UserAction::Label(_)) => (1, action),
            (1, _) => (1, UserAction::Label(random.u32(0..4))),
            (machine, _) => (machine, action),
        }
    });
    made.chain(more).collect()
}

fn name(machine: usize) -> String {
    format!("vm-{machine}")
}

async fn carry_out(client: &Client, namespace: &TestNamespace, machine: usize, action: UserAction) {
    let vms: Api<VirtualMachine> = api(client, namespace);
    let name = name(machine);
    let patch = match action {
        UserAction::Make => {
            let mut vm = vm_manifest(&name);
            vm["spec"]["vm"]["powerdownTimeout"] = json!(0);
            let made = vms.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await;
            assert!(matches!(&made, Ok(_) | Err(kube::Error::Api(_))), "{made:?}");
            return;
        }
        UserAction::Delete => {
            let _ = vms.delete(&name, &DeleteParams::default()).await;
            return;
        }
        UserAction::Start => json!({ "spec": { "vm": { "state": "Running" } } }),
        UserAction::Stop => json!({ "spec": { "vm": { "state": "Stopped" } } }),
        UserAction::Cpus(cpus) => json!({ "spec": { "vm": { "currentCpus": cpus } } }),
        UserAction::Label(value) => json!({ "metadata": { "labels": { "tier": value.to_string() } } }),
    };
    // One that was deleted before can't be changed.
    let _ = vms.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await;
}

/// The objects of a namespace, without what differs between two runs: a Pod, for example, is made from the spec at that time.
async fn end_state(client: &Client, namespace: &TestNamespace) -> BTreeMap<String, Value> {
    let mut state = BTreeMap::new();
    let mut uids = BTreeMap::new();
    for vm in api::<VirtualMachine>(client, namespace).list(&Default::default()).await.unwrap() {
        let ready = condition(&vm, "Ready").unwrap();
        let status = vm.status.clone().unwrap();
        let observed = status.observed_generation == vm.metadata.generation;
        let said = json!([ready.0, ready.1, status.phase, status.created, observed]);
        state.insert(format!("VirtualMachine {}", vm.name_any()), said);
        uids.insert(vm.name_any(), vm.uid().unwrap());
    }
    for pod in api::<Pod>(client, namespace).list(&Default::default()).await.unwrap() {
        let going = pod.metadata.deletion_timestamp.is_some();
        state.insert(format!("Pod {}", pod.name_any()), json!([pod.labels(), pod.owner_references().len(), going]));
    }
    for map in api::<ConfigMap>(client, namespace).list(&Default::default()).await.unwrap() {
        let mut data = json!(map.data).to_string().replace(namespace.name(), "NAMESPACE");
        // A machine that is made again is told so by its own UID: that of another would stay.
        if let Some(uid) = uids.get(&map.name_any()) {
            data = data.replace(uid, "UID");
        }
        let ours = map.labels().contains_key("app.kubernetes.io/instance");
        if ours {
            state.insert(format!("ConfigMap {}", map.name_any()), json!([data, map.labels()]));
        }
    }
    for claim in api::<PersistentVolumeClaim>(client, namespace).list(&Default::default()).await.unwrap() {
        // A machine that nobody managed while it existed has left none.
        if !claim.labels().get("app.kubernetes.io/instance").is_some_and(|vm| uids.contains_key(vm)) {
            continue;
        }
        let going = claim.metadata.deletion_timestamp.is_some();
        state.insert(format!("PersistentVolumeClaim {}", claim.name_any()), json!([claim.labels(), going]));
    }
    for secret in api::<Secret>(client, namespace).list(&Default::default()).await.unwrap() {
        state.insert(format!("Secret {}", secret.name_any()), json!(secret.labels()));
    }
    state
}

/// Waits until the objects are `expected`.
async fn reaches(
    client: &Client,
    namespace: &TestNamespace,
    expected: &BTreeMap<String, Value>,
    log: impl Fn() -> String,
) {
    let mut last = BTreeMap::new();
    let end = tokio::time::Instant::now() + LIMIT;
    while tokio::time::Instant::now() < end {
        last = end_state(client, namespace).await;
        if last == *expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    println!("{}", log());
    let differ = expected.iter().filter(|(name, value)| last.get(*name) != Some(*value));
    let mut differences: Vec<String> = differ
        .map(|(name, value)| format!("{name}: {value}\n   found {:?}", last.get(name).map(ToString::to_string)))
        .collect();
    differences.extend(last.keys().filter(|name| !expected.contains_key(*name)).map(|name| format!("{name}: nothing")));
    panic!("not the end state of an undisturbed run; expected\n{}", differences.join("\n"));
}

/// The end state after these actions without any fault.
async fn end_state_without_faults(
    cluster: &'static Cluster,
    test: &str,
    actions: &[(usize, UserAction)],
) -> BTreeMap<String, Value> {
    let client = cluster.client().await;
    let namespace = namespace(cluster, test).await;
    let manager = Manager::start(cluster, &namespace, &[]);
    for (machine, action) in actions {
        carry_out(&client, &namespace, *machine, *action).await;
    }
    // The same twice in a row, and everything observed.
    let mut last = BTreeMap::new();
    let state = eventually("the undisturbed run to end", LIMIT, async || {
        let state = end_state(&client, &namespace).await;
        let is_settled = settled(&state) && state == last;
        last = state.clone();
        tokio::time::sleep(Duration::from_secs(2)).await;
        is_settled.then_some(state)
    })
    .await;
    drop(manager);
    state
}

/// Whether every VM has reached its final state, as far as that is possible without a node.
fn settled(state: &BTreeMap<String, Value>) -> bool {
    let machines: Vec<_> = state.iter().filter(|(name, _)| name.starts_with("VirtualMachine ")).collect();
    !machines.is_empty()
        && machines
            .iter()
            .all(|(_, said)| ["StoppedAsRequested", "Starting"].contains(&said[1].as_str().unwrap()) && said[4] == true)
        && state.iter().all(|(name, said)| !name.starts_with("Pod ") || said[2] == false)
        && state.iter().all(|(name, said)| {
            // What a deleted machine leaves the garbage collector takes, in its time.
            let labels = match name.split_once(' ') {
                Some(("Pod", _)) => &said[0],
                Some(("ConfigMap", _)) => &said[1],
                Some(("Secret", _)) => said,
                _ => return true,
            };
            let vm = labels["app.kubernetes.io/instance"].as_str();
            vm.is_some_and(|vm| state.contains_key(&format!("VirtualMachine {vm}")))
        })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_the_api_server_change_nothing_in_the_end() {
    let machines = count("VM_OPERATOR_TEST_MACHINES", 60);
    let cluster = Cluster::control_plane();
    let client = cluster.client().await;
    let all: Vec<(usize, UserAction)> = (0..machines).map(|machine| (machine, UserAction::Make)).collect();
    let expected = end_state_without_faults(cluster, "calm", &all).await;

    let namespace = namespace(cluster, "stormy").await;
    let watch = Some(Duration::from_secs(3));
    let faults = Faults { too_many: 10, unavailable: 5, lost_answer: 3, gone: 10, watch, half_lists: 2 };
    let proxy = Proxy::start(client.clone(), 7, faults).await;
    let manager = Manager::start_with(&proxy.kubeconfig(), namespace.name(), &[], "");
    join_all(all.iter().map(|(machine, action)| carry_out(&client, &namespace, *machine, *action))).await;
    reaches(&client, &namespace, &expected, || manager.log()).await;
    proxy.calm();
    reaches(&client, &namespace, &expected, || manager.log()).await;

    let injected = proxy.injected();
    println!("faults: {injected:?}");
    for fault in ["429", "503", "410", "lost answer", "cut watch", "half a list"] {
        assert!(injected.contains_key(fault), "{injected:?}");
    }
    assert!(manager.log().contains("not done yet"), "this is how a failure is logged: {}", manager.log());
    // A lease is renewed for as long as it lasts.
    let of_objects = |what: &str| !["/status", "/events", "/leases/"].iter().any(|other| what.contains(other));
    let writes: Vec<(String, u32)> = proxy.writes().into_iter().filter(|(what, _)| of_objects(what)).collect();
    // Each has a Pod, a ConfigMap, a Secret and two claims; the answer to the one write may have been lost.
    assert!(writes.len() > 4 * machines, "{writes:?}");
    let often: Vec<_> = writes.iter().filter(|(_, times)| *times > 2).collect();
    assert!(often.is_empty(), "applied more than twice: {often:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_list_makes_no_object_seem_deleted() {
    let cluster = Cluster::control_plane();
    let client = cluster.client().await;
    let all = |action: UserAction| (0..5).map(move |machine| (machine, action));
    let made: Vec<_> = all(UserAction::Make).collect();
    let changed: Vec<_> = all(UserAction::Make).chain(all(UserAction::Cpus(1))).collect();
    let (made, changed) = (
        end_state_without_faults(cluster, "made", &made).await,
        end_state_without_faults(cluster, "changed", &changed).await,
    );

    let namespace = namespace(cluster, "halves").await;
    let manager = Manager::start_with(cluster.kubeconfig(), namespace.name(), &[], "");
    join_all(all(UserAction::Make).map(|(machine, action)| carry_out(&client, &namespace, machine, action))).await;
    reaches(&client, &namespace, &made, || manager.log()).await;
    drop(manager);

    let proxy = Proxy::start(client.clone(), 7, Faults { half_lists: 3, ..Faults::default() }).await;
    let manager = Manager::start_with(&proxy.kubeconfig(), namespace.name(), &[], "");
    eventually("each kind has been listed to its end", LIMIT, async || {
        let lists = proxy.lists();
        (lists.len() >= 5 && lists.values().all(|times| *times > 3)).then_some(())
    })
    .await;
    join_all(all(UserAction::Cpus(1)).map(|(machine, action)| carry_out(&client, &namespace, machine, action))).await;
    reaches(&client, &namespace, &changed, || manager.log()).await;
    let writes: Vec<String> = proxy.writes().into_keys().collect();
    assert_eq!(writes.iter().filter(|what| what.contains("/configmaps/")).count(), 5, "{writes:?}");
    let expected = ["/configmaps/", "/status", "/events", "/leases"];
    let others: Vec<_> = writes.iter().filter(|what| !expected.iter().any(|part| what.contains(part))).collect();
    assert!(others.is_empty(), "{others:?}");
    let injected = proxy.injected();
    assert!(injected["half a list"] >= 5 * 3, "{injected:?}");
    assert!(manager.log().contains("failed to perform initial object list"), "{}", manager.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manager_that_is_killed_at_any_moment_reaches_the_same_end_state() {
    let kills = count("VM_OPERATOR_TEST_KILLS", 25);
    let machines = 12;
    let actions = user_actions(42, machines, 8 * kills);
    let cluster = Cluster::control_plane();
    let client = cluster.client().await;
    let expected = end_state_without_faults(cluster, "unkilled", &actions).await;

    let namespace = namespace(cluster, "killed").await;
    let mut random = fastrand::Rng::with_seed(11);
    let mut left = actions.iter();
    let (mut first_pods, mut first_claims) = (BTreeMap::new(), BTreeMap::new());
    let pods: Api<Pod> = api(&client, &namespace);
    let claims: Api<PersistentVolumeClaim> = api(&client, &namespace);
    for round in 0..kills {
        let manager = Manager::start_with(cluster.kubeconfig(), namespace.name(), &[], "");
        let life = Duration::from_millis(random.u64(20..900));
        let work = async {
            let mut share: Vec<_> = left.by_ref().take(if round + 1 == kills { usize::MAX } else { 9 }).collect();
            for (machine, action) in share.drain(..) {
                carry_out(&client, &namespace, *machine, *action).await;
            }
        };
        // The manager dies in the middle of what people do, or a little after. One lives until the two that nobody stops have Pods, however
        // slow the machine is; those after it find them.
        futures::future::join(work, tokio::time::sleep(life)).await;
        if round == kills / 2 {
            eventually("Pods of the two", LIMIT, async || {
                let made = [pods.get_opt(&name(0)).await.unwrap(), pods.get_opt(&name(1)).await.unwrap()];
                made.iter().all(Option::is_some).then_some(())
            })
            .await;
        }
        drop(manager);
        for machine in 0..2 {
            if let Some(pod) = pods.get_opt(&name(machine)).await.unwrap() {
                let uid = pod.uid().unwrap();
                let first = first_pods.entry(machine).or_insert_with(|| uid.clone());
                assert_eq!(*first, uid, "a machine that nobody stopped was started anew");
            }
        }
        for claim in claims.list(&Default::default()).await.unwrap() {
            first_claims.entry(claim.name_any()).or_insert_with(|| claim.uid().unwrap());
        }
    }
    let manager = Manager::start_with(cluster.kubeconfig(), namespace.name(), &[], "");
    reaches(&client, &namespace, &expected, || manager.log()).await;
    assert!(kills < 10 || first_pods.len() == 2, "the two that nobody stops: {first_pods:?}");
    assert!(kills < 10 || first_claims.len() > 4, "{first_claims:?}");
    for (machine, first) in first_pods {
        assert_eq!(pods.get(&name(machine)).await.unwrap().uid().unwrap(), first);
    }
    for (claim, first) in first_claims {
        assert_eq!(claims.get(&claim).await.unwrap().uid().unwrap(), first, "claim {claim} was made anew");
    }
}

/// Guests shut down while the manager is killed, and people start some of the VMs while no manager runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_after_a_guest_shutdown_is_never_undone_and_the_other_vms_stay_down() {
    let kills = count("VM_OPERATOR_TEST_KILLS", 25);
    let cluster = Cluster::control_plane();
    let client = cluster.client().await;
    let namespace = namespace(cluster, "shutdowns").await;
    let (vms, pods): (Api<VirtualMachine>, Api<Pod>) = (api(&client, &namespace), api(&client, &namespace));
    let names: Vec<String> = (0..6).map(name).collect();
    for name in &names {
        let mut vm = vm_manifest(name);
        vm["spec"]["guestShutdownStops"] = json!(true);
        vms.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
    }
    let start = async |name: &str| {
        let running = Patch::Merge(json!({ "spec": { "vm": { "state": "Running" } } }));
        vms.patch(name, &PatchParams::default(), &running).await.unwrap();
    };
    let ready = async |name: &str, wanted: &str| {
        eventually(&format!("{name} to be {wanted}"), LIMIT, async || {
            let vm = vms.get(name).await.unwrap();
            let is = condition(&vm, "Ready").is_some_and(|(_, reason, _)| reason == wanted);
            (is && vm.metadata.generation == vm.status.as_ref().unwrap().observed_generation).then_some(vm)
        })
        .await
    };
    let mut random = fastrand::Rng::with_seed(5);
    let (mut started, mut down) = (0, 0);
    for round in 0..kills.div_ceil(3) {
        let manager = Manager::start_with(cluster.kubeconfig(), namespace.name(), &[], "");
        let mut former = BTreeMap::new();
        for name in &names {
            start(name).await;
            ready(name, "Starting").await;
            let pod = eventually("its Pod", LIMIT, async || pods.get_opt(name).await.unwrap()).await;
            former.insert(name.clone(), pod.uid());
            report(&client, namespace.name(), name, true, "Started").await;
        }
        let life = Duration::from_millis(random.u64(0..300));
        let shutdowns =
            join_all(names.iter().map(|name| report(&client, namespace.name(), name, false, "GuestShutdown")));
        futures::future::join(shutdowns, tokio::time::sleep(life)).await;
        // However slow all is, it comes so far now and then that there is something to start.
        if round % 3 == 0 {
            eventually("the first to be stopped", LIMIT, async || {
                let vms = vms.list(&ListParams::default()).await.unwrap();
                vms.iter().any(|vm| vm.spec.vm.state == PowerState::Stopped).then_some(())
            })
            .await;
        }
        drop(manager);
        let mut starts = BTreeMap::new();
        for name in &names {
            let is_stopped = vms.get(name).await.unwrap().spec.vm.state == PowerState::Stopped;
            // In those rounds all, so that there are some.
            if is_stopped && (round % 3 == 0 || random.bool()) {
                start(name).await;
                starts.insert(name.clone(), ());
            }
        }
        let _manager = Manager::start_with(cluster.kubeconfig(), namespace.name(), &[], "");
        for name in &names {
            if starts.contains_key(name) {
                let vm = ready(name, "Starting").await;
                assert_eq!(vm.spec.vm.state, PowerState::Running);
                eventually("another Pod", LIMIT, async || {
                    let pod = pods.get_opt(name).await.unwrap();
                    pod.filter(|pod| pod.metadata.deletion_timestamp.is_none() && pod.uid() != former[name])
                })
                .await;
                started += 1;
            } else {
                let vm = ready(name, "StoppedAsRequested").await;
                assert_eq!(vm.spec.vm.state, PowerState::Stopped);
                assert!(pods.get_opt(name).await.unwrap().is_none());
                down += 1;
            }
        }
    }
    println!("{started} started while no manager ran, {down} stayed down");
    assert!(started > 0 && down > 0, "{started} {down}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_admission_webhook_blocks_no_other_vm_and_a_failing_one_is_reported() {
    let cluster = Cluster::control_plane();
    let namespace = namespace(cluster, "admission").await;
    let client = cluster.client().await;
    let (machines, pods): (Api<VirtualMachine>, Api<Pod>) = (api(&client, &namespace), api(&client, &namespace));
    let webhook = Webhook::start().await;
    // Some are there before the manager. They are more than the manager reconciles at once.
    let slow: Vec<String> = (0..20).map(|number| format!("slow-{number:02}")).collect();
    let (before, after) = slow.split_at(10);
    let mut names: Vec<&str> = slow.iter().map(String::as_str).collect();
    names.push("late");
    let configure = |seconds| namespace.apply(&webhook.configuration(namespace.name(), &names, seconds).to_string());
    configure(30);
    // The API server takes up its configuration some time after it has it.
    webhook.answer(true);
    let probe = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "probe", "labels": { "app.kubernetes.io/instance": "late" } },
        "spec": { "containers": [{ "name": "probe", "image": "probe" }] },
    });
    let probe = serde_json::from_value(probe).unwrap();
    eventually("the webhook to be in force", LIMIT, async || {
        pods.create(&PostParams { dry_run: true, ..PostParams::default() }, &probe).await.unwrap();
        (!webhook.asked().is_empty()).then_some(())
    })
    .await;
    webhook.answer(false);
    webhook.forget();
    let make = async |name: &str| {
        let vm = serde_json::from_value(vm_manifest(name)).unwrap();
        machines.create(&PostParams::default(), &vm).await.unwrap();
    };
    let has_pod = async |name: &str| pods.get_opt(name).await.unwrap().is_some();

    for name in before {
        make(name).await;
    }
    let manager = Manager::start(cluster, &namespace, &[]);
    eventually("the webhook to be asked", LIMIT, async || (webhook.asked() == before).then_some(())).await;
    manager.wait_until_ready("listed").await;
    for name in after {
        make(name).await;
    }
    eventually("the webhook to be asked", LIMIT, async || (webhook.asked() == slow).then_some(())).await;
    for number in 0..4 {
        make(&format!("quick-{number}")).await;
    }
    eventually("the quick ones' Pods", LIMIT, async || {
        let pods = pods.list(&ListParams::default()).await.unwrap();
        (pods.iter().filter(|pod| pod.name_any().starts_with("quick")).count() == 4).then_some(())
    })
    .await;
    for name in &slow {
        assert!(!has_pod(name).await, "{name} waits for its admission");
    }
    webhook.answer(true);
    for name in &slow {
        eventually(&format!("the Pod of {name}"), LIMIT, async || has_pod(name).await.then_some(())).await;
    }
    assert_eq!(webhook.asked(), slow, "each was sent once");

    // One that does not answer in time is a failure that may last, and whoever looks at the machine is told.
    webhook.answer(false);
    configure(1);
    make("late").await;
    let ready = async |reason: &str| {
        eventually(&format!("late to be {reason}"), LIMIT, async || {
            let vm = machines.get("late").await.unwrap();
            condition(&vm, "Ready").filter(|(_, is, _)| is == reason)
        })
        .await
    };
    let (_, _, message) = ready("ApplyFailed").await;
    assert!(message.starts_with("apply Pod late: ") && message.contains("slow.example.org"), "{message}");
    make("other").await;
    eventually("the Pod of other", LIMIT, async || has_pod("other").await.then_some(())).await;
    webhook.answer(true);
    eventually("the Pod of late", LIMIT, async || has_pod("late").await.then_some(())).await;
    ready("Starting").await;
    cluster.kubectl(&["delete", "validatingwebhookconfiguration", namespace.name()]);
}

/// The garbage collector takes away the owner of what a VM leaves. If the manager gave it back, the Pod would go with the VM.
#[tokio::test]
async fn a_vm_whose_deletion_is_seen_late_takes_nothing_back_that_it_left() {
    let cluster = Cluster::control_plane();
    let client = cluster.client().await;
    let namespace = namespace(cluster, "left").await;
    let proxy = Proxy::start(client.clone(), 1, Faults::default()).await;
    let manager = Manager::start_with(&proxy.kubeconfig(), namespace.name(), &[], "");
    let vms = api::<VirtualMachine>(&client, &namespace);
    let pods = api::<Pod>(&client, &namespace);
    let mut manifest = vm_manifest("apple");
    // With a node the Pod does not go at once when it is deleted.
    manifest["spec"]["nodeName"] = json!("played");
    namespace.apply(&manifest.to_string());
    eventually("the VM to run", LIMIT, async || {
        pods.get_opt("apple").await.unwrap()?;
        report(&client, namespace.name(), "apple", true, "Started").await;
        let vm = vms.get("apple").await.unwrap();
        condition(&vm, "Ready").is_some_and(|ready| ready.1 == "Running").then_some(())
    })
    .await;
    let pod = pods.get("apple").await.unwrap();
    proxy.hold_watches(Some("/vms?"));
    let orphan = DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    vms.delete("apple", &orphan).await.unwrap();
    eventually("the manager to see what the VM left", LIMIT, async || {
        manager.log().contains("it adopts nothing").then_some(())
    })
    .await;
    let is_gone = async || vms.get_opt("apple").await.unwrap().is_none().then_some(());
    eventually("the VM to be gone", LIMIT, is_gone).await;
    let left = pods.get("apple").await.unwrap();
    assert_eq!((left.uid(), left.metadata.deletion_timestamp.is_some()), (pod.uid(), false));
    assert!(left.owner_references().is_empty(), "{:?}", left.metadata);

    // A new VM of the name continues with it, whether its state is set or not.
    proxy.hold_watches(None);
    manifest["spec"]["vm"].as_object_mut().unwrap().remove("state");
    namespace.apply(&manifest.to_string());
    let vm = vms.get("apple").await.unwrap();
    let adopted = eventually("the Pod to be owned", LIMIT, async || {
        let pod = pods.get("apple").await.unwrap();
        pod.owner_references().iter().any(|owner| Some(&owner.uid) == vm.uid().as_ref()).then_some(pod)
    })
    .await;
    assert_eq!((adopted.uid(), adopted.metadata.deletion_timestamp.is_some()), (pod.uid(), false));
}
