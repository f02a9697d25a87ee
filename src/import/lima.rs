//! Instances and templates of Lima (<https://lima-vm.io/docs/reference/>).

use serde_json::{Value, json};

use super::{
    draft::{Content, Draft, Link},
    source::{Item, SourceError},
};
use crate::{api::Quantity, exchange::Grade};

/// What Lima gives an instance that says nothing.
const CPUS: u64 = 4;
const GIB: u64 = 1 << 30;

pub(super) fn read(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    root.enter();
    if let Some(arch) = root.get("arch") {
        if !["x86_64", "default", ""].contains(&arch.text()) {
            let what = format!("the guest needs the architecture {}: VMs are x86_64", arch.text());
            return Err(SourceError::new(arch.line, what));
        }
        arch.same("x86_64");
    }
    if root.get("os").is_some_and(|os| os.text() == "Darwin") {
        return Err(SourceError::new(root.line, "a guest with macOS runs on Apple's computers only"));
    }
    draft.spec.insert("guestShutdownStops".into(), true.into());
    draft.set("firmware", "uefi");
    let nothing = Item::new("", "", 0, None);
    let cpus = root.get("cpus");
    draft.cpus(cpus.unwrap_or(&nothing), cpus.and_then(Item::number).unwrap_or(CPUS), None);
    let memory = root.get("memory");
    let bytes = memory.map_or(Some(4 * GIB), size);
    if bytes.is_some_and(|bytes| draft.ram(bytes, None)) {
        memory.map(|it| it.same("spec.vm.maximumRam"));
    } else if let Some(memory) = memory {
        memory.left_out("this is no size that a VM can have: it gets 1G");
    }
    image(root, draft);
    draft.network(Link::Pod, None, None);
    for item in root.items() {
        match item.key.as_str() {
            "vmType" if item.text() == "qemu" => _ = item.same("QEMU"),
            "vmType" => _ = item.changed(format!("QEMU (before: {})", item.text())),
            "os" => _ = item.same("what guest it is"),
            "minimumLimaVersion" | "message" => item.left_out("it is for Lima"),
            "firmware" => firmware(item, draft),
            "networks" => {
                item.whole(Grade::Changed, "the Pod's network: spec.vm.networks[].tap is for bridges of the node");
            }
            "additionalDisks" => {
                item.enter();
                for disk in item.items() {
                    let name = disk.get("name").unwrap_or(disk).text().to_owned();
                    let disk_size = disk.get("size").and_then(size);
                    if let Some(name) =
                        draft.disk(&name, disk_size, Content::Host(format!("~/.lima/_disks/{name}/datadisk")))
                    {
                        disk.whole(
                            Grade::Changed,
                            format!("its content has to be copied into the claim VM-{name}-disk (see the comments)"),
                        );
                    }
                }
            }
            "video" => item.whole(Grade::Changed, "virtio-vga: kubectl vm view"),
            "audio" => item.whole(Grade::Changed, "an Intel HDA sound card, with spec.vm.display.spice"),
            "plain" => _ = item.changed("the guest has nothing of Lima"),
            "ssh" => item.whole(Grade::Changed, "kubectl vm ssh, as the user of spec.cloudInit"),
            "user" => user(item, draft),
            "cpuType" | "vmOpts" => cpu(item, draft),
            "upgradePackages" => {
                data(draft)["package_upgrade"] = item.is_yes().into();
                item.same("spec.cloudInit.userData");
            }
            "timezone" if !item.text().is_empty() => {
                data(draft)["timezone"] = item.same("spec.cloudInit.userData").into()
            }
            "provision" => provision(item, draft),
            _ => {}
        }
    }
    Ok(())
}

/// What parts that nobody used are told.
pub(super) fn why(item: &Item) -> &'static str {
    match item.key.as_str() {
        "base" => "it names other files: `limactl template copy --fill FILE -` prints one with all of them",
        "mounts" | "mountType" | "mountTypesUnsupported" | "mountInotify" => {
            "no folders of a computer are mounted: share files by the network"
        }
        "containerd" => "Lima installs it: put that into spec.cloudInit",
        "portForwards" => "kubectl vm port-forward, or kubectl vm expose",
        "hostResolver" | "dns" | "propagateProxyEnv" | "env" | "caCerts" => {
            "Lima sets it in the guest: put that into spec.cloudInit"
        }
        "probes" => "the condition Booted says when the guest is up",
        "copyToHost" => "kubectl vm scp",
        "param" => "parameters are for Lima's scripts: write their values out",
        "rosetta" | "nestedVirtualization" | "vz" | "krunkit" => "it is for computers of Apple",
        _ => "",
    }
}

/// A size as Lima writes it: `4GiB`.
fn size(item: &Item) -> Option<u64> {
    Quantity::parse(item.text()).ok().map(|it| it.bytes())
}

/// Whether the set import-disk can compare it.
fn is_sum(sum: &str) -> bool {
    [64, 128].contains(&sum.len()) && sum.bytes().all(|byte| byte.is_ascii_hexdigit() && !byte.is_ascii_uppercase())
}

fn image(root: &Item, draft: &mut Draft) {
    let disk = root.get("disk");
    let bytes = disk.map_or(Some(100 * GIB), size);
    if let Some(disk) = disk {
        if bytes.is_some() {
            _ = disk.same("the size of the disk")
        } else {
            disk.left_out("this is no size: the disk has 10Gi")
        }
    }
    draft.disk("system", bytes, Content::Empty);
    let mut found = false;
    for image in root.get("images").into_iter().flat_map(|it| it.enter().items()) {
        image.enter();
        let arch = image.get("arch").map_or("x86_64", Item::text);
        let location = image.get("location").unwrap_or(image);
        if arch != "x86_64" {
            image.whole(Grade::Same, "an image for another architecture");
            continue;
        }
        if found {
            image.whole(Grade::Same, "another image for the same");
            continue;
        }
        let url = location.text().to_owned();
        if !url.starts_with("https://") && !url.starts_with("http://") {
            if let Some(first) = draft.disks.first().and_then(super::draft::disk_name).map(str::to_owned) {
                draft.fills.push(super::draft::Fill { disk: first, from: url, is_size_known: true });
                location.changed("its content has to be copied into the claim VM-system-disk (see the comments)");
                found = true;
            }
            continue;
        }
        found = true;
        location.same("spec.templateValues.import.url, by the template set import-disk");
        let digest = image.get("digest");
        let sum = digest.and_then(|it| it.text().split_once(':')).map(|(_, sum)| sum).filter(|sum| is_sum(sum));
        let mut source = json!({ "url": url });
        if let Some(sum) = sum {
            source["sha256"] = json!(sum);
        }
        draft.import("system", source);
        for key in ["arch", "variant"] {
            if let Some(item) = image.get(key) {
                item.same("the image");
            }
        }
        if let Some(digest) = digest {
            match sum {
                Some(_) => _ = digest.same("spec.templateValues.import.sha256"),
                None => digest.left_out("this is neither a SHA-256 nor a SHA-512"),
            }
        }
        for key in ["kernel", "initrd"] {
            if let Some(item) = image.get(key) {
                item.whole(Grade::LeftOut, "the guest boots from its disks");
            }
        }
    }
}

fn firmware(item: &Item, draft: &mut Draft) {
    item.enter();
    if let Some(legacy) = item.get("legacyBIOS") {
        if legacy.is_yes() {
            draft.set("firmware", "bios");
        }
        legacy.same("spec.vm.firmware");
    }
}

fn cpu(item: &Item, draft: &mut Draft) {
    item.enter();
    let map = item.get("qemu/cpuType").unwrap_or(item).enter();
    for item in map.items() {
        match item.key.as_str() {
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

fn user(item: &Item, draft: &mut Draft) {
    item.enter();
    if let Some(name) = item.get("name").filter(|name| !name.text().is_empty()) {
        data(draft)["users"] = json!([{ "name": name.same("spec.cloudInit.userData: add ssh_authorized_keys"), "sudo": "ALL=(ALL) NOPASSWD:ALL" }]);
    }
    for key in ["comment", "home", "uid", "shell"] {
        let Some(item) = item.get(key) else { continue };
        let field = match key {
            "comment" => "gecos",
            "home" => "homedir",
            other => other,
        };
        let users = &mut data(draft)["users"];
        if users.is_array() && !item.text().contains("{{") {
            users[0][field] = item.json();
            item.same("spec.cloudInit.userData");
        }
    }
}

/// Scripts run at each start in Lima, and at the first one here.
fn provision(item: &Item, draft: &mut Draft) {
    item.enter();
    for script in item.items() {
        script.enter();
        let mode = script.get("mode").map_or("system", Item::text);
        let Some(text) = script.get("script").filter(|_| ["system", "boot", "dependency"].contains(&mode)) else {
            continue;
        };
        let data = data(draft);
        let count = data["runcmd"].as_array().map_or(0, Vec::len);
        let path = format!("/var/lib/import/{count}.sh");
        let file = json!({ "path": path, "permissions": "0755", "content": text.text() });
        for (field, value) in [("write_files", file), ("runcmd", json!(path))] {
            let list = data[field].as_array().cloned().unwrap_or_default();
            data[field] = list.into_iter().chain([value]).collect();
        }
        let uses = text.text().contains("LIMA_CIDATA") || text.text().contains("{{");
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
