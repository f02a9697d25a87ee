//! What the guest, its devices and the programs around it do when something breaks: a disk whose storage is full, a monitor that is cut off,
//! a TPM or a network that is lost. Also what a command must not change of a VM that runs.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use serde_json::json;

use super::runner::{ADDRESS, MonitorProxy, RUNNER, Vm, kill, wait_for};

#[test]
fn a_guest_whose_disk_is_full_waits_until_there_is_space() {
    let mut vm = Vm::new(json!({}), json!({}));
    let mut runner = vm.start_on_a_full_storage("all");
    // The guest counts its starts on that disk.
    runner.logs("condition=\"DevicesReady\" status=false reason=\"StorageFull\"");
    runner.says_last("DevicesReady", "The storage of the disk ");
    runner.says_last("DevicesReady", "/storage/data.img is full");
    assert!(!runner.output().contains("guest: starts="), "{}", runner.state());
    runner.says_last("Running", "QEMU runs a");
    runner.grow_storage();
    runner.console("guest: starts=1");
    runner.console("guest: up");
    runner.logs("condition=\"Booted\" status=true");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_guest_whose_disk_stays_full_is_powered_off_at_the_end_of_its_time() {
    let mut vm = Vm::new(json!({ "powerdownTimeout": 1 }), json!({}));
    let mut runner = vm.start_on_a_full_storage("all");
    runner.logs("reason=\"StorageFull\"");
    runner.signal("TERM");
    runner.logs("the guest is stopped; continuing it, so that it hears the power button");
    runner.ends_well("PoweredOff");
}

#[test]
fn a_guest_that_is_paused_hears_the_power_button() {
    let vm = Vm::new(json!({}), json!({}));
    // A person has paused the guest while no agent ran.
    let mut machine = vm.start("machine");
    machine.console("guest: up");
    vm.ask_qemu("stop");
    let agent = vm.start("agent");
    agent.logs("condition=\"Running\" status=false reason=\"Paused\"");
    drop(agent);
    machine.signal("TERM");
    machine.console("guest: power button");
    machine.ends_well("PoweredDown");
}

#[test]
fn a_guest_hears_the_power_button_after_the_monitors_connection_was_cut() {
    let vm = Vm::new(json!({}), json!({}));
    let mut command = Command::new(RUNNER);
    command.env("VM_RUNNER_QEMU", MonitorProxy::qemu(&vm));
    let mut runner = vm.start_by(command, "all");
    let proxy = MonitorProxy::start(&vm);
    runner.console("guest: up");
    proxy.cut();
    runner.logs("the connection to QEMU's monitor was broken; it is there again guest=Executes");
    runner.signal("TERM");
    runner.console("guest: power button");
    runner.ends_well("PoweredDown");
}

#[test]
fn render_command_changes_nothing_of_a_vm_that_runs() {
    let mut vm = Vm::new(json!({ "firmware": "uefi" }), json!({}));
    vm.config["updateTemplate"] = json!(false);
    vm.write_config();
    let mut runner = vm.start("all");
    runner.console("guest: up");
    // The next start would make another disk and write another cloud-init disk.
    let new = vm.path("new.img");
    vm.change(|config| {
        config["cloudInit"]["metaData"]["local-hostname"] = json!("emil");
        let disk = json!({ "type": "raw", "resource": new, "size": 2 << 20 });
        config["vm"]["drives"].as_array_mut().unwrap().push(disk);
    });
    let files = || ["cloud-init.img", "machine.json"].map(|file| vm.text(&format!("run/{file}")));
    let before = (files(), fs::read_dir(vm.path("data")).unwrap().count());
    let output = Command::new(RUNNER).args(["render-command", "--config-dir"]).arg(vm.path("config")).output().unwrap();
    assert!(output.status.success() && output.stdout.starts_with(b"qemu-system-x86_64\n"), "{output:?}");
    assert!(before == (files(), fs::read_dir(vm.path("data")).unwrap().count()));
    assert!(!new.exists());
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_guest_whose_tpm_is_lost_goes_on_and_its_status_says_so() {
    let vm = Vm::new(json!({ "useTpm": true }), json!({}));
    let mut machine = vm.start("machine");
    let agent = vm.start("agent");
    machine.console("guest: up");
    let is_swtpm = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().starts_with("swtpm");
    kill(machine.children().into_iter().find(is_swtpm).expect("swtpm among the runner's children"), "KILL").unwrap();
    agent.logs("condition=\"DevicesReady\" status=false reason=\"TpmLost\"");
    drop(agent);
    let agent = vm.start("agent");
    agent.logs("condition=\"DevicesReady\" status=false reason=\"TpmLost\"");
    agent.says_last("Running", "QEMU runs a");
    machine.signal("TERM");
    machine.console("guest: power button");
    machine.ends_well("PoweredDown");
}

#[test]
fn the_error_names_a_helper_that_is_missing_or_fails() {
    let vm = Vm::new(json!({ "network": [{ "type": "pod", "device": "virtio-net" }] }), json!({}));
    let script = |name: &str, text: &str| {
        let file = vm.path(name);
        fs::write(&file, format!("#!/bin/sh\ncd {}\n{text}", vm.path("").display())).unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
        file
    };
    // passt without its rights creates its socket before it fails, and QEMU starts without a network.
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
    let late = "fails-late ended (exit status: 1): Failed to sandbox process, exiting\na pod network needs seccomp and AppArmor profiles that";
    for (program, why) in [
        (Path::new("/no/passt"), "cannot start /no/passt (install it in the runner's image)"),
        (Path::new("/bin/false"), "/bin/false ended (exit status: 1): no output"),
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

/// In a Pod, passt has a container of its own.
#[test]
fn passt_in_its_container_is_started_again_and_its_socket_says_what_it_can_do() {
    for (help, socket) in
        [("--vhost-user  Enable vhost-user mode", "vhost-user.sock"), ("--socket PATH", "stream.sock")]
    {
        let [tools, folder] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let program = tools.path().join("passt");
        // It plays passt: it says what it can do, makes its socket, and ends at once unless there is the file `stay`.
        let script = format!(
            "#!/bin/sh\ncd {}\ntest \"$1\" = --help && {{ echo '{help}'; exit 0; }}\necho \"$*\" >>log\n\
             for word; do case $word in *.sock) : >$word; esac; done\necho broken >&2; test -e stay && exec sleep 600; exit 3\n",
            tools.path().display()
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        fs::write(folder.path().join("stream.sock"), "of an earlier container").unwrap();
        let mut command = Command::new(RUNNER);
        command.args(["passt", "--keep-port=5900", "--pod-ports=100", "--passt"]).arg(&program);
        let mut passt = command.arg("--folder").arg(folder.path()).spawn().unwrap();
        let text = |file: &Path| fs::read_to_string(file).unwrap_or_default();
        let log = || text(&tools.path().join("log"));
        wait_for("three starts", || (log().lines().count() >= 3).then_some(()), log);
        let failure = || text(&folder.path().join("failure"));
        wait_for("the failure", || failure().contains("(exit status: 3): broken").then_some(()), failure);
        fs::write(tools.path().join("stay"), "").unwrap();
        wait_for("the socket", || folder.path().join(socket).exists().then_some(()), log);
        let arguments = log().lines().next().unwrap().to_owned();
        assert_eq!(arguments.contains("--vhost-user"), socket == "vhost-user.sock", "{arguments}");
        assert!(arguments.contains("--tcp-ports 1-100,~5900") && !arguments.contains("--one-off"), "{arguments}");
        let sockets = fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name());
        let sockets: Vec<_> = sockets.filter(|name| name.to_string_lossy().ends_with(".sock")).collect();
        assert_eq!(sockets, [socket]);
        kill(passt.id(), "TERM").unwrap();
        assert!(passt.wait().unwrap().success());
    }
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
    // passt listens on all ports, also on privileged ones, except on the display's port. There QEMU listens.
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

    // The guest continues without its network.
    let mut children = runner.children().into_iter();
    let is_passt = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().starts_with("passt");
    kill(children.find(is_passt).expect("passt among the runner's children"), "KILL").unwrap();
    runner.logs("the guest continues without it until its next start");
    runner.logs("condition=\"DevicesReady\" status=false reason=\"NetworkLost\"");
    runner.signal("TERM");
    runner.console("guest: power button");
    runner.ends_well("PoweredDown");
}

/// As on a node where other programs have used up the user's inotify instances.
#[test]
fn a_node_without_inotify_starts_the_guest_and_changes_it() {
    let vm = Vm::new(json!({}), json!({}));
    let script = "echo 0 >/proc/sys/user/max_inotify_instances && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "sh", "-c", script, "sh", RUNNER]);
    let mut runner = vm.start_by(command, "all");
    runner.logs("the node has no inotify watches left; looking at the files each second");
    runner.console("guest: up");
    vm.change(|config| config["vm"]["currentRam"] = json!("200 MiB"));
    runner.logs("changed change=\"Balloon(209715200)\"");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

/// As on a node whose container runtime hangs, or whose disk is full.
#[test]
fn a_log_that_nobody_reads_keeps_no_guest_from_booting_and_powering_down() {
    let vm = Vm::new(json!({}), json!({}));
    let (mut runner, _unread) = vm.start_unread("all");
    wait_for("guest: up", || vm.text("run/console.log").contains("guest: up").then_some(()), || runner.state());
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
    assert!(vm.text("run/console.log").contains("guest: power button"));
}
