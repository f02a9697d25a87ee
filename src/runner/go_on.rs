//! What the guest does, and who may let it go on when it does not execute. Pure.
//!
//! QEMU's `cont` is sent for different reasons by different parts of the runner, and a guest may stand still for different reasons. This table
//! says which belong together; [`permission`] is the table as code. Nobody can send `cont` without it, because [`Command::Cont`] contains a
//! [`Permission`].
//!
//! | who ([`Who`]) | the guest has not run | a disk has stopped it | it has panicked or hangs | it is stopped |
//! |---|---|---|---|---|
//! | `Agent`: everything is ready for the guest, or a guest that had panicked was reset | yes | | | |
//! | `NoAgent`: no agent has come in time | yes | | | |
//! | `Spec`: the spec does not pause the guest any more, and an agent had paused it | yes: it was reset meanwhile | | | yes |
//! | `Disk`: the disk may work again | | yes | | |
//! | `Panic`: the machine role has reset the guest after its panic | yes | | yes: the reset is still to come | |
//! | `Powerdown`: a guest that stands still does not hear the power button | | yes | | yes |
//! | `Person`: a person has run `vm-runner ctl resume` | yes | yes | yes | yes |
//!
//! A guest that has shut down goes on for nobody: QEMU is ended. A guest that was reset while it stood still counts as one that has not run: QEMU says `prelaunch` of both.
//!
//! [`Command::Cont`]: super::qmp::Command::Cont

use serde::Serialize;

/// What the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestState {
    /// It has not run yet, or was reset while it stood still.
    NotStarted,
    /// It executes.
    Executes,
    /// A disk has stopped it.
    StoppedByDisk,
    /// It has panicked, and is stopped.
    Panicked,
    /// Its watchdog has stopped it.
    Hung,
    /// It has shut down, and QEMU waits for its end.
    ShutDown,
    /// It is stopped otherwise.
    Stopped,
}

/// Who wants the guest to go on. The table in this file says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The agent, which has done what comes before the guest's first instruction: above all it has set the display's password.
    Agent,
    /// The machine role, because there is no agent.
    NoAgent,
    /// The agent, because the VM's spec does not pause the guest any more.
    Spec,
    /// The machine role, because a disk that has stopped the guest may work again.
    Disk,
    /// The machine role, after a panic.
    Panic,
    /// The machine role, which presses the power button.
    Powerdown,
    /// A person in the VM's container.
    Person,
}

/// Leave to send `cont`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Permission {
    /// Only this file makes one.
    #[serde(skip)]
    _private: (),
}

/// Whether the guest may go on. `None`: it stays as it is; one that executes needs no permission.
pub fn permission(who: Who, guest: GuestState) -> Option<Permission> {
    use GuestState::{Executes, Hung, NotStarted, Panicked, ShutDown, Stopped, StoppedByDisk};
    let may = match (who, guest) {
        (_, Executes | ShutDown) => false,
        (Who::Agent | Who::NoAgent, guest) => guest == NotStarted,
        (Who::Spec, guest) => matches!(guest, NotStarted | Stopped),
        (Who::Disk, guest) => guest == StoppedByDisk,
        (Who::Panic, guest) => matches!(guest, NotStarted | Panicked | Hung),
        (Who::Powerdown, guest) => matches!(guest, StoppedByDisk | Stopped),
        (Who::Person, NotStarted | StoppedByDisk | Panicked | Hung | Stopped) => true,
    };
    may.then_some(Permission { _private: () })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_what_the_code_does() {
        use GuestState::{Executes, Hung, NotStarted, Panicked, ShutDown, Stopped, StoppedByDisk};
        let whose = [
            ("Agent", Who::Agent),
            ("NoAgent", Who::NoAgent),
            ("Spec", Who::Spec),
            ("Disk", Who::Disk),
            ("Panic", Who::Panic),
            ("Powerdown", Who::Powerdown),
            ("Person", Who::Person),
        ];
        let columns: [&[GuestState]; 4] = [&[NotStarted], &[StoppedByDisk], &[Panicked, Hung], &[Stopped]];
        for (name, who) in whose {
            assert_eq!([Executes, ShutDown].map(|guest| permission(who, guest)), [None, None], "{name}");
            let row =
                include_str!("go_on.rs").lines().find(|line| line.starts_with(&format!("//! | `{name}`"))).unwrap();
            let cells = row.trim_end_matches('|').split('|').skip(2);
            for (cell, guests) in cells.zip(columns) {
                for guest in guests {
                    let says = cell.trim().starts_with("yes");
                    assert_eq!(permission(who, *guest).is_some(), says, "{name} {guest:?}");
                }
            }
        }
    }
}
