//! vmctl on a real node, with its image and the files of `example/vmctl`.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;

fn example(file: &str) -> Value {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("example/vmctl");
    serde_yaml::from_str(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap()
}

/// What a command prints, which the page about vmctl shows.
fn shown(namespace: &TestNamespace, arguments: &[&str]) -> String {
    let printed = namespace.kubectl(arguments);
    println!("$ kubectl {}\n{printed}", arguments.join(" "));
    printed
}

async fn number_of_vms(vms: &Api<VirtualMachine>, number: usize) {
    eventually(&format!("{number} derived VMs"), LIMIT, async || {
        let derived = ListParams::default().labels("vmoperator.jdrupes.org/prototype=testvm");
        (vms.list(&derived).await.unwrap().items.len() == number).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_stateful_set_and_a_daemon_set_of_vms_boot_behind_a_service() {
    let _shared = NODE.read().await;
    let Stage { cluster: _, namespace, vms, pods } = Stage::set("vmctl").await;
    let address = recipes::serve_images(&namespace, &pods).await;
    recipes::install_set(&namespace, "import-disk", &["import-disk"]);
    allow_privilege(&namespace);
    let config = "'/Manager': {'/Controller': {'/Reconciler': {passt: {seccompProfile: Unconfined}}}}\n";
    configure(&namespace, &pods, config).await;

    // The example, with the tiny guest.
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("example/vmctl");
    namespace.kubectl(&["apply", "--filename", folder.join("rbac.yaml").to_str().unwrap()]);
    let mut prototype = example("prototype.yaml");
    prototype["spec"]["templateValues"]["import"] =
        json!({ "url": format!("http://{address}:8000/guest.img"), "format": "raw", "seconds": 60 });
    prototype["spec"]["cloudInit"] = json!({ "userData": { "message": "of the prototype" } });
    let machine = &mut prototype["spec"]["vm"];
    (machine["maximumCpus"], machine["maximumRam"]) = (json!(1), json!("256Mi"));
    machine["disks"][0]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] = json!("256Mi");
    // There are three at once, beside those of another test.
    prototype["spec"]["resources"] = json!({ "requests": { "cpu": "100m" } });
    namespace.apply(&prototype.to_string());
    let mut service = example("service.yaml");
    service["spec"]["ports"][0]["targetPort"] = json!(8080);
    namespace.apply(&service.to_string());

    // One after the other, because a Pod is ready when its guest has booted.
    namespace.kubectl(&["apply", "--filename", folder.join("stateful-set.yaml").to_str().unwrap()]);
    namespace.kubectl(&["rollout", "status", "statefulset/web", "--timeout=600s"]);
    for name in ["testvm-web-0", "testvm-web-1", "testvm-web-2"] {
        let vm = vms.get(name).await.unwrap();
        assert!(conditions::is_true(&vm.status.unwrap().conditions, conditions::BOOTED), "{name}");
    }
    let list = shown(&namespace, &["get", "statefulset,pods,vms"]);
    assert!(list.contains("statefulset.apps/web   3/3"), "{list}");
    let log = shown(&namespace, &["logs", "web-0"]);
    assert!(log.contains("derived the VM") && log.contains("the guest is up") && !log.contains("WARN"), "{log}");

    // Each guest answers for the Service.
    let ip = namespace.kubectl(&["get", "service", "web", "--output=jsonpath={.spec.clusterIP}"]);
    let fetch = format!(r"/bin/busybox printf 'GET / HTTP/1.0\r\n\r\n' | /bin/busybox nc -w 5 {ip} 80 || true");
    let mut answered: BTreeSet<String> = BTreeSet::new();
    eventually("all guests to answer", LIMIT, async || {
        let page = namespace.kubectl(&["exec", "images", "--", "/bin/busybox", "sh", "-c", &fetch]);
        answered.extend(page.trim().lines().last().filter(|line| line.starts_with("testvm-")).map(str::to_owned));
        (answered.len() == 3).then_some(())
    })
    .await;
    println!("{answered:?}");
    let expected = ["0", "1", "2"].map(|number| format!("testvm-web-{number} of the prototype"));
    assert_eq!(answered, expected.into());
    shown(&namespace, &["get", "endpointslices", "--selector=kubernetes.io/service-name=web"]);

    // One is one: the guests of the others are shut down, and their disks are kept.
    namespace.kubectl(&["scale", "statefulset", "web", "--replicas=1"]);
    gone(&pods, "web-1").await;
    number_of_vms(&vms, 1).await;
    gone(&pods, "testvm-web-1").await;
    namespace.kubectl(&["get", "pvc", "testvm-web-1-system-disk", "testvm-web-2-system-disk"]);

    // The next Pod of the name has the next VM, with the disk of the first one.
    let first = vms.get("testvm-web-0").await.unwrap().metadata.uid;
    namespace.kubectl(&["delete", "pod", "web-0"]);
    namespace.kubectl(&["rollout", "status", "statefulset/web", "--timeout=600s"]);
    let again = eventually("the next VM", LIMIT, async || {
        let vm = vms.get_opt("testvm-web-0").await.unwrap()?;
        (vm.status.as_ref()?.ready == Some(true)).then_some(vm)
    })
    .await;
    assert_ne!(again.metadata.uid, first);
    let console = namespace.log("testvm-web-0");
    assert!(console.contains("guest: starts=2"), "{console}");

    namespace.kubectl(&["scale", "statefulset", "web", "--replicas=0"]);
    number_of_vms(&vms, 0).await;

    // One on each node, which is one here. It is killed: its VM goes with its Pod, and there is another one.
    namespace.kubectl(&["delete", "statefulset", "web"]);
    namespace.kubectl(&["apply", "--filename", folder.join("daemon-set.yaml").to_str().unwrap()]);
    namespace.kubectl(&["rollout", "status", "daemonset/web", "--timeout=600s"]);
    let name =
        namespace.kubectl(&["get", "pods", "--selector=app=web-vmctl", "--output=jsonpath={.items[*].metadata.name}"]);
    let vm = vms.get(&format!("testvm-{name}")).await.unwrap();
    assert!(vm.status.unwrap().ready == Some(true));
    namespace.kubectl(&["delete", "pod", &name, "--grace-period=0", "--force"]);
    eventually("its VM to be gone", LIMIT, async || {
        vms.get_opt(&format!("testvm-{name}")).await.unwrap().is_none().then_some(())
    })
    .await;
    number_of_vms(&vms, 1).await;
    namespace.kubectl(&["delete", "daemonset", "web"]);
    number_of_vms(&vms, 0).await;
    eventually("the Pods to be gone", LIMIT, async || {
        let selector = ListParams::default().labels("app.kubernetes.io/name=vm-runner");
        pods.list(&selector).await.unwrap().items.is_empty().then_some(())
    })
    .await;
    // Deleted with their VM, unlike those of the StatefulSet.
    eventually("its disk to be gone", LIMIT, async || {
        let claims = namespace.kubectl(&["get", "pvc", "--output=name"]);
        (!claims.contains(&name)).then_some(())
    })
    .await;
}
