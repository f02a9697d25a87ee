//! Runs the program vm-runner with QEMU and the tiny guest of tests/guest/, without a cluster.
//!
//! The tests need Debian's packages qemu-system-x86, qemu-block-extra, ovmf, swtpm, passt, iproute2, busybox-static, and those that
//! tests/guest/build.sh names. QEMU emulates the CPU (TCG), so the tests need no KVM.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]

#[path = "guest/agents.rs"]
mod agents;
#[path = "guest/faults.rs"]
mod faults;
#[path = "guest/generations.rs"]
mod generations;
#[path = "guest/measures.rs"]
mod measures;
#[path = "guest/orders.rs"]
mod orders;
#[path = "guest/panics.rs"]
mod panics;
#[cfg(feature = "dev")]
#[path = "guest/relay.rs"]
mod relay;
#[path = "support/runner.rs"]
mod runner;
#[path = "support/spice.rs"]
mod spice;
#[path = "guest/templates.rs"]
mod templates;
#[path = "support/vnc.rs"]
mod vnc;

use std::{
    fs,
    io::{BufRead, BufReader},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use runner::{RUNNER, Vm, kill, wait_for};
use serde_json::{Value, json};
use vm_operator::api::stats::GuestStats;

#[test]
fn a_vm_boots_takes_changes_powers_down_and_keeps_its_data() {
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

        // A change of the configuration takes effect in the running VM.
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
        runner.console("guest: up");
        let output = runner.output();
        let first = output.lines().find_map(|line| line.trim_end().split_once("guest: cpus="));
        assert_eq!(first.unwrap().1, "2", "the number of CPUs at the boot");
        // QEMU would end if an emulated CPU was unplugged: it waits for the next start.
        vm.change(|config| {
            config["vm"]["currentCpus"] = json!(1);
            config["vm"]["currentRam"] = json!("256 MiB");
        });
        runner.logs("changed change=\"Balloon(268435456)\"");
        assert!(!runner.log().contains("Unplug"), "{}", runner.log());
        runner.signal("TERM");
        runner.ends_well("PoweredDown");
    }
    assert_eq!((vm.text("data/uuid.txt"), vm.machine()["machineType"].clone()), (uuid, machine_type));
    assert!(vm.text("data/machine-type").starts_with("pc-q35-"));
    assert!(vm.path("data/fw-vars.fd").exists() && vm.path("data/tpm").exists());
}

#[test]
fn a_network_keeps_its_addresses_when_the_one_before_it_is_taken_out() {
    let user = json!({ "type": "user", "device": "virtio-net" });
    let mut vm = Vm::new(json!({ "network": [user, user] }), json!({}));
    let cards = |vm: &Vm| -> Vec<String> {
        let mut runner = vm.start("all");
        runner.console("guest: up");
        let output = runner.output();
        runner.signal("TERM");
        runner.ends_well("PoweredDown");
        let mut cards: Vec<String> =
            output.lines().filter_map(|line| Some(line.trim_end().split_once("guest: card=")?.1.to_owned())).collect();
        cards.sort();
        cards
    };
    let both = cards(&vm);
    let macs = vm.machine()["macs"].clone();
    assert_eq!(both, [0, 1].map(|at| format!("0000:00:10.{at} {}", macs[at].as_str().unwrap())));
    // What the manager writes then.
    vm.config["vm"]["network"] = json!([{ "type": "user", "device": "virtio-net", "slot": 1, "mac": macs[1] }]);
    vm.write_config();
    assert_eq!(cards(&vm), both[1..]);
}

/// The guest boots from the second of two disks, and would not find it if its place were another one.
#[test]
fn a_guest_boots_from_a_disk_and_has_a_cd_when_those_before_them_are_taken_out() {
    let mut vm = Vm::new(json!({ "firmware": "uefi" }), json!({}));
    let cd = |file: &str| json!({ "type": "ide-cd", "file": vm.cd(file, 64) });
    let cds = [cd("first.iso"), cd("second.iso")];
    let drives = vm.config["vm"]["drives"].as_array_mut().unwrap();
    drives.swap(0, 1);
    drives.extend(cds);
    vm.write_config();
    let start = |vm: &Vm, slot: u32| {
        let mut runner = vm.start("all");
        runner.console("guest: up");
        let file = vm.cd("third.iso", 64);
        vm.change(|config| config["vm"]["drives"].as_array_mut().unwrap().last_mut().unwrap()["file"] = json!(file));
        runner.logs(&format!("changed change=\"Insert {{ slot: {slot},"));
        runner.signal("TERM");
        runner.ends_well("PoweredDown");
    };
    start(&vm, 1);
    // What the manager writes then.
    let drives = vm.config["vm"]["drives"].as_array_mut().unwrap();
    drives.remove(2);
    drives.remove(0);
    for drive in drives {
        drive["slot"] = json!(1);
    }
    vm.write_config();
    start(&vm, 1);
}

/// A web server that ends when it is dropped.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(folder: &Path) -> Self {
        // busybox does not accept port 0, so the test chooses a port that was free a moment ago.
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
    std::os::unix::fs::symlink("/etc/passwd", vm.path("passwd")).unwrap();
    let insert = |file: &str, resets: u64| {
        vm.change(|config| {
            config["vm"]["drives"][2]["file"] = json!(file);
            config["resetCounter"] = json!(resets);
        });
    };
    // The tiny guest has no driver for this drive, so the test looks at the files that QEMU has open.
    runner.opens(&small);
    insert(&large, 0);
    runner.opens(&large);
    runner.closes(&small);
    insert("", 0);
    runner.logs("changed change=\"Eject { slot: 0,");
    runner.closes(&large);
    // What is refused is in the status, and leaves the drive as it is.
    for (file, reason) in [
        ("/no/such.iso", "the file is neither in the image repository"),
        ("fat:///run/secrets", "it has the protocol fat"),
        ("json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}", "a path must be absolute"),
        (vm.path("passwd").to_str().unwrap(), "a symbolic link leads out of"),
        (vm.path("later.iso").to_str().unwrap(), "No such file or directory"),
    ] {
        insert(file, 0);
        runner.logs(&format!("{file} can't be inserted into the CD drive 0: {reason}"));
        runner.logs("condition=\"ChangesApplied\" status=false reason=\"ChangeFailed\"");
    }
    insert(&small, 0);
    runner.opens(&small);
    // QEMU connects to the web server when the CD is inserted.
    let server = Server::start(&vm.path(""));
    let url = format!("http://{}/large.iso", server.address);
    insert(&url, 0);
    runner.logs(&format!("changed change=\"Insert {{ slot: 0, drive: \\\"0\\\", medium: Url(\\\"{url}\\\")"));
    runner.closes(&small);
    insert(&small, 0);
    runner.opens(&small);

    insert(&small, 1);
    runner.console("guest: starts=2");
    insert(&large, 1);
    runner.opens(&large);
    let log = runner.log();
    assert_eq!(log.matches("changed change=\"Reset\"").count(), 1, "{log}");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_cd_that_the_guest_has_locked_is_changed_when_the_guest_opens_the_tray() {
    let mut vm = Vm::new(json!({}), json!({ "lock-cd": true }));
    let [small, large] = [("small.iso", 64), ("large.iso", 128)].map(|(name, kilobytes)| vm.cd(name, kilobytes));
    // The tiny guest has a driver only for drives at a SCSI controller. The VM has no balloon, which must not prevent other changes.
    let template = include_str!("../templates/qemu/standard.yaml.j2")
        .replace("driver: virtio-balloon-pci", "driver: virtio-rng-pci")
        .replace("  free-page-reporting: true\n  deflate-on-oom: true\n", "")
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
    // What QEMU refuses is tried at the start and with each new configuration. Other events of files and trays are no reason.
    let refused = runner.log().matches("not changed change=\"Balloon").count();
    assert!((1..=3).contains(&refused), "{refused} times: {}", runner.log());
}

#[test]
fn a_guest_that_shuts_down_by_itself_ends_the_runner_with_success() {
    let vm = Vm::new(json!({}), json!({ "poweroff-after-boot": true }));
    let mut runner = vm.start("all");
    runner.console("guest: powering off by itself");
    runner.ends_well("GuestShutdown");
}

#[test]
fn with_guest_shutdown_stops_the_runner_waits_after_the_guests_shutdown() {
    let mut vm = Vm::new(json!({}), json!({ "poweroff-after-boot": true }));
    vm.config["guestShutdownStops"] = json!(true);
    vm.write_config();
    {
        let runner = vm.start("all");
        runner.logs("condition=\"Running\" status=false reason=\"GuestShutdown\"");
        runner.logs("waiting for the Pod's end");
        // The runner is killed here, as if its container were killed. The kubelet starts the container again.
    }
    let mut runner = vm.start("all");
    runner.logs("waiting for the Pod's end");
    assert!(!runner.log().contains("QEMU started"), "{}", runner.log());
    runner.signal("TERM");
    runner.ends_well("GuestShutdown");
}

#[test]
fn a_runner_that_waits_ends_when_the_guest_may_start_again() {
    let mut vm = Vm::new(json!({}), json!({ "poweroff-after-boot": true }));
    vm.config["guestShutdownStops"] = json!(true);
    vm.write_config();
    let mut runner = vm.start("all");
    runner.logs("waiting for the Pod's end");
    vm.change(|config| config["guestShutdownStops"] = json!(false));
    // The kubelet starts the container again, and the runner starts the guest.
    runner.ends_well("GuestShutdown");
    drop(runner);
    vm.start("all").logs("QEMU started");
}

#[test]
fn a_reboot_does_not_end_the_vm() {
    let vm = Vm::new(json!({}), json!({ "reboot-after-first-boot": true }));
    let mut runner = vm.start("all");
    runner.console("guest: rebooting");
    runner.console("guest: starts=2");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_guest_that_ignores_the_power_button_is_powered_off() {
    let vm = Vm::new(json!({ "powerdownTimeout": 1 }), json!({ "ignore-power-button": true }));
    let mut runner = vm.start("all");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.console("guest: power button, not listening");
    runner.ends_well("PoweredOff");
}

#[test]
fn the_time_of_a_guest_that_powers_down_follows_the_configuration() {
    let vm = Vm::new(json!({ "powerdownTimeout": 900 }), json!({ "ignore-power-button": true }));
    let mut runner = vm.start("all");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.console("guest: power button, not listening");
    vm.change(|config| config["vm"]["powerdownTimeout"] = json!(1));
    runner.ends_well("PoweredOff");
}

/// The kubelet would kill the runner before.
#[test]
fn a_time_that_is_raised_is_not_longer_than_the_pods_grace_period() {
    let mut vm = Vm::new(json!({ "powerdownTimeout": 1 }), json!({ "ignore-power-button": true }));
    vm.start("all").console("guest: up");
    // The container is started again in the same Pod, which keeps its grace period.
    vm.set("powerdownTimeout", 900);
    let mut runner = vm.start("all");
    runner.console("guest: up");
    wait_for("the limit", || (vm.machine()["startedWith"]["longestPowerdown"] == 1).then_some(()), || runner.state());
    runner.signal("TERM");
    runner.console("guest: power button, not listening");
    runner.ends_well("PoweredOff");
}

/// As `kubectl exec` does it, also for the Pod of a VM that was deleted.
#[test]
fn a_person_in_the_container_ends_a_guest_that_does_not_power_down() {
    let vm = Vm::new(json!({ "powerdownTimeout": 900 }), json!({ "ignore-power-button": true }));
    let end = || {
        let output = Command::new(RUNNER).args(["end", "--config-dir"]).arg(vm.path("config")).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (is_done, error) = end();
    assert!(!is_done && error.contains("no VM runs here"), "{error}");
    let mut runner = vm.start("all");
    runner.console("guest: up");
    let (is_done, error) = end();
    assert!(!is_done && error.contains("is not being powered down"), "{error}");
    runner.signal("TERM");
    runner.console("guest: power button, not listening");
    let (is_done, error) = end();
    assert!(is_done, "{error}");
    runner.ends_well("PoweredOff");
}

#[test]
fn a_person_in_the_container_looks_at_the_guest_and_pauses_it() {
    let vm = Vm::new(json!({ "display": { "vnc": { "port": free_port() } } }), json!({}));
    let ctl = |arguments: &[&str]| {
        let output = Command::new(RUNNER)
            .arg("ctl")
            .arg("--config-dir")
            .arg(vm.path("config"))
            .args(arguments)
            .output()
            .unwrap();
        (output.status.success(), output.stdout, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let status = || String::from_utf8(ctl(&["status"]).1).unwrap();
    let (is_done, _, error) = ctl(&["status"]);
    assert!(!is_done && error.contains("no VM runs here"), "{error}");
    let mut runner = vm.start("all");
    runner.console("guest: up");
    assert_eq!(status(), "running\n");
    assert!(ctl(&["pause"]).0);
    assert_eq!(status(), "paused\n");
    runner.logs("condition=\"Running\" status=false reason=\"Paused\"");
    assert!(ctl(&["resume"]).0);
    assert_eq!(status(), "running\n");

    let (is_done, picture, error) = ctl(&["screenshot"]);
    assert!(is_done && picture.starts_with(b"\x89PNG"), "{error}");
    let file = vm.path("screen.png");
    assert!(ctl(&["screenshot", file.to_str().unwrap()]).0);
    assert!(std::fs::read(file).unwrap().starts_with(b"\x89PNG"));
    assert!(ctl(&["send-key", "ctrl-alt-f2"]).0);
    let (is_done, _, error) = ctl(&["send-key", "ctrl+alt"]);
    assert!(!is_done && error.contains("QEMU has no key \"ctrl+alt\""), "{error}");

    // What `kubectl vm top` shows: a sample, and then one each second until nobody reads them.
    let (is_done, line, error) = ctl(&["stats"]);
    assert!(is_done, "{error}");
    let first: GuestStats = serde_json::from_slice(&line).unwrap();
    assert!(first.cpus > 0 && first.cpu_time > 0 && first.disk_read > 0, "{first:?}");
    assert!(first.ram.is_some_and(|ram| ram > 0) && first.resident.is_some_and(|bytes| bytes > 1 << 20), "{first:?}");
    assert!(first.ram_used.is_none_or(|used| used > 0 && Some(used) < first.ram), "{first:?}");
    let mut following = Command::new(RUNNER)
        .args(["ctl", "--config-dir"])
        .arg(vm.path("config"))
        .args(["stats", "--follow", "1"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let samples: Vec<GuestStats> = lines.take(3).map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    let rates = samples[2].since(&samples[0]).unwrap();
    assert!((0.0..=2.0 * f64::from(samples[0].cpus)).contains(&rates.cpus), "{samples:?} {rates:?}");
    assert!(samples[0].cpu_time >= first.cpu_time && samples[1].at >= samples[0].at + 900, "{first:?} {samples:?}");
    // The reader is gone, so the next line ends it.
    assert!(!following.wait().unwrap().success());

    assert!(ctl(&["reset"]).0);
    runner.console("guest: starts=2");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

/// As `kubectl vm guest` does it.
#[test]
fn a_person_in_the_container_asks_the_guest_agent() {
    let vm = Vm::new(json!({}), json!({}));
    let guest = || Command::new(RUNNER).args(["guest", "--config-dir"]).arg(vm.path("config")).output().unwrap();
    let error = guest();
    assert!(!error.status.success() && !error.stderr.is_empty(), "{error:?}");
    let mut runner = vm.start("all");
    runner.console("guest: up");
    // The agent starts after that, and the runner asks it too: one connection waits for the other.
    let answer = wait_for("an answer", || Some(guest()).filter(|it| it.status.success()), || format!("{:?}", guest()));
    let said: Value = serde_json::from_slice(&answer.stdout).unwrap();
    println!("{said:#}");
    assert!(said["osinfo"]["kernel-release"].is_string() && said["hostname"]["host-name"].is_string(), "{said:#}");
    assert!(said["interfaces"].is_array() && said["filesystems"].is_array(), "{said:#}");
    assert!(said["users"].is_array() || said["refused"]["users"].is_string(), "{said:#}");
    runner.logs("condition=\"Booted\" status=true");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_failure_of_qemu_is_in_the_log_the_termination_log_and_the_state() {
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
fn a_missing_disk_is_an_error_before_qemu_starts() {
    let vm = Vm::new(json!({ "drives": [{ "type": "raw", "resource": "/dev/no-such-disk" }] }), json!({}));
    let mut runner = vm.start("all");
    assert_eq!(runner.end().code(), Some(1));
    for place in [runner.log(), vm.text("termination-log"), vm.text("run/machine.json")] {
        assert!(place.contains("the disk /dev/no-such-disk does not exist"), "{place}");
    }
}

#[test]
fn a_guest_continues_when_its_agent_crashes_and_a_new_one_starts() {
    let vm = Vm::new(json!({}), json!({}));
    let mut machine = vm.start("machine");
    {
        let agent = vm.start("agent");
        agent.logs("the guest runs");
        agent.logs("condition=\"Booted\" status=true");
        assert!(!agent.output().contains("guest:"), "only the machine role copies the console");
        // The agent is killed here.
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

/// As in the two containers of a Pod. `VM_OPERATOR_TEST_KILLS` says how often the agent is killed.
#[test]
fn an_agent_that_is_killed_again_and_again_is_back_at_once_and_the_guest_does_not_notice() {
    let kills = std::env::var("VM_OPERATOR_TEST_KILLS").map_or(10, |text| text.parse().unwrap());
    let vm = Vm::new(json!({ "maximumCpus": 2, "currentCpus": 1 }), json!({}));
    // The sidecar starts first.
    let mut agent = vm.start_container("agent");
    let mut machine = vm.start_container("machine");
    machine.console("guest: up");
    agent.logs("condition=\"Booted\" status=true");
    let before = vm.machine();
    assert!(before["start"].as_str().unwrap().len() > 30, "{before}");
    let mut longest = Duration::ZERO;
    for number in 1..=kills {
        let [child] = agent.children()[..] else { panic!("{:?}", agent.children()) };
        kill(child, "KILL").unwrap();
        let killed = Instant::now();
        let reports = || agent.log().matches("condition=\"Booted\" status=true").count();
        wait_for("a report of the next agent", || (reports() > number).then_some(()), || agent.state());
        longest = longest.max(killed.elapsed());
    }
    println!(
        "{kills} agents killed; the longest time until the next one reported that the guest has booted: {longest:?}"
    );
    assert_eq!(vm.machine(), before, "the same QEMU");
    let is_down = |line: &&str| line.contains("condition=\"Booted\" status=false");
    assert!(agent.log().lines().filter(is_down).count() <= 2, "no agent but the first says it: {}", agent.log());
    assert_eq!(machine.output().matches("guest: starts=").count(), 1);
    assert!(!machine.log().contains("continuing it without one"), "{}", machine.log());
    vm.change(|config| config["vm"]["currentCpus"] = json!(2));
    machine.console("guest: cpus=2");

    // The kubelet ends the sidecar after the container with QEMU.
    machine.signal("TERM");
    machine.ends_well("PoweredDown");
    agent.logs("condition=\"Running\" status=false reason=\"PoweredDown\"");
    agent.signal("TERM");
    assert!(agent.end().success(), "{}", agent.state());
    drop((machine, agent));

    // QEMU may get the same process ID again.
    let second = vm.start_container("machine");
    second.logs("QEMU started");
    wait_for("another start", || (vm.machine()["start"] != before["start"]).then_some(()), || second.state());
}

#[test]
fn a_guest_starts_without_an_agent() {
    let vm = Vm::new(json!({ "maximumCpus": 2, "currentCpus": 2 }), json!({}));
    let mut machine = vm.start("machine");
    machine.console("guest: cpus=2");
    machine.console("guest: up");
    assert!(machine.log().contains("continuing it without one"));
    machine.signal("TERM");
    machine.ends_well("PoweredDown");
}

#[test]
fn render_command_prints_the_command_line_without_starting_qemu() {
    let vm = Vm::new(json!({ "display": { "spice": { "port": 5999, "ticket": "secret" } } }), json!({}));
    let output = Command::new(RUNNER).args(["render-command", "--config-dir"]).arg(vm.path("config")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("qemu-system-x86_64\n-nodefaults\n"), "{text}");
    assert!(text.contains("port=5999,disable-ticketing=off") && !text.contains("secret"), "{text}");
    assert!(!vm.path("run").exists() && !vm.path("data").exists() && !vm.path("data.img").exists());
}

#[test]
fn the_log_can_be_json() {
    let arguments = ["run", "--log-format=json", "--config-dir=/nowhere", "--termination-log=/nowhere"];
    let output = Command::new(RUNNER).args(arguments).output().unwrap();
    let line: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(line["level"] == "ERROR" && line["timestamp"].is_string(), "{line}");
    assert!(line["message"].as_str().unwrap().contains("/nowhere/config.yaml"), "{line}");
}

/// A free port for a display. VNC ports begin at 5900.
fn free_port() -> u16 {
    (5950..6000).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap()
}

#[test]
fn the_display_accepts_only_the_current_password_until_it_expires() {
    let port = free_port();
    let vm = Vm::new(json!({ "display": { "vnc": { "port": port } } }), json!({}));
    let set = |file: &str, text: &str| {
        fs::write(vm.path("config/new"), text).unwrap();
        fs::rename(vm.path("config/new"), vm.path("config").join(file)).unwrap();
    };
    set("display-password", "first");
    set("password-expiry", "never");
    let mut runner = vm.start("all");
    let accepts_only = |password: Option<&str>| {
        for known in ["first", "second"] {
            let right = password == Some(known);
            let what = format!("the password {known} to be {}", if right { "accepted" } else { "refused" });
            wait_for(&what, || (vnc::view(port, known).is_some() == right).then_some(()), || runner.state());
        }
    };
    accepts_only(Some("first"));
    set("display-password", "second");
    accepts_only(Some("second"));
    set("password-expiry", "now");
    accepts_only(None);
    set("password-expiry", "+3600");
    accepts_only(Some("second"));
    set("password-expiry", "1000000000");
    accepts_only(None);
    set("password-expiry", "4000000000");
    accepts_only(Some("second"));
    let viewer = vnc::view(port, "second").unwrap();
    runner.says_last("ConsoleConnected", "A viewer at 127.0.0.1 is connected to the display.");
    drop(viewer);
    runner.says_last("ConsoleConnected", "No viewer is connected to the display.");
    // The log levels change while the VM runs.
    assert!(!runner.log().contains("DEBUG"), "{}", runner.log());
    set("logging.properties", "org.jdrupes.vmoperator.level=FINE");
    runner.logs("levels=vm_operator=debug,info");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_password_that_has_expired_is_not_valid_again_when_another_agent_starts() {
    let port = free_port();
    let vm = Vm::new(json!({ "display": { "vnc": { "port": port } } }), json!({}));
    fs::write(vm.path("config/display-password"), "first").unwrap();
    fs::write(vm.path("config/password-expiry"), "+3").unwrap();
    let machine = vm.start("machine");
    let agent = vm.start("agent");
    agent.logs("changed change=\"Password");
    let state = || machine.state();
    wait_for("the password to expire", || vnc::view(port, "first").is_none().then_some(()), state);
    drop(agent);
    let agent = vm.start("agent");
    agent.logs("changed change=\"Password");
    assert!(vnc::view(port, "first").is_none());
    // Another password has its own time.
    fs::write(vm.path("config/new"), "second").unwrap();
    fs::rename(vm.path("config/new"), vm.path("config/display-password")).unwrap();
    fs::write(vm.path("config/new"), "+3600").unwrap();
    fs::rename(vm.path("config/new"), vm.path("config/password-expiry")).unwrap();
    wait_for("the second password", || vnc::view(port, "second"), state);
}

#[test]
fn a_display_that_had_a_password_is_never_started_without_one() {
    let port = free_port();
    let vm = Vm::new(json!({ "display": { "vnc": { "port": port } } }), json!({}));
    fs::write(vm.path("config/display-password"), "first").unwrap();
    vm.start("all").logs("QEMU started");
    // The container is started again: once with another error, and then twice after the Secret was deleted.
    vm.change(|config| config["template"] = json!("nowhere"));
    vm.start("all").logs("QEMU failed");
    vm.write_config();
    fs::remove_file(vm.path("config/display-password")).unwrap();
    for _ in 0..2 {
        let runner = vm.start("all");
        runner.logs("the display's password is missing");
        assert!(!runner.log().contains("QEMU started"), "{}", runner.log());
    }
    fs::write(vm.path("config/display-password"), "second").unwrap();
    vm.start("all").logs("QEMU started");
}

#[test]
fn a_display_that_must_have_a_password_is_not_started_without_one() {
    let port = free_port();
    let vm = Vm::new(json!({ "display": { "vnc": { "port": port } } }), json!({}));
    let start = || {
        let mut command = Command::new(RUNNER);
        command.env("VM_RUNNER_REQUIRE_PASSWORD", "true");
        vm.start_by(command, "all")
    };
    let runner = start();
    runner.logs("the display's password is missing");
    assert!(!runner.log().contains("QEMU started"), "{}", runner.log());
    drop(runner);
    fs::write(vm.path("config/display-password"), "first").unwrap();
    start().logs("QEMU started");
}

#[test]
fn the_status_names_the_user_who_is_logged_in_and_the_viewer() {
    let port = (5900..5950).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap();
    let display = json!({ "spice": { "port": port, "ticket": "ticket" }, "loggedInUser": "alice" });
    let vm = Vm::new(json!({ "display": display }), json!({}));
    let log_in = |user: Value| vm.change(|config| config["vm"]["display"]["loggedInUser"] = user);
    let mut machine = vm.start("machine");
    {
        let agent = vm.start("agent");
        machine.console("guest: login alice");
        agent.says_last("VmopAgentConnected", "The login agent answers.");
        agent.says_last("UserLoggedIn", "alice is logged in.");
        assert!(spice::view(("127.0.0.1", port), "wrong").is_err());
        let viewer = spice::view(("127.0.0.1", port), "ticket").unwrap();
        agent.says_last("ConsoleConnected", "A viewer at 127.0.0.1 is connected to the display.");
        drop(viewer);
        agent.says_last("ConsoleConnected", "No viewer is connected to the display.");
        log_in(json!("root"));
        agent.says_last("UserLoggedIn", "alice is logged in; then the login agent refused: 501 root does not log in");
        log_in(Value::Null);
        machine.console("guest: logout");
        agent.says_last("UserLoggedIn", "No user is logged in.");
        // The agent is killed here.
    }
    // The next agent finds the login agent and a viewer that are connected already.
    let _viewer = spice::view(("127.0.0.1", port), "ticket").unwrap();
    log_in(json!("bob"));
    let mut agent = vm.start("agent");
    machine.console("guest: login bob");
    agent.says_last("UserLoggedIn", "bob is logged in.");
    agent.says_last("ConsoleConnected", "A viewer at 127.0.0.1 is connected to the display.");
    // All containers of a Pod receive SIGTERM at the same time.
    agent.signal("TERM");
    machine.signal("TERM");
    machine.ends_well("PoweredDown");
    assert!(agent.end().success());
    agent.says_last("Running", "The guest has shut down, as the runner asked it to.");
    agent.says_last("UserLoggedIn", "The VM does not run.");
    agent.says_last("ConsoleConnected", "The VM does not run.");
}
