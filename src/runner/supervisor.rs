//! The command `vm-runner agent`: runs the agent role as a child process, and starts it again at once when it ends.
//!
//! The kubelet waits 10 s and more before it starts a container again
//! (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy>). Until then a guest's report would be out of date.

use std::{
    ffi::OsString,
    io,
    process::ExitStatus,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    sync::watch,
    time::sleep,
};
use tracing::{error, warn};

use crate::process::signals::terminated;

/// An agent that worked for this time is started again at once.
const GOOD_TIME: Duration = Duration::from_secs(10);
/// The pause before an agent that ended sooner is started again: the first one, which doubles each time, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The pauses between the ends and the starts of a program.
#[derive(Debug, Default)]
pub struct Pauses {
    /// The pause after the next agent that ends soon. Zero: the first agent that ends soon is started again at once, too.
    next: Duration,
}

impl Pauses {
    /// The pause after an agent that worked for `time`.
    pub fn after(&mut self, time: Duration) -> Duration {
        if time >= GOOD_TIME {
            self.next = Duration::ZERO;
        }
        let pause = self.next;
        self.next = (pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        pause
    }
}

/// Runs `program` with `arguments` again and again until `term` is true. Then the child gets SIGTERM, and its end is waited for.
///
/// # Errors
/// If the program cannot be started or waited for.
pub async fn supervise(program: &OsString, arguments: &[OsString], term: watch::Receiver<bool>) -> io::Result<()> {
    let mut pauses = Pauses::default();
    loop {
        let begin = Instant::now();
        let mut child = Command::new(program).args(arguments).kill_on_drop(true).spawn()?;
        let status = tokio::select! {
            status = child.wait() => status?,
            () = terminated(term.clone()) => return end(&mut child).await,
        };
        let pause = pauses.after(begin.elapsed());
        report(status, pause);
        tokio::select! {
            () = sleep(pause) => {}
            () = terminated(term.clone()) => return Ok(()),
        }
    }
}

fn report(status: ExitStatus, pause: Duration) {
    let pause_ms = pause.as_millis();
    if status.success() {
        warn!(pause_ms, "the agent has ended; it is started again");
    } else {
        error!(%status, pause_ms, "the agent has failed; it is started again");
    }
}

/// Asks the child to end, and waits for it.
async fn end(child: &mut Child) -> io::Result<()> {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
    if let Some(pid) = pid {
        kill_process(pid, Signal::TERM)?;
    }
    let status = child.wait().await?;
    if !status.success() {
        error!(%status, "the agent has failed while it ended");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::time::timeout;

    use super::*;

    #[test]
    fn an_agent_is_started_again_at_once_unless_it_fails_again_and_again() {
        let mut pauses = Pauses::default();
        let (soon, later) = (Duration::from_secs(1), GOOD_TIME);
        let seen: Vec<u128> = [soon, soon, soon, soon, later, soon].map(|time| pauses.after(time).as_millis()).into();
        assert_eq!(seen, [0, 100, 200, 400, 0, 100]);
        for _ in 0..20 {
            pauses.after(soon);
        }
        assert_eq!(pauses.after(soon), LONGEST_PAUSE);
    }

    #[tokio::test]
    async fn a_child_that_fails_is_replaced_and_the_last_one_ends_well() {
        let directory = tempfile::tempdir().unwrap();
        let script = r#"echo start >>"$0/log"; test $(wc -l <"$0/log") -lt 3 && kill -KILL $$
            trap 'echo term >>"$0/log"; exit 0' TERM; touch "$0/ready"; while :; do sleep 0.01; done"#;
        let arguments = ["-c".into(), script.into(), directory.path().as_os_str().to_owned()];
        let (sender, term) = watch::channel(false);
        let supervised = tokio::spawn(async move { supervise(&"sh".into(), &arguments, term).await });
        let ready = async {
            while !directory.path().join("ready").exists() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(60), ready).await.unwrap();
        sender.send_replace(true);
        timeout(Duration::from_secs(60), supervised).await.unwrap().unwrap().unwrap();
        let log = fs::read_to_string(directory.path().join("log")).unwrap();
        assert_eq!(log, "start\nstart\nstart\nterm\n");
    }
}
