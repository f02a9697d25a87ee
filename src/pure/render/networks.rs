//! The networks of the runner's configuration: what each network of the spec keeps from its VM's former starts.
//!
//! A network keeps its MAC address and its slot, which gives its PCI address, whatever is added, taken out or sorted around it. `status.identity`
//! has both for each network of the last start. **A network of the spec is the first of these that fits**
//!
//! | | the recorded one |
//! |---|---|
//! | 1 | of its name |
//! | 2 | with the MAC address that the spec gives it |
//! | 3 | that [`entries`] finds by parameters and neighbours. A network with a name is none that has another name |
//! | 4 | none: it gets the slot of its position, or the first that is free |

use std::collections::BTreeSet;

use crate::{
    api::{
        Network, VirtualMachine,
        network::MOST_NETWORKS,
        status::{Identity, ListEntry, NetworkIdentity},
    },
    entries::{self, Recorded},
    runner_config::NetworkSection,
};

/// The sections of the networks, in the order of the spec.
pub(crate) fn sections(vm: &VirtualMachine) -> Vec<NetworkSection> {
    let networks = &vm.spec.vm.networks;
    let identity = vm.status.as_ref().and_then(|status| status.runner.identity.as_ref());
    let recorded = identity.map(recorded).unwrap_or_default();
    // There the disks stand behind the last slot of the networks.
    let reuses = identity.is_some_and(|identity| identity.hardware.as_deref() == Some("legacy"));
    let mut sections: Vec<NetworkSection> = networks.iter().filter_map(section).collect();
    // A kept address that the spec gives to a network now belongs to that network alone.
    let in_spec = |mac: &str| networks.iter().filter_map(Network::mac).any(|it| it.eq_ignore_ascii_case(mac));
    let slots = slots(&recorded, &sections, reuses);
    // A status that is not ours may have an address twice.
    let mut given = BTreeSet::new();
    for (index, (section, slot)) in sections.iter_mut().zip(slots).enumerate() {
        section.place(index, slot);
        let kept = recorded.iter().find(|recorded| recorded.slot == slot).map(|recorded| &recorded.mac);
        let kept = kept.filter(|mac| section.mac().is_none() && !in_spec(mac));
        if let Some(mac) = kept.filter(|mac| given.insert(mac.to_lowercase())) {
            section.set_mac(mac.clone());
        }
    }
    sections
}

fn section(network: &Network) -> Option<NetworkSection> {
    let device = |device: &Option<String>| device.clone().unwrap_or_else(|| "virtio-net".into());
    let (name, mac, slot) = (network.name.clone(), network.mac().map(str::to_owned), None);
    if let Some(tap) = &network.tap {
        let bridge = tap.bridge.clone().unwrap_or_else(|| "br0".into());
        Some(NetworkSection::Tap { device: device(&tap.device), bridge, mac, name, slot })
    } else if let Some(user) = &network.user {
        let (device, net) = (device(&user.device), user.net.clone());
        Some(NetworkSection::User { device, net, mac, name, slot, forwards: Vec::new() })
    } else {
        let pod = network.pod.as_ref()?;
        Some(NetworkSection::Pod { device: device(&pod.device), mac, name, slot })
    }
}

/// The networks of the last start. A runner of an earlier release has reported addresses alone, and had the networks in the order of the spec.
fn recorded(identity: &Identity) -> Vec<NetworkIdentity> {
    if !identity.networks.is_empty() {
        // A status that is not ours may have a slot twice.
        let mut slots = BTreeSet::new();
        return identity.networks.iter().filter(|it| slots.insert(it.slot)).cloned().collect();
    }
    let network = |(index, mac): (usize, &String)| {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let entry = ListEntry { position: index, parameters: String::new() };
        NetworkIdentity { name: None, mac: mac.clone(), slot: index, entry }
    };
    identity.macs.iter().enumerate().map(network).collect()
}

/// The slots of the networks, by the table at the head of this module. `reuses`: a new network may have the slot of one that is gone.
fn slots(recorded: &[NetworkIdentity], networks: &[NetworkSection], reuses: bool) -> Vec<u32> {
    let mut found: Vec<Option<u32>> = vec![None; networks.len()];
    let mut left: Vec<&NetworkIdentity> = recorded.iter().collect();
    for fits in [has_name, has_mac] {
        for (network, slot) in networks.iter().zip(&mut found).filter(|(_, slot)| slot.is_none()) {
            if let Some(at) = left.iter().position(|it| fits(network, it)) {
                *slot = Some(left.remove(at).slot);
            }
        }
    }
    by_neighbours(&left, networks, &mut found);
    let former = left.iter().map(|it| it.slot).filter(|_| !reuses).collect();
    entries::fill(found, &former, MOST_NETWORKS)
}

/// The first line of the table.
fn has_name(network: &NetworkSection, recorded: &NetworkIdentity) -> bool {
    recorded.name.is_some() && network.name() == recorded.name.as_deref()
}

/// The second line of the table.
fn has_mac(network: &NetworkSection, recorded: &NetworkIdentity) -> bool {
    network.mac().is_some_and(|mac| mac.eq_ignore_ascii_case(&recorded.mac))
}

/// The third line of the table.
fn by_neighbours(left: &[&NetworkIdentity], networks: &[NetworkSection], found: &mut [Option<u32>]) {
    let rest: Vec<usize> = (0..networks.len()).filter(|at| found[*at].is_none()).collect();
    if left.is_empty() || rest.is_empty() {
        return;
    }
    let records: Vec<Recorded> =
        left.iter().map(|it| Recorded { number: it.slot, entry: it.entry.clone(), unused: false }).collect();
    let entry = |at: &usize| ListEntry {
        position: u32::try_from(*at).unwrap_or(u32::MAX),
        parameters: networks[*at].parameters(),
    };
    let slots = entries::matched(&records, &rest.iter().map(entry).collect::<Vec<_>>());
    for (at, slot) in rest.into_iter().zip(slots) {
        let is_it =
            |it: &&&NetworkIdentity| Some(it.slot) == slot && (networks[at].name().is_none() || it.name.is_none());
        found[at] = left.iter().find(is_it).map(|it| it.slot);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::vm;

    /// `a b:lan`: networks with these bridges, the second with a name.
    fn networks(text: &str) -> Value {
        let network = |word: &str| {
            let (bridge, name) = word.split_once(':').map_or((word, None), |(bridge, name)| (bridge, Some(name)));
            let mut network = json!({ "tap": { "bridge": bridge } });
            if let Some(name) = name {
                network["name"] = json!(name);
            }
            network
        };
        json!(text.split_whitespace().map(network).collect::<Vec<_>>())
    }

    fn with(networks: Value, identity: Value) -> VirtualMachine {
        vm(|vm| {
            vm["spec"]["vm"]["networks"] = networks;
            vm["status"] = json!({ "identity": identity });
        })
    }

    fn mac(number: u32) -> String {
        format!("02:00:00:00:00:{number:02x}")
    }

    /// What a runner reports after a start with these sections: new addresses for those without.
    fn started(sections: &[NetworkSection], next: &mut u32) -> Value {
        let network = |(index, section): (usize, &NetworkSection)| {
            let slot = section.slot(index);
            let mac = section.mac().map(str::to_owned).unwrap_or_else(|| {
                *next += 1;
                mac(*next)
            });
            json!({ "name": section.name(), "mac": mac, "slot": slot,
                "entry": { "position": index, "parameters": section.parameters() } })
        };
        json!({ "uuid": "u", "networks": sections.iter().enumerate().map(network).collect::<Vec<_>>() })
    }

    #[test]
    fn the_table() {
        for (before, after, expected, what) in [
            ("a b", "b", "1", "the first is taken out"),
            ("a b", "a", "0", "the last is taken out"),
            ("a b", "x a b", "2 0 1", "a new one comes first"),
            ("a b c", "c a b", "2 0 1", "sorted"),
            ("a b", "x b", "0 1", "the first is edited"),
            ("a a", "a a", "0 1", "nothing tells them apart"),
            ("a:x a:y", "a:y", "1", "the first of two that look the same, with names"),
            ("a:x a:y", "a:y a:x", "1 0", "with names, sorted"),
            ("a b", "b:y", "1", "one gets a name"),
            ("a:x b", "a b", "0 1", "one loses its name"),
            ("a:x b", "a:z b", "2 1", "another name is another network"),
            ("a:net1", "b a:net1", "1 0", "a name that looks like a default"),
        ] {
            let mut next = 0;
            let first = sections(&with(networks(before), Value::Null));
            let identity = started(&first, &mut next);
            let found = sections(&with(networks(after), identity.clone()));
            let slots: Vec<String> =
                found.iter().enumerate().map(|(index, section)| section.slot(index).to_string()).collect();
            assert_eq!(slots.join(" "), expected, "{what}: {before} -> {after}");
            for (index, section) in found.iter().enumerate() {
                let slot = section.slot(index);
                let kept = identity["networks"].as_array().unwrap().iter().find(|it| it["slot"] == slot);
                assert_eq!(section.mac().map(Value::from), kept.map(|it| it["mac"].clone()), "{what}: slot {slot}");
            }
        }
    }

    #[test]
    fn a_vm_of_an_earlier_release_keeps_what_it_has_and_its_file_is_the_same() {
        let macs = json!([mac(1), mac(2)]);
        let found = sections(&with(networks("a b"), json!({ "uuid": "u", "macs": macs })));
        let expected = json!([
            { "type": "tap", "device": "virtio-net", "bridge": "a", "mac": mac(1) },
            { "type": "tap", "device": "virtio-net", "bridge": "b", "mac": mac(2) },
        ]);
        assert_eq!(json!(found), expected, "no field that the file did not have");
        // A new one behind them.
        let more = sections(&with(networks("a b c"), json!({ "uuid": "u", "macs": macs })));
        assert_eq!((more[2].slot(2), more[2].mac()), (2, None));
    }

    #[test]
    fn slots_are_used_again_when_there_are_no_others() {
        let text = (0..MOST_NETWORKS).map(|number| format!("a{number} ")).collect::<String>();
        let identity = started(&sections(&with(networks(&text), Value::Null)), &mut 0);
        let all_new = (0..MOST_NETWORKS).map(|number| format!("b:n{number} ")).collect::<String>();
        let found = sections(&with(networks(&all_new), identity));
        let slots: BTreeSet<u32> = found.iter().enumerate().map(|(index, section)| section.slot(index)).collect();
        assert_eq!(slots, (0..MOST_NETWORKS).collect());
    }

    #[derive(Clone, Debug)]
    enum Edit {
        TakeOut(usize),
        Insert(usize, bool),
        Swap(usize, usize),
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// Whatever is edited between two starts, a network that is still there has its address and its slot.
        #[test]
        fn a_network_that_is_still_there_has_its_addresses(
            edits in prop::collection::vec(prop_oneof![
                (0..6_usize).prop_map(Edit::TakeOut),
                (0..6_usize, any::<bool>()).prop_map(|(at, named)| Edit::Insert(at, named)),
                (0..6_usize, 0..6_usize).prop_map(|(one, other)| Edit::Swap(one, other)),
            ], 0..20),
            starts in prop::collection::vec(any::<bool>(), 20),
        ) {
            // Each network has a bridge of its own, so that it is known which one it is.
            let mut list: Vec<String> = vec!["b0".into(), "b1:one".into(), "b2".into()];
            let (mut number, mut next) = (3, 0);
            let mut identity = Value::Null;
            let mut known: BTreeMap<String, (u32, String)> = BTreeMap::new();
            for (edit, starts) in std::iter::once(None).chain(edits.into_iter().map(Some)).zip(std::iter::once(true).chain(starts)) {
                let length = list.len();
                match edit {
                    Some(Edit::TakeOut(at)) if at < length => drop(list.remove(at)),
                    Some(Edit::Insert(at, named)) if length < 8 => {
                        let name = if named { format!(":n{number}") } else { String::new() };
                        list.insert(at.min(length), format!("b{number}{name}"));
                        number += 1;
                    }
                    Some(Edit::Swap(one, other)) if one < length && other < length => list.swap(one, other),
                    _ => {}
                }
                if !starts {
                    continue;
                }
                let found = sections(&with(networks(&list.join(" ")), identity.clone()));
                identity = started(&found, &mut next);
                let now: BTreeMap<String, (u32, String)> = list.iter().zip(identity["networks"].as_array().unwrap()).map(|(bridge, it)| {
                    (bridge.clone(), (u32::try_from(it["slot"].as_u64().unwrap()).unwrap(), it["mac"].as_str().unwrap().to_owned()))
                }).collect();
                for (bridge, addresses) in &now {
                    prop_assert!(known.get(bridge).is_none_or(|before| before == addresses), "{bridge}: {known:?} {now:?}");
                }
                let slots: BTreeSet<u32> = now.values().map(|(slot, _)| *slot).collect();
                prop_assert_eq!(slots.len(), list.len());
                known = now;
            }
        }
    }
}
