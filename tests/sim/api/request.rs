//! A request as the store understands it, read from HTTP, and the answer.

use std::collections::BTreeMap;

use axum::http::{Method, header, request::Parts};
use serde_json::{Value, json};

use super::kinds::{KindId, kinds, served};

/// An object, or all of a kind if it has no name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    pub kind: KindId,
    /// Empty: all namespaces, or a kind without namespaces.
    pub namespace: String,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    Apply { object: Value, force: bool },
    Merge(Value),
    Strategic(Value),
    Json(Value),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Verb {
    Get,
    List {
        limit: Option<usize>,
        page: Option<String>,
    },
    Watch {
        from: Option<u64>,
        bookmarks: bool,
    },
    Create(Value),
    Replace(Value),
    Patch(Body),
    Delete(Value),
    /// What kinds a version of a group has.
    Discover,
}

/// What of a kind is listed or watched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selector {
    /// Labels that an object must have, with these values or any.
    labels: Vec<(String, Option<String>)>,
    /// Fields that must have, or must not have, these values.
    fields: Vec<(String, bool, String)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub verb: Verb,
    pub target: Target,
    /// `status` or nothing.
    pub subresource: &'static str,
    pub selector: Selector,
    pub manager: String,
    pub dry_run: bool,
    /// Whether only the metadata is asked for.
    pub metadata_only: bool,
}

impl Request {
    /// A request for an object as a field manager sends it without any options.
    pub fn of(manager: &str, target: Target, verb: Verb) -> Self {
        Self {
            verb,
            target,
            subresource: "",
            selector: Selector::default(),
            manager: manager.into(),
            dry_run: false,
            metadata_only: false,
        }
    }
}

/// An answer: its code and its JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub code: u16,
    pub body: Value,
}

impl Answer {
    pub fn ok(body: Value) -> Self {
        Self { code: 200, body }
    }

    pub fn failure(code: u16, reason: &str, message: &str, details: Value) -> Self {
        let body = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "details": details, "code": code,
        });
        Self { code, body }
    }

    pub fn conflict(target: &Target, message: &str) -> Self {
        let what = format!("Operation cannot be fulfilled on {} \"{}\": {message}", target.resource(), target.name);
        Self::failure(409, "Conflict", &what, json!({ "name": target.name, "kind": kinds()[target.kind].plural }))
    }

    pub fn not_found(target: &Target) -> Self {
        let what = format!("{} \"{}\" not found", target.resource(), target.name);
        Self::failure(404, "NotFound", &what, json!({ "name": target.name, "kind": kinds()[target.kind].plural }))
    }

    pub fn invalid(target: &Target, field: &str, message: &str) -> Self {
        let name = kinds()[target.kind].name;
        let what = format!("{name} \"{}\" is invalid: {field}: {message}", target.name);
        let cause = json!({ "reason": "FieldValueInvalid", "message": message, "field": field });
        Self::failure(422, "Invalid", &what, json!({ "name": target.name, "kind": name, "causes": [cause] }))
    }
}

impl Target {
    pub fn new(kind: KindId, namespace: &str, name: &str) -> Self {
        Self { kind, namespace: namespace.into(), name: name.into() }
    }

    pub fn resource(&self) -> String {
        kinds()[self.kind].resource()
    }
}

impl Selector {
    pub fn parse(labels: &str, fields: &str) -> Self {
        let labels = labels.split(',').filter(|term| !term.is_empty()).map(|term| match term.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.trim_start_matches('=').to_owned())),
            None => (term.to_owned(), None),
        });
        let fields = fields.split(',').filter(|term| !term.is_empty()).map(|term| match term.split_once("!=") {
            Some((name, value)) => (name.to_owned(), false, value.to_owned()),
            None => {
                let (name, value) = term.split_once('=').unwrap_or((term, ""));
                (name.to_owned(), true, value.trim_start_matches('=').to_owned())
            }
        });
        Self { labels: labels.collect(), fields: fields.collect() }
    }

    pub fn selects(&self, object: &Value) -> bool {
        let has_label = |(name, value): &(String, Option<String>)| {
            let found = object["metadata"]["labels"].get(name);
            found.is_some_and(|found| value.as_ref().is_none_or(|value| found == value))
        };
        let has_field = |(name, is_it, value): &(String, bool, String)| {
            let found = object.pointer(&format!("/{}", name.replace('.', "/"))).and_then(Value::as_str);
            (found.unwrap_or_default() == value) == *is_it
        };
        self.labels.iter().all(has_label) && self.fields.iter().all(has_field)
    }
}

/// Reads a request. An error is the answer to it.
pub fn read(parts: &Parts, body: &[u8]) -> Result<Request, Answer> {
    let missing = || Answer::failure(404, "NotFound", "the server could not find the requested resource", json!({}));
    let query: BTreeMap<String, String> = match parts.uri.query() {
        Some(query) => url::form_urlencoded::parse(query.as_bytes()).into_owned().collect(),
        None => BTreeMap::new(),
    };
    let asked = |name: &str| query.get(name).map(String::as_str);
    let accept = parts.headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let common = |verb, target, subresource| Request {
        verb,
        target,
        subresource,
        selector: Selector::parse(
            asked("labelSelector").unwrap_or_default(),
            asked("fieldSelector").unwrap_or_default(),
        ),
        manager: asked("fieldManager").unwrap_or("unknown").to_owned(),
        dry_run: asked("dryRun").is_some(),
        metadata_only: accept.contains("as=PartialObjectMetadata"),
    };
    let segments: Vec<&str> = parts.uri.path().split('/').filter(|segment| !segment.is_empty()).collect();
    let (group, version, rest) = match &segments[..] {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return Err(missing()),
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
        rest => ("", rest),
    };
    let (plural, name, subresource) = match rest {
        [] => {
            let first = kinds().iter().position(|kind| (kind.group, kind.version) == (group, version));
            return Ok(common(Verb::Discover, Target::new(first.ok_or_else(missing)?, "", ""), ""));
        }
        [plural] => (plural, "", ""),
        [plural, name] => (plural, *name, ""),
        [plural, name, "status"] => (plural, *name, "status"),
        _ => return Err(missing()),
    };
    let target = Target::new(served(group, version, plural).ok_or_else(missing)?, namespace, name);
    let json = || -> Result<Value, Answer> {
        if body.is_empty() {
            return Ok(json!({}));
        }
        serde_json::from_slice(body).map_err(|error| Answer::failure(400, "BadRequest", &error.to_string(), json!({})))
    };
    let verb = match parts.method {
        Method::GET if !name.is_empty() => Verb::Get,
        Method::GET if asked("watch").is_some_and(|watch| watch == "true" || watch == "1") => Verb::Watch {
            from: asked("resourceVersion").and_then(|version| version.parse().ok()).filter(|version| *version > 0),
            bookmarks: asked("allowWatchBookmarks") == Some("true"),
        },
        Method::GET => Verb::List {
            limit: asked("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0),
            page: asked("continue").map(str::to_owned),
        },
        Method::POST => Verb::Create(json()?),
        Method::PUT => Verb::Replace(json()?),
        Method::DELETE => Verb::Delete(json()?),
        Method::PATCH => {
            let how = parts.headers.get(header::CONTENT_TYPE).and_then(|how| how.to_str().ok()).unwrap_or_default();
            Verb::Patch(match how {
                "application/json-patch+json" => Body::Json(json()?),
                "application/merge-patch+json" => Body::Merge(json()?),
                "application/strategic-merge-patch+json" => Body::Strategic(json()?),
                _ => Body::Apply { object: json()?, force: asked("force") == Some("true") },
            })
        }
        _ => return Err(missing()),
    };
    Ok(common(verb, target, subresource))
}
