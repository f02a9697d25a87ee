//! The steps in which QEMU changes the CD in a drive of the running VM.

use tracing::debug;

use super::{
    cd::Medium,
    device::DeviceId,
    qmp::{Command, Error as QmpError, Qmp},
};
use crate::runner_config::digest;

/// Inserts a CD. QEMU opens it before the drive is touched, so that a CD that can't be opened leaves the former one in the drive.
///
/// # Errors
/// If QEMU refuses a step.
pub async fn insert(
    monitor: &mut Qmp,
    drive: DeviceId,
    medium: &Medium,
    former: Option<String>,
) -> Result<(), QmpError> {
    let node = node_name(drive, medium);
    // One that an agent has opened and not inserted.
    close_image(monitor, node.clone()).await;
    monitor.execute(&Command::BlockdevAdd(medium.node(&node))).await?;
    if let Err(error) = exchange(monitor, drive, &node).await {
        close_image(monitor, node).await;
        return Err(error);
    }
    if let Some(former) = former {
        close_image(monitor, former).await;
    }
    Ok(())
}

/// Takes out the CD in a drive, whose node is `former`.
///
/// # Errors
/// If QEMU refuses a step.
pub async fn eject(monitor: &mut Qmp, drive: DeviceId, former: String) -> Result<(), QmpError> {
    take_out(monitor, drive).await?;
    monitor.execute(&Command::BlockdevCloseTray { id: drive }).await?;
    close_image(monitor, former).await;
    Ok(())
}

/// Whether a step failed because the guest has locked the tray.
pub fn is_locked(error: &QmpError) -> bool {
    let steps = ["blockdev-open-tray", "blockdev-remove-medium"];
    matches!(error, QmpError::Refused { command, .. } if steps.contains(&command.as_str()))
}

async fn exchange(monitor: &mut Qmp, drive: DeviceId, node: &str) -> Result<(), QmpError> {
    take_out(monitor, drive).await?;
    monitor.execute(&Command::BlockdevInsertMedium { id: drive, node_name: node.to_owned() }).await?;
    monitor.execute(&Command::BlockdevCloseTray { id: drive }).await?;
    Ok(())
}

/// Opens the tray and takes out what is in it. If the guest has locked the tray, QEMU asks the guest to open it, and refuses
/// (<https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html#command-QMP-block.blockdev-open-tray>).
async fn take_out(monitor: &mut Qmp, drive: DeviceId) -> Result<(), QmpError> {
    monitor.execute(&Command::BlockdevOpenTray { id: drive, force: false }).await?;
    monitor.execute(&Command::BlockdevRemoveMedium { id: drive }).await?;
    Ok(())
}

/// Closes an image that is in no drive any more.
async fn close_image(monitor: &mut Qmp, node: String) {
    let name = node.clone();
    if let Err(error) = monitor.execute(&Command::BlockdevDel { node_name: node }).await {
        debug!(node = name, %error, "cannot close an image");
    }
}

/// The name of the node of a CD in a drive. It has at most 31 characters, as QEMU wants it.
fn node_name(drive: DeviceId, medium: &Medium) -> String {
    format!("{drive}-{}", digest(medium.text(), 8))
}
