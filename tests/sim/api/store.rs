//! The objects, and what a request makes of them: a function of the state, the time and the request.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{
    fields::{self, Writer},
    immutable,
    kinds::{Kind, KindId, kind, kinds},
    quota,
    request::{Answer, Body, Request, Selector, Target, Verb},
    schema,
};

/// A change of an object, as watches report it.
#[derive(Clone, Debug)]
pub struct Change {
    pub version: u64,
    pub target: Target,
    pub before: Option<Arc<Value>>,
    /// `None`: it was deleted.
    pub after: Option<Arc<Value>>,
    /// The last state of an object that was deleted, with the version of its deletion.
    pub last: Arc<Value>,
}

/// The API server.
#[derive(Clone, Default)]
pub struct Store {
    objects: BTreeMap<Target, Arc<Value>>,
    version: u64,
    made: u64,
    /// All changes, the oldest first.
    pub changes: Vec<Change>,
    /// Changes up to this version are forgotten: who watches from before gets 410.
    pub compacted: u64,
    /// The objects whose status has only the defaults of the definition. These are not stored, and so the next update writes the object, even if
    /// it changes nothing.
    without_status: BTreeSet<Target>,
    /// The rest of lists that were begun.
    pages: BTreeMap<String, (u64, Vec<Value>)>,
}

/// A resourceVersion above that of an empty etcd.
const FIRST_VERSION: u64 = 100;

impl Store {
    pub fn version(&self) -> u64 {
        self.version.max(FIRST_VERSION)
    }

    pub fn get(&self, target: &Target) -> Option<&Value> {
        self.objects.get(target).map(|object| &**object)
    }

    /// The object, without a copy of it.
    pub fn shared(&self, target: &Target) -> Option<Arc<Value>> {
        self.objects.get(target).cloned()
    }

    /// The objects of a kind.
    pub fn all(&self, kind: KindId) -> impl Iterator<Item = (&Target, &Value)> {
        self.everything().filter(move |(target, _)| target.kind == kind)
    }

    /// All objects of a kind, by its name.
    pub fn of(&self, name: &str) -> impl Iterator<Item = (&Target, &Value)> {
        self.all(kind(name))
    }

    /// Every object.
    pub fn everything(&self) -> impl Iterator<Item = (&Target, &Value)> {
        self.objects.iter().map(|(target, object)| (target, &**object))
    }

    /// Answers a request. A watch is begun elsewhere.
    pub fn answer(&mut self, now: Timestamp, request: &Request) -> Answer {
        let saved = request
            .dry_run
            .then(|| (self.objects.clone(), self.without_status.clone(), self.version, self.made, self.changes.len()));
        let mut answer = match self.result(now, request) {
            Ok(answer) | Err(answer) => answer,
        };
        if let Some((objects, without_status, version, made, changes)) = saved {
            (self.objects, self.without_status, self.version, self.made) = (objects, without_status, version, made);
            self.changes.truncate(changes);
        }
        if request.metadata_only && answer.code < 300 {
            answer.body = metadata_only(answer.body);
        }
        answer
    }

    fn result(&mut self, now: Timestamp, request: &Request) -> Result<Answer, Answer> {
        let Request { verb, target, .. } = request;
        let kind = &kinds()[target.kind];
        match verb {
            Verb::Discover => Ok(Answer::ok(discovery(kind))),
            Verb::Watch { .. } => Err(Answer::failure(500, "InternalError", "a watch is no answer", json!({}))),
            Verb::Get => self.get(target).cloned().map(Answer::ok).ok_or_else(|| Answer::not_found(target)),
            Verb::List { limit, page } => self.list(request, *limit, page.as_deref()),
            Verb::Create(object) => self.create(now, request, object.clone()),
            Verb::Replace(object) => self.replace(now, request, object.clone()),
            Verb::Patch(body) => self.patch(now, request, body),
            Verb::Delete(options) => self.delete(now, target, options),
        }
    }

    fn list(&mut self, request: &Request, limit: Option<usize>, page: Option<&str>) -> Result<Answer, Answer> {
        let Request { target, selector, .. } = request;
        let gone = || Answer::failure(410, "Expired", "The provided continue parameter is too old", json!({}));
        let (version, mut items) = match page {
            Some(page) => self.pages.remove(page).ok_or_else(gone)?,
            None => (self.version(), self.selected(target, selector)),
        };
        let rest = items.split_off(limit.unwrap_or(items.len()).min(items.len()));
        let mut metadata = json!({ "resourceVersion": version.to_string() });
        if !rest.is_empty() {
            let next = format!("page-{version}-{}", rest.len());
            metadata["continue"] = next.clone().into();
            self.pages.insert(next, (version, rest));
        }
        let kind = &kinds()[target.kind];
        Ok(Answer::ok(json!({
            "kind": format!("{}List", kind.name), "apiVersion": kind.api_version(), "metadata": metadata, "items": items,
        })))
    }

    fn selected(&self, place: &Target, selector: &Selector) -> Vec<Value> {
        let in_place = |target: &Target| place.namespace.is_empty() || target.namespace == place.namespace;
        let found = self.all(place.kind).filter(|(target, object)| in_place(target) && selector.selects(object));
        found.map(|(_, object)| object.clone()).collect()
    }

    fn create(&mut self, now: Timestamp, request: &Request, mut object: Value) -> Result<Answer, Answer> {
        let kind = &kinds()[request.target.kind];
        if kind.name.starts_with("Self") {
            object["status"] = json!({ "allowed": true });
            return Ok(Answer { code: 201, body: object });
        }
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let target = Target { name, ..request.target.clone() };
        clean_new(&mut object, kind);
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
        }
        kind.leave_out_empty(&mut object);
        schema::prune(kind, &mut object);
        kind.fill_in(&mut object);
        self.admit(&target, None, &object)?;
        if self.get(&target).is_some() {
            let message = format!("{} \"{}\" already exists", target.resource(), target.name);
            let details = json!({ "name": target.name, "kind": kind.plural });
            return Err(Answer::failure(409, "AlreadyExists", &message, details));
        }
        let object = fields::update(None, object, &writer(request, now), kind);
        let made = self.put_new(now, target, object)?;
        Ok(Answer { code: 201, body: made })
    }

    fn replace(&mut self, now: Timestamp, request: &Request, new: Value) -> Result<Answer, Answer> {
        let target = &request.target;
        let live = self.get(target).cloned().ok_or_else(|| Answer::not_found(target))?;
        let uid = &new["metadata"]["uid"];
        if !uid.is_null() && *uid != live["metadata"]["uid"] {
            return Err(precondition_failed(target, uid, &live["metadata"]["uid"]));
        }
        self.update(now, request, live, new)
    }

    fn patch(&mut self, now: Timestamp, request: &Request, body: &Body) -> Result<Answer, Answer> {
        let target = &request.target;
        let live = self.get(target).cloned();
        if let Body::Apply { object, force } = body {
            return self.apply(now, request, live, object, *force);
        }
        let live = live.ok_or_else(|| Answer::not_found(target))?;
        let mut new = live.clone();
        match body {
            Body::Merge(patch) => json_patch::merge(&mut new, patch),
            Body::Strategic(patch) => merge_strategic(&mut new, patch, "", &kinds()[target.kind]),
            Body::Json(patch) => {
                let bad = |error: String| Answer::failure(422, "Invalid", &error, json!({}));
                for step in patch.as_array().into_iter().flatten() {
                    let mut step = step.clone();
                    let path = step["path"].as_str().unwrap_or_default();
                    // A field that is not there is added.
                    if step["op"] == "replace" && new.pointer(path).is_none() {
                        step["op"] = json!("add");
                    }
                    let step: json_patch::Patch =
                        serde_json::from_value(json!([step])).map_err(|error| bad(error.to_string()))?;
                    json_patch::patch(&mut new, &step).map_err(|error| bad(error.to_string()))?;
                }
            }
            Body::Apply { .. } => {}
        }
        self.update(now, request, live, new)
    }

    fn apply(
        &mut self,
        now: Timestamp,
        request: &Request,
        live: Option<Value>,
        object: &Value,
        force: bool,
    ) -> Result<Answer, Answer> {
        let (target, kind) = (&request.target, &kinds()[request.target.kind]);
        let mut config = object.clone();
        let metadata = config["metadata"].as_object_mut();
        let given = |field: &str| metadata.as_deref().and_then(|metadata| metadata.get(field)).cloned();
        let (uid, version) = (given("uid"), given("resourceVersion"));
        if let Some(metadata) = config["metadata"].as_object_mut() {
            ["uid", "resourceVersion", "managedFields"].iter().for_each(|field| drop(metadata.remove(*field)));
        }
        keep_part(&mut config, request.subresource, kind);
        match &live {
            Some(_) => {}
            None if request.subresource == "status" => return Err(Answer::not_found(target)),
            None => {
                if uid.is_some() {
                    let message = "uid mismatch: the provided object specified uid, and no existing object was found";
                    return Err(Answer::conflict(target, message));
                }
                clean_new(&mut config, kind);
            }
        }
        schema::read(target, &config)?;
        let applied = fields::apply(live.as_ref(), &config, &writer(request, now), force, kind);
        let mut applied = applied.map_err(|fields::Conflict(with)| {
            Answer::conflict(target, &format!("Apply failed with conflicts with {}", with.join(", ")))
        })?;
        kind.leave_out_empty(&mut applied);
        schema::prune(kind, &mut applied);
        kind.fill_in(&mut applied);
        // Which object is meant is checked after the conflicts of fields.
        if let Some(live) = &live {
            if version.is_some_and(|version| version != live["metadata"]["resourceVersion"]) {
                return Err(modified(target));
            }
            if request.subresource.is_empty() && uid.is_some_and(|uid| uid != live["metadata"]["uid"]) {
                // The merged object has another UID than the stored one.
                return Err(Answer::invalid(target, "metadata.uid", "Invalid value: field is immutable"));
            }
        }
        match live {
            Some(live) => self.put_changed(target, &live, applied).map(Answer::ok),
            None => {
                let mut made = applied;
                made["metadata"]["name"] = target.name.clone().into();
                self.admit(target, None, &made)?;
                self.put_new(now, target.clone(), made).map(|made| Answer { code: 201, body: made })
            }
        }
    }

    /// Stores an update of an object: by a replacement or a patch.
    fn update(&mut self, now: Timestamp, request: &Request, live: Value, mut new: Value) -> Result<Answer, Answer> {
        let (target, kind) = (&request.target, &kinds()[request.target.kind]);
        let version = &new["metadata"]["resourceVersion"];
        if !version.is_null() && version != "" && *version != live["metadata"]["resourceVersion"] {
            return Err(modified(target));
        }
        // A write of a status can't change the metadata, and so it does not matter what it says of them but for the version.
        let uid = &new["metadata"]["uid"];
        if request.subresource.is_empty() && !uid.is_null() && *uid != live["metadata"]["uid"] {
            return Err(Answer::invalid(target, "metadata.uid", "Invalid value: field is immutable"));
        }
        if request.subresource == "status" {
            let status = new["status"].take();
            let entries = new["metadata"]["managedFields"].take();
            new = live.clone();
            if status.is_null() {
                drop(new.as_object_mut().map(|it| it.remove("status")))
            } else {
                new["status"] = status
            }
            if !entries.is_null() {
                new["metadata"]["managedFields"] = entries;
            }
        } else if kind.has_status {
            match live.get("status") {
                Some(status) => new["status"] = status.clone(),
                None => drop(new.as_object_mut().map(|it| it.remove("status"))),
            }
        }
        // A replacement may leave out what it does not change.
        if new["metadata"]["managedFields"].is_null() && !live["metadata"]["managedFields"].is_null() {
            new["metadata"]["managedFields"] = live["metadata"]["managedFields"].clone();
        }
        let given =
            ["uid", "namespace", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds"];
        for field in given {
            match live["metadata"].get(field) {
                Some(value) => new["metadata"][field] = value.clone(),
                None => drop(new["metadata"].as_object_mut().map(|it| it.remove(field))),
            }
        }
        new["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"].clone();
        kind.leave_out_empty(&mut new);
        schema::prune(kind, &mut new);
        kind.fill_in(&mut new);
        let new = fields::update(Some(&live), new, &writer(request, now), kind);
        self.put_changed(target, &live, new).map(Answer::ok)
    }

    fn delete(&mut self, now: Timestamp, target: &Target, options: &Value) -> Result<Answer, Answer> {
        let mut live = self.get(target).cloned().ok_or_else(|| Answer::not_found(target))?;
        let uid = &options["preconditions"]["uid"];
        if !uid.is_null() && *uid != live["metadata"]["uid"] {
            return Err(precondition_failed(target, uid, &live["metadata"]["uid"]));
        }
        let version = &options["preconditions"]["resourceVersion"];
        if !version.is_null() && *version != live["metadata"]["resourceVersion"] {
            return Err(modified(target));
        }
        match options["propagationPolicy"].as_str() {
            Some("Orphan") => add_finalizer(&mut live, "orphan"),
            Some("Foreground") => add_finalizer(&mut live, "foregroundDeletion"),
            _ => {}
        }
        let grace = if kinds()[target.kind].name == "Pod" { grace_of_pod(&live, options) } else { 0 };
        let has_finalizers = live["metadata"]["finalizers"].as_array().is_some_and(|all| !all.is_empty());
        if grace == 0 && !has_finalizers {
            self.remove(target);
            return Ok(Answer::ok(json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
                "details": { "name": target.name, "kind": kinds()[target.kind].plural, "uid": live["metadata"]["uid"] },
            })));
        }
        let before = (*self.objects[target]).clone();
        let metadata = &mut live["metadata"];
        let shorter = metadata["deletionGracePeriodSeconds"].as_i64().is_none_or(|known| grace < known);
        if metadata["deletionTimestamp"].is_null() || shorter && kinds()[target.kind].name == "Pod" {
            metadata["deletionTimestamp"] = seconds(now + SignedDuration::from_secs(grace)).into();
            metadata["deletionGracePeriodSeconds"] = grace.into();
            if kinds()[target.kind].has_generation {
                metadata["generation"] = (metadata["generation"].as_i64().unwrap_or(0) + 1).into();
            }
        }
        let after = if live == before { before } else { self.store(target, live) };
        Ok(Answer::ok(after))
    }

    /// Writes as a part of the control plane does, without conflicts.
    pub fn write(
        &mut self,
        now: Timestamp,
        target: &Target,
        manager: &str,
        is_status: bool,
        edit: impl FnOnce(&mut Value),
    ) {
        let Some(live) = self.get(target).cloned() else { return };
        let mut new = live.clone();
        edit(&mut new);
        let kind = &kinds()[target.kind];
        let subresource = if is_status { "status" } else { "" };
        let new =
            fields::update(Some(&live), new, &Writer { manager: manager.into(), subresource, now: seconds(now) }, kind);
        // A Pod that ends, or is bound, need not pass what the API server checks of users.
        self.put_unchecked(target, &live, new);
    }

    fn put_new(&mut self, now: Timestamp, target: Target, mut object: Value) -> Result<Value, Answer> {
        let kind = &kinds()[target.kind];
        self.made += 1;
        let uid = format!("{:08x}-0000-4000-8000-{:012x}", self.made, self.made);
        object["apiVersion"] = kind.api_version().into();
        object["kind"] = if kind.name == "NewEvent" { "Event".into() } else { kind.name.into() };
        let metadata = &mut object["metadata"];
        metadata["uid"] = uid.into();
        metadata["creationTimestamp"] = seconds(now).into();
        if kind.is_namespaced {
            metadata["namespace"] = target.namespace.clone().into();
        }
        if kind.has_generation {
            metadata["generation"] = 1.into();
        }
        kind.fill_in(&mut object);
        match kind.name {
            "Pod" => object["status"] = json!({ "phase": "Pending", "qosClass": "Burstable" }),
            "PersistentVolumeClaim" => {
                object["status"] = json!({ "phase": "Pending" });
                add_finalizer(&mut object, "kubernetes.io/pvc-protection");
            }
            _ => {}
        }
        if !kind.is_builtin() && !object["status"].is_null() {
            self.without_status.insert(target.clone());
        }
        Ok(self.store(&target, object))
    }

    fn put_changed(&mut self, target: &Target, live: &Value, new: Value) -> Result<Value, Answer> {
        check_immutable(target, live, &new)?;
        self.admit(target, Some(live), &new)?;
        Ok(self.put_unchecked(target, live, new))
    }

    /// Refuses what the definition of the kind, or a quota, does not allow.
    fn admit(&self, target: &Target, live: Option<&Value>, new: &Value) -> Result<(), Answer> {
        schema::check(target, live, new)?;
        quota::check(self, target, live, new)
    }

    fn put_unchecked(&mut self, target: &Target, live: &Value, mut new: Value) -> Value {
        let kind = &kinds()[target.kind];
        let had_no_status = self.without_status.remove(target);
        if *live == new && !had_no_status {
            return new;
        }
        let content = |object: &Value| -> Value {
            let mut content = object.clone();
            if let Some(content) = content.as_object_mut() {
                ["metadata", "status"].iter().for_each(|part| drop(content.remove(*part)));
            }
            content
        };
        if kind.has_generation && content(live) != content(&new) {
            new["metadata"]["generation"] = (live["metadata"]["generation"].as_i64().unwrap_or(0) + 1).into();
        }
        let has_finalizers = new["metadata"]["finalizers"].as_array().is_some_and(|all| !all.is_empty());
        if !new["metadata"]["deletionTimestamp"].is_null() && !has_finalizers && kind.name != "Pod" {
            self.objects.insert(target.clone(), new.clone().into());
            self.remove(target);
            return new;
        }
        self.store(target, new)
    }

    fn store(&mut self, target: &Target, mut object: Value) -> Value {
        self.version = self.version() + 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let last = Arc::new(object);
        let before = self.objects.insert(target.clone(), last.clone());
        let (version, target, after) = (self.version, target.clone(), Some(last.clone()));
        self.changes.push(Change { version, target, before, after, last: last.clone() });
        (*last).clone()
    }

    /// Removes an object, whatever its finalizers are.
    pub fn remove(&mut self, target: &Target) {
        let Some(before) = self.objects.remove(target) else { return };
        self.version = self.version() + 1;
        let mut last = (*before).clone();
        last["metadata"]["resourceVersion"] = self.version.to_string().into();
        let last = Arc::new(last);
        self.changes.push(Change {
            version: self.version,
            target: target.clone(),
            before: Some(before),
            after: None,
            last,
        });
    }
}

fn writer(request: &Request, now: Timestamp) -> Writer {
    Writer { manager: request.manager.clone(), subresource: request.subresource, now: seconds(now) }
}

/// A time as the API server writes it.
pub fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn modified(target: &Target) -> Answer {
    let message = "the object has been modified; please apply your changes to the latest version and try again";
    Answer::conflict(target, message)
}

fn precondition_failed(target: &Target, given: &Value, has: &Value) -> Answer {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let message =
        format!("Precondition failed: UID in precondition: {}, UID in object meta: {}", text(given), text(has));
    Answer::conflict(target, &message)
}

fn add_finalizer(object: &mut Value, name: &str) {
    let finalizers = &mut object["metadata"]["finalizers"];
    match finalizers.as_array_mut() {
        Some(all) if all.iter().any(|known| known == name) => {}
        Some(all) => all.push(name.into()),
        None => *finalizers = json!([name]),
    }
}

/// What a client may not say of a new object.
fn clean_new(object: &mut Value, kind: &Kind) {
    if kind.has_status
        && let Some(object) = object.as_object_mut()
    {
        object.remove("status");
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        for field in ["uid", "resourceVersion", "creationTimestamp", "generation", "deletionTimestamp", "selfLink"] {
            metadata.remove(field);
        }
    }
}

/// Of an apply, only the part that the resource or its subresource has.
fn keep_part(config: &mut Value, subresource: &str, kind: &Kind) {
    if let Some(config) = config.as_object_mut() {
        if subresource == "status" {
            config.retain(|field, _| ["apiVersion", "kind", "metadata", "status"].contains(&field.as_str()));
            if let Some(metadata) = config.get_mut("metadata").and_then(Value::as_object_mut) {
                metadata.retain(|field, _| ["name", "namespace"].contains(&field.as_str()));
            }
        } else if kind.has_status {
            config.remove("status");
        }
    }
}

/// The grace period of a Pod that is deleted: none without a node or after its end
/// (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination>).
fn grace_of_pod(pod: &Value, options: &Value) -> i64 {
    let has_ended = ["Succeeded", "Failed"].iter().any(|phase| pod["status"]["phase"] == *phase);
    if pod["spec"]["nodeName"].as_str().unwrap_or_default().is_empty() || has_ended {
        return 0;
    }
    let of_pod = || pod["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(30);
    options["gracePeriodSeconds"].as_i64().unwrap_or_else(of_pod)
}

/// Fields that can't change (<https://kubernetes.io/docs/concepts/workloads/pods/#pod-update-and-replacement>).
fn check_immutable(target: &Target, live: &Value, new: &Value) -> Result<(), Answer> {
    let (mut before, mut after) = (live["spec"].clone(), new["spec"].clone());
    let mut ignore = |pointer: &str| {
        for spec in [&mut before, &mut after] {
            spec.pointer_mut(pointer).map(Value::take);
        }
    };
    match kinds()[target.kind].name {
        "Pod" => {
            ignore("/activeDeadlineSeconds");
            ignore("/tolerations");
            for list in ["containers", "initContainers"] {
                (0..16).for_each(|index| ignore(&format!("/{list}/{index}/image")));
            }
            let message = "Forbidden: pod updates may not change fields other than `spec.containers[*].image`";
            if before != after { Err(Answer::invalid(target, "spec", message)) } else { Ok(()) }
        }
        "PersistentVolumeClaim" => {
            let size = |object: &Value| object["spec"]["resources"]["requests"]["storage"].clone();
            if bytes(&size(new)) < bytes(&size(live)) {
                let message = "Forbidden: field can not be less than status.capacity";
                return Err(Answer::invalid(target, "spec.resources.requests.storage", message));
            }
            ignore("/resources/requests/storage");
            if live["spec"]["volumeName"].is_null() {
                ignore("/volumeName");
                after.as_object_mut().map(|after| after.remove("volumeName"));
            }
            let message = "Forbidden: spec is immutable after creation except resources.requests";
            if before != after { Err(Answer::invalid(target, "spec", message)) } else { Ok(()) }
        }
        _ => immutable::check(target, live, new),
    }
}

/// The bytes of a quantity, as far as the scenarios use the units.
pub fn bytes(quantity: &Value) -> u64 {
    let text = quantity.as_str().unwrap_or_default();
    let digits = text.trim_end_matches(|letter: char| letter.is_alphabetic());
    let unit = match &text[digits.len()..] {
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => 1,
    };
    digits.parse::<u64>().unwrap_or_default() * unit
}

/// A strategic merge patch, in which lists that are maps are merged by their key.
fn merge_strategic(object: &mut Value, patch: &Value, path: &str, kind: &Kind) {
    use super::kinds::Shape;
    match (object, patch, kind.shapes.get(path)) {
        (Value::Object(object), Value::Object(patch), _) => {
            for (name, value) in patch {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                if value.is_null() {
                    object.remove(name);
                } else {
                    merge_strategic(object.entry(name.clone()).or_insert(Value::Null), value, &path, kind);
                }
            }
        }
        (Value::Array(items), Value::Array(patches), Some(Shape::Map(keys))) => {
            for patch in patches {
                let same = |item: &&mut Value| keys.iter().all(|key| item[key] == patch[key]);
                match items.iter_mut().find(same) {
                    Some(item) => merge_strategic(item, patch, &format!("{path}[]"), kind),
                    None => items.push(patch.clone()),
                }
            }
        }
        (object, patch, _) => *object = patch.clone(),
    }
}

/// The object, or each object of a list, without all but its metadata.
pub fn metadata_only(object: Value) -> Value {
    if let Value::Array(items) = &object["items"] {
        let items: Vec<Value> = items.iter().cloned().map(metadata_only).collect();
        return json!({
            "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"], "items": items,
        });
    }
    if object["kind"] == "Status" {
        return object;
    }
    json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"] })
}

fn discovery(of: &Kind) -> Value {
    let same = kinds().iter().filter(|kind| (kind.group, kind.version) == (of.group, of.version));
    let verbs = ["create", "delete", "get", "list", "patch", "update", "watch"];
    let resources = same.map(|kind| {
        json!({ "name": kind.plural, "singularName": "", "namespaced": kind.is_namespaced, "kind": kind.name, "verbs": verbs })
    });
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": of.api_version(),
        "resources": resources.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Timestamp {
        "2027-01-15T08:00:00Z".parse().unwrap()
    }

    fn ask(store: &mut Store, kind_name: &str, name: &str, subresource: &'static str, verb: Verb) -> Answer {
        let target = Target::new(kind(kind_name), "vms", name);
        let request = Request { subresource, ..Request::of("test", target, verb) };
        store.answer(now(), &request)
    }

    fn applied(object: Value) -> Verb {
        Verb::Patch(Body::Apply { object, force: true })
    }

    /// The codes with which kube-apiserver answers when an object is not the one that a client means.
    #[test]
    fn a_write_that_means_another_object_is_refused() {
        let mut store = Store::default();
        let map = |metadata: Value| json!({ "metadata": metadata, "data": { "a": "1" } });
        let versioned = || applied(map(json!({ "resourceVersion": "1" })));
        assert_eq!(
            ask(&mut store, "ConfigMap", "m", "", applied(map(json!({ "uid": "x" })))).code,
            409,
            "no such object"
        );
        assert_eq!(ask(&mut store, "ConfigMap", "m", "", versioned()).code, 201);
        assert_eq!(ask(&mut store, "ConfigMap", "m", "", versioned()).code, 409, "it exists");
        let other = ask(&mut store, "ConfigMap", "m", "", applied(map(json!({ "uid": "x" }))));
        assert_eq!((other.code, &other.body["details"]["causes"][0]["field"]), (422, &json!("metadata.uid")));
        let merge = |patch: Value| Verb::Patch(Body::Merge(patch));
        assert_eq!(ask(&mut store, "ConfigMap", "m", "", merge(json!({ "metadata": { "uid": "x" } }))).code, 422);
        assert_eq!(
            ask(&mut store, "ConfigMap", "m", "", merge(json!({ "metadata": { "resourceVersion": "7" } }))).code,
            409
        );
        assert_eq!(ask(&mut store, "ConfigMap", "n", "", merge(json!({}))).code, 404);
        assert_eq!(
            ask(&mut store, "ConfigMap", "m", "", Verb::Delete(json!({ "preconditions": { "uid": "x" } }))).code,
            409
        );
        assert_eq!(ask(&mut store, "ConfigMap", "m", "", Verb::Create(map(json!({ "name": "m" })))).code, 409);
        assert_eq!(ask(&mut store, "ConfigMap", "m", "", Verb::Delete(json!({}))).code, 200);
        assert_eq!(ask(&mut store, "ConfigMap", "m", "", Verb::Delete(json!({}))).code, 404);
    }

    #[test]
    fn spec_and_status_are_written_apart_and_only_the_spec_counts() {
        let mut store = Store::default();
        let vm =
            json!({ "metadata": { "name": "a" }, "spec": { "vm": { "maximumCpus": 2 } }, "status": { "phase": "x" } });
        let made = ask(&mut store, "VirtualMachine", "a", "", Verb::Create(vm)).body;
        assert_eq!((&made["status"]["phase"], &made["metadata"]["generation"]), (&Value::Null, &json!(1)));
        assert_eq!(made["spec"]["vm"]["rtcBase"], "utc", "a default of the definition");
        let status = json!({ "metadata": { "name": "a" }, "status": { "phase": "Running" }, "spec": { "vm": { "maximumCpus": 4 } } });
        let said = ask(&mut store, "VirtualMachine", "a", "status", applied(status)).body;
        assert_eq!((&said["status"]["phase"], &said["spec"]["vm"]["maximumCpus"]), (&json!("Running"), &json!(2)));
        assert_eq!(said["metadata"]["generation"], 1);
        let patch = json!({ "spec": { "vm": { "maximumCpus": 4 } }, "status": { "phase": "y" } });
        let changed = ask(&mut store, "VirtualMachine", "a", "", Verb::Patch(Body::Merge(patch))).body;
        assert_eq!((&changed["status"]["phase"], &changed["metadata"]["generation"]), (&json!("Running"), &json!(2)));
    }

    #[test]
    fn a_pod_with_a_node_and_a_claim_with_a_finalizer_are_deleted_later() {
        let mut store = Store::default();
        let pod = |store: &mut Store| {
            ask(store, "Pod", "p", "", Verb::Create(json!({ "metadata": { "name": "p" }, "spec": {} })))
        };
        pod(&mut store);
        assert_eq!(ask(&mut store, "Pod", "p", "", Verb::Delete(json!({}))).body["kind"], "Status", "it has no node");
        pod(&mut store);
        let target = Target::new(kind("Pod"), "vms", "p");
        store.write(now(), &target, "scheduler", false, |pod| pod["spec"]["nodeName"] = json!("node-1"));
        let going = ask(&mut store, "Pod", "p", "", Verb::Delete(json!({}))).body;
        assert_eq!((&going["kind"], &going["metadata"]["deletionGracePeriodSeconds"]), (&json!("Pod"), &json!(30)));
        let sooner = ask(&mut store, "Pod", "p", "", Verb::Delete(json!({ "gracePeriodSeconds": 1 }))).body;
        assert_eq!(sooner["metadata"]["deletionTimestamp"], "2027-01-15T08:00:01Z");
        let claim =
            json!({ "metadata": { "name": "c" }, "spec": { "resources": { "requests": { "storage": "2Gi" } } } });
        ask(&mut store, "PersistentVolumeClaim", "c", "", Verb::Create(claim));
        let size = |size: &str| {
            Verb::Patch(Body::Merge(json!({ "spec": { "resources": { "requests": { "storage": size } } } })))
        };
        assert_eq!(ask(&mut store, "PersistentVolumeClaim", "c", "", size("1Gi")).code, 422);
        assert_eq!(ask(&mut store, "PersistentVolumeClaim", "c", "", size("3Gi")).code, 200);
        ask(&mut store, "PersistentVolumeClaim", "c", "", Verb::Delete(json!({})));
        let claim = Target::new(kind("PersistentVolumeClaim"), "vms", "c");
        assert!(store.get(&claim).is_some_and(|claim| !claim["metadata"]["deletionTimestamp"].is_null()));
        store.write(now(), &claim, "controller", false, |claim| claim["metadata"]["finalizers"] = json!([]));
        assert!(store.get(&claim).is_none());
    }
}
