use std::collections::BTreeSet;

use serde_json::json;

use super::*;
use crate::object::persistent_volume_claims;

/// No request is ever sent to it.
fn children() -> (Arc<Children>, mpsc::UnboundedReceiver<ObjectRef<PackedVm>>) {
    let nobody = tower::service_fn(async |_: axum::http::Request<kube::client::Body>| {
        Err::<axum::http::Response<kube::client::Body>, _>("nobody is asked")
    });
    Children::new(Client::new(nobody, "ns"), None, Arc::new(Metrics::new()))
}

fn service(name: &str, version: u32) -> Arrived {
    of(Some("vm"), name, version)
}

fn of(vm: Option<&str>, name: &str, version: u32) -> Arrived {
    let labels =
        vm.map_or(json!({}), |vm| json!({ "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": vm }));
    let metadata = json!({
        "name": name, "namespace": "ns", "uid": format!("uid of {name}"), "resourceVersion": version.to_string(), "labels": labels,
    });
    let object: Meta = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
    object.pack(&kind(), &Shapes::default())
}

fn kind() -> TypeMeta {
    TypeMeta { api_version: "v1".into(), kind: "Service".into() }
}

fn known(children: &Children) -> Vec<String> {
    let mut names: Vec<_> = all(&lock(&children.index)).map(|known| known.key.name.clone()).collect();
    names.sort();
    names
}

/// All objects.
fn all(index: &Index) -> impl Iterator<Item = &Packed> {
    let objects: Vec<&Packed> = index.elsewhere(&("ns".into(), "no VM".into())).map(|(_, object)| object).collect();
    objects.into_iter()
}

#[tokio::test]
async fn an_object_whose_label_names_another_vm_leaves_the_former_one() {
    let (children, mut triggered) = children();
    let mut triggered_vms =
        || -> Vec<_> { std::iter::from_fn(|| triggered.try_recv().ok()).map(|vm| vm.name).collect() };
    let name = |vm: &str| ("ns".into(), vm.into());
    let has = |vm| !lock(&children.index).of(&name(vm)).is_empty();
    children.apply_event(&kind(), Event::Apply(service("apple", 1)));
    assert_eq!((triggered_vms(), has("vm")), (vec!["vm".to_owned()], true));
    children.apply_event(&kind(), Event::Apply(of(None, "apple", 2)));
    assert_eq!((triggered_vms(), has("vm")), (vec!["vm".to_owned()], false));
    children.apply_event(&kind(), Event::Apply(service("apple", 3)));
    triggered_vms();
    children.apply_event(&kind(), Event::Apply(of(Some("other"), "apple", 4)));
    assert_eq!((triggered_vms(), has("vm"), has("other")), (vec!["vm".to_owned(), "other".to_owned()], false, true));
    children.apply_event(&kind(), Event::Delete(of(None, "apple", 5)));
    assert_eq!((triggered_vms(), has("other")), (vec!["other".to_owned()], false));
    // The same in a list.
    children.apply_event(&kind(), Event::Apply(service("pear", 6)));
    children.apply_event(&kind(), Event::Init);
    children.apply_event(&kind(), Event::InitApply(of(None, "pear", 7)));
    children.apply_event(&kind(), Event::InitDone);
    assert!(!has("vm"));
    assert!(!children.has_object("uid of apple") && !children.has_object("uid of pear"));
}

#[tokio::test(start_paused = true)]
async fn a_list_that_can_not_be_read_removes_nothing() {
    let list =
        json!({ "metadata": { "resourceVersion": "5" }, "items": [{ "metadata": { "name": null } }] }).to_string();
    let server = tower::service_fn(move |_: axum::http::Request<kube::client::Body>| {
        std::future::ready(Ok::<_, std::convert::Infallible>(axum::http::Response::new(axum::body::Body::from(
            list.clone(),
        ))))
    });
    let (children, _triggered) = Children::new(Client::new(server, "ns"), None, Arc::new(Metrics::new()));
    children.insert(service("apple", 1));
    let error = children.watch([kind()]).await.unwrap_err();
    assert!(error.message.contains("invalid type: null"), "{error}");
    assert_eq!(known(&children), ["apple"]);
    assert!(!children.knows(&kind()));
}

/// Objects that exist, by name, and whose UID is that of [`service`]; of others the API server says so. The first request fails.
fn children_of(existing: &'static [&'static str]) -> Arc<Children> {
    let fails = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let server = tower::service_fn(move |request: axum::http::Request<kube::client::Body>| {
        let name = request.uri().path().rsplit('/').next().unwrap().to_owned();
        let answer = if fails.swap(false, std::sync::atomic::Ordering::Relaxed) {
            Err("no connection")
        } else if existing.contains(&&*name) {
            let object = json!({ "metadata": { "name": name, "namespace": "ns", "uid": format!("uid of {name}") } });
            Ok((200, object))
        } else {
            Ok((
                404,
                json!({ "kind": "Status", "status": "Failure", "message": "not found", "reason": "NotFound", "code": 404 }),
            ))
        };
        std::future::ready(answer.map(|(code, body)| {
            axum::http::Response::builder().status(code).body(axum::body::Body::from(body.to_string())).unwrap()
        }))
    });
    Children::new(Client::new(server, "ns"), None, Arc::new(Metrics::new())).0
}

#[tokio::test(start_paused = true)]
async fn the_api_server_is_asked_for_what_was_made_while_its_kind_was_listed() {
    let children = children_of(&["made"]);
    children.insert(service("gone", 1));
    children.apply_event(&kind(), Event::Init);
    children.apply_event(&kind(), Event::InitApply(service("there", 2)));
    children.insert(service("made", 3));
    children.insert(service("made-and-deleted", 4));
    children.apply_event(&kind(), Event::InitDone);
    assert_eq!(
        known(&children),
        ["made", "made-and-deleted", "there"],
        "at once only those are removed that the list must have"
    );
    sleep(ASK_AGAIN * 2).await;
    assert_eq!(known(&children), ["made", "there"]);

    // What was answered before the next list began is in it, or gone.
    children.insert(service("earlier", 5));
    children.apply_event(&kind(), Event::Init);
    children.apply_event(&kind(), Event::InitApply(service("made", 3)));
    children.apply_event(&kind(), Event::InitDone);
    assert_eq!(known(&children), ["made"]);

    // One that is known again can be answered about.
    children.apply_event(&kind(), Event::Delete(service("made", 6)));
    children.insert(service("made", 5));
    assert!(known(&children).is_empty(), "an answer that is slower than the watch brings nothing back");
    children.apply_event(&kind(), Event::Apply(service("made", 7)));
    children.insert(service("made", 8));
    assert_eq!(all(&lock(&children.index)).map(|known| known.version).collect::<Vec<_>>(), [8]);
}

/// An API server that lists a Service, refuses its watch, and then its list as often as `refusals` says.
fn children_that_are_refused(refusals: usize) -> (Arc<Children>, Arc<Metrics>) {
    let requests = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let server = tower::service_fn(move |request: axum::http::Request<kube::client::Body>| {
        let number = requests.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let metadata = json!({
            "name": "apple", "namespace": "ns", "uid": "uid of apple", "resourceVersion": "1",
            "labels": { "app.kubernetes.io/instance": "vm", "app.kubernetes.io/name": "vm-runner" },
        });
        let list = json!({ "metadata": { "resourceVersion": "5" }, "items": [{ "metadata": metadata }] });
        let refusal = json!({ "kind": "Status", "status": "Failure", "message": "forbidden", "reason": "Forbidden", "code": 403 });
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        async move {
            let (code, body) = match number {
                0 => (200, list),
                number if number <= refusals => (403, refusal),
                // Nothing changes any more.
                _ if is_watch => std::future::pending().await,
                _ => (200, list),
            };
            let body = axum::body::Body::from(body.to_string());
            Ok::<_, std::convert::Infallible>(axum::http::Response::builder().status(code).body(body).unwrap())
        }
    });
    let metrics = Arc::new(Metrics::new());
    (Children::new(Client::new(server, "ns"), None, metrics.clone()).0, metrics)
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_refused_after_it_was_complete_is_reported_until_it_works_again() {
    let (children, metrics) = children_that_are_refused(3);
    let mut changes = children.recovered.subscribe();
    let mut change = async || tokio::time::timeout(ASK_AGAIN * 10, changes.changed()).await.expect("a change").unwrap();
    // It is refused before this returns, or after.
    let _ = children.watch([kind()]).await;
    change().await;
    let error = children.watch([kind()]).await.unwrap_err();
    assert!(error.message.contains("forbidden"), "{error}");
    assert_eq!(metrics.refused_watches().len(), 1);
    assert!(metrics.text().contains("vm_operator_watches_refused{kind=\"Service\"} 1"));
    assert!(children.knows(&kind()) && known(&children) == ["apple"], "what is known stays");
    change().await;
    children.watch([kind()]).await.unwrap();
    assert_eq!(metrics.refused_watches(), []);
    assert!(!metrics.text().contains("vm_operator_watches_refused{kind"));
}

/// A Pod of others begins to use a claim, and ends: the VM that has the claim is reconciled, once for all its claims, and sees the Pod once.
#[tokio::test]
async fn a_vm_is_reconciled_when_a_pod_of_others_comes_that_can_write_to_its_claims() {
    let (children, mut triggered) = children();
    let mut triggered_vms =
        || -> Vec<_> { std::iter::from_fn(|| triggered.try_recv().ok()).map(|vm| vm.name).collect() };
    let whole = |kind: TypeMeta, value: serde_json::Value| {
        let object: Whole = serde_json::from_value(value).unwrap();
        object.pack(&kind, &Shapes::default())
    };
    let labels = json!({ "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "apple" });
    let claims = persistent_volume_claims();
    children.apply_event(&claims, Event::Init);
    for name in ["one", "two"] {
        let metadata =
            json!({ "name": name, "namespace": "ns", "uid": name, "resourceVersion": "1", "labels": labels.clone() });
        children.apply_event(&claims, Event::InitApply(whole(claims.clone(), json!({ "metadata": metadata }))));
    }
    let volume = |claim: &str| json!({ "name": claim, "persistentVolumeClaim": { "claimName": claim } });
    let debug = |version: u32| {
        let metadata =
            json!({ "name": "debug", "namespace": "ns", "uid": "debug", "resourceVersion": version.to_string() });
        let volumes = json!([volume("one"), volume("two"), volume("of another")]);
        whole(crate::object::pods(), json!({ "metadata": metadata, "spec": { "volumes": volumes } }))
    };
    triggered_vms();
    // While claims are being listed, all VMs are reconciled afterwards.
    children.apply_event(&crate::object::pods(), Event::Apply(debug(2)));
    assert_eq!(triggered_vms(), [""; 0]);
    children.apply_event(&crate::object::pods(), Event::Delete(debug(3)));
    children.apply_event(&claims, Event::InitDone);
    children.apply_event(&crate::object::pods(), Event::Apply(debug(4)));
    assert_eq!(triggered_vms(), ["apple"]);
    let vm: VirtualMachine = serde_json::from_value(json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": "apple", "namespace": "ns" }, "spec": { "vm": { "maximumCpus": 1 } },
    }))
    .unwrap();
    let mounting = children.mounting(&vm, ["one".to_owned(), "two".to_owned()].into_iter());
    assert_eq!(mounting.iter().map(|pod| pod.key.name.as_str()).collect::<Vec<_>>(), ["debug"]);
    children.apply_event(&crate::object::pods(), Event::Delete(debug(5)));
    assert_eq!(triggered_vms(), ["apple"]);
}

/// Whatever owner and labels a report has: it is its Pod's, and the VM that has the Pod is reconciled.
#[tokio::test]
async fn a_report_is_found_by_the_uid_of_its_pod() {
    let owned_by = |kind: &str, name: &str| json!({ "apiVersion": if kind == "VirtualMachine" { "vmoperator.jdrupes.org/v1" } else { "v1" }, "kind": kind, "name": name, "uid": format!("uid of {name}") });
    let labels = |vm: &str| json!({ "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": vm });
    let vm = |name: &str, pod: Option<&str>| -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
            "metadata": { "name": name, "namespace": "ns", "uid": format!("uid of {name}") },
            "spec": { "vm": { "maximumCpus": 1 } }, "status": { "podUid": pod },
        }))
        .unwrap()
    };
    for (what, owners, labels, expected) in [
        ("as it was made", json!([owned_by("VirtualMachine", "pear")]), labels("pear"), &["pear"][..]),
        ("given to another VM", json!([owned_by("VirtualMachine", "apple")]), labels("pear"), &["apple", "pear"]),
        ("given to something else", json!([owned_by("ConfigMap", "x")]), labels("pear"), &["pear"]),
        ("given to something else, labelled", json!([owned_by("ConfigMap", "x")]), labels("apple"), &["apple", "pear"]),
        ("without owner and labels", json!([]), json!({}), &["pear"]),
    ] {
        let (children, mut triggered) = children();
        let mut triggered_vms = || -> Vec<_> {
            std::iter::from_fn(|| triggered.try_recv().ok()).map(|vm: ObjectRef<PackedVm>| vm.name).collect()
        };
        let arrive = |kind: TypeMeta,
                      name: &str,
                      uid: &str,
                      owners: &serde_json::Value,
                      labels: &serde_json::Value,
                      version: u32| {
            let metadata = json!({
                "name": name, "namespace": "ns", "uid": uid, "resourceVersion": version.to_string(), "labels": labels, "ownerReferences": owners,
            });
            let object: Whole = serde_json::from_value(json!({ "metadata": metadata, "spec": {} })).unwrap();
            object.pack(&kind, &Shapes::default())
        };
        let of_pear = json!([owned_by("VirtualMachine", "pear")]);
        let pod = || arrive(crate::object::pods(), "pear", "pod", &of_pear, &json!({}), 1);
        let report = |version| arrive(reports(), "pod", "report", &owners, &labels, version);
        let seen = |vm: &VirtualMachine| -> Vec<String> {
            let observed = children.observe(vm, Timestamp::now());
            observed.reports.iter().map(|report| report.uid.clone()).collect()
        };
        children.apply_event(&crate::object::pods(), Event::Apply(pod()));
        let first = arrive(reports(), "pod", "report", &of_pear, &json!({}), 2);
        children.apply_event(&reports(), Event::Apply(first));
        triggered_vms();
        children.apply_event(&reports(), Event::Apply(report(3)));
        let triggered: BTreeSet<String> = triggered_vms().into_iter().collect();
        assert_eq!(triggered.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{what}");
        assert_eq!(seen(&vm("pear", None)), ["report"], "{what}");
        assert_eq!(seen(&vm("apple", None)), [""; 0], "{what}: it is about another VM's Pod");
        // Without its Pod the status says whose it is.
        let gone = arrive(crate::object::pods(), "pear", "pod", &of_pear, &json!({}), 4);
        children.apply_event(&crate::object::pods(), Event::Delete(gone));
        assert_eq!(seen(&vm("pear", Some("pod"))), ["report"], "{what}");
        children.apply_event(&reports(), Event::Delete(report(5)));
        assert_eq!(seen(&vm("pear", Some("pod"))), [""; 0], "{what}");
        assert!(lock(&children.index).report("ns", "pod").is_none(), "{what}");
    }
}
