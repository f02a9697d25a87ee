//! What the buttons of a VM do: `POST /vms/NAMESPACE/NAME/ACTION`.

use axum::{
    Form,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Resource,
    api::{Patch, PatchParams},
};
use serde::Deserialize;
use serde_json::json;

use super::{
    app::App,
    rights::rights,
    rows::Act,
    signed_in::{Allowed, Reset, Restart, SignedIn, Start, Stop, not_found},
    store::Key,
};
use crate::{
    actions::{
        VmHandle,
        power::{Change, Decision, decide},
    },
    api::{StoredVm, VirtualMachine},
    ownership::WEB_MANAGER,
    process::ErrorChain,
};

/// Where the button was.
#[derive(Deserialize)]
pub(super) struct Origin {
    #[serde(default)]
    from: String,
}

impl Origin {
    /// The page to which the person returns. It is chosen here, so that no form leads to another site.
    fn page(&self, (namespace, name): &Key) -> String {
        match self.from.as_str() {
            "list" => "/vms".into(),
            "detail" => format!("/vms/{namespace}/{name}"),
            _ => "/home".into(),
        }
    }
}

/// `POST .../start`
pub(super) async fn start(State(app): State<App>, allowed: Allowed<Start>, Form(origin): Form<Origin>) -> Response {
    act(&app, Act::Start, &allowed.signed_in, &allowed.key, &origin).await
}

/// `POST .../stop`
pub(super) async fn stop(State(app): State<App>, allowed: Allowed<Stop>, Form(origin): Form<Origin>) -> Response {
    act(&app, Act::Stop, &allowed.signed_in, &allowed.key, &origin).await
}

/// `POST .../restart`
pub(super) async fn restart(State(app): State<App>, allowed: Allowed<Restart>, Form(origin): Form<Origin>) -> Response {
    act(&app, Act::Restart, &allowed.signed_in, &allowed.key, &origin).await
}

/// `POST .../reset`
pub(super) async fn reset(State(app): State<App>, allowed: Allowed<Reset>, Form(origin): Form<Origin>) -> Response {
    act(&app, Act::Reset, &allowed.signed_in, &allowed.key, &origin).await
}

async fn act(app: &App, act: Act, signed_in: &SignedIn, key: &Key, origin: &Origin) -> Response {
    let (language, page, user) = (signed_in.language, origin.page(key), signed_in.person.user.as_str());
    let says = |status, kind, detail: Option<&str>| {
        app.message(language, &signed_in.frame(), status, kind, detail, Some(&page))
    };
    let failed = |error: &kube::Error| {
        tracing::warn!(namespace = key.0, vm = key.1, error = %ErrorChain(error), "the web interface could not change a VM");
        says(StatusCode::BAD_GATEWAY, "failed", None)
    };
    // As it is now: what the watch has reported may be older than a change of its permissions, and has not all that the decision needs.
    let vm = match VmHandle::new(app.client.clone(), &key.0, &key.1).get().await {
        Ok(vm) => vm,
        Err(kube::Error::Api(answer)) if answer.is_not_found() => return not_found(app, signed_in),
        Err(error) => return failed(&error),
    };
    let rights = rights(&signed_in.person, signed_in.views, &key.0, &vm, &app.store);
    if !act.is_allowed(&rights, signed_in.views.administrator) {
        return not_found(app, signed_in);
    }
    match decide(&vm, act.command(), None, false, Timestamp::now()) {
        Err(refusal) => {
            let why = refusal.to_string();
            app.audit.refused(user, &vm, act, &why);
            says(StatusCode::CONFLICT, "refused", Some(&format!("{}: {why}", key.1)))
        }
        Ok(Decision::Unchanged(_)) => Redirect::to(&page).into_response(),
        Ok(Decision::Write { change, applier: _ }) => match write(app, key, change).await {
            Ok(()) => {
                app.audit.acted(user, &vm, act).await;
                Redirect::to(&page).into_response()
            }
            Err(error) => failed(&error),
        },
    }
}

/// Writes the change. It has the UID of the VM, so that the API server refuses it for another VM of that name.
async fn write(app: &App, (namespace, name): &Key, change: Change) -> kube::Result<()> {
    let api: Api<StoredVm> = Api::namespaced(app.client.clone(), namespace);
    let parameters = PatchParams { field_manager: Some(WEB_MANAGER.into()), ..PatchParams::default() };
    match change {
        Change::Merge(body) => api.patch(name, &parameters, &Patch::Merge(&body)).await.map(drop),
        Change::Apply(mut body) => {
            body["apiVersion"] = json!(VirtualMachine::api_version(&()));
            body["kind"] = json!(VirtualMachine::kind(&()));
            let parameters = PatchParams { force: true, ..parameters };
            api.patch(name, &parameters, &Patch::Apply(&body)).await.map(drop)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_person_returns_to_a_page_of_this_site() {
        let key = ("orchard".to_owned(), "apple".to_owned());
        let page = |from: &str| Origin { from: from.into() }.page(&key);
        assert_eq!([page("list"), page("home"), page("detail")], ["/vms", "/home", "/vms/orchard/apple"]);
        assert_eq!(page("https://evil.example"), "/home");
    }
}
