//! The templates in force are kept in the cluster, also if the API server does not answer for some time.

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition},
    manager::Manager,
    proxy::{Faults, Proxy},
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, ResourceExt, api::ListParams};
use rustix::process::Signal;
use serde_json::json;
use vm_operator::{api::VirtualMachine, render::kept};

use super::version;

const LABELLED: &str =
    "{% extends \"builtin/config-map.yaml.j2\" %}\n{% block labels %}\n    team: red\n{% endblock %}\n";
const BROKEN: &str = "{% extends \"builtin/config-map.yaml.j2\" %}\n{% block labels %}{{ nothing }}{% endblock %}\n";

#[tokio::test]
async fn what_is_in_force_is_read_and_kept_although_the_api_server_does_not_answer_at_first() {
    let mut ns = ManagedNamespace::with_templates("kept", &[]).await;
    ns.create_vm("apple", |_| {}).await;
    let builtin = version(&ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await);
    let proxy = Proxy::start(ns.client.clone(), 1, Faults::default()).await;
    let of_proxy =
        |templates: &[(&str, &str)]| Manager::start_with(&proxy.kubeconfig(), ns.namespace.name(), templates, "");
    let log_has = async |manager: &Manager, words: &str| {
        eventually(words, LIMIT, async || manager.log().contains(words).then_some(())).await;
    };

    // A good set can't be kept at first.
    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    ns.manager = of_proxy(&[]);
    ns.manager.wait_until_ready("[+] vms: 1 listed").await;
    proxy.refuse(Some("/configmaps/vm-operator-in-force"));
    ns.manager.change_templates(&[("config-map.yaml.j2", LABELLED)]);
    let labelled = version(&ns.vm_when("apple", "of the new set", |vm| version(vm) != builtin).await);
    log_has(&ns.manager, "the templates in force can't be kept").await;
    let kept = |manager: &Manager| manager.log().matches("kept the templates in force").count();
    let before = kept(&ns.manager);
    proxy.refuse(None);
    eventually("the set to be kept", LIMIT, async || (kept(&ns.manager) > before).then_some(())).await;

    // A set that is broken meanwhile is not in force after a restart, although what was in force can't be read at first.
    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    proxy.refuse(Some("templates-in-force"));
    ns.manager = of_proxy(&[("config-map.yaml.j2", BROKEN)]);
    log_has(&ns.manager, "the templates that were in force last can't be read").await;
    proxy.refuse(None);
    ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    let changed = |vm: &VirtualMachine| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation;
    let apple = ns.vm_when("apple", "looked at", changed).await;
    assert_eq!(version(&apple), labelled);
    let refused = |vm: &VirtualMachine| condition(vm, "TemplatesValid").is_some_and(|it| it.1 == "NewerRefused");
    ns.vm_when("apple", "told of the refusal", refused).await;
}

#[tokio::test]
async fn a_version_that_could_not_be_written_into_the_history_is_there_soon() {
    let mut ns = ManagedNamespace::with_templates("history-late", &[]).await;
    ns.create_vm("apple", |_| {}).await;
    let builtin = version(&ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await);
    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    let proxy = Proxy::start(ns.client.clone(), 1, Faults::default()).await;
    ns.manager = Manager::start_with(&proxy.kubeconfig(), ns.namespace.name(), &[], "");
    ns.manager.wait_until_ready("[+] vms: 1 listed").await;

    proxy.refuse(Some("/configmaps/vm-operator-history"));
    ns.manager.change_templates(&[("config-map.yaml.j2", LABELLED)]);
    let labelled = version(&ns.vm_when("apple", "of the new set", |vm| version(vm) != builtin).await);
    eventually("the failure", LIMIT, async || ns.manager.log().contains("lacks a version").then_some(())).await;
    proxy.refuse(None);

    let maps: Api<ConfigMap> = Api::namespaced(ns.client.clone(), ns.namespace.name());
    eventually("the version in the history", LIMIT, async || {
        let history = maps.list_metadata(&ListParams::default().labels(kept::HISTORY)).await.unwrap();
        history.iter().any(|map| map.annotations().get(kept::VERSION) == labelled.as_ref()).then_some(())
    })
    .await;
}
