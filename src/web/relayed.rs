//! Connections to the relay in a VM's Pod ([`crate::relay`]): for consoles, figures and pictures.

use std::time::Duration;

use axum::body::Bytes;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::tungstenite::Message;

use super::app::App;
use crate::{
    api::VirtualMachine,
    client::relay::{Access, Socket},
    process::ErrorChain,
    relay::{LONGEST_PICTURE, PICTURE, secret_name},
};

/// How long the relay may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Opens a path of the relay of the VM.
///
/// # Errors
/// If the VM has no relay, its Secret can't be read, or the relay does not answer.
pub(super) async fn open(app: &App, vm: &VirtualMachine, path: &str) -> Result<Socket<TcpStream>, String> {
    let opened = timeout(PATIENCE, connect(app, vm, path)).await;
    opened.unwrap_or_else(|_| Err("the relay does not answer".into()))
}

async fn connect(app: &App, vm: &VirtualMachine, path: &str) -> Result<Socket<TcpStream>, String> {
    let namespace = vm.metadata.namespace.as_deref().unwrap_or_default();
    let status = vm.status.as_ref();
    let port = status.and_then(|status| status.runner.relay_port).filter(|port| *port > 0).ok_or("it has no relay")?;
    let address = status.and_then(|status| status.addresses.as_ref()?.first()).ok_or("its Pod has no address")?;
    let secrets: Api<Secret> = Api::namespaced(app.client.clone(), namespace);
    let name = secret_name(vm.metadata.name.as_deref().unwrap_or_default());
    let secret = secrets.get(&name).await.map_err(|error| format!("Secret {name}: {}", ErrorChain(&error)))?;
    let access = Access::of_secret(&secret).map_err(|error| format!("Secret {name}: {error}"))?;
    let stream = TcpStream::connect((address.address.as_str(), port)).await;
    let stream = stream.map_err(|error| format!("connect to {}:{port}: {error}", address.address))?;
    let _ = stream.set_nodelay(true);
    access.open(stream, path).await.map_err(|error| ErrorChain(&error).to_string())
}

/// A picture of the VM's screen as PNG.
///
/// # Errors
/// If it has none now, or its relay does not answer.
pub(super) async fn picture(app: &App, vm: &VirtualMachine) -> Result<Bytes, String> {
    let mut relay = open(app, vm, PICTURE).await?;
    let mut content = Vec::new();
    loop {
        match relay.next().await {
            Some(Ok(Message::Binary(piece))) => {
                content.extend_from_slice(&piece);
                if content.len() as u64 > LONGEST_PICTURE {
                    return Err("the picture is too large".into());
                }
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Close(None))) => break,
            Some(Ok(Message::Close(Some(frame)))) => return Err(frame.reason.to_string()),
            Some(Ok(_)) | None => return Err("the relay has ended the connection".into()),
            Some(Err(error)) => return Err(error.to_string()),
        }
    }
    let is_png = content.starts_with(b"\x89PNG\r\n\x1a\n");
    is_png.then(|| content.into()).ok_or_else(|| "it is no PNG".into())
}
