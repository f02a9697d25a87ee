//! Signing in with a password, and signing out.

use axum::{
    Extension, Form,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Redirect, Response},
};
use k8s_openapi::jiff::Timestamp;
use minijinja::context;
use serde::Deserialize;

use super::{
    app::App,
    client::Client,
    devices::Devices,
    pages::value,
    passwords::{Asked, Attempt, Hash},
    provider::LONGEST_NAME,
    session::{Session, SignIn},
    sign_in_oidc,
    signed_in::{SignedIn, language},
};

/// `GET /sign-in`
pub(super) async fn form(
    State(app): State<App>,
    headers: HeaderMap,
    signed_in: Option<Extension<SignedIn>>,
) -> Response {
    if signed_in.is_some() {
        return Redirect::to("/").into_response();
    }
    page(&app, &headers, StatusCode::OK, None)
}

fn page(app: &App, headers: &HeaderMap, status: StatusCode, problem: Option<&str>) -> Response {
    let (language, settings) = (language(headers), app.settings_now());
    let frame = value(App::frame(language, &settings));
    let providers = settings.providers().iter();
    let providers: Vec<_> =
        providers.map(|provider| context! { path => provider.path(), name => provider.display_name.clone() }).collect();
    let has_users = settings.has_users() || providers.is_empty();
    let context = context! {
        frame => frame, problem => problem, view => "", providers => providers, has_users => has_users,
    };
    app.pages.page(language, status, "sign-in.html", context)
}

/// What the form sends.
#[derive(Deserialize)]
pub(super) struct Credentials {
    user: String,
    password: String,
}

/// `POST /sign-in`. A session always gets a new name, so that nobody can prepare one for another person.
pub(super) async fn sign_in(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    former: Option<Extension<SignedIn>>,
    Form(Credentials { user, password }): Form<Credentials>,
) -> Response {
    let settings = app.settings_now();
    let (hash, decoy) = (settings.user(&user).and_then(|user| user.hash.clone()), settings.decoy().cloned());
    let (now, devices) = (Timestamp::now(), Devices::read(&app.keys_now(), &headers));
    let attempt = if user.len() > LONGEST_NAME {
        Attempt::Wrong
    } else {
        let (decoy, device) = (decoy.unwrap_or_else(Hash::decoy), devices.of(&user, now));
        let asked = Asked { from: client.address, user: &user, password, hash, decoy, device };
        app.passwords.attempt(asked).await
    };
    // A name that nobody has may be a password that was typed into the wrong field.
    let known = settings.user(&user).map(|_| user.as_str());
    app.audit.attempt(known, client.address, attempt);
    let now = Timestamp::now();
    match attempt {
        Attempt::Wrong => page(&app, &headers, StatusCode::UNAUTHORIZED, Some("wrong")),
        Attempt::TooMany => page(&app, &headers, StatusCode::TOO_MANY_REQUESTS, Some("wait")),
        Attempt::Right => match devices
            .with(&user, now)
            .and_then(|devices| Ok((devices, Session::begin(SignIn::Password(user), now)?)))
        {
            Ok((devices, session)) => {
                if let Some(Extension(former)) = former {
                    app.sessions.end(&former.session);
                }
                let keys = app.keys_now();
                let answer = (keys.jar().add(session.cookie()), Redirect::to("/")).into_response();
                (keys.jar().add(devices.cookie()), answer).into_response()
            }
            Err(error) => {
                tracing::error!(%error, "there are no random numbers for a session");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        },
    }
}

/// `POST /sign-out`. The session ends, and with it all its pages and consoles.
pub(super) async fn sign_out(State(app): State<App>, headers: HeaderMap, signed_in: SignedIn) -> Response {
    app.sessions.end(&signed_in.session);
    app.audit.signed_out(&signed_in.person.user);
    let mut cookie = Session::no_cookie();
    cookie.make_removal();
    let of_provider = sign_in_oidc::sign_out(&app, &headers, &signed_in.session).await;
    let page = of_provider.unwrap_or_else(|| Redirect::to("/sign-in").into_response());
    (app.keys_now().jar().add(cookie), page).into_response()
}
