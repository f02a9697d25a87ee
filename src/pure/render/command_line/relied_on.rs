//! What the runner relies on in QEMU's arguments, whatever a template makes of them.

use serde_json::Value;

use super::Context;

/// What must be there, and the block of the built-in template that has it.
struct Part {
    block: &'static str,
    /// For people: what is missing.
    what: String,
    /// The options of which one has it.
    options: &'static [&'static str],
    /// What the option's value has.
    has: Has,
}

/// What an option's value must have.
enum Has {
    /// A key with this value.
    Field(&'static str, String),
    /// This text in it.
    Text(String),
}

/// Checks the arguments that a template has rendered.
///
/// # Errors
/// The first part that is missing, for people.
pub(super) fn check(context: &Context<'_>, arguments: &[String]) -> Result<(), String> {
    // An agent that has not prepared the VM yet would find a guest that runs.
    if !arguments.iter().any(|argument| argument == "-S") {
        return Err("it starts the guest at once: QEMU must be started with -S, as the built-in template does outside of its blocks".into());
    }
    let Some(Part { block, what, .. }) = parts(context).into_iter().find(|part| !part.is_in(arguments)) else {
        return Ok(());
    };
    Err(format!(
        "it leaves out {what}, which the runner needs: see the block `{block}` of builtin/qemu/standard.yaml.j2"
    ))
}

impl Part {
    fn is_in(&self, arguments: &[String]) -> bool {
        let options = arguments.iter().zip(arguments.iter().skip(1));
        let mut values = options.filter(|(option, _)| self.options.contains(&option.as_str())).map(|(_, value)| value);
        match &self.has {
            Has::Field(name, wanted) => values.any(|value| field(value, name).as_ref() == Some(wanted)),
            Has::Text(text) => values.any(|value| value.contains(text)),
        }
    }
}

fn parts(context: &Context<'_>) -> Vec<Part> {
    let mut parts = Vec::new();
    for (id, path) in [("monitor", &context.sockets.monitor), ("agent", &context.sockets.agent)] {
        parts.extend([
            chardev("monitors", format!("the socket of the monitor `{id}`"), path),
            Part {
                block: "monitors",
                what: format!("the monitor `{id}`"),
                options: &["-mon"],
                has: Has::Field("chardev", id.into()),
            },
        ]);
    }
    parts.push(chardev("ports", "the socket of the serial console".into(), &context.sockets.serial));
    parts.push(device("devices", "the balloon".into(), "balloon".into()));
    parts.extend(context.disks.iter().map(|disk| device("disk", format!("the disk {}", disk.id), disk.id.to_string())));
    parts.extend(context.cds.iter().map(|cd| device("cd", format!("the CD drive {}", cd.id), cd.id.to_string())));
    for network in &context.networks {
        let id = network.id.to_string();
        parts.push(Part {
            block: "network",
            what: format!("the network {id}"),
            options: &["-netdev"],
            has: Has::Field("id", id),
        });
        // A template that is older than forwarded ports, or than this type of network, would connect the guest otherwise.
        parts.extend(network.forwards.iter().map(|forward| Part {
            block: "network",
            what: format!("the forwarded port {forward}"),
            options: &["-netdev"],
            has: Has::Text(forward.clone()),
        }));
        parts.extend(network.socket.iter().map(|socket| Part {
            block: "network",
            what: format!("the connection to {socket} of a network of type pod"),
            options: &["-netdev", "-chardev"],
            has: Has::Text(socket.clone()),
        }));
    }
    parts
}

fn chardev(block: &'static str, what: String, path: &str) -> Part {
    Part { block, what, options: &["-chardev"], has: Has::Field("path", path.into()) }
}

fn device(block: &'static str, what: String, id: String) -> Part {
    Part { block, what, options: &["-device"], has: Has::Field("id", id) }
}

/// A field of an option's value as QEMU reads it: JSON, or `key=value` between single commas; a doubled comma belongs to a value.
fn field(value: &str, name: &str) -> Option<String> {
    if value.starts_with('{') {
        let value: Value = serde_json::from_str(value).ok()?;
        return value[name].as_str().map(str::to_owned);
    }
    let escaped = value.replace(",,", "\0");
    let found = escaped.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='))?;
    Some(found.replace('\0', ","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_read_as_qemu_reads_it() {
        for (value, expected) in [
            (r#"{"driver":"virtio-blk-pci","id":"disk0"}"#, Some("disk0")),
            ("virtio-blk-pci,id=disk0,drive=x", Some("disk0")),
            ("virtio-blk-pci,drive=a,,id=disk0", None),
            ("virtio-blk-pci,id=a,,b", Some("a,b")),
            ("virtio-blk-pci,serial=id=disk0", None),
            ("", None),
            ("{", None),
        ] {
            assert_eq!(field(value, "id").as_deref(), expected, "{value}");
        }
    }
}
