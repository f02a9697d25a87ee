//! What integration tests share.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, reason = "this is test code")]

pub mod broken_sets;
pub mod cluster;
pub mod managed_namespace;
pub mod manager;
pub mod proxy;
pub mod requests;
#[cfg(feature = "dev")]
pub mod terminal;
#[cfg(feature = "dev")]
pub mod webhook;
