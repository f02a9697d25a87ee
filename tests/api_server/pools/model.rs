//! Many people share few VMs of a pool that makes them, by two replicas whose clocks differ by five minutes, while the pool grows and shrinks, its
//! template changes, another pool of the same VMs comes and goes, people are at consoles, hours pass, calls are cut off between any two
//! writes, and the manager is killed. The properties are checked in the history of all writes, and at rest.
//!
//! `VM_OPERATOR_TEST_POOL_STEPS=10000` does 10,000 steps with 50 people and 20 VMs; by default it is 200 with 8 and 5.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Mutex,
        atomic::{AtomicI64, Ordering},
    },
};

use futures::{StreamExt, future::join_all};
use kube::runtime::watcher;
use tokio::time::timeout;
use vm_operator::assignment::{CLOCK_SKEW, Held, candidates};

use super::{members::manifest, *};
use crate::support::{managed_namespace::SERVICES, manager::Manager};

/// How many seconds have passed for the people and the replicas. The manager keeps the true time, so it is a replica with a slow clock.
static PASSED: AtomicI64 = AtomicI64::new(0);

fn clock(skew: i64) -> Timestamp {
    Timestamp::now() + SignedDuration::from_secs(PASSED.load(Ordering::Relaxed) + skew)
}

const REPLICAS: [fn() -> Timestamp; 2] = [|| clock(-150), || clock(150)];
/// The retention of the pools in minutes.
const RETENTION: [(&str, i64); 2] = [("desk", 60), ("night", 20)];
/// How many things happen at a time.
const AT_ONCE: usize = 10;

/// A state of a VM in the history.
#[derive(Clone, Debug)]
struct Seen {
    uid: Option<String>,
    held: Option<Held>,
    console: Option<(bool, Timestamp)>,
    is_gone: bool,
}

impl Seen {
    fn of(vm: &VirtualMachine, is_gone: bool) -> Self {
        let status = vm.status.as_ref();
        let console = status.and_then(|status| {
            let console = status.conditions.iter().find(|condition| condition.type_ == "ConsoleConnected")?;
            Some((console.status == "True", console.last_transition_time.0))
        });
        let held = status.and_then(|status| status.pools.assignment.as_ref()).and_then(Held::of);
        Self { uid: vm.uid(), held, console, is_gone }
    }
}

type History = Arc<Mutex<Vec<(String, Seen)>>>;

/// In the whole history of writes: who loses a VM to somebody else was past the retention, and not at the console. Nobody's VM is deleted.
fn check(history: &[(String, Seen)]) -> usize {
    let (mut last, mut taken) = (BTreeMap::<&String, &Seen>::new(), 0);
    for (name, now) in history {
        let before = last.insert(name, now).filter(|before| before.uid == now.uid && !before.is_gone);
        if now.is_gone {
            assert!(now.held.is_none(), "nobody's VM is deleted: {name} was {now:?}");
            continue;
        }
        let Some((before, held)) = before.and_then(|before| Some((before, before.held.as_ref()?))) else { continue };
        let Some(next) = now.held.as_ref().filter(|next| next.user != held.user) else { continue };
        taken += 1;
        assert!(
            !before.console.is_some_and(|(is_connected, _)| is_connected),
            "taken at the console: {name}, {before:?}, {now:?}"
        );
        let pool = held.pool.as_deref().unwrap();
        let minutes = RETENTION.iter().find(|(name, _)| *name == pool).map(|(_, minutes)| *minutes).unwrap();
        let used = [held.last_used, before.console.map(|(_, since)| since)].into_iter().flatten().max().unwrap();
        let end = used + SignedDuration::from_mins(minutes) + CLOCK_SKEW;
        // Both times are whole seconds.
        let at = next.assigned_at.unwrap() + SignedDuration::from_secs(1);
        assert!(end <= at, "never two users on a VM within retention: {name} is kept until {end}, {before:?}, {now:?}");
    }
    taken
}

struct Scene<'a> {
    ns: &'a ManagedNamespace,
    random: fastrand::Rng,
    people: usize,
    vms: u32,
}

type Happens<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

impl<'a> Scene<'a> {
    /// Something that happens while other things do.
    fn step(&mut self) -> Happens<'a> {
        let ns = self.ns;
        let handle = handle(ns, REPLICAS[self.random.usize(..2)]);
        let name = format!("user-{}", self.random.usize(..self.people));
        let vm = format!("desk-{}", self.random.u32(..self.vms));
        let pool = ["desk", "desk", "night"][self.random.usize(..3)];
        match self.random.u8(..20) {
            // A replica is killed while it works.
            0..4 => {
                let limit = Duration::from_millis(self.random.u64(5..400));
                Box::pin(async move { drop(timeout(limit, handle.assign(pool, &user(&name))).await) })
            }
            4..6 => Box::pin(async move { allowed(handle.release(pool, &name, None).await.map(drop)) }),
            6 => Box::pin(async move { allowed(handle.unassign(&vm, None).await.map(drop)) }),
            7 => Box::pin(async move {
                let nobody = Assignee { rights: Rights::default(), ..user(&name) };
                let answer = handle.assign(pool, &nobody).await;
                let is_refused =
                    matches!(answer, Err(PoolError::Refused(NotAssigned::NoRight { .. }) | PoolError::NoPool { .. }));
                assert!(is_refused, "no right, no VM: {answer:?}");
            }),
            // Another writer makes a conflict.
            8..10 => {
                let patch = Patch::Merge(json!({ "metadata": { "annotations": { "note": name } } }));
                Box::pin(async move {
                    drop(ns.api::<VirtualMachine>().patch(&vm, &PatchParams::default(), &patch).await);
                })
            }
            10..12 => {
                let is_there = self.random.bool();
                Box::pin(async move { sit_down(ns, &vm, is_there).await })
            }
            12 => {
                let replicas = self.random.u32(self.vms / 2..=self.vms);
                Box::pin(async move { change_pool(ns, json!({ "replicas": replicas })).await })
            }
            13 => {
                let cpus = self.random.u32(1..4);
                let template = json!({ "template": { "spec": { "vm": { "maximumCpus": cpus } } } });
                Box::pin(async move { change_pool(ns, template).await })
            }
            14 if self.random.u8(..3) == 0 => Box::pin(async move {
                let pools = ns.api::<VmPool>();
                if pools.get_opt("night").await.unwrap().is_some() {
                    drop(pools.delete("night", &Default::default()).await);
                } else {
                    create_night(ns).await;
                }
            }),
            15 => {
                PASSED.fetch_add(self.random.i64(0..900), Ordering::Relaxed);
                Box::pin(async {})
            }
            _ => Box::pin(async move { allowed(handle.assign(pool, &user(&name)).await.map(drop)) }),
        }
    }
}

/// Each call ends, and an error is one of those that a person understands.
fn allowed(answer: Result<(), PoolError>) {
    match answer {
        Ok(())
        | Err(PoolError::Refused(NotAssigned::NoneFree { .. } | NotAssigned::NoMembers))
        | Err(PoolError::NoPool { .. } | PoolError::NoVm { .. }) => {}
        Err(error) => panic!("it ends: {error:?}"),
    }
}

async fn change_pool(ns: &ManagedNamespace, spec: Value) {
    let patch = Patch::Merge(json!({ "spec": spec }));
    ns.api::<VmPool>().patch("desk", &PatchParams::default(), &patch).await.unwrap();
}

async fn create_night(ns: &ManagedNamespace) {
    let pool = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": "night" },
        "spec": { "retention": "PT20M", "permissions": [{ "role": "staff" }] },
    });
    drop(ns.api::<VmPool>().create(&PostParams::default(), &serde_json::from_value(pool).unwrap()).await);
}

/// Whoever has the VM comes to its console, or goes.
async fn sit_down(ns: &ManagedNamespace, name: &str, is_there: bool) {
    let vms = ns.api::<VirtualMachine>();
    let Some(vm) = vms.get_opt(name).await.unwrap() else { return };
    let Some(user) = holder(&vm) else { return };
    let condition = json!({
        "type": "ConsoleConnected", "status": if is_there { "True" } else { "False" }, "reason": "Test", "message": "-",
        "lastTransitionTime": clock(0).strftime("%FT%TZ").to_string(),
    });
    let others =
        vm.status.iter().flat_map(|status| &status.conditions).filter(|other| other.type_ != "ConsoleConnected");
    let conditions: Vec<_> = others.map(|other| json!(other)).chain([condition]).collect();
    let status = json!({ "consoleUser": user, "conditions": conditions });
    let patch = Patch::Merge(json!({ "metadata": { "resourceVersion": vm.resource_version() }, "status": status }));
    drop(vms.patch_status(name, &PatchParams::default(), &patch).await);
}

/// What is true when everything has ended.
async fn at_rest(ns: &ManagedNamespace) {
    let vms = ns.api::<VirtualMachine>();
    let list = async || vms.list(&Default::default()).await.unwrap().items;
    for vm in list().await {
        sit_down(ns, &vm.name_any(), false).await;
    }
    eventually("each user to have one VM of a pool at most, and the pool its VMs", 2 * LIMIT, async || {
        let view = handle(ns, || clock(0)).list().await.unwrap();
        let mut held = BTreeMap::new();
        for member in view.members.iter().filter(|member| !member.is_deleted) {
            if let Some(of) = &member.held {
                held.entry((of.pool.clone(), of.user.clone())).or_insert_with(Vec::new).push(&member.name);
                view.pools.get(of.pool.as_ref()?)?;
            }
        }
        let plan = vm_operator::assignment::members::plan(
            &view.pools["desk"],
            &view.members,
            &Default::default(),
            String::new,
        )?;
        (held.values().all(|names| names.len() == 1) && plan.writes.is_empty()).then_some(())
    })
    .await;

    // Repeating changes nothing, and whoever has none gets the first of the order.
    let replica = handle(ns, || clock(0));
    let view = replica.list().await.unwrap();
    let held = view.members.iter().filter_map(|member| Some((member.name.clone(), member.held.clone()?)));
    for (name, held) in held.filter(|(_, held)| held.pool.as_deref() == Some("desk")).take(3) {
        let again = replica.assign("desk", &user(&held.user)).await.unwrap();
        assert_eq!((again.vm.name_any(), again.is_new), (name, false), "repeating changes nothing for {}", held.user);
    }
    let view = replica.list().await.unwrap();
    let first = candidates("desk", &view.pools, &view.members, clock(0)).first().map(|member| member.name.clone());
    let chosen = replica.assign("desk", &user("newcomer")).await.ok().map(|assigned| assigned.vm.name_any());
    assert!(chosen == first, "the chosen one is the first of the order: {chosen:?} and not {first:?}");
    replica.release("desk", "newcomer", None).await.unwrap();
}

#[tokio::test]
async fn many_people_share_few_vms() {
    let steps = std::env::var("VM_OPERATOR_TEST_POOL_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(200);
    let (people, vms) = if steps > 1000 { (50, 20) } else { (8, 5) };
    let mut ns = ManagedNamespace::new("pool-model").await;
    let mut pool = manifest("desk", vms);
    pool["spec"]["warm"] = json!(1);
    pool["spec"]["template"]["spec"]["pools"] = json!(["night"]);
    ns.namespace.apply(&pool.to_string());
    create_night(&ns).await;
    let history = History::default();
    let observer = {
        let (vms, history) = (ns.api::<VirtualMachine>(), history.clone());
        tokio::spawn(watcher(vms, Default::default()).for_each(move |event| {
            match event {
                Ok(watcher::Event::Apply(vm) | watcher::Event::InitApply(vm)) => {
                    history.lock().unwrap().push((vm.name_any(), Seen::of(&vm, false)));
                }
                Ok(watcher::Event::Delete(vm)) => history.lock().unwrap().push((vm.name_any(), Seen::of(&vm, true))),
                _ => {}
            }
            std::future::ready(())
        }))
    };
    pool_when(&ns, "desk", [vms, vms, 0, 0], reasons::USABLE).await;

    let rounds = steps / AT_ONCE;
    let mut random = fastrand::Rng::with_seed(7);
    for round in 1..=rounds {
        let mut scene = Scene { ns: &ns, random: random.fork(), people, vms };
        let happens: Vec<_> = (0..AT_ONCE).map(|_| scene.step()).collect();
        join_all(happens).await;
        if round % 10 == 5 {
            ns.manager.signal(rustix::process::Signal::KILL);
            ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], SERVICES);
        }
        if round == rounds || round % 100 == 0 {
            at_rest(&ns).await;
        }
    }
    let history = std::mem::take(&mut *history.lock().unwrap());
    let taken = check(&history);
    println!(
        "{steps} steps of {people} people with {vms} VMs: {} states of VMs, {taken} VMs taken from others",
        history.len()
    );
    assert!(
        history.len() > steps / 4 && (steps < 1000 || taken > 0),
        "the watch has seen what happened: {}",
        history.len()
    );
    observer.abort();
}
