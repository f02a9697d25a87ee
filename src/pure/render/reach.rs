//! What the Pods of a VM reach that exist ([`Reach`]).

use crate::{
    allowed::Reach,
    observed::{Object, Observed},
    ownership::origin::Origin,
};

/// What the VM's Pods reach in which a guest may run. A Pod that the VM-Operator in Java has made is in the network of its node without a tap, too,
/// so only its runner counts.
pub(super) fn of(observed: &Observed) -> Reach {
    let pods = || {
        let objects = observed.objects.iter().filter(|object| object.key.is_pod() && !object.has_ended());
        objects.filter(|pod| pod.runner_container().is_some())
    };
    let is_of_node = |pod: &Object| pod.spec["hostNetwork"] == true;
    Reach {
        is_in_network_of_node: pods()
            .any(|pod| is_of_node(pod) && (pod.origin == Origin::Manager || !pod.has_legacy_runner())),
        is_legacy: pods().any(|pod| pod.has_legacy_runner()),
    }
}
