//! What one VM, one kind of objects or one missing right holds up, and what it does not.

use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceQuota;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use super::*;
use crate::support::proxy::{Faults, Proxy};

/// Allows the manager to do that with a resource.
fn allow(ns: &ManagedNamespace, resource: &str, group: &str, verbs: &[&str]) {
    let metadata = json!({ "name": resource });
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata,
        "rules": [{ "apiGroups": [group], "resources": [resource], "verbs": verbs }],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": resource },
        "subjects": [{ "kind": "ServiceAccount", "name": "vm-operator", "namespace": ns.namespace.name() }],
    });
    ns.namespace.apply(&role.to_string());
    ns.namespace.apply(&binding.to_string());
}

fn allow_policies(ns: &ManagedNamespace, verbs: &[&str]) {
    allow(ns, "networkpolicies", "networking.k8s.io", verbs);
}

#[tokio::test]
async fn a_set_that_needs_a_right_is_refused_with_its_name_and_used_when_the_right_is_given() {
    let ns = ManagedNamespace::new("rights").await;
    for name in ["apple", "pear"] {
        ns.create_vm(name, |_| {}).await;
        ns.vm_with_reason(name, "Starting").await;
    }
    ns.manager.change_templates(&[("network-policy.yaml.j2", POLICY)]);
    let told = async |words: &str| {
        ns.vm_when("pear", &format!("told of {words:?}"), |vm| {
            condition(vm, TEMPLATES_VALID)
                .is_some_and(|(_, reason, message)| reason == "NewerRefused" && message.contains(words))
        })
        .await
    };
    let place = ns.namespace.name();
    let missing = |verbs: &str| {
        format!(
            "network-policy.yaml.j2: the manager may not {verbs} networkpolicies.networking.k8s.io in the namespace {place}; give its \
             account system:serviceaccount:{place}:vm-operator a Role in that namespace with the rule \
             - {{apiGroups: [networking.k8s.io], resources: [networkpolicies], verbs: [{verbs}]}}"
        )
    };
    told(&missing("list, watch, get, create, patch, delete")).await;
    // A dry run shows only whether it may patch.
    allow_policies(&ns, &["get", "create", "patch", "list"]);
    told(&missing("watch, delete")).await;
    allow_policies(&ns, &["get", "create", "patch", "list", "watch", "delete"]);
    policy(&ns, "apple").await;
    ns.vm_when("pear", "content", |vm| condition(vm, TEMPLATES_VALID).unwrap().1 == "Rendered").await;
}

#[tokio::test]
async fn a_set_that_a_quota_refused_is_used_when_the_quota_grows() {
    let ns = ManagedNamespace::with_templates("quota", &[]).await;
    ns.create_vm("apple", |_| {}).await;
    ns.vm_with_reason("apple", "Starting").await;
    let policies = |number: u32| {
        let hard = json!({ "count/networkpolicies.networking.k8s.io": number.to_string() });
        let quota = json!({ "apiVersion": "v1", "kind": "ResourceQuota", "metadata": { "name": "few" }, "spec": { "hard": hard } });
        ns.namespace.apply(&quota.to_string());
    };
    policies(0);
    let quotas: Api<ResourceQuota> = ns.api();
    eventually("the quota to be in force", LIMIT, async || quotas.get("few").await.unwrap().status?.used.map(drop))
        .await;
    ns.manager.change_templates(&[("network-policy.yaml.j2", POLICY)]);
    refused(&ns, "exceeded quota: few").await;
    policies(1);
    // Nothing that the manager watches has changed.
    policy(&ns, "apple").await;
    ns.vm_when("apple", "content", |vm| condition(vm, TEMPLATES_VALID).unwrap().1 == "Rendered").await;
}

#[tokio::test]
async fn a_set_that_a_value_of_a_vm_refused_is_used_when_the_value_is_mended() {
    let ns = ManagedNamespace::with_templates("mended", &[]).await;
    for (name, values) in [("apple", json!({})), ("pear", json!({ "types": ["Ingress"] }))] {
        ns.create_vm(name, |vm| vm["spec"]["templateValues"] = values).await;
        ns.vm_with_reason(name, "Starting").await;
    }
    ns.manager.change_templates(&[("network-policy.yaml.j2", &POLICY.replace("[Ingress]", "{{ values.types }}"))]);
    let line = refused(&ns, "`values.types` is undefined").await;
    assert!(line.contains("/apple"), "{line}");
    ns.patch_vm("apple", json!({ "spec": { "templateValues": { "types": ["Egress"] } } })).await;
    for name in ["apple", "pear"] {
        policy(&ns, name).await;
    }
}

#[tokio::test]
async fn bad_values_of_a_vm_that_runs_are_reported_for_that_generation() {
    let schema = json!({ "properties": { "size": { "enum": ["small", "large"] } } }).to_string();
    let ns = ManagedNamespace::with_templates("bad-values", &[("values.schema.json", &schema)]).await;
    ns.create_vm("apple", |vm| vm["spec"]["templateValues"] = json!({ "size": "small" })).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let before = pod(&ns, "apple").await;
    ns.patch_vm("apple", json!({ "spec": { "templateValues": { "size": "huge" } } })).await;
    let vm = ns.vm_with_reason("apple", "TemplateError").await;
    let (status, _, message) = condition(&vm, "Ready").unwrap();
    assert!(status == "False" && message.contains("values.size: \"huge\" is not one of"), "{message}");
    let event = ns.wait_for_event("apple", "TemplateError").await;
    assert!(event.message.unwrap().contains("values.size"));
    assert_eq!(vm.status.unwrap().phase.as_deref(), Some("Running"));
    assert_eq!(pod(&ns, "apple").await.uid(), before.uid());
    ns.patch_vm("apple", json!({ "spec": { "templateValues": { "size": "large" } } })).await;
    ns.vm_with_reason("apple", "Running").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_right_to_watch_that_is_taken_away_is_named_by_the_vms_and_they_can_be_stopped() {
    let mut ns = ManagedNamespace::new("taken-right").await;
    // An API server closes a watch after some minutes, and only then asks again whether the manager may watch.
    let kubeconfig = Kubeconfig::read_from(ns.kubeconfig.path()).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let faults = Faults { watch: Some(Duration::from_secs(3)), ..Faults::default() };
    let proxy = Proxy::start(Client::try_from(config).unwrap(), 7, faults).await;
    drop(ns.manager);
    ns.manager = Manager::start_with(&proxy.kubeconfig(), ns.namespace.name(), &[], SERVICES);
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;

    let role = include_str!("../../../deploy/manager-role.yaml");
    let without = role.replace("[configmaps, pods, secrets, services]", "[configmaps, pods, services]");
    assert_ne!(role, without);
    ns.namespace.apply(&without);
    let vm = ns.vm_with_reason("apple", "WatchFailed").await;
    let place = ns.namespace.name();
    let expected = format!(
        "Secret objects can't be watched: the manager may not list, watch secrets in the namespace {place}; give its account \
         system:serviceaccount:{place}:vm-operator a Role in that namespace with the rule \
         - {{apiGroups: [\"\"], resources: [secrets], verbs: [list, watch]}}"
    );
    assert_eq!(condition(&vm, "Ready").unwrap().2, expected);
    ns.wait_for_event("apple", "WatchFailed").await;
    assert_eq!(ns.manager.metric("vm_operator_watches_refused{kind=\"Secret\"}"), Some(1.0));
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.wait_for_no_pod("apple").await;

    ns.namespace.apply(role);
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    ns.vm_with_reason("apple", "Starting").await;
}

#[tokio::test]
async fn a_job_of_the_vm_that_the_manager_may_not_delete_names_the_right_and_does_not_keep_the_vm_up() {
    let ns = ManagedNamespace::new("job").await;
    ns.create_vm("apple", |_| ()).await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    // Its Pod has the VM's labels, so it may run the guest.
    let owner = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": "apple", "uid": vm.uid(), "controller": true,
    });
    let labels = json!({ "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "apple", "app.kubernetes.io/component": "vm-runner" });
    let pod = json!({ "metadata": { "labels": labels }, "spec": { "restartPolicy": "Never", "containers": [{ "name": "x", "image": "x" }] } });
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "guest", "ownerReferences": [owner] }, "spec": { "template": pod },
    });
    // As the manager made it for templates of before: one that a person makes is not the VM's.
    let jobs: Api<k8s_openapi::api::batch::v1::Job> = ns.api();
    jobs.patch("guest", &PatchParams::apply("vm-operator").force(), &Patch::Apply(&job)).await.unwrap();
    eventually("the Job's Pod", LIMIT, async || (ns.pods().await.len() == 2).then_some(())).await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.wait_for_no_pod("apple").await;
    let place = ns.namespace.name();
    let missing = format!(
        "delete Job guest: the manager may not delete jobs.batch in the namespace {place}; give its account \
         system:serviceaccount:{place}:vm-operator a Role in that namespace with the rule \
         - {{apiGroups: [batch], resources: [jobs], verbs: [delete]}}"
    );
    let vm = ns.vm_with_reason("apple", "ApplyFailed").await;
    assert_eq!(condition(&vm, "Ready").unwrap().2, missing);
    allow(&ns, "jobs", "batch", &["get", "delete"]);
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    ns.pod_when("apple", "there", |_| true).await;
}

#[tokio::test]
async fn a_kind_that_only_one_vm_makes_is_that_vms_matter() {
    let ns = ManagedNamespace::new("one-vm").await;
    ns.create_vm("apple", |vm| vm["spec"]["templateValues"] = json!({ "policy": true })).await;
    ns.create_vm("pear", |_| ()).await;
    for name in ["apple", "pear"] {
        ns.vm_with_reason(name, "Starting").await;
    }
    let before = version(&ns.vm_when("pear", "rendered", |vm| version(vm).is_some()).await);
    let template = format!("{{% if values.policy is defined %}}\n{POLICY}{{% endif %}}\n");
    ns.manager.change_templates(&[("network-policy.yaml.j2", &template)]);
    ns.vm_when("pear", "of the new version", |vm| version(vm) != before).await;
    ns.vm_with_reason("pear", "Starting").await;
    ns.vm_with_reason("apple", "WatchFailed").await;
    allow_policies(&ns, &["*"]);
    policy(&ns, "apple").await;
    ns.vm_with_reason("apple", "Starting").await;
}

#[tokio::test]
async fn a_vm_whose_own_spec_is_refused_holds_up_nobody() {
    let ns = ManagedNamespace::with_templates("own-spec", &[]).await;
    ns.create_vm("pear", |_| {}).await;
    // Its requests are above its limits. It comes first, and its objects have the shape of all.
    for (name, memory) in [("apple", "2Gi"), ("plum", "8Gi")] {
        ns.create_vm(name, |vm| {
            vm["spec"]["resources"] = json!({ "requests": { "memory": "4Gi" }, "limits": { "memory": memory } });
        })
        .await;
    }
    ns.create_vm("typo", |vm| vm["spec"]["affinity"] = json!({ "nodeAffinty": {} })).await;
    ns.vm_with_reason("apple", "ApplyFailed").await;
    ns.vm_with_reason("plum", "Starting").await;
    let first = version(&ns.vm_when("pear", "rendered", |vm| version(vm).is_some()).await);
    let pod = |scheduling: &str| {
        let start = "{% extends \"builtin/pod.yaml.j2\" %}\n{% block scheduling %}\n{{ super() }}\n";
        format!("{start}  {scheduling}\n{{% endblock %}}\n")
    };
    ns.manager.change_templates(&[("pod.yaml.j2", &pod("tolerations: [{key: vms, operator: Exists}]"))]);
    let second = version(&ns.vm_when("pear", "of the new version", |vm| version(vm) != first).await);

    // What the API server refuses only with the new set is the set's matter, also if another VM is refused anyhow.
    ns.manager.change_templates(&[("pod.yaml.j2", &pod("tolerations: [{key: vms, operator: Perhaps}]"))]);
    refused(&ns, "Perhaps").await;
    assert_eq!(version(&ns.api::<VirtualMachine>().get("pear").await.unwrap()), second);
}

#[tokio::test]
async fn a_vm_that_is_too_large_or_nests_too_deep_holds_up_nobody() {
    let ns = ManagedNamespace::with_templates("large", &[]).await;
    ns.create_vm("pear", |_| {}).await;
    ns.create_vm("apple", |vm| vm["spec"]["templateValues"] = json!({ "a": vec![json!({ "": 0 }); 180_000] })).await;
    // The schema lets some of it through, the manager does not.
    let deep = |levels| (0..levels).fold(json!("x"), |value, _| json!([value]));
    ns.create_vm("deep", |vm| vm["spec"]["templateValues"] = json!({ "a": deep(98) })).await;
    ns.create_vm("deeper", |vm| vm["spec"]["templateValues"] = json!({ "a": deep(120) })).await;
    ns.vm_with_reason("deeper", "InvalidSpec").await;
    ns.vm_with_reason("apple", "InvalidSpec").await;
    ns.vm_with_reason("deep", "Starting").await;
    let first = version(&ns.vm_when("pear", "rendered", |vm| version(vm).is_some()).await);
    ns.manager.change_templates(&[("network-policy.yaml.j2", POLICY)]);
    for name in ["pear", "deep"] {
        policy(&ns, name).await;
    }
    ns.vm_when("pear", "of the new version", |vm| version(vm) != first).await;
}

/// A set with a label in each ConfigMap, and a schema that allows these sizes.
fn with_sizes(tier: &str, sizes: &[&str]) -> [(&'static str, String); 2] {
    let schema = json!({ "properties": { "size": { "enum": sizes } } });
    let template = format!(
        "{{% extends \"builtin/config-map.yaml.j2\" %}}\n{{% block labels %}}\n    tier: {tier}\n{{% endblock %}}\n"
    );
    [("config-map.yaml.j2", template), ("values.schema.json", schema.to_string())]
}

#[tokio::test]
async fn a_vm_whose_values_do_not_match_the_new_schema_keeps_its_version_and_holds_up_nobody() {
    let mut ns = ManagedNamespace::with_templates("misfit", &[]).await;
    let sets = [
        with_sizes("first", &["small", "huge"]),
        with_sizes("second", &["small", "large"]),
        with_sizes("third", &["small", "large"]),
    ];
    let sets = sets.each_ref().map(|set| set.each_ref().map(|(name, text)| (*name, text.as_str())));
    for (name, values) in
        [("apple", json!({ "size": "huge" })), ("pear", json!({ "size": "small" })), ("plum", json!({}))]
    {
        ns.create_vm(name, |vm| vm["spec"]["templateValues"] = values).await;
    }
    let maps: Api<ConfigMap> = ns.api();
    let tier = async |name: &str, wanted: &str| {
        eventually(&format!("{name} of tier {wanted}"), LIMIT, async || {
            let map = maps.get_opt(name).await.unwrap()?;
            (map.labels().get("tier")? == wanted).then_some(map)
        })
        .await
    };
    ns.manager.change_templates(&sets[0]);
    for name in ["apple", "pear", "plum"] {
        tier(name, "first").await;
    }
    let first = version(&ns.vm_when("apple", "told its version", |vm| version(vm).is_some()).await);
    ns.vm_when("apple", "of the first version", |vm| condition(vm, TEMPLATES_VALID).unwrap().1 == "Rendered").await;

    ns.manager.change_templates(&sets[1]);
    tier("pear", "second").await;
    tier("plum", "second").await;
    let is_kept = |vm: &VirtualMachine| condition(vm, TEMPLATES_VALID).is_some_and(|it| it.1 == "ValuesRefused");
    let apple = ns.vm_when("apple", "told of its values", is_kept).await;
    let message = condition(&apple, TEMPLATES_VALID).unwrap().2;
    assert!(message.contains("values.size: \"huge\" is not one of"), "{message}");
    ns.wait_for_event("apple", "ValuesRefused").await;
    assert_eq!(ns.manager.metric("vm_operator_templates_last_load_successful"), Some(1.0));

    // It is still served, also by the next manager.
    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    ns.manager = Manager::start(ns.cluster, &ns.namespace, &sets[1]);
    eventually("the change", LIMIT, async || {
        let map = tier("apple", "first").await;
        map.data.unwrap()["config.yaml"].contains("currentCpus: 1").then_some(())
    })
    .await;
    let apple = ns
        .vm_when("apple", "told again", |vm| {
            is_kept(vm) && vm.metadata.generation == vm.status.as_ref().unwrap().observed_generation
        })
        .await;
    assert!(version(&apple).is_some());

    // A third version changes nothing of that, until the values match.
    ns.manager.change_templates(&sets[2]);
    tier("pear", "third").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": 2 } } })).await;
    eventually("the change", LIMIT, async || {
        let map = tier("apple", "first").await;
        map.data.unwrap()["config.yaml"].contains("currentCpus: 2").then_some(())
    })
    .await;
    ns.patch_vm("apple", json!({ "spec": { "templateValues": { "size": "large" } } })).await;
    tier("apple", "third").await;
    ns.vm_when("apple", "content", |vm| {
        condition(vm, TEMPLATES_VALID).unwrap().1 == "Rendered" && version(vm) != first
    })
    .await;
    // What no VM needs is not kept.
    let former = ListParams::default().labels("vmoperator.jdrupes.org/templates-former");
    assert_eq!(maps.list(&former).await.unwrap().items.len(), 1);
    ns.manager.change_templates(&[]);
    eventually("no former version", LIMIT, async || maps.list(&former).await.unwrap().items.is_empty().then_some(()))
        .await;
}

#[tokio::test]
async fn what_no_pod_mounts_does_not_hold_up_the_start() {
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: {{ vm.metadata.name ~ '-web' }}}\nspec:\n  \
                   ports: [{port: {{ values.port | default(80) }}}]\n";
    let ns =
        ManagedNamespace::with_templates("beside", &[("web.yaml.j2", service), ("network-policy.yaml.j2", POLICY)])
            .await;
    let problem = async |name: &str, wanted: &str| {
        let vm = ns
            .vm_when(name, &format!("ObjectsReady: {wanted}"), |vm| {
                condition(vm, OBJECTS_READY).is_some_and(|(status, reason, _)| status == "False" && reason == wanted)
            })
            .await;
        condition(&vm, OBJECTS_READY).unwrap().2
    };
    let none = async |name: &str| {
        ns.vm_when(name, "without a problem", |vm| condition(vm, OBJECTS_READY).is_none()).await;
    };
    // The API server refuses it.
    ns.create_vm("apple", |vm| vm["spec"]["templateValues"] = json!({ "port": 100_000 })).await;
    pod(&ns, "apple").await;
    let message = problem("apple", "ApplyFailed").await;
    assert!(message.contains("apply Service apple-web") && message.contains("between 1 and 65535"), "{message}");
    ns.vm_with_reason("apple", "Starting").await;
    ns.wait_for_event("apple", "ApplyFailed").await;
    // It is tried again.
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    ns.patch_vm("apple", json!({ "spec": { "templateValues": { "port": 81 } } })).await;
    none("apple").await;

    // Its name is taken.
    let theirs = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": { "name": "pear" }, "spec": { "podSelector": {} },
    });
    ns.namespace.apply(&theirs.to_string());
    ns.create_vm("pear", |_| ()).await;
    pod(&ns, "pear").await;
    let message = problem("pear", "NameTaken").await;
    assert!(message.starts_with("NetworkPolicy pear exists and does not belong to this VM"), "{message}");
    ns.namespace.kubectl(&["delete", "networkpolicy", "pear"]);
    none("pear").await;

    // It waits for what somebody else must do first, as a Service does for its load balancer.
    let finalizers = |list: &str| {
        let patch = format!("--patch={{\"metadata\":{{\"finalizers\":[{list}]}}}}");
        ns.namespace.kubectl(&["patch", "service", "apple-web", "--type=merge", &patch]);
    };
    finalizers("\"example.org/load-balancer\"");
    ns.namespace.kubectl(&["delete", "service", "apple-web", "--wait=false"]);
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    pod(&ns, "apple").await;
    problem("apple", "WaitingForDeletion").await;
    finalizers("");
    none("apple").await;
    assert!(ns.api::<Service>().get("apple-web").await.unwrap().metadata.deletion_timestamp.is_none());
}

#[tokio::test]
async fn a_vm_with_which_a_template_takes_all_memory_has_an_error_of_its_own() {
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ '-x' }}}\n\
               data: {size: {{ ns.text | length | string }}}\n";
    let map = "{% set ns = namespace(text='x') %}\n{% for i in range(spec.vm.resetCount or 0) %}\n\
               {% set ns.text = ns.text ~ ns.text %}\n{% endfor %}\n"
        .to_owned()
        + map;
    let ns = ManagedNamespace::with_templates("memory", &[("x.yaml.j2", &map)]).await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["resetCount"] = json!(2)).await;
    ns.vm_with_reason("pear", "Starting").await;
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["resetCount"] = json!(50)).await;
    let apple = ns.vm_with_reason("apple", "TemplateError").await;
    let message = condition(&apple, TEMPLATES_VALID).unwrap().2;
    assert!(message.starts_with("(render): it takes too much memory or time"), "{message}");
    // The manager lives, and serves the other VM.
    ns.patch_vm("pear", json!({ "spec": { "vm": { "resetCount": 3 } } })).await;
    let maps: Api<ConfigMap> = ns.api();
    eventually("the other VM's change", LIMIT, async || {
        (maps.get("pear-x").await.unwrap().data?.get("size")? == "8").then_some(())
    })
    .await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "resetCount": 1 } } })).await;
    ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(ns.manager.log().matches("leading").count(), 1);
}

/// A definition of a kind in the group `k8s.cni.cncf.io`.
fn definition(kind: &str, plural: &str) -> String {
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let version = json!({ "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": schema } });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.k8s.cni.cncf.io") },
        "spec": {
            "group": "k8s.cni.cncf.io", "scope": "Namespaced", "versions": [version],
            "names": { "kind": kind, "plural": plural, "singular": kind.to_lowercase() },
        },
    })
    .to_string()
}

#[tokio::test]
async fn the_api_server_knows_the_plural_of_a_kind() {
    // An API server of its own: a kind that comes and goes makes the garbage collector of all tests pause.
    let cluster = OwnCluster::api_server();
    let mut ns = ManagedNamespace::on(*cluster, "plural").await;
    ns.namespace.apply(&definition("NetworkAttachmentDefinition", "network-attachment-definitions"));
    let template = "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata: {name: {{ vm.metadata.name }}}\n\
                    spec: {bridge: {{ values.bridge | default('br0') }}}\n";
    drop(ns.manager);
    ns.manager = Manager::start(ns.cluster, &ns.namespace, &[("network.yaml.j2", template)]);
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.pod_when("apple", "there", |_| true).await;
    let bridge = || {
        let of = [
            "get",
            "network-attachment-definitions",
            "apple",
            "--ignore-not-found",
            "--output=jsonpath={.spec.bridge}",
        ];
        ns.namespace.kubectl(&of)
    };
    // The Pod does not wait for it.
    eventually("a bridge", LIMIT, async || (bridge() == "br0").then_some(())).await;
    ns.patch_vm("apple", json!({ "spec": { "templateValues": { "bridge": "br1" } } })).await;
    eventually("another bridge", LIMIT, async || (bridge() == "br1").then_some(())).await;
    // The schema of this kind allows anything.
    let patch = r#"--patch={"spec":{"bridge":"theirs"}}"#;
    ns.namespace.kubectl(&["patch", "network-attachment-definitions", "apple", "--type=merge", patch]);
    eventually("the bridge to be put back", LIMIT, async || (bridge() == "br1").then_some(())).await;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("network.yaml.j2"), template.replace("br0", "br3")).unwrap();
    assert_eq!(
        ns.namespace.kubectl_vm(&["diff", "apple", "--templates", folder.path().to_str().unwrap()]),
        (0, String::new())
    );
    ns.manager.change_templates(&[]);
    eventually("no definition", LIMIT, async || bridge().is_empty().then_some(())).await;
}

#[tokio::test]
async fn a_kind_that_can_not_be_watched_is_reported_and_the_vm_can_be_stopped() {
    // An API server of its own: a kind that comes and goes makes the garbage collector of all tests pause.
    let cluster = OwnCluster::api_server();
    let mut ns = ManagedNamespace::on(*cluster, "unwatched").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    // Without it the next manager starts as for the first time, and does not check the set.
    ns.api::<ConfigMap>().delete("vm-operator-in-force", &Default::default()).await.unwrap();
    drop(ns.manager);
    let nowhere = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: x}\n";
    ns.manager = Manager::start(ns.cluster, &ns.namespace, &[("policy.yaml.j2", nowhere)]);
    let vm = ns.vm_with_reason("apple", "WatchFailed").await;
    let message = condition(&vm, "Ready").unwrap().2;
    assert!(message.starts_with("CiliumNetworkPolicy objects can't be watched: "), "{message}");
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.wait_for_no_pod("apple").await;
    assert!(ns.api::<ConfigMap>().get_opt("apple").await.unwrap().is_some());

    // The kind comes later.
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    ns.vm_with_reason("apple", "WatchFailed").await;
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "ciliumnetworkpolicies.cilium.io" },
        "spec": {
            "group": "cilium.io", "scope": "Namespaced",
            "names": { "kind": "CiliumNetworkPolicy", "plural": "ciliumnetworkpolicies", "singular": "ciliumnetworkpolicy" },
            "versions": [{ "name": "v2", "served": true, "storage": true, "schema": { "openAPIV3Schema": schema } }],
        },
    });
    ns.namespace.apply(&definition.to_string());
    ns.vm_with_reason("apple", "Starting").await;
    ns.pod_when("apple", "made", |_| true).await;
    ns.namespace.kubectl(&["get", "ciliumnetworkpolicies", "x"]);
}
