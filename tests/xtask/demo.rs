//! From nothing to a running guest, step by step.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use crate::binaries::{Binaries, kubectl_command};
use crate::images::NO_REGISTRY;
use crate::programs::{Profile, Source};
use crate::setup::{self, Purpose};
use crate::tools::{dev_dir, is_root, last_lines, root, run, run_raw};
use crate::{cluster, guest, images};

/// The resources, as a user deploys them.
const CRDS: &str = "crds";
/// The manager of the demo, and what its VM boots from.
const QUICKSTART: &str = "example/quickstart";
/// The VM itself.
const MACHINE: &str = "example/quickstart/vm.yaml";
const NAMESPACE: &str = "vmop-demo";
const VM: &str = "demo";
/// What the small guest begins its lines on the console with.
const GUEST_MARK: &str = "guest:";
/// A guest without hardware acceleration takes its time.
const PATIENCE: Duration = Duration::from_secs(120);

/// The cluster of the demo.
struct Demo {
    kubeconfig: PathBuf,
    /// Its directory, if it is ours.
    dir: Option<PathBuf>,
    /// Which images it has: the same names may have meant others before.
    images: String,
}

/// Prints what is being done, and how long it took.
fn step<T>(name: &str, action: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    eprintln!("· {name} ...");
    let value = action().with_context(|| format!("✗ {name}"))?;
    eprintln!("✓ {name} ({:.1} s)", start.elapsed().as_secs_f32());
    Ok(value)
}

/// The cluster that KUBECONFIG names, unless that is the demo's own.
fn foreign_kubeconfig() -> Result<Option<PathBuf>> {
    let Some(value) = std::env::var_os("KUBECONFIG").filter(|value| !value.is_empty()) else { return Ok(None) };
    let path = std::path::absolute(&value).with_context(|| format!("KUBECONFIG={}", value.display()))?;
    let own = own_dir().join("kubeconfig");
    if path == own || path.canonicalize().is_ok_and(|path| own.canonicalize().is_ok_and(|own| path == own)) {
        return Ok(None);
    }
    // It may be a list of files, which is kubectl's business.
    if std::env::split_paths(&value).count() > 1 {
        return Ok(Some(value.into()));
    }
    if !path.is_file() {
        bail!("KUBECONFIG={}: there is no such file; unset KUBECONFIG to have a cluster started", value.display());
    }
    Ok(Some(path))
}

/// Where the demo's own cluster lives.
fn own_dir() -> PathBuf {
    dev_dir().join("cluster")
}

/// The directory of a cluster that `cargo xtask cluster up` has started elsewhere: it takes images.
fn other_dir(kubeconfig: &Path) -> Option<PathBuf> {
    kubeconfig.parent().filter(|dir| cluster::has_node(dir)).map(Path::to_owned)
}

/// Does it all.
pub fn up(offline: bool) -> Result<()> {
    let start = Instant::now();
    for path in [CRDS, QUICKSTART, MACHINE] {
        if !root().join(path).exists() {
            bail!("{path} is missing: the demo deploys it");
        }
    }
    let foreign = foreign_kubeconfig()?;
    let dir = match &foreign {
        Some(kubeconfig) => {
            eprintln!("Using the cluster of KUBECONFIG={}.", kubeconfig.display());
            other_dir(kubeconfig)
        }
        None if !is_root() => bail!(
            "the demo starts a Kubernetes with a node on this machine, and that takes root: run this as root, or set \
             KUBECONFIG to a cluster that it may use"
        ),
        None => Some(own_dir()),
    };
    let demo = match dir {
        None => {
            eprintln!("Its nodes must know these images, or be able to pull them:");
            for name in images::names(NO_REGISTRY).chain([guest::image_name()]) {
                eprintln!("  {name}");
            }
            eprintln!("`cargo xtask images` and `cargo xtask guest` make them as archives in .dev, for example for");
            eprintln!("`kind load image-archive` or `ctr -n k8s.io images import` on each node.");
            Demo { kubeconfig: foreign.unwrap_or_default(), dir: None, images: String::new() }
        }
        Some(dir) => {
            step("What the machine needs", || setup::ensure(&[Purpose::Demo]))?;
            step("Kubernetes", || Binaries::find_or_build(true).map(drop))?;
            let mut archives =
                step("Container images", || images::build(&Source::Build(Profile::Dev), NO_REGISTRY, offline))?;
            archives.push(step("The guest", guest::image)?);
            let kubeconfig = match foreign {
                Some(kubeconfig) => kubeconfig,
                None => step("Cluster", || cluster::up(&dir, false))?,
            };
            step("Images into the cluster", || cluster::import(&dir, &archives))?;
            let built =
                archives.iter().map(|archive| Ok(fs::metadata(archive)?.modified()?.duration_since(UNIX_EPOCH)?));
            let images =
                built.map(|time: Result<Duration>| Ok(time?.as_millis().to_string())).collect::<Result<Vec<_>>>()?;
            Demo { kubeconfig, dir: Some(dir), images: images.join("-") }
        }
    };
    demo.deploy().inspect_err(|_| demo.explain())?;
    demo.show_console();
    eprintln!("\nThe guest runs ({:.0} s in all). Now try:", start.elapsed().as_secs_f32());
    demo.what_to_try()
}

/// Takes away what `up` has made.
pub fn down() -> Result<()> {
    let Some(kubeconfig) = foreign_kubeconfig()? else { return cluster::down(&own_dir()) };
    let demo = Demo { kubeconfig, dir: None, images: String::new() };
    step("Removing the demo from the cluster of KUBECONFIG", || {
        // The machine first, while there is a manager that lets go of it.
        demo.kubectl(&["delete", "--ignore-not-found", "--timeout=120s", "--filename", MACHINE])?;
        demo.kubectl(&["delete", "--ignore-not-found", "--timeout=120s", "--kustomize", QUICKSTART]).map(drop)
    })?;
    println!("The CustomResourceDefinitions stay, because other VMs may be in the cluster: kubectl delete -f {CRDS}");
    Ok(())
}

impl Demo {
    fn command(&self, args: &[&str]) -> Result<Command> {
        let mut command = kubectl_command()?;
        command.args(args).env("KUBECONFIG", &self.kubeconfig).current_dir(root());
        Ok(command)
    }

    fn kubectl(&self, args: &[&str]) -> Result<String> {
        run(&mut self.command(args)?)
    }

    fn deploy(&self) -> Result<()> {
        step("The resources", || {
            self.kubectl(&["apply", "--server-side", "--filename", CRDS])?;
            self.kubectl(&["wait", "--for=condition=Established", "--timeout=30s", "--filename", CRDS]).map(drop)
        })?;
        step("The manager's manifests", || {
            self.kubectl(&["apply", "--server-side", "--kustomize", QUICKSTART]).map(drop)
        })?;
        step("The manager runs", || {
            let of_manager = ["deployment/vm-operator", "--namespace", NAMESPACE];
            let annotations = json!({ "vm-operator-demo/images": self.images });
            let patch = json!({ "spec": { "template": { "metadata": { "annotations": annotations } } } }).to_string();
            self.kubectl(&[&["patch"], &of_manager[..], &["--patch", &patch]].concat())?;
            self.kubectl(&[&["rollout", "status", "--timeout=90s"], &of_manager[..]].concat()).map(drop)
        })?;
        step("The guest's disk is in place", || {
            let args = ["wait", "job", "--all", "--for=condition=Complete", "--timeout=90s", "--namespace", NAMESPACE];
            self.kubectl(&args).map(drop)
        })?;
        step("The VM's manifest", || self.kubectl(&["apply", "--server-side", "--filename", MACHINE]).map(drop))?;
        for (condition, name) in [("Running", "The VM runs"), ("Booted", "The guest has booted")] {
            step(name, || self.wait_for(condition))?;
        }
        Ok(())
    }

    fn wait_for(&self, condition: &str) -> Result<()> {
        let start = Instant::now();
        let mut last = String::new();
        loop {
            let output = run_raw(&mut self.command(&["get", "vm", VM, "--namespace", NAMESPACE, "--output=json"])?)?;
            let vm: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            let conditions = vm["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let find = |name: &str| conditions.iter().find(|found| found["type"] == name);
            if find(condition).is_some_and(|found| found["status"] == "True") {
                return Ok(());
            }
            if let Some(ready) = find("Ready") {
                let now = ready["message"].as_str().unwrap_or_default();
                if now != last {
                    eprintln!("    {now}");
                    last = now.to_owned();
                }
            }
            if start.elapsed() > PATIENCE {
                return Err(anyhow!("waited {} s in vain for the condition {condition} of the VM", PATIENCE.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(250));
        }
    }

    /// After a failed step: what the cluster knows about it. None of this may hide the failure itself.
    fn explain(&self) {
        let sections: [(&str, &[&str]); 4] = [
            ("Objects", &["get", "vm,pod,pvc,deployment", "--output=wide"]),
            (
                "The VM's conditions",
                &[
                    "get",
                    "vm",
                    VM,
                    "--output=jsonpath={range .status.conditions[*]}{.type}={.status} {.reason} {.message}{\"\\n\"}{end}",
                ],
            ),
            ("Events", &["get", "events", "--sort-by=.lastTimestamp", "--field-selector=type!=Normal"]),
            (
                "Pods' logs",
                &["logs", "--selector=!no-such-label", "--all-containers", "--prefix", "--tail=15", "--ignore-errors"],
            ),
        ];
        for (title, args) in sections {
            let Ok(mut command) = self.command(&[args, &["--namespace", NAMESPACE]].concat()) else { return };
            let Ok(output) = run_raw(&mut command) else { return };
            let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            eprint!("{title}:\n{}", last_lines(&text, 30));
        }
        eprintln!("To look around: export KUBECONFIG={}", self.kubeconfig.display());
        if let Some(dir) = &self.dir {
            eprintln!("The logs of the cluster itself: {}", dir.join("logs").display());
        }
        eprintln!("To try again: make demo; to begin anew: make demo-down demo");
    }

    /// What the guest has said, from its Pod's log.
    fn show_console(&self) {
        let Ok(log) = self.kubectl(&["logs", VM, "--namespace", NAMESPACE, "--all-containers"]) else { return };
        let said: Vec<&str> = log.lines().filter(|line| line.contains(GUEST_MARK)).collect();
        let text = if said.is_empty() { log.clone() } else { said.join("\n") };
        eprint!("\nOn the guest's console:\n{}", last_lines(&text, 12));
        let _ = std::io::stderr().flush();
    }

    fn what_to_try(&self) -> Result<()> {
        let from_here = |path: &Path| {
            let below = std::env::current_dir().ok().and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
            below.map_or_else(|| path.display().to_string(), |below| format!("$PWD/{}", below.display()))
        };
        let (kubeconfig, bin) = (from_here(&self.kubeconfig), from_here(&link_programs()?));
        println!("  export KUBECONFIG={kubeconfig} PATH={bin}:$PATH");
        println!("  kubectl -n {NAMESPACE} get vms                  # the VM and its state");
        println!("  kubectl -n {NAMESPACE} get all,cm,secret,pvc     # what was made of it");
        println!("  kubectl -n {NAMESPACE} logs -f {VM}              # its console");
        println!("  kubectl vm diff {VM} -n {NAMESPACE}              # what the manager would change now: nothing");
        println!("  kubectl vm explain {VM} -n {NAMESPACE}           # whether it is as it should be, and if not, why");
        println!(
            "  kubectl -n {NAMESPACE} patch vm {VM} --type merge -p '{{\"spec\":{{\"vm\":{{\"state\":\"Stopped\"}}}}}}'   # shut it down"
        );
        println!("  make demo-down                               # take all of it away");
        Ok(())
    }
}

/// A folder for the PATH, with links to `kubectl-vm` as it was built beside this program, and to kubectl if the machine has none.
fn link_programs() -> Result<PathBuf> {
    let folder = root().join(".dev/bin");
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let mut programs = vec![std::env::current_exe()?.with_file_name("kubectl-vm")];
    if crate::tools::find_program("kubectl").is_none() {
        programs.push(PathBuf::from(crate::binaries::kubectl_command()?.get_program()));
    }
    for program in programs.iter().filter(|program| program.exists()) {
        let link = folder.join(program.file_name().unwrap_or_default());
        if link.symlink_metadata().is_ok() {
            fs::remove_file(&link).with_context(|| format!("removing {}", link.display()))?;
        }
        symlink(program, &link).with_context(|| format!("linking {}", link.display()))?;
    }
    Ok(folder)
}
