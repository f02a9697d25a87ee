//! What the subcommands share: where things are, and running other programs with errors that help.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

/// The version of Kubernetes that tests and the demo run.
pub const KUBERNETES_VERSION: &str = "1.36.3";

/// The top of the source tree. The helper is never installed, so where it was built is where it works.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What is made in the tree and can be thrown away.
pub fn dev_dir() -> PathBuf {
    root().join(".dev")
}

/// Where slow things are kept that all checkouts share.
pub fn cache_dir() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => {
            PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache")
        }
    };
    Ok(base.join("vm-operator"))
}

/// The Cargo that runs us, or that of the PATH.
pub fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Where Cargo keeps the crates.
pub fn cargo_home() -> Result<PathBuf> {
    match std::env::var_os("CARGO_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => Ok(PathBuf::from(dir)),
        None => {
            Ok(PathBuf::from(std::env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?).join(".cargo"))
        }
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Where programs are that only root needs.
pub const SYSTEM_DIRS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Where a program is on the PATH.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|candidate| candidate.is_file())
}

/// A short name for the contents of files, to find out whether something made of them is up to date.
pub fn fingerprint<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize())[..16].to_owned()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The SHA-256 of a file of any size.
pub fn sha256_file(path: &Path) -> Result<String> {
    let mut file = fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer).with_context(|| format!("reading {}", path.display()))?;
        if count == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..count]);
    }
}

/// Whether a directory is on an overlay, as in a container: another overlay can't lie on that.
pub fn lies_on_overlay(dir: &Path) -> Result<bool> {
    Ok(run(Command::new("stat").args(["--file-system", "--format=%T"]).arg(dir))?.trim() == "overlayfs")
}

/// What cannot be guessed: tokens, names.
pub fn random_hex(bytes: usize) -> Result<String> {
    let mut buffer = vec![0; bytes];
    fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut buffer)).context("reading /dev/urandom")?;
    Ok(hex(&buffer))
}

pub fn write(path: &Path, contents: impl AsRef<[u8]>) -> Result<()> {
    fs::write(path, contents).with_context(|| format!("writing {}", path.display()))
}

pub fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

pub fn make_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("creating the directory {}", path.display()))
}

/// Removes a file or a directory tree; one that is not there is fine.
pub fn remove(path: &Path) -> Result<()> {
    let result = match path.symlink_metadata() {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match result {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Has a directory for one process at a time, however the others end: the kernel lets go of it with its last holder.
/// Nothing while another one has it.
pub fn try_hold(dir: &Path) -> Result<Option<fs::File>> {
    make_dir(dir)?;
    let handle = fs::File::open(dir).with_context(|| format!("opening {}", dir.display()))?;
    match handle.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => return Ok(None),
        Err(fs::TryLockError::Error(error)) => return Err(error).with_context(|| format!("locking {}", dir.display())),
    }
    // Its last holder may have removed it meanwhile.
    let is_still_there = fs::metadata(dir)
        .is_ok_and(|there| handle.metadata().is_ok_and(|held| (held.dev(), held.ino()) == (there.dev(), there.ino())));
    Ok(is_still_there.then_some(handle))
}

/// A directory in the cache to make something in. It goes in the end; if this process is killed, the next one sees to
/// that.
pub struct Stage {
    dir: PathBuf,
    _held: fs::File,
}

impl Stage {
    pub fn new(purpose: &str) -> Result<Self> {
        let all = cache_dir()?.join("stages");
        make_dir(&all)?;
        for old in fs::read_dir(&all).with_context(|| format!("listing {}", all.display()))?.flatten() {
            if let Ok(Some(_held)) = try_hold(&old.path()) {
                remove(&old.path())?;
            }
        }
        let dir = all.join(format!("{purpose}-{}", std::process::id()));
        let held = try_hold(&dir)?.with_context(|| format!("{} is in use", dir.display()))?;
        Ok(Self { dir, _held: held })
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = remove(&self.dir);
    }
}

/// A program that takes long. It is told to end when this process ends: a build that was interrupted does not go on
/// behind the back of whoever tries again.
pub fn tied(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM"]).arg(program);
    command
}

fn describe(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    let mut text = words.join(" ");
    if text.len() > 300 {
        text.truncate(text.floor_char_boundary(300));
        text.push_str(" ...");
    }
    text
}

/// Runs a program quietly; what it printed is in the error if it fails.
pub fn run(command: &mut Command) -> Result<String> {
    let output = run_raw(command)?;
    if !output.status.success() {
        let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stdout));
        bail!("`{}` failed ({}):\n{}", describe(command), output.status, last_lines(&text, 25));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a program quietly, whatever its exit code.
pub fn run_raw(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().with_context(|| format!("starting `{}`", describe(command)))
}

/// Runs a program that speaks for itself on our own output.
pub fn run_loud(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("starting `{}`", describe(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", describe(command));
    }
    Ok(())
}

/// Runs a program that takes long and prints a line on its standard error for each piece of its work, and shows how many
/// there were so far. The lines themselves are in the error if it fails.
pub fn run_counted(command: &mut Command, what: &str) -> Result<()> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting `{}`", describe(command)))?;
    let output = child.stderr.take().context("no pipe from the program")?;
    let is_terminal = std::io::stderr().is_terminal();
    let mut lines: Vec<String> = vec![];
    for line in BufReader::new(output).split(b'\n') {
        lines.push(String::from_utf8_lossy(&line.context("reading what the program says")?).into_owned());
        if is_terminal {
            eprint!("\r    {} {what}", lines.len());
        } else if lines.len().is_multiple_of(500) {
            eprintln!("    {} {what}", lines.len());
        }
    }
    if is_terminal {
        eprintln!();
    }
    let status = child.wait().context("waiting for the program")?;
    if !status.success() {
        bail!("`{}` failed ({status}):\n{}", describe(command), last_lines(&lines.join("\n"), 25));
    }
    Ok(())
}

/// The end of a text, where programs say why they gave up.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].iter().map(|line| format!("  | {line}\n")).collect()
}

/// Asks again and again until there is an answer; the pause is short, because a person or a test waits.
pub fn wait_for<T>(what: &str, limit: Duration, mut check: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = check()? {
            return Ok(value);
        }
        if start.elapsed() > limit {
            bail!("waited {} s in vain for {what}", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
