//! Signing in with a provider of OpenID Connect: [`super::openid`] speaks with it, [`super::provider`] decides who is let in.
//!
//! It begins with a link: a form would be stopped on its way to another site by the pages' policy. What is kept until the person returns is in a
//! cookie that only this program can read, so it is bound to her browser, and any replica can go on with it.

use std::time::Duration;

use axum::{
    Extension,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Redirect, Response},
};
use axum_extra::extract::cookie::{Cookie, SameSite};
use k8s_openapi::jiff::Timestamp;
use minijinja::context;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use tracing::{error, warn};

use super::{
    app::App,
    client::Client,
    openid::{Begun, OpenIdError},
    pages::value,
    provider::{NotLetIn, Profile},
    session::{Session, SignIn},
    signed_in::{SignedIn, language},
    site::Site,
};
use crate::process::ErrorChain;

/// The cookie of a sign-in that has begun.
const COOKIE: &str = "__Host-oidc";
/// How long a person may take at the provider, in seconds.
const LONGEST: i64 = 600;
/// How long a sign-out waits for a provider that is to be asked first.
const PATIENCE: Duration = Duration::from_secs(3);
/// How much of a text of the provider is shown, in characters.
const LONGEST_TEXT: usize = 300;

/// The content of the cookie.
#[derive(Serialize, Deserialize)]
struct Kept {
    begun: Begun,
    /// In seconds since 1970.
    until: i64,
}

impl Kept {
    fn cookie(&self) -> Cookie<'static> {
        let value = serde_json::to_string(self).unwrap_or_default();
        Cookie::build((COOKIE, value)).path("/").secure(true).http_only(true).same_site(SameSite::Lax).build()
    }

    fn no_cookie() -> Cookie<'static> {
        let mut cookie =
            Cookie::build((COOKIE, "")).path("/").secure(true).http_only(true).same_site(SameSite::Lax).build();
        cookie.make_removal();
        cookie
    }
}

/// `GET /sign-in/oidc/NAME`. It costs little, and asks the provider nothing that is not kept: so it has no limit that strangers could use up.
pub(super) async fn begin(State(app): State<App>, headers: HeaderMap, Path(name): Path<String>) -> Response {
    let settings = app.settings_now();
    let Some(provider) = settings.provider(&name) else {
        return says(&app, &headers, StatusCode::NOT_FOUND, "missing", None);
    };
    let Some(site) = site(&app, &headers) else { return StatusCode::BAD_REQUEST.into_response() };
    match app.openid.begin(provider, &site.signed_in).await {
        Ok((url, begun)) => {
            let kept = Kept { begun, until: Timestamp::now().as_second().saturating_add(LONGEST) };
            (app.keys_now().jar().add(kept.cookie()), Redirect::to(&url)).into_response()
        }
        Err(error) => {
            warn!(provider = name, error = %ErrorChain(&error), "a provider of OpenID Connect can't be used");
            says(&app, &headers, StatusCode::BAD_GATEWAY, "provider", None)
        }
    }
}

/// What the provider sends with the person (RFC 6749, 4.1.2; RFC 9207).
#[derive(Deserialize)]
pub(super) struct Sent {
    state: Option<String>,
    code: Option<String>,
    error: Option<String>,
    error_description: Option<String>,
    iss: Option<String>,
}

/// Why a person who returns is not let in.
enum Failure {
    /// Nothing has begun in this browser, or too long ago, or it was something else.
    NotBegun,
    /// The provider says that it can't sign her in.
    Provider(String),
    /// The provider's answer can't be used.
    Answer(OpenIdError),
    /// She is not let in.
    Refused(NotLetIn),
}

/// `GET /oauth/callback`. Whatever happens, the same answer of the provider is of no use again in this browser.
pub(super) async fn callback(
    State(app): State<App>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    former: Option<Extension<SignedIn>>,
    Query(sent): Query<Sent>,
) -> Response {
    let kept =
        app.keys_now().read(&headers, COOKIE).and_then(|cookie| serde_json::from_str::<Kept>(cookie.value()).ok());
    let provider = kept.as_ref().map(|kept| kept.begun.provider.clone()).unwrap_or_default();
    let jar = app.keys_now().jar().add(Kept::no_cookie());
    let now = Timestamp::now();
    let failure = match finish(&app, kept, sent, now).await {
        Ok(profile) => {
            let by = SignIn::Provider(provider.clone(), profile);
            match app.settings_now().person(&by) {
                Ok(person) => {
                    let Ok(session) = Session::begin(by, now) else {
                        error!("there are no random numbers for a session");
                        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
                    };
                    app.audit.signed_in_by(&provider, &person.user, client.address);
                    if let Some(Extension(former)) = former {
                        app.sessions.end(&former.session);
                    }
                    return (jar.add(session.cookie()), Redirect::to("/")).into_response();
                }
                Err(refusal) => Failure::Refused(refusal),
            }
        }
        Err(failure) => failure,
    };
    let (status, kind, why, shown) = match failure {
        Failure::NotBegun => {
            (StatusCode::BAD_REQUEST, "not-begun", "it has not begun in this browser".to_owned(), None)
        }
        Failure::Provider(text) => {
            (StatusCode::FORBIDDEN, "provider-says", format!("the provider says {text}"), Some(text))
        }
        Failure::Answer(error) => (StatusCode::BAD_GATEWAY, "provider", ErrorChain(&error).to_string(), None),
        Failure::Refused(refusal) => (StatusCode::FORBIDDEN, kind(refusal), refusal.to_string(), None),
    };
    app.audit.not_signed_in_by(&provider, client.address, &why);
    (jar, says(&app, &headers, status, kind, shown.as_deref())).into_response()
}

const fn kind(refusal: NotLetIn) -> &'static str {
    match refusal {
        NotLetIn::NoUser | NotLetIn::NoProvider | NotLetIn::NoName | NotLetIn::BadName | NotLetIn::TooLong => {
            "unknown-person"
        }
        NotLetIn::NotAuthorized => "not-authorized",
        NotLetIn::IsLocalUser => "local-user",
    }
}

async fn finish(app: &App, kept: Option<Kept>, sent: Sent, now: Timestamp) -> Result<Profile, Failure> {
    let kept = kept.filter(|kept| kept.until > now.as_second()).ok_or(Failure::NotBegun)?;
    // Nothing of what was sent counts before.
    if sent.state.as_deref() != Some(kept.begun.state.as_str()) {
        return Err(Failure::NotBegun);
    }
    let settings = app.settings_now();
    let provider = settings.provider(&kept.begun.provider).ok_or(Failure::Refused(NotLetIn::NoProvider))?;
    if let Some(issuer) = &sent.iss
        && !app.openid.is_issuer(provider, issuer).await.map_err(Failure::Answer)?
    {
        return Err(Failure::NotBegun);
    }
    let code = match (sent.code, sent.error) {
        (Some(code), None) => code,
        (_, error) => {
            let texts = [error.unwrap_or_else(|| "nothing".into()), sent.error_description.unwrap_or_default()];
            let text = texts.iter().filter(|text| !text.is_empty()).cloned().collect::<Vec<_>>().join(": ");
            return Err(Failure::Provider(text.chars().filter(|it| !it.is_control()).take(LONGEST_TEXT).collect()));
        }
    };
    let claims = app.openid.finish(provider, kept.begun, code).await.map_err(Failure::Answer)?;
    Profile::of(&claims, &provider.roles_claim).map_err(Failure::Refused)
}

/// The URLs of this site.
fn site(app: &App, headers: &HeaderMap) -> Option<Site> {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let (settings, origin) = (app.settings_now(), app.origins.first().map(String::as_str));
    Site::of(settings.redirect_uri.as_deref(), origin, host, app.is_https)
}

/// A page for somebody who is not signed in.
fn says(app: &App, headers: &HeaderMap, status: StatusCode, kind: &str, detail: Option<&str>) -> Response {
    let (language, settings) = (language(headers), app.settings_now());
    app.message(language, &App::frame(language, &settings), status, kind, detail, Some("/sign-in"))
}

/// The page after a sign-out, which leads to the provider's. It is no redirect: a form would be stopped on its way to another site by the pages'
/// policy. The header has the browser go on by itself.
pub(super) async fn sign_out(app: &App, headers: &HeaderMap, session: &Session) -> Option<Response> {
    let settings = app.settings_now();
    let SignIn::Provider(name, _) = &session.by else { return None };
    let (provider, site) = (settings.provider(name)?, site(app, headers)?);
    // She is signed out here already.
    let url = match timeout(PATIENCE, app.openid.end_session(provider, &site.signed_out)).await.ok()? {
        Ok(url) => url?,
        Err(error) => {
            warn!(provider = name, error = %ErrorChain(&error), "a provider of OpenID Connect can't be used");
            return None;
        }
    };
    let language = language(headers);
    let context = context! {
        frame => value(App::frame(language, &settings)), view => "", url => url.clone(), provider => provider.display_name.clone(),
    };
    let mut response = app.pages.page(language, StatusCode::OK, "signed-out.html", context);
    let refresh = header::HeaderValue::from_str(&format!("0; url={url}")).ok()?;
    response.headers_mut().insert(header::REFRESH, refresh);
    Some(response)
}
