//! What is in a CD drive.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What QEMU opens for a CD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Medium {
    /// A file, as a path without links.
    File(String),
    /// An http(s) URL.
    Url(String),
}

impl Medium {
    /// The path or the URL, as QEMU shows it too.
    pub fn text(&self) -> &str {
        match self {
            Self::File(text) | Self::Url(text) => text,
        }
    }

    /// QEMU's driver.
    pub fn driver(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Url(url) if url.starts_with("https:") => "https",
            Self::Url(_) => "http",
        }
    }

    /// The protocol of a URL; `None` for a file.
    pub fn protocol(&self) -> Option<&'static str> {
        matches!(self, Self::Url(_)).then(|| self.driver())
    }

    /// The arguments of `blockdev-add`. The format is given, because QEMU would guess it from the content, which is not trusted.
    pub fn node(&self, name: &str) -> Value {
        let key = if matches!(self, Self::File(_)) { "filename" } else { "url" };
        json!({
            "driver": "raw", "node-name": name, "read-only": true,
            "file": { "driver": self.driver(), key: self.text(), "read-only": true },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_gets_a_driver_and_never_a_text_to_interpret() {
        let node = |medium: Medium| medium.node("cd0-1").to_string();
        assert_eq!(
            node(Medium::File("/a/json:{}".into())),
            r#"{"driver":"raw","file":{"driver":"file","filename":"/a/json:{}","read-only":true},"node-name":"cd0-1","read-only":true}"#
        );
        assert_eq!(
            node(Medium::Url("https://host/a.iso".into())),
            r#"{"driver":"raw","file":{"driver":"https","read-only":true,"url":"https://host/a.iso"},"node-name":"cd0-1","read-only":true}"#
        );
    }
}
