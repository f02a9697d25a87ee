//! What the runner does with a QEMU that runs: the operations, and the steps in which each is carried out. Pure.
//!
//! Three decide which: [`super::changes`] compares the configuration with the VM, [`super::lifecycle`] has the start, the failures and the end
//! of the guest, and [`super::ctl`] what a person asks for in the VM's container.

use super::{
    config::Password,
    go_on::{GuestState, Who, permission},
    qmp::{Command, CpuSlot, Secret},
};
use crate::{
    api::Quantity,
    render::command_line::{DeviceId, Medium},
    runner_config::digest,
};

/// An operation. There is none before QEMU listens on its monitors: until then the machine role prepares files and starts programs. From then on
/// the guest is in one of the stages of this table. *waits*: it is carried out when the guest is in a stage that allows it.
///
/// After its shutdown only `Quit` and `Kill` are.
///
/// | operation | has not run | executes | a disk has stopped it | has panicked, hangs | is stopped | powers down |
/// |---|---|---|---|---|---|---|
/// | `Plug`, `Unplug`, `Balloon`, `Password`, `Insert`, `Eject`, `Grow`, `Reset` | yes | yes | yes | yes | yes | yes |
/// | `Pause` | waits | yes | waits | yes | yes | waits |
/// | `GoOn` | [`super::go_on`] | | [`super::go_on`] | [`super::go_on`] | [`super::go_on`] | as before it |
/// | `Reboot` | waits | yes | waits | waits | waits | as before it |
/// | `Powerdown` | | yes | yes | | yes | yes |
/// | `Quit`, `Kill` | yes | yes | yes | yes | yes | yes |
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Plugs a CPU.
    Plug {
        /// The name of the CPU's device.
        id: String,
        /// The slot.
        slot: CpuSlot,
    },
    /// Asks the guest to release a CPU.
    Unplug {
        /// The name of the CPU's device.
        id: String,
    },
    /// Changes the guest's memory, in bytes.
    Balloon(u64),
    /// Sets the password of the display.
    Password(DisplayPassword),
    /// Puts a CD into a drive, in the place of what is in it.
    Insert {
        /// The drive's slot.
        slot: u32,
        /// The drive as people know it.
        drive: String,
        /// The CD.
        medium: Medium,
        /// The node of what is in the drive.
        former: Option<String>,
    },
    /// Takes a CD out of its drive.
    Eject {
        /// The drive's slot.
        slot: u32,
        /// The drive as people know it.
        drive: String,
        /// The node of what is in the drive.
        former: String,
    },
    /// Makes a disk larger.
    Grow {
        /// The disk as people know it.
        disk: String,
        /// Its node.
        node: String,
        /// Its new size.
        bytes: u64,
    },
    /// Stops the guest's CPUs.
    Pause,
    /// Lets the guest execute.
    GoOn(Who),
    /// Presses the reset button.
    Reset,
    /// Asks the guest's agent to reboot the guest.
    Reboot,
    /// Presses the power button.
    Powerdown,
    /// Ends QEMU.
    Quit,
    /// Kills QEMU. Only the machine role can, because QEMU is its child.
    Kill,
}

/// The password of a display.
#[derive(Clone, Debug, PartialEq)]
pub struct DisplayPassword {
    /// The display's protocol: `spice` or `vnc`.
    pub protocol: &'static str,
    /// The password.
    pub password: Password,
}

/// A step of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A command. If QEMU refuses it, the operation has failed.
    Must(Command),
    /// A command that QEMU may refuse.
    May(Command),
    /// A command that QEMU refuses if the guest has locked the tray. The operation begins again when the guest opens it.
    Tray(Command),
    /// The guest must release the device, which [`Event::DeviceDeleted`](super::qmp::Event::DeviceDeleted) reports.
    Release,
    /// QEMU's guest agent is asked to reboot the guest.
    AskGuest,
}

impl Step {
    /// The command for QEMU.
    pub fn command(&self) -> Option<&Command> {
        match self {
            Self::Must(command) | Self::May(command) | Self::Tray(command) => Some(command),
            Self::Release | Self::AskGuest => None,
        }
    }
}

impl Operation {
    /// Whether the operation can be carried out now, as the table says.
    pub fn is_allowed(&self, guest: GuestState, powers_down: bool) -> bool {
        use GuestState::{Executes, Hung, Panicked, Stopped, StoppedByDisk};
        match self {
            Self::Quit | Self::Kill => true,
            _ if guest == GuestState::ShutDown => false,
            Self::Plug { .. }
            | Self::Unplug { .. }
            | Self::Balloon(_)
            | Self::Password(_)
            | Self::Insert { .. }
            | Self::Eject { .. }
            | Self::Grow { .. }
            | Self::GoOn(_)
            | Self::Reset => true,
            Self::Pause => !powers_down && matches!(guest, Executes | Panicked | Hung | Stopped),
            Self::Reboot => guest == Executes,
            Self::Powerdown => matches!(guest, Executes | StoppedByDisk | Stopped),
        }
    }

    /// The steps, in order. `guest` is what the guest does.
    pub fn steps(&self, guest: GuestState) -> Vec<Step> {
        match self {
            Self::Plug { id, slot: CpuSlot { type_, properties, occupant: _ } } => {
                vec![Step::Must(Command::DeviceAdd {
                    driver: type_.clone(),
                    id: id.clone(),
                    properties: properties.clone(),
                })]
            }
            Self::Unplug { id } => {
                vec![Step::Must(Command::DeviceDel { id: id.clone() }), Step::Release]
            }
            Self::Balloon(value) => vec![Step::Must(Command::Balloon { value: *value })],
            &Self::Password(DisplayPassword { protocol, password: Password { ref secret, ref expiry } }) => vec![
                Step::Must(Command::SetPassword { protocol, password: Secret(secret.clone()) }),
                // The first one removes the time.
                Step::Must(Command::ExpirePassword { protocol, time: expiry.clone() }),
            ],
            Self::Insert { slot, drive: _, medium, former } => {
                let (id, node_name) = (DeviceId::Cd(*slot), node_name(*slot, medium));
                // QEMU opens the image before the drive is touched, so that a CD that can't be opened leaves the former one in the drive.
                let open = [
                    // One that an agent has opened and not inserted.
                    Step::May(Command::BlockdevDel { node_name: node_name.clone() }),
                    Step::Must(Command::BlockdevAdd(medium.node(&node_name))),
                ];
                let insert = [
                    Step::Must(Command::BlockdevInsertMedium { id, node_name }),
                    Step::Must(Command::BlockdevCloseTray { id }),
                ];
                let close = former.iter().map(|former| Step::May(Command::BlockdevDel { node_name: former.clone() }));
                open.into_iter().chain(take_out(id)).chain(insert).chain(close).collect()
            }
            Self::Eject { slot, drive: _, former } => {
                let id = DeviceId::Cd(*slot);
                let close = [
                    Step::Must(Command::BlockdevCloseTray { id }),
                    Step::May(Command::BlockdevDel { node_name: former.clone() }),
                ];
                take_out(id).into_iter().chain(close).collect()
            }
            Self::Grow { disk: _, node, bytes } => {
                vec![Step::Must(Command::BlockResize { node_name: node.clone(), size: *bytes })]
            }
            Self::Pause => vec![Step::Must(Command::Stop)],
            Self::GoOn(who) => {
                let step = match who {
                    // QEMU keeps the press of the power button until the guest runs.
                    Who::Powerdown => Step::May,
                    Who::Agent | Who::NoAgent | Who::Spec | Who::Disk | Who::Panic | Who::Person => Step::Must,
                };
                permission(*who, guest).map(Command::Cont).map(step).into_iter().collect()
            }
            Self::Reset => vec![Step::Must(Command::SystemReset)],
            Self::Reboot => vec![Step::AskGuest],
            Self::Powerdown => vec![Step::Must(Command::SystemPowerdown)],
            Self::Quit => vec![Step::Must(Command::Quit)],
            Self::Kill => Vec::new(),
        }
    }

    /// What is done after a step has failed.
    pub fn undo(&self) -> Vec<Step> {
        match self {
            Self::Insert { slot, drive: _, medium, former: _ } => {
                vec![Step::May(Command::BlockdevDel { node_name: node_name(*slot, medium) })]
            }
            Self::Plug { .. }
            | Self::Unplug { .. }
            | Self::Balloon(_)
            | Self::Password(_)
            | Self::Eject { .. }
            | Self::Grow { .. }
            | Self::Pause
            | Self::GoOn(_)
            | Self::Reset
            | Self::Reboot
            | Self::Powerdown
            | Self::Quit
            | Self::Kill => Vec::new(),
        }
    }

    /// The CD drive that it changes.
    pub fn drive(&self) -> Option<DeviceId> {
        match self {
            Self::Insert { slot, .. } | Self::Eject { slot, .. } => Some(DeviceId::Cd(*slot)),
            Self::Plug { .. }
            | Self::Unplug { .. }
            | Self::Balloon(_)
            | Self::Password(_)
            | Self::Grow { .. }
            | Self::Pause
            | Self::GoOn(_)
            | Self::Reset
            | Self::Reboot
            | Self::Powerdown
            | Self::Quit
            | Self::Kill => None,
        }
    }

    /// What to tell a person if QEMU refuses it; `None` if it matters only to the log: a custom QEMU template, for example, may have no balloon.
    pub fn problem(&self) -> Option<String> {
        match self {
            Self::Insert { slot: _, drive, medium, former: _ } => Some(not_inserted(medium.text(), drive)),
            Self::Eject { slot: _, drive, former: _ } => {
                Some(format!("the CD can't be taken out of the CD drive {drive}"))
            }
            Self::Grow { disk, node: _, bytes } => {
                let size = Quantity::with_unit(*bytes);
                Some(format!("the disk {disk} can't grow to {size} while the guest runs, but at its next start"))
            }
            Self::Pause => Some("the guest can't be paused".into()),
            Self::GoOn(_) => Some("the guest can't go on".into()),
            Self::Reboot => Some("the guest can't be asked to reboot".into()),
            Self::Plug { .. }
            | Self::Unplug { .. }
            | Self::Balloon(_)
            | Self::Password(_)
            | Self::Reset
            | Self::Powerdown
            | Self::Quit
            | Self::Kill => None,
        }
    }
}

/// What to tell a person about a CD that is not in its drive.
pub fn not_inserted(text: &str, drive: &str) -> String {
    format!("{text} can't be inserted into the CD drive {drive}")
}

/// Opens the tray and takes out what is in it. If the guest has locked the tray, QEMU asks the guest to open it, and refuses
/// (<https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html#command-QMP-block.blockdev-open-tray>).
fn take_out(id: DeviceId) -> [Step; 2] {
    [Step::Tray(Command::BlockdevOpenTray { id, force: false }), Step::Tray(Command::BlockdevRemoveMedium { id })]
}

/// The name of the node of a CD in a drive. It has at most 31 characters, as QEMU wants it.
fn node_name(slot: u32, medium: &Medium) -> String {
    format!("{}-{}", DeviceId::Cd(slot), digest(medium.text(), 8))
}
