//! QEMU's guest agent: a program in the guest that answers questions about the guest
//! (<https://www.qemu.org/docs/master/interop/qemu-ga-ref.html>).

use std::{
    io,
    path::Path,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};
use tokio::time::timeout;

use super::lines::JsonLines;
use crate::api::report::OSINFO_FIELDS;

/// The time for one attempt. A guest that boots may be slow.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest text in an answer of a guest, in bytes.
const LONGEST_TEXT: usize = 256;
/// The time for the guest agent to answer before the guest is asked to reboot.
const REBOOT_TIMEOUT: Duration = Duration::from_secs(3);
/// The time in which the guest agent refuses a reboot, if it does.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// The number with which a connection for a reboot synchronizes; those of questions are the numbers of their attempts.
const REBOOT_ID: u32 = 1000;
/// The most bytes of an answer to a question of the runner; of all that a guest sends on a connection, four times as many are read. Real answers have
/// some hundred.
const LONGEST_ANSWER: usize = 64 << 10;
/// The same for a person's questions: a guest may have many file systems.
const LONGEST_DETAIL: usize = 1 << 20;
/// Attempts after the guest agent has opened its port.
const ATTEMPTS: u32 = 6;

/// Asks the guest agent for the guest's operating system. Returns the answer of `guest-get-osinfo`, or an empty object if the agent
/// does not have this command or forbids it.
///
/// The port may still contain parts of an earlier connection, so the runner synchronizes first: the marker byte resets the
/// agent's parser, and the runner skips answers until the one with its own number
/// (<https://www.qemu.org/docs/master/interop/qemu-ga-ref.html#command-QGA-qapi-schema.guest-sync-delimited>).
///
/// # Errors
/// If the agent does not answer in several attempts. The error is that of the last attempt.
pub async fn os_info(socket: &Path) -> io::Result<Value> {
    let mut attempt = 1;
    loop {
        let error = match tokio::time::timeout(ANSWER_TIMEOUT, ask(socket, attempt)).await {
            Ok(Ok(info)) => return Ok(info),
            Ok(Err(error)) => error,
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        if attempt == ATTEMPTS {
            return Err(error);
        }
        tokio::time::sleep(Duration::from_secs(1 << attempt.min(5))).await;
        attempt += 1;
    }
}

/// Asks the guest to reboot. The guest agent says nothing to that, unless it refuses.
///
/// # Errors
/// If the agent does not answer, or refuses.
pub async fn reboot(socket: &Path) -> io::Result<()> {
    let mut lines = timeout(REBOOT_TIMEOUT, connect(socket, REBOOT_ID, LONGEST_ANSWER)).await??;
    lines.send(&[], &execute("guest-shutdown", &json!({ "mode": "reboot" }))).await?;
    match timeout(REFUSAL_TIMEOUT, receive(&mut lines)).await {
        Ok(Ok(answer)) if answer.get("error").is_some() => Err(refusal(&answer)),
        // It reboots, and QEMU may have closed the connection.
        _ => Ok(()),
    }
}

/// The number with which a connection for [`set_time`] synchronizes.
const CLOCK_ID: u32 = 3000;

/// Sets the guest's clock: to the node's time, or to what its hardware clock has.
///
/// # Errors
/// If the agent does not answer within 5 seconds, or refuses.
pub async fn set_time(socket: &Path, to_nodes_time: bool) -> io::Result<()> {
    let mut lines = timeout(ANSWER_TIMEOUT, connect(socket, CLOCK_ID, LONGEST_ANSWER)).await??;
    // As late as possible.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    let arguments = if to_nodes_time { json!({ "time": i64::try_from(now).unwrap_or(i64::MAX) }) } else { json!({}) };
    lines.send(&[], &execute("guest-set-time", &arguments)).await?;
    let answer = timeout(ANSWER_TIMEOUT, receive(&mut lines)).await??;
    if answer.get("error").is_some() { Err(refusal(&answer)) } else { Ok(()) }
}

/// Why the agent refuses something.
fn refusal(answer: &Value) -> io::Error {
    let reason = answer["error"]["desc"].as_str().unwrap_or("the guest agent gives no reason");
    let reason: String = reason.chars().filter(|c| !c.is_control()).take(LONGEST_TEXT).collect();
    io::Error::other(reason)
}

/// The number with which a connection for [`details`] synchronizes.
const DETAILS_ID: u32 = 2000;

/// All that the guest agent says about the guest, for a person: its answers under the names `osinfo`, `hostname`, `timezone`, `interfaces`,
/// `users` and `filesystems`, as the guest sent them, and under `refused` why there is none of these. Nothing in them can be trusted.
///
/// # Errors
/// If the agent does not answer within 5 seconds.
pub async fn details(socket: &Path) -> io::Result<Value> {
    let questions = [
        ("osinfo", "guest-get-osinfo"),
        ("hostname", "guest-get-host-name"),
        ("timezone", "guest-get-timezone"),
        ("interfaces", "guest-network-get-interfaces"),
        ("users", "guest-get-users"),
        ("filesystems", "guest-get-fsinfo"),
    ];
    let mut lines = timeout(ANSWER_TIMEOUT, connect(socket, DETAILS_ID, LONGEST_DETAIL)).await??;
    let mut details = json!({});
    for (name, question) in questions {
        lines.send(&[], &execute(question, &json!({}))).await?;
        let mut answer = timeout(ANSWER_TIMEOUT, receive(&mut lines)).await??;
        match (answer["error"].is_null(), answer.get_mut("return")) {
            (true, Some(found)) => details[name] = found.take(),
            _ => {
                let reason = answer["error"]["desc"].as_str().unwrap_or("the guest agent gives no reason");
                details["refused"][name] = json!(reason);
            }
        }
    }
    Ok(details)
}

/// Connects and synchronizes. An answer may have at most `longest` bytes.
async fn connect(socket: &Path, id: u32, longest: usize) -> io::Result<JsonLines> {
    let mut lines = JsonLines::connect_limited(socket, longest, 4 * longest).await?;
    lines.send(&[0xff], &execute("guest-sync-delimited", &json!({ "id": id }))).await?;
    while receive(&mut lines).await?.get("return").and_then(Value::as_u64) != Some(id.into()) {}
    Ok(lines)
}

async fn ask(socket: &Path, id: u32) -> io::Result<Value> {
    let mut lines = connect(socket, id, LONGEST_ANSWER).await?;
    lines.send(&[], &execute("guest-get-osinfo", &json!({}))).await?;
    let mut answer = receive(&mut lines).await?;
    match answer.get("error") {
        // The agent is older than this command, or its configuration forbids it. That it answers says that the guest is up.
        Some(_) => Ok(json!({})),
        // A guest can send anything, also what has no fields.
        None => Ok(documented(answer.get_mut("return").map(Value::take).unwrap_or_default())),
    }
}

/// The answer as far as the documentation goes: known keys with short texts. A guest can send anything, and the status must not depend on
/// it.
fn documented(info: Value) -> Value {
    let Value::Object(info) = info else { return json!({}) };
    let is_text = |text: &str| text.len() <= LONGEST_TEXT && !text.contains(char::is_control);
    let known = info
        .into_iter()
        .filter(|(name, value)| OSINFO_FIELDS.contains(&name.as_str()) && value.as_str().is_some_and(is_text));
    Value::Object(known.collect())
}

fn execute(command: &str, arguments: &Value) -> Value {
    json!({ "execute": command, "arguments": arguments })
}

async fn receive(lines: &mut JsonLines) -> io::Result<Value> {
    lines.receive().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::UnixListener,
    };

    use super::*;

    #[test]
    fn what_a_guest_says_beyond_the_documentation_is_left_out() {
        let nested = (0..120).fold(json!("x"), |value, _| json!([value]));
        let info = json!({ "id": "debian", "name": "x".repeat(LONGEST_TEXT + 1), "version": 12, "pretty-name": nested,
                "variant": "\u{1b}[2J", "colour": "blue" });
        assert_eq!(documented(info), json!({ "id": "debian" }));
        assert_eq!(documented(json!([1])), json!({}));
    }

    #[tokio::test]
    async fn an_answer_that_has_no_fields_is_no_panic() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qga");
        let listener = UnixListener::bind(&socket).unwrap();
        for answer in ["\"return\"", "[]", "7", "null", "{}"] {
            let guest = async {
                let (mut guest, _) = listener.accept().await.unwrap();
                let mut buffer = [0; 512];
                assert_ne!(guest.read(&mut buffer).await.unwrap(), 0);
                guest.write_all(format!("{{\"return\": 1}}\n{answer}\n").as_bytes()).await.unwrap();
                assert_ne!(guest.read(&mut buffer).await.unwrap(), 0);
            };
            let (info, ()) = tokio::join!(ask(&socket, 1), guest);
            assert_eq!(info.unwrap(), json!({}), "{answer}");
        }
    }

    #[tokio::test]
    async fn a_guest_that_sends_without_end_is_not_read_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qga");
        let listener = UnixListener::bind(&socket).unwrap();
        for sent in ["{}\n".repeat(1000), "\n".repeat(4096), format!("{{\"return\": \"{}\"}}\n", "x".repeat(5000))] {
            let guest = async {
                let (mut guest, _) = listener.accept().await.unwrap();
                let mut count = 0;
                while guest.write_all(sent.as_bytes()).await.is_ok() {
                    count += sent.len();
                }
                count
            };
            let (info, count) = tokio::join!(ask(&socket, 1), guest);
            assert_eq!(info.unwrap_err().kind(), io::ErrorKind::InvalidData);
            // What was on its way when the runner stopped is in the kernel's buffers.
            assert!(count < 4 * LONGEST_ANSWER + (1 << 20), "{count}");
        }
    }

    #[tokio::test]
    async fn answers_to_an_earlier_connection_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qga");
        let listener = UnixListener::bind(&socket).unwrap();
        let guest = async {
            let (mut guest, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 512];
            let count = guest.read(&mut buffer).await.unwrap();
            assert_eq!(buffer[0], 0xff);
            assert!(String::from_utf8_lossy(&buffer[1..count]).contains("guest-sync-delimited"));
            guest.write_all(b"{\"return\": 77}\n\xff{\"return\": 1}\n").await.unwrap();
            assert_ne!(guest.read(&mut buffer).await.unwrap(), 0);
            guest.write_all(b"{\"return\": {\"id\": \"debian\"}}\n").await.unwrap();
        };
        let (info, ()) = tokio::join!(ask(&socket, 1), guest);
        assert_eq!(info.unwrap()["id"], "debian");
    }

    #[tokio::test]
    async fn what_the_agent_refuses_is_named_beside_what_it_says() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qga");
        let listener = UnixListener::bind(&socket).unwrap();
        let guest = async {
            let (mut guest, _) = listener.accept().await.unwrap();
            let (read, mut write) = guest.split();
            let mut asked = tokio::io::AsyncBufReadExt::split(tokio::io::BufReader::new(read), b'\n');
            let answers = [
                json!({ "return": DETAILS_ID }),
                json!({ "return": { "id": "debian" } }),
                json!({ "return": { "host-name": "apple" } }),
                json!({ "error": { "class": "GenericError", "desc": "no zone" } }),
                json!([]),
                json!({ "return": [] }),
                json!({ "return": [{ "mountpoint": "/" }] }),
            ];
            for answer in answers {
                assert!(asked.next_segment().await.unwrap().is_some());
                write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        };
        let (found, ()) = tokio::join!(details(&socket), guest);
        let refused = json!({ "timezone": "no zone", "interfaces": "the guest agent gives no reason" });
        let expected = json!({
            "osinfo": { "id": "debian" }, "hostname": { "host-name": "apple" }, "users": [], "filesystems": [{ "mountpoint": "/" }],
            "refused": refused,
        });
        assert_eq!(found.unwrap(), expected);
    }

    #[tokio::test]
    async fn the_clock_is_set_to_the_nodes_time_or_to_that_of_the_hardware() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qga");
        let listener = UnixListener::bind(&socket).unwrap();
        for (to_nodes_time, answer, expected) in [
            (true, r#"{"return": {}}"#, Ok(())),
            (false, r#"{"return": {}}"#, Ok(())),
            (true, r#"{"error": {"desc": "no\u0007"}}"#, Err("no".to_owned())),
        ] {
            let guest = async {
                let (mut guest, _) = listener.accept().await.unwrap();
                let mut buffer = [0; 512];
                assert_ne!(guest.read(&mut buffer).await.unwrap(), 0);
                guest.write_all(format!("{{\"return\": {CLOCK_ID}}}\n").as_bytes()).await.unwrap();
                let count = guest.read(&mut buffer).await.unwrap();
                let asked: Value = serde_json::from_slice(&buffer[..count]).unwrap();
                assert_eq!(asked["execute"], "guest-set-time");
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
                match asked["arguments"]["time"].as_u64() {
                    Some(time) => assert!(to_nodes_time && (time / 1_000_000_000).abs_diff(now) < 60, "{asked}"),
                    None => assert!(!to_nodes_time, "{asked}"),
                }
                guest.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            };
            let (done, ()) = tokio::join!(set_time(&socket, to_nodes_time), guest);
            assert_eq!(done.map_err(|error| error.to_string()), expected);
        }
    }

    #[tokio::test]
    async fn a_reboot_is_done_unless_the_agent_refuses_it() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("qga");
        let listener = UnixListener::bind(&socket).unwrap();
        for (answer, expected) in [("", Ok(())), (r#"{"error": {"desc": "no\u0007"}}"#, Err("no".to_owned()))] {
            let guest = async {
                let (mut guest, _) = listener.accept().await.unwrap();
                let mut buffer = [0; 512];
                assert_ne!(guest.read(&mut buffer).await.unwrap(), 0);
                guest.write_all(format!("{{\"return\": {REBOOT_ID}}}\n").as_bytes()).await.unwrap();
                let count = guest.read(&mut buffer).await.unwrap();
                let asked = String::from_utf8_lossy(&buffer[..count]).into_owned();
                assert!(asked.contains("guest-shutdown") && asked.contains("reboot"), "{asked}");
                guest.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            };
            let (done, ()) = tokio::join!(reboot(&socket), guest);
            assert_eq!(done.map_err(|error| error.to_string()), expected);
        }
    }
}
