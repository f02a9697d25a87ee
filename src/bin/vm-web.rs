//! The program of the web interface: see `vm_operator::web`.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};
use vm_operator::{
    config::Scope,
    process::{listen::Listen, log, network::Network},
    web::{self, Options},
};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Shows people their virtual machines in a browser until told to end (SIGTERM).
///
/// The API server is the one that KUBECONFIG names or, in a cluster, the cluster's own. Browsers keep a session only over HTTPS, or on this
/// computer: give it a certificate, or put a proxy with one in front of it.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: Serve,
}

#[derive(Subcommand)]
enum Command {
    /// End all sessions that a user has begun until now, with their pages and consoles. The user may sign in again: also remove her from the
    /// configuration, or at the provider, if she may not.
    Revoke {
        /// The user.
        user: String,
        /// The namespace of the web interface. Default: the one of the service account or kubeconfig.
        #[arg(long, short, value_name = "NS")]
        namespace: Option<String>,
        #[command(flatten)]
        secret: SessionsSecret,
    },
    /// What the program starts to render the objects of a VM: reads a job from standard input.
    #[command(hide = true)]
    RenderObjects,
}

#[derive(Args)]
struct SessionsSecret {
    /// The Secret of the program's own namespace that has the sessions which have ended before their time.
    #[arg(long, env = "VM_WEB_SESSIONS_SECRET", value_name = "NAME", default_value = "vm-operator-web-sessions")]
    sessions_secret: String,
}

#[derive(Args)]
struct Serve {
    /// The manager's configuration file, which also has the users and their roles; none is no error.
    #[arg(long, short, env = "VM_OPERATOR_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The namespaces whose VMs are shown: one, several with commas, or `*` for all. Default: what the configuration says, then the one of the
    /// service account or kubeconfig.
    #[arg(long, short, env = "VM_OPERATOR_NAMESPACE", value_name = "NS", value_delimiter = ',')]
    namespace: Vec<String>,
    /// The address on which it listens. Default: the port and hostname of /Manager/GuiSocketServer in the configuration, or [::]:8080.
    #[arg(long, env = "VM_WEB_LISTEN", value_name = "ADDRESS", value_parser = address)]
    listen: Option<SocketAddr>,
    /// A file with at least 32 random bytes, from which the key of sessions is made; or several, a line each: the first makes new sessions, all are
    /// good for old ones. Default: a new key each time.
    #[arg(long, env = "VM_WEB_SESSION_KEY", value_name = "FILE")]
    session_key: Option<PathBuf>,
    #[command(flatten)]
    secret: SessionsSecret,
    /// A file with a certificate (PEM, with those of its issuers): it speaks HTTPS. The file is read again when it changes.
    #[arg(long, env = "VM_WEB_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// A file with the certificate's key (PEM).
    #[arg(long, env = "VM_WEB_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The origin under which people reach it, such as https://vms.example.com, if a proxy changes the Host of requests. May be repeated.
    #[arg(long = "origin", env = "VM_WEB_ORIGIN", value_name = "ORIGIN", value_delimiter = ',')]
    origins: Vec<String>,
    /// The address of a proxy, or a range of addresses such as 10.0.0.0/8: what it says in X-Forwarded-For, Forwarded and X-Forwarded-Proto is
    /// believed. May be repeated. Those of the configuration count, too.
    #[arg(long = "trusted-proxy", env = "VM_WEB_TRUSTED_PROXIES", value_name = "RANGE", value_delimiter = ',')]
    proxies: Vec<Network>,
    /// The address on which it answers the kubelet's probes, /livez and /readyz, and nothing else: without TLS, and whoever else is connected.
    /// Default: only where it listens for everybody.
    #[arg(long, env = "VM_WEB_PROBES", value_name = "ADDRESS", value_parser = address)]
    probes: Option<SocketAddr>,
    /// The format of the log.
    #[arg(long, env = "VM_OPERATOR_LOG_FORMAT", default_value = "text")]
    log_format: log::Format,
}

/// An address to listen on.
fn address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse::<Listen>()?.0.ok_or("it can't be off")
}

fn main() -> ExitCode {
    let Arguments { command, serve } = Arguments::parse();
    let Serve {
        config,
        namespace,
        listen,
        session_key,
        secret,
        tls_cert,
        tls_key,
        origins,
        proxies,
        probes,
        log_format,
    } = serve;
    let scope = (!namespace.is_empty()).then(|| Scope::of(namespace));
    let (sessions_secret, tls) = (secret.sessions_secret, tls_cert.zip(tls_key));
    let options = Options { config, scope, listen, session_key, sessions_secret, tls, origins, proxies, probes };
    log::run_on_one_thread(log_format, async {
        let done = match command {
            None => web::run(options).await,
            Some(Command::RenderObjects) => web::render_objects().map_err(Into::into),
            Some(Command::Revoke { user, namespace, secret }) => {
                web::revoke(&user, namespace.as_deref(), secret.sessions_secret).await
            }
        };
        match done {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                tracing::error!("{error:#}");
                ExitCode::FAILURE
            }
        }
    })
}
