//! The kubelet's socket: the registration, and how a kubelet that has started anew is noticed.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use http::uri::PathAndQuery;
use tonic::{
    Status,
    client::Grpc,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{
    messages::{DevicePluginOptions, Empty, REGISTER, RegisterRequest, VERSION},
    resources::Resource,
};

/// The name of the kubelet's socket in its folder for device plugins.
const SOCKET: &str = "kubelet.sock";
/// How long the kubelet may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Why a resource could not be registered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers on the socket.
    #[error("cannot connect to the kubelet at {}", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        source: tonic::transport::Error,
    },
    /// The kubelet's answer is an error.
    #[error("the kubelet refuses the resource {resource}: {}", status.message())]
    Refused {
        /// The name of the resource.
        resource: &'static str,
        /// The answer.
        status: Box<Status>,
    },
}

/// The folder of the kubelet for device plugins.
#[derive(Clone, Debug)]
pub struct Kubelet(PathBuf);

/// Which socket it is: another kubelet creates another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
    created: (i64, i64),
}

impl Kubelet {
    /// The kubelet whose folder that is.
    pub fn new(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// The identity of its socket. `None`: there is no socket.
    pub fn identity(&self) -> Option<Identity> {
        let found = fs::metadata(self.0.join(SOCKET)).ok()?;
        Some(Identity { device: found.dev(), inode: found.ino(), created: (found.ctime(), found.ctime_nsec()) })
    }

    /// Registers all resources. The kubelet then calls their servers.
    ///
    /// # Errors
    /// If the kubelet does not answer, or refuses a resource.
    pub async fn register(&self) -> Result<(), Error> {
        let mut kubelet = Grpc::new(self.connect().await?);
        for resource in Resource::ALL {
            let request = RegisterRequest {
                version: VERSION.to_owned(),
                endpoint: resource.socket().to_owned(),
                resource_name: resource.name().to_owned(),
                options: Some(DevicePluginOptions::default()),
            };
            let refused = |status| Error::Refused { resource: resource.name(), status: Box::new(status) };
            let failed = |error: tonic::transport::Error| refused(Status::from_error(error.into()));
            kubelet.ready().await.map_err(failed)?;
            let codec = ProstCodec::<RegisterRequest, Empty>::default();
            let path = PathAndQuery::from_static(REGISTER);
            kubelet.unary(tonic::Request::new(request), path, codec).await.map_err(refused)?;
        }
        Ok(())
    }

    async fn connect(&self) -> Result<Channel, Error> {
        let socket = self.0.join(SOCKET);
        let channel = match Endpoint::from_shared(format!("unix://{}", socket.display())) {
            Ok(endpoint) => endpoint.connect_timeout(ANSWER).timeout(ANSWER).connect().await,
            Err(error) => Err(error),
        };
        channel.map_err(|source| Error::Connect { socket, source })
    }
}

/// What is wrong with the folder, if it can't be used.
///
/// # Errors
/// If it is not there, or no folder.
pub fn check(folder: &Path) -> io::Result<()> {
    if fs::metadata(folder)?.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) }
}
