//! Where a viewer finds a display.

use k8s_openapi::{api::core::v1::Service, apimachinery::pkg::util::intstr::IntOrString};

use std::net::IpAddr;

use super::{DisplayError, Protocol, Request, VmHandle};
use crate::api::VirtualMachine;

/// The host that a viewer connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// One that is meant for viewers: by the request, by the VM's spec, or by a load balancer.
    Public(String),
    /// The Pod's address. Outside of the cluster it is often not reachable.
    Pod(String),
}

impl Host {
    /// Its name or address.
    pub fn name(&self) -> &str {
        match self {
            Self::Public(name) | Self::Pod(name) => name,
        }
    }
}

/// A version of the Internet Protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl IpVersion {
    fn is_of(self, address: &str) -> bool {
        match address.parse() {
            Ok(IpAddr::V4(_)) => self == Self::V4,
            Ok(IpAddr::V6(_)) => self == Self::V6,
            Err(_) => false,
        }
    }
}

/// A host and the port of the display there.
#[derive(Debug, PartialEq)]
pub(super) struct Endpoint {
    pub host: Host,
    pub port: u16,
}

impl Endpoint {
    /// The endpoint on the request's server, or the one that the VM has.
    pub async fn find(vm: &VmHandle, resource: &VirtualMachine, request: &Request) -> Result<Self, DisplayError> {
        let port = pod_port(resource);
        if port == 0 {
            return Err(DisplayError::NoPort);
        }
        if let Some(server) = &request.server {
            return Ok(Self { host: Host::Public(server.clone()), port });
        }
        let service = match &resource.spec.load_balancer_service {
            Some(metadata) if metadata.is_empty() => None,
            // Whether VMs have a Service is in the manager's configuration, which this program does not know.
            Some(_) | None => service(vm).await?,
        };
        Self::of(resource, service.as_ref(), request.ip_version).ok_or(DisplayError::NoAddress)
    }

    /// The first that there is: the server of the spec, the load balancer, the Pod with the preferred address or else its first.
    fn of(vm: &VirtualMachine, service: Option<&Service>, ip_version: Option<IpVersion>) -> Option<Self> {
        let port = pod_port(vm);
        if let Some(server) = &vm.spec.vm.display.spice.server {
            return Some(Self { host: Host::Public(server.clone()), port });
        }
        if let Some(balanced) = service.and_then(|service| Self::of_load_balancer(vm, service)) {
            return Some(balanced);
        }
        let addresses = vm.status.as_ref()?.addresses.as_ref()?;
        let is_preferred = |address: &str| ip_version.is_some_and(|version| version.is_of(address));
        let address = addresses.iter().find(|it| is_preferred(&it.address)).or(addresses.first())?;
        Some(Self { host: Host::Pod(address.address.clone()), port })
    }

    /// The address of a load balancer, once it has one, and its port that leads to the display.
    fn of_load_balancer(vm: &VirtualMachine, service: &Service) -> Option<Self> {
        let ingress = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?.first()?;
        let host = ingress.ip.clone().or(ingress.hostname.clone())?;
        let display = i32::from(pod_port(vm));
        let mut ports = service.spec.as_ref()?.ports.as_ref()?.iter();
        let port = ports.find(|port| match &port.target_port {
            Some(IntOrString::Int(target)) => *target == display,
            Some(IntOrString::String(name)) => name == Protocol::of(vm).name(),
            None => port.port == display,
        })?;
        Some(Self { host: Host::Public(host), port: port.port.try_into().ok()? })
    }
}

/// The VM's Service, if it has one and this user may read it.
async fn service(vm: &VmHandle) -> Result<Option<Service>, DisplayError> {
    match vm.api::<Service>().get_opt(vm.name()).await {
        // Most VMs have none, and their users need no right to read Services.
        Err(kube::Error::Api(answer)) if answer.code == 403 => Ok(None),
        answer => answer.map_err(DisplayError::object("Service")),
    }
}

/// The port at which the display listens in the Pod.
pub(super) fn pod_port(vm: &VirtualMachine) -> u16 {
    let display = &vm.spec.vm.display;
    display.vnc.as_ref().map_or(display.spice.port, |vnc| vnc.port)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::tests::vm, *};

    fn public(host: &str, port: u16) -> Option<Endpoint> {
        Some(Endpoint { host: Host::Public(host.into()), port })
    }

    #[test]
    fn the_server_of_the_spec_comes_first() {
        let vm = vm(json!({ "spice": { "port": 5910, "server": "vms.example.org" } }), json!({}));
        assert_eq!(Endpoint::of(&vm, None, None), public("vms.example.org", 5910));
    }

    #[test]
    fn a_load_balancer_comes_before_the_pod() {
        let running = vm(json!({}), json!({ "addresses": [{ "type": "PodIP", "address": "10.0.0.1" }] }));
        let pod = Some(Endpoint { host: Host::Pod("10.0.0.1".into()), port: 5900 });
        assert_eq!(Endpoint::of(&running, None, None), pod);
        let mut service: Service = serde_json::from_value(json!({
            "spec": { "ports": [{ "port": 22, "targetPort": 22 }, { "port": 6000, "targetPort": 5900 }] },
        }))
        .unwrap();
        assert_eq!(Endpoint::of(&running, Some(&service), None), pod, "the load balancer has no address yet");
        let balancer = json!({ "loadBalancer": { "ingress": [{ "hostname": "lb.example.org" }] } });
        service.status = serde_json::from_value(balancer).unwrap();
        assert_eq!(Endpoint::of(&running, Some(&service), None), public("lb.example.org", 6000));
        assert_eq!(Endpoint::of(&vm(json!({}), json!({})), None, None), None);
    }

    #[test]
    fn the_preferred_address_of_the_pod() {
        let address = |addresses: &[&str], version| {
            let addresses = addresses.iter().map(|address| json!({ "type": "PodIP", "address": address }));
            let vm = vm(json!({}), json!({ "addresses": addresses.collect::<Vec<_>>() }));
            Endpoint::of(&vm, None, version).map(|endpoint| endpoint.host.name().to_owned())
        };
        let both = ["fd00::1", "10.0.0.1"];
        assert_eq!(address(&both, None).as_deref(), Some("fd00::1"));
        assert_eq!(address(&both, Some(IpVersion::V4)).as_deref(), Some("10.0.0.1"));
        assert_eq!(address(&both, Some(IpVersion::V6)).as_deref(), Some("fd00::1"));
        assert_eq!(address(&["10.0.0.1"], Some(IpVersion::V6)).as_deref(), Some("10.0.0.1"), "there is no other");
        assert_eq!(address(&[], Some(IpVersion::V6)), None);
    }
}
