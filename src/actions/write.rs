//! Writes what was decided about a VM: the executor beside the pure decisions of [`power`](super::power) and [`edit`](super::edit).
//!
//! ```text
//!  the VM as it was read ─▶ decide ─▶ write ─┬─▶ done
//!            ▲                               │
//!            └── read it again ◀── others have changed it meanwhile
//! ```

use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, Patch, PatchParams},
    core::DynamicObject,
};
use serde_json::json;

use super::{Change, Decision, FoundVm, Trial, VmHandle};
use crate::{api::VirtualMachine, ownership::Applier};

/// How often a VM is decided about again that others change at the same time.
const TRIES: usize = 10;

/// As whom a change is written, and whether it is only tried.
#[derive(Clone, Copy)]
pub struct By<'a> {
    /// The name under which the API server notes it.
    pub field_manager: &'a str,
    /// How it is tried without being made.
    pub trial: Option<Trial>,
}

/// What was done with a VM.
pub enum Done<T> {
    /// Nothing, because of this.
    Unchanged {
        /// The VM.
        found: FoundVm,
        /// Why.
        why: String,
    },
    /// It was written.
    Written {
        /// The VM that was decided about.
        before: FoundVm,
        /// The VM as it is now, or would be.
        object: Box<DynamicObject>,
        /// Who else applies a field that was written, and the field.
        applier: Option<(Applier, &'static str)>,
        /// What the person expects of it.
        expected: T,
    },
}

/// Why nothing was done.
pub enum ChangeError<R> {
    /// It was refused by who decides.
    Refused(R),
    /// A request failed.
    Request {
        /// The verb, as rules of roles have it.
        verb: &'static str,
        /// The error.
        error: kube::Error,
    },
    /// Others change the VM all the time.
    Busy,
}

impl VmHandle {
    /// The VM as it is now, with all its fields.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn find(&self) -> kube::Result<FoundVm> {
        let object = self.objects().get(&self.name).await?;
        FoundVm::new(object).map_err(kube::Error::SerdeError)
    }

    /// Decides about the VM and writes that. A change that names the version of the VM is refused by the API server if somebody else has changed the
    /// VM since it was read; then it is read and decided about again.
    ///
    /// # Errors
    /// Why nothing was written.
    pub async fn change<T, R>(
        &self,
        mut found: FoundVm,
        by: By<'_>,
        decide: impl Fn(&FoundVm) -> Result<Decision<T>, R>,
    ) -> Result<Done<T>, ChangeError<R>> {
        for _ in 0..TRIES {
            let (change, applier, expected) = match decide(&found).map_err(ChangeError::Refused)? {
                Decision::Unchanged(why) => return Ok(Done::Unchanged { found, why }),
                Decision::Write { change, applier, expected } => (change, applier, expected),
            };
            let error = match self.write(&found, &change, by).await {
                Ok(object) => return Ok(Done::Written { before: found, object: Box::new(object), applier, expected }),
                Err(error) => error,
            };
            let now = match &error {
                kube::Error::Api(answer) if answer.is_conflict() => {
                    self.find().await.map_err(|error| ChangeError::Request { verb: "get", error })?
                }
                _ => return Err(ChangeError::Request { verb: "patch", error }),
            };
            // Another VM of its name is not what the person meant.
            if now.vm.uid() != found.vm.uid() {
                return Err(ChangeError::Request { verb: "patch", error });
            }
            found = now;
        }
        Err(ChangeError::Busy)
    }

    async fn write(&self, found: &FoundVm, change: &Change, by: By<'_>) -> kube::Result<DynamicObject> {
        let (Change::Merge(body) | Change::Apply(body)) = change;
        if by.trial == Some(Trial::Client) {
            let mut object = json!(found.object);
            json_patch::merge(&mut object, body);
            return serde_json::from_value(object).map_err(kube::Error::SerdeError);
        }
        let parameters = PatchParams {
            field_manager: Some(by.field_manager.to_owned()),
            dry_run: by.trial == Some(Trial::Server),
            ..PatchParams::default()
        };
        match change {
            Change::Merge(body) => self.objects().patch(&self.name, &parameters, &Patch::Merge(body)).await,
            Change::Apply(body) => {
                let mut body = body.clone();
                body["apiVersion"] = json!(VirtualMachine::api_version(&()));
                body["kind"] = json!(VirtualMachine::kind(&()));
                let parameters = PatchParams { force: true, ..parameters };
                self.objects().patch(&self.name, &parameters, &Patch::Apply(&body)).await
            }
        }
    }

    /// The VMs of the namespace, with all their fields.
    fn objects(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &ApiResource::erase::<VirtualMachine>(&()))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex},
    };

    use kube::{Client, client::Body};
    use tower::service_fn;

    use super::*;
    use crate::test_support;

    const BY: By<'_> = By { field_manager: "ann", trial: None };

    fn apple(version: usize, uid: &str) -> FoundVm {
        let vm = test_support::vm(|vm| {
            vm["metadata"]["resourceVersion"] = json!(version.to_string());
            vm["metadata"]["uid"] = json!(uid);
        });
        FoundVm::new(serde_json::from_value(json!(vm)).unwrap()).unwrap()
    }

    /// The VM `apple` of an API server that answers the first patches with these codes. Whenever the VM is read, it has another version. Also
    /// returns what was asked.
    fn server(codes: Vec<u16>, uid: &'static str) -> (VmHandle, Arc<Mutex<Vec<String>>>) {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let noted = requests.clone();
        let server = service_fn(move |request: axum::http::Request<Body>| {
            let mut noted = noted.lock().unwrap();
            noted.push(request.method().to_string());
            let count = |method: &str| noted.iter().filter(|it| *it == method).count();
            let code = match request.method().as_str() {
                "PATCH" => codes.get(count("PATCH") - 1).copied().unwrap_or(200),
                _ => 200,
            };
            let answer = match code {
                200 => json!(apple(1 + count("GET"), uid).object),
                409 => {
                    json!({ "kind": "Status", "status": "Failure", "code": 409, "reason": "Conflict", "message": "no" })
                }
                code => json!({ "kind": "Status", "status": "Failure", "code": code, "message": "no" }),
            };
            let answer = axum::http::Response::builder().status(code).body(Body::from(answer.to_string().into_bytes()));
            async move { Ok::<_, Infallible>(answer.unwrap()) }
        });
        (VmHandle::new(Client::new(server, "orchard"), "orchard", "apple"), requests)
    }

    /// Writes the version that was decided about.
    fn decide(found: &FoundVm) -> Result<Decision<Option<String>>, &'static str> {
        let version = found.vm.resource_version();
        let change = Change::Merge(json!({ "spec": { "vm": { "currentCpus": 1 } } }));
        Ok(Decision::Write { change, applier: None, expected: version })
    }

    #[tokio::test]
    async fn a_vm_that_others_change_is_decided_about_again() {
        let (vm, requests) = server(vec![409, 409], "apple-uid");
        let done = vm.change(apple(1, "apple-uid"), BY, decide).await;
        assert!(matches!(done, Ok(Done::Written { expected: Some(version), .. }) if version == "3"));
        assert_eq!(*requests.lock().unwrap(), ["PATCH", "GET", "PATCH", "GET", "PATCH"]);
    }

    #[tokio::test]
    async fn a_vm_that_others_change_all_the_time_is_given_up() {
        let (vm, requests) = server(vec![409; 20], "apple-uid");
        assert!(matches!(vm.change(apple(1, "apple-uid"), BY, decide).await, Err(ChangeError::Busy)));
        assert_eq!(requests.lock().unwrap().iter().filter(|it| *it == "PATCH").count(), TRIES);
    }

    #[tokio::test]
    async fn what_was_refused_or_is_about_another_vm_of_the_name_is_not_tried_again() {
        for (code, uid, expected) in [(403, "apple-uid", &["PATCH"][..]), (409, "other-uid", &["PATCH", "GET"])] {
            let (vm, requests) = server(vec![code], uid);
            let done = vm.change(apple(1, "apple-uid"), BY, decide).await;
            let is_refused = |error: &kube::Error| matches!(error, kube::Error::Api(answer) if answer.code == code);
            assert!(matches!(done, Err(ChangeError::Request { verb: "patch", error }) if is_refused(&error)), "{code}");
            assert_eq!(*requests.lock().unwrap(), expected, "{code}");
        }
    }

    #[tokio::test]
    async fn a_trial_of_the_client_sends_nothing() {
        let (vm, requests) = server(Vec::new(), "apple-uid");
        let done = vm.change(apple(1, "apple-uid"), By { trial: Some(Trial::Client), ..BY }, decide).await;
        let Ok(Done::Written { object, before, .. }) = done else { panic!("it is not refused") };
        assert_eq!(object.data["spec"]["vm"]["currentCpus"], 1);
        assert_eq!(before.object.data["spec"]["vm"]["currentCpus"], serde_json::Value::Null);
        assert!(requests.lock().unwrap().is_empty());
    }
}
