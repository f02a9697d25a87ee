//! The figures of the runner in docs/performance.md. `make bench-runner` measures them; nothing is asserted.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    agents::resident,
    free_port,
    runner::{ADDRESS, RUNNER, Runner, Vm, wait_for},
};

/// How long the guest sends, in seconds.
const SECONDS: u32 = 10;
/// A guest that boots must not measure the tail of its boot.
const IDLE: Duration = Duration::from_secs(10);

/// A guest that serves an endless file, with one network.
fn vm(network: Value) -> Vm {
    Vm::new(json!({ "network": [network], "maximumRam": "512 MiB" }), json!({ "serve-zeros": true }))
}

/// What the shell prints that gets the file of a guest as long as it is measured: a number of bytes.
fn get(url: &str) -> [String; 3] {
    ["sh".into(), "-c".into(), format!("timeout {SECONDS} busybox wget -q -O - {url}/zeros | wc -c")]
}

/// The rate in Gbit/s, of an output of [`get`].
fn rate(output: &str) -> String {
    let bytes: f64 = output.trim().parse().unwrap_or_default();
    if bytes == 0.0 {
        "did not connect".into()
    } else {
        format!("{:.2} Gbit/s", bytes * 8.0 / f64::from(SECONDS) / 1e9)
    }
}

/// Waits until the guest has its address and has booted.
fn wait(runner: &Runner, address: &str) {
    runner.console(&format!("guest: address={address}"));
    runner.console("guest: up");
}

fn user() -> String {
    let port = free_port();
    let vm = vm(json!({ "type": "user", "device": "virtio-net",
        "forwards": [{ "address": "127.0.0.1", "port": port, "guestPort": 8080 }] }));
    let runner = vm.start("all");
    wait(&runner, "10.0.2.15");
    let [program, arguments @ ..] = get(&format!("http://127.0.0.1:{port}"));
    rate(&String::from_utf8_lossy(&Command::new(program).args(arguments).output().unwrap().stdout))
}

fn pod_stream() -> String {
    let vm = vm(json!({ "type": "pod", "device": "virtio-net" }));
    let runner = vm.start_in_a_network_of_its_own("all");
    wait(&runner, ADDRESS);
    rate(&in_network(&runner, ADDRESS))
}

fn in_network(runner: &Runner, address: &str) -> String {
    let words = get(&format!("http://{address}:8080"));
    runner.in_its_network(&words.each_ref().map(String::as_str))
}

/// passt in a process of its own, as in the Pod's container, if this computer's passt and QEMU can do it.
fn pod_vhost_user() -> String {
    let says = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let version = says("qemu-system-x86_64", "--version");
    let number = |at: usize| version.split_whitespace().nth(3)?.split('.').nth(at)?.parse::<u32>().ok();
    // The chardev's reconnect-ms.
    if (number(0), number(1)) < (Some(9), Some(2)) || !says("passt", "--help").contains("--vhost-user") {
        return "not measured: this computer's QEMU or passt is too old".into();
    }
    let vm = vm(json!({ "type": "pod", "device": "virtio-net" }));
    let folder = vm.path("passt").display().to_string();
    fs::create_dir(&folder).unwrap();
    let script = format!(
        "ip link set lo up && ip link add eth0 type veth peer name peer && ip link set peer up &&
         ip addr add {ADDRESS}/24 dev eth0 && ip link set eth0 up && ip route add default via 10.99.0.1 || exit 1
         {RUNNER} passt --folder {folder} & export VM_RUNNER_PASST_DIR={folder}; exec \"$@\""
    );
    let runner = vm.start_by(namespaces(&script), "all");
    wait(&runner, ADDRESS);
    rate(&in_network(&runner, ADDRESS))
}

/// A bridge in a network of its own, with a DHCP server.
fn tap() -> String {
    let vm = vm(json!({ "type": "tap", "device": "virtio-net", "bridge": "br0" }));
    let udhcpd = vm.path("udhcpd.conf");
    let [changes, work] = ["changes", "work"].map(|name| vm.path(name).display().to_string());
    let leases = vm.path("leases").display().to_string();
    let configuration =
        format!("start {ADDRESS}\nend {ADDRESS}\ninterface br0\nlease_file {leases}\npidfile {leases}.pid\n");
    fs::write(&udhcpd, configuration).unwrap();
    let script = format!(
        "mkdir {changes} {work} && mount -t overlay overlay -o lowerdir=/etc,upperdir={changes},workdir={work} /etc &&
         mkdir -p /etc/qemu && echo allow all >/etc/qemu/bridge.conf && ip link set lo up &&
         ip link add br0 type bridge && ip addr add 10.99.0.1/24 dev br0 && ip link set br0 up || exit 1
         touch {leases}; busybox udhcpd -f {} & exec \"$@\"",
        udhcpd.display()
    );
    if !Path::new("/dev/net/tun").exists() {
        return "not measured: there is no /dev/net/tun".into();
    }
    let runner = vm.start_by(namespaces(&script), "all");
    wait_for(
        "the guest",
        || (runner.output().contains("guest: address=") || runner.log().contains("QEMU failed")).then_some(()),
        || runner.state(),
    );
    if runner.log().contains("QEMU failed") {
        println!("{}", runner.log());
        return "not measured: QEMU can't make a tap device here".into();
    }
    rate(&in_network(&runner, ADDRESS))
}

/// The runner in namespaces of its own, after a script.
fn namespaces(script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "--mount", "sh", "-c", script, "sh", RUNNER]);
    command
}

/// The resident memory of both roles in MB, with a guest that has booted and does nothing.
fn memory() -> [String; 2] {
    let vm = Vm::new(json!({ "network": [{ "type": "user", "device": "virtio-net" }] }), json!({}));
    let (machine, agent) = (vm.start("machine"), vm.start("agent"));
    machine.console("guest: up");
    agent.logs("condition=\"Booted\" status=true");
    let begin = Instant::now();
    wait_for("a guest at rest", || (begin.elapsed() > IDLE).then_some(()), String::new);
    [machine, agent].map(|runner| format!("{:.1} MB", resident(runner.child.id().into()) * 1.048_576))
}

#[test]
#[ignore = "it measures: make bench-runner"]
fn the_table_of_the_runner() {
    let [machine, agent] = memory();
    let rows = [
        ("memory of the machine role, resident", machine),
        ("memory of the agent, resident", agent),
        ("network `user`", user()),
        ("network `pod`, passt by a stream", pod_stream()),
        ("network `pod`, passt by vhost-user", pod_vhost_user()),
        ("network `tap`", tap()),
    ];
    let rows: Vec<String> = rows.iter().map(|(what, figure)| format!("| {what} | {figure} |\n")).collect();
    let table = format!("| | |\n|---|---|\n{}", rows.concat());
    println!("{table}");
    if std::env::var_os("VM_OPERATOR_TEST_UPDATE").is_none() {
        return;
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/performance.md");
    let text = fs::read_to_string(&page).unwrap();
    let (before, section) = text.split_once("## The runner\n").unwrap();
    let (head, rest) = section.split_once("| | |\n").unwrap();
    let end = rest.find("\n\n").map_or(rest.len(), |at| at + 1);
    fs::write(page, format!("{before}## The runner\n{head}{table}{}", &rest[end..])).unwrap();
}
