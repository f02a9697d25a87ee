//! The connection file for remote-viewer: `POST /vms/NAMESPACE/NAME/connection`. It writes (a password, and whom it is for), so it is a form.
//!
//! The file has a password that lets whoever has it in for some seconds. It is in no log, no cache and no page.

use std::time::Duration;

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use tokio::time::timeout;
use tracing::warn;

use super::{
    app::App,
    rights::{may_open, rights},
    signed_in::{Allowed, OpenConsole, SignedIn, not_found},
    why::Why,
};
use crate::{
    actions::{
        VmHandle,
        display::{self, Request},
    },
    api::VirtualMachine,
    ownership::WEB_MANAGER,
    people::Right,
    process::ErrorChain,
};

/// How long the runner may take to set a password. Less than an answer may take.
const PATIENCE: Duration = Duration::from_secs(25);

/// Why a person gets no file.
enum Denied {
    /// She is not signed in any more.
    SignedOut,
    /// There is no such VM, or none for her.
    Missing,
    /// She may not open the display now.
    InUse,
    /// The VM can't be read.
    Unread(String),
}

/// The VM as it is now, if the person may open its display now: what the watch has reported may be older than a change of its permissions.
async fn open_for(app: &App, signed_in: &SignedIn, handle: &VmHandle) -> Result<VirtualMachine, Denied> {
    let vm = match handle.get().await {
        Ok(vm) => vm,
        Err(kube::Error::Api(answer)) if answer.is_not_found() => return Err(Denied::Missing),
        Err(error) => return Err(Denied::Unread(ErrorChain(&error).to_string())),
    };
    let now = signed_in.now(app).ok_or(Denied::SignedOut)?;
    if !now.goes_on(app) {
        return Err(Denied::SignedOut);
    }
    let rights = rights(&now.person, now.views, handle.namespace(), &vm, &app.store);
    if !rights.contains(Right::AccessConsole) {
        return Err(Denied::Missing);
    }
    if may_open(&now.person, &rights, handle.namespace(), &vm, &app.store) { Ok(vm) } else { Err(Denied::InUse) }
}

/// `POST .../connection`
pub(super) async fn file(State(app): State<App>, allowed: Allowed<OpenConsole>) -> Response {
    let Allowed { signed_in, key, .. } = allowed;
    let page = format!("/vms/{}/{}", key.0, key.1);
    let says = |status, kind| app.message(signed_in.language, &signed_in.frame(), status, kind, None, Some(&page));
    let failed = |error: &dyn std::fmt::Display| {
        warn!(namespace = key.0, vm = key.1, %error, "the web interface could not make a connection file");
        says(StatusCode::BAD_GATEWAY, "failed")
    };
    let denied = |why: Denied| match why {
        Denied::SignedOut => StatusCode::UNAUTHORIZED.into_response(),
        Denied::Missing => not_found(&app, &signed_in),
        Denied::InUse => says(StatusCode::CONFLICT, "in-use"),
        Denied::Unread(error) => failed(&error),
    };
    let handle = VmHandle::new(app.client.clone(), &key.0, &key.1);
    if let Err(why) = open_for(&app, &signed_in, &handle).await {
        return denied(why);
    }
    let settings = &signed_in.settings;
    let request = Request {
        server: None,
        port: None,
        validity: settings.password_validity(),
        user: Some(signed_in.person.user.clone()),
        // Decided above: by her right to take it, or because it is free or hers.
        take_over: true,
        ip_version: settings.ip_version,
        field_manager: WEB_MANAGER,
    };
    match timeout(PATIENCE, display::open(&handle, &request, || {})).await {
        // The runner has needed some time: she may have lost her right, or somebody else may be at the console by now.
        Ok(Ok(connection)) => match open_for(&app, &signed_in, &handle).await {
            Ok(vm) => {
                app.audit.got_connection(&signed_in.person.user, &vm);
                let headers = [
                    (header::CONTENT_TYPE, "application/x-virt-viewer".to_owned()),
                    (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{}.vv\"", key.1)),
                    (header::CACHE_CONTROL, "no-store".to_owned()),
                ];
                (headers, connection.file(settings.deletes_connection_file())).into_response()
            }
            Err(why) => denied(why),
        },
        Ok(Err(error)) => match Why::display(&key.1, &error) {
            Some(why) => app.refusal(signed_in.language, &signed_in.frame(), &why, &page),
            None => failed(&ErrorChain(&error)),
        },
        Err(_) => failed(&format!("its runner did not set the password within {} s", PATIENCE.as_secs())),
    }
}
