//! `kubectl vm upload`: a file of this computer becomes the disk of a VM.
//!
//! ```text
//!  file ─▶ size, SHA-256 ─▶ templateValues.import.upload: the container `import` of the VM's Pod waits for that file
//!       └▶ kubectl exec: how much is there? ─▶ the rest ─▶ the container compares the checksum, and fills the disk
//! ```
//!
//! Each piece is written at its place, so that an upload that broke off, or two at once, do no harm. A Pod that takes the place of another one
//! gets the file from its start.

use std::{
    fs::File,
    io::{self, IsTerminal, Read, Seek, SeekFrom, Write},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use clap::Args;
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::{
    ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use sha2::{Digest, Sha256};
use tokio::time::sleep;

use super::{
    cluster::ClusterOptions,
    in_pod::{InPod, Target, start_failed},
    output::{Exit, Failure, Output, chain, note, plain},
    vms::{failure, refused, title},
};
use crate::{
    actions::{
        VmHandle,
        create::{
            DiskImage,
            disk_file::{DiskFile, HEAD},
        },
    },
    api::{Quantity, VirtualMachine},
    explain::upload::{IMPORT_CONTAINER, awaited},
    files::FileError,
    object::INSTANCE_LABEL,
    observed::vms_pod::is_vms_pod,
    process::{RepeatFilter, shell::shell_word},
};

/// The file that the container waits for.
const IMAGE: &str = "/download/image";
/// How often an upload that breaks off goes on without having got further.
const BREAKS: usize = 20;
/// How long to wait before something is tried again.
const REST: Duration = Duration::from_secs(1);
/// How much is sent between two looks at the progress.
const PIECE: usize = 1 << 20;
/// Of a file that is larger it is said that its checksum is computed, because that takes a while.
const LARGE: u64 = 1 << 30;

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    target: Target,
    /// The file: an image of the format qcow2 or raw.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    // A file that can't be sent, or has another size, is not read as a whole first.
    length(&options.file).map_err(FileError::io(&options.file))?;
    let (vm, found) = options.target.read().await?;
    let (who, file) = (title(vm.name()), options.file.display());
    fits(&found, &options.file, None).map_err(|why| Failure::new(format!("{who}: {why}")))?;
    let (image, _) = described(&options.file)?;
    match send(&vm, &options.file, Some(&image), None, options.target.cluster()).await? {
        Sent::All => writeln!(output, "{who}: its disk has {file}")?,
        Sent::Nothing => writeln!(output, "{who}: its disk was filled already: nothing of {file} is sent")?,
    }
    Ok(Exit::Success)
}

/// What became of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The disk has it.
    All,
    /// The disk had been filled before. The guest may have written to it since.
    Nothing,
}

/// The command that sends a file to a VM, for a shell.
pub(super) fn command(vm: &str, namespace: &str, file: &Path) -> String {
    format!("kubectl vm upload {vm} {} -n {namespace}", shell_word(&file.display().to_string()))
}

/// How many bytes a file or a block device has.
fn length(file: &Path) -> io::Result<u64> {
    let kind = std::fs::metadata(file)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::Error::other("this is neither a file nor a block device"));
    }
    File::open(file)?.seek(SeekFrom::End(0))
}

/// What the VM has to know of a file: its size, its checksum, its format. And how large the disk in it is.
///
/// # Errors
/// If it can't be read, or can't become a disk.
pub(super) fn described(file: &Path) -> Result<(DiskImage, u64), Failure> {
    let wrong = FileError::io(file);
    let unfit = |why: &str| Failure::usage(format!("{}: {why}", file.display()));
    let length = length(file).map_err(&wrong)?;
    let mut reader = File::open(file).map_err(&wrong)?;
    let mut head = Vec::new();
    Read::take(&mut reader, HEAD).read_to_end(&mut head).map_err(&wrong)?;
    if head.is_empty() {
        return Err(unfit("this file is empty"));
    }
    let DiskFile { format, disk_size } = DiskFile::of(&head).map_err(|error| unfit(&error.to_string()))?;
    if length > LARGE {
        note(&format!("{}: its checksum is computed first ...", file.display()));
    }
    let (mut sum, mut piece, mut size) = (Sha256::new(), vec![0; PIECE], head.len() as u64);
    sum.update(&head);
    loop {
        let count = reader.read(&mut piece).map_err(&wrong)?;
        let Some(read) = piece.get(..count).filter(|read| !read.is_empty()) else { break };
        sum.update(read);
        size += count as u64;
    }
    let sha256 = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((DiskImage::Upload { size, sha256, format }, disk_size.unwrap_or(size)))
}

/// Whether a VM waits for this file, and how large it is. Without `image` only the size is compared.
fn fits(vm: &VirtualMachine, file: &Path, image: Option<&DiskImage>) -> Result<u64, String> {
    let Some((size, sum)) = awaited(vm) else {
        return Err("it does not wait for a file: `kubectl vm create --image ./FILE` makes a VM that does".into());
    };
    let is_wanted = match image {
        Some(DiskImage::Upload { size: found, sha256, .. }) => (*found, sha256.as_str()) == (size, sum),
        Some(_) => false,
        None => length(file).is_ok_and(|length| length == size),
    };
    if is_wanted {
        return Ok(size);
    }
    Err(format!("it waits for another file than {}: one of {size} bytes with the SHA-256 {sum}", file.display()))
}

/// Sends the file to the VM, and waits until its disk is full. `image`: what the file is, if that is to be compared. `limit`: how long the
/// VM's Pod may take until it waits for the file.
///
/// # Errors
/// If the VM waits for another file, or has no Pod that gets it, or the upload breaks off too often.
pub(super) async fn send(
    vm: &VmHandle,
    file: &Path,
    image: Option<&DiskImage>,
    limit: Option<Duration>,
    cluster: &ClusterOptions,
) -> Result<Sent, Failure> {
    let who = title(vm.name());
    let found = match vm.get().await {
        Ok(found) => found,
        Err(error) => {
            let line = refused(vm.client(), &who, &["get"], Some(vm.namespace()), &error).await;
            return Err(failure(line, &error));
        }
    };
    let size = fits(&found, file, image).map_err(|why| Failure::new(format!("{who}: {why}")))?;
    let again = command(vm.name(), vm.namespace(), file);
    let (mut before, mut breaks, mut sending, mut said) = (None, 0, None::<Seen>, RepeatFilter::default());
    loop {
        let state = container(vm, &found, sending.as_ref(), |seen| seen.import != Import::Waits);
        let state = match limit {
            Some(limit) => tokio::time::timeout(limit, state).await.map_err(|_| Failure::Command {
                lines: vec![format!("{who}: its Pod does not wait for the file yet")],
                exit: Exit::TimeOut,
            })?,
            None => state.await,
        };
        let seen = state?;
        match &seen.import {
            // Nobody knows whether it was this file.
            Import::Done if before.is_none() => return Ok(Sent::Nothing),
            Import::Done => return Ok(Sent::All),
            Import::Failed(why) => return Err(Failure::new(format!("{who}: the disk is not filled: {why}"))),
            Import::Waits | Import::Runs => {}
        }
        let pod = InPod::named(cluster, vm.namespace(), seen.pod.clone());
        if sending.as_ref().is_none_or(|former| former.pod_uid != seen.pod_uid) {
            sending = Some(seen);
        }
        let offset = match offset(&pod).await? {
            Ok(offset) => offset,
            Err(why) if breaks < BREAKS => {
                if said.is_new(&why) {
                    note(&format!("{who}: {why}; trying again"));
                }
                breaks += 1;
                sleep(REST).await;
                continue;
            }
            Err(why) => return Err(Failure::new(format!("{who}: {why}; {again} goes on"))),
        };
        let mut there = offset;
        if offset < size {
            breaks = if before.is_some_and(|before| offset <= before) { breaks + 1 } else { 0 };
            if breaks > BREAKS {
                return Err(Failure::new(format!(
                    "{who}: the upload breaks off at {offset} of {size} bytes; {again} goes on"
                )));
            }
            if before.is_some() || offset > 0 {
                note(&format!("{who}: goes on at {offset} of {size} bytes"));
            }
            before = Some(offset);
            let now = length(file).map_err(FileError::io(file))?;
            if now != size {
                return Err(Failure::new(format!(
                    "{who}: {} has changed: it has {now} bytes, and {size} are waited for",
                    file.display()
                )));
            }
            there = piece(&pod, vm, file, offset, size).await?.unwrap_or(offset);
        }
        if there < size {
            // What is missing shows when the container is asked again.
            continue;
        }
        note(&format!("{who}: all is there; the checksum is compared, and the disk filled"));
        // Another Pod knows nothing of the file.
        let is_other = |seen: &Seen| sending.as_ref().is_none_or(|former| former.pod_uid != seen.pod_uid);
        let has_ended = |seen: &Seen| matches!(seen.import, Import::Done | Import::Failed(_)) || is_other(seen);
        match container(vm, &found, sending.as_ref(), has_ended).await?.import {
            Import::Failed(why) => return Err(Failure::new(format!("{who}: the disk is not filled: {why}"))),
            Import::Done => return Ok(Sent::All),
            Import::Waits | Import::Runs => {
                note(&format!("{who}: its Pod was replaced: the file is sent again"));
                before = Some(there);
            }
        }
    }
}

/// What the container that fills the disk does.
#[derive(Debug, PartialEq, Eq)]
enum Import {
    Waits,
    Runs,
    Done,
    Failed(String),
}

/// The state of the container, and how often it was started again. `before`: how often that was when somebody began to send: failures before
/// that do not count, because the container waits again after them.
fn import_of(pod: &Pod, before: Option<i32>) -> (Import, i32) {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.init_container_statuses.as_ref());
    let Some(container) = containers.into_iter().flatten().find(|it| it.name == IMPORT_CONTAINER) else {
        return (Import::Waits, 0);
    };
    let ContainerStatus { state: Some(state), last_state, restart_count, .. } = container else {
        return (Import::Waits, 0);
    };
    let is_new = before.is_some_and(|before| *restart_count > before);
    let former = last_state.as_ref().filter(|_| is_new).and_then(|state| state.terminated.as_ref());
    let ended = state.terminated.as_ref();
    let import = if ended.is_some_and(|ended| ended.exit_code == 0) {
        Import::Done
    } else if let Some(failed) = ended.filter(|_| before.is_some()).or(former).filter(|ended| ended.exit_code != 0) {
        // The end of its log.
        let why = failed.message.as_deref().and_then(|text| text.trim().lines().last());
        Import::Failed(why.unwrap_or("the container has failed").to_owned())
    } else if state.running.is_some() {
        Import::Runs
    } else {
        Import::Waits
    };
    (import, *restart_count)
}

/// What the container does, how often it was started again, and its Pod.
struct Seen {
    import: Import,
    restarts: i32,
    pod: String,
    pod_uid: String,
}

/// Whether a Pod with the VM's name in its label is that of this VM, and stays. An earlier VM of the name may have filled its disk, another program
/// may use the label too, and a person may have copied the Pod.
fn is_of(pod: &Pod, vm: &VirtualMachine) -> bool {
    pod.metadata.deletion_timestamp.is_none() && is_vms_pod(vm, pod)
}

/// Waits until the container of the VM, as it was `found`, is as it should be. `before`: how it was when somebody began to send.
async fn container(
    vm: &VmHandle,
    found: &VirtualMachine,
    before: Option<&Seen>,
    is_wanted: impl Fn(&Seen) -> bool,
) -> Result<Seen, Failure> {
    let labels = format!("{INSTANCE_LABEL}={}", vm.name());
    let pods = kube::Api::<Pod>::namespaced(vm.client().clone(), vm.namespace());
    let mut pods = std::pin::pin!(watcher(pods, watcher::Config::default().labels(&labels)).applied_objects());
    let mut said = RepeatFilter::default();
    loop {
        match pods.try_next().await {
            Ok(Some(pod)) if is_of(&pod, found) => {
                let pod_uid = pod.uid().unwrap_or_default();
                // The container of another Pod begins to count anew.
                let before = before.filter(|former| former.pod_uid == pod_uid).map(|former| former.restarts);
                let (import, restarts) = import_of(&pod, before);
                let seen = Seen { import, restarts, pod: pod.name_any(), pod_uid };
                if is_wanted(&seen) {
                    return Ok(seen);
                }
            }
            Ok(Some(_)) => {}
            Ok(None) => return Err(Failure::unknown(format!("{vm}: its Pods are no longer watched"))),
            Err(error) if is_final(&error) => return Err(Failure::unknown(chain(vm, &error))),
            Err(error) => {
                let why = chain(vm, &error);
                if said.is_new(&why) {
                    note(&format!("{why}; trying again"));
                }
                sleep(REST).await;
            }
        }
    }
}

/// Whether a watch is refused, so that trying again does not help.
fn is_final(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    matches!(error, InitialListFailed(kube::Error::Api(answer)) | WatchStartFailed(kube::Error::Api(answer)) if [403, 404].contains(&answer.code))
}

/// The same of what kubectl says.
fn is_refused(told: &str) -> bool {
    ["(Forbidden)", "(NotFound)"].iter().any(|reason| told.contains(reason))
}

/// The command that prints how much of the file is there.
fn print_size() -> String {
    format!("stat -c %s {IMAGE}")
}

/// How much of the file is there, or why that can't be seen now.
///
/// # Errors
/// If trying again does not help.
async fn offset(pod: &InPod<'_>) -> Result<Result<u64, String>, Failure> {
    // The container makes the file when it starts.
    let ask = format!("{} 2>/dev/null || echo 0", print_size());
    let mut kubectl = tokio::process::Command::from(pod.exec(IMPORT_CONTAINER, &["--quiet"], &["sh", "-c", &ask]));
    let answer = kubectl.output().await.map_err(start_failed)?;
    let told = plain(String::from_utf8_lossy(&answer.stderr).trim());
    match String::from_utf8_lossy(&answer.stdout).trim().parse() {
        Ok(offset) => Ok(Ok(offset)),
        Err(_) if is_refused(&told) => Err(Failure::new(told)),
        Err(_) if told.is_empty() => Ok(Err("the container that waits for the file does not answer".into())),
        Err(_) => Ok(Err(format!("the container that waits for the file does not answer: {told}"))),
    }
}

/// Sends the file from this place on, until it ends or the connection does. Returns how much is there then, if the connection lasted. The shell that
/// writes says it, because the container that has all of a small file may have ended before it can be asked.
async fn piece(pod: &InPod<'_>, vm: &VmHandle, file: &Path, offset: u64, size: u64) -> Result<Option<u64>, Failure> {
    let wrong = FileError::io(file);
    let mut reader = File::open(file).map_err(&wrong)?;
    reader.seek(SeekFrom::Start(offset)).map_err(&wrong)?;
    let write = format!(
        "dd of={IMAGE} bs=1M iflag=fullblock oflag=seek_bytes seek={offset} conv=notrunc status=none && {}",
        print_size()
    );
    let mut kubectl =
        tokio::process::Command::from(pod.exec(IMPORT_CONTAINER, &["--stdin", "--quiet"], &["sh", "-c", &write]));
    kubectl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
    let mut kubectl = kubectl.spawn().map_err(start_failed)?;
    let Some(mut stdin) = kubectl.stdin.take() else { return Ok(None) };
    let (mut buffer, mut sent) = (vec![0; PIECE], offset);
    let mut progress = Progress::new(vm.name(), size);
    loop {
        let count = reader.read(&mut buffer).map_err(&wrong)?;
        let Some(read) = buffer.get(..count).filter(|read| !read.is_empty()) else { break };
        // What is missing shows when the container is asked again.
        if tokio::io::AsyncWriteExt::write_all(&mut stdin, read).await.is_err() {
            break;
        }
        sent += count as u64;
        progress.show(sent);
    }
    drop(stdin);
    progress.end();
    let ended = kubectl.wait_with_output().await.map_err(start_failed)?;
    if !ended.status.success() {
        sleep(REST).await;
        return Ok(None);
    }
    Ok(String::from_utf8_lossy(&ended.stdout).trim().parse().ok())
}

/// How far an upload is: a line that is written again in a terminal, or a line for each tenth.
struct Progress {
    vm: String,
    size: u64,
    begin: Instant,
    is_terminal: bool,
    shown: Option<Instant>,
    tenth: u64,
}

impl Progress {
    fn new(vm: &str, size: u64) -> Self {
        let is_terminal = io::stderr().is_terminal();
        Self { vm: vm.to_owned(), size, begin: Instant::now(), is_terminal, shown: None, tenth: 0 }
    }

    fn show(&mut self, sent: u64) {
        let tenth = sent.saturating_mul(10) / self.size.max(1);
        let is_time = self.shown.is_none_or(|shown| shown.elapsed() > Duration::from_millis(200));
        if self.is_terminal && is_time {
            self.shown = Some(Instant::now());
            // Nobody is there to be told that standard error is closed.
            let _ = write!(io::stderr(), "\r{}", self.line(sent));
        } else if !self.is_terminal && tenth > self.tenth {
            note(&self.line(sent));
        }
        self.tenth = tenth;
    }

    fn line(&self, sent: u64) -> String {
        let percent = sent.saturating_mul(100) / self.size.max(1);
        let size = Quantity::with_unit(self.size);
        format!("vm/{}: {percent:3} % of {size} are sent ({} s)", self.vm, self.begin.elapsed().as_secs())
    }

    fn end(&self) {
        if self.is_terminal {
            let _ = writeln!(io::stderr());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(state: serde_json::Value, last: serde_json::Value, restarts: i32) -> Pod {
        serde_json::from_value(json!({ "status": { "initContainerStatuses": [
            { "name": "import", "state": state, "lastState": last, "image": "i", "imageID": "", "ready": false, "restartCount": restarts },
        ] } }))
        .unwrap()
    }

    #[test]
    fn the_container_says_how_far_the_import_is() {
        let ended = |code: i32, message: &str| json!({ "terminated": { "exitCode": code, "message": message } });
        let runs = json!({ "running": { "startedAt": "2026-01-01T00:00:00Z" } });
        let waits = json!({ "waiting": { "reason": "CrashLoopBackOff" } });
        let no_space = || Import::Failed("qemu-img: no space".into());
        let failed = ended(1, "waiting for a file\nqemu-img: no space\n");
        for (state, last, restarts, before, expected) in [
            (waits.clone(), json!({}), 0, None, Import::Waits),
            (runs.clone(), json!({}), 0, None, Import::Runs),
            (ended(0, ""), json!({}), 0, None, Import::Done),
            // It failed before this upload, and waits again.
            (failed.clone(), json!({}), 0, None, Import::Waits),
            (runs.clone(), failed.clone(), 1, None, Import::Runs),
            (runs.clone(), failed.clone(), 1, Some(1), Import::Runs),
            // It failed with this one.
            (failed.clone(), json!({}), 1, Some(1), no_space()),
            (waits, failed.clone(), 2, Some(1), no_space()),
            (runs, failed, 2, Some(1), no_space()),
        ] {
            assert_eq!(import_of(&pod(state, last, restarts), before), (expected, restarts));
        }
        assert_eq!(import_of(&Pod::default(), None).0, Import::Waits);
    }

    #[test]
    fn only_the_pod_of_this_vm_counts() {
        let owned = |kind: &str, uid: &str| json!([{ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": kind, "name": "web", "uid": uid }]);
        let vm = crate::test_support::vm(|vm| {
            vm["metadata"]["name"] = json!("web");
            vm["metadata"]["uid"] = json!("vm-2");
        });
        for (name, owners, is_going, expected) in [
            ("web", owned("VirtualMachine", "vm-2"), false, true),
            ("web", owned("VirtualMachine", "vm-2"), true, false),
            ("web", owned("VirtualMachine", "vm-1"), false, false),
            ("web", owned("ReplicaSet", "rs"), false, false),
            ("web", json!([]), false, false),
            // A copy.
            ("web-debug", owned("VirtualMachine", "vm-2"), false, false),
        ] {
            let time = is_going.then_some("2026-01-01T00:00:00Z");
            let metadata = json!({ "name": name, "ownerReferences": owners, "deletionTimestamp": time });
            let pod: Pod = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
            assert_eq!(is_of(&pod, &vm), expected, "{metadata}");
        }
    }

    #[test]
    fn what_is_refused_is_not_tried_again() {
        let status = |code: u16| {
            let status: kube::core::Status = serde_json::from_value(json!({ "code": code })).unwrap();
            watcher::Error::WatchStartFailed(kube::Error::Api(Box::new(status)))
        };
        for (code, expected) in [(403, true), (404, true), (410, false), (429, false), (500, false)] {
            assert_eq!(is_final(&status(code)), expected, "{code}");
        }
        assert!(!is_final(&watcher::Error::NoResourceVersion));
        for (told, expected) in [
            ("Error from server (Forbidden): pods \"web\" is forbidden: User \"alice\" cannot create", true),
            ("Error from server (NotFound): pods \"web\" not found", true),
            ("error: unable to upgrade connection: container not found (\"import\")", false),
            ("error: Internal error occurred: error sending request", false),
            ("", false),
        ] {
            assert_eq!(is_refused(told), expected, "{told}");
        }
    }

    #[test]
    fn only_the_file_that_is_waited_for_is_sent() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut head = vec![0_u8; 104];
        head[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        head[24..32].copy_from_slice(&(20_u64 << 30).to_be_bytes());
        std::fs::write(file.path(), &head).unwrap();
        let (image, disk_size) = described(file.path()).unwrap();
        let DiskImage::Upload { size: 104, format: "qcow2", sha256 } = &image else { panic!("{image:?}") };
        assert_eq!(disk_size, 20 << 30);
        let vm = |upload: serde_json::Value| -> VirtualMachine {
            serde_json::from_value(json!({ "metadata": { "name": "web" }, "spec": {
                "vm": { "maximumCpus": 1 }, "templateValues": { "import": { "upload": upload } },
            } }))
            .unwrap()
        };
        let fits = |upload| fits(&vm(upload), Path::new("a.img"), Some(&image));
        assert_eq!(fits(json!({ "size": 104, "sha256": sha256 })), Ok(104));
        let other = fits(json!({ "size": 14, "sha256": "ab" })).unwrap_err();
        assert_eq!(other, "it waits for another file than a.img: one of 14 bytes with the SHA-256 ab");
        assert!(fits(json!({})).unwrap_err().starts_with("it does not wait for a file"));
        let by_size = |size: u64| super::fits(&vm(json!({ "size": size, "sha256": "ab" })), file.path(), None);
        assert_eq!((by_size(104), by_size(14).is_err()), (Ok(104), true));
        head[15] = 112;
        for (content, complaint) in [(head.as_slice(), "it reads another file"), (&b""[..], "this file is empty")] {
            std::fs::write(file.path(), content).unwrap();
            let failure = described(file.path()).unwrap_err();
            assert!(failure.words().contains(complaint), "{}", failure.words());
        }
        let folder = described(file.path().parent().unwrap()).unwrap_err();
        assert!(folder.words().ends_with("this is neither a file nor a block device"), "{}", folder.words());
    }

    #[test]
    fn the_command_that_goes_on_is_for_a_shell() {
        assert_eq!(command("web", "vms", Path::new("./a.img")), "kubectl vm upload web ./a.img -n vms");
        assert_eq!(command("web", "vms", Path::new("it is.img")), "kubectl vm upload web 'it is.img' -n vms");
    }
}
