//! vmctl: VMs beside the Pods of Deployments and the like, made of the files in `example/vmctl`. The tests play the kubelet: they start the
//! program as it does with the Pods that Kubernetes' controllers make.

use std::{
    fs::{self, File},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};
use vm_operator::{
    api::VirtualMachine,
    object::SET_LABEL,
    vmctl::derive::{POD_UID_ANNOTATION, PROTOTYPE_LABEL},
};

use super::commands::ns;
use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace},
};

/// A node without a kubelet, which [`ns`] makes.
const NODE: &str = "played";

/// A file of the example.
fn example(file: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/vmctl");
    fs::read_to_string(folder.join(file)).unwrap()
}

/// The example's prototype without its template set, which is not installed here.
fn prototype(edit: impl FnOnce(&mut Value)) -> Value {
    let mut vm: Value = serde_yaml::from_str(&example("prototype.yaml")).unwrap();
    let spec = vm["spec"].as_object_mut().unwrap();
    spec.remove("templates");
    spec.remove("templateValues");
    edit(&mut vm);
    vm
}

/// A kubeconfig with the rights of the example's service account.
fn kubeconfig(ns: &ManagedNamespace) -> NamedTempFile {
    let text = fs::read_to_string(ns.cluster.kubeconfig()).unwrap();
    let mut kubeconfig: Value = serde_yaml::from_str(&text).unwrap();
    kubeconfig["users"][0]["user"]["as"] = json!(format!("system:serviceaccount:{}:vmctl", ns.namespace));
    let file = NamedTempFile::new().unwrap();
    fs::write(file.path(), kubeconfig.to_string()).unwrap();
    file
}

/// A namespace with a manager, the example's rights and its prototype.
async fn stage(test: &str) -> (ManagedNamespace, NamedTempFile) {
    let ns = ns(test).await;
    ns.namespace.create(&example("rbac.yaml")).await;
    ns.api::<VirtualMachine>()
        .create(&PostParams::default(), &serde_json::from_value(prototype(|_| ())).unwrap())
        .await
        .unwrap();
    let kubeconfig = kubeconfig(&ns);
    (ns, kubeconfig)
}

/// The program in a Pod; it is killed at the end.
struct Vmctl {
    process: Child,
    folder: TempDir,
    uid: String,
}

impl Vmctl {
    /// Starts it as the kubelet would in that Pod, with the downward API's files.
    fn start(kubeconfig: &Path, pod: &Pod, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let uid = pod.uid().unwrap();
        for (file, text) in [("name", pod.name_any()), ("uid", uid.clone()), ("namespace", pod.namespace().unwrap())] {
            fs::write(folder.path().join(file), text).unwrap();
        }
        let process = Command::new(env!("CARGO_BIN_EXE_vmctl"))
            .args(arguments)
            .arg("--podinfo")
            .arg(folder.path())
            .env("KUBECONFIG", kubeconfig)
            .env("NODE_NAME", NODE)
            .stdin(Stdio::null())
            .stderr(File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        Self { process, folder, uid }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// The kubelet's probe: whether it succeeds, and what it prints.
    fn probe(&self) -> (bool, String) {
        // The kubelet gives a probe the container's environment.
        let probe = Command::new(env!("CARGO_BIN_EXE_vmctl"))
            .args(["ready", "--pod-uid", &self.uid])
            .env("NODE_NAME", NODE)
            .output()
            .unwrap();
        let text = String::from_utf8([probe.stdout, probe.stderr].concat()).unwrap();
        (probe.status.success(), text.trim().to_owned())
    }

    fn term(&self) {
        kill_process(Pid::from_child(&self.process), Signal::TERM).unwrap();
    }

    /// Waits until it ends.
    async fn ended(&mut self) -> ExitStatus {
        let ended = eventually("vmctl to end", 3 * LIMIT, async || {
            self.process.try_wait().unwrap().map(|status| (status, self.log()))
        });
        ended.await.0
    }

    /// Whether its log says that, at last.
    async fn says(&self, words: &str) {
        eventually(&format!("the log to have {words:?}"), LIMIT, async || self.log().contains(words).then_some(()))
            .await;
    }
}

impl Drop for Vmctl {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

/// A Pod as a StatefulSet makes it, but without one.
async fn pod(ns: &ManagedNamespace, name: &str) -> Pod {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": { "terminationGracePeriodSeconds": 90, "containers": [{ "name": "vmctl", "image": "localhost/vmctl:0" }] },
    });
    ns.api::<Pod>().create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
}

async fn delete_now(ns: &ManagedNamespace, pod: &str) {
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    ns.api::<Pod>().delete(pod, &now).await.unwrap();
}

/// The VMs of the prototype, by name.
async fn derived(ns: &ManagedNamespace) -> Vec<VirtualMachine> {
    let label = ListParams::default().labels(&format!("{PROTOTYPE_LABEL}=testvm"));
    ns.api::<VirtualMachine>().list(&label).await.unwrap().items
}

/// Waits for the VM of that name.
async fn vm(ns: &ManagedNamespace, name: &str) -> VirtualMachine {
    let api = ns.api::<VirtualMachine>();
    eventually(&format!("vm {name}"), LIMIT, async || api.get_opt(name).await.unwrap()).await
}

/// Waits until a VM's Pod is being deleted.
async fn asked_to_end(ns: &ManagedNamespace, pod: &str) {
    let api = ns.api::<Pod>();
    // The garbage collector of a new cluster discovers new kinds only every 30 s.
    eventually(&format!("Pod {pod} to be asked to end"), 3 * LIMIT, async || {
        api.get(pod).await.unwrap().metadata.deletion_timestamp.map(drop)
    })
    .await;
}

async fn no_vm(ns: &ManagedNamespace, name: &str) {
    let api = ns.api::<VirtualMachine>();
    // The garbage collector of a new cluster discovers new kinds only every 30 s.
    eventually(&format!("no vm {name}"), 3 * LIMIT, async || api.get_opt(name).await.unwrap().is_none().then_some(()))
        .await;
}

/// Waits until there are so many Pods with that label, and returns them.
async fn pods(ns: &ManagedNamespace, label: &str, number: usize) -> Vec<Pod> {
    let label = ListParams::default().labels(label);
    eventually(&format!("{number} Pods"), LIMIT, async || {
        let pods = ns.api::<Pod>().list(&label).await.unwrap().items;
        (pods.len() == number).then_some(pods)
    })
    .await
}

#[tokio::test]
async fn three_replicas_are_three_vms_and_one_is_one() {
    let (ns, kubeconfig) = stage("vmctl-deployment").await;
    ns.namespace.create(&example("deployment.yaml")).await;
    ns.namespace.create(&example("service.yaml")).await;
    let mut running = vec![];
    for pod in pods(&ns, "app=web-vmctl", 3).await {
        ns.bind_pod(&pod.name_any(), NODE).await;
        let vmctl = Vmctl::start(kubeconfig.path(), &pod, &["testvm", "--disks=ephemeral"]);
        running.push((pod, vmctl));
    }
    for (pod, vmctl) in &running {
        let name = format!("testvm-{}", pod.name_any());
        let made = vm(&ns, &name).await;
        let owners = made.owner_references();
        assert_eq!((owners.len(), &owners[0].uid), (1, &pod.uid().unwrap()));
        assert_eq!(made.labels(), &[("app".into(), "web".into()), (PROTOTYPE_LABEL.into(), "testvm".into())].into());
        let applied = made.managed_fields().iter().find(|entry| entry.manager.as_deref() == Some("vmctl")).unwrap();
        assert_eq!(applied.operation.as_deref(), Some("Apply"));

        // Its Pod is on the same node, and the Service selects it.
        let vms_pod = ns.pod_when(&name, "is there", |_| true).await;
        assert_eq!((vms_pod.labels()["app"].as_str(), vms_pod.labels()[PROTOTYPE_LABEL].as_str()), ("web", "testvm"));
        let affinity = json!(vms_pod.spec.unwrap().affinity);
        let terms = "/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchFields/0";
        assert_eq!(
            affinity.pointer(terms).unwrap(),
            &json!({ "key": "metadata.name", "operator": "In", "values": [NODE] })
        );
        eventually("the probe to say why not", LIMIT, async || {
            let (is_ready, why) = vmctl.probe();
            (!is_ready && why.starts_with("not ready: Starting: ")).then_some(())
        })
        .await;
        ns.bind_pod(&name, NODE).await;
        ns.report(&name, true, "Started").await;
        eventually("the probe to succeed", LIMIT, async || (vmctl.probe() == (true, "ready".into())).then_some(()))
            .await;
        assert!(!vmctl.log().contains("WARN"), "{}", vmctl.log());
    }
    let service = ns.api::<Service>().get("web").await.unwrap().spec.unwrap().selector.unwrap();
    let selected: Vec<String> = service.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let mut served: Vec<String> = pods(&ns, &selected.join(","), 3).await.iter().map(ResourceExt::name_any).collect();
    served.sort();
    let mut expected: Vec<String> = running.iter().map(|(pod, _)| format!("testvm-{}", pod.name_any())).collect();
    expected.sort();
    assert_eq!(served, expected, "the Service leads to the guests, and not to vmctl's Pods");
    let prototype = vm(&ns, "testvm").await;
    assert!(prototype.status.unwrap_or_default().created != Some(true), "the prototype itself does not run");

    // The claims go with their VMs.
    for name in &expected {
        eventually(&format!("{name} to own its claims"), LIMIT, async || {
            let claims = ns.api::<PersistentVolumeClaim>();
            let mut owned = 0;
            for claim in [format!("{name}-system-disk"), format!("{name}-runner-data")] {
                let claim = claims.get(&claim).await.unwrap();
                owned += usize::from(claim.owner_references().iter().any(|owner| owner.name == *name));
            }
            (owned == 2).then_some(())
        })
        .await;
    }

    ns.namespace.kubectl(&["scale", "deployment", "web", "--replicas=1"]);
    let going = eventually("two Pods to be deleted", LIMIT, async || {
        let pods = pods(&ns, "app=web-vmctl", 3).await;
        let going: Vec<String> =
            pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_some()).map(ResourceExt::name_any).collect();
        (going.len() == 2).then_some(going)
    })
    .await;
    for (pod, vmctl) in running.iter_mut().filter(|(pod, _)| going.contains(&pod.name_any())) {
        let name = format!("testvm-{}", pod.name_any());
        let claims = ns.api::<PersistentVolumeClaim>();
        let disk = format!("{name}-system-disk");
        // As if SIGTERM came before vmctl had heard of the claim.
        let unowned = Patch::Merge(json!({ "metadata": { "ownerReferences": null } }));
        claims.patch(&disk, &PatchParams::default(), &unowned).await.unwrap();
        vmctl.term();
        asked_to_end(&ns, &name).await;
        let is_going = vm(&ns, &name).await.metadata.deletion_timestamp.is_some();
        assert!(is_going && vmctl.process.try_wait().unwrap().is_none(), "VM and vmctl stay until the guest is down");
        assert_eq!(vmctl.probe(), (false, "not ready: the VM is being deleted".into()));
        ns.remove_pod(&name).await;
        assert!(vmctl.ended().await.success());
        assert!(vmctl.log().contains("the guest is down, and the VM is deleted"), "{}", vmctl.log());
        ns.remove_pod(&pod.name_any()).await;
        eventually("its disk to be gone", 3 * LIMIT, async || {
            claims.get_opt(&disk).await.unwrap().is_none().then_some(())
        })
        .await;
    }
    let left: Vec<String> = derived(&ns).await.iter().map(ResourceExt::name_any).collect();
    let stays = running.iter().find(|(pod, _)| !going.contains(&pod.name_any())).unwrap();
    assert_eq!(left, [format!("testvm-{}", stays.0.name_any())]);
    assert_eq!(stays.1.probe(), (true, "ready".into()), "the third one is not disturbed");
}

#[tokio::test]
async fn a_restarted_container_keeps_its_vm_and_the_next_pod_of_the_name_gets_a_new_one_with_its_disks() {
    let (ns, kubeconfig) = stage("vmctl-names").await;
    let first = pod(&ns, "web-0").await;
    let mut vmctl = Vmctl::start(kubeconfig.path(), &first, &["testvm"]);
    let made = vm(&ns, "testvm-web-0").await;
    vmctl.says("derived the VM").await;
    ns.pod_when("testvm-web-0", "is there", |_| true).await;
    ns.bind_pod("testvm-web-0", NODE).await;
    let claims = ns.api::<PersistentVolumeClaim>();
    let disk = claims.get("testvm-web-0-system-disk").await.unwrap();
    assert!(disk.owner_references().is_empty(), "a kept disk is nobody's");

    // The container ends without a word, and is started again: also if the prototype is gone meanwhile.
    vmctl.process.kill().unwrap();
    vmctl.process.wait().unwrap();
    ns.api::<VirtualMachine>().delete("testvm", &DeleteParams::default()).await.unwrap();
    let again = Vmctl::start(kubeconfig.path(), &first, &["testvm"]);
    again.says("this Pod's VM exists already").await;
    assert_eq!(vm(&ns, "testvm-web-0").await.uid(), made.uid());
    let manifest = serde_json::from_value(prototype(|_| ())).unwrap();
    ns.api::<VirtualMachine>().create(&PostParams::default(), &manifest).await.unwrap();

    // A node that was lost: the Pod is removed by force, its program with it, and there is a new one of the name. The guest still runs.
    drop(again);
    delete_now(&ns, "web-0").await;
    let second = pod(&ns, "web-0").await;
    assert_ne!(first.uid(), second.uid());
    let next = Vmctl::start(kubeconfig.path(), &second, &["testvm"]);
    // The guest is still there, and its disks with it.
    asked_to_end(&ns, "testvm-web-0").await;
    ns.remove_pod("testvm-web-0").await;
    let vms = ns.api::<VirtualMachine>();
    let made_next = eventually("the VM of the new Pod", 3 * LIMIT, async || {
        let found = vms.get_opt("testvm-web-0").await.unwrap()?;
        (found.annotations()[POD_UID_ANNOTATION] == second.uid().unwrap()).then_some(found)
    })
    .await;
    let is_new = |pod: &Pod| {
        pod.metadata.deletion_timestamp.is_none() && pod.owner_references()[0].uid == made_next.uid().unwrap()
    };
    ns.pod_when("testvm-web-0", "is the new VM's", is_new).await;
    assert_eq!(claims.get("testvm-web-0-system-disk").await.unwrap().uid(), disk.uid(), "the disk is the same");

    // The lost node answers again, and what still runs of the first Pod is started there once more.
    let mut former = Vmctl::start(kubeconfig.path(), &first, &["testvm"]);
    assert_eq!(former.ended().await.code(), Some(1));
    former.says("/web-0, which has taken the place of this one").await;
    let still = vm(&ns, "testvm-web-0").await;
    assert!(still.metadata.deletion_timestamp.is_none() && still.uid() == made_next.uid(), "it is the next Pod's");
    drop(next);
}

#[tokio::test]
async fn vms_of_pods_that_were_killed_or_evicted_are_deleted() {
    let (ns, kubeconfig) = stage("vmctl-killed").await;
    let start = |pod: &Pod| Vmctl::start(kubeconfig.path(), pod, &["testvm", "--disks=ephemeral"]);
    // Killed: the garbage collector deletes the VM, and with it its claims.
    let killed = pod(&ns, "killed").await;
    let vmctl = start(&killed);
    vm(&ns, "testvm-killed").await;
    let claims = ns.api::<PersistentVolumeClaim>();
    eventually("the claim to be owned", LIMIT, async || {
        let claim = claims.get_opt("testvm-killed-system-disk").await.unwrap()?;
        (!claim.owner_references().is_empty()).then_some(())
    })
    .await;
    drop(vmctl);
    delete_now(&ns, "killed").await;
    no_vm(&ns, "testvm-killed").await;
    eventually("its disk to be gone", 3 * LIMIT, async || {
        claims.get_opt("testvm-killed-system-disk").await.unwrap().is_none().then_some(())
    })
    .await;

    // Evicted: the object of the Pod stays, and so would the VM. The next vmctl of the prototype deletes it, and no other one.
    let (evicted, lives, next) = (pod(&ns, "evicted").await, pod(&ns, "lives").await, pod(&ns, "next").await);
    let vmctl = start(&evicted);
    let other = start(&lives);
    let to_be_evicted = vm(&ns, "testvm-evicted").await;
    vm(&ns, "testvm-lives").await;
    // A person's copy.
    let foreign = prototype(|vm| {
        vm["metadata"]["name"] = json!("by-hand");
        vm["metadata"]["annotations"] = json!(to_be_evicted.annotations());
        vm["metadata"]["labels"][PROTOTYPE_LABEL] = json!("testvm");
    });
    ns.api::<VirtualMachine>().create(&PostParams::default(), &serde_json::from_value(foreign).unwrap()).await.unwrap();
    drop(vmctl);
    let status = json!({ "status": { "phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory." } });
    ns.api::<Pod>().patch_status("evicted", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    let sweeper = start(&next);
    vm(&ns, "testvm-next").await;
    no_vm(&ns, "testvm-evicted").await;
    // The first look of the other one may come as late as this.
    let said = || [sweeper.log(), other.log()].concat().contains("deleted the VM of a Pod that is gone");
    eventually("one of them to say so", LIMIT, async || said().then_some(())).await;
    assert!(ns.api::<Pod>().get_opt("evicted").await.unwrap().is_some());
    let names: Vec<String> = derived(&ns).await.iter().map(ResourceExt::name_any).collect();
    assert_eq!(names, ["by-hand", "testvm-lives", "testvm-next"], "what no vmctl made has only the label, and stays");
    drop(other);

    // Somebody deletes the VM: the container ends, and the kubelet starts it again, with a new VM.
    let mut sweeper = sweeper;
    ns.api::<VirtualMachine>().delete("testvm-next", &DeleteParams::default()).await.unwrap();
    assert_eq!(sweeper.ended().await.code(), Some(1));
    sweeper.says("was deleted by somebody else").await;
}

#[tokio::test]
async fn a_prototype_and_a_vm_may_be_in_other_namespaces() {
    let (ns, kubeconfig) = stage("vmctl-elsewhere").await;
    let elsewhere = ns.cluster.namespace("vmctl-prototypes").await;
    let there = Api::<VirtualMachine>::namespaced(ns.client.clone(), elsewhere.name());
    let golden = prototype(|vm| vm["metadata"]["name"] = json!("golden"));
    there.create(&PostParams::default(), &serde_json::from_value(golden).unwrap()).await.unwrap();
    let pod = pod(&ns, "web-0").await;
    let proto = format!("--proto-namespace={elsewhere}");

    // It may not read the prototype yet.
    let mut refused = Vmctl::start(kubeconfig.path(), &pod, &["golden", &proto]);
    assert_eq!(refused.ended().await.code(), Some(1));
    assert!(refused.log().contains("cannot get resource \"vms\""), "{}", refused.log());
    elsewhere.create(&example("rbac.yaml")).await;
    elsewhere.kubectl(&[
        "create",
        "rolebinding",
        "other",
        "--role=vmctl",
        &format!("--serviceaccount={}:vmctl", ns.namespace),
    ]);
    let bound = || async {
        let mut vmctl = Vmctl::start(kubeconfig.path(), &pod, &["golden", &proto]);
        let log = eventually("an answer", LIMIT, async || {
            let log = vmctl.log();
            (log.contains("derived the VM") || vmctl.process.try_wait().unwrap().is_some()).then_some(log)
        });
        log.await.contains("derived the VM").then_some(vmctl)
    };
    let mut vmctl = eventually("the right to reach the authorizer", LIMIT, bound).await;
    assert_eq!(vm(&ns, "golden-web-0").await.owner_references().len(), 1, "Pod and VM are in one namespace");
    vmctl.term();
    assert!(vmctl.ended().await.success());

    // The VM too: the garbage collector would delete it at once if the Pod were its owner.
    let mut vmctl = Vmctl::start(kubeconfig.path(), &pod, &["golden", &proto, &format!("--namespace={elsewhere}")]);
    vmctl.says("so Kubernetes can't delete the VM with the Pod").await;
    let made = there.get("golden-web-0").await.unwrap();
    assert!(made.owner_references().is_empty());
    vmctl.term();
    assert!(vmctl.ended().await.success());
    assert!(there.get_opt("golden-web-0").await.unwrap().is_none());
}

#[tokio::test]
async fn what_can_not_be_derived_ends_the_program_with_the_reason() {
    let (ns, kubeconfig) = stage("vmctl-refused").await;
    let place = ns.namespace.name();
    let vms = ns.api::<VirtualMachine>();
    let web = pod(&ns, "web-0").await;
    for (name, edit) in [
        ("shared", json!({ "accessModes": ["ReadWriteMany"], "resources": { "requests": { "storage": "1Gi" } } })),
        ("fixed", json!({ "volumeName": "pv-1", "resources": { "requests": { "storage": "1Gi" } } })),
        ("testvm-web-0", json!({ "resources": { "requests": { "storage": "1Gi" } } })),
    ] {
        let vm = prototype(|vm| {
            vm["metadata"]["name"] = json!(name);
            vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"] = edit;
        });
        vms.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
    }
    let taken = vms.get("testvm-web-0").await.unwrap();
    for (arguments, code, words) in [
        (&["nothing"] as &[&str], 1, format!("there is no prototype: vm {place}/nothing does not exist")),
        (&["shared"], 1, format!("the prototype {place}/shared has a disk with the access mode ReadWriteMany")),
        (&["fixed"], 1, "volumeName: pv-1".into()),
        (&["testvm"], 1, format!("vm {place}/testvm-web-0 exists already: no vmctl has made it, so it is left alone")),
        (&[], 2, "required arguments were not provided".into()),
    ] {
        let mut vmctl = Vmctl::start(kubeconfig.path(), &web, arguments);
        let status = vmctl.ended().await;
        assert!(status.code() == Some(code) && vmctl.log().contains(&words), "{arguments:?}: {status} {}", vmctl.log());
    }
    let still = vms.get("testvm-web-0").await.unwrap();
    assert_eq!((still.uid(), &still.spec), (taken.uid(), &taken.spec), "a VM that is not ours is not touched");
    let nobody = Command::new(env!("CARGO_BIN_EXE_vmctl"))
        .args(["testvm", "--podinfo", "/nowhere", "--node", "a"])
        .output()
        .unwrap();
    let said = String::from_utf8(nobody.stderr).unwrap();
    assert!(nobody.status.code() == Some(2) && said.contains("the name of this Pod is not known"), "{said}");

    // The garbage collector would delete its VM at once.
    let mut nowhere = web.clone();
    nowhere.metadata.name = Some("nowhere".into());
    let mut vmctl = Vmctl::start(kubeconfig.path(), &nowhere, &["testvm"]);
    assert_eq!(vmctl.ended().await.code(), Some(1));
    vmctl.says(&format!("there is no Pod {place}/nowhere with the UID {}", web.uid().unwrap())).await;

    // A Deployment's Pods have new names each time.
    let deployment = example("deployment.yaml").replace("replicas: 3", "replicas: 1");
    ns.namespace.create(&deployment).await;
    let pod = &pods(&ns, "app=web-vmctl", 1).await[0];
    let mut vmctl = Vmctl::start(kubeconfig.path(), pod, &["testvm"]);
    assert_eq!(vmctl.ended().await.code(), Some(1));
    vmctl.says("a ReplicaSet gives each of its Pods a new name").await;
    let forced = Vmctl::start(kubeconfig.path(), pod, &["testvm", "--force"]);
    vm(&ns, &format!("testvm-{}", pod.name_any())).await;
    drop(forced);

    // A claim that a template fixes would be that of all VMs.
    let template = "{% extends \"builtin/pod.yaml.j2\" %}\n{% block volumes %}\n    - name: shared\n      persistentVolumeClaim: {claimName: shared}\n{% endblock %}\n";
    let set = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "templates-fixed", "labels": { SET_LABEL: "fixed" } },
        "data": { "pod.yaml.j2": template },
    });
    ns.namespace.create(&set.to_string()).await;
    let fixed = prototype(|vm| {
        vm["metadata"]["name"] = json!("fixed-in-template");
        vm["spec"]["templates"] = json!({ "set": "fixed" });
    });
    vms.create(&PostParams::default(), &serde_json::from_value(fixed).unwrap()).await.unwrap();
    let web = self::pod(&ns, "web-2").await;
    let mut vmctl = Vmctl::start(kubeconfig.path(), &web, &["fixed-in-template"]);
    assert_eq!(vmctl.ended().await.code(), Some(1));
    vmctl.says("may write to the claim shared, which is no disk of that VM alone").await;
    no_vm(&ns, "fixed-in-template-web-2").await;

    // Without the right to list Pods it works too, and says what it can't do.
    ns.namespace.kubectl(&[
        "patch",
        "role",
        "vmctl",
        "--type=json",
        "--patch",
        r#"[{"op":"remove","path":"/rules/1"}]"#,
    ]);
    let other = self::pod(&ns, "web-1").await;
    let poor = Vmctl::start(kubeconfig.path(), &other, &["testvm"]);
    poor.says("VMs of Pods that are gone can't be found, and are not deleted").await;
    assert_eq!(vm(&ns, "testvm-web-1").await.annotations()[POD_UID_ANNOTATION], other.uid().unwrap());
}

#[tokio::test]
async fn the_api_server_takes_all_examples_and_refuses_the_originals_as_the_page_says() {
    let ns = ns("vmctl-examples").await;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/vmctl");
    let mut files = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name == "kustomization.yaml" {
            continue;
        }
        files += 1;
        let path = path.to_str().unwrap();
        ns.namespace.kubectl(&["apply", "--dry-run=server", "--validate=strict", "--filename", path]);
    }
    assert!(files >= 7, "{files}");
    // With what the autoscaler's file adds to the kustomization.
    let lines = example("hpa.yaml");
    let lines: Vec<&str> = lines.lines().filter_map(|line| line.strip_prefix("#   ")).collect();
    let added: Value = serde_yaml::from_str(&lines.join("\n")).unwrap();
    let mut kustomization: Value = serde_yaml::from_str(&example("kustomization.yaml")).unwrap();
    kustomization["resources"].as_array_mut().unwrap().extend(added["resources"].as_array().unwrap().clone());
    kustomization["patches"] = added["patches"].clone();
    let scaled = tempfile::tempdir().unwrap();
    fs::write(scaled.path().join("kustomization.yaml"), kustomization.to_string()).unwrap();
    for file in ["rbac.yaml", "prototype.yaml", "deployment.yaml", "service.yaml", "hpa.yaml"] {
        fs::write(scaled.path().join(file), example(file)).unwrap();
    }
    let built = ns.cluster.kubectl(&["kustomize", scaled.path().to_str().unwrap()]);
    assert!(built.contains("kind: HorizontalPodAutoscaler") && !built.contains(" replicas:"), "{built}");
    ns.namespace.kubectl(&["apply", "--dry-run=server", "--kustomize", folder.to_str().unwrap()]);
    ns.namespace.create(&example("rbac.yaml")).await;
    ns.cluster.kubectl(&["label", "namespace", ns.namespace.name(), "pod-security.kubernetes.io/enforce=restricted"]);
    for file in ["deployment.yaml", "stateful-set.yaml", "daemon-set.yaml"] {
        let workload: Value = serde_yaml::from_str(&example(file)).unwrap();
        let spec = &workload["spec"]["template"]["spec"];
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "x" }, "spec": spec });
        ns.namespace.kubectl(&[
            "apply",
            "--dry-run=server",
            "--filename",
            &written(&pod.to_string()).path().to_string_lossy(),
        ]);
        let prototype: Value = serde_yaml::from_str(&example("prototype.yaml")).unwrap();
        let guest = prototype["spec"]["vm"]["powerdownTimeout"].as_u64().unwrap();
        assert!(spec["terminationGracePeriodSeconds"].as_u64().unwrap() >= guest + 15, "{file}");
    }

    // The YAML of the original.
    let page = fs::read_to_string(folder.join("../../docs/vmctl.md")).unwrap();
    let pod = json!({
        "metadata": { "labels": { "app": "vmctl" } },
        "spec": { "containers": [{
            "name": "vmctl", "image": "quay.io/fabiand/vmctl", "imagePullPolicy": "IfNotPresent", "args": ["testvm"],
            "serviceAccountName": "default",
        }] },
    });
    let workload = |kind: &str| {
        json!({
            "apiVersion": "apps/v1", "kind": kind, "metadata": { "name": "vmctl", "labels": { "app": "vmctl" } },
            "spec": { "selector": { "matchLabels": { "app": "vmctl" } }, "template": pod },
        })
    };
    let preset = json!({
        "apiVersion": "settings.k8s.io/v1alpha1", "kind": "PodPreset",
        "metadata": { "name": "have-podinfo", "selector": { "matchLabels": { "app": "vmctl" } } },
        "spec": { "volumeMounts": [], "volumes": [] },
    });
    for original in [workload("Deployment"), workload("Daemonset"), preset] {
        let file = written(&original.to_string());
        let place = [
            "--namespace",
            ns.namespace.name(),
            "apply",
            "--dry-run=server",
            "--filename",
            file.path().to_str().unwrap(),
        ];
        let refused = ns.cluster.try_kubectl(&place).expect_err("a refusal");
        let said = refused.replace(file.path().to_str().unwrap(), "vmctl.yaml");
        println!("{said}");
        let lines = said.lines().filter(|line| line.starts_with("error") || line.starts_with("Error"));
        for line in lines {
            assert!(page.contains(line), "docs/vmctl.md lacks the line\n{line}");
        }
    }
    let help = Command::new(env!("CARGO_BIN_EXE_vmctl")).arg("-h").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let options = help.lines().filter_map(|line| line.trim().split_once("--").map(|(_, rest)| rest));
    let mut found = 0;
    for option in options
        .map(|rest| rest.split([' ', '=', ',', ']', '.']).next().unwrap())
        .filter(|name| !["", "help", "version"].contains(name))
    {
        found += 1;
        assert!(
            page.contains(&format!("`--{option}`")) || page.contains(&format!("`--{option} ")),
            "docs/vmctl.md lacks --{option}"
        );
    }
    assert!(found >= 10, "{help}");
}

fn written(text: &str) -> NamedTempFile {
    let file = NamedTempFile::with_suffix(".yaml").unwrap();
    fs::write(file.path(), text).unwrap();
    file
}
