//! The vmctls in people's Pods: each runs as long as the containers of its Pod do, and is told to end when the Pod is deleted.

use std::time::Duration;

use vm_operator::vmctl::derive::PodFacts;

use super::Run;
use crate::{
    manager::{Manager, NAMESPACE, Role},
    people::PROTOTYPE,
    world::{has_ended, is_deleting, uid},
};

/// How long the kubelet waits before it starts a vmctl again that has ended, and how often it does so.
const AGAIN: (Duration, u32) = (Duration::from_secs(20), 4);

impl Run {
    /// Starts the vmctls that do not run, tells those to end whose Pods are deleted, and ends those whose Pods are gone.
    pub(super) fn start_vmctls(&mut self) {
        let pods = self.store.of("Pod").filter(|(_, pod)| pod["metadata"]["labels"][PROTOTYPE].is_string());
        let pods: Vec<_> = pods.map(|(target, pod)| (target.clone(), pod.clone())).collect();
        let runs = |pod: &String| self.world.guests.contains_key(pod);
        let gone = |manager: &Manager| manager.role == Role::Vmctl && !runs(&manager.identity);
        while let Some(at) = self.managers.iter().position(gone) {
            self.managers.remove(at);
        }
        for (target, pod) in pods {
            let pod_uid = uid(&pod);
            let running = self.managers.iter().find(|manager| manager.identity == pod_uid);
            if let Some(running) = running {
                if is_deleting(&pod) {
                    running.terminate();
                }
                continue;
            }
            let (times, last) = self.ended.get(&pod_uid).copied().unwrap_or_default();
            let is_due = times == 0 || times <= AGAIN.1 && self.elapsed >= last + AGAIN.0;
            if is_deleting(&pod) || has_ended(&pod) || !self.world.guests.contains_key(&pod_uid) || !is_due {
                continue;
            }
            let text = |pointer: &str| pod.pointer(pointer).and_then(|it| it.as_str()).unwrap_or_default().to_owned();
            let prototype = text(&format!("/metadata/labels/{PROTOTYPE}"));
            let facts =
                PodFacts { name: target.name, uid: pod_uid, namespace: NAMESPACE.into(), node: text("/spec/nodeName") };
            self.note(&format!("the vmctl of the Pod {} starts", facts.name));
            self.managers.push(Manager::vmctl(self.now() + self.skew, self.elapsed, &prototype, facts));
        }
    }
}
