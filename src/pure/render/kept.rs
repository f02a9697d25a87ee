//! How the manager keeps template sets in ConfigMaps: what is in force, and which versions were before. Commands read them.
//!
//! | ConfigMap | content |
//! |---|---|
//! | `vm-operator-in-force[-SET]` | the version in force |
//! | `vm-operator-in-force[-SET].VERSION` | a former version that a VM keeps, because its values do not match the schema of the newest one |
//! | `vm-operator-history[-SET].VERSION` | a version that came in force: the newest one, and a few before it |

use std::io::{self, Read, Write};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use k8s_openapi::api::core::v1::ConfigMap;

use super::templates::Layers;
use crate::object::{HISTORY_MAP, IN_FORCE_MAP};

/// The label of a set that is in force, and of a former version that is kept. Its value is the set's name, and empty for the set of the VMs
/// that name none.
pub const LABEL: &str = "vmoperator.jdrupes.org/templates-in-force";
/// The label of a former version that a VM keeps. Its value is the version.
pub const FORMER: &str = "vmoperator.jdrupes.org/templates-former";
/// The label of a version in the history. Its value is the set's name, as that of [`LABEL`].
pub const HISTORY: &str = "vmoperator.jdrupes.org/templates-history";
/// The annotation with the version of the set.
pub const VERSION: &str = "vmoperator.jdrupes.org/version";
/// The annotation with the time at which a version came in force.
pub const SINCE: &str = "vmoperator.jdrupes.org/in-force-since";
/// The key with [`Layers`] as compressed JSON.
pub const KEY: &str = "layers.json.gz";
/// How many versions of a set its history has.
pub const HISTORY_LENGTH: usize = 5;
/// The most bytes that are read out of compressed data: no set that can be used is larger.
const LARGEST_UNPACKED: u64 = 64 << 20;

/// The ConfigMap of a set, or of a former version that a VM keeps.
pub fn in_force_name(set: Option<&str>, former: Option<&str>) -> String {
    name(IN_FORCE_MAP, set, former)
}

/// The ConfigMap of a version in the history.
pub fn history_name(set: Option<&str>, version: &str) -> String {
    name(HISTORY_MAP, set, Some(version))
}

fn name(begin: &str, set: Option<&str>, version: Option<&str>) -> String {
    let set = set.map(|set| format!("-{}", set.to_lowercase())).unwrap_or_default();
    let version = version.map(|version| format!(".{version}")).unwrap_or_default();
    format!("{begin}{set}{version}")
}

impl Layers {
    /// The layers as compressed JSON. A map of strings is written as JSON without an error, and so is a vector of bytes.
    pub fn packed(&self) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        let written = serde_json::to_writer(&mut encoder, self).map_err(io::Error::from);
        written.and_then(|()| encoder.flush()).and_then(|()| encoder.finish()).unwrap_or_default()
    }

    /// The layers that a ConfigMap keeps. `None`: it has none, or another program wrote it.
    pub fn kept_in(map: &ConfigMap) -> Option<Self> {
        Self::unpacked(&map.binary_data.as_ref()?.get(KEY)?.0)
    }

    /// The layers from what [`Layers::packed`] made.
    pub fn unpacked(bytes: &[u8]) -> Option<Self> {
        let mut text = String::new();
        GzDecoder::new(bytes).take(LARGEST_UNPACKED).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_the_set_and_the_version() {
        assert_eq!(in_force_name(None, None), "vm-operator-in-force");
        assert_eq!(in_force_name(Some("Desktop"), Some("1234")), "vm-operator-in-force-desktop.1234");
        assert_eq!(history_name(None, "1234"), "vm-operator-history.1234");
    }
}
