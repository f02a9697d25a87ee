//! vm-operator runs QEMU/KVM virtual machines in Kubernetes Pods.
//!
//! One direction, one module for each step:
//!
//! ```text
//!  VirtualMachine ──┐
//!  observed objects ┼─▶ render ─▶ objects ─▶ plan ─▶ apply / delete / wait ─▶ status, events
//!  configuration ───┤   (pure)              (pure)        (the only writes)     (pure, then one write)
//!  templates ───────┘
//! ```
//!
//! Without Cargo features only the pure modules are there, and no client that they could name.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

// Pure: no async, no client, no clock, no randomness.
#[deny(clippy::disallowed_methods)]
mod pure;
pub use pure::*;

#[cfg(test)]
mod test_support;

// Ground: what the programs need of their own process.
#[cfg(feature = "manager")]
pub mod metrics;
pub mod process;

// Reads and writes.
#[cfg(any(feature = "cli", feature = "manager", feature = "web"))]
pub mod actions;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(any(feature = "cli", feature = "manager", feature = "vmctl", feature = "web"))]
pub mod client;
#[cfg(feature = "manager")]
pub mod cluster;
pub mod files;
#[cfg(feature = "local")]
pub mod local;
#[cfg(feature = "manager")]
pub mod manager;
#[cfg(feature = "node-devices")]
pub mod node_devices;
#[cfg(feature = "runner")]
pub mod runner;
#[cfg(feature = "vmctl")]
pub mod vmctl;
#[cfg(feature = "web")]
pub mod web;
