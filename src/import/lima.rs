//! Instances and templates of Lima (<https://lima-vm.io/docs/reference/>).

use serde_json::{Value, json};

use super::{
    draft::{Content, Draft, Fill, Link, Place},
    guest,
    source::{Item, SourceError},
};
use crate::exchange::Grade;

/// What Lima gives an instance that says nothing.
const CPUS: u64 = 4;
const GIB: u64 = 1 << 30;
const MEMORY: u64 = 4 * GIB;
const DISK: u64 = 100 * GIB;
/// The most that a VM can have.
const MOST_CPUS: u64 = 1024;
const LARGEST_DISK: u64 = 1 << 60;

const LOGIN: &str =
    "Lima makes a user who has your SSH key, and nobody makes one here: write one into spec.cloudInit.userData.users";
const USER: &str = "the user is called as that of the computer there: write one into spec.cloudInit.userData.users";
/// The keys of a file.
const KEYS: [&str; 44] = [
    "additionalDisks",
    "arch",
    "audio",
    "base",
    "blockDevices",
    "caCerts",
    "containerd",
    "copyToHost",
    "cpuType",
    "cpus",
    "disk",
    "dns",
    "env",
    "firmware",
    "guestInstallPrefix",
    "hostResolver",
    "images",
    "memory",
    "message",
    "minimumLimaVersion",
    "mountInotify",
    "mountType",
    "mountTypesUnsupported",
    "mounts",
    "nestedVirtualization",
    "network",
    "networks",
    "os",
    "osOpts",
    "param",
    "plain",
    "portForwards",
    "probes",
    "propagateProxyEnv",
    "provision",
    "rosetta",
    "ssh",
    "timezone",
    "tpm",
    "upgradePackages",
    "user",
    "video",
    "vmOpts",
    "vmType",
];
/// How names of archives end. WSL takes root file systems in such files.
const ARCHIVES: [&str; 11] =
    [".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.zst", ".tzst", ".wsl", ".zip"];
const TEMPLATE: &str = "a template, which Lima fills in: write the value out";

pub(super) fn read(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    root.enter();
    if !root.items().iter().any(|item| KEYS.contains(&item.key.as_str())) {
        return Err(SourceError::new(root.line, "this is no file of Lima: it has none of Lima's keys, such as images"));
    }
    architecture(root)?;
    if let Some(os) = root.get("os").filter(|os| os.text() == "Darwin") {
        return Err(SourceError::new(os.line, "a guest with macOS runs on Apple's computers only"));
    }
    draft.spec.insert("guestShutdownStops".into(), true.into());
    draft.set("firmware", "uefi");
    cpus(root, draft)?;
    memory(root, draft)?;
    let is_told = image(root, draft)?;
    match (is_told, given(root, "user").is_some()) {
        (true, true) => {}
        (true, false) => _ = root.changed(LOGIN),
        (false, true) => root.left_out("there is no image: the disk is empty"),
        (false, false) => root.left_out(format!("there is no image: the disk is empty. {LOGIN}")),
    }
    draft.network(Link::Pod, None, None);
    guest::tell_name(draft, root.line, "the file", Some("eth0".into()), None);
    for item in root.items() {
        let value = item.json();
        match item.key.as_str() {
            // What fills the disk is told already.
            "images" => {}
            _ if is_empty(&value) => item.whole(Grade::Same, "it is empty: Lima's default"),
            // In these two, false is a value for scripts.
            key if is_off(&value) && !["param", "env"].contains(&key) => item.whole(Grade::Same, "it is off"),
            "vmType" if item.text() == "qemu" => _ = item.same("QEMU"),
            "vmType" => _ = item.changed(format!("QEMU (before: {})", item.text())),
            "os" => _ = item.same("what guest it is"),
            "minimumLimaVersion" | "message" => item.left_out("it is for Lima"),
            "mountType" | "mountTypesUnsupported" | "mountInotify" if given(root, "mounts").is_none() => {
                item.whole(Grade::Same, "nothing is mounted");
            }
            "firmware" => firmware(item, draft),
            "tpm" => tpm(item, draft),
            "networks" => networks(item),
            "additionalDisks" => disks(item, draft),
            "video" if given(item, "display").is_none_or(|it| it.text() == "none") => {
                item.whole(Grade::Same, "there is no screen; the VM has one");
            }
            "video" => item.whole(Grade::Changed, "virtio-vga: kubectl vm view"),
            "audio" if given(item, "device").is_none_or(|it| it.text() == "none") => {
                item.whole(Grade::Same, "there is no sound");
            }
            "audio" => item.whole(Grade::Changed, "an Intel HDA sound card, with spec.vm.display.spice"),
            "plain" => _ = item.changed("the guest has nothing of Lima"),
            "ssh" => item.whole(Grade::Changed, "kubectl vm ssh, as the user of spec.cloudInit"),
            "user" => user(item, draft),
            "cpuType" | "vmOpts" => cpu(item, draft),
            "upgradePackages" if is_on(item) => {
                data(draft)["package_upgrade"] = true.into();
                item.same("spec.cloudInit.userData");
            }
            "timezone" => data(draft)["timezone"] = item.same("spec.cloudInit.userData").into(),
            "provision" => provision(item, draft),
            _ => {}
        }
    }
    Ok(())
}

/// What parts that nobody used are told.
pub(super) fn why(item: &Item) -> &'static str {
    match item.key.as_str() {
        "mounts" | "mountType" | "mountTypesUnsupported" | "mountInotify" => {
            "no folders of a computer are mounted: share files by the network"
        }
        "containerd" => "Lima installs it: put that into spec.cloudInit",
        "portForwards" => "kubectl vm port-forward, or kubectl vm expose",
        "base" => "it names other files: `limactl template copy --fill FILE -` prints one with all of them",
        "hostResolver" | "dns" | "propagateProxyEnv" | "env" | "caCerts" => {
            "Lima sets it in the guest: put that into spec.cloudInit"
        }
        "probes" => "the condition Booted says when the guest is up",
        "copyToHost" => "kubectl vm scp",
        "param" => "parameters are for Lima's scripts: write their values out",
        "rosetta" | "nestedVirtualization" | "vz" | "krunkit" => "it is for computers of Apple",
        "blockDevices" => "devices of a computer are not passed on",
        "osOpts" => "Lima installs Windows by itself: do it by the console (kubectl vm view)",
        "minimumVersion" | "guestInstallPrefix" => "it is for Lima",
        _ => "",
    }
}

/// A part, if it says something: null and nothing are Lima's default.
fn given<'a>(item: &'a Item, key: &str) -> Option<&'a Item> {
    item.get(key).filter(|part| !is_empty(&part.json()))
}

/// Whether nothing is said.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(parts) => parts.iter().all(is_empty),
        Value::Object(parts) => parts.values().all(is_empty),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether nothing is wanted.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Array(parts) => parts.iter().all(is_off),
        Value::Object(parts) => parts.values().all(is_off),
        other => *other == Value::Bool(false) || is_empty(other),
    }
}

/// Whether it is a yes, however it is written.
fn is_on(item: &Item) -> bool {
    item.json() == Value::Bool(true) || item.is_yes()
}

fn is_x86(arch: &str) -> bool {
    ["x86_64", "amd64", "default"].contains(&arch)
}

fn architecture(root: &Item) -> Result<(), SourceError> {
    let Some(arch) = given(root, "arch") else { return Ok(()) };
    if is_x86(arch.text()) {
        arch.same("x86_64");
        return Ok(());
    }
    let mut images = root.get("images").into_iter().flat_map(Item::items);
    let has_image = images.any(|image| given(image, "arch").is_some_and(|arch| is_x86(arch.text())));
    let hint = if has_image { "; there is an image for it: set `arch: x86_64`" } else { "" };
    let what = format!("the guest needs the architecture {}: VMs are x86_64{hint}", arch.text());
    Err(SourceError::new(arch.line, what))
}

fn cpus(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let nothing = Item::new("", "", 0, None);
    let Some(item) = given(root, "cpus") else {
        draft.cpus(&nothing, CPUS, None);
        return Ok(());
    };
    match item.number() {
        Some(0) => {
            draft.cpus(&nothing, CPUS, None);
            item.same(format!("Lima's default: {CPUS}"));
        }
        Some(count) if count <= MOST_CPUS => draft.cpus(item, count, None),
        _ => {
            let what = format!("cpus: {:?} is no number of CPUs: a VM has 1 to {MOST_CPUS}", item.text());
            return Err(SourceError::new(item.line, what));
        }
    }
    Ok(())
}

fn memory(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let Some(item) = given(root, "memory") else {
        draft.ram(MEMORY, None);
        return Ok(());
    };
    if !size(item).is_some_and(|bytes| draft.ram(bytes, None)) {
        let what = format!("memory: {:?} is no size that a VM can have", item.text());
        return Err(SourceError::new(item.line, what));
    }
    item.same("spec.vm.maximumRam");
    Ok(())
}

/// A size as Lima reads it (RAMInBytes of go-units): all units are binary and in any case, so `4GB` is `4GiB`.
fn size(item: &Item) -> Option<u64> {
    let text = item.text();
    let last = text.rfind(|letter: char| letter.is_ascii_digit() || letter == '.' || letter == ' ')?;
    let (number, unit) = text.split_at(last + 1);
    let number: f64 = number.strip_suffix(' ').unwrap_or(number).parse().ok()?;
    let factor = match unit.to_lowercase().as_str() {
        "" | "b" => 1_u64,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        "p" | "pb" | "pib" => 1 << 50,
        _ => return None,
    };
    let bytes = number * factor as f64;
    (0.0..9e18).contains(&bytes).then_some(bytes as u64)
}

/// The first disk, and what fills it. False: nothing fills it, and the file has no part that could be told so.
fn image(root: &Item, draft: &mut Draft) -> Result<bool, SourceError> {
    let disk = given(root, "disk");
    let bytes = match disk {
        Some(item) => size(item).filter(|bytes| *bytes <= LARGEST_DISK).ok_or_else(|| {
            SourceError::new(item.line, format!("disk: {:?} is no size that a disk can have", item.text()))
        })?,
        None => 0,
    };
    if let Some(disk) = disk {
        disk.same("the size of the disk");
    }
    draft.disk("system", Some(if bytes == 0 { DISK } else { bytes }), Content::Empty);
    // Lima installs Windows from its CD, whatever the URL of that ends with.
    let is_cd = given(root, "os").is_some_and(|os| os.text() == "Windows");
    let mut found = false;
    for image in root.get("images").into_iter().flat_map(|it| it.enter().items()) {
        image.enter();
        let arch = given(image, "arch").map_or("x86_64", Item::text);
        if !is_x86(arch) {
            image.whole(Grade::Same, "an image for another architecture");
        } else if found {
            image.whole(Grade::Same, "another image for the same");
        } else {
            found = fill(image, is_cd, draft);
        }
    }
    if found {
        return Ok(true);
    }
    if let Some(base) = given(root, "base") {
        base.whole(
            Grade::LeftOut,
            "it names other files, and the image is in one of them, so the disk is empty: `limactl template copy --fill FILE -` \
             prints one file with all of them",
        );
        return Ok(true);
    }
    let Some(images) = root.get("images") else { return Ok(false) };
    images.left_out("none of them can fill the disk of an x86_64 VM: the disk is empty");
    Ok(true)
}

/// Lets an image fill the first disk. False: it can't. `is_cd`: it is a CD, also if its name does not say so.
fn fill(image: &Item, is_cd: bool, draft: &mut Draft) -> bool {
    let location = image.get("location").unwrap_or(image);
    let url = location.text();
    let name = url.split(['?', '#']).next().unwrap_or_default().to_lowercase();
    let is_remote = ["http://", "https://"].iter().any(|scheme| name.starts_with(scheme));
    let file = url.strip_prefix("file://").unwrap_or(url);
    let packed = [(".xz", "xz -d"), (".gz", "gunzip"), (".bz2", "bunzip2"), (".zst", "zstd -d")];
    let obstacle = if ARCHIVES.iter().any(|end| name.ends_with(end)) {
        "it is an archive of files, and no disk: give another image, or unpack it if there is a disk in it".to_owned()
    } else if let Some((_, command)) = packed.iter().find(|(end, _)| name.ends_with(end)) {
        format!(
            "it is compressed: unpack it ({command}), offer the file by HTTP, and set spec.templates.set to import-disk and \
             spec.templateValues.import.url to its URL"
        )
    } else if is_cd || name.ends_with(".iso") {
        "a CD fills no disk: boot from it with spec.vm.disks[].cdrom.image".to_owned()
    } else if url.contains("{{") {
        TEMPLATE.to_owned()
    } else if file.is_empty() || !is_remote && file.contains(':') {
        "only files and URLs of http and https are read: set spec.templates.set to import-disk, and spec.templateValues.import".to_owned()
    } else {
        String::new()
    };
    if !obstacle.is_empty() {
        image.whole(Grade::LeftOut, obstacle);
        return false;
    }
    let digest = image.get("digest");
    if is_remote {
        location.same("spec.templateValues.import.url, by the template set import-disk");
        let mut source = json!({ "url": url });
        // Images of other names are QCOW2, the set's default.
        if name.ends_with(".raw") {
            source["format"] = json!("raw");
        }
        let sum = digest.and_then(|it| it.text().split_once(':')).map(|(_, sum)| sum).filter(|sum| is_sum(sum));
        if let Some(sum) = sum {
            source["sha256"] = json!(sum);
        }
        draft.import("system", source);
        match digest {
            Some(digest) if sum.is_some() => _ = digest.same("spec.templateValues.import.sha256"),
            Some(digest) => digest.left_out("this is neither a SHA-256 nor a SHA-512"),
            None => {}
        }
    } else {
        draft.fills.push(Fill { disk: "system".into(), from: Place::File(file.to_owned()), is_size_known: true });
        location.changed("its content has to be copied into the claim VM-system-disk (see the comments)");
        if let Some(digest) = digest {
            digest.left_out("nobody compares it: sha256sum, sha512sum");
        }
    }
    for key in ["arch", "variant"] {
        if let Some(item) = image.get(key) {
            item.same("the image");
        }
    }
    for key in ["kernel", "initrd"] {
        if let Some(item) = image.get(key) {
            item.whole(Grade::LeftOut, "the guest boots from its disks");
        }
    }
    true
}

/// Whether the set import-disk can compare it.
fn is_sum(sum: &str) -> bool {
    [64, 128].contains(&sum.len()) && sum.bytes().all(|byte| byte.is_ascii_hexdigit() && !byte.is_ascii_uppercase())
}

/// The VM has one network, in place of the one that each instance has without asking.
fn networks(list: &Item) {
    list.enter();
    for network in list.items() {
        if network.get("lima").is_some_and(|name| name.text() == "user-v2") {
            network.whole(Grade::Changed, "the Pod's network");
        } else {
            network.whole(
                Grade::LeftOut,
                "the VM has the Pod's network: spec.vm.networks[].tap is for bridges of the node, and for others see \
                 example/templates/second-network",
            );
        }
    }
}

fn disks(list: &Item, draft: &mut Draft) {
    list.enter();
    for disk in list.items() {
        let name = given(disk, "name").unwrap_or(disk).text().to_owned();
        if name.is_empty() {
            disk.whole(Grade::LeftOut, "it has no name");
            continue;
        }
        let wanted = given(disk, "size");
        let bytes = wanted.and_then(size).filter(|bytes| (1..=LARGEST_DISK).contains(bytes));
        let file = Place::File(format!("~/.lima/_disks/{name}/datadisk"));
        let Some(name) = draft.disk(&name, bytes, Content::From(file)) else {
            disk.whole(Grade::LeftOut, "a VM has at most 64 disks");
            continue;
        };
        let what = format!("its content has to be copied into the claim VM-{name}-disk (see the comments)");
        disk.whole(Grade::Changed, what);
        if let Some(wanted) = wanted.filter(|_| bytes.is_none()) {
            wanted.left_out("this is no size: the disk has 10Gi");
        }
    }
}

fn firmware(item: &Item, draft: &mut Draft) {
    item.enter();
    if let Some(legacy) = item.get("legacyBIOS") {
        if is_on(legacy) {
            draft.set("firmware", "bios");
        }
        legacy.same("spec.vm.firmware");
    }
}

/// `tpm: true`, or `tpm: {enabled: true}`. Another value is no equivalent, so nothing is marked then.
fn tpm(item: &Item, draft: &mut Draft) {
    let switch = item.get("enabled").unwrap_or(item);
    if is_on(switch) {
        item.enter();
        draft.set("useTpm", true);
        switch.same("spec.vm.useTpm: a TPM 2.0");
    }
}

fn cpu(item: &Item, draft: &mut Draft) {
    item.enter();
    let map = item.get("qemu/cpuType").unwrap_or(item).enter();
    for item in map.items() {
        match item.key.as_str() {
            "x86_64" if is_empty(&item.json()) => _ = item.same("Lima's default"),
            "x86_64" if draft.cpu_model(item.text()) => _ = item.same("spec.vm.cpuModel"),
            "aarch64" | "armv7l" | "riscv64" | "ppc64le" | "s390x" => _ = item.same("for another architecture"),
            _ => {}
        }
    }
}

/// The user-data, as a map.
fn data(draft: &mut Draft) -> &mut Value {
    let init = draft.spec.entry("cloudInit").or_insert_with(|| json!({ "userData": {} }));
    &mut init["userData"]
}

/// The user whom Lima makes.
fn user(item: &Item, draft: &mut Draft) {
    item.enter();
    let name = given(item, "name");
    let written = name.filter(|name| is_user(name.text()));
    let mut user = json!({ "sudo": "ALL=(ALL) NOPASSWD:ALL" });
    for part in item.items() {
        let text = part.text();
        match part.key.as_str() {
            _ if is_empty(&part.json()) => _ = part.same("it is empty: Lima's default"),
            _ if text.contains("{{") => part.left_out(TEMPLATE),
            "name" if written.is_none() => part.left_out("no user can be called so"),
            "name" => {
                user["name"] = text.into();
                part.changed(
                    "spec.cloudInit.userData.users: without a key nobody can log in, and Lima's is not in the file: add \
                     ssh_authorized_keys",
                );
            }
            "comment" | "home" | "uid" | "shell" if written.is_none() => part.left_out(USER),
            "comment" => user["gecos"] = part.same("spec.cloudInit.userData").into(),
            "home" => user["homedir"] = part.same("spec.cloudInit.userData").into(),
            "shell" => user["shell"] = part.same("spec.cloudInit.userData").into(),
            "uid" => match part.number() {
                Some(number) => {
                    user["uid"] = number.into();
                    part.same("spec.cloudInit.userData");
                }
                None => part.left_out("this is no number"),
            },
            _ => {}
        }
    }
    if written.is_some() {
        data(draft)["users"] = json!([user]);
    }
}

/// Whether Linux has users of that name.
fn is_user(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    (1..=32).contains(&name.len()) && name.bytes().all(is_letter) && !name.starts_with(['-', '.'])
}

/// Scripts run at each start in Lima, and at the first one here.
fn provision(item: &Item, draft: &mut Draft) {
    item.enter();
    for script in item.items() {
        script.enter();
        let mode = given(script, "mode").map_or("system", Item::text);
        let is_root = ["system", "boot", "dependency"].contains(&mode);
        let Some(text) = script.get("script").filter(|text| is_root && !text.text().is_empty()) else {
            script.whole(
                Grade::LeftOut,
                "only scripts that are in the file and run as root are taken: put it into spec.cloudInit",
            );
            continue;
        };
        let data = data(draft);
        let count = data["runcmd"].as_array().map_or(0, Vec::len);
        let path = format!("/var/lib/import/{count}.sh");
        let file = json!({ "path": path, "permissions": "0755", "content": text.text() });
        for (field, value) in [("write_files", file), ("runcmd", json!(path))] {
            match data[field].as_array_mut() {
                Some(list) => list.push(value),
                None => data[field] = json!([value]),
            }
        }
        let uses = ["LIMA_CIDATA", "PARAM_", "{{"].iter().any(|word| text.text().contains(word));
        text.changed(if uses {
            "spec.cloudInit.userData: it runs once, and without Lima's variables and parameters, which it uses"
        } else {
            "spec.cloudInit.userData: it runs once, at the first start"
        });
        if let Some(mode) = script.get("mode") {
            mode.same("as root");
        }
    }
}

#[cfg(test)]
mod tests;
