//! vm-operator runs QEMU/KVM virtual machines in Kubernetes Pods.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod api;
#[cfg(feature = "runner")]
pub mod runner;
pub mod runner_config;
