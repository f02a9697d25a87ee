//! The manager's configuration: the file `config.yaml` of the ConfigMap `vm-operator`.
//!
//! Keys that begin with `/` are the paths of components, as in the files of existing users. The manager warns about unknown keys and does
//! not refuse them, because those files also configure components that this program does not have.

use std::{borrow::Cow, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, Unexpected, Visitor, value::MapAccessDeserializer},
};

use serde_json::{Map, Value};

pub mod allowed;

pub use allowed::Allowed;
use allowed::{Images, Patterns};

use crate::api::ServiceMetadata;

/// The default of [`ReconcilerConfig::cloud_init_label`].
pub const CLOUD_INIT_LABEL: &str = "vmoperator.jdrupes.org/cloud-init";

/// The manager's configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// The namespaces to manage; in a cluster, by default, the manager's own.
    pub namespace: Option<Scope>,
    /// How the manager makes objects.
    pub reconciler: ReconcilerConfig,
    /// The unknown keys, as paths.
    pub unknown: Vec<String>,
}

/// The namespaces whose VMs are managed: one, a list, or `*` for all.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "Names")]
pub enum Scope {
    /// These namespaces.
    These(Vec<String>),
    /// All namespaces.
    All,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a namespace, a list of namespaces, or \"*\" for all")]
enum Names {
    One(String),
    Some(Vec<String>),
}

impl From<Names> for Scope {
    fn from(names: Names) -> Self {
        Self::of(match names {
            Names::One(name) => vec![name],
            Names::Some(names) => names,
        })
    }
}

impl Scope {
    /// The scope for a list of namespaces. If one is `*`, all namespaces.
    pub fn of(mut names: Vec<String>) -> Self {
        if names.iter().any(|name| name == "*") {
            return Self::All;
        }
        names.sort();
        names.dedup();
        Self::These(names)
    }

    /// What each watch covers: a namespace, or the whole cluster (`None`).
    pub fn watched(&self) -> Vec<Option<String>> {
        match self {
            Self::These(names) => names.iter().cloned().map(Some).collect(),
            Self::All => vec![None],
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::These(names) => f.write_str(&names.join(",")),
            Self::All => f.write_str("*"),
        }
    }
}

/// How the manager makes objects: the section `/Manager`, `/Controller`, `/Reconciler`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReconcilerConfig {
    /// The claim for the runner's data of each VM.
    pub runner_data_pvc: RunnerDataPvc,
    /// The device plugin of the nodes. Not in the original operator.
    pub node_devices: NodeDevices,
    /// The profiles of a container with passt. Not in the original operator.
    pub passt: Passt,
    /// Whether VMs have a relay, through which people reach their consoles. Not in the original operator.
    pub relay: bool,
    /// The claims for disks. Not in the original operator.
    pub disk_pvc: DiskPvc,
    /// The claim with CD images that every Pod mounts; absent: only Pods with a CD out of it. Not in the original operator.
    pub image_repository_claim: Option<String>,
    /// Folders in the runner's container of which CDs may be, beside the image repository. Not in the original operator.
    pub cd_folders: Vec<String>,
    /// Whether VMs have a Service for their display, and its labels and annotations.
    pub load_balancer_service: LoadBalancerService,
    /// CPUs of a VM for each CPU that its Pod requests.
    pub cpu_overcommit: f64,
    /// Bytes of a VM's memory for each byte that its Pod requests.
    pub ram_overcommit: f64,
    /// The runner's image for VMs that do not name one. The original operator does not have this key.
    pub runner_image: Option<String>,
    /// The default of `spec.loggingProperties`.
    pub logging_properties: Option<String>,
    /// What VMs may get beside a VM. Not in the original operator.
    #[serde(flatten)]
    pub allowed: Allowed,
    /// The label that a Secret or ConfigMap must have to be mounted as a VM's cloud-init data; empty: none. Not in the original operator.
    pub cloud_init_label: String,
    /// When the kubelet pulls that image. Not in the original operator.
    pub runner_image_pull_policy: Option<String>,
    /// `values` for templates; those of a VM are merged over them. Not in the original operator.
    pub template_values: Map<String, Value>,
    /// The kinds of objects that templates may make. Not in the original operator.
    pub allowed_kinds: Kinds,
}

/// The registry of the runner's image if neither the VM nor the manager names one. The programs of a release have its registry built in.
const REGISTRY: &str = match option_env!("VM_OPERATOR_REGISTRY") {
    Some(registry) => registry,
    None => "localhost",
};

impl ReconcilerConfig {
    /// The runner's image for VMs that do not name one.
    pub fn own_image(&self) -> String {
        let built_in = || format!("{REGISTRY}/vm-runner:{}", env!("CARGO_PKG_VERSION"));
        self.runner_image.clone().unwrap_or_else(built_in)
    }
}

impl Default for ReconcilerConfig {
    fn default() -> Self {
        Self {
            runner_data_pvc: RunnerDataPvc::default(),
            node_devices: NodeDevices::default(),
            passt: Passt::default(),
            relay: true,
            disk_pvc: DiskPvc::default(),
            image_repository_claim: None,
            cd_folders: Vec::new(),
            load_balancer_service: LoadBalancerService::default(),
            cpu_overcommit: 2.0,
            ram_overcommit: 1.25,
            runner_image: None,
            logging_properties: None,
            allowed: Allowed::default(),
            cloud_init_label: CLOUD_INIT_LABEL.to_owned(),
            runner_image_pull_policy: None,
            template_values: Map::new(),
            allowed_kinds: Kinds::default(),
        }
    }
}

impl ReconcilerConfig {
    /// This configuration with the limits of another one. What an administrator does not allow any more is refused at once, whatever needs it.
    #[must_use]
    pub fn with_limits_of(&self, other: &Self) -> Self {
        // Without `..`: of each field it is decided whether it is a limit.
        let Self {
            cd_folders,
            allowed,
            cloud_init_label,
            allowed_kinds,
            runner_data_pvc: _,
            node_devices: _,
            passt: _,
            relay: _,
            disk_pvc: _,
            image_repository_claim: _,
            load_balancer_service: _,
            cpu_overcommit: _,
            ram_overcommit: _,
            runner_image: _,
            logging_properties: _,
            runner_image_pull_policy: _,
            template_values: _,
        } = other.clone();
        // A legacy runner gets another Pod and another file: what is a new one is checked with all VMs first.
        let legacy_runner_images = self.allowed.legacy_runner_images.limited_to(&allowed.legacy_runner_images);
        let allowed = Allowed { legacy_runner_images, ..allowed };
        Self { cd_folders, allowed, cloud_init_label, allowed_kinds, ..self.clone() }
    }

    /// The keys whose values differ, as paths such as `templateValues.size`.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let json = |config: &Self| serde_json::to_value(config).unwrap_or_default();
        differences("", &json(self), &json(other), &mut found);
        found
    }
}

fn differences(path: &str, one: &Value, other: &Value, found: &mut Vec<String>) {
    match (one, other) {
        (one, other) if one == other => {}
        (Value::Object(one), Value::Object(other)) => {
            let names: std::collections::BTreeSet<&String> = one.keys().chain(other.keys()).collect();
            for name in names {
                // The fields of the configuration are written in this way.
                let key = if path.is_empty() { camel_case(name) } else { format!("{path}.{name}") };
                let of = |map: &Map<String, Value>| map.get(name).cloned().unwrap_or_default();
                differences(&key, &of(one), &of(other), found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}

fn camel_case(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |text, word| {
        let (begin, rest) = word.split_at(word.len().min(1));
        text + &begin.to_uppercase() + rest
    })
}

/// Kinds of objects, each as `Kind` or `Kind.group`; `*` stands for any text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Kinds(Patterns);

impl From<Vec<String>> for Kinds {
    fn from(names: Vec<String>) -> Self {
        Self(names.into())
    }
}

impl From<Kinds> for Vec<String> {
    fn from(Kinds(patterns): Kinds) -> Self {
        patterns.into()
    }
}

impl Default for Kinds {
    /// Kinds that a VM may need, of Kubernetes and of tools that many clusters have. All are namespaced, and none grants rights.
    fn default() -> Self {
        let names = [
            "ConfigMap",
            "PersistentVolumeClaim",
            "Pod",
            "Secret",
            "Service",
            "CronJob.batch",
            "Deployment.apps",
            "EndpointSlice.discovery.k8s.io",
            "Ingress.networking.k8s.io",
            "Job.batch",
            "NetworkPolicy.networking.k8s.io",
            "PodDisruptionBudget.policy",
            "ResourceClaim.resource.k8s.io",
            "StatefulSet.apps",
            "*.cilium.io",
            "*.gateway.networking.k8s.io",
            "*.monitoring.coreos.com",
            "Certificate.cert-manager.io",
            "DNSEndpoint.externaldns.k8s.io",
            "NetworkAttachmentDefinition.k8s.cni.cncf.io",
            "VolumeSnapshot.snapshot.storage.k8s.io",
        ];
        names.map(str::to_owned).to_vec().into()
    }
}

impl Kinds {
    /// The name of a kind in such a list.
    pub fn name(api_version: &str, kind: &str) -> String {
        match api_version.split_once('/') {
            Some((group, _)) => format!("{kind}.{group}"),
            None => kind.to_owned(),
        }
    }

    /// Whether the list contains a kind.
    pub fn allow(&self, api_version: &str, kind: &str) -> bool {
        let name = Self::name(api_version, kind);
        self.0.contain(&name)
    }
}

/// The claim for the runner's data of each VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RunnerDataPvc {
    /// Its storage class; absent: the cluster's default.
    pub storage_class_name: Option<String>,
}

/// The resources with which Pods get the devices of their nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeDevices {
    /// The resource of KVM, for VMs that demand it.
    pub kvm: String,
    /// The resource for VMs that take KVM if there is some, and for tap devices. Absent: the nodes have no such plugin.
    pub machine: Option<String>,
}

impl Default for NodeDevices {
    fn default() -> Self {
        Self { kvm: "vmoperator.jdrupes.org/kvm".to_owned(), machine: None }
    }
}

/// [`Passt`]: no profile.
pub const UNCONFINED: &str = "Unconfined";

/// The profiles of a container with passt, which isolates itself with calls that the runtime's profiles forbid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Passt {
    /// The path of a seccomp profile on the nodes (`localhostProfile`), or [`UNCONFINED`].
    pub seccomp_profile: String,
    /// The name of an AppArmor profile that is loaded on the nodes, or [`UNCONFINED`]. Absent: the runtime's.
    pub app_armor_profile: Option<String>,
}

impl Default for Passt {
    fn default() -> Self {
        Self { seccomp_profile: "vm-operator/passt.json".to_owned(), app_armor_profile: None }
    }
}

/// The claims for disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DiskPvc {
    /// The mode of a new claim whose disk does not set one.
    pub volume_mode: VolumeMode,
}

/// What a volume is to its Pod. Not every storage class can provide block volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeMode {
    /// A block device, which is the disk.
    #[default]
    Block,
    /// A file system, with the disk in a file.
    Filesystem,
}

/// Services for displays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum LoadBalancerService {
    /// `false`, as without the key: no VM has a Service. `true`: each VM has one, unless its spec has `loadBalancerService: {}`.
    Enabled(bool),
    /// As `true`, with labels and annotations for every Service.
    Metadata(ServiceMetadata),
}

impl LoadBalancerService {
    /// What every Service of a VM has, if the VM has one; `own` is what the VM's spec says of it.
    pub fn defaults(&self, own: Option<&ServiceMetadata>) -> Option<Cow<'_, ServiceMetadata>> {
        let defaults = match self {
            Self::Enabled(false) => return None,
            Self::Enabled(true) => Cow::Owned(ServiceMetadata::default()),
            Self::Metadata(defaults) => Cow::Borrowed(defaults),
        };
        if own.is_some_and(ServiceMetadata::is_empty) { None } else { Some(defaults) }
    }
}

impl Default for LoadBalancerService {
    fn default() -> Self {
        Self::Enabled(false)
    }
}

// A derived untagged enum would report the position of the section and not of the wrong value.
impl<'de> Deserialize<'de> for LoadBalancerService {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BoolOrMetadata;
        impl<'de> Visitor<'de> for BoolOrMetadata {
            type Value = LoadBalancerService;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false, or labels and annotations")
            }

            fn visit_bool<E: Error>(self, enabled: bool) -> Result<LoadBalancerService, E> {
                Ok(LoadBalancerService::Enabled(enabled))
            }

            fn visit_unit<E: Error>(self) -> Result<LoadBalancerService, E> {
                Ok(LoadBalancerService::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LoadBalancerService, A::Error> {
                ServiceMetadata::deserialize(MapAccessDeserializer::new(map)).map(LoadBalancerService::Metadata)
            }
        }
        deserializer.deserialize_any(BoolOrMetadata)
    }
}

/// A configuration that can't be used. The source has line and column.
#[derive(Debug, thiserror::Error)]
#[error("the configuration can't be used")]
pub struct ConfigError(#[from] pub crate::yaml::Error);

impl Config {
    /// Reads the text of the file.
    ///
    /// # Errors
    /// If it is not YAML, or a known key has a wrong value.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let section = Section { path: "", config: &mut config };
        section.deserialize(crate::yaml::unique_documents(text)?).map_err(crate::yaml::Error::from)?;
        Ok(config)
    }

    /// Reads the value of a key. Its errors have the position in the file.
    fn take<'de, A: MapAccess<'de>>(&mut self, path: &str, key: &str, map: &mut A) -> Result<(), A::Error> {
        let reconciler = &mut self.reconciler;
        let allowed = &mut reconciler.allowed;
        match (path, key) {
            ("/Manager/Controller", "namespace") => self.namespace = map.next_value()?,
            ("/Manager/Controller/Reconciler", "runnerDataPvc") => {
                reconciler.runner_data_pvc = map.next_value_seed(known(path, key, &mut self.unknown))?;
            }
            ("/Manager/Controller/Reconciler", "diskPvc") => {
                reconciler.disk_pvc = map.next_value_seed(known(path, key, &mut self.unknown))?;
            }
            ("/Manager/Controller/Reconciler", "nodeDevices") => {
                reconciler.node_devices = map.next_value_seed(known(path, key, &mut self.unknown))?;
            }
            ("/Manager/Controller/Reconciler", "relay") => reconciler.relay = map.next_value()?,
            ("/Manager/Controller/Reconciler", "passt") => {
                reconciler.passt = map.next_value_seed(known(path, key, &mut self.unknown))?;
            }
            ("/Manager/Controller/Reconciler", "imageRepositoryClaim") => {
                reconciler.image_repository_claim = map.next_value()?;
            }
            ("/Manager/Controller/Reconciler", "cdFolders") => reconciler.cd_folders = map.next_value::<Folders>()?.0,
            ("/Manager/Controller/Reconciler", "loadBalancerService") => {
                reconciler.load_balancer_service = map.next_value_seed(known(path, key, &mut self.unknown))?;
            }
            ("/Manager/Controller/Reconciler", "cpuOvercommit") => {
                reconciler.cpu_overcommit = map.next_value::<Factor>()?.0;
            }
            ("/Manager/Controller/Reconciler", "ramOvercommit") => {
                reconciler.ram_overcommit = map.next_value::<Factor>()?.0;
            }
            ("/Manager/Controller/Reconciler", "templateValues") => reconciler.template_values = map.next_value()?,
            ("/Manager/Controller/Reconciler", "allowedKinds") => reconciler.allowed_kinds = map.next_value()?,
            ("/Manager/Controller/Reconciler", "loggingProperties") => {
                reconciler.logging_properties = map.next_value()?
            }
            ("/Manager/Controller/Reconciler", "networks") => {
                allowed.networks = map.next_value_seed(known(path, key, &mut self.unknown))?;
            }
            ("/Manager/Controller/Reconciler", "claims") => {
                allowed.claims = map.next_value_seed(known(path, key, &mut self.unknown))?;
            }
            ("/Manager/Controller/Reconciler", "services") => {
                allowed.services = map.next_value_seed(known(path, key, &mut self.unknown))?;
            }
            ("/Manager/Controller/Reconciler", "runnerImages") => {
                let images: Images = map.next_value()?;
                allowed.runner_images = images.of_file().map_err(A::Error::custom)?;
            }
            ("/Manager/Controller/Reconciler", "legacyRunnerImages") => {
                let images: Images = map.next_value()?;
                allowed.legacy_runner_images = images.of_file().map_err(A::Error::custom)?;
            }
            ("/Manager/Controller/Reconciler", "nodeNames") => allowed.node_names = map.next_value()?,
            ("/Manager/Controller/Reconciler", "affinityNamespaces") => {
                allowed.affinity_namespaces = map.next_value()?;
            }
            ("/Manager/Controller/Reconciler", "extendedResources") => allowed.extended_resources = map.next_value()?,
            ("/Manager/Controller/Reconciler", "podLabels") => allowed.pod_labels = map.next_value()?,
            // The former name is of the time when only Secrets needed it.
            ("/Manager/Controller/Reconciler", "cloudInitLabel" | "cloudInitSecretLabel") => {
                reconciler.cloud_init_label = map.next_value()?;
            }
            ("/Manager/Controller/Reconciler", "runnerImage") => reconciler.runner_image = map.next_value()?,
            ("/Manager/Controller/Reconciler", "runnerImagePullPolicy") => {
                reconciler.runner_image_pull_policy = map.next_value()?;
            }
            _ => {
                map.next_value::<IgnoredAny>()?;
                self.unknown.push(format!("{path}: {key}"));
            }
        }
        Ok(())
    }
}

/// Reads the value of a known key and collects the unknown keys in it.
struct Known<'a, T> {
    path: &'a str,
    key: &'a str,
    unknown: &'a mut Vec<String>,
    of: PhantomData<T>,
}

fn known<'a, T>(path: &'a str, key: &'a str, unknown: &'a mut Vec<String>) -> Known<'a, T> {
    Known { path, key, unknown, of: PhantomData }
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Known<'_, T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        let Self { path, key, unknown, .. } = self;
        serde_ignored::deserialize(deserializer, |within| unknown.push(format!("{path}: {key}.{within}")))
    }
}

/// A number above 0, because the manager divides by it.
struct Factor(f64);

impl<'de> Deserialize<'de> for Factor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Positive;
        // The visitor refuses it, so that the error has the position of the number.
        impl Visitor<'_> for Positive {
            type Value = Factor;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number above 0")
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Factor, E> {
                if number > 0.0 && number.is_finite() {
                    Ok(Factor(number))
                } else {
                    Err(E::invalid_value(Unexpected::Float(number), &self))
                }
            }

            #[allow(clippy::cast_precision_loss, reason = "nobody shares a CPU among so many")]
            fn visit_u64<E: Error>(self, number: u64) -> Result<Factor, E> {
                self.visit_f64(number as f64)
            }
        }
        deserializer.deserialize_f64(Positive)
    }
}

/// Absolute paths of folders.
struct Folders(Vec<String>);

impl<'de> Deserialize<'de> for Folders {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let folders = Vec::<String>::deserialize(deserializer)?;
        let is_usable = |folder: &&String| folder.starts_with('/') && !folder.trim_matches('/').is_empty();
        match folders.iter().find(|folder| !is_usable(folder)) {
            Some(folder) => Err(D::Error::custom(format!("{folder:?} is not the absolute path of a folder below /"))),
            None => Ok(Self(folders)),
        }
    }
}

/// The section of a component. The sections of its child components are inside it.
struct Section<'a> {
    path: &'a str,
    config: &'a mut Config,
}

impl<'de> DeserializeSeed<'de> for Section<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Section<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys and values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key.starts_with('/') {
                let path = format!("{}{key}", self.path);
                map.next_value_seed(Section { path: &path, config: &mut *self.config })?;
            } else {
                self.config.take(self.path, &key, &mut map)?;
            }
        }
        Ok(())
    }

    /// The section is empty.
    fn visit_none<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

#[cfg(test)]
mod tests;
