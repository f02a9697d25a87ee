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
pub mod advice;
#[deny(clippy::disallowed_methods)]
pub mod allowed;
#[deny(clippy::disallowed_methods)]
pub mod api;
#[deny(clippy::disallowed_methods)]
pub mod assignment;
#[deny(clippy::disallowed_methods)]
pub mod claims;
#[deny(clippy::disallowed_methods)]
pub mod config;
#[deny(clippy::disallowed_methods)]
pub mod entries;
#[deny(clippy::disallowed_methods)]
pub mod exchange;
#[deny(clippy::disallowed_methods)]
pub mod explain;
#[cfg(feature = "cli")]
#[deny(clippy::disallowed_methods)]
pub mod import;
#[deny(clippy::disallowed_methods)]
pub mod jinja;
#[deny(clippy::disallowed_methods)]
pub mod kvm;
#[cfg(feature = "schema")]
#[deny(clippy::disallowed_methods)]
pub mod lint;
#[deny(clippy::disallowed_methods)]
pub mod mask;
#[deny(clippy::disallowed_methods)]
pub mod object;
#[deny(clippy::disallowed_methods)]
pub mod observed;
#[deny(clippy::disallowed_methods)]
pub mod ownership;
#[deny(clippy::disallowed_methods)]
pub mod people;
#[deny(clippy::disallowed_methods)]
pub mod plan;
#[deny(clippy::disallowed_methods)]
pub mod power;
#[deny(clippy::disallowed_methods)]
pub mod relay;
#[deny(clippy::disallowed_methods)]
pub mod render;
#[deny(clippy::disallowed_methods)]
pub mod runner_config;
#[deny(clippy::disallowed_methods)]
pub mod schedule;
#[deny(clippy::disallowed_methods)]
pub mod status;
#[cfg(test)]
mod test_support;
#[deny(clippy::disallowed_methods)]
pub mod user_data;
#[deny(clippy::disallowed_methods)]
pub mod yaml;

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
