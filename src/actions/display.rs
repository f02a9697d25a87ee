//! Opens a VM's display for a viewer.
//!
//! ```text
//!  VM, Service ──────────▶ address ───────────────────┐
//!  display secret, clock ▶ password in force, or new ─┴▶ Connection ─▶ file for remote-viewer
//! ```
//!
//! # Flow
//! [`open`] does these steps in this order and stops at the first error:
//! 1. It reads the VM. A VM that does not run has no display; a display that somebody uses is refused unless the request
//!    takes it over.
//! 2. It finds the address: the server of the request, else the one of the spec, else the load balancer's, else the Pod's.
//! 3. It reads the display secret that the Pod uses. It writes a new password there if the present one ends within
//!    [`MINIMUM_VALIDITY`], or if the request names another user than the last one and the password ends at all.
//! 4. It waits until the runner reports that the password of the Secret is in force (`status.displayPasswordExpiry`).
//! 5. It reads the VM again, checks it as in step 1, and writes the request's user into `status.consoleUser` of what it has read.
//!
//! # Guarantees
//! - The password of a [`Connection`] was in force when `open` returned. If the VM's display has no password, there is none.
//! - A password that never ends is never replaced.
//! - The password of a new connection is the one that this call has written, or one that stood in the Secret before; never one that another call has
//!   written since.
//! - Nothing is written before the VM is known to run and to have an address.
//! - Two calls at the same time without a user end with the same new password: the Secret is written only in the version that
//!   was read, and the call whose write is refused reads it again.
//! - Writes carry the field manager of the request. GitOps tools leave alone those of [`COMMAND_MANAGER`] and
//!   [`WEB_MANAGER`](crate::ownership::WEB_MANAGER).
//! - The wait of step 4 takes two minutes at most.
//!
//! # Assumptions
//! - The clocks of the caller and of the node differ by less than [`MINIMUM_VALIDITY`].
//! - The runner reports a password's end exactly as it stands in the Secret. Passwords are told apart by their end alone, so a
//!   new one gets an end that differs from the present one's.
//!
//! # Caveats
//! - Two calls at the same time for two users each set a password. The runner may see only the later one; the other call then
//!   ends with [`DisplayError::PasswordNotSet`].
//!
//! # Rights
//! `get`, `list` and `watch` on VMs, `get` and `patch` on the display secret; for a user `patch` on `vms/status`, for a load
//! balancer `get` on Services. `get` on Pods or `list` on Secrets is needed only where the Secret is not called
//! `NAME-display-secret`.
//!
//! # Errors
//! [`DisplayError`] has a variant for everything that a caller can explain better than with the message.

mod address;
mod file;
mod password;

use std::time::Duration;

use kube::{
    api::{Patch, PatchParams},
    runtime::wait,
};
use serde_json::json;

use self::address::Endpoint;
pub use self::address::{Host, IpVersion};
pub use self::password::{End, Present};
use super::VmHandle;
use crate::{
    api::{
        StoredVm, VirtualMachine,
        conditions::{self, CONSOLE_CONNECTED, READY, RUNNING},
    },
    ownership::COMMAND_MANAGER,
};

/// How often others may write the VM while its user is noted.
const TRIES: u32 = 20;

/// A password that ends sooner does not let a viewer in reliably.
pub const MINIMUM_VALIDITY: Duration = Duration::from_secs(10);

/// How a display is opened.
#[derive(Clone, Debug)]
pub struct Request {
    /// The host that the viewer connects to. `None`: the one that the VM has.
    pub server: Option<String>,
    /// The port that the viewer connects to. `None`: the one that the VM has.
    pub port: Option<u16>,
    /// How long a new password lets viewers in.
    pub validity: Validity,
    /// Who gets the connection. The user is noted in the VM's status; another user than the last one gets a new password.
    pub user: Option<String>,
    /// Whether the display is taken from a viewer that is connected now.
    pub take_over: bool,
    /// Which of the Pod's addresses is preferred, if the viewer connects to the Pod.
    pub ip_version: Option<IpVersion>,
    /// The field manager of what is written.
    pub field_manager: &'static str,
}

/// How long a password lets viewers in: at least [`MINIMUM_VALIDITY`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity(Duration);

/// The time is shorter than [`MINIMUM_VALIDITY`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a viewer can't connect within that time: at least {}s are needed", MINIMUM_VALIDITY.as_secs())]
pub struct TooShort;

impl Default for Validity {
    fn default() -> Self {
        Self(MINIMUM_VALIDITY)
    }
}

impl TryFrom<Duration> for Validity {
    type Error = TooShort;

    fn try_from(time: Duration) -> Result<Self, TooShort> {
        if time >= MINIMUM_VALIDITY { Ok(Self(time)) } else { Err(TooShort) }
    }
}

/// What a viewer needs.
#[derive(Clone, PartialEq, Eq)]
pub struct Connection {
    /// The VM, as `NAMESPACE/NAME`.
    pub vm: String,
    /// What the display speaks.
    pub protocol: Protocol,
    /// The host to connect to.
    pub host: Host,
    /// The port to connect to.
    pub port: u16,
    /// The port of the display in the Pod.
    pub pod_port: u16,
    /// The password. `None`: the display lets everybody in.
    pub password: Option<String>,
    /// The proxy of SPICE viewers. A server of the request is connected to without one.
    pub proxy: Option<String>,
    /// Whether the viewer's USB devices can be used in the guest.
    pub usb: bool,
}

/// What a display speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// SPICE.
    Spice,
    /// VNC (RFC 6143).
    Vnc,
}

impl Protocol {
    fn of(vm: &VirtualMachine) -> Self {
        if vm.spec.vm.display.vnc.is_some() { Self::Vnc } else { Self::Spice }
    }

    /// The name that viewers and Services use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spice => "spice",
            Self::Vnc => "vnc",
        }
    }
}

/// Why a display can't be opened. The messages speak of the VM as "it".
#[derive(Debug, thiserror::Error)]
pub enum DisplayError {
    /// The VM has no status: no manager has seen it.
    #[error("it has not been started yet")]
    NotStarted,
    /// The VM does not run.
    #[error("it does not run, and has no display{}", after(": ", message))]
    NotRunning {
        /// The message of the VM's condition `Ready`.
        message: Option<String>,
    },
    /// Somebody is connected, and the request does not take the display over.
    #[error("somebody is connected to the display{}", after(" from ", client))]
    InUse {
        /// The address of that viewer.
        client: Option<String>,
    },
    /// `display.spice.port` is 0.
    #[error("it has no port: spec.vm.display.spice.port is 0")]
    NoPort,
    /// Neither the spec nor a load balancer nor the Pod gives an address.
    #[error("it has no address yet")]
    NoAddress,
    /// The runner did not report within the time that the password is in force.
    #[error("its runner did not set the password of Secret {secret} within {} s", password::LIMIT.as_secs())]
    PasswordNotSet {
        /// The display secret.
        secret: String,
    },
    /// The runner set the password so late that it had ended already.
    #[error("its runner set the password only after the password had expired")]
    PasswordExpired,
    /// The VM was deleted meanwhile.
    #[error("it was deleted")]
    Deleted,
    /// The VM can't be read.
    #[error(transparent)]
    Vm(kube::Error),
    /// The VM can't be watched.
    #[error(transparent)]
    Watch(#[from] wait::Error),
    /// Another object can't be read or written.
    #[error("{object}")]
    Object {
        /// The object or field, after "its".
        object: String,
        /// What the API server says.
        source: kube::Error,
    },
    /// The operating system has no random numbers.
    #[error("there are no random numbers for a password")]
    Random(#[from] getrandom::Error),
}

impl DisplayError {
    fn object(object: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        |source| Self::Object { object: format!("its {}", object.into()), source }
    }
}

fn after(separator: &str, text: &Option<String>) -> String {
    text.as_ref().map(|text| format!("{separator}{text}")).unwrap_or_default()
}

/// Opens the display of a VM: see the module for flow, guarantees, assumptions and rights.
///
/// `waiting` is called once if the runner needs more than two seconds to set a password.
///
/// # Errors
/// [`DisplayError`]. After an error a new password may stand in the display secret; the next call uses it while it lasts.
pub async fn open(vm: &VmHandle, request: &Request, waiting: impl FnOnce()) -> Result<Connection, DisplayError> {
    let resource = vm.get().await.map_err(DisplayError::Vm)?;
    check_available(&resource, request.take_over)?;
    let endpoint = Endpoint::find(vm, &resource, request).await?;
    let password = password::in_force(vm, request, waiting).await?;
    if let Some(user) = &request.user {
        note_user(vm, user, request).await?;
    }
    let protocol = Protocol::of(&resource);
    let spice = Some(&resource.spec.vm.display.spice).filter(|_| protocol == Protocol::Spice);
    Ok(Connection {
        vm: format!("{}/{}", vm.namespace(), vm.name()),
        protocol,
        host: endpoint.host,
        port: request.port.unwrap_or(endpoint.port),
        pod_port: address::pod_port(&resource),
        password,
        proxy: spice.filter(|_| request.server.is_none()).and_then(|spice| spice.proxy_url.clone()),
        usb: spice.is_some_and(|spice| spice.usb_redirects > 0),
    })
}

/// Whether the VM has a display for a viewer, when it runs.
pub fn has_display(vm: &VirtualMachine) -> bool {
    address::pod_port(vm) != 0
}

/// The password in the VM's display secret, whether or not it lets anybody in. `None`: the VM has no display secret. Nothing is written.
///
/// # Errors
/// [`DisplayError::Object`].
pub async fn present_password(vm: &VmHandle) -> Result<Option<Present>, DisplayError> {
    password::present(vm).await
}

/// A password that lets viewers in now: steps 3 and 4 of [`open`]. `None`: the display lets everybody in.
///
/// # Errors
/// As [`open`].
pub async fn password_in_force(
    vm: &VmHandle,
    validity: Validity,
    waiting: impl FnOnce(),
) -> Result<Option<String>, DisplayError> {
    check_available(&vm.get().await.map_err(DisplayError::Vm)?, true)?;
    let request = Request {
        server: None,
        port: None,
        validity,
        user: None,
        take_over: false,
        ip_version: None,
        field_manager: COMMAND_MANAGER,
    };
    password::in_force(vm, &request, waiting).await
}

/// Checks that the VM runs and that nobody else uses its display.
fn check_available(vm: &VirtualMachine, take_over: bool) -> Result<(), DisplayError> {
    let status = vm.status.as_ref().ok_or(DisplayError::NotStarted)?;
    if !conditions::is_true(&status.conditions, RUNNING) {
        let message = conditions::find(&status.conditions, READY).map(|ready| ready.message.clone());
        return Err(DisplayError::NotRunning { message });
    }
    if !take_over && conditions::is_true(&status.conditions, CONSOLE_CONNECTED) {
        return Err(DisplayError::InUse { client: status.runner.console_client.clone() });
    }
    Ok(())
}

/// Writes who gets the connection into the VM's status, if the display is still available: the runner has needed some time.
async fn note_user(vm: &VmHandle, user: &str, request: &Request) -> Result<(), DisplayError> {
    for attempt in 1.. {
        let resource = vm.get().await.map_err(DisplayError::Vm)?;
        check_available(&resource, request.take_over)?;
        let patch = Patch::Merge(json!({
            "metadata": { "resourceVersion": resource.metadata.resource_version }, "status": { "consoleUser": user },
        }));
        match vm.api::<StoredVm>().patch_status(vm.name(), &patch_params(request.field_manager), &patch).await {
            // It has changed since it was read: somebody may have connected.
            Err(kube::Error::Api(refusal)) if refusal.is_conflict() && attempt < TRIES => {}
            result => return result.map(drop).map_err(DisplayError::object("status.consoleUser")),
        }
    }
    Ok(())
}

fn patch_params(field_manager: &str) -> PatchParams {
    PatchParams::apply(field_manager)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM with that display and status.
    pub(super) fn vm(display: serde_json::Value, status: serde_json::Value) -> VirtualMachine {
        serde_json::from_value(json!({
            "apiVersion": "vmoperator.jdrupes.org/v1",
            "kind": "VirtualMachine",
            "metadata": { "name": "apple", "namespace": "orchard" },
            "spec": { "vm": { "maximumRam": "1Gi", "networks": [], "disks": [], "display": display } },
            "status": status,
        }))
        .unwrap()
    }

    fn condition(type_: &str, reason: &str, message: &str) -> serde_json::Value {
        json!({
            "type": type_, "status": "True", "reason": reason, "message": message,
            "lastTransitionTime": "2024-01-01T00:00:00Z",
        })
    }

    #[test]
    fn a_vm_that_does_not_run_has_no_display() {
        let error =
            |status, take_over| check_available(&vm(json!({}), status), take_over).map_err(|error| error.to_string());
        assert_eq!(error(json!(null), true), Err("it has not been started yet".into()));
        let stopped = json!({ "conditions": [condition("Ready", "StoppedAsRequested", "it is stopped")] });
        assert_eq!(error(stopped, true), Err("it does not run, and has no display: it is stopped".into()));
    }

    #[test]
    fn a_display_in_use_must_be_taken_over() {
        let conditions = [condition("Running", "Running", ""), condition("ConsoleConnected", "Connected", "")];
        let vm = vm(json!({}), json!({ "conditions": conditions, "consoleClient": "10.0.0.9" }));
        let error = check_available(&vm, false).unwrap_err();
        assert_eq!(error.to_string(), "somebody is connected to the display from 10.0.0.9");
        assert!(check_available(&vm, true).is_ok());
    }

    #[test]
    fn a_password_lasts_long_enough_to_connect() {
        assert_eq!(Validity::try_from(Duration::from_secs(10)), Ok(Validity(MINIMUM_VALIDITY)));
        assert_eq!(Validity::try_from(Duration::from_secs(9)), Err(TooShort));
    }
}
