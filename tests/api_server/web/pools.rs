//! Pools in the web interface, over HTTP: a person gets a VM and gives it back, and administrators see who has which.

use k8s_openapi::api::core::v1::Event;
use kube::{
    Api, ResourceExt,
    api::{ListParams, PostParams},
};
use serde_json::{Value, json};
use vm_operator::api::VmPool;

use super::{Web, configuration, until};
use crate::support::{cluster::eventually, managed_namespace::LIMIT};

impl Web {
    pub(super) async fn create_pool(&self, name: &str, permissions: Value) {
        let pool = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": name },
            "spec": { "retention": "PT1H", "permissions": permissions },
        });
        let pools: Api<VmPool> = Api::namespaced(self.client.clone(), self.namespace.name());
        pools.create(&PostParams::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
    }

    /// Creates a stopped VM of the pool.
    pub(super) async fn create_member(&self, name: &str, pool: &str) {
        let vm = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": name },
            "spec": { "pools": [pool], "vm": { "maximumCpus": 2, "maximumRam": "1Gi" } },
        });
        self.vms().create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
    }

    async fn holder(&self, vm: &str) -> Option<String> {
        self.vms().get(vm).await.unwrap().status?.pools.assignment?.user
    }
}

#[tokio::test]
async fn each_path_of_a_pool_asks_for_a_right_in_it() {
    let web = Web::new("web-pool-rights", &configuration(&["admin", "ann", "other"])).await;
    web.create_pool("desks", json!([{ "user": "ann", "may": ["accessConsole"] }])).await;
    web.create_member("desk-1", "desks").await;
    let (nobody, admin, ann, other) =
        (web.nobody(), web.sign_in("admin").await, web.sign_in("ann").await, web.sign_in("other").await);
    let space = web.namespace.name();
    eventually("the pool's card", LIMIT, async || ann.get("/home").await.body.contains("desks").then_some(())).await;
    assert!(!other.get("/home").await.body.contains("desks"));
    // An administrator has no right in the pool, and sees it on the page of pools.
    assert!(!admin.get("/home").await.body.contains("desks/start"));
    eventually("the pool on its page", LIMIT, async || {
        let page = admin.get("/pools").await.body;
        (page.contains("desks") && page.contains("desk-1")).then_some(())
    })
    .await;
    let (start, release) = (format!("/pools/{space}/desks/start"), format!("/pools/{space}/desks/release"));
    let (missing, take) = (format!("/pools/{space}/none/start"), web.path("desk-1", "/release"));
    for (path, wanted) in [(&start, [401, 404, 404]), (&release, [401, 404, 404]), (&missing, [401, 404, 404])] {
        for (browser, status) in [&nobody, &other, &admin].into_iter().zip(wanted) {
            assert_eq!(browser.post(path, "").await.status, status, "{path}");
        }
    }
    for (path, wanted) in [("/pools", [303, 404, 404]), ("/live/pools", [401, 404, 404])] {
        for (browser, status) in [&nobody, &other, &ann].into_iter().zip(wanted) {
            assert_eq!(browser.get(path).await.status, status, "{path}");
        }
    }
    assert_eq!([nobody.post(&take, "").await.status, ann.post(&take, "").await.status], [401, 404]);
    let (there, not_there) = (other.post(&start, "").await, other.post(&missing, "").await);
    assert_eq!(
        (there.status, there.body),
        (not_there.status, not_there.body),
        "a pool of others is as one that does not exist"
    );
    assert_eq!(web.holder("desk-1").await, None);

    // With her VM she may do what the pool says, and no more.
    assert_eq!(ann.post(&start, "").await.header("location"), Some(web.path("desk-1", "/console").as_str()));
    assert_eq!(ann.get(&web.path("desk-1", "/console")).await.status, 200);
    assert_eq!(
        [ann.post(&take, "").await.status, ann.post(&web.path("desk-1", "/stop"), "from=home").await.status],
        [403, 403]
    );
    assert_eq!(other.get(&web.path("desk-1", "")).await.status, 404);
}

#[tokio::test]
async fn a_person_gets_a_vm_of_a_pool_and_gives_it_back() {
    let web = Web::new("web-pool", &configuration(&["admin", "ann", "bob"])).await;
    let may = |user: &str| json!({ "user": user, "may": ["accessConsole", "start"] });
    web.create_pool("desks", json!([may("ann"), may("bob")])).await;
    let (admin, ann, bob) = (web.sign_in("admin").await, web.sign_in("ann").await, web.sign_in("bob").await);
    let space = web.namespace.name();
    let path = |action: &str| format!("/pools/{space}/desks/{action}");
    // A new pool loads the pages of all people again: when that is done, its number is no longer 0.
    eventually("the pool's card", LIMIT, async || {
        let page = ann.get("/home").await.body;
        (page.contains("desks/start") && !page.contains("-0\"")).then_some(())
    })
    .await;
    web.create_member("desk-1", "desks").await;
    let (_, mut live) = ann.open("GET", "/live/home", &[], "").await;
    until(&mut live, "vms", "pool:").await;

    let answer = ann.post(&path("start"), "").await;
    assert_eq!(
        (answer.status, answer.header("location")),
        (303, Some(web.path("desk-1", "/console").as_str())),
        "{}",
        answer.body
    );
    assert_eq!(web.holder("desk-1").await.as_deref(), Some("ann"));
    let vm = web.vms().get("desk-1").await.unwrap();
    assert_eq!(json!(vm.spec.vm.state), "Running", "it is started for her");
    assert!(vm.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some("vm-operator-web")));
    // Her VM is in the place of the pool, without a reload.
    let seen = until(&mut live, "gone", "pool:").await;
    assert!(seen.contains("desk-1"), "{seen}");
    let page = ann.get("/home").await.body;
    assert!(page.contains("desks/release") && page.contains("desk-1") && !page.contains("desks/start"), "{page}");
    // The same one again; and there is none for anybody else, who is told until when.
    assert_eq!(ann.post(&path("start"), "").await.header("location"), answer.header("location"));
    let refused = bob.post(&path("start"), "").await;
    assert_eq!(refused.status, 409);
    assert!(refused.body.contains("The next one is kept until <time datetime=\"20"), "{}", refused.body);
    let origin = format!("http://{}", web.address);
    let german = bob.send("POST", &path("start"), &[("origin", &origin), ("accept-language", "de")], "").await;
    assert_eq!((german.status, german.body.contains("Die VM des Pools ist vergeben.")), (409, true), "{}", german.body);
    assert_eq!(web.holder("desk-1").await.as_deref(), Some("ann"));
    // Its console waits for the guest, and says for what.
    assert!(ann.get(&web.path("desk-1", "/console")).await.body.contains("class=\"waiting\""));

    let answer = ann.post(&path("release"), "").await;
    assert_eq!((answer.status, answer.header("location")), (303, Some("/home")));
    assert_eq!(web.holder("desk-1").await, None);
    until(&mut live, "vm", "pool:").await;
    assert_eq!(ann.get(&web.path("desk-1", "")).await.status, 404, "it is hers no more");

    assert_eq!(bob.post(&path("start"), "").await.status, 303);
    let row = eventually("bob on the page", LIMIT, async || {
        let page = admin.get("/pools").await.body;
        page.contains("bob").then_some(page)
    })
    .await;
    assert!(row.contains("desk-1/release") && row.contains("square assigned"), "{row}");
    assert!(row.contains("name=\"user\" value=\"bob\""), "{row}");
    // What an old page says of somebody else does not count.
    let take_back = async |user: &str| admin.post(&web.path("desk-1", "/release"), &format!("user={user}")).await;
    let late = take_back("ann").await;
    assert_eq!((late.status, late.body.contains("Somebody else changed it: bob has it now.")), (409, true));
    assert_eq!(web.holder("desk-1").await.as_deref(), Some("bob"));
    let answer = take_back("bob").await;
    assert_eq!((answer.status, answer.header("location")), (303, Some("/pools")));
    assert_eq!(web.holder("desk-1").await, None);

    let events: Api<Event> = Api::namespaced(web.client.clone(), space);
    for (reason, text) in [
        ("WebAssigned", "ann has got it from the pool desks"),
        ("WebReleased", "ann has released it"),
        ("WebTakenBack", "admin has released it in the web interface (bob had it)"),
    ] {
        eventually(text, LIMIT, async || {
            let about = ListParams::default().fields(&format!("involvedObject.name=desk-1,reason={reason}"));
            let all = events.list(&about).await.unwrap();
            all.items.iter().any(|event| event.message.as_deref().unwrap_or_default().contains(text)).then_some(())
        })
        .await;
    }
    let log = std::fs::read_to_string(web.folder.path().join("log")).unwrap();
    assert!(
        log.contains("a person has got a VM of a pool") && log.contains("a person has released a VM of a pool"),
        "{log}"
    );
}
