//! Other CPUs and another memory, within the maximum of the VM: `POST /vms/NAMESPACE/NAME/size`.

use axum::{
    Form,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use serde::Deserialize;
use serde_json::json;

use super::{
    act::BY,
    app::App,
    signed_in::{Administer, Allowed, not_found},
};
use crate::{
    actions::{
        Change, Decision, FoundVm, VmHandle,
        edit::{Edit, EditRefusal, decide},
        write::{ChangeError, Done},
    },
    api::Quantity,
    process::ErrorChain,
};

/// What the form has. An empty field changes nothing.
#[derive(Deserialize)]
pub(super) struct ResizeForm {
    cpus: String,
    ram: String,
}

impl ResizeForm {
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

/// Decides what is written for all of them, and what is different then.
fn decide_all(found: &FoundVm, edits: &[Edit]) -> Result<Decision<String>, EditRefusal> {
    let (mut patch, mut words) = (json!({}), Vec::new());
    for edit in edits {
        if let Decision::Write { change: Change::Merge(one) | Change::Apply(one), expected, .. } =
            decide(found, edit, false)?
        {
            json_patch::merge(&mut patch, &one);
            words.push(expected.what);
        }
    }
    Ok(match words.as_slice() {
        [] => Decision::Unchanged("nothing is different".into()),
        words => Decision::Write { change: Change::Merge(patch), applier: None, expected: words.join(", ") },
    })
}

/// `POST /vms/NAMESPACE/NAME/size`
pub(super) async fn resize(
    State(app): State<App>,
    allowed: Allowed<Administer>,
    Form(wanted): Form<ResizeForm>,
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
    let handle = VmHandle::new(app.client.clone(), namespace, name);
    let found = match handle.find().await {
        Ok(found) => found,
        Err(kube::Error::Api(answer)) if answer.is_not_found() => return not_found(&app, signed_in),
        Err(error) => return failed(&error),
    };
    match handle.change(found, BY, |found| decide_all(found, &edits)).await {
        Ok(Done::Unchanged { .. }) => {}
        Ok(Done::Written { before, expected, .. }) => {
            app.audit.resized(&signed_in.person.user, &before.vm, &expected);
        }
        Err(ChangeError::Refused(refusal)) => {
            return says(StatusCode::CONFLICT, "refused", Some(&format!("{name}: {refusal}")));
        }
        Err(ChangeError::Request { error, .. }) => return failed(&error),
        Err(ChangeError::Busy) => return says(StatusCode::BAD_GATEWAY, "failed", None),
    }
    Redirect::to(&page).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_and_sizes_are_taken() {
        let edits =
            |cpus: &str, ram: &str| ResizeForm { cpus: cpus.into(), ram: ram.into() }.edits().map(|edits| edits.len());
        assert_eq!([edits("", ""), edits("2", ""), edits(" 2 ", "4Gi")], [Ok(0), Ok(1), Ok(2)]);
        for (cpus, ram) in [("0", ""), ("-1", ""), ("two", ""), ("1.5", ""), ("", "much"), ("", "-1Gi")] {
            assert!(edits(cpus, ram).is_err(), "{cpus} {ram}");
        }
    }
}
