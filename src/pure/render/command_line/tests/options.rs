//! No text of a VM becomes an option of QEMU: whatever it is, the command line has the same options with the same keys.

use serde_json::json;

use super::*;

/// Texts that mean something to QEMU, to YAML or to the template engine.
const HOSTILE: [&str; 21] = [
    "a=b",
    "a,b=c",
    ",",
    ",,",
    "a,,b=c",
    ",b=c",
    "json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}",
    "{\"driver\":\"file\"}",
    "/dev/vda",
    "fat:///x",
    "nbd://x",
    "-S",
    "- -S",
    "a\n- -S",
    "a\nb: c",
    "\", \"b\": \"c",
    "{{ 7 * 7 }}",
    "a\0b",
    "\u{85}\u{2028}\u{feff}",
    "ä€𝄞",
    "02:16:3e:33:58:10,romfile=/x",
];

/// The options that have no value.
const FLAGS: [&str; 4] = ["-nodefaults", "-no-user-config", "-S", "-no-shutdown"];

/// A VM with a text in each field that can have one.
fn vm(display: &str) -> Value {
    let display = match display {
        "spice" => {
            json!({ "spice": { "port": 5900, "ticket": "t", "streaming-video": "all", "socket": "/run/spice" } })
        }
        _ => json!({ "loggedInUser": "alice", "vnc": { "port": 5900, "socket": "/run/vnc" } }),
    };
    json!({
        "name": "apple", "uuid": "u", "machineType": "m", "useTpm": true, "firmware": "uefi", "cpuModel": "host",
        "maximumRam": "1Gi", "currentRam": "1Gi", "accelerator": "kvm", "rtcBase": "utc", "rtcClock": "rt",
        "network": [
            { "type": "tap", "device": "e1000e", "bridge": "br0", "mac": "02:16:3e:33:58:10" },
            {
                "type": "user", "device": "e1000e", "net": "10.0.2.0/24", "mac": "02:16:3e:33:58:11",
                "forwards": [{ "protocol": "udp", "address": "127.0.0.1", "port": 1, "guestPort": 2 }],
            },
            { "type": "pod", "device": "e1000e", "mac": "02:16:3e:33:58:12" },
        ],
        "drives": [
            { "type": "raw", "resource": "/dev/a" },
            { "type": "raw", "resource": "/srv/a.img" },
            { "type": "qcow2", "resource": "/srv/a.qcow2" },
            { "type": "ide-cd", "file": "/srv/a.iso" },
            { "type": "ide-cd", "file": "https://host/a.iso" },
        ],
        "display": display,
    })
}

/// The places of all texts in a value, as JSON pointers.
fn texts(value: &Value, place: &str) -> Vec<String> {
    match value {
        Value::String(_) => vec![place.to_owned()],
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.flat_map(|(number, item)| texts(item, &format!("{place}/{number}"))).collect()
        }
        Value::Object(fields) => {
            fields.iter().flat_map(|(name, field)| texts(field, &format!("{place}/{name}"))).collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => vec![],
    }
}

/// The names in a JSON value, each with the place where it is.
fn names(value: &Value, place: &str) -> Vec<String> {
    let inner = |(name, item): (String, &Value)| {
        let place = format!("{place}.{name}");
        std::iter::once(place.clone()).chain(names(item, &place)).collect::<Vec<_>>()
    };
    match value {
        Value::Object(fields) => fields.iter().map(|(name, field)| (name.clone(), field)).flat_map(inner).collect(),
        Value::Array(items) => {
            items.iter().enumerate().map(|(number, item)| (number.to_string(), item)).flat_map(inner).collect()
        }
        _ => vec![],
    }
}

/// The keys of an option's value as QEMU reads it: JSON, or `key=value` between single commas; a doubled comma belongs to a value. What has
/// no `=` is the value of the option's implied key if it comes first, else a key.
fn keys(value: &str) -> Vec<String> {
    if value.starts_with('{') {
        return names(&serde_json::from_str(value).unwrap(), "");
    }
    let (mut keys, mut rest) = (Vec::new(), value);
    loop {
        let (name, has_value) =
            rest.find(['=', ',']).map_or((rest, false), |at| (&rest[..at], rest[at..].starts_with('=')));
        let is_implied = keys.is_empty() && !has_value;
        keys.push(if is_implied { "(implied)".to_owned() } else { name.to_owned() });
        if !is_implied {
            rest = &rest[name.len()..];
        }
        // The rest is a value, perhaps an empty one, up to a single comma.
        while let Some(at) = rest.find(",,").filter(|at| rest.find(',') == Some(*at)) {
            rest = &rest[at + 2..];
        }
        let Some((_, next)) = rest.split_once(',') else { return keys };
        rest = next;
    }
}

/// The options with their keys. The CPU model may have features, which its owner is meant to write (`host,-vmx`).
fn options(arguments: &[String]) -> Vec<(String, Vec<String>)> {
    let mut options = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(option) = arguments.next() {
        assert!(option.starts_with('-'), "{option}");
        let value = if FLAGS.contains(&option.as_str()) { None } else { arguments.next() };
        options.push((option.clone(), value.filter(|_| option != "-cpu").map(|value| keys(value)).unwrap_or_default()));
    }
    options
}

/// The options of a VM; an error of a text that is refused.
fn options_of(vm: &Value, path: &str, sockets: Sockets) -> Result<Vec<(String, Vec<String>)>, String> {
    let config = json!({ "namespace": "orchard", "vm": vm });
    let config: RunnerConfig = serde_json::from_value(config).map_err(|error| error.to_string())?;
    let medium = |(number, text): (usize, &str)| match number {
        0 => Some(Medium::File(text.into())),
        _ => Some(Medium::Url(format!("https://{text}"))),
    };
    let prepared = Prepared {
        firmware: Some(Firmware { code: path.into(), vars: path.into(), secure: true }),
        cloud_init_disk: Some(path.into()),
        block_devices: vec![true, false, false],
        media: config.vm.drives.iter().filter_map(Drive::cd).enumerate().map(medium).collect(),
        ..prepared()
    };
    let arguments = qemu(&config, &prepared, sockets, &standard_template()).map_err(|error| error.to_string())?;
    Ok(options(&arguments))
}

#[test]
fn the_keys_are_those_that_qemu_reads() {
    for (value, expected) in [
        ("a", "(implied)"),
        ("a,b=c,d", "(implied) b d"),
        ("a,,b=c,d=e", "(implied) d"),
        ("a=b,,c=d,,,e=f", "a e"),
        ("a=b=c", "a"),
    ] {
        assert_eq!(keys(value).join(" "), expected, "{value}");
    }
}

#[test]
fn no_text_of_a_vm_adds_an_option() {
    for display in ["spice", "vnc"] {
        let plain = vm(display);
        let expected = options_of(&plain, "/x", sockets()).unwrap();
        assert!(expected.len() > 40, "{expected:?}");
        let places = texts(&plain, "");
        assert!(places.len() > 25, "{places:?}");
        let mut refused = std::collections::BTreeSet::new();
        for place in &places {
            for text in HOSTILE {
                let mut vm = plain.clone();
                *vm.pointer_mut(place).unwrap() = text.into();
                match options_of(&vm, "/x", sockets()) {
                    Ok(options) => assert_eq!(options, expected, "{place} is {text:?}"),
                    Err(_) => drop(refused.insert(place.as_str())),
                }
            }
        }
        // Not everything is refused: only what has a type of its own.
        let typed = |place: &&&str| {
            let ends = ["/type", "/mac", "Ram", "/firmware", "/accelerator", "/protocol", "/address"];
            ends.iter().any(|end| place.ends_with(end))
        };
        assert_eq!(refused.iter().filter(|place| !typed(place)).collect::<Vec<_>>(), [&""; 0]);
    }
}

#[test]
fn no_path_on_the_node_adds_an_option() {
    let plain = vm("vnc");
    let expected = options_of(&plain, "/x", sockets()).unwrap();
    for text in HOSTILE {
        assert_eq!(options_of(&plain, text, sockets()).unwrap(), expected, "{text:?}");
    }
    assert_eq!(options_of(&plain, "/x", Sockets::in_folder("/run/a,b=c")).unwrap(), expected);
}
