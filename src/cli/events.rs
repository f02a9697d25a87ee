//! `kubectl vm events`: the events of a VM, of its Pod and of its claims, the oldest first.

use std::collections::BTreeSet;

use clap::Args;
use futures::TryStreamExt;
use k8s_openapi::{api::core::v1::Event, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, ListParams},
    runtime::watcher::{self, watcher},
};
use serde_json::json;

use super::{
    format::{self, DataFormat},
    in_pod::Target,
    output::{Exit, Failure, Output, note, plain},
    vms::{CHUNK, refused_about},
};
use crate::{
    api::VirtualMachine,
    claims,
    explain::{page::age, time},
};

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    target: Target,
    /// Go on with each new event.
    #[arg(long, short)]
    watch: bool,
    /// Print the events as data.
    #[arg(long, short, value_name = "FORMAT", conflicts_with = "watch")]
    output: Option<DataFormat>,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let (vm, found) = options.target.read().await?;
    let of_vm = OfVm::new(&found);
    let client = vm.client();
    let api: Api<Event> = Api::namespaced(client.clone(), vm.namespace());
    if options.watch {
        return watch(&of_vm, &api, client, vm.namespace(), output).await;
    }
    let events = match list(&api).await {
        Ok(events) => of_vm.sorted(events),
        Err(error) => return Err(Failure::unknown(refusal(client, vm.namespace(), &["list"], &error).await)),
    };
    match &options.output {
        Some(format) => {
            let items: Vec<_> = events.iter().map(|event| json!(event)).collect();
            format.print(&format::list(&items), output)?;
        }
        None if events.is_empty() => note(&format!("{vm}: no events; the cluster keeps them for an hour or so")),
        None => write!(output, "{}", plain(&page(&events, Timestamp::now())))?,
    }
    Ok(Exit::Success)
}

/// All events of the namespace.
pub(super) async fn list(api: &Api<Event>) -> kube::Result<Vec<Event>> {
    let mut parameters = ListParams::default().limit(CHUNK);
    let mut events = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        parameters.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        events.extend(page.items);
        if parameters.continue_token.is_none() {
            return Ok(events);
        }
    }
}

async fn refusal(client: &Client, namespace: &str, verbs: &[&str], error: &kube::Error) -> String {
    refused_about(client, &ApiResource::erase::<Event>(&()), "events", verbs, Some(namespace), error).await
}

/// Prints events as they come. After a watch was interrupted, those that were printed are left out.
async fn watch(
    of_vm: &OfVm,
    api: &Api<Event>,
    client: &Client,
    namespace: &str,
    output: &mut Output<'_>,
) -> Result<Exit, Failure> {
    let mut changes = std::pin::pin!(watcher(api.clone(), watcher::Config::default().page_size(CHUNK)));
    let (mut printed, mut found, mut is_first) = (BTreeSet::new(), Vec::new(), true);
    loop {
        match changes.try_next().await {
            Ok(Some(watcher::Event::Init | watcher::Event::Delete(_))) => {}
            Ok(Some(watcher::Event::InitApply(event) | watcher::Event::Apply(event))) if !is_first => {
                print(of_vm.sorted(vec![event]), &mut printed, output)?;
            }
            Ok(Some(watcher::Event::InitApply(event) | watcher::Event::Apply(event))) => found.push(event),
            Ok(Some(watcher::Event::InitDone)) => {
                if std::mem::take(&mut is_first) {
                    write!(output, "{}", head())?;
                }
                print(of_vm.sorted(std::mem::take(&mut found)), &mut printed, output)?;
            }
            Ok(None) => return Ok(Exit::Success),
            Err(watcher::Error::InitialListFailed(error) | watcher::Error::WatchStartFailed(error)) if matches!(&error, kube::Error::Api(answer) if answer.is_forbidden()) =>
            {
                return Err(Failure::unknown(refusal(client, namespace, &["list", "watch"], &error).await));
            }
            // The watcher begins again after a pause.
            Err(error) => {
                note(&format!("events: {error}; trying again"));
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            }
        }
    }
}

fn print(
    events: Vec<Event>,
    printed: &mut BTreeSet<(Option<String>, Option<String>)>,
    output: &mut Output<'_>,
) -> Result<(), Failure> {
    for event in events {
        if printed.insert((event.uid(), event.resource_version())) {
            write!(output, "{}", plain(&line(&event, Timestamp::now())))?;
        }
    }
    output.flush()
}

/// What belongs to a VM, by kind and name.
pub(super) struct OfVm {
    name: String,
    uid: Option<String>,
    pod_uid: Option<String>,
    claims: BTreeSet<String>,
    created: Option<Timestamp>,
}

impl OfVm {
    pub fn new(vm: &VirtualMachine) -> Self {
        let status = vm.status.as_ref();
        let known = status.iter().flat_map(|status| &status.claims).map(|claim| claim.name.clone());
        Self {
            name: vm.name_any(),
            uid: vm.uid(),
            pod_uid: status.and_then(|status| status.pod_uid.clone()),
            claims: known.chain(claims::possible_names(vm)).collect(),
            created: vm.creation_timestamp().map(|time| time.0),
        }
    }

    /// The events about the VM and its objects, also those of its former Pods, the oldest first. Those about a former VM of its name are
    /// left out.
    pub fn sorted(&self, mut events: Vec<Event>) -> Vec<Event> {
        events.retain(|event| self.has(event));
        events.sort_by_key(time);
        events
    }

    fn has(&self, event: &Event) -> bool {
        let about = &event.involved_object;
        let name = about.name.as_deref().unwrap_or_default();
        let is_of_vm = match about.kind.as_deref() {
            Some("VirtualMachine") => about.uid == self.uid,
            Some("Pod") => {
                let is_its_pod = self.pod_uid.is_some() && about.uid == self.pod_uid;
                is_its_pod || name == self.name || name.strip_suffix("-0") == Some(&self.name)
            }
            Some("PersistentVolumeClaim") => self.claims.contains(name),
            Some("ConfigMap" | "Service" | "StatefulSet") => name == self.name,
            _ => false,
        };
        is_of_vm && (self.created.is_none() || time(event).is_none_or(|time| Some(time) >= self.created))
    }
}

fn head() -> String {
    columns("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")
}

/// The events as a table.
pub(super) fn page(events: &[Event], now: Timestamp) -> String {
    std::iter::once(head()).chain(events.iter().map(|event| line(event, now))).collect()
}

fn columns(age: &str, type_: &str, reason: &str, object: &str, message: &str) -> String {
    format!("{age:<10} {type_:<8} {reason:<24} {object:<44} {message}\n")
}

fn line(event: &Event, now: Timestamp) -> String {
    let about = &event.involved_object;
    let object = format!("{}/{}", about.kind.as_deref().unwrap_or("?"), about.name.as_deref().unwrap_or("?"));
    let count = event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1);
    let times = if count > 1 { format!(" (x{count})") } else { String::new() };
    let message = event.message.as_deref().unwrap_or_default().trim().replace('\n', " ");
    columns(
        &time(event).map_or_else(|| "?".to_owned(), |time| age(now, time)),
        event.type_.as_deref().unwrap_or_default(),
        event.reason.as_deref().unwrap_or_default(),
        &object,
        &format!("{message}{times}"),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::test_support::{noon, vm};

    fn event(kind: &str, name: &str, uid: &str, time: &str, edit: impl FnOnce(&mut Value)) -> Event {
        let mut event = json!({
            "metadata": { "name": "e" }, "involvedObject": { "kind": kind, "name": name, "uid": uid }, "type": "Normal", "reason": "R",
            "message": "m", "lastTimestamp": time,
        });
        edit(&mut event);
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn the_events_of_a_vm_are_those_of_its_objects() {
        let vm = vm(|vm| {
            vm["metadata"]["creationTimestamp"] = json!("2027-01-15T07:00:00Z");
            vm["status"] = json!({ "podUid": "pod-7", "claims": [{ "name": "apple-old-disk" }] });
        });
        let of_vm = OfVm::new(&vm);
        let at = "2027-01-15T07:30:00Z";
        for (kind, name, uid, time, is_of_vm) in [
            ("VirtualMachine", "apple", "apple-uid", at, true),
            ("VirtualMachine", "apple", "former-uid", at, false),
            ("Pod", "apple", "former-pod", at, true),
            ("Pod", "apple-0", "x", at, true),
            ("Pod", "strange", "pod-7", at, true),
            ("Pod", "apple-2", "x", at, false),
            ("PersistentVolumeClaim", "apple-core-disk", "x", at, true),
            ("PersistentVolumeClaim", "apple-old-disk", "x", at, true),
            ("PersistentVolumeClaim", "pear-core-disk", "x", at, false),
            ("Deployment", "apple", "x", at, false),
            ("Pod", "apple", "x", "2027-01-15T06:59:59Z", false),
        ] {
            assert_eq!(of_vm.has(&event(kind, name, uid, time, |_| ())), is_of_vm, "{kind} {name} {uid} {time}");
        }
        assert!(
            !OfVm { pod_uid: None, ..of_vm }
                .has(&event("Pod", "x", "", at, |it| it["involvedObject"]["uid"] = json!(null)))
        );
    }

    #[test]
    fn the_oldest_is_first_and_repetitions_are_counted() {
        let of_vm = OfVm::new(&vm(|_| ()));
        let late = event("Pod", "apple", "x", "2027-01-15T07:59:00Z", |it| it["count"] = json!(4));
        let early = event("VirtualMachine", "apple", "apple-uid", "2027-01-15T04:00:00Z", |it| {
            it["message"] = json!("two\nlines\n");
            it["type"] = json!("Warning");
        });
        let timeless = event("Pod", "apple", "x", "2027-01-15T07:59:00Z", |it| it["lastTimestamp"] = json!(null));
        insta::assert_snapshot!(page(&of_vm.sorted(vec![late, early, timeless]), noon()), @r"
        LAST SEEN  TYPE     REASON                   OBJECT                                       MESSAGE
        ?          Normal   R                        Pod/apple                                    m
        4h         Warning  R                        VirtualMachine/apple                         two lines
        60s        Normal   R                        Pod/apple                                    m (x4)
        ");
    }
}
