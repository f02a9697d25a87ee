//! Kubernetes' own schemas, as far as templates make objects of these kinds: built in, so no cluster is asked.
//!
//! They are those of the `k8s-openapi` crate's types, closed: a field that a type does not have is an error, as with
//! `kubectl --validate=strict`.

use std::{collections::HashMap, sync::LazyLock};

use jsonschema::Validator;
use k8s_openapi::api::{
    apps::v1 as apps, batch::v1 as batch, core::v1 as core, discovery::v1 as discovery, networking::v1 as networking,
    policy::v1 as policy,
};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

static VALIDATORS: LazyLock<HashMap<(&str, &str), Validator>> = LazyLock::new(|| {
    let kinds = [
        ("v1", "ConfigMap", schema::<core::ConfigMap>()),
        ("v1", "PersistentVolumeClaim", schema::<core::PersistentVolumeClaim>()),
        ("v1", "Pod", schema::<core::Pod>()),
        ("v1", "Secret", schema::<core::Secret>()),
        ("v1", "Service", schema::<core::Service>()),
        ("apps/v1", "Deployment", schema::<apps::Deployment>()),
        ("apps/v1", "StatefulSet", schema::<apps::StatefulSet>()),
        ("batch/v1", "CronJob", schema::<batch::CronJob>()),
        ("batch/v1", "Job", schema::<batch::Job>()),
        ("discovery.k8s.io/v1", "EndpointSlice", schema::<discovery::EndpointSlice>()),
        ("networking.k8s.io/v1", "Ingress", schema::<networking::Ingress>()),
        ("networking.k8s.io/v1", "NetworkPolicy", schema::<networking::NetworkPolicy>()),
        ("policy/v1", "PodDisruptionBudget", schema::<policy::PodDisruptionBudget>()),
    ];
    let compiled = kinds.into_iter().filter_map(|(api_version, kind, schema)| {
        // That they all compile is tested.
        Some(((api_version, kind), jsonschema::validator_for(&schema).ok()?))
    });
    compiled.collect()
});

/// What does not fit the schema of the object's kind; nothing for a kind that is not known here.
pub fn check(object: &Value) -> Vec<String> {
    let text = |name: &str| object[name].as_str().unwrap_or_default();
    let Some(validator) = VALIDATORS.get(&(text("apiVersion"), text("kind"))) else { return Vec::new() };
    let describe = |error: jsonschema::ValidationError<'_>| {
        let path = error.instance_path().to_string().trim_start_matches('/').replace('/', ".");
        if path.is_empty() { error.to_string() } else { format!("{path}: {error}") }
    };
    validator.iter_errors(object).map(describe).collect()
}

fn schema<T: JsonSchema>() -> Value {
    let mut schema = json!(SchemaGenerator::default().into_root_schema_for::<T>());
    close(&mut schema);
    // The API server takes a number, too.
    if let Some(quantity) = schema.pointer_mut("/$defs/io.k8s.apimachinery.pkg.api.resource.Quantity") {
        *quantity = json!({ "type": ["string", "number"] });
    }
    schema
}

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
    fn every_schema_compiles_and_closes() {
        assert_eq!(VALIDATORS.len(), 13);
        for (api_version, kind) in VALIDATORS.keys() {
            let object = json!({ "apiVersion": api_version, "kind": kind, "metadata": { "name": "a" }, "nonsense": 1 });
            let wrong = check(&object);
            assert!(wrong.iter().any(|wrong| wrong.contains("nonsense")), "{kind}: {wrong:?}");
        }
    }
}
