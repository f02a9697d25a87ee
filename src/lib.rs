//! vm-operator runs QEMU/KVM virtual machines in Kubernetes Pods.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod api;
pub mod config;
pub mod observed;
pub mod render;
pub mod runner_config;
#[cfg(feature = "runner")]
pub mod runner;
