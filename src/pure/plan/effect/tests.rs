use std::sync::Arc;

use kube::core::DynamicObject;

use super::*;
use crate::test_support::{applied, nothing, rendered, stopped, vm};

/// The same objects, those of a kind changed by `edit`.
fn edited(objects: &[Rendered], kind: &str, edit: impl Fn(&mut Value)) -> Vec<Rendered> {
    let mut objects = objects.to_vec();
    for object in objects.iter_mut().filter(|object| object.key.kind == kind) {
        edit(Arc::make_mut(&mut object.value));
        object.hash = "another".into();
    }
    objects
}

/// The objects with their content.
fn content(objects: &[Rendered]) -> Vec<DynamicObject> {
    let of = |object: &Rendered| serde_json::from_value(Value::clone(&object.value)).unwrap();
    objects.iter().filter(|object| object.key.kind != "Secret").map(of).collect()
}

/// What becomes of a VM that has all its objects.
fn effect_on(vm: &VirtualMachine, new: impl FnOnce(&[Rendered]) -> Vec<Rendered>) -> Effect {
    let old = rendered(vm, &nothing());
    let has_pod = vm.spec.vm.state == crate::api::PowerState::Running;
    let there: Vec<Rendered> = old.iter().filter(|object| has_pod || !object.key.is_pod()).cloned().collect();
    let observed = applied(&there, |kind, object| {
        if kind == "Pod" {
            object["spec"]["nodeName"] = json!("node-1");
        }
    });
    let old = rendered(vm, &observed);
    let new = new(&old);
    effect(Input { vm, observed: &observed, current: &content(&there), old: Some(&old), new: &new })
}

fn paths(effect: &Effect) -> (Vec<String>, Vec<&str>) {
    let live = effect.at_once.iter().flat_map(|touched| {
        let fields = touched.fields.iter().map(|field| format!("{} {}", touched.object, field.path));
        let alone = touched.fields.is_empty().then(|| format!("{} {}", touched.object, touched.what));
        fields.chain(alone)
    });
    (live.collect(), effect.at_next_start.iter().map(|change| change.path.as_str()).collect())
}

/// Another text in the runner's configuration.
fn with_config(objects: &[Rendered], old: &str, new: &str) -> Vec<Rendered> {
    edited(objects, "ConfigMap", |map| {
        let text = map["data"]["config.yaml"].as_str().unwrap();
        assert!(text.contains(old), "{text}");
        map["data"]["config.yaml"] = text.replace(old, new).into();
    })
}

#[test]
fn what_a_running_vm_gets_at_once_is_told_from_what_waits() {
    let running = vm(|_| ());
    type Change = fn(&[Rendered]) -> Vec<Rendered>;
    let cases: [(Change, Class, &[&str], &[&str]); 11] = [
        (|old| old.to_vec(), Class::Nothing, &[], &[]),
        (
            |old| edited(old, "Pod", |pod| pod["metadata"]["labels"]["tier"] = json!("web")),
            Class::Live,
            &["Pod apple metadata.labels.tier"],
            &[],
        ),
        (
            |old| edited(old, "Pod", |pod| pod["spec"]["priorityClassName"] = json!("high")),
            Class::Restart,
            &[],
            &["objects/Pod/spec.priorityClassName"],
        ),
        (
            |old| edited(old, "Pod", |pod| pod["spec"]["initContainers"][0]["image"] = json!("new")),
            Class::Live,
            &["Pod apple spec.initContainers[agent].image"],
            &[],
        ),
        // The guest gets some fields of the runner's configuration while it runs, and others not.
        (
            |old| with_config(old, "currentCpus: 2", "currentCpus: 1"),
            Class::Live,
            &["ConfigMap apple config.yaml/vm.currentCpus"],
            &[],
        ),
        (
            |old| with_config(old, "maximumCpus: 2", "maximumCpus: 4"),
            Class::Restart,
            &["ConfigMap apple changed"],
            &["config.yaml/vm.maximumCpus"],
        ),
        (
            |old| edited(old, "ConfigMap", |map| map["data"]["logging.properties"] = json!("x")),
            Class::Live,
            &["ConfigMap apple data.logging.properties"],
            &[],
        ),
        (
            |old| {
                let old = with_config(old, "updateTemplate: true", "updateTemplate: true\n  qemuTemplates: a-digest");
                edited(&old, "ConfigMap", |map| map["data"]["qemu.yaml"] = json!("templates: {}"))
            },
            Class::Restart,
            &["ConfigMap apple changed"],
            &["config.yaml/qemuTemplates"],
        ),
        (
            |old| {
                let old = with_config(old, "updateTemplate: true", "updateTemplate: false\n  qemuTemplates: a-digest");
                edited(&old, "ConfigMap", |map| map["data"]["qemu.yaml"] = json!("templates: {}"))
            },
            Class::Live,
            &["ConfigMap apple config.yaml/updateTemplate"],
            &[],
        ),
        // It is written, but says the same.
        (|old| edited(old, "ConfigMap", |_| ()), Class::Nothing, &[], &[]),
        (
            |old| old.iter().filter(|object| object.key.name != "apple-relay").cloned().collect(),
            Class::Live,
            &["Secret apple-relay deleted"],
            &[],
        ),
    ];
    for (number, (change, class, live, restart)) in cases.into_iter().enumerate() {
        let effect = effect_on(&running, change);
        let (found_live, found_restart) = paths(&effect);
        let found_live: Vec<&str> = found_live.iter().map(String::as_str).collect();
        assert_eq!((effect.class, &*found_live, &*found_restart), (class, live, restart), "case {number}: {effect:?}");
    }
}

#[test]
fn a_configuration_that_is_written_is_live_even_if_a_part_of_it_waits() {
    let both = |old: &[Rendered]| {
        with_config(&with_config(old, "maximumCpus: 2", "maximumCpus: 4"), "currentCpus: 2", "currentCpus: 3")
    };
    let effect = effect_on(&vm(|_| ()), both);
    assert_eq!(paths(&effect).0, ["ConfigMap apple config.yaml/vm.currentCpus"]);
    assert_eq!(effect.class, Class::Restart);
    assert_eq!((&effect.at_next_start[0].current, &effect.at_next_start[0].wanted), (&Some(json!(2)), &Some(json!(4))));
}

#[test]
fn without_a_former_rendering_what_there_is_is_compared() {
    for (apple, of_pod, of_map) in
        [(vm(|_| ()), Class::Restart, Class::Live), (stopped(), Class::Nothing, Class::Start)]
    {
        let old = rendered(&apple, &nothing());
        let observed = applied(&old, |_, _| ());
        let new = rendered(&apple, &observed);
        let input = |new| Input { vm: &apple, observed: &observed, current: &[], old: None, new };
        assert_eq!(effect(input(&new)).class, Class::Nothing);
        let pod = edited(&new, "Pod", |pod| pod["spec"]["priorityClassName"] = json!("high"));
        assert_eq!(effect(input(&pod)).class, of_pod);
        let map = edited(&new, "ConfigMap", |map| map["metadata"]["labels"]["tier"] = json!("web"));
        assert_eq!(effect(input(&map)).class, of_map);
    }
}

#[test]
fn what_a_vm_gets_that_has_yet_to_start_is_no_effect_of_a_program() {
    let apple = vm(|_| ());
    let observed = nothing();
    let new = rendered(&apple, &observed);
    let program = Input { vm: &apple, observed: &observed, current: &[], old: None, new: &new };
    assert_eq!(effect(program), Effect::default());
    let without_claims: Vec<Rendered> = new.iter().filter(|object| !object.key.is_claim()).cloned().collect();
    let held = Input { old: Some(&without_claims), ..program };
    assert_eq!(effect(held).class, Class::Start, "of templates it is");
}

#[test]
fn a_vm_that_is_down_has_it_at_its_next_start() {
    let down = stopped();
    assert_eq!(effect_on(&down, <[_]>::to_vec).class, Class::Nothing);
    let other_pod = effect_on(&down, |old| edited(old, "Pod", |pod| pod["spec"]["priorityClassName"] = json!("high")));
    assert_eq!((other_pod.class, other_pod.at_next_start.len()), (Class::Start, 0));
    let other_map = effect_on(&down, |old| with_config(old, "maximumCpus: 2", "maximumCpus: 4"));
    assert_eq!((other_map.class, other_map.at_next_start.len()), (Class::Start, 0));
}

#[test]
fn what_waits_already_is_no_effect() {
    let waiting = vm(|vm| {
        vm["status"] = json!({ "pendingChanges": [
            { "path": "objects/Pod/spec.priorityClassName", "wanted": "high", "reason": "r" },
        ] });
    });
    let change = |old: &[Rendered]| edited(old, "Pod", |pod| pod["spec"]["priorityClassName"] = json!("high"));
    let effect = effect_on(&waiting, change);
    assert_eq!((effect.class, effect.waits_already.len()), (Class::Nothing, 1));
    // With another value it waits anew.
    let change = |old: &[Rendered]| edited(old, "Pod", |pod| pod["spec"]["priorityClassName"] = json!("higher"));
    assert_eq!(effect_on(&waiting, change).class, Class::Restart);
}

#[test]
fn an_object_of_somebody_else_and_cloud_init_data_are_named() {
    let apple = vm(|vm| vm["spec"]["cloudInit"] = json!({ "userData": { "a": "b" } }));
    let old = rendered(&apple, &nothing());
    let observed = applied(&old, |kind, object| {
        if kind == "ConfigMap" && object["metadata"]["name"] == "apple" {
            object["metadata"]["ownerReferences"] =
                json!([{ "apiVersion": "v1", "kind": "X", "name": "x", "uid": "x" }]);
            object["metadata"]["labels"] = json!({});
        }
    });
    let (old, new) = (rendered(&apple, &observed), rendered(&apple, &observed));
    let effect_of = |old: Option<&[Rendered]>, new: &[Rendered]| {
        effect(Input { vm: &apple, observed: &observed, current: &[], old, new })
    };
    assert_eq!(effect_of(Some(&old), &new).class, Class::Nothing, "it is so already");
    let refused = effect_of(None, &new);
    assert_eq!(
        (refused.class, refused.refused[0].as_str()),
        (Class::Refused, "ConfigMap apple exists and is not the manager's: it is not taken over")
    );
    // The content of the Secret is not known, but what is rendered differs.
    let new = edited(&old, "Secret", |secret| secret["data"]["user-data"] = json!("eA=="));
    let changed = effect_of(Some(&old), &new);
    assert_eq!((changed.class, paths(&changed).1), (Class::Restart, vec!["cloud-init"]));
    assert!(changed.at_once.iter().flat_map(|it| &it.fields).all(|field| field.wanted.is_none()), "{changed:?}");
}

#[test]
fn the_words_of_the_classes_are_those_of_the_json() {
    for class in Class::ALL {
        assert_eq!(json!(class), json!(class.word()));
    }
}
