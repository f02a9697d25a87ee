//! Carries out a change in the running QEMU.

use std::path::Path;

use qapi::qmp;

use super::{
    cd_drive,
    changes::{Actual, Change, DisplayPassword},
    device::DeviceId,
    guest_agent,
    qmp::{Error as QmpError, ExpirePassword, Qmp, SetPassword},
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
            monitor.execute(qmp::device_del { id }).await?;
        }
        Change::Balloon(bytes) => {
            monitor.execute(qmp::balloon { value: i64::try_from(bytes).unwrap_or(i64::MAX) }).await?;
            actual.ram = Some(bytes);
        }
        Change::Password(DisplayPassword { protocol, password }) => {
            monitor.execute(SetPassword { protocol, password: &password.secret }).await?;
            // This order is necessary: `set_password` removes the expiry.
            monitor.execute(ExpirePassword { protocol, time: &password.expiry }).await?;
            actual.password = Some(password);
        }
        Change::Insert { slot, drive: _, medium, former } => {
            cd_drive::insert(monitor, DeviceId::Cd(slot), &medium, former).await?;
        }
        Change::Eject { slot, drive: _, former } => {
            cd_drive::eject(monitor, DeviceId::Cd(slot), former).await?;
        }
        Change::Pause => {
            monitor.execute(qmp::stop {}).await?;
        }
        Change::GoOn => {
            monitor.execute(qmp::cont {}).await?;
        }
        Change::Reset(_) => {
            monitor.execute(qmp::system_reset {}).await?;
        }
        Change::Reboot(_) => guest_agent::reboot(guest_agent)
            .await
            .map_err(|error| QmpError::Refused { command: "guest-shutdown", reason: error.to_string() })?,
    }
    Ok(())
}
