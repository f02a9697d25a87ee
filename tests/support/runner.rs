//! A machine with its files in a temporary directory, and the program vm-runner that runs it, as a process beside the test.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, OnceLock},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vm_operator::runner_config::RunnerConfig;

/// For a machine that is busy with other things; nothing is asserted about times.
const PATIENCE: Duration = Duration::from_secs(180);

/// The program.
pub const RUNNER: &str = env!("CARGO_BIN_EXE_vm-runner");
/// The runner's in a network of its own.
pub const ADDRESS: &str = "10.99.0.2";

/// The guest's disk image, built once.
pub fn guest_image() -> &'static Path {
    static IMAGE: OnceLock<PathBuf> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let image = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guest.img");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/guest/build.sh");
        let status = Command::new(script).arg(&image).status().unwrap();
        assert!(status.success(), "{script}: {status}");
        image
    })
}

/// Waits for a condition; if it does not come, the state is printed.
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>, state: impl Fn() -> String) -> T {
    let start = Instant::now();
    loop {
        if let Some(outcome) = condition() {
            return outcome;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}\n{}", state());
        sleep(Duration::from_millis(20));
    }
}

/// Sends a signal, `TERM` or `KILL`.
pub fn kill(pid: u32, signal: &str) -> rustix::io::Result<()> {
    let signal = match signal {
        "TERM" => Signal::TERM,
        "KILL" => Signal::KILL,
        other => panic!("{other}"),
    };
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal)
}

/// A machine with its files in a temporary directory, which outlive its starts.
pub struct Vm {
    dir: tempfile::TempDir,
    pub config: Value,
}

impl Vm {
    /// A small machine; `vm` is merged into the configuration's section of that name, `user_data` goes to cloud-init.
    pub fn new(vm: Value, user_data: Value) -> Self {
        let dir = tempfile::Builder::new().prefix("vmr").tempdir().unwrap();
        fs::copy(guest_image(), dir.path().join("disk.img")).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let mut config = json!({
            "namespace": "ns1",
            "dataDir": path("data"),
            "runtimeDir": path("run"),
            "cdFolders": [dir.path()],
            "cloudInit": { "metaData": { "local-hostname": "hugo" }, "userData": user_data },
            "vm": {
                "name": "vm1",
                "firmware": "bios",
                "accelerator": "tcg",
                "maximumRam": "256 MiB",
                "powerdownTimeout": 120,
                "drives": [
                    { "type": "raw", "resource": path("disk.img"), "bootindex": 0 },
                    { "type": "raw", "resource": path("data.img"), "size": 1 << 20 },
                ],
            },
        });
        config["vm"].as_object_mut().unwrap().extend(vm.as_object().unwrap().clone());
        fs::create_dir(path("config")).unwrap();
        let vm = Self { dir, config };
        vm.write_config();
        vm
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.path(name)).unwrap_or_default()).into_owned()
    }

    pub fn write_config(&self) {
        let text = json!({ "/Runner": self.config }).to_string();
        RunnerConfig::parse(&text).unwrap();
        fs::write(self.path("config/config.yaml"), text).unwrap();
    }

    /// Changes the configuration while a runner follows it, as the kubelet does: all at once.
    pub fn change(&self, edit: impl FnOnce(&mut Value)) {
        let mut changed = self.config.clone();
        edit(&mut changed);
        fs::write(self.path("config/new"), json!({ "/Runner": changed }).to_string()).unwrap();
        fs::rename(self.path("config/new"), self.path("config/config.yaml")).unwrap();
    }

    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.config["vm"][key] = value.into();
        self.write_config();
    }

    /// Starts the runner; its output goes to the files ROLE.out and ROLE.err.
    pub fn start(&self, role: &str) -> Runner<'_> {
        self.start_by(Command::new(RUNNER), role)
    }

    /// Starts the runner in a network of its own, in which it has [`ADDRESS`], and without root's rights outside.
    pub fn start_in_a_network_of_its_own(&self, role: &str) -> Runner<'_> {
        let script = format!(
            "ip link set lo up && ip link add eth0 type veth peer name peer && ip link set peer up &&
             ip addr add {ADDRESS}/24 dev eth0 && ip link set eth0 up && ip route add default via 10.99.0.1 &&
             exec \"$@\""
        );
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", &script, "sh", RUNNER]);
        self.start_by(command, role)
    }

    /// Starts the runner with its second disk on a storage that is full.
    pub fn start_on_a_full_storage(&mut self, role: &str) -> Runner<'_> {
        let storage = self.path("storage");
        fs::create_dir(&storage).unwrap();
        self.config["vm"]["drives"][1]["resource"] = storage.join("data.img").display().to_string().into();
        self.write_config();
        let script = "mount -t tmpfs -o size=4k tmpfs \"$0\" && head -c 4096 /dev/zero >\"$0/other\" && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script]).arg(storage).arg(RUNNER);
        self.start_by(command, role)
    }

    pub fn start_by(&self, command: Command, role: &str) -> Runner<'_> {
        self.start_words(command, role, &["run", "--role", role])
    }

    /// Starts the runner as the containers of a Pod do: `vm-runner machine`, `vm-runner agent`.
    pub fn start_container(&self, name: &str) -> Runner<'_> {
        self.start_words(Command::new(RUNNER), name, &[name])
    }

    /// Starts the runner with an output that nobody reads and that takes nothing more.
    pub fn start_unread(&self, role: &str) -> (Runner<'_>, UnixStream) {
        let (reader, mut writer) = UnixStream::pair().unwrap();
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[b'x'; 4096]).is_ok() {}
        writer.set_nonblocking(false).unwrap();
        let out = || Stdio::from(OwnedFd::from(writer.try_clone().unwrap()));
        let words = ["run", "--role", role];
        (self.start_into(Command::new(RUNNER), role, &words, out(), out()), reader)
    }

    /// Starts the runner with the relay on a port that the system chooses; the folder `relay` has what it needs.
    pub fn start_relayed(&self) -> Runner<'_> {
        let mut command = Command::new(RUNNER);
        command.env("VM_RUNNER_RELAY_DIR", self.path("relay")).env("VM_RUNNER_RELAY_PORT", "0");
        self.start_by(command, "all")
    }

    fn start_words(&self, command: Command, role: &str, words: &[&str]) -> Runner<'_> {
        let file = |kind: &str| Stdio::from(File::create(self.path(&format!("{role}.{kind}"))).unwrap());
        self.start_into(command, role, words, file("out"), file("err"))
    }

    fn start_into(&self, mut command: Command, role: &str, words: &[&str], output: Stdio, errors: Stdio) -> Runner<'_> {
        fs::write(self.path("termination-log"), "").unwrap();
        let child = command
            .args(words)
            .args(["--status", "log", "--config-dir"])
            .arg(self.path("config"))
            .arg("--termination-log")
            .arg(self.path("termination-log"))
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .unwrap();
        Runner { vm: self, role: role.into(), child }
    }

    /// Makes a CD's image.
    pub fn cd(&self, name: &str, kilobytes: usize) -> String {
        let path = self.path(name);
        fs::write(&path, vec![b'x'; kilobytes << 10]).unwrap();
        path.display().to_string()
    }

    /// Gives QEMU a command over the agent's monitor, which no agent uses.
    pub fn ask_qemu(&self, command: &str) {
        let mut monitor = UnixStream::connect(self.path("run/agent.sock")).unwrap();
        let mut answers = BufReader::new(monitor.try_clone().unwrap()).lines().map(Result::unwrap);
        answers.next().unwrap();
        for command in ["qmp_capabilities", command] {
            writeln!(monitor, "{}", json!({ "execute": command })).unwrap();
            answers.find(|answer| answer.contains("\"return\"")).unwrap();
        }
    }

    pub fn machine(&self) -> Value {
        serde_json::from_str(&self.text("run/machine.json")).unwrap_or_default()
    }
}

/// Stands between the machine role and QEMU's monitor, and can cut the connection.
#[derive(Default)]
pub struct MonitorProxy(Arc<Mutex<Vec<UnixStream>>>);

impl MonitorProxy {
    /// The program that the runner must start as QEMU.
    pub fn qemu(vm: &Vm) -> PathBuf {
        let script = "#!/bin/sh
            for word; do shift; set -- \"$@\" \"$(echo \"$word\" | sed s,/monitor.sock,/qemu.sock,)\"; done
            exec qemu-system-x86_64 \"$@\"";
        let file = vm.path("qemu");
        fs::write(&file, script).unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
        file
    }

    /// Waits for QEMU's monitor, and passes on what is said there.
    pub fn start(vm: &Vm) -> Self {
        let (socket, qemu) = (vm.path("run/monitor.sock"), vm.path("run/qemu.sock"));
        wait_for("QEMU's monitor", || UnixStream::connect(&qemu).ok(), || vm.text("all.err"));
        let listener = UnixListener::bind(socket).unwrap();
        let proxy = Self::default();
        let streams = Arc::clone(&proxy.0);
        thread::spawn(move || {
            for runner in listener.incoming().map_while(Result::ok) {
                let Ok(qemu) = UnixStream::connect(&qemu) else { return };
                let pairs = [(&runner, &qemu), (&qemu, &runner)].map(|(from, to)| (from.try_clone(), to.try_clone()));
                streams.lock().unwrap().extend([runner, qemu]);
                for (from, to) in pairs {
                    let (mut from, mut to) = (from.unwrap(), to.unwrap());
                    thread::spawn(move || std::io::copy(&mut from, &mut to));
                }
            }
        });
        proxy
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        for stream in self.0.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// A running vm-runner. QEMU does not outlive it, even if a test fails.
pub struct Runner<'a> {
    pub vm: &'a Vm,
    role: String,
    pub child: Child,
}

impl Runner<'_> {
    pub fn output(&self) -> String {
        self.vm.text(&format!("{}.out", self.role))
    }

    pub fn log(&self) -> String {
        self.vm.text(&format!("{}.err", self.role))
    }

    pub fn state(&self) -> String {
        let (out, err) = (self.output(), self.log());
        format!("--- console\n{out}\n--- log\n{err}\n--- machine\n{}", self.vm.machine())
    }

    /// Waits for a line on the guest's console.
    pub fn console(&self, line: &str) {
        wait_for(
            line,
            || self.output().lines().any(|found| found.trim_end().ends_with(line)).then_some(()),
            || self.state(),
        );
    }

    /// Waits for a text in the runner's log.
    pub fn logs(&self, text: &str) {
        wait_for(text, || self.log().contains(text).then_some(()), || self.state());
    }

    /// Waits for a text in the runner's log, and returns the word after it.
    pub fn logged(&self, text: &str) -> String {
        self.logs(text);
        let log = self.log();
        let word = log.split_once(text).and_then(|(_, rest)| rest.split_whitespace().next());
        word.unwrap().to_owned()
    }

    /// Waits until the last word on a condition is this message.
    pub fn says_last(&self, condition: &str, message: &str) {
        let mark = format!("condition=\"{condition}\"");
        let says = || self.log().lines().rfind(|line| line.contains(&mark)).is_some_and(|line| line.contains(message));
        wait_for(message, || says().then_some(()), || self.state());
    }

    /// What a program says in the runner's network.
    pub fn in_its_network(&self, program: &[&str]) -> String {
        self.in_its("--net", program)
    }

    /// Lets the storage of the second disk grow, see [`Vm::start_on_a_full_storage`].
    pub fn grow_storage(&self) {
        let storage = self.vm.path("storage").display().to_string();
        self.in_its("--mount", &["mount", "-o", "remount,size=8m", &storage]);
    }

    fn in_its(&self, namespace: &str, program: &[&str]) -> String {
        let pid = self.child.id().to_string();
        let enter = ["--target", &pid, "--user", "--preserve-credentials", namespace];
        let output = Command::new("nsenter").args(enter).args(program).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Whether QEMU has the file open.
    pub fn has_open(&self, file: &str) -> bool {
        let qemu = self.vm.machine()["pid"].as_u64().unwrap();
        let files = fs::read_dir(format!("/proc/{qemu}/fd"))
            .unwrap()
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        files.into_iter().any(|open| open == Path::new(file))
    }

    pub fn opens(&self, file: &str) {
        wait_for(file, || self.has_open(file).then_some(()), || self.state());
    }

    /// QEMU opens a new file before it closes the old one.
    pub fn closes(&self, file: &str) {
        wait_for(file, || (!self.has_open(file)).then_some(()), || self.state());
    }

    /// The processes that it started.
    pub fn children(&self) -> Vec<u32> {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    pub fn signal(&self, name: &str) {
        kill(self.child.id(), name).unwrap();
    }

    /// Waits for the runner's end.
    pub fn end(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "the runner does not end\n{}", self.state());
            sleep(Duration::from_millis(20));
        }
    }

    #[track_caller]
    pub fn ends_well(&mut self, reason: &str) {
        let status = self.end();
        assert!(status.success(), "{status}\n{}", self.state());
        let machine = self.vm.machine();
        assert_eq!((&machine["phase"], &machine["reason"]), (&json!("Ended"), &json!(reason)), "{}", self.state());
    }
}

impl Drop for Runner<'_> {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = self.child.kill();
            let _ = self.child.wait();
            let machine = self.vm.machine();
            if self.role != "agent"
                && machine["phase"] != "Ended"
                && let Some(qemu) = machine["pid"].as_u64().and_then(|pid| pid.try_into().ok())
            {
                let _ = kill(qemu, "KILL");
            }
        }
    }
}
