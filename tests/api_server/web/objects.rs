//! The objects of a VM with the templates that they come from, what its next start changes, and the template sets of all VMs.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};
use vm_operator::render::{
    TemplateSet,
    kept::{self, in_force_name},
};

use super::{LIMIT, Web, configuration};
use crate::support::cluster::eventually;

impl Web {
    /// Keeps a template set as the manager does.
    pub(super) async fn keep_templates(&self, files: &[(&str, &str)], former: bool) -> String {
        let files = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let set = TemplateSet::layered(&files, None).unwrap();
        let version = set.version().to_owned();
        let name = in_force_name(None, former.then_some(version.as_str()));
        let map = json!({
            "metadata": { "name": name, "labels": { kept::LABEL: "" }, "annotations": { kept::VERSION: version } },
            "binaryData": { kept::KEY: k8s_openapi::ByteString(set.layers().packed()) },
        });
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), self.namespace.name());
        maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
        version
    }
}

#[tokio::test]
async fn an_administrator_sees_of_which_templates_objects_are_made() {
    let web = Web::new("web-objects", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["*"] }])).await;
    let (admin, ann, path) = (web.sign_in("admin").await, web.sign_in("ann").await, web.path("apple", "/objects"));
    let none = admin.get(&path).await;
    assert_eq!((none.status, none.body.contains("no manager has kept its templates there")), (409, true));

    let extra = "apiVersion: v1\nkind: Secret\nmetadata: { name: {{ vm.metadata.name ~ '-extra' }} }\nstringData: { word: sesame }\n";
    let pod = "{% extends \"builtin/pod.yaml.j2\" %}{% block labels %}{{ super() }}{% endblock %}";
    let newest = web.keep_templates(&[("extra.yaml.j2", extra), ("pod.yaml.j2", pod)], false).await;
    let page = admin.get(&path).await;
    assert_eq!(page.status, 200, "{}", page.body);
    for part in [
        newest.as_str(),
        "apple-extra",
        "extra.yaml.j2",
        "pod.yaml.j2",
        "(labels:1)",
        "extra.yaml.j2:2</code>",
        "containers:",
        "(masked) 6 characters",
    ] {
        assert!(page.body.contains(part), "{part}: {}", page.body);
    }
    assert!(!page.body.contains("sesame"));
    assert_eq!((ann.get(&path).await.status, web.nobody().get(&path).await.status), (403, 303));

    // A VM that keeps a former version is shown with that.
    let former = web.keep_templates(&[("other.yaml.j2", &extra.replace("-extra", "-other"))], true).await;
    web.set_status("apple", json!({ "templates": { "version": former } })).await;
    let page = admin.get(&path).await;
    assert!(page.body.contains("apple-other") && page.body.contains(&former) && !page.body.contains("apple-extra"));

    // A template that takes all memory or never ends harms nobody.
    let greedy = "{% set ns = namespace(text='x' * 1000) %}{% for _ in range(40) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}a: {{ ns.text|length }}\n";
    let greedy = web.keep_templates(&[("greedy.yaml.j2", greedy)], true).await;
    web.set_status("apple", json!({ "templates": { "version": greedy } })).await;
    assert_eq!(admin.get(&path).await.status, 409);
    assert_eq!(admin.get("/vms").await.status, 200);
}

#[tokio::test]
async fn administrators_see_what_a_start_changes_and_which_templates_are_refused() {
    let web = Web::new("web-health", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["start"] }])).await;
    let condition = |reason: &str, message: &str| -> Value {
        json!([{ "type": "TemplatesValid", "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z" }])
    };
    // A slash is escaped.
    let path = "objects/Pod/spec.containers[vm-runner].image";
    let field = "spec.containers[vm-runner].image";
    web.set_status(
        "apple",
        json!({
            "templates": { "version": "1a2b3c4d" }, "conditions": condition("NewerRefused", "pod.yaml.j2:3:1: there is no such block"),
            "pendingChanges": [{ "path": path, "current": "image:1", "wanted": "image:2", "reason": "r" }],
        }),
    )
    .await;
    let (admin, ann, own) = (web.sign_in("admin").await, web.sign_in("ann").await, web.path("apple", ""));
    let page = eventually("the change", LIMIT, async || {
        let page = admin.get(&own).await.body;
        page.contains(field).then_some(page)
    })
    .await;
    assert!(page.contains("<del>image:1</del>") && page.contains("<ins>image:2</ins>"), "{page}");
    let page = ann.get(&own).await.body;
    assert!(page.contains(field) && !page.contains("image:1") && !page.contains("1a2b3c4d"), "{page}");

    let page = admin.get("/templates").await.body;
    for part in ["1a2b3c4d", "A newer version is not used", "NewerRefused", "there is no such block", "apple\">"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    web.set_status("apple", json!({ "conditions": condition("Rendered", "fine") })).await;
    eventually("nothing to be refused", LIMIT, async || {
        let page = admin.get("/templates").await.body;
        (page.contains("In force") && !page.contains("NewerRefused")).then_some(())
    })
    .await;
}
