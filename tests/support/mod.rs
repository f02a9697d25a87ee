//! What integration tests share.

pub mod cluster;
pub mod manager;
