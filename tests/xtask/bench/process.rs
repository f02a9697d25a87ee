//! The manager as a process, and what the kernel says about processes.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::load::LIMIT;
use crate::tools::{last_lines, read};

/// How long a manager uses no CPU time before it is said to be at rest.
const AT_REST: Duration = Duration::from_secs(1);

/// A running manager.
pub struct Manager {
    process: Child,
    log: PathBuf,
    /// When it was started.
    pub started: Instant,
}

impl Manager {
    /// Starts one that has its templates in the folder `templates` beside its log, which is written anew. One that is started after another
    /// need not wait for its lease.
    pub fn start(program: &Path, kubeconfig: &Path, namespace: &str, log: &Path) -> Result<Self> {
        Self::start_as("bench", program, kubeconfig, namespace, log)
    }

    /// Starts one that has this name in the lease.
    pub fn start_as(name: &str, program: &Path, kubeconfig: &Path, namespace: &str, log: &Path) -> Result<Self> {
        let templates = log.with_file_name("templates");
        std::fs::create_dir_all(&templates).with_context(|| format!("creating {}", templates.display()))?;
        let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let started = Instant::now();
        let process = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(["run", "--namespace", namespace, "--templates"])
            .arg(&templates)
            .env("KUBECONFIG", kubeconfig)
            .env("VM_OPERATOR_LISTEN", "127.0.0.1:0")
            .env("VM_OPERATOR_IDENTITY", name)
            // So that it can be seen which VMs were looked at.
            .env("RUST_LOG", "info,kube_runtime=warn,vm_operator::manager::reconcile=debug")
            .stdin(Stdio::null())
            .stderr(file)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Self { process, log: log.to_owned(), started })
    }

    /// What it has used so far.
    pub fn usage(&self) -> Result<Usage> {
        Usage::of(self.process.id())
    }

    /// What it holds.
    pub fn holdings(&self) -> Result<Holdings> {
        Holdings::of(self.process.id())
    }

    /// Waits until it does nothing any more; returns since when.
    pub async fn rest(&mut self) -> Result<Instant> {
        let begin = Instant::now();
        let (mut last, mut since) = (self.usage()?.cpu, begin);
        while since.elapsed() < AT_REST {
            tokio::time::sleep(Duration::from_millis(50)).await;
            self.check()?;
            let now = self.usage()?.cpu;
            if now > last {
                (last, since) = (now, Instant::now());
            }
            if begin.elapsed() > LIMIT {
                bail!("the manager has not come to rest in {} s", LIMIT.as_secs());
            }
        }
        Ok(since)
    }

    /// Waits until so many VMs were looked at since its start; returns when.
    pub async fn caught_up(&mut self, count: usize) -> Result<Instant> {
        let mut seen = Reconciled::in_log(&self.log)?;
        loop {
            if seen.count()? >= count {
                return Ok(Instant::now());
            }
            self.check()?;
            if self.started.elapsed() > LIMIT {
                bail!("the manager has looked at {} of {count} VMs in {} s", seen.vms.len(), LIMIT.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// How many lines of its log are warnings or worse.
    pub fn complaints(&self) -> Result<usize> {
        Ok(read(&self.log)?.lines().filter(|line| line.contains(" WARN ") || line.contains(" ERROR ")).count())
    }

    /// An error with its last words if it has ended.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.process.try_wait().context("asking for the state of the manager")? {
            bail!("the manager has ended ({status}):\n{}", last_lines(&read(&self.log)?, 12));
        }
        Ok(())
    }

    /// Kills it: it does not give its lease back.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill().context("killing the manager")?;
        self.process.wait().context("waiting for the manager").map(drop)
    }

    /// Ends it as Kubernetes does; returns how long that took.
    pub async fn stop(mut self) -> Result<Duration> {
        let begin = Instant::now();
        let pid = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw).context("the manager has no number")?;
        kill_process(pid, Signal::TERM).context("ending the manager")?;
        while self.process.try_wait().context("waiting for the manager")?.is_none() {
            if begin.elapsed() > Duration::from_secs(30) {
                bail!("the manager does not end when it is told to");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(begin.elapsed())
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The VMs that were reconciled, as a log says that grows.
struct Reconciled {
    log: BufReader<File>,
    /// The beginning of a line that is still being written.
    line: String,
    vms: HashSet<String>,
}

impl Reconciled {
    fn in_log(log: &Path) -> Result<Self> {
        let file = File::open(log).with_context(|| format!("opening {}", log.display()))?;
        Ok(Self { log: BufReader::new(file), line: String::new(), vms: HashSet::new() })
    }

    /// How many they are by now.
    fn count(&mut self) -> Result<usize> {
        while self.log.read_line(&mut self.line).context("reading the log of the manager")? > 0
            && self.line.ends_with('\n')
        {
            self.vms.extend(reconciled(self.line.trim_end()).map(str::to_owned));
            self.line.clear();
        }
        Ok(self.vms.len())
    }
}

/// The VM that was reconciled, if a line says that.
fn reconciled(line: &str) -> Option<&str> {
    let vm = line.strip_suffix(": reconciled")?.split_once("reconcile{vm=\"")?.1.split_once('/')?.1;
    vm.split_once('"').map(|(name, _)| name)
}

/// What a process holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Holdings {
    /// Open files.
    pub files: usize,
    /// Threads.
    pub threads: usize,
}

impl Holdings {
    fn of(pid: u32) -> Result<Self> {
        let count = |what: &str| {
            let folder = format!("/proc/{pid}/{what}");
            anyhow::Ok(fs::read_dir(&folder).with_context(|| format!("listing {folder}"))?.count())
        };
        Ok(Self { files: count("fd")?, threads: count("task")? })
    }
}

/// What a process has used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// CPU seconds.
    pub cpu: f64,
    /// Memory now, MB.
    pub rss: f64,
    /// The most memory ever, MB.
    pub peak: f64,
}

impl Usage {
    /// Of a process.
    pub fn of(pid: u32) -> Result<Self> {
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let status = read(&dir.join("status"))?;
        let memory = |field: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or_default();
            kib * 1024.0 / 1e6
        };
        let stat = read(&dir.join("stat"))?;
        // The name, in parentheses, may hold anything.
        let fields = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
        let ticks: f64 = fields.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        let cpu = ticks / rustix::param::clock_ticks_per_second() as f64;
        Ok(Self { cpu, rss: memory("VmRSS"), peak: memory("VmHWM") })
    }

    /// CPU seconds of the API server and etcd of a cluster.
    pub fn control_plane(dir: &Path) -> Result<f64> {
        let marks = [format!("--cert-dir={}/pki", dir.display()), format!("--data-dir={}/etcd", dir.display())];
        let mut cpu = 0.0;
        for entry in fs::read_dir("/proc").context("listing /proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let Ok(line) = fs::read(entry.path().join("cmdline")) else { continue };
            if line.split(|byte| *byte == 0).any(|word| marks.iter().any(|mark| mark.as_bytes() == word)) {
                cpu += Self::of(pid)?.cpu;
            }
        }
        Ok(cpu)
    }
}
