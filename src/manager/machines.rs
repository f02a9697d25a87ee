//! The watch of the machines: waits for their CustomResourceDefinition, and steps over a machine that can't be read.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Api, Client, Resource, ResourceExt,
    runtime::{
        WatchStreamExt,
        events::{Event as Note, EventType},
        reflector::store::Writer,
        utils::Backoff,
        watcher::{self, Event, watcher},
    },
};
use tracing::{info, warn};

use super::{
    metrics::Metrics,
    web::{Health, Progress},
};
use crate::{
    api::{VirtualMachine, full_name},
    cluster::{
        events::Teller,
        packed::{PackedMachine, Unreadable},
        watch::{Chain, PAGE},
    },
    power,
};

/// The machines of a namespace, or of all (`None`), as they come, change and go. They are kept in the store of `writer`; how
/// far they are is said as that part of the health.
pub fn watch(
    client: Client,
    namespace: Option<&str>,
    writer: Writer<PackedMachine>,
    metrics: Arc<Metrics>,
    health: (Arc<Health>, String),
    teller: Arc<Teller>,
) -> impl Stream<Item = watcher::Result<PackedMachine>> + Send + use<> {
    let tell = move |vm: &_, error: &_| tell(&teller, vm, error);
    let mut reader = Reader { metrics, health, tell, names: BTreeSet::new(), counted: 0, listed: 0, said: None };
    let api: Api<PackedMachine> =
        namespace.map_or_else(|| Api::all(client.clone()), |namespace| Api::namespaced(client.clone(), namespace));
    watcher(api, watcher::Config::default().page_size(PAGE))
        .backoff(Patience::default())
        .filter_map(move |event| std::future::ready(reader.take(event).map(Ok)))
        .reflect(writer)
        .touched_objects()
}

struct Reader<T> {
    metrics: Arc<Metrics>,
    health: (Arc<Health>, String),
    /// Tells whoever looks at the machine that it can't be read.
    tell: T,
    /// Machines that can't be read now.
    names: BTreeSet<String>,
    /// How many of them are in the metric.
    counted: i64,
    listed: usize,
    /// The last error of the watch, until it works again.
    said: Option<String>,
}

impl<T: FnMut(&PackedMachine, &Unreadable)> Reader<T> {
    /// What the store is to hear of an event.
    fn take(&mut self, event: watcher::Result<Event<PackedMachine>>) -> Option<Event<PackedMachine>> {
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
                if self.said.take().is_some() {
                    info!(machines = self.listed, "the machines are listed now");
                }
                self.ready(Progress::Ready(format!("{} listed", self.listed)));
                Some(Event::InitDone)
            }
            Event::Apply(vm) => {
                // What cannot be read cannot be brought anywhere: as if it were not there. Nothing of it is deleted.
                let event = self.read(&vm).map_or(Event::Delete(vm), Event::Apply);
                self.count();
                Some(event)
            }
            Event::Delete(vm) => {
                self.names.remove(&name_of(&vm));
                self.count();
                Some(Event::Delete(vm))
            }
        }
    }

    /// Of a machine what is kept, if it can be read.
    fn read(&mut self, vm: &PackedMachine) -> Option<PackedMachine> {
        let name = name_of(vm);
        match vm.read() {
            Ok(mut read) => {
                self.names.remove(&name);
                power::trim(&mut read);
                Some(PackedMachine::from(&read))
            }
            Err(error) => {
                warn!(vm = name, %error, "this machine can't be read and is left as it is");
                self.names.insert(name);
                (self.tell)(vm, &error);
                None
            }
        }
    }

    /// Other namespaces are watched by others and count in the same metric.
    fn count(&mut self) {
        let count = i64::try_from(self.names.len()).unwrap_or(i64::MAX);
        self.metrics.unreadable(count - std::mem::replace(&mut self.counted, count));
    }

    fn ready(&self, progress: Progress) {
        let (health, part) = &self.health;
        health.set(part, progress);
    }

    /// The watch goes on by itself; a trouble that lasts is said once.
    fn failed(&mut self, error: &watcher::Error) {
        self.metrics.watch_cut("VirtualMachine");
        let missing =
            matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(answer)) if answer.code == 404);
        let message = if missing {
            let resource = VirtualMachine::plural(&());
            format!("the API server does not know {resource}: apply the CustomResourceDefinitions in crds/")
        } else {
            Chain(error).to_string()
        };
        if self.said.as_ref() == Some(&message) {
            return;
        }
        warn!("waiting for the machines: {message}");
        // A manager that has listed them once goes on with what it knows.
        if self.listed == 0 {
            self.ready(Progress::Waiting(message.clone()));
        }
        self.said = Some(message);
    }
}

fn name_of(vm: &PackedMachine) -> String {
    full_name(vm.namespace().as_deref(), &vm.name_any())
}

/// An event where a person who wonders about the machine will look.
fn tell(teller: &Teller, vm: &PackedMachine, error: &Unreadable) {
    let note = format!("this version of the manager can't read the machine and leaves it as it is: {error}");
    let event = Note {
        type_: EventType::Warning,
        reason: "Unreadable".into(),
        note: Some(note.chars().take(1000).collect()),
        action: "Read".into(),
        secondary: None,
    };
    teller.tell(event, ObjectReference { resource_version: None, ..vm.object_ref(&()) });
}

/// The pauses between tries to watch: short enough that a CustomResourceDefinition that appears is soon seen.
struct Patience {
    next: Duration,
    last: Option<Instant>,
}

impl Patience {
    const FIRST: Duration = Duration::from_millis(500);
    const LONGEST: Duration = Duration::from_secs(8);
    /// A watch that has worked for so long begins with the first pause again. Before each list there is a sign of life
    /// that means nothing.
    const GOOD: Duration = Duration::from_secs(60);
}

impl Default for Patience {
    fn default() -> Self {
        Self { next: Self::FIRST, last: None }
    }
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        if self.last.is_some_and(|last| last.elapsed() > Self::GOOD) {
            self.next = Self::FIRST;
        }
        self.last = Some(Instant::now());
        let pause = self.next;
        self.next = (pause * 2).min(Self::LONGEST);
        Some(pause)
    }
}

impl Backoff for Patience {
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn arrived(name: &str, spec: Value) -> PackedMachine {
        serde_json::from_value(json!({ "metadata": { "name": name, "namespace": "ns" }, "spec": spec })).unwrap()
    }

    #[test]
    fn one_that_can_not_be_read_is_as_if_it_were_not_there() {
        let metrics = Arc::new(Metrics::new());
        let (health, _) = Health::new(metrics.clone());
        let (unreadable, told) = std::sync::mpsc::channel();
        let tell = |_: &_, error: &Unreadable| unreadable.send(error.to_string()).unwrap();
        let health = (health, "machines".to_owned());
        let mut reader = Reader { metrics, health, tell, names: BTreeSet::new(), counted: 0, listed: 0, said: None };
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

    #[test]
    fn the_pauses_grow() {
        let pauses: Vec<u128> = Patience::default().take(6).map(|pause| pause.as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 8000]);
    }
}
