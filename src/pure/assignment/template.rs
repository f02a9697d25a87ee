//! The template from which the VMs of a pool are made, and what such a VM keeps about that.

use std::collections::{BTreeMap, BTreeSet};

use kube::{Resource, core::DynamicObject};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::{
    api::{VirtualMachine, VmPool},
    object::{POOL_LABEL, POOL_TEMPLATE_ANNOTATION, UNUSED_ANNOTATION},
    ownership::is_made_by_pool,
};

/// From what the VMs of a pool are made.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    labels: Map<String, Value>,
    annotations: Map<String, Value>,
    spec: Value,
    /// The hash of all this.
    pub hash: String,
}

impl Template {
    /// The template of a pool as the API server has it. `None`: it has none, or one that can't be read.
    pub fn read(name: &str, pool: &DynamicObject) -> Option<Self> {
        let template = pool.data.pointer("/spec/template")?;
        let map = |path: &str| template.pointer(path).and_then(Value::as_object).cloned().unwrap_or_default();
        let (mut labels, annotations) = (map("/metadata/labels"), map("/metadata/annotations"));
        labels.insert(POOL_LABEL.into(), name.into());
        let mut spec = template.get("spec").filter(|spec| spec.is_object())?.clone();
        // The definition refuses a power state. It would stop the VMs that are started for an assignment.
        if let Some(Value::Object(vm)) = spec.get_mut("vm") {
            vm.remove("state");
        }
        let pools = spec.get("pools").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
        let pools: BTreeSet<_> = pools.chain([name]).collect();
        spec["pools"] = json!(pools);
        let text = json!([labels, annotations, spec]).to_string();
        let hash = Sha256::digest(text).into_iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Some(Self { labels, annotations, spec, hash })
    }

    /// A VM of the pool with this name and UID, for a server-side apply. `is_unused`: the VM is made, and nobody has had it.
    pub fn vm(&self, pool: &str, uid: Option<&str>, name: &str, is_unused: bool) -> Value {
        let mut annotations = self.annotations.clone();
        // It is not the template's to give.
        annotations.remove(UNUSED_ANNOTATION);
        if is_unused {
            annotations.insert(UNUSED_ANNOTATION.into(), "true".into());
        }
        annotations.insert(POOL_TEMPLATE_ANNOTATION.into(), self.hash.clone().into());
        json!({
            "apiVersion": VirtualMachine::api_version(&()),
            "kind": VirtualMachine::kind(&()),
            "metadata": {
                "name": name, "labels": self.labels, "annotations": annotations,
                "ownerReferences": [{
                    "apiVersion": VmPool::api_version(&()), "kind": VmPool::kind(&()), "name": pool, "uid": uid,
                    "controller": true,
                }],
            },
            "spec": self.spec,
        })
    }
}

/// Which pool made a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// The name of the pool, by the VM's label.
    pub pool: Option<String>,
    /// The UID of the VM's controlling owner.
    pub owner: Option<String>,
    /// The hash of the template that was applied to it last.
    pub template: Option<String>,
    /// Whether a pool has made the VM ([`is_made_by_pool`]). All else could be copied.
    pub is_proven: bool,
}

impl Made {
    /// What the VM's metadata says.
    pub fn read(vm: &VirtualMachine) -> Self {
        let text = |map: &Option<BTreeMap<String, String>>, key: &str| map.as_ref()?.get(key).cloned();
        let mut owners = vm.metadata.owner_references.iter().flatten();
        Self {
            pool: text(&vm.metadata.labels, POOL_LABEL),
            owner: owners.find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.clone()),
            template: text(&vm.metadata.annotations, POOL_TEMPLATE_ANNOTATION),
            is_proven: is_made_by_pool(&vm.metadata),
        }
    }
}
