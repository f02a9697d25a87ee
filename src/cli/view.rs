//! `kubectl vm view`: the guest's screen in a viewer for VNC on this computer.
//!
//! ```text
//!  viewer ─▶ a port of this computer ─▶ API server (pods/portforward) ─▶ the relay in the Pod ─▶ QEMU
//! ```
//!
//! The relay ([`crate::relay`]) decides who uses the screen; this command shows what it asks, and passes the answer on.

use std::{
    env,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
};

use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use futures::{SinkExt, StreamExt};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, api::ApiResource};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, Lines, Stdin},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
};
use tokio_tungstenite::tungstenite::Message;

use super::{
    cluster::ClusterOptions,
    in_pod::{pod_of, read_vm},
    output::{Exit, Failure, Output, note},
    stdio,
    vms::{failure, refused_about, vm_names},
};
use crate::{
    actions::VmHandle,
    client::relay::Access,
    process::ErrorChain,
    relay::{Answer, Closed, Console, Hello, News, Wish, secret_name},
};

/// The program that shows the screen, if no other one is named: virt-viewer's.
const VIEWER: &str = "remote-viewer";
/// How much is read at once.
const PIECE: usize = 32 << 10;

#[derive(Args)]
pub(super) struct Options {
    /// The VM.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vm_names))]
    vm: String,
    #[command(flatten)]
    cluster: ClusterOptions,
    /// Only look: keys and pointer do not reach the guest, and whoever uses the screen goes on.
    #[arg(long)]
    watch: bool,
    /// If another user has the screen, ask for it: without an answer within 10 s it is yours.
    #[arg(long, conflicts_with_all = ["watch", "take"])]
    ask: bool,
    /// If another user has the screen, take it at once.
    #[arg(long, conflicts_with = "watch")]
    take: bool,
    /// Who you are, as the other viewers see it. Default: your name on this computer.
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// The viewer, which gets the address vnc://127.0.0.1:PORT. Default: remote-viewer.
    #[arg(long, value_name = "PROGRAM")]
    viewer: Option<PathBuf>,
    /// Start no viewer: print the address, and go on until Ctrl-C.
    #[arg(long, conflicts_with = "viewer")]
    proxy_only: bool,
    /// The port of this computer. Default: a free one.
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    port: u16,
}

impl Options {
    fn hello(&self) -> Result<Hello, Failure> {
        let user = self.user.clone().or_else(|| env::var("USER").ok()).filter(|name| !name.is_empty());
        let user = user.ok_or_else(|| Failure::usage("say who you are: --user, because $USER is not set"))?;
        let mut session = [0; 8];
        getrandom::fill(&mut session).map_err(|error| Failure::new(format!("a name for this session: {error}")))?;
        let wish = match (self.watch, self.ask, self.take) {
            (true, ..) => Wish::Watch,
            (_, true, _) => Wish::Ask,
            (.., true) => Wish::TakeOver,
            _ => Wish::Control,
        };
        let hello = Hello { user, session: format!("kubectl-{:016x}", u64::from_be_bytes(session)), wish };
        match hello.problem() {
            Some(problem) => Err(Failure::new(problem.to_owned())),
            None => Ok(hello),
        }
    }
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let hello = options.hello()?;
    let (vm, found) = read_vm(&options.vm, &options.cluster).await?;
    let port = found.status.as_ref().and_then(|status| status.runner.relay_port).filter(|port| *port > 0);
    let pod = pod_of(&vm, &found).await?;
    let (Some(port), Some(pod)) = (port, pod) else {
        let (name, namespace) = (vm.name(), vm.namespace());
        return Err(Failure::new(format!(
            "{vm}: nothing leads to its screen: its guest does not run, or its Pod is from before the relay, or the manager's \
             configuration has relay: false; kubectl vm explain {name} -n {namespace} says whether it runs"
        )));
    };
    let screen = Screen { access: access(&vm).await?, vm, pod, port, hello };
    let failed = |error: io::Error| Failure::new(format!("listen on 127.0.0.1:{}: {error}", options.port));
    let listener = TcpListener::bind(("127.0.0.1", options.port)).await.map_err(failed)?;
    let address = format!("vnc://{}", listener.local_addr().map_err(failed)?);
    let mut answers = Answers::new();
    let mut viewer = match options.proxy_only {
        true => None,
        false => start(options.viewer.as_deref(), &address)?,
    };
    if viewer.is_none() {
        writeln!(output, "{address}")?;
        output.flush()?;
    }
    if viewer.is_none() && !options.proxy_only {
        note(&format!("there is no {VIEWER} here: start a viewer for VNC with this address"));
    }
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            status = ended(viewer.as_mut()) => return without_connection(options.viewer.as_deref(), status),
        };
        let (stream, _) = accepted.map_err(failed)?;
        let shown = tokio::select! {
            shown = screen.show(stream, &mut answers) => shown,
            _ = ended(viewer.as_mut()) => return Ok(Exit::Success),
        };
        match shown {
            // Somebody may look again.
            Ok(()) if options.proxy_only => {}
            Ok(()) => return Ok(Exit::Success),
            Err(failure) if options.proxy_only => note(&failure.words()),
            Err(failure) => return Err(failure),
        }
    }
}

/// What the VM's Secret has.
async fn access(vm: &VmHandle) -> Result<Access, Failure> {
    let name = secret_name(vm.name());
    let secrets: Api<Secret> = Api::namespaced(vm.client().clone(), vm.namespace());
    let secret = match secrets.get(&name).await {
        Ok(secret) => secret,
        Err(error) => {
            let (resource, what) = (ApiResource::erase::<Secret>(&()), format!("{vm}: Secret {name}"));
            let refused = refused_about(vm.client(), &resource, &what, &["get"], Some(vm.namespace()), &error).await;
            return Err(failure(refused, &error));
        }
    };
    Access::of_secret(&secret).map_err(|error| Failure::new(format!("{vm}: Secret {name}: {error}")))
}

/// Starts the viewer. `None`: there is none on this computer, and none was named.
fn start(named: Option<&Path>, address: &str) -> Result<Option<Child>, Failure> {
    let program = named.unwrap_or(Path::new(VIEWER));
    let mut command = Command::new(program);
    command.arg(address).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    match command.spawn() {
        Ok(child) => Ok(Some(child)),
        Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::new(format!("start {}: {error}", program.display()))),
    }
}

/// Waits for the viewer's end. Never returns without a viewer.
async fn ended(viewer: Option<&mut Child>) -> io::Result<ExitStatus> {
    match viewer {
        Some(viewer) => viewer.wait().await,
        None => std::future::pending().await,
    }
}

/// The end of a viewer that has not connected.
fn without_connection(named: Option<&Path>, status: io::Result<ExitStatus>) -> Result<Exit, Failure> {
    let program = named.unwrap_or(Path::new(VIEWER)).display();
    match status {
        Ok(status) if status.success() => Ok(Exit::Success),
        Ok(status) => Err(Failure::new(format!(
            "{program} ended without a connection ({status}); --proxy-only prints the address for another viewer"
        ))),
        Err(error) => Err(Failure::new(format!("wait for {program}: {error}"))),
    }
}

/// What the person at the terminal types: answers to questions.
struct Answers(Option<Lines<BufReader<Stdin>>>);

impl Answers {
    fn new() -> Self {
        Self(io::stdin().is_terminal().then(|| BufReader::new(tokio::io::stdin()).lines()))
    }

    /// Whether the other user gets the screen.
    async fn next(&mut self) -> bool {
        if let Some(lines) = &mut self.0 {
            while let Ok(Some(line)) = lines.next_line().await {
                match line.trim() {
                    "y" | "yes" => return true,
                    "n" | "no" => return false,
                    _ => note("y or n?"),
                }
            }
            self.0 = None;
        }
        std::future::pending().await
    }
}

/// The screen of a VM.
struct Screen {
    vm: VmHandle,
    pod: String,
    port: u16,
    access: Access,
    hello: Hello,
}

impl Screen {
    /// Connects a viewer with the screen, until one of them ends.
    async fn show(&self, viewer: TcpStream, answers: &mut Answers) -> Result<(), Failure> {
        let (_forwarder, relay) = stdio::connect(&self.vm, &self.pod, self.port).await?;
        let failed = |error: &dyn std::fmt::Display| Failure::new(format!("{}: {error}", self.vm));
        let opened = self.access.open(relay, Console::Vnc.path()).await;
        let mut relay = opened.map_err(|error| failed(&ErrorChain(&error)))?;
        let hello = serde_json::to_string(&self.hello).map_err(|error| failed(&error))?;
        relay.send(Message::text(hello)).await.map_err(|error| failed(&error))?;
        self.carry(viewer, &mut relay, answers).await
    }

    async fn carry<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        viewer: TcpStream,
        relay: &mut crate::client::relay::Socket<S>,
        answers: &mut Answers,
    ) -> Result<(), Failure> {
        let (mut keys, mut screen) = viewer.into_split();
        let failed = |error: &dyn std::fmt::Display| Failure::new(format!("{}: {error}", self.vm));
        let (mut buffer, mut asked) = (vec![0; PIECE], None);
        // What the viewer says before the relay has let it in waits.
        let mut is_connected = false;
        loop {
            tokio::select! {
                count = keys.read(&mut buffer), if is_connected => match count {
                    Ok(0) | Err(_) => return Ok(()),
                    Ok(count) => {
                        let bytes = buffer.get(..count).unwrap_or_default().to_vec();
                        relay.send(Message::binary(bytes)).await.map_err(|error| failed(&error))?;
                    }
                },
                agrees = answers.next(), if asked.is_some() => if let Some(id) = asked.take() {
                    let answer = serde_json::to_string(&Answer { id, agrees }).map_err(|error| failed(&error))?;
                    relay.send(Message::text(answer)).await.map_err(|error| failed(&error))?;
                },
                message = relay.next() => match message {
                    Some(Ok(Message::Binary(bytes))) => if screen.write_all(&bytes).await.is_err() { return Ok(()) },
                    Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                        Ok(News::Connected { .. }) => is_connected = true,
                        Ok(news) => asked = self.tell(&news, asked),
                        Err(error) => return Err(failed(&error)),
                    },
                    Some(Ok(Message::Close(Some(frame)))) => {
                        return Err(failed(&why(frame.code.into(), &frame.reason)));
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(failed(&error)),
                    None => return Err(failed(&"the connection broke")),
                },
            }
        }
    }

    /// Tells the person what the relay says. Returns the question that is open.
    fn tell(&self, news: &News, asked: Option<u64>) -> Option<u64> {
        match news {
            News::Connected { .. } => asked,
            News::Asking { user, seconds } => {
                note(&format!(
                    "{}: {user} has the screen, and is asked; without an answer it is yours in {seconds} s",
                    self.vm
                ));
                asked
            }
            News::Question { id, user, seconds } => {
                note(&format!("{}: {user} asks for the screen, and gets it in {seconds} s. Now? y or n", self.vm));
                Some(*id)
            }
            News::Withdrawn { id } => asked.filter(|open| open != id),
        }
    }
}

/// Why the relay has ended the connection.
fn why(code: u16, reason: &str) -> String {
    match Closed::of(code) {
        Some(Closed::GuestEnded) => "the guest has ended".into(),
        Some(Closed::InUse) => {
            format!("{reason} has the screen: --ask asks for it, --take takes it, --watch looks at it")
        }
        Some(Closed::Refused) => "the user who has the screen does not give it away".into(),
        Some(Closed::TakenOver) => format!("{reason} has the screen now"),
        Some(Closed::NoConsole) => format!("it has no screen: {reason}"),
        Some(Closed::BadRequest | Closed::RelayEnds) | None => format!("the relay has ended the connection: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_viewer_that_fails_is_an_error() {
        use std::os::unix::process::ExitStatusExt;

        let ended = |code: i32| without_connection(Some(Path::new("vncviewer")), Ok(ExitStatus::from_raw(code << 8)));
        assert_eq!(ended(0).unwrap(), Exit::Success);
        let failure = ended(1).unwrap_err();
        assert!(
            failure.words().starts_with("vncviewer ended without a connection (exit status: 1)"),
            "{}",
            failure.words()
        );
    }

    #[test]
    fn the_end_of_a_connection_says_what_to_do() {
        let text = |closed: Closed, reason: &str| why(closed as u16, reason);
        assert!(text(Closed::InUse, "ann").starts_with("ann has the screen: --ask"));
        assert_eq!(text(Closed::TakenOver, "bob"), "bob has the screen now");
        assert_eq!(why(1001, "bye"), "the relay has ended the connection: bye");
    }
}
