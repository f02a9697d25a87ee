//! A Pod that helps the guest, made by a template; and one that only says that it does.

use serde_json::json;
use vm_operator::object::{ROLE_ANNOTATION, SET_LABEL};

use super::*;

/// It is ready some seconds after it has started.
const HELPER: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  name: {{ vm.metadata.name ~ "-helper" }}
  annotations: {vmoperator.jdrupes.org/role: helper}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - name: helper
      image: localhost/vm-demo-guest:0.1.0
      imagePullPolicy: IfNotPresent
      command: [/bin/busybox, sh, -c, "sleep 5; mkdir /tmp/www; exec /bin/busybox httpd -f -p 8000 -h /tmp/www"]
      readinessProbe: {tcpSocket: {port: 8000}, periodSeconds: 1}
"#;

#[tokio::test]
async fn a_guest_runs_with_a_helper_of_its_templates_and_not_beside_what_pretends_to_be_one() {
    let _shared = NODE.read().await;
    let Stage { namespace, vms, pods, .. } = Stage::set("helpers").await;
    let set = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": "vm-operator-templates-helped", "labels": { SET_LABEL: "helped" } },
        "data": { "helper.yaml.j2": HELPER },
    });
    namespace.apply(&set.to_string());
    let mut manifest = demo(&namespace);
    manifest["spec"]["templates"] = json!({ "set": "helped" });
    namespace.apply(&manifest.to_string());
    let vm = wait_for(&vms, "demo", conditions::BOOTED, true).await;
    let (helper, guest) = (pods.get("demo-helper").await.unwrap(), pods.get("demo").await.unwrap());
    let status = helper.status.unwrap();
    let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready").unwrap();
    assert!(ready.status == "True" && ready.last_transition_time <= guest.metadata.creation_timestamp);
    assert_eq!(vm.status.unwrap().pod_uid, guest.metadata.uid, "the status is about the guest's Pod");
    let (code, told) = namespace.kubectl_vm(&["explain", "demo"]);
    assert_eq!(code, 0, "{told}");

    // A restart makes both anew, the helper after its guest is gone.
    namespace.kubectl(&["annotate", "vm", "demo", "vmoperator.jdrupes.org/restartedAt=monday"]);
    let second = eventually("another Pod", LIMIT, async || {
        let before = pods.get_opt("demo-helper").await.unwrap();
        let now = pods.get_opt("demo").await.unwrap();
        let is_left = |pod: &Pod| pod.metadata.deletion_timestamp.is_none() && pod.metadata.uid == helper.metadata.uid;
        if now.as_ref().is_some_and(|pod| pod.metadata.uid == guest.metadata.uid) {
            assert!(before.as_ref().is_some_and(is_left), "the guest has it to its end");
        }
        now.filter(|pod| pod.metadata.uid != guest.metadata.uid)
    })
    .await;
    let new = pods.get("demo-helper").await.unwrap();
    assert_ne!(new.metadata.uid, helper.metadata.uid);
    assert!(new.metadata.creation_timestamp <= second.metadata.creation_timestamp);
    wait_for(&vms, "demo", conditions::BOOTED, true).await;

    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", r#"{"spec":{"vm":{"state":"Stopped"}}}"#]);
    gone(&pods, "demo-helper").await;
    assert!(pods.get_opt("demo").await.unwrap().is_none());
    let vm = wait_for(&vms, "demo", conditions::READY, true).await;
    assert_eq!(vm.status.unwrap().phase.as_deref(), Some("Stopped"));

    // What a person makes is no helper, whatever it says: it can write to the disk.
    let claim = manifest["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["name"].as_str().unwrap();
    let claim = format!("demo-{claim}-disk");
    let pretender = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "pretender", "annotations": { ROLE_ANNOTATION: "helper" } },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "helper", "image": "localhost/vm-demo-guest:0.1.0", "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/busybox", "sleep", "1d"],
            }],
            "volumes": [{ "name": "disk", "persistentVolumeClaim": { "claimName": claim } }],
        },
    });
    namespace.apply(&pretender.to_string());
    namespace.kubectl(&["wait", "--for=condition=Ready", "pod/pretender", "--timeout=600s"]);
    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", r#"{"spec":{"vm":{"state":"Running"}}}"#]);
    eventually("it to be held", LIMIT, async || {
        (reason(&vms.get("demo").await.unwrap(), conditions::READY) == "ClaimInUse").then_some(())
    })
    .await;
    assert!(pods.get_opt("demo").await.unwrap().is_none());
    namespace.kubectl(&["delete", "pod", "pretender"]);
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    namespace.kubectl(&["delete", "vm", "demo"]);
    gone(&pods, "demo").await;
}
