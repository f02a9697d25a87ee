//! What all requests share.

use std::{ops::Deref, sync::Arc};

use axum::{http::StatusCode, response::Response};
use kube::Client;
use minijinja::context;
use tokio::sync::watch;

use super::{
    audit::Audit,
    keys::Keys,
    language::Language,
    openid::OpenId,
    pages::{Frame, Pages, value},
    passwords::Passwords,
    pictures::Pictures,
    session::Sessions,
    settings::Settings,
    store::Store,
    sums::History,
    why::Why,
};
use crate::process::network::Network;

/// What all requests share.
#[derive(Clone)]
pub(super) struct App(Arc<Parts>);

/// The parts of [`App`].
pub(super) struct Parts {
    /// The configuration as it is now.
    pub settings: watch::Receiver<Arc<Settings>>,
    /// Sends requests with the program's own rights.
    pub client: Client,
    /// The VMs.
    pub store: Arc<Store>,
    /// Who has signed out, and who is there.
    pub sessions: Sessions,
    /// Whether those that have ended elsewhere are known, or may not be.
    pub are_sessions_known: watch::Receiver<bool>,
    /// The keys of cookies.
    pub keys: watch::Receiver<Arc<Keys>>,
    /// Compares passwords.
    pub passwords: Passwords,
    /// Speaks with providers of OpenID Connect.
    pub openid: OpenId,
    /// Makes pages.
    pub pages: Pages,
    /// Pictures of screens.
    pub pictures: Pictures,
    /// What all VMs have had.
    pub history: History,
    /// Notes what people do.
    pub audit: Audit,
    /// The origins of the site, beside the one in a request's `Host`.
    pub origins: Vec<String>,
    /// The proxies of the command line that say from whom a request comes, beside those of the configuration.
    pub proxies: Vec<Network>,
    /// The namespaces whose VMs are shown; `None` stands for all.
    pub namespaces: Vec<Option<String>>,
    /// The program's own namespace.
    pub own_namespace: String,
    /// Whether the program itself speaks HTTPS.
    pub is_https: bool,
    /// Part of the number that a page has from this process: the numbers of another one mean nothing here.
    pub epoch: u32,
    /// Becomes true when the program ends.
    pub ending: watch::Receiver<bool>,
}

impl App {
    /// From its parts.
    pub fn new(parts: Parts) -> Self {
        Self(Arc::new(parts))
    }

    /// The configuration as it is now.
    pub fn settings_now(&self) -> Arc<Settings> {
        self.settings.borrow().clone()
    }

    /// The proxies that say from whom a request comes.
    pub fn proxies_now(&self) -> Vec<Network> {
        self.proxies.iter().chain(&self.settings.borrow().trusted_proxies).copied().collect()
    }

    /// The keys of cookies as they are now.
    pub fn keys_now(&self) -> Arc<Keys> {
        self.keys.borrow().clone()
    }

    /// The frame of a page for nobody in particular.
    pub fn frame<'a>(language: Language, settings: &'a Settings) -> Frame<'a> {
        let cluster = settings.cluster_name.as_deref();
        Frame { language: language.tag(), cluster, user: None, administrator: false, home: false }
    }

    /// A page that says that something is not so. `kind` names its texts; a detail is shown in the place of the general one.
    pub fn message(
        &self,
        language: Language,
        frame: &Frame<'_>,
        status: StatusCode,
        kind: &str,
        detail: Option<&str>,
        back: Option<&str>,
    ) -> Response {
        let context = context! { frame => value(frame), kind => kind, detail => detail, back => back, view => "" };
        self.pages.page(language, status, "message.html", context)
    }

    /// A page that says why something is not possible now.
    pub fn refusal(&self, language: Language, frame: &Frame<'_>, why: &Why, back: &str) -> Response {
        let context =
            context! { frame => value(frame), kind => "refused", why => value(why), back => back, view => "" };
        self.pages.page(language, StatusCode::CONFLICT, "message.html", context)
    }
}

impl Deref for App {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}
