//! The random values of a rendering: the password of a new display secret, and by what a new relay and its clients know each other.

use rcgen::{CertificateParams, DnType, KeyPair};
use tracing::warn;

use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    observed::Observed,
    process::ErrorChain,
    render::{RandomInput, RelayIdentity, needs_relay_identity},
};

/// The random values for a VM.
pub fn random_input(vm: &VirtualMachine, observed: &Observed, config: &ReconcilerConfig) -> RandomInput {
    let is_needed = needs_relay_identity(vm, observed, config);
    let relay = if is_needed { new_identity() } else { RelayIdentity::default() };
    RandomInput { display_password: random(), relay }
}

/// A new identity: a self-signed certificate that clients know from the Secret, and a token. Empty if it can't be made; then the relay does not
/// listen until somebody deletes the Secret.
fn new_identity() -> RelayIdentity {
    let made = || -> Result<(String, String), rcgen::Error> {
        let mut params = CertificateParams::new(vec!["relay".to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, "vm-operator relay");
        let key = KeyPair::generate()?;
        Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
    };
    match made() {
        Ok((certificate, key)) => RelayIdentity { certificate, key, token: random() + &random() },
        Err(error) => {
            warn!(error = %ErrorChain(&error), "cannot make a certificate for a relay");
            RelayIdentity::default()
        }
    }
}

/// 128 random bits in hexadecimal. Empty if the operating system has no randomness; then no password can be made.
pub fn random() -> String {
    let mut bits = [0; 16];
    match getrandom::fill(&mut bits) {
        Ok(()) => bits.iter().map(|byte| format!("{byte:02x}")).collect(),
        Err(error) => {
            warn!(%error, "the operating system has no randomness");
            String::new()
        }
    }
}
