//! The socket on which the machine role answers to others in the Pod: a person who runs `vm-runner end` or `vm-runner ctl`, for example by
//! `kubectl exec`, and the agent, which asks what a CD is ([`super::cd`]).
//!
//! Each connection is one [`Request`] and its answer, each a line of JSON.
//!
//! To end a guest needs neither a token of the Pod nor the VirtualMachine, so it works at each moment of a power-down, also when the VM was
//! deleted. It ends only a guest that is being powered down already: otherwise the kubelet would start the guest again.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::future::join_all;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{mpsc, oneshot},
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use super::{
    cd::{self, Answer},
    changes::WantedCd,
    config,
    ctl::{Reply, Task},
    lines::JsonLines,
    runtime_dir::RuntimeDir,
};

/// The time that a line may take to arrive.
const PATIENCE: Duration = Duration::from_secs(5);
/// The pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(200);

/// What the machine role is asked: the form on the socket.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Request {
    /// To end the guest. The answer says whether it does: it refuses if the guest is not being powered down.
    End,
    /// What QEMU opens for each of these CDs, as the configuration names them. The answer is a list of [`Answer`].
    Media(Vec<String>),
    /// To do something with the guest. The answer is a [`Reply`].
    Task(Task),
}

/// What [`Control`] hands on to who supervises QEMU.
pub enum Asked {
    /// To end the guest.
    End(EndRequest),
    /// To do something with the guest.
    Task(TaskRequest),
}

/// A request to do something with the guest.
pub struct TaskRequest {
    /// What to do.
    pub task: Task,
    /// The file for a picture.
    pub picture: PathBuf,
    reply: oneshot::Sender<Reply>,
}

impl TaskRequest {
    /// Answers. The command may have been interrupted meanwhile; then nobody takes a picture away.
    pub fn answer(self, reply: Reply) {
        if self.reply.send(reply).is_err() {
            let _ = fs::remove_file(self.picture);
        }
    }
}

/// The machine role's side. It listens until it is dropped.
pub struct Control {
    server: JoinHandle<()>,
    asked: mpsc::Receiver<Asked>,
}

/// A request to end the guest.
pub struct EndRequest(oneshot::Sender<bool>);

impl EndRequest {
    /// Answers whether the guest is being ended. The command may have been interrupted meanwhile.
    pub fn answer(self, is_ending: bool) {
        let _ = self.0.send(is_ending);
    }
}

impl Control {
    /// Listens on the socket. `config_dir` has the configuration with the folders of which a CD may be.
    ///
    /// # Errors
    /// If the socket cannot be created.
    pub fn listen(runtime: &RuntimeDir, config_dir: &Path) -> io::Result<Self> {
        // The socket of an earlier runner.
        let _ = fs::remove_file(runtime.control());
        let listener = UnixListener::bind(runtime.control())?;
        let (sender, asked) = mpsc::channel(1);
        let server = Server {
            config_dir: config_dir.to_owned(),
            runtime: runtime.clone(),
            asks: sender,
            pictures: Arc::default(),
        };
        Ok(Self { server: tokio::spawn(serve(listener, server)), asked })
    }

    /// The next request that is about the guest.
    pub async fn asked(&mut self) -> Asked {
        match self.asked.recv().await {
            Some(request) => request,
            // The task has panicked.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// What each connection needs.
#[derive(Clone)]
struct Server {
    config_dir: PathBuf,
    runtime: RuntimeDir,
    asks: mpsc::Sender<Asked>,
    /// How many pictures were made.
    pictures: Arc<AtomicU64>,
}

async fn serve(listener: UnixListener, server: Server) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let server = server.clone();
                    connections.spawn(async move {
                        if let Err(error) = server.answer(stream).await {
                            debug!(%error, "a request to the machine role was not answered");
                        }
                    });
                }
                Err(error) => {
                    warn!(%error, "cannot accept a request to the machine role");
                    sleep(PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

impl Server {
    async fn answer(&self, stream: UnixStream) -> io::Result<()> {
        let mut lines = JsonLines::over(stream);
        // No guest runs any more.
        let gone = || io::Error::from(io::ErrorKind::UnexpectedEof);
        match receive(&mut lines, PATIENCE).await? {
            Request::End => {
                let (sender, is_ending) = oneshot::channel();
                self.asks.send(Asked::End(EndRequest(sender))).await.map_err(|_| gone())?;
                lines.send(&[], &is_ending.await.map_err(|_| gone())?).await
            }
            Request::Task(task) => {
                let (reply, answer) = oneshot::channel();
                let picture = self.runtime.picture(self.pictures.fetch_add(1, Ordering::Relaxed));
                let request = TaskRequest { task, picture, reply };
                self.asks.send(Asked::Task(request)).await.map_err(|_| gone())?;
                lines.send(&[], &answer.await.map_err(|_| gone())?).await
            }
            Request::Media(texts) => lines.send(&[], &media(&texts, &self.config_dir).await?).await,
        }
    }
}

async fn media(texts: &[String], config_dir: &Path) -> io::Result<Vec<Answer>> {
    let configuration = config::read(config_dir).map_err(io::Error::other)?;
    let folders = cd::folders(&configuration.config.cd_folders);
    let media = texts.iter().map(async |text| cd::medium(text, &folders).await.map_err(|refusal| refusal.to_string()));
    Ok(join_all(media).await)
}

async fn receive<T: DeserializeOwned>(lines: &mut JsonLines, patience: Duration) -> io::Result<T> {
    let message = timeout(patience, lines.receive()).await??.ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(serde_json::from_value(message)?)
}

/// Asks the machine role to end the guest. Returns false if it refuses, because the guest is not being powered down.
///
/// # Errors
/// If no VM runs, or its runner does not answer.
pub async fn end(runtime: &RuntimeDir) -> io::Result<bool> {
    ask(runtime, &Request::End).await
}

/// Asks the machine role to do something with the guest.
///
/// # Errors
/// If no VM runs, or its runner does not answer.
pub async fn carry_out(runtime: &RuntimeDir, task: Task) -> io::Result<Reply> {
    ask(runtime, &Request::Task(task)).await
}

/// A question what CDs are, which is asked in a task of its own: the machine role may have to wait for a server. The task ends with this.
pub struct MediaQuestion {
    /// The CDs.
    pub cds: Vec<WantedCd>,
    task: JoinHandle<Vec<Answer>>,
}

impl MediaQuestion {
    /// Asks the machine role. If it does not answer, all CDs are refused.
    pub fn ask(runtime: &RuntimeDir, cds: Vec<WantedCd>) -> Self {
        let asked: Vec<String> = cds.iter().map(|cd| cd.text.clone()).collect();
        let runtime = runtime.clone();
        let task = tokio::spawn(async move {
            let refuse = |error| vec![Err(format!("the machine role does not answer: {error}")); asked.len()];
            media_of(&runtime, asked.clone()).await.unwrap_or_else(refuse)
        });
        Self { cds, task }
    }

    /// The answers, in the order of the CDs.
    pub async fn answers(&mut self) -> Vec<Answer> {
        (&mut self.task).await.unwrap_or_default()
    }
}

impl Drop for MediaQuestion {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Asks the machine role what these CDs are.
///
/// # Errors
/// If it does not answer, or with something else.
async fn media_of(runtime: &RuntimeDir, texts: Vec<String>) -> io::Result<Vec<Answer>> {
    let number = texts.len();
    let answers: Vec<Answer> = ask(runtime, &Request::Media(texts)).await?;
    if answers.len() == number { Ok(answers) } else { Err(io::ErrorKind::InvalidData.into()) }
}

async fn ask<T: DeserializeOwned>(runtime: &RuntimeDir, request: &Request) -> io::Result<T> {
    let mut lines = JsonLines::connect(&runtime.control()).await?;
    lines.send(&[], request).await?;
    receive(&mut lines, 4 * PATIENCE).await
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::render::command_line::Medium;

    fn runtime(directory: &Path) -> RuntimeDir {
        RuntimeDir::open(directory).unwrap()
    }

    #[tokio::test]
    async fn a_request_to_end_the_guest_gets_its_answer() {
        let directory = tempfile::tempdir().unwrap();
        let runtime = runtime(directory.path());
        assert!(end(&runtime).await.is_err(), "no VM runs");
        for is_ending in [true, false] {
            let mut control = Control::listen(&runtime, directory.path()).unwrap();
            let (asked, ()) = tokio::join!(end(&runtime), async {
                let Asked::End(request) = control.asked().await else { panic!("a task") };
                request.answer(is_ending);
            });
            assert_eq!(asked.unwrap(), is_ending);
        }
    }

    #[tokio::test]
    async fn a_cd_is_looked_up_in_the_folders_of_the_configuration_whoever_asks_what_else() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let runtime = runtime(&root);
        let config = format!(
            "/Runner:\n  namespace: a\n  cdFolders: [{}]\n  vm: {{name: a, maximumCpus: 1, maximumRam: 1Gi}}\n",
            root.display()
        );
        fs::write(root.join("config.yaml"), config).unwrap();
        let iso = root.join("a.iso").to_str().unwrap().to_owned();
        fs::write(&iso, "").unwrap();
        let _control = Control::listen(&runtime, &root).unwrap();
        // Somebody who connects and says nothing, and somebody who talks nonsense.
        let _silent = UnixStream::connect(runtime.control()).await.unwrap();
        UnixStream::connect(runtime.control()).await.unwrap().write_all(b"hello\n").await.unwrap();
        let answers = media_of(&runtime, vec![iso.clone(), "/etc/passwd".into()]).await.unwrap();
        assert_eq!(answers[0], Ok(Medium::File(iso)));
        assert!(answers[1].as_ref().is_err_and(|refusal| refusal.contains("cdFolders")), "{answers:?}");
    }
}
