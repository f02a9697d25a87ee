//! New images for the agents of running VMs, few at once.
//!
//! An agent is replaced while its guest runs, so a new manager brings a new agent to all VMs. If its image can't be pulled or does not
//! work, only the first few VMs have no agent then: the next VM gets the image when one of them has its new agent.
//!
//! ```text
//!  plan with a new image ─▶ may_begin ─┬─ fewer than AT_ONCE are replaced: the Pod's image is patched ─▶ its new agent runs ─┐
//!                                      └─ else the VM waits ◀── reconciled when one is done ◀──────────────────────────────┘
//! ```

use std::{
    collections::{HashMap, VecDeque},
    sync::Mutex,
};

use futures::{Stream, channel::mpsc};
use kube::runtime::reflector::ObjectRef;

use crate::{cluster::packed::PackedVm, object::AGENT_NAME, observed::Object, process::lock};

/// How many agents are replaced at once.
const AT_ONCE: usize = 4;

/// The agents that are replaced, and the VMs that wait for that.
pub struct Agents {
    state: Mutex<State>,
    next: mpsc::UnboundedSender<ObjectRef<PackedVm>>,
}

#[derive(Default)]
struct State {
    /// The containers that are replaced.
    under_way: HashMap<ObjectRef<PackedVm>, Container>,
    waiting: VecDeque<ObjectRef<PackedVm>>,
}

/// A container as the kubelet knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Container {
    pod_uid: String,
    /// Another one has another ID. `None`: the kubelet has not reported one.
    id: Option<String>,
}

impl Agents {
    /// No agent is replaced yet. The stream has the VMs whose turn it is.
    pub fn new() -> (Self, impl Stream<Item = ObjectRef<PackedVm>> + Send + use<>) {
        let (next, turns) = mpsc::unbounded();
        (Self { state: Mutex::default(), next }, turns)
    }

    /// Whether a VM's agent may be replaced now. If not, the VM's turn comes.
    pub fn may_begin(&self, vm: &ObjectRef<PackedVm>, pod: &Object) -> bool {
        let mut state = lock(&self.state);
        state.waiting.retain(|waiting| waiting != vm);
        let may_begin = state.under_way.contains_key(vm) || state.under_way.len() < AT_ONCE;
        if may_begin {
            state.under_way.entry(vm.clone()).or_insert_with(|| container(pod).0);
        } else {
            state.waiting.push_back(vm.clone());
        }
        may_begin
    }

    /// Looks whether a VM has its new agent. `pod` finds the VM's Pod, if it has one; most VMs need not be asked for it.
    pub fn observe<'a>(&self, vm: &ObjectRef<PackedVm>, pod: impl FnOnce() -> Option<&'a Object>) {
        let mut state = lock(&self.state);
        let is_done = |old: &Container| {
            pod()
                .map(container)
                .is_none_or(|(new, is_running)| new.pod_uid != old.pod_uid || is_running && new.id != old.id)
        };
        if state.under_way.get(vm).is_some_and(is_done) {
            state.under_way.remove(vm);
            if let Some(next) = state.waiting.pop_front() {
                // Nobody listens when the manager ends.
                let _ = self.next.unbounded_send(next);
            }
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&self, vm: &ObjectRef<PackedVm>) {
        self.observe(vm, || None);
        lock(&self.state).waiting.retain(|waiting| waiting != vm);
    }
}

/// The agent's container in a Pod, and whether it runs.
fn container(pod: &Object) -> (Container, bool) {
    let status = pod.container_statuses().find(|status| status["name"] == AGENT_NAME);
    let id = status.and_then(|status| status["containerID"].as_str()).map(str::to_owned);
    let is_running = status.is_some_and(|status| status["state"]["running"].is_object());
    (Container { pod_uid: pod.uid.clone(), id }, is_running)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::{FutureExt, StreamExt};
    use serde_json::json;

    use super::*;
    use crate::test_support::{applied, nothing, rendered, vm};

    fn pod(id: &str, state: &str) -> Arc<Object> {
        let observed = applied(&rendered(&vm(|_| ()), &nothing()), |kind, object| {
            if kind == "Pod" {
                object["status"] = json!({ "initContainerStatuses": [
                    { "name": "agent", "containerID": id, "state": { state: {} } },
                ] });
            }
        });
        observed.objects.iter().find(|object| object.key.is_pod()).unwrap().clone()
    }

    #[test]
    fn the_next_vm_has_its_turn_when_a_new_agent_runs_and_not_before() {
        let (agents, mut turns) = Agents::new();
        let name = |number: usize| ObjectRef::<PackedVm>::new(&format!("vm-{number}"));
        let old = pod("old", "running");
        let begun: Vec<bool> = (0..AT_ONCE + 2).map(|number| agents.may_begin(&name(number), &old)).collect();
        assert_eq!(begun, [true, true, true, true, false, false]);
        assert!(agents.may_begin(&name(0), &old), "the patch is tried again");
        let mut turn = || turns.next().now_or_never().flatten().map(|vm| vm.name);
        for unfinished in [&old, &pod("old", "terminated"), &pod("new", "waiting")] {
            agents.observe(&name(0), || Some(unfinished));
            assert_eq!(turn(), None);
        }
        let new = pod("new", "running");
        agents.observe(&name(0), || Some(&new));
        assert_eq!(turn().as_deref(), Some("vm-4"));
        assert!(agents.may_begin(&name(4), &old));
        assert!(!agents.may_begin(&name(0), &old), "a later image waits like all others");
        // A VM that goes makes room, too, and one that waits no more gets no turn.
        agents.forget(&name(5));
        agents.forget(&name(1));
        assert_eq!(turn().as_deref(), Some("vm-0"));
    }
}
