//! What the Pods of a VM reach that exist ([`Reach`]).

use crate::{
    allowed::Reach,
    observed::{Object, Observed},
    ownership::origin::Origin,
};

/// What the VM's Pods reach in which a guest may run. A Pod that the VM-Operator in Java has made is in the network of its node without a tap, too,
/// so only its runner counts.
pub(super) fn of(observed: &Observed) -> Reach {
    let pods = observed.objects.iter().filter(|object| object.key.is_pod() && !object.has_ended());
    let reach = |pod: &Object| Reach {
        is_in_network_of_node: pod.spec["hostNetwork"] == true
            && (pod.origin == Origin::Manager || !pod.has_legacy_runner()),
        is_legacy: pod.has_legacy_runner(),
    };
    pods.filter(|pod| pod.runner_container().is_some()).map(|pod| reach(pod)).fold(Reach::default(), |all, one| Reach {
        is_in_network_of_node: all.is_in_network_of_node || one.is_in_network_of_node,
        is_legacy: all.is_legacy || one.is_legacy,
    })
}
