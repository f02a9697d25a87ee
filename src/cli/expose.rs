//! `kubectl vm expose`: a Service that leads to the guest of a VM, also before that runs.
//!
//! The Service selects the VM's Pod by labels that the Pod has whatever the templates are, so it leads to each Pod that the VM will have. It has
//! neither the VM as its owner nor the labels of the VM's objects: it is the person's, and the manager leaves it alone.

use std::collections::BTreeMap;

use clap::{Args, ValueEnum};
use clap_complete::engine::ArgValueCompleter;
use k8s_openapi::{
    api::{
        core::v1::{Service, ServicePort, ServiceSpec},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, ListParams, ObjectMeta, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use super::{
    cluster::ClusterOptions,
    format::ObjectFormat,
    in_pod::{read_vm, unreachable},
    output::{Exit, Failure, Output, note},
    vms::{failure, refused_about, title, vm_names},
    write::DryRun,
};
use crate::{
    api::VirtualMachine,
    object::{APP_NAME, COMPONENT_LABEL, CONTAINER_NAME, INSTANCE_LABEL},
    ownership::COMMAND_MANAGER,
};

/// The ports of a Pod that lead to its guest, unless a template says otherwise (docs/virtual-machines.md).
const LAST_PORT: u16 = 9999;
/// How long the endpoints of a running guest may take to be written, and how often they are looked for.
const ENDPOINTS: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(200);

#[derive(Args)]
pub(super) struct Options {
    /// The VM. It need not run.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vm_names))]
    vm: String,
    /// The port of the Service.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// The port of the guest. Default: the same.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    target_port: Option<u16>,
    /// The name of the Service. Default: VM-PORT. A Service with the name of the VM itself is that of its display, if it has one.
    #[arg(long)]
    name: Option<String>,
    /// What the Service is reached by: an address in the cluster, also a port of each node, or also a load balancer.
    #[arg(long = "type", value_name = "TYPE", default_value = "ClusterIP", ignore_case = true)]
    type_: Type,
    /// The protocol.
    #[arg(long, default_value = "TCP", ignore_case = true)]
    protocol: Protocol,
    /// The name of the port, which Services with several ports have.
    #[arg(long, value_name = "NAME")]
    port_name: Option<String>,
    /// The port of each node, of the types NodePort and LoadBalancer. Default: a free one.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    node_port: Option<u16>,
    /// The address in the cluster; None for a name alone, whose addresses are those of the Pods. Default: a free one.
    #[arg(long, value_name = "ADDRESS")]
    cluster_ip: Option<String>,
    /// More addresses, which lead to a node. Can be given several times.
    #[arg(long, value_name = "ADDRESS")]
    external_ip: Vec<String>,
    /// The address that the load balancer should have, if the cluster's can do that.
    #[arg(long, value_name = "ADDRESS")]
    load_balancer_ip: Option<String>,
    /// The families of its addresses, the first one first. Default: that of the cluster.
    #[arg(long, value_name = "FAMILY", value_delimiter = ',', ignore_case = true)]
    ip_family: Vec<Family>,
    /// Whether it has addresses of both families.
    #[arg(long, value_name = "POLICY", ignore_case = true)]
    ip_family_policy: Option<FamilyPolicy>,
    /// Labels of the Service.
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = label)]
    labels: Vec<(String, String)>,
    /// Say what would be done, without doing it: client asks only what the VM is, server also whether the Service would be accepted.
    #[arg(long, value_name = "HOW")]
    dry_run: Option<DryRun>,
    /// Print the Service, instead of lines about it.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<ObjectFormat>,
    /// The name under which the API server notes the change.
    #[arg(long, value_name = "NAME", default_value = COMMAND_MANAGER)]
    field_manager: String,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Type {
    #[value(name = "ClusterIP")]
    ClusterIp,
    #[value(name = "NodePort")]
    NodePort,
    #[value(name = "LoadBalancer")]
    LoadBalancer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Protocol {
    #[value(name = "TCP")]
    Tcp,
    #[value(name = "UDP")]
    Udp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Family {
    #[value(name = "IPv4")]
    V4,
    #[value(name = "IPv6")]
    V6,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FamilyPolicy {
    #[value(name = "SingleStack")]
    Single,
    #[value(name = "PreferDualStack")]
    Prefer,
    #[value(name = "RequireDualStack")]
    Require,
}

/// The word of Kubernetes for a value of an option, which is also the one that is typed.
fn word(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("a label is KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// The labels by which a Service finds the Pod of a VM.
fn selector(vm: &str) -> BTreeMap<String, String> {
    let labels = [("app.kubernetes.io/name", APP_NAME), (INSTANCE_LABEL, vm), (COMPONENT_LABEL, CONTAINER_NAME)];
    labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

impl Options {
    /// `expose VM --port PORT --target-port TARGET`.
    pub fn of_port(vm: &str, port: u16, target: u16, field_manager: &str, cluster: &ClusterOptions) -> Self {
        Self {
            vm: vm.to_owned(),
            port,
            target_port: Some(target),
            name: None,
            type_: Type::ClusterIp,
            protocol: Protocol::Tcp,
            port_name: None,
            node_port: None,
            cluster_ip: None,
            external_ip: Vec::new(),
            load_balancer_ip: None,
            ip_family: Vec::new(),
            ip_family_policy: None,
            labels: Vec::new(),
            dry_run: None,
            output: None,
            field_manager: field_manager.to_owned(),
            cluster: cluster.clone(),
        }
    }

    fn target(&self) -> u16 {
        self.target_port.unwrap_or(self.port)
    }

    /// The Service that is wanted.
    fn service(&self, vm: &VirtualMachine) -> Service {
        let several = |items: Vec<String>| if items.is_empty() { None } else { Some(items) };
        let name = self.name.clone().unwrap_or_else(|| format!("{}-{}", vm.name_any(), self.port));
        let labels: BTreeMap<_, _> = self.labels.iter().cloned().collect();
        let port = ServicePort {
            name: self.port_name.clone(),
            port: self.port.into(),
            target_port: Some(IntOrString::Int(self.target().into())),
            protocol: Some(word(self.protocol)),
            node_port: self.node_port.map(i32::from),
            ..ServicePort::default()
        };
        Service {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: vm.namespace(),
                labels: Some(labels).filter(|labels| !labels.is_empty()),
                ..ObjectMeta::default()
            },
            spec: Some(ServiceSpec {
                type_: Some(word(self.type_)),
                selector: Some(selector(&vm.name_any())),
                ports: Some(vec![port]),
                cluster_ip: self.cluster_ip.clone(),
                external_ips: several(self.external_ip.clone()),
                load_balancer_ip: self.load_balancer_ip.clone(),
                ip_families: several(self.ip_family.iter().copied().map(word).collect()),
                ip_family_policy: self.ip_family_policy.map(word),
                ..ServiceSpec::default()
            }),
            status: None,
        }
    }

    /// What the person should know about the port of the guest.
    fn doubts(&self, vm: &VirtualMachine) -> Option<String> {
        let (target, display) = (self.target(), &vm.spec.vm.display);
        let displays = display.vnc.as_ref().map_or(display.spice.port, |vnc| vnc.port);
        if target == displays {
            return Some(format!("port {target} of the VM's Pod is that of the display, not the guest's"));
        }
        (target > LAST_PORT).then(|| {
            format!(
                "port {target} does not lead to the guest unless a template sets VM_RUNNER_POD_PORTS to it or more: without that the ports \
                 from 1 to {LAST_PORT} do (docs/virtual-machines.md, Networks)"
            )
        })
    }
}

/// Whether a Service that exists is the wanted one: all that is wanted is in it, and it selects nothing else.
fn is_wanted(existing: &Service, wanted: &Service) -> bool {
    let selected = |service: &Service| service.spec.as_ref().and_then(|spec| spec.selector.clone());
    let labels = |service: &Service| json!(service.labels());
    selected(existing) == selected(wanted)
        && has(&json!(existing.spec), &json!(wanted.spec))
        && has(&labels(existing), &labels(wanted))
}

/// Whether a value has all fields of another one with their values.
fn has(value: &Value, wanted: &Value) -> bool {
    match (value, wanted) {
        (Value::Object(value), Value::Object(wanted)) => {
            wanted.iter().all(|(key, wanted)| value.get(key).is_some_and(|value| has(value, wanted)))
        }
        (Value::Array(value), Value::Array(wanted)) => {
            value.len() == wanted.len() && value.iter().zip(wanted).all(|(value, wanted)| has(value, wanted))
        }
        _ => value == wanted,
    }
}

/// Where a Service is reached, in a line for each way.
fn addresses(service: &Service) -> Vec<String> {
    let spec = service.spec.clone().unwrap_or_default();
    let port = spec.ports.and_then(|ports| ports.into_iter().next()).unwrap_or_default();
    let (number, protocol) = (port.port, port.protocol.unwrap_or_default());
    let at = |address: &str| match address.contains(':') {
        true => format!("[{address}]:{number}"),
        false => format!("{address}:{number}"),
    };
    let own: Vec<String> = spec.cluster_ips.unwrap_or_default();
    let own: Vec<String> = own.iter().filter(|address| *address != "None").map(|address| at(address)).collect();
    let name = at(&format!("{}.{}.svc", service.name_any(), service.namespace().unwrap_or_default()));
    let own = if own.is_empty() { String::new() } else { format!("{}, ", own.join(", ")) };
    let mut lines = vec![format!("in the cluster: {own}{name} ({protocol})")];
    if let Some(port) = port.node_port.filter(|port| *port > 0) {
        lines.push(format!("on each node: port {port}"));
    }
    lines.extend(spec.external_ips.unwrap_or_default().iter().map(|address| format!("from outside: {}", at(address))));
    if spec.type_.as_deref() == Some("LoadBalancer") {
        let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
        let given = balancer.into_iter().flatten().filter_map(|item| item.ip.as_deref().or(item.hostname.as_deref()));
        let given: Vec<String> = given.map(at).collect();
        let none = || format!("none yet; kubectl get service {} shows it", service.name_any());
        lines.push(format!("load balancer: {}", if given.is_empty() { none() } else { given.join(", ") }));
    }
    lines
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let (vm, found) = read_vm(&options.vm, &options.cluster).await?;
    if let Some(why) = unreachable(&found.spec.vm.networks) {
        return Err(Failure::new(format!("{vm}: {why}")));
    }
    if let Some(doubts) = options.doubts(&found) {
        note(&format!("{vm}: {doubts}"));
    }
    let wanted = options.service(&found);
    let what = format!("service/{}", wanted.name_any());
    let (service, is_new) = match options.dry_run {
        Some(DryRun::Client) => (wanted, true),
        _ => create(vm.client(), options, &wanted, &what).await?,
    };
    let done = if is_new { format!("exposed{}", DryRun::mark(options.dry_run)) } else { "unchanged".to_owned() };
    match &options.output {
        Some(ObjectFormat::Name) => writeln!(output, "{what}")?,
        Some(ObjectFormat::Data(format)) => format.print(&json!(service), output)?,
        None => {
            writeln!(output, "{what} {done}: it leads to port {} of {}", options.target(), title(&found.name_any()))?;
            if options.dry_run.is_none() {
                for line in addresses(&service) {
                    writeln!(output, "  {line}")?;
                }
                output.flush()?;
                writeln!(output, "  ready endpoints: {}", ready(vm.client(), &service, &found).await)?;
            }
        }
    }
    Ok(Exit::Success)
}

/// Creates the Service, or finds that it exists as it is wanted. Returns whether it is new.
async fn create(client: &Client, options: &Options, wanted: &Service, what: &str) -> Result<(Service, bool), Failure> {
    let namespace = wanted.namespace().unwrap_or_default();
    let api: Api<Service> = Api::namespaced(client.clone(), &namespace);
    let resource = ApiResource::erase::<Service>(&());
    let dry_run = options.dry_run == Some(DryRun::Server);
    let parameters = PostParams { dry_run, field_manager: Some(options.field_manager.clone()) };
    let error = match api.create(&parameters, wanted).await {
        Ok(service) => return Ok((service, true)),
        Err(error) => error,
    };
    if !matches!(&error, kube::Error::Api(answer) if answer.is_already_exists()) {
        let line = refused_about(client, &resource, what, &["create"], Some(&namespace), &error).await;
        // Services have stricter names than VMs.
        let is_of_name = matches!(&error, kube::Error::Api(answer) if answer.message.contains("metadata.name"));
        let help = if is_of_name && options.name.is_none() { "; give it another name by --name" } else { "" };
        return Err(failure(line + help, &error));
    }
    match api.get(&wanted.name_any()).await {
        Ok(existing) if is_wanted(&existing, wanted) => Ok((existing, false)),
        Ok(_) => Err(Failure::new(format!(
            "{what}: it exists already, and is another one than this; give this one another name by --name"
        ))),
        Err(error) => {
            let line = refused_about(client, &resource, what, &["get"], Some(&namespace), &error).await;
            Err(failure(line, &error))
        }
    }
}

/// The endpoints that are ready, for a line. Those of a running guest are waited for.
async fn ready(client: &Client, service: &Service, vm: &VirtualMachine) -> String {
    let (name, namespace) = (service.name_any(), service.namespace().unwrap_or_default());
    let api: Api<EndpointSlice> = Api::namespaced(client.clone(), &namespace);
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={name}"));
    let runs = vm.runs();
    let deadline = Instant::now() + ENDPOINTS;
    loop {
        match api.list(&of_service).await {
            Ok(slices) => {
                let found = endpoints(&slices.items);
                if !found.is_empty() {
                    return found.join(", ");
                }
            }
            Err(error) => {
                let resource = ApiResource::erase::<EndpointSlice>(&());
                return refused_about(client, &resource, "not known", &["list"], Some(&namespace), &error).await;
            }
        }
        if !runs {
            return format!("none until {} runs", title(&vm.name_any()));
        }
        if Instant::now() > deadline {
            return "none yet".to_owned();
        }
        sleep(LOOK).await;
    }
}

/// The addresses and ports that are ready.
fn endpoints(slices: &[EndpointSlice]) -> Vec<String> {
    let mut found = Vec::new();
    for slice in slices {
        let port = slice.ports.iter().flatten().find_map(|port| port.port);
        let port = port.map(|port| format!(":{port}")).unwrap_or_default();
        let is_ready = |endpoint: &&k8s_openapi::api::discovery::v1::Endpoint| {
            endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
        };
        for address in slice.endpoints.iter().filter(is_ready).flat_map(|endpoint| &endpoint.addresses) {
            found.push(if slice.address_type == "IPv6" {
                format!("[{address}]{port}")
            } else {
                format!("{address}{port}")
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {

    use super::*;

    fn options(line: &str) -> Options {
        crate::cli::parsed(line).unwrap()
    }

    fn vm(display: Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
            "metadata": { "name": "web", "namespace": "vms", "labels": { "tier": "web" }, "uid": "1" },
            "spec": { "vm": { "maximumCpus": 1, "display": display } },
        }))
        .unwrap()
    }

    fn service(line: &str) -> Value {
        json!(options(line).service(&vm(json!({}))))
    }

    #[test]
    fn a_service_selects_each_pod_that_the_vm_will_have() {
        assert_eq!(
            service("web --port 22"),
            json!({
                "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web-22", "namespace": "vms" },
                "spec": {
                    "type": "ClusterIP",
                    "selector": {
                        "app.kubernetes.io/name": "vm-runner",
                        "app.kubernetes.io/instance": "web",
                        "app.kubernetes.io/component": "vm-runner",
                    },
                    "ports": [{ "port": 22, "targetPort": 22, "protocol": "TCP" }],
                },
            })
        );
    }

    #[test]
    fn each_option_is_a_field() {
        for (option, pointer, expected) in [
            ("--name other", "/metadata/name", json!("other")),
            ("--labels a=b,c=", "/metadata/labels", json!({ "a": "b", "c": "" })),
            ("--target-port 2222", "/spec/ports/0/targetPort", json!(2222)),
            ("--protocol udp", "/spec/ports/0/protocol", json!("UDP")),
            ("--port-name ssh", "/spec/ports/0/name", json!("ssh")),
            ("--type NodePort --node-port 30080", "/spec/ports/0/nodePort", json!(30080)),
            ("--type loadbalancer", "/spec/type", json!("LoadBalancer")),
            ("--cluster-ip None", "/spec/clusterIP", json!("None")),
            ("--external-ip 192.0.2.1 --external-ip 192.0.2.2", "/spec/externalIPs", json!(["192.0.2.1", "192.0.2.2"])),
            ("--load-balancer-ip 192.0.2.1", "/spec/loadBalancerIP", json!("192.0.2.1")),
            ("--ip-family ipv6,IPv4", "/spec/ipFamilies", json!(["IPv6", "IPv4"])),
            ("--ip-family-policy PreferDualStack", "/spec/ipFamilyPolicy", json!("PreferDualStack")),
        ] {
            let service = service(&format!("web --port 22 {option}"));
            assert_eq!(service.pointer(pointer), Some(&expected), "{option}: {service:#}");
        }
        for wrong in
            ["", "--port 0", "--port 65536", "--port ssh", "--port 22 --type ExternalName", "--port 22 --labels a"]
        {
            assert!(crate::cli::parsed::<Options>(&format!("web {wrong}")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ports_that_do_not_lead_to_the_guest_are_doubted() {
        let doubts = |line: &str, display| options(line).doubts(&vm(display)).unwrap_or_default();
        assert_eq!(doubts("web --port 9999", json!({})), "");
        assert_eq!(doubts("web --port 27017 --target-port 22", json!({})), "");
        assert!(doubts("web --port 27017", json!({})).contains("VM_RUNNER_POD_PORTS"));
        let of_display = |port| format!("port {port} of the VM's Pod is that of the display, not the guest's");
        assert_eq!(doubts("web --port 5900", json!({})), of_display(5900));
        assert_eq!(doubts("web --port 5901", json!({ "vnc": { "port": 5901 } })), of_display(5901));
        assert_eq!(doubts("web --port 5900", json!({ "spice": { "port": 0 } })), "");
    }

    #[test]
    fn a_service_that_exists_is_the_wanted_one_or_another() {
        let wanted = options("web --port 22").service(&vm(json!({})));
        let existing = |edit: fn(&mut Value)| {
            let mut service = json!(wanted);
            service["metadata"]["uid"] = json!("2");
            service["spec"]["clusterIP"] = json!("10.0.0.1");
            service["spec"]["ports"][0]["nodePort"] = json!(30000);
            edit(&mut service);
            serde_json::from_value::<Service>(service).unwrap()
        };
        assert!(is_wanted(&existing(|_| ()), &wanted), "what the API server adds is no difference");
        let others: [fn(&mut Value); 4] = [
            |service| service["spec"]["ports"][0]["targetPort"] = json!(23),
            |service| service["spec"]["type"] = json!("NodePort"),
            |service| service["spec"]["selector"]["tier"] = json!("web"),
            |service| service["spec"]["ports"] = json!([]),
        ];
        for other in others {
            assert!(!is_wanted(&existing(other), &wanted));
        }
        let labelled = options("web --port 22 --labels a=b").service(&vm(json!({})));
        assert!(!is_wanted(&existing(|_| ()), &labelled));
    }

    #[test]
    fn addresses_are_those_that_the_service_has() {
        let lines = |spec: Value, status: Value| {
            let mut service =
                json!({ "metadata": { "name": "web-22", "namespace": "vms" }, "spec": spec, "status": status });
            service["spec"]["ports"][0]["port"] = json!(22);
            service["spec"]["ports"][0]["protocol"] = json!("TCP");
            addresses(&serde_json::from_value(service).unwrap())
        };
        let port = || json!([{}]);
        assert_eq!(
            lines(json!({ "ports": port(), "clusterIPs": ["10.0.0.1", "fd00::1"] }), json!({})),
            ["in the cluster: 10.0.0.1:22, [fd00::1]:22, web-22.vms.svc:22 (TCP)"]
        );
        assert_eq!(
            lines(json!({ "ports": port(), "clusterIPs": ["None"] }), json!({})),
            ["in the cluster: web-22.vms.svc:22 (TCP)"]
        );
        let balanced = json!({
            "type": "LoadBalancer", "ports": [{ "nodePort": 30022 }], "clusterIPs": ["10.0.0.1"], "externalIPs": ["192.0.2.1"],
        });
        let in_cluster = "in the cluster: 10.0.0.1:22, web-22.vms.svc:22 (TCP)";
        let (node, outside) = ("on each node: port 30022", "from outside: 192.0.2.1:22");
        assert_eq!(
            lines(balanced.clone(), json!({})),
            [in_cluster, node, outside, "load balancer: none yet; kubectl get service web-22 shows it"]
        );
        let given = json!({ "loadBalancer": { "ingress": [{ "ip": "192.0.2.7" }, { "hostname": "lb.example.org" }] } });
        assert_eq!(
            lines(balanced, given),
            [in_cluster, node, outside, "load balancer: 192.0.2.7:22, lb.example.org:22"]
        );
    }

    #[test]
    fn endpoints_that_are_not_ready_do_not_count() {
        let slice = |family: &str, endpoints: Value| {
            let slice = json!({ "addressType": family, "ports": [{ "port": 22 }], "endpoints": endpoints });
            serde_json::from_value::<EndpointSlice>(slice).unwrap()
        };
        let slices = [
            slice(
                "IPv4",
                json!([{ "addresses": ["10.1.0.1"], "conditions": { "ready": true } }, { "addresses": ["10.1.0.2"] }]),
            ),
            slice("IPv4", json!([{ "addresses": ["10.1.0.3"], "conditions": { "ready": false } }])),
            slice("IPv6", json!([{ "addresses": ["fd00::1"] }])),
        ];
        assert_eq!(endpoints(&slices), ["10.1.0.1:22", "10.1.0.2:22", "[fd00::1]:22"]);
    }
}
