//! What integration tests share.

pub mod cluster;
