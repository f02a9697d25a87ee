//! The variables of the runner's container that QEMU templates can read: those in which device plugins name the devices that a Pod got.

use std::{collections::BTreeMap, sync::Arc};

use minijinja::{Error, ErrorKind, Value, value::Object};
use serde::{Serialize, Serializer};

/// How the names begin: of the device plugins of KubeVirt, of NVIDIA (`PCI_RESOURCE_`, `MDEV_PCI_RESOURCE_`, `USB_RESOURCE_`), and of SR-IOV networks
/// (`PCIDEVICE_`). All else in the environment is the runner's own.
pub const PREFIXES: [&str; 4] = ["PCI_RESOURCE_", "MDEV_PCI_RESOURCE_", "USB_RESOURCE_", "PCIDEVICE_"];

/// The variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Environment {
    /// Those of a container.
    Is(BTreeMap<String, String>),
    /// Each variable has this value: for a check of templates where there is no container.
    Each(&'static str),
}

impl Environment {
    /// Of all variables those that templates can read.
    pub fn of(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        Self::Is(variables.into_iter().filter(|(name, _)| is_readable(name)).collect())
    }
}

fn is_readable(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// For templates: `none` for a variable that is not there, and an error for one that is never there.
impl Object for Environment {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let name = key.as_str()?;
        if !is_readable(name) {
            let begins = PREFIXES.join(", ");
            let message =
                format!("env.{name}: of the environment, templates can read variables that begin with {begins}");
            return Some(Error::new(ErrorKind::InvalidOperation, message).into());
        }
        Some(match &**self {
            Self::Is(variables) => variables.get(name).map_or(Value::from(()), |value| Value::from(value.as_str())),
            Self::Each(value) => Value::from(*value),
        })
    }
}

/// As an object of the template engine.
pub(super) fn as_object<S: Serializer>(environment: &Environment, serializer: S) -> Result<S::Ok, S::Error> {
    Value::from_object(environment.clone()).serialize(serializer)
}
