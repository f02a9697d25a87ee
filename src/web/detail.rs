//! The page of one VM: why it is not as its spec wants it, its figures, its events.

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::join;
use k8s_openapi::{
    api::core::v1::{Event, Pod},
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams},
};
use minijinja::context;
use serde::Serialize;
use serde_json::Value;

use super::{
    app::App,
    happenings::{Reader, happenings},
    pages::value,
    relayed,
    rights::may_open,
    rows::{Onlooker, Row},
    signed_in::{Allowed, OpenConsole, See, not_found},
    store::Key,
};
use crate::{
    api::{PendingChange, VirtualMachine},
    explain::{self, Facts},
    object,
    observed::Object,
};

/// The most events that are read.
const READ: u32 = 200;

/// A change that the next start brings.
#[derive(Serialize)]
struct Change {
    path: String,
    current: Option<String>,
    wanted: Option<String>,
}

impl Change {
    /// Administrators also see the values.
    fn of(change: &PendingChange, is_administrator: bool) -> Self {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let shown = |value: &Option<Value>| value.as_ref().filter(|_| is_administrator).map(text);
        Self { path: change.path.clone(), current: shown(&change.current), wanted: shown(&change.wanted) }
    }
}

/// `GET /vms/NAMESPACE/NAME`
pub(super) async fn page(State(app): State<App>, allowed: Allowed<See>) -> Response {
    let Allowed { signed_in, key, rights, .. } = &allowed;
    // Before the VM is read, so that the stream of the page begins not too late.
    let number = app.store.number();
    let Some(vm) = app.store.vm(key) else { return not_found(&app, signed_in) };
    let (facts, is_read) = facts(&app, key, &vm).await;
    let uid = vm.uid().unwrap_or_default();
    let reader = Reader { user: &signed_in.person.user, is_administrator: signed_in.views.administrator, vm: &uid };
    let events = is_read.then(|| happenings(&facts.events, reader));
    let onlooker = Onlooker { person: &signed_in.person, rights, is_administrator: signed_in.views.administrator };
    let row = Row::of(&vm, onlooker, &app.store, Timestamp::now());
    let changes = vm.status.iter().flat_map(|status| &status.pending_changes);
    let pending: Vec<Change> = changes.map(|change| Change::of(change, signed_in.views.administrator)).collect();
    let devices = vm.status.as_ref().map(|status| &status.runner.devices);
    let templates = vm.status.as_ref().and_then(|status| status.templates.as_ref());
    let context = context! {
        frame => value(signed_in.frame()), view => "detail", vm => value(&row),
        explanation => value(explain::explain(&facts)), pending => value(pending), devices => value(devices),
        templates => value(templates),
        events => events.map(value), since => format!("{}-{number}", app.epoch),
    };
    app.pages.page(signed_in.language, StatusCode::OK, "detail.html", context)
}

/// `GET /live/vm/NAMESPACE/NAME/picture`: a picture of the screen, for who can open the console now; else nothing. Below `/live/`, because pages ask for it by
/// themselves: that is no use of the session.
pub(super) async fn picture(State(app): State<App>, allowed: Allowed<OpenConsole>) -> Response {
    let Allowed { signed_in, key, rights, .. } = &allowed;
    let vm = app.store.vm(key).filter(|vm| may_open(&signed_in.person, rights, &key.0, vm, &app.store));
    let picture = match vm {
        Some(vm) => app.pictures.of(key, relayed::picture(&app, &vm)).await,
        None => None,
    };
    // That took a while.
    let picture = picture.filter(|_| signed_in.goes_on(&app) && signed_in.may_open(&app, key));
    match picture {
        Some(picture) => ([(header::CONTENT_TYPE, "image/png")], picture).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    }
}

/// What is known of the VM, its Pod and their events, and whether the events could be read. Nothing of other objects is read, because a person need not
/// know of them.
async fn facts(app: &App, key: &Key, vm: &VirtualMachine) -> (Facts, bool) {
    let (namespace, name) = key;
    let pods: Api<DynamicObject> = Api::namespaced_with(app.client.clone(), namespace, &ApiResource::erase::<Pod>(&()));
    let events: Api<Event> = Api::namespaced(app.client.clone(), namespace);
    let about = ListParams::default().fields(&format!("involvedObject.name={name}")).limit(READ);
    let (pod, events) = join!(pods.get_opt(name), events.list(&about));
    let uid = vm.uid().unwrap_or_default();
    let pod = pod.ok().map(|pod| pod.map(|pod| Object::trim(&object::pods(), pod)).filter(|pod| pod.is_of(vm)));
    let pod_uid = pod.as_ref().and_then(Option::as_ref).map(|pod| pod.uid.clone());
    let is_about = |event: &Event| {
        let about = event.involved_object.uid.as_ref();
        about.is_some() && (about == Some(&uid) || about == pod_uid.as_ref())
    };
    let events = events.ok().map(|list| list.items.into_iter().filter(is_about).collect::<Vec<_>>());
    let is_read = events.is_some();
    (Facts { events: events.unwrap_or_default(), ..Facts::new(vm.clone(), pod, Timestamp::now()) }, is_read)
}
