//! HTTPS by the program itself: its certificate and key, from files.

use std::{fs, path::Path, sync::Arc};

use anyhow::Context;
use tokio_rustls::rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

/// Reads a certificate, with those of its issuers, and its key: PEM.
///
/// # Errors
/// If a file can't be read, has nothing of that kind, or the key is of another certificate.
pub(super) fn load(certificate: &Path, key: &Path) -> anyhow::Result<Arc<ServerConfig>> {
    let read = |file: &Path| fs::read(file).with_context(|| file.display().to_string());
    let chain = CertificateDer::pem_slice_iter(&read(certificate)?).collect::<Result<Vec<_>, _>>();
    let chain = chain.with_context(|| format!("{}: this is no certificate", certificate.display()))?;
    anyhow::ensure!(!chain.is_empty(), "{}: there is no certificate", certificate.display());
    let private =
        PrivateKeyDer::from_pem_slice(&read(key)?).with_context(|| format!("{}: there is no key", key.display()))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .context("TLS can't be used")?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .with_context(|| format!("{} and {}", certificate.display(), key.display()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (String, String) {
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["vms.example".to_owned()]).unwrap();
        (cert.pem(), signing_key.serialize_pem())
    }

    #[test]
    fn files_that_can_not_be_used_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let load = |certificate: &str, key: &str| {
            let (first, second) = (folder.path().join("tls.crt"), folder.path().join("tls.key"));
            fs::write(&first, certificate).unwrap();
            fs::write(&second, key).unwrap();
            super::load(&first, &second).map(drop).map_err(|error| format!("{error:#}"))
        };
        let ((certificate, key), (other, _)) = (pair(), pair());
        assert_eq!(load(&certificate, &key), Ok(()));
        assert_eq!(load(&format!("{certificate}{other}"), &key), Ok(()));
        for (certificate, key, message) in [
            ("", key.as_str(), "tls.crt: there is no certificate"),
            (&certificate, "", "tls.key: there is no key"),
            (&other, &key, "tls.crt and "),
        ] {
            let error = load(certificate, key).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        assert!(super::load(Path::new("/none/tls.crt"), Path::new("/none/tls.key")).is_err());
    }
}
