//! What Proxmox gives to cloud-init: the user, keys, addresses.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{Draft, Grade, Item, decoded, is_mac, is_numbered};

pub(super) fn cloud_init(root: &Item, draft: &mut Draft) {
    let get = |key: &str| root.get(key);
    let mut user = Map::new();
    if let Some(item) = get("ciuser") {
        user.insert("name".into(), item.same("spec.cloudInit.userData").into());
        user.insert("sudo".into(), "ALL=(ALL) NOPASSWD:ALL".into());
        user.insert("shell".into(), "/bin/bash".into());
    }
    if let Some(item) = get("sshkeys") {
        let keys = decoded(item.same("spec.cloudInit.userData"));
        let keys: Vec<Value> = keys.lines().filter(|key| !key.trim().is_empty()).map(|key| key.trim().into()).collect();
        user.insert("ssh_authorized_keys".into(), keys.into());
    }
    if let Some(item) = get("cipassword") {
        if item.text().starts_with('$') {
            user.insert("passwd".into(), item.same("spec.cloudInit.userData: the hash").into());
            user.insert("lock_passwd".into(), false.into());
        } else {
            item.left_out("it is readable: put it into a Secret (spec.cloudInit.userDataFrom)");
        }
    }
    let mut data = Map::new();
    if !user.is_empty() {
        user.entry("name").or_insert_with(|| "root".into());
        data.insert("users".into(), json!([user]));
    }
    if let Some(item) = get("ciupgrade") {
        data.insert("package_upgrade".into(), item.is_yes().into());
        item.same("spec.cloudInit.userData");
    }
    if let Some(item) = get("citype") {
        item.changed("the data source is NoCloud");
    }
    let network = network_config(root);
    if data.is_empty() && network.is_none() {
        return;
    }
    let mut init = json!({ "userData": data });
    if let Some(network) = network {
        init["networkConfig"] = network;
    }
    draft.spec.insert("cloudInit".into(), init);
}

/// `ipconfigN`, in cloud-init's version 2. A card is found by its MAC address.
fn network_config(root: &Item) -> Option<Value> {
    let mut cards = Map::new();
    let mut interfaces = BTreeMap::new();
    for item in root.items().iter().filter(|item| is_numbered(&item.key, &["net"])) {
        interfaces.entry(item.key.as_str()).or_insert(item);
    }
    let servers = [("nameserver", "addresses"), ("searchdomain", "search")].map(|(key, field)| (root.get(key), field));
    for item in root.items().iter().filter(|item| is_numbered(&item.key, &["ipconfig"])) {
        let number = &item.key["ipconfig".len()..];
        let card = interfaces.get(format!("net{number}").as_str());
        let mac = card.and_then(|card| card.items().iter().find(|part| is_mac(part.text()))).map(Item::text);
        let Some(mac) = mac else {
            item.whole(Grade::LeftOut, "its card has no MAC address in this file");
            continue;
        };
        item.enter();
        // Without a name, several programs of guests do not look for the address.
        let name = super::card_name(root, &format!("net{number}")).unwrap_or_else(|| format!("eth{number}"));
        let mut config = json!({ "match": { "macaddress": mac.to_lowercase() }, "set-name": name });
        for (key, gateway, dhcp, default) in [("ip", "gw", "dhcp4", "0.0.0.0/0"), ("ip6", "gw6", "dhcp6", "::/0")] {
            let Some(address) = item.get(key) else { continue };
            match address.text() {
                "dhcp" => config[dhcp] = true.into(),
                "auto" => config["accept-ra"] = true.into(),
                text => {
                    let list = config["addresses"].as_array().cloned().unwrap_or_default();
                    config["addresses"] = list.into_iter().chain([text.into()]).collect();
                }
            }
            address.same("spec.cloudInit.networkConfig");
            if let Some(gateway) = item.get(gateway) {
                let list = config["routes"].as_array().cloned().unwrap_or_default();
                let route = json!({ "to": default, "via": gateway.same("spec.cloudInit.networkConfig") });
                config["routes"] = list.into_iter().chain([route]).collect();
            }
        }
        for (item, field) in servers {
            if let Some(item) = item {
                let words = item.same("spec.cloudInit.networkConfig").split([' ', ',']).filter(|word| !word.is_empty());
                config["nameservers"][field] = words.collect::<Vec<_>>().into();
            }
        }
        cards.insert(format!("net{number}"), config);
    }
    (!cards.is_empty()).then(|| json!({ "version": 2, "ethernets": cards }))
}
