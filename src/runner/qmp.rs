//! QEMU's monitor protocol: one connection, commands typed by the `qapi` crate, events as far as the runner acts on them.
//!
//! Protocol: <https://www.qemu.org/docs/master/interop/qmp-spec.html>. The crate's own stream is not used, because it ends
//! with the first event or enum value that is newer than the crate; here an unknown event is [`Event::Other`].

use std::{collections::VecDeque, io, path::Path, time::Duration};

use qapi::{
    Command,
    qmp::{self, qmp_capabilities},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::lines::JsonLines;

/// How long QEMU may take for an answer. It answers in milliseconds unless its main loop hangs (on dead storage, say).
const PATIENCE: Duration = Duration::from_secs(10);

/// What can go wrong with a monitor.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection broke: usually QEMU ended.
    #[error("the connection to QEMU's monitor broke")]
    Io(#[from] io::Error),
    /// QEMU ended.
    #[error("QEMU closed its monitor")]
    Closed,
    /// QEMU refused the command.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The command's name.
        command: &'static str,
        /// QEMU's words.
        reason: String,
    },
    /// The answer has not the form that the command's answers have.
    #[error("QEMU's answer to {command} is not understood")]
    Answer {
        /// The command's name.
        command: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// No answer.
    #[error("QEMU did not answer {command} within {} s", PATIENCE.as_secs())]
    Timeout {
        /// The command's name.
        command: &'static str,
    },
}

/// An event of QEMU. Not all that there are, only those that mean something to the runner.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "event", content = "data", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Event {
    /// The guest runs (again).
    Resume,
    /// The guest is paused.
    Stop,
    /// The guest's power button was pressed.
    Powerdown,
    /// QEMU is about to end.
    Shutdown {
        /// Whether the guest did it.
        guest: bool,
        /// `guest-shutdown`, `guest-reset`, `guest-panic`, `host-qmp-quit`, `host-signal`, ...
        #[serde(default)]
        reason: String,
    },
    /// The guest was reset.
    Reset {
        /// Whether the guest did it.
        guest: bool,
    },
    /// The balloon has another size.
    BalloonChange {
        /// The memory that the guest has, in bytes.
        actual: u64,
    },
    /// A program in the guest opened or closed a port.
    VserportChange {
        /// The port.
        id: String,
        /// Which of both.
        open: bool,
    },
    /// A device is gone.
    DeviceDeleted {
        /// The device, if it had a name.
        #[serde(default)]
        device: Option<String>,
    },
    /// The tray of a CD drive moved.
    DeviceTrayMoved {
        /// Whether it is open now.
        #[serde(rename = "tray-open")]
        open: bool,
    },
    /// A viewer of the display was let in: with SPICE once for each of its channels.
    #[serde(rename = "SPICE_INITIALIZED", alias = "VNC_INITIALIZED")]
    ViewerCame {
        /// Who.
        client: Viewer,
    },
    /// A connection to the display is gone.
    #[serde(rename = "SPICE_DISCONNECTED", alias = "VNC_DISCONNECTED")]
    ViewerWent {
        /// Who.
        client: Viewer,
    },
    /// Another one.
    #[serde(other, deserialize_with = "ignore")]
    Other,
}

/// A connection of a viewer to the display.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Viewer {
    /// The viewer's address.
    pub host: String,
    /// Its port.
    #[serde(alias = "service")]
    pub port: String,
    /// The kind of SPICE's channel; a VNC viewer has one connection only.
    #[serde(default)]
    pub channel_type: Option<u8>,
}

impl Viewer {
    /// SPICE's main channel, which each viewer has once (`SPICE_CHANNEL_MAIN` in spice-protocol).
    const MAIN: u8 = 1;

    /// Whether this is the connection that stands for its viewer.
    pub fn is_main(&self) -> bool {
        self.channel_type.is_none_or(|channel| channel == Self::MAIN)
    }

    /// Whether both are the same connection.
    pub fn is(&self, other: &Self) -> bool {
        (&self.host, &self.port) == (&other.host, &other.port)
    }
}

fn ignore<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    serde::de::IgnoredAny::deserialize(deserializer).map(|_| ())
}

/// `set_password`: <https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html#command-QMP-ui.set_password>. (The crate's
/// type for it needs another variant for each protocol; its sibling below cannot be serialized at all.)
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

/// `query-block`, as JSON: the crate's type does not know values that are newer than it.
#[derive(Debug, Serialize)]
pub struct QueryBlock {}

/// `query-spice`, of which only the viewers are of interest.
#[derive(Debug, Serialize)]
pub struct QuerySpice {}

/// `query-vnc`, of which only the viewers are of interest.
#[derive(Debug, Serialize)]
pub struct QueryVnc {}

/// The connections to a display.
#[derive(Debug, Default, Deserialize)]
pub struct Viewers {
    /// The connections.
    #[serde(default, alias = "channels")]
    pub clients: Vec<Viewer>,
}

/// `blockdev-change-medium`: opens the tray, inserts, closes. Of a tray that the guest has locked it asks the guest to open
/// it, and refuses (<https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html#command-QMP-block.blockdev-change-medium>).
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ChangeMedium<'a> {
    /// The drive.
    pub id: &'a str,
    /// The image.
    pub filename: &'a str,
    /// `raw`: an image's content must not be taken for a format.
    pub format: &'a str,
    /// `read-only`.
    pub read_only_mode: &'a str,
}

/// Names the commands that are written here, with what QEMU answers.
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
    QuerySpice = "query-spice" -> Viewers;
    QueryVnc = "query-vnc" -> Viewers;
    ChangeMedium<'_> = "blockdev-change-medium" -> qapi::Empty;
}

/// A place for a CPU, as `query-hotpluggable-cpus` tells.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// The CPU's type.
    pub type_: String,
    /// Where it is: socket, die, core, thread.
    pub properties: Map<String, Value>,
    /// The CPU in it, as a path in QEMU's object tree.
    pub occupant: Option<String>,
}

/// A connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    lines: JsonLines,
    events: VecDeque<Event>,
    last_id: u64,
}

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// If nobody listens, or it is no QMP server.
    pub async fn connect(socket: &Path) -> Result<Self, Error> {
        let mut lines = JsonLines::connect(socket).await?;
        // The greeting. QEMU sends it when it accepts the connection; a second client would wait for it for ever.
        let greeting = tokio::time::timeout(PATIENCE, lines.receive())
            .await
            .map_err(|_| Error::Timeout { command: "a connection" })??;
        if greeting.is_none_or(|greeting| greeting.get("QMP").is_none()) {
            return Err(Error::Closed);
        }
        let mut qmp = Self { lines, events: VecDeque::new(), last_id: 0 };
        qmp.execute(qmp_capabilities { enable: None }).await?;
        Ok(qmp)
    }

    /// Executes a command. Events that arrive meanwhile are kept for [`Qmp::event`].
    ///
    /// # Errors
    /// If the connection breaks, QEMU refuses, or does not answer in time; after the last the connection is still good.
    pub async fn execute<C: Command>(&mut self, command: C) -> Result<C::Ok, Error> {
        let name = C::NAME;
        self.last_id += 1;
        let id = self.last_id;
        let exchange = async {
            self.lines.send(&[], &json!({ "execute": name, "arguments": command, "id": id })).await?;
            loop {
                let message = self.lines.receive().await?.ok_or(Error::Closed)?;
                // An answer with another number belongs to a command that was given up on.
                if message.get("event").is_some() {
                    self.events.push_back(event(message));
                } else if message.get("id").and_then(Value::as_u64) == Some(id) {
                    return answer::<C>(message);
                }
            }
        };
        tokio::time::timeout(PATIENCE, exchange).await.unwrap_or(Err(Error::Timeout { command: name }))
    }

    /// The places for CPUs. None where the machine has a fixed number.
    ///
    /// # Errors
    /// If the connection breaks, or QEMU does not answer in time.
    pub async fn cpu_slots(&mut self) -> Result<Vec<Slot>, Error> {
        let slots = match self.execute(qmp::query_hotpluggable_cpus {}).await {
            Err(Error::Refused { .. }) => Vec::new(),
            slots => slots?,
        };
        let slot = |slot: qmp::HotpluggableCPU| Slot {
            properties: match serde_json::to_value(&slot.props) {
                Ok(Value::Object(properties)) => properties,
                _ => Map::new(),
            },
            type_: slot.type_,
            occupant: slot.qom_path,
        };
        Ok(slots.into_iter().map(slot).collect())
    }

    /// Plugs a CPU.
    ///
    /// # Errors
    /// As for [`Qmp::execute`].
    pub async fn plug(&mut self, id: String, slot: Slot) -> Result<(), Error> {
        let (bus, driver) = (None, slot.type_);
        self.execute(qmp::device_add { driver, id: Some(id), bus, arguments: slot.properties }).await.map(|_| ())
    }

    /// The next event. No event is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection breaks or ends.
    pub async fn event(&mut self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            let message = self.lines.receive().await?.ok_or(Error::Closed)?;
            if message.get("event").is_some() {
                self.events.push_back(event(message));
            }
        }
    }
}

fn event(message: Value) -> Event {
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
    fn events_that_mean_something_and_others() {
        let parse = |text: &str| event(serde_json::from_str(text).unwrap());
        let time = r#""timestamp": {"seconds": 1, "microseconds": 2}"#;
        assert_eq!(parse(&format!(r#"{{{time}, "event": "RESUME"}}"#)), Event::Resume);
        assert_eq!(
            parse(&format!(
                r#"{{{time}, "event": "SHUTDOWN", "data": {{"guest": true, "reason": "guest-shutdown"}}}}"#
            )),
            Event::Shutdown { guest: true, reason: "guest-shutdown".into() }
        );
        // A reason that this crate does not know is still a reason.
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
            Event::DeviceTrayMoved { open: true }
        );
        let spice = r#"{"event": "SPICE_INITIALIZED", "data": {
            "server": {"auth": "spice", "port": "5900", "family": "ipv4", "host": "0.0.0.0"},
            "client": {"port": "40000", "channel-type": 1, "connection-id": 7, "family": "ipv4", "host": "10.0.0.7",
                "channel-id": 0, "tls": false}}}"#;
        let viewer = Viewer { host: "10.0.0.7".into(), port: "40000".into(), channel_type: Some(1) };
        assert_eq!(parse(spice), Event::ViewerCame { client: viewer.clone() });
        let vnc = r#"{"event": "VNC_DISCONNECTED", "data": {
            "server": {"auth": "vnc", "family": "ipv4", "service": "5900", "host": "0.0.0.0", "websocket": false},
            "client": {"family": "ipv4", "service": "40000", "host": "10.0.0.7", "websocket": false}}}"#;
        assert_eq!(parse(vnc), Event::ViewerWent { client: Viewer { channel_type: None, ..viewer } });
        assert_eq!(parse(&format!(r#"{{"event": "POWERDOWN", {time}}}"#)), Event::Powerdown);
        assert_eq!(parse(r#"{"event": "RTC_CHANGE", "data": {"offset": 78}}"#), Event::Other);
        assert_eq!(parse(r#"{"event": "FROM_THE_FUTURE"}"#), Event::Other);
    }

    #[test]
    fn a_refusal_has_qemus_words() {
        let message = json!({ "error": { "class": "GenericError", "desc": "CPU hotplug is off" }, "id": 1 });
        let error = answer::<qapi::qmp::cont>(message).unwrap_err();
        assert_eq!(error.to_string(), "QEMU refused cont: CPU hotplug is off");
    }
}
