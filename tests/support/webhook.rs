//! A validating admission webhook that waits with its answers until the test allows them.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, reason = "this is test code")]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use axum::{Json, Router, extract::State, routing::post};
use k8s_openapi::ByteString;
use rcgen::{CertificateParams, KeyPair, SanType};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, pki_types::PrivatePkcs8KeyDer},
    server::TlsStream,
};

/// The webhook.
pub struct Webhook {
    address: SocketAddr,
    authority: String,
    shared: Arc<Shared>,
}

struct Shared {
    answers: watch::Sender<bool>,
    /// The names of the objects that it was asked about.
    asked: Mutex<Vec<String>>,
}

impl Webhook {
    /// A webhook that does not answer yet.
    pub async fn start() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST))];
        let certificate = params.self_signed(&key).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
            .unwrap();
        let shared = Arc::new(Shared { answers: watch::Sender::new(false), asked: Mutex::default() });
        let router = Router::new().route("/", post(review)).with_state(shared.clone());
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = tcp.local_addr().unwrap();
        let listener = Listener { tcp, tls: TlsAcceptor::from(Arc::new(config)) };
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, authority: certificate.pem(), shared }
    }

    /// The configuration with which the API server asks it about new Pods of these VMs in a namespace.
    pub fn configuration(&self, namespace: &str, machines: &[&str], timeout_seconds: u8) -> Value {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": { "name": namespace },
            "webhooks": [{
                "name": "slow.example.org",
                "clientConfig": {
                    "url": format!("https://{}/", self.address),
                    "caBundle": ByteString(self.authority.clone().into_bytes()),
                },
                "rules": [{ "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"] }],
                "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": namespace } },
                "objectSelector": { "matchExpressions": [
                    { "key": "app.kubernetes.io/instance", "operator": "In", "values": machines },
                ] },
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "timeoutSeconds": timeout_seconds,
            }],
        })
    }

    /// Sets whether it answers; this applies to requests that wait and to later ones.
    pub fn answer(&self, answers: bool) {
        self.shared.answers.send_replace(answers);
    }

    /// Forgets the requests so far.
    pub fn forget(&self) {
        self.shared.asked.lock().unwrap().clear();
    }

    /// The names of all objects that it was asked about, sorted.
    pub fn asked(&self) -> Vec<String> {
        let mut asked = self.shared.asked.lock().unwrap().clone();
        asked.sort();
        asked
    }
}

/// Allows everything.
async fn review(State(shared): State<Arc<Shared>>, Json(review): Json<Value>) -> Json<Value> {
    let request = &review["request"];
    shared.asked.lock().unwrap().push(request["object"]["metadata"]["name"].as_str().unwrap().to_owned());
    shared.answers.subscribe().wait_for(|answers| *answers).await.unwrap();
    Json(json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "response": { "uid": request["uid"], "allowed": true },
    }))
}

struct Listener {
    tcp: TcpListener,
    tls: TlsAcceptor,
}

impl axum::serve::Listener for Listener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            if let Ok((stream, address)) = self.tcp.accept().await
                && let Ok(stream) = self.tls.accept(stream).await
            {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.tcp.local_addr()
    }
}
