//! `vm-runner ctl stats`: prints the figures of the running guest, once or again and again.

use std::{
    io,
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::{sync::watch, time::timeout};

use super::{
    control,
    ctl::{Reply, Task},
    runtime_dir::RuntimeDir,
};

/// The time after which the guest has told of its memory.
const FIRST: Duration = Duration::from_secs(2);
/// The longest time for which figures are printed. A container runtime does not always end what `kubectl exec` has started when kubectl is gone.
const LONGEST: Duration = Duration::from_mins(10);

/// Why no figures are printed any more.
#[derive(Debug)]
pub enum Trouble {
    /// No runner could be asked.
    NoRunner(io::Error),
    /// QEMU does not say.
    Refused(String),
    /// Nobody reads them.
    Output(io::Error),
}

/// Prints a sample, or one every `follow` seconds until nobody reads them or the program is to end, but not longer than [`LONGEST`].
///
/// # Errors
/// If no VM runs, or nobody reads the samples.
pub async fn print(
    runtime: &RuntimeDir,
    follow: Option<u64>,
    mut term: watch::Receiver<bool>,
    print: impl Fn(&str) -> io::Result<()>,
) -> Result<(), Trouble> {
    let print = |line: &str| print(line).map_err(Trouble::Output);
    let begin = Instant::now();
    let mut sample = ask(runtime).await;
    let end = loop {
        let line = match sample {
            Ok(line) if follow.is_some() => print(&line),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        if line.is_err() {
            break line;
        }
        let pause = follow.map_or(FIRST, Duration::from_secs);
        if timeout(pause, term.wait_for(|is_terminated| *is_terminated)).await.is_ok()
            || (follow.is_some() && begin.elapsed() > LONGEST)
        {
            break Ok(());
        }
        sample = ask(runtime).await;
        if follow.is_none() {
            break sample.and_then(|line| print(&line));
        }
    };
    // The guest may have ended; then there is nobody to be told.
    let _ = control::carry_out(runtime, Task::EndOfStats).await;
    end
}

async fn ask(runtime: &RuntimeDir) -> Result<String, Trouble> {
    match control::carry_out(runtime, Task::Stats { follow: None }).await.map_err(Trouble::NoRunner)? {
        Reply::Stats(stats) => Ok(format!("{}\n", json!(stats))),
        Reply::Refused(refusal) => Err(Trouble::Refused(refusal)),
        Reply::Done | Reply::Status(_) | Reply::Picture(_) => Err(Trouble::Refused("it has no figures".into())),
    }
}
