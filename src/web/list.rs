//! The pages with VMs: the administrator's list, and a person's own.

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use k8s_openapi::jiff::Timestamp;
use minijinja::context;

use super::{
    app::App,
    pages::value,
    pools::{self, Offers},
    rights::{assigned_pool, may_open, own_rights},
    rows::{Onlooker, Row},
    signed_in::{Administrator, SignedIn, not_found},
    store::{Look, View},
    sums::Sum,
};
use crate::{
    api::{VirtualMachine, status::whole_seconds},
    people::Rights,
};

impl View {
    const fn page(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::List => ("list", "list.html", "row.html"),
            Self::Home => ("home", "home.html", "card.html"),
        }
    }

    /// What the person may do with the VM on such a page.
    pub(super) fn rights(self, signed_in: &SignedIn, namespace: &str, vm: &VirtualMachine, app: &App) -> Rights {
        match self {
            Self::List if signed_in.views.administrator => Rights::all(),
            Self::List => Rights::default(),
            Self::Home => own_rights(&signed_in.person, signed_in.views, namespace, vm, &app.store),
        }
    }

    /// How the person sees the VM on such a page.
    pub(super) fn look(
        self,
        signed_in: &SignedIn,
        rights: &Rights,
        namespace: &str,
        vm: &VirtualMachine,
        app: &App,
    ) -> Look {
        let can_open_console = may_open(&signed_in.person, rights, namespace, vm, &app.store);
        let is_own = assigned_pool(&signed_in.person, vm).is_some();
        Look { view: self, language: signed_in.language, rights: rights.clone(), can_open_console, is_own }
    }

    /// The VM's part of such a page. What it shows depends on nothing but the look.
    pub(super) fn part(self, signed_in: &SignedIn, rights: &Rights, vm: &VirtualMachine, app: &App) -> String {
        let is_administrator = self == Self::List;
        let onlooker = Onlooker { person: &signed_in.person, rights, is_administrator };
        let row = Row::of(vm, onlooker, &app.store, Timestamp::now());
        let (_, _, template) = self.page();
        app.pages.part_or_nothing(signed_in.language, template, context! { vm => value(&row) })
    }

    fn whole(self, signed_in: &SignedIn, app: &App) -> Response {
        let (name, template, _) = self.page();
        let now = Timestamp::now();
        let subscription = app.store.subscribe();
        let rows = subscription.vms.iter().filter_map(|(key, vm, _)| {
            let rights = self.rights(signed_in, &key.0, vm, app);
            (!rights.is_empty()).then(|| self.part(signed_in, &rights, vm, app))
        });
        let offers = Offers::of(signed_in, &app.store, subscription.vms.iter().map(|(key, vm, _)| (&**key, &**vm)));
        let cards = offers.open().into_iter().filter(|_| self == Self::Home);
        let cards = cards.map(|pool| pools::card(signed_in, &pool, app));
        // Only who sees all VMs sees what they have together.
        let (sum_since, sums) = match self {
            Self::List => app.history.lines(now, Sum::of(subscription.vms.iter().map(|(_, vm, _)| &**vm))),
            Self::Home => (now, Vec::new()),
        };
        let context = context! {
            sums => value(sums), sum_since => whole_seconds(sum_since),
            frame => value(signed_in.frame()), view => name, rows => rows.collect::<Vec<_>>(), cards => cards.collect::<Vec<_>>(),
            since => format!("{}-{}", app.epoch, subscription.number),
        };
        app.pages.page(signed_in.language, StatusCode::OK, template, context)
    }
}

/// `GET /`: the person's first page.
pub(super) async fn first(State(app): State<App>, signed_in: SignedIn) -> Response {
    match () {
        () if signed_in.views.administrator => Redirect::to("/vms").into_response(),
        () if signed_in.views.user => Redirect::to("/home").into_response(),
        () => app.message(signed_in.language, &signed_in.frame(), StatusCode::OK, "nothing", None, None),
    }
}

/// `GET /vms`
pub(super) async fn list(State(app): State<App>, Administrator(signed_in): Administrator) -> Response {
    View::List.whole(&signed_in, &app)
}

/// `GET /home`
pub(super) async fn home(State(app): State<App>, signed_in: SignedIn) -> Response {
    if signed_in.views.user { View::Home.whole(&signed_in, &app) } else { not_found(&app, &signed_in) }
}
