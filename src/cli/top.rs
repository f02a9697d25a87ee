//! `kubectl vm top`: what guests use of CPUs, memory, disks and network, live in a terminal, or once as a table or as data.
//!
//! ```text
//!  the VMs, every few seconds ──────────────────────────────┐
//!  kubectl exec ... vm-runner ctl stats --follow, for each ─┼▶ Screen ─▶ terminal, table, JSON
//!  keys ────────────────────────────────────────────────────┘    └▶ kubectl vm start, stop, console
//! ```
//!
//! The figures come from the VMs' Pods, and nothing of them is written anywhere.

mod screen;

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal},
    process::{Command, Stdio},
    time::Duration,
};

use clap::Args;
use crossterm::event::{Event, EventStream, KeyEventKind};
use futures::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    process::Command as Program,
    sync::mpsc::{Receiver, Sender, channel},
    task::JoinHandle,
    time::{sleep, timeout},
};

use self::screen::{Act, Key, Screen, Seen, Sort};
use super::{
    format::DataFormat,
    in_pod::InPod,
    output::{Exit, Failure, Output, note},
    vms::{self, Selection, api, checked_name, refused, resource, title},
};
use crate::{
    actions::{FoundVm, VmHandle},
    api::{VirtualMachine, stats::GuestStats},
};

/// How often it is asked which VMs there are.
const LOOK: Duration = Duration::from_secs(5);
/// How long the figures may take to come when they are printed once.
const ONCE: Duration = Duration::from_secs(20);

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    selection: Selection,
    /// Print a table once, as where standard output is no terminal.
    #[arg(long)]
    once: bool,
    /// By what the VMs are sorted.
    #[arg(long, value_name = "WHAT", default_value = "cpu")]
    sort: Sort,
    /// The seconds between two looks at a guest.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Print it once, as data.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<DataFormat>,
}

/// What comes from outside.
enum Update {
    /// The VMs that there are, and what is known of each.
    Vms(BTreeMap<Key, Seen>),
    Sample(Key, Result<GuestStats, String>),
    Message(String),
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let cluster = options.selection.connect().await?;
    let is_once = options.once || options.output.is_some() || !io::stdin().is_terminal() || !io::stdout().is_terminal();
    let source = FigureSource { options, client: &cluster.client, namespace: &cluster.namespace };
    // Nobody shall find an empty screen where there is nothing to look at.
    let (vms, missing) = source.vms().await?;
    for name in &missing {
        note(&format!("{}: there is none in the namespace {}", title(name), cluster.namespace));
    }
    if vms.is_empty() && missing.is_empty() {
        let place = (!options.selection.all_namespaces).then_some(cluster.namespace.as_str());
        note(&vms::nothing("VMs", place, options.selection.selector.as_deref()));
    }
    if vms.is_empty() {
        return Ok(vms::exit(0, missing.len()));
    }
    let screen = Screen::new(options.sort, options.selection.all_namespaces);
    let (sender, receiver) = channel(64);
    // The samples end with what is done with them, whichever ends first.
    if is_once {
        tokio::select! {
            never = source.follow(sender) => match never {},
            end = once(options, screen, receiver, missing.len(), output) => end,
        }
    } else {
        output.flush()?;
        tokio::select! {
            never = source.follow(sender.clone()) => match never {},
            end = live(options, screen, receiver, sender) => end.map_err(|error| Failure::new(format!("terminal: {error}"))),
        }
    }
}

/// Where VMs and figures come from.
struct FigureSource<'a> {
    options: &'a Options,
    client: &'a Client,
    namespace: &'a str,
}

/// The samples of a VM, in a task of their own.
struct Sampler(JoinHandle<()>);

impl Drop for Sampler {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl FigureSource<'_> {
    /// Sends what there is, again and again.
    async fn follow(&self, sender: Sender<Update>) -> std::convert::Infallible {
        let mut samplers: BTreeMap<Key, Sampler> = BTreeMap::new();
        loop {
            match self.vms().await {
                Ok((vms, _)) => {
                    let seen = vms.iter().map(|(key, vm)| (key.clone(), seen(vm)));
                    // Nobody listens any more: the program ends.
                    let _ = sender.send(Update::Vms(seen.collect())).await;
                    samplers.retain(|key, sampler| {
                        vms.get(key).is_some_and(VirtualMachine::runs) && !sampler.0.is_finished()
                    });
                    for (key, vm) in vms.iter().filter(|(_, vm)| vm.runs()) {
                        if !samplers.contains_key(key) {
                            let command = self.command(key, vm).await;
                            let task = tokio::spawn(samples(key.clone(), command, sender.clone()));
                            samplers.insert(key.clone(), Sampler(task));
                        }
                    }
                }
                Err(failure) => drop(sender.send(Update::Message(failure.words())).await),
            }
            sleep(LOOK).await;
        }
    }

    /// The VMs that are meant, and the names that no VM has.
    async fn vms(&self) -> Result<(BTreeMap<Key, VirtualMachine>, Vec<String>), Failure> {
        let Selection { names, selector, all_namespaces, .. } = &self.options.selection;
        let place = (!all_namespaces).then_some(self.namespace);
        let (mut objects, mut missing) = (Vec::new(), Vec::new());
        if names.is_empty() {
            let api: Api<DynamicObject> = match place {
                Some(namespace) => api(self.client, namespace),
                None => Api::all_with(self.client.clone(), &resource()),
            };
            let mut parameters = ListParams { label_selector: selector.clone(), ..ListParams::default() };
            parameters.limit = Some(vms::CHUNK);
            loop {
                let page = match api.list(&parameters).await {
                    Ok(page) => page,
                    Err(error) => {
                        let line = refused(self.client, "VMs", &["list"], place, &error).await;
                        return Err(vms::failure(line, &error));
                    }
                };
                parameters.continue_token = page.metadata.continue_.clone().filter(|token| !token.is_empty());
                objects.extend(page.items);
                if parameters.continue_token.is_none() {
                    break;
                }
            }
        }
        for argument in names {
            let name = checked_name(argument)?;
            match api(self.client, self.namespace).get_opt(name).await {
                Ok(Some(object)) => objects.push(object),
                Ok(None) => missing.push(name.to_owned()),
                Err(error) => {
                    let line = refused(self.client, &title(name), &["get"], place, &error).await;
                    return Err(vms::failure(line, &error));
                }
            }
        }
        // One that can't be read is not shown; `list` shows it.
        let vms = objects.into_iter().filter_map(|object| FoundVm::new(object).ok()).map(|found| found.vm);
        let key = |vm: &VirtualMachine| (vm.namespace().unwrap_or_default(), vm.name_any());
        Ok((vms.map(|vm| (key(&vm), vm)).collect(), missing))
    }

    /// The command that prints the samples of a VM.
    async fn command(&self, key: &Key, vm: &VirtualMachine) -> Result<Command, String> {
        let handle = VmHandle::new(self.client.clone(), &key.0, &key.1);
        let pod = InPod::of(&handle, vm, &self.options.selection.cluster).await.map_err(|failure| failure.words())?;
        let seconds = self.options.interval.to_string();
        Ok(pod.runner(&[], &["ctl", "stats", "--follow", &seconds]))
    }
}

fn seen(vm: &VirtualMachine) -> Seen {
    let phase = vm.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
    let has_nodes_network = vm.spec.vm.networks.iter().any(|network| network.tap.is_some());
    Seen { phase, has_nodes_network, ..Seen::default() }
}

/// Sends what a command prints, until it ends.
async fn samples(key: Key, command: Result<Command, String>, sender: Sender<Update>) {
    let end = match command {
        Ok(command) => read(&key, command, &sender).await,
        Err(trouble) => Err(trouble),
    };
    if let Err(trouble) = end {
        // Nobody listens any more: the program ends.
        let _ = sender.send(Update::Sample(key, Err(trouble))).await;
    }
}

/// Sends each line of a program, until nobody wants another. The program ends with this.
async fn read(key: &Key, command: Command, sender: &Sender<Update>) -> Result<(), String> {
    let mut program = Program::from(command);
    program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let failed = |error: io::Error| format!("kubectl: {error}");
    let mut child = program.spawn().map_err(failed)?;
    let (Some(stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else { return Ok(()) };
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await.map_err(failed)? {
        let sample = serde_json::from_str(&line).map_err(|error| format!("figures that can't be read: {error}"));
        if sender.send(Update::Sample(key.clone(), sample)).await.is_err() {
            return Ok(());
        }
    }
    if child.wait().await.map_err(failed)?.success() {
        // They come for some minutes, and then again.
        return Ok(());
    }
    let mut said = String::new();
    stderr.read_to_string(&mut said).await.map_err(failed)?;
    let is_talk = |line: &&str| !line.is_empty() && !line.starts_with("command terminated");
    let line = said.lines().map(str::trim).find(is_talk).unwrap_or("its figures have ended").to_owned();
    // A runner that was started before this release.
    let is_old = line.contains("unrecognized subcommand");
    Err(if is_old { "its runner has no figures yet; the next start brings one that has".into() } else { line })
}

impl Screen {
    fn update(&mut self, update: Update) {
        match update {
            Update::Vms(vms) => {
                let mut before = std::mem::take(&mut self.vms);
                let kept = |(key, now): (Key, Seen)| {
                    let seen = before.remove(&key).filter(|_| now.phase == "Running").unwrap_or_default();
                    (key, Seen { phase: now.phase, has_nodes_network: now.has_nodes_network, ..seen })
                };
                self.vms = vms.into_iter().map(kept).collect();
            }
            Update::Sample(key, sample) => {
                if let Some(seen) = self.vms.get_mut(&key) {
                    seen.take(sample);
                }
            }
            Update::Message(message) => self.message = message,
        }
    }
}

/// Prints the figures when all are there.
async fn once(
    options: &Options,
    mut screen: Screen,
    mut receiver: Receiver<Update>,
    missing: usize,
    output: &mut Output<'_>,
) -> Result<Exit, Failure> {
    let is_done = |seen: &Seen| seen.rates.is_some() || seen.trouble.is_some() || seen.phase != "Running";
    let all = async {
        let mut listed = false;
        while !listed || !screen.vms.values().all(is_done) {
            let Some(update) = receiver.recv().await else { break };
            listed |= matches!(update, Update::Vms(_));
            screen.update(update);
        }
    };
    // What has come by then is shown.
    let _ = timeout(ONCE + Duration::from_secs(options.interval), all).await;
    for seen in screen.vms.values_mut().filter(|seen| !is_done(seen)) {
        seen.trouble = Some("its figures have not come in time".into());
    }
    match &options.output {
        Some(format) => {
            let item = |key: &Key| -> Value {
                let mut item = json!(screen.vms[key]);
                (item["namespace"], item["name"]) = (json!(key.0), json!(key.1));
                item
            };
            let items: Vec<Value> = screen.order().into_iter().map(item).collect();
            format.print(&json!({ "items": items }), output)?;
        }
        None => write!(output, "{}", screen.page())?,
    }
    screen.troubles().iter().for_each(|line| note(line));
    let failed = screen.vms.values().filter(|seen| seen.trouble.is_some()).count();
    Ok(vms::exit(screen.vms.len() - failed, failed + missing))
}

/// The terminal program.
async fn live(
    options: &Options,
    mut screen: Screen,
    mut receiver: Receiver<Update>,
    sender: Sender<Update>,
) -> io::Result<Exit> {
    let mut terminal = Terminal::open()?;
    loop {
        terminal.0.draw(|frame| screen.draw(frame))?;
        let act = tokio::select! {
            event = terminal.1.next() => match event {
                Some(Ok(Event::Key(key))) if key.kind == KeyEventKind::Press => screen.key(key),
                Some(Ok(_)) => None,
                Some(Err(error)) => return Err(error),
                None => Some(Act::Quit),
            },
            Some(update) = receiver.recv() => {
                screen.update(update);
                None
            }
        };
        match act {
            None => {}
            Some(Act::Quit) => return Ok(Exit::Success),
            Some(Act::Start(key)) => screen.message = say(options, "start", &key, &sender)?,
            Some(Act::Stop(key)) => screen.message = say(options, "stop", &key, &sender)?,
            Some(Act::Console(key)) => {
                drop(terminal);
                let status = Program::from(itself(options, "console", &key)?).status().await?;
                terminal = Terminal::open()?;
                screen.message = if status.success() { String::new() } else { format!("the console ended: {status}") };
            }
        }
    }
}

/// The terminal, as the program has it: as it was when this is dropped.
struct Terminal(ratatui::DefaultTerminal, EventStream);

impl Terminal {
    fn open() -> io::Result<Self> {
        Ok(Self(ratatui::try_init()?, EventStream::new()))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Another command of this program for a VM.
fn itself(options: &Options, command: &str, (namespace, name): &Key) -> io::Result<Command> {
    let mut program = Command::new(std::env::current_exe()?);
    program.args([command, name, "--namespace", namespace]);
    options.selection.cluster.pass_on(&mut program);
    Ok(program)
}

/// Runs a command; what it says comes later. Returns what is shown meanwhile.
fn say(options: &Options, command: &str, key: &Key, sender: &Sender<Update>) -> io::Result<String> {
    let mut program = Program::from(itself(options, command, key)?);
    program.stdin(Stdio::null());
    let sender = sender.clone();
    tokio::spawn(async move {
        let said = match program.output().await {
            Ok(output) => String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        let _ = sender.send(Update::Message(said)).await;
    });
    Ok(format!("{command} {} ...", title(&key.1)))
}
