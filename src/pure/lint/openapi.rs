//! Kubernetes' schemas of the kinds that templates usually make. They are built in, so no cluster is asked.
//!
//! They come from the types of the crate `k8s-openapi` and are closed: a field that a type does not have is an error, as with
//! `kubectl --validate=strict`.

use std::{collections::HashMap, sync::LazyLock};

use jsonschema::Validator;
use k8s_openapi::api::{
    apps::v1 as apps, batch::v1 as batch, core::v1 as core, discovery::v1 as discovery, networking::v1 as networking,
    policy::v1 as policy,
};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

/// A kind and its schema.
struct Kind {
    api_version: &'static str,
    kind: &'static str,
    schema: Value,
}

impl Kind {
    fn of<T: JsonSchema>(api_version: &'static str, kind: &'static str) -> Self {
        Self { api_version, kind, schema: schema::<T>() }
    }
}

fn kinds() -> [Kind; 13] {
    [
        Kind::of::<core::ConfigMap>("v1", "ConfigMap"),
        Kind::of::<core::PersistentVolumeClaim>("v1", "PersistentVolumeClaim"),
        Kind::of::<core::Pod>("v1", "Pod"),
        Kind::of::<core::Secret>("v1", "Secret"),
        Kind::of::<core::Service>("v1", "Service"),
        Kind::of::<apps::Deployment>("apps/v1", "Deployment"),
        Kind::of::<apps::StatefulSet>("apps/v1", "StatefulSet"),
        Kind::of::<batch::CronJob>("batch/v1", "CronJob"),
        Kind::of::<batch::Job>("batch/v1", "Job"),
        Kind::of::<discovery::EndpointSlice>("discovery.k8s.io/v1", "EndpointSlice"),
        Kind::of::<networking::Ingress>("networking.k8s.io/v1", "Ingress"),
        Kind::of::<networking::NetworkPolicy>("networking.k8s.io/v1", "NetworkPolicy"),
        Kind::of::<policy::PodDisruptionBudget>("policy/v1", "PodDisruptionBudget"),
    ]
}

/// By apiVersion and kind.
static VALIDATORS: LazyLock<HashMap<(&str, &str), Validator>> = LazyLock::new(|| {
    // A test checks that all of them compile.
    let compiled = kinds().into_iter().filter_map(|Kind { api_version, kind, schema }| {
        Some(((api_version, kind), jsonschema::validator_for(&schema).ok()?))
    });
    compiled.collect()
});

/// What violates the schema of the object's kind. Objects of other kinds are not checked.
pub fn check(object: &Value) -> Vec<String> {
    let text = |name: &str| object[name].as_str().unwrap_or_default();
    let Some(validator) = VALIDATORS.get(&(text("apiVersion"), text("kind"))) else { return Vec::new() };
    let describe = |error: jsonschema::ValidationError<'_>| {
        let path = error.instance_path().to_string().trim_start_matches('/').replace('/', ".");
        if path.is_empty() { error.to_string() } else { format!("{path}: {error}") }
    };
    validator.iter_errors(object).map(describe).collect()
}

/// The schema of a type, closed.
pub(crate) fn schema<T: JsonSchema>() -> Value {
    let mut schema = json!(SchemaGenerator::default().into_root_schema_for::<T>());
    close(&mut schema);
    // The API server accepts a number, too.
    if let Some(quantity) = schema.pointer_mut("/$defs/io.k8s.apimachinery.pkg.api.resource.Quantity") {
        *quantity = json!({ "type": ["string", "number"] });
    }
    schema
}

/// Makes unknown fields errors, where the schema names the known ones.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.get("properties").is_some_and(Value::is_object) && !map.contains_key("additionalProperties") {
                map.insert("additionalProperties".into(), json!(false));
            }
            map.values_mut().for_each(close);
        }
        Value::Array(list) => list.iter_mut().for_each(close),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_schema_compiles_and_knows_its_fields() {
        for Kind { api_version, kind, .. } in kinds() {
            let object = json!({ "apiVersion": api_version, "kind": kind, "metadata": { "name": "a" }, "nonsense": 1 });
            let violations = check(&object);
            assert!(violations.iter().any(|it| it.contains("nonsense")), "{kind}: {violations:?}");
        }
    }
}
