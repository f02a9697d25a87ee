//! What a VM's spec wants when its guest fails.

use crate::{
    api::{OnPanic, WatchdogAction},
    runner_config::VmSection,
};

/// How a guest has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panic {
    /// Its kernel has panicked.
    Kernel,
    /// Its watchdog was not fed in time.
    Watchdog,
}

/// What is done then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// The VM is reset.
    Reset,
    /// QEMU is ended, and the VM stays down.
    End,
    /// The guest stays paused.
    Keep,
    /// The guest goes on.
    GoOn,
}

impl Reaction {
    /// What QEMU itself does: all but the last is left to the runner.
    pub fn by_qemu(self) -> &'static str {
        match self {
            Self::Reset | Self::End | Self::Keep => "pause",
            Self::GoOn => "none",
        }
    }
}

impl From<WatchdogAction> for Reaction {
    fn from(action: WatchdogAction) -> Self {
        match action {
            WatchdogAction::Reset => Self::Reset,
            WatchdogAction::Poweroff => Self::End,
            WatchdogAction::Pause => Self::Keep,
            WatchdogAction::None => Self::GoOn,
        }
    }
}

/// What the VM's spec wants for each. `None`: there is no such device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reactions {
    pub(crate) on_panic: Option<OnPanic>,
    pub(crate) watchdog: Option<WatchdogAction>,
}

impl Reactions {
    /// Those of a VM.
    pub fn of(vm: &VmSection) -> Self {
        Self { on_panic: vm.on_panic, watchdog: vm.watchdog.map(|watchdog| watchdog.action) }
    }

    /// With a panic device alone.
    #[cfg(test)]
    pub fn on(on_panic: OnPanic) -> Self {
        Self { on_panic: Some(on_panic), watchdog: None }
    }

    /// When the watchdog is not fed. Without an action of its own, that of a panic.
    pub fn watchdog(self) -> Option<Reaction> {
        self.to(Panic::Watchdog).map(|(reaction, _)| reaction)
    }

    /// What is done, and the field of the spec that says so.
    pub fn to(self, panic: Panic) -> Option<(Reaction, &'static str)> {
        let by_watchdog = self.watchdog.filter(|_| panic == Panic::Watchdog).map(|action| {
            let field = match action {
                WatchdogAction::Reset => "watchdog.action: reset",
                WatchdogAction::Poweroff => "watchdog.action: poweroff",
                WatchdogAction::Pause => "watchdog.action: pause",
                WatchdogAction::None => "watchdog.action: none",
            };
            (action.into(), field)
        });
        by_watchdog.or_else(|| {
            let on_panic = self.on_panic?;
            let field = match on_panic {
                OnPanic::Restart => "onPanic: restart",
                OnPanic::Stop => "onPanic: stop",
                OnPanic::Keep => "onPanic: keep",
            };
            Some((WatchdogAction::from(on_panic).into(), field))
        })
    }

    /// Whether one of them ends the guest.
    pub fn may_end(self) -> bool {
        [Panic::Kernel, Panic::Watchdog]
            .into_iter()
            .any(|panic| self.to(panic).is_some_and(|(it, _)| it == Reaction::End))
    }
}
