//! The gRPC service of one resource, which the kubelet calls over the plugin's Unix socket.
//!
//! The service is written by hand instead of generated from the protocol's file, so that no build needs the compiler `protoc`.

use std::{
    convert::Infallible,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt, Stream, future::BoxFuture, stream};
use prost::Message;
use tokio::{net::UnixListener, sync::watch, task::JoinHandle, time::timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Status,
    body::Body,
    server::{Grpc, NamedService},
};
use tonic_prost::ProstCodec;
use tracing::warn;

use super::{
    messages::{
        AllocateRequest, AllocateResponse, DEVICE_PLUGIN, Device, DevicePluginOptions, Empty, ListAndWatchResponse,
        PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
    },
    resources::{Inventory, Resource},
    web::Health,
};

/// How long an answer may take that was begun before the end.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// The servers of all resources. They end, and their sockets are removed, with [`Servers::stop`].
pub struct Servers {
    stop: watch::Sender<bool>,
    running: Vec<JoinHandle<()>>,
    sockets: Vec<PathBuf>,
}

impl Servers {
    /// Listens on the socket of each resource in the kubelet's folder. A socket that is there already was left by a plugin that was
    /// killed.
    ///
    /// # Errors
    /// If a socket can't be created.
    pub fn start(folder: &Path, inventory: &watch::Receiver<Inventory>, health: &Arc<Health>) -> io::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let mut servers = Self { stop, running: Vec::new(), sockets: Vec::new() };
        for resource in Resource::ALL {
            let socket = folder.join(resource.socket());
            match fs::remove_file(&socket) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
            let listener = UnixListener::bind(&socket)?;
            servers.sockets.push(socket);
            let plugin = DevicePlugin {
                resource,
                inventory: inventory.clone(),
                health: Arc::clone(health),
                stopped: stopped.clone(),
            };
            servers.running.push(tokio::spawn(serve(plugin, listener)));
        }
        Ok(servers)
    }

    /// Whether all sockets are still there and all servers run. A kubelet that starts removes the sockets of all plugins.
    pub fn are_there(&self) -> bool {
        self.sockets.iter().all(|socket| socket.exists()) && !self.running.iter().any(JoinHandle::is_finished)
    }

    /// Ends the servers and removes their sockets.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        for mut server in self.running {
            if timeout(LAST_ANSWERS, &mut server).await.is_err() {
                server.abort();
            }
        }
        for socket in self.sockets {
            // The kubelet may have removed it already.
            let _ = fs::remove_file(socket);
        }
    }
}

async fn serve(plugin: DevicePlugin, listener: UnixListener) {
    let (resource, stopped) = (plugin.resource.name(), plugin.stopped.clone());
    let served = tonic::transport::Server::builder()
        .add_service(plugin)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), is_stopped(stopped))
        .await;
    if let Err(error) = served {
        warn!(resource, %error, "the kubelet's calls are not answered any more");
    }
}

/// Returns when the plugin is to end, or has ended.
async fn is_stopped(mut stopped: watch::Receiver<bool>) {
    let _ = stopped.wait_for(|is_stopped| *is_stopped).await;
}

/// The service.
#[derive(Clone)]
struct DevicePlugin {
    resource: Resource,
    inventory: watch::Receiver<Inventory>,
    health: Arc<Health>,
    stopped: watch::Receiver<bool>,
}

impl DevicePlugin {
    /// The devices, now and after each change, until the plugin ends.
    fn devices(&self) -> impl Stream<Item = Result<ListAndWatchResponse, Status>> + use<> {
        let last: Option<Vec<Device>> = None;
        stream::unfold((self.clone(), last), |(mut plugin, last)| async move {
            loop {
                let devices = plugin.resource.devices(&plugin.inventory.borrow_and_update());
                if last.as_ref() != Some(&devices) {
                    return Some((Ok(ListAndWatchResponse { devices: devices.clone() }), (plugin, Some(devices))));
                }
                tokio::select! {
                    changed = plugin.inventory.changed() => changed.ok()?,
                    () = is_stopped(plugin.stopped.clone()) => return None,
                }
            }
        })
    }

    fn allocate(&self, request: &AllocateRequest) -> AllocateResponse {
        let inventory = self.inventory.borrow();
        let containers = request.container_requests.iter().map(|_| self.resource.allocation(&inventory));
        self.health.count_allocations(self.resource, request.container_requests.len());
        AllocateResponse { container_responses: containers.collect() }
    }
}

impl NamedService for DevicePlugin {
    const NAME: &'static str = DEVICE_PLUGIN;
}

impl tower::Service<http::Request<Body>> for DevicePlugin {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let plugin = self.clone();
        let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        async move {
            Ok(match call.as_str() {
                "GetDevicePluginOptions" => unary(request, |_: Empty| DevicePluginOptions::default()).await,
                "ListAndWatch" => {
                    let list = tower::service_fn(move |_: tonic::Request<Empty>| {
                        let devices = plugin.devices();
                        async move { Ok::<_, Status>(tonic::Response::new(devices)) }
                    });
                    Grpc::new(ProstCodec::default()).server_streaming(list, request).await
                }
                "Allocate" => unary(request, move |request: AllocateRequest| plugin.allocate(&request)).await,
                "GetPreferredAllocation" => {
                    unary(request, |_: PreferredAllocationRequest| PreferredAllocationResponse::default()).await
                }
                "PreStartContainer" => {
                    unary(request, |_: PreStartContainerRequest| PreStartContainerResponse::default()).await
                }
                _ => Status::unimplemented("no such call in v1beta1").into_http(),
            })
        }
        .boxed()
    }
}

/// Answers a call that has one answer.
async fn unary<Q, A>(
    request: http::Request<Body>,
    answer: impl Fn(Q) -> A + Send + Sync + 'static,
) -> http::Response<Body>
where
    Q: Message + Default + 'static,
    A: Message + Default + 'static,
{
    let service = tower::service_fn(move |request: tonic::Request<Q>| {
        let answer = answer(request.into_inner());
        async move { Ok::<_, Status>(tonic::Response::new(answer)) }
    });
    Grpc::new(ProstCodec::default()).unary(service, request).await
}
