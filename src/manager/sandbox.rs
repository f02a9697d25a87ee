//! Checks new templates in a separate process, so that a template which takes all memory or never ends does no harm to the manager.
//!
//! ```text
//!  manager ── job, then one VM a line (JSON) ──▶ vm-operator check-templates ── outcome or refusal (JSON) ──▶ manager
//! ```
//!
//! The template engine counts steps and [`render`](crate::render) limits the output, but a text that is joined with itself again and
//! again stays within both limits until memory ends.

use std::{
    io::{self, BufRead, BufReader, Write},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    observed::Observed,
    render::{
        self, RandomInput, TemplateError, TemplateSet,
        check::{self, Outcome, Refusal},
        templates::Layers,
    },
};

/// The subcommand of this program that checks.
pub const COMMAND: &str = "check-templates";
/// The memory that a check may take, in bytes.
const MEMORY: u64 = 256 << 20;
/// The CPU time that a check may take, in seconds, and the time.
const CPU: u64 = 60;
const TIME: Duration = Duration::from_secs(120);

/// What to check. The VMs follow.
#[derive(Serialize, Deserialize)]
struct Job {
    old: Option<Layers>,
    new: Layers,
    config: ReconcilerConfig,
    /// Only print the name of each template before it is rendered.
    trace: bool,
}

#[derive(Serialize, Deserialize)]
struct CheckedVm {
    vm: VirtualMachine,
    observed: Observed,
}

#[derive(Serialize, Deserialize)]
enum Report {
    Checked(Outcome),
    Refused(Refusal),
}

/// Why a check has no outcome.
#[derive(Debug)]
pub enum Failure {
    /// The templates can't be used.
    Refused(TemplateError, Option<Box<VirtualMachine>>),
    /// The check itself could not run.
    Io(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Runs [`check::check`] in a separate process.
///
/// # Errors
/// If the set is refused, also because rendering takes too much memory or time. Or if the process cannot be started.
pub async fn check<M>(
    old: Option<&TemplateSet>,
    new: &TemplateSet,
    vms: impl Fn() -> M,
    config: &ReconcilerConfig,
) -> Result<Outcome, Failure>
where
    M: Iterator<Item = (VirtualMachine, Observed)> + Send,
{
    let job = |trace| Job {
        old: old.map(|old| old.layers().clone()),
        new: new.layers().clone(),
        config: config.clone(),
        trace,
    };
    let (status, output) = run(&job(false), vms()).await?;
    if let (Some(0), Ok(report)) = (status.code(), serde_json::from_slice(&output)) {
        return match report {
            Report::Checked(outcome) => Ok(outcome),
            Report::Refused(Refusal { vm, error }) => Err(Failure::Refused(error, Some(vm))),
        };
    }
    // The process did not finish. Run it again to find the template.
    let (again, printed) = run(&job(true), vms()).await?;
    let printed = String::from_utf8_lossy(&printed);
    let last = printed.lines().last().filter(|_| !again.success()).unwrap_or("(a template)\t");
    let (place, vm) = last.split_once('\t').unwrap_or((last, ""));
    let mut error = TemplateError::refused(place, format!("it can't be rendered: {}", ended(status)));
    if !vm.is_empty() {
        error.message += &format!(" (VM {vm})");
    }
    Err(Failure::Refused(error, None))
}

fn ended(status: ExitStatus) -> String {
    let limits = format!("{} MiB of memory and {CPU} s are the most that all VMs together may take", MEMORY >> 20);
    format!("it takes too much memory or time ({status}); {limits}")
}

async fn run(
    job: &Job,
    vms: impl Iterator<Item = (VirtualMachine, Observed)> + Send,
) -> io::Result<(ExitStatus, Vec<u8>)> {
    // This very program, even if its file was replaced meanwhile.
    let mut child = Command::new("/proc/self/exe")
        .arg(COMMAND)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let mut input = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let feed = async move {
        let mut line = serde_json::to_vec(job)?;
        line.push(b'\n');
        input.write_all(&line).await?;
        for (vm, observed) in vms {
            line.clear();
            serde_json::to_writer(&mut line, &CheckedVm { vm, observed })?;
            line.push(b'\n');
            input.write_all(&line).await?;
        }
        io::Result::Ok(())
    };
    // At the same time, because each may have to wait for the other.
    let work = async { tokio::join!(feed, child.wait_with_output()) };
    let (fed, output) = timeout(TIME, work).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
    let output = output?;
    match fed {
        // The process ended before it had read everything. Its exit status says why.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok((output.status, output.stdout)),
    }
}

/// The other process: reads a job and VMs from standard input and writes the report.
///
/// # Errors
/// If standard input or output fails.
pub fn serve() -> io::Result<()> {
    let (input, output) = (BufReader::new(io::stdin().lock()), io::stdout().lock());
    setrlimit(Resource::Data, Rlimit { current: Some(MEMORY), maximum: Some(MEMORY) })?;
    setrlimit(Resource::Cpu, Rlimit { current: Some(CPU), maximum: Some(CPU) })?;
    // A core dump could contain secrets.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    work(input, output)
}

fn work(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    let mut lines = input.lines();
    let job = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
    let Job { old, new, config, trace } = serde_json::from_str(&job)?;
    let vms = lines.map_while(Result::ok).filter_map(|line| {
        let CheckedVm { vm, observed } = serde_json::from_str(&line).ok()?;
        Some((vm, observed))
    });
    // The manager has compiled both before.
    let compiled = |layers| TemplateSet::compile(layers).map_err(io::Error::other);
    let new = compiled(new)?;
    if trace {
        // Errors do not matter here.
        let random = RandomInput { display_password: String::new() };
        for (vm, observed) in vms {
            let say = |file: &str| {
                writeln!(output, "{file}\t{}", vm.full_name())?;
                output.flush()
            };
            render::trace(&vm, &observed, &config, &random, &new, say)?;
        }
        return Ok(());
    }
    let old = old.map(compiled).transpose()?;
    let report = match check::check(old.as_ref(), &new, vms, &config) {
        Ok(outcome) => Report::Checked(outcome),
        Err(refusal) => Report::Refused(refusal),
    };
    serde_json::to_writer(output, &report)?;
    Ok(())
}
