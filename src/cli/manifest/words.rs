//! Violations of a schema in the API server's words
//! (<https://github.com/kubernetes/kube-openapi/blob/master/pkg/validation/errors/schema.go>).

use jsonschema::{ValidationError, error::ValidationErrorKind};
use serde_json::Value;

use super::{Problem, position::Step};
use crate::{
    api::{
        quantity::{self, InvalidQuantity},
        schema::AMOUNT,
    },
    lint::suggestion,
};

/// The problems of an error: one for each unknown field, else one.
pub(super) fn problems(error: &ValidationError<'_>, object: &Value, schema: &Value) -> Vec<Problem> {
    let path = path(&error.instance_path().to_string(), object);
    match error.kind() {
        ValidationErrorKind::AdditionalProperties { unexpected } => {
            let known = known_fields(schema, &path);
            unexpected.iter().map(|name| unknown_field(&path, name, &known, schema)).collect()
        }
        ValidationErrorKind::Required { property } => {
            let name = property.as_str().unwrap_or_default().to_owned();
            let missing: Vec<Step> = path.iter().cloned().chain([Step::Key(name)]).collect();
            vec![Problem { path, is_key: false, message: format!("{}: Required value", field(&missing)) }]
        }
        // The type is wrong, too, and that is reported.
        ValidationErrorKind::Enum { options } if !has_type_of(options, error.instance()) => Vec::new(),
        kind => {
            let field = field(&path);
            let message = format!("{field}: {}", words(kind, &field, error.instance()));
            vec![Problem { path, is_key: false, message }]
        }
    }
}

fn unknown_field(path: &[Step], name: &str, known: &[String], schema: &Value) -> Problem {
    let path: Vec<Step> = path.iter().cloned().chain([Step::Key(name.to_owned())]).collect();
    let suggestion = match elsewhere(&schema["properties"]["spec"], name, "spec") {
        Some(place) => format!("it belongs to {place}"),
        None => suggestion(name, known),
    };
    let message = format!("unknown field {:?}: {suggestion}", field(&path));
    Problem { path, is_key: true, message }
}

/// The first place below a field, in no list, where the schema has a field of that name.
fn elsewhere(schema: &Value, name: &str, field: &str) -> Option<String> {
    let fields = schema["properties"].as_object()?;
    if fields.contains_key(name) {
        return Some(field.to_owned());
    }
    fields.iter().find_map(|(below, schema)| elsewhere(schema, name, &format!("{field}.{below}")))
}

/// Whether a list has a value of the same type.
fn has_type_of(options: &Value, value: &Value) -> bool {
    options.as_array().into_iter().flatten().any(|option| type_of(option) == type_of(value))
}

/// What is wrong with a value.
fn words(kind: &ValidationErrorKind, field: &str, value: &Value) -> String {
    let invalid = |what: String| format!("Invalid value: {value}: {field} in body {what}");
    match kind {
        ValidationErrorKind::Type { kind } => {
            let wanted = match kind {
                jsonschema::error::TypeKind::Single(type_) => type_.to_string(),
                // Where the API server removes a null, the schema allows it.
                jsonschema::error::TypeKind::Multiple(types) => {
                    let names = types.iter().map(|type_| type_.to_string()).filter(|name| name != "null");
                    names.collect::<Vec<_>>().join(",")
                }
            };
            let found = type_of(value);
            // Such as `on`.
            let hint = if wanted == "string" && value.is_boolean() { "; write a text in quotes" } else { "" };
            format!("Invalid value: {found:?}: {field} in body must be of type {wanted}: {found:?}{hint}")
        }
        ValidationErrorKind::Enum { options } => {
            let options: Vec<String> = options.as_array().into_iter().flatten().map(Value::to_string).collect();
            format!("Unsupported value: {value}: supported values: {}", options.join(", "))
        }
        ValidationErrorKind::Minimum { limit } => {
            invalid(format!("should be greater than or equal to {}", number(limit)))
        }
        ValidationErrorKind::Maximum { limit } => invalid(format!("should be less than or equal to {}", number(limit))),
        ValidationErrorKind::MinLength { limit } => invalid(format!("should be at least {limit} chars long")),
        // These patterns would say less than a sentence.
        ValidationErrorKind::Pattern { pattern } if pattern == quantity::PATTERN => {
            format!("Invalid value: {}", InvalidQuantity(value.as_str().unwrap_or_default().into()))
        }
        ValidationErrorKind::Pattern { pattern } if pattern == AMOUNT => {
            let units = "write a number with an optional unit, such as 10Gi, 10G or 500m (there is no GB and no GiB)";
            format!("Invalid value: {value} is not an amount: {units}")
        }
        ValidationErrorKind::Pattern { pattern } => invalid(format!("should match '{pattern}'")),
        ValidationErrorKind::MaxLength { limit } => format!("Too long: may not be more than {limit} bytes"),
        ValidationErrorKind::MaxItems { limit } => too_many(value.as_array().map_or(0, Vec::len), *limit),
        ValidationErrorKind::MaxProperties { limit } => too_many(value.as_object().map_or(0, |map| map.len()), *limit),
        ValidationErrorKind::Not { schema } => match schema["required"].as_array() {
            Some(fields) => {
                let fields: Vec<&str> = fields.iter().filter_map(Value::as_str).collect();
                format!("Invalid value: give only one of {}", fields.join(" and "))
            }
            None => format!("Invalid value: {value}: {field:?} must not validate the schema (not)"),
        },
        // The definition has no other keywords.
        kind => format!("Invalid value: {value}: it breaks the rule {:?} of the schema", kind.keyword()),
    }
}

/// A limit, which the schema may have as 1.0.
fn number(limit: &Value) -> String {
    limit
        .as_f64()
        .filter(|number| number.fract() == 0.0)
        .map_or_else(|| limit.to_string(), |number| format!("{number:.0}"))
}

fn too_many(found: usize, limit: u64) -> String {
    format!("Too many: {found}: must have at most {limit} items")
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The names of the fields that the schema has at a path.
fn known_fields(schema: &Value, path: &[Step]) -> Vec<String> {
    let mut at = schema;
    for step in path {
        at = match step {
            Step::Key(name) => at["properties"].get(name).unwrap_or(&at["additionalProperties"]),
            Step::Index(_) => &at["items"],
        };
        if let Some(name) = at["$ref"].as_str().and_then(|reference| reference.strip_prefix("#/$defs/")) {
            at = &schema["$defs"][name];
        }
    }
    at["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect()
}

/// The steps of a JSON pointer to a value that exists.
fn path(pointer: &str, object: &Value) -> Vec<Step> {
    let mut at = object;
    let mut steps = Vec::new();
    for part in pointer.split('/').skip(1) {
        let name = part.replace("~1", "/").replace("~0", "~");
        let (step, next) = match (at, name.parse::<usize>()) {
            (Value::Array(list), Ok(index)) => (Step::Index(index), list.get(index)),
            _ => (Step::Key(name.clone()), at.get(&name)),
        };
        steps.push(step);
        at = next.unwrap_or(&Value::Null);
    }
    steps
}

/// A path as the API server writes it: `spec.vm.disks[0].cdrom`.
fn field(path: &[Step]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Step::Key(name) if text.is_empty() => text.push_str(name),
            Step::Key(name) => text += &format!(".{name}"),
            Step::Index(index) => text += &format!("[{index}]"),
        }
    }
    if text.is_empty() { "<root>".into() } else { text }
}

/// The steps of a path that is written as the API server writes it.
pub(in crate::cli) fn steps(field: &str) -> Vec<Step> {
    let part = |part: &str| match part.parse() {
        Ok(index) => Step::Index(index),
        Err(_) => Step::Key(part.to_owned()),
    };
    field.split(['.', '[', ']']).filter(|it| !it.is_empty()).map(part).collect()
}
