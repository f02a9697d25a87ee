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
    signed_in::{Allowed, OpenConsole, not_found},
};
use crate::{
    actions::{
        VmHandle,
        display::{self, DisplayError, Request},
    },
    ownership::WEB_MANAGER,
    people::Right,
    process::ErrorChain,
};

/// How long the runner may take to set a password. Less than an answer may take.
const PATIENCE: Duration = Duration::from_secs(25);

/// `POST .../connection`
pub(super) async fn file(State(app): State<App>, allowed: Allowed<OpenConsole>) -> Response {
    let Allowed { signed_in, key, .. } = allowed;
    let page = format!("/vms/{}/{}", key.0, key.1);
    let says = |status, kind, detail: Option<&str>| {
        app.message(signed_in.language, &signed_in.frame(), status, kind, detail, Some(&page))
    };
    let failed = |error: &dyn std::fmt::Display| {
        warn!(namespace = key.0, vm = key.1, %error, "the web interface could not make a connection file");
        says(StatusCode::BAD_GATEWAY, "failed", None)
    };
    let handle = VmHandle::new(app.client.clone(), &key.0, &key.1);
    // As it is now: what the watch has reported may be older than a change of its permissions.
    let vm = match handle.get().await {
        Ok(vm) => vm,
        Err(kube::Error::Api(answer)) if answer.is_not_found() => return not_found(&app, &signed_in),
        Err(error) => return failed(&ErrorChain(&error)),
    };
    let rights = rights(&signed_in.person, signed_in.views, &key.0, &vm, &app.store);
    if !rights.contains(Right::AccessConsole) {
        return not_found(&app, &signed_in);
    }
    let refused = |why: &str| says(StatusCode::CONFLICT, "refused", Some(&format!("{}: {why}", key.1)));
    if !may_open(&signed_in.person, &rights, &key.0, &vm, &app.store) {
        return says(StatusCode::CONFLICT, "in-use", None);
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
        Ok(Ok(connection)) => {
            app.audit.got_connection(&signed_in.person.user, &vm);
            let headers = [
                (header::CONTENT_TYPE, "application/x-virt-viewer".to_owned()),
                (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{}.vv\"", key.1)),
                (header::CACHE_CONTROL, "no-store".to_owned()),
            ];
            (headers, connection.file(settings.deletes_connection_file())).into_response()
        }
        Ok(Err(error)) => match error {
            DisplayError::NotStarted
            | DisplayError::NotRunning { .. }
            | DisplayError::InUse { .. }
            | DisplayError::NoPort
            | DisplayError::NoAddress
            | DisplayError::Deleted => refused(&error.to_string()),
            DisplayError::PasswordNotSet { .. }
            | DisplayError::PasswordExpired
            | DisplayError::Vm(_)
            | DisplayError::Watch(_)
            | DisplayError::Object { .. }
            | DisplayError::Random(_) => failed(&ErrorChain(&error)),
        },
        Err(_) => failed(&format!("its runner did not set the password within {} s", PATIENCE.as_secs())),
    }
}
