//! The objects of a VM as its templates make them, for administrators: each with the files that it comes from.
//!
//! The templates in force and the manager's configuration are read from its ConfigMaps, in the namespace of this program. The objects are those of a first
//! start, as `kubectl vm render --installed` shows them; what a running VM has instead is in `status.pendingChanges`, on the VM's page.

mod render;

use axum::{extract::State, http::StatusCode, response::Response};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, ResourceExt};
use minijinja::context;

pub use self::render::serve;
use self::render::{Job, render};
use super::{
    app::App,
    pages::value,
    signed_in::{Administer, Allowed, not_found},
};
use crate::{
    actions::VmHandle,
    api::VirtualMachine,
    config::{Config, ReconcilerConfig},
    object::CONFIG_MAP,
    process::ErrorChain,
    render::{
        kept::{VERSION, in_force_name},
        templates::Layers,
    },
};

/// Why there is nothing to render.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    /// A ConfigMap can't be read.
    #[error("ConfigMap {0}: {error}", error = ErrorChain(.1))]
    Unread(String, #[source] kube::Error),
    /// A ConfigMap does not exist, or has no templates.
    #[error("ConfigMap {0}: no manager has kept its templates there; it must be in the namespace of the web interface")]
    NotKept(String),
    /// The configuration is wrong.
    #[error("ConfigMap {CONFIG_MAP}: {0}")]
    Configuration(String),
}

/// `GET /vms/NAMESPACE/NAME/objects`
pub(super) async fn page(State(app): State<App>, allowed: Allowed<Administer>) -> Response {
    let Allowed { signed_in, key, .. } = &allowed;
    let says = |status, detail: &str| {
        let back = format!("/vms/{}/{}", key.0, key.1);
        app.message(signed_in.language, &signed_in.frame(), status, "refused", Some(detail), Some(&back))
    };
    // The store has not all fields.
    let vm = match VmHandle::new(app.client.clone(), &key.0, &key.1).get().await {
        Ok(vm) => vm,
        Err(kube::Error::Api(answer)) if answer.is_not_found() => return not_found(&app, signed_in),
        Err(error) => return says(StatusCode::BAD_GATEWAY, &ErrorChain(&error).to_string()),
    };
    let (layers, version) = match in_force(&app, &vm).await {
        Ok(found) => found,
        Err(trouble) => return says(StatusCode::CONFLICT, &trouble.to_string()),
    };
    let config = match configuration(&app).await {
        Ok(config) => config,
        Err(trouble) => return says(StatusCode::CONFLICT, &trouble.to_string()),
    };
    let set = vm.template_set().map(str::to_owned);
    let objects = match render(&Job { vm, config, layers }).await {
        Ok(Ok(objects)) => objects,
        Ok(Err(error)) => return says(StatusCode::CONFLICT, &error),
        Err(error) => {
            tracing::warn!(namespace = key.0, vm = key.1, %error, "the web interface could not render a VM");
            return says(StatusCode::CONFLICT, &error.to_string());
        }
    };
    let context = context! {
        frame => value(signed_in.frame()), view => "objects", id => format!("{}/{}", key.0, key.1), namespace => key.0.clone(), name => key.1.clone(),
        set => set, version => version, objects => value(objects),
    };
    app.pages.page(signed_in.language, StatusCode::OK, "objects.html", context)
}

/// The templates by which the manager renders the VM, and their version: those in force, or the former ones that the VM keeps.
async fn in_force(app: &App, vm: &VirtualMachine) -> Result<(Layers, String), Trouble> {
    let set = vm.template_set();
    let of_vm = vm.status.as_ref().and_then(|status| status.templates.as_ref());
    let of_vm = of_vm.filter(|from| from.set.as_deref() == set).and_then(|from| from.version.as_deref());
    let newest = in_force_name(set, None);
    let newest_map = read(app, &newest).await?;
    let found = newest_map.as_ref().and_then(layers);
    let version = found.as_ref().map(|(_, version)| version.as_str());
    if let Some(former) = of_vm.filter(|former| Some(*former) != version)
        && let Some(map) = read(app, &in_force_name(set, Some(former))).await?
        && let Some(former) = layers(&map)
    {
        return Ok(former);
    }
    found.ok_or(Trouble::NotKept(newest))
}

/// The templates in a ConfigMap, and their version.
fn layers(map: &ConfigMap) -> Option<(Layers, String)> {
    let layers = Layers::kept_in(map)?;
    Some((layers, map.annotations().get(VERSION).cloned().unwrap_or_default()))
}

async fn configuration(app: &App) -> Result<ReconcilerConfig, Trouble> {
    let text = read(app, CONFIG_MAP).await?.and_then(|map| map.data?.remove("config.yaml")).unwrap_or_default();
    let config = Config::parse(&text).map_err(|error| Trouble::Configuration(error.to_string()))?;
    Ok(config.reconciler)
}

async fn read(app: &App, name: &str) -> Result<Option<ConfigMap>, Trouble> {
    let api: Api<ConfigMap> = Api::namespaced(app.client.clone(), &app.own_namespace);
    api.get_opt(name).await.map_err(|error| Trouble::Unread(format!("{}/{name}", app.own_namespace), error))
}
