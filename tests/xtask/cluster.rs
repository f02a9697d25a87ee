//! A cluster for tests and for trying out: its supervisor, and the commands around it.
//!
//! Three processes see to it that nothing stays behind. The *supervisor* has the orders (standard input, signals).
//! *Inside* the namespaces, or beside it where there are none, is the parent of the components; the kernel ends it
//! with the supervisor. The *guard* does nothing but wait until the supervisor is gone, and then clean up what the
//! kernel does not: loop devices, control groups, the directory. It does so after each end, so that a normal end
//! and a SIGKILL take the same path.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::binaries::Binaries;
use crate::components::{NodePlan, Plan};
use crate::faults;
use crate::inside::Report;
use crate::network::Network;
use crate::node::INSIDE;
use crate::sweep::{self, State};
use crate::tools::{cache_dir, is_root, lies_on_overlay, make_dir, read, remove, run, try_hold, wait_for, write};
use crate::{pki, setup, tools_image};

enum Event {
    /// A line on standard input.
    Order(String),
    /// Standard input has ended.
    InputEnd,
    /// Something from inside.
    Report(Report),
    /// The parent of the components is gone.
    InsideEnd,
    Signal,
}

/// What a cluster consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// A node on which Pods run, and all that it takes.
    Node,
    /// The API server and the controllers.
    ControlPlane,
    /// The API server alone.
    ApiServer,
}

/// Runs a cluster in the foreground. `detached`: until a signal comes; else also until standard input ends.
pub fn run_in_foreground(dir: &Path, extent: Extent, detached: bool) -> Result<()> {
    let with_node = extent == Extent::Node;
    if with_node && !is_root() {
        bail!("a cluster with a node needs root; a control plane alone does not: --control-plane");
    }
    setup::ensure(&[if with_node { setup::Purpose::Cluster } else { setup::Purpose::ControlPlane }])?;
    let binaries = Binaries::find_or_build(with_node)?;
    let pause_image = if with_node { Some(tools_image::archive()?) } else { None };

    make_dir(dir)?;
    let dir = fs::canonicalize(dir).with_context(|| format!("finding {}", dir.display()))?;
    let dir = dir.as_path();
    let held = hold(dir)?;
    sweep::sweep_all(dir)?;
    make_dir(&dir.join("logs"))?;
    State::new(None).save(dir)?;

    let mut guard = start_guard(dir, held)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut inside = None;
    let result = runtime.block_on(async {
        let (mut child, output) = start_inside(dir, with_node)?;
        let mut input = child.stdin.take().context("no pipe to the parent of the components")?;
        let pid = child.id();
        inside = Some(child);
        State::new(Some(pid)).save(dir)?;
        let mut events = listen(output)?;
        let mut failed = Failed::default();
        let ready = supervise(&mut events, &mut input, dir, pid, extent, binaries, pause_image, detached, &mut failed);
        let result = ready.await;
        result.and_then(|()| failed.into_result())
    });
    if let Some(mut child) = inside {
        // unshare passes its end on to the namespaces; without them setpriv does so to the components.
        let _ = child.kill();
        let _ = child.wait();
    }
    let verdict = if result.is_ok() { "remove" } else { "keep" };
    guard.finish(verdict)?;
    result
}

/// Has the directory for one cluster. The guard of the one before, which may still clean up there, is waited for.
fn hold(dir: &Path) -> Result<fs::File> {
    wait_for("the cluster before this one to be cleaned up", Duration::from_secs(60), || {
        let held = try_hold(dir)?;
        if held.is_none() && sweep::is_alive(dir) {
            bail!("a cluster is running in {} already; end it with `cargo xtask cluster down`", dir.display());
        }
        Ok(held)
    })
}

/// The tests that have begun and not passed. If the test process ends and there are some, the logs are of interest.
#[derive(Default)]
struct Failed {
    open: BTreeSet<String>,
    failed: BTreeSet<String>,
}

impl Failed {
    fn order(&mut self, line: &str) {
        match line.split_once(' ') {
            Some(("begin", name)) => {
                self.open.insert(name.to_owned());
            }
            Some(("passed", name)) => {
                self.open.remove(name);
            }
            Some(("failed", name)) => {
                self.open.remove(name);
                self.failed.insert(name.to_owned());
            }
            _ => eprintln!("cluster: what is `{line}`?"),
        }
    }

    fn into_result(self) -> Result<()> {
        if !self.failed.is_empty() {
            bail!("tests failed: {}", Vec::from_iter(self.failed).join(", "));
        }
        if !self.open.is_empty() {
            bail!("the test process ended in the middle of: {}", Vec::from_iter(self.open).join(", "));
        }
        Ok(())
    }
}

#[expect(clippy::too_many_arguments, reason = "called once; a struct would only move the list")]
async fn supervise(
    events: &mut mpsc::UnboundedReceiver<Event>,
    input: &mut ChildStdin,
    dir: &Path,
    pid: u32,
    extent: Extent,
    binaries: Binaries,
    pause_image: Option<PathBuf>,
    detached: bool,
    failed: &mut Failed,
) -> Result<()> {
    let start = Instant::now();
    let mut state = State::new(Some(pid));
    let mut signal_seen = false;
    let mut input_ended = false;
    loop {
        if signal_seen || (input_ended && !detached) {
            return Ok(());
        }
        match events.recv().await {
            Some(Event::Order(line)) => match line.strip_prefix(faults::ORDER) {
                Some(fault) => writeln!(input, "{fault}").context("passing on a fault")?,
                None => failed.order(&line),
            },
            Some(Event::InputEnd) => input_ended = true,
            Some(Event::Signal) => signal_seen = true,
            Some(Event::Report(Report::Started)) => {
                let plan = make_plan(dir, pid, extent, binaries.clone(), pause_image.clone(), &mut state)?;
                state.save(dir)?;
                writeln!(input, "{}", serde_json::to_string(&plan)?).context("sending the plan inside")?;
            }
            Some(Event::Report(Report::Ready)) => {
                state.ready = true;
                state.save(dir)?;
                let seconds = start.elapsed().as_secs_f32();
                let line = json!({"kubeconfig": dir.join("kubeconfig"), "dir": dir, "seconds": seconds});
                let mut out = std::io::stdout().lock();
                let said = writeln!(out, "{line}").and_then(|()| out.flush());
                // Whoever has asked for it may be gone, by Ctrl-C: then it is there for the next one.
                if !detached {
                    said.context("saying that the cluster is ready")?;
                }
            }
            Some(Event::Report(Report::Failed(why))) => return Err(anyhow!(why)),
            Some(Event::InsideEnd) | None => bail!("the cluster in {} ended by itself; see its logs", dir.display()),
        }
    }
}

fn make_plan(
    dir: &Path,
    pid: u32,
    extent: Extent,
    binaries: Binaries,
    pause_image: Option<PathBuf>,
    state: &mut State,
) -> Result<Plan> {
    let (address, ports, node, seen) = match pause_image.filter(|_| extent == Extent::Node) {
        Some(pause_image) => {
            let network = Network::connect(pid)?;
            sweep::remove_cgroup(&network.cgroup());
            state.cgroup = Some(network.cgroup());
            state.init = sweep::only_child(pid);
            let node = NodePlan {
                link: network.link(),
                pods: network.pods(),
                cgroup: network.cgroup(),
                snapshotter: snapshotter(dir)?,
                pause_image,
            };
            // In a network of its own all ports are free.
            (network.address(), [6443, 2379, 2380], Some(node), PathBuf::from(INSIDE))
        }
        None => ([127, 0, 0, 1].into(), free_ports()?, None, dir.to_owned()),
    };
    pki::create(dir, &format!("https://{address}:{}", ports[0]), address)?;
    Ok(Plan { dir: seen, address, ports, binaries, controllers: extent != Extent::ApiServer, node })
}

/// overlayfs is fast, but cannot lie on itself, as it would in a container.
fn snapshotter(dir: &Path) -> Result<String> {
    Ok(if lies_on_overlay(dir)? { "native" } else { "overlayfs" }.to_owned())
}

fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    // All at once, or the kernel may give one twice.
    let mut held = vec![];
    for port in &mut ports {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).context("looking for a free port")?;
        *port = listener.local_addr().context("looking for a free port")?.port();
        held.push(listener);
    }
    Ok(ports)
}

fn start_inside(dir: &Path, with_node: bool) -> Result<(Child, ChildStdout)> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if with_node {
        command.args(["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]);
    }
    let mut child = command
        .arg(std::env::current_exe().context("finding this program")?)
        .args(["cluster", "inside"])
        .env("VM_OPERATOR_CLUSTER_DIR", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // Ctrl-C is for the supervisor, which then ends this one.
        .process_group(0)
        .spawn()
        .context("starting the parent of the components")?;
    let output = child.stdout.take().context("no pipe from the parent of the components")?;
    Ok((child, output))
}

fn listen(output: ChildStdout) -> Result<mpsc::UnboundedReceiver<Event>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let orders = sender.clone();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = orders.send(Event::Order(line));
        }
        let _ = orders.send(Event::InputEnd);
    });
    let reports = sender.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Ok(report) = serde_json::from_str(&line) {
                let _ = reports.send(Event::Report(report));
            }
        }
        let _ = reports.send(Event::InsideEnd);
    });
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        let mut signals = signal(kind).context("listening for signals")?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                let _ = sender.send(Event::Signal);
            }
        });
    }
    Ok(receiver)
}

struct Guard {
    child: Child,
    input: Option<ChildStdin>,
}

impl Guard {
    /// Tells the guard what shall become of the directory, and waits until all is clean.
    fn finish(&mut self, verdict: &str) -> Result<()> {
        if let Some(mut input) = self.input.take() {
            writeln!(input, "{verdict}").context("telling the guard")?;
        }
        let status = self.child.wait().context("waiting for the guard")?;
        if !status.success() {
            bail!("the cluster is gone, but cleaning up after it failed ({status})");
        }
        Ok(())
    }
}

fn start_guard(dir: &Path, held: fs::File) -> Result<Guard> {
    let mut child = Command::new(std::env::current_exe().context("finding this program")?)
        .args(["cluster", "guard", "--dir"])
        .arg(dir)
        .stdin(Stdio::piped())
        // It writes nothing there; so it holds the directory until all is clean, also when the supervisor is killed.
        .stdout(held)
        .process_group(0)
        .spawn()
        .context("starting the guard")?;
    let input = child.stdin.take();
    Ok(Guard { child, input })
}

/// Waits until the supervisor is gone, and cleans up.
pub fn guard(dir: &Path) -> Result<()> {
    let mut verdict = String::new();
    std::io::stdin().lock().read_line(&mut verdict).context("waiting for the supervisor")?;
    sweep::sweep(dir)?;
    if verdict.trim() == "remove" {
        return remove(dir);
    }
    for bulky in ["etcd", "containerd", "volumes", "kubelet", "run"] {
        remove(&dir.join(bulky))?;
    }
    let why = if verdict.is_empty() { "The supervisor of the cluster was killed. " } else { "" };
    eprintln!("{why}The cluster's logs are in {}", dir.join("logs").display());
    Ok(())
}

/// Starts a cluster in the background and returns when it can be used.
pub fn up(dir: &Path, control_plane: bool) -> Result<PathBuf> {
    let kubeconfig = dir.join("kubeconfig");
    // One whose start was interrupted goes on starting.
    let runs = wait_for("the cluster that is starting already", Duration::from_secs(120), || {
        if !sweep::is_alive(dir) {
            return Ok(Some(false));
        }
        Ok(State::load(dir).is_ok_and(|state| state.ready).then_some(true))
    })?;
    if runs {
        return Ok(kubeconfig);
    }
    // Here, where what takes long can be seen.
    setup::ensure(&[if control_plane { setup::Purpose::ControlPlane } else { setup::Purpose::Cluster }])?;
    Binaries::find_or_build(!control_plane)?;
    let log = cache_dir()?.join("cluster-up.log");
    make_dir(&cache_dir()?)?;
    let mut command = Command::new("setsid");
    command
        .arg(std::env::current_exe().context("finding this program")?)
        .args(["cluster", "run", "--detached", "--dir"])
        .arg(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(fs::File::create(&log).with_context(|| format!("creating {}", log.display()))?);
    if control_plane {
        command.arg("--control-plane");
    }
    let mut child = command.spawn().context("starting the supervisor")?;
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output).read_line(&mut line).context("waiting for the supervisor")?;
    }
    if line.is_empty() {
        let _ = child.wait();
        bail!("the cluster did not start:\n{}", read(&log)?.trim_end());
    }
    Ok(kubeconfig)
}

/// Ends the cluster of a directory.
pub fn down(dir: &Path) -> Result<()> {
    if sweep::is_alive(dir) {
        let state = State::load(dir)?;
        state.stop()?;
        wait_for("the supervisor to end", Duration::from_secs(60), || Ok((!sweep::is_alive(dir)).then_some(())))?;
        // The guard may still be at it, and keeps the logs of a cluster that had failed.
        let held = wait_for("the cluster to be cleaned up", Duration::from_secs(60), || try_hold(dir))?;
        remove(dir)?;
        drop(held);
        println!("The cluster in {} is gone.", dir.display());
    } else if dir.join(sweep::STATE).exists() {
        let held = wait_for("the cluster to be cleaned up", Duration::from_secs(60), || try_hold(dir))?;
        sweep::sweep(dir)?;
        remove(dir)?;
        drop(held);
        println!("No cluster ran in {}; what was left of one is gone.", dir.display());
    } else {
        println!("There is no cluster in {}.", dir.display());
    }
    Ok(())
}

/// Says how the cluster of a directory is.
pub fn status(dir: &Path) -> Result<()> {
    if !sweep::is_alive(dir) {
        println!("No cluster runs in {}. Start one with `cargo xtask cluster up`.", dir.display());
        return Ok(());
    }
    let state = State::load(dir)?;
    println!("directory   {}", dir.display());
    println!("kubeconfig  {}", dir.join("kubeconfig").display());
    println!("logs        {}", dir.join("logs").display());
    println!("state       {}", if state.ready { "ready" } else { "starting" });
    if state.ready {
        for args in [["get", "nodes"], ["get", "--raw=/readyz"]] {
            let text = run(crate::binaries::kubectl_command()?.args(args).env("KUBECONFIG", dir.join("kubeconfig")))?;
            println!("{}", text.trim_end());
        }
    }
    Ok(())
}

/// Whether the cluster of a directory runs and has a node.
pub fn has_node(dir: &Path) -> bool {
    sweep::is_alive(dir) && State::load(dir).is_ok_and(|state| state.init.is_some())
}

/// The command line of the containerd of the cluster's node, for images of Pods.
fn ctr_images(dir: &Path) -> Result<Command> {
    let state = State::load(dir).context("only a cluster that runs has images")?;
    let Some(init) = state.init else {
        bail!("the cluster in {} has no node, and so no images", dir.display());
    };
    let mut ctr = Command::new("nsenter");
    // Its root, too: this may run in a chroot.
    ctr.args(["--target", &init.pid.to_string(), "--mount", "--root", "ctr", "-a"])
        .arg(format!("{INSIDE}/containerd.sock"))
        .args(["-n", "k8s.io", "images"]);
    Ok(ctr)
}

/// Gives an image that the cluster's containerd knows another name.
pub fn tag(dir: &Path, image: &str, name: &str) -> Result<()> {
    run(ctr_images(dir)?.args(["tag", "--force", image, name])).with_context(|| format!("naming {image} {name}"))?;
    Ok(())
}

/// Makes images known to the cluster's containerd; one that it knows in this very version is left alone.
pub fn import(dir: &Path, archives: &[PathBuf]) -> Result<()> {
    ctr_images(dir)?;
    let seen = dir.join("imported");
    make_dir(&seen)?;
    for archive in archives {
        let archive = fs::canonicalize(archive).with_context(|| format!("finding {}", archive.display()))?;
        let meta = fs::metadata(&archive).with_context(|| format!("looking at {}", archive.display()))?;
        let version = format!("{} {:?}", meta.len(), meta.modified()?);
        let name = archive.to_string_lossy().replace('/', "_");
        let marker = seen.join(name);
        if fs::read_to_string(&marker).is_ok_and(|known| known == version) {
            continue;
        }
        run(ctr_images(dir)?.arg("import").arg(&archive))
            .with_context(|| format!("importing {}", archive.display()))?;
        write(&marker, version)?;
    }
    Ok(())
}
