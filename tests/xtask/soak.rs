//! Everything at once for hours: does a manager need more and more?
//!
//! ```text
//!  people: create, delete, start, stop, edit ─┐
//!  templates that change ─────────────────────┼─▶ API server ◀─▶ manager, and one that stands by
//!  pretended nodes ───────────────────────────┘
//!  a third of the time: leaders are killed or ended ─▶ the rest: one leads ─▶ its first quarter is compared with its last one
//! ```

mod people;
mod samples;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde::Serialize;
use vm_operator::api::VirtualMachine;

use self::people::People;
use self::samples::{Sample, Verdict};
use crate::bench::cluster::Cluster;
use crate::bench::process::Manager;
use crate::bench::released::{self, Released};
use crate::scale::fleet::{Fate, Fleet};
use crate::scale::nodes;
use crate::scale::ours::{Mark, Ours};
use crate::setup::{self, Purpose};
use crate::tools::{make_dir, root, write};

/// The namespace of the VMs.
const NAMESPACE: &str = "soak";
/// The time between two samples.
const SAMPLE: Duration = Duration::from_secs(10);
/// The shortest time between two changes of leaders: a killed one is waited for.
const BETWEEN_LEADERS: Duration = Duration::from_secs(30);
/// Into how many parts the time with changes is divided; the leader changes between two of them.
const PARTS: u32 = 8;
/// The time between two changes of templates.
const BETWEEN_TEMPLATES: Duration = Duration::from_secs(120);
/// How long a new leader may take for what came while none worked: that is no sample of its usual work.
const BEGINNING: Duration = Duration::from_secs(30);
/// How long it may take until everything is as people want it, when they have stopped.
const SETTLED: Duration = Duration::from_secs(300);

/// What is done for how long.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// For how many minutes
    #[arg(long, env = "SOAK_MINUTES", default_value_t = 120)]
    minutes: u64,
    /// About how many VMs
    #[arg(long = "n", value_name = "N", default_value_t = 300)]
    count: usize,
    /// What people do follows from this number
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many times in a second people do something
    #[arg(long, value_name = "NUMBER", default_value_t = 2)]
    rate: u32,
    #[command(flatten)]
    released: Released,
}

/// What a soak leaves.
#[derive(Serialize)]
struct Report {
    date: String,
    version: String,
    commit: String,
    minutes: u64,
    count: usize,
    seed: u64,
    samples: Vec<Sample>,
}

/// Does a soak; returns whether nothing grew.
pub fn run_soak(options: &Options) -> Result<bool> {
    setup::ensure(&[Purpose::ControlPlane])?;
    let Some(manager) = options.released.manager("soak")? else { return Ok(true) };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = Report {
        date: Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: released::commit()?,
        minutes: options.minutes,
        count: options.count,
        seed: options.seed,
        samples: runtime.block_on(async { Soak::start(manager, options).await?.run(options).await })?,
    };
    let dir = root().join("bench/results");
    make_dir(&dir)?;
    let file = dir.join(format!("soak-{}.json", report.date.replace(':', "")));
    write(&file, serde_json::to_string_pretty(&report)? + "\n")?;
    println!("The samples are in {}.", file.strip_prefix(root()).unwrap_or(&file).display());
    let last = report.samples.iter().map(|sample| sample.leader).max().unwrap_or_default();
    let of_last: Vec<Sample> = report.samples.into_iter().filter(|sample| sample.leader == last).collect();
    let verdict = Verdict::of(&of_last).context("the soak was too short to compare anything: at least 3 minutes")?;
    println!("\n{} samples of the last leader, number {}:\n\n{}", of_last.len(), last + 1, verdict.table());
    Ok(verdict.is_passed())
}

/// A cluster with people, and two managers.
struct Soak<'a> {
    cluster: Cluster,
    fleet: Fleet,
    ours: Ours,
    people: People,
    program: &'a Path,
    leader: Manager,
    standby: Manager,
    /// How many managers there were.
    managers: usize,
    samples: Vec<Sample>,
}

impl<'a> Soak<'a> {
    async fn start(program: &'a Path, options: &Options) -> Result<Self> {
        let cluster = Cluster::start().await?;
        cluster.namespace(NAMESPACE).await?;
        nodes::create(&cluster.client, 20).await?;
        let ours = Ours::default();
        let fleet = Fleet::start(&cluster.client, NAMESPACE, 20, Fate::Run, &ours);
        let mut leader = start_manager(&cluster, program, 0)?;
        leader.rest().await?;
        let standby = start_manager(&cluster, program, 1)?;
        let random = fastrand::Rng::with_seed(options.seed);
        let people = People::with(cluster.client.clone(), NAMESPACE, ours.clone(), random, options.count).await?;
        Ok(Self { cluster, fleet, ours, people, program, leader, standby, managers: 2, samples: vec![] })
    }

    async fn run(mut self, options: &Options) -> Result<Vec<Sample>> {
        // What VMs that are deleted leave is deleted by it.
        let _collector = self.cluster.garbage_collector()?.context("there is no kube-controller-manager")?;
        let (begin, whole) = (Instant::now(), Duration::from_secs(60 * options.minutes));
        let (with_changes, between) = (whole / 3, (whole / 3 / PARTS).max(BETWEEN_LEADERS));
        let (mut leads_since, mut templates) = (begin, 0);
        let (mut next_sample, mut last) = (begin + SAMPLE, self.look().await?);
        let mut actions = 0;
        let mut tick = tokio::time::interval(Duration::from_secs(1) / options.rate.max(1));
        while begin.elapsed() < whole {
            tick.tick().await;
            self.people.act().await?;
            actions += 1;
            if begin.elapsed() > BETWEEN_TEMPLATES * (templates + 1) {
                templates += 1;
                self.change_templates(templates)?;
            }
            if begin.elapsed() < with_changes && leads_since.elapsed() > between {
                self.change_leader().await?;
                (leads_since, last) = (Instant::now(), self.look().await?);
            }
            if Instant::now() > next_sample {
                next_sample += SAMPLE;
                let look = self.look().await?;
                if leads_since.elapsed() > BEGINNING {
                    self.sample(begin, &last, &look, actions)?;
                }
                (last, actions) = (look, 0);
            }
        }
        self.settle().await?;
        Ok(self.samples)
    }

    /// How much the leader has used, and the requests, by now.
    async fn look(&mut self) -> Result<(Mark, f64)> {
        self.leader.check()?;
        self.standby.check()?;
        self.fleet.check()?;
        Ok((Mark::now(&self.cluster.client, &self.ours).await?, self.leader.usage()?.cpu))
    }

    fn sample(&mut self, begin: Instant, last: &(Mark, f64), look: &(Mark, f64), actions: usize) -> Result<()> {
        let (usage, holdings) = (self.leader.usage()?, self.leader.holdings()?);
        // Those that the garbage collector sends, too, are not counted.
        let is_counted = |request: &str| !request.starts_with("GET ") && !request.starts_with("DELETE ");
        let requests = look.0.since(&last.0).into_iter().filter(|(request, _)| is_counted(request));
        let sample = Sample {
            at_s: begin.elapsed().as_secs_f64(),
            leader: self.managers - 2,
            rss: usage.rss,
            files: holdings.files,
            threads: holdings.threads,
            cpu_s: look.1 - last.1,
            requests: requests.map(|(_, count)| count).sum(),
            actions,
            vms: self.people.vms().len(),
        };
        eprintln!(
            "  {:5.0} s: leader {}, {} VMs, {:.1} MB, {} files, {} threads, {} requests, {actions} actions",
            sample.at_s,
            sample.leader + 1,
            sample.vms,
            sample.rss,
            sample.files,
            sample.threads,
            sample.requests
        );
        self.samples.push(sample);
        Ok(())
    }

    fn change_templates(&self, number: u32) -> Result<()> {
        let text = format!(
            "{{% extends \"builtin/config-map.yaml.j2\" %}}\n{{% block labels %}}\n    soak: \"{number}\"\n{{% endblock %}}\n"
        );
        write(&self.cluster.dir.join("logs/templates/config-map.yaml.j2"), text)
    }

    /// The leader is killed or, each second time, ended. The one that stands by leads then, and another one stands by.
    async fn change_leader(&mut self) -> Result<()> {
        let new = start_manager(&self.cluster, self.program, self.managers)?;
        let standby = std::mem::replace(&mut self.standby, new);
        let leader = std::mem::replace(&mut self.leader, standby);
        self.managers += 1;
        if self.managers.is_multiple_of(2) { leader.kill() } else { leader.stop().await.map(drop) }
    }

    /// Waits until all is as people want it: a Pod for each VM that shall run, and no other.
    async fn settle(&mut self) -> Result<()> {
        let begin = Instant::now();
        loop {
            self.look().await?;
            self.leader.rest().await?;
            let wrong = self.wrong().await?;
            if wrong.is_empty() {
                eprintln!("  all VMs are as people want them");
                return Ok(());
            }
            if begin.elapsed() > SETTLED {
                bail!("not as people want it after {} s: {}", SETTLED.as_secs(), wrong.join("; "));
            }
        }
    }

    async fn wrong(&self) -> Result<Vec<String>> {
        let (client, all) = (self.cluster.client.clone(), ListParams::default());
        let vms =
            Api::<VirtualMachine>::namespaced(client.clone(), NAMESPACE).list(&all).await.context("listing the VMs")?;
        let pods = Api::<Pod>::namespaced(client, NAMESPACE).list_metadata(&all).await.context("listing the Pods")?;
        let wanted = self.people.vms();
        let of_vms = vms.items.iter().filter_map(|vm| {
            let (name, ready) = (vm.name_any(), vm.status.as_ref().and_then(|status| status.ready));
            match wanted.get(&name) {
                None => Some(format!("{name} should be deleted")),
                Some(true) if ready != Some(true) => Some(format!("{name} should run")),
                Some(_) => None,
            }
        });
        let exists = |name: &&String| vms.items.iter().any(|vm| vm.name_any() == **name);
        let lost = wanted.keys().filter(|name| !exists(name)).map(|name| format!("{name} should exist"));
        let stray = pods.items.iter().map(ResourceExt::name_any).filter(|name| wanted.get(name) != Some(&true));
        Ok(of_vms.chain(lost).chain(stray.map(|name| format!("Pod {name} should not exist"))).collect())
    }
}

/// Manager number `number`. All have the same templates.
fn start_manager(cluster: &Cluster, program: &Path, number: usize) -> Result<Manager> {
    let log: PathBuf = cluster.dir.join(format!("logs/manager-{number}.log"));
    Manager::start_as(&format!("manager-{number}"), program, &cluster.kubeconfig(), NAMESPACE, &log)
}
