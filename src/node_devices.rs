//! `vm-operator node-devices`: a device plugin of the kubelet, which gives the Pods of VMs the devices of their node. So these Pods need no
//! privilege. (<https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/>)
//!
//! ```text
//!  /dev ──────────────────────────┐
//!  result of `vm-runner try-kvm` ─┼─▶ node ─▶ resources (pure) ─▶ plugin ◀─ the kubelet's calls
//!                                 │                              kubelet ─▶ registration
//! ```
//!
//! The program needs no capability, and no device itself: it only looks which device files there are. The trial of KVM needs `/dev/kvm` and
//! QEMU. So a Pod of its own makes it, which gets the device from this plugin, and leaves the result in a folder of the node.
//!
//! A kubelet that starts removes the sockets of all plugins. This program then listens and registers again.

mod kubelet;
mod messages;
mod node;
mod plugin;
mod resources;
mod web;

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tracing::{info, warn};

use self::{
    kubelet::{Identity, Kubelet},
    plugin::Servers,
    resources::{Inventory, Resource},
    web::Health,
};
use crate::process::{
    ErrorChain, RepeatFilter,
    follow::{Changes, DirectoryWatch, Follower},
};

/// How often the node is looked at. Changes in the kubelet's folder and of the trial are noticed at once; the devices are not, because
/// `/dev` changes too often to be watched. It is also what remains if the node has no inotify instances left.
const INTERVAL: Duration = Duration::from_secs(10);

/// Where the program finds what it needs of the node.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kubelet's folder for device plugins.
    pub plugins: PathBuf,
    /// The node's `/dev`.
    pub dev: PathBuf,
    /// The folder with the result of the trial of KVM.
    pub reports: PathBuf,
    /// The kubelet's folder of seccomp profiles. `None`: no profile is installed.
    pub seccomp: Option<PathBuf>,
    /// The address of probes and metrics. `None`: they are not answered.
    pub listen: Option<SocketAddr>,
}

/// Why the program ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubelet's folder can't be used.
    #[error("cannot use the kubelet's folder for device plugins {}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The profile can't be installed.
    #[error("cannot install the seccomp profile {} in {}", node::PROFILE, folder.display())]
    Profile {
        /// The folder.
        folder: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Probes can't be answered.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

/// Why the resources are not offered any more.
enum End {
    Terminated,
    KubeletRestarted,
}

/// Offers the node's devices until `term` becomes true.
///
/// # Errors
/// If the kubelet's folder can't be used, or the profile can't be written. A kubelet that does not answer is no error: the program tries
/// again.
pub async fn run(options: Options, term: watch::Receiver<bool>) -> Result<(), Error> {
    let folder_error = |source| Error::Folder { folder: options.plugins.clone(), source };
    kubelet::check(&options.plugins).map_err(folder_error)?;
    if let Some(folder) = &options.seccomp {
        let failed = |source| Error::Profile { folder: folder.clone(), source };
        if node::install_profile(folder).map_err(failed)? {
            info!(profile = node::PROFILE, "the seccomp profile is installed");
        }
    }
    let mut offer = Offer::new(options.clone());
    if let Some(address) = options.listen {
        let failed = |source| Error::Listen { address, source };
        let address = web::start(Arc::clone(&offer.health), address).await.map_err(failed)?;
        info!(%address, "probes and metrics are answered");
    }
    loop {
        let servers =
            Servers::start(&options.plugins, &offer.sender.subscribe(), &offer.health).map_err(folder_error)?;
        let end = offer.register_and_follow(&servers, term.clone()).await;
        servers.stop().await;
        match end {
            End::Terminated => return Ok(()),
            End::KubeletRestarted => info!("the kubelet has started anew: registering again"),
        }
    }
}

/// What is offered to the kubelet.
struct Offer {
    options: Options,
    kubelet: Kubelet,
    sender: watch::Sender<Inventory>,
    health: Arc<Health>,
    problems: RepeatFilter,
}

impl Offer {
    fn new(options: Options) -> Self {
        let mut problems = RepeatFilter::default();
        let (sender, receiver) = watch::channel(node::inventory(&options.dev, &options.reports, &mut problems));
        let kubelet = Kubelet::new(&options.plugins);
        let offer = Self { options, kubelet, sender, health: Arc::new(Health::new(receiver)), problems };
        offer.log();
        offer
    }

    fn log(&self) {
        let inventory = self.sender.borrow();
        let [kvm, machine, _] = Resource::ALL.map(|resource| resource.count(&inventory));
        let result = inventory.kvm_result();
        let reason = match &result {
            None => "KVM is not tried yet",
            Some(result) => result.problem.as_deref().unwrap_or("KVM works"),
        };
        let (tun, vhost_net) = (inventory.tun, inventory.vhost_net);
        info!(kvm, machine, tun, vhost_net, reason, "the node's devices");
    }

    /// Registers the resources and keeps the inventory up to date, until the program is to end or the kubelet has restarted.
    async fn register_and_follow(&mut self, servers: &Servers, mut term: watch::Receiver<bool>) -> End {
        let mut changes = FolderChanges::new(&[&self.options.plugins, &self.options.reports]);
        let mut registered: Option<Identity> = None;
        let mut failures = RepeatFilter::default();
        loop {
            let identity = self.kubelet.identity();
            if !servers.are_there() || (registered.is_some() && identity.is_some() && identity != registered) {
                self.health.not_registered("the kubelet has started anew".into());
                return End::KubeletRestarted;
            }
            self.look();
            if registered.is_none() && self.register(&mut failures).await {
                registered = identity;
            }
            tokio::select! {
                _ = term.wait_for(|is_terminated| *is_terminated) => return End::Terminated,
                () = changes.next() => {}
            }
        }
    }

    /// Looks at the node.
    fn look(&mut self) {
        let inventory = node::inventory(&self.options.dev, &self.options.reports, &mut self.problems);
        self.health.looked();
        let replace = |known: &mut Inventory| {
            let is_new = *known != inventory;
            *known = inventory;
            is_new
        };
        if self.sender.send_if_modified(replace) {
            self.log();
        }
    }

    /// Tries to register the resources.
    async fn register(&self, failures: &mut RepeatFilter) -> bool {
        match self.kubelet.register().await {
            Ok(()) => {
                self.health.registered();
                info!("the kubelet knows the resources");
                true
            }
            Err(error) => {
                let message = ErrorChain(&error).to_string();
                if failures.is_new(&message) {
                    warn!(error = message, "the resources can't be registered; trying again");
                }
                self.health.not_registered(message);
                false
            }
        }
    }
}

/// Changes of files in folders, and the passing of [`INTERVAL`].
struct FolderChanges {
    follower: Option<Follower>,
    interval: tokio::time::Interval,
}

impl FolderChanges {
    fn new(folders: &[&Path]) -> Self {
        let mut interval = interval(INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is at once.
        interval.reset();
        let follower = follow(folders).inspect_err(|error| {
            warn!(%error, interval = ?INTERVAL, "changes of files can't be watched; the node is looked at in intervals");
        });
        Self { follower: follower.ok(), interval }
    }

    /// Returns when something may have changed.
    async fn next(&mut self) {
        let Some(follower) = &mut self.follower else {
            self.interval.tick().await;
            return;
        };
        tokio::select! {
            _ = self.interval.tick() => {}
            changed = follower.changed() => {
                if changed.is_err() {
                    self.follower = None;
                }
            }
        }
    }
}

fn follow(folders: &[&Path]) -> io::Result<Follower> {
    let watch = DirectoryWatch::new()?;
    for folder in folders {
        watch.add(folder, Changes::All)?;
    }
    watch.follow()
}

#[cfg(test)]
mod tests;
