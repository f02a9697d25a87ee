//! The steps, each with its measurement.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ListParams};
use serde_json::json;
use vm_operator::api::{Reason, VirtualMachine};

use super::Options;
use super::figures::{Figures, Measured, Step};
use super::fleet::{Fate, Fleet, create_class};
use super::nodes;
use super::ours::{Mark, Ours};
use crate::bench::cluster::Cluster;
use crate::bench::load;
use crate::bench::process::{Manager, Usage};
use crate::tools::write;

/// How many VMs are in a page of our lists.
const PAGE: u32 = 500;
/// The namespace of the VMs.
const NAMESPACE: &str = "scale";
/// What is changed in the template of all VMs.
const TEMPLATE: &str =
    "{% extends \"builtin/config-map.yaml.j2\" %}\n{% block labels %}\n    scale: \"1\"\n{% endblock %}\n";

/// An API server with pretended nodes, and a number of VMs.
pub struct Scene<'a> {
    cluster: Cluster,
    fleet: Fleet,
    ours: Ours,
    program: &'a Path,
    count: usize,
}

/// Whether a VM is as it shall be in the end.
type Is = fn(&VirtualMachine) -> bool;

/// The beginning of a step.
struct Begin {
    time: Instant,
    requests: Mark,
    /// What the manager had used.
    cpu: f64,
    control_plane: f64,
}

impl<'a> Scene<'a> {
    /// Starts all but the manager.
    pub async fn start(program: &'a Path, count: usize, nodes: usize, fate: Fate) -> Result<Self> {
        let cluster = Cluster::start().await?;
        cluster.namespace(NAMESPACE).await?;
        nodes::create(&cluster.client, nodes).await?;
        create_class(&cluster.client).await?;
        let ours = Ours::default();
        let fleet = Fleet::start(&cluster.client, NAMESPACE, nodes, fate, &ours);
        Ok(Self { cluster, fleet, ours, program, count })
    }

    /// A manager, when it has nothing to do, and its memory.
    pub async fn manager(&self) -> Result<(Manager, f64)> {
        let mut manager = self.start_manager("first")?;
        manager.rest().await?;
        let rss = manager.usage()?.rss;
        Ok((manager, rss))
    }

    /// Does the steps with VMs that run.
    pub async fn running(&self, mut manager: Manager, options: &Options, figures: &mut Figures) -> Result<()> {
        figures.keep(self.create(Step::Create, &mut manager, runs).await?);
        if options.wants(Step::Rest) {
            figures.keep(self.rest(Step::Rest, &mut manager, options.rest).await?);
        }
        if options.wants(Step::Update) {
            figures.keep(self.update(&mut manager).await?);
        }
        if options.wants(Step::Templates) {
            figures.keep(self.templates(&mut manager).await?);
        }
        if options.wants(Step::Restart) {
            let (measured, new) = self.restart(Step::Restart, manager).await?;
            figures.keep(measured);
            manager = new;
        }
        if options.wants(Step::Failover) {
            let (measured, new) = self.failover(manager).await?;
            figures.keep(measured);
            manager = new;
        }
        if options.wants(Step::NodeLost) {
            figures.keep(self.node_lost(&mut manager).await?);
        }
        if options.wants(Step::NodeLost) && options.wants(Step::NodeDown) {
            figures.keep(self.node_down(&mut manager).await?);
        }
        manager.stop().await.map(drop)
    }

    /// Does the steps with VMs that can't start.
    pub async fn stuck(&self, mut manager: Manager, options: &Options, figures: &mut Figures) -> Result<()> {
        figures.keep(self.create(Step::Stuck, &mut manager, waits).await?);
        if options.wants(Step::StuckRest) {
            figures.keep(self.rest(Step::StuckRest, &mut manager, options.rest).await?);
        }
        if options.wants(Step::StuckRestart) {
            let (measured, new) = self.restart(Step::StuckRestart, manager).await?;
            figures.keep(measured);
            manager = new;
        }
        manager.stop().await.map(drop)
    }

    async fn create(&self, step: Step, manager: &mut Manager, is: Is) -> Result<Measured> {
        let begin = self.begin(manager.usage()?.cpu).await?;
        self.ours.add("POST vms", self.count);
        load::create(&self.cluster.client, NAMESPACE, 0..self.count).await?;
        self.until(step, manager, begin, self.count, is).await
    }

    async fn rest(&self, step: Step, manager: &mut Manager, seconds: u64) -> Result<Measured> {
        let begin = self.begin(manager.usage()?.cpu).await?;
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let end = Mark::now(&self.cluster.client, &self.ours).await?;
        self.measured(step, manager, &begin, Instant::now(), &end)
    }

    async fn update(&self, manager: &mut Manager) -> Result<Measured> {
        let begin = self.begin(manager.usage()?.cpu).await?;
        let patch = json!({ "spec": { "vm": { "currentCpus": 3 } } });
        self.ours.add("PATCH vms", self.count);
        load::patch(&self.cluster.client, NAMESPACE, self.count, &patch).await?;
        self.until(Step::Update, manager, begin, self.count, |vm| runs(vm) && vm.spec.vm.current_cpus == Some(3)).await
    }

    async fn templates(&self, manager: &mut Manager) -> Result<Measured> {
        let begin = self.begin(manager.usage()?.cpu).await?;
        let mut maps = load::Seen::of::<ConfigMap>(&self.cluster.client, NAMESPACE).await;
        self.ours.add("LIST configmaps", self.count.div_ceil(PAGE as usize));
        let old = maps.now();
        write(&self.folder().join("templates/config-map.yaml.j2"), TEMPLATE)?;
        let has_changed = |seen: &HashMap<String, String>, name: &String| seen.get(name) != old.get(name);
        maps.until("all objects", |seen| (0..self.count).map(load::name).all(|name| has_changed(seen, &name))).await?;
        self.until(Step::Templates, manager, begin, self.count, runs).await
    }

    async fn restart(&self, step: Step, manager: Manager) -> Result<(Measured, Manager)> {
        manager.stop().await?;
        let begin = self.begin(0.0).await?;
        let mut manager = self.start_manager("first")?;
        let caught_up = manager.caught_up(self.count).await?;
        let rest = manager.rest().await?;
        let end = Mark::now(&self.cluster.client, &self.ours).await?;
        let caught_up_s = Some(seconds(begin.time, caught_up));
        Ok((Measured { caught_up_s, ..self.measured(step, &manager, &begin, rest, &end)? }, manager))
    }

    async fn failover(&self, manager: Manager) -> Result<(Measured, Manager)> {
        let mut standby = self.start_manager("second")?;
        standby.rest().await?;
        let begin = self.begin(standby.usage()?.cpu).await?;
        manager.kill()?;
        let time = self.end_of_lease().await?;
        let caught_up = standby.caught_up(self.count).await?;
        let rest = standby.rest().await?;
        let end = Mark::now(&self.cluster.client, &self.ours).await?;
        let begin = Begin { time, ..begin };
        let caught_up_s = Some(seconds(time, caught_up));
        Ok((Measured { caught_up_s, ..self.measured(Step::Failover, &standby, &begin, rest, &end)? }, standby))
    }

    async fn node_lost(&self, manager: &mut Manager) -> Result<Measured> {
        let begin = self.begin(manager.usage()?.cpu).await?;
        let lost = self.fleet.lose(0).await?.len();
        self.until(Step::NodeLost, manager, begin, lost, is_lost).await
    }

    async fn node_down(&self, manager: &mut Manager) -> Result<Measured> {
        let begin = self.begin(manager.usage()?.cpu).await?;
        self.fleet.give_up(0).await?;
        self.until(Step::NodeDown, manager, begin, self.count, runs).await
    }

    fn folder(&self) -> PathBuf {
        self.cluster.dir.join("logs")
    }

    fn start_manager(&self, name: &str) -> Result<Manager> {
        let log = self.folder().join(format!("manager-{name}.log"));
        Manager::start_as(name, self.program, &self.cluster.kubeconfig(), NAMESPACE, &log)
    }

    /// When others may take the lease of a manager that renews it no more.
    async fn end_of_lease(&self) -> Result<Instant> {
        let api: Api<Lease> = Api::namespaced(self.cluster.client.clone(), NAMESPACE);
        let lease = api.get("vm-operator").await.context("reading the lease")?.spec.context("an empty lease")?;
        let renewed = lease.renew_time.context("a lease that nobody holds")?.0;
        let lasts = u64::try_from(lease.lease_duration_seconds.unwrap_or_default()).unwrap_or_default();
        let age = Timestamp::now().duration_since(renewed).unsigned_abs();
        Instant::now().checked_sub(age).map(|renewed| renewed + Duration::from_secs(lasts)).context("an old lease")
    }

    async fn begin(&self, cpu: f64) -> Result<Begin> {
        Ok(Begin {
            requests: Mark::now(&self.cluster.client, &self.ours).await?,
            cpu,
            control_plane: Usage::control_plane(&self.cluster.dir)?,
            time: Instant::now(),
        })
    }

    /// Waits until the manager is at rest and so many VMs are as they shall be.
    async fn until(&self, step: Step, manager: &mut Manager, begin: Begin, count: usize, is: Is) -> Result<Measured> {
        loop {
            let rest = manager.rest().await?;
            let end = Mark::now(&self.cluster.client, &self.ours).await?;
            let measured = self.measured(step, manager, &begin, rest, &end)?;
            self.fleet.check()?;
            let done = self.count(is).await?;
            if done >= count {
                return Ok(measured);
            }
            if begin.time.elapsed() > load::LIMIT {
                bail!("{}: {done} of {count} VMs in {} s", step.name(), load::LIMIT.as_secs());
            }
        }
    }

    /// How many VMs are in some way.
    async fn count(&self, is: Is) -> Result<usize> {
        let api: Api<VirtualMachine> = Api::namespaced(self.cluster.client.clone(), NAMESPACE);
        let (mut page, mut count) = (ListParams::default().limit(PAGE), 0);
        loop {
            self.ours.add("LIST vms", 1);
            let list = api.list(&page).await.context("listing the VMs")?;
            count += list.items.iter().filter(|vm| is(vm)).count();
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => return Ok(count),
            }
        }
    }

    fn measured(&self, step: Step, manager: &Manager, begin: &Begin, rest: Instant, end: &Mark) -> Result<Measured> {
        let usage = manager.usage()?;
        Ok(Measured {
            step,
            seconds: seconds(begin.time, rest),
            caught_up_s: None,
            cpu_s: usage.cpu - begin.cpu,
            control_plane_cpu_s: Usage::control_plane(&self.cluster.dir)? - begin.control_plane,
            rss: usage.rss,
            peak: usage.peak,
            requests: end.since(&begin.requests),
        })
    }
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}

/// The status is of the newest spec.
fn is_observed(vm: &VirtualMachine) -> bool {
    vm.status.as_ref().is_some_and(|status| status.observed_generation == vm.metadata.generation)
}

fn runs(vm: &VirtualMachine) -> bool {
    is_observed(vm) && vm.status.as_ref().is_some_and(|status| status.ready == Some(true) && status.problem.is_none())
}

fn has_problem(vm: &VirtualMachine, reason: Reason) -> bool {
    vm.status.as_ref().and_then(|status| status.problem.as_ref()).is_some_and(|problem| problem.reason == reason)
}

fn is_lost(vm: &VirtualMachine) -> bool {
    has_problem(vm, Reason::NodeNotResponding)
}

/// It can't start, and the manager has said so.
fn waits(vm: &VirtualMachine) -> bool {
    is_observed(vm) && vm.status.as_ref().is_some_and(|status| status.ready != Some(true) && status.problem.is_some())
}
