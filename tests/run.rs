//! `vm-runner run FILE` with QEMU and the tiny guest of tests/guest/. Needs the same packages as tests/guest.rs, and qemu-utils.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[allow(dead_code, reason = "it is for tests/guest.rs, too")]
#[path = "support/runner.rs"]
mod runner;

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
};

use runner::{RUNNER, guest_image, kill, wait_for};
use serde_json::Value;

const VM: &str = "
apiVersion: vmoperator.jdrupes.org/v1
kind: VirtualMachine
metadata: {name: apple}
spec:
  cloudInit:
    metaData: {local-hostname: hugo}
    userDataFrom: {secretKeyRef: {name: users, key: data}}
  vm:
    firmware: bios
    accelerator: tcg
    maximumCpus: 2
    currentCpus: 1
    maximumRam: 256Mi
    powerdownTimeout: 120
    networks: [{pod: {}}]
    disks:
      - volumeClaimTemplate:
          metadata: {name: system}
          spec: {resources: {requests: {storage: 64Mi}}}
---
apiVersion: v1
kind: Secret
metadata: {name: users}
stringData:
  data: |
    #cloud-config
    message: hello from the file
";

/// A folder with the file of a VM, and the VM's folder.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::Builder::new().prefix("vmr").tempdir().unwrap());
        fs::write(place.path("vm.yaml"), VM).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.path(name)).unwrap_or_default()).into_owned()
    }

    fn arguments(&self, more: &[&str]) -> Vec<String> {
        let file = |name: &str| self.path(name).display().to_string();
        let mut arguments = vec!["run".into(), file("vm.yaml"), "--dir".into(), file("apple")];
        arguments.extend(more.iter().map(|it| (*it).to_owned()));
        arguments
    }

    /// Starts the VM. The output goes to the files `out` and `err`.
    fn start(&self, more: &[&str]) -> Run<'_> {
        let mut command = Command::new(RUNNER);
        command.args(self.arguments(more)).stdin(Stdio::null());
        self.start_by(command)
    }

    /// Starts the VM in a terminal, whose keys are what the returned pipe gets.
    fn start_in_a_terminal(&self, more: &[&str]) -> (Run<'_>, ChildStdin) {
        let line = [vec![RUNNER.to_owned()], self.arguments(more)].concat().join(" ");
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--command", &line, "/dev/null"]).stdin(Stdio::piped());
        let mut run = self.start_by(command);
        let keys = run.child.stdin.take().unwrap();
        (run, keys)
    }

    fn start_by(&self, mut command: Command) -> Run<'_> {
        let file = |name: &str| File::create(self.path(name)).unwrap();
        Run { place: self, child: command.stdout(file("out")).stderr(file("err")).spawn().unwrap() }
    }

    fn qemu(&self) -> u32 {
        let machine: Value = serde_json::from_str(&self.text("apple/run/machine.json")).unwrap();
        machine["pid"].as_u64().unwrap().try_into().unwrap()
    }
}

/// A running VM, which ends with the test.
struct Run<'a> {
    place: &'a Place,
    child: Child,
}

impl Run<'_> {
    fn says(&self, text: &str) {
        let state =
            || [self.place.text("out"), self.place.text("err"), self.place.text("apple/vm-runner.log")].join("\n---\n");
        let said = || self.place.text("out").contains(text) || self.place.text("err").contains(text);
        wait_for(text, || said().then_some(()), state);
    }

    fn end(&mut self) -> ExitStatus {
        let state = || self.place.text("apple/vm-runner.log");
        let child = std::cell::RefCell::new(&mut self.child);
        wait_for("the end", || child.borrow_mut().try_wait().unwrap(), state)
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn image() -> String {
    guest_image().display().to_string()
}

/// Whether a process runs. One that has ended may wait for its parent as a zombie.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn a_vm_runs_from_a_file_answers_on_its_port_and_keeps_its_disk() {
    let (place, image) = (Place::new(), image());
    let before = fs::metadata(&image).unwrap().modified().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let publish = format!("{port}:8080");
    {
        let mut run = place.start(&["--image", &image, "--publish", &publish, "--set", "spec.vm.currentCpus=2"]);
        run.says("spec.vm.networks[0] is a user network here and not that of a Pod");
        run.says("guest: hostname=hugo");
        run.says("guest: user-data hello from the file");
        run.says("guest: starts=1");
        run.says("guest: cpus=2");
        run.says("guest: up");
        let answer = wait_for(
            "the guest's web server",
            || {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
                stream.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer).ok()?;
                (!answer.is_empty()).then_some(answer)
            },
            || place.text("out"),
        );
        assert!(answer.starts_with("HTTP/1."), "{answer}");

        let second = Command::new(RUNNER).args(place.arguments(&[])).output().unwrap();
        let error = String::from_utf8_lossy(&second.stderr).into_owned();
        assert!(second.status.code() == Some(1) && error.contains("runs already"), "{error}");

        kill(run.child.id(), "TERM").unwrap();
        run.says("guest: power button");
        assert_eq!(run.end().code(), Some(0));
        run.says("vm-runner: the guest has shut down");
    }
    // The disk is over the image: no need to name it again.
    let run = place.start(&[]);
    run.says("guest: starts=2");
    drop(run);
    let run = place.start(&["--image", &image, "--fresh"]);
    run.says("guest: starts=1");
    assert_eq!(fs::metadata(&image).unwrap().modified().unwrap(), before, "the image is untouched");
}

#[test]
fn a_killed_runner_takes_qemu_along() {
    let place = Place::new();
    let run = place.start(&["--image", &image()]);
    run.says("guest: up");
    let qemu = place.qemu();
    assert!(runs(qemu));
    kill(run.child.id(), "KILL").unwrap();
    wait_for("QEMU's end", || (!runs(qemu)).then_some(()), || place.text("apple/vm-runner.log"));
}

#[test]
fn ctrl_bracket_in_a_terminal_asks_the_guest_to_power_down_and_the_second_time_ends_it() {
    let place = Place::new();
    {
        let (mut run, mut keys) = place.start_in_a_terminal(&["--image", &image()]);
        run.says("Ctrl-] leaves it");
        run.says("guest: up");
        // Ctrl-C is for the guest.
        keys.write_all(b"\x03").unwrap();
        keys.write_all(b"\x1d").unwrap();
        run.says("the guest is asked to power down; Ctrl-] or the signal once more ends it at once");
        run.says("guest: power button");
        assert_eq!(run.end().code(), Some(0));
    }
    // The command goes through a shell.
    let ignore = "'spec.cloudInit={userData: {ignore-power-button: true}}'";
    let (mut run, mut keys) = place.start_in_a_terminal(&["--set", ignore]);
    run.says("guest: up");
    keys.write_all(b"\x1d").unwrap();
    run.says("guest: power button, not listening");
    keys.write_all(b"\x1d").unwrap();
    assert_eq!(run.end().code(), Some(3));
    run.says("the guest was ended without its shutdown");
}

#[test]
fn what_is_wrong_is_said_before_anything_starts() {
    let place = Place::new();
    let text = VM.replace("maximumCpus: 2", "maximumCpus: many").replace("{pod: {}}", "{user: {}}");
    fs::write(place.path("wrong.yaml"), text).unwrap();
    let error = |arguments: &[&str]| {
        let output = Command::new(RUNNER).current_dir(place.path("")).arg("run").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let dir = place.path("apple").display().to_string();
    let in_dir = |more: &[&str]| error(&[&["vm.yaml", "--dir", &dir], more].concat());
    assert!(error(&["wrong.yaml"]).contains("wrong.yaml:12:18: spec.vm.maximumCpus"), "{}", error(&["wrong.yaml"]));
    assert!(in_dir(&["--qemu", "no-such-qemu"]).contains("the program no-such-qemu is not installed: "));
    // No file of this computer is the guest's, also not one beside the VM's file, but those of folders that are named.
    fs::write(place.path("beside.iso"), "cd").unwrap();
    fs::create_dir(place.path("cds")).unwrap();
    fs::write(place.path("cds/one.iso"), "cd").unwrap();
    let (folder, beside) = (place.path("cds").display().to_string(), place.path("beside.iso").display().to_string());
    let escape = format!("{folder}/../beside.iso");
    for (cd, folders, says) in [
        ("/etc/hostname", vec![], "add --cd-folder /etc"),
        ("beside.iso", vec![], "add --cd-folder DIR"),
        (beside.as_str(), vec![], "add --cd-folder "),
        ("one.iso", vec![], "the VM wants the CD image one.iso, which is in no folder that you have named"),
        ("/etc/hostname", vec!["--cd-folder", &folder], "add --cd-folder /etc"),
        (escape.as_str(), vec!["--cd-folder", &folder], "add --cd-folder"),
        // What is allowed fails later only.
        (
            "one.iso",
            vec!["--cd-folder", "/usr", "--cd-folder", &folder, "--image", "no-such.img"],
            "cannot find no-such.img",
        ),
        ("one.iso", vec!["--image-repository", &folder, "--image", "no-such.img"], "cannot find no-such.img"),
    ] {
        let set = format!("spec.vm.disks[1]={{cdrom: {{image: \"{cd}\"}}}}");
        let said = in_dir(&[&["--set", &set], folders.as_slice()].concat());
        assert!(said.contains(says), "{cd} {folders:?}: {said}");
    }
    assert!(in_dir(&["--image", "no-such.img"]).contains("cannot find no-such.img"));
    fs::write(place.path("key.pub"), "ssh-ed25519 AAAA alice").unwrap();
    assert!(in_dir(&["--ssh-key", "key.pub"]).contains("userDataFrom"));
    assert!(!Path::new(&dir).join("run/machine.json").exists());
}
