//! Generated declarations: values for every property that a definition has, over the pure core. Set, changed,
//! taken out again, and several at once.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is test code")]

#[path = "../support/declared.rs"]
mod declared;
#[path = "../support/stored.rs"]
mod stored;

// Pools: the same of each property of a pool, with the VMs that it makes.
mod pools;
// VMs: each property has an effect, comes to rest, and can be taken back.
mod vms;
