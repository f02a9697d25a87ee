//! Checks new templates in a separate process, so that a template which takes all memory or never ends does no harm to the manager.
//!
//! ```text
//!  manager ── job, then one VM a line (JSON) ──▶ vm-operator check-templates ── outcome or refusal (JSON) ──▶ manager
//! ```
//!
//! The template engine counts steps and [`render`](crate::render) limits the output, but a text that is joined with itself again and
//! again stays within both limits until memory ends.

use std::{
    collections::BTreeSet,
    io::{self, BufRead, BufReader, Write},
    iter,
    os::unix::process::ExitStatusExt,
    panic::resume_unwind,
    process::ExitStatus,
    thread::{self, ScopedJoinHandle},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{io::AsyncWriteExt, time::timeout};
use tracing::warn;

use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    observed::Observed,
    process::limited,
    render::{
        self, RandomInput, TemplateError, TemplateSet,
        check::{self, Bystander, Change, Judged, SetEffect, SetRefusal},
        templates::Layers,
    },
};

/// The subcommand of this program that checks.
pub const COMMAND: &str = "check-templates";
/// The CPU time that a check may take, in seconds, and the time.
const CPU: u64 = 60;
const TIME: Duration = Duration::from_secs(120);
/// How many bytes of VMs are judged at a time. A large VM is judged alone, because it needs a hundred times its size.
const AT_A_TIME: usize = 256 << 10;
/// The stack of a thread, in bytes: as large as that of a program's first one, on which VMs are rendered later.
const STACK: usize = 8 << 20;
/// How many threads judge VMs at most. The stack of each counts as memory of the process.
const THREADS: usize = 4;
/// How many VMs may be left out, because they are too large by themselves.
const MOST_LEFT_OUT: usize = 20;
/// The signals SIGKILL and SIGXCPU, with which the kernel ends a process that takes too much time.
const KILLED: i32 = 9;
const CPU_EXCEEDED: i32 = 24;

/// What to check. The VMs follow.
#[derive(Serialize, Deserialize)]
struct Job {
    old: Option<Layers>,
    new: Layers,
    /// The configuration in force, if the one for the new templates is another one.
    old_config: Option<ReconcilerConfig>,
    config: ReconcilerConfig,
    /// The VMs of other sets.
    bystanders: Vec<Bystander>,
    /// How VMs are judged.
    way: Way,
}

/// How a process judges VMs.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Way {
    /// Several at once.
    Together,
    /// One after the other. This takes less memory.
    Alone,
    /// The same, but only the name of each template is printed, before it is rendered.
    Trace,
}

#[derive(Serialize, Deserialize)]
struct CheckedVm {
    vm: VirtualMachine,
    observed: Observed,
}

#[derive(Serialize, Deserialize)]
enum Report {
    Checked(SetEffect),
    Refused(SetRefusal),
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

/// Checks a [`Change`] in a separate process. `old_config` is the configuration in force, if it is another one than `config`. A VM for
/// which the process has not enough memory or time although the set in use is not different in this is left out: one VM must not hold up the
/// others.
///
/// # Errors
/// If the set is refused, also because rendering takes too much memory or time. Or if the process cannot be started.
pub async fn check<M>(
    old: Option<&TemplateSet>,
    new: &TemplateSet,
    vms: impl Fn() -> M,
    bystanders: impl Fn() -> Vec<Bystander>,
    old_config: Option<&ReconcilerConfig>,
    config: &ReconcilerConfig,
) -> Result<SetEffect, Failure>
where
    M: Iterator<Item = (VirtualMachine, Observed)> + Send,
{
    if limited::is_unlimited() {
        let change = Change { old, old_config: old_config.unwrap_or(config), new, config };
        let refused = |SetRefusal { vm, error }| Failure::Refused(error, Some(vm));
        return change.check(bystanders(), vms()).map_err(refused);
    }
    let job = |old: Option<&TemplateSet>, new: &TemplateSet, way| Job {
        old: old.map(|old| old.layers().clone()),
        new: new.layers().clone(),
        old_config: old_config.cloned(),
        config: config.clone(),
        bystanders: if way == Way::Trace { Vec::new() } else { bystanders() },
        way,
    };
    let mut left_out = BTreeSet::new();
    loop {
        let rest = || vms().filter(|(vm, _)| !left_out.contains(&vm.full_name()));
        let mut end = run(&job(old, new, Way::Together), rest()).await?;
        if matches!(end, Ended::Without(status, _) if is_of_memory(status)) {
            // How much memory is too much must not depend on how many VMs were judged at once. Their CPU time does not.
            end = run(&job(old, new, Way::Alone), rest()).await?;
        }
        let status = match end {
            Ended::With(Report::Checked(outcome)) => return Ok(outcome),
            Ended::With(Report::Refused(SetRefusal { vm, error })) => return Err(Failure::Refused(error, Some(vm))),
            Ended::Without(status, _) => status,
        };
        // The process did not finish. Run it again to find the VM and the template.
        let (place, name) = match run(&job(old, new, Way::Trace), rest()).await? {
            Ended::Without(again, printed) if !again.success() => last_line(&printed),
            _ => ("(a template)".to_owned(), String::new()),
        };
        let alone = || vms().filter(|(vm, _)| vm.full_name() == name);
        if !name.is_empty() && left_out.len() < MOST_LEFT_OUT {
            // The VM is too large by itself if it can't be rendered alone with what is in use, or only the comparison is too much for it.
            let builtin = TemplateSet::builtin().ok();
            let in_use = old.or(builtin.as_ref()).unwrap_or(new);
            let is_too_large = matches!(run(&job(None, in_use, Way::Alone), alone()).await?, Ended::Without(..));
            let fits_alone = async || {
                let ended = run(&job(None, new, Way::Alone), alone()).await?;
                io::Result::Ok(is_of_memory(status) && matches!(ended, Ended::With(Report::Checked(_))))
            };
            if is_too_large || fits_alone().await? {
                warn!(
                    vm = name,
                    why = ended(status),
                    "a VM is left out of the check of new templates, because it is too large"
                );
                left_out.insert(name);
                continue;
            }
        }
        let mut error = TemplateError::refused(&place, format!("it can't be rendered: {}", ended(status)));
        if !name.is_empty() {
            error.message += &format!(" (VM {name})");
        }
        return Err(Failure::Refused(error, None));
    }
}

/// The last template and VM that a process has printed.
fn last_line(printed: &[u8]) -> (String, String) {
    let printed = String::from_utf8_lossy(printed);
    let (place, vm) = printed.lines().last().and_then(|line| line.split_once('\t')).unwrap_or(("(a template)", ""));
    (place.to_owned(), vm.to_owned())
}

/// Whether a process ended because it had no memory, and not because it took too much time.
fn is_of_memory(status: ExitStatus) -> bool {
    !matches!(status.signal(), Some(KILLED | CPU_EXCEEDED))
}

/// How a process ended.
enum Ended {
    /// It has written its report.
    With(Report),
    /// It has not; what it has printed.
    Without(ExitStatus, Vec<u8>),
}

fn ended(status: ExitStatus) -> String {
    let limits =
        format!("{} MiB of memory and {CPU} s are the most that all VMs together may take", limited::MEMORY >> 20);
    format!("it takes too much memory or time ({status}); {limits}")
}

async fn run(job: &Job, vms: impl Iterator<Item = (VirtualMachine, Observed)> + Send) -> io::Result<Ended> {
    let (mut child, mut input, output) = limited::start(COMMAND)?;
    child.stdout = Some(output);
    let feed = async move {
        let mut line = serde_json::to_vec(job)?;
        line.push(b'\n');
        input.write_all(&line).await?;
        for (vm, observed) in vms {
            line.clear();
            // The name comes first, so that the process can say with which VM it is, before it parses the rest.
            line.extend(vm.full_name().as_bytes());
            line.push(b'\t');
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
        _ => Ok(match serde_json::from_slice(&output.stdout) {
            Ok(report) if output.status.success() => Ended::With(report),
            _ => Ended::Without(output.status, output.stdout),
        }),
    }
}

/// The other process: reads a job and VMs from standard input and writes the report.
///
/// # Errors
/// If standard input or output fails.
pub fn serve() -> io::Result<()> {
    let (input, output) = (BufReader::new(io::stdin().lock()), io::stdout().lock());
    limited::limit(Some(CPU))?;
    work(input, output)
}

fn work(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    let mut lines = input.lines();
    let job = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
    let Job { old, new, old_config, config, bystanders, way } = serde_json::from_str(&job)?;
    let old_config = old_config.as_ref().unwrap_or(&config);
    // The manager has compiled both before.
    let compiled = |layers| TemplateSet::compile(layers).map_err(io::Error::other);
    let (new, old) = (compiled(new)?, old.map(compiled).transpose()?);
    let change = Change { old: old.as_ref(), old_config, new: &new, config: &config };
    let lines = lines.map_while(Result::ok);
    let parsed = |line: &str| {
        let CheckedVm { vm, observed } = serde_json::from_str(line).ok()?;
        Some((vm, observed))
    };
    if way == Way::Trace {
        // Errors do not matter here.
        let random = RandomInput::default();
        for line in lines {
            let (name, line) = line.split_once('\t').ok_or(io::ErrorKind::InvalidData)?;
            let mut say = |place: &str| {
                writeln!(output, "{place}\t{name}")?;
                output.flush()
            };
            say("(the VM)")?;
            let Some((vm, observed)) = parsed(line) else { continue };
            render::trace(&vm, &observed, &config, &random, &new, &mut say)?;
            say("(all templates)")?;
            let _ = change.check(Vec::new(), [(vm, observed)]);
        }
        return Ok(());
    }
    let judge = |line: &str| {
        let (vm, observed) = parsed(line.split_once('\t')?.1)?;
        Some(change.judge(vm, observed))
    };
    let threads = if way == Way::Together { threads() } else { 1 };
    let report = match check::outcome(bystanders, judged(lines, threads, judge)) {
        Ok(outcome) => Report::Checked(outcome),
        Err(refusal) => Report::Refused(refusal),
    };
    serde_json::to_writer(output, &report)?;
    Ok(())
}

/// How many threads judge VMs.
fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(THREADS)
}

/// The VMs of these lines as they were judged, in the order of the lines. Several threads judge, some VMs at a time.
fn judged(
    lines: impl Iterator<Item = String>,
    threads: usize,
    judge: impl Fn(&str) -> Option<Judged> + Sync,
) -> impl Iterator<Item = Judged> {
    let mut lines = lines.peekable();
    let batches = iter::from_fn(move || {
        let (mut batch, mut size) = (Vec::new(), 0);
        // A large VM is a batch of its own.
        while let Some(line) = lines.next_if(|line| size == 0 || size + line.len() <= AT_A_TIME) {
            size += line.len();
            batch.push(line);
        }
        (!batch.is_empty()).then_some(batch)
    });
    batches.flat_map(move |batch| {
        thread::scope(|scope| {
            let part = |lines: &[String]| lines.iter().filter_map(|line| judge(line)).collect::<Vec<_>>();
            let start = |lines| {
                let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, move || part(lines));
                // There may be too many threads in the container already.
                thread.map_err(|_| part(lines))
            };
            let parts: Vec<_> = batch.chunks(batch.len().div_ceil(threads)).map(start).collect();
            let join = |part: Result<ScopedJoinHandle<'_, _>, _>| {
                part.map_or_else(|judged| judged, |part| part.join().unwrap_or_else(|panic| resume_unwind(panic)))
            };
            parts.into_iter().flat_map(join).collect::<Vec<_>>()
        })
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::{nothing, vm};

    /// What the process writes for these VMs.
    fn output(way: Way, vms: &[VirtualMachine]) -> String {
        let set = TemplateSet::builtin().unwrap();
        let job = Job {
            old: Some(set.layers().clone()),
            new: set.layers().clone(),
            old_config: None,
            config: ReconcilerConfig::default(),
            bystanders: Vec::new(),
            way,
        };
        let mut input = serde_json::to_string(&job).unwrap();
        for vm in vms {
            let checked = CheckedVm { vm: vm.clone(), observed: nothing() };
            input += &format!("\n{}\t{}", vm.full_name(), serde_json::to_string(&checked).unwrap());
        }
        let mut output = Vec::new();
        work(input.as_bytes(), &mut output).unwrap();
        String::from_utf8(output).unwrap()
    }

    #[test]
    fn a_vm_is_named_before_it_is_parsed_and_before_each_template() {
        let pear = vm(|vm| vm["metadata"]["name"] = json!("pear"));
        let printed = output(Way::Trace, &[vm(|_| ()), pear]);
        let of_pear: Vec<&str> = printed.lines().filter(|line| line.ends_with("\torchard/pear")).collect();
        assert_eq!(of_pear.first(), Some(&"(the VM)\torchard/pear"));
        assert!(of_pear.contains(&"builtin/pod.yaml.j2\torchard/pear"), "{of_pear:?}");
        assert_eq!(last_line(printed.as_bytes()), ("(all templates)".into(), "orchard/pear".into()));
        assert_eq!(last_line(b""), ("(a template)".into(), String::new()));
    }

    #[test]
    fn the_first_vm_that_can_not_be_rendered_is_named_wherever_it_was_judged() {
        let files = [("x.yaml.j2".to_owned(), "{{ values.missing.deep }}".to_owned())].into();
        let set = TemplateSet::layered(&files, None).unwrap();
        let (builtin, config) = (TemplateSet::builtin().unwrap(), ReconcilerConfig::default());
        let change = Change { old: Some(&builtin), old_config: &config, new: &set, config: &config };
        // Each batch has several of them.
        let vms: Vec<_> =
            (0..200).map(|number| vm(|vm| vm["metadata"]["name"] = json!(format!("vm-{number}")))).collect();
        let lines = vms.iter().map(|vm| vm.metadata.name.clone().unwrap() + &" ".repeat(AT_A_TIME / 20));
        let named = |line: &str| vms.iter().find(|vm| vm.metadata.name.as_deref() == Some(line.trim())).cloned();
        let all = judged(lines, THREADS, |line| Some(change.judge(named(line)?, nothing())));
        let mut seen = 0;
        let refusal = check::outcome(Vec::new(), all.skip(50).inspect(|_| seen += 1)).unwrap_err();
        assert_eq!((refusal.vm.metadata.name.as_deref(), seen), (Some("vm-50"), 1));
    }

    #[test]
    fn the_report_names_the_number_of_vms() {
        for way in [Way::Together, Way::Alone] {
            let report = output(way, &[vm(|_| ())]);
            assert!(matches!(serde_json::from_str(&report), Ok(Report::Checked(SetEffect { vms: 1, .. }))), "{report}");
        }
    }
}
