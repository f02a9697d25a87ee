//! The trial of KVM for a whole node: `vm-runner try-kvm`. It runs in a Pod of its own, which has QEMU and gets `/dev/kvm` from the device
//! plugin, and leaves the result in a folder of the node.

use std::{path::Path, time::Duration};

use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use super::{
    accel::{self, Error},
    files::{create_directory, write_atomically},
};
use crate::{
    kvm::{FILE, TrialResult},
    process::signals::terminated,
};

/// The time for a trial. A working KVM needs less than 0.1 s, but a node that starts many VMs at once may be slow.
const LIMIT: Duration = Duration::from_secs(60);
/// The first and the longest pause after a failure. It doubles each time: the cause may be a moment of bad luck, or may stay.
const PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(600));

/// Tries KVM until it works, and writes each result. Then waits for the end, because the Pod would be started again.
///
/// # Errors
/// If a file can't be written, or QEMU can't be started.
pub async fn run(reports: &Path, qemu: &str, term: watch::Receiver<bool>) -> Result<(), Error> {
    create_directory(reports)?;
    let mut pause = PAUSES.0;
    loop {
        let result = accel::trial(qemu, &std::env::temp_dir().join("kvm-trial.bin"), LIMIT).await?;
        write_atomically(&reports.join(FILE), result.text().as_bytes())?;
        let TrialResult { problem: Some(problem) } = result else {
            info!("KVM works on this node");
            terminated(term).await;
            return Ok(());
        };
        warn!(problem, next = ?pause, "KVM does not work on this node; trying again");
        tokio::select! {
            () = terminated(term.clone()) => return Ok(()),
            () = sleep(pause) => pause = (pause * 2).min(PAUSES.1),
        }
    }
}
