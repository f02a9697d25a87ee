//! The networks of a VM: `spec.vm.networks`.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schema;

/// The most networks of a VM.
pub const MOST_NETWORKS: u32 = 32;

/// A network interface: exactly one of `tap`, `user` and `pod`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema, PartialEq, Eq)]
#[x_kube(validation = Rule::new("[has(self.tap), has(self.user), has(self.pod)].filter(x, x).size() == 1").message("a network is exactly one of tap, user and pod"))]
pub struct Network {
    /// A name that no other network of the VM has. By it the network keeps its addresses also if everything else of it is changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: Option<String>,
    /// An interface on a bridge of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<TapNetwork>,
    /// QEMU's user networking. The guest reaches the network through the Pod; nothing can connect to the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserNetwork>,
    /// The guest uses the Pod's address, so Services reach it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodNetwork>,
}

impl Network {
    /// The MAC address in the spec, if there is one.
    pub fn mac(&self) -> Option<&str> {
        let tap = self.tap.as_ref().and_then(|tap| tap.mac.as_deref());
        tap.or_else(|| self.pod.as_ref().and_then(|pod| pod.mac.as_deref()))
    }
}

/// An interface on a bridge.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct TapNetwork {
    /// The network card that the guest sees. Default: `virtio-net`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::qemu_text")]
    pub device: Option<String>,
    /// The bridge. Default: `br0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15), regex(pattern = r"^[^/:\s\x00-\x1f\x7f-\x9f]+$"))]
    pub bridge: Option<String>,
    /// The MAC address. Default: generated once and kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::mac_address")]
    pub mac: Option<String>,
}

/// QEMU's user networking.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct UserNetwork {
    /// The network card that the guest sees. Default: `virtio-net`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::qemu_text")]
    pub device: Option<String>,
    /// The network that the guest sees, such as `10.0.2.0/24`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::qemu_text")]
    pub net: Option<String>,
}

/// The Pod's own network.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct PodNetwork {
    /// The network card that the guest sees. Default: `virtio-net`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::qemu_text")]
    pub device: Option<String>,
    /// The MAC address. Default: generated once and kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::mac_address")]
    pub mac: Option<String>,
}
