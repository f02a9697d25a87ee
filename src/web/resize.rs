//! Other CPUs and another memory, within the maximum of the VM: `POST /vms/NAMESPACE/NAME/size`.

use axum::{
    Form,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
};
use serde::Deserialize;
use serde_json::json;

use super::{
    app::App,
    signed_in::{Administer, Allowed, not_found},
};
use crate::{
    actions::edit::{Decision, Edit, Refusal, decide},
    api::{Quantity, VirtualMachine, stored},
    ownership::WEB_MANAGER,
    process::ErrorChain,
};

/// What the form has. An empty field changes nothing.
#[derive(Deserialize)]
pub(super) struct Wanted {
    cpus: String,
    ram: String,
}

impl Wanted {
    /// What is to be changed. The error is a text that is no number, or no size.
    fn edits(&self) -> Result<Vec<Edit>, String> {
        let mut edits = Vec::new();
        let (cpus, ram) = (self.cpus.trim(), self.ram.trim());
        if !cpus.is_empty() {
            let number = cpus.parse().ok().filter(|number| *number > 0).ok_or_else(|| cpus.to_owned())?;
            edits.push(Edit::Cpus { number, raise: false });
        }
        if !ram.is_empty() {
            edits.push(Edit::Ram { size: Quantity::parse(ram).map_err(|_| ram.to_owned())?, raise: false });
        }
        Ok(edits)
    }
}

/// Decides what is written for all of them: a merge patch, and what is different then. `None`: nothing.
fn patch(
    object: &DynamicObject,
    vm: &VirtualMachine,
    edits: &[Edit],
) -> Result<Option<(serde_json::Value, String)>, Refusal> {
    let (mut patch, mut words) = (json!({}), Vec::new());
    for edit in edits {
        if let Decision::Write { patch: one, what, .. } = decide(object, vm, edit, false)? {
            json_patch::merge(&mut patch, &one);
            words.push(what);
        }
    }
    Ok((!words.is_empty()).then(|| (patch, words.join(", "))))
}

/// `POST /vms/NAMESPACE/NAME/size`
pub(super) async fn resize(
    State(app): State<App>,
    allowed: Allowed<Administer>,
    Form(wanted): Form<Wanted>,
) -> Response {
    let Allowed { signed_in, key: (namespace, name), .. } = &allowed;
    let page = format!("/vms/{namespace}/{name}");
    let says = |status, kind, detail: Option<&str>| {
        app.message(signed_in.language, &signed_in.frame(), status, kind, detail, Some(&page))
    };
    let failed = |error: &kube::Error| {
        tracing::warn!(namespace, vm = name, error = %ErrorChain(error), "the web interface could not change a VM");
        says(StatusCode::BAD_GATEWAY, "failed", None)
    };
    let edits = match wanted.edits() {
        Ok(edits) => edits,
        Err(text) => return says(StatusCode::UNPROCESSABLE_ENTITY, "refused", Some(&format!("{name}: {text:?}"))),
    };
    let resource = ApiResource::erase::<VirtualMachine>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(app.client.clone(), namespace, &resource);
    let object = match api.get(name).await {
        Ok(object) => object,
        Err(kube::Error::Api(answer)) if answer.is_not_found() => return not_found(&app, signed_in),
        Err(error) => return failed(&error),
    };
    let vm = serde_json::to_string(&object).ok().and_then(|text| stored::read(&text).ok());
    let Some(vm) = vm else { return says(StatusCode::CONFLICT, "refused", None) };
    match patch(&object, &vm, &edits) {
        Err(refusal) => says(StatusCode::CONFLICT, "refused", Some(&format!("{name}: {refusal}"))),
        Ok(None) => Redirect::to(&page).into_response(),
        Ok(Some((patch, what))) => {
            let parameters = PatchParams { field_manager: Some(WEB_MANAGER.into()), ..PatchParams::default() };
            if let Err(error) = api.patch(name, &parameters, &Patch::Merge(&patch)).await {
                return failed(&error);
            }
            app.audit.resized(&signed_in.person.user, &vm, &what);
            Redirect::to(&page).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_and_sizes_are_taken() {
        let edits =
            |cpus: &str, ram: &str| Wanted { cpus: cpus.into(), ram: ram.into() }.edits().map(|edits| edits.len());
        assert_eq!([edits("", ""), edits("2", ""), edits(" 2 ", "4Gi")], [Ok(0), Ok(1), Ok(2)]);
        for (cpus, ram) in [("0", ""), ("-1", ""), ("two", ""), ("1.5", ""), ("", "much"), ("", "-1Gi")] {
            assert!(edits(cpus, ram).is_err(), "{cpus} {ram}");
        }
    }
}
