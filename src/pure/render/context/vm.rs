//! `vm` in the context: the resource as an object whose large parts are converted only if a template asks for them.

use std::sync::{Arc, OnceLock};

use kube::{Resource, ResourceExt};
use minijinja::value::{Enumerator, Object, Serde};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::api::{VirtualMachine, VirtualMachineSpec, VirtualMachineStatus};

/// `vm`. Few templates use `vm.spec` and `vm.status`, which are large.
#[derive(Debug)]
pub(super) struct Vm {
    metadata: Lazy<Value>,
    spec: Lazy<VirtualMachineSpec>,
    status: Lazy<Option<VirtualMachineStatus>>,
}

/// A value that is converted for templates when the first one asks for it.
#[derive(Debug)]
struct Lazy<T>(T, OnceLock<minijinja::Value>);

impl<T: Serialize> Lazy<T> {
    fn of(data: T) -> Self {
        Self(data, OnceLock::new())
    }

    fn get(&self) -> minijinja::Value {
        self.1.get_or_init(|| Serde(&self.0).into()).clone()
    }
}

/// Passes `vm` to minijinja as an object instead of a copy.
pub(super) fn as_object<S: Serializer>(vm: &Arc<Vm>, serializer: S) -> Result<S::Ok, S::Error> {
    minijinja::Value::from_dyn_object(vm.clone()).serialize(serializer)
}

impl Vm {
    pub(super) fn of(vm: &VirtualMachine) -> Arc<Self> {
        let metadata = json!({
            "name": vm.name_any(), "namespace": vm.namespace(), "uid": vm.uid(),
            "labels": vm.labels(), "annotations": vm.annotations(),
            "creationTimestamp": vm.metadata.creation_timestamp,
        });
        Arc::new(Self {
            metadata: Lazy::of(metadata),
            spec: Lazy::of(vm.spec.clone()),
            status: Lazy::of(vm.status.clone().map(VirtualMachineStatus::for_templates)),
        })
    }
}

impl Object for Vm {
    fn get_value(self: &Arc<Self>, key: &minijinja::Value) -> Option<minijinja::Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<minijinja::Value> {
        Some(match key {
            "apiVersion" => VirtualMachine::api_version(&()).into(),
            "kind" => VirtualMachine::kind(&()).into(),
            "metadata" => self.metadata.get(),
            "spec" => self.spec.get(),
            "status" => self.status.get(),
            _ => return None,
        })
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["apiVersion", "kind", "metadata", "spec", "status"])
    }
}
