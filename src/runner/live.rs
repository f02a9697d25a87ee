//! Carries out a change in the running QEMU.

use std::path::Path;

use super::{
    cd_drive,
    changes::{Actual, Change, DisplayPassword},
    device::DeviceId,
    go_on::{Who, permission},
    guest_agent,
    qmp::{Command, Error as QmpError, Qmp, Secret, Status},
};

/// Carries out a change, and notes in `actual` what cannot be asked of QEMU. `guest_agent` is the socket of the guest agent's port.
///
/// # Errors
/// If QEMU or the guest agent refuses it, or the connection is broken.
pub async fn carry_out(
    change: Change,
    monitor: &mut Qmp,
    guest_agent: &Path,
    actual: &mut Actual,
) -> Result<(), QmpError> {
    match change {
        Change::Plug { id, slot } => monitor.plug(id, slot).await?,
        Change::Unplug { id } => {
            monitor.execute(&Command::DeviceDel { id }).await?;
        }
        Change::Balloon(bytes) => {
            monitor.execute(&Command::Balloon { value: bytes }).await?;
            actual.ram = Some(bytes);
        }
        Change::Password(DisplayPassword { protocol, password }) => {
            let secret = Secret(password.secret.clone());
            monitor.execute(&Command::SetPassword { protocol, password: secret }).await?;
            // This order is necessary: `set_password` removes the expiry.
            monitor.execute(&Command::ExpirePassword { protocol, time: password.expiry.clone() }).await?;
            actual.password = Some(password);
        }
        Change::Insert { slot, drive: _, medium, former } => {
            cd_drive::insert(monitor, DeviceId::Cd(slot), &medium, former).await?;
        }
        Change::Eject { slot, drive: _, former } => {
            cd_drive::eject(monitor, DeviceId::Cd(slot), former).await?;
        }
        Change::Pause => {
            monitor.execute(&Command::Stop).await?;
        }
        Change::GoOn => {
            let status: Status = monitor.query(&Command::QueryStatus).await?;
            if let Some(permission) = permission(Who::Spec, status.into()) {
                monitor.execute(&Command::Cont(permission)).await?;
            }
        }
        Change::Reset(_) => {
            monitor.execute(&Command::SystemReset).await?;
        }
        Change::Reboot(_) => guest_agent::reboot(guest_agent)
            .await
            .map_err(|error| QmpError::Refused { command: "guest-shutdown".into(), reason: error.to_string() })?,
    }
    Ok(())
}
