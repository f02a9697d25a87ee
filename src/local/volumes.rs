//! What the kubelet would put into the container of the runner: files from ConfigMaps and Secrets, and claims. Pure.

use std::{
    collections::BTreeMap,
    path::{Component, Path},
};

use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, Container, KeyToPath, PersistentVolumeClaim, Pod, Secret, Volume},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::object::CONTAINER_NAME;

/// Why a volume can't be made from the objects.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The templates make no Pod.
    #[error("the templates make no Pod for the VM, so nothing says how it runs")]
    NoPod,
    /// The Pod has no container for the runner.
    #[error(
        "the Pod has no container {CONTAINER_NAME}: a VM with an image of the VM-Operator in Java runs only in a cluster"
    )]
    NoContainer,
    /// An object is not what its kind says.
    #[error("the {kind} of the templates or of the file can't be read: {message}")]
    Object {
        /// The kind.
        kind: &'static str,
        /// The parser's message.
        message: String,
    },
    /// A file comes from an object that is neither rendered nor in the file.
    #[error(
        "the VM needs the {kind} {name}{}, which is only in a cluster: put it into the same file, after a line ---",
        with_key(key)
    )]
    Missing {
        /// The kind: ConfigMap or Secret.
        kind: &'static str,
        /// The name.
        name: String,
        /// The key. Empty: the object itself is missing.
        key: String,
    },
    /// The volume of the configuration is of a kind that needs a cluster.
    #[error(
        "the Pod's volume {0} is of a kind that only a cluster has: the runner's configuration can't be read from it"
    )]
    Volume(String),
    /// A name or path would be outside of the VM's folder.
    #[error("the Pod names {0:?}, which is no plain name below a folder")]
    Name(String),
    /// A disk is at a path where the Pod has no claim.
    #[error("the disk {0} is at a path where the Pod has no claim")]
    NoClaim(String),
    /// A disk is on a claim that exists only in a cluster.
    #[error("the disk {disk} is on the claim {claim}, which the templates don't make: it is only in a cluster")]
    ClaimOfCluster {
        /// The path of the disk in the Pod.
        disk: String,
        /// The claim.
        claim: String,
    },
}

fn with_key(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!(" with the key {key}") }
}

/// The objects from which the runner's container gets its files and disks.
pub struct Objects {
    pod: Pod,
    config_maps: BTreeMap<String, ConfigMap>,
    secrets: BTreeMap<String, Secret>,
    claims: BTreeMap<String, PersistentVolumeClaim>,
}

/// A claim on which a disk is.
#[derive(Debug, PartialEq, Eq)]
pub struct Claim {
    /// The name of the Pod's volume, such as `system-disk`.
    pub volume: String,
    /// The spec.
    pub spec: Value,
}

impl Objects {
    /// The objects that the templates made, and the others of the file. A rendered one has precedence.
    ///
    /// # Errors
    /// If an object of these kinds can't be read, or there is no Pod.
    pub fn new<'a>(
        rendered: impl Iterator<Item = &'a Value>,
        others: impl Iterator<Item = &'a Value>,
    ) -> Result<Self, Error> {
        let all: Vec<&Value> = others.chain(rendered).collect();
        let pod = read::<Pod>("Pod", &all)?.pop().ok_or(Error::NoPod)?;
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        let config_maps = read::<ConfigMap>("ConfigMap", &all)?;
        let secrets = read::<Secret>("Secret", &all)?;
        let claims = read::<PersistentVolumeClaim>("PersistentVolumeClaim", &all)?;
        Ok(Self {
            pod,
            config_maps: config_maps.into_iter().map(|it| (name(&it.metadata.name), it)).collect(),
            secrets: secrets.into_iter().map(|it| (name(&it.metadata.name), it)).collect(),
            claims: claims.into_iter().map(|it| (name(&it.metadata.name), it)).collect(),
        })
    }

    /// The containers of the Pod beside the runner's, which do not run without a cluster.
    pub fn other_containers(&self) -> impl Iterator<Item = &str> {
        let spec = self.pod.spec.iter();
        let containers = spec.flat_map(|spec| spec.containers.iter().chain(spec.init_containers.iter().flatten()));
        containers.map(|container| container.name.as_str()).filter(|name| *name != CONTAINER_NAME)
    }

    /// The files of the volume that is mounted at a path of the runner's container, by their paths in it.
    ///
    /// # Errors
    /// If nothing is mounted there, or what the files come from is missing.
    pub fn files(&self, mount_path: &str) -> Result<BTreeMap<String, Vec<u8>>, Error> {
        let mounts = self.container()?.volume_mounts.iter().flatten();
        let mount = mounts.into_iter().find(|mount| mount.mount_path.trim_end_matches('/') == mount_path);
        let volume = mount.and_then(|mount| self.volume(&mount.name));
        let volume = volume.ok_or_else(|| Error::Volume(mount_path.to_owned()))?;
        let mut files = BTreeMap::new();
        if let Some(source) = &volume.config_map {
            files.extend(self.of_config_map(&source.name, source.items.as_deref(), source.optional)?);
        } else if let Some(source) = &volume.secret {
            let name = source.secret_name.clone().unwrap_or_default();
            files.extend(self.of_secret(&name, source.items.as_deref(), source.optional)?);
        } else if let Some(projected) = &volume.projected {
            for source in projected.sources.iter().flatten() {
                if let Some(source) = &source.config_map {
                    files.extend(self.of_config_map(&source.name, source.items.as_deref(), source.optional)?);
                }
                if let Some(source) = &source.secret {
                    files.extend(self.of_secret(&source.name, source.items.as_deref(), source.optional)?);
                }
            }
        } else {
            return Err(Error::Volume(volume.name.clone()));
        }
        match files.keys().find(|path| !is_below(path)) {
            Some(path) => Err(Error::Name(path.clone())),
            None => Ok(files),
        }
    }

    /// The claim of the disk at a path of the runner's container: a block device, or a file below a mounted claim.
    ///
    /// # Errors
    /// If there is no claim, or it is not one that the templates make.
    pub fn claim(&self, disk: &str) -> Result<Claim, Error> {
        let container = self.container()?;
        let device = container.volume_devices.iter().flatten().find(|device| device.device_path == disk);
        let mounts = container.volume_mounts.iter().flatten();
        let above = mounts.filter(|mount| disk.starts_with(&format!("{}/", mount.mount_path.trim_end_matches('/'))));
        let mount = above.max_by_key(|mount| mount.mount_path.len()).map(|mount| &mount.name);
        let volume = device.map(|device| &device.name).or(mount).and_then(|name| self.volume(name));
        let source = volume.and_then(|volume| Some((volume, volume.persistent_volume_claim.as_ref()?)));
        let (volume, source) = source.ok_or_else(|| Error::NoClaim(disk.to_owned()))?;
        let missing = || Error::ClaimOfCluster { disk: disk.to_owned(), claim: source.claim_name.clone() };
        let claim = self.claims.get(&source.claim_name).ok_or_else(missing)?;
        if volume.name.contains('/') || !is_below(&volume.name) {
            return Err(Error::Name(volume.name.clone()));
        }
        let spec = serde_json::to_value(&claim.spec).unwrap_or_default();
        Ok(Claim { volume: volume.name.clone(), spec })
    }

    fn container(&self) -> Result<&Container, Error> {
        let mut containers = self.pod.spec.iter().flat_map(|spec| &spec.containers);
        containers.find(|container| container.name == CONTAINER_NAME).ok_or(Error::NoContainer)
    }

    fn volume(&self, name: &str) -> Option<&Volume> {
        self.pod.spec.as_ref()?.volumes.iter().flatten().find(|volume| volume.name == name)
    }

    fn of_config_map(&self, name: &str, items: Option<&[KeyToPath]>, optional: Option<bool>) -> Result<Files, Error> {
        let data = self.config_maps.get(name).map(|map| {
            let texts = map.data.iter().flatten().map(|(key, text)| (key.clone(), text.clone().into_bytes()));
            texts.chain(bytes(map.binary_data.as_ref())).collect()
        });
        chosen("ConfigMap", name, data, items, optional)
    }

    fn of_secret(&self, name: &str, items: Option<&[KeyToPath]>, optional: Option<bool>) -> Result<Files, Error> {
        let data = self.secrets.get(name).map(|secret| {
            let texts = secret.string_data.iter().flatten().map(|(key, text)| (key.clone(), text.clone().into_bytes()));
            bytes(secret.data.as_ref()).chain(texts).collect()
        });
        chosen("Secret", name, data, items, optional)
    }
}

/// Whether a path stays below the folder in which it is: the file of a VM can come from somebody else.
fn is_below(path: &str) -> bool {
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

type Files = BTreeMap<String, Vec<u8>>;

fn bytes(data: Option<&BTreeMap<String, ByteString>>) -> impl Iterator<Item = (String, Vec<u8>)> {
    data.into_iter().flatten().map(|(key, bytes)| (key.clone(), bytes.0.clone()))
}

/// The files of an object: the chosen keys under their paths, or all keys.
fn chosen(
    kind: &'static str,
    name: &str,
    data: Option<Files>,
    items: Option<&[KeyToPath]>,
    optional: Option<bool>,
) -> Result<Files, Error> {
    let missing = |key: &str| Error::Missing { kind, name: name.to_owned(), key: key.to_owned() };
    let is_optional = optional.unwrap_or_default();
    let Some(data) = data else { return if is_optional { Ok(Files::new()) } else { Err(missing("")) } };
    let Some(items) = items else { return Ok(data) };
    let mut files = Files::new();
    for item in items {
        match data.get(&item.key) {
            Some(content) => drop(files.insert(item.path.clone(), content.clone())),
            None if is_optional => {}
            None => return Err(missing(&item.key)),
        }
    }
    Ok(files)
}

/// The objects of a kind.
fn read<T: DeserializeOwned>(kind: &'static str, objects: &[&Value]) -> Result<Vec<T>, Error> {
    let of_kind = objects.iter().filter(|object| object["kind"] == kind && object["apiVersion"] == "v1");
    let parse = |object: &&Value| {
        serde_json::from_value(Value::clone(object))
            .map_err(|error: serde_json::Error| Error::Object { kind, message: error.to_string() })
    };
    of_kind.map(parse).collect()
}
