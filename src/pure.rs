//! What decides: functions without a client, a clock, files or randomness. They get time, random values and texts as arguments, so each is tested
//! with tables.
//!
//! The crate's root has these modules under their own names.

pub mod advice;
pub mod allowed;
pub mod answers;
pub mod api;
pub mod assignment;
pub mod claims;
pub mod config;
pub mod entries;
pub mod exchange;
pub mod explain;
#[cfg(feature = "cli")]
pub mod import;
pub mod jinja;
pub mod kvm;
#[cfg(feature = "schema")]
pub mod lint;
pub mod mask;
pub mod object;
pub mod observed;
pub mod ownership;
pub mod people;
pub mod plan;
pub mod power;
pub mod relay;
pub mod render;
pub mod runner_config;
pub mod schedule;
pub mod status;
pub mod user_data;
pub mod yaml;
