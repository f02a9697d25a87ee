//! Boots the tiny guest (tests/guest/) with a real QEMU through the real program vm-runner, without a cluster.
//!
//! Needs Debian's qemu-system-x86, qemu-block-extra, ovmf, swtpm, passt, iproute2, busybox-static and what
//! tests/guest/build.sh names. Emulated, so that it works anywhere.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "support/spice.rs"]
mod spice;

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
    thread::sleep,
    time::{Duration, Instant},
};

use des::{
    Des,
    cipher::{BlockCipherEncrypt, KeyInit},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vm_operator::runner_config::RunnerConfig;

/// For a machine that is busy with other things; nothing is asserted about times.
const PATIENCE: Duration = Duration::from_secs(180);

const RUNNER: &str = env!("CARGO_BIN_EXE_vm-runner");
/// The runner's in a network of its own.
const ADDRESS: &str = "10.99.0.2";

/// The guest's disk image, built once.
fn guest_image() -> &'static Path {
    static IMAGE: OnceLock<PathBuf> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let image = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guest.img");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/guest/build.sh");
        let status = Command::new(script).arg(&image).status().unwrap();
        assert!(status.success(), "{script}: {status}");
        image
    })
}

fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>, state: impl Fn() -> String) -> T {
    let start = Instant::now();
    loop {
        if let Some(outcome) = condition() {
            return outcome;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}\n{}", state());
        sleep(Duration::from_millis(20));
    }
}

fn kill(pid: u32, signal: &str) -> rustix::io::Result<()> {
    let signal = match signal {
        "TERM" => Signal::TERM,
        "KILL" => Signal::KILL,
        other => panic!("{other}"),
    };
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal)
}

/// A machine with its files in a temporary directory, which outlive its starts.
struct Vm {
    dir: tempfile::TempDir,
    config: Value,
}

impl Vm {
    /// A small machine; `vm` is merged into the configuration's section of that name, `user_data` goes to cloud-init.
    fn new(vm: Value, user_data: Value) -> Self {
        let dir = tempfile::Builder::new().prefix("vmr").tempdir().unwrap();
        fs::copy(guest_image(), dir.path().join("disk.img")).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let mut config = json!({
            "namespace": "ns1",
            "dataDir": path("data"),
            "runtimeDir": path("run"),
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

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.path(name)).unwrap_or_default()).into_owned()
    }

    fn write_config(&self) {
        let text = json!({ "/Runner": self.config }).to_string();
        RunnerConfig::parse(&text).unwrap();
        fs::write(self.path("config/config.yaml"), text).unwrap();
    }

    /// Changes the configuration while a runner follows it, as the kubelet does: all at once.
    fn change(&self, edit: impl FnOnce(&mut Value)) {
        let mut changed = self.config.clone();
        edit(&mut changed);
        fs::write(self.path("config/new"), json!({ "/Runner": changed }).to_string()).unwrap();
        fs::rename(self.path("config/new"), self.path("config/config.yaml")).unwrap();
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.config["vm"][key] = value.into();
        self.write_config();
    }

    /// Starts the runner; its output goes to the files ROLE.out and ROLE.err.
    fn start(&self, role: &str) -> Runner<'_> {
        self.start_by(Command::new(RUNNER), role)
    }

    /// Starts the runner in a network of its own, in which it has [`ADDRESS`], and without root's rights outside.
    fn start_in_a_network_of_its_own(&self, role: &str) -> Runner<'_> {
        let script = format!(
            "ip link set lo up && ip link add eth0 type veth peer name peer && ip link set peer up &&
             ip addr add {ADDRESS}/24 dev eth0 && ip link set eth0 up && ip route add default via 10.99.0.1 &&
             exec \"$@\""
        );
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", &script, "sh", RUNNER]);
        self.start_by(command, role)
    }

    fn start_by(&self, mut command: Command, role: &str) -> Runner<'_> {
        let file = |kind: &str| File::create(self.path(&format!("{role}.{kind}"))).unwrap();
        fs::write(self.path("termination-log"), "").unwrap();
        let child = command
            .args(["run", "--role", role, "--status", "log", "--config-dir"])
            .arg(self.path("config"))
            .arg("--termination-log")
            .arg(self.path("termination-log"))
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"))
            .spawn()
            .unwrap();
        Runner { vm: self, role: role.into(), child }
    }

    /// Makes a CD's image.
    fn cd(&self, name: &str, kilobytes: usize) -> String {
        let path = self.path(name);
        fs::write(&path, vec![b'x'; kilobytes << 10]).unwrap();
        path.display().to_string()
    }

    fn machine(&self) -> Value {
        serde_json::from_str(&self.text("run/machine.json")).unwrap_or_default()
    }
}

/// A running vm-runner. QEMU does not outlive it, even if a test fails.
struct Runner<'a> {
    vm: &'a Vm,
    role: String,
    child: Child,
}

impl Runner<'_> {
    fn output(&self) -> String {
        self.vm.text(&format!("{}.out", self.role))
    }

    fn log(&self) -> String {
        self.vm.text(&format!("{}.err", self.role))
    }

    fn state(&self) -> String {
        let (out, err) = (self.output(), self.log());
        format!("--- console\n{out}\n--- log\n{err}\n--- machine\n{}", self.vm.machine())
    }

    /// Waits for a line on the guest's console.
    fn console(&self, line: &str) {
        wait_for(
            line,
            || self.output().lines().any(|found| found.trim_end().ends_with(line)).then_some(()),
            || self.state(),
        );
    }

    /// Waits for a text in the runner's log.
    fn logs(&self, text: &str) {
        wait_for(text, || self.log().contains(text).then_some(()), || self.state());
    }

    /// Waits until the last word on a condition is this message.
    fn says_last(&self, condition: &str, message: &str) {
        let mark = format!("condition=\"{condition}\"");
        let says = || self.log().lines().rfind(|line| line.contains(&mark)).is_some_and(|line| line.contains(message));
        wait_for(message, || says().then_some(()), || self.state());
    }

    /// What a program says in the runner's network.
    fn in_its_network(&self, program: &[&str]) -> String {
        let pid = self.child.id().to_string();
        let enter = ["--target", &pid, "--user", "--preserve-credentials", "--net"];
        let output = Command::new("nsenter").args(enter).args(program).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Whether QEMU has the file open.
    fn has_open(&self, file: &str) -> bool {
        let qemu = self.vm.machine()["pid"].as_u64().unwrap();
        let files = fs::read_dir(format!("/proc/{qemu}/fd"))
            .unwrap()
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        files.into_iter().any(|open| open == Path::new(file))
    }

    fn opens(&self, file: &str) {
        wait_for(file, || self.has_open(file).then_some(()), || self.state());
    }

    /// QEMU opens a new file before it closes the old one.
    fn closes(&self, file: &str) {
        wait_for(file, || (!self.has_open(file)).then_some(()), || self.state());
    }

    fn signal(&self, name: &str) {
        kill(self.child.id(), name).unwrap();
    }

    /// Waits for the runner's end.
    fn end(&mut self) -> ExitStatus {
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
    fn ends_well(&mut self, reason: &str) {
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

#[test]
fn a_guest_boots_changes_and_powers_down_and_its_disk_stays() {
    let hardware = json!({
        "firmware": "uefi",
        "useTpm": true,
        "maximumCpus": 4,
        "currentCpus": 1,
        "maximumRam": "512 MiB",
        "network": [{ "type": "user", "device": "virtio-net" }],
    });
    let mut vm = Vm::new(hardware, json!({ "message": "hello from the test" }));
    vm.config["vm"]["drives"].as_array_mut().unwrap().push(json!({ "type": "ide-cd", "file": "" }));
    vm.config["cloudInit"]["networkConfig"] = json!({ "version": 2 });
    vm.write_config();
    {
        let mut runner = vm.start("all");
        runner.console("guest: hostname=hugo");
        runner.console("guest: network-config");
        runner.console("guest: user-data hello from the test");
        runner.console("guest: starts=1");
        runner.console("guest: cpus=1");
        runner.console("guest: up");
        runner.logs("condition=\"Booted\" status=true");

        // The running machine gets what the configuration says now.
        vm.change(|config| {
            config["vm"]["currentCpus"] = json!(3);
            config["vm"]["currentRam"] = json!("384 MiB");
        });
        runner.console("guest: cpus=3");
        runner.logs("changed change=\"Balloon(402653184)\"");

        runner.signal("TERM");
        runner.console("guest: power button");
        runner.ends_well("PoweredDown");
        let log = runner.log();
        assert!(log.contains("condition=\"Running\" status=false reason=\"PoweredDown\""), "{log}");
    }
    let (uuid, machine_type) = (vm.text("data/uuid.txt"), vm.machine()["machineType"].clone());
    vm.set("currentCpus", 2);
    {
        let mut runner = vm.start("all");
        runner.console("guest: starts=2");
        runner.console("guest: cpus=2");
        runner.console("guest: up");
        runner.signal("TERM");
        runner.ends_well("PoweredDown");
    }
    assert_eq!((vm.text("data/uuid.txt"), vm.machine()["machineType"].clone()), (uuid, machine_type));
    assert!(vm.text("data/machine-type").starts_with("pc-q35-"));
    assert!(vm.path("data/fw-vars.fd").exists() && vm.path("data/tpm").exists());
}

/// A web server that ends with the test.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn of(folder: &Path) -> Self {
        // It takes no port 0; one that was free a moment ago is.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let address = free.to_string();
        let process = Command::new("busybox").args(["httpd", "-f", "-p", &address, "-h"]).arg(folder).spawn().unwrap();
        wait_for("the web server", || TcpStream::connect(&address).ok(), String::new);
        Self { process, address }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_cd_is_changed_and_a_reset_is_made_once_while_the_guest_runs() {
    let mut vm = Vm::new(json!({}), json!({}));
    let (small, large) = (vm.cd("small.iso", 64), vm.cd("large.iso", 128));
    vm.config["vm"]["drives"].as_array_mut().unwrap().push(json!({ "type": "ide-cd", "file": small }));
    vm.write_config();
    let mut runner = vm.start("all");
    runner.console("guest: up");
    let insert = |file: &str, resets: u64| {
        vm.change(|config| {
            config["vm"]["drives"][2]["file"] = json!(file);
            config["resetCounter"] = json!(resets);
        });
    };
    // The tiny guest's kernel has no driver for this drive; QEMU's open files tell.
    runner.opens(&small);
    insert(&large, 0);
    runner.opens(&large);
    runner.closes(&small);
    insert("", 0);
    runner.logs("changed change=\"Eject { id: \\\"cd0\\\" }\"");
    runner.closes(&large);
    insert("/no/such.iso", 0);
    runner.logs("not changed change=\"Insert { id: \\\"cd0\\\", file: \\\"/no/such.iso\\\" }\"");
    insert(&small, 0);
    runner.opens(&small);
    // From a web server, which QEMU asks for it at once.
    let server = Server::of(&vm.path(""));
    let url = format!("http://{}/large.iso", server.address);
    insert(&url, 0);
    runner.logs(&format!("changed change=\"Insert {{ id: \\\"cd0\\\", file: \\\"{url}\\\" }}\""));
    runner.closes(&small);
    insert(&small, 0);
    runner.opens(&small);

    insert(&small, 1);
    runner.console("guest: starts=2");
    insert(&large, 1);
    runner.opens(&large);
    let log = runner.log();
    assert_eq!(log.matches("changed change=\"Reset(1)\"").count(), 1, "{log}");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_cd_that_the_guest_uses_is_changed_when_the_guest_lets_it_go() {
    let mut vm = Vm::new(json!({}), json!({ "lock-cd": true }));
    let [small, large] = [("small.iso", 64), ("large.iso", 128)].map(|(name, kilobytes)| vm.cd(name, kilobytes));
    // The tiny guest's kernel has a driver for drives at a SCSI controller only.
    let template = include_str!("../templates/runner/standard.yaml.j2")
        .replace("driver: ide-cd", "driver: scsi-cd")
        .replace("bus: {{ cd.bus }}", "bus: scsi.0")
        .replace(
            "{% for cd in cds %}",
            "- -device\n- { driver: virtio-scsi-pci, id: scsi, bus: pcie.0, addr: \"7.0\" }\n{% for cd in cds %}",
        );
    fs::create_dir(vm.path("data")).unwrap();
    fs::write(vm.path("data/template-scsi.yaml.j2"), template).unwrap();
    vm.config["template"] = json!("scsi.yaml.j2");
    vm.config["updateTemplate"] = json!(false);
    vm.config["vm"]["drives"].as_array_mut().unwrap().push(json!({ "type": "ide-cd", "file": small }));
    vm.write_config();
    let mut runner = vm.start("all");
    runner.console("guest: cd locked");
    runner.console("guest: up");
    vm.change(|config| config["vm"]["drives"][2]["file"] = json!(large));
    runner.logs("not changed change=\"Insert");
    runner.opens(&small);
    vm.change(|config| {
        config["vm"]["drives"][2]["file"] = json!(large);
        config["vm"]["display"]["loggedInUser"] = json!("eject");
    });
    runner.opens(&large);
    runner.closes(&small);
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_guest_that_shuts_down_by_itself_ends_the_runner_with_success() {
    let vm = Vm::new(json!({}), json!({ "poweroff-after-boot": true }));
    let mut runner = vm.start("all");
    runner.console("guest: powering off by itself");
    runner.ends_well("GuestShutdown");
}

#[test]
fn a_guest_that_is_to_stay_down_keeps_the_runner_waiting() {
    let mut vm = Vm::new(json!({}), json!({ "poweroff-after-boot": true }));
    vm.config["guestShutdownStops"] = json!(true);
    vm.write_config();
    {
        let runner = vm.start("all");
        runner.logs("condition=\"Running\" status=false reason=\"GuestShutdown\"");
        runner.logs("waiting for the Pod's end");
        // As if the container were killed; the kubelet starts it again.
    }
    let mut runner = vm.start("all");
    runner.logs("waiting for the Pod's end");
    assert!(!runner.log().contains("QEMU started"), "{}", runner.log());
    runner.signal("TERM");
    runner.ends_well("GuestShutdown");
}

#[test]
fn a_reboot_is_no_end() {
    let vm = Vm::new(json!({}), json!({ "reboot-after-first-boot": true }));
    let mut runner = vm.start("all");
    runner.console("guest: rebooting");
    runner.console("guest: starts=2");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_guest_that_does_not_listen_is_powered_off() {
    let vm = Vm::new(json!({ "powerdownTimeout": 1 }), json!({ "ignore-power-button": true }));
    let mut runner = vm.start("all");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.console("guest: power button, not listening");
    runner.ends_well("PoweredOff");
}

#[test]
fn a_qemu_that_cannot_start_has_its_last_words_everywhere() {
    let vm = Vm::new(json!({ "machineType": "pc-q35-99.9" }), json!({}));
    let mut runner = vm.start("all");
    assert_eq!(runner.end().code(), Some(1));
    let machine = vm.machine();
    assert_eq!((&machine["reason"], &machine["code"]), (&json!("QemuFailed"), &json!(1)));
    for place in [runner.log(), vm.text("termination-log"), machine["lastWords"].to_string()] {
        assert!(place.contains("unsupported machine type"), "{place}");
    }
    assert!(vm.text("termination-log").contains("use a runner image"), "what to do");
    assert!(runner.log().contains("status=false reason=\"QemuFailed\""), "{}", runner.log());
}

#[test]
fn what_is_missing_is_named_before_qemu_starts() {
    let vm = Vm::new(json!({ "drives": [{ "type": "raw", "resource": "/dev/no-such-disk" }] }), json!({}));
    let mut runner = vm.start("all");
    assert_eq!(runner.end().code(), Some(1));
    for place in [runner.log(), vm.text("termination-log"), vm.text("run/machine.json")] {
        assert!(place.contains("the disk /dev/no-such-disk does not exist"), "{place}");
    }
}

#[test]
fn an_agent_that_crashes_disturbs_no_guest() {
    let vm = Vm::new(json!({}), json!({}));
    let mut machine = vm.start("machine");
    {
        let agent = vm.start("agent");
        agent.logs("the guest runs");
        agent.logs("condition=\"Booted\" status=true");
        assert!(!agent.output().contains("guest:"), "the console is the machine's");
        // Killed with the end of its scope.
    }
    let mut agent = vm.start("agent");
    agent.logs("condition=\"Running\" status=true");
    agent.logs("condition=\"Booted\" status=true");
    machine.signal("TERM");
    machine.ends_well("PoweredDown");
    agent.logs("reason=\"PoweredDown\"");
    agent.signal("TERM");
    assert!(agent.end().success());
    assert_eq!(machine.output().matches("guest: up").count(), 1);
}

#[test]
fn a_guest_starts_without_an_agent() {
    let vm = Vm::new(json!({}), json!({}));
    let mut machine = vm.start("machine");
    machine.console("guest: up");
    assert!(machine.log().contains("continuing it without one"));
    machine.signal("TERM");
    machine.ends_well("PoweredDown");
}

#[test]
fn the_command_line_can_be_seen_without_a_start() {
    let vm = Vm::new(json!({ "display": { "spice": { "port": 5999, "ticket": "secret" } } }), json!({}));
    let output = Command::new(RUNNER).args(["render-command", "--config-dir"]).arg(vm.path("config")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("qemu-system-x86_64\n-nodefaults\n"), "{text}");
    assert!(text.contains("port=5999,disable-ticketing=off") && !text.contains("secret"), "{text}");
    assert!(!vm.path("run/machine.json").exists());
}

/// A viewer of a VNC display, if the password lets it in (RFC 6143, sections 7.1 to 7.3.1).
fn view(port: u16, password: &str) -> Option<TcpStream> {
    let enter = || -> std::io::Result<(u32, TcpStream)> {
        let mut server = TcpStream::connect(("127.0.0.1", port))?;
        server.set_read_timeout(Some(Duration::from_secs(10)))?;
        server.read_exact(&mut [0; 12])?;
        server.write_all(b"RFB 003.008\n")?;
        let mut count = [0];
        server.read_exact(&mut count)?;
        let mut types = vec![0; count[0].into()];
        server.read_exact(&mut types)?;
        const BY_PASSWORD: u8 = 2;
        assert_eq!(types, [BY_PASSWORD], "nobody gets in without");
        server.write_all(&[BY_PASSWORD])?;
        let mut challenge = [0; 16];
        server.read_exact(&mut challenge)?;
        let mut key = [0; 8];
        key.iter_mut().zip(password.bytes()).for_each(|(key, byte)| *key = byte.reverse_bits());
        let cipher = Des::new(&key.into());
        for block in challenge.chunks_exact_mut(8) {
            cipher.encrypt_block(block.try_into().unwrap());
        }
        server.write_all(&challenge)?;
        let mut result = [0; 4];
        server.read_exact(&mut result)?;
        const SHARED: u8 = 1;
        server.write_all(&[SHARED])?;
        Ok((u32::from_be_bytes(result), server))
    };
    let (result, server) = enter().ok()?;
    (result == 0).then_some(server)
}

#[test]
fn the_display_takes_the_password_of_the_moment() {
    let port = (5950..6000).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap();
    let vm = Vm::new(json!({ "display": { "vnc": { "port": port } } }), json!({}));
    let set = |file: &str, text: &str| {
        fs::write(vm.path("config/new"), text).unwrap();
        fs::rename(vm.path("config/new"), vm.path("config").join(file)).unwrap();
    };
    set("display-password", "first");
    set("password-expiry", "never");
    let mut runner = vm.start("all");
    let only = |password: Option<&str>| {
        for known in ["first", "second"] {
            let right = password == Some(known);
            let what = format!("{known} to be {}", if right { "right" } else { "wrong" });
            wait_for(&what, || (view(port, known).is_some() == right).then_some(()), || runner.state());
        }
    };
    only(Some("first"));
    set("display-password", "second");
    only(Some("second"));
    set("password-expiry", "now");
    only(None);
    set("password-expiry", "+3600");
    only(Some("second"));
    set("password-expiry", "1000000000");
    only(None);
    set("password-expiry", "4000000000");
    only(Some("second"));
    let viewer = view(port, "second").unwrap();
    runner.says_last("ConsoleConnected", "The display is shown at 127.0.0.1.");
    drop(viewer);
    runner.says_last("ConsoleConnected", "Nobody looks at the display.");
    // While it runs it says more, if it is told to.
    assert!(!runner.log().contains("DEBUG"), "{}", runner.log());
    set("logging.properties", "org.jdrupes.vmoperator.level=FINE");
    runner.logs("levels=vm_operator=debug,info");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_user_is_logged_in_and_who_looks_at_the_display_is_named() {
    let port = (5900..5950).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap();
    let display = json!({ "spice": { "port": port, "ticket": "ticket" }, "loggedInUser": "alice" });
    let vm = Vm::new(json!({ "display": display }), json!({}));
    let log_in = |user: Value| vm.change(|config| config["vm"]["display"]["loggedInUser"] = user);
    let mut machine = vm.start("machine");
    {
        let agent = vm.start("agent");
        machine.console("guest: login alice");
        agent.says_last("VmopAgentConnected", "The login agent answers.");
        agent.says_last("UserLoggedIn", "alice was logged in.");
        assert!(spice::view(("127.0.0.1", port), "wrong").is_err());
        let viewer = spice::view(("127.0.0.1", port), "ticket").unwrap();
        agent.says_last("ConsoleConnected", "The display is shown at 127.0.0.1.");
        drop(viewer);
        agent.says_last("ConsoleConnected", "Nobody looks at the display.");
        log_in(json!("root"));
        agent.says_last("UserLoggedIn", "alice was logged in; then the login agent refused: 501 root does not log in");
        log_in(Value::Null);
        machine.console("guest: logout");
        agent.says_last("UserLoggedIn", "No user was logged in.");
        // Killed with the end of its scope.
    }
    // The next one finds the guest's agent, and a viewer, as they are.
    let _viewer = spice::view(("127.0.0.1", port), "ticket").unwrap();
    log_in(json!("bob"));
    let mut agent = vm.start("agent");
    machine.console("guest: login bob");
    agent.says_last("UserLoggedIn", "bob was logged in.");
    agent.says_last("ConsoleConnected", "The display is shown at 127.0.0.1.");
    // A Pod's containers are told to end at the same time.
    agent.signal("TERM");
    machine.signal("TERM");
    machine.ends_well("PoweredDown");
    assert!(agent.end().success());
    agent.says_last("Running", "The guest has shut down, as it was asked to.");
    agent.says_last("UserLoggedIn", "The machine does not run.");
    agent.says_last("ConsoleConnected", "The machine does not run.");
}

#[test]
fn a_guest_with_a_pod_network_has_the_pods_address_and_its_ports() {
    let port = 5950;
    let hardware = json!({
        "network": [{ "type": "pod", "device": "virtio-net", "mac": "02:16:3e:33:58:10" }],
        "display": { "vnc": { "port": port } },
    });
    let vm = Vm::new(hardware, json!({ "message": "hello from the guest" }));
    let mut runner = vm.start_in_a_network_of_its_own("all");
    runner.console(&format!("guest: address={ADDRESS}"));
    let url = format!("http://{ADDRESS}:8080/");
    let page = wait_for(
        "the guest's page",
        || Some(runner.in_its_network(&["busybox", "wget", "-q", "-O", "-", &url])).filter(|page| !page.is_empty()),
        || runner.state(),
    );
    assert_eq!(page.trim(), "hugo hello from the guest");
    // The ports up to the last, also those that only root may have, but not the display's: that is QEMU's.
    let listening = runner.in_its_network(&["ss", "--no-header", "--listening", "--tcp", "--numeric", "--processes"]);
    let owner = |port: u16| {
        let line = listening.lines().find(|line| line.contains(&format!(":{port} ")));
        line.and_then(|line| line.split('"').nth(1)).unwrap_or_default()
    };
    for (port, program) in
        [(1, "passt"), (80, "passt"), (8080, "passt"), (port, "qemu-system-x86"), (port + 1, "passt")]
    {
        assert!(owner(port).starts_with(program), "{port}: {:?}", owner(port));
    }

    // A guest is not ended for its network.
    let runner_pid = runner.child.id();
    let children = fs::read_to_string(format!("/proc/{runner_pid}/task/{runner_pid}/children")).unwrap();
    let mut children = children.split_whitespace().map(|pid| pid.parse::<u32>().unwrap());
    let is_passt = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().starts_with("passt");
    kill(children.find(is_passt).expect("passt among the runner's children"), "KILL").unwrap();
    runner.logs("the guest is without what this program did until its next start");
    runner.signal("TERM");
    runner.console("guest: power button");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_helper_that_is_missing_or_fails_is_named() {
    let vm = Vm::new(json!({ "network": [{ "type": "pod", "device": "virtio-net" }] }), json!({}));
    let script = |name: &str, text: &str| {
        let file = vm.path(name);
        fs::write(&file, format!("#!/bin/sh\ncd {}\n{text}", vm.path("").display())).unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
        file
    };
    // As passt without its rights, which makes its socket before it finds out; and QEMU goes on without a network.
    let fails_late = script(
        "fails-late",
        "while [ $1 != --socket ]; do shift; done
         echo $$ >pid; touch $2
         while [ ! -e started ]; do sleep 0.02; done
         echo Failed to sandbox process, exiting >&2
         exit 1",
    );
    let qemu = script(
        "qemu",
        r#"case "$*" in *passt.sock*) touch started; while [ -e /proc/$(cat pid) ]; do sleep 0.02; done ;; esac
           exec qemu-system-x86_64 "$@""#,
    );
    let late =
        "fails-late ended (exit status: 1): Failed to sandbox process, exiting\na pod network needs a container that";
    for (program, why) in [
        (Path::new("/no/passt"), "cannot start /no/passt (install it in the runner's image)"),
        (Path::new("/bin/false"), "/bin/false ended (exit status: 1): without a word"),
        (&fails_late, late),
    ] {
        let mut command = Command::new("env");
        command.arg(format!("VM_RUNNER_PASST={}", program.display()));
        if program == fails_late {
            command.arg(format!("VM_RUNNER_QEMU={}", qemu.display()));
        }
        command.arg(RUNNER);
        let mut runner = vm.start_by(command, "all");
        assert_eq!(runner.end().code(), Some(1), "{}", runner.state());
        let last_words = vm.machine()["lastWords"].as_str().unwrap().to_owned();
        for place in [vm.text("termination-log"), last_words] {
            assert!(place.contains(why), "{place}");
        }
    }
}
