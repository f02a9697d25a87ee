//! What `kubectl vm` does with a guest on a node. The tests of `tests/node.rs` call it when their guest is up.

use crate::{
    LIMIT,
    support::cluster::{Cluster, TestNamespace, XTASK},
};

/// A `kubectl vm` command in the namespace.
pub fn kubectl_vm(namespace: &TestNamespace, arguments: &[&str]) -> (tempfile::TempDir, tokio::process::Command) {
    command(namespace, env!("CARGO_BIN_EXE_kubectl-vm"), arguments)
}

/// A kubectl command in the namespace.
pub fn kubectl(namespace: &TestNamespace, arguments: &[&str]) -> (tempfile::TempDir, tokio::process::Command) {
    command(namespace, "kubectl", arguments)
}

/// The program finds the kubectl of this cluster; the folder holds it.
fn command(
    namespace: &TestNamespace,
    program: &str,
    arguments: &[&str],
) -> (tempfile::TempDir, tokio::process::Command) {
    let tools = tempfile::tempdir().unwrap();
    let kubectl = tools.path().join("kubectl");
    let own_path = std::env::var("PATH").unwrap();
    std::fs::write(&kubectl, format!("#!/bin/sh\nPATH='{own_path}' exec {XTASK} kubectl -- \"$@\"\n")).unwrap();
    std::fs::set_permissions(&kubectl, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{own_path}", tools.path().display());
    let own = tools.path().join(program);
    let mut command = tokio::process::Command::new(if own.exists() { own } else { program.into() });
    command.args(arguments).args(["--namespace", namespace.name()]);
    command.env("KUBECONFIG", Cluster::with_node().kubeconfig()).env("PATH", path);
    (tools, command)
}

/// Where a started `port-forward` listens, and what else it says: it ends if nobody reads that.
async fn forwarded(
    forward: &mut tokio::process::Child,
) -> (u16, tokio::io::Lines<tokio::io::BufReader<tokio::process::ChildStdout>>) {
    let mut lines = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(forward.stdout.take().unwrap()));
    let line = tokio::time::timeout(LIMIT, lines.next_line()).await.expect("a line").unwrap().unwrap();
    let (_, port) = line.split_once("127.0.0.1:").expect("where it listens");
    (port.split(' ').next().unwrap().parse().unwrap(), lines)
}

/// What the guest of the VM `demo` serves, through `kubectl vm port-forward`.
pub async fn a_forwarded_port_leads_to_the_guest(namespace: &TestNamespace) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (_tools, mut command) = kubectl_vm(namespace, &["port-forward", "demo", ":8080"]);
    let mut forward = command.stdout(std::process::Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let (port, _lines) = forwarded(&mut forward).await;
    let mut guest = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    guest.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
    let mut page = String::new();
    tokio::time::timeout(LIMIT, guest.read_to_string(&mut page)).await.expect("an answer").unwrap();
    page
}

/// What the guest of the VM `demo` serves, through `kubectl vm port-forward --stdio`; and what is said where nothing listens.
pub async fn one_connection_leads_to_the_guest(namespace: &TestNamespace) -> String {
    let ask = async |port: &str| {
        let (_tools, mut command) = kubectl_vm(namespace, &["port-forward", "demo", "--stdio", port]);
        let piped = std::process::Stdio::piped;
        let mut child = command.stdin(piped()).stdout(piped()).stderr(piped()).kill_on_drop(true).spawn().unwrap();
        // Standard input ends here, before the answer comes.
        let mut stdin = child.stdin.take().unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stdin, b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
        drop(stdin);
        tokio::time::timeout(LIMIT, child.wait_with_output()).await.expect("the end of the connection").unwrap()
    };
    let closed = ask("9").await;
    let talk = String::from_utf8_lossy(&closed.stderr);
    let silent = "demo: port 9: the guest does not answer: nothing listens there, or it has not booted yet";
    assert!(closed.status.code() == Some(1) && talk.contains(silent), "{closed:?}");
    let page = ask("8080").await;
    assert!(page.status.success() && page.stderr.is_empty(), "{page:?}");
    String::from_utf8(page.stdout).unwrap()
}

/// `kubectl vm port-forward --stdio` does not outlive who reads its standard output.
pub async fn a_connection_ends_with_its_reader(namespace: &TestNamespace) {
    let (_tools, mut command) = kubectl_vm(namespace, &["port-forward", "demo", "--stdio", "8080"]);
    let piped = std::process::Stdio::piped;
    // The guest waits for a question that does not come.
    let mut child = command.stdin(piped()).stdout(piped()).kill_on_drop(true).spawn().unwrap();
    drop(child.stdout.take());
    let status = tokio::time::timeout(LIMIT, child.wait()).await.expect("the end of the command").unwrap();
    assert!(status.success(), "{status}");
}

/// What `kubectl vm` says about the guest of the VM `demo`.
pub async fn the_guest_answers_commands(namespace: &TestNamespace) {
    let run = async |arguments: &[&str]| {
        let (_tools, mut command) = kubectl_vm(namespace, arguments);
        let output = command.output().await.unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        output.stdout
    };
    let log = String::from_utf8(run(&["logs", "demo", "--tail=50"]).await).unwrap();
    assert!(log.contains("guest: up"), "{log}");
    let picture = run(&["screenshot", "demo", "--output=-"]).await;
    assert!(picture.starts_with(b"\x89PNG"), "{} bytes", picture.len());
    run(&["send-key", "demo", "ctrl-alt-f1", "ret"]).await;
    let guest: serde_json::Value = serde_json::from_slice(&run(&["guest", "demo", "-o", "json"]).await).unwrap();
    assert!(guest["isUp"] == true && guest["kernel"].is_string() && guest["hostName"] == "demo-guest", "{guest:#}");
    assert!(guest["interfaces"].is_array() && guest["fileSystems"].is_array(), "{guest:#}");
}

/// `kubectl vm console` of the VM `demo` has the last output of the guest, and the guest gets what is typed.
pub async fn the_console_is_in_a_terminal(namespace: &TestNamespace) {
    let (_tools, mut command) = kubectl_vm(namespace, &["console", "vm/demo"]);
    let mut console = command
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let (mut stdout, mut seen) = (console.stdout.take().unwrap(), Vec::new());
    let read = async {
        while !String::from_utf8_lossy(&seen).contains("guest: up") {
            let count = tokio::io::AsyncReadExt::read_buf(&mut stdout, &mut seen).await.unwrap();
            assert!(count > 0, "the command has ended: {}", String::from_utf8_lossy(&seen));
        }
    };
    tokio::time::timeout(LIMIT, read).await.expect("the guest's last output");
    // Ctrl-] leaves.
    tokio::io::AsyncWriteExt::write_all(console.stdin.as_mut().unwrap(), b"\x1d").await.unwrap();
    let status = tokio::time::timeout(LIMIT, console.wait()).await.expect("the end of the command").unwrap();
    assert!(status.success(), "{status}");
}

/// Who has the VM's Secret sees what the guest writes, through the port that its status names.
pub async fn the_relay_leads_to_the_guests_consoles(namespace: &TestNamespace, port: Option<u16>) {
    use futures::{SinkExt, StreamExt};
    use tokio_tungstenite::tungstenite::Message;
    use vm_operator::{
        client::relay::Access,
        relay::{Console, Hello, PORT, Wish},
    };

    assert_eq!(port, Some(PORT));
    let (_tools, mut command) = kubectl(namespace, &["port-forward", "pod/demo", &format!(":{PORT}")]);
    let mut forward = command.stdout(std::process::Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let (port, _lines) = forwarded(&mut forward).await;
    let secret: k8s_openapi::api::core::v1::Secret =
        serde_json::from_str(&namespace.kubectl(&["get", "secret", "demo-relay", "--output=json"])).unwrap();
    let data = secret.data.unwrap();
    let access = Access::new(&data["tls.crt"].0, &data["token"].0).unwrap();
    let stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let mut console = access.open(stream, Console::Serial.path()).await.unwrap();
    let hello = Hello { user: "ann".into(), session: "s".into(), wish: Wish::Watch };
    console.send(Message::text(serde_json::to_string(&hello).unwrap())).await.unwrap();
    let mut seen = String::new();
    while !seen.contains("guest: up") {
        let message = tokio::time::timeout(LIMIT, console.next()).await.expect("the guest's last output").unwrap();
        if let Message::Binary(bytes) = message.unwrap() {
            seen += &String::from_utf8_lossy(&bytes);
        }
    }
}

/// `kubectl vm create` makes a VM whose disk is filled from an image, and ends when its guest is up. Returns what it printed.
pub async fn a_vm_is_created_from_an_image(namespace: &TestNamespace, name: &str, image: &[&str]) -> String {
    let data = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(data.path(), "message: Hello from the command line\n").unwrap();
    let size = ["--cpus=1", "--ram=512Mi", "--disk=256Mi", "--network=user", "--cloud-init"];
    let what = [&["create", name, "--image"], image, &size, &[data.path().to_str().unwrap()]].concat();
    let (_tools, mut command) = kubectl_vm(namespace, &what);
    let output = tokio::time::timeout(LIMIT, command.output()).await.expect("the end of the command").unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{output:?}");
    let printed = format!("{}{}", text(&output.stderr), text(&output.stdout));
    println!("$ kubectl vm {}\n{printed}", what.join(" "));
    assert!(printed.contains(&format!("vm/{name}: is up: its agent answers (")), "{printed}");
    printed
}

/// What a command that succeeds prints on standard output.
pub async fn printed(namespace: &TestNamespace, arguments: &[&str]) -> String {
    let (_tools, mut command) = kubectl_vm(namespace, arguments);
    let output = tokio::time::timeout(LIMIT, command.output()).await.expect("the end of the command").unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    println!("$ kubectl vm {}\n{}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A file of the archive that `kubectl vm dump` makes.
pub async fn dumped(namespace: &TestNamespace, vm: &str, file: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("dump.tar.gz");
    printed(namespace, &["dump", vm, "--output", archive.to_str().unwrap()]).await;
    let file = format!("{vm}/{file}");
    let tar = std::process::Command::new("tar").arg("xzOf").arg(&archive).arg(&file).output().unwrap();
    assert!(tar.status.success(), "{file}: {}", String::from_utf8_lossy(&tar.stderr));
    String::from_utf8(tar.stdout).unwrap()
}

/// `kubectl vm view` leads a viewer for VNC to the guest's screen, one at a time.
pub async fn the_screen_is_shown(namespace: &TestNamespace) {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
    let (_tools, mut command) = kubectl_vm(namespace, &["view", "demo", "--proxy-only", "--user=ann"]);
    let mut view = command.stdout(std::process::Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(view.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(LIMIT, lines.next_line()).await.expect("an address").unwrap().unwrap();
    let address = line.strip_prefix("vnc://").unwrap();
    let mut viewer = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut version = [0; 12];
    tokio::time::timeout(LIMIT, viewer.read_exact(&mut version)).await.expect("QEMU's greeting").unwrap();
    assert_eq!(&version, b"RFB 003.008\n");

    // Another user's viewer is one that does nothing but end when it is told to.
    let (_tools, mut command) = kubectl_vm(namespace, &["view", "demo", "--proxy-only", "--user=bob"]);
    let mut other = command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(other.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(LIMIT, lines.next_line()).await.expect("an address").unwrap().unwrap();
    let _viewer = tokio::net::TcpStream::connect(line.strip_prefix("vnc://").unwrap()).await.unwrap();
    let mut notes = BufReader::new(other.stderr.take().unwrap()).lines();
    let note = tokio::time::timeout(LIMIT, notes.next_line()).await.expect("a note").unwrap().unwrap();
    assert!(note.contains("ann has the screen: --ask asks for it"), "{note}");
}
