//! The agent's connections to one QEMU process, and what it waits for.

use std::io;

use serde_json::Value;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep_until},
};
use tracing::warn;

use super::{cd::Answer, control::MediaQuestion, login::LoginPort, operations::Operations, qmp::Qmp};

/// The connections to one QEMU process.
pub struct Session {
    /// QEMU's monitor.
    pub monitor: Qmp,
    /// What is known of the running QEMU, and what is being done with it.
    pub operations: Operations,
    /// The task that asks the guest agent for the guest's operating system.
    pub guest_question: Option<JoinHandle<io::Result<Value>>>,
    /// The task that sets the guest's clock, after the guest stood still.
    pub clock_task: Option<JoinHandle<io::Result<()>>>,
    /// Since when the guest stands still.
    pub stopped_at: Option<Instant>,
    /// The question to the machine role what the CDs are.
    pub media_question: Option<MediaQuestion>,
    /// The port of the login agent.
    pub login: Option<LoginPort>,
    /// The task that ends when a person asks for a forced stop, while the guest powers down.
    pub forced_stop: Option<JoinHandle<()>>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(task) = &self.forced_stop {
            task.abort();
        }
        if let Some(task) = &self.guest_question {
            task.abort();
        }
        if let Some(task) = &self.clock_task {
            task.abort();
        }
    }
}

/// The answer to a question to the guest agent, or `None` if there is no answer. Never returns without a question.
pub async fn guest_answer(question: &mut Option<JoinHandle<io::Result<Value>>>) -> Option<Value> {
    match question {
        Some(handle) => match handle.await {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(error)) => {
                warn!(%error, "the guest agent has opened its port but does not answer");
                None
            }
            Err(_) => None,
        },
        None => futures::future::pending().await,
    }
}

/// How the guest's clock was set. Never returns without a task.
pub async fn clock_answer(task: &mut Option<JoinHandle<io::Result<()>>>) -> io::Result<()> {
    match task {
        Some(handle) => handle.await.unwrap_or_else(|error| Err(io::Error::other(error))),
        None => futures::future::pending().await,
    }
}

/// What the machine role says about the CDs. Never returns without a question.
pub async fn media_answer(question: &mut Option<MediaQuestion>) -> Vec<Answer> {
    match question {
        Some(question) => question.answers().await,
        None => futures::future::pending().await,
    }
}

/// Returns at the time. Never returns without one.
pub async fn time_of(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => futures::future::pending().await,
    }
}

/// Returns when the task has ended. Never returns without a task.
pub async fn ended(task: &mut Option<JoinHandle<()>>) {
    match task {
        Some(task) => drop(task.await),
        None => futures::future::pending().await,
    }
}

/// The login agent's next line. Never returns without a port.
pub async fn login_line(login: &mut Option<LoginPort>) -> io::Result<String> {
    match login {
        Some(port) => port.receive().await,
        None => futures::future::pending().await,
    }
}
