//! Writes the runner's part of the VM's status, and reads the one thing that the runner needs from the API server.
//!
//! The runner uses server-side apply with the field manager `vm-runner`. Each apply contains the whole report, because a field
//! that is missing in it is removed. Conditions are a map by type, so those of the manager do not change.

use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, WatchEvent},
};
use serde_json::Value;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout, timeout_at},
};
use tracing::{debug, info, warn};

use super::report::{Report, StatusBefore, Target};
use crate::{
    api::{
        StoredVm,
        conditions::{self, NewCondition},
    },
    object::FORCE_STOP_ANNOTATION,
    process::ErrorChain,
};

/// The field manager of the runner's status.
const FIELD_MANAGER: &str = "vm-runner";

/// The back-off after a failed write: the first pause, which doubles with each failure, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The limit of writes, because a guest can cause reports at will: [`BURST`] reports at once, then one every [`INTERVAL`].
const BURST: u32 = 10;
const INTERVAL: Duration = Duration::from_secs(1);

/// The time that the memory must stay the same before it is written. While QEMU changes the balloon, it reports a new size every
/// second.
const RAM_SETTLE_TIME: Duration = Duration::from_secs(3);

/// While the guest powers down and the VM can't be watched: how often the runner reads it, and how long it waits for the answer.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// The longest time that a guest can have to power down, and a little more.
const LONGEST_POWERDOWN: Duration = Duration::from_secs(86_400 + 600);

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

    /// Returns when a person has asked for a forced stop of the runner's Pod.
    ///
    /// The manager deletes the Pod again with a shorter grace period then. But a kubelet that already waits for the end of the Pod keeps
    /// the first grace period (<https://github.com/kubernetes/kubernetes/issues/83916>), and it does not refresh projected files any
    /// more. So the runner has to ask the API server.
    ///
    /// The runner watches the VM, because the API server refuses the token of a Pod a minute after the end of its grace period
    /// (<https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/#bound-service-account-tokens>), and anybody can
    /// have shortened that while the kubelet still waits. The API server looks at the token only when a request begins, so a watch that
    /// is open stays open. Where the runner may not watch, it reads the VM again and again.
    pub async fn stop_forced(&self) {
        let (Some(api), Some(uid)) = (&self.api, &self.target.pod_uid) else { return std::future::pending().await };
        loop {
            match self.watch_stop_forced(api, uid).await {
                Ok(true) => return,
                Ok(false) => debug!("the watch of the VM has ended"),
                Err(error) => debug!(error = %ErrorChain(&error), "cannot watch the VM"),
            }
            match timeout(ASK_AGAIN, self.read(api)).await {
                Ok(Ok(vm)) if is_stop_forced(&vm, uid) => return,
                Ok(Ok(_)) => {}
                Ok(Err(error)) => debug!(error = %ErrorChain(&error), "cannot read the VM"),
                Err(_) => debug!("the API server does not say whether a forced stop was requested"),
            }
            sleep(ASK_AGAIN).await;
        }
    }

    /// The VM as JSON: a part that this version can't read must not keep a guest from being stopped.
    async fn read(&self, api: &Api<StoredVm>) -> Result<Value, kube::Error> {
        let url = format!("{}/{}", api.resource_url(), self.target.name);
        let request = http::Request::get(url).body(Vec::new()).map_err(kube::Error::HttpError)?;
        api.clone().into_client().request(request).await
    }

    /// Returns true when the watch reports that the stop is forced, and false when the watch ends. The first item of a watch is the VM as it
    /// is.
    async fn watch_stop_forced(&self, api: &Api<StoredVm>, uid: &str) -> Result<bool, kube::Error> {
        // Kube's own parameters allow no watch that lasts as long as a power-down. A bookmark each minute keeps the connection open.
        let url = format!(
            "{}?watch=true&allowWatchBookmarks=true&fieldSelector=metadata.name%3D{}&timeoutSeconds={}",
            api.resource_url(),
            self.target.name,
            LONGEST_POWERDOWN.as_secs()
        );
        let request = http::Request::get(url).body(Vec::new()).map_err(kube::Error::HttpError)?;
        let events = api.clone().into_client().request_events::<Value>(request).await?;
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.try_next().await? {
            match event {
                WatchEvent::Added(vm) | WatchEvent::Modified(vm) if is_stop_forced(&vm, uid) => return Ok(true),
                WatchEvent::Added(_) | WatchEvent::Modified(_) | WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
                WatchEvent::Error(status) => return Err(kube::Error::Api(status)),
            }
        }
        Ok(false)
    }
}

/// Whether the VM has the annotation for a forced stop of this Pod, and the manager does not ignore it.
fn is_stop_forced(vm: &Value, pod_uid: &str) -> bool {
    vm["metadata"]["annotations"][FORCE_STOP_ANNOTATION] == pod_uid && vm["status"]["forceStopIgnored"] != pod_uid
}

/// Writes the status of one VM.
pub struct StatusWriter {
    resource: VmResource,
    /// The last report that was written.
    written: Option<Report>,
    /// `None`: the status must be read first.
    before: Option<StatusBefore>,
    pause: Duration,
    rate_limit: RateLimit,
}

impl StatusWriter {
    /// A writer that has not written anything yet.
    pub fn new(resource: VmResource) -> Self {
        Self { resource, written: None, before: None, pause: FIRST_PAUSE, rate_limit: RateLimit::new(Instant::now()) }
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
                let next_write = self.rate_limit.count(Instant::now());
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
            None => self.before.insert(read_before(api, &target.name, self.written.is_none()).await?),
        };
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

/// Reads the status of the VM. `is_first_report` says whether this runner has not reported yet.
async fn read_before(api: &Api<StoredVm>, name: &str, is_first_report: bool) -> Result<StatusBefore, kube::Error> {
    let StoredVm(vm) = api.get_status(name).await?;
    let status = vm.status.unwrap_or_default();
    let mut conditions = status.conditions;
    if is_first_report {
        // This is another QEMU process than that of an earlier runner, so the condition gets a new time even if its status is the same.
        conditions.retain(|condition| condition.type_ != conditions::RUNNING);
    }
    Ok(StatusBefore { conditions, password_serial: status.display_password_serial.unwrap_or_default() })
}

/// Limits the rate of writes: [`BURST`] at once, then one every [`INTERVAL`].
struct RateLimit {
    /// When the whole burst is available again.
    full_at: Instant,
}

impl RateLimit {
    fn new(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Counts a write. Returns when the next one is allowed.
    fn count(&mut self, now: Instant) -> Instant {
        self.full_at = self.full_at.max(now) + INTERVAL;
        self.full_at - INTERVAL * BURST
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
    }

    /// The API server would refuse a second request: the Pod's token is not valid any more.
    #[cfg(feature = "manager")]
    #[tokio::test]
    async fn a_forced_stop_arrives_by_the_watch_that_was_opened_at_the_beginning() {
        use axum::{Router, body::Body, http::StatusCode};

        let vm = |annotations: serde_json::Value| {
            json!({
                "metadata": { "name": "apple", "annotations": annotations }, "spec": { "vm": { "maximumCpus": 1 } },
            })
        };
        let line = |type_: &str, object: serde_json::Value| format!("{}\n", json!({ "type": type_, "object": object }));
        let lines = [line("ADDED", vm(json!({}))), line("MODIFIED", vm(json!({ FORCE_STOP_ANNOTATION: "pod-uid" })))];
        let (send, received) = tokio::sync::mpsc::unbounded_channel();
        let watch = std::sync::Arc::new(std::sync::Mutex::new(Some(received)));
        let router = Router::new().fallback(move |request: axum::extract::Request| {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let watch = watch.lock().unwrap().take().filter(|_| is_watch);
            std::future::ready(match watch {
                Some(mut lines) => Ok(Body::from_stream(futures::stream::poll_fn(move |context| {
                    lines.poll_recv(context).map(|line: Option<String>| line.map(Ok::<_, std::convert::Infallible>))
                }))),
                None => Err(StatusCode::UNAUTHORIZED),
            })
        });
        let client = Client::try_from(crate::test_support::played(router).await).unwrap();
        let target = Target { name: "apple".into(), pod_uid: Some("pod-uid".into()) };
        let resource = VmResource::new(Some(client), "ns", target);
        let forced = tokio::spawn(async move { resource.stop_forced().await });
        let [there, forced_now] = lines;
        send.send(there).unwrap();
        send.send(forced_now).unwrap();
        timeout(Duration::from_secs(60), forced).await.unwrap().unwrap();
    }

    #[test]
    fn after_a_burst_of_writes_the_rate_is_limited() {
        let start = Instant::now() + INTERVAL * BURST;
        let mut limit = RateLimit::new(start);
        for number in 1..BURST {
            assert!(limit.count(start) < start, "write {number} of the burst");
        }
        assert_eq!(limit.count(start), start);
        assert_eq!(limit.count(start), start + INTERVAL);
        let later = start + INTERVAL * 100;
        assert!(limit.count(later) < later, "the burst is available again");
    }
}
