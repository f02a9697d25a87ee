//! The watch of the VMs. It waits for their CustomResourceDefinition, and skips a VM that cannot be read.
//!
//! ```text
//!  list, watch ─▶ read, trim, pack ─▶ store ─▶ all listed: each VM once ──┐
//!                                       └────▶ later: each that changes ──┴─▶ queue
//! ```

use std::{collections::BTreeSet, future::ready, sync::Arc, time::Duration};

use futures::{Stream, StreamExt, channel::oneshot, stream};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client, Resource,
    runtime::{
        WatchStreamExt,
        reflector::{ObjectRef, Store, store::Writer},
        watcher::{self, Event},
    },
};
use tokio::{sync::watch, time::timeout};
use tracing::{info, warn};

use super::web::{HealthPart, Readiness};
use crate::{
    api::{Reason, VirtualMachine, reasons},
    client::events::EventRecorder,
    cluster::{
        list_watch::{self, list_watch},
        packed::{PackedVm, Shapes},
    },
    metrics::Metrics,
    process::{ErrorChain, RepeatFilter},
};

/// For how long at most the first reconciles wait until the kinds of objects that VMs usually have are listed.
const OBJECTS_LISTED: Duration = Duration::from_secs(10);

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
        changed(events.filter_map(move |event| ready(reader.read_event(event))), writer, listed)
    }
}

/// The VMs that change or go after they have been `listed`, each when the store shows it.
fn changed(
    events: impl Stream<Item = Event<PackedVm>> + Send,
    writer: Writer<PackedVm>,
    listed: oneshot::Sender<()>,
) -> impl Stream<Item = watcher::Result<PackedVm>> + Send {
    let (mut listed, store) = (Some(listed), writer.as_reader());
    events.map(Ok).reflect(writer).flat_map(move |event| {
        stream::iter(match event {
            // The store shows a list only when it is complete.
            Ok(Event::Init | Event::InitApply(_)) => vec![],
            Ok(Event::InitDone) => match listed.take() {
                Some(listed) => {
                    // When the manager ends nobody waits for this.
                    let _ = listed.send(());
                    vec![]
                }
                // A later list: any VM may have changed meanwhile.
                None => in_order(&store).into_iter().map(|vm| Ok(Arc::unwrap_or_clone(vm))).collect(),
            },
            Ok(Event::Apply(vm) | Event::Delete(vm)) => vec![Ok(vm)],
            Err(error) => vec![Err(error)],
        })
    })
}

/// All VMs, by namespace and name: the order is the same each time.
pub fn in_order(store: &Store<PackedVm>) -> Vec<Arc<PackedVm>> {
    let mut vms = store.state();
    vms.sort_by(|one, other| {
        let (one, other) = (one.meta(), other.meta());
        (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name))
    });
    vms
}

/// The VMs to reconcile for another reason than a change of the VM itself.
///
/// When all VMs are `listed` and their objects are (`objects_listed`, for 10 s at most), each VM is reconciled once. From then on
/// the `triggered` ones are, and `started` is true. A trigger that comes earlier is dropped: the first list of a kind would trigger a VM once for each of
/// its objects, and the reconcile of all VMs that follows sees them anyway.
pub fn at_start(
    listed: oneshot::Receiver<()>,
    objects_listed: impl Future<Output = ()> + Send + 'static,
    store: Store<PackedVm>,
    triggered: impl Stream<Item = ObjectRef<PackedVm>> + Send,
    started: watch::Sender<bool>,
) -> impl Stream<Item = ObjectRef<PackedVm>> + Send {
    let passes = started.subscribe();
    let all = stream::once(async move {
        // If the watch has ended, so does the manager.
        let _ = listed.await;
        let _ = timeout(OBJECTS_LISTED, objects_listed).await;
        started.send_replace(true);
        stream::iter(in_order(&store)).map(|vm| ObjectRef::from_obj(&*vm))
    });
    stream::select(all.flatten(), triggered.filter(move |_| ready(*passes.borrow())))
}

struct Reader<T> {
    metrics: Arc<Metrics>,
    health: HealthPart,
    /// Called with each VM that cannot be read.
    report: T,
    /// Full names of the VMs that cannot be read now.
    unreadable: BTreeSet<String>,
    /// How many of them the metric counts.
    counted: i64,
    listed: usize,
    /// Whether all VMs have been listed once.
    is_listed: bool,
    repeats: RepeatFilter,
    /// The field sets that VMs have in common.
    shapes: Shapes,
}

impl<T: FnMut(&PackedVm, &serde_json::Error)> Reader<T> {
    fn new(metrics: Arc<Metrics>, health: HealthPart, report: T) -> Self {
        Self {
            metrics,
            health,
            report,
            unreadable: BTreeSet::new(),
            counted: 0,
            listed: 0,
            is_listed: false,
            repeats: RepeatFilter::default(),
            shapes: Shapes::default(),
        }
    }

    /// The event for the store.
    fn read_event(&mut self, event: watcher::Result<Event<PackedVm>>) -> Option<Event<PackedVm>> {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                self.failed(&error);
                return None;
            }
        };
        match event {
            Event::Init => {
                self.unreadable.clear();
                self.listed = 0;
                Some(Event::Init)
            }
            Event::InitApply(vm) => {
                self.listed += 1;
                self.read(&vm).map(Event::InitApply)
            }
            Event::InitDone => {
                self.count();
                self.is_listed = true;
                if self.repeats.clear() {
                    info!(vms = self.listed, "the VMs are listed now");
                }
                self.health.set(Readiness::Ready(format!("{} listed", self.listed)));
                Some(Event::InitDone)
            }
            Event::Apply(vm) => {
                self.works();
                // A VM that cannot be read is not reconciled, as if it did not exist. None of its objects is deleted.
                let event = self.read(&vm).map_or(Event::Delete(vm), Event::Apply);
                self.count();
                Some(event)
            }
            Event::Delete(vm) => {
                self.works();
                self.unreadable.remove(&vm.full_name());
                self.count();
                Some(Event::Delete(vm))
            }
        }
    }

    /// The part of a VM that is kept, if it can be read. Reports it otherwise.
    fn read(&mut self, vm: &PackedVm) -> Option<PackedVm> {
        let name = vm.full_name();
        match vm.trim(&self.shapes) {
            Ok(read) => {
                self.unreadable.remove(&name);
                Some(read)
            }
            Err(error) => {
                warn!(vm = name, %error, "this VM can't be read and is left as it is");
                self.unreadable.insert(name);
                (self.report)(vm, &error);
                None
            }
        }
    }

    /// An event came, so the watch works.
    fn works(&mut self) {
        if self.repeats.clear() {
            info!("the watch of the VMs works again");
        }
    }

    /// Updates the metric, which the watches of other namespaces change too.
    fn count(&mut self) {
        let count = i64::try_from(self.unreadable.len()).unwrap_or(i64::MAX);
        self.metrics.unreadable(count - std::mem::replace(&mut self.counted, count));
    }

    /// The watch goes on by itself. A problem that lasts is logged once.
    fn failed(&mut self, error: &watcher::Error) {
        self.metrics.watch_restarted("VirtualMachine");
        let message = if list_watch::code(error) == Some(404) {
            let resource = VirtualMachine::plural(&());
            format!("the API server does not know {resource}: apply the CustomResourceDefinitions in crds/")
        } else {
            ErrorChain(error).to_string()
        };
        if !self.repeats.is_new(&message) {
            return;
        }
        warn!("waiting for the VMs: {message}");
        // A manager that has listed the VMs once goes on with what it knows. If the watch is refused, that does not end by itself.
        if !self.is_listed || list_watch::is_refused(error) {
            self.health.set(Readiness::Waiting(message));
        }
    }
}

/// Records an event of the VM.
fn record_unreadable(recorder: &EventRecorder, vm: &PackedVm, error: &serde_json::Error) {
    let note = format!("this version of the manager can't read the VM and leaves it as it is: {error}");
    let event = reasons::Event { reason: Reason::Unreadable, note, action: "Read" };
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
    fn a_vm_that_can_not_be_read_is_skipped() {
        let metrics = Arc::new(Metrics::new());
        let (health, _) = Health::new(metrics.clone());
        let (sender, reported) = std::sync::mpsc::channel();
        let report = |_: &_, error: &serde_json::Error| sender.send(error.to_string()).unwrap();
        let health = HealthPart { health, name: "vms".to_owned() };
        let mut reader = Reader::new(metrics, health, report);
        // The API server stores no VM without a name.
        let nameless: PackedVm = serde_json::from_value(json!({ "metadata": { "name": 7 }, "spec": {} })).unwrap();
        let bad_value = arrived("apple", json!({ "vm": { "maximumCpus": "many" } }));
        assert!(matches!(reader.read_event(Ok(Event::Init)), Some(Event::Init)));
        assert!(reader.read_event(Ok(Event::InitApply(nameless))).is_none());
        assert!(reported.try_recv().unwrap().contains("metadata.name"));
        let listed = reader.read_event(Ok(Event::InitApply(bad_value.clone())));
        assert!(matches!(listed, Some(Event::InitApply(vm)) if vm.read().unwrap().spec.invalid.is_some()));
        assert!(matches!(reader.read_event(Ok(Event::InitDone)), Some(Event::InitDone)));
        assert!(reader.metrics.text().contains("vm_operator_machines_unreadable 1"));
        let changed = reader.read_event(Ok(Event::Apply(bad_value)));
        assert!(matches!(changed, Some(Event::Apply(vm)) if vm.name_any() == "apple"));
        assert!(reported.try_recv().is_err());
    }

    #[tokio::test]
    async fn vms_that_are_listed_again_are_reconciled_as_they_are_then() {
        let vm = |name: &str, cpus: u32| {
            let vm =
                json!({ "metadata": { "name": name, "namespace": "ns" }, "spec": { "vm": { "maximumCpus": cpus } } });
            PackedVm::from(serde_json::from_value::<VirtualMachine>(vm).unwrap())
        };
        let (send, events) = unbounded();
        let send = |event| send.unbounded_send(event).unwrap();
        let (listed, mut is_listed) = oneshot::channel();
        let (store, writer) = reflector::store();
        let mut reconciled = pin!(changed(events, writer, listed));
        for event in [Event::Init, Event::InitApply(vm("apple", 1)), Event::InitDone] {
            send(event);
        }
        assert!(
            reconciled.next().now_or_never().is_none(),
            "the queue is told that all are listed, and reconciles all"
        );
        assert_eq!(is_listed.try_recv(), Ok(Some(())));
        for event in [Event::Init, Event::InitApply(vm("apple", 2)), Event::InitApply(vm("pear", 2))] {
            send(event);
        }
        assert!(reconciled.next().now_or_never().is_none(), "the store has them only when all are listed");
        send(Event::InitDone);
        for _ in 0..2 {
            let name = reconciled.next().now_or_never().unwrap().unwrap().unwrap().name_any();
            let kept = store.get(&ObjectRef::new(&name).within("ns")).unwrap().read().unwrap();
            assert_eq!(kept.spec.vm.maximum_cpus, Some(2), "{name}");
        }
        assert!(reconciled.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn at_the_start_each_vm_is_triggered_once_when_all_is_listed() {
        let (store, mut writer) = reflector::store();
        let (trigger, triggered) = unbounded();
        let (vms_listed, listed) = oneshot::channel();
        let (list_objects, objects_listed) = oneshot::channel();
        let objects_listed = objects_listed.map(|_| ());
        let mut queue =
            pin!(at_start(listed, objects_listed, store, triggered, watch::Sender::new(false)).map(|vm| vm.name));
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
