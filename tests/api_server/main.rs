//! The manager on a real API server. The tests play the runner, the kubelet and the people; Pods stay pending.
//!
//! All tests share one control plane, which starts with the first of them and ends with this program. Each test has a
//! namespace of its own, and mostly a manager of its own that manages that namespace. A test that changes what belongs to
//! the whole cluster, or counts the requests of all clients, starts an API server of its own and says why.
//!
//! As many tests run at once as the machine has cores. One module or test: `cargo test --features dev --test api_server NAME`.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this is test code"
)]

#[path = "../support/mod.rs"]
mod support;

// The manifest of a release.
mod install;
mod late;

// What a VM becomes: its objects, its status and events, what is put back and what is refused.
mod reconciler;
// What existing manifests, disks and scripts rely on: images, resources, claims, cloud-init, the runner's configuration.
mod contract;
// Values that the schema refuses, and values that are stored already.
mod values;
// The same files checked without a cluster.
mod offline;
// A namespace of the VM-Operator in Java: its Pods, Services, configuration, runner images.
mod takeover;
// All VMs of two of its releases: taken over, stopped, started, restarted, evicted.
mod takeover_all;
// What `kubectl vm migrate-check` says before.
mod migrate_check;
// The commands of `kubectl vm` for every day.
mod commands;
// What their page shows.
// How `kubectl vm` leads to guests: connections, ssh, Services.
mod reach;
// And those for CPUs, memory, CDs and disks.
mod edit;
// And those that show something of a VM.
mod about;
// And the one that shows what guests use, in a terminal.
mod top;
// And the one that makes VMs.
mod create;
// Pools: VMs for users, for some time.
mod pools;
// vmctl: VMs beside the Pods of Deployments.
mod vmctl;
// Start, stop and restart. Two Pods of one VM never run at the same time.
mod power;
// Who may write VMs gets VMs, and nothing else: a row for each field.
mod hostile;
// What the token of a VM's Pod may do, and how a forced stop reaches its runner.
mod token;
// And that of a legacy runner.
mod legacy_token;
// VMs of release 3.3, whose Pods a StatefulSet makes.
mod former_releases;
// Pod Security Standards, and Pods that wait for devices.
mod pod_security;
// Disks: claims grow, are kept, and belong to one VM.
mod claims;
mod disks;

// The display's secret, made by a person or by the manager.
mod secrets;
// The display's password and the file that a viewer opens.
mod display;
// Causes that `kubectl vm explain` names.
mod explain;

// VMs in Git: what Flux, Argo CD, kubectl and other appliers do to them.
mod gitops;
// Templates that change while the manager runs, 60 ways to break one, the recipes, `kubectl vm diff`.
mod templates;
// What `kubectl vm plan` says of changes, compared with what happens; and restarts in waves.
mod plan;
// VMs for other systems.
mod export;
// What the documentation and the cookbook print is what the programs print.
mod documentation;
// Patches of the form strategicMerge, compared with `kubectl patch`.
mod strategic_merge;
// The API server that the simulation plays, compared with the real one.
mod simulated;
// Typical mistakes, and what the programs say about each.
mod mistakes;
// The history of template sets, and the way back.
mod history;

// The manager as a process: election, end, configuration, namespaces, metrics, log.
mod process;
// A quota on limits stops no VM that has limits.
mod quota;
// A manager with nothing to do sends no requests, and a restart writes nothing.
mod at_rest;
// The API server cuts connections, refuses and loses answers; the manager is killed.
mod robust;

// What people may do with VMs, by the roles of `deploy/users`.
mod user_roles;
// The web interface: sign-in, pages, their live changes, actions, by the rights of each person.
mod web;
