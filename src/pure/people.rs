//! What a person may do with a VM or a pool. The web interface asks it for every page and action, the pools for every assignment.
//!
//! ```text
//!  user, roles ─────────────────────────────┐
//!  a VM's spec.permissions ─┐               ├─▶ Rights
//!  a pool's permissions ────┴─ which count ─┘
//! ```
//!
//! | a person looks at | whose permissions count |
//! |---|---|
//! | a VM | those of the VM |
//! | a pool, and the VM that is assigned to her from it | those of the pool alone |
//!
//! Permissions for the user and for all of her roles are united. `*` is everything, and `takeConsole` contains `accessConsole`. Who has at
//! least one right sees the VM or the pool; for everybody else it does not exist.

use std::collections::BTreeSet;

use crate::api::{VirtualMachineSpec, VmAction, VmPermission, VmPoolSpec, pool::PoolPermission};

/// A person, as whoever signed her in says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Person {
    /// The user's name.
    pub user: String,
    /// The roles that she has.
    pub roles: BTreeSet<String>,
}

/// One thing that a person may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Right {
    /// Start the VM. In a pool it also counts for a VM that is assigned already; the assignment itself starts the VM without it.
    Start,
    /// Stop the VM.
    Stop,
    /// Reset the guest.
    Reset,
    /// Use the console when nobody else does.
    AccessConsole,
    /// Use the console at any time; whoever uses it loses it.
    TakeConsole,
}

impl Right {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Start, Self::Stop, Self::Reset, Self::AccessConsole, Self::TakeConsole];
}

/// What a person may do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rights(BTreeSet<Right>);

impl Rights {
    /// Everything: what an administrator may do.
    pub fn all() -> Self {
        Self(Right::ALL.into())
    }

    /// Whether this is one of them.
    pub fn contains(&self, right: Right) -> bool {
        self.0.contains(&right)
    }

    /// Whether there is none. Then the VM or pool is not shown either.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn grant(&mut self, action: VmAction) {
        match action {
            VmAction::Start => self.0.extend([Right::Start]),
            VmAction::Stop => self.0.extend([Right::Stop]),
            VmAction::Reset => self.0.extend([Right::Reset]),
            VmAction::AccessConsole => self.0.extend([Right::AccessConsole]),
            VmAction::TakeConsole => self.0.extend([Right::AccessConsole, Right::TakeConsole]),
            VmAction::Everything => self.0.extend(Right::ALL),
        }
    }
}

/// What the person may do with the VM because of the VM's own permissions.
pub fn rights_of_vm(person: &Person, vm: &VirtualMachineSpec) -> Rights {
    let granted = vm.permissions.iter().map(|VmPermission { user, role, may }| (user, role, may.as_slice()));
    rights(person, granted)
}

/// What the person may do with the pool, and with the VM that is assigned to her from it. A permission without `may` is `accessConsole`.
pub fn rights_in_pool(person: &Person, pool: &VmPoolSpec) -> Rights {
    let default = &[VmAction::AccessConsole];
    let granted = pool
        .permissions
        .iter()
        .map(|PoolPermission { user, role, may }| (user, role, may.as_deref().unwrap_or(default)));
    rights(person, granted)
}

fn rights<'a>(
    person: &Person,
    permissions: impl Iterator<Item = (&'a Option<String>, &'a Option<String>, &'a [VmAction])>,
) -> Rights {
    let mut rights = Rights::default();
    for (user, role, may) in permissions {
        let names = |name: &Option<String>, is: &dyn Fn(&String) -> bool| name.as_ref().is_some_and(is);
        if names(user, &|user| *user == person.user) || names(role, &|role| person.roles.contains(role)) {
            may.iter().for_each(|action| rights.grant(*action));
        }
    }
    rights
}

/// Who uses a VM's console, and who is logged in, as its status says.
#[derive(Clone, Debug, Default)]
pub struct ConsoleUse<'a> {
    /// The user who is connected, or for whom a password was made last.
    pub user: Option<&'a str>,
    /// Whether a viewer is connected.
    pub is_connected: bool,
    /// Whether the VM is to have a user logged in: `display.loggedInUser`, or an assignment from a pool with `loginOnAssignment`.
    pub login_wanted: bool,
    /// The user who is logged in in the guest.
    pub logged_in: Option<&'a str>,
}

/// Whether the person may open the console of a running VM now. Who may take it may always. Anybody else needs the right to access it, must
/// not find another user at it, and must be the one who is logged in, if somebody is to be.
pub fn may_open_console(person: &Person, rights: &Rights, console: &ConsoleUse) -> bool {
    let is = |user: Option<&str>| user == Some(person.user.as_str());
    let is_free = !console.is_connected || is(console.user);
    let is_logged_in = !console.login_wanted || is(console.logged_in);
    rights.contains(Right::TakeConsole) || rights.contains(Right::AccessConsole) && is_free && is_logged_in
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::vm;

    fn person(user: &str, roles: &[&str]) -> Person {
        Person { user: user.into(), roles: roles.iter().map(|role| (*role).to_owned()).collect() }
    }

    fn in_pool(person: &Person, permissions: Value) -> Rights {
        rights_in_pool(person, &serde_json::from_value(json!({ "permissions": permissions })).unwrap())
    }

    fn of_vm(person: &Person, permissions: &Value) -> Rights {
        rights_of_vm(person, &vm(|vm| vm["spec"]["permissions"] = permissions.clone()).spec)
    }

    #[test]
    fn permissions_of_the_user_and_of_all_roles_are_united() {
        let permissions = json!([
            { "user": "alice", "may": ["start"] },
            { "role": "staff", "may": ["takeConsole"] },
            { "role": "night", "may": ["stop", "reset"] },
            { "role": "nobody", "may": ["*"] },
            { "user": "bob", "may": ["*"] },
        ]);
        let alice = person("alice", &["staff", "alice"]);
        let expected = Rights([Right::Start, Right::AccessConsole, Right::TakeConsole].into());
        assert_eq!(of_vm(&alice, &permissions), expected);
        assert_eq!(in_pool(&alice, permissions.clone()), expected);
        assert_eq!(of_vm(&person("bob", &[]), &permissions), Rights::all());
        // A role of a user's name gives her nothing, nor does a user of a role's name.
        assert!(of_vm(&person("carol", &["alice", "bob"]), &permissions).is_empty());
        assert!(of_vm(&person("staff", &[]), &permissions).is_empty());
    }

    #[test]
    fn a_permission_that_does_not_say_what_it_allows_is_access_to_the_console_in_a_pool_and_nothing_in_a_vm() {
        let alice = person("alice", &[]);
        assert_eq!(in_pool(&alice, json!([{ "user": "alice" }])), Rights([Right::AccessConsole].into()));
        assert!(in_pool(&alice, json!([{ "user": "alice", "may": [] }])).is_empty());
        assert!(of_vm(&alice, &json!([{ "user": "alice" }])).is_empty());
    }

    #[test]
    fn the_console() {
        let (alice, access) = (person("alice", &[]), Rights([Right::AccessConsole].into()));
        let take = Rights([Right::AccessConsole, Right::TakeConsole].into());
        let opens = |rights: &Rights, user, is_connected, login_wanted, logged_in| {
            may_open_console(&alice, rights, &ConsoleUse { user, is_connected, login_wanted, logged_in })
        };
        assert!(opens(&access, None, false, false, None));
        assert!(opens(&access, Some("bob"), false, false, Some("bob")));
        assert!(!opens(&access, Some("bob"), true, false, None));
        assert!(!opens(&access, None, true, false, None));
        assert!(opens(&access, Some("alice"), true, false, None));
        assert!(!opens(&access, None, false, true, None));
        assert!(!opens(&access, None, false, true, Some("bob")));
        assert!(opens(&access, None, false, true, Some("alice")));
        assert!(opens(&take, Some("bob"), true, true, Some("bob")));
        assert!(!opens(&Rights([Right::Start, Right::Stop, Right::Reset].into()), None, false, false, None));
    }

    fn permissions() -> impl Strategy<Value = Value> {
        let who = prop_oneof![
            prop::sample::select(vec!["alice", "bob"]).prop_map(|user| ("user", user)),
            prop::sample::select(vec!["staff", "night"]).prop_map(|role| ("role", role)),
        ];
        let may = prop::sample::subsequence(vec!["start", "stop", "reset", "accessConsole", "takeConsole", "*"], 0..=6);
        prop::collection::vec((who, may).prop_map(|((kind, name), may)| json!({ kind: name, "may": may })), 0..6)
            .prop_map(Value::Array)
    }

    proptest! {
        /// A right comes from a permission that names the person: without those she has none, and one more never takes a right away.
        #[test]
        fn rights_come_from_permissions_alone(permissions in permissions(), more in permissions(), roles in prop::sample::subsequence(vec!["staff", "night"], 0..=2)) {
            let alice = person("alice", &roles);
            let own = |permission: &Value| permission["user"] == "alice" || roles.iter().any(|role| permission["role"] == *role);
            let rights = of_vm(&alice, &permissions);
            let foreign: Vec<Value> = permissions.as_array().unwrap().iter().filter(|permission| !own(permission)).cloned().collect();
            prop_assert!(of_vm(&alice, &json!(foreign)).is_empty());
            let both: Vec<Value> = permissions.as_array().unwrap().iter().chain(more.as_array().unwrap()).cloned().collect();
            prop_assert!(rights.0.is_subset(&of_vm(&alice, &json!(both)).0));
            prop_assert!(!rights.contains(Right::TakeConsole) || rights.contains(Right::AccessConsole));
            prop_assert_eq!(in_pool(&alice, permissions), rights);
        }
    }
}
