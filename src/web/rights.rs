//! What a person who is signed in may do with a VM.

use std::net::IpAddr;

use super::{settings::Views, store::Store};
use crate::{
    api::{
        VirtualMachine,
        conditions::{CONSOLE_CONNECTED, is_true},
    },
    people::{ConsoleUse, Person, Rights, may_open_console, rights_in_pool, rights_of_vm},
};

/// What the person may do with the VM. Without a right the VM does not exist for her.
pub(super) fn rights(person: &Person, views: Views, namespace: &str, vm: &VirtualMachine, store: &Store) -> Rights {
    if views.administrator { Rights::all() } else { own_rights(person, views, namespace, vm, store) }
}

/// The same for the page of her own VMs, where an administrator is a user as others are.
pub(super) fn own_rights(person: &Person, views: Views, namespace: &str, vm: &VirtualMachine, store: &Store) -> Rights {
    if !views.user {
        return Rights::default();
    }
    match assigned_pool(person, vm) {
        Some(pool) => store.pool(namespace, pool).map(|pool| rights_in_pool(person, &pool)).unwrap_or_default(),
        None => rights_of_vm(person, &vm.spec),
    }
}

/// The pool from which the person has the VM.
pub(super) fn assigned_pool<'a>(person: &Person, vm: &'a VirtualMachine) -> Option<&'a str> {
    let assignment = vm.status.as_ref()?.pools.assignment.as_ref()?;
    if assignment.user.as_deref() == Some(person.user.as_str()) { assignment.pool.as_deref() } else { None }
}

/// The user who is at the console: the viewer's of the relay, else the one for whom the display's password was made last.
pub(super) fn console_user(vm: &VirtualMachine) -> Option<&str> {
    let status = vm.status.as_ref()?;
    // Whoever did not come through the relay is known by her address.
    let viewer = status.runner.console_client.as_deref().filter(|client| client.parse::<IpAddr>().is_err());
    viewer.or(status.display.console_user.as_deref())
}

/// Whether the person may open the console now, if the VM's guest runs.
pub(super) fn may_open(person: &Person, rights: &Rights, namespace: &str, vm: &VirtualMachine, store: &Store) -> bool {
    let Some(status) = &vm.status else { return false };
    let pool =
        status.pools.assignment.as_ref().and_then(|assignment| store.pool(namespace, assignment.pool.as_deref()?));
    let console = ConsoleUse {
        user: console_user(vm),
        is_connected: is_true(&status.conditions, CONSOLE_CONNECTED),
        login_wanted: vm.spec.vm.display.logged_in_user.is_some() || pool.is_some_and(|pool| pool.login_on_assignment),
        logged_in: status.runner.logged_in_user.as_deref(),
    };
    may_open_console(person, rights, &console)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::{people::Right, test_support::vm};

    const USER: Views = Views { administrator: false, user: true };

    fn ann() -> Person {
        Person { user: "ann".into(), roles: ["staff".to_owned()].into() }
    }

    fn has(views: Views, edit: impl FnOnce(&mut Value), store: &Store) -> Vec<Right> {
        let rights = rights(&ann(), views, "orchard", &vm(edit), store);
        Right::ALL.into_iter().filter(|right| rights.contains(*right)).collect()
    }

    #[test]
    fn a_view_gives_all_rights_or_those_of_permissions_or_none() {
        let store = Store::new(0);
        let permit = |vm: &mut Value| vm["spec"]["permissions"] = json!([{ "role": "staff", "may": ["start"] }]);
        assert_eq!(has(Views { administrator: true, user: false }, |_| {}, &store), Right::ALL);
        assert_eq!(has(USER, permit, &store), [Right::Start]);
        assert_eq!(has(USER, |_| {}, &store), []);
        assert_eq!(has(Views::default(), permit, &store), []);
        let both = Views { administrator: true, user: true };
        assert!(own_rights(&ann(), both, "orchard", &vm(|_| {}), &store).is_empty());
    }

    #[test]
    fn a_vm_that_is_assigned_to_her_has_the_rights_of_its_pool_alone() {
        let store = Store::new(0);
        let of_vm = json!([{ "user": "ann", "may": ["*"] }]);
        let assigned = |user: &str| {
            let (user, of_vm) = (user.to_owned(), of_vm.clone());
            move |vm: &mut Value| {
                vm["spec"]["permissions"] = of_vm;
                vm["status"] = json!({ "assignment": { "pool": "desks", "user": user } });
            }
        };
        assert_eq!(has(USER, assigned("ann"), &store), [], "the pool does not exist");
        let pool = json!({ "permissions": [{ "user": "ann", "may": ["stop"] }] });
        let pool: Arc<crate::api::VmPoolSpec> = Arc::new(serde_json::from_value(pool).unwrap());
        store.set_pool(("meadow".into(), "desks".into()), Some(pool.clone()));
        assert_eq!(has(USER, assigned("ann"), &store), [], "a pool of another namespace");
        store.set_pool(("orchard".into(), "desks".into()), Some(pool));
        assert_eq!(has(USER, assigned("ann"), &store), [Right::Stop]);
        assert_eq!(has(USER, assigned("bob"), &store), Right::ALL, "assigned to somebody else: those of the VM");
    }

    #[test]
    fn the_console_of_a_vm_that_logs_its_user_in_waits_for_the_login() {
        let store = Store::new(0);
        let opens = |edit: &dyn Fn(&mut Value)| {
            let vm = vm(|vm| {
                vm["status"] = json!({ "phase": "Running" });
                edit(vm);
            });
            let access = rights_of_vm(
                &ann(),
                &crate::test_support::vm(|vm| {
                    vm["spec"]["permissions"] = json!([{ "user": "ann", "may": ["accessConsole"] }]);
                })
                .spec,
            );
            may_open(&ann(), &access, "orchard", &vm, &store)
        };
        assert!(opens(&|_| {}));
        let wants = |vm: &mut Value| vm["spec"]["vm"]["display"] = json!({ "loggedInUser": "ann" });
        assert!(!opens(&wants));
        assert!(opens(&|vm| {
            wants(vm);
            vm["status"]["loggedInUser"] = json!("ann");
        }));
        let connected = json!([{ "type": "ConsoleConnected", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" }]);
        let used = |client: &'static str, user: &'static str| {
            let connected = connected.clone();
            move |vm: &mut Value| {
                vm["status"]["consoleClient"] = json!(client);
                vm["status"]["consoleUser"] = json!(user);
                vm["status"]["conditions"] = connected.clone();
            }
        };
        assert!(opens(&used("ann", "bob")) && !opens(&used("bob", "ann")), "through the relay");
        assert!(
            opens(&used("192.0.2.1", "ann"))
                && !opens(&used("192.0.2.1", "bob"))
                && !opens(&used("2001:db8::1", "bob"))
        );
        assert!(!opens(&|vm| {
            vm["status"]["consoleUser"] = json!("bob");
            vm["status"]["conditions"] = json!([{ "type": "ConsoleConnected", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" }]);
        }));
    }
}
