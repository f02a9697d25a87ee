//! Makes the manifest of a new VM from what a person says of it.
//!
//! ```text
//!  options, keys, files ─▶ Wanted ─▶ manifest ─▶ a file for Git, or the API server
//! ```
//!
//! A disk gets its content before the first start from the template set `import-disk` (docs/cookbook.md), which downloads an image.

use serde_json::{Map, Value, json};

use crate::api::{GROUP, Quantity};

/// The set that fills disks, and the name of the disk that it fills.
pub const IMPORT_SET: &str = "import-disk";
const SYSTEM_DISK: &str = "system";

/// The images that have short names: those that their distributions publish for clouds, with cloud-init, for amd64. Each is the newest of
/// its release, so it has no checksum that could be written down here.
pub const CATALOG: [(&str, &str); 4] = [
    ("debian:12", "https://cloud.debian.org/images/cloud/bookworm/latest/debian-12-generic-amd64.qcow2"),
    ("debian:13", "https://cloud.debian.org/images/cloud/trixie/latest/debian-13-generic-amd64.qcow2"),
    ("ubuntu:22.04", "https://cloud-images.ubuntu.com/jammy/current/jammy-server-cloudimg-amd64.img"),
    ("ubuntu:24.04", "https://cloud-images.ubuntu.com/noble/current/noble-server-cloudimg-amd64.img"),
];

/// An image that fills the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskImage {
    /// Where it is downloaded from, by the VM's Pod.
    pub url: String,
    /// Its format, with qemu-img's name.
    pub format: &'static str,
}

/// The text names no image that can fill a disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what they are")]
pub enum InvalidImage {
    #[error("{0} is a CD: give it by --cd, which needs no import")]
    Cd(String),
    #[error("{0} is compressed: only images of the formats qcow2 and raw fill a disk")]
    Compressed(String),
    #[error(
        "{text:?} is no image that can fill a disk: write https://... (qcow2 or raw), or one of {}",
        CATALOG.map(|(name, _)| name).join(", ")
    )]
    Unknown { text: String },
}

impl DiskImage {
    /// The image of a URL, or of a short name in the [`CATALOG`]. `is_raw`: its format, where the URL's end does not tell it.
    ///
    /// # Errors
    /// If that can't fill a disk.
    pub fn parse(text: &str, is_raw: bool) -> Result<Self, InvalidImage> {
        let url = CATALOG.iter().find(|(name, _)| *name == text).map_or(text, |(_, url)| url);
        if !["https://", "http://"].iter().any(|scheme| url.strip_prefix(scheme).is_some_and(|rest| !rest.is_empty())) {
            return Err(InvalidImage::Unknown { text: text.to_owned() });
        }
        let path = url.split(['?', '#']).next().unwrap_or_default().to_lowercase();
        let ends = |ends: &[&str]| ends.iter().any(|end| path.ends_with(end));
        if ends(&[".iso"]) {
            return Err(InvalidImage::Cd(text.to_owned()));
        }
        if ends(&[".xz", ".gz", ".zst", ".bz2", ".zip", ".tar", ".ova"]) {
            return Err(InvalidImage::Compressed(text.to_owned()));
        }
        let format = if is_raw || ends(&[".raw"]) { "raw" } else { "qcow2" };
        Ok(Self { url: url.to_owned(), format })
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
pub struct Wanted {
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
    /// The template set that fills disks.
    pub set: String,
    /// Whether it is started. If not, the manifest says nothing about that, so that people start and stop it.
    pub start: bool,
}

/// The manifest.
pub fn manifest(wanted: &Wanted) -> Value {
    let Wanted { name, namespace, image, cd, cpus, ram, disk, class, network, user, set, start } = wanted;
    let mut metadata = json!({ "name": name });
    if let Some(namespace) = namespace {
        metadata["namespace"] = json!(namespace);
    }
    let mut claim = json!({ "resources": { "requests": { "storage": disk } } });
    if let Some(class) = class {
        claim["storageClassName"] = json!(class);
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
    if let Some(DiskImage { url, format }) = image {
        spec["templates"] = json!({ "set": set });
        let mut import = json!({ "url": url });
        // The set's default.
        if *format != "qcow2" {
            import["format"] = json!(format);
        }
        spec["templateValues"] = json!({ "import": import });
    }
    if let Some(data) = user_data(user) {
        spec["cloudInit"] = json!({ "userData": data });
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

    fn wanted() -> Wanted {
        Wanted {
            name: "web".into(),
            namespace: None,
            image: Some(DiskImage::parse("debian:12", false).unwrap()),
            cd: None,
            cpus: 2,
            ram: Quantity::parse("2Gi").unwrap(),
            disk: "10Gi".into(),
            class: None,
            network: WantedNetwork::Pod,
            user: WantedUser::Keys { user: "ann".into(), keys: vec!["ssh-ed25519 AAAA ann@desk".into()] },
            set: IMPORT_SET.into(),
            start: true,
        }
    }

    fn yaml(wanted: &Wanted) -> String {
        let options = serde_saphyr::ser_options! { folded_wrap_chars: usize::MAX };
        serde_saphyr::to_string_with_options(&manifest(wanted), options).unwrap()
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
        let wanted = Wanted {
            namespace: Some("vms".into()),
            image: None,
            cd: Some("debian.iso".into()),
            class: Some("fast".into()),
            network: WantedNetwork::Bridge("br1".into()),
            user: WantedUser::Nobody,
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
        let raw = Wanted { image: Some(DiskImage::parse("http://a/b", true).unwrap()), set: "fill".into(), ..wanted() };
        let raw = manifest(&Wanted { network: WantedNetwork::Nothing, ..raw });
        assert_eq!(raw["spec"]["templateValues"]["import"], json!({ "url": "http://a/b", "format": "raw" }));
        assert_eq!((&raw["spec"]["templates"]["set"], &raw["spec"]["vm"]["networks"]), (&json!("fill"), &json!([])));
        let user = manifest(&Wanted { network: WantedNetwork::User, ..wanted() });
        assert_eq!(user["spec"]["vm"]["networks"], json!([{ "user": {} }]));
    }

    #[test]
    fn an_image_is_a_url_or_a_short_name() {
        let parsed = |text: &str| {
            DiskImage::parse(text, false)
                .map_or_else(|error| error.to_string(), |it| format!("{} {}", it.format, it.url))
        };
        let unknown = |text: &str| {
            format!(
                "{text:?} is no image that can fill a disk: write https://... (qcow2 or raw), or one of debian:12, debian:13, \
                 ubuntu:22.04, ubuntu:24.04"
            )
        };
        for (text, expected) in [
            ("https://a/b.qcow2", "qcow2 https://a/b.qcow2".to_owned()),
            ("http://a/b.img?x=.raw", "qcow2 http://a/b.img?x=.raw".into()),
            ("https://a/B.RAW", "raw https://a/B.RAW".into()),
            ("ubuntu:24.04", format!("qcow2 {}", CATALOG[3].1)),
            ("https://a/b.iso", "https://a/b.iso is a CD: give it by --cd, which needs no import".into()),
            (
                "https://a/b.raw.xz",
                "https://a/b.raw.xz is compressed: only images of the formats qcow2 and raw fill a disk".into(),
            ),
            ("https://", unknown("https://")),
            ("debian", unknown("debian")),
            ("oci://a/b", unknown("oci://a/b")),
            ("./disk.qcow2", unknown("./disk.qcow2")),
        ] {
            assert_eq!(parsed(text), expected);
        }
    }
}
