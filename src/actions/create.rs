//! Makes the manifest of a new VM from what a person says of it.
//!
//! ```text
//!  options, keys, files ─▶ NewVm ─▶ manifest ─▶ a file for Git, or the API server
//! ```
//!
//! A disk gets its content before the first start from the template set `import-disk` (docs/cookbook.md), which downloads an image.

pub mod disk_file;
pub mod login;

use serde_json::{Map, Value, json};

use crate::api::{GROUP, Quantity};

/// The set that fills disks, and the name of the disk that it fills.
pub const IMPORT_SET: &str = "import-disk";
const SYSTEM_DISK: &str = "system";
/// The smallest disk, in bytes. What is less is a number whose unit was forgotten.
pub const LEAST_DISK: u64 = 1 << 20;
/// The size in bytes of a disk of which nobody says it.
pub const DISK_SIZE: u64 = 10 << 30;

/// The images that have short names: those that their distributions publish for clouds, with cloud-init, for amd64; and the file with their
/// checksums. Each is the newest of its release, so the checksum itself can't be written down here.
pub const CATALOG: [(&str, &str, &str); 4] = [
    (
        "debian:12",
        "https://cloud.debian.org/images/cloud/bookworm/latest/debian-12-generic-amd64.qcow2",
        "https://cloud.debian.org/images/cloud/bookworm/latest/SHA512SUMS",
    ),
    (
        "debian:13",
        "https://cloud.debian.org/images/cloud/trixie/latest/debian-13-generic-amd64.qcow2",
        "https://cloud.debian.org/images/cloud/trixie/latest/SHA512SUMS",
    ),
    (
        "ubuntu:22.04",
        "https://cloud-images.ubuntu.com/jammy/current/jammy-server-cloudimg-amd64.img",
        "https://cloud-images.ubuntu.com/jammy/current/SHA256SUMS",
    ),
    (
        "ubuntu:24.04",
        "https://cloud-images.ubuntu.com/noble/current/noble-server-cloudimg-amd64.img",
        "https://cloud-images.ubuntu.com/noble/current/SHA256SUMS",
    ),
];

/// How a downloaded image is checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Not at all.
    #[default]
    None,
    /// By this checksum: SHA-256 or SHA-512, in hexadecimal digits.
    Sum(String),
    /// By the one that a file at this URL has for it, as `sha256sum` writes such files.
    At(String),
}

/// What fills the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskImage {
    /// An image that the VM's Pod downloads.
    Url {
        /// Where it is.
        url: String,
        /// Its format, with qemu-img's name.
        format: &'static str,
        /// How it is checked.
        checksum: Checksum,
    },
    /// A container image that has a disk in `/disk`, as KubeVirt's container disks have it. The kubelet pulls it.
    Container(String),
    /// A claim of the same namespace, which the storage clones.
    Claim {
        /// Its name.
        name: String,
        /// Its volume mode, if that is known: the clone has the same.
        mode: Option<String>,
    },
    /// A file that a person uploads into the VM's Pod.
    Upload {
        /// Its size in bytes.
        size: u64,
        /// Its SHA-256.
        sha256: String,
        /// Its format, with qemu-img's name.
        format: &'static str,
    },
}

/// What a person wrote for an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageName {
    /// An image that is known as it is.
    Known(DiskImage),
    /// A file of the person's computer.
    File(String),
}

/// The text names no image that can fill a disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what they are")]
pub enum InvalidImage {
    #[error("{0} is a CD: give it by --cd, which needs no import")]
    Cd(String),
    #[error("{0} is compressed: only images of the formats qcow2 and raw fill a disk")]
    Compressed(String),
    #[error("{0} has another format than qcow2 and raw, which fill a disk: convert it with qemu-img convert -O qcow2")]
    Format(String),
    #[error("{0:?} is no checksum: SHA-256 has 64 hexadecimal digits, SHA-512 has 128")]
    Checksum(String),
    #[error(
        "a checksum is for https://... and http://...: a container image has a digest, and a file is always compared"
    )]
    NeedlessChecksum,
    #[error(
        "{text:?} is no image that can fill a disk: write https://... (qcow2 or raw), oci:IMAGE, claim:NAME, ./FILE, or one of {}",
        CATALOG.map(|(name, ..)| name).join(", ")
    )]
    Unknown { text: String },
}

impl ImageName {
    /// The image of a URL, of a short name in the [`CATALOG`], `oci:IMAGE`, `claim:NAME`, or a path with a slash. `is_raw`: its format,
    /// where the URL's end does not tell it. `sum`: the checksum that it must have.
    ///
    /// # Errors
    /// If that can't fill a disk.
    pub fn parse(text: &str, is_raw: bool, sum: Option<&str>) -> Result<Self, InvalidImage> {
        let unknown = || InvalidImage::Unknown { text: text.to_owned() };
        let known = CATALOG.iter().find(|(name, ..)| *name == text);
        let url = known.map_or(text, |(_, url, _)| url);
        let is_url = ["https://", "http://"].iter().any(|scheme| url.starts_with(scheme));
        if sum.is_some() && !is_url {
            return Err(InvalidImage::NeedlessChecksum);
        }
        let is_word = |text: &str| !text.is_empty() && !text.contains(char::is_whitespace);
        if let Some(image) = text.strip_prefix("oci:") {
            let image = image.strip_prefix("//").unwrap_or(image);
            return is_word(image).then(|| Self::Known(DiskImage::Container(image.to_owned()))).ok_or_else(unknown);
        }
        if let Some(claim) = text.strip_prefix("claim:") {
            let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
            let is_name = !claim.is_empty() && claim.bytes().all(is_letter);
            let claim = is_name.then(|| DiskImage::Claim { name: claim.to_owned(), mode: None });
            return claim.map(Self::Known).ok_or_else(unknown);
        }
        let path = url.split(['?', '#']).next().unwrap_or_default().to_lowercase();
        let ends = |ends: &[&str]| ends.iter().any(|end| path.ends_with(end));
        let is_file = !is_url && text.contains('/') && !text.contains("://") && !text.ends_with('/');
        if !is_file && !["https://", "http://"].iter().any(|scheme| url.strip_prefix(scheme).is_some_and(is_word)) {
            return Err(unknown());
        }
        if ends(&[".iso"]) {
            return Err(InvalidImage::Cd(text.to_owned()));
        }
        if ends(&[".xz", ".gz", ".zst", ".bz2", ".zip", ".tar", ".ova"]) {
            return Err(InvalidImage::Compressed(text.to_owned()));
        }
        if !is_raw && ends(&[".vmdk", ".vdi", ".vhd", ".vhdx"]) {
            return Err(InvalidImage::Format(text.to_owned()));
        }
        if is_file {
            return Ok(Self::File(text.to_owned()));
        }
        let checksum = match (sum, known) {
            (Some(sum), _) => {
                let sum = sum.to_lowercase();
                if ![64, 128].contains(&sum.len()) || !sum.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                    return Err(InvalidImage::Checksum(sum));
                }
                Checksum::Sum(sum)
            }
            (None, Some((.., sums))) => Checksum::At((*sums).to_owned()),
            (None, None) => Checksum::None,
        };
        let format = if is_raw || ends(&[".raw"]) { "raw" } else { "qcow2" };
        Ok(Self::Known(DiskImage::Url { url: url.to_owned(), format, checksum }))
    }
}

impl DiskImage {
    /// The values for the template set that fills disks. `None`: it is not needed.
    fn values(&self) -> Option<Value> {
        let mut import = json!({});
        // The set's default is qcow2.
        if let Self::Url { format: "raw", .. } | Self::Upload { format: "raw", .. } = self {
            import["format"] = json!("raw");
        }
        match self {
            Self::Url { url, format: _, checksum } => {
                import["url"] = json!(url);
                match checksum {
                    Checksum::None => {}
                    Checksum::Sum(sum) => import["sha256"] = json!(sum),
                    Checksum::At(url) => import["sums"] = json!(url),
                }
            }
            Self::Container(image) => import["oci"] = json!(image),
            Self::Upload { size, sha256, format: _ } => {
                import["upload"] = json!({ "size": size, "sha256": sha256 });
            }
            Self::Claim { .. } => return None,
        }
        Some(import)
    }
}

/// The network of a new VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WantedNetwork {
    /// The guest has the Pod's address.
    Pod,
    /// The guest reaches the network, and nothing reaches the guest.
    User,
    /// A bridge of the node.
    Bridge(String),
    /// None.
    Nothing,
}

impl WantedNetwork {
    fn value(&self) -> Option<Value> {
        Some(match self {
            Self::Pod => json!({ "pod": {} }),
            Self::User => json!({ "user": {} }),
            Self::Bridge(bridge) => json!({ "tap": { "bridge": bridge } }),
            Self::Nothing => return None,
        })
    }
}

/// What cloud-init is given.
#[derive(Clone, Debug, PartialEq)]
pub enum WantedUser {
    /// A user who logs in with these keys and may become root.
    Keys {
        /// The user's name.
        user: String,
        /// Public keys, as in `~/.ssh/authorized_keys`.
        keys: Vec<String>,
    },
    /// The whole user-data: YAML, or a text that begins with `#`.
    Data(Value),
    /// Nothing.
    Nobody,
}

/// What a person says of a new VM.
#[derive(Clone, Debug, PartialEq)]
pub struct NewVm {
    /// Its name.
    pub name: String,
    /// Its namespace. `None`: the manifest names none.
    pub namespace: Option<String>,
    /// What fills its disk. `None`: the disk is empty.
    pub image: Option<DiskImage>,
    /// What is in its CD drive. `None`: it has no drive.
    pub cd: Option<String>,
    /// CPUs.
    pub cpus: u32,
    /// Memory.
    pub ram: Quantity,
    /// The size of its disk, as Kubernetes writes it.
    pub disk: String,
    /// The storage class of its disk. `None`: the default one.
    pub class: Option<String>,
    /// The network.
    pub network: WantedNetwork,
    /// Who can log in.
    pub user: WantedUser,
    /// The pools to which it belongs.
    pub pools: Vec<String>,
    /// The template set that fills disks.
    pub set: String,
    /// Whether it is started. If not, the manifest says nothing about that, so that people start and stop it.
    pub start: bool,
}

/// A size as Kubernetes reads it in a claim.
pub fn plain_size(size: &Quantity) -> String {
    size.to_string().replace([' ', 'B'], "").replace("ki", "Ki")
}

/// The manifest.
pub fn manifest(wanted: &NewVm) -> Value {
    let NewVm { name, namespace, image, cd, cpus, ram, disk, class, network, user, pools, set, start } = wanted;
    let mut metadata = json!({ "name": name });
    if let Some(namespace) = namespace {
        metadata["namespace"] = json!(namespace);
    }
    let mut claim = json!({ "resources": { "requests": { "storage": disk } } });
    if let Some(class) = class {
        claim["storageClassName"] = json!(class);
    }
    if let Some(DiskImage::Claim { name, mode }) = image {
        claim["dataSource"] = json!({ "kind": "PersistentVolumeClaim", "name": name });
        if let Some(mode) = mode {
            claim["volumeMode"] = json!(mode);
        }
    }
    let mut disks = vec![json!({ "volumeClaimTemplate": { "metadata": { "name": SYSTEM_DISK }, "spec": claim } })];
    disks.extend(cd.as_ref().map(|image| json!({ "cdrom": { "image": image } })));
    let mut machine = Map::new();
    if *start {
        machine.insert("state".into(), json!("Running"));
    }
    machine.insert("maximumCpus".into(), json!(cpus));
    machine.insert("maximumRam".into(), json!(ram));
    machine.insert("networks".into(), network.value().into_iter().collect());
    machine.insert("disks".into(), json!(disks));
    let mut spec = json!({ "vm": machine });
    if let Some(import) = image.as_ref().and_then(DiskImage::values) {
        spec["templates"] = json!({ "set": set });
        spec["templateValues"] = json!({ "import": import });
    }
    if let Some(data) = user_data(user) {
        spec["cloudInit"] = json!({ "userData": data });
    }
    if !pools.is_empty() {
        spec["pools"] = json!(pools);
    }
    json!({ "apiVersion": format!("{GROUP}/v1"), "kind": "VirtualMachine", "metadata": metadata, "spec": spec })
}

/// The user-data (<https://cloudinit.readthedocs.io/en/latest/reference/modules.html#users-and-groups>).
fn user_data(user: &WantedUser) -> Option<Value> {
    let (name, keys) = match user {
        WantedUser::Nobody => return None,
        WantedUser::Data(data) => return Some(data.clone()),
        WantedUser::Keys { user, keys } => (user, keys),
    };
    // With the guest agent the VM's condition Booted says when the guest is up, and `kubectl vm guest` and `reboot` work.
    let mut data = json!({
        "packages": ["qemu-guest-agent"],
        "runcmd": ["systemctl start qemu-guest-agent"],
    });
    if name == "root" {
        data["disable_root"] = json!(false);
        data["users"] = json!([{ "name": name, "ssh_authorized_keys": keys }]);
    } else {
        let sudo = "ALL=(ALL) NOPASSWD:ALL";
        data["users"] = json!([{ "name": name, "shell": "/bin/bash", "ssh_authorized_keys": keys, "sudo": sudo }]);
    }
    Some(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(text: &str) -> DiskImage {
        match ImageName::parse(text, false, None).unwrap() {
            ImageName::Known(image) => image,
            ImageName::File(file) => panic!("{file}"),
        }
    }

    fn wanted() -> NewVm {
        NewVm {
            name: "web".into(),
            namespace: None,
            image: Some(image("debian:12")),
            cd: None,
            cpus: 2,
            ram: Quantity::parse("2Gi").unwrap(),
            disk: "10Gi".into(),
            class: None,
            network: WantedNetwork::Pod,
            user: WantedUser::Keys { user: "ann".into(), keys: vec!["ssh-ed25519 AAAA ann@desk".into()] },
            pools: Vec::new(),
            set: IMPORT_SET.into(),
            start: true,
        }
    }

    fn yaml(wanted: &NewVm) -> String {
        crate::yaml::unfolded(&manifest(wanted)).unwrap()
    }

    #[test]
    fn a_cloud_image_fills_the_disk() {
        insta::assert_snapshot!(yaml(&wanted()), @r#"
        apiVersion: vmoperator.jdrupes.org/v1
        kind: VirtualMachine
        metadata:
          name: web
        spec:
          cloudInit:
            userData:
              packages:
              - qemu-guest-agent
              runcmd:
              - systemctl start qemu-guest-agent
              users:
              - name: ann
                shell: /bin/bash
                ssh_authorized_keys:
                - ssh-ed25519 AAAA ann@desk
                sudo: ALL=(ALL) NOPASSWD:ALL
          templateValues:
            import:
              sums: https://cloud.debian.org/images/cloud/bookworm/latest/SHA512SUMS
              url: https://cloud.debian.org/images/cloud/bookworm/latest/debian-12-generic-amd64.qcow2
          templates:
            set: import-disk
          vm:
            disks:
            - volumeClaimTemplate:
                metadata:
                  name: system
                spec:
                  resources:
                    requests:
                      storage: 10Gi
            maximumCpus: 2
            maximumRam: 2Gi
            networks:
            - pod: {}
            state: Running
        "#);
    }

    #[test]
    fn a_cd_installs_onto_an_empty_disk() {
        let wanted = NewVm {
            namespace: Some("vms".into()),
            image: None,
            cd: Some("debian.iso".into()),
            class: Some("fast".into()),
            network: WantedNetwork::Bridge("br1".into()),
            user: WantedUser::Nobody,
            pools: vec!["desks".into()],
            start: false,
            ..wanted()
        };
        insta::assert_snapshot!(yaml(&wanted), @r"
        apiVersion: vmoperator.jdrupes.org/v1
        kind: VirtualMachine
        metadata:
          name: web
          namespace: vms
        spec:
          pools:
          - desks
          vm:
            disks:
            - volumeClaimTemplate:
                metadata:
                  name: system
                spec:
                  resources:
                    requests:
                      storage: 10Gi
                  storageClassName: fast
            - cdrom:
                image: debian.iso
            maximumCpus: 2
            maximumRam: 2Gi
            networks:
            - tap:
                bridge: br1
        ");
    }

    #[test]
    fn root_and_data_of_ones_own() {
        let data = |user| user_data(&user).unwrap();
        let root = data(WantedUser::Keys { user: "root".into(), keys: vec!["k".into()] });
        assert_eq!(root["disable_root"], false);
        assert_eq!(root["users"], json!([{ "name": "root", "ssh_authorized_keys": ["k"] }]));
        assert_eq!(data(WantedUser::Data(json!("#!/bin/sh\n"))), "#!/bin/sh\n");
        let raw = DiskImage::Url { url: "http://a/b".into(), format: "raw", checksum: Checksum::Sum("0a".into()) };
        let raw = NewVm { image: Some(raw), set: "fill".into(), ..wanted() };
        let raw = manifest(&NewVm { network: WantedNetwork::Nothing, ..raw });
        assert_eq!(
            raw["spec"]["templateValues"]["import"],
            json!({ "url": "http://a/b", "format": "raw", "sha256": "0a" })
        );
        assert_eq!((&raw["spec"]["templates"]["set"], &raw["spec"]["vm"]["networks"]), (&json!("fill"), &json!([])));
        let user = manifest(&NewVm { network: WantedNetwork::User, ..wanted() });
        assert_eq!(user["spec"]["vm"]["networks"], json!([{ "user": {} }]));
    }

    #[test]
    fn other_images_fill_the_disk() {
        let spec = |image: DiskImage| manifest(&NewVm { image: Some(image), ..wanted() })["spec"].take();
        let import = |image: DiskImage| spec(image)["templateValues"]["import"].take();
        assert_eq!(import(image("oci:quay.io/a/b:1")), json!({ "oci": "quay.io/a/b:1" }));
        let upload = DiskImage::Upload { size: 7, sha256: "ab".into(), format: "raw" };
        assert_eq!(import(upload), json!({ "format": "raw", "upload": { "size": 7, "sha256": "ab" } }));
        let cloned = spec(DiskImage::Claim { name: "golden".into(), mode: Some("Filesystem".into()) });
        let claim = &cloned["vm"]["disks"][0]["volumeClaimTemplate"]["spec"];
        assert_eq!(claim["dataSource"], json!({ "kind": "PersistentVolumeClaim", "name": "golden" }));
        assert_eq!((&claim["volumeMode"], &cloned["templates"]), (&json!("Filesystem"), &Value::Null));
    }

    #[test]
    fn an_image_is_a_url_or_another_source() {
        let sum = "0".repeat(63) + "A";
        let parsed = |text: &str, sum: Option<&str>| match ImageName::parse(text, false, sum) {
            Ok(ImageName::Known(DiskImage::Url { url, format, checksum })) => format!("{format} {url} {checksum:?}"),
            Ok(image) => format!("{image:?}"),
            Err(error) => error.to_string(),
        };
        let unknown = |text: &str| {
            format!(
                "{text:?} is no image that can fill a disk: write https://... (qcow2 or raw), oci:IMAGE, claim:NAME, ./FILE, or one of \
                 debian:12, debian:13, ubuntu:22.04, ubuntu:24.04"
            )
        };
        for (text, expected) in [
            ("https://a/b.qcow2", "qcow2 https://a/b.qcow2 None".to_owned()),
            ("http://a/b.img?x=.raw", "qcow2 http://a/b.img?x=.raw None".into()),
            ("https://a/B.RAW", "raw https://a/B.RAW None".into()),
            ("ubuntu:24.04", format!("qcow2 {} At({:?})", CATALOG[3].1, CATALOG[3].2)),
            ("https://a/b.iso", "https://a/b.iso is a CD: give it by --cd, which needs no import".into()),
            ("./b.raw.xz", "./b.raw.xz is compressed: only images of the formats qcow2 and raw fill a disk".into()),
            (
                "https://a/b.vmdk",
                "https://a/b.vmdk has another format than qcow2 and raw, which fill a disk: convert it with qemu-img convert -O qcow2".into(),
            ),
            ("oci://quay.io/a/b", "Known(Container(\"quay.io/a/b\"))".into()),
            ("claim:golden", "Known(Claim { name: \"golden\", mode: None })".into()),
            ("./disk.qcow2", "File(\"./disk.qcow2\")".into()),
            ("claim:Golden", unknown("claim:Golden")),
            ("oci:", unknown("oci:")),
            ("https://", unknown("https://")),
            ("debian", unknown("debian")),
            ("ftp://a/b", unknown("ftp://a/b")),
        ] {
            assert_eq!(parsed(text, None), expected);
        }
        let with_sum = parsed("https://a/b", Some(&sum));
        assert_eq!(with_sum, format!("qcow2 https://a/b Sum({:?})", sum.to_lowercase()));
        assert!(parsed("debian:12", Some(&sum)).contains("Sum("), "it outranks the distribution's");
        assert!(parsed("https://a/b", Some("abc")).contains("is no checksum"));
        assert!(parsed("./a.img", Some(&sum)).contains("a file is always compared"));
        let fixed = ImageName::parse("https://a/b.vhd", true, None);
        assert!(matches!(fixed, Ok(ImageName::Known(DiskImage::Url { format: "raw", .. }))), "{fixed:?}");
    }
}
