//! What several programs do as clients: of the API server, and of the relay in a VM's Pod.

#[cfg(any(feature = "cli", feature = "manager"))]
pub mod access;
#[cfg(any(feature = "cli", feature = "manager"))]
pub mod discovery;
#[cfg(any(feature = "manager", feature = "web"))]
pub mod events;
#[cfg(any(feature = "manager", feature = "vmctl"))]
pub mod give_up;
#[cfg(any(feature = "cli", feature = "web"))]
pub mod relay;
