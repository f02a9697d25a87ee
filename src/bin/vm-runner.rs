//! The program inside each Pod: runs one virtual machine.
#![forbid(unsafe_code)]

use std::{io::IsTerminal, process::ExitCode};

use clap::Parser;
use tracing_subscriber::EnvFilter;
use vm_operator::runner::{Arguments, LogFormat, machine::chain, run};

// One thread: the runner waits most of the time, and each thread costs memory in each Pod.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_env("VM_RUNNER_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // The standard output is the guest's console.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match arguments.log_format {
        LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => log.json().init(),
    }
    match run(arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", chain(&error));
            ExitCode::FAILURE
        }
    }
}
