//! A connection to QEMU's monitor, with the protocol QMP (<https://www.qemu.org/docs/master/interop/qmp-spec.html>).
//!
//! [`Command`] has the commands that the runner sends, and the other types what it reads of the answers. QEMU may be newer than the runner, so
//! whatever else it says is left alone: an unknown event is [`Event::Other`].

use std::{collections::VecDeque, fmt, io, path::Path, time::Duration};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::{
    go_on::{GuestState, Permission},
    lines::JsonLines,
};
use crate::render::command_line::DeviceId;

/// The time that QEMU has to answer. It answers in milliseconds unless its main loop hangs, for example on failed storage.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The most events that are kept while a command is executed, which takes milliseconds. Whoever breaks out of QEMU can send them without end,
/// and the agent must have no use for more memory than it has.
const MOST_EVENTS: usize = 1000;
/// The longest event in bytes, as JSON. Those that the runner uses have some hundred.
const LONGEST_EVENT: usize = 4096;

/// Why a command or an event cannot be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection is broken. Usually QEMU has ended.
    #[error("the connection to QEMU's monitor is broken")]
    Io(#[from] io::Error),
    /// QEMU has closed the connection, or the peer is not QEMU.
    #[error("QEMU closed its monitor")]
    Closed,
    /// QEMU has sent more events than the runner keeps.
    #[error("QEMU sent more than {MOST_EVENTS} events before an answer")]
    Flood,
    /// QEMU has refused the command.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The command's name.
        command: String,
        /// QEMU's message.
        reason: String,
    },
    /// The answer has an unexpected form.
    #[error("QEMU's answer to {command} has an unexpected form")]
    Answer {
        /// The command's name.
        command: String,
        /// What differs.
        source: serde_json::Error,
    },
    /// QEMU has not answered in time.
    #[error("QEMU did not answer {command} within {} s", ANSWER_TIMEOUT.as_secs())]
    Timeout {
        /// The command's name.
        command: String,
    },
}

/// An event of QEMU. Only the events that the runner uses have a variant of their own.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "event", content = "data", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Event {
    /// The guest executes, for the first time or again.
    Resume,
    /// The guest is paused.
    Stop,
    /// The VM's power button was pressed.
    Powerdown,
    /// QEMU is about to end.
    Shutdown {
        /// Whether the guest caused it.
        guest: bool,
        /// `guest-shutdown`, `guest-reset`, `guest-panic`, `host-qmp-quit`, `host-signal`, ...
        #[serde(default)]
        reason: String,
    },
    /// The guest was reset.
    Reset {
        /// Whether the guest caused it.
        guest: bool,
    },
    /// The guest's kernel has panicked.
    GuestPanicked {},
    /// The guest has not fed its watchdog in time.
    Watchdog {},
    /// The size of the balloon has changed.
    BalloonChange {
        /// The memory that the guest has, in bytes.
        actual: u64,
    },
    /// A program in the guest opened or closed a port.
    VserportChange {
        /// The name of the port's device.
        id: String,
        /// Whether the port is open now.
        open: bool,
    },
    /// A drive could not be read or written.
    BlockIoError {
        /// Whether QEMU stops the guest therefore. Otherwise it reports the error to the guest, or ignores it.
        #[serde(rename = "action", deserialize_with = "is_stop")]
        stops: bool,
    },
    /// A device was removed.
    DeviceDeleted {
        /// The device's name, if it had one.
        #[serde(default)]
        device: Option<String>,
    },
    /// The tray of a CD drive was opened or closed.
    DeviceTrayMoved {
        /// The name of the drive's device, or a path in QEMU's object tree that ends with it.
        id: String,
        /// Whether it is open now.
        #[serde(rename = "tray-open")]
        open: bool,
    },
    /// A viewer has connected to the display and was authenticated. With SPICE there is an event for each channel.
    #[serde(rename = "SPICE_INITIALIZED", alias = "VNC_INITIALIZED")]
    ViewerConnected {
        /// The viewer's connection.
        client: Viewer,
    },
    /// A connection to the display has ended.
    #[serde(rename = "SPICE_DISCONNECTED", alias = "VNC_DISCONNECTED")]
    ViewerDisconnected {
        /// The viewer's connection.
        client: Viewer,
    },
    /// passt has connected to QEMU's network, for the first time or again.
    NetdevVhostUserConnected {
        /// The name of the network.
        #[serde(rename = "netdev-id")]
        network: String,
    },
    /// passt has ended.
    NetdevVhostUserDisconnected {
        /// The name of the network.
        #[serde(rename = "netdev-id")]
        network: String,
    },
    /// Any other event.
    #[serde(other, deserialize_with = "ignore")]
    Other,
}

/// A viewer's connection to the display.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Viewer {
    /// The viewer's address.
    pub host: String,
    /// The viewer's port.
    #[serde(alias = "service")]
    pub port: String,
    /// The type of the SPICE channel. Absent with VNC, where a viewer has only one connection.
    #[serde(default)]
    pub channel_type: Option<u8>,
    /// Whether it came through a Unix socket: from a program in the Pod.
    #[serde(default, rename = "family", deserialize_with = "is_unix")]
    pub is_inner: bool,
}

impl Viewer {
    /// The main channel of SPICE, of which each viewer has one (`SPICE_CHANNEL_MAIN` in spice-protocol).
    const MAIN_CHANNEL: u8 = 1;

    /// Whether this is the main connection of a viewer outside the Pod. Each viewer has exactly one.
    pub fn is_main(&self) -> bool {
        !self.is_inner && self.channel_type.is_none_or(|channel| channel == Self::MAIN_CHANNEL)
    }

    /// Whether both are the same connection.
    pub fn is_same_connection(&self, other: &Self) -> bool {
        (&self.host, &self.port) == (&other.host, &other.port)
    }
}

fn ignore<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    serde::de::IgnoredAny::deserialize(deserializer).map(|_| ())
}

fn is_stop<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    String::deserialize(deserializer).map(|action| action == "stop")
}

fn is_unix<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    String::deserialize(deserializer).map(|family| family == "unix")
}

/// A command, as data. Names and arguments are those of <https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html>; an answer is `{}` where
/// nothing else is said.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "execute", content = "arguments", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Command {
    /// Changes the size of the balloon so that the guest has this memory.
    Balloon {
        /// In bytes.
        value: u64,
    },
    /// Makes a disk larger. QEMU refuses more than a device has.
    #[serde(rename = "block_resize")]
    BlockResize {
        /// The disk's node.
        #[serde(rename = "node-name")]
        node_name: String,
        /// In bytes.
        size: u64,
    },
    /// Opens an image.
    BlockdevAdd(Value),
    /// Closes the tray of a drive.
    BlockdevCloseTray {
        /// The drive's device.
        id: DeviceId,
    },
    /// Closes an image that nothing uses.
    BlockdevDel {
        /// The image's node.
        node_name: String,
    },
    /// Puts an image into a drive that is open and empty.
    BlockdevInsertMedium {
        /// The drive's device.
        id: DeviceId,
        /// The image's node.
        node_name: String,
    },
    /// Opens the tray of a drive. If the guest has locked it, QEMU asks the guest to open it, and refuses.
    BlockdevOpenTray {
        /// The drive's device.
        id: DeviceId,
        /// Whether a locked tray is opened too.
        force: bool,
    },
    /// Takes out what is in a drive that is open.
    BlockdevRemoveMedium {
        /// The drive's device.
        id: DeviceId,
    },
    /// Lets the guest execute.
    Cont(Permission),
    /// Plugs a device.
    #[serde(rename = "device_add")]
    DeviceAdd {
        /// Its type.
        driver: String,
        /// Its name.
        id: String,
        /// What else it has.
        #[serde(flatten)]
        properties: Map<String, Value>,
    },
    /// Asks the guest to release a device. [`Event::DeviceDeleted`] follows when it has.
    #[serde(rename = "device_del")]
    DeviceDel {
        /// The device's name.
        id: String,
    },
    /// Sets until when the password of a display is valid.
    #[serde(rename = "expire_password")]
    ExpirePassword {
        /// `spice` or `vnc`.
        protocol: &'static str,
        /// `now`, `never`, `+SECONDS` or Unix time.
        time: String,
    },
    /// Reads a property. The answer is its value.
    QomGet {
        /// The object.
        path: &'static str,
        /// The property's name.
        property: &'static str,
    },
    /// Sets a property.
    QomSet {
        /// The object.
        path: &'static str,
        /// The property's name.
        property: &'static str,
        /// Its value.
        value: Value,
    },
    /// Begins the conversation.
    #[serde(rename = "qmp_capabilities")]
    QmpCapabilities {
        /// What of the monitor's capabilities is used.
        enable: Vec<&'static str>,
    },
    /// The answer is a [`Balloon`].
    QueryBalloon,
    /// The drives, with what is in them. What is read of the answer has a function of its own each.
    QueryBlock,
    /// The answer is a list of [`BlockStats`].
    QueryBlockstats,
    /// The answer is a list of [`Port`].
    QueryChardev,
    /// The answer is a list of [`CpuThread`].
    QueryCpusFast,
    /// The answer is a list of [`CpuSlot`]. QEMU refuses it if the machine type has a fixed number of CPUs.
    QueryHotpluggableCpus,
    /// The answer is [`Viewers`].
    QuerySpice,
    /// The answer is a [`Status`].
    QueryStatus,
    /// The answer is [`Viewers`].
    QueryVnc,
    /// Ends QEMU.
    Quit,
    /// Writes a picture of the screen.
    Screendump {
        /// The file.
        filename: String,
        /// `png`.
        format: &'static str,
    },
    /// Presses keys at once.
    SendKey {
        /// The keys.
        keys: Vec<Key>,
    },
    /// Sets the password of a display, which is valid for ever then.
    #[serde(rename = "set_password")]
    SetPassword {
        /// `spice` or `vnc`.
        protocol: &'static str,
        /// The password.
        password: Secret,
    },
    /// Stops the guest.
    Stop,
    /// Presses the power button.
    #[serde(rename = "system_powerdown")]
    SystemPowerdown,
    /// Presses the reset button.
    #[serde(rename = "system_reset")]
    SystemReset,
}

impl Command {
    /// Its name.
    pub fn name(&self) -> String {
        json!(self)["execute"].as_str().unwrap_or_default().to_owned()
    }
}

/// A text that no log may have.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("...")
    }
}

/// A key of the keyboard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", content = "data", rename_all = "lowercase")]
pub enum Key {
    /// By its name (`QKeyCode`).
    QCode(String),
}

/// What QEMU says of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Status {
    /// Whether the guest's CPUs run.
    pub running: bool,
    /// The state in QEMU's words (`RunState`).
    pub status: String,
}

/// The size of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Balloon {
    /// The memory that the guest has, in bytes.
    pub actual: u64,
}

/// A character device: a port between QEMU and the guest.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Port {
    /// Its name.
    pub label: String,
    /// Whether a program in the guest has opened it.
    pub frontend_open: bool,
}

/// A CPU of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CpuThread {
    /// Its thread. With TCG several CPUs may share one.
    pub thread_id: i64,
}

/// A disk's counters.
#[derive(Debug, Deserialize)]
pub struct BlockStats {
    /// Its counters.
    pub stats: BlockCounters,
}

/// What has gone from and to a disk.
#[derive(Debug, Deserialize)]
pub struct BlockCounters {
    /// Bytes that were read.
    pub rd_bytes: u64,
    /// Bytes that were written.
    pub wr_bytes: u64,
}

/// The connections to a display.
#[derive(Debug, Default, Deserialize)]
pub struct Viewers {
    /// The connections.
    #[serde(default, alias = "channels")]
    pub clients: Vec<Viewer>,
}

impl From<Status> for GuestState {
    fn from(Status { running, status }: Status) -> Self {
        match status.as_str() {
            _ if running => Self::Executes,
            "prelaunch" => Self::NotStarted,
            "io-error" => Self::StoppedByDisk,
            "guest-panicked" => Self::Panicked,
            "watchdog" => Self::Hung,
            "shutdown" => Self::ShutDown,
            _ => Self::Stopped,
        }
    }
}

/// A slot for a CPU (`HotpluggableCPU`).
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct CpuSlot {
    /// The CPU's type.
    #[serde(rename = "type")]
    pub type_: String,
    /// Its position: socket, die, core, thread.
    #[serde(rename = "props")]
    pub properties: Map<String, Value>,
    /// The CPU in the slot, as a path in QEMU's object tree. `None`: the slot is empty.
    #[serde(default, rename = "qom-path")]
    pub occupant: Option<String>,
}

/// A command with the number of its answer.
#[derive(Serialize)]
struct Numbered<'a> {
    #[serde(flatten)]
    command: &'a Command,
    id: u64,
}

/// A connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    lines: JsonLines,
    events: VecDeque<Event>,
    /// An event was lost, so the connection is of no use any more.
    is_flooded: bool,
    last_id: u64,
}

impl Qmp {
    /// Connects to the monitor and negotiates its capabilities.
    ///
    /// # Errors
    /// If no program listens on the socket, or the program is not a QMP server.
    pub async fn connect(socket: &Path) -> Result<Self, Error> {
        let mut lines = JsonLines::connect(socket).await?;
        // QEMU sends a greeting when it accepts the connection. It does not accept a second client, which would wait for ever.
        let greeting = tokio::time::timeout(ANSWER_TIMEOUT, lines.receive())
            .await
            .map_err(|_| Error::Timeout { command: "a connection".into() })??;
        let greeting = greeting.and_then(|mut greeting| Some(greeting.get_mut("QMP")?.take())).ok_or(Error::Closed)?;
        let mut qmp = Self { lines, events: VecDeque::new(), is_flooded: false, last_id: 0 };
        qmp.execute(&Command::QmpCapabilities { enable: capabilities(&greeting) }).await?;
        Ok(qmp)
    }

    /// Executes a command. Events that arrive before the answer are kept for [`Qmp::event`].
    ///
    /// # Errors
    /// If the connection breaks, QEMU refuses the command, or QEMU does not answer in time. After a timeout the connection can still
    /// be used.
    pub async fn execute(&mut self, command: &Command) -> Result<Value, Error> {
        if self.is_flooded {
            return Err(Error::Flood);
        }
        self.last_id += 1;
        let id = self.last_id;
        let exchange = async {
            self.lines.send(&[], &Numbered { command, id }).await?;
            loop {
                let message = self.lines.receive().await?.ok_or(Error::Closed)?;
                // An answer with another number belongs to an earlier command that has timed out.
                if message.get("event").is_some() {
                    self.keep(event(message))?;
                } else if message.get("id").and_then(Value::as_u64) == Some(id) {
                    return answer(command, message);
                }
            }
        };
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await;
        answer.unwrap_or_else(|_| Err(Error::Timeout { command: command.name() }))
    }

    /// As [`Qmp::execute`], with the answer as the command's documentation names it.
    ///
    /// # Errors
    /// As for [`Qmp::execute`], and if the answer has another form.
    pub async fn query<T: DeserializeOwned>(&mut self, command: &Command) -> Result<T, Error> {
        read(command, self.execute(command).await?)
    }

    /// Returns the slots for CPUs. The list is empty if the machine type has a fixed number of CPUs.
    ///
    /// # Errors
    /// If the connection breaks, or QEMU does not answer in time.
    pub async fn cpu_slots(&mut self) -> Result<Vec<CpuSlot>, Error> {
        match self.query(&Command::QueryHotpluggableCpus).await {
            Err(Error::Refused { .. }) => Ok(Vec::new()),
            slots => slots,
        }
    }

    /// Returns the next event. Cancel safe: no event is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection is broken or has ended.
    pub async fn event(&mut self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            if self.is_flooded {
                return Err(Error::Flood);
            }
            let message = self.lines.receive().await?.ok_or(Error::Closed)?;
            if message.get("event").is_some() {
                self.keep(event(message))?;
            }
        }
    }

    /// Keeps an event. What the runner does not use is not kept.
    fn keep(&mut self, event: Event) -> Result<(), Error> {
        self.is_flooded |= self.events.len() == MOST_EVENTS;
        if self.is_flooded {
            return Err(Error::Flood);
        }
        self.events.extend(Some(event).filter(|event| *event != Event::Other));
        Ok(())
    }
}

/// What of the capabilities in QEMU's greeting is used: a thread of its own reads the monitor (`oob`), so that a command that needs no main loop
/// reaches a QEMU whose main loop hangs, on a network for example. It can be had only now
/// (<https://www.qemu.org/docs/master/interop/qmp-spec.html#out-of-band-execution>).
fn capabilities(greeting: &Value) -> Vec<&'static str> {
    let offered = |name: &&str| greeting["capabilities"].as_array().is_some_and(|all| all.iter().any(|it| it == name));
    ["oob"].into_iter().filter(offered).collect()
}

/// Reads an event. What the runner does not know is [`Event::Other`].
pub fn event(message: Value) -> Event {
    if message.to_string().len() > LONGEST_EVENT {
        return Event::Other;
    }
    serde_json::from_value(message).unwrap_or(Event::Other)
}

fn answer(command: &Command, mut message: Value) -> Result<Value, Error> {
    if let Some(error) = message.get("error") {
        let reason = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_owned();
        return Err(Error::Refused { command: command.name(), reason });
    }
    Ok(message["return"].take())
}

/// Reads the answer to a command.
///
/// # Errors
/// If it has another form than the command's documentation says.
pub fn read<T: DeserializeOwned>(command: &Command, answer: Value) -> Result<T, Error> {
    serde_json::from_value(answer).map_err(|source| Error::Answer { command: command.name(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::go_on::{Who, permission};

    #[test]
    fn events_are_parsed_and_unknown_events_are_no_error() {
        let parse = |text: &str| event(serde_json::from_str(text).unwrap());
        let time = r#""timestamp": {"seconds": 1, "microseconds": 2}"#;
        assert_eq!(parse(&format!(r#"{{{time}, "event": "RESUME"}}"#)), Event::Resume);
        let data = r#""data": {"action": "pause", "info": {"type": "tdx"}}"#;
        assert_eq!(parse(&format!(r#"{{{time}, "event": "GUEST_PANICKED", {data}}}"#)), Event::GuestPanicked {});
        assert_eq!(parse(&format!(r#"{{{time}, "event": "WATCHDOG", {data}}}"#)), Event::Watchdog {});
        assert_eq!(
            parse(&format!(
                r#"{{{time}, "event": "SHUTDOWN", "data": {{"guest": true, "reason": "guest-shutdown"}}}}"#
            )),
            Event::Shutdown { guest: true, reason: "guest-shutdown".into() }
        );
        // A QEMU that is newer than the runner may have other reasons.
        assert_eq!(
            parse(&format!(r#"{{"event": "SHUTDOWN", {time}, "data": {{"guest": false, "reason": "new"}}}}"#)),
            Event::Shutdown { guest: false, reason: "new".into() }
        );
        assert_eq!(
            parse(r#"{"event": "VSERPORT_CHANGE", "data": {"id": "guest-agent", "open": true}}"#),
            Event::VserportChange { id: "guest-agent".into(), open: true }
        );
        assert_eq!(
            parse(r#"{"event": "DEVICE_DELETED", "data": {"path": "/x"}}"#),
            Event::DeviceDeleted { device: None }
        );
        assert_eq!(
            parse(r#"{"event": "DEVICE_TRAY_MOVED", "data": {"device": "", "id": "cd0", "tray-open": true}}"#),
            Event::DeviceTrayMoved { id: "cd0".into(), open: true }
        );
        let disk = r#"{"event": "BLOCK_IO_ERROR", "data": {"device": "", "node-name": "disk0-image", "operation": "write",
            "action": "ACTION", "nospace": true, "reason": "No space left on device"}}"#;
        for (action, stops) in [("stop", true), ("report", false), ("ignore", false)] {
            assert_eq!(parse(&disk.replace("ACTION", action)), Event::BlockIoError { stops });
        }
        let spice = r#"{"event": "SPICE_INITIALIZED", "data": {
            "server": {"auth": "spice", "port": "5900", "family": "ipv4", "host": "0.0.0.0"},
            "client": {"port": "40000", "channel-type": 1, "connection-id": 7, "family": "ipv4", "host": "10.0.0.7",
                "channel-id": 0, "tls": false}}}"#;
        let viewer = Viewer { host: "10.0.0.7".into(), port: "40000".into(), channel_type: Some(1), is_inner: false };
        assert_eq!(parse(spice), Event::ViewerConnected { client: viewer.clone() });
        let vnc = r#"{"event": "VNC_DISCONNECTED", "data": {
            "server": {"auth": "vnc", "family": "ipv4", "service": "5900", "host": "0.0.0.0", "websocket": false},
            "client": {"family": "ipv4", "service": "40000", "host": "10.0.0.7", "websocket": false}}}"#;
        assert_eq!(parse(vnc), Event::ViewerDisconnected { client: Viewer { channel_type: None, ..viewer } });
        assert_eq!(parse(&format!(r#"{{"event": "POWERDOWN", {time}}}"#)), Event::Powerdown);
        let network = r#"{"timestamp": {}, "event": "NETDEV_VHOST_USER_DISCONNECTED", "data": {"netdev-id": "net1"}}"#;
        assert_eq!(parse(network), Event::NetdevVhostUserDisconnected { network: "net1".into() });
        assert_eq!(parse(r#"{"event": "RTC_CHANGE", "data": {"offset": 78}}"#), Event::Other);
        assert_eq!(parse(r#"{"event": "FROM_THE_FUTURE"}"#), Event::Other);
    }

    /// As whoever has broken out of QEMU could do it.
    #[tokio::test]
    async fn events_without_end_are_not_kept() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("monitor.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let qemu = tokio::spawn(async move {
            let mut lines = JsonLines::over(listener.accept().await.unwrap().0);
            lines.send(&[], &json!({ "QMP": {} })).await.unwrap();
            let request = lines.receive().await.unwrap().unwrap();
            lines.send(&[], &json!({ "return": {}, "id": request["id"] })).await.unwrap();
            lines.receive().await.unwrap().unwrap();
            let long = json!({ "event": "DEVICE_DELETED", "data": { "device": "x".repeat(LONGEST_EVENT) } });
            for event in [json!({ "event": "RTC_CHANGE" }), long] {
                for _ in 0..2 * MOST_EVENTS {
                    lines.send(&[], &event).await.unwrap();
                }
            }
            // Until nobody listens.
            while lines.send(&[], &json!({ "event": "RESUME" })).await.is_ok() {}
        });
        let mut qmp = Qmp::connect(&socket).await.unwrap();
        assert!(matches!(qmp.execute(&Command::QueryStatus).await, Err(Error::Flood)));
        for _ in 0..MOST_EVENTS {
            assert_eq!(qmp.event().await.unwrap(), Event::Resume);
        }
        assert!(matches!(qmp.event().await, Err(Error::Flood)));
        assert!(matches!(qmp.execute(&Command::QueryStatus).await, Err(Error::Flood)));
        drop(qmp);
        qemu.await.unwrap();
    }

    #[test]
    fn a_refusal_contains_the_message_of_qemu() {
        let message = json!({ "error": { "class": "GenericError", "desc": "CPU hotplug is off" }, "id": 1 });
        let plug = Command::DeviceDel { id: "vmop-cpu-1".into() };
        let error = answer(&plug, message).unwrap_err();
        assert_eq!(error.to_string(), "QEMU refused device_del: CPU hotplug is off");
    }

    #[test]
    fn a_command_has_the_form_that_qemu_documents() {
        let sent = |command: Command| json!(Numbered { command: &command, id: 7 });
        assert_eq!(sent(Command::QueryStatus), json!({ "execute": "query-status", "id": 7 }));
        let begin = |greeting: Value| sent(Command::QmpCapabilities { enable: capabilities(&greeting) });
        let enabled =
            |enable: Value| json!({ "execute": "qmp_capabilities", "arguments": { "enable": enable }, "id": 7 });
        assert_eq!(begin(json!({ "version": {}, "capabilities": ["new", "oob"] })), enabled(json!(["oob"])));
        assert_eq!(begin(json!({ "version": {}, "capabilities": [] })), enabled(json!([])));
        assert_eq!(begin(json!({})), enabled(json!([])));
        let password = Command::SetPassword { protocol: "vnc", password: Secret("s3cret".into()) };
        assert!(!format!("{password:?}").contains("s3cret"));
        let arguments = json!({ "protocol": "vnc", "password": "s3cret" });
        assert_eq!(sent(password), json!({ "execute": "set_password", "arguments": arguments, "id": 7 }));
        let cont = Command::Cont(permission(Who::Person, GuestState::Stopped).unwrap());
        assert_eq!(sent(cont), json!({ "execute": "cont", "arguments": {}, "id": 7 }));
        let keys = Command::SendKey { keys: vec![Key::QCode("ret".into())] };
        let arguments = json!({ "keys": [{ "type": "qcode", "data": "ret" }] });
        assert_eq!(sent(keys), json!({ "execute": "send-key", "arguments": arguments, "id": 7 }));
        let image = json!({ "driver": "raw" });
        let opened = json!({ "execute": "blockdev-add", "arguments": image, "id": 7 });
        assert_eq!(sent(Command::BlockdevAdd(image)), opened);
        let inserted = Command::BlockdevInsertMedium { id: DeviceId::Cd(1), node_name: "n".into() };
        assert_eq!(json!(inserted)["arguments"], json!({ "id": "cd1", "node-name": "n" }));
        let slot =
            json!({ "type": "max-x86_64-cpu", "props": { "core-id": 1, "from-the-future": 2 }, "vcpus-count": 1 });
        let CpuSlot { type_, properties, occupant } = serde_json::from_value(slot).unwrap();
        assert_eq!(occupant, None);
        let plug = Command::DeviceAdd { driver: type_, id: "vmop-cpu-1".into(), properties };
        let arguments = json!({ "driver": "max-x86_64-cpu", "id": "vmop-cpu-1", "core-id": 1, "from-the-future": 2 });
        assert_eq!(json!(plug), json!({ "execute": "device_add", "arguments": arguments }));
    }
}
