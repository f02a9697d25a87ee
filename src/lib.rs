//! vm-operator runs QEMU/KVM virtual machines in Kubernetes Pods.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod api;
pub mod config;
pub mod observed;
pub mod plan;
pub mod render;
pub mod runner_config;
pub mod status;
#[cfg(test)]
mod test_support;
#[cfg(feature = "runner")]
pub mod runner;
