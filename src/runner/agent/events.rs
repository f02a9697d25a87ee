//! What the agent does when QEMU reports something.

use super::{Agent, GUEST_AGENT_PORT, LOGIN_AGENT_PORT};
use crate::runner::{
    login::LoginState,
    operations::Input,
    qmp::{Error as QmpError, Event},
    session::Session,
};

impl Agent {
    /// Takes up what QEMU reports.
    ///
    /// # Errors
    /// If the connection is broken.
    pub(super) async fn process_event(&mut self, event: Event, session: &mut Session) -> Result<(), QmpError> {
        match &event {
            Event::Resume => self.go_on(session),
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
            }
            Event::VserportChange { id, open } if id == GUEST_AGENT_PORT => {
                // A guest agent that closes its port says nothing about the guest: the package may be upgraded.
                if *open {
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
            Event::ViewerConnected { client } => self.observation.add_viewer(client.clone()),
            Event::ViewerDisconnected { client } => {
                self.observation.viewers.retain(|viewer| !viewer.is_same_connection(client));
            }
            // The machine role writes QEMU's end, because it knows whether the runner has received SIGTERM.
            Event::Shutdown { .. } => {}
            // These are for the operations alone, or for the machine role.
            Event::Stop
            | Event::BalloonChange { .. }
            | Event::VserportChange { .. }
            | Event::BlockIoError { .. }
            | Event::GuestPanicked {}
            | Event::Watchdog {}
            | Event::DeviceDeleted { .. }
            | Event::DeviceTrayMoved { .. }
            | Event::NetdevVhostUserConnected { .. }
            | Event::NetdevVhostUserDisconnected { .. }
            | Event::Other => {}
        }
        self.operate(Input::Event(event), session).await
    }
}
