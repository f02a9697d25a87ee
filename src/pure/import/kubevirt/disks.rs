//! Volumes and disks of KubeVirt, with the DataVolumes that are made for them.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Content, Draft, FULL, Grade, Item, Place, Quantity, by_name, cloud_init, of, quantity};
use crate::render::valid::is_subdomain;

pub(super) fn disks(root: &Item, spec: &Item, domain: &Item, draft: &mut Draft) {
    let volumes: Vec<&Item> = spec.get("volumes").into_iter().flat_map(|it| it.enter().items()).collect();
    let by_name = by_name(spec.get("volumes").map(Item::items).unwrap_or_default());
    let list = domain.get("devices/disks");
    list.map(Item::enter);
    // A volume that no disk names is a disk too.
    let listed: Vec<(&str, Option<&Item>)> =
        list.into_iter().flat_map(Item::items).map(|it| (it.get("name").map_or("", Item::text), Some(it))).collect();
    let others = volumes.iter().map(|it| (it.get("name").map_or("", Item::text), None));
    let names: BTreeSet<&str> = listed.iter().map(|(name, _)| *name).collect();
    let others: Vec<_> = others.filter(|(name, _)| !names.contains(name)).collect();
    for (name, disk) in listed.into_iter().chain(others) {
        let Some(volume) = by_name.get(name).copied() else {
            // A CD drive without a volume is one without a CD.
            if let Some(disk) = disk.filter(|disk| disk.get("cdrom").is_some())
                && draft.cd("")
            {
                disk.whole(Grade::Same, "an empty drive");
            }
            continue;
        };
        volume.enter();
        if let Some(item) = volume.get("name") {
            item.same("the disk's name");
        }
        let before = draft.disks.len();
        source(root, volume, disk, name, draft);
        let Some(disk) = disk else { continue };
        disk.enter();
        if let Some(item) = disk.get("name") {
            item.same("the disk's name");
        }
        for key in ["disk", "cdrom", "lun"] {
            let Some(device) = disk.get(key) else { continue };
            device.enter();
            if key == "lun" {
                device.changed("a disk: SCSI commands of the guest do not reach the device");
            }
            if let Some(bus) = device.get("bus") {
                match (key, bus.text()) {
                    ("cdrom", "sata") | (_, "virtio") => _ = bus.same("the disk's bus"),
                    ("cdrom", other) => _ = bus.changed(format!("sata (before: {other})")),
                    (_, other) => {
                        _ = bus.changed(format!(
                            "virtio (before: {other}): Windows needs the driver viostor before it moves"
                        ))
                    }
                }
            }
            if let Some(item) = device.get("readonly") {
                if key == "cdrom" {
                    item.same("a CD")
                } else {
                    item.changed("the disk is writable")
                };
            }
        }
        if let Some(item) = disk.get("serial").filter(|_| draft.disks.len() > before) {
            match draft.serial(item.text()) {
                true => _ = item.same("spec.vm.disks[].serial"),
                false => item.left_out("the serial number of a disk has up to 20 letters, digits, '.', '_' and '-'"),
            }
        }
        let order = disk.get("bootOrder").and_then(Item::number).and_then(|it| u32::try_from(it).ok());
        if let Some(order) = order.filter(|_| draft.disks.len() > before) {
            if let Some(disk) = draft.disks.last_mut() {
                disk["bootindex"] = order.min(i32::MAX as u32).into();
            }
            if let Some(item) = disk.get("bootOrder") {
                item.same("bootindex");
            }
        }
    }
}

/// The content of a disk: what a volume is.
fn source(root: &Item, volume: &Item, disk: Option<&Item>, name: &str, draft: &mut Draft) {
    let is_cd = disk.is_some_and(|disk| disk.get("cdrom").is_some());
    let Some(kind) = volume.items().iter().find(|it| it.key != "name") else { return };
    match kind.key.as_str() {
        "cloudInitNoCloud" | "cloudInitConfigDrive" => return cloud_init(kind, draft),
        "configMap" | "secret" | "serviceAccount" | "downwardAPI" | "sysprep" | "downwardMetrics" => {
            return kind.whole(
                Grade::LeftOut,
                "no disks are made of other objects: put the data into spec.cloudInit, or on a CD",
            );
        }
        _ => {}
    }
    if draft.is_full() {
        return kind.whole(Grade::LeftOut, FULL);
    }
    if is_cd {
        kind.whole(
            Grade::Changed,
            "an empty drive: put the CD into the image repository, or set spec.vm.disks[].cdrom.image to a URL",
        );
        draft.cd("");
        return;
    }
    let mut class = None;
    let claim = kind.get("claimName").or_else(|| kind.get("name")).map_or("", Item::text);
    let (mut filled, mut why) = (None, "");
    let (bytes, from) = match kind.key.as_str() {
        "containerDisk" => {
            let image = kind.get("image").map_or("", Item::text);
            let path = kind.get("path").map(Item::text);
            filled = Some(match path {
                Some(path) => json!({ "oci": image, "path": path }),
                None => json!({ "oci": image }),
            });
            let path = path.unwrap_or("/disk");
            (None, Some(Place::Words(format!("the container image {image}, {path}"))))
        }
        "persistentVolumeClaim" | "ephemeral" => {
            let claim = kind.get("persistentVolumeClaim/claimName").map_or(claim, Item::text);
            let found = harvester(root, claim);
            class = found.as_ref().and_then(|claim| claim.class.clone());
            (found.and_then(|claim| claim.bytes), Some(Place::Words(format!("the claim {claim}"))))
        }
        "dataVolume" => {
            let (size, source) = data_volume(root, claim);
            class = class_of(root, claim);
            let is_new = !is_of_a_cluster(root);
            let mut from = Some(Place::Words(format!("the claim {claim}, which the DataVolume of that name fills")));
            match source {
                DiskContent::Nothing if is_new => from = None,
                DiskContent::Set(source) if is_new => filled = Some(source),
                DiskContent::Set(_) => {
                    why = "; not what the DataVolume's source has: the file is of a cluster, where the guest may have changed the disk since";
                }
                DiskContent::Nothing | DiskContent::Other => {}
            }
            (size, from)
        }
        "emptyDisk" => (kind.get("capacity").and_then(quantity), None),
        "hostDisk" => {
            let path = kind.get("path").map_or("", Item::text).to_owned();
            (kind.get("capacity").and_then(quantity), Some(Place::OnNode(path)))
        }
        _ => return,
    };
    let is_empty = from.is_none();
    let content = from.filter(|_| filled.is_none()).map_or(Content::Empty, Content::From);
    let Some(name) = draft.disk(name, bytes, content) else {
        return kind.whole(Grade::LeftOut, FULL);
    };
    if let (Some(class), Some(disk)) = (class, draft.disks.last_mut()) {
        disk["volumeClaimTemplate"]["spec"]["storageClassName"] = json!(class);
    }
    if ["persistentVolumeClaim", "dataVolume"].contains(&kind.key.as_str()) && filled.is_none() {
        draft.origin(format!("{}/{claim}", of(root, "metadata/namespace")), &name, kind);
    }
    let lasts = if ["containerDisk", "ephemeral"].contains(&kind.key.as_str()) { "; it outlives a stop" } else { "" };
    if let Some(source) = filled {
        kind.whole(Grade::Changed, format!("the template set import-disk fills the claim VM-{name}-disk{lasts}"));
        draft.import(&name, source);
    } else if is_empty && kind.key == "dataVolume" {
        kind.whole(Grade::Same, "an empty disk");
    } else if is_empty {
        kind.whole(Grade::Changed, "a claim, so its content outlives a stop");
    } else {
        kind.whole(
            Grade::Changed,
            format!("its content has to be copied into the claim VM-{name}-disk (see the comments){lasts}{why}"),
        );
    }
}

/// Whether the VM was read from a cluster, where it may have run: a file that people wrote has no UID and no status. Tools that make such
/// files write `status: {}`.
fn is_of_a_cluster(root: &Item) -> bool {
    // Tools that clean a dump leave one of them.
    let of_server = ["uid", "resourceVersion"];
    of_server.iter().any(|field| !of(root, &format!("metadata/{field}")).is_empty())
        || root.get("status").is_some_and(|status| !status.items().is_empty())
}

/// What a DataVolume has in the beginning.
enum DiskContent {
    Nothing,
    /// What the template set import-disk fills a disk with.
    Set(Value),
    /// Something that only KubeVirt can copy.
    Other,
}

/// The annotation in which Harvester has the claims of a VM, as JSON.
pub(super) const TEMPLATES: &str = "harvesterhci.io/volumeClaimTemplates";

/// A claim that the file describes.
struct Claim {
    bytes: Option<u64>,
    class: Option<String>,
}

/// A claim in Harvester's annotation.
fn harvester(root: &Item, name: &str) -> Option<Claim> {
    let annotations = root.get("metadata/annotations")?;
    // Its key has a slash.
    let text = annotations.items().iter().find(|item| item.key == TEMPLATES)?.text();
    let claims: Vec<Value> = serde_json::from_str(text).ok()?;
    let claim = claims.into_iter().find(|claim| claim["metadata"]["name"] == name)?;
    let spec = &claim["spec"];
    let bytes = spec["resources"]["requests"]["storage"].as_str().and_then(|text| Quantity::parse(text).ok());
    let class = spec["storageClassName"].as_str().filter(|class| is_subdomain(class)).map(str::to_owned);
    Some(Claim { bytes: bytes.map(|size| size.bytes()), class })
}

/// The storage class of a DataVolume of the VM.
fn class_of(root: &Item, name: &str) -> Option<String> {
    let mut templates = root.get("spec/dataVolumeTemplates").into_iter().flat_map(Item::items);
    let template = templates.find(|it| it.get("metadata/name").is_some_and(|it| it.text() == name))?;
    let class = ["storage", "pvc"].iter().find_map(|key| template.get("spec")?.get(key)?.get("storageClassName"))?;
    Some(class.text().to_owned()).filter(|class| is_subdomain(class))
}

/// The size of a DataVolume of the VM, and what it has in the beginning.
fn data_volume(root: &Item, name: &str) -> (Option<u64>, DiskContent) {
    let templates = root.get("spec/dataVolumeTemplates").into_iter().flat_map(Item::items);
    let template = templates.into_iter().find(|it| it.get("metadata/name").is_some_and(|it| it.text() == name));
    let Some((template, spec)) = template.and_then(|template| Some((template, template.get("spec")?))) else {
        return (None, DiskContent::Other);
    };
    let size = ["storage", "pvc"].iter().find_map(|key| spec.get(key)?.get("resources/requests/storage"));
    let url = |kind: &str| spec.get("source")?.get(kind)?.get("url").map(|url| url.text().to_owned());
    let is_plain = |url: &String| ![".xz", ".gz", ".zst", ".iso"].iter().any(|end| url.ends_with(end));
    let raw = |url: &str| url.ends_with(".raw");
    let source = url("http").filter(is_plain).map(|url| match raw(&url) {
        true => json!({ "url": url, "format": "raw" }),
        false => json!({ "url": url }),
    });
    let image = || url("registry").and_then(|url| url.strip_prefix("docker://").map(|image| json!({ "oci": image })));
    template.whole(Grade::Changed, "a claim of the VM; its access mode and source are not those of the DataVolume");
    let source = match source.or_else(image) {
        Some(source) => DiskContent::Set(source),
        None if spec.get("source/blank").is_some() => DiskContent::Nothing,
        None => DiskContent::Other,
    };
    (size.and_then(quantity), source)
}
