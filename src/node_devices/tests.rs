//! The device plugin with a kubelet that the tests play: its socket, and calls over the plugin's sockets.

use std::{
    convert::Infallible,
    fs,
    task::{Context, Poll},
};

use futures::{FutureExt, future::BoxFuture};
use http::uri::PathAndQuery;
use tokio::{net::UnixListener, sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Code, Status, Streaming,
    body::Body,
    client::Grpc,
    server::NamedService,
    transport::{Channel, Endpoint, Server},
};
use tonic_prost::ProstCodec;

use super::{
    messages::{
        AllocateRequest, AllocateResponse, ContainerAllocateRequest, DevicePluginOptions, Empty, ListAndWatchResponse,
        PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse,
        RegisterRequest,
    },
    *,
};

/// A wait in these tests fails after this time; none of them depends on how long something takes.
const LIMIT: Duration = Duration::from_secs(30);

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("waited in vain: {what}"))
}

/// The kubelet's side of the registration.
#[derive(Clone)]
struct Registration {
    seen: mpsc::UnboundedSender<RegisterRequest>,
    refuse: bool,
}

impl NamedService for Registration {
    const NAME: &'static str = "v1beta1.Registration";
}

impl tower::Service<http::Request<Body>> for Registration {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self { seen, refuse } = self.clone();
        async move {
            assert_eq!(request.uri().path(), "/v1beta1.Registration/Register");
            let register = tower::service_fn(move |request: tonic::Request<RegisterRequest>| {
                let answer = if refuse { Err(Status::internal("the version is too old")) } else { Ok(Empty {}) };
                seen.send(request.into_inner()).unwrap();
                async move { answer.map(tonic::Response::new) }
            });
            Ok(tonic::server::Grpc::new(ProstCodec::default()).unary(register, request).await)
        }
        .boxed()
    }
}

/// A kubelet that listens in a folder.
struct PlayedKubelet {
    seen: mpsc::UnboundedReceiver<RegisterRequest>,
    server: JoinHandle<()>,
}

impl PlayedKubelet {
    fn start(folder: &Path, refuse: bool) -> Self {
        let (sender, seen) = mpsc::unbounded_channel();
        let listener = UnixListener::bind(folder.join("kubelet.sock")).unwrap();
        let server = Server::builder().add_service(Registration { seen: sender, refuse });
        let server = async move { server.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap() };
        Self { seen, server: tokio::spawn(server) }
    }

    /// The names of the next resources that are registered, each with its socket.
    async fn registered(&mut self, count: usize) -> Vec<(String, String)> {
        let mut found = Vec::new();
        for _ in 0..count {
            let request = within("a registration", self.seen.recv()).await.unwrap();
            assert_eq!((request.version.as_str(), request.options), ("v1beta1", Some(DevicePluginOptions::default())));
            found.push((request.resource_name, request.endpoint));
        }
        found
    }

    /// Ends as a kubelet that starts anew: it removes everything from its folder.
    async fn restart(self, folder: &Path) -> Self {
        self.server.abort();
        let _ = self.server.await;
        for entry in fs::read_dir(folder).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        Self::start(folder, false)
    }
}

/// A client of a plugin's socket.
struct Caller(Grpc<Channel>);

impl Caller {
    async fn connect(socket: &Path) -> Self {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
        Self(Grpc::new(within("a connection", endpoint.connect()).await.unwrap()))
    }

    async fn call<Q, A>(&mut self, call: &str, request: Q) -> Result<A, Status>
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let path = PathAndQuery::try_from(format!("/v1beta1.DevicePlugin/{call}")).unwrap();
        self.0.ready().await.unwrap();
        let answer = self.0.unary(tonic::Request::new(request), path, ProstCodec::<Q, A>::default());
        within(call, answer).await.map(tonic::Response::into_inner)
    }

    async fn list(&mut self) -> Devices {
        let path = PathAndQuery::from_static("/v1beta1.DevicePlugin/ListAndWatch");
        self.0.ready().await.unwrap();
        let answer = self.0.server_streaming(tonic::Request::new(Empty {}), path, ProstCodec::default());
        Devices(within("the list", answer).await.unwrap().into_inner())
    }
}

struct Devices(Streaming<ListAndWatchResponse>);

impl Devices {
    /// The number of devices in the next list. `None`: the plugin has ended it.
    async fn next(&mut self) -> Option<usize> {
        let list = within("a list of devices", self.0.message()).await.unwrap()?;
        assert!(list.devices.iter().all(|device| device.health == "Healthy"));
        Some(list.devices.len())
    }
}

/// The folders of a node whose `/dev/kvm` is the null device.
struct Node {
    folder: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["plugins", "dev", "reports", "seccomp"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn add_kvm(&self) {
        std::os::unix::fs::symlink("/dev/null", self.path("dev/kvm")).unwrap();
    }

    /// The trial writes its result as `vm-runner try-kvm` does.
    fn report(&self, text: &str) {
        fs::write(self.path("reports/kvm.json.new"), text).unwrap();
        fs::rename(self.path("reports/kvm.json.new"), self.path("reports/kvm.json")).unwrap();
    }

    fn start(&self) -> Plugin {
        let options = Options {
            plugins: self.path("plugins"),
            dev: self.path("dev"),
            reports: self.path("reports"),
            seccomp: Some(self.path("seccomp")),
            listen: None,
        };
        let (term, receiver) = watch::channel(false);
        Plugin { term, running: tokio::spawn(run(options, receiver)) }
    }
}

struct Plugin {
    term: watch::Sender<bool>,
    running: JoinHandle<Result<(), Error>>,
}

impl Plugin {
    async fn end(self) {
        self.term.send_replace(true);
        within("the end", self.running).await.unwrap().unwrap();
    }
}

const SOCKETS: [(&str, &str); 3] = [
    ("vmoperator.jdrupes.org/kvm", "vm-operator-kvm.sock"),
    ("vmoperator.jdrupes.org/machine", "vm-operator-machine.sock"),
    ("vmoperator.jdrupes.org/kvm-trial", "vm-operator-kvm-trial.sock"),
];

fn all_resources() -> Vec<(String, String)> {
    SOCKETS.map(|(name, socket)| (name.to_owned(), socket.to_owned())).to_vec()
}

#[tokio::test]
async fn the_kubelet_gets_devices_after_the_trial_and_their_files_with_its_result() {
    let node = Node::new();
    node.add_kvm();
    let mut kubelet = PlayedKubelet::start(&node.path("plugins"), false);
    let plugin = node.start();
    assert_eq!(kubelet.registered(3).await, all_resources());
    assert!(node.path("seccomp/vm-operator/passt.json").exists());

    let mut kvm = Caller::connect(&node.path("plugins/vm-operator-kvm.sock")).await;
    let mut devices = kvm.list().await;
    assert_eq!(devices.next().await, Some(0));
    node.report(r#"{"problem":null}"#);
    assert_eq!(devices.next().await, Some(1000));
    let container = ContainerAllocateRequest { devices_ids: vec!["7".into()] };
    let request = AllocateRequest { container_requests: vec![container.clone(), container] };
    let answer: AllocateResponse = kvm.call("Allocate", request).await.unwrap();
    assert_eq!(answer.container_responses.len(), 2);
    for response in answer.container_responses {
        let files: Vec<String> = response.devices.into_iter().map(|device| device.host_path).collect();
        assert_eq!(files, ["/dev/kvm"]);
        assert_eq!(response.envs["VM_RUNNER_KVM_TRIAL"], r#"{"problem":null}"#);
    }
    // A trial that fails later takes the resource away.
    node.report(r#"{"problem":"no VMX"}"#);
    assert_eq!(devices.next().await, Some(0));

    plugin.end().await;
    assert_eq!(devices.next().await, None);
    for (_, socket) in SOCKETS {
        assert!(!node.path("plugins").join(socket).exists(), "{socket}");
    }
}

#[tokio::test]
async fn every_call_of_the_api_has_an_answer() {
    let node = Node::new();
    let mut kubelet = PlayedKubelet::start(&node.path("plugins"), false);
    let plugin = node.start();
    kubelet.registered(3).await;
    let mut machine = Caller::connect(&node.path("plugins/vm-operator-machine.sock")).await;
    let options: Result<DevicePluginOptions, Status> = machine.call("GetDevicePluginOptions", Empty {}).await;
    assert_eq!(options.unwrap(), DevicePluginOptions::default());
    let preferred: Result<PreferredAllocationResponse, Status> =
        machine.call("GetPreferredAllocation", PreferredAllocationRequest {}).await;
    assert_eq!(preferred.unwrap(), PreferredAllocationResponse {});
    let started: Result<PreStartContainerResponse, Status> =
        machine.call("PreStartContainer", PreStartContainerRequest {}).await;
    assert_eq!(started.unwrap(), PreStartContainerResponse {});
    let unknown: Result<Empty, Status> = machine.call("NoSuchCall", Empty {}).await;
    assert_eq!(unknown.unwrap_err().code(), Code::Unimplemented);
    assert_eq!(machine.list().await.next().await, Some(1000));
    plugin.end().await;
}

#[tokio::test]
async fn a_kubelet_that_starts_anew_or_late_gets_another_registration() {
    let node = Node::new();
    let plugins = node.path("plugins");
    // What a plugin that was killed has left.
    fs::write(plugins.join("vm-operator-kvm.sock"), "").unwrap();
    let plugin = node.start();
    // The plugin listens before the kubelet does.
    let listens = async {
        while UnixStreamProbe::connect(&plugins.join("vm-operator-kvm-trial.sock")).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    within("the plugin to listen", listens).await;
    let mut kubelet = PlayedKubelet::start(&plugins, false);
    assert_eq!(kubelet.registered(3).await, all_resources());
    for _ in 0..3 {
        kubelet = kubelet.restart(&plugins).await;
        assert_eq!(kubelet.registered(3).await, all_resources());
        let mut machine = Caller::connect(&plugins.join("vm-operator-machine.sock")).await;
        assert_eq!(machine.list().await.next().await, Some(1000));
    }
    plugin.end().await;
}

/// Whether somebody listens on a socket.
struct UnixStreamProbe;

impl UnixStreamProbe {
    async fn connect(socket: &Path) -> io::Result<()> {
        tokio::net::UnixStream::connect(socket).await.map(drop)
    }
}

#[tokio::test]
async fn a_refused_registration_is_reported_and_tried_again() {
    let node = Node::new();
    let plugins = node.path("plugins");
    let mut kubelet = PlayedKubelet::start(&plugins, true);
    let error = Kubelet::new(&plugins).register().await.unwrap_err();
    let message = "the kubelet refuses the resource vmoperator.jdrupes.org/kvm: the version is too old";
    assert_eq!(error.to_string(), message);
    assert_eq!(kubelet.registered(1).await.len(), 1);
    let plugin = node.start();
    assert_eq!(kubelet.registered(1).await, all_resources()[..1]);
    let mut kubelet = kubelet.restart(&plugins).await;
    assert_eq!(kubelet.registered(3).await, all_resources());
    plugin.end().await;
}

#[tokio::test]
async fn a_node_without_the_kubelets_folder_is_an_error_that_names_it() {
    let node = Node::new();
    fs::remove_dir(node.path("plugins")).unwrap();
    let error = within("an error", node.start().running).await.unwrap().unwrap_err();
    let expected = format!("cannot use the kubelet's folder for device plugins {}", node.path("plugins").display());
    assert_eq!(error.to_string(), expected);
}
