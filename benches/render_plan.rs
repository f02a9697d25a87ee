//! What one reconcile of a VM computes: render, plan, and both. The budget for both is 300 µs.
#![allow(missing_docs, reason = "criterion's macros make functions without")]
#![allow(clippy::unwrap_used, reason = "this is a benchmark")]

use std::{hint::black_box, sync::Arc};

use criterion::{Criterion, criterion_group, criterion_main};
use k8s_openapi::jiff::Timestamp;
use kube::core::DynamicObject;
use serde_json::{Map, Value, json};
use vm_operator::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    object::Rendered,
    observed::{Object, Observed},
    ownership::OBJECT_MANAGER,
    plan::plan,
    render::{RandomInput, TemplateSet, render},
};

// The manager's allocator.
#[cfg(feature = "manager")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn vm() -> VirtualMachine {
    let text = include_str!("machine.yaml").replace("NAME", "pear");
    let mut vm: VirtualMachine = serde_yaml::from_str(&text).unwrap();
    vm.metadata.namespace = Some("orchard".into());
    vm.metadata.uid = Some("00000000-0000-4000-8000-000000000001".into());
    vm
}

/// The objects as a cluster has them after they were applied.
fn cluster(objects: &[Rendered]) -> Vec<Arc<Object>> {
    let objects = objects.iter().map(|object| {
        let mut value = Value::clone(&object.value);
        value["metadata"]["uid"] = json!(object.key.to_string());
        value["metadata"]["managedFields"] =
            json!([{ "manager": OBJECT_MANAGER, "operation": "Apply", "fieldsV1": field_set(&object.value) }]);
        let object: DynamicObject = serde_json::from_value(value).unwrap();
        Arc::new(Object::trim(&object.types.clone().unwrap(), object))
    });
    objects.collect()
}

/// The field set of an object, as if lists were atomic.
fn field_set(value: &Value) -> Value {
    let Value::Object(map) = value else { return json!({}) };
    let fields = map.iter().filter(|(name, _)| !["apiVersion", "kind", "name", "namespace"].contains(&name.as_str()));
    Value::Object(fields.map(|(name, value)| (format!("f:{name}"), field_set(value))).collect::<Map<_, _>>())
}

fn benchmarks(criterion: &mut Criterion) {
    let (vm, config, templates) = (vm(), ReconcilerConfig::default(), TemplateSet::builtin().unwrap());
    let random = RandomInput { display_password: "0123456789abcdef0123456789abcdef".into(), ..RandomInput::default() };
    let render = |observed: &Observed| render(&vm, observed, &config, &random, &templates).unwrap();
    let empty = Observed::nothing(Timestamp::UNIX_EPOCH);
    let full = Observed::of(cluster(&render(&empty)), Timestamp::UNIX_EPOCH);
    let rendered = render(&full);
    // A VM at rest: this is what a reconcile costs when there is nothing to do.
    assert!(plan(&vm, &full, Some(&rendered)).steps.iter().all(Vec::is_empty));

    let mut group = criterion.benchmark_group("one VM");
    group.bench_function("render", |bencher| bencher.iter(|| render(black_box(&full))));
    group.bench_function("plan, first start", |bencher| {
        bencher.iter(|| plan(black_box(&vm), &empty, Some(&rendered)));
    });
    group.bench_function("plan, at rest", |bencher| bencher.iter(|| plan(black_box(&vm), &full, Some(&rendered))));
    group.bench_function("render and plan, at rest", |bencher| {
        bencher.iter(|| plan(&vm, black_box(&full), Some(&render(&full))));
    });
    group.finish();
}

criterion_group!(benches, benchmarks);
criterion_main!(benches);
