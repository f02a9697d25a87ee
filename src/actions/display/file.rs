//! The connection file of remote-viewer (its manual, section CONNECTION FILE).

use super::{Connection, Protocol};

impl Connection {
    /// The connection file for remote-viewer. With `delete_after_use` the viewer deletes it.
    pub fn file(&self, delete_after_use: bool) -> String {
        let proxy = self.proxy.clone().filter(|_| self.protocol == Protocol::Spice);
        let values = [
            ("type", Some(self.protocol.name().to_owned())),
            ("host", Some(self.host.name().to_owned())),
            ("port", Some(self.port.to_string())),
            ("password", self.password.clone()),
            ("proxy", proxy),
            ("title", Some(self.vm.clone())),
            ("enable-usbredir", self.usb.then(|| "1".to_owned())),
            ("delete-this-file", delete_after_use.then(|| "1".to_owned())),
        ];
        let lines = values.into_iter().filter_map(|(key, value)| Some(format!("{key}={}\n", escape(&value?))));
        std::iter::once("[virt-viewer]\n".to_owned()).chain(lines).collect()
    }
}

/// Writes a value so that GKeyFile (<https://docs.gtk.org/glib/struct.KeyFile.html>) reads it unchanged: GKeyFile drops spaces
/// at the start and takes a backslash as the start of an escape.
fn escape(value: &str) -> String {
    let text = value.trim_start_matches(' ');
    let spaces = "\\s".repeat(value.len() - text.len());
    spaces + &text.replace('\\', "\\\\").replace('\n', "\\n").replace('\r', "\\r").replace('\t', "\\t")
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Host, Protocol},
        *,
    };

    fn connection() -> Connection {
        Connection {
            vm: "orchard/apple".into(),
            protocol: Protocol::Spice,
            host: Host::Public("vms.example.org".into()),
            port: 5910,
            pod_port: 5900,
            password: Some(" a\\b\n".into()),
            proxy: Some("http://proxy:3128".into()),
            usb: true,
        }
    }

    #[test]
    fn a_spice_viewer_gets_everything() {
        insta::assert_snapshot!(connection().file(true), @r"
        [virt-viewer]
        type=spice
        host=vms.example.org
        port=5910
        password=\sa\\b\n
        proxy=http://proxy:3128
        title=orchard/apple
        enable-usbredir=1
        delete-this-file=1
        ");
    }

    #[test]
    fn a_vnc_viewer_gets_no_proxy() {
        let host = Host::Pod("10.0.0.1".into());
        let vnc = Connection { protocol: Protocol::Vnc, host, port: 5901, password: None, usb: false, ..connection() };
        insta::assert_snapshot!(vnc.file(false), @"
        [virt-viewer]
        type=vnc
        host=10.0.0.1
        port=5901
        title=orchard/apple
        ");
    }
}
