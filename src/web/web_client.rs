//! Requests to providers of OpenID Connect: JSON over HTTPS, with limits for time and size. Redirects are not followed.
//!
//! A provider's certificate is checked by Mozilla's list, which is part of the program, and by that of the computer (or of the file that
//! `SSL_CERT_FILE` names).

use std::{sync::Arc, time::Duration};

use axum::body::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::timeout;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

/// How long an answer may take, with its body.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest body of an answer, in bytes.
const LONGEST: usize = 1 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum WebError {
    /// TLS can't be used.
    #[error("TLS can't be used")]
    Tls(#[from] rustls::Error),
    /// The request can't be sent.
    #[error("the server can't be reached")]
    Unreachable(#[from] hyper_util::client::legacy::Error),
    /// The answer takes too long.
    #[error("there is no answer within {} s", PATIENCE.as_secs())]
    TooLate,
    /// The answer breaks off or is too long.
    #[error("the answer breaks off, or has more than {LONGEST} bytes")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Sends requests.
pub(super) struct WebClient(Client<HttpsConnector<HttpConnector>, Full<Bytes>>);

impl WebClient {
    /// Reads the list of certificates of the computer.
    ///
    /// # Errors
    /// If TLS can't be used.
    pub fn new() -> Result<Self, WebError> {
        let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        let native = rustls_native_certs::load_native_certs();
        for error in native.errors {
            tracing::debug!(%error, "a certificate of this computer can't be read");
        }
        roots.add_parsable_certificates(native.certs);
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1().build();
        Ok(Self(Client::builder(TokioExecutor::new()).build(connector)))
    }

    /// Sends a request and reads the whole answer.
    ///
    /// # Errors
    /// [`WebError`]. No error has a part of the request or of the answer.
    pub async fn send(&self, request: http::Request<Vec<u8>>) -> Result<http::Response<Vec<u8>>, WebError> {
        let exchange = async {
            let answer = self.0.request(request.map(|body| Full::new(Bytes::from(body)))).await?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, LONGEST).collect().await.map_err(WebError::Body)?;
            Ok(http::Response::from_parts(head, body.to_bytes().to_vec()))
        };
        timeout(PATIENCE, exchange).await.unwrap_or(Err(WebError::TooLate))
    }
}
