//! When the manager may work: while it holds the lease, or always if no election is wanted.

use std::{fs, sync::Arc};

use anyhow::{Context as _, bail};
use kube::Client;
use tokio::sync::watch;

use super::{
    leader::{Election, Fence, LeaderState},
    random,
    web::{self, Health, Readiness},
};
use crate::metrics::Metrics;

/// How the manager stands for election.
pub struct Candidacy {
    /// A client of its own: nothing else must hold up a renewal.
    pub client: Client,
    /// The namespace of the lease.
    pub namespace: String,
    /// The manager's name in the lease; `None`: one that no other process has.
    pub identity: Option<String>,
}

/// The manager's claim to work. The fence is open while it holds.
pub struct Leadership {
    election: Option<Election>,
    state: Option<watch::Receiver<LeaderState>>,
    health: Arc<Health>,
}

impl Leadership {
    /// Stands for election, or leads at once if there is no candidacy.
    pub fn start(candidacy: Option<Candidacy>, fence: Fence, metrics: Arc<Metrics>, health: Arc<Health>) -> Self {
        let Some(Candidacy { client, namespace, identity }) = candidacy else {
            fence.open();
            metrics.leads(true);
            health.set(web::LEASE, Readiness::Ready("not used".into()));
            return Self { election: None, state: None, health };
        };
        let election = Election::start(client, &namespace, identity.unwrap_or_else(unique_identity), fence, metrics);
        let state = Some(election.state());
        Self { election: Some(election), state, health }
    }

    /// Returns when this manager leads.
    ///
    /// # Errors
    /// If it led and does not any more, or the election ended.
    pub async fn gained(&self) -> anyhow::Result<()> {
        let Some(mut state) = self.state.clone() else {
            self.health.set(web::VMS, Readiness::Waiting("not listed yet".into()));
            return Ok(());
        };
        loop {
            let now = state.borrow_and_update().clone();
            match now {
                LeaderState::Unknown(problem) => {
                    let why = problem.unwrap_or_else(|| "not read yet".into());
                    self.health.set(web::LEASE, Readiness::Waiting(why));
                }
                LeaderState::Standby(leader) => {
                    self.health.set(web::LEASE, Readiness::Ready(format!("standing by for {leader}")));
                    self.health.set(web::VMS, Readiness::Ready("not needed while standing by".into()));
                }
                LeaderState::Leading => {
                    self.health.set(web::LEASE, Readiness::Ready("held".into()));
                    self.health.set(web::VMS, Readiness::Waiting("not listed yet".into()));
                    return Ok(());
                }
                LeaderState::Lost(why) => bail!(why),
            }
            state.changed().await.context("the election ended")?;
        }
    }

    /// Returns when this manager does not lead any more, with the reason.
    pub async fn lost(&self) -> String {
        let Some(mut state) = self.state.clone() else { return std::future::pending().await };
        match state.wait_for(|state| matches!(state, LeaderState::Lost(_))).await.as_deref() {
            Ok(LeaderState::Lost(why)) => why.clone(),
            _ => "the election ended".to_owned(),
        }
    }

    /// Gives the lease back.
    pub async fn resign(self) {
        if let Some(election) = self.election {
            election.resign().await;
        }
    }
}

/// A name that no other process has, and that this program did not have before it was restarted. In the form of client-go.
fn unique_identity() -> String {
    let host = std::env::var("HOSTNAME").or_else(|_| fs::read_to_string("/proc/sys/kernel/hostname"));
    format!("{}_{}", host.unwrap_or_default().trim(), random::random())
}
