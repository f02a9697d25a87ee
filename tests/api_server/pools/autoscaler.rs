//! A HorizontalPodAutoscaler of a pool: Kubernetes' own controller, with the metrics of the Pods from a played metrics API.

use k8s_openapi::{
    api::{autoscaling::v2::HorizontalPodAutoscaler, core::v1::Pod},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind},
};
use vm_operator::object::POOL_LABEL;

use super::{members::manifest, *};

/// The resource `pods` of the metrics API (<https://github.com/kubernetes/metrics>), which has an object for each Pod with its labels.
fn metrics_api() -> CustomResourceDefinition {
    let definition = json!({
        "metadata": {
            "name": "pods.metrics.k8s.io",
            "annotations": { "api-approved.kubernetes.io": "unapproved, for a test" },
        },
        "spec": {
            "group": "metrics.k8s.io", "scope": "Namespaced",
            "names": { "kind": "PodMetrics", "listKind": "PodMetricsList", "plural": "pods", "singular": "pod" },
            "versions": [{
                "name": "v1beta1", "served": true, "storage": true,
                "schema": { "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } },
            }],
        },
    });
    serde_json::from_value(definition).unwrap()
}

/// The CPU time that a Pod asks for, in thousandths.
fn requested(pod: &Pod) -> u32 {
    let spec = pod.spec.as_ref().unwrap();
    let sidecars = spec.init_containers.iter().flatten().filter(|it| it.restart_policy.as_deref() == Some("Always"));
    let requests = spec.containers.iter().chain(sidecars).map(|container| {
        let cpu = &container.resources.as_ref().unwrap().requests.as_ref().unwrap()["cpu"].0;
        cpu.strip_suffix('m').map_or_else(|| cpu.parse::<u32>().unwrap() * 1000, |cpu| cpu.parse().unwrap())
    });
    requests.sum()
}

/// Says how many thousandths of a CPU a Pod uses.
async fn measure(ns: &ManagedNamespace, pod: &Pod, cpu: u32) {
    let kind =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("metrics.k8s.io", "v1beta1", "PodMetrics"), "pods");
    let metrics = Api::<DynamicObject>::namespaced_with(ns.client.clone(), ns.namespace.name(), &kind);
    let name = pod.name_any();
    let object = json!({
        "apiVersion": "metrics.k8s.io/v1beta1", "kind": "PodMetrics",
        "metadata": { "name": name, "labels": pod.labels() },
        "timestamp": Timestamp::now().to_string(), "window": "30s",
        "containers": [{ "name": "vm-runner", "usage": { "cpu": format!("{cpu}m"), "memory": "1Gi" } }],
    });
    // The API server serves a new kind a moment after its definition.
    eventually("the played metrics API to take it", LIMIT, async || {
        metrics.patch(&name, &PatchParams::apply("test").force(), &Patch::Apply(&object)).await.ok()
    })
    .await;
}

#[tokio::test]
async fn an_autoscaler_finds_the_pods_of_a_pools_vms_and_scales_it() {
    let ns = ManagedNamespace::with_configuration("pool-autoscaler", "allowed: {podLabels: []}").await;
    let mut pool = manifest("desktops", 2);
    pool["spec"]["warm"] = 20.into();
    // Git leaves to the autoscaler how many there are, and a person says how many there are first.
    pool["spec"].as_object_mut().unwrap().remove("replicas");
    ns.namespace.apply(&pool.to_string());
    ns.namespace.kubectl(&["scale", "vmpool", "desktops", "--replicas=2"]);
    // A copy of a VM is not one of the pool's, whatever its labels say.
    ns.create_vm("copy", |vm| {
        vm["metadata"]["labels"] = json!({ POOL_LABEL: "desktops" });
        vm["spec"]["vm"]["state"] = "Running".into();
    })
    .await;
    let pods = ns.api::<Pod>();
    for (name, pool) in [("desktops-0", Some("desktops")), ("desktops-1", Some("desktops")), ("copy", None)] {
        let pod = eventually(&format!("the Pod of {name}"), LIMIT, async || pods.get_opt(name).await.unwrap()).await;
        assert_eq!(pod.labels().get(POOL_LABEL).map(String::as_str), pool, "{name}");
        let since = Timestamp::now() - SignedDuration::from_mins(10);
        let ready = json!({ "type": "Ready", "status": "True", "lastTransitionTime": since.to_string() });
        ns.patch_pod_status(name, json!({ "phase": "Running", "startTime": since.to_string(), "conditions": [ready] }))
            .await;
    }

    let definitions = Api::<CustomResourceDefinition>::all(ns.client.clone());
    let definition = metrics_api();
    definitions.create(&PostParams::default(), &definition).await.unwrap();
    for (name, share) in [("desktops-0", 0.75), ("desktops-1", 0.75), ("copy", 100.0)] {
        let pod = pods.get(name).await.unwrap();
        measure(&ns, &pod, (f64::from(requested(&pod)) * share) as u32).await;
    }
    ns.namespace.kubectl(&["apply", "--filename", "example/pools-from-a-template/autoscaler.yaml"]);
    // Two VMs that use 75 % are three that use 50 %.
    eventually("the autoscaler to want three VMs", 3 * LIMIT, async || {
        (ns.api::<VmPool>().get("desktops").await.unwrap().spec.replicas == Some(3)).then_some(())
    })
    .await;
    eventually("the third VM's Pod", LIMIT, async || pods.get_opt("desktops-2").await.unwrap()).await;
    delete(&ns.api::<HorizontalPodAutoscaler>(), "desktops").await;
    delete(&definitions, &definition.name_any()).await;
}
