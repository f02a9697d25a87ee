//! The form for a new VM, for administrators: `/vms/new`.
//!
//! ```text
//!  form ─▶ NewVm ─┬─▶ its YAML, and the command for it
//!                 └─▶ the API server: would it take it (a dry run)? ─▶ what is wrong, beside each field
//!                                     create it ─▶ the page of the VM
//! ```
//!
//! The page works without a script; with one it asks by itself while somebody types.

mod command;
mod form;

use std::{collections::BTreeSet, time::Duration};

use axum::{
    Form,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, PostParams},
    core::Status,
};
use minijinja::context;
use serde_json::Value;
use tokio::time::timeout;

use self::form::{Field, Problems, Wrong, field_of};
use super::{
    app::App,
    pages::value,
    signed_in::{Administrator, SignedIn},
};
use crate::{
    actions::create::{CATALOG, manifest},
    api::{VirtualMachine, stored},
    ownership::WEB_MANAGER,
    process::ErrorChain,
    render::valid::is_dns_label,
    yaml,
};

/// How long a new VM may take until the watch has it. Then its page is found.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the API server says of a VM.
#[derive(Default)]
struct Complaints {
    /// Of fields of the form.
    fields: Problems,
    /// Of all others.
    others: Vec<String>,
}

impl Complaints {
    /// Sorts what is wrong by the fields that it is about.
    fn of(status: &Status) -> Self {
        let mut refusal = Self::default();
        let causes = status.details.as_ref().map(|details| details.causes.as_slice()).unwrap_or_default();
        for cause in causes {
            match field_of(&cause.field) {
                Some(field) => refusal.add(field, &cause.message),
                None if cause.field.is_empty() => refusal.others.push(cause.message.clone()),
                None => refusal.others.push(format!("{}: {}", cause.field, cause.message)),
            }
        }
        if causes.is_empty() && status.reason == "AlreadyExists" {
            refusal.add(Field::Name, &status.message);
        } else if causes.is_empty() {
            refusal.others.push(status.message.clone());
        }
        refusal
    }

    fn add(&mut self, field: Field, message: &str) {
        let says = self.fields.entry(field).or_insert_with(|| Wrong::Says(String::new()));
        if let Wrong::Says(all) = says
            && !all.contains(message)
        {
            let separator = if all.is_empty() { "" } else { "; " };
            *all += &format!("{separator}{message}");
        }
    }
}

/// What became of a request.
enum Outcome {
    /// It was not sent: fields are wrong, or nothing was asked yet.
    NotAsked,
    /// The API server would take the VM.
    Accepted,
    /// It does not take it.
    Refused(Complaints),
    /// There is no answer. The log says why.
    Failed,
}

/// `GET /vms/new`
pub(super) async fn form(State(app): State<App>, Administrator(signed_in): Administrator) -> Response {
    let form = form::Form::new(app.namespaces.first().and_then(Option::as_deref).unwrap_or(&app.own_namespace));
    page(&app, &signed_in, StatusCode::OK, &form, Problems::new(), Outcome::NotAsked)
}

/// `POST /vms/new`: asks whether the VM would be taken, or creates it.
pub(super) async fn submit(
    State(app): State<App>,
    Administrator(signed_in): Administrator,
    Form(form): Form<form::Form>,
) -> Response {
    let (wanted, mut problems) = form.read(|namespace| serves(&app, namespace));
    let is_dry = form.what != "create";
    if !problems.is_empty() {
        if form.live.is_some() {
            // Who is still typing need not hear it.
            problems.retain(|_, wrong| *wrong != Wrong::Missing);
        }
        let status = if is_dry { StatusCode::OK } else { StatusCode::UNPROCESSABLE_ENTITY };
        return page(&app, &signed_in, status, &form, problems, Outcome::NotAsked);
    }
    let namespace = form.namespace.trim();
    let (outcome, status) = match create(&app, namespace, &manifest(&wanted), is_dry).await {
        Ok(_) if is_dry => (Outcome::Accepted, StatusCode::OK),
        Ok(object) => return created(&app, &signed_in, namespace, &object).await,
        Err(kube::Error::Api(answer)) => {
            (Outcome::Refused(Complaints::of(&answer)), if is_dry { StatusCode::OK } else { StatusCode::CONFLICT })
        }
        Err(error) => {
            let vm = &wanted.name;
            tracing::warn!(namespace, vm, error = %ErrorChain(&error), "the web interface could not create a VM");
            (Outcome::Failed, if is_dry { StatusCode::OK } else { StatusCode::BAD_GATEWAY })
        }
    };
    page(&app, &signed_in, status, &form, problems, outcome)
}

/// Whether the web interface has that namespace. What is no name of one becomes no part of a URL.
fn serves(app: &App, namespace: &str) -> bool {
    is_dns_label(namespace) && app.namespaces.iter().any(|served| served.as_deref().is_none_or(|it| it == namespace))
}

async fn create(app: &App, namespace: &str, manifest: &Value, is_dry: bool) -> kube::Result<DynamicObject> {
    let object: DynamicObject = serde_json::from_value(manifest.clone()).map_err(kube::Error::SerdeError)?;
    let resource = ApiResource::erase::<VirtualMachine>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(app.client.clone(), namespace, &resource);
    let parameters = PostParams { dry_run: is_dry, field_manager: Some(WEB_MANAGER.into()) };
    api.create(&parameters, &object).await
}

/// Notes it, and leads to the VM's page.
async fn created(app: &App, signed_in: &SignedIn, namespace: &str, object: &DynamicObject) -> Response {
    let name = object.metadata.name.clone().unwrap_or_default();
    if let Some(vm) = serde_json::to_string(object).ok().and_then(|text| stored::read(&text).ok()) {
        app.audit.created(&signed_in.person.user, &vm);
    }
    let key = (namespace.to_owned(), name);
    let _ = timeout(PATIENCE, app.store.until(&key, |_| true)).await;
    Redirect::to(&format!("/vms/{namespace}/{}", key.1)).into_response()
}

fn page(
    app: &App,
    signed_in: &SignedIn,
    status: StatusCode,
    form: &form::Form,
    mut problems: Problems,
    outcome: Outcome,
) -> Response {
    let (mut others, mut verdict) = (Vec::new(), "");
    match outcome {
        Outcome::NotAsked => {}
        Outcome::Accepted => verdict = "accepted",
        Outcome::Failed => verdict = "failed",
        Outcome::Refused(refusal) => {
            verdict = "refused";
            problems.extend(refusal.fields);
            others = refusal.others;
        }
    }
    let (wanted, _) = form.read(|_| true);
    let known = app.store.subscribe();
    let pools = app.store.pools();
    let namespaces: BTreeSet<&str> = match app.namespaces.iter().map(Option::as_deref).collect::<Option<BTreeSet<_>>>()
    {
        Some(these) => these,
        None => {
            let of_vms = known.vms.iter().map(|(key, ..)| key.0.as_str());
            let of_pools = pools.iter().map(|((namespace, _), _)| namespace.as_str());
            of_vms.chain(of_pools).chain([app.own_namespace.as_str()]).collect()
        }
    };
    let context = context! {
        frame => value(signed_in.frame()), view => "create", form => value(form), problems => value(&problems),
        others => others, verdict => verdict, yaml => yaml::unfolded(&manifest(&wanted)).unwrap_or_default(), command => command::command(&wanted, &form.image),
        namespaces => value(namespaces), is_any_namespace => app.namespaces.contains(&None),
        images => CATALOG.map(|(name, ..)| name), pools => value(pools.iter().map(|((_, name), _)| name).collect::<BTreeSet<_>>()),
    };
    app.pages.page(signed_in.language, status, "create.html", context)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(status: Value) -> Complaints {
        Complaints::of(&serde_json::from_value(status).unwrap())
    }

    #[test]
    fn what_the_api_server_says_goes_to_its_field() {
        let cause =
            |field: &str, message: &str| json!({ "field": field, "message": message, "reason": "FieldValueInvalid" });
        let refusal = refusal(json!({ "code": 422, "message": "all", "reason": "Invalid", "details": { "causes": [
            cause("metadata.name", "one"), cause("metadata.name", "two"), cause("metadata.name", "one"),
            cause("spec.vm", "a rule"), cause("", "at large"),
        ] } }));
        assert_eq!(refusal.fields, [(Field::Name, Wrong::Says("one; two".into()))].into());
        assert_eq!(refusal.others, ["spec.vm: a rule", "at large"]);
    }

    #[test]
    fn a_namespace_is_no_part_of_another_path() {
        assert!(is_dns_label("lab-2") && is_dns_label(&"a".repeat(63)));
        for text in ["", "..", "a/b", "a?b", "a%2fb", "Lab", "ä", &"a".repeat(64)] {
            assert!(!is_dns_label(text), "{text}");
        }
    }

    #[test]
    fn an_answer_without_causes_is_shown_as_a_whole() {
        let exists = refusal(json!({ "code": 409, "message": "exists", "reason": "AlreadyExists" }));
        assert_eq!((exists.fields, exists.others.len()), ([(Field::Name, Wrong::Says("exists".into()))].into(), 0));
        let forbidden = refusal(json!({ "code": 403, "message": "exceeded quota", "reason": "Forbidden" }));
        assert_eq!((forbidden.fields.len(), forbidden.others), (0, vec!["exceeded quota".to_owned()]));
    }
}
