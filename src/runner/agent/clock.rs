//! The guest's clock, which stands still with the guest: while it is paused, or while the storage of a disk is full.

use std::{io, time::Duration};

use tracing::{info, warn};

use super::Agent;
use crate::runner::{guest_agent, session::Session};

/// A clock that is behind by less is left alone: guests correct that by themselves.
const MATTERS: Duration = Duration::from_secs(1);

impl Agent {
    /// The guest goes on.
    pub(super) fn go_on(&mut self, session: &mut Session) {
        if let Some(since) = session.stopped_at.take() {
            self.behind += since.elapsed();
            self.set_clock(session);
        }
    }

    /// Sets the guest's clock by the guest agent, if it is behind. Without an agent the report says that it is.
    pub(super) fn set_clock(&mut self, session: &mut Session) {
        let vm = &self.configuration.config.vm;
        // With `vm` the hardware's clock stands still too, because somebody wants that.
        if self.behind < MATTERS || vm.rtc_clock == "vm" {
            return;
        }
        if self.observation.os_info.is_none() {
            self.observation.clock_behind = Some(self.behind.as_secs());
            return;
        }
        // A guest that lives at another time keeps that of its hardware.
        let has_real_time = ["utc", "localtime"].contains(&vm.rtc_base.as_str());
        let socket = self.options.runtime.guest_agent();
        if let Some(task) = session.clock_task.take() {
            task.abort();
        }
        session.clock_task = Some(tokio::spawn(async move { guest_agent::set_time(&socket, has_real_time).await }));
    }

    /// Takes note of how the clock was set.
    pub(super) fn note_clock(&mut self, set: io::Result<()>) {
        let seconds = self.behind.as_secs();
        match set {
            Ok(()) => {
                info!(seconds, "the guest stood still, and its clock is set");
                self.behind = Duration::ZERO;
                self.observation.clock_behind = None;
            }
            Err(error) => {
                warn!(%error, seconds, "the guest stood still, and its clock can't be set");
                self.observation.clock_behind = Some(seconds);
            }
        }
    }

    /// The guest boots anew.
    pub(super) fn forget_clock(&mut self, session: &mut Session) {
        if let Some(task) = session.clock_task.take() {
            task.abort();
        }
        session.stopped_at = None;
        self.behind = Duration::ZERO;
        self.observation.clock_behind = None;
    }
}
