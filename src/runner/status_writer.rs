//! Writes the runner's part of the VM's status, and reads what the runner needs from the API server. All requests are patches of the status.
//!
//! The runner uses server-side apply with the field manager `vm-runner`. Each apply contains the whole report, because a field
//! that is missing in it is removed. Conditions are a map by type, so those of the manager do not change.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::Value;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{debug, info, warn};

use super::report::{Report, StatusBefore, Target};
use crate::{
    api::{StoredVm, conditions::NewCondition},
    object::FORCE_STOP_ANNOTATION,
    process::ErrorChain,
};

/// The field manager of the runner's status.
const FIELD_MANAGER: &str = "vm-runner";

/// The back-off after a failed write: the first pause, which doubles with each failure, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The shortest time between two writes, because a guest can cause reports at will.
const INTERVAL: Duration = Duration::from_secs(1);

/// The time that the memory must stay the same before it is written. While QEMU changes the balloon, it reports a new size every
/// second.
const RAM_SETTLE_TIME: Duration = Duration::from_secs(3);

/// While the guest powers down: how often the runner asks whether a forced stop is requested, and how long it waits for the answer.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// The VirtualMachine in the API server.
#[derive(Clone, Debug)]
pub struct VmResource {
    /// `None`: there is no API server, so the status is only logged.
    api: Option<Api<StoredVm>>,
    target: Target,
}

impl VmResource {
    /// The VM with this namespace and target. Without a client the status is only logged.
    pub fn new(client: Option<Client>, namespace: &str, target: Target) -> Self {
        Self { api: client.map(|client| Api::namespaced(client, namespace)), target }
    }

    /// Returns when a forced stop of the runner's Pod is requested.
    ///
    /// The manager deletes the Pod again with a shorter grace period then. But a kubelet that already waits for the end of the Pod keeps
    /// the first grace period (<https://github.com/kubernetes/kubernetes/issues/83916>), and it does not refresh projected files any
    /// more. So the runner asks the API server again and again.
    ///
    /// The API server refuses the token of a Pod a minute after the end of its grace period
    /// (<https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/#bound-service-account-tokens>). The guest has
    /// no more time than the grace period, unless somebody has shortened that. Then the manager requests a forced stop at its end
    /// ([`force_stop`](mod@crate::power::force_stop)), while the token is still valid.
    pub async fn stop_forced(&self) {
        let (Some(_), Some(uid)) = (&self.api, &self.target.pod_uid) else { return std::future::pending().await };
        let mut is_refused = false;
        loop {
            match timeout(ASK_AGAIN, self.read()).await {
                Ok(Ok(vm)) if is_stop_forced(&vm, uid) => return,
                Ok(Ok(_)) => {}
                Ok(Err(kube::Error::Api(answer))) if answer.code == 401 => {
                    if !std::mem::replace(&mut is_refused, true) {
                        warn!(
                            "the API server refuses the Pod's token, so a forced stop can't be noticed any more; to end the guest now, run vm-runner end in the Pod"
                        );
                    }
                }
                Ok(Err(error)) => debug!(error = %ErrorChain(&error), "cannot read the VM"),
                Err(_) => debug!("the API server does not say whether a forced stop was requested"),
            }
            sleep(ASK_AGAIN).await;
        }
    }

    /// The VM as JSON: a part that this version can't read must not keep a guest from being stopped. A patch that changes nothing is
    /// answered with the object, so the runner needs no right to read VMs, which no rule can restrict to its own. Null without an API
    /// server.
    async fn read(&self) -> Result<Value, kube::Error> {
        let Some(api) = &self.api else { return Ok(Value::Null) };
        let url = format!("{}/{}/status", api.resource_url(), self.target.name);
        let request = http::Request::patch(url).header(http::header::CONTENT_TYPE, "application/merge-patch+json");
        let request = request.body(b"{}".to_vec()).map_err(kube::Error::HttpError)?;
        api.clone().into_client().request(request).await
    }

    /// The part of the status that the first report of an agent continues. `is_first_report` says whether this runner has not reported yet.
    async fn read_before(&self, is_first_report: bool) -> Result<StatusBefore, kube::Error> {
        let StoredVm(vm) = serde_json::from_value(self.read().await?).map_err(kube::Error::SerdeError)?;
        let status = vm.status.unwrap_or_default();
        let password_serial = status.display_password_serial.unwrap_or_default();
        let mut before = StatusBefore { conditions: status.conditions, password_serial };
        if is_first_report {
            before.begin_start();
        }
        Ok(before)
    }
}

/// Whether the manager says that the guest of this Pod must end, or the VM has the annotation for a forced stop and the manager does not
/// ignore it: there may be no manager at the moment.
fn is_stop_forced(vm: &Value, pod_uid: &str) -> bool {
    let is_requested = vm["metadata"]["annotations"][FORCE_STOP_ANNOTATION] == pod_uid;
    vm["status"]["endGuest"] == pod_uid || is_requested && vm["status"]["forceStopIgnored"] != pod_uid
}

/// Writes the status of one VM.
pub struct StatusWriter {
    resource: VmResource,
    /// The last report that was written.
    written: Option<Report>,
    /// `None`: the status must be read first.
    before: Option<StatusBefore>,
    pause: Duration,
}

impl StatusWriter {
    /// A writer that has not written anything yet.
    pub fn new(resource: VmResource) -> Self {
        Self { resource, written: None, before: None, pause: FIRST_PAUSE }
    }

    /// Writes each report that differs from the last one, until the sender is dropped and the last report is written. A failed
    /// write is repeated with a back-off, with the newest report.
    pub async fn follow(mut self, mut reports: watch::Receiver<Option<Report>>) {
        loop {
            let report = reports.borrow_and_update().clone();
            match report {
                Some(report) if self.written.as_ref() != Some(&report) => {
                    self.write_settled(report, &mut reports).await
                }
                _ => {
                    let sender_is_gone = reports.changed().await.is_err();
                    if sender_is_gone && *reports.borrow() == self.written {
                        return;
                    }
                }
            }
        }
    }

    /// Writes a report, unless only its memory is new and a newer report comes soon.
    async fn write_settled(&mut self, report: Report, reports: &mut watch::Receiver<Option<Report>>) {
        let is_only_ram = self.written.as_ref().is_some_and(|written| report.differs_only_in_ram(written));
        if is_only_ram && let Ok(Ok(())) = timeout(RAM_SETTLE_TIME, reports.changed()).await {
            return;
        }
        match self.write(&report).await {
            Ok(()) => {
                self.written = Some(report);
                self.pause = FIRST_PAUSE;
                let next_write = Instant::now() + INTERVAL;
                // The loop reads the newest report afterwards. Once the sender is dropped, the last report is written at once.
                while let Ok(Ok(())) = timeout_at(next_write, reports.changed()).await {}
            }
            Err(error) => {
                let retry_s = self.pause.as_secs();
                warn!(error = %ErrorChain(&error), retry_s, "cannot write the VM's status");
                sleep(self.pause).await;
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    async fn write(&mut self, report: &Report) -> Result<(), kube::Error> {
        self.log_new_conditions(report);
        let VmResource { api, target } = &self.resource;
        let Some(api) = api else { return Ok(()) };
        if self.written.as_ref().is_some_and(|written| written.resource_uid != report.resource_uid) {
            // The VM was deleted and created again, so its status is another one.
            self.before = None;
        }
        let before = match &mut self.before {
            Some(before) => before,
            None => self.before.insert(self.resource.read_before(self.written.is_none()).await?),
        };
        if self.written.as_ref().is_some_and(|written| written.start != report.start) {
            before.begin_start();
        }
        let object = report.object(target, before, Timestamp::now());
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let StoredVm(vm) = api.patch_status(&target.name, &params, &Patch::Apply(&object)).await?;
        before.conditions = vm.status.unwrap_or_default().conditions;
        Ok(())
    }

    fn log_new_conditions(&self, report: &Report) {
        for condition in &report.conditions {
            if self.written.as_ref().is_none_or(|written| !written.conditions.contains(condition)) {
                let NewCondition { type_, status, reason, message } = condition;
                info!(condition = type_, status, reason = reason.as_str(), "{message}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_forced_stop_that_the_manager_ignores_does_not_end_the_guest() {
        for (value, ignored, expected) in
            [("a", None, true), ("a", Some("b"), true), ("a", Some("a"), false), ("b", None, false)]
        {
            let vm = json!({
                "metadata": { "name": "apple", "annotations": { FORCE_STOP_ANNOTATION: value } },
                "status": { "forceStopIgnored": ignored, "assignment": {} },
            });
            assert_eq!(is_stop_forced(&vm, "a"), expected, "{value} {ignored:?}");
        }
        let ended = |uid: &str| json!({ "metadata": { "name": "apple" }, "status": { "endGuest": uid } });
        assert!(is_stop_forced(&ended("a"), "a") && !is_stop_forced(&ended("b"), "a"));
    }

    /// A played API server that answers with `vm`, and the requests that it got: method and path.
    #[cfg(feature = "manager")]
    async fn server(vm: Value) -> (VmResource, std::sync::Arc<std::sync::Mutex<Vec<String>>>) {
        let requests = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = std::sync::Arc::clone(&requests);
        let router = axum::Router::new().fallback(move |request: axum::extract::Request| {
            seen.lock().unwrap().push(format!("{} {}", request.method(), request.uri().path()));
            std::future::ready(axum::Json(vm.clone()))
        });
        let client = Client::try_from(crate::test_support::played(router).await).unwrap();
        let target = Target { name: "apple".into(), pod_uid: Some("pod-uid".into()) };
        (VmResource::new(Some(client), "ns", target), requests)
    }

    #[cfg(feature = "manager")]
    const STATUS: &str = "PATCH /apis/vmoperator.jdrupes.org/v1/namespaces/ns/vms/apple/status";

    #[cfg(feature = "manager")]
    #[tokio::test]
    async fn a_forced_stop_is_found_with_a_patch_of_the_status() {
        let vm = json!({
            "metadata": { "name": "apple", "annotations": { FORCE_STOP_ANNOTATION: "pod-uid" } },
            "spec": "not known to this version",
        });
        let (resource, requests) = server(vm).await;
        timeout(Duration::from_secs(60), resource.stop_forced()).await.unwrap();
        assert_eq!(*requests.lock().unwrap(), [STATUS]);
    }

    /// As a guest does it that opens and closes its agents' ports.
    #[cfg(feature = "manager")]
    #[tokio::test]
    async fn a_flood_of_reports_is_one_write_per_second_and_nothing_but_patches_of_the_status() {
        use crate::runner::{report::Observation, state::MachineState};

        let vm = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" },
            "spec": { "vm": { "maximumCpus": 1 } },
        });
        let (resource, requests) = server(vm).await;
        let (reports, receiver) = watch::channel(None);
        let begin = Instant::now();
        let writing = tokio::spawn(StatusWriter::new(resource).follow(receiver));
        let report = |number: u32| {
            let machine = MachineState::failed_before_start(format!("failure {number}"), None);
            Report::derive(&Observation { machine: Some(machine), ..Observation::default() })
        };
        for number in 0.. {
            reports.send_replace(report(number));
            tokio::task::yield_now().await;
            // The first request reads.
            if requests.lock().unwrap().len() >= 4 {
                break;
            }
        }
        drop(reports);
        timeout(Duration::from_secs(60), writing).await.unwrap().unwrap();
        let requests = requests.lock().unwrap();
        assert!(requests.iter().all(|request| request == STATUS), "{requests:?}");
        let writes = requests.len() as u64 - 1;
        // One at once, and the last one when the sender is gone.
        assert!(writes <= begin.elapsed().as_secs() + 2, "{writes} writes in {:?}", begin.elapsed());
    }
}
