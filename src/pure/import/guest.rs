//! What a guest notices of its move by itself: its network cards have other names, and cloud-init takes it for a new one.

use serde_json::{Map, Value, json};

use super::draft::{Card, Draft};
use crate::{exchange::Grade, runner_config::digest};

/// The PCI slot of the first network card, and how many share one (`templates/qemu/standard.yaml.j2`).
const FIRST_SLOT: usize = 16;
const IN_A_SLOT: usize = 8;
/// What cloud-init does in a guest that it takes for a new one.
const ANEW: &str = "it makes new host keys and users, and runs runcmd again";

/// What Linux guests call the card with this number here, with systemd's names: a function of a slot of the first bus.
pub(super) fn name_here(number: usize) -> String {
    format!("enp0s{}f{}", FIRST_SLOT + number / IN_A_SLOT, number % IN_A_SLOT)
}

/// Tells the new name of the card that was added last. `before`: what systemd called it there.
pub(super) fn tell_name(draft: &mut Draft, line: usize, what: &str, before: Option<String>, mac: Option<&str>) {
    let number = draft.cards.len();
    let here = name_here(number);
    draft.cards.push(Card { before: before.clone(), mac: mac.map(str::to_lowercase) });
    let before = before.unwrap_or_else(|| "another name".to_owned());
    let why = format!(
        "a Linux guest calls this card {here} here (before: {before}): a configuration of the guest that names the card must name the new one or \
         match its MAC address, else the guest has no network"
    );
    draft.note(line, what, Grade::Changed, why);
}

/// The data for a network in which each card that was only named is found by its MAC address, and keeps its name. `None`: there is nothing to
/// change. Cards without a MAC address get one.
pub(super) fn network_config(text: &str, draft: &mut Draft) -> Option<Value> {
    let mut data: Value = crate::yaml::from_str(text).ok()?;
    // Some write the outer key of netplan's files.
    let config = if data.get("network").is_some_and(Value::is_object) { data.get_mut("network")? } else { &mut data };
    let mut number = 0;
    let mut changed = false;
    let mut finds = |draft: &mut Draft| {
        let found = mac_of(draft, number);
        number += 1;
        found
    };
    if let Some(cards) = config.get_mut("ethernets").and_then(Value::as_object_mut) {
        for (name, card) in cards.iter_mut() {
            let Some(mac) = finds(draft) else { break };
            if card.is_null() {
                *card = json!({});
            }
            let Some(card) = card.as_object_mut() else { continue };
            if !card.contains_key("match") {
                card.insert("match".into(), json!({ "macaddress": mac }));
            } else if card["match"].get("macaddress").is_none() || card.contains_key("set-name") {
                continue;
            }
            card.entry("set-name").or_insert_with(|| json!(name));
            changed = true;
        }
    }
    // Version 1: a card with an address gets the name.
    for card in config.get_mut("config").and_then(Value::as_array_mut).into_iter().flatten() {
        if card["type"] != "physical" {
            continue;
        }
        let Some(mac) = finds(draft) else { break };
        if let Some(card) = card.as_object_mut().filter(|card| !card.contains_key("mac_address")) {
            card.insert("mac_address".into(), json!(mac));
            changed = true;
        }
    }
    changed.then_some(data)
}

/// The MAC address of a card, which gets one if it has none.
fn mac_of(draft: &mut Draft, number: usize) -> Option<String> {
    let card = draft.cards.get(number)?;
    if let Some(mac) = &card.mac {
        return Some(mac.clone());
    }
    let seed = format!("{}/{}/{number}", draft.namespace.as_deref().unwrap_or_default(), draft.name);
    let hash = digest(seed, 3);
    let pairs: Vec<&str> = (0..3).filter_map(|at| hash.get(2 * at..2 * at + 2)).collect();
    let mac = format!("52:54:00:{}", pairs.join(":"));
    if !draft.give_mac(number, &mac) {
        return None;
    }
    if let Some(card) = draft.cards.get_mut(number) {
        card.mac = Some(mac.clone());
    }
    Some(mac)
}

/// Tells that cloud-init takes a copied guest for a new one. `former`: the instance-id that it had, where the source says it.
pub(super) fn tell_instance(draft: &mut Draft, line: usize, what: &str, former: Option<String>) {
    if draft.fills.is_empty() || !draft.spec.contains_key("cloudInit") {
        return;
    }
    let init = draft.spec.entry("cloudInit").or_insert_with(|| json!({}));
    let why = match former {
        Some(former) if init["metaData"]["instance-id"].is_null() => {
            let mut meta = init["metaData"].as_object().cloned().unwrap_or_else(Map::new);
            meta.insert("instance-id".into(), json!(former));
            init["metaData"] = meta.into();
            format!(
                "spec.cloudInit.metaData.instance-id: {former}, as there, so that cloud-init in the copied guest does not run anew; without it {ANEW}"
            )
        }
        _ => format!(
            "cloud-init in the copied guest runs anew: {ANEW}; `cloud-init query instance_id` in the guest prints the former instance-id, which as \
             spec.cloudInit.metaData.instance-id prevents that"
        ),
    };
    draft.note(line, what, Grade::Changed, why);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::draft::Link;

    fn changed(text: &str, macs: &[Option<&str>]) -> Option<Value> {
        let mut draft = Draft::default();
        draft.name.push_str("web");
        for (number, mac) in macs.iter().enumerate() {
            draft.network(if number == 0 { Link::Pod } else { Link::Bridge("br0") }, None, *mac);
            tell_name(&mut draft, 1, "card", Some("ens18".into()), *mac);
        }
        network_config(text, &mut draft)
    }

    #[test]
    fn cards_are_found_by_their_address_and_keep_their_names() {
        let mac = Some("02:00:00:00:00:0A");
        let found = changed("version: 2\nethernets:\n  enp1s0: {dhcp4: true}\n", &[mac]).unwrap();
        let expected = json!({ "match": { "macaddress": "02:00:00:00:00:0a" }, "set-name": "enp1s0", "dhcp4": true });
        assert_eq!(found["ethernets"]["enp1s0"], expected);
        // Without an address the card gets one, which stays the same.
        let given = changed("ethernets: {eth0: }", &[None]).unwrap();
        assert_eq!(given, changed("ethernets: {eth0: }", &[None]).unwrap());
        assert!(given["ethernets"]["eth0"]["match"]["macaddress"].as_str().unwrap().starts_with("52:54:00:"));
        let first =
            changed("version: 1\nconfig: [{type: physical, name: eth0}, {type: nameserver}]\n", &[mac]).unwrap();
        assert_eq!(first["config"][0]["mac_address"], "02:00:00:00:00:0a");
        let outer =
            changed("network: {version: 2, ethernets: {a: {}, b: {}}}", &[mac, Some("02:00:00:00:00:0b")]).unwrap();
        assert_eq!(outer["network"]["ethernets"]["b"]["match"]["macaddress"], "02:00:00:00:00:0b");
        let only_matched = "ethernets: {x: {match: {macaddress: '02:00:00:00:00:0c'}}}";
        assert_eq!(changed(only_matched, &[mac]).unwrap()["ethernets"]["x"]["set-name"], "x");
        for same in [
            "ethernets: {x: {match: {name: 'en*'}, dhcp4: true}}",
            "ethernets: {x: {match: {macaddress: '02:00:00:00:00:0c'}, set-name: y}}",
            "version: 1\nconfig: [{type: physical, name: eth0, mac_address: 'aa'}]\n",
            "config: disabled",
            "a: [",
            "text",
        ] {
            assert_eq!(changed(same, &[mac]), None, "{same}");
        }
        // More cards in the data than the VM has.
        assert_eq!(changed("ethernets: {eth0: {}}", &[]), None);
    }

    #[test]
    fn eight_cards_share_a_slot() {
        assert_eq!([0, 1, 7, 8, 31].map(name_here), ["enp0s16f0", "enp0s16f1", "enp0s16f7", "enp0s17f0", "enp0s19f7"]);
    }
}
