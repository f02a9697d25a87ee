//! What the buttons of a VM do, `POST /vms/NAMESPACE/NAME/ACTION`, and those for many of them.

use std::collections::BTreeSet;

use axum::{
    Form,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use futures::{StreamExt, stream};
use k8s_openapi::jiff::Timestamp;
use minijinja::context;
use serde::{Deserialize, Serialize};

use super::{
    app::App,
    pages::value,
    rights::rights,
    rows::Act,
    signed_in::{Administrator, Allowed, OfAct, SignedIn, not_found},
    store::Key,
    why::Why,
};
use crate::{
    actions::{
        FoundVm, VmHandle,
        power::decide,
        write::{By, ChangeError, Done},
    },
    ownership::WEB_MANAGER,
    process::ErrorChain,
};

/// As whom the web interface changes VMs.
pub(super) const BY: By<'_> = By { field_manager: WEB_MANAGER, trial: None };
/// How many VMs of many are changed at once.
const AT_ONCE: usize = 8;

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

/// `POST .../ACTION`, the path of the action of which the need is.
pub(super) async fn act<N: OfAct>(State(app): State<App>, allowed: Allowed<N>, Form(origin): Form<Origin>) -> Response {
    let Allowed { signed_in, key, .. } = &allowed;
    let (language, page) = (signed_in.language, origin.page(key));
    match carry_out(&app, N::ACT, signed_in, key).await {
        Ok(()) => Redirect::to(&page).into_response(),
        Err(Trouble::Missing) => not_found(&app, signed_in),
        Err(Trouble::Refused(why)) => app.refusal(language, &signed_in.frame(), &why, &page),
        Err(Trouble::Failed) => {
            app.message(language, &signed_in.frame(), StatusCode::BAD_GATEWAY, "failed", None, Some(&page))
        }
    }
}

/// `POST /vms/act`: one action on many VMs. The form has `action`, and `vm` once for each of them.
pub(super) async fn many(
    State(app): State<App>,
    Administrator(signed_in): Administrator,
    Form(fields): Form<Vec<(String, String)>>,
) -> Response {
    let values = |wanted: &'static str| fields.iter().filter(move |(name, _)| name == wanted).map(|(_, value)| value);
    let Some(act) = values("action").find_map(|action| Act::ALL.into_iter().find(|act| act.path() == action)) else {
        return not_found(&app, &signed_in);
    };
    let keys: BTreeSet<Key> = values("vm")
        .filter_map(|vm| vm.split_once('/'))
        .map(|(namespace, name)| (namespace.to_owned(), name.to_owned()))
        .collect();
    let outcomes = stream::iter(keys).map(|key| {
        let (app, signed_in) = (app.clone(), signed_in.clone());
        async move {
            let outcome = carry_out(&app, act, &signed_in, &key).await;
            (key, outcome)
        }
    });
    let outcomes: Vec<_> = outcomes.buffered(AT_ONCE).collect().await;
    let troubles = outcomes.into_iter().filter_map(|((_, name), outcome)| Some((name, outcome.err()?)));
    let failures: Vec<Failure> = troubles
        .map(|(name, trouble)| match trouble {
            Trouble::Refused(why) => Failure { name, kind: "refused", why: Some(why) },
            Trouble::Missing => Failure { name, kind: "missing", why: None },
            Trouble::Failed => Failure { name, kind: "failed", why: None },
        })
        .collect();
    if failures.is_empty() {
        return Redirect::to("/vms").into_response();
    }
    let frame = value(signed_in.frame());
    let context =
        context! { frame => frame, kind => "refused", failures => value(failures), back => "/vms", view => "" };
    app.pages.page(signed_in.language, StatusCode::CONFLICT, "message.html", context)
}

/// What was not done to one of many VMs, for the page that says so.
#[derive(Serialize)]
struct Failure {
    name: String,
    kind: &'static str,
    why: Option<Why>,
}

/// Why an action was not done.
enum Trouble {
    /// There is no such VM, or none for this person.
    Missing,
    /// The VM is not in a state for it.
    Refused(Why),
    /// A request to the API server failed. The log says why.
    Failed,
}

async fn carry_out(app: &App, act: Act, signed_in: &SignedIn, key: &Key) -> Result<(), Trouble> {
    let user = signed_in.person.user.as_str();
    let failed = |error: &kube::Error| {
        tracing::warn!(namespace = key.0, vm = key.1, error = %ErrorChain(error), "the web interface could not change a VM");
        Trouble::Failed
    };
    // Only of the namespaces that are served; and what somebody has typed becomes no part of a URL.
    if app.store.vm(key).is_none() {
        return Err(Trouble::Missing);
    }
    // As it is now: what the watch has reported may be older than a change of its permissions, and has not all that the decision needs.
    let handle = VmHandle::new(app.client.clone(), &key.0, &key.1);
    let found = match handle.find().await {
        Ok(found) => found,
        Err(kube::Error::Api(answer)) if answer.is_not_found() => return Err(Trouble::Missing),
        Err(error) => return Err(failed(&error)),
    };
    let decide = |found: &FoundVm| {
        let rights = rights(&signed_in.person, signed_in.views, &key.0, &found.vm, &app.store);
        if !act.is_allowed(&rights, signed_in.views.administrator) {
            return Err(Trouble::Missing);
        }
        decide(&found.vm, act.command(), None, false, Timestamp::now()).map_err(|refusal| {
            app.audit.refused(user, &found.vm, act, &refusal.to_string());
            Trouble::Refused(Why::act(&key.1, &refusal))
        })
    };
    match handle.change(found, BY, decide).await {
        Ok(Done::Unchanged { .. }) => Ok(()),
        Ok(Done::Written { before, .. }) => {
            app.audit.acted(user, &before.vm, act);
            Ok(())
        }
        Err(ChangeError::Refused(trouble)) => Err(trouble),
        Err(ChangeError::Request { error, .. }) => Err(failed(&error)),
        Err(ChangeError::Busy) => Err(Trouble::Failed),
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
