//! A connection to QEMU's monitor, with the protocol QMP (<https://www.qemu.org/docs/master/interop/qmp-spec.html>).
//!
//! The types of most commands come from the crate `qapi`. Its stream is not used, because it fails at the first event or enum
//! value that is newer than the crate. Here an unknown event is [`Event::Other`].

use std::{collections::VecDeque, io, path::Path, time::Duration};

use qapi::{
    Command,
    qmp::{self, qmp_capabilities},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::lines::JsonLines;

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
        command: &'static str,
        /// QEMU's message.
        reason: String,
    },
    /// The answer has an unexpected form.
    #[error("QEMU's answer to {command} has an unexpected form")]
    Answer {
        /// The command's name.
        command: &'static str,
        /// What differs.
        source: serde_json::Error,
    },
    /// QEMU has not answered in time.
    #[error("QEMU did not answer {command} within {} s", ANSWER_TIMEOUT.as_secs())]
    Timeout {
        /// The command's name.
        command: &'static str,
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

/// `set_password`: <https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html#command-QMP-ui.set_password>. The crate's
/// type has a variant for each protocol, and its type for `expire_password` cannot be serialized at all.
#[derive(Debug, Serialize)]
pub struct SetPassword<'a> {
    /// `spice` or `vnc`.
    pub protocol: &'a str,
    /// The password.
    pub password: &'a str,
}

/// `expire_password`.
#[derive(Debug, Serialize)]
pub struct ExpirePassword<'a> {
    /// `spice` or `vnc`.
    pub protocol: &'a str,
    /// `now`, `never`, `+SECONDS` or Unix time.
    pub time: &'a str,
}

/// `query-block`. The answer stays JSON, because the crate's type rejects values that are newer than the crate.
#[derive(Debug, Serialize)]
pub struct QueryBlock {}

/// `query-spice`. Only the viewers in the answer are used.
#[derive(Debug, Serialize)]
pub struct QuerySpice {}

/// `query-vnc`. Only the viewers in the answer are used.
#[derive(Debug, Serialize)]
pub struct QueryVnc {}

/// `query-blockstats`. Only some counters are used; the crate's type wants those of the newest QEMU.
#[derive(Debug, Serialize)]
pub struct QueryBlockstats {}

/// A disk in the answer of [`QueryBlockstats`].
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

/// `blockdev-add`. The crate's type has a variant with all fields for each driver.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct BlockdevAdd(pub Value);

/// Gives the commands of this module their names and the types of their answers.
macro_rules! commands {
    ($($command:ty = $name:literal -> $answer:ty;)*) => {
        $(impl Command for $command {
            type Ok = $answer;
            const NAME: &'static str = $name;
            const ALLOW_OOB: bool = false;
        })*
    };
}

commands! {
    SetPassword<'_> = "set_password" -> qapi::Empty;
    ExpirePassword<'_> = "expire_password" -> qapi::Empty;
    QueryBlock = "query-block" -> Value;
    QueryBlockstats = "query-blockstats" -> Vec<BlockStats>;
    QuerySpice = "query-spice" -> Viewers;
    QueryVnc = "query-vnc" -> Viewers;
    BlockdevAdd = "blockdev-add" -> qapi::Empty;
}

/// What the guest does, from an answer of `query-status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestState {
    /// It has not run yet.
    NotStarted,
    /// It executes.
    Executes,
    /// A disk has stopped it.
    StoppedByDisk,
    /// It has panicked, and is stopped.
    Panicked,
    /// Its watchdog has stopped it.
    Hung,
    /// It is stopped otherwise.
    Stopped,
}

impl From<qmp::StatusInfo> for GuestState {
    fn from(info: qmp::StatusInfo) -> Self {
        match info.status {
            _ if info.running => Self::Executes,
            qmp::RunState::prelaunch => Self::NotStarted,
            qmp::RunState::io_error => Self::StoppedByDisk,
            qmp::RunState::guest_panicked => Self::Panicked,
            qmp::RunState::watchdog => Self::Hung,
            _ => Self::Stopped,
        }
    }
}

/// A slot for a CPU, from the answer of `query-hotpluggable-cpus`.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuSlot {
    /// The CPU's type.
    pub type_: String,
    /// Its position: socket, die, core, thread.
    pub properties: Map<String, Value>,
    /// The CPU in the slot, as a path in QEMU's object tree. `None`: the slot is empty.
    pub occupant: Option<String>,
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
            .map_err(|_| Error::Timeout { command: "a connection" })??;
        if greeting.is_none_or(|greeting| greeting.get("QMP").is_none()) {
            return Err(Error::Closed);
        }
        let mut qmp = Self { lines, events: VecDeque::new(), is_flooded: false, last_id: 0 };
        qmp.execute(qmp_capabilities { enable: None }).await?;
        Ok(qmp)
    }

    /// Executes a command. Events that arrive before the answer are kept for [`Qmp::event`].
    ///
    /// # Errors
    /// If the connection breaks, QEMU refuses the command, or QEMU does not answer in time. After a timeout the connection can still
    /// be used.
    pub async fn execute<C: Command>(&mut self, command: C) -> Result<C::Ok, Error> {
        let name = C::NAME;
        if self.is_flooded {
            return Err(Error::Flood);
        }
        self.last_id += 1;
        let id = self.last_id;
        let exchange = async {
            self.lines.send(&[], &json!({ "execute": name, "arguments": command, "id": id })).await?;
            loop {
                let message = self.lines.receive().await?.ok_or(Error::Closed)?;
                // An answer with another number belongs to an earlier command that has timed out.
                if message.get("event").is_some() {
                    self.keep(event(message))?;
                } else if message.get("id").and_then(Value::as_u64) == Some(id) {
                    return answer::<C>(message);
                }
            }
        };
        tokio::time::timeout(ANSWER_TIMEOUT, exchange).await.unwrap_or(Err(Error::Timeout { command: name }))
    }

    /// Returns the slots for CPUs. The list is empty if the machine type has a fixed number of CPUs.
    ///
    /// # Errors
    /// If the connection breaks, or QEMU does not answer in time.
    pub async fn cpu_slots(&mut self) -> Result<Vec<CpuSlot>, Error> {
        let slots = match self.execute(qmp::query_hotpluggable_cpus {}).await {
            Err(Error::Refused { .. }) => Vec::new(),
            slots => slots?,
        };
        let slot = |slot: qmp::HotpluggableCPU| CpuSlot {
            properties: match serde_json::to_value(&slot.props) {
                Ok(Value::Object(properties)) => properties,
                _ => Map::new(),
            },
            type_: slot.type_,
            occupant: slot.qom_path,
        };
        Ok(slots.into_iter().map(slot).collect())
    }

    /// Plugs a CPU with the name `id` into a slot.
    ///
    /// # Errors
    /// As for [`Qmp::execute`].
    pub async fn plug(&mut self, id: String, slot: CpuSlot) -> Result<(), Error> {
        let (bus, driver) = (None, slot.type_);
        self.execute(qmp::device_add { driver, id: Some(id), bus, arguments: slot.properties }).await.map(|_| ())
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

fn event(message: Value) -> Event {
    if message.to_string().len() > LONGEST_EVENT {
        return Event::Other;
    }
    serde_json::from_value(message).unwrap_or(Event::Other)
}

fn answer<C: Command>(mut message: Value) -> Result<C::Ok, Error> {
    if let Some(error) = message.get("error") {
        let reason = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_owned();
        return Err(Error::Refused { command: C::NAME, reason });
    }
    serde_json::from_value(message["return"].take()).map_err(|source| Error::Answer { command: C::NAME, source })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        // The crate `qapi` does not know this reason.
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
        assert!(matches!(qmp.execute(qmp::query_status {}).await, Err(Error::Flood)));
        for _ in 0..MOST_EVENTS {
            assert_eq!(qmp.event().await.unwrap(), Event::Resume);
        }
        assert!(matches!(qmp.event().await, Err(Error::Flood)));
        assert!(matches!(qmp.execute(qmp::query_status {}).await, Err(Error::Flood)));
        drop(qmp);
        qemu.await.unwrap();
    }

    #[test]
    fn a_refusal_contains_the_message_of_qemu() {
        let message = json!({ "error": { "class": "GenericError", "desc": "CPU hotplug is off" }, "id": 1 });
        let error = answer::<qapi::qmp::cont>(message).unwrap_err();
        assert_eq!(error.to_string(), "QEMU refused cont: CPU hotplug is off");
    }
}
