//! The program inside each Pod: drives QEMU and reports the guest's state.
pub mod cloud_init;
pub mod command;
pub mod config;
pub mod files;
pub mod lines;
pub mod qmp;
