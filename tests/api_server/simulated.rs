//! The API server of the simulation answers as the real one: both get the same random requests, and the answers are compared: codes, reasons, objects,
//! who owns which field, and whether something was written.
//!
//! Known to differ, in one of some thousand requests: whether an apply conflicts with `before-first-apply` about the last field of a map or list.

use std::collections::BTreeMap;

use axum::http::{Method, Request as HttpRequest, header};
use fastrand::Rng;
use http_body_util::BodyExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::{Client, client::Body};
use serde_json::{Value, json};

use crate::support::{cluster::Cluster, manager::install_crds};

#[path = "../sim/api/mod.rs"]
#[allow(dead_code, reason = "the simulation uses the rest")]
mod api;

use self::api::{request, store::Store};

/// How many objects each kind has.
const NAMES: [&str; 2] = ["one", "two"];
/// The field managers of applies.
const MANAGERS: [&str; 2] = ["first", "second"];

/// What stands in a body for the UID of the object as it is, and for its version.
const UID: &str = "the UID";
const VERSION: &str = "the version";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    ConfigMap,
    Vm,
}

impl Kind {
    fn path(self, namespace: &str) -> String {
        match self {
            Self::ConfigMap => format!("/api/v1/namespaces/{namespace}/configmaps"),
            Self::Vm => format!("/apis/vmoperator.jdrupes.org/v1/namespaces/{namespace}/vms"),
        }
    }

    /// Some of the fields that an object of the kind can have.
    fn fields(self, name: &str, random: &mut Rng) -> Value {
        let mut object = match self {
            Self::ConfigMap => {
                json!({ "apiVersion": "v1", "kind": "ConfigMap", "data": some(random, &["a", "b", "c"]) })
            }
            Self::Vm => {
                json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "spec": { "vm": vm(random) } })
            }
        };
        object["metadata"] = json!({ "name": name });
        for field in ["labels", "annotations"] {
            if random.bool() {
                object["metadata"][field] = some(random, &["x", "y"]);
            }
        }
        if random.u32(0..8) == 0 {
            object["metadata"]["finalizers"] = json!(["example.com/kept"]);
        }
        object
    }
}

/// Some of these keys, at least the last one, each with one of two values.
fn some(random: &mut Rng, keys: &[&str]) -> Value {
    let chosen: Vec<&str> =
        keys.iter().filter(|key| Some(key) == keys.last().as_ref() || random.bool()).copied().collect();
    chosen.into_iter().map(|key| (key.to_owned(), json!(["1", "2"][random.usize(0..2)]))).collect()
}

fn vm(random: &mut Rng) -> Value {
    let mut vm = json!({ "maximumCpus": random.u32(2..4) });
    if random.bool() {
        vm["currentCpus"] = random.u32(1..3).into();
    }
    if random.bool() {
        vm["state"] = json!(["Running", "Stopped"][random.usize(0..2)]);
    }
    if random.bool() {
        vm["networks"] = json!([{ "user": {} }]);
    }
    vm
}

fn status(random: &mut Rng) -> Value {
    let types = ["Running", "Booted", "Ready"];
    let chosen = types.iter().filter(|_| random.bool()).copied().collect::<Vec<_>>();
    let condition = |type_: &str, random: &mut Rng| {
        let is_true = random.bool();
        json!({
            "type": type_, "status": if is_true { "True" } else { "False" }, "reason": "Some", "message": "",
            "lastTransitionTime": "2027-01-15T08:00:00Z",
        })
    };
    let conditions: Vec<Value> = chosen.into_iter().map(|type_| condition(type_, random)).collect();
    let mut status = json!({ "conditions": conditions });
    if random.bool() {
        status["phase"] = json!(["Running", "Starting"][random.usize(0..2)]);
    }
    status
}

/// A request, before it is known what UID and version its object has.
#[derive(Clone, Debug)]
struct Asked {
    method: Method,
    /// The path, without the query.
    path: String,
    /// The path of the object that is meant.
    object: String,
    query: String,
    content: &'static str,
    body: Value,
}

/// What a client may say of the object that it means.
fn given(random: &mut Rng, right: &str, wrong: &str) -> Option<Value> {
    match random.u32(0..8) {
        0 => Some(json!(right)),
        1 => Some(json!(wrong)),
        _ => None,
    }
}

const NO_UID: &str = "00000000-1111-2222-3333-444444444444";

fn asked(namespace: &str, random: &mut Rng) -> Asked {
    let kind = [Kind::ConfigMap, Kind::Vm][random.usize(0..2)];
    let name = NAMES[random.usize(0..NAMES.len())];
    let (all, own) = (kind.path(namespace), format!("{}/{name}", kind.path(namespace)));
    let with_status = kind == Kind::Vm && random.u32(0..3) == 0;
    let part = if with_status { format!("{own}/status") } else { own.clone() };
    let mut body = kind.fields(name, random);
    if with_status {
        body["status"] = status(random);
    }
    let (uid, version) = (given(random, UID, NO_UID), given(random, VERSION, "1"));
    let mut identified = body.clone();
    for (field, value) in [("uid", &uid), ("resourceVersion", &version)] {
        if let Some(value) = value {
            identified["metadata"][field] = value.clone();
        }
    }
    let manager = MANAGERS[random.usize(0..MANAGERS.len())];
    let dry = if random.u32(0..10) == 0 { "&dryRun=All" } else { "" };
    let other = format!("fieldManager=third{dry}");
    let ask = |method, path: &str, query: &str, content, body: Value| Asked {
        method,
        path: path.to_owned(),
        object: own.clone(),
        query: query.to_owned(),
        content,
        body,
    };
    let json = "application/json";
    match random.u32(0..100) {
        0..45 => {
            let query = format!("fieldManager={manager}&force={}{dry}", random.bool());
            ask(Method::PATCH, &part, &query, "application/apply-patch+yaml", identified)
        }
        45..60 => {
            if let Some(it) = identified.as_object_mut() {
                it.retain(|field, _| field != "apiVersion" && field != "kind");
            }
            if random.bool() {
                identified["metadata"]["labels"] = json!({ "x": null, "z": "3" });
            }
            ask(Method::PATCH, &part, &other, "application/merge-patch+json", identified)
        }
        60..65 => {
            let patch = json!([{ "op": "replace", "path": "/metadata/labels/x", "value": "9" }]);
            ask(Method::PATCH, &own, &other, "application/json-patch+json", patch)
        }
        65..68 if kind == Kind::ConfigMap => {
            ask(Method::PATCH, &own, &other, "application/strategic-merge-patch+json", body)
        }
        68..78 => ask(Method::POST, &all, &other, json, body),
        78..84 => {
            identified["metadata"]["resourceVersion"] = version.unwrap_or_else(|| json!(VERSION));
            ask(Method::PUT, &part, &other, json, identified)
        }
        84..87 => {
            let without = json!({ "metadata": { "managedFields": [{}] } });
            ask(Method::PATCH, &own, &other, "application/merge-patch+json", without)
        }
        87..95 => {
            let mut preconditions = json!({});
            for (field, value) in [("uid", uid), ("resourceVersion", version)] {
                if let Some(value) = value {
                    preconditions[field] = value;
                }
            }
            ask(Method::DELETE, &own, "", json, json!({ "preconditions": preconditions }))
        }
        95..97 => {
            let free = json!({ "metadata": { "finalizers": null } });
            ask(Method::PATCH, &own, &other, "application/merge-patch+json", free)
        }
        97..99 => ask(Method::GET, &all, "labelSelector=x%3D1", json, Value::Null),
        _ => ask(Method::GET, &own, "", json, Value::Null),
    }
}

impl Asked {
    fn text(&self) -> String {
        format!("{} {} {} {} {}", self.method, self.path, self.query, self.content, self.body)
    }

    /// The request for an object that has this UID and version.
    fn to_http(&self, (uid, version): &(String, String)) -> HttpRequest<Vec<u8>> {
        let query = if self.query.is_empty() { String::new() } else { format!("?{}", self.query) };
        let body = if self.body.is_null() { String::new() } else { self.body.to_string() };
        let body = body.replace(UID, uid).replace(&format!("\"{VERSION}\""), &format!("\"{version}\""));
        let request = HttpRequest::builder().method(self.method.clone()).uri(format!("{}{query}", self.path));
        request.header(header::CONTENT_TYPE, self.content).body(body.into_bytes()).unwrap()
    }

    fn get(&self) -> HttpRequest<Vec<u8>> {
        HttpRequest::get(&self.object).body(Vec::new()).unwrap()
    }
}

/// What answers: the played API server or the real one.
enum Server {
    Played(Box<Store>),
    Real(Client),
}

impl Server {
    async fn answer(&mut self, request: HttpRequest<Vec<u8>>) -> (u16, Value) {
        match self {
            Self::Played(store) => {
                let (parts, body) = request.into_parts();
                let answer = match request::read(&parts, &body) {
                    Ok(request) => store.answer(Timestamp::now(), &request),
                    Err(answer) => answer,
                };
                (answer.code, answer.body)
            }
            Self::Real(client) => {
                let answer = client.send(request.map(Body::from)).await.unwrap();
                let code = answer.status().as_u16();
                let body = answer.into_body().collect().await.unwrap().to_bytes();
                (code, serde_json::from_slice(&body).unwrap_or_else(|_| json!(String::from_utf8_lossy(&body))))
            }
        }
    }

    /// Sends a request, and returns the answer, and then the object, as far as they do not differ between two servers.
    async fn ask(&mut self, asked: &Asked) -> (Value, Value) {
        let (_, before) = self.answer(asked.get()).await;
        let text = |field: &str| before["metadata"][field].as_str().unwrap_or("7").to_owned();
        let (uid, version) = (text("uid"), text("resourceVersion"));
        let uid = if uid == "7" { NO_UID.to_owned() } else { uid };
        let (code, body) = self.answer(asked.to_http(&(uid, version.clone()))).await;
        let (_, after) = self.answer(asked.get()).await;
        let is_written = after["metadata"]["resourceVersion"].as_str().is_some_and(|now| now != version);
        let said = json!({ "code": code, "body": plain(body), "written": is_written });
        (said, plain(after))
    }
}

/// An answer without times, UIDs, versions and sentences.
fn plain(mut body: Value) -> Value {
    if body["kind"] == "Status" {
        return json!({ "reason": body["reason"], "status": body["status"] });
    }
    if !body.is_object() {
        return body;
    }
    if let Some(items) = body.get_mut("items").and_then(Value::as_array_mut) {
        return items.iter_mut().map(|item| plain(item.take())).collect();
    }
    if let Some(object) = body.as_object_mut() {
        object.retain(|field, _| field != "apiVersion" && field != "kind");
    }
    if let Some(metadata) = body["metadata"].as_object_mut() {
        metadata.retain(|field, _| !["uid", "resourceVersion", "creationTimestamp"].contains(&field.as_str()));
        if let Some(deleted) = metadata.get_mut("deletionTimestamp") {
            *deleted = json!("a time");
        }
        let entries = metadata.remove("managedFields");
        let entries = entries.iter().filter_map(Value::as_array).flatten().map(|entry| {
            let name = format!("{} {} {}", entry["manager"], entry["operation"], entry["subresource"]);
            (name, entry["fieldsV1"].clone())
        });
        let entries: BTreeMap<String, Value> = entries.collect();
        metadata.insert("fields".into(), json!(entries));
    }
    body
}

/// How many sequences are tried (`VM_OPERATOR_TEST_SEQUENCES`; only one: `VM_OPERATOR_TEST_SEQUENCE`), and how many requests each has.
const SEQUENCES: u64 = 24;
const REQUESTS: usize = 60;

#[tokio::test]
async fn random_requests_get_the_same_answers_from_the_played_and_the_real_api_server() {
    let cluster = Cluster::control_plane();
    install_crds(cluster).await;
    let number = |variable: &str| std::env::var(variable).ok().and_then(|number| number.parse::<u64>().ok());
    let sequences = match number("VM_OPERATOR_TEST_SEQUENCE") {
        Some(only) => only..only + 1,
        None => 0..number("VM_OPERATOR_TEST_SEQUENCES").unwrap_or(SEQUENCES),
    };
    for seed in sequences {
        let namespace = cluster.namespace(&format!("simulated-{seed}")).await;
        let mut random = Rng::with_seed(seed);
        let mut real = Server::Real(cluster.client().await);
        let mut played = Server::Played(Box::default());
        let mut before = Vec::new();
        for number in 0..REQUESTS {
            let asked = asked(namespace.name(), &mut random);
            let (is, was) = (played.ask(&asked).await, real.ask(&asked).await);
            let text = |(said, object): &(Value, Value)| format!("{said:#}\n{object:#}");
            let (is, was) = (text(&is), text(&was));
            let of_object: Vec<String> =
                before.iter().filter(|it: &&Asked| it.object == asked.object).map(Asked::text).collect();
            let history = of_object.join("\n");
            assert!(
                is == was,
                "request {number} of VM_OPERATOR_TEST_SEQUENCE={seed}\n{history}\n{}\nplayed: {is}\nreal: {was}",
                asked.text()
            );
            before.push(asked);
        }
    }
}
