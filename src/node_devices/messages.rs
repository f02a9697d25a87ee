//! The messages of the kubelet's device-plugin API, v1beta1
//! (<https://github.com/kubernetes/kubelet/blob/master/pkg/apis/deviceplugin/v1beta1/api.proto>): those calls and fields that this program
//! uses. The numbers are the protocol.

use std::collections::HashMap;

/// The version of the API, for the registration.
pub const VERSION: &str = "v1beta1";
/// The call with which a plugin registers at the kubelet.
pub const REGISTER: &str = "/v1beta1.Registration/Register";
/// The service of a plugin.
pub const DEVICE_PLUGIN: &str = "v1beta1.DevicePlugin";
/// A device that containers may get.
pub const HEALTHY: &str = "Healthy";

/// No fields.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

/// What a plugin wants to be asked. Ours wants nothing.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DevicePluginOptions {
    /// Whether to call PreStartContainer before each start of a container.
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// Whether to call GetPreferredAllocation before each allocation.
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// The registration of a plugin.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterRequest {
    /// The version of the API.
    #[prost(string, tag = "1")]
    pub version: String,
    /// The name of the plugin's socket in the kubelet's folder.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// The name of the resource.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// What the plugin wants to be asked.
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

/// All devices of a resource.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListAndWatchResponse {
    /// The devices.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// One unit of a resource.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Device {
    /// Its name, unique within the resource.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`], or containers do not get it.
    #[prost(string, tag = "2")]
    pub health: String,
}

/// The devices that a Pod's containers get.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// The devices that a container gets.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAllocateRequest {
    /// The devices' names.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// What the containers get.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateResponse {
    /// One for each container, in the order of the request.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// What a container gets.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAllocateResponse {
    /// Environment variables.
    #[prost(map = "string, string", tag = "1")]
    pub envs: HashMap<String, String>,
    /// Device files.
    #[prost(message, repeated, tag = "3")]
    pub devices: Vec<DeviceSpec>,
}

/// A device file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceSpec {
    /// Its path in the container.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Its path on the node.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// What the container may do with it: `r`, `w`, `m` (create device files).
    #[prost(string, tag = "3")]
    pub permissions: String,
}

/// The devices of which the kubelet wants to choose some. The plugin has no preference, so it reads nothing of it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferredAllocationRequest {}

/// No preference.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferredAllocationResponse {}

/// A container is about to start. The plugin has nothing to do then, so it reads nothing of it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreStartContainerRequest {}

/// Nothing.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreStartContainerResponse {}
