//! Boots the tiny guest (tests/guest/) with a real QEMU through the real program vm-runner, without a cluster.
//!
//! Needs Debian's qemu-system-x86, qemu-block-extra, ovmf, swtpm, passt, iproute2, busybox-static and what
//! tests/guest/build.sh names. Emulated, so that it works anywhere.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "support/runner.rs"]
mod runner;
#[path = "support/spice.rs"]
mod spice;
#[path = "support/vnc.rs"]
mod vnc;

use std::{
    fs,
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command},
};

use runner::{ADDRESS, RUNNER, Vm, kill, wait_for};
use serde_json::{Value, json};

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
        runner.console("guest: up");
        let output = runner.output();
        let first = output.lines().find_map(|line| line.trim_end().split_once("guest: cpus="));
        assert_eq!(first.unwrap().1, "2", "from the start on");
        // Also the CPUs of the start can go.
        vm.change(|config| config["vm"]["currentCpus"] = json!(1));
        runner.console("guest: cpus=1");
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
    // The tiny guest's kernel has a driver for drives at a SCSI controller only. Nor has the machine a balloon, which keeps nothing
    // else from being changed.
    let template = include_str!("../templates/runner/standard.yaml.j2")
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
fn a_guest_that_is_not_to_stay_down_any_more_is_not_held() {
    let mut vm = Vm::new(json!({}), json!({ "poweroff-after-boot": true }));
    vm.config["guestShutdownStops"] = json!(true);
    vm.write_config();
    let mut runner = vm.start("all");
    runner.logs("waiting for the Pod's end");
    vm.change(|config| config["guestShutdownStops"] = json!(false));
    // The kubelet starts it again, and with it the guest.
    runner.ends_well("GuestShutdown");
    drop(runner);
    vm.start("all").logs("QEMU started");
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
    let vm = Vm::new(json!({ "maximumCpus": 2, "currentCpus": 2 }), json!({}));
    let mut machine = vm.start("machine");
    machine.console("guest: cpus=2");
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

#[test]
fn each_line_of_the_log_can_be_json() {
    let arguments = ["run", "--log-format=json", "--config-dir=/nowhere", "--termination-log=/nowhere"];
    let output = Command::new(RUNNER).args(arguments).output().unwrap();
    let line: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(line["level"] == "ERROR" && line["timestamp"].is_string(), "{line}");
    assert!(line["message"].as_str().unwrap().contains("/nowhere/config.yaml"), "{line}");
}

/// A port for a display; QEMU's VNC begins at 5900.
fn free_port() -> u16 {
    (5950..6000).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap()
}

#[test]
fn the_display_takes_the_password_of_the_moment() {
    let port = free_port();
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
            wait_for(&what, || (vnc::view(port, known).is_some() == right).then_some(()), || runner.state());
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
    let viewer = vnc::view(port, "second").unwrap();
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
fn a_display_that_had_a_password_is_never_open() {
    let port = free_port();
    let vm = Vm::new(json!({ "display": { "vnc": { "port": port } } }), json!({}));
    fs::write(vm.path("config/display-password"), "first").unwrap();
    vm.start("all").logs("QEMU started");
    // The container is started again, once in vain for another reason, and then twice after its Secret has gone.
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
fn a_display_whose_secret_has_no_password_is_not_open() {
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
