//! The signals that end a program.

use std::io;

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

/// Returns a channel that becomes true when the process receives SIGTERM or SIGINT for the first time. Further signals have no effect.
///
/// # Errors
/// If the kernel refuses a signal handler.
pub fn termination() -> io::Result<watch::Receiver<bool>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        sender.send_replace(true);
        // If this task ended here, the receivers would see a closed channel instead of the value.
        sender.closed().await;
    });
    Ok(receiver)
}

/// Returns when the channel of [`termination`] is true, or when its sender is gone because the process ends.
pub async fn terminated(mut termination: watch::Receiver<bool>) {
    let _ = termination.wait_for(|is_terminated| *is_terminated).await;
}
