//! The log and, with the feature `otel`, traces.

use std::{
    io::{self, IsTerminal, Write},
    process::ExitCode,
};

use tracing_subscriber::{EnvFilter, Layer, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// What is logged unless RUST_LOG says otherwise. What kube logs of watches the manager logs too, without the names of types.
const DEFAULT: &str = "info,kube_runtime=error";

/// How long sending the last spans may take when the program ends.
#[cfg(any(test, feature = "otel"))]
pub const LAST: std::time::Duration = std::time::Duration::from_millis(100);

/// The format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Lines for people.
    Text,
    /// A JSON object for each line.
    Json,
}

/// The running log; [`Log::end`] must be called when the program ends.
#[must_use]
pub struct Log {
    #[cfg(feature = "otel")]
    traces: Option<traces::Traces>,
}

/// Starts the log of the whole program. Must be called in the tokio runtime.
pub fn start(format: Format) -> Log {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT));
    let lines = fmt::layer().with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
    let lines = match format {
        Format::Text => lines.boxed(),
        Format::Json => lines.json().flatten_event(true).with_span_list(false).boxed(),
    };
    let log = tracing_subscriber::registry().with(filter).with(lines);
    #[cfg(feature = "otel")]
    {
        let (layer, traces) = traces::start().unzip();
        log.with(layer).init();
        Log { traces }
    }
    #[cfg(not(feature = "otel"))]
    {
        log.init();
        Log {}
    }
}

/// Runs a program that waits most of the time, with its log, on one thread. Returns the program's exit code.
pub fn run_on_one_thread(format: Format, program: impl Future<Output = ExitCode>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(io::stderr(), "start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(async {
        let log = start(format);
        let code = program.await;
        log.end();
        code
    })
}

impl Log {
    /// Sends the spans that were not sent yet.
    pub fn end(self) {
        #[cfg(feature = "otel")]
        if let Some(traces) = self.traces {
            traces.end();
        }
    }
}

#[cfg(feature = "otel")]
mod traces {
    use std::{env, sync::mpsc, thread};

    use opentelemetry::trace::TracerProvider as _;
    use opentelemetry_otlp::SpanExporter;
    use opentelemetry_sdk::{
        Resource,
        runtime::Tokio,
        trace::{SdkTracer, SdkTracerProvider, span_processor_with_async_runtime::BatchSpanProcessor},
    };
    use tracing::Subscriber;
    use tracing_opentelemetry::OpenTelemetryLayer;
    use tracing_subscriber::registry::LookupSpan;

    /// Sends traces in the background.
    pub struct Traces(SdkTracerProvider);

    /// Starts if the standard variables name a collector
    /// (<https://opentelemetry.io/docs/specs/otel/protocol/exporter/>).
    pub fn start<S>() -> Option<(OpenTelemetryLayer<S, SdkTracer>, Traces)>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
            .into_iter()
            .find(|name| env::var_os(name).is_some_and(|value| !value.is_empty()))?;
        let exporter = match SpanExporter::builder().with_http().build() {
            Ok(exporter) => exporter,
            Err(error) => {
                return print_error(&error);
            }
        };
        let mut resource = Resource::builder();
        if env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("vm-operator");
        }
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_span_processor(BatchSpanProcessor::builder(exporter, Tokio).build())
            .build();
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("vm-operator"));
        Some((layer, Traces(provider)))
    }

    #[allow(clippy::print_stderr, reason = "the log has not started yet")]
    fn print_error<T>(error: &dyn std::error::Error) -> Option<T> {
        eprintln!("no traces: {error}");
        None
    }

    impl Traces {
        /// Sends the spans that were not sent yet.
        pub fn end(self) {
            let (done, wait) = mpsc::channel();
            thread::spawn(move || {
                let _ = self.0.shutdown();
                let _ = done.send(());
            });
            // A collector that does not answer must not hold up the end.
            let _ = wait.recv_timeout(super::LAST);
        }
    }
}
