//! Faults that a test orders of the cluster that it has for itself.
//!
//! | the line | what happens |
//! |---|---|
//! | `fault kill NAME` | the component is killed, and stays away |
//! | `fault start NAME [ARGUMENT ...]` | it is started again, with these arguments too; if it is containerd, the next order waits until it answers |
//! | `fault crash` | the node loses its power: the kubelet, containerd and all that runs in containers is killed, and stays away |

use std::fs;
use std::io::BufRead;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::mpsc;

use crate::components::Components;
use crate::node;

/// What the line begins with, on the supervisor's standard input.
pub const ORDER: &str = "fault ";

/// The kubelet needs it when it starts.
const CONTAINERD: &str = "containerd";

/// A fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Kills a component.
    Kill(String),
    /// Starts a component that was killed.
    Start { name: String, more: Vec<String> },
    /// The node loses its power.
    Crash,
}

impl Fault {
    /// Reads a line without [`ORDER`].
    pub fn read(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        Ok(match words.as_slice() {
            ["kill", name] => Self::Kill((*name).to_owned()),
            ["start", name, more @ ..] => {
                Self::Start { name: (*name).to_owned(), more: more.iter().map(|word| (*word).to_owned()).collect() }
            }
            ["crash"] => Self::Crash,
            _ => bail!("`{line}` is no fault"),
        })
    }

    /// Lets it happen.
    pub async fn happen(self, components: &mut Components) -> Result<()> {
        match self {
            Self::Kill(name) => components.kill(&name).await,
            Self::Start { name, more } => {
                components.start_again(&name, &more)?;
                if name == CONTAINERD { node::wait_for_containerd(components).await } else { Ok(()) }
            }
            Self::Crash => {
                for name in ["kubelet", CONTAINERD] {
                    components.kill(name).await?;
                }
                kill_containers(components)
            }
        }
    }
}

/// Kills all processes of the cluster's namespace but its first one, this one and the components.
fn kill_containers(components: &Components) -> Result<()> {
    let kept: Vec<u32> = components.processes().chain([1, std::process::id()]).collect();
    for entry in fs::read_dir("/proc").context("reading /proc")? {
        let name = entry.context("reading /proc")?.file_name();
        let Some(id) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let process = i32::try_from(id).ok().and_then(Pid::from_raw).filter(|_| !kept.contains(&id));
        if let Some(process) = process {
            // It may have ended meanwhile.
            let _ = kill_process(process, Signal::KILL);
        }
    }
    Ok(())
}

/// The faults that are ordered on standard input from now on.
pub fn ordered() -> mpsc::UnboundedReceiver<Result<Fault>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let fault = line.context("reading faults").and_then(|line| Fault::read(&line));
            if sender.send(fault).is_err() {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::Fault;

    #[test]
    fn a_line_is_a_fault_or_an_error() {
        let start = |more: &[&str]| Fault::Start {
            name: "kubelet".to_owned(),
            more: more.iter().map(|word| (*word).to_owned()).collect(),
        };
        assert_eq!(Fault::read("kill etcd").unwrap(), Fault::Kill("etcd".to_owned()));
        assert_eq!(Fault::read("start kubelet").unwrap(), start(&[]));
        assert_eq!(Fault::read("start kubelet --v=2 --x").unwrap(), start(&["--v=2", "--x"]));
        assert_eq!(Fault::read("crash").unwrap(), Fault::Crash);
        for wrong in ["", "kill", "kill a b", "start", "crash now", "stop kubelet"] {
            assert!(Fault::read(wrong).is_err(), "{wrong}");
        }
    }
}
