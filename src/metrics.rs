//! Every metric of the manager, declared once. Callers report what happened; this module decides what is counted.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    encoding::text,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::{Metric, Registry},
};
use tokio::time::Instant;

use crate::{
    api::{VirtualMachine, conditions, status::Phase},
    process::lock,
};

type Labels<const N: usize> = [(&'static str, Cow<'static, str>); N];
/// A counter for each combination of label values.
type Counters<const N: usize> = Family<Labels<N>, Counter>;
type Gauges<const N: usize> = Family<Labels<N>, Gauge>;
/// Lists all VMs.
type ListVms = Box<dyn Fn() -> Vec<VmSummary> + Send + Sync>;

/// What the metrics show of a VM. It is derived when the VM changes, so that a request for the metrics need not read the VMs.
#[derive(Clone, Debug, PartialEq)]
pub struct VmSummary {
    phase: &'static str,
    /// If the VM is not as its spec wants it: the reason, and since when, as Unix time.
    not_ready: Option<(Box<str>, i64)>,
}

impl Default for VmSummary {
    fn default() -> Self {
        Self { phase: Phase::Pending.as_str(), not_ready: None }
    }
}

impl VmSummary {
    /// The summary of a VM.
    pub fn of(vm: &VirtualMachine) -> Self {
        let status = vm.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref()).map_or(Phase::Pending, |phase| {
            Phase::ALL.into_iter().find(|known| known.as_str() == phase).unwrap_or(Phase::Unknown)
        });
        let conditions = status.map(|status| status.conditions.as_slice()).unwrap_or_default();
        let ready = conditions::find(conditions, conditions::READY).filter(|ready| ready.status != "True");
        let not_ready = ready.map(|ready| {
            // The default condition of a VM that no manager has reconciled is older than the VM.
            let times = [Some(&ready.last_transition_time), vm.metadata.creation_timestamp.as_ref()];
            let since = times.into_iter().flatten().map(|time| time.0.as_second()).max().unwrap_or_default();
            (ready.reason.as_str().into(), since)
        });
        Self { phase: phase.as_str(), not_ready }
    }
}

/// What the manager counts and measures.
pub struct Metrics {
    registry: Registry,
    process: ProcessMetrics,
    reconcile: ReconcileMetrics,
    vms: VmMetrics,
    inputs: InputMetrics,
    /// The watches that the API server refuses, by kind and namespace, and why.
    refused: Mutex<BTreeMap<(String, String), String>>,
    list: OnceLock<ListVms>,
    queue: Mutex<HashSet<String>>,
    work: Mutex<HashMap<u64, Instant>>,
    number: AtomicU64,
}

/// The process and its leadership.
struct ProcessMetrics {
    leader: Gauge,
    lease_failures: Counter,
    memory: Gauge,
}

impl ProcessMetrics {
    fn register(all: &mut Registry) -> Self {
        Self {
            leader: add(
                all,
                "vm_operator_leader",
                "1 if this manager holds the lease and works; the sum over all replicas should be 1",
            ),
            lease_failures: add(
                all,
                "vm_operator_lease_failures",
                "Failed attempts to take or renew the lease; a leader that fails for 8 s ends",
            ),
            memory: add(all, "process_resident_memory_bytes", "Resident memory of the manager"),
        }
    }
}

/// Reconciles and what they write.
struct ReconcileMetrics {
    reconciles: Counters<1>,
    durations: Histogram,
    errors: Counters<1>,
    waiting: Gauge,
    in_work: Gauge,
    writes: Counters<2>,
    skipped: Counters<1>,
    template_errors: Counter,
}

impl ReconcileMetrics {
    fn register(all: &mut Registry) -> Self {
        let durations = Histogram::new(exponential_buckets(0.001, 2.0, 15));
        all.register(
            "vm_operator_reconcile_duration_seconds",
            "How long a reconcile of one VM took, with all writes that it caused",
            durations.clone(),
        );
        Self {
            reconciles: add(
                all,
                "vm_operator_reconciles",
                "Reconciles of a VM; result is done, again (the VM is reconciled again later without a change) or failed",
            ),
            durations,
            errors: add(
                all,
                "vm_operator_reconcile_errors",
                "Failed reconciles of a VM; reason is the API server's, or NameTaken, Shared (a claim of another VM), SecretRefused (cloud-init data that is not meant for VMs), MountMissing (a Secret or ConfigMap that the Pod would mount), Adopted (a claim that was there already; no failure), Outdated (the VM changed during its start; no failure), Answer (the manager can't read it), Watch (of a kind of object), Render (the process that renders templates can't be started), Connection (no answer)",
            ),
            waiting: add(all, "vm_operator_machines_waiting", "VMs that changed and wait for their reconcile"),
            in_work: add(
                all,
                "vm_operator_machines_in_work",
                "VMs that are being reconciled: at most 16 in each namespace that the manager watches by name",
            ),
            writes: add(
                all,
                "vm_operator_writes",
                "Successful writes by kind of object; verb is apply, label, delete, status or spec",
            ),
            skipped: add(
                all,
                "vm_operator_applies_skipped",
                "Rendered objects that needed no write because the cluster has them as rendered",
            ),
            template_errors: add(
                all,
                "vm_operator_template_errors",
                "Reconciles in which a template could not be rendered; the manager leaves the objects of such a VM as they are",
            ),
        }
    }
}

/// The VMs that the manager watches.
struct VmMetrics {
    machines: Gauges<1>,
    not_ready: Gauges<1>,
    not_ready_since: Gauges<1>,
    unreadable: Gauge,
}

impl VmMetrics {
    fn register(all: &mut Registry) -> Self {
        Self {
            machines: add(
                all,
                "vm_operator_machines",
                "VirtualMachines by the phase in their status, Pending if no manager has reconciled them yet; leader only",
            ),
            not_ready: add(
                all,
                "vm_operator_machines_not_ready",
                "VirtualMachines that are not as their spec wants them, by the reason in the condition Ready",
            ),
            not_ready_since: add(
                all,
                "vm_operator_machines_not_ready_since_timestamp_seconds",
                "Of the VirtualMachines that are not as their spec wants them: since when, as Unix time, the one is so that has been so the longest, by its present reason",
            ),
            unreadable: add(
                all,
                "vm_operator_machines_unreadable",
                "VirtualMachines that this version of the manager can't read and leaves as they are; the log has their names",
            ),
        }
    }
}

/// What the manager reads: templates, configuration, watches.
struct InputMetrics {
    templates_good: Gauge,
    config_loads: Counters<1>,
    config_good: Gauge,
    config_time: Gauge,
    watch_restarts: Counters<1>,
    watches_refused: Gauges<1>,
}

impl InputMetrics {
    fn register(all: &mut Registry) -> Self {
        Self {
            templates_good: add(
                all,
                "vm_operator_templates_last_load_successful",
                "1 if the newest templates are in force, 0 if they are refused",
            ),
            config_loads: add(
                all,
                "vm_operator_config_loads",
                "How often the manager read its configuration, at its start and after changes; result is success or failure",
            ),
            config_good: add(
                all,
                "vm_operator_config_last_load_successful",
                "1 if the present configuration is valid; at 0 the last valid one stays in force",
            ),
            config_time: add(
                all,
                "vm_operator_config_last_success_timestamp_seconds",
                "When the configuration in force was read, as Unix time",
            ),
            watch_restarts: add(
                all,
                "vm_operator_watch_restarts",
                "Watches that broke and were started again, by kind of object; some are normal when the API server restarts",
            ),
            watches_refused: add(
                all,
                "vm_operator_watches_refused",
                "Watches that the API server refuses although they worked before, by kind of object: a right was taken away, or a version of the kind",
            ),
        }
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Registers a new metric.
fn add<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics, at zero.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let all = &mut registry;
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        all.register("vm_operator_build", "The version of the manager; always 1", version);
        let started: Gauge = add(all, "process_start_time_seconds", "When the manager was started, as Unix time");
        started.set(now());
        let metrics = Self {
            process: ProcessMetrics::register(all),
            reconcile: ReconcileMetrics::register(all),
            vms: VmMetrics::register(all),
            inputs: InputMetrics::register(all),
            list: OnceLock::new(),
            queue: Mutex::default(),
            work: Mutex::default(),
            refused: Mutex::default(),
            number: AtomicU64::new(0),
            registry,
        };
        metrics.create_first_series();
        metrics
    }

    /// Prometheus can compute a rate only of a series that exists before the first event.
    fn create_first_series(&self) {
        let create = |counters: &Counters<1>, label: &'static str, values: &[&'static str]| {
            for value in values {
                drop(counters.get_or_create(&[(label, (*value).into())]));
            }
        };
        // A manager that stands by has refused no templates.
        self.inputs.templates_good.set(1);
        create(&self.reconcile.reconciles, "result", &["again", "done", "failed"]);
        create(&self.inputs.config_loads, "result", &["failure", "success"]);
        create(&self.reconcile.errors, "reason", &["Connection"]);
        create(&self.reconcile.skipped, "kind", &["Pod"]);
        create(&self.inputs.watch_restarts, "kind", &["Lease", "Pod", "VirtualMachine"]);
        for (verb, kind) in [("apply", "Pod"), ("delete", "Pod"), ("status", "VirtualMachine")] {
            drop(self.reconcile.writes.get_or_create(&[("verb", verb.into()), ("kind", kind.into())]));
        }
    }

    /// Reports whether this manager is the leader.
    pub fn leads(&self, leads: bool) {
        self.process.leader.set(leads.into());
    }

    /// The lease could not be written.
    pub fn lease_failed(&self) {
        self.process.lease_failures.inc();
    }

    /// Takes the function that lists all VMs, for the metrics that are measured when somebody asks.
    pub fn vms_from(&self, list: impl Fn() -> Vec<VmSummary> + Send + Sync + 'static) {
        // There is one list in a process.
        let _ = self.list.set(Box::new(list));
    }

    /// A VM waits for its reconcile.
    pub fn queued(&self, vm: &str) {
        lock(&self.queue).insert(vm.to_owned());
    }

    /// A VM that waited for its reconcile was deleted.
    pub fn unqueued(&self, vm: &str) {
        lock(&self.queue).remove(vm);
    }

    /// A reconcile of a VM begins. It ends when the returned value is consumed or dropped.
    pub fn begin(self: &Arc<Self>, vm: &str) -> Work {
        self.unqueued(vm);
        let number = self.number.fetch_add(1, Ordering::Relaxed) + 1;
        let began = Instant::now();
        lock(&self.work).insert(number, began);
        Work { metrics: self.clone(), number, began }
    }

    /// The duration of the longest reconcile that is still running.
    pub fn longest_work(&self) -> Duration {
        lock(&self.work).values().map(Instant::elapsed).max().unwrap_or_default()
    }

    /// The templates of a VM could not be rendered.
    pub fn template_failed(&self) {
        self.reconcile.template_errors.inc();
    }

    /// A rendered object of this kind needs no write.
    pub fn skipped(&self, kind: &str) {
        self.reconcile.skipped.get_or_create(&[("kind", kind.to_owned().into())]).inc();
    }

    /// A write succeeded: `apply`, `label`, `delete`, `status` or `spec` (of a VM).
    pub fn wrote(&self, verb: &'static str, kind: &str) {
        self.reconcile.writes.get_or_create(&[("verb", verb.into()), ("kind", kind.to_owned().into())]).inc();
    }

    /// The templates were loaded.
    pub fn templates_loaded(&self, good: bool) {
        self.inputs.templates_good.set(good.into());
    }

    /// The configuration was read.
    pub fn config_loaded(&self, good: bool) {
        self.inputs.config_good.set(good.into());
        let result = if good { "success" } else { "failure" };
        self.inputs.config_loads.get_or_create(&[("result", result.into())]).inc();
        if good {
            self.inputs.config_time.set(now());
        }
    }

    /// A watch broke and is started again.
    pub fn watch_restarted(&self, kind: &str) {
        self.inputs.watch_restarts.get_or_create(&[("kind", kind.to_owned().into())]).inc();
    }

    /// The API server refuses a watch that worked before, or (`None`) the watch works.
    pub fn watch_refused(&self, namespace: Option<&str>, kind: &str, why: Option<String>) {
        let watch = (kind.to_owned(), namespace.unwrap_or_default().to_owned());
        let mut refused = lock(&self.refused);
        match why {
            Some(why) => drop(refused.insert(watch, why)),
            None => drop(refused.remove(&watch)),
        }
    }

    /// The watches that the API server refuses, and why.
    pub fn refused_watches(&self) -> Vec<(String, String)> {
        let refused = lock(&self.refused);
        let name = |(kind, namespace): &(String, String)| match namespace.as_str() {
            "" => format!("watch of {kind} objects"),
            namespace => format!("watch of {kind} objects in {namespace}"),
        };
        refused.iter().map(|(watch, why)| (name(watch), why.clone())).collect()
    }

    /// Adds to the number of VMs that can't be read; `more` may be negative.
    pub fn unreadable(&self, more: i64) {
        self.vms.unreadable.inc_by(more);
    }

    /// All metrics as OpenMetrics text.
    pub fn text(&self) -> String {
        self.measure();
        let mut text = String::new();
        // A String takes all that is written to it.
        let _ = text::encode(&mut text, &self.registry);
        text
    }

    /// Sets the metrics that are not counted as they happen.
    fn measure(&self) {
        let size = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.reconcile.waiting.set(size(lock(&self.queue).len()));
        self.reconcile.in_work.set(size(lock(&self.work).len()));
        if let Some(memory) = resident_memory() {
            self.process.memory.set(memory);
        }
        self.inputs.watches_refused.clear();
        for (kind, _) in lock(&self.refused).keys() {
            self.inputs.watches_refused.get_or_create(&[("kind", kind.clone().into())]).inc();
        }
        let mut phases: BTreeMap<Box<str>, i64> = Phase::ALL.map(|phase| (phase.as_str().into(), 0)).into();
        let mut reasons: BTreeMap<Box<str>, i64> = BTreeMap::new();
        let mut since: BTreeMap<Box<str>, i64> = BTreeMap::new();
        for VmSummary { phase, not_ready } in self.list.get().map(|list| list()).unwrap_or_default() {
            *phases.entry(phase.into()).or_default() += 1;
            if let Some((reason, began)) = not_ready {
                *reasons.entry(reason.clone()).or_default() += 1;
                since.entry(reason).and_modify(|time| *time = began.min(*time)).or_insert(began);
            }
        }
        for (gauges, label, values) in [
            (&self.vms.machines, "phase", phases),
            (&self.vms.not_ready, "reason", reasons),
            (&self.vms.not_ready_since, "reason", since),
        ] {
            gauges.clear();
            for (name, value) in values {
                gauges.get_or_create(&[(label, String::from(name).into())]).set(value);
            }
        }
    }
}

/// The resident memory in bytes, from proc_pid_status(5).
fn resident_memory() -> Option<i64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix(" kB")?;
    Some(kilobytes.parse::<i64>().ok()? * 1024)
}

/// A reconcile that is running.
pub struct Work {
    metrics: Arc<Metrics>,
    /// The number of the reconcile, counted from the manager's start.
    pub number: u64,
    began: Instant,
}

impl Work {
    /// The reconcile succeeded; with `again`, the VM is reconciled again later without a change.
    pub fn done(self, again: bool) {
        self.ended(if again { "again" } else { "done" });
    }

    /// It failed and will be tried again. `reason` is the label of the error.
    pub fn failed(self, reason: Cow<'static, str>) {
        self.metrics.reconcile.errors.get_or_create(&[("reason", reason)]).inc();
        self.ended("failed");
    }

    fn ended(self, result: &'static str) {
        self.metrics.reconcile.reconciles.get_or_create(&[("result", result.into())]).inc();
        self.metrics.reconcile.durations.observe(self.began.elapsed().as_secs_f64());
    }
}

impl Drop for Work {
    // Also if the manager ends during the reconcile.
    fn drop(&mut self) {
        lock(&self.metrics.work).remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sample(text: &str, name: &str) -> f64 {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
    }

    #[test]
    fn waiting_running_and_finished_reconciles_are_counted() {
        let metrics = Arc::new(Metrics::new());
        for name in ["apple", "pear", "pear", "plum"] {
            metrics.queued(name);
        }
        metrics.unqueued("plum");
        let work = metrics.begin("apple");
        let text = metrics.text();
        assert_eq!(sample(&text, "vm_operator_machines_waiting"), 1.0);
        assert_eq!(sample(&text, "vm_operator_machines_in_work"), 1.0);
        assert!(metrics.longest_work() > Duration::ZERO);
        work.done(false);
        drop(metrics.begin("pear"));
        let text = metrics.text();
        assert_eq!(sample(&text, "vm_operator_machines_in_work"), 0.0);
        assert_eq!(sample(&text, "vm_operator_reconciles_total{result=\"done\"}"), 1.0);
        assert_eq!(sample(&text, "vm_operator_reconcile_duration_seconds_count"), 1.0);
        assert_eq!(metrics.longest_work(), Duration::ZERO);
    }

    #[test]
    fn errors_are_counted_by_their_reason() {
        let metrics = Arc::new(Metrics::new());
        metrics.begin("apple").failed("Forbidden".into());
        let text = metrics.text();
        assert_eq!(sample(&text, "vm_operator_reconcile_errors_total{reason=\"Forbidden\"}"), 1.0);
        assert_eq!(sample(&text, "vm_operator_reconciles_total{result=\"failed\"}"), 1.0);
    }

    #[test]
    fn vms_are_counted_when_the_metrics_are_read() {
        let vm = |phase: &str, ready: &str, since: &str| {
            let condition = json!({ "type": "Ready", "status": ready, "reason": "ImagePullFailed", "message": "",
                "lastTransitionTime": since });
            let vm = json!({ "metadata": { "name": "apple", "creationTimestamp": "1970-01-01T00:00:02Z" },
                "spec": { "vm": { "maximumCpus": 1 } }, "status": { "phase": phase, "conditions": [condition] } });
            VmSummary::of(&serde_json::from_value(vm).unwrap())
        };
        let metrics = Metrics::new();
        metrics.vms_from(move || {
            vec![
                vm("Running", "True", "1970-01-01T00:00:01Z"),
                vm("Starting", "False", "1970-01-01T00:00:03Z"),
                vm("Starting", "Unknown", "1970-01-01T00:00:00Z"),
                vm("Stopping", "False", "1970-01-01T00:00:04Z"),
            ]
        });
        let text = metrics.text();
        assert_eq!(sample(&text, "vm_operator_machines{phase=\"Running\"}"), 1.0);
        assert_eq!(sample(&text, "vm_operator_machines{phase=\"Starting\"}"), 2.0);
        assert_eq!(sample(&text, "vm_operator_machines{phase=\"Failed\"}"), 0.0);
        assert_eq!(sample(&text, "vm_operator_machines_not_ready{reason=\"ImagePullFailed\"}"), 3.0);
        let since = "vm_operator_machines_not_ready_since_timestamp_seconds{reason=\"ImagePullFailed\"}";
        assert_eq!(sample(&text, since), 2.0);
    }
}
