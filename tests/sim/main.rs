//! A deterministic simulation of the manager: its real code against an API server in memory, in one thread and in virtual time.
//!
//! ```text
//!  people ──────────────┐
//!  scheduler, kubelets, │      ┌─ answers ─┐
//!  guests, controllers ─┴▶ API ┤           ├▶ the manager
//!                              └─ watches ─┘
//! ```
//!
//! A seed decides which of the things that are possible happens next, and what goes wrong ([`run`]). After each step the
//! [`invariants`] are checked; when nothing happens any more, the state must be that of a run that nothing disturbed.
//!
//! | variable | what it does |
//! |---|---|
//! | `SIM_SEEDS` | how many seeds `random_scenarios` runs |
//! | `SIM_FIRST` | the first of them |
//! | `SIM_SEED` | `random_scenarios` runs only this seed, and prints what happens; what fails is tried with less, as long as it still fails |
//! | `SIM_STRIDE` | one of so many faults at single requests is tried; 1: each fault at each request of each scenario |
//! | `SIM_SCENARIO` | of the scenarios with faults at single requests only those are run whose name contains this |
//! | `SIM_SAME` | of how many seeds `a_seed_gives_the_same_run_again` compares two runs |
//! | `SIM_STATE` | the objects at the end of a run that fails are printed |
//! | `SIM_LOG` | what the manager logs is printed, filtered as by `RUST_LOG` |
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is test code")]

mod api;
mod invariants;
mod manager;
mod net;
mod people;
mod run;
mod scenarios;
mod sets;
mod situations;
mod world;

/// Prints what the manager logs.
fn log() {
    if let Ok(filter) = std::env::var("SIM_LOG") {
        let _ = tracing_subscriber::fmt().with_env_filter(filter).without_time().try_init();
    }
}

/// The number that a variable has.
fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}
