//! The fields of `spec.vm.display`.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::schema;

/// The display.
#[derive(Clone, Debug, Serialize, Deserialize, KubeSchema, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.vnc) || !has(self.clipboard) || self.clipboard == 'vnc'").message("display.clipboard can't be spice with display.vnc: such a display has no SPICE"),
)]
#[serde(rename_all = "camelCase")]
pub struct Display {
    /// The number of screens.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 16))]
    pub outputs: u32,
    /// The user that the guest's login agent logs in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256), regex(pattern = r"^[^\x00-\x1f\x7f-\x9f]*$"))]
    pub logged_in_user: Option<String>,
    /// The display as SPICE.
    #[serde(default)]
    pub spice: Spice,
    /// The display as VNC, instead of SPICE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnc: Option<Vnc>,
    /// Which viewers share the guest's clipboard: those of SPICE, or those of VNC, such as a browser. Default: those of SPICE, and those of VNC
    /// if the display has no SPICE. The guest needs its SPICE agent (`spice-vdagent`) for both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clipboard: Option<Clipboard>,
}

/// The viewers that share the guest's clipboard.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Clipboard {
    Spice,
    Vnc,
}

impl Display {
    /// The viewers that share the guest's clipboard.
    #[must_use]
    pub fn clipboard(&self) -> Clipboard {
        self.clipboard.unwrap_or(if self.vnc.is_some() { Clipboard::Vnc } else { Clipboard::Spice })
    }
}

impl Default for Display {
    fn default() -> Self {
        Self { outputs: 1, logged_in_user: None, spice: Spice::default(), vnc: None, clipboard: None }
    }
}

/// SPICE.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Spice {
    /// The port in the Pod. 0: there is none, and only programs in the Pod reach the display.
    #[serde(default = "spice_port")]
    #[schemars(range(min = 0, max = 65535))]
    pub port: u16,
    /// The host in the connection file (`kubectl vm display`). Default: the load balancer's address, or else the Pod's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253), regex(pattern = r"^[^\x00-\x1f\x7f-\x9f]*$"))]
    pub server: Option<String>,
    /// Whether the manager creates a display secret with a random password if there is none.
    #[serde(default = "yes")]
    pub generate_secret: bool,
    /// The URL of an HTTP proxy for SPICE viewers, for the connection file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096), regex(pattern = r"^[^\x00-\x1f\x7f-\x9f]*$"))]
    pub proxy_url: Option<String>,
    /// SPICE's `streaming-video`: `off`, `all` or `filter`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::qemu_text")]
    pub streaming_video: Option<String>,
    /// The number of USB devices that a viewer can redirect.
    #[serde(default = "two")]
    #[schemars(range(min = 0, max = 8))]
    pub usb_redirects: u32,
}

impl Default for Spice {
    fn default() -> Self {
        Self {
            port: spice_port(),
            server: None,
            generate_secret: true,
            proxy_url: None,
            streaming_video: None,
            usb_redirects: 2,
        }
    }
}

/// VNC.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct Vnc {
    /// The port in the Pod.
    #[serde(default = "spice_port")]
    #[schemars(range(min = 5900, max = 65535))]
    pub port: u16,
}

fn yes() -> bool {
    true
}
fn one() -> u32 {
    1
}
fn two() -> u32 {
    2
}
fn spice_port() -> u16 {
    5900
}
