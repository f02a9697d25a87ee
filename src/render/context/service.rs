//! `service` in the context: labels and annotations of the VM's Service.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{api::ServiceMetadata, config::LoadBalancerService};

/// Both fields are present, also if they are empty ([`ServiceMetadata`] leaves those out).
#[derive(Serialize)]
pub(super) struct Service {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

impl Service {
    /// The VM's metadata over the manager's. An empty value removes the manager's. `None`: the VM gets no Service.
    pub(super) fn of(wanted: Option<&ServiceMetadata>, config: &LoadBalancerService) -> Option<Self> {
        let wanted = wanted?;
        let mut merged = match config {
            LoadBalancerService::Enabled(false) => return None,
            LoadBalancerService::Enabled(true) => ServiceMetadata::default(),
            LoadBalancerService::Metadata(defaults) => defaults.clone(),
        };
        for (map, over) in [(&mut merged.labels, &wanted.labels), (&mut merged.annotations, &wanted.annotations)] {
            map.extend(over.clone());
            map.retain(|_, value| !value.is_empty());
        }
        Some(Self { labels: merged.labels, annotations: merged.annotations })
    }
}
