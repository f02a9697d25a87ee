//! Strategic merge patches, as `kubectl patch --type=strategic` and Kustomize apply them to the kinds of Kubernetes.
//!
//! | in the patch | what happens |
//! |---|---|
//! | a map | it is merged field by field; null removes a field |
//! | a list with a [merge key](super::merge_keys) | its items are merged by that key; new ones are added |
//! | another list, text, number | it replaces the old value |
//! | `$patch: delete` | in an item: removes it; in a map: empties the map |
//! | `$patch: replace` | as the only field of an item: the other items replace the list; in a map: the map replaces the old one |
//! | `$patch: merge` | nothing: that is the default |
//! | `$retainKeys: [FIELD]` | the map loses all other fields |
//! | `$deleteFromPrimitiveList/FIELD: [VALUE]` | the list of texts or numbers loses these values |
//! | `$setElementOrder/FIELD: [{KEY: VALUE}]` | the items of the list get this order |
//!
//! A kind that is not built in has no keys. Without directives that is RFC 7386.
//! The rules: <https://github.com/kubernetes/community/blob/main/contributors/devel/sig-api-machinery/strategic-merge-patch.md>

use serde_json::{Map, Value};

use super::merge_keys::{Merge, Type};

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const DELETE_FROM_LIST: &str = "$deleteFromPrimitiveList/";
const ORDER: &str = "$setElementOrder/";

/// What is wrong with a patch, and where in the object.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", if path.is_empty() { String::new() } else { format!("{path}: ") })]
pub struct Problem {
    path: String,
    message: String,
}

impl Problem {
    fn new(message: impl Into<String>) -> Self {
        Self { path: String::new(), message: message.into() }
    }

    fn under(self, field: &str) -> Self {
        let dot = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        Self { path: format!("{field}{dot}{}", self.path), ..self }
    }
}

/// Merges a patch into an object.
///
/// # Errors
/// A directive or an item that has no meaning where it is. The object is then changed in part.
pub fn merge(object: &mut Value, patch: &Value) -> Result<(), Problem> {
    let text = |name: &str| object[name].as_str().unwrap_or_default();
    let of = Type::of_kind(text("apiVersion"), text("kind"));
    let (Value::Object(object), Value::Object(patch)) = (object, patch) else {
        return Err(Problem::new("it must be a map"));
    };
    if directive(patch)? == Some(Directive::Delete) {
        let message = "$patch: delete stands for the whole object: to create no such object, override its template by an empty file";
        return Err(Problem::new(message));
    }
    merge_map(object, patch, of)
}

/// The value of `$patch`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Directive {
    Delete,
    Replace,
    Merge,
}

fn directive(patch: &Map<String, Value>) -> Result<Option<Directive>, Problem> {
    let Some(directive) = patch.get(PATCH) else { return Ok(None) };
    match directive.as_str() {
        Some("delete") => Ok(Some(Directive::Delete)),
        Some("replace") => Ok(Some(Directive::Replace)),
        Some("merge") => Ok(Some(Directive::Merge)),
        _ => Err(Problem::new(format!("$patch is delete, replace or merge, not {directive}"))),
    }
}

/// The fields of a patch without its directives.
fn fields(patch: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    let is_directive = |name: &str| {
        [PATCH, RETAIN_KEYS].contains(&name) || name.starts_with(DELETE_FROM_LIST) || name.starts_with(ORDER)
    };
    patch.iter().filter(move |(name, _)| !is_directive(name))
}

fn merge_map(map: &mut Map<String, Value>, patch: &Map<String, Value>, of: Type) -> Result<(), Problem> {
    match directive(patch)? {
        Some(Directive::Replace) => {
            *map = new_map(patch)?;
            return Ok(());
        }
        Some(Directive::Delete) => {
            map.clear();
            return Ok(());
        }
        Some(Directive::Merge) | None => {}
    }
    retain_keys(map, patch)?;
    delete_from_lists(map, patch)?;
    for (name, value) in fields(patch) {
        let order = patch.get(&format!("{ORDER}{name}"));
        merge_field(map, name, value, of, order).map_err(|problem| problem.under(name))?;
    }
    let orders = patch.iter().filter_map(|(name, order)| Some((name.strip_prefix(ORDER)?, order)));
    for (name, order) in orders.filter(|(name, _)| !patch.contains_key(*name)) {
        let nothing = Value::Array(Vec::new());
        if map.contains_key(name) {
            merge_field(map, name, &nothing, of, Some(order)).map_err(|problem| problem.under(name))?;
        }
    }
    Ok(())
}

fn merge_field(
    map: &mut Map<String, Value>,
    name: &str,
    patch: &Value,
    of: Type,
    order: Option<&Value>,
) -> Result<(), Problem> {
    let (merge, of) = of.field(name);
    if let (Some(order), false) = (order, matches!(merge, Merge::ByKey(_))) {
        return Err(Problem::new(format!(
            "{ORDER}{name}: {order}: the list has no merge key, so it has the order of the patch"
        )));
    }
    match (map.get_mut(name), patch, merge) {
        (_, Value::Null, _) => drop(map.remove(name)),
        (Some(Value::Object(map)), Value::Object(patch), Merge::Usual | Merge::ByKey(_)) => merge_map(map, patch, of)?,
        (Some(Value::Array(list)), Value::Array(items), Merge::ByKey(key)) => merge_list(list, items, order, key, of)?,
        (None, Value::Array(items), Merge::ByKey(key)) => {
            let mut list = Vec::new();
            merge_list(&mut list, items, order, key, of)?;
            map.insert(name.to_owned(), Value::Array(list));
        }
        (Some(Value::Array(_)), Value::Array(items), _) if items.iter().any(is_deletion) => {
            let message = "this list has no merge key, so $patch: delete finds no item: write the whole list";
            return Err(Problem::new(message));
        }
        _ => match new_value(patch)? {
            Some(value) => drop(map.insert(name.to_owned(), value)),
            None => drop(map.remove(name)),
        },
    }
    Ok(())
}

fn is_deletion(item: &Value) -> bool {
    item.get(PATCH).is_some_and(|directive| directive == "delete")
}

/// Merges items into a list by their key.
fn merge_list(
    list: &mut Vec<Value>,
    items: &[Value],
    order: Option<&Value>,
    key: &str,
    of: Type,
) -> Result<(), Problem> {
    let mut is_replaced = false;
    let mut merged = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let wrong = |message: String| Problem::new(message).under(&format!("[{index}]"));
        let fields = item.as_object().ok_or_else(|| wrong(format!("an item must be a map with the key {key}")))?;
        let directive = directive(fields).map_err(|problem| problem.under(&format!("[{index}]")))?;
        if directive == Some(Directive::Replace) {
            if fields.len() > 1 {
                let message = "$patch: replace replaces the whole list, so it must be the only field of its item; \
                               to replace one item, give it $retainKeys with the names of its fields";
                return Err(wrong(message.into()));
            }
            is_replaced = true;
            continue;
        }
        let value = fields.get(key).ok_or_else(|| wrong(format!("it has no {key}, by which the list is merged")))?;
        if directive == Some(Directive::Delete) {
            list.retain(|item| item.get(key) != Some(value));
        } else {
            merged.push((index, value, fields));
        }
    }
    if is_replaced {
        list.clear();
    }
    let before: Vec<Value> = list.iter().map(|item| item[key].clone()).collect();
    for (index, value, item) in &merged {
        let under = |problem: Problem| problem.under(&format!("[{index}]"));
        match list.iter_mut().find(|old| old.get(key) == Some(value)) {
            Some(Value::Object(old)) => merge_map(old, item, of).map_err(under)?,
            _ => list.push(Value::Object(new_map(item).map_err(under)?)),
        }
    }
    let of_patch: Vec<&Value> = merged.iter().map(|(_, value, _)| *value).collect();
    let wanted = match order {
        Some(order) => ordered_by(order, &of_patch, key)?,
        None => of_patch,
    };
    *list = in_order(std::mem::take(list), key, &wanted, &before);
    Ok(())
}

/// The keys in the order of a `$setElementOrder`, which must name all items of the patch in their order.
fn ordered_by<'a>(order: &'a Value, of_patch: &[&Value], key: &str) -> Result<Vec<&'a Value>, Problem> {
    let wrong = |what: &str| Problem::new(format!("$setElementOrder: {what}"));
    let items = order.as_array().ok_or_else(|| wrong("it must be a list"))?;
    let keys: Option<Vec<&Value>> = items.iter().map(|item| item.get(key)).collect();
    let keys = keys.ok_or_else(|| wrong(&format!("each item must have the key {key}")))?;
    let mut rest = keys.iter();
    match of_patch.iter().find(|wanted| !rest.any(|key| key == *wanted)) {
        Some(missing) => Err(wrong(&format!("{missing} is not in it, or in another order than in the patch"))),
        None => Ok(keys),
    }
}

/// Brings the items of a list in order: those of the patch in its order, the others as before, and between both the order before.
fn in_order(list: Vec<Value>, key: &str, wanted: &[&Value], before: &[Value]) -> Vec<Value> {
    let place_in_patch = |item: &Value| wanted.iter().position(|key_of_item| **key_of_item == item[key]);
    let place_before = |item: &Value| before.iter().position(|key_of_item| *key_of_item == item[key]);
    let (mut of_patch, others): (Vec<Value>, Vec<Value>) =
        list.into_iter().partition(|item| place_in_patch(item).is_some());
    of_patch.sort_by_key(place_in_patch);
    let (mut of_patch, mut others) = (of_patch.into_iter().peekable(), others.into_iter().peekable());
    let mut all = Vec::new();
    while let (Some(new), Some(other)) = (of_patch.peek(), others.peek()) {
        let is_before = place_before(new).zip(place_before(other)).is_some_and(|(new, other)| other < new);
        all.extend(if is_before { others.next() } else { of_patch.next() });
    }
    all.extend(of_patch.chain(others));
    all
}

/// Applies `$retainKeys`.
fn retain_keys(map: &mut Map<String, Value>, patch: &Map<String, Value>) -> Result<(), Problem> {
    let Some(keys) = patch.get(RETAIN_KEYS) else { return Ok(()) };
    let names: Option<Vec<&str>> = keys.as_array().and_then(|keys| keys.iter().map(Value::as_str).collect());
    let names = names.ok_or_else(|| Problem::new(format!("{RETAIN_KEYS} is a list of names of fields, not {keys}")))?;
    let is_named = |name: &String| names.contains(&name.as_str());
    if let Some((name, _)) = fields(patch).find(|(name, value)| !value.is_null() && !is_named(name)) {
        return Err(Problem::new(format!("{RETAIN_KEYS} must name all fields beside it, and {name} is not there")));
    }
    map.retain(|name, _| is_named(name));
    Ok(())
}

/// Applies `$deleteFromPrimitiveList`.
fn delete_from_lists(map: &mut Map<String, Value>, patch: &Map<String, Value>) -> Result<(), Problem> {
    for (directive, values) in patch {
        let Some(name) = directive.strip_prefix(DELETE_FROM_LIST) else { continue };
        let values = values.as_array().filter(|values| values.iter().all(is_primitive));
        let values =
            values.ok_or_else(|| Problem::new(format!("{directive}: it must be a list of texts or numbers")))?;
        if let Some(Value::Array(list)) = map.get_mut(name) {
            list.retain(|item| !values.contains(item));
        }
    }
    Ok(())
}

fn is_primitive(value: &Value) -> bool {
    !value.is_object() && !value.is_array()
}

/// A value of the patch where the object has nothing to merge it with: without null and directives. None if it only deletes.
fn new_value(value: &Value) -> Result<Option<Value>, Problem> {
    Ok(match value {
        Value::Object(map) if directive(map)? == Some(Directive::Delete) => None,
        Value::Object(map) => Some(Value::Object(new_map(map)?)),
        Value::Array(items) => {
            // An item with nothing but `$patch: replace` is about the list.
            let is_mark =
                |item: &Value| item.as_object().is_some_and(|item| item.len() == 1 && item.contains_key(PATCH));
            let items = items.iter().enumerate().filter(|(_, item)| !is_mark(item));
            let new =
                items.map(|(index, item)| new_value(item).map_err(|problem| problem.under(&format!("[{index}]"))));
            Some(Value::Array(new.filter_map(Result::transpose).collect::<Result<_, _>>()?))
        }
        _ => Some(value.clone()),
    })
}

fn new_map(patch: &Map<String, Value>) -> Result<Map<String, Value>, Problem> {
    directive(patch)?;
    let mut map = Map::new();
    for (name, value) in fields(patch).filter(|(_, value)| !value.is_null()) {
        if let Some(value) = new_value(value).map_err(|problem| problem.under(name))? {
            map.insert(name.clone(), value);
        }
    }
    Ok(map)
}

/// A list with a merge key whose items a merge patch (RFC 7386) does not keep as they are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplacedList {
    /// Where it is in the object, such as `spec.containers`.
    pub path: String,
    /// By which field a strategic merge patch would merge it.
    pub key: &'static str,
}

/// The lists with merge keys that a merge patch replaces although the object has other items in them.
pub fn replaced_lists(object: &Value, patch: &Value) -> Vec<ReplacedList> {
    let text = |name: &str| object[name].as_str().unwrap_or_default();
    let mut found = Vec::new();
    find_replaced(object, patch, Type::of_kind(text("apiVersion"), text("kind")), "", &mut found);
    found
}

fn find_replaced(old: &Value, patch: &Value, of: Type, path: &str, found: &mut Vec<ReplacedList>) {
    for (name, new) in patch.as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match (&old[name], new, of.field(name)) {
            // An empty list is meant to replace.
            (Value::Array(old), Value::Array(new), (Merge::ByKey(key), _)) if !new.is_empty() => {
                if old.iter().any(|item| !new.contains(item)) {
                    found.push(ReplacedList { path, key });
                }
            }
            (old, new, (_, of)) => find_replaced(old, new, of, &path, found),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod() -> Value {
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "a" }, "spec": {
            "containers": [
                { "name": "x", "image": "x:1", "args": ["-a", "-b"], "env": [{ "name": "A", "value": "1" }, { "name": "B", "value": "2" }] },
                { "name": "y", "image": "y:1" },
            ],
            "tolerations": [{ "key": "a" }],
            "volumes": [{ "name": "v", "configMap": { "name": "c" } }],
        } })
    }

    fn merged(patch: &Value) -> Result<Value, String> {
        let mut pod = pod();
        merge(&mut pod, &json!({ "spec": patch })).map_err(|problem| problem.to_string())?;
        Ok(pod["spec"].clone())
    }

    // What kubectl does with the same patches is compared in tests/api_server/strategic_merge.rs.

    #[test]
    fn lists_with_a_key_are_merged_and_others_replaced() {
        let patch = json!({
            "containers": [{ "name": "z", "image": "z:1", "env": null }, { "name": "x", "env": [{ "name": "B", "value": "3" }, { "name": "C" }] }],
            "tolerations": [{ "key": "b" }],
        });
        insta::assert_json_snapshot!(merged(&patch).unwrap(), @r#"
        {
          "containers": [
            {
              "image": "z:1",
              "name": "z"
            },
            {
              "args": [
                "-a",
                "-b"
              ],
              "env": [
                {
                  "name": "A",
                  "value": "1"
                },
                {
                  "name": "B",
                  "value": "3"
                },
                {
                  "name": "C"
                }
              ],
              "image": "x:1",
              "name": "x"
            },
            {
              "image": "y:1",
              "name": "y"
            }
          ],
          "tolerations": [
            {
              "key": "b"
            }
          ],
          "volumes": [
            {
              "configMap": {
                "name": "c"
              },
              "name": "v"
            }
          ]
        }
        "#);
    }

    #[test]
    fn an_error_names_the_place_and_what_to_do() {
        let error = |patch: Value| merged(&patch).unwrap_err();
        insta::assert_snapshot!(error(json!({ "containers": [{ "name": "x", "env": [{ "value": "1" }] }] })), @"spec.containers[0].env[0]: it has no name, by which the list is merged");
        insta::assert_snapshot!(error(json!({ "containers": ["x"] })), @"spec.containers[0]: an item must be a map with the key name");
        insta::assert_snapshot!(error(json!({ "containers": [{ "name": "x", "$patch": "remove" }] })), @r#"spec.containers[0]: $patch is delete, replace or merge, not "remove""#);
        insta::assert_snapshot!(error(json!({ "containers": [{ "name": "x", "$patch": "replace", "image": "z" }] })), @"spec.containers[0]: $patch: replace replaces the whole list, so it must be the only field of its item; to replace one item, give it $retainKeys with the names of its fields");
        insta::assert_snapshot!(error(json!({ "tolerations": [{ "key": "a", "$patch": "delete" }] })), @"spec.tolerations: this list has no merge key, so $patch: delete finds no item: write the whole list");
        insta::assert_snapshot!(error(json!({ "volumes": [{ "name": "v", "$retainKeys": ["name"], "emptyDir": {} }] })), @"spec.volumes[0]: $retainKeys must name all fields beside it, and emptyDir is not there");
        insta::assert_snapshot!(error(json!({ "volumes": [{ "name": "v", "$retainKeys": "name" }] })), @r#"spec.volumes[0]: $retainKeys is a list of names of fields, not "name""#);
        insta::assert_snapshot!(error(json!({ "$setElementOrder/containers": [{ "name": "y" }], "containers": [{ "name": "x" }] })), @r#"spec.containers: $setElementOrder: "x" is not in it, or in another order than in the patch"#);
        insta::assert_snapshot!(error(json!({ "$setElementOrder/tolerations": ["a"] })), @r#"spec.tolerations: $setElementOrder/tolerations: ["a"]: the list has no merge key, so it has the order of the patch"#);
        insta::assert_snapshot!(error(json!({ "containers": [{ "name": "x", "$deleteFromPrimitiveList/args": "-a" }] })), @"spec.containers[0]: $deleteFromPrimitiveList/args: it must be a list of texts or numbers");
        insta::assert_snapshot!(merge(&mut pod(), &json!({ "$patch": "delete" })).unwrap_err(), @"$patch: delete stands for the whole object: to create no such object, override its template by an empty file");
    }

    #[test]
    fn a_kind_without_keys_is_merged_as_by_rfc_7386() {
        let object = json!({ "apiVersion": "example.org/v1", "kind": "Pod", "spec": { "containers": [{ "name": "x" }], "a": { "b": 1, "c": 2 } } });
        let patch = json!({ "spec": { "containers": [{ "name": "y" }], "a": { "b": null, "d": { "e": 1 } } } });
        let (mut strategic, mut rfc_7386) = (object.clone(), object);
        merge(&mut strategic, &patch).unwrap();
        json_patch::merge(&mut rfc_7386, &patch);
        assert_eq!(strategic, rfc_7386);
    }

    #[test]
    fn a_map_that_is_not_there_yet_takes_the_patch_without_its_directives() {
        let patch = json!({ "affinity": { "$patch": "replace", "podAffinity": { "x": null } }, "hostAliases": [{ "$patch": "replace" }, { "ip": "::1" }] });
        let spec = merged(&patch).unwrap();
        assert_eq!(spec["affinity"], json!({ "podAffinity": {} }));
        assert_eq!(spec["hostAliases"], json!([{ "ip": "::1" }]));
    }

    #[test]
    fn a_merge_patch_replaces_lists_with_keys() {
        let lists = |patch: Value| replaced_lists(&pod(), &json!({ "spec": patch }));
        let list = |path: &str, key| ReplacedList { path: path.into(), key };
        assert_eq!(
            lists(json!({ "containers": [{ "name": "x", "image": "x:2" }] })),
            [list("spec.containers", "name")]
        );
        assert_eq!(lists(json!({ "volumes": [{ "name": "w" }] })), [list("spec.volumes", "name")]);
        // Nothing is lost, or that is meant.
        for patch in [
            json!({ "tolerations": [{ "key": "b" }] }),
            json!({ "hostAliases": [{ "ip": "::1" }] }),
            json!({ "volumes": [] }),
            json!({ "volumes": [{ "name": "w" }, pod()["spec"]["volumes"][0]] }),
        ] {
            assert_eq!(lists(patch.clone()), [], "{patch}");
        }
    }
}
