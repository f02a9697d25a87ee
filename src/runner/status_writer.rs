//! Writes what the runner reports, and reads what the manager tells it. All requests are patches of the status of one VmReport, which has the
//! UID of the runner's Pod as its name; the runner has no other right.
//!
//! Each report replaces the one before as a whole. Until the manager has created the VmReport, the runner tries again.
//!
//! A cluster may lack the kind VmReport, or the right to write one, because only a part of it was updated. Then the runner reports as earlier
//! releases do: it applies its part of the VM's status, with the field manager `vm-runner`.

use std::{collections::BTreeSet, time::Duration};

use k8s_openapi::jiff::Timestamp;
use kube::{Client, Resource, core::Status};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{debug, info, warn};

use super::report::{Report, StatusBefore, Target};
use crate::{
    api::{GROUP, StoredVm, VirtualMachine, VirtualMachineStatus, VmReport, VmReportStatus, conditions::NewCondition},
    object::FORCE_STOP_ANNOTATION,
    process::ErrorChain,
};

/// The field manager of the runner's part of a VM's status, where there are no reports.
const FIELD_MANAGER: &str = "vm-runner";

/// The back-off after a failed write: the first pause, which doubles with each failure, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The longest pause while the manager has not created the report yet.
const LONGEST_WAIT: Duration = Duration::from_secs(8);

/// The shortest time between two writes, because a guest can cause reports at will.
const INTERVAL: Duration = Duration::from_secs(1);

/// The time that the memory must stay the same before it is written. While QEMU changes the balloon, it reports a new size every
/// second.
const RAM_SETTLE_TIME: Duration = Duration::from_secs(3);

/// While the guest powers down: how often the runner asks whether a forced stop is requested, and how long it waits for the answer.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// Where the runner reports: a VmReport in the API server, or the status of the VM.
#[derive(Clone)]
pub struct VmResource {
    /// `None`: there is no API server, so the status is only logged.
    client: Option<Client>,
    namespace: String,
    target: Target,
    /// What of the status the API server has refused, as people were told last.
    told: Option<String>,
}

/// What the API server answers to a patch.
enum Answer {
    /// The VmReport of the runner's Pod.
    Report(Value),
    /// The VM.
    Vm(Value),
}

impl VmResource {
    /// The VM with this namespace and target. Without a client the status is only logged.
    pub fn new(client: Option<Client>, namespace: &str, target: Target) -> Self {
        Self { client, namespace: namespace.to_owned(), target, told: None }
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
        let (Some(_), Some(uid)) = (&self.client, &self.target.pod_uid) else { return std::future::pending().await };
        let mut is_refused = false;
        loop {
            match timeout(ASK_AGAIN, self.read()).await {
                Ok(Ok(Some(Answer::Report(report)))) if report["spec"]["endGuest"] == true => return,
                Ok(Ok(Some(Answer::Vm(vm)))) if is_stop_forced(&vm, uid) => return,
                Ok(Ok(_)) => {}
                Ok(Err(kube::Error::Api(answer))) if answer.code == 401 => {
                    if !std::mem::replace(&mut is_refused, true) {
                        warn!(
                            "the API server refuses the Pod's token, so a forced stop can't be noticed any more; to end the guest now, run vm-runner end in the Pod"
                        );
                    }
                }
                Ok(Err(error)) => debug!(error = %ErrorChain(&error), "cannot read what the manager says"),
                Err(_) => debug!("the API server does not say whether a forced stop was requested"),
            }
            sleep(ASK_AGAIN).await;
        }
    }

    /// What the manager says, as JSON: a part that this version can't read must not keep a guest from being stopped. A patch that changes
    /// nothing is answered with the object, so the runner needs no right to read, which no rule can restrict to its own. `None` without an
    /// API server.
    async fn read(&self) -> Result<Option<Answer>, kube::Error> {
        let nothing = || ("application/merge-patch+json", String::new(), json!({}));
        self.patch(nothing(), nothing()).await
    }

    /// Replaces the report. What the API server refuses of it is left out, so that all else is known.
    async fn write(&mut self, status: VmReportStatus) -> Result<Option<Answer>, kube::Error> {
        let mut value = json!(status);
        let has_report = self.target.pod_uid.is_some();
        let mut of_vm = VirtualMachineStatus::default();
        status.fold_into(self.target.pod_uid.as_deref().unwrap_or_default(), Timestamp::now(), &mut of_vm);
        of_vm.pod_uid = of_vm.pod_uid.filter(|uid| !uid.is_empty());
        let vm = json!({
            "apiVersion": VirtualMachine::api_version(&()), "kind": VirtualMachine::kind(&()),
            "metadata": { "name": self.target.name }, "status": of_vm,
        });
        let query = format!("?fieldManager={FIELD_MANAGER}&force=true");
        loop {
            let report = json!([{ "op": "add", "path": "/status", "value": value }]);
            let report = ("application/json-patch+json", String::new(), report);
            match self.patch(report, ("application/apply-patch+yaml", query.clone(), vm.clone())).await {
                Err(kube::Error::Api(refusal)) if has_report && leave_out(&mut value, &refusal) => {
                    if self.told.replace(refusal.message.clone()).as_ref() != Some(&refusal.message) {
                        warn!(
                            error = refusal.message,
                            "the API server refuses a part of the VM's status, which is left out: are the CRDs those of this release?"
                        );
                    }
                }
                answer => return answer,
            }
        }
    }

    /// Sends the first patch to the runner's report. If there are no reports in the cluster, or runners may not write them, it sends the other
    /// one to the VM. Each has its content type, query and body.
    async fn patch(
        &self,
        report: (&str, String, Value),
        vm: (&str, String, Value),
    ) -> Result<Option<Answer>, kube::Error> {
        let Some(client) = &self.client else { return Ok(None) };
        let send = async |resource: &str, name: &str, (content, query, body): (&str, String, Value)| {
            let url = format!("/apis/{GROUP}/v1/namespaces/{}/{resource}/{name}/status{query}", self.namespace);
            let request = http::Request::patch(url).header(http::header::CONTENT_TYPE, content);
            let request = request.body(body.to_string().into_bytes()).map_err(kube::Error::HttpError)?;
            client.request::<Value>(request).await
        };
        let refused = match &self.target.pod_uid {
            Some(uid) => match send(&VmReport::plural(&()), uid, report).await {
                Ok(report) => return Ok(Some(Answer::Report(report))),
                Err(error) if has_no_reports(&error) => Some(error),
                Err(error) => return Err(error),
            },
            None => None,
        };
        let sent = send(&VirtualMachine::plural(&()), &self.target.name, vm).await;
        // What keeps it from the usual place is what a person must know.
        sent.map(|vm| Some(Answer::Vm(vm))).map_err(|error| refused.unwrap_or(error))
    }

    /// What the first report of an agent continues. `is_first_report` says whether this runner has not reported yet.
    async fn read_before(&self, is_first_report: bool) -> Result<StatusBefore, kube::Error> {
        let mut before = match self.read().await? {
            Some(Answer::Report(report)) => {
                let report: VmReport = serde_json::from_value(report).map_err(kube::Error::SerdeError)?;
                let status = report.status.unwrap_or_default();
                let serial = status.runner.display_password_serial.or(report.spec.display_password_serial);
                StatusBefore { conditions: status.conditions, password_serial: serial.unwrap_or_default() }
            }
            Some(Answer::Vm(vm)) => {
                let StoredVm(vm) = serde_json::from_value(vm).map_err(kube::Error::SerdeError)?;
                let status = vm.status.unwrap_or_default();
                let password_serial = status.runner.display_password_serial.unwrap_or_default();
                StatusBefore { conditions: status.conditions, password_serial }
            }
            None => StatusBefore::default(),
        };
        if is_first_report {
            before.begin_start();
        }
        Ok(before)
    }
}

/// What says which changes wait. A manager that does not know all of that must not count the configuration as read.
const OF_CHANGES: [&str; 3] = ["pendingChanges", "devices", "conditions"];

/// Takes out of a report what the API server finds invalid: a field, or of a list an item. Returns whether there was something.
fn leave_out(report: &mut Value, refusal: &Status) -> bool {
    const READ: &str = "configDigest";
    if refusal.code != 422 {
        return false;
    }
    let causes = refusal.details.iter().flat_map(|details| &details.causes);
    let refused: BTreeSet<(&str, Option<usize>)> = causes.filter_map(|cause| refused_field(&cause.field)).collect();
    let mut is_any = false;
    // The last item first, so that the numbers of the others stay.
    for (field, item) in refused.into_iter().rev().filter(|(field, _)| *field != READ) {
        let is_there = match (report.get_mut(field), item) {
            (Some(Value::Array(items)), Some(item)) if item < items.len() => {
                items.remove(item);
                true
            }
            (Some(_), _) => report.as_object_mut().is_some_and(|report| report.remove(field).is_some()),
            (None, _) => false,
        };
        if is_there && OF_CHANGES.contains(&field) {
            report[READ] = json!("");
        }
        is_any |= is_there;
    }
    is_any
}

/// The field of the status in a path such as `status.pendingChanges[2].path`, and the item.
fn refused_field(path: &str) -> Option<(&str, Option<usize>)> {
    let field = path.strip_prefix("status.")?.split('.').next()?;
    match field.split_once('[') {
        Some((field, item)) => Some((field, item.strip_suffix(']')?.parse().ok())),
        None => Some((field, None)),
    }
}

/// Whether the API server does not have the kind VmReport, or no Role allows to write one. About a report that only does not exist yet it says
/// its name.
fn has_no_reports(error: &kube::Error) -> bool {
    let kube::Error::Api(answer) = error else { return false };
    let names_one = answer.details.as_ref().is_some_and(|details| !details.name.is_empty());
    answer.code == 403 || answer.code == 404 && !names_one
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
                let is_awaited = matches!(&error, kube::Error::Api(answer) if answer.code == 404);
                self.pause = (self.pause * 2).min(if is_awaited { LONGEST_WAIT } else { LONGEST_PAUSE });
            }
        }
    }

    async fn write(&mut self, report: &Report) -> Result<(), kube::Error> {
        self.log_new_conditions(report);
        if self.resource.client.is_none() {
            return Ok(());
        }
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
        let status = report.status(before, Timestamp::now());
        before.conditions.clone_from(&status.conditions);
        self.resource.write(status).await?;
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

    /// A played API server that answers with `object`, and the requests that it got: method and path.
    #[cfg(feature = "manager")]
    async fn server(object: Value) -> (VmResource, std::sync::Arc<std::sync::Mutex<Vec<String>>>) {
        let requests = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = std::sync::Arc::clone(&requests);
        let router = axum::Router::new().fallback(move |request: axum::extract::Request| {
            seen.lock().unwrap().push(format!("{} {}", request.method(), request.uri().path()));
            std::future::ready(axum::Json(object.clone()))
        });
        let client = Client::try_from(crate::test_support::played(router).await).unwrap();
        let target = Target { name: "apple".into(), pod_uid: Some("pod-uid".into()) };
        (VmResource::new(Some(client), "ns", target), requests)
    }

    #[cfg(feature = "manager")]
    const STATUS: &str = "PATCH /apis/vmoperator.jdrupes.org/v1/namespaces/ns/vmreports/pod-uid/status";

    #[cfg(feature = "manager")]
    #[tokio::test]
    async fn a_forced_stop_is_found_with_a_patch_of_the_status() {
        let report = json!({
            "metadata": "not known to this version", "spec": { "endGuest": true }, "status": "neither is this",
        });
        let (resource, requests) = server(report).await;
        timeout(Duration::from_secs(60), resource.stop_forced()).await.unwrap();
        assert_eq!(*requests.lock().unwrap(), [STATUS]);
    }

    /// As the API server answered a runner of a later release than its CRDs.
    #[test]
    fn what_the_api_server_refuses_of_a_report_is_left_out() {
        let refusal = |field: &str| {
            serde_json::from_value::<Status>(json!({
                "kind": "Status", "status": "Failure", "reason": "Invalid", "code": 422, "message": "VmReport is invalid",
                "details": { "name": "pod-uid", "causes": [{ "reason": "FieldValueInvalid", "field": field, "message": "Invalid value" }] },
            }))
            .unwrap()
        };
        let report = json!({ "cpus": 2, "pendingChanges": [{ "path": "new" }, { "path": "known" }], "configDigest": "a-digest" });
        let without = |field: &str| {
            let mut report = report.clone();
            leave_out(&mut report, &refusal(field)).then_some(report)
        };
        for field in ["status.pendingChanges[0].path", "status.pendingChanges[0]"] {
            let rest = json!({ "cpus": 2, "pendingChanges": [{ "path": "known" }], "configDigest": "" });
            assert_eq!(without(field), Some(rest), "{field}");
        }
        assert_eq!(without("status.pendingChanges"), Some(json!({ "cpus": 2, "configDigest": "" })));
        let changes = &report["pendingChanges"];
        let rest = json!({ "pendingChanges": changes, "configDigest": "a-digest" });
        assert_eq!(without("status.cpus"), Some(rest), "it says nothing of what waits");
        // Then it is repeated later.
        let others = ["status.identity.uuid", "status.configDigest", "spec.vm", ""];
        assert_eq!(others.map(without), [const { None }; 4]);
        let mut report = json!({ "cpus": 2 });
        assert!(!leave_out(&mut report, &Status { code: 409, ..refusal("status.cpus") }));
    }

    /// As a guest does it that opens and closes its agents' ports.
    #[cfg(feature = "manager")]
    #[tokio::test]
    async fn a_flood_of_reports_is_one_write_per_second_and_nothing_but_patches_of_the_status() {
        use crate::runner::{report::Observation, state::MachineState};

        let report = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmReport", "metadata": { "name": "pod-uid" },
            "spec": { "vm": "apple" },
        });
        let (resource, requests) = server(report).await;
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
