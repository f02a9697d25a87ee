//! The program that runs one virtual machine, inside its Pod or from a file.
#![forbid(unsafe_code)]

use std::{
    io::{IsTerminal, Write},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};
use vm_operator::{
    process::{ErrorChain, output::Output},
    runner::{Arguments, Error, LogFormat, logging::Logging, run},
};

/// How long the end of the program waits until its log is written.
const LAST_LINES: Duration = Duration::from_secs(1);

// The runner waits most of the time, so one thread is enough. Each thread costs memory in each Pod.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    #[cfg(feature = "local")]
    if let Some((from_file, programs)) = arguments.from_file() {
        return vm_operator::local::main(&from_file, &programs, arguments.log_format).await;
    }
    let (logging, filter) = Logging::new(std::env::var("VM_RUNNER_LOG").ok().as_deref());
    // The log goes to the standard error, because the standard output is the guest's console.
    // Without a thread for it the log is written at once, and waits for its reader.
    let output = Output::to(std::io::stderr()).ok();
    let writer = output.clone();
    let log = tracing_subscriber::fmt::layer().with_writer(move || -> Box<dyn Write> {
        match &writer {
            Some(output) => Box::new(output.clone()),
            None => Box::new(std::io::stderr()),
        }
    });
    let registry = tracing_subscriber::registry().with(filter);
    match arguments.log_format {
        LogFormat::Text => registry.with(log.with_ansi(std::io::stderr().is_terminal())).init(),
        LogFormat::Json => registry.with(log.json().flatten_event(true)).init(),
    }
    let code = match run(arguments, logging).await {
        Ok(()) => ExitCode::SUCCESS,
        // The last word of a container, which a person reads in the VM's conditions, is no line of a log.
        Err(error @ Error::HandOver(_)) => {
            let _ = writeln!(std::io::stderr(), "{}", ErrorChain(&error));
            ExitCode::FAILURE
        }
        Err(error) => {
            tracing::error!("{}", ErrorChain(&error));
            ExitCode::FAILURE
        }
    };
    if let Some(output) = output {
        output.finish(LAST_LINES);
    }
    code
}
