//! The agent with a played QEMU behind a real socket. What it decides is tested with the operations.

use std::{
    fs,
    sync::{Arc, Mutex, MutexGuard},
};

use serde_json::json;
use tokio::{net::UnixListener, task::JoinHandle, time::timeout};

use super::*;
use crate::{
    api::conditions,
    runner::{
        lines::JsonLines,
        operations::played::PlayedQemu,
        report::Target,
        state::{EndReason, StartedWith},
    },
};

/// A QEMU, and the command at which it closes the connection: before or after it has carried it out.
struct Played {
    qemu: PlayedQemu,
    cut: Option<(&'static str, bool)>,
}

/// A VM whose QEMU is played.
struct Vm {
    _directory: tempfile::TempDir,
    config: PathBuf,
    runtime: RuntimeDir,
    played: Arc<Mutex<Played>>,
    /// Changes after each command.
    commands: watch::Receiver<()>,
    server: JoinHandle<()>,
}

impl Vm {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("config");
        fs::create_dir(&config).unwrap();
        let runtime = RuntimeDir::open(&directory.path().join("run")).unwrap();
        let played = Arc::new(Mutex::new(Played { qemu: PlayedQemu::started(), cut: None }));
        let (server, commands) = serve(&runtime, &played);
        let vm = Self { _directory: directory, config, runtime, played, commands, server };
        vm.configure(0, false);
        fs::write(vm.config.join("display-password"), "secret").unwrap();
        vm.machine("s-1", Phase::Running);
        vm
    }

    fn configure(&self, resets: u64, paused: bool) {
        let vm = json!({
            "name": "apple", "maximumCpus": 4, "currentCpus": 2, "maximumRam": "1 GiB", "display": { "vnc": { "port": 5900 } },
        });
        let config = json!({ "/Runner": { "namespace": "ns", "resetCounter": resets, "paused": paused, "vm": vm } });
        fs::write(self.config.join("new"), config.to_string()).unwrap();
        fs::rename(self.config.join("new"), self.config.join("config.yaml")).unwrap();
    }

    /// Writes what the machine role writes.
    fn machine(&self, start: &str, phase: Phase) {
        let started_with = StartedWith::from(&config::read(&self.config).unwrap());
        let state = MachineState {
            start: start.into(),
            accelerator: "kvm".into(),
            phase,
            ..MachineState::failed_before_start(String::new(), Some(started_with))
        };
        state.write(&self.runtime).unwrap();
    }

    fn agent(&self) -> (Agent, watch::Receiver<Option<Report>>) {
        let options = AgentOptions {
            config_dir: self.config.clone(),
            runtime: self.runtime.clone(),
            logging: Logging::new(None).0,
            resource: VmResource::new(None, "ns", Target { name: "apple".into(), pod_uid: None }),
            relay: watch::channel(RelayState::default()).1,
        };
        let (sender, reports) = watch::channel(None);
        (Agent::new(options, sender).unwrap(), reports)
    }

    fn played(&self) -> MutexGuard<'_, Played> {
        self.played.lock().unwrap()
    }

    /// Waits until QEMU is so.
    async fn until(&mut self, is: impl Fn(&PlayedQemu) -> bool) {
        let waiting = async {
            while !is(&self.played.lock().unwrap().qemu) {
                self.commands.changed().await.unwrap();
            }
        };
        let is_so = timeout(Duration::from_secs(30), waiting).await.is_ok();
        assert!(is_so, "{:?}", self.played().qemu);
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn serve(runtime: &RuntimeDir, played: &Arc<Mutex<Played>>) -> (JoinHandle<()>, watch::Receiver<()>) {
    let _ = fs::remove_file(runtime.agent_monitor());
    let listener = UnixListener::bind(runtime.agent_monitor()).unwrap();
    let (sender, commands) = watch::channel(());
    let played = Arc::clone(played);
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut lines = JsonLines::over(stream);
            let mut messages = vec![json!({ "QMP": {} })];
            loop {
                let sent = async {
                    for message in &messages {
                        lines.send(&[], message).await?;
                    }
                    lines.receive().await
                };
                let Ok(Some(request)) = sent.await else { break };
                let Some(answers) = answers(&request, &mut played.lock().unwrap()) else { break };
                messages = answers;
                sender.send_replace(());
            }
            sender.send_replace(());
        }
    });
    (server, commands)
}

/// What QEMU says to a command, with its events. `None`: it closes the connection.
fn answers(request: &Value, played: &mut Played) -> Option<Vec<Value>> {
    let cut = played.cut.take_if(|(command, _)| request["execute"] == *command);
    if let Some((_, false)) = cut {
        return None;
    }
    let answer = match played.qemu.execute(request) {
        Ok(answer) => json!({ "return": answer, "id": request["id"] }),
        Err(reason) => json!({ "error": { "class": "GenericError", "desc": reason }, "id": request["id"] }),
    };
    let events = std::mem::take(&mut played.qemu.events);
    // They are lost with the answer.
    cut.is_none().then(|| events.into_iter().chain([answer]).collect())
}

/// Runs an agent beside a script, which ends first.
async fn beside(agent: &mut Agent, script: impl Future<Output = ()>) {
    let (_term, is_terminated) = watch::channel(false);
    tokio::select! {
        ended = agent.run(is_terminated) => panic!("{ended:?}"),
        () = script => {}
    }
}

fn is_ready(qemu: &PlayedQemu) -> bool {
    let password = Some(("secret".to_owned(), "never".to_owned()));
    qemu.present() == 2 && qemu.balloon == 1 << 30 && qemu.password == password && qemu.status == "running"
}

#[tokio::test]
async fn an_agent_goes_on_where_a_broken_connection_has_interrupted_it() {
    for command in ["device_add", "balloon", "set_password", "expire_password", "cont"] {
        for is_done in [false, true] {
            let mut vm = Vm::new();
            vm.played().cut = Some((command, is_done));
            let (mut agent, _reports) = vm.agent();
            beside(&mut agent, vm.until(is_ready)).await;
            assert_eq!(vm.played().cut, None, "{command}");
            assert!(vm.played().qemu.was_open, "{command}");
        }
    }
}

#[tokio::test]
async fn a_reset_is_made_once_although_its_answer_is_lost_and_the_agent_is_killed() {
    let mut vm = Vm::new();
    let (mut agent, _reports) = vm.agent();
    beside(&mut agent, vm.until(is_ready)).await;
    vm.played().cut = Some(("system_reset", true));
    vm.configure(1, false);
    beside(&mut agent, vm.until(|qemu| qemu.resets == 1)).await;
    drop(agent);
    let (mut agent, _reports) = vm.agent();
    vm.configure(1, true);
    beside(&mut agent, vm.until(|qemu| qemu.status == "paused")).await;
    assert_eq!(vm.played().qemu.resets, 1);
    // That it is paused is noted after that.
    let is_noted = |orders: Orders| orders.counter == 1;
    assert!(Orders::read(&vm.runtime, "s-1").is_some_and(is_noted));
}

#[tokio::test]
async fn a_qemu_that_ends_in_the_middle_is_reported_and_the_next_one_gets_everything() {
    let mut vm = Vm::new();
    let (mut agent, mut reports) = vm.agent();
    vm.played().cut = Some(("set_password", true));
    beside(&mut agent, vm.until(|qemu| qemu.password.is_some())).await;
    vm.server.abort();
    let _ = (&mut vm.server).await;
    let reason = EndReason::QemuFailed;
    vm.machine("s-1", Phase::Ended { reason, code: Some(1), last_words: "no".into(), held: false });
    let is_reported = async {
        let failed = |report: &Option<Report>| {
            let mut conditions = report.iter().flat_map(|report| &report.conditions);
            conditions.any(|it| it.type_ == conditions::RUNNING && it.reason == reason.reason())
        };
        timeout(Duration::from_secs(30), reports.wait_for(failed)).await.unwrap().unwrap();
    };
    beside(&mut agent, is_reported).await;
    *vm.played() = Played { qemu: PlayedQemu::started(), cut: None };
    (vm.server, vm.commands) = serve(&vm.runtime, &vm.played);
    vm.machine("s-2", Phase::Running);
    beside(&mut agent, vm.until(is_ready)).await;
}
