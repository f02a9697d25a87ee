//! Cleaning up what the kernel does not take away with the namespaces of a cluster.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::node::cgroup_hierarchies;
use crate::tools::{read, remove, run, run_raw, wait_for, write};

/// The file in the cluster's directory that says whose it is.
pub const STATE: &str = "state.json";

/// A process, and when it started: its number alone may be another's by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    started: u64,
}

impl Process {
    fn find(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name of the program is in parentheses and may hold anything.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        if fields.first() == Some(&"Z") {
            return None;
        }
        Some(Self { pid, started: fields.get(19)?.parse().ok()? })
    }

    fn is_alive(self) -> bool {
        Self::find(self.pid) == Some(self)
    }

    fn signal(self, signal: Signal) -> Result<()> {
        if !self.is_alive() {
            return Ok(());
        }
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("not a process number")?;
        kill_process(pid, signal).with_context(|| format!("sending a signal to process {}", self.pid))
    }
}

/// What must be known of a cluster to end it and to clean up after it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    supervisor: Option<Process>,
    inside: Option<Process>,
    /// The first process in the PID namespace: when it is gone, all are gone.
    pub init: Option<Process>,
    /// The control group of its containers.
    pub cgroup: Option<String>,
    /// Whether it can be used.
    pub ready: bool,
}

impl State {
    /// The state of a cluster whose supervisor is this process.
    pub fn new(inside: Option<u32>) -> Self {
        Self {
            supervisor: Process::find(std::process::id()),
            inside: inside.and_then(Process::find),
            init: None,
            cgroup: None,
            ready: false,
        }
    }

    /// Writes it to the cluster's directory.
    pub fn save(&self, dir: &Path) -> Result<()> {
        let unfinished = dir.join("state.tmp");
        write(&unfinished, serde_json::to_string(self)?)?;
        fs::rename(&unfinished, dir.join(STATE)).with_context(|| format!("writing {}", dir.join(STATE).display()))
    }

    /// Reads it from there.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join(STATE);
        serde_json::from_str(&read(&path)?).with_context(|| format!("reading {}", path.display()))
    }

    /// Asks the supervisor to end the cluster.
    pub fn stop(&self) -> Result<()> {
        self.supervisor.map_or(Ok(()), |process| process.signal(Signal::TERM))
    }
}

/// Whether the supervisor of a directory's cluster lives.
pub fn is_alive(dir: &Path) -> bool {
    State::load(dir).is_ok_and(|state| state.supervisor.is_some_and(Process::is_alive))
}

/// The child of a process that has just one.
pub fn only_child(pid: u32) -> Option<Process> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    Process::find(children.split_whitespace().next()?.parse().ok()?)
}

/// Cleans up after the cluster that was in `dir`, and after the test clusters beside it whose supervisor and guard
/// both were killed.
pub fn sweep_all(dir: &Path) -> Result<()> {
    sweep(dir)?;
    // Not the directory itself: it is held.
    for entry in fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))?.flatten() {
        remove(&entry.path())?;
    }
    let Some(siblings) = dir.parent().and_then(|parent| fs::read_dir(parent).ok()) else { return Ok(()) };
    let mut kept = vec![];
    for sibling in siblings.flatten().map(|entry| entry.path()) {
        if sibling != dir && sibling.join(STATE).exists() && !is_alive(&sibling) {
            if sibling.join("etcd").exists() {
                sweep(&sibling)?;
            }
            kept.push((fs::metadata(sibling.join(STATE)).and_then(|meta| meta.modified()).ok(), sibling));
        }
    }
    // The logs of the last failures are enough.
    kept.sort();
    kept.reverse();
    for (_, old) in kept.into_iter().skip(5) {
        remove(&old)?;
    }
    Ok(())
}

/// Waits until the processes of a cluster are gone, and removes what they leave: loop devices, control groups.
pub fn sweep(dir: &Path) -> Result<()> {
    let Ok(state) = State::load(dir) else { return Ok(()) };
    for process in [state.inside, state.init].into_iter().flatten() {
        // The kernel has done so already, unless something is very wrong.
        let mut patience = 100;
        wait_for("the cluster's processes to end", Duration::from_secs(30), || {
            patience -= 1;
            if patience == 0 {
                process.signal(Signal::KILL)?;
            }
            Ok((!process.is_alive()).then_some(()))
        })?;
    }
    wait_for("the components to end", Duration::from_secs(30), || Ok(components_of(dir).is_empty().then_some(())))?;
    wait_for("the loop devices to be free", Duration::from_secs(30), || {
        let devices = loops_of(dir)?;
        for device in &devices {
            // One that is open elsewhere, such as below another one, goes when that one has gone.
            run_raw(Command::new("losetup").arg("--detach").arg(device))?;
        }
        Ok(devices.is_empty().then_some(()))
    })?;
    if let Some(cgroup) = &state.cgroup {
        wait_for(
            "the control groups to be empty",
            Duration::from_secs(10),
            || Ok(remove_cgroup(cgroup).then_some(())),
        )?;
    }
    Ok(())
}

/// The components that run without namespaces. Their death signal has been sent; it may not have arrived yet.
fn components_of(dir: &Path) -> Vec<PathBuf> {
    let needle = format!("={}/", dir.display());
    let Ok(processes) = fs::read_dir("/proc") else { return vec![] };
    processes
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let Ok(line) = fs::read(path.join("cmdline")) else { return false };
            let line = String::from_utf8_lossy(&line);
            ["etcd", "kube-apiserver", "kube-controller-manager"]
                .iter()
                .any(|name| line.split('\0').next().is_some_and(|program| program.ends_with(name)))
                && line.contains(&needle)
        })
        .collect()
}

/// The loop devices of the cluster's volumes, and those that the kubelet has put on top of them (it does so to hold
/// a block volume while a Pod uses it). They are known by the inode of their file: its path changes when the mount
/// namespace in which it was opened goes.
fn loops_of(dir: &Path) -> Result<Vec<String>> {
    let Ok(volumes) = fs::read_dir(dir.join("volumes")) else { return Ok(vec![]) };
    let mut backing: Vec<String> = volumes.flatten().filter_map(|entry| identity(&entry.path().join("disk"))).collect();
    let list = run(Command::new("losetup")
        .args(["--list", "--noheadings", "--raw"])
        .args(["--output", "NAME,BACK-MAJ:MIN,BACK-INO"]))?;
    // Even raw output is padded.
    let list = list.replace("\\x20", " ");
    let mut all: Vec<(&str, String)> = list
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, file)| (name, file.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect();
    let mut mine = vec![];
    loop {
        let (found, rest): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(_, file)| backing.iter().any(|known| known == file));
        if found.is_empty() {
            // The upper ones first: they hold those below.
            mine.reverse();
            return Ok(mine);
        }
        backing = found.iter().filter_map(|(name, _)| identity(Path::new(name))).collect();
        mine.extend(found.iter().map(|(name, _)| (*name).to_owned()));
        all = rest;
    }
}

/// Device and inode of a file, as losetup writes them.
fn identity(path: &Path) -> Option<String> {
    let meta = fs::metadata(path).ok()?;
    let device = meta.dev();
    Some(format!("{}:{} {}", rustix::fs::major(device), rustix::fs::minor(device), meta.ino()))
}

/// Removes a control group and those below it; whether there is none any more.
pub fn remove_cgroup(name: &str) -> bool {
    fn remove_tree(path: &Path) -> bool {
        for child in fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if child.is_dir() {
                remove_tree(&child);
            }
        }
        let _ = fs::remove_dir(path);
        !path.exists()
    }
    // All of them, also when one can't be removed yet.
    let left = cgroup_hierarchies().iter().filter(|hierarchy| !remove_tree(&hierarchy.join(name))).count();
    left == 0
}
