//! Fuzzing of what the runner reads: QEMU's monitor, QEMU's guest agent, the login agent, the configuration, and the folder that it shares
//! with whoever breaks out of QEMU. Nothing may panic, hang, take much memory, or make the runner report more than a status holds.
//!
//! A case is one of two: the function that reads an input, or a whole agent with played peers of which one is hostile. The peers are in the
//! same thread, and time passes only while everybody waits, so what never ends is found at once.
//!
//! `FUZZ_SECONDS` says for how long; without it this is a short test. `make fuzz` takes an hour. `FUZZ_CASE` does one case again.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is test code")]

#[path = "support/fuzzing.rs"]
mod fuzzing;
#[path = "fuzz_runner/mutator.rs"]
mod mutator;
#[path = "fuzz_runner/peers.rs"]
mod peers;

use std::{
    collections::BTreeMap,
    fs,
    io::Cursor,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;
use mutator::Mutator;
use peers::{Peer, Role};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt,
    net::UnixStream,
    sync::watch,
    time::{sleep, timeout},
};
use vm_operator::{
    process::ErrorChain,
    runner::{
        agent::{Agent, AgentOptions},
        cd,
        changes::{Actual, Desired, cd_drives, changes, pending},
        config::{self, Configuration, Password},
        control::{self, Asked, Control},
        devices::failed_disks,
        files::write_atomically,
        go_on::GuestState,
        guest_agent,
        logging::Logging,
        login::{LoginPort, LoginState},
        qmp::{Balloon, Command, Port, Qmp, Status, Viewers},
        report::{Observation, Report, StatusBefore, Target},
        runtime_dir::RuntimeDir,
        state::{MachineState, Orders, PasswordEnd, Phase, StartedWith},
        status_writer::VmResource,
    },
};

/// A case that takes longer is named.
const SLOW: Duration = Duration::from_secs(5);
/// How long it may take in the time that passes only while everybody waits.
const LONGEST: Duration = Duration::from_secs(3_600);
/// The most memory of the whole process in KiB. The largest message is some MiB, and a line may have one.
const MOST_MEMORY: u64 = 300 << 10;
/// The most bytes of a report. An object in the API server may have some hundred kilobytes.
const MOST_REPORTED: usize = 64 << 10;
/// What the status may say of the guest's operating system
/// (<https://www.qemu.org/docs/master/interop/qemu-ga-ref.html#object-QGA-qapi-schema.GuestOSInfo>).
const OS_INFO: &[&str] = &[
    "id",
    "kernel-release",
    "kernel-version",
    "machine",
    "name",
    "pretty-name",
    "variant",
    "variant-id",
    "version",
    "version-id",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Input {
    Qmp,
    GuestAgent,
    LoginAgent,
    Configuration,
    SharedFolder,
}

const INPUTS: [Input; 5] =
    [Input::Qmp, Input::GuestAgent, Input::LoginAgent, Input::Configuration, Input::SharedFolder];

/// What became of the cases of an input.
#[derive(Debug, Default)]
struct Count {
    /// The function has read something that it could use.
    used: u64,
    /// It has refused everything.
    refused: u64,
    /// Cases with a whole agent.
    agents: u64,
    /// What these have reported.
    reports: u64,
}

impl Count {
    /// Whether everything has happened that can.
    fn has_all(&self) -> bool {
        self.used > 0 && self.refused > 0 && self.agents > 0 && self.reports > 0
    }
}

fn config() -> Value {
    json!({
        "namespace": "ns1", "resetCounter": 1, "rebootCounter": 2, "paused": false, "guestShutdownStops": true,
        "resourceUid": "uid-1", "cdFolders": ["/tmp"], "template": "standard.yaml.j2",
        "cloudInit": { "metaData": { "local-hostname": "hugo" }, "userData": { "packages": ["vim"] }, "networkConfig": { "version": 2 } },
        "vm": {
            "name": "vm1", "uuid": "c0ffee00-0000-4000-8000-000000000001", "firmware": "uefi", "accelerator": "tcg",
            "maximumCpus": 4, "currentCpus": 2, "maximumRam": "512 MiB", "currentRam": "256Mi", "powerdownTimeout": 120,
            "network": [{ "type": "user", "device": "virtio-net" }, { "type": "pod", "device": "virtio-net", "mac": "02:00:00:00:00:01" }],
            "drives": [
                { "type": "raw", "resource": "/dev/system-disk", "bootindex": 0 },
                { "type": "ide-cd", "file": "/a.iso" },
                { "type": "qcow2", "resource": "/tmp/x.qcow2" },
            ],
            "display": { "outputs": 1, "loggedInUser": "alice", "spice": { "port": 5900, "usbRedirects": 2 } },
        },
    })
}

fn configuration() -> Configuration {
    let text = json!({ "/Runner": config() }).to_string();
    let config = config::parse(Path::new("config.yaml"), &text).unwrap();
    Configuration { config, digest: "digest".into(), password: None, cloud_init: None, qemu: None }
}

fn machine(phase: &Phase) -> MachineState {
    MachineState {
        start: "s-1".into(),
        pid: 7,
        machine_type: "pc-q35-7.2".into(),
        accelerator: "tcg".into(),
        uuid: "c0ffee00-0000-4000-8000-000000000001".into(),
        macs: vec!["02:00:00:00:00:01".into()],
        phase: phase.clone(),
        ..MachineState::failed_before_start(String::new(), Some(StartedWith::from(&configuration())))
    }
}

/// What a report may be, whatever others say.
fn check(report: &Report) {
    let object = json!(report.status(&StatusBefore::default(), Timestamp::UNIX_EPOCH));
    let text = object.to_string();
    assert!(text.len() <= MOST_REPORTED, "{} bytes: {}...", text.len(), text.chars().take(3_000).collect::<String>());
    no_control_characters(&object);
    for condition in object["conditions"].as_array().unwrap() {
        assert!(condition["message"].as_str().unwrap().len() <= 8 << 10);
    }
    check_os_info(&object["osinfo"]);
}

fn check_os_info(info: &Value) {
    for (key, value) in info.as_object().into_iter().flatten() {
        assert!(OS_INFO.contains(&key.as_str()) && value.as_str().unwrap().len() <= 256, "{key}: {value}");
    }
}

fn no_control_characters(value: &Value) {
    match value {
        Value::String(text) => assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}"),
        Value::Array(list) => list.iter().for_each(no_control_characters),
        Value::Object(map) => map.values().for_each(no_control_characters),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The folders of a case.
struct Folders {
    runtime: RuntimeDir,
    config: PathBuf,
    _temporary: tempfile::TempDir,
}

impl Folders {
    fn new() -> Self {
        // In memory, because the runner waits for the disk when it writes.
        let place = [Path::new("/dev/shm"), Path::new("/tmp")].into_iter().find(|path| path.is_dir()).unwrap();
        let temporary = tempfile::Builder::new().prefix("fuzz").tempdir_in(place).unwrap();
        let config = temporary.path().join("config");
        fs::create_dir_all(config.join("cloud-init")).unwrap();
        let runtime = RuntimeDir::open(&temporary.path().join("run")).unwrap();
        Self { runtime, config, _temporary: temporary }
    }
}

async fn qmp_case(mutator: &mut Mutator, folders: &Folders) -> bool {
    let socket = folders.runtime.agent_monitor();
    let _qemu = Peer::listen(&socket, Role::Qemu, true, mutator.fork());
    let Ok(mut qmp) = Qmp::connect(&socket).await else { return false };
    let mut used = 0;
    for _ in 0..mutator.random.u32(1..12) {
        let vm = &configuration().config.vm;
        used += u32::from(match mutator.random.u32(..6) {
            0 => qmp.cpu_slots().await.is_ok(),
            1 => qmp
                .execute(&Command::QueryBlock)
                .await
                .map(|blocks| (cd_drives(&blocks), failed_disks(&blocks, vm)))
                .is_ok(),
            2 => qmp.query::<Viewers>(&Command::QuerySpice).await.is_ok(),
            3 => qmp.query::<Status>(&Command::QueryStatus).await.is_ok(),
            4 => qmp.query::<Balloon>(&Command::QueryBalloon).await.is_ok(),
            _ => qmp.query::<Vec<Port>>(&Command::QueryChardev).await.is_ok(),
        });
        while let Ok(Ok(_)) = timeout(Duration::from_millis(500), qmp.event()).await {}
    }
    used > 0
}

async fn guest_agent_case(mutator: &mut Mutator, folders: &Folders) -> bool {
    let socket = folders.runtime.guest_agent();
    let _guest = Peer::listen(&socket, Role::GuestAgent, true, mutator.fork());
    if mutator.once_in(3) {
        return match guest_agent::reboot(&socket).await {
            Ok(()) => true,
            Err(error) => {
                let text = error.to_string();
                assert!(text.len() <= 1_024 && !text.contains(char::is_control), "{text:?}");
                false
            }
        };
    }
    let Ok(info) = guest_agent::os_info(&socket).await else { return false };
    check_os_info(&info);
    no_control_characters(&info);
    true
}

async fn login_case(mutator: &mut Mutator, folders: &Folders) -> bool {
    let socket = folders.runtime.vmop_agent();
    let _guest = Peer::listen(&socket, Role::LoginAgent, true, mutator.fork());
    let mut port = LoginPort::connect(&socket).await.unwrap();
    let (mut login, mut user, mut is_used) = (LoginState::default(), Some("alice".to_owned()), false);
    let mut checked = login.clone();
    while let Ok(Ok(line)) = timeout(Duration::from_secs(10), port.receive()).await {
        login.receive(&line);
        if mutator.once_in(20) {
            // A longer one is only copied more slowly, once for each line of a flood.
            user = Some(mutator.text().chars().take(3_000).collect());
        }
        if let Some(request) = login.next_request(user.as_deref()) {
            is_used = true;
            assert!(request.len() <= 4_096 && !request.contains(char::is_control), "{request:?}");
            if port.send(&request).await.is_err() {
                break;
            }
        }
        if (login.connected, &login.user, &login.refusal) == (checked.connected, &checked.user, &checked.refusal) {
            continue;
        }
        checked.clone_from(&login);
        let observation = Observation {
            machine: Some(machine(&Phase::Running)),
            is_executing: Some(true),
            login: login.clone(),
            ..Observation::default()
        };
        check(&Report::derive(&observation).unwrap());
    }
    is_used
}

/// Writes a strange configuration, as far as the kubelet could.
fn write_configuration(mutator: &mut Mutator, folder: &Path, is_hostile: bool) {
    let good = json!({ "/Runner": config() });
    let text = if is_hostile && !mutator.once_in(4) {
        mutator.message(good)
    } else {
        let mut config = good;
        // Something that the agent does.
        config["/Runner"]["vm"]["currentCpus"] = json!(mutator.random.u32(1..=4));
        config["/Runner"]["resetCounter"] = json!(mutator.random.u32(1..4));
        config["/Runner"]["paused"] = json!(mutator.random.bool());
        config["/Runner"]["vm"]["display"]["loggedInUser"] = json!(*mutator.pick(&["alice", "bob", ""]));
        config.to_string().into_bytes()
    };
    let write = |name: &str, content: &[u8]| {
        fs::write(folder.join("new"), content).unwrap();
        fs::rename(folder.join("new"), folder.join(name)).unwrap();
    };
    if is_hostile {
        for (name, content) in [
            ("display-password", "secret\n"),
            ("password-expiry", "+300"),
            ("logging.properties", ".level=WARNING\norg.jdrupes.vmoperator.level=FINE\n"),
            ("cloud-init/meta-data", "instance-id: x\n"),
            ("cloud-init/user-data", "#cloud-config\n"),
        ] {
            if mutator.once_in(3) {
                write(name, &mutator.bytes(content.as_bytes()));
            }
        }
    }
    write("config.yaml", &text);
}

fn configuration_case(mutator: &mut Mutator, folders: &Folders) -> bool {
    write_configuration(mutator, &folders.config, true);
    Logging::new(None).0.read(&folders.config);
    let configuration = match config::read(&folders.config) {
        Ok(configuration) => configuration,
        Err(error) => {
            assert!(!ErrorChain(&error).to_string().is_empty());
            return false;
        }
    };
    let vm = &configuration.config.vm;
    assert!(vm.current_cpus > 0 && vm.current_cpus <= vm.maximum_cpus);
    let desired = Desired::of(&configuration, Some(&machine(&Phase::Running)));
    changes(&desired, &Actual { guest: Some(GuestState::Executes), ..Actual::default() });
    for cd in &desired.cds {
        let _ = cd::check(&cd.text, &cd::folders(&configuration.config.cd_folders));
    }
    let observation = Observation {
        machine: Some(machine(&Phase::Running)),
        is_executing: Some(true),
        pending: pending(&machine(&Phase::Running), 1, &configuration),
        ..Observation::default()
    };
    check(&Report::derive(&observation).unwrap());
    if let Some(files) = &configuration.cloud_init {
        let size = usize::try_from(files.disk_size()).unwrap();
        files.write_disk(Cursor::new(vec![0; size])).unwrap();
    }
    true
}

/// Puts something in the place of a file.
fn write_hostile(mutator: &mut Mutator, path: &Path, good: Value) {
    let _ = fs::remove_file(path);
    let _ = fs::remove_dir_all(path);
    match mutator.random.u32(..14) {
        0 => {}
        1 => symlink("/etc/passwd", path).unwrap(),
        2 => symlink(path, path).unwrap(),
        3 => symlink("/dev/zero", path).unwrap(),
        4 => mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap(),
        5 => fs::create_dir(path).unwrap(),
        6 => fs::File::create(path).unwrap().set_len(mutator.random.u64(..1 << 40)).unwrap(),
        7 => fs::write(path, good.to_string()).unwrap(),
        _ => write_atomically(path, &mutator.message(good)).unwrap(),
    }
}

fn write_folder(mutator: &mut Mutator, runtime: &RuntimeDir) {
    let phase = mutator.pick(&[Phase::Running, Phase::Running, Phase::Starting]).clone();
    write_hostile(mutator, &runtime.machine(), json!(machine(&phase)));
    write_hostile(mutator, &runtime.resets(), json!({ "start": "s-1", "counter": 1, "reboots": 0, "paused": true }));
    write_hostile(mutator, &runtime.password_end(), json!({ "password": "x", "until": 7 }));
}

async fn folder_case(mutator: &mut Mutator, folders: &Folders) -> bool {
    let runtime = &folders.runtime;
    write_folder(mutator, runtime);
    let configuration = configuration();
    let password = Password { secret: "secret".into(), expiry: mutator.pick(&["+300", "now", "never"]).to_string() };
    let end = PasswordEnd::fixed(runtime, "s-1", &password);
    assert!(end == password.expiry || end.parse::<i64>().is_ok(), "{end}");
    let state = MachineState::read(runtime);
    let is_used = state.is_some();
    if let Some(state) = state {
        let orders = Orders::of(runtime, &state, &configuration.config);
        assert_eq!(orders.start, state.start);
        let observation = Observation {
            pending: pending(&state, 3, &configuration),
            machine: Some(state),
            is_executing: Some(mutator.random.bool()),
            ..Observation::default()
        };
        if let Some(report) = Report::derive(&observation) {
            check(&report);
        }
    }
    if mutator.once_in(4) {
        control_case(mutator, folders).await;
    }
    is_used
}

/// The machine role's socket, on which anybody in the Pod can ask.
async fn control_case(mutator: &mut Mutator, folders: &Folders) {
    write_configuration(mutator, &folders.config, false);
    let mut control = Control::listen(&folders.runtime, &folders.config).unwrap();
    let mut open = Vec::new();
    for _ in 0..mutator.random.u32(1..20) {
        let mut stream = UnixStream::connect(folders.runtime.control()).await.unwrap();
        let requests = [
            json!("end"),
            json!({ "media": ["/a.iso", "relative", ""] }),
            json!({ "task": "status" }),
            json!({ "task": { "sendKey": { "keys": ["ctrl"] } } }),
        ];
        let request = mutator.pick(&requests).clone();
        let mut line = mutator.message(request);
        line.push(b'\n');
        // It may have closed the connection already.
        let _ = timeout(Duration::from_secs(1), stream.write_all(&line)).await;
        open.push(stream);
    }
    let runtime = folders.runtime.clone();
    let ending = async {
        loop {
            if let Asked::End(request) = control.asked().await {
                request.answer(true);
            }
        }
    };
    // Requests of others come before it.
    let answer = tokio::select! { answer = control::end(&runtime) => answer, () = ending => unreachable!() };
    assert!(answer.unwrap(), "the machine role does not answer");
}

/// A whole agent. One of its inputs is hostile. Returns the number of reports.
async fn agent_case(input: Input, mutator: &mut Mutator, folders: &Folders) -> u64 {
    let runtime = &folders.runtime;
    let is = |other| input == other;
    write_configuration(mutator, &folders.config, false);
    machine(&Phase::Running).write(runtime).unwrap();
    let peers = [
        (runtime.agent_monitor(), Role::Qemu, is(Input::Qmp)),
        (runtime.guest_agent(), Role::GuestAgent, is(Input::GuestAgent)),
        (runtime.vmop_agent(), Role::LoginAgent, is(Input::LoginAgent)),
        (runtime.control(), Role::Machine, is(Input::SharedFolder)),
    ]
    .map(|(socket, role, is_hostile)| Peer::listen(&socket, role, is_hostile, mutator.fork()));
    let options = AgentOptions {
        config_dir: folders.config.clone(),
        runtime: runtime.clone(),
        logging: Logging::new(None).0,
        resource: VmResource::new(None, "ns1", Target { name: "vm1".into(), pod_uid: None }),
        relay: tokio::sync::watch::channel(vm_operator::runner::relay::RelayState::default()).1,
    };
    let (sender, mut reports) = watch::channel(None);
    let (term, is_term) = watch::channel(false);
    let mut agent = Agent::new(options, sender).unwrap();
    let script = async {
        for _ in 0..mutator.random.u32(1..12) {
            sleep(Duration::from_millis(mutator.random.u64(..20_000))).await;
            match input {
                Input::SharedFolder => write_folder(mutator, runtime),
                Input::Configuration => write_configuration(mutator, &folders.config, true),
                _ => write_configuration(mutator, &folders.config, false),
            }
        }
        term.send_replace(true);
        // QEMU ends, and with it the guest.
        drop(peers);
        std::future::pending::<()>().await;
    };
    let mut count = 0;
    let checking = async {
        loop {
            let _ = reports.changed().await;
            check(reports.borrow_and_update().as_ref().unwrap());
            count += 1;
        }
    };
    tokio::select! {
        ended = agent.run(is_term) => ended.unwrap(),
        () = script => unreachable!(),
        () = checking => unreachable!(),
    }
    agent.report_end();
    count
}

fn case(number: u64, counts: &mut BTreeMap<Input, Count>) {
    let input = INPUTS[usize::try_from(number % 5).unwrap()];
    let is_agent = (number / 5).is_multiple_of(4);
    let mut mutator = Mutator::new(number);
    let folders = Folders::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let count = counts.entry(input).or_default();
    runtime.block_on(async {
        let case = async {
            if is_agent {
                count.agents += 1;
                count.reports += agent_case(input, &mut mutator, &folders).await;
                return;
            }
            let is_used = match input {
                Input::Qmp => qmp_case(&mut mutator, &folders).await,
                Input::GuestAgent => guest_agent_case(&mut mutator, &folders).await,
                Input::LoginAgent => login_case(&mut mutator, &folders).await,
                Input::Configuration => configuration_case(&mut mutator, &folders),
                Input::SharedFolder => folder_case(&mut mutator, &folders).await,
            };
            *(if is_used { &mut count.used } else { &mut count.refused }) += 1;
        };
        assert!(timeout(LONGEST, case).await.is_ok(), "it does not end");
    });
}

/// The most memory that this process has had, in KiB.
fn most_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn what_the_runner_reads_never_makes_it_panic_hang_or_report_too_much() {
    if let Some(only) = std::env::var("FUZZ_CASE").ok().and_then(|text| text.parse().ok()) {
        case(only, &mut BTreeMap::new());
        eprintln!("case {only}: at most {} MiB", most_memory() >> 10);
        return;
    }
    let mut counts = BTreeMap::new();
    let first = fuzzing::fuzz(
        120,
        |number| format!("FUZZ_CASE={number}"),
        |number| {
            let begin = Instant::now();
            case(number, &mut counts);
            if begin.elapsed() > SLOW {
                eprintln!("case {number} took {:?}", begin.elapsed());
            }
            assert!(most_memory() < MOST_MEMORY, "after case {number} the process has had {} KiB", most_memory());
            counts.values().all(Count::has_all)
        },
    );
    eprintln!("cases from {first}; at most {} MiB", most_memory() >> 10);
    for (input, count) in &counts {
        let Count { used, refused, agents, reports } = count;
        eprintln!("{input:?}: {used} used, {refused} refused; {agents} agents with {reports} reports");
        // Otherwise it would show nothing.
        assert!(count.has_all(), "{input:?}");
    }
}
