//! A new image for the agent of a running VM.

use super::*;

#[test]
fn an_agent_gets_its_new_image_while_the_guest_runs_and_all_else_waits() {
    let vm = vm(|_| ());
    let plan_of = |edit: fn(&mut Value)| {
        let observed = cluster(
            &vm,
            on_pod(move |pod| {
                on_node(pod);
                pod["metadata"]["annotations"][HASH_ANNOTATION] = json!("another");
                pod["spec"]["initContainers"][0]["image"] = json!("old");
                edit(pod);
            }),
        );
        let plan = plan(&vm, &observed, Some(&rendered(&vm, &observed)));
        let images = plan.steps.iter().flatten().filter_map(|action| match action {
            Action::Image { container, image, .. } => Some(format!("{container}: {image}")),
            _ => None,
        });
        let pending = plan.pending.iter().map(|change| change.path.replace("objects/Pod/spec.", ""));
        (images.collect::<Vec<_>>(), pending.collect::<Vec<_>>())
    };
    let new = || rendered(&vm, &nothing());
    let pod = new().into_iter().find(|object| object.key.is_pod()).unwrap();
    let image = format!("agent: {}", pod.value["spec"]["initContainers"][0]["image"].as_str().unwrap());
    let both = plan_of(|pod| pod["spec"]["containers"][0]["image"] = json!("old"));
    assert_eq!(both, (vec![image.clone()], vec!["containers[vm-runner].image".into()]));
    assert_eq!(plan_of(|_| ()), (vec![image], vec![]));
    // An agent that would be mounted or started otherwise needs a new Pod.
    let (images, pending) = plan_of(|pod| pod["spec"]["initContainers"][0]["args"] = json!(["other"]));
    assert_eq!((images, pending.len()), (vec![], 2), "{pending:?}");
}

#[test]
fn an_image_that_a_webhook_has_written_is_no_change_of_what_is_rendered() {
    let vm = vm(|_| ());
    let created = plan(&vm, &nothing(), Some(&rendered(&vm, &nothing())));
    let created = created.steps.iter().flatten().find_map(|action| match action {
        Action::Apply { object, .. } if object.key.is_pod() => Some(object.clone()),
        _ => None,
    });
    let annotations = created.unwrap().value["metadata"]["annotations"].clone();
    let plan_of = |rendered_agent: &'static str, edit: fn(&mut Value)| {
        let annotations = annotations.clone();
        let observed = cluster(
            &vm,
            on_pod(move |pod| {
                on_node(pod);
                pod["metadata"]["annotations"] = annotations.clone();
                pod["metadata"]["annotations"][HASH_ANNOTATION] = json!("another");
                pod["spec"]["initContainers"][0]["image"] = json!("mirror/agent");
                pod["spec"]["containers"][0]["image"] = json!("mirror/runner");
                edit(pod);
            }),
        );
        let mut objects = rendered(&vm, &observed);
        if !rendered_agent.is_empty() {
            let pod = objects.iter_mut().find(|object| object.key.is_pod()).unwrap();
            Arc::make_mut(&mut pod.value)["spec"]["initContainers"][0]["image"] = json!(rendered_agent);
        }
        let plan = plan(&vm, &observed, Some(&objects));
        let images = plan.steps.iter().flatten().filter_map(|action| match action {
            Action::Image { image, .. } => Some(image.clone()),
            _ => None,
        });
        let labels = plan.steps.iter().flatten().any(|action| matches!(action, Action::Label { .. }));
        (images.collect::<Vec<_>>(), plan.pending.len(), labels)
    };
    assert_eq!(plan_of("", |_| ()), (vec![], 0, false));
    // An unrelated change is the only one.
    let unrelated: fn(&mut Value) = |pod| pod["spec"]["restartPolicy"] = json!("Never");
    assert_eq!(plan_of("", unrelated), (vec![], 1, false));
    // What is rendered now is another image.
    assert_eq!(plan_of("new", unrelated), (vec!["new".into()], 1, false));
}
