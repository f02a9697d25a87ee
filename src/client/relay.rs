//! The client's side of the relay: a connection to it, over whatever leads to the Pod's port.

use std::{io, sync::Arc};

use k8s_openapi::api::core::v1::Secret;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        self, CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme,
        client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
        pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
    },
};
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{
        self,
        client::IntoClientRequest,
        http::{HeaderValue, StatusCode, header::AUTHORIZATION},
        protocol::WebSocketConfig,
    },
};

/// The longest message of a relay, in bytes: it sends pieces of 32 KiB. What it says is foreign, and a client may have many connections.
const LONGEST_MESSAGE: usize = 256 << 10;
/// The memory in which a connection is read, in bytes.
const BUFFER: usize = 16 << 10;

/// A connection to the relay.
pub type Socket<S> = WebSocketStream<TlsStream<S>>;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The certificate or the token of the Secret can't be used.
    #[error("{0} of the relay's Secret can't be used")]
    Secret(&'static str),
    /// There is no TLS with the relay, or another certificate.
    #[error("no TLS with the relay")]
    Tls(#[source] io::Error),
    /// The token is wrong.
    #[error("the relay does not know the token: the Secret has changed since the Pod mounted it")]
    Token,
    /// The relay does not answer as one.
    #[error("the relay does not answer as one")]
    WebSocket(#[source] Box<tungstenite::Error>),
}

/// What a client needs to be let in: the content of the Secret.
#[derive(Clone, Debug)]
pub struct Access {
    certificate: CertificateDer<'static>,
    token: HeaderValue,
}

impl Access {
    /// From the Secret's `tls.crt` and `token`.
    ///
    /// # Errors
    /// If one of them can't be used.
    pub fn new(certificate: &[u8], token: &[u8]) -> Result<Self, Error> {
        let certificate = CertificateDer::from_pem_slice(certificate).map_err(|_| Error::Secret("tls.crt"))?;
        let bearer = [b"Bearer ", token.trim_ascii()].concat();
        let mut token = HeaderValue::from_bytes(&bearer).map_err(|_| Error::Secret("token"))?;
        token.set_sensitive(true);
        Ok(Self { certificate, token })
    }

    /// From the Secret.
    ///
    /// # Errors
    /// If a part of it is missing or can't be used.
    pub fn of_secret(secret: &Secret) -> Result<Self, Error> {
        let part = |key: &str| secret.data.as_ref()?.get(key).map(|value| value.0.as_slice());
        Self::new(part("tls.crt").unwrap_or_default(), part("token").unwrap_or_default())
    }

    /// Opens the path, one of those that [the protocol](crate::relay) has, over a connection to the relay's port.
    ///
    /// # Errors
    /// If the relay is another one, or does not let the client in.
    pub async fn open<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S, path: &str) -> Result<Socket<S>, Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = Pinned { certificate: self.certificate.clone(), provider: provider.clone() };
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Tls(io::Error::other(error)))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        let name = ServerName::try_from("relay").map_err(|error| Error::Tls(io::Error::other(error)))?;
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(Error::Tls)?;
        let no_socket = |error| match error {
            tungstenite::Error::Http(response) if response.status() == StatusCode::UNAUTHORIZED => Error::Token,
            error => Error::WebSocket(Box::new(error)),
        };
        let mut request = format!("ws://relay{path}").into_client_request().map_err(no_socket)?;
        request.headers_mut().insert(AUTHORIZATION, self.token.clone());
        let config = WebSocketConfig::default()
            .read_buffer_size(BUFFER)
            .write_buffer_size(0)
            .max_write_buffer_size(2 * LONGEST_MESSAGE)
            .max_message_size(Some(LONGEST_MESSAGE))
            .max_frame_size(Some(LONGEST_MESSAGE));
        Ok(client_async_with_config(request, stream, Some(config)).await.map_err(no_socket)?.0)
    }
}

/// Takes exactly the certificate of the Secret. No authority signs it, and it is valid for whatever address leads to the Pod.
#[derive(Debug)]
struct Pinned {
    certificate: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if *end_entity == self.certificate {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
