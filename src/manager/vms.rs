//! The watch of the machines: waits for their CustomResourceDefinition, and steps over a machine that can't be read.
//!
//! ```text
//!  watch ─▶ read, trim, pack ─▶ store ─▶ all listed: all ───────────┐
//!                                 └────▶ later: each that changes ──┴─▶ queue
//! ```

use std::{
    collections::BTreeSet,
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt, channel::oneshot, stream};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client, Resource,
    runtime::{
        WatchStreamExt,
        events::{Event as Note, EventType},
        reflector::{ObjectRef, Store, store::Writer},
        watcher::{self, Event},
    },
};
use tokio::time::timeout;
use tracing::{info, warn};

use super::web::{HealthPart, Readiness};
use crate::{
    api::VirtualMachine,
    cluster::{
        events::EventRecorder,
        list_watch::{self, list_watch},
        packed::{PackedVm, Unreadable},
    },
    metrics::Metrics,
    ownership,
    process::{ErrorChain, RepeatFilter},
};

/// For how long at most the first reconciles wait until the kinds of objects that VMs usually have are listed.
const OBJECTS_LISTED: Duration = Duration::from_secs(10);

/// Of a machine what is kept, if it can be read.
fn trimmed(vm: &PackedVm) -> Result<PackedVm, Unreadable> {
    let mut vm = vm.read()?;
    ownership::trim(&mut vm);
    Ok(PackedVm::from(&vm))
}

/// The watch of the VMs of a namespace.
pub struct VmWatch {
    /// The client.
    pub client: Client,
    /// The namespace; `None`: all.
    pub namespace: Option<String>,
    /// Counts VMs that cannot be read, and interrupted watches.
    pub metrics: Arc<Metrics>,
    /// Reports how far the list is.
    pub health: HealthPart,
    /// Writes an event about each VM that cannot be read.
    pub recorder: Arc<EventRecorder>,
}

impl VmWatch {
    /// The VMs that change or go after all of them have been `listed`. The store of `writer` keeps them.
    pub fn start(
        self,
        writer: Writer<PackedVm>,
        listed: oneshot::Sender<()>,
    ) -> impl Stream<Item = watcher::Result<PackedVm>> + Send + use<> {
        let Self { client, namespace, metrics, health, recorder } = self;
        let mut reader = Reader::new(metrics, health, move |vm: &_, error: &_| record_unreadable(&recorder, vm, error));
        let api = match namespace {
            Some(namespace) => Api::namespaced(client, &namespace),
            None => Api::all(client),
        };
        let events = list_watch(api, watcher::Config::default());
        changed(events.filter_map(move |event| ready(reader.take(event))), writer, listed)
    }
}

/// The machines that change and go once they are `listed`, each when the store has it so.
fn changed(
    events: impl Stream<Item = Event<PackedVm>> + Send,
    writer: Writer<PackedVm>,
    listed: oneshot::Sender<()>,
) -> impl Stream<Item = watcher::Result<PackedVm>> + Send {
    let (mut listed, store) = (Some(listed), writer.as_reader());
    events.map(Ok).reflect(writer).flat_map(move |event| {
        stream::iter(match event {
            // The store has what is listed when all is: who looks before that sees what was.
            Ok(Event::Init | Event::InitApply(_)) => vec![],
            Ok(Event::InitDone) => match listed.take() {
                Some(listed) => {
                    // Nobody waits any more when the manager ends.
                    let _ = listed.send(());
                    vec![]
                }
                // Listed again: whatever changed meanwhile.
                None => store.state().into_iter().map(|vm| Ok(Arc::unwrap_or_clone(vm))).collect(),
            },
            Ok(Event::Apply(vm) | Event::Delete(vm)) => vec![Ok(vm)],
            Err(error) => vec![Err(error)],
        })
    })
}

/// The VMs to reconcile for another reason than a change of the VM itself.
///
/// When all VMs are `listed` and their objects are (`objects_listed`, for 10 s at most), each VM is reconciled once. From then on
/// the `triggered` ones are. A trigger that comes earlier is dropped: the first list of a kind would trigger a VM once for each of
/// its objects, and the reconcile of all VMs that follows sees them anyway.
pub fn at_start(
    listed: oneshot::Receiver<()>,
    objects_listed: impl Future<Output = ()> + Send + 'static,
    store: Store<PackedVm>,
    triggered: impl Stream<Item = ObjectRef<PackedVm>> + Send,
) -> impl Stream<Item = ObjectRef<PackedVm>> + Send {
    let started = Arc::new(AtomicBool::new(false));
    let passes = started.clone();
    let all = stream::once(async move {
        // If the watch has ended, so does the manager.
        let _ = listed.await;
        let _ = timeout(OBJECTS_LISTED, objects_listed).await;
        started.store(true, Ordering::Relaxed);
        stream::iter(store.state()).map(|vm| ObjectRef::from_obj(&*vm))
    });
    stream::select(all.flatten(), triggered.filter(move |_| ready(passes.load(Ordering::Relaxed))))
}

struct Reader<T> {
    metrics: Arc<Metrics>,
    health: HealthPart,
    /// Tells whoever looks at the machine that it can't be read.
    tell: T,
    /// Machines that can't be read now.
    names: BTreeSet<String>,
    /// How many of them are in the metric.
    counted: i64,
    listed: usize,
    /// Whether all were listed once.
    known: bool,
    said: RepeatFilter,
}

impl<T: FnMut(&PackedVm, &Unreadable)> Reader<T> {
    fn new(metrics: Arc<Metrics>, health: HealthPart, tell: T) -> Self {
        Self {
            metrics,
            health,
            tell,
            names: BTreeSet::new(),
            counted: 0,
            listed: 0,
            known: false,
            said: RepeatFilter::default(),
        }
    }

    /// What the store is to hear of an event.
    fn take(&mut self, event: watcher::Result<Event<PackedVm>>) -> Option<Event<PackedVm>> {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                self.failed(&error);
                return None;
            }
        };
        match event {
            Event::Init => {
                self.names.clear();
                self.listed = 0;
                Some(Event::Init)
            }
            Event::InitApply(vm) => {
                self.listed += 1;
                self.read(&vm).map(Event::InitApply)
            }
            Event::InitDone => {
                self.count();
                self.known = true;
                if self.said.clear() {
                    info!(machines = self.listed, "the machines are listed now");
                }
                self.health.set(Readiness::Ready(format!("{} listed", self.listed)));
                Some(Event::InitDone)
            }
            Event::Apply(vm) => {
                self.works();
                // What cannot be read cannot be brought anywhere: as if it were not there. Nothing of it is deleted.
                let event = self.read(&vm).map_or(Event::Delete(vm), Event::Apply);
                self.count();
                Some(event)
            }
            Event::Delete(vm) => {
                self.works();
                self.names.remove(&vm.full_name());
                self.count();
                Some(Event::Delete(vm))
            }
        }
    }

    /// Of a machine what is kept, if it can be read.
    fn read(&mut self, vm: &PackedVm) -> Option<PackedVm> {
        let name = vm.full_name();
        match trimmed(vm) {
            Ok(read) => {
                self.names.remove(&name);
                Some(read)
            }
            Err(error) => {
                warn!(vm = name, %error, "this machine can't be read and is left as it is");
                self.names.insert(name);
                (self.tell)(vm, &error);
                None
            }
        }
    }

    /// The watch goes on after a trouble.
    fn works(&mut self) {
        if self.said.clear() {
            info!("the watch of the machines works again");
        }
    }

    /// Other namespaces are watched by others and count in the same metric.
    fn count(&mut self) {
        let count = i64::try_from(self.names.len()).unwrap_or(i64::MAX);
        self.metrics.unreadable(count - std::mem::replace(&mut self.counted, count));
    }

    /// The watch goes on by itself; a trouble that lasts is said once.
    fn failed(&mut self, error: &watcher::Error) {
        self.metrics.watch_cut("VirtualMachine");
        let message = if list_watch::code(error) == Some(404) {
            let resource = VirtualMachine::plural(&());
            format!("the API server does not know {resource}: apply the CustomResourceDefinitions in crds/")
        } else {
            ErrorChain(error).to_string()
        };
        if !self.said.is_new(&message) {
            return;
        }
        warn!("waiting for the machines: {message}");
        // A manager that has listed them once goes on with what it knows.
        if !self.known {
            self.health.set(Readiness::Waiting(message));
        }
    }
}

/// An event where a person who wonders about the machine will look.
fn record_unreadable(recorder: &EventRecorder, vm: &PackedVm, error: &Unreadable) {
    let note = format!("this version of the manager can't read the machine and leaves it as it is: {error}");
    let event = Note {
        type_: EventType::Warning,
        reason: "Unreadable".into(),
        note: Some(note),
        action: "Read".into(),
        secondary: None,
    };
    recorder.record(event, ObjectReference { resource_version: None, ..vm.object_ref(&()) });
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::{FutureExt, channel::mpsc::unbounded};
    use kube::{ResourceExt, runtime::reflector};
    use serde_json::{Value, json};

    use super::*;
    use crate::manager::web::Health;

    fn arrived(name: &str, spec: Value) -> PackedVm {
        serde_json::from_value(json!({ "metadata": { "name": name, "namespace": "ns" }, "spec": spec })).unwrap()
    }

    #[test]
    fn one_that_can_not_be_read_is_as_if_it_were_not_there() {
        let metrics = Arc::new(Metrics::new());
        let (health, _) = Health::new(metrics.clone());
        let (unreadable, told) = std::sync::mpsc::channel();
        let tell = |_: &_, error: &Unreadable| unreadable.send(error.to_string()).unwrap();
        let health = HealthPart { health, name: "machines".to_owned() };
        let mut reader = Reader::new(metrics, health, tell);
        let (good, bad) = (json!({ "vm": { "maximumCpus": 1 } }), json!({ "vm": { "maximumCpus": "many" } }));
        assert!(matches!(reader.take(Ok(Event::Init)), Some(Event::Init)));
        assert!(reader.take(Ok(Event::InitApply(arrived("bad", bad.clone())))).is_none());
        let listed = reader.take(Ok(Event::InitApply(arrived("good", good.clone()))));
        assert!(matches!(listed, Some(Event::InitApply(vm)) if vm.name_any() == "good"));
        assert!(matches!(reader.take(Ok(Event::InitDone)), Some(Event::InitDone)));
        assert!(reader.metrics.text().contains("vm_operator_machines_unreadable 1"));
        assert!(told.try_recv().unwrap().contains("many"));

        // What was readable and is not any more is forgotten; what is again is there.
        let changed = reader.take(Ok(Event::Apply(arrived("good", bad))));
        assert!(matches!(changed, Some(Event::Delete(vm)) if vm.name_any() == "good"));
        assert!(reader.metrics.text().contains("vm_operator_machines_unreadable 2"));
        let mended = reader.take(Ok(Event::Apply(arrived("bad", good))));
        assert!(matches!(mended, Some(Event::Apply(vm)) if vm.name_any() == "bad"));
        assert!(reader.metrics.text().contains("vm_operator_machines_unreadable 1"));
    }

    #[tokio::test]
    async fn what_is_listed_again_is_looked_at_as_it_is_then() {
        let machine = |name: &str, cpus: u32| {
            let vm =
                json!({ "metadata": { "name": name, "namespace": "ns" }, "spec": { "vm": { "maximumCpus": cpus } } });
            PackedVm::from(&serde_json::from_value::<VirtualMachine>(vm).unwrap())
        };
        let (send, events) = unbounded();
        let send = |event| send.unbounded_send(event).unwrap();
        let (listed, mut is_listed) = oneshot::channel();
        let (store, writer) = reflector::store();
        let mut looked_at = pin!(changed(events, writer, listed));
        for event in [Event::Init, Event::InitApply(machine("apple", 1)), Event::InitDone] {
            send(event);
        }
        assert!(
            looked_at.next().now_or_never().is_none(),
            "all are looked at when the queue hears that they are listed"
        );
        assert_eq!(is_listed.try_recv(), Ok(Some(())));
        for event in [Event::Init, Event::InitApply(machine("apple", 2)), Event::InitApply(machine("pear", 2))] {
            send(event);
        }
        assert!(looked_at.next().now_or_never().is_none(), "the store has them only when all are listed");
        send(Event::InitDone);
        for _ in 0..2 {
            let name = looked_at.next().now_or_never().unwrap().unwrap().unwrap().name_any();
            let kept = store.get(&ObjectRef::new(&name).within("ns")).unwrap().read().unwrap();
            assert_eq!(kept.spec.vm.maximum_cpus, Some(2), "{name}");
        }
        assert!(looked_at.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn at_the_start_each_vm_is_triggered_once_when_all_is_listed() {
        let (store, mut writer) = reflector::store();
        let (trigger, triggered) = unbounded();
        let (vms_listed, listed) = oneshot::channel();
        let (list_objects, objects_listed) = oneshot::channel();
        let objects_listed = objects_listed.map(|_| ());
        let mut queue = pin!(at_start(listed, objects_listed, store, triggered).map(|vm| vm.name));
        let vm = |name: &str| ObjectRef::new(name).within("ns");
        writer.apply_watcher_event(&Event::Init);
        for name in ["apple", "pear"] {
            let packed = arrived(name, json!({ "vm": { "maximumCpus": 1 } }));
            writer.apply_watcher_event(&Event::InitApply(packed));
        }
        writer.apply_watcher_event(&Event::InitDone);
        trigger.unbounded_send(vm("apple")).unwrap();
        assert!(queue.next().now_or_never().is_none(), "the VMs are not listed yet");
        vms_listed.send(()).unwrap();
        trigger.unbounded_send(vm("pear")).unwrap();
        assert!(queue.next().now_or_never().is_none(), "the objects are not listed yet");
        list_objects.send(()).unwrap();
        let mut all: Vec<_> = queue.by_ref().take(2).collect().await;
        all.sort();
        assert_eq!(all, ["apple", "pear"]);
        assert!(queue.next().now_or_never().is_none(), "what came earlier is dropped");

        trigger.unbounded_send(vm("pear")).unwrap();
        assert_eq!(queue.next().await.as_deref(), Some("pear"));
    }
}
