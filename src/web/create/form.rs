//! What is in the form for a new VM, what that makes, and what is wrong with it.
//!
//! ```text
//!  fields ─▶ NewVm (with a default for what is wrong) ─▶ manifest, command
//!         └▶ what is wrong, by field ◀─ fields that the API server refuses
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    actions::create::{
        DISK_SIZE, DiskImage, IMPORT_SET, ImageName, NewVm, WantedNetwork, WantedUser,
        login::{is_user_name, keys_of},
        plain_size,
    },
    api::Quantity,
};

/// The most CPUs that the form takes, as `kubectl vm create`.
const MOST_CPUS: u32 = 1024;

/// A field of the form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "each is the field of that name in `Form`")]
pub(in crate::web) enum Field {
    Namespace,
    Name,
    Image,
    Cpus,
    Ram,
    Disk,
    Network,
    Bridge,
    User,
    Keys,
    Pools,
}

/// What is wrong with a field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::web) enum Wrong {
    /// It is empty, and must not be.
    Missing,
    /// The form can't take it: the text of the field's name says why.
    Invalid,
    /// What the API server says.
    Says(String),
}

/// What is wrong, by field.
pub(in crate::web) type Problems = BTreeMap<Field, Wrong>;

/// The fields as the browser sends them. What it does not send is empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(in crate::web) struct Form {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// What fills the disk: a name of the catalog, a URL or `oci:IMAGE`.
    pub image: String,
    /// How many CPUs.
    pub cpus: String,
    /// The memory.
    pub ram: String,
    /// The size of the disk.
    pub disk: String,
    /// `pod`, `user`, `bridge` or `none`.
    pub network: String,
    /// The node's bridge, for `bridge`.
    pub bridge: String,
    /// Who logs in.
    pub user: String,
    /// That user's public keys, one in a line.
    pub keys: String,
    /// Pools, with commas or spaces.
    pub pools: String,
    /// Whether it starts. A browser sends nothing for a box that is not checked.
    pub start: Option<String>,
    /// `create`: create it; else only ask.
    #[serde(rename = "do", skip_serializing)]
    pub what: String,
    /// The page asks by itself, while somebody types.
    #[serde(skip_serializing)]
    pub live: Option<String>,
}

impl Default for Form {
    fn default() -> Self {
        let empty = String::new;
        Self {
            namespace: empty(),
            name: empty(),
            image: empty(),
            cpus: empty(),
            ram: empty(),
            disk: empty(),
            network: empty(),
            bridge: empty(),
            user: empty(),
            keys: empty(),
            pools: empty(),
            start: None,
            what: empty(),
            live: None,
        }
    }
}

impl Form {
    /// The form before anybody has typed.
    pub fn new(namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            image: "debian:13".into(),
            cpus: "2".into(),
            ram: "2Gi".into(),
            disk: "10Gi".into(),
            network: "pod".into(),
            start: Some("on".into()),
            ..Self::default()
        }
    }

    /// What the fields say, with a default for each that is wrong. `serves`: whether the web interface has that namespace.
    pub fn read(&self, serves: impl Fn(&str) -> bool) -> (NewVm, Problems) {
        let mut problems = Problems::new();
        let mut required = |field, text: &str, is_right: bool| match (text.trim(), is_right) {
            ("", _) => drop(problems.insert(field, Wrong::Missing)),
            (_, true) => {}
            (_, false) => drop(problems.insert(field, Wrong::Invalid)),
        };
        let (namespace, name, image) = (self.namespace.trim(), self.name.trim(), self.image.trim());
        required(Field::Namespace, namespace, serves(namespace));
        // Whether it is a name, the API server says.
        required(Field::Name, name, true);
        // A clone needs what the claim has, and a file somebody who sends it: both need kubectl.
        let found = match ImageName::parse(image, false, None) {
            Ok(ImageName::Known(image @ (DiskImage::Url { .. } | DiskImage::Container(_)))) => Some(image),
            _ => None,
        };
        required(Field::Image, image, found.is_some());
        let cpus = self.cpus.trim().parse().ok().filter(|number| (1..=MOST_CPUS).contains(number));
        required(Field::Cpus, &self.cpus, cpus.is_some());
        let size = |text: &str| Quantity::parse(text.trim()).ok();
        let (ram, disk) = (size(&self.ram), size(&self.disk));
        required(Field::Ram, &self.ram, ram.is_some());
        required(Field::Disk, &self.disk, disk.is_some());
        let network = match self.network.as_str() {
            "pod" => Some(WantedNetwork::Pod),
            "user" => Some(WantedNetwork::User),
            "none" => Some(WantedNetwork::Nothing),
            "bridge" => {
                required(Field::Bridge, &self.bridge, true);
                Some(WantedNetwork::Bridge(self.bridge.trim().to_owned()))
            }
            _ => None,
        };
        required(Field::Network, &self.network, network.is_some());
        let (user, keys) = (self.user.trim(), keys_of(&self.keys));
        required(Field::User, user, is_user_name(user));
        required(Field::Keys, &self.keys, keys.is_ok());
        let pools = self.pools.split([',', ' ', '\n']).map(str::trim).filter(|pool| !pool.is_empty());
        let wanted = NewVm {
            name: name.to_owned(),
            namespace: Some(namespace.to_owned()),
            image: found,
            cd: None,
            cpus: cpus.unwrap_or(1),
            ram: ram.unwrap_or_else(|| Quantity::with_unit(2 << 30)),
            disk: plain_size(&disk.unwrap_or_else(|| Quantity::with_unit(DISK_SIZE))),
            class: None,
            network: network.unwrap_or(WantedNetwork::Pod),
            user: WantedUser::Keys { user: user.to_owned(), keys: keys.unwrap_or_default() },
            pools: pools.map(str::to_owned).collect(),
            set: IMPORT_SET.into(),
            start: self.start.is_some(),
        };
        (wanted, problems)
    }
}

/// The field of the form that makes a field of the manifest, by its path as the API server writes it. `None`: no single one.
pub(super) fn field_of(path: &str) -> Option<Field> {
    const PATHS: [(&str, Field); 12] = [
        ("metadata.namespace", Field::Namespace),
        ("metadata.name", Field::Name),
        ("spec.templateValues", Field::Image),
        ("spec.templates", Field::Image),
        ("spec.vm.maximumCpus", Field::Cpus),
        ("spec.vm.currentCpus", Field::Cpus),
        ("spec.vm.maximumRam", Field::Ram),
        ("spec.vm.currentRam", Field::Ram),
        ("spec.vm.disks", Field::Disk),
        ("spec.vm.networks", Field::Network),
        ("spec.cloudInit", Field::User),
        ("spec.pools", Field::Pools),
    ];
    if path.starts_with("spec.vm.networks") && path.ends_with(".bridge") {
        return Some(Field::Bridge);
    }
    let is_in =
        |known: &str| path.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
    PATHS.into_iter().find(|(known, _)| is_in(known)).map(|(_, field)| field)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc ann@desk";

    fn right() -> Form {
        Form { name: "web".into(), user: "ann".into(), keys: format!("{KEY}\n"), ..Form::new("lab") }
    }

    fn problems(edit: impl FnOnce(&mut Form)) -> Vec<(Field, Wrong)> {
        let mut form = right();
        edit(&mut form);
        form.read(|namespace| namespace == "lab").1.into_iter().collect()
    }

    #[test]
    fn fields_become_a_vm() {
        let form = Form { pools: "a, b\n".into(), network: "bridge".into(), bridge: "br1".into(), ..right() };
        let (wanted, problems) = form.read(|_| true);
        assert_eq!(problems, Problems::new());
        assert_eq!((wanted.name.as_str(), wanted.namespace.as_deref(), wanted.cpus), ("web", Some("lab"), 2));
        assert_eq!((wanted.disk.as_str(), wanted.pools), ("10Gi", vec!["a".to_owned(), "b".into()]));
        assert_eq!(wanted.network, WantedNetwork::Bridge("br1".into()));
        assert_eq!(wanted.user, WantedUser::Keys { user: "ann".into(), keys: vec![KEY.into()] });
        assert!(wanted.start && !Form { start: None, ..right() }.read(|_| true).0.start);
    }

    #[test]
    fn each_field_says_what_is_wrong_with_it() {
        use Wrong::{Invalid, Missing};
        type Set = fn(&mut Form, &str);
        assert_eq!(problems(|_| {}), []);
        let cases: [(Set, &str, Field, Wrong); 20] = [
            (|it, text| it.namespace = text.into(), "meadow", Field::Namespace, Invalid),
            (|it, text| it.name = text.into(), " ", Field::Name, Missing),
            (|it, text| it.image = text.into(), "", Field::Image, Missing),
            (|it, text| it.image = text.into(), "fedora:1", Field::Image, Invalid),
            (|it, text| it.image = text.into(), "./file.img", Field::Image, Invalid),
            (|it, text| it.image = text.into(), "claim:golden", Field::Image, Invalid),
            (|it, text| it.cpus = text.into(), "0", Field::Cpus, Invalid),
            (|it, text| it.cpus = text.into(), "1025", Field::Cpus, Invalid),
            (|it, text| it.cpus = text.into(), "1.5", Field::Cpus, Invalid),
            (|it, text| it.ram = text.into(), "much", Field::Ram, Invalid),
            (|it, text| it.ram = text.into(), "", Field::Ram, Missing),
            (|it, text| it.disk = text.into(), "-1Gi", Field::Disk, Invalid),
            (|it, text| it.network = text.into(), "tap", Field::Network, Invalid),
            (|it, text| it.network = text.into(), "", Field::Network, Missing),
            (|it, text| it.network = text.into(), "bridge", Field::Bridge, Missing),
            (|it, text| it.user = text.into(), "", Field::User, Missing),
            (|it, text| it.user = text.into(), "Ann", Field::User, Invalid),
            (|it, text| it.keys = text.into(), "", Field::Keys, Missing),
            (|it, text| it.keys = text.into(), "secret", Field::Keys, Invalid),
            (|it, text| it.keys = text.into(), "-----BEGIN OPENSSH PRIVATE KEY-----", Field::Keys, Invalid),
        ];
        for (set, text, field, wrong) in cases {
            assert_eq!(problems(|form| set(form, text)), [(field, wrong)], "{text}");
        }
    }

    #[test]
    fn a_field_of_the_manifest_has_the_field_that_makes_it() {
        for (path, field) in [
            ("metadata.name", Some(Field::Name)),
            ("spec.vm.maximumRam", Some(Field::Ram)),
            ("spec.vm.networks[0].tap.bridge", Some(Field::Bridge)),
            ("spec.vm.networks", Some(Field::Network)),
            ("spec.vm.disks[0].volumeClaimTemplate", Some(Field::Disk)),
            ("spec.templateValues.import", Some(Field::Image)),
            ("spec.pools[1]", Some(Field::Pools)),
            ("spec.vm", None),
            ("spec.poolsize", None),
            ("", None),
        ] {
            assert_eq!(field_of(path), field, "{path}");
        }
    }
}
