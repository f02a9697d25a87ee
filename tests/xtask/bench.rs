//! The manager against the raw limit: what a bare client needs for the same writes, on the same machine in the same run.
//!
//! ```text
//!  for each N:  API server ─▶ raw limit ◀─▶ manager: create
//!                             └─ in turns, round by round ──┘
//!               API server ─▶ manager: create ─▶ rest ─▶ restart ─▶ down ─▶ update ─▶ delete
//! ```
//!
//! docs/performance.md says what the figures mean. Nothing is asserted: figures depend on the VM, so the ratios and the
//! budgets are shown, and a person judges.

pub mod cluster;
pub mod load;
mod plot;
pub mod process;
pub mod released;
mod table;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams};
use serde::{Deserialize, Serialize};
use serde_json::json;
use vm_operator::api::VirtualMachine;

use self::cluster::Cluster;
use self::load::{Raw, Seen};
use self::process::{Manager, Usage};
use self::released::Released;
use crate::requests::{Requests, is_about_vms};
use crate::setup::{self, Purpose};
use crate::tools::{make_dir, read, root, write};

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Numbers of VMs
    #[arg(long = "n", value_name = "N", value_delimiter = ',', default_values_t = [100, 1000])]
    counts: Vec<usize>,
    /// Only these parts (all need `create`, which is always done)
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// How often raw limit, creation and restart are measured; the one with the median counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// For how many seconds the cluster is left alone
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    rest: u64,
    /// Draw docs/performance.svg from this run
    #[arg(long)]
    plot: bool,
    /// Draw docs/performance.svg from the figures of earlier runs, and measure nothing
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    plot_from: Vec<PathBuf>,
    #[command(flatten)]
    released: Released,
}

/// A part of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Rest,
    Restart,
    Down,
    Update,
    Templates,
    Delete,
}

/// All figures of one run.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    date: String,
    commit: String,
    cores: usize,
    figures: Vec<Figures>,
}

/// The figures for one number of VMs. Times are in seconds, memory is in MB.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// How many VMs.
    pub n: usize,
    raw_pods_s: f64,
    raw_create_s: f64,
    raw_writes_per_vm: usize,
    raw_control_plane_cpu_s: f64,
    /// First creation of a VM until the last Pod was seen.
    pub pods_s: f64,
    settled_s: f64,
    cpu_s: f64,
    control_plane_cpu_s: f64,
    rss_empty: f64,
    rss: f64,
    /// The most memory while the VMs were made.
    pub peak: f64,
    requests: BTreeMap<String, u64>,
    objects_per_vm: usize,
    complaints: usize,
    ratios: Vec<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rest: Option<Rest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    restart: Option<Restart>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    down: Option<Down>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    update: Option<Change>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    templates: Option<Templates>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    delete: Option<Change>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Rest {
    seconds: u64,
    requests: BTreeMap<String, u64>,
    cpu_s: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Restart {
    stop_s: f64,
    caught_up_s: f64,
    /// Of all restarts, the quickest first.
    #[serde(default)]
    all_caught_up_s: Vec<f64>,
    /// What API server and etcd used until then. In some restarts much more than in others: then the API server collected its
    /// garbage meanwhile.
    #[serde(default)]
    control_plane_cpu_s: f64,
    /// Of all restarts, in the order of their times.
    #[serde(default)]
    all_control_plane_cpu_s: Vec<f64>,
    cpu_s: f64,
    rss: f64,
    peak: f64,
    requests: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Down {
    pod_s: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Change {
    /// How long it took to ask for it.
    asked_s: f64,
    /// From the first request until it was done.
    done_s: f64,
    cpu_s: f64,
    rss: f64,
    requests: BTreeMap<String, u64>,
}

/// Templates that change while all VMs run.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Templates {
    /// From the change of the file until the first object was seen.
    first_s: f64,
    change: Change,
    /// How many Pods were written.
    pods: usize,
}

/// Does a bench, prints the table, and keeps the figures.
pub fn run_bench(options: &Options) -> Result<()> {
    let picture = root().join("docs/performance.svg");
    if !options.plot_from.is_empty() {
        let mut figures = vec![];
        for file in &options.plot_from {
            let report: Report =
                serde_json::from_str(&read(file)?).with_context(|| format!("reading {}", file.display()))?;
            figures.extend(report.figures);
        }
        return plot::draw(&figures, &picture);
    }
    setup::ensure(&[Purpose::ControlPlane])?;
    let Some(manager) = options.released.manager("bench")? else { return Ok(()) };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut report = Report {
        date: Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        commit: released::commit()?,
        cores: std::thread::available_parallelism()?.get(),
        figures: vec![],
    };
    for count in &options.counts {
        eprintln!("· {count} VMs ...");
        let figures = runtime.block_on(measure(*count, manager, options))?;
        println!("{}", table::of(&figures));
        report.figures.push(figures);
    }
    let dir = root().join("bench/results");
    make_dir(&dir)?;
    let file = dir.join(format!("{}.json", report.date.replace(':', "")));
    write(&file, serde_json::to_string_pretty(&report)? + "\n")?;
    println!("The figures are in {}.", file.strip_prefix(root()).unwrap_or(&file).display());
    if options.plot {
        plot::draw(&report.figures, &picture)?;
    }
    Ok(())
}

fn counted(requests: &Requests) -> BTreeMap<String, u64> {
    let of_machines = requests.only(is_about_vms);
    of_machines.iter().map(|(request, count)| (format!("{} {}", request.verb, request.resource), count)).collect()
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}

async fn measure(count: usize, program: &Path, options: &Options) -> Result<Figures> {
    let cluster = Cluster::start().await?;
    // The first requests of their kind are slow, and an API server that has seen a thousand VMs takes longer for the next
    // thousand: without this the raw limit of the first round would be one of another server than its manager's.
    raw(&cluster, count, "warm-up").await?;

    let mut rounds: Vec<Figures> = vec![];
    for round in 0..options.rounds.max(1) {
        let (raw_namespace, namespace) = (format!("raw-{round}"), format!("bench-{round}"));
        let managed = async || {
            let (made, manager) = create(&cluster, program, count, &namespace).await?;
            cluster.end(manager, &namespace).await?;
            anyhow::Ok(made)
        };
        // An API server is slower the more it has seen, so whoever began in one round is second in the next.
        let (made, (raw, raw_control_plane_cpu_s)) = if round % 2 == 0 {
            let raw = raw(&cluster, count, &raw_namespace).await?;
            (managed().await?, raw)
        } else {
            (managed().await?, raw(&cluster, count, &raw_namespace).await?)
        };
        let figures = Figures {
            raw_pods_s: raw.pods_s,
            raw_create_s: raw.create_s,
            raw_writes_per_vm: raw.writes_per_vm,
            raw_control_plane_cpu_s,
            // Without the VM itself and its status.
            objects_per_vm: raw.writes_per_vm - 2,
            ..made
        };
        eprintln!("  raw limit {:.2} s, manager {:.2} s", figures.raw_pods_s, figures.pods_s);
        rounds.push(figures);
    }
    rounds.sort_by(|a, b| (a.raw_pods_s / a.pods_s).total_cmp(&(b.raw_pods_s / b.pods_s)));
    let ratios = rounds.iter().map(|figures| figures.raw_pods_s / figures.pods_s).collect();
    // Of two in the middle the worse one.
    let mut figures = Figures { ratios, ..rounds[(rounds.len() - 1) / 2].clone() };
    drop(cluster);
    // One that has seen no other VMs: it remembers those of all rounds for some time, and to collect its garbage takes
    // longer the more it remembers.
    let cluster = Cluster::start().await?;
    let namespace = "bench";
    let (_, manager) = create(&cluster, program, count, namespace).await?;
    Scene { cluster: &cluster, program, namespace, count }.go_on(manager, options, &mut figures).await?;
    Ok(figures)
}

/// The raw limit, and the CPU seconds that it took the control plane. Nothing is left of it.
async fn raw(cluster: &Cluster, count: usize, namespace: &str) -> Result<(Raw, f64)> {
    cluster.namespace(namespace).await?;
    let mut pods = Seen::of::<Pod>(&cluster.client, namespace).await;
    let before = Usage::control_plane(&cluster.dir)?;
    let raw = load::raw(&cluster.client, namespace, count, &mut pods).await?;
    let cpu = Usage::control_plane(&cluster.dir)? - before;
    drop(pods);
    cluster.empty(namespace).await?;
    Ok((raw, cpu))
}

/// The manager's part of the figures, and the manager with its VMs.
async fn create(cluster: &Cluster, program: &Path, count: usize, namespace: &str) -> Result<(Figures, Manager)> {
    cluster.namespace(namespace).await?;
    let mut pods = Seen::of::<Pod>(&cluster.client, namespace).await;
    let log = cluster.dir.join("logs/manager.log");
    let mut manager = Manager::start(program, &cluster.kubeconfig(), namespace, &log)?;
    manager.rest().await?;
    let (empty, before) = (manager.usage()?, cluster.requests().await?);
    let control_plane = Usage::control_plane(&cluster.dir)?;
    let start = Instant::now();
    load::create(&cluster.client, namespace, 0..count).await?;
    let made = pods.until("all Pods", |seen| seen.len() >= count).await?;
    let settled = manager.rest().await?;
    let usage = manager.usage()?;
    let control_plane_cpu_s = Usage::control_plane(&cluster.dir)? - control_plane;
    let mut requests = counted(&cluster.requests().await?.since(&before));
    // Ours.
    requests.remove("POST vms");
    let figures = Figures {
        n: count,
        pods_s: seconds(start, made),
        settled_s: seconds(start, settled),
        cpu_s: usage.cpu - empty.cpu,
        control_plane_cpu_s,
        rss_empty: empty.rss,
        rss: usage.rss,
        peak: usage.peak,
        requests,
        complaints: manager.complaints()?,
        ..Figures::default()
    };
    Ok((figures, manager))
}

impl Restart {
    /// The one of the median time, with the requests of the one that wrote most: none may.
    fn median(mut restarts: Vec<Self>) -> Self {
        restarts.sort_by(|a, b| a.caught_up_s.total_cmp(&b.caught_up_s));
        let all_caught_up_s = restarts.iter().map(|restart| restart.caught_up_s).collect();
        let all_control_plane_cpu_s = restarts.iter().map(|restart| restart.control_plane_cpu_s).collect();
        let worst = restarts.iter().max_by_key(|restart| table::writes_in(&restart.requests));
        let requests = worst.map(|restart| restart.requests.clone()).unwrap_or_default();
        let median = restarts.swap_remove(restarts.len() / 2);
        Self { all_caught_up_s, all_control_plane_cpu_s, requests, ..median }
    }
}

/// A namespace full of VMs.
struct Scene<'a> {
    cluster: &'a Cluster,
    program: &'a Path,
    namespace: &'a str,
    count: usize,
}

impl Scene<'_> {
    async fn go_on(&self, mut manager: Manager, options: &Options, figures: &mut Figures) -> Result<()> {
        let wanted = |part| options.only.is_empty() || options.only.contains(&part);
        load::run(&self.cluster.client, self.namespace, self.count).await?;
        manager.rest().await?;
        if wanted(Part::Rest) {
            figures.rest = Some(self.rest(&manager, options.rest).await?);
        }
        if wanted(Part::Restart) {
            let mut restarts = vec![];
            for _ in 0..options.rounds.max(1) {
                let (restart, new) = self.restart(manager).await?;
                restarts.push(restart);
                manager = new;
            }
            figures.restart = Some(Restart::median(restarts));
        }
        if wanted(Part::Down) {
            let (down, new) = self.down(manager).await?;
            (figures.down, manager) = (Some(down), new);
        }
        if wanted(Part::Update) {
            figures.update = Some(self.update(&mut manager).await?);
        }
        if wanted(Part::Templates) {
            figures.templates = Some(self.templates(&mut manager).await?);
        }
        if wanted(Part::Delete) {
            figures.delete = self.delete(&mut manager).await?;
        }
        manager.stop().await.map(drop)
    }

    fn start(&self) -> Result<Manager> {
        let log = self.cluster.dir.join("logs/manager.log");
        Manager::start(self.program, &self.cluster.kubeconfig(), self.namespace, &log)
    }

    async fn rest(&self, manager: &Manager, seconds: u64) -> Result<Rest> {
        let (before, usage) = (self.cluster.requests().await?, manager.usage()?);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let requests = counted(&self.cluster.requests().await?.since(&before));
        Ok(Rest { seconds, requests, cpu_s: manager.usage()?.cpu - usage.cpu })
    }

    async fn restart(&self, manager: Manager) -> Result<(Restart, Manager)> {
        let stop_s = manager.stop().await?.as_secs_f64();
        let before = self.cluster.requests().await?;
        let control_plane = Usage::control_plane(&self.cluster.dir)?;
        let mut manager = self.start()?;
        let caught_up = manager.caught_up(self.count).await?;
        let control_plane_cpu_s = Usage::control_plane(&self.cluster.dir)? - control_plane;
        manager.rest().await?;
        let usage = manager.usage()?;
        let requests = counted(&self.cluster.requests().await?.since(&before));
        let caught_up_s = seconds(manager.started, caught_up);
        let Usage { cpu: cpu_s, rss, peak } = usage;
        let restart = Restart {
            stop_s,
            caught_up_s,
            all_caught_up_s: vec![],
            control_plane_cpu_s,
            all_control_plane_cpu_s: vec![],
            cpu_s,
            rss,
            peak,
            requests,
        };
        Ok((restart, manager))
    }

    async fn down(&self, manager: Manager) -> Result<(Down, Manager)> {
        manager.stop().await?;
        let mut pods = Seen::of::<Pod>(&self.cluster.client, self.namespace).await;
        load::create(&self.cluster.client, self.namespace, self.count..self.count + 1).await?;
        let mut manager = self.start()?;
        let made = pods.until("the Pod of a new machine", |seen| seen.contains_key(&load::name(self.count))).await?;
        manager.rest().await?;
        // The others are counted from here on.
        let vms: Api<VirtualMachine> = Api::namespaced(self.cluster.client.clone(), self.namespace);
        vms.delete(&load::name(self.count), &DeleteParams::background()).await.context("deleting a machine")?;
        manager.rest().await?;
        Ok((Down { pod_s: seconds(manager.started, made) }, manager))
    }

    async fn update(&self, manager: &mut Manager) -> Result<Change> {
        let mut maps = Seen::of::<ConfigMap>(&self.cluster.client, self.namespace).await;
        let old = maps.now();
        let (before, usage) = (self.cluster.requests().await?, manager.usage()?);
        let start = Instant::now();
        let patch = json!({ "spec": { "vm": { "currentCpus": 3 } } });
        load::patch(&self.cluster.client, self.namespace, self.count, &patch).await?;
        let asked = Instant::now();
        let changed = |seen: &std::collections::HashMap<String, String>| {
            (0..self.count).map(load::name).filter(|name| seen.get(name) != old.get(name)).count()
        };
        let done = maps.until("all configurations", |seen| changed(seen) >= self.count).await;
        let done = done.map_err(|error| manager.check().err().unwrap_or(error))?;
        manager.rest().await?;
        let mut change = self.change(manager, usage.cpu, start, asked, done, before).await?;
        // Ours.
        change.requests.remove("PATCH vms");
        Ok(change)
    }

    async fn templates(&self, manager: &mut Manager) -> Result<Templates> {
        let mut maps = Seen::of::<ConfigMap>(&self.cluster.client, self.namespace).await;
        let pods = Seen::of::<Pod>(&self.cluster.client, self.namespace).await;
        let before_pods = pods.now();
        let old = maps.now();
        let (before, usage) = (self.cluster.requests().await?, manager.usage()?);
        let text =
            "{% extends \"builtin/config-map.yaml.j2\" %}\n{% block labels %}\n    bench: \"1\"\n{% endblock %}\n";
        let start = Instant::now();
        write(&self.cluster.dir.join("logs/templates/config-map.yaml.j2"), text)?;
        let asked = Instant::now();
        let changed = |seen: &std::collections::HashMap<String, String>| {
            (0..self.count).map(load::name).filter(|name| seen.get(name) != old.get(name)).count()
        };
        let first = maps.until("the first object", |seen| changed(seen) > 0).await?;
        let done = maps.until("all objects", |seen| changed(seen) >= self.count).await?;
        manager.rest().await?;
        let change = self.change(manager, usage.cpu, start, asked, done, before).await?;
        let now = pods.now();
        let touched = now.iter().filter(|(name, version)| before_pods.get(*name) != Some(*version)).count();
        Ok(Templates { first_s: seconds(start, first), change, pods: touched })
    }

    /// Nothing, where there is no garbage collector.
    async fn delete(&self, manager: &mut Manager) -> Result<Option<Change>> {
        let Some(collector) = self.cluster.garbage_collector()? else { return Ok(None) };
        let mut pods = Seen::of::<Pod>(&self.cluster.client, self.namespace).await;
        let (before, usage) = (self.cluster.requests().await?, manager.usage()?);
        let start = Instant::now();
        load::delete(&self.cluster.client, self.namespace, self.count).await?;
        let asked = Instant::now();
        let done = pods.until("the Pods to go", |seen| seen.is_empty()).await?;
        manager.rest().await?;
        let mut change = self.change(manager, usage.cpu, start, asked, done, before).await?;
        drop(collector);
        // Those of the garbage collector, and ours.
        change.requests.retain(|request, _| !request.starts_with("DELETE ") && !request.starts_with("GET "));
        Ok(Some(change))
    }

    async fn change(
        &self,
        manager: &Manager,
        cpu: f64,
        start: Instant,
        asked: Instant,
        done: Instant,
        before: Requests,
    ) -> Result<Change> {
        let usage = manager.usage()?;
        Ok(Change {
            asked_s: seconds(start, asked),
            done_s: seconds(start, done),
            cpu_s: usage.cpu - cpu,
            rss: usage.rss,
            requests: counted(&self.cluster.requests().await?.since(&before)),
        })
    }
}
