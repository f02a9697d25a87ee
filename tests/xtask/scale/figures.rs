//! What a run has measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A step of the measurement. They are done in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// All VMs are created at once, until all run
    Create,
    /// Nothing happens
    Rest,
    /// Each VM gets another number of CPUs
    Update,
    /// The template that all VMs use changes
    Templates,
    /// The manager is ended and started again
    Restart,
    /// The manager is killed while another one stands by
    Failover,
    /// A node answers no more
    NodeLost,
    /// A person says that the node is down
    NodeDown,
    /// VMs are created that no node takes
    Stuck,
    /// Nothing happens to them
    StuckRest,
    /// The manager is ended and started again
    StuckRestart,
}

impl Step {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create all, until they run",
            Self::Rest => "all at rest",
            Self::Update => "update all",
            Self::Templates => "change the template of all",
            Self::Restart => "restart of the manager",
            Self::Failover => "failover, from the end of the lease",
            Self::NodeLost => "a node with 50 VMs is lost",
            Self::NodeDown => "its VMs are started elsewhere",
            Self::Stuck => "create VMs that no node takes",
            Self::StuckRest => "these at rest",
            Self::StuckRestart => "restart of the manager with these",
        }
    }

    /// Whether the VMs are some that run on nodes.
    pub fn is_of_running(self) -> bool {
        match self {
            Self::Create
            | Self::Rest
            | Self::Update
            | Self::Templates
            | Self::Restart
            | Self::Failover
            | Self::NodeLost
            | Self::NodeDown => true,
            Self::Stuck | Self::StuckRest | Self::StuckRestart => false,
        }
    }

    /// Whether what it takes grows with the number of VMs.
    pub fn grows(self) -> bool {
        match self {
            Self::Create
            | Self::Update
            | Self::Templates
            | Self::Restart
            | Self::Failover
            | Self::Stuck
            | Self::StuckRestart => true,
            Self::Rest | Self::NodeLost | Self::NodeDown | Self::StuckRest => false,
        }
    }
}

/// What one step took.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// The step.
    pub step: Step,
    /// Until it was done and the manager used no more CPU.
    pub seconds: f64,
    /// Until a new manager had reconciled each VM once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caught_up_s: Option<f64>,
    /// CPU seconds of the manager.
    pub cpu_s: f64,
    /// CPU seconds of API server and etcd.
    pub control_plane_cpu_s: f64,
    /// The manager's memory afterwards, MB.
    pub rss: f64,
    /// The most memory that this process of the manager ever had, MB.
    pub peak: f64,
    /// The requests that were not ours: `VERB resource`.
    pub requests: BTreeMap<String, u64>,
}

impl Measured {
    /// How many requests there were.
    pub fn requests(&self) -> u64 {
        self.requests.values().sum()
    }

    /// How many of them changed something.
    pub fn writes(&self) -> u64 {
        let is_read = |request: &str| request.starts_with("GET ") || request.starts_with("LIST ");
        self.requests.iter().filter(|(request, _)| !is_read(request)).map(|(_, count)| count).sum()
    }
}

/// The figures for one number of VMs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// How many VMs.
    pub n: usize,
    /// The manager's memory before the first VM, MB.
    pub rss_empty: f64,
    /// Step by step.
    pub steps: Vec<Measured>,
}

impl Figures {
    /// Says what a step took, and keeps it.
    pub fn keep(&mut self, measured: Measured) {
        eprintln!("  {}: {:.1} s, {} requests", measured.step.name(), measured.seconds, measured.requests());
        self.steps.push(measured);
    }

    /// What a step took, if it was done.
    pub fn of(&self, step: Step) -> Option<&Measured> {
        self.steps.iter().find(|measured| measured.step == step)
    }

    /// The most memory that a manager had with VMs that run, MB; `None` if no such step was done.
    pub fn peak(&self) -> Option<f64> {
        let running = self.steps.iter().filter(|measured| measured.step.is_of_running());
        running.map(|measured| measured.peak).reduce(f64::max)
    }
}

/// All figures of one run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// When it began.
    pub date: String,
    /// The version of the manager.
    pub version: String,
    /// The commit of the sources.
    pub commit: String,
    /// How many cores manager, API server and this program share.
    pub cores: usize,
    /// How many nodes were pretended.
    pub nodes: usize,
    /// For how many seconds nothing happened in the steps at rest.
    pub rest_s: u64,
    /// By the number of VMs.
    pub figures: Vec<Figures>,
}
