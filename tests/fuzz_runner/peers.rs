//! The programs that the runner talks to, played: QEMU, the agents in the guest, and the machine role. A hostile one says what its
//! [`Mutator`] makes of what the program would say.

use std::{path::Path, time::Duration};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    task::JoinHandle,
    time::sleep,
};

use super::mutator::Mutator;

/// Who a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Qemu,
    GuestAgent,
    LoginAgent,
    Machine,
}

/// Serves a socket until it is dropped; its connections end with it.
pub struct Peer(JoinHandle<()>);

impl Peer {
    pub fn listen(socket: &Path, role: Role, is_hostile: bool, mut mutator: Mutator) -> Self {
        // What a hostile folder has in its place.
        let _ = std::fs::remove_file(socket);
        let _ = std::fs::remove_dir_all(socket);
        let listener = UnixListener::bind(socket).unwrap();
        Self(tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let mut speaker = Speaker { stream: BufReader::new(stream), is_hostile, mutator: mutator.fork() };
                connections.spawn(async move {
                    // A connection that is broken is the end of the conversation.
                    let _ = match role {
                        Role::Qemu => speaker.qemu().await,
                        Role::GuestAgent => speaker.guest_agent().await,
                        Role::LoginAgent => speaker.login_agent().await,
                        Role::Machine => speaker.machine_role().await,
                    };
                });
            }
        }))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Speaker {
    stream: BufReader<UnixStream>,
    is_hostile: bool,
    mutator: Mutator,
}

impl Speaker {
    async fn say(&mut self, message: Value) -> std::io::Result<()> {
        let mut line = if self.is_hostile && self.mutator.once_in(4) {
            self.mutator.message(message)
        } else {
            message.to_string().into_bytes()
        };
        line.push(b'\n');
        if self.is_hostile && self.mutator.once_in(60) {
            line = self.flood(&line);
        }
        self.stream.get_mut().write_all(&line).await?;
        if self.is_hostile && self.mutator.once_in(60) {
            return Err(std::io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    }

    /// The line some thousand times, about a megabyte at most.
    fn flood(&mut self, line: &[u8]) -> Vec<u8> {
        line.repeat(self.mutator.random.usize(1..2 + (1 << 20) / line.len().max(256)))
    }

    async fn request(&mut self) -> std::io::Result<Value> {
        let mut line = Vec::new();
        if self.stream.read_until(b'\n', &mut line).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.strip_prefix(b"\xff").unwrap_or(&line);
        Ok(serde_json::from_slice(line).unwrap_or_default())
    }

    async fn qemu(&mut self) -> std::io::Result<()> {
        self.say(json!({ "QMP": { "version": {}, "capabilities": ["oob"] } })).await?;
        for _ in 0..40 {
            let pause = Duration::from_millis(self.mutator.random.u64(1..4_000));
            let request = tokio::select! {
                request = self.request() => Some(request?),
                () = sleep(pause) => None,
            };
            for _ in 0..self.mutator.random.u32(..3) {
                let event = self.event();
                self.say(event).await?;
            }
            if let Some(request) = request {
                let answer = answer(request["execute"].as_str().unwrap_or_default());
                let is_refused = self.mutator.once_in(20);
                let error = json!({ "class": "GenericError", "desc": format!("no {}", self.mutator.text()) });
                let answer = if is_refused { ("error", error) } else { ("return", answer) };
                self.say(json!({ answer.0: answer.1, "id": request["id"] })).await?;
            }
        }
        // Somebody who hangs, or who ends.
        if self.mutator.random.bool() { self.silent().await } else { Ok(()) }
    }

    async fn silent(&mut self) -> std::io::Result<()> {
        let mut buffer = [0; 4096];
        while self.stream.read(&mut buffer).await? > 0 {}
        Ok(())
    }

    fn event(&mut self) -> Value {
        let port = *self.mutator.pick(&["guest-agent", "vmop-agent", "another"]);
        let open = self.mutator.random.bool();
        let number = self.mutator.random.u32(..50);
        let viewer = json!({ "host": format!("10.0.0.{number}"), "port": "40000", "channel-type": number % 3 });
        let events = [
            json!({ "event": "RESUME" }),
            json!({ "event": "STOP" }),
            json!({ "event": "POWERDOWN" }),
            json!({ "event": "SHUTDOWN", "data": { "guest": open, "reason": "guest-shutdown" } }),
            json!({ "event": "RESET", "data": { "guest": open } }),
            json!({ "event": "BALLOON_CHANGE", "data": { "actual": 1 << 28 } }),
            json!({ "event": "VSERPORT_CHANGE", "data": { "id": port, "open": open } }),
            json!({ "event": "BLOCK_IO_ERROR", "data": { "action": "stop", "reason": "no" } }),
            json!({ "event": "DEVICE_DELETED", "data": { "device": "vmop-cpu-1" } }),
            json!({ "event": "DEVICE_TRAY_MOVED", "data": { "id": "cd0", "tray-open": open } }),
            json!({ "event": "SPICE_INITIALIZED", "data": { "client": viewer } }),
            json!({ "event": "SPICE_DISCONNECTED", "data": { "client": viewer } }),
            json!({ "event": "NETDEV_VHOST_USER_CONNECTED", "data": { "netdev-id": "net0" } }),
            json!({ "event": "FROM_THE_FUTURE", "data": {} }),
        ];
        self.mutator.pick(&events).clone()
    }

    async fn guest_agent(&mut self) -> std::io::Result<()> {
        for _ in 0..10 {
            let request = self.request().await?;
            let answer = match request["execute"].as_str().unwrap_or_default() {
                "guest-sync-delimited" => request["arguments"]["id"].clone(),
                "guest-get-osinfo" => json!({
                    "id": "debian", "pretty-name": "Debian GNU/Linux 13", "kernel-release": "6.12", "machine": "x86_64",
                }),
                _ => json!({}),
            };
            let is_refused = self.mutator.once_in(10);
            let error = json!({ "class": "CommandNotFound", "desc": self.mutator.text() });
            self.say(if is_refused { json!({ "error": error }) } else { json!({ "return": answer }) }).await?;
        }
        Ok(())
    }

    async fn login_agent(&mut self) -> std::io::Result<()> {
        let lines = ["220 hello", "201 done", "202 nobody", "501 who?", "410 not now", "110 soon", ""];
        for _ in 0..self.mutator.random.u32(1..60) {
            let mut line = self.mutator.pick(&lines).as_bytes().to_vec();
            if self.is_hostile && self.mutator.random.bool() {
                line = self.mutator.bytes(&line);
            }
            line.push(b'\n');
            if self.is_hostile && self.mutator.once_in(20) {
                line = self.flood(&line);
            }
            self.stream.get_mut().write_all(&line).await?;
            if self.mutator.once_in(3) {
                sleep(Duration::from_millis(self.mutator.random.u64(..2_000))).await;
            }
        }
        self.silent().await
    }

    async fn machine_role(&mut self) -> std::io::Result<()> {
        let request = self.request().await?;
        let texts = request["media"].as_array().cloned().unwrap_or_default();
        let answers: Vec<Value> = texts.iter().map(|text| json!({ "Ok": { "file": text } })).collect();
        self.say(json!(answers)).await
    }
}

/// What QEMU answers to a command.
fn answer(command: &str) -> Value {
    match command {
        "query-status" => json!({ "running": true, "singlestep": false, "status": "running" }),
        "query-chardev" => json!([
            { "label": "guest-agent", "filename": "unix", "frontend-open": true },
            { "label": "vmop-agent", "filename": "unix", "frontend-open": true },
        ]),
        "query-balloon" => json!({ "actual": 1_u64 << 28 }),
        "query-hotpluggable-cpus" => json!([
            { "type": "max-x86_64-cpu", "vcpus-count": 1, "props": { "core-id": 1 }, "qom-path": "/machine/peripheral/vmop-cpu-1" },
            { "type": "max-x86_64-cpu", "vcpus-count": 1, "props": { "core-id": 0 }, "qom-path": "/machine/unattached/device[0]" },
        ]),
        "query-block" => json!([
            { "qdev": "/machine/peripheral/disk0/virtio-backend", "io-status": "nospace" },
            { "qdev": "/machine/peripheral/cd0", "inserted": { "file": "/a.iso", "node-name": "cd0-image" } },
        ]),
        "query-spice" => json!({ "enabled": true, "channels": [
            { "host": "10.0.0.7", "port": "40000", "channel-type": 1, "connection-id": 7, "family": "ipv4" },
        ] }),
        _ => json!({}),
    }
}
