//! The development helper: clusters for tests and for trying out, container images, the demo.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this program speaks to a person at a terminal")]

mod bench;
mod binaries;
mod chart;
mod cluster;
mod components;
mod demo;
mod faults;
mod guest;
mod images;
mod inside;
mod network;
mod node;
mod pki;
mod programs;
mod release;
mod reproducible;
#[path = "../support/requests.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod requests;
mod sbom;
mod scale;
mod setup;
mod soak;
mod sweep;
mod testrun;
mod tools;
mod tools_image;
mod values_table;
mod web_assets;

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

/// Builds, tests and tries out vm-operator
#[derive(Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what is missing on this machine (Debian packages, as root), and say what and why
    Setup {
        /// What the machine is to be good for
        #[arg(long = "for", value_enum, default_value = "all")]
        purpose: setup::Purpose,
    },
    /// A real one-node Kubernetes on this machine
    #[command(subcommand)]
    Cluster(ClusterTask),
    /// Build the container images into .dev/images
    Images {
        /// How to build the programs
        #[arg(long, value_enum, default_value = "dev")]
        profile: programs::Profile,
        /// Build no programs: take the static ones that are in this folder
        #[arg(long, value_name = "FOLDER", conflicts_with = "profile")]
        programs: Option<PathBuf>,
        #[command(flatten)]
        target: Target,
        /// Ask no registry: make the base image from Debian's packages
        #[arg(long)]
        offline: bool,
        /// Then make them known to the cluster of this directory
        #[arg(long, value_name = "DIR")]
        import: Option<PathBuf>,
    },
    /// Push the images, which were built for a registry, to it, and write their digests into dist/images.txt
    Push(Target),
    /// Build what a release has beside its images into dist: archives of the programs, packages, SBOMs, the Helm chart, install.yaml, SHA256SUMS
    Dist {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        installation: Installation,
        /// The URL of the folder from which people download these files, for krew's manifest
        ///
        /// Default, if the registry is ghcr.io/OWNER/REPO: the release of that repository at GitHub.
        #[arg(long, value_name = "URL")]
        downloads: Option<String>,
    },
    /// Write an SBOM (CycloneDX) of each program into dist
    Sbom,
    /// Build the programs of a release twice, in different directories, and compare them
    Reproducible {
        #[command(flatten)]
        target: Target,
        /// The programs; by default all
        programs: Vec<String>,
    },
    /// Print one manifest with the CustomResourceDefinitions and the manager
    Manifest {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        installation: Installation,
    },
    /// Build the tiny guest of tests and of the demo into .dev/guest, as a disk and as a container image
    Guest,
    /// Generate crds/*.yaml, and their copies in the Helm chart, from the types
    Crds,
    /// Make the web interface's scripts out of noVNC and xterm.js (needs npm)
    WebAssets,
    /// Write deploy/*.yaml from the Helm chart, with a Helm that is built from its Go modules
    Manifests,
    /// Test the Helm chart: what it renders, what it refuses, and an installation on a real API server
    ChartTest,
    /// Run all tests; the last line says how many passed, failed and were skipped
    Test {
        /// Only tests whose names contain one of these
        #[arg(last = true)]
        filters: Vec<String>,
    },
    /// The manager against a bare client that makes the same writes; docs/performance.md says more
    Bench(bench::Options),
    /// How the manager's work grows with the number of VMs; docs/scale.md says more
    Scale(scale::Options),
    /// Everything at once on some hundred VMs: whether a manager needs more and more
    Soak(soak::Options),
    /// From nothing to a running guest, on this machine or on the cluster of KUBECONFIG
    Demo {
        /// Ask no registry for base images
        #[arg(long)]
        offline: bool,
    },
    /// Take the demo away again
    DemoDown,
    /// The machine's kubectl, or the one of our build where it has none
    Kubectl {
        /// What kubectl is to do
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
    /// Print the path of Helm (built from its Go modules once)
    #[command(hide = true)]
    Helm,
    /// Print the folder with Flux's kustomize-controller and its definition (built from its Go modules once)
    #[command(hide = true)]
    KustomizeController,
    /// Print the folder with Flux's helm-controller and its definition (built from its Go modules once)
    #[command(hide = true)]
    HelmController,
    /// Print the folder with Argo CD, what it needs, and its definitions (built from its Go modules once)
    #[command(hide = true)]
    ArgoCd,
    /// Read an object as JSON and print what kstatus makes of it (built from its Go module)
    Kstatus,
}

#[derive(Args)]
struct Target {
    /// Where the images are, such as ghcr.io/example
    #[arg(long, default_value = images::NO_REGISTRY)]
    registry: String,
}

#[derive(Args)]
struct Installation {
    /// The namespace of the manager and of its VMs
    #[arg(long, default_value = "vm-operator")]
    namespace: String,
}

#[derive(Args)]
struct Place {
    /// The cluster's directory; its kubeconfig is in it
    #[arg(long, default_value_os_t = tools::dev_dir().join("cluster"))]
    dir: PathBuf,
}

#[derive(Subcommand)]
enum ClusterTask {
    /// Start a cluster in the background; it stays until `down`
    Up {
        #[command(flatten)]
        place: Place,
        /// Only the control plane: no node, no root needed
        #[arg(long)]
        control_plane: bool,
    },
    /// End the cluster and remove all that it left
    Down(Place),
    /// Say how the cluster is
    Status(Place),
    /// Make container images (archives) known to the cluster
    Import {
        #[command(flatten)]
        place: Place,
        /// OCI or Docker archives
        #[arg(required = true)]
        archives: Vec<PathBuf>,
    },
    /// Give an image that the cluster knows another name
    Tag {
        #[command(flatten)]
        place: Place,
        /// The name that it has
        image: String,
        /// The new name
        name: String,
    },
    /// Run a cluster in the foreground, for a test process
    ///
    /// Prints a line of JSON with the path of the kubeconfig when the cluster can be used. Ends when standard input
    /// ends, or with SIGTERM, SIGINT or SIGHUP. On standard input lines "begin NAME", "passed NAME" and "failed
    /// NAME" say what becomes of the tests: the logs are kept if one failed, or had no end.
    Run {
        #[command(flatten)]
        place: Place,
        /// Only the control plane: no node, no root needed
        #[arg(long)]
        control_plane: bool,
        /// Only the API server, without controllers
        #[arg(long, hide = true)]
        api_server: bool,
        /// Do not end with standard input
        #[arg(long, hide = true)]
        detached: bool,
    },
    /// The parent of the components
    #[command(hide = true)]
    Inside,
    /// Cleans up when the supervisor is gone
    #[command(hide = true)]
    Guard(Place),
}

/// Does a task; whether it was successful is only to be told by the exit code where the task has said the rest.
fn run(task: Task) -> Result<bool> {
    match task {
        Task::Test { filters } => return testrun::run(&filters),
        Task::Guest => {
            setup::ensure(&[setup::Purpose::Guest])?;
            println!("{}", guest::disk()?.display());
            println!("{}", guest::image()?.display());
            Ok(())
        }
        Task::Crds => chart::write_definitions(),
        Task::Manifests => chart::write_manifests(),
        Task::WebAssets => web_assets::build(),
        Task::ChartTest => chart::test(),
        Task::Bench(options) => bench::run_bench(&options),
        Task::Scale(options) => scale::run_scale(&options),
        Task::Soak(options) => return soak::run_soak(&options),
        Task::Demo { offline } => demo::up(offline),
        Task::DemoDown => demo::down(),
        // It takes our place, with all that belongs to it: terminal, signals, exit code.
        Task::Kubectl { args } => Err(binaries::kubectl_command()?.args(args).exec().into()),
        Task::Helm => {
            println!("{}", binaries::helm()?.display());
            Ok(())
        }
        Task::KustomizeController => {
            println!("{}", binaries::kustomize_controller()?.display());
            Ok(())
        }
        Task::HelmController => {
            println!("{}", binaries::helm_controller()?.display());
            Ok(())
        }
        Task::ArgoCd => {
            println!("{}", binaries::argo_cd()?.display());
            Ok(())
        }
        Task::Kstatus => {
            let module = tools::root().join("tests/kstatus");
            let error = std::process::Command::new("go").args(["run", "."]).current_dir(module).exec();
            Err(error).context("kstatus is built from its Go module: install Go (https://go.dev/dl)")
        }
        Task::Setup { purpose } => {
            setup::ensure(&[purpose])?;
            println!("All is there.");
            Ok(())
        }
        Task::Push(target) => images::push(&target.registry),
        Task::Dist { target, installation, downloads } => {
            release::dist(&target.registry, &installation.namespace, downloads.as_deref())
        }
        Task::Sbom => {
            for file in sbom::write_into(&tools::root().join("dist"), &programs::ALL)? {
                println!("dist/{file}");
            }
            Ok(())
        }
        Task::Reproducible { target, programs } => return reproducible::compare(&target.registry, &programs),
        Task::Manifest { target, installation } => {
            print!("{}", release::manifest(&target.registry, &installation.namespace)?);
            Ok(())
        }
        Task::Images { profile, programs, target, offline, import } => {
            setup::ensure(&[setup::Purpose::Images])?;
            let source = programs.map_or(programs::Source::Build(profile), programs::Source::Folder);
            let archives = images::build(&source, &target.registry, offline)?;
            for (name, archive) in images::names(&target.registry).zip(&archives) {
                println!("{name}  {}", archive.display());
            }
            import.map_or(Ok(()), |dir| cluster::import(&dir, &archives))
        }
        Task::Cluster(task) => match task {
            ClusterTask::Up { place, control_plane } => {
                let start = std::time::Instant::now();
                let kubeconfig = cluster::up(&place.dir, control_plane)?;
                println!("The cluster is ready ({:.1} s). Try:", start.elapsed().as_secs_f32());
                println!("  export KUBECONFIG={}", kubeconfig.display());
                Ok(())
            }
            ClusterTask::Down(place) => cluster::down(&place.dir),
            ClusterTask::Status(place) => cluster::status(&place.dir),
            ClusterTask::Import { place, archives } => cluster::import(&place.dir, &archives),
            ClusterTask::Tag { place, image, name } => cluster::tag(&place.dir, &image, &name),
            ClusterTask::Run { place, control_plane, api_server, detached } => {
                let extent = match (control_plane, api_server) {
                    (_, true) => cluster::Extent::ApiServer,
                    (true, false) => cluster::Extent::ControlPlane,
                    (false, false) => cluster::Extent::Node,
                };
                cluster::run_in_foreground(&place.dir, extent, detached)
            }
            ClusterTask::Inside => inside::run(),
            ClusterTask::Guard(place) => cluster::guard(&place.dir),
        },
    }
    .map(|()| true)
}

/// `su` alone leaves the directories of root's programs off the PATH. What we start wants them there, and what that
/// starts in turn: so it is the PATH of this very process that they have to be on.
fn take_the_whole_path() -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let missing: Vec<PathBuf> =
        tools::SYSTEM_DIRS.iter().map(PathBuf::from).filter(|dir| !dirs.contains(dir)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    dirs.extend(missing);
    let program = std::env::current_exe().context("finding this program")?;
    let mut again = std::process::Command::new(program);
    Err(again.args(std::env::args_os().skip(1)).env("PATH", std::env::join_paths(dirs)?).exec().into())
}

fn main() -> ExitCode {
    if let Err(error) = take_the_whole_path() {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    match run(Arguments::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
