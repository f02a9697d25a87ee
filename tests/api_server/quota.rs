//! VMs in a namespace with a quota on limits: each container of their Pods has requests and limits where the VM has.

use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::{
    commands::run,
    create,
    support::{
        cluster::eventually,
        managed_namespace::{LIMIT, ManagedNamespace},
    },
};

async fn quota(ns: &ManagedNamespace, hard: &[&str]) {
    let hard: serde_json::Map<String, Value> = hard.iter().map(|what| ((*what).to_owned(), json!("64Gi"))).collect();
    let quota = json!({ "metadata": { "name": "limits" }, "spec": { "hard": hard } });
    let quotas = ns.api::<ResourceQuota>();
    quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
    eventually("the quota to be counted", LIMIT, async || quotas.get("limits").await.unwrap().status?.used.map(drop))
        .await;
}

/// What a VM may have that makes further containers.
fn vms() -> [(&'static str, Value); 6] {
    let sum = "30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58";
    let import =
        |import: Value| json!({ "templates": { "set": "import-disk" }, "templateValues": { "import": import } });
    [
        ("plain", json!({ "vm": { "networks": [{ "user": {} }] } })),
        ("pod-network", json!({ "vm": { "networks": [{ "pod": {} }] } })),
        (
            "url",
            import(json!({ "disk": "core", "url": "https://example.org/a.img", "sums": "https://example.org/SUMS" })),
        ),
        ("oci", import(json!({ "disk": "core", "oci": "localhost/vm-demo-guest:0.1.0" }))),
        ("upload", import(json!({ "disk": "core", "upload": { "size": 4096, "sha256": sum } }))),
        (
            "several",
            import(
                json!({ "disk": "core", "url": "https://example.org/a.img", "disks": { "core": { "oci": "localhost/b" } } }),
            ),
        ),
    ]
}

#[tokio::test]
async fn a_quota_on_limits_stops_no_vm_that_has_limits() {
    let ns = create::ns("quota-limits").await;
    quota(&ns, &["limits.cpu", "limits.memory", "requests.cpu", "requests.memory"]).await;
    let both = json!({ "limits": { "memory": "768Mi", "cpu": "1" }, "requests": { "memory": "768Mi", "cpu": "500m" } });
    let guaranteed = json!({ "limits": { "memory": "768Mi", "cpu": "1" } });
    for (name, spec) in vms() {
        for (kind, resources) in [("burst", &both), ("guaranteed", &guaranteed)] {
            let name = format!("{name}-{kind}");
            ns.create_vm(&name, |vm| {
                json_patch::merge(&mut vm["spec"], &spec);
                vm["spec"]["resources"] = resources.clone();
            })
            .await;
            ns.vm_with_reason(&name, "Starting").await;
            let pod = json!(ns.api::<Pod>().get(&name).await.unwrap());
            let of = |list: &str| pod["spec"][list].as_array().cloned().unwrap_or_default();
            for container in of("initContainers").into_iter().chain(of("containers")) {
                let about = format!("{name}: {} {}", container["name"], container["resources"]);
                for part in ["/limits/cpu", "/limits/memory", "/requests/cpu", "/requests/memory"] {
                    assert!(container["resources"].pointer(part).is_some(), "{about}");
                }
                // What is reserved beside the guest's own is small, whatever the VM has.
                let is_passt = container["name"] == "passt" && kind == "burst";
                assert!(!is_passt || container["resources"]["requests"]["cpu"] == "10m", "{about}");
                let context = &container["securityContext"];
                assert_eq!(context["allowPrivilegeEscalation"], false, "{about}");
                assert_eq!(context["readOnlyRootFilesystem"], true, "{about}");
                assert_eq!(context["capabilities"], json!({ "drop": ["ALL"] }), "{about}");
            }
            let class = if kind == "burst" { "Burstable" } else { "Guaranteed" };
            assert_eq!(pod["status"]["qosClass"], class, "{name}");
        }
    }
}

#[tokio::test]
async fn one_limit_is_enough_for_a_quota_on_it_and_explain_says_what_is_missing() {
    let ns = create::ns("quota-memory").await;
    quota(&ns, &["limits.memory"]).await;
    for (name, spec) in vms() {
        ns.create_vm(name, |vm| {
            json_patch::merge(&mut vm["spec"], &spec);
            vm["spec"]["resources"] = json!({ "limits": { "memory": "768Mi" } });
        })
        .await;
        ns.vm_with_reason(name, "Starting").await;
        let pod = json!(ns.api::<Pod>().get(name).await.unwrap());
        let containers = pod["spec"]["initContainers"].as_array().unwrap();
        let passt = containers.iter().find(|container| container["name"] == "passt");
        let resources = json!({ "limits": { "memory": "256Mi" }, "requests": { "cpu": "10m", "memory": "32Mi" } });
        assert!(passt.is_none_or(|passt| passt["resources"] == resources), "one limit is none of CPU: {passt:?}");
    }
    ns.create_vm("without", |_| ()).await;
    let said = eventually("the quota to refuse it", LIMIT, async || {
        let said = run(&ns, &["explain", "without"]).data;
        said.contains("failed quota: limits").then_some(said)
    })
    .await;
    let todo = "set limits.memory in spec.resources of the VM, from which its other containers follow, or a LimitRange";
    assert!(said.contains(todo), "{said}");
    // What it says is true.
    ns.patch_vm("without", json!({ "spec": { "resources": { "limits": { "memory": "768Mi" } } } })).await;
    ns.vm_with_reason("without", "Starting").await;
}
