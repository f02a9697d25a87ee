//! Who sends a request, and what she may do: found once for each request, in one place.
//!
//! [`identify`] reads the cookie. A handler says what it needs by its arguments: [`SignedIn`] is a person who is signed in, and [`Allowed`] one with
//! a right on the VM in the path. A VM on which she has no right is answered as one that does not exist.

use std::marker::PhantomData;

use axum::{
    extract::{FromRequestParts, Path, Request, State},
    http::{Method, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Redirect, Response},
};
use k8s_openapi::jiff::Timestamp;

use super::{
    app::App,
    held::Held,
    language::Language,
    pages::Frame,
    rights::{may_open, rights},
    rows::Act,
    session::{COOKIE, Session},
    settings::{Settings, Views},
    store::Key,
};
use crate::people::{Person, Right, Rights, rights_in_pool};

/// The header of a request that the page sends by itself: it is no use of the session.
const LIVE: &str = "x-live";

/// A person who is signed in.
#[derive(Clone)]
pub(super) struct SignedIn {
    /// The session.
    pub session: Session,
    /// The person.
    pub person: Person,
    /// What she sees.
    pub views: Views,
    /// The language of her pages.
    pub language: Language,
    /// The configuration in which her roles are.
    pub settings: std::sync::Arc<Settings>,
}

impl SignedIn {
    /// The frame of her pages.
    pub fn frame(&self) -> Frame<'_> {
        let user = Some(self.settings.full_name(&self.session.by).unwrap_or(&self.person.user));
        Frame {
            user,
            administrator: self.views.administrator,
            home: self.views.user,
            ..App::frame(self.language, &self.settings)
        }
    }

    /// The person with the roles that she has now. `None`: she may not be here any more.
    pub fn now(&self, app: &App) -> Option<Self> {
        let settings = app.settings_now();
        let person = settings.person(&self.session.by).ok()?;
        Some(Self { views: settings.views(&person), person, settings, ..self.clone() })
    }

    /// Whether the session goes on. To ask is no use of it.
    pub fn goes_on(&self, app: &App) -> bool {
        app.sessions.goes_on(&self.session, &self.person.user, Timestamp::now(), false)
    }

    /// Whether the person may open the console of the VM, with the roles that she has now and as the VM is now.
    pub fn may_open(&self, app: &App, key: &Key) -> bool {
        let (Some(now), Some(vm)) = (self.now(app), app.store.vm(key)) else { return false };
        let rights = rights(&now.person, now.views, &key.0, &vm, &app.store);
        may_open(&now.person, &rights, &key.0, &vm, &app.store)
    }
}

/// The language that the request wants.
pub(super) fn language(headers: &axum::http::HeaderMap) -> Language {
    headers.get(header::ACCEPT_LANGUAGE).and_then(|value| value.to_str().ok()).map(Language::wanted).unwrap_or_default()
}

/// Reads the cookie, and writes it again after some time.
pub(super) async fn identify(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let now = Timestamp::now();
    let session = app.keys_now().read(request.headers(), COOKIE).and_then(|cookie| Session::read(&cookie));
    // Pages open sockets by themselves, again and again; what is typed there is a use.
    let is_by_itself = request.headers().contains_key(LIVE) || request.headers().contains_key(header::UPGRADE);
    let is_use = !request.uri().path().starts_with("/live/") && !is_by_itself;
    let signed_in = session.and_then(|session| {
        let settings = app.settings_now();
        let person = settings.person(&session.by).ok()?;
        let is_there = app.sessions.goes_on(&session, &person.user, now, is_use);
        let views = settings.views(&person);
        is_there.then(|| SignedIn { session, person, views, language: language(request.headers()), settings })
    });
    let renewed = signed_in.as_ref().filter(|_| is_use).and_then(|it| it.session.used_at(now));
    let user = signed_in.as_ref().map(|signed_in| signed_in.person.user.as_str());
    let held = match Held::begin(request.extensions_mut(), user) {
        Ok(held) => held,
        Err(too_many) => return *too_many,
    };
    if let Some(signed_in) = signed_in {
        request.extensions_mut().insert(signed_in);
    }
    let response = held.until_answered(next.run(request).await);
    match renewed {
        // Signing in and out set the cookie themselves.
        Some(session) if !response.headers().contains_key(header::SET_COOKIE) => {
            (app.keys_now().jar().add(session.cookie()), response).into_response()
        }
        _ => response,
    }
}

impl FromRequestParts<App> for SignedIn {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Response> {
        let is_page = parts.method == Method::GET && !parts.uri.path().starts_with("/live/");
        let nobody = || {
            if is_page { Redirect::to("/sign-in").into_response() } else { StatusCode::UNAUTHORIZED.into_response() }
        };
        parts.extensions.get::<Self>().cloned().ok_or_else(nobody)
    }
}

/// What a handler needs.
pub(super) trait Need {
    /// Whether a person with these rights has it.
    fn is_met(rights: &Rights, is_administrator: bool) -> bool;
}

/// To see the VM: any right.
pub(super) struct See;
/// To use its console. Whether that is possible now depends on who uses it, and is decided later.
pub(super) struct OpenConsole;
/// To do what only administrators may.
pub(super) struct Administer;
/// To start it.
pub(super) struct Start;
/// To stop it.
pub(super) struct Stop;
/// To restart it.
pub(super) struct Restart;
/// To reset it.
pub(super) struct Reset;
/// To pause it.
pub(super) struct Pause;
/// To let it go on.
pub(super) struct Resume;

/// A need that is that of an action.
pub(super) trait OfAct: Send + Sync + 'static {
    /// The action.
    const ACT: Act;
}

impl OfAct for Start {
    const ACT: Act = Act::Start;
}

impl OfAct for Stop {
    const ACT: Act = Act::Stop;
}

impl OfAct for Restart {
    const ACT: Act = Act::Restart;
}

impl OfAct for Reset {
    const ACT: Act = Act::Reset;
}

impl OfAct for Pause {
    const ACT: Act = Act::Pause;
}

impl OfAct for Resume {
    const ACT: Act = Act::Resume;
}

impl<N: OfAct> Need for N {
    fn is_met(rights: &Rights, is_administrator: bool) -> bool {
        N::ACT.is_allowed(rights, is_administrator)
    }
}

impl Need for See {
    fn is_met(rights: &Rights, _: bool) -> bool {
        !rights.is_empty()
    }
}

impl Need for Administer {
    fn is_met(_: &Rights, is_administrator: bool) -> bool {
        is_administrator
    }
}

impl Need for OpenConsole {
    fn is_met(rights: &Rights, _: bool) -> bool {
        rights.contains(Right::AccessConsole)
    }
}

/// A person who has what the handler needs, on the VM that the path names as `{namespace}/{name}`.
pub(super) struct Allowed<N> {
    /// The person.
    pub signed_in: SignedIn,
    /// The VM's namespace and name.
    pub key: Key,
    /// All that she may do with it.
    pub rights: Rights,
    need: PhantomData<N>,
}

impl<N: Need> FromRequestParts<App> for Allowed<N> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Response> {
        let signed_in = SignedIn::from_request_parts(parts, app).await?;
        let missing = || not_found(app, &signed_in);
        let Path((namespace, name)) =
            Path::<(String, String)>::from_request_parts(parts, app).await.map_err(|_| missing())?;
        let key = (namespace, name);
        let vm = app.store.vm(&key).ok_or_else(missing)?;
        let rights = rights(&signed_in.person, signed_in.views, &key.0, &vm, &app.store);
        if rights.is_empty() {
            return Err(missing());
        }
        if !N::is_met(&rights, signed_in.views.administrator) {
            let language = signed_in.language;
            return Err(app.message(language, &signed_in.frame(), StatusCode::FORBIDDEN, "forbidden", None, None));
        }
        Ok(Self { signed_in, key, rights, need: PhantomData })
    }
}

/// A person with a right in the pool that the path names as `{namespace}/{name}`. An administrator has none by that: she is a user as others are.
pub(super) struct AllowedPool {
    /// The person.
    pub signed_in: SignedIn,
    /// The pool's namespace and name.
    pub key: Key,
    /// All that she may do with a VM of the pool.
    pub rights: Rights,
}

impl FromRequestParts<App> for AllowedPool {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Response> {
        let signed_in = SignedIn::from_request_parts(parts, app).await?;
        let missing = || not_found(app, &signed_in);
        let Path((namespace, name)) =
            Path::<(String, String)>::from_request_parts(parts, app).await.map_err(|_| missing())?;
        let pool = app.store.pool(&namespace, &name).filter(|_| signed_in.views.user).ok_or_else(missing)?;
        let rights = rights_in_pool(&signed_in.person, &pool);
        if rights.is_empty() {
            return Err(missing());
        }
        Ok(Self { signed_in, key: (namespace, name), rights })
    }
}

/// An administrator.
pub(super) struct Administrator(pub SignedIn);

impl FromRequestParts<App> for Administrator {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Response> {
        let signed_in = SignedIn::from_request_parts(parts, app).await?;
        if signed_in.views.administrator { Ok(Self(signed_in)) } else { Err(not_found(app, &signed_in)) }
    }
}

/// The page for what does not exist, or not for this person.
pub(super) fn not_found(app: &App, signed_in: &SignedIn) -> Response {
    app.message(signed_in.language, &signed_in.frame(), StatusCode::NOT_FOUND, "missing", None, None)
}
