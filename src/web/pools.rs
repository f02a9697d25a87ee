//! Pools: a person gets a VM of one, and gives it back; administrators see who has which. What follows from what is [`crate::assignment`], and the
//! writes are those of [`PoolHandle`].

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use axum::{
    Form,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use minijinja::context;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::{
    app::App,
    pages::value,
    rights::assigned_pool,
    signed_in::{Administer, Administrator, Allowed, AllowedPool, SignedIn, not_found},
    store::{Key, Store},
    why::Why,
};
use crate::{
    actions::pool::{PoolError, PoolHandle, member},
    api::{VirtualMachine, status::whole_seconds},
    assignment::{Assignee, Pool, Pools},
    ownership::WEB_MANAGER,
    people::{Person, Right, rights_in_pool},
    process::ErrorChain,
};

/// How long the watch may take to report what was written.
const NEWS: Duration = Duration::from_secs(5);

fn handle(app: &App, namespace: &str) -> PoolHandle {
    PoolHandle {
        client: app.client.clone(),
        namespace: namespace.to_owned(),
        field_manager: WEB_MANAGER.into(),
        clock: Timestamp::now,
    }
}

/// The pools in which the person has a right, each with that one of her VMs that is from it.
pub(super) struct Offers {
    pools: BTreeSet<Key>,
    own: BTreeMap<Key, Key>,
}

impl Offers {
    /// With the VMs as they are.
    pub fn of<'a>(
        signed_in: &SignedIn,
        store: &Store,
        vms: impl Iterator<Item = (&'a Key, &'a VirtualMachine)>,
    ) -> Self {
        let mut offers = Self { pools: BTreeSet::new(), own: BTreeMap::new() };
        if signed_in.views.user {
            let pools = store.pools().into_iter();
            offers.pools = pools
                .filter(|(_, pool)| !rights_in_pool(&signed_in.person, pool).is_empty())
                .map(|(key, _)| key)
                .collect();
            vms.for_each(|(key, vm)| offers.change(&signed_in.person, key, Some(vm)));
        }
        offers
    }

    /// A VM has changed. One that is being deleted is nobody's.
    pub fn change(&mut self, person: &Person, key: &Key, vm: Option<&VirtualMachine>) {
        let vm = vm.filter(|vm| vm.metadata.deletion_timestamp.is_none());
        match vm.and_then(|vm| assigned_pool(person, vm)) {
            Some(pool) => drop(self.own.insert(key.clone(), (key.0.clone(), pool.to_owned()))),
            None => drop(self.own.remove(key)),
        }
    }

    /// The pools of which she has no VM.
    pub fn open(&self) -> BTreeSet<Key> {
        let taken: BTreeSet<&Key> = self.own.values().collect();
        self.pools.iter().filter(|pool| !taken.contains(pool)).cloned().collect()
    }
}

/// The name of a pool's card on a page.
pub(super) fn card_id((namespace, name): &Key) -> String {
    format!("pool:{namespace}/{name}")
}

/// The card of a pool of which the person has no VM.
pub(super) fn card(signed_in: &SignedIn, (namespace, name): &Key, app: &App) -> String {
    app.pages.part_or_nothing(signed_in.language, "pool-card.html", context! { namespace => namespace, name => name })
}

/// `POST /pools/NAMESPACE/NAME/start`: the person gets a VM of the pool, and is led to its console.
pub(super) async fn start(State(app): State<App>, allowed: AllowedPool) -> Response {
    let AllowedPool { signed_in, key, rights } = &allowed;
    let who = Assignee { user: signed_in.person.user.clone(), rights: rights.clone() };
    // At once: she has it also if it is not started then.
    let note = |vm: &VirtualMachine| app.audit.assigned(&who.user, vm, &key.1);
    let assigned = match handle(&app, &key.0).assign_noting(&key.1, &who, note).await {
        Ok(assigned) => assigned,
        Err(error) => return failed(&app, signed_in, key, &error, "/home"),
    };
    if assigned.is_started && !assigned.is_new {
        note(&assigned.vm);
    }
    let vm = (key.0.clone(), assigned.vm.name_any());
    // The next page asks the store, which may not have heard of it yet.
    let is_known = |vm: &VirtualMachine| assigned_pool(&signed_in.person, vm) == Some(&key.1);
    let _ = timeout(NEWS, app.store.until(&vm, is_known)).await;
    match rights.contains(Right::AccessConsole) {
        true => Redirect::to(&format!("/vms/{}/{}/console", vm.0, vm.1)).into_response(),
        false => Redirect::to("/home").into_response(),
    }
}

/// `POST /pools/NAMESPACE/NAME/release`: the person gives her VM back.
pub(super) async fn release(State(app): State<App>, allowed: AllowedPool) -> Response {
    let AllowedPool { signed_in, key, .. } = &allowed;
    let user = &signed_in.person.user;
    let note = |vm: &VirtualMachine| app.audit.released(user, vm, user);
    match handle(&app, &key.0).release_noting(&key.1, user, None, note).await {
        Ok(_) => Redirect::to("/home").into_response(),
        Err(error) => failed(&app, signed_in, key, &error, "/home"),
    }
}

/// From whom a VM is taken: as the page says it, on which it may be somebody else's by now.
#[derive(Deserialize)]
pub(super) struct Holder {
    #[serde(default)]
    user: String,
}

/// `POST /vms/NAMESPACE/NAME/release`: an administrator takes the VM from the user who has it.
pub(super) async fn unassign(
    State(app): State<App>,
    allowed: Allowed<Administer>,
    Form(Holder { user }): Form<Holder>,
) -> Response {
    let Allowed { signed_in, key, .. } = &allowed;
    match handle(&app, &key.0).take_back(&key.1, &user).await {
        Ok(released) => {
            if let Some(vm) = released {
                app.audit.released(&signed_in.person.user, &vm, &user);
            }
            Redirect::to("/pools").into_response()
        }
        Err(error) => failed(&app, signed_in, key, &error, "/pools"),
    }
}

fn failed(app: &App, signed_in: &SignedIn, key: &Key, error: &PoolError, back: &str) -> Response {
    if matches!(error, PoolError::NoPool { .. } | PoolError::NoVm { .. }) {
        return not_found(app, signed_in);
    }
    if let Some(why) = Why::pool(&key.1, error) {
        return app.refusal(signed_in.language, &signed_in.frame(), &why, back);
    }
    let error = ErrorChain(error);
    tracing::warn!(namespace = key.0, pool = key.1, %error, "the web interface could not assign or release a VM");
    app.message(signed_in.language, &signed_in.frame(), StatusCode::BAD_GATEWAY, "failed", None, Some(back))
}

/// A pool on the administrators' page.
#[derive(Serialize)]
struct Shown {
    namespace: String,
    name: String,
    retention: String,
    /// How many VMs the manager makes for it.
    wanted: Option<u32>,
    /// Why the retention can't be read.
    problem: Option<String>,
    members: Vec<Square>,
}

/// A VM of a pool.
#[derive(Serialize)]
struct Square {
    id: String,
    name: String,
    /// `free`, `warm` (free, and its guest runs), `renewing` (nobody gets it before it is replaced), `assigned`, `expired`, or `other` (it is assigned from another pool).
    tone: &'static str,
    user: Option<String>,
    last_used: Option<String>,
    kept_until: Option<String>,
    is_connected: bool,
}

/// `GET /pools`
pub(super) async fn page(State(app): State<App>, Administrator(signed_in): Administrator) -> Response {
    let (now, vms) = (Timestamp::now(), app.store.subscribe());
    let pools: Vec<Shown> = app
        .store
        .pools()
        .into_iter()
        .map(|((namespace, name), spec)| {
            let pool = Pool::of(&name, None, &spec);
            let problem = pool.retention.as_ref().err().map(ToString::to_string);
            let pools = Pools::from([(name.clone(), pool)]);
            let own = vms.vms.iter().filter(|(key, ..)| key.0 == namespace);
            let members = own.filter_map(|(_, vm, _)| square(vm, &name, &pools, now)).collect();
            let (retention, wanted) = (spec.retention.clone(), spec.replicas);
            Shown { namespace, name, retention, wanted, problem, members }
        })
        .collect();
    let context = context! {
        frame => value(signed_in.frame()), view => "pools", pools => value(pools), since => format!("{}-{}", app.epoch, vms.number),
    };
    app.pages.page(signed_in.language, StatusCode::OK, "pools.html", context)
}

/// The VM, if it belongs to the pool or is assigned from it.
fn square(vm: &VirtualMachine, pool: &str, pools: &Pools, now: Timestamp) -> Option<Square> {
    let member = member(vm, now);
    let held = member.held.as_ref();
    let is_from = held.is_some_and(|held| held.pool.as_deref() == Some(pool));
    if member.is_deleted || !(member.pools.contains(pool) || is_from) {
        return None;
    }
    let until = member.taken_from(pools).filter(|_| is_from);
    let tone = match held {
        None if !member.is_clean(pools) => "renewing",
        None if member.runs => "warm",
        None => "free",
        Some(_) if !is_from => "other",
        Some(_) if until.is_some_and(|until| until <= now) => "expired",
        Some(_) => "assigned",
    };
    let held = held.filter(|_| is_from);
    Some(Square {
        id: format!("{}/{}", vm.metadata.namespace.as_deref().unwrap_or_default(), member.name),
        tone,
        user: held.map(|held| held.user.clone()),
        last_used: held.and_then(|held| held.last_used).map(whole_seconds),
        kept_until: until.map(whole_seconds),
        is_connected: member.console.is_connected,
        name: member.name,
    })
}

/// Whether the VM is on the administrators' page of pools.
pub(super) fn is_of_pool(vm: &VirtualMachine) -> bool {
    !vm.spec.pools.is_empty() || vm.status.as_ref().is_some_and(|status| status.pools.assignment.is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        api::VmPoolSpec,
        test_support::{noon, vm},
    };

    #[test]
    fn the_pool_of_a_vm_that_is_being_deleted_is_open_again() {
        let (ann, desks) =
            (Person { user: "ann".into(), ..Person::default() }, ("orchard".to_owned(), "desks".to_owned()));
        let key = ("orchard".to_owned(), "apple".to_owned());
        let mut offers = Offers { pools: [desks.clone()].into(), own: BTreeMap::new() };
        let assigned = |vm: &mut Value| vm["status"] = json!({ "assignment": { "pool": "desks", "user": "ann" } });
        offers.change(&ann, &key, Some(&vm(assigned)));
        assert!(offers.open().is_empty());
        let deleted = vm(|vm| {
            assigned(vm);
            vm["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
        offers.change(&ann, &key, Some(&deleted));
        assert_eq!(offers.open(), [desks].into());
    }

    #[test]
    fn a_square_says_how_a_vm_of_the_pool_is() {
        let spec: VmPoolSpec = serde_json::from_value(json!({ "retention": "PT1H", "permissions": [] })).unwrap();
        let pools = Pools::from([("desks".to_owned(), Pool::of("desks", None, &spec))]);
        let tone = |edit: &dyn Fn(&mut Value)| {
            let vm = vm(|vm| {
                vm["spec"]["pools"] = json!(["desks"]);
                edit(vm);
            });
            square(&vm, "desks", &pools, noon()).map(|square| (square.tone, square.user))
        };
        let held = |pool: &str, hours: i64| {
            let used = whole_seconds(noon() - k8s_openapi::jiff::SignedDuration::from_hours(hours));
            let pool = pool.to_owned();
            move |vm: &mut Value| {
                vm["status"] = json!({ "assignment": { "pool": pool, "user": "ann", "lastUsed": used } });
            }
        };
        assert_eq!(tone(&|_| {}), Some(("free", None)));
        let running = json!({ "type": "Running", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" });
        assert_eq!(tone(&|vm| vm["status"] = json!({ "conditions": [running] })), Some(("warm", None)));
        assert_eq!(tone(&held("desks", 0)), Some(("assigned", Some("ann".into()))));
        assert_eq!(tone(&held("desks", 2)), Some(("expired", Some("ann".into()))));
        assert_eq!(tone(&held("others", 0)), Some(("other", None)));
        assert_eq!(tone(&|vm| vm["spec"]["pools"] = json!(["others"])), None);
    }
}
