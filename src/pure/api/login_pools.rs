//! The pools that log users in: a VM that is assigned from a pool with `loginOnAssignment` has its user logged in.

use std::{collections::BTreeSet, sync::Arc};

use kube::{ResourceExt, core::DynamicObject};

use super::VirtualMachine;

/// The pools with `loginOnAssignment`, as namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoginPools(BTreeSet<(String, String)>);

impl LoginPools {
    /// Sets the user to log in, if the VM is assigned from such a pool. The assignment has precedence over the VM's spec, which says who
    /// is logged in otherwise.
    pub fn log_in(&self, vm: &mut Arc<VirtualMachine>) {
        if let Some(user) = self.user(vm) {
            Arc::make_mut(vm).spec.vm.display.logged_in_user = Some(user);
        }
    }

    /// The user to log in, if it is another one than that of the spec.
    fn user(&self, vm: &VirtualMachine) -> Option<String> {
        let assignment = vm.status.as_ref()?.pools.assignment.as_ref()?;
        let (pool, user) = (assignment.pool.clone()?, assignment.user.clone()?);
        let pool = (vm.namespace().unwrap_or_default(), pool);
        let is_other = vm.spec.vm.display.logged_in_user.as_ref() != Some(&user);
        (is_other && self.0.contains(&pool)).then_some(user)
    }

    /// Takes over what the API server says about a pool. Only this field of it is read, so that no other one can be in the way.
    pub fn observe(&mut self, pool: &DynamicObject) {
        let name = (pool.namespace().unwrap_or_default(), pool.name_any());
        if pool.data.pointer("/spec/loginOnAssignment").is_some_and(|login| *login == true) {
            self.0.insert(name);
        } else {
            self.0.remove(&name);
        }
    }

    /// A pool does not exist any more.
    pub fn forget(&mut self, pool: &DynamicObject) {
        self.0.remove(&(pool.namespace().unwrap_or_default(), pool.name_any()));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::vm;

    fn pool(name: &str, spec: Value) -> DynamicObject {
        serde_json::from_value(json!({ "metadata": { "name": name, "namespace": "orchard" }, "spec": spec })).unwrap()
    }

    #[test]
    fn the_user_of_an_assigned_vm_is_logged_in_if_its_pool_says_so() {
        let mut pools = LoginPools::default();
        pools.observe(&pool("with", json!({ "loginOnAssignment": true, "permissions": "what is this?" })));
        for spec in [json!({}), json!({ "loginOnAssignment": false }), json!({ "loginOnAssignment": "yes" }), json!(1)]
        {
            pools.observe(&pool("without", spec));
        }
        let user = |pools: &LoginPools, pool: &str, in_spec: Option<&str>| {
            let mut vm = Arc::new(vm(|vm| {
                let assignment = json!({ "pool": pool, "user": "alice", "lastUsed": "2026-01-01T00:00:00Z" });
                vm["status"] = json!({ "assignment": assignment });
                vm["spec"]["vm"]["display"] = json!({ "loggedInUser": in_spec });
            }));
            pools.log_in(&mut vm);
            vm.spec.vm.display.logged_in_user.clone()
        };
        assert_eq!(user(&pools, "with", None).as_deref(), Some("alice"));
        assert_eq!(user(&pools, "with", Some("bob")).as_deref(), Some("alice"));
        assert_eq!(user(&pools, "without", Some("bob")).as_deref(), Some("bob"));
        pools.forget(&pool("with", json!({})));
        assert_eq!(user(&pools, "with", Some("bob")).as_deref(), Some("bob"));
        let mut unassigned = Arc::new(vm(|_| ()));
        pools.log_in(&mut unassigned);
        assert_eq!(unassigned.spec.vm.display.logged_in_user, None);
    }
}
