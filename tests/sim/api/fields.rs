//! Who owns which field: the sets in `metadata.managedFields`, and what an apply or an update makes of an object and of them
//! (<https://kubernetes.io/docs/reference/using-api/server-side-apply/>).

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Map, Value, json};

use super::kinds::{Kind, Shape};

/// A set of fields. An element is `f:NAME`, `k:{KEYS}` or `v:VALUE`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Set {
    /// Whether the field itself is in the set.
    has_self: bool,
    below: BTreeMap<String, Set>,
}

impl Set {
    fn leaf() -> Self {
        Self { has_self: true, below: BTreeMap::new() }
    }

    pub fn is_empty(&self) -> bool {
        !self.has_self && self.below.values().all(Self::is_empty)
    }

    /// The set of all fields of a value.
    fn of(value: &Value, path: &str, kind: &Kind) -> Self {
        let shape = kind.shapes.get(path);
        match value {
            Value::Object(map) if shape != Some(&Shape::Atomic) => {
                if map.is_empty() {
                    return Self::leaf();
                }
                let fields = map.iter().filter(|(name, _)| is_in_sets(path, name));
                let below = fields.map(|(name, value)| (format!("f:{name}"), Self::of(value, &join(path, name), kind)));
                Self { has_self: false, below: below.collect() }
            }
            Value::Array(items) => match shape {
                Some(Shape::Map(keys)) => {
                    let path = format!("{path}[]");
                    let item = |item: &Value| {
                        let set = Self::of(item, &path, kind);
                        (key_of(item, keys), Self { has_self: true, ..set })
                    };
                    Self { has_self: false, below: items.iter().map(item).collect() }
                }
                Some(Shape::Set) => {
                    let below = items.iter().map(|item| (format!("v:{item}"), Self::leaf()));
                    Self { has_self: false, below: below.collect() }
                }
                Some(Shape::Atomic) | None => Self::leaf(),
            },
            _ => Self::leaf(),
        }
    }

    /// The same with the maps and lists that have fields: who adds one to an object by an update owns it, too. The parts that each object
    /// of the kind has are nobody's.
    fn with_containers(value: &Value, kind: &Kind) -> Self {
        let mut set = Self::of(value, "", kind);
        for (name, part) in &mut set.below {
            part.add_containers();
            let is_of_type = kind.is_builtin() && ["f:spec", "f:status"].contains(&name.as_str());
            part.has_self = name != "f:metadata" && (part.below.is_empty() || !is_of_type);
        }
        set
    }

    /// Without the parts that a write to the resource, or to its status, can't change.
    fn of_part(mut self, subresource: &str, kind: &Kind) -> Self {
        if kind.has_status {
            self.below.retain(|name, _| (name == "f:status") == (subresource == "status"));
        }
        self
    }

    fn add_containers(&mut self) {
        self.has_self = true;
        self.below.values_mut().for_each(Self::add_containers);
    }

    fn parse(fields: &Value) -> Self {
        let Some(map) = fields.as_object() else { return Self::default() };
        if map.is_empty() {
            return Self::leaf();
        }
        let below = map.iter().filter(|(name, _)| *name != ".").map(|(name, set)| (name.clone(), Self::parse(set)));
        Self { has_self: map.contains_key("."), below: below.collect() }
    }

    fn to_value(&self) -> Value {
        let mut map = Map::new();
        if self.has_self && !self.below.is_empty() {
            map.insert(".".into(), json!({}));
        }
        map.extend(
            self.below.iter().filter(|(_, set)| !set.is_empty()).map(|(name, set)| (name.clone(), set.to_value())),
        );
        map.into()
    }

    fn minus(&self, other: &Self) -> Self {
        let below = self.below.iter().map(|(name, set)| match other.below.get(name) {
            Some(other) => (name.clone(), set.minus(other)),
            None => (name.clone(), set.clone()),
        });
        let below = below.filter(|(_, set)| !set.is_empty()).collect();
        Self { has_self: self.has_self && !other.has_self, below }
    }

    fn plus(&self, other: &Self) -> Self {
        let mut all = self.clone();
        all.has_self |= other.has_self;
        for (name, set) in &other.below {
            let below = all.below.entry(name.clone()).or_default();
            *below = below.plus(set);
        }
        all
    }

    /// Leaves out the items of lists that are not in `other`.
    fn keep_items_of(&mut self, other: &Self) {
        let is_item = |element: &str| !element.starts_with("f:");
        self.below.retain(|element, _| !is_item(element) || other.below.contains_key(element));
        for (element, set) in &mut self.below {
            if let Some(other) = other.below.get(element) {
                set.keep_items_of(other);
            }
        }
    }

    fn common(&self, other: &Self) -> Self {
        self.minus(&self.minus(other))
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// Whether sets have the field: they never have what names an object.
fn is_in_sets(path: &str, name: &str) -> bool {
    match path {
        "" => !["apiVersion", "kind"].contains(&name),
        "metadata" => ["labels", "annotations", "ownerReferences", "finalizers"].contains(&name),
        _ => true,
    }
}

/// The element of a list's item. The only default of a key is that of ports.
fn key_of(item: &Value, keys: &[String]) -> String {
    let value = |key: &String| match &item[key] {
        Value::Null if key == "protocol" => json!("TCP"),
        value => value.clone(),
    };
    let keys: BTreeMap<&String, Value> = keys.iter().map(|key| (key, value(key))).collect();
    format!("k:{}", json!(keys))
}

/// The item of a list that an element names.
fn position(items: &[Value], element: &str, shape: Option<&Shape>) -> Option<usize> {
    items.iter().position(|item| match shape {
        Some(Shape::Map(keys)) => key_of(item, keys) == element,
        _ => format!("v:{item}") == element,
    })
}

/// Who writes, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Writer {
    pub manager: String,
    /// `status` or nothing.
    pub subresource: &'static str,
    pub now: String,
}

/// An entry of `managedFields`.
#[derive(Clone, Debug)]
struct Entry {
    manager: String,
    operation: String,
    subresource: String,
    time: String,
    fields: Set,
}

impl Entry {
    fn is(&self, writer: &Writer, operation: &str) -> bool {
        self.manager == writer.manager && self.operation == operation && self.subresource == writer.subresource
    }
}

fn entries(object: &Value) -> Vec<Entry> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let entries = object["metadata"]["managedFields"].as_array().into_iter().flatten();
    let entries = entries.map(|entry| Entry {
        manager: text(&entry["manager"]),
        operation: text(&entry["operation"]),
        subresource: text(&entry["subresource"]),
        time: text(&entry["time"]),
        fields: Set::parse(&entry["fieldsV1"]),
    });
    // `[{}]` takes all entries away.
    entries.filter(|entry| !entry.operation.is_empty()).collect()
}

fn set_entries(object: &mut Value, entries: Vec<Entry>, kind: &Kind) {
    let written = entries.into_iter().filter(|entry| !entry.fields.is_empty()).map(|entry| {
        let mut written = json!({
            "manager": entry.manager, "operation": entry.operation, "apiVersion": kind.api_version(), "time": entry.time,
            "fieldsType": "FieldsV1", "fieldsV1": entry.fields.to_value(),
        });
        if !entry.subresource.is_empty() {
            written["subresource"] = entry.subresource.into();
        }
        written
    });
    let written: Vec<Value> = written.collect();
    if let Some(metadata) = object["metadata"].as_object_mut() {
        if written.is_empty() {
            metadata.remove("managedFields");
        } else {
            metadata.insert("managedFields".into(), written.into());
        }
    }
}

/// Fields that an apply would take from others who own them with other values.
pub struct Conflict(pub Vec<String>);

/// What an apply of `config` makes of an object.
pub fn apply(
    live: Option<&Value>,
    config: &Value,
    writer: &Writer,
    force: bool,
    kind: &Kind,
) -> Result<Value, Conflict> {
    let mut entries = live.map(entries).unwrap_or_default();
    if let Some(live) = live.filter(|_| entries.is_empty()) {
        let (operation, time) = ("Update".to_owned(), writer.now.clone());
        let (manager, fields) = ("before-first-apply".to_owned(), Set::with_containers(live, kind));
        let fields = fields.of_part(writer.subresource, kind);
        entries.push(Entry { manager, operation, subresource: writer.subresource.into(), time, fields });
    }
    // Maps and lists that went with their last field are nobody's any more.
    if let Some(live) = live {
        let left = Set::with_containers(live, kind);
        for entry in entries.iter_mut().filter(|entry| entry.operation != "Apply") {
            entry.fields = entry.fields.common(&left);
        }
    }
    let wanted = Set::of(config, "", kind).of_part(writer.subresource, kind);
    let mut merged = live.cloned().unwrap_or_else(|| json!({}));
    let before = merged.clone();
    merge(&mut merged, config, "", kind);
    let mut former = Set::default();
    let mut others = Set::default();
    let mut conflicts = Vec::new();
    for entry in &mut entries {
        if entry.is(writer, "Apply") {
            former = entry.fields.clone();
            continue;
        }
        let taken = changed(&before, &merged, &entry.fields.common(&wanted), "", kind);
        if !taken.is_empty() {
            conflicts.push(entry.manager.clone());
            entry.fields = entry.fields.minus(&taken);
        }
        others = others.plus(&entry.fields);
    }
    if !conflicts.is_empty() && !force {
        return Err(Conflict(conflicts));
    }
    remove(&mut merged, &former.minus(&wanted).minus(&others), "", kind);
    let left = Set::of(&merged, "", kind);
    entries.iter_mut().for_each(|entry| entry.fields.keep_items_of(&left));
    match entries.iter_mut().find(|entry| entry.is(writer, "Apply")) {
        Some(entry) => entry.fields = wanted,
        None => entries.push(Entry {
            manager: writer.manager.clone(),
            operation: "Apply".into(),
            subresource: writer.subresource.into(),
            time: writer.now.clone(),
            fields: wanted,
        }),
    }
    set_entries(&mut merged, entries, kind);
    Ok(stamped(live, merged, writer, "Apply"))
}

/// What an update from `live` to `new` makes of the entries. `new` has those of `live`, or others that the writer gives it.
pub fn update(live: Option<&Value>, mut new: Value, writer: &Writer, kind: &Kind) -> Value {
    let nothing = json!({});
    let before = live.unwrap_or(&nothing);
    let mut entries = entries(&new);
    // Nothing is tracked between a reset of the entries and the next apply.
    if live.is_some() && entries.is_empty() {
        set_entries(&mut new, entries, kind);
        return new;
    }
    let (had, has) = (Set::with_containers(before, kind), Set::with_containers(&new, kind));
    let (had, has) = (had.of_part(writer.subresource, kind), has.of_part(writer.subresource, kind));
    let (gone, added) = (had.minus(&has), has.minus(&had));
    let written = changed(before, &new, &had.common(&has), "", kind).plus(&added);
    for entry in &mut entries {
        entry.fields = entry.fields.minus(&gone);
        if !entry.is(writer, "Update") {
            entry.fields = entry.fields.minus(&written);
        }
    }
    match entries.iter_mut().find(|entry| entry.is(writer, "Update")) {
        Some(entry) => entry.fields = entry.fields.plus(&written),
        None => entries.push(Entry {
            manager: writer.manager.clone(),
            operation: "Update".into(),
            subresource: writer.subresource.into(),
            time: writer.now.clone(),
            fields: written,
        }),
    }
    set_entries(&mut new, entries, kind);
    stamped(live, new, writer, "Update")
}

/// The new object with the time in the writer's entry; or the live one, if nothing but a time has changed.
fn stamped(live: Option<&Value>, mut new: Value, writer: &Writer, operation: &str) -> Value {
    if let Some(live) = live.filter(|live| **live == new) {
        return live.clone();
    }
    for entry in new["metadata"]["managedFields"].as_array_mut().into_iter().flatten() {
        let subresource = entry["subresource"].as_str().unwrap_or_default();
        if entry["manager"] == *writer.manager && entry["operation"] == operation && subresource == writer.subresource {
            entry["time"] = writer.now.clone().into();
        }
    }
    if new["metadata"]["managedFields"].is_null()
        && let Some(metadata) = new["metadata"].as_object_mut()
    {
        metadata.remove("managedFields");
    }
    new
}

/// Those fields of `of` that have other values in `new` than in `old`.
fn changed(old: &Value, new: &Value, of: &Set, path: &str, kind: &Kind) -> Set {
    let shape = kind.shapes.get(path);
    // Of an empty map or list that gets fields, only these differ.
    let are_containers = match shape {
        Some(Shape::Atomic) => false,
        Some(Shape::Map(_) | Shape::Set) => old.is_array() && new.is_array(),
        None => old.is_object() && new.is_object(),
    };
    let has_self = of.has_self && of.below.is_empty() && old != new && !are_containers;
    let mut differ = Set { has_self, below: BTreeMap::new() };
    for (element, of) in &of.below {
        let (old, new, path) = match element.strip_prefix("f:") {
            Some(name) => (old.get(name), new.get(name), join(path, name)),
            None => {
                let item = |list: &Value| -> Option<usize> { position(list.as_array()?, element, shape) };
                (
                    item(old).and_then(|index| old.get(index)),
                    item(new).and_then(|index| new.get(index)),
                    format!("{path}[]"),
                )
            }
        };
        let below = changed(old.unwrap_or(&Value::Null), new.unwrap_or(&Value::Null), of, &path, kind);
        if !below.is_empty() {
            differ.below.insert(element.clone(), below);
        }
    }
    differ
}

/// Merges what is applied into an object.
fn merge(object: &mut Value, config: &Value, path: &str, kind: &Kind) {
    let shape = kind.shapes.get(path);
    match (object, config, shape) {
        (Value::Object(object), Value::Object(config), None) => {
            for (name, value) in config {
                let at = join(path, name);
                match object.get_mut(name).filter(|known| !known.is_null()) {
                    Some(known) => merge(known, value, &at, kind),
                    None => drop(object.insert(name.clone(), value.clone())),
                }
            }
        }
        (Value::Array(items), Value::Array(config), Some(shape @ (Shape::Map(_) | Shape::Set))) => {
            let element = |item: &Value| match shape {
                Shape::Map(keys) => key_of(item, keys),
                _ => format!("v:{item}"),
            };
            *items = merge_lists(std::mem::take(items), config, element, |known, item| {
                merge(known, item, &format!("{path}[]"), kind);
            });
        }
        (object, config, _) => *object = config.clone(),
    }
}

/// Merges the items of an applied list into a list. Those of both have the order of the applied one; what else is in the list stays where it is
/// beside them (<https://github.com/kubernetes-sigs/structured-merge-diff>, `typed/merge.go`).
fn merge_lists(
    items: Vec<Value>,
    config: &[Value],
    element: impl Fn(&Value) -> String,
    merge: impl Fn(&mut Value, &Value),
) -> Vec<Value> {
    let keys: Vec<String> = items.iter().map(&element).collect();
    let applied: Vec<String> = config.iter().map(&element).collect();
    let (mut merged, mut used) = (Vec::new(), vec![false; items.len()]);
    let mut shared: VecDeque<&String> = applied.iter().filter(|key| keys.contains(key)).collect();
    let (mut left, mut right) = (0, 0);
    while left < items.len() || right < config.len() {
        if left < items.len() && right < config.len() {
            let is_same = keys[left] == applied[right];
            let is_later = keys.contains(&applied[right]) && shared.front().is_some_and(|next| **next != keys[left]);
            if !is_same && is_later && applied.contains(&keys[left]) {
                // It comes in its turn.
                left += 1;
                continue;
            }
        }
        if left < items.len() && !applied.contains(&keys[left]) {
            merged.push(items[left].clone());
            left += 1;
            continue;
        }
        if left < items.len() && used[left] {
            left += 1;
            continue;
        }
        if right < config.len() {
            let known = keys.iter().position(|key| *key == applied[right]);
            match known {
                Some(index) => {
                    let mut item = items[index].clone();
                    merge(&mut item, &config[right]);
                    merged.push(item);
                    used[index] = true;
                    shared.pop_front();
                }
                None => merged.push(config[right].clone()),
            }
            right += 1;
        } else {
            left += 1;
        }
    }
    merged
}

/// Removes fields that nobody owns any more.
fn remove(object: &mut Value, gone: &Set, path: &str, kind: &Kind) {
    let shape = kind.shapes.get(path);
    for (element, gone) in &gone.below {
        match (element.strip_prefix("f:"), &mut *object) {
            (Some(name), Value::Object(map)) => {
                let Some(value) = map.get_mut(name) else { continue };
                remove(value, gone, &join(path, name), kind);
                let is_left_empty = match value {
                    Value::Object(map) => map.is_empty(),
                    Value::Array(items) => items.is_empty(),
                    _ => false,
                };
                if gone.has_self || is_left_empty {
                    map.remove(name);
                }
            }
            (None, Value::Array(items)) => {
                let Some(index) = position(items, element, shape) else { continue };
                if gone.has_self {
                    items.remove(index);
                } else {
                    remove(&mut items[index], gone, &format!("{path}[]"), kind);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::kinds::{kind, kinds},
        *,
    };

    fn writer(manager: &str) -> Writer {
        Writer { manager: manager.into(), subresource: "", now: "2027-01-01T00:00:00Z".into() }
    }

    fn owned<'a>(object: &'a Value, manager: &str) -> &'a Value {
        let entries = object["metadata"]["managedFields"].as_array().unwrap();
        entries.iter().find(|entry| entry["manager"] == manager).map_or(&Value::Null, |entry| &entry["fieldsV1"])
    }

    /// The example of the documentation: what one applies no more is removed, unless another applies it too.
    #[test]
    fn what_is_applied_no_more_is_removed_unless_another_owns_it() {
        let kind = &kinds()[kind("Pod")];
        let container = |name: &str, image: &str| json!({ "name": name, "image": image });
        let pod = |labels: Value, containers: Value| json!({ "metadata": { "name": "p", "labels": labels }, "spec": { "containers": containers } });
        let first = pod(json!({ "a": "1", "b": "1" }), json!([container("x", "i"), container("y", "i")]));
        let made = apply(None, &first, &writer("one"), false, kind).ok().unwrap();
        let both =
            apply(Some(&made), &pod(json!({ "b": "1" }), json!([container("y", "i")])), &writer("two"), false, kind);
        let both = both.ok().unwrap();
        let less = apply(Some(&both), &pod(json!({}), json!([container("x", "j")])), &writer("one"), false, kind);
        let less = less.ok().unwrap();
        assert_eq!(less["metadata"]["labels"], json!({ "b": "1" }));
        assert_eq!(less["spec"]["containers"], json!([container("x", "j"), container("y", "i")]));
        assert_eq!(
            owned(&less, "one"),
            &json!({
                "f:metadata": { "f:labels": {} },
                "f:spec": { "f:containers": { "k:{\"name\":\"x\"}": { ".": {}, "f:name": {}, "f:image": {} } } },
            })
        );
    }

    #[test]
    fn another_value_is_a_conflict_and_force_takes_the_field() {
        let kind = &kinds()[kind("ConfigMap")];
        let map = |value: &str| json!({ "metadata": { "name": "m" }, "data": { "x": value, "y": "1" } });
        let made = apply(None, &map("1"), &writer("one"), false, kind).ok().unwrap();
        assert!(apply(Some(&made), &map("2"), &writer("two"), false, kind).is_err());
        let taken = apply(Some(&made), &map("2"), &writer("two"), true, kind).ok().unwrap();
        assert_eq!(owned(&taken, "one"), &json!({ "f:data": { "f:y": {} } }));
        let edited = update(
            Some(&taken),
            {
                let mut it = taken.clone();
                it["data"]["y"] = json!("2");
                it
            },
            &writer("edit"),
            kind,
        );
        assert_eq!(
            (owned(&edited, "one"), owned(&edited, "edit")),
            (&Value::Null, &json!({ "f:data": { "f:y": {} } }))
        );
        let same = apply(
            Some(&edited),
            &json!({ "metadata": { "name": "m" }, "data": { "x": "2", "y": "2" } }),
            &writer("two"),
            true,
            kind,
        );
        let same = same.ok().unwrap();
        let again = apply(
            Some(&same),
            &json!({ "metadata": { "name": "m" }, "data": { "x": "2", "y": "2" } }),
            &Writer { now: "later".into(), ..writer("two") },
            true,
            kind,
        );
        assert_eq!(again.ok().unwrap(), same, "what changes nothing is no write");
    }

    #[test]
    fn after_a_reset_only_an_apply_records_again() {
        let kind = &kinds()[kind("ConfigMap")];
        let map = json!({ "metadata": { "name": "m" }, "data": { "x": "1" } });
        let mut made = apply(None, &map, &writer("one"), false, kind).ok().unwrap();
        made["metadata"]["managedFields"] = json!([{}]);
        let reset = update(Some(&map), made, &writer("tool"), kind);
        assert!(reset["metadata"]["managedFields"].is_null());
        let applied = apply(Some(&reset), &map, &writer("one"), true, kind).ok().unwrap();
        let before = json!({ "f:data": { ".": {}, "f:x": {} } });
        assert_eq!(owned(&applied, "before-first-apply"), &before, "an update owns the map, too");
    }
}
