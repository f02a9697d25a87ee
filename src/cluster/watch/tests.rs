use serde_json::json;

use super::*;

/// No request is ever sent to it.
fn children() -> (Arc<Children>, mpsc::UnboundedReceiver<ObjectRef<PackedMachine>>) {
    let nobody = tower::service_fn(async |_: axum::http::Request<kube::client::Body>| {
        Err::<axum::http::Response<kube::client::Body>, _>("nobody is asked")
    });
    Children::new(Client::new(nobody, "ns"), None, Arc::new(Metrics::new()))
}

fn service(name: &str, version: u32) -> Arrived {
    of(Some("vm"), name, version)
}

fn of(vm: Option<&str>, name: &str, version: u32) -> Arrived {
    let labels = vm.map_or(json!({}), |vm| json!({ "app.kubernetes.io/instance": vm }));
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
    let objects = lock(&children.objects);
    let mut names: Vec<_> = objects.values().flatten().map(|known| known.key.name.clone()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn an_object_that_is_labelled_otherwise_is_not_the_former_machines_any_more() {
    let (children, mut triggered) = children();
    let mut woken = || -> Vec<_> { std::iter::from_fn(|| triggered.try_recv().ok()).map(|vm| vm.name).collect() };
    let place = |vm: &str| ("ns".into(), vm.into());
    let has = |vm| lock(&children.objects).contains_key(&place(vm));
    children.take(&kind(), Event::Apply(service("apple", 1)));
    assert_eq!((woken(), has("vm")), (vec!["vm".to_owned()], true));
    children.take(&kind(), Event::Apply(of(None, "apple", 2)));
    assert_eq!((woken(), has("vm")), (vec!["vm".to_owned()], false));
    children.take(&kind(), Event::Apply(service("apple", 3)));
    woken();
    children.take(&kind(), Event::Apply(of(Some("other"), "apple", 4)));
    assert_eq!((woken(), has("vm"), has("other")), (vec!["vm".to_owned(), "other".to_owned()], false, true));
    children.take(&kind(), Event::Delete(of(None, "apple", 5)));
    assert_eq!((woken(), has("other")), (vec!["other".to_owned()], false));
    // Told by a list, too.
    children.take(&kind(), Event::Apply(service("pear", 6)));
    children.take(&kind(), Event::Init);
    children.take(&kind(), Event::InitApply(of(None, "pear", 7)));
    children.take(&kind(), Event::InitDone);
    assert!(!has("vm"));
    assert!(lock(&children.uids).is_empty());
}

#[tokio::test]
async fn what_is_listed_and_can_not_be_read_is_not_gone() {
    let list = json!({ "metadata": { "resourceVersion": "5" }, "items": [
        { "metadata": {
            "name": "apple", "namespace": "ns", "uid": "uid of apple", "resourceVersion": "1",
            "labels": { "app.kubernetes.io/instance": "vm" },
        } },
        { "metadata": { "name": null } },
    ] });
    let (asked, mut requests) = mpsc::unbounded();
    let server = tower::service_fn(move |request: axum::http::Request<kube::client::Body>| {
        let is_watch = request.uri().to_string().contains("watch=true");
        asked.unbounded_send(is_watch).unwrap();
        let list = list.to_string();
        async move {
            match is_watch {
                true => std::future::pending().await,
                false => Ok::<_, std::convert::Infallible>(axum::http::Response::new(axum::body::Body::from(list))),
            }
        }
    });
    let client = Client::new(listing::beginning_with_lists(server), "ns");
    let (children, _triggered) = Children::new(client, None, Arc::new(Metrics::new()));
    children.insert(service("apple", 1));
    children.insert(service("pear", 2));
    let error = children.watch([kind()]).await.unwrap_err();
    assert!(error.message.contains("watch stream failed"), "{error}");
    // The watch goes on from the list.
    while !requests.next().await.unwrap() {}
    assert_eq!(known(&children), ["apple", "pear"]);
    assert!(!children.knows(&kind()));
}

#[tokio::test(start_paused = true)]
async fn what_is_made_while_its_kind_is_listed_is_believed_in_until_the_watch_must_have_told_it() {
    let (children, _triggered) = children();
    children.insert(service("gone", 1));
    children.take(&kind(), Event::Init);
    children.take(&kind(), Event::InitApply(service("there", 2)));
    children.insert(service("made", 3));
    children.insert(service("made-and-deleted", 4));
    children.take(&kind(), Event::InitDone);
    assert_eq!(known(&children), ["made", "made-and-deleted", "there"]);
    children.take(&kind(), Event::Apply(service("made", 3)));
    sleep(DOUBT * 2).await;
    assert_eq!(known(&children), ["made", "there"]);

    // As long as the watch does not go on it can't tell.
    children.take(&kind(), Event::Init);
    children.take(&kind(), Event::InitApply(service("made", 3)));
    children.take(&kind(), Event::InitApply(service("there", 2)));
    children.insert(service("untold", 4));
    children.take(&kind(), Event::InitDone);
    for _ in 0..5 {
        lock(&children.troubles).insert(kind(), Instant::now());
        sleep(DOUBT * 3 / 4).await;
        assert_eq!(known(&children), ["made", "there", "untold"]);
    }
    sleep(DOUBT).await;
    assert_eq!(known(&children), ["made", "there"]);

    // What was answered before the next list can have begun is in it, or gone. When it has, one hears a little later.
    children.insert(service("earlier", 5));
    children.expect_list(&kind());
    children.insert(service("later", 6));
    children.take(&kind(), Event::Init);
    children.take(&kind(), Event::InitApply(service("made", 3)));
    children.take(&kind(), Event::InitDone);
    assert_eq!(known(&children), ["later", "made"]);

    // After a cut the watch mostly goes on, and nothing is listed.
    children.expect_list(&kind());
    children.take(&kind(), Event::Apply(service("made", 7)));
    assert!(lock(&children.lists).is_empty());

    // What was known before and is not listed is gone, even if it was answered about last. One that is told of again is not.
    children.expect_list(&kind());
    children.insert(service("made", 8));
    children.take(&kind(), Event::Init);
    children.take(&kind(), Event::InitDone);
    assert!(known(&children).is_empty());
    children.take(&kind(), Event::Apply(service("made", 9)));
    children.insert(service("made", 10));
    let objects = lock(&children.objects);
    assert_eq!(objects.values().flatten().map(|known| known.version).collect::<Vec<_>>(), [10]);
}
