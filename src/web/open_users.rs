//! A warning about users that are where many people read them: hashes of passwords in the manager's ConfigMap.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tracing::warn;

use super::settings::Settings;
use crate::object::CONFIG_MAP;

/// Looks once, in the background: the web interface works without an answer.
pub(super) async fn check(client: Client, namespace: String) {
    let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
    if let Ok(Some(map)) = api.get_opt(CONFIG_MAP).await
        && has_hashes(&map)
    {
        warn!(
            namespace,
            config_map = CONFIG_MAP,
            "hashes of passwords are in a ConfigMap, which the role view reads; they belong in the Secret vm-operator-web"
        );
    }
}

/// Whether users in the ConfigMap have hashes of passwords.
fn has_hashes(map: &ConfigMap) -> bool {
    let text = map.data.iter().flatten().find(|(key, _)| *key == "config.yaml").map(|(_, text)| text);
    text.and_then(|text| Settings::parse(text).ok()).is_some_and(|settings| settings.decoy().is_some())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn only_hashes_are_warned_of() {
        let has = |user: &str| {
            let text = format!(
                "\"/Manager\": {{\"/GuiHttpServer\": {{\"/ConsoleWeblet\": {{\"/WebConsole\": {{\"/LoginConlet\": {{users: [{user}]}}}}}}}}}}"
            );
            let data = BTreeMap::from([("config.yaml".to_owned(), text)]);
            has_hashes(&ConfigMap { data: Some(data), ..ConfigMap::default() })
        };
        assert!(has("{name: ann, password: \"$2b$12$NiBd74ZGdplLC63ePZf1f.UtjMKkbQ23cQoO2OKOFalDBHWAOy21.\"}"));
        assert!(!has("{name: ann}"));
        assert!(!has_hashes(&ConfigMap::default()));
    }
}
