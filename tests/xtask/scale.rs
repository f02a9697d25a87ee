//! How the manager's work grows with the number of VMs, on pretended nodes.
//!
//! ```text
//!  for each N:  API server, 500 nodes ─▶ create ─▶ rest ─▶ update ─▶ templates ─▶ restart ─▶ failover ─▶ a node is lost ─▶ its VMs elsewhere
//!               API server, 500 nodes ─▶ create VMs that no node takes ─▶ rest ─▶ restart
//! ```
//!
//! docs/scale.md says what the figures mean. Nothing is asserted: a person judges.

mod figures;
mod fit;
pub mod fleet;
pub mod nodes;
pub mod ours;
mod plot;
mod steps;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum as _;
use k8s_openapi::jiff::Timestamp;

use self::figures::{Figures, Report, Step};
use self::fleet::Fate;
use self::steps::Scene;
use crate::bench::released::{self, Released};
use crate::setup::{self, Purpose};
use crate::tools::{make_dir, read, root, write};

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Numbers of VMs
    #[arg(long = "n", value_name = "N", value_delimiter = ',', default_values_t = [300, 1000, 3000])]
    counts: Vec<usize>,
    /// Only these steps (those of VMs that run need `create`, the others `stuck`; both are done then)
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Step>,
    /// How many nodes there are
    #[arg(long, default_value_t = 500)]
    nodes: usize,
    /// What the VMs lack that can't start
    #[arg(long, value_enum, default_value = "node")]
    lacking: Lacking,
    /// For how many seconds the cluster is left alone
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    rest: u64,
    /// Draw docs/scale.svg from this run
    #[arg(long)]
    plot: bool,
    /// Print the tables of an earlier run, and measure nothing
    #[arg(long, value_name = "FILE")]
    show: Option<PathBuf>,
    #[command(flatten)]
    released: Released,
}

impl Options {
    /// Whether a step is wanted.
    fn wants(&self, step: Step) -> bool {
        self.only.is_empty() || self.only.contains(&step)
    }
}

/// What VMs lack that can't start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Lacking {
    /// The scheduler finds no node with enough memory
    Node,
    /// Nobody makes volumes for their claims
    Volume,
    /// There is no scheduler
    Scheduler,
}

impl Lacking {
    fn fate(self) -> Fate {
        match self {
            Self::Node => Fate::NoNode,
            Self::Volume => Fate::NoVolume,
            Self::Scheduler => Fate::NoScheduler,
        }
    }
}

/// Measures, prints the tables, and keeps the figures.
pub fn run_scale(options: &Options) -> Result<()> {
    if let Some(file) = &options.show {
        let report: Report =
            serde_json::from_str(&read(file)?).with_context(|| format!("reading {}", file.display()))?;
        return show(&report, options.plot);
    }
    setup::ensure(&[Purpose::ControlPlane])?;
    let Some(manager) = options.released.manager("scale")? else { return Ok(()) };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut report = Report {
        date: Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: released::commit()?,
        cores: std::thread::available_parallelism()?.get(),
        nodes: options.nodes,
        rest_s: options.rest,
        figures: vec![],
    };
    let dir = root().join("bench/results");
    make_dir(&dir)?;
    let file = dir.join(format!("scale-{}.json", report.date.replace(':', "")));
    for count in &options.counts {
        eprintln!("· {count} VMs ...");
        report.figures.push(runtime.block_on(measure(*count, manager, options))?);
        // After each number: the last one may take long, or fail.
        write(&file, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    show(&report, options.plot)?;
    println!("The figures are in {}.", file.strip_prefix(root()).unwrap_or(&file).display());
    Ok(())
}

fn show(report: &Report, plot: bool) -> Result<()> {
    println!("{}", table::of(report));
    if plot {
        plot::draw(&report.figures, &root().join("docs/scale.svg"))?;
    }
    Ok(())
}

async fn measure(count: usize, program: &Path, options: &Options) -> Result<Figures> {
    let wants = |is: fn(Step) -> bool| Step::value_variants().iter().any(|&step| is(step) && options.wants(step));
    let mut figures = Figures { n: count, rss_empty: 0.0, steps: vec![] };
    if wants(Step::is_of_running) {
        let scene = Scene::start(program, count, options.nodes, Fate::Run).await?;
        let (manager, rss_empty) = scene.manager().await?;
        figures.rss_empty = rss_empty;
        scene.running(manager, options, &mut figures).await?;
    }
    if wants(|step| !step.is_of_running()) {
        let scene = Scene::start(program, count, options.nodes, options.lacking.fate()).await?;
        let (manager, _) = scene.manager().await?;
        scene.stuck(manager, options, &mut figures).await?;
    }
    Ok(figures)
}
