//! The process that is the parent of all components of one cluster. Whoever ends it ends the cluster.

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{WaitOptions, wait};
use serde::{Deserialize, Serialize};

use crate::components::{Components, Plan};
use crate::faults;
use crate::node;

/// What it tells its supervisor, a line each.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// The namespaces are there, the plan may come.
    Started,
    /// The cluster can be used.
    Ready,
    /// It cannot, or not any more.
    Failed(String),
}

fn report(report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(report)?)?;
    Ok(out.flush()?)
}

/// Runs the components until one of them ends.
pub fn run() -> Result<()> {
    if std::process::id() == 1 {
        return init();
    }
    report(&Report::Started)?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("reading the plan")?;
    let plan: Plan = serde_json::from_str(&line).context("reading the plan")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // On this very thread: a component gets its death signal when the thread that started it ends.
    let result: Result<()> = runtime.block_on(async {
        let mut components = Components::new(plan.clone())?;
        match &plan.node {
            Some(node) => node::start(&mut components, &plan, node).await?,
            None => {
                components.start_api_server()?;
                components.finish_control_plane().await?;
            }
        }
        report(&Report::Ready)?;
        let mut ordered = faults::ordered();
        loop {
            tokio::select! {
                Some(fault) = ordered.recv() => fault?.happen(&mut components).await?,
                () = tokio::time::sleep(Duration::from_secs(1)) => components.check()?,
            }
        }
    });
    match result {
        Err(error) => report(&Report::Failed(format!("{error:#}"))),
        Ok(()) => Ok(()),
    }
}

/// The first process of a PID namespace is the parent of all orphans, and has to bury them.
fn init() -> Result<()> {
    let dir = std::env::var_os("VM_OPERATOR_CLUSTER_DIR").context("VM_OPERATOR_CLUSTER_DIR is not set")?;
    let program = std::env::current_exe().context("finding this program")?;
    if let Err(error) = node::mount_all(Path::new(&dir)) {
        return report(&Report::Failed(format!("{error:#}")));
    }
    let child =
        Command::new(program).args(["cluster", "inside"]).spawn().context("starting the parent of the components")?;
    loop {
        match wait(WaitOptions::empty()).context("waiting for a child")? {
            Some((pid, _)) if pid.as_raw_nonzero().get().unsigned_abs() == child.id() => return Ok(()),
            _ => {}
        }
    }
}
