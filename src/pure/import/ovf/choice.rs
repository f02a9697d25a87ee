//! Which of several possible values a VM has: deployment options, and the bounds of a range.

use std::collections::BTreeSet;

use super::{Grade, Item, is_yes, of};

/// The configuration that is read: the default one, or the first.
pub(super) fn configuration(root: &Item) -> Option<&str> {
    let section = root.get("DeploymentOptionSection")?;
    section.enter();
    if let Some(info) = section.get("Info") {
        info.same("words for people");
    }
    let all: Vec<&Item> = section.all("Configuration").collect();
    let chosen = all.iter().copied().find(|item| is_yes(of(item, "@default"))).or_else(|| all.first().copied())?;
    let id = of(chosen, "@id");
    for item in all {
        if std::ptr::eq(item, chosen) {
            item.whole(Grade::Same, "the configuration that is read");
        } else {
            item.whole(Grade::LeftOut, format!("another configuration: {id:?} is read"));
        }
    }
    Some(id)
}

/// The parts with these names that count. The others are left out: they are for another configuration, or for another bound than the
/// normal value.
pub(super) fn taken<'a>(section: &'a Item, keys: &[&str], configuration: Option<&str>) -> Vec<&'a Item> {
    let all: Vec<&Item> = section.items().iter().filter(|item| keys.contains(&item.key.as_str())).collect();
    let is_normal = |item: &Item| ["", "normal"].contains(&of(item, "@bound"));
    let is_for_it = |item: &Item| of(item, "@configuration").split_whitespace().any(|id| Some(id) == configuration);
    // Such a part replaces the general one of the same number.
    let special: BTreeSet<&str> = all
        .iter()
        .copied()
        .filter(|item| is_for_it(item) && is_normal(item))
        .map(|item| of(item, "InstanceID"))
        .filter(|id| !id.is_empty())
        .collect();
    let mut found = Vec::new();
    for item in all {
        let only_for = of(item, "@configuration");
        let read = configuration.unwrap_or_default();
        if !only_for.is_empty() && !is_for_it(item) {
            item.whole(Grade::LeftOut, format!("it is for the configuration {only_for:?}: {read:?} is read"));
        } else if !is_normal(item) {
            let bound = of(item, "@bound");
            item.whole(Grade::LeftOut, format!("the bound {bound:?} of a range: the normal value counts"));
        } else if only_for.is_empty() && special.contains(of(item, "InstanceID")) {
            item.whole(Grade::LeftOut, format!("the configuration {read:?} has another one"));
        } else {
            found.push(item);
        }
    }
    found
}
