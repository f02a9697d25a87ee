//! Blocks of the documentation with commands and what they print, typed as a person would, and compared.
//!
//! A comment before a block says where its output comes from: `<!-- recorded: NAME -->`, the tests of `pages.rs`, or `<!-- examples -->`, nowhere: there
//! is no output, or that of another program. With `VM_OPERATOR_TEST_UPDATE=1` a block is written anew where it differs. A line `...` stands for any lines.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use regex::Regex;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    LIMIT,
    support::{
        cluster::{XTASK, eventually},
        terminal::Screen,
    },
};

/// The namespace of the examples.
pub const PLACE: &str = "vms";

/// What differs between two runs.
fn normal(text: &str) -> Vec<String> {
    let rules = [
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
        (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
        (r"^[\w+/-]{22}$", "PASSWORD"),
        (r"\b[0-9a-f]{8}\b", "VERSION"),
        (r"\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b", "MAC"),
        (r"\bfe80::[0-9a-f:]+", "ADDRESS"),
        (r"\b\d+\.\d+\.\d+\.\d+(/\d+)?\b", "ADDRESS"),
        (r"://ADDRESS:\d+", "://ADDRESS"),
        (r"ssh-ed25519 \S+", "KEY"),
        (r"\b\d+\.\d+\.\d+-\d+-cloud-amd64\b", "KERNEL"),
        (r"\b(\d+ min )?\d+ s\b", "DURATION"),
        (r"\b((\d+\.)?\d+(ms|s|m|h|d))+\b", "AGE"),
        // QEMU 10.0 sometimes stands still, and the runner ends it (src/runner/stall.rs).
        (r", started again \d+ times$", ""),
        (r"^guest: starts=\d+$", "guest: starts=N"),
        (r"\bgeneration \d+\b", "generation N"),
        // How often an event was seen.
        (r" \(x\d+\)$", ""),
        (" +", " "),
    ];
    let rules = rules.map(|(pattern, name)| (Regex::new(pattern).unwrap(), name));
    let line = |line: &str| {
        rules.iter().fold(line.to_owned(), |line, (pattern, name)| pattern.replace_all(&line, *name).into_owned())
    };
    text.trim_end().lines().map(line).map(|line| line.trim_end().to_owned()).collect()
}

/// Whether the page's lines are those that were printed. Which states of a VM a command has seen on the way, if any, depends on the machine's speed, so
/// these lines need not be there. Events have no order: they come from several programs within a second.
fn is_same(page: &str, printed: &str) -> bool {
    let on_the_way = Regex::new(
        r"^vm/\S+: (Pending|Starting|Running|Stopping|Paused|Failed|Unknown|Stopped, \w+)[,:].*\(DURATION\)$",
    )
    .unwrap();
    let (mut lines, mut others) = (normal(page), normal(printed));
    let has_some = |lines: &[String]| lines.iter().any(|line| on_the_way.is_match(line));
    let is_whole = !lines.iter().any(|line| line.trim() == "...");
    if is_whole && !has_some(&lines) && has_some(&others) {
        return false;
    }
    lines.retain(|line| !on_the_way.is_match(line));
    others.retain(|line| !on_the_way.is_match(line));
    let are_same = match (events(&mut lines), events(&mut others)) {
        (Some(lines), Some(others)) if is_whole => lines == others,
        (Some(lines), Some(others)) => lines.iter().filter(|line| *line != "...").all(|line| others.contains(line)),
        (lines, others) => lines == others,
    };
    if !are_same {
        return false;
    }
    for lines in [&mut lines, &mut others] {
        // The guest gets its address while it says these.
        lines.chunk_by_mut(|line, next| [line, next].iter().all(|it| it.starts_with("guest: "))).for_each(<[_]>::sort);
    }
    fits(&lines, &others)
}

/// Takes the events from the end of a page, sorted.
fn events(lines: &mut Vec<String>) -> Option<Vec<String>> {
    let begin = lines.iter().position(|line| line.starts_with("LAST SEEN") || line.starts_with("Events "))?;
    let events = lines.split_off(begin).into_iter();
    let mut events: Vec<String> = events.map(|line| line.trim_start_matches("Events").trim().to_owned()).collect();
    events.sort();
    Some(events)
}

fn fits(page: &[String], printed: &[String]) -> bool {
    match page.split_first() {
        None => printed.is_empty(),
        Some((first, rest)) if first.trim() == "..." => {
            (0..=printed.len()).any(|skipped| fits(rest, &printed[skipped..]))
        }
        Some((first, rest)) => printed.first() == Some(first) && fits(rest, &printed[1..]),
    }
}

/// A screen whose figures and identifiers may be others.
fn shape(screen: &str) -> String {
    let mac = r"\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b";
    let rules = [(r"\b[0-9a-f]{32}\b", "ID"), (mac, "MAC"), (r"~?\d+(\.\d+)?(Ki|Mi|Gi|%)?", "N")];
    rules.iter().fold(screen.to_owned(), |screen, (pattern, name)| {
        Regex::new(pattern).unwrap().replace_all(&screen, *name).into_owned()
    })
}

/// The comment before the block of that name, and how the block begins.
fn mark(name: &str) -> String {
    format!("<!-- recorded: {name} -->\n```\n")
}

/// The pages of the documentation.
fn pages() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|end| end == "md")).collect()
}

/// A block of a page.
struct Block {
    file: PathBuf,
    before: String,
    text: String,
    after: String,
}

impl Block {
    fn find(name: &str) -> Self {
        let mark = mark(name);
        let found = pages().into_iter().find_map(|file| {
            let page = fs::read_to_string(&file).unwrap();
            let begin = page.find(&mark)? + mark.len();
            let end = begin + page[begin..].find("```").unwrap();
            let [before, text, after] = [&page[..begin], &page[begin..end], &page[end..]].map(str::to_owned);
            Some(Self { file, before, text, after })
        });
        found.unwrap_or_else(|| panic!("no page has the block {name}"))
    }

    /// The commands, each with what it printed.
    fn commands(&self) -> Vec<(String, String)> {
        let text = format!("\n{}", self.text);
        let parts = text.split("\n$ ").skip(1);
        parts
            .map(|part| {
                let (command, printed) = part.split_once('\n').unwrap_or((part, ""));
                let printed = printed.trim_end_matches('\n');
                (command.to_owned(), if printed.is_empty() { String::new() } else { format!("{printed}\n") })
            })
            .collect()
    }

    /// Writes the block anew, or fails with what is wrong in it.
    fn settle(name: &str, new: &str, wrong: &[String]) {
        if wrong.is_empty() {
            return;
        }
        let Self { file, before, text: _, after } = Self::find(name);
        println!("{}, block {name}:\n{}", file.display(), wrong.join("\n"));
        let is_update = std::env::var_os("VM_OPERATOR_TEST_UPDATE").is_some();
        assert!(is_update, "{}, block {name}: not what is printed", file.display());
        fs::write(file, format!("{before}{new}{after}")).unwrap();
    }
}

fn difference(command: &str, expected: &str, printed: &str) -> String {
    format!("$ {command}\n--- the page has\n{expected}--- printed is\n{printed}")
}

/// A person at a terminal, in an empty folder, with OpenSSH's files and a kubeconfig for [`PLACE`].
pub struct Desk {
    home: TempDir,
    code: Cell<i32>,
    /// What was started with `&`: it ends with the block.
    background: RefCell<Vec<Running>>,
    /// The blocks that were typed.
    typed: RefCell<BTreeSet<String>>,
}

/// A program that ends with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Desk {
    /// With the rights of the kubeconfig.
    pub fn new(kubeconfig: &Path) -> Self {
        let home = tempfile::tempdir().unwrap();
        let place = home.path().display().to_string();
        for folder in ["bin", ".kube", ".ssh", "desk"] {
            fs::create_dir(home.path().join(folder)).unwrap();
        }
        let mut kubeconfig: Value = serde_yaml::from_str(&fs::read_to_string(kubeconfig).unwrap()).unwrap();
        kubeconfig["contexts"][0]["name"] = json!("vm-operator");
        kubeconfig["current-context"] = json!("vm-operator");
        kubeconfig["contexts"][0]["context"]["namespace"] = json!(PLACE);
        let desk = Self { home, code: Cell::new(0), background: RefCell::default(), typed: RefCell::default() };
        desk.write(".kube/config", &kubeconfig.to_string());
        let (own_home, own_path) = (std::env::var("HOME").unwrap_or_default(), std::env::var("PATH").unwrap());
        desk.program(
            "kubectl",
            &format!(
                "if [ \"$1\" = vm ]; then shift; exec {} \"$@\"; fi\n\
                 KUBECONFIG={place}/.kube/config HOME={own_home} PATH='{own_path}' exec {XTASK} kubectl -- \"$@\"",
                env!("CARGO_BIN_EXE_kubectl-vm"),
            ),
        );
        // OpenSSH looks for its files in the home that the machine knows.
        for name in ["ssh", "scp"] {
            desk.program(name, &format!("PATH='{own_path}' exec {name} -F {place}/.ssh/config \"$@\""));
        }
        desk.write(
            ".ssh/config",
            &format!(
                "Include {place}/.ssh/vms\nHost *\n  IdentityFile {place}/.ssh/id_ed25519\n  UserKnownHostsFile {place}/.ssh/known_hosts\n  \
                 StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
            ),
        );
        desk.run("ssh-keygen -q -t ed25519 -N '' -C ann@desk -f ~/.ssh/id_ed25519");
        desk
    }

    /// Where a file of the person is.
    pub fn file(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Writes a file of the person.
    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.file(name), text).unwrap();
    }

    fn program(&self, name: &str, script: &str) {
        let file = self.home.path().join("bin").join(name);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", line])
            .env("PATH", format!("{}:{}", self.home.path().join("bin").display(), std::env::var("PATH").unwrap()))
            .env("HOME", self.home.path())
            .env("USER", "ann")
            .env("TERM", "xterm")
            .env_remove("KUBECONFIG")
            .env_remove("SSH_AUTH_SOCK")
            .current_dir(self.home.path().join("desk"));
        command
    }

    /// As the page has it.
    fn seen(&self, text: &str) -> String {
        text.replace(env!("CARGO_BIN_EXE_kubectl-vm"), "/usr/local/bin/kubectl-vm")
    }

    /// Types a command, and returns what it prints.
    pub fn run(&self, line: &str) -> String {
        if line == "echo $?" {
            return format!("{}\n", self.code.get());
        }
        if let Some(line) = line.strip_suffix(" &") {
            let mut child = self.command(&format!("exec {line} 2>&1")).stdout(Stdio::piped()).spawn().unwrap();
            let mut first = String::new();
            let mut output = BufReader::new(child.stdout.take().unwrap());
            output.read_line(&mut first).unwrap();
            // It may say more, and ends if nobody reads that.
            std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
            self.background.borrow_mut().push(Running(child));
            return self.seen(&first);
        }
        let output = self.command(&format!("{{ {line}\n}} 2>&1")).stdin(Stdio::null()).output().unwrap();
        self.code.set(output.status.code().unwrap());
        self.seen(&String::from_utf8_lossy(&output.stdout))
    }

    /// Types a command that has to succeed.
    pub fn does(&self, line: &str) -> String {
        println!("$ {line}");
        let printed = self.run(line);
        assert_eq!(self.code.get(), 0, "{line}: {printed}");
        printed
    }

    /// Types the commands of a block, and compares what they print; before the command of that number the test does something.
    pub async fn types_with(&self, name: &str, mut before: impl AsyncFnMut(usize)) {
        let block = Block::find(name);
        let (mut new, mut wrong) = (String::new(), Vec::new());
        for (number, (command, expected)) in block.commands().into_iter().enumerate() {
            before(number).await;
            let begin = std::time::Instant::now();
            let printed = self.run(&command);
            println!("{name}: {:.1} s: $ {command}", begin.elapsed().as_secs_f32());
            let kept = if is_same(&expected, &printed) {
                expected
            } else {
                wrong.push(difference(&command, &expected, &printed));
                printed
            };
            new += &format!("$ {command}\n{kept}");
            if !kept.is_empty() && !kept.ends_with('\n') {
                new.push('\n');
            }
        }
        assert!(!new.is_empty(), "the block {name} has no command");
        self.background.borrow_mut().clear();
        self.typed.borrow_mut().insert(name.to_owned());
        Block::settle(name, &new, &wrong);
    }

    /// Types the commands of a block, and compares what they print.
    pub async fn types(&self, name: &str) {
        self.types_with(name, async |_| ()).await;
    }

    /// Types the one command of a block in a terminal, and compares what is on its screen when the person has done `look`. Then the keys end the program.
    pub async fn looks_at(&self, name: &str, look: impl AsyncFnOnce(&mut Screen), leave: &str) {
        let block = Block::find(name);
        let [(command, expected)] = &block.commands()[..] else { panic!("the block {name} has not one command") };
        let (mut screen, child) = Screen::open(self.command(&format!("exec {command}")), 14, 110);
        let mut child = Running(child);
        look(&mut screen).await;
        let text = self.seen(&screen.text());
        let text = format!("{}\n", text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end());
        screen.press(leave);
        let status = eventually(&format!("the end of {command}"), LIMIT, async || child.0.try_wait().unwrap()).await;
        assert!(status.success(), "{command}: {status}");
        let wrong = (!is_same(&shape(expected), &shape(&text))).then(|| difference(command, expected, &text));
        let new = format!("$ {command}\n{text}");
        self.typed.borrow_mut().insert(name.to_owned());
        Block::settle(name, &new, &wrong.into_iter().collect::<Vec<_>>());
    }

    /// Fails if a page has a block that nobody has typed.
    pub fn has_typed_all(&self) {
        assert_eq!(*self.typed.borrow(), recorded());
    }
}

/// The blocks that a test records, in all pages.
fn recorded() -> BTreeSet<String> {
    let mark = Regex::new("<!-- recorded: ([a-z-]+) -->\n```\n").unwrap();
    let texts = pages().into_iter().map(|file| fs::read_to_string(file).unwrap());
    texts.flat_map(|text| mark.captures_iter(&text).map(|found| found[1].to_owned()).collect::<Vec<_>>()).collect()
}

/// Every block of the page about commands with commands and output is recorded, or is an example.
#[test]
fn each_block_of_the_page_says_where_its_output_is_from() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/commands.md")).unwrap();
    let parts: Vec<&str> = text.split("```").collect();
    for (before, block) in parts.iter().zip(&parts[1..]).step_by(2).filter(|(_, block)| block.contains("\n$ ")) {
        let comment = before.trim_end().lines().last().unwrap_or_default();
        assert!(
            comment == "<!-- examples -->" || comment.starts_with("<!-- recorded: "),
            "a block of docs/commands.md has no comment that says where its output is from:\n{block}"
        );
    }
}

#[test]
fn a_comparison_sees_what_matters() {
    for (page, printed, expected) in [
        ("a 10.0.0.1 b\n", "a    10.200.3.4 b\n", true),
        ("vm/a started (now Running, 41 s)", "vm/a started (now Running, 0 s)", true),
        ("vm/a started", "vm/a stopped", false),
        ("since 2026-01-01T00:00:00Z", "since 2026-11-25T21:24:41Z", true),
        ("a\n...\nd", "a\nb\nc\nd", true),
        ("a\n...\nd", "a\nb\nc", false),
        (
            "vm/a: Starting: x (0 s)\nvm/a started",
            "vm/a: Stopping: y (2 s)\nvm/a: Starting: x (3 s)\nvm/a started",
            true,
        ),
        ("vm/a: Starting: x (0 s)\nvm/a started", "vm/a started", true),
        ("vm/a started", "vm/a: Starting: x (0 s)\nvm/a started", false),
        ("...", "vm/a: Starting: x (3 s)\nvm/a started", true),
        ("vm/b: Running: x (0 s)\nvm/a: Stopped, Wanted: y (0 s)\nvm/a: z", "vm/b: Running: x (1 s)\nvm/a: z", true),
        ("LAST SEEN\n1s b\n2s a", "LAST SEEN\n3s a\n3s b", true),
        ("LAST SEEN\n1s b\n2s a", "LAST SEEN\n3s a\n3s b\n4s c", false),
        ("LAST SEEN\n1s b\n...", "LAST SEEN\n3s a\n3s b\n4s c", true),
        ("LAST SEEN\n1s d\n...", "LAST SEEN\n3s a\n3s b\n4s c", false),
        ("Pod a\nEvents 1s b\n...", "Pod a\nEvents 3s a\n3s b", true),
        ("Pod a\nEvents 1s b\n...", "Pod a\nmore\nEvents 3s a\n3s b", false),
        ("Pod a\nEvents 1s b", "Pod a", false),
        ("Pod a\nEvents 1s b\n2s b\n2s c", "Pod a\nEvents 1s b\n2s c\n3s c", false),
        ("guest: up\nguest: address", "guest: address\nguest: up", true),
        ("", "a", false),
    ] {
        assert_eq!(is_same(page, printed), expected, "{page:?} {printed:?}");
    }
    assert_eq!(shape("web  Running  ~3%  412Mi 2.9Ki"), shape("web  Running  150%  9Mi 0"));
    assert_eq!(shape("card 52:54:00:aa:03:7f"), shape("card 52:54:00:12:fd:3b"));
    assert_ne!(shape("web  Running"), shape("web  Stopped"));
}
