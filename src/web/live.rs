//! The stream of events (<https://html.spec.whatwg.org/multipage/server-sent-events.html>) that keeps a page as the cluster is.
//!
//! | event | data | what the page does |
//! |---|---|---|
//! | `vms` | the VMs that it may show | removes the others |
//! | `vm` | a VM with its part of the page; for the page of one VM: what it waits for, and whether the console can be opened | puts it in the place of the former part |
//! | `gone` | a VM that it has shown | removes it |
//! | `reload` | | is loaded again: rights have changed, the session has ended, or the stream was too slow |
//!
//! | `figures` | what the guest of the one VM uses | draws it |
//!
//! The card of a pool on the page of a person's own VMs is treated as a VM with the name `pool:NAMESPACE/NAME`.
//!
//! The name of a VM is sent only to who may see it. A stream ends with its session.

use std::{
    collections::{BTreeSet, HashSet},
    convert::Infallible,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use axum::{
    extract::{Query, State},
    http::HeaderMap,
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{
    broadcast::error::RecvError,
    mpsc::{self, error::SendError},
};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    app::App,
    console, figures,
    pools::{Offers, card, card_id, is_of_pool},
    rights::rights,
    signed_in::{Administrator, Allowed, See, SignedIn, not_found},
    store::{Collection, Key, Subscription, View},
};
use crate::{api::VirtualMachine, people::Rights, process::signals::terminated};

/// How many events wait for a slow reader.
const WAITING: usize = 16;
/// After this time without an event a comment is sent, so that proxies keep the stream.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// When a browser whose stream has ended asks again, in milliseconds: from the first on, at a time of its own, so that not all come back at once.
const AGAIN: (u64, u64) = (1000, 4000);

/// What a page shows.
enum Shown {
    /// VMs.
    Of(View),
    /// The VMs of pools.
    Pools,
    /// One VM.
    One(Key),
}

/// From which number on, and whether with figures.
#[derive(Deserialize)]
pub(super) struct Since {
    since: Option<String>,
    #[serde(default)]
    figures: bool,
}

/// The number of the last collection that the page has. A stream that was interrupted goes on where it was. `None`: a page of another process.
fn number(headers: &HeaderMap, Query(Since { since, .. }): &Query<Since>, epoch: u32) -> Option<u64> {
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let (of, number) = last.or(since.as_deref())?.split_once('-')?;
    number.parse().ok().filter(|_| of.parse() == Ok(epoch))
}

/// `GET /live/list`
pub(super) async fn list(
    State(app): State<App>,
    Administrator(signed_in): Administrator,
    headers: HeaderMap,
    since: Query<Since>,
) -> Response {
    start(app, signed_in, Shown::Of(View::List), &headers, since)
}

/// `GET /live/home`
pub(super) async fn home(
    State(app): State<App>,
    signed_in: SignedIn,
    headers: HeaderMap,
    since: Query<Since>,
) -> Response {
    if !signed_in.views.user {
        return not_found(&app, &signed_in);
    }
    start(app, signed_in, Shown::Of(View::Home), &headers, since)
}

/// `GET /live/pools`
pub(super) async fn pools(
    State(app): State<App>,
    Administrator(signed_in): Administrator,
    headers: HeaderMap,
    since: Query<Since>,
) -> Response {
    start(app, signed_in, Shown::Pools, &headers, since)
}

/// `GET /live/vm/NAMESPACE/NAME`
pub(super) async fn one(
    State(app): State<App>,
    allowed: Allowed<See>,
    headers: HeaderMap,
    since: Query<Since>,
) -> Response {
    start(app, allowed.signed_in, Shown::One(allowed.key), &headers, since)
}

fn start(app: App, signed_in: SignedIn, shown: Shown, headers: &HeaderMap, since: Query<Since>) -> Response {
    let (wants_figures, since) = (since.figures, number(headers, &since, app.epoch));
    let (sender, receiver) = mpsc::channel(WAITING);
    // It ends when the browser has closed the stream: then nothing can be sent.
    tokio::spawn(async move {
        let (ending, sessions, session) = (app.ending.clone(), app.sessions.clone(), signed_in.session.clone());
        let user = signed_in.person.user.clone();
        let of = if let Shown::One(key) = &shown { Some(key.clone()).filter(|_| wants_figures) } else { None };
        let (of_app, person) = (app.clone(), signed_in.clone());
        let figures = async {
            match of {
                Some(key) => figures::send(&of_app, &person, &key, &sender).await,
                None => std::future::pending().await,
            }
        };
        let page = Page { app, signed_in, shown, names: HashSet::new(), events: sender.clone() };
        let follow = pin!(page.follow(since));
        tokio::select! {
            _ = follow => {}
            // She may not see the VM any more.
            () = figures => {}
            () = sessions.ended(&session, &user) => drop(sender.send(Event::default().event("reload").data("")).await),
            () = terminated(ending) => {}
            () = sender.closed() => {}
        }
    });
    let events = ReceiverStream::new(receiver).map(Ok::<_, Infallible>);
    ([("x-accel-buffering", "no")], Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))).into_response()
}

/// A page that is open.
struct Page {
    app: App,
    signed_in: SignedIn,
    shown: Shown,
    /// The VMs that the page has shown.
    names: HashSet<Arc<Key>>,
    events: mpsc::Sender<Event>,
}

impl Page {
    /// Sends what changes. Returns when the browser does not listen any more, or is to load the page again.
    async fn follow(mut self, since: Option<u64>) -> Result<(), SendError<Event>> {
        let Subscription { vms, number, mut next } = self.app.store.subscribe();
        let is_home = matches!(self.shown, Shown::Of(View::Home));
        let own = vms.iter().filter(|_| is_home).map(|(key, vm, _)| (&**key, &**vm));
        let mut offers = Offers::of(&self.signed_in, &self.app.store, own);
        let mut cards = if is_home { offers.open() } else { BTreeSet::new() };
        let seen: Vec<_> = vms
            .into_iter()
            .filter_map(|(key, vm, changed)| Some((self.rights(&key, &vm)?, key, vm, changed)))
            .collect();
        self.names.extend(seen.iter().map(|(_, key, ..)| key.clone()));
        let ids = seen.iter().map(|(_, key, ..)| id(key)).chain(cards.iter().map(card_id));
        let event = self.event(number, "vms", &json!(ids.collect::<Vec<_>>())).retry(again());
        self.events.send(event).await?;
        for pool in &cards {
            self.put_card(number, pool).await?;
        }
        for (rights, key, vm, changed) in seen {
            if since.is_none_or(|since| changed > since) {
                self.put(number, &rights, &key, &vm, None).await?;
            }
        }
        loop {
            let collection = match next.recv().await {
                Ok(collection) => collection,
                Err(RecvError::Closed) => return Ok(()),
                Err(RecvError::Lagged(_)) => return self.send(number, "reload", &json!(null)).await,
            };
            if collection.have_rights_changed {
                return self.send(collection.number, "reload", &json!(null)).await;
            }
            for (key, vm) in &collection.vms {
                let seen = vm.as_ref().and_then(|vm| Some((self.rights(key, vm)?, vm)));
                if let Some((rights, vm)) = seen {
                    self.names.insert(key.clone());
                    self.put(collection.number, &rights, key, vm, Some(&collection)).await?;
                } else if self.names.remove(key) {
                    self.send(collection.number, "gone", &json!(id(key))).await?;
                }
                offers.change(&self.signed_in.person, key, vm.as_deref());
            }
            let open = if is_home { offers.open() } else { BTreeSet::new() };
            for pool in cards.difference(&open) {
                self.send(collection.number, "gone", &json!(card_id(pool))).await?;
            }
            for pool in open.difference(&cards) {
                self.put_card(collection.number, pool).await?;
            }
            cards = open;
        }
    }

    async fn put_card(&self, number: u64, pool: &Key) -> Result<(), SendError<Event>> {
        let html = card(&self.signed_in, pool, &self.app);
        self.send(number, "vm", &json!({ "id": card_id(pool), "html": html })).await
    }

    /// What the person may do with the VM on this page. `None`: nothing, so she does not see it.
    fn rights(&self, key: &Key, vm: &VirtualMachine) -> Option<Rights> {
        let (signed_in, namespace) = (&self.signed_in, &key.0);
        let rights = match &self.shown {
            Shown::Of(view) => view.rights(signed_in, namespace, vm, &self.app),
            Shown::One(one) if one == key => rights(&signed_in.person, signed_in.views, namespace, vm, &self.app.store),
            Shown::Pools if self.signed_in.views.administrator && is_of_pool(vm) => Rights::all(),
            Shown::Pools | Shown::One(_) => return None,
        };
        Some(rights).filter(|rights| !rights.is_empty())
    }

    async fn put(
        &self,
        number: u64,
        rights: &Rights,
        key: &Key,
        vm: &VirtualMachine,
        collection: Option<&Collection>,
    ) -> Result<(), SendError<Event>> {
        let data = match &self.shown {
            Shown::Of(view) => {
                let render = || view.part(&self.signed_in, rights, vm, &self.app);
                let html = match collection {
                    Some(collection) => {
                        let look = view.look(&self.signed_in, rights, &key.0, vm, &self.app);
                        collection.rendered(look, key, render)
                    }
                    None => render().into(),
                };
                json!({ "id": id(key), "html": html })
            }
            Shown::Pools => json!({ "id": id(key) }),
            Shown::One(_) => {
                let (html, open) = console::waiting(&self.signed_in, rights, vm, &self.app);
                json!({ "id": id(key), "html": html, "open": open })
            }
        };
        self.send(number, "vm", &data).await
    }

    fn event(&self, number: u64, name: &str, data: &serde_json::Value) -> Event {
        Event::default().id(format!("{}-{number}", self.app.epoch)).event(name).data(data.to_string())
    }

    async fn send(&self, number: u64, name: &str, data: &serde_json::Value) -> Result<(), SendError<Event>> {
        self.events.send(self.event(number, name, data)).await
    }
}

/// When a browser asks again.
fn again() -> Duration {
    let (least, span) = AGAIN;
    // Without random numbers they come back at once, and are served one after another.
    let mut number = [0; 8];
    let _ = getrandom::fill(&mut number);
    Duration::from_millis(least + u64::from_be_bytes(number) % span)
}

fn id((namespace, name): &Key) -> String {
    format!("{namespace}/{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_goes_on_from_the_number_of_its_page_or_of_its_last_event() {
        let number = |last: Option<&str>, since: Option<&str>| {
            let headers =
                last.map(|last| ("last-event-id".parse().unwrap(), last.parse().unwrap())).into_iter().collect();
            super::number(&headers, &Query(Since { since: since.map(str::to_owned), figures: false }), 7)
        };
        assert_eq!(number(None, Some("7-3")), Some(3));
        assert_eq!(number(Some("7-5"), Some("7-3")), Some(5));
        assert_eq!(number(None, Some("8-3")), None, "of another process");
        assert_eq!(number(Some("8-5"), Some("7-3")), None);
        for wrong in ["", "7", "7-", "-3", "7-x"] {
            assert_eq!(number(None, Some(wrong)), None, "{wrong}");
        }
        assert_eq!(number(None, None), None);
    }
}
