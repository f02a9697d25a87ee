//! What the agent does when QEMU reports something.

use tokio::time::Instant;
use tracing::debug;

use super::{Agent, DISK_IS_MENDED, GUEST_AGENT_PORT, LOGIN_AGENT_PORT};
use crate::runner::{changes::Change, login::LoginState, qmp::Event, session::Session};

impl Agent {
    /// Takes up what QEMU reports.
    pub(super) async fn process_event(&mut self, event: Event, session: &mut Session) {
        match event {
            Event::Resume => {
                (self.observation.is_executing, self.observation.panic) = (Some(true), None);
                self.go_on(session);
                session.disk_mended_at =
                    (!self.observation.devices.is_empty()).then(|| Instant::now() + DISK_IS_MENDED);
            }
            Event::Stop => {
                if let Err(error) = self.process_stop(session).await {
                    debug!(%error, "QEMU's monitor");
                }
            }
            Event::Powerdown => {
                // The machine role presses the power button several times.
                let resource = self.options.resource.clone();
                session.forced_stop.get_or_insert_with(|| tokio::spawn(async move { resource.stop_forced().await }));
            }
            Event::Reset { .. } => {
                if let Some(question) = session.guest_question.take() {
                    question.abort();
                }
                self.observation.os_info = None;
                // A guest that boots reads the hardware's clock.
                self.forget_clock(session);
                // It is not paused because somebody wants that.
                if self.observation.panic.is_some()
                    && !session.actual.orders.paused
                    && let Err(error) = self.continue_guest(session).await
                {
                    debug!(%error, "QEMU's monitor");
                }
                self.note_boot(session).await;
            }
            Event::BalloonChange { actual } => self.observation.ram = actual,
            Event::VserportChange { id, open } if id == GUEST_AGENT_PORT => {
                // A guest agent that closes its port says nothing about the guest: the package may be upgraded.
                if open {
                    self.ask_guest_agent(session);
                }
            }
            Event::VserportChange { id, open } if id == LOGIN_AGENT_PORT => {
                // A login agent that opens its port sends a greeting.
                if !open {
                    self.observation.login = LoginState::default();
                } else if session.login.is_none() {
                    session.login = self.connect_login().await;
                }
            }
            Event::ViewerConnected { client } => self.observation.add_viewer(client),
            Event::ViewerDisconnected { client } => {
                self.observation.viewers.retain(|viewer| !viewer.is_same_connection(&client));
            }
            // The guest has opened a tray that it had locked, so the CD can be changed now. Otherwise it may open trays as it likes.
            Event::DeviceTrayMoved { id, open: true } if session.waits_for(&id) => {
                self.apply_where(session, Change::waits_for_media).await;
            }
            Event::DeviceDeleted { .. } => {
                if let Err(error) = self.query_hardware(session).await {
                    debug!(%error, "QEMU's monitor");
                }
            }
            // The machine role writes QEMU's end, because it knows whether the runner has received SIGTERM.
            Event::Shutdown { .. } => {}
            Event::VserportChange { .. }
            | Event::BlockIoError { .. }
            | Event::GuestPanicked {}
            | Event::Watchdog {}
            | Event::DeviceTrayMoved { .. }
            | Event::NetdevVhostUserConnected { .. }
            | Event::NetdevVhostUserDisconnected { .. }
            | Event::Other => {}
        }
    }
}
