//! `service` in the context: labels and annotations of the VM's Service.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    api::{NullableTexts, ServiceMetadata},
    config::LoadBalancerService,
};

/// Both fields are present, also if they are empty ([`ServiceMetadata`] leaves those out).
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Service {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

impl Service {
    /// The VM's metadata over the manager's. Null or an empty value removes the manager's. `None`: the VM has no Service.
    pub(super) fn of(own: Option<&ServiceMetadata>, config: &LoadBalancerService) -> Option<Self> {
        let defaults = config.defaults(own)?;
        let nothing = ServiceMetadata::default();
        let own = own.unwrap_or(&nothing);
        Some(Self {
            labels: merged(defaults.labels.as_ref(), own.labels.as_ref()),
            annotations: merged(defaults.annotations.as_ref(), own.annotations.as_ref()),
        })
    }
}

fn merged(defaults: Option<&NullableTexts>, own: Option<&NullableTexts>) -> BTreeMap<String, String> {
    let mut merged = defaults.cloned().unwrap_or_default();
    merged.extend(own.cloned().unwrap_or_default());
    let given = |(name, value): (String, Option<String>)| Some((name, value.filter(|value| !value.is_empty())?));
    merged.into_iter().filter_map(given).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_configuration_switches_services_on_and_a_vm_can_decline() {
        let on = LoadBalancerService::Metadata(
            serde_json::from_value(json!({ "labels": { "a": "1", "b": "2" }, "annotations": { "c": "3", "d": null } }))
                .unwrap(),
        );
        let (off, bare) = (LoadBalancerService::Enabled(false), LoadBalancerService::Enabled(true));
        let defaults = json!({ "labels": { "a": "1", "b": "2" }, "annotations": { "c": "3" } });
        let nothing = json!({ "labels": {}, "annotations": {} });
        for (own, config, expected) in [
            (Value::Null, &off, Value::Null),
            (json!({ "labels": { "e": "5" } }), &off, Value::Null),
            (Value::Null, &bare, nothing.clone()),
            (Value::Null, &on, defaults.clone()),
            (json!({}), &on, Value::Null),
            (json!({}), &bare, Value::Null),
            (json!({ "labels": {} }), &on, defaults),
            (
                json!({ "labels": { "a": null, "b": "", "e": "5" }, "annotations": { "c": "4" } }),
                &on,
                json!({ "labels": { "e": "5" }, "annotations": { "c": "4" } }),
            ),
            (json!({ "labels": { "a": null } }), &bare, nothing),
        ] {
            let own: Option<ServiceMetadata> = serde_json::from_value(own).unwrap();
            assert_eq!(json!(Service::of(own.as_ref(), config)), expected, "{own:?} {config:?}");
        }
    }
}
