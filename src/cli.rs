//! The kubectl plugin `kubectl vm`: it renders and plans with the same functions as the manager.
//!
//! ```text
//!  arguments ─▶ run(command) ─▶ results, written as they come ─▶ standard output
//!                   └─▶ Failure ─▶ standard error, exit code
//! ```
//!
//! [`output`] has the exit codes, [`cluster`] the connection to a cluster, [`input`] the files that commands read. The other
//! modules are the commands. [`vm_file`] is for `vm-runner run FILE`.

mod belongings;
mod cluster;
mod complete;
mod console;
mod create;
mod diff;
mod display;
#[cfg(test)]
mod documents;
mod dump;
mod edit;
mod events;
mod explain;
mod export;
mod expose;
mod format;
mod guest;
mod import;
mod in_pod;
mod input;
mod installed;
mod jsonpath;
mod lint;
mod list;
mod manifest;
mod migrate_check;
mod output;
mod password;
mod plan;
mod pool;
mod power;
mod render;
mod rollout;
mod ssh;
mod stdio;
mod templates;
mod top;
mod upload;
mod view;
pub mod vm_file;
mod vms;
mod wait;
mod write;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{CommandFactory, Parser, Subcommand};

use self::output::{Exit, Failure, Output};
use crate::{actions, api::crd, files::FileError};

/// Works with VMs and with the templates that they are rendered from.
#[derive(Parser)]
#[command(name = "kubectl-vm", bin_name = "kubectl vm", version, propagate_version = true, after_help = exit_codes())]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the version.
    Version,
    /// List VMs, as `kubectl get vms` does.
    #[command(visible_alias = "ls")]
    List(list::Options),
    /// Create VMs, and wait until their guests are up; or print manifests for Git.
    ///
    ///   kubectl vm create web --image debian:13
    ///   kubectl vm create web --image debian:13 --dry-run=client -o yaml > web.yaml
    ///   kubectl vm create web --cd https://.../installer.iso --disk 40Gi
    ///
    /// What --image names fills the disk before the first start. That needs the template set
    /// import-disk in the manager's namespace (but for claim:NAME), and cloud-init in the image, which
    /// makes the user.
    /// With --cd alone the disk is empty.
    #[command(verbatim_doc_comment)]
    Create(create::Options),
    /// Print the manifest of a VM that another program describes: libvirt, Proxmox, KubeVirt, OVF (VMware, VirtualBox).
    ///
    ///   virsh dumpxml web | kubectl vm import - > web.yaml
    ///   kubectl vm import /etc/pve/qemu-server/101.conf --name web | kubectl apply -f -
    ///
    /// Standard error lists what is changed (the guest sees other hardware) and what has no
    /// equivalent, as FILE:LINE: what. Comments in the manifest say how the disks' content is
    /// copied. No cluster is asked; the manifest is checked as the API server would check it.
    #[command(verbatim_doc_comment)]
    Import(import::Options),
    /// Upload a file into the disk of a VM that waits for it, from where an earlier upload ended.
    ///
    /// A VM waits for a file if `kubectl vm create --image ./FILE` made it, or its manifest. The checksum is compared in the Pod.
    Upload(upload::Options),
    /// Let VMs run.
    ///
    /// A VM that runs is left as it is, and that is a success. If a GitOps controller applies spec.vm.state, it would take the start back:
    /// then the command says which one, and does nothing without --yes.
    Start(power::StartOptions),
    /// Shut down the guests of VMs, and leave the VMs stopped.
    ///
    /// The guest has the VM's powerdownTimeout to shut down.
    Stop(power::StopOptions),
    /// Shut down the guests of VMs and start them again, with all changes that wait for the next start.
    ///
    /// GitOps controllers do not take a restart back.
    Restart(power::Options),
    /// Restart the VMs of which something waits for the next start, wave by wave.
    ///
    /// A wave waits until its VMs are Ready (and their guests have booted, if they had). If one does not become Ready in time, the rollout
    /// stops: it says which, which VMs were not touched, and how to go on. VMs that do not run are left out. A rollout that was
    /// interrupted goes on where it was.
    Rollout(rollout::Options),
    /// Press the reset button of VMs: their guests start again at once, without a shutdown, in the same Pod.
    Reset(power::Options),
    /// Ask the guests of VMs to reboot. This needs QEMU's guest agent in the guest.
    Reboot(power::Options),
    /// Pause VMs: their CPUs stand still, their memory stays.
    Pause(power::Options),
    /// Let paused VMs go on.
    #[command(visible_alias = "unpause")]
    Resume(power::Options),
    /// Set how many CPUs and how much memory guests have, and which CDs are in their drives.
    #[command(subcommand)]
    Set(edit::Set),
    /// Give VMs more hardware.
    #[command(subcommand)]
    Add(edit::Add),
    /// Make what VMs have larger.
    #[command(subcommand)]
    Grow(edit::Grow),
    /// Show the guest's serial console in this terminal, from its last output on; Ctrl-] leaves.
    ///
    /// It waits until the guest runs, and goes on with the next guest after a restart.
    Console(console::Options),
    /// Show the guest's screen in a viewer for VNC on this computer. One user has it; others may watch, ask for it, or take it.
    ///
    /// The command ends with the viewer. Without one it prints an address for any viewer. It needs neither a network of the VM nor a password: it goes
    /// through the API server to the relay in the VM's Pod.
    View(view::Options),
    /// Show what is known of the guest of a VM: its system, addresses, users, file systems. Most of it comes from QEMU's guest agent in the guest.
    Guest(guest::Options),
    /// Show what guests use of CPUs, memory, disks and network: live in a terminal, with keys to start and stop VMs and for their consoles; elsewhere, or
    /// with --once or -o, as a table or data.
    ///
    /// It runs `vm-runner ctl stats` in the VMs' Pods. Nothing is written into the VMs.
    Top(top::Options),
    /// Print the log of a VM: what its runner says, and what the guest writes on its serial console.
    Logs(in_pod::LogOptions),
    /// Forward ports of this computer to the guest of a VM, which needs a network of type pod. Ctrl-C ends it.
    ///
    /// With --stdio it is one connection, on standard input and output, for example as ssh's ProxyCommand:
    /// `ssh -o ProxyCommand='kubectl vm port-forward VM --stdio %p' USER@VM`. It ends when the guest closes the connection.
    PortForward(in_pod::ForwardOptions),
    /// Log in to the guest of a VM with OpenSSH, or run a command there. The VM needs a network of type pod.
    ///
    ///   kubectl vm ssh web
    ///   kubectl vm ssh ada@web -- uptime
    ///   kubectl vm ssh web -- -N -L 8080:localhost:80
    ///
    /// The agent, the keys, ~/.ssh/config and known_hosts are those of ssh. There the guest is called
    /// vm.NAME.NAMESPACE. The exit code is that of ssh: that of the command in the guest, or 255.
    #[command(verbatim_doc_comment)]
    Ssh(ssh::LoginOptions),
    /// Copy files from and to the guest of a VM with OpenSSH. The VM needs a network of type pod.
    ///
    ///   kubectl vm scp page.html web:/var/www
    ///   kubectl vm scp -r ada@web:photos .
    ///
    /// A path with a colon before its first slash is in the guest, so ./a:b is on this computer. The exit
    /// code is that of scp.
    #[command(verbatim_doc_comment)]
    Scp(ssh::CopyOptions),
    /// Print a configuration with which ssh, scp, rsync and editors reach the guests of VMs, as vm.NAME.NAMESPACE.
    ///
    ///   kubectl vm ssh-config --all > ~/.ssh/vms
    ///
    /// and at the head of ~/.ssh/config: Include vms
    #[command(verbatim_doc_comment)]
    SshConfig(ssh::ConfigOptions),
    /// Create a Service that leads to the guest of a VM, also before it runs. The VM needs a network of type pod.
    ///
    ///   kubectl vm expose web --port 80
    ///   kubectl vm expose web --port 27017 --target-port 22 --name ssh --type LoadBalancer
    ///
    /// The Service stays when the VM is deleted, as that of `kubectl expose` does.
    #[command(verbatim_doc_comment)]
    Expose(expose::Options),
    /// Write a picture of the guest's screen into a file.
    Screenshot(in_pod::ScreenshotOptions),
    /// Press keys of the guest's keyboard, such as ctrl-alt-delete.
    SendKey(in_pod::KeyOptions),
    /// Wait until VMs are as they should be.
    ///
    /// What is waited for is on standard error, whenever it changes. Exit code 4: the time is over.
    Wait(wait::Options),
    /// Say why VMs do not run, or are not as their spec wants them: the cause first, in one line with what to do.
    ///
    /// For one VM that is named the stages from the manager to QEMU follow, a line each. What you have no right to read is named, and everything
    /// else is said nevertheless. Several VMs have only their first lines; without a name it is all VMs of the namespace.
    ///
    /// Exit code 1: there is a cause. 0: each VM is as its spec wants it, or is on its way. 5: some of the VMs could not be read.
    Explain(explain::Options),
    /// Show all that there is to know of a VM on one page: what is wanted and what is, disks, Pod, changes that wait, last events.
    Status(explain::StatusOptions),
    /// Print the events of a VM and of its objects, the oldest first.
    Events(events::Options),
    /// Collect all that a bug report about a VM needs in an archive: the VM, its objects, events, logs, templates, the manager's log.
    ///
    /// Secrets are masked. What you have no right to read is named in a file of the archive, and everything else is in it.
    Dump(dump::Options),
    /// Print a VM as the objects of another system, with the list of what is changed or left out.
    ///
    ///   kubectl vm export web --to kubevirt > web.yaml
    ///
    /// The list is on standard error, and as comments at the head of the file. For a VM of the
    /// cluster the claims, the UUID and the MAC addresses are those that it has.
    #[command(verbatim_doc_comment)]
    Export(export::Options),
    /// Show pools, give their VMs to users, and take them back.
    #[command(subcommand)]
    Pool(pool::Command),
    /// Print the password of a VM's display.
    ///
    /// Standard error says when it ends. With a viewer, `kubectl vm display` is simpler.
    Password(password::Options),
    /// Print the objects that the manager would create for the VMs of a file, as YAML.
    ///
    /// The VMs are checked as the API server checks them. No cluster is asked, except for templates with --installed: what depends on one
    /// (a UID, a random password, claims that exist) is as for a new VM. A comment before each object says which files and blocks it comes
    /// from. Errors are printed as FILE:LINE:COLUMN: what.
    Render(render::Options),
    /// Show what would change in the cluster, object by object, and when: at once, at the next start, or never.
    ///
    /// The VM is in the cluster, or comes from a file. Without --templates it is rendered with the templates of the cluster.
    /// With --templates the folder stands for the templates for all VMs and for the named sets in it; other sets are those of the cluster.
    /// Nothing is changed: the API server is asked for what it would do (a dry run). Exit code 1 means that there are differences, 3 that
    /// there was an error, so that they could not be determined, or not all of them.
    Diff(diff::Options),
    /// Say what changed templates, a changed configuration or another version of the operator would do to each VM: nothing, live, restart or refused.
    ///
    ///   kubectl vm plan --templates my-templates
    ///   kubectl vm plan -A --config config.yaml -v
    ///   kubectl vm plan
    ///
    /// Without --templates and --config it is what the built-in templates of this program would
    /// do, if a manager of its version came. VMs are rendered as they are now and with the change,
    /// and both are planned as the manager does it. A set that the manager would not use is
    /// refused for all its VMs. Nothing is changed. Effects:
    ///
    ///   nothing   the VM does not notice
    ///   start     no guest runs; the next start is with the change
    ///   live      objects change at once, while the guest runs
    ///   restart   something waits for the next start: see `kubectl vm rollout`
    ///   refused   the change, or a part of it, is not carried out
    ///
    /// Exit code 0: nothing for all VMs; 1: something would happen, or is refused; 3: it is not
    /// known of all VMs.
    #[command(verbatim_doc_comment)]
    Plan(plan::Options),
    /// Say what happens to the VMs of a namespace of VM-Operator (the program in Java) when the manager takes it over. Nothing is changed.
    ///
    /// Each VM stays the same, changes, or needs attention: a person should do something before, or before the VM gets this project's
    /// runner. What you have no right to read is named and not judged. Exit code 1: something needs attention.
    MigrateCheck(migrate_check::Options),
    /// Print the connection file with which remote-viewer connects to the display of a VM.
    ///
    ///   kubectl vm display NAME | remote-viewer -
    ///
    /// If the password of the display secret has ended or ends within 10s, the command writes a new
    /// one, which is valid for --valid-for, and waits until the runner has set it.
    #[command(verbatim_doc_comment)]
    Display(display::Options),
    /// Find what is wrong with a folder of templates, or may surprise.
    ///
    /// Syntax, names that are not in scope, habits of Helm's templates, blocks and files that have no effect, guard rails, and the schema of
    /// the objects that are rendered, with the VMs of --filename or a few built-in ones. No cluster is asked without --installed.
    Lint(lint::Options),
    /// List, print, create, test and pack templates, and go back to a former version.
    #[command(subcommand)]
    Templates(templates::Command),
    /// Print the CustomResourceDefinitions, or write them into a folder.
    Crds {
        /// The folder. Each definition becomes a file in it.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Print a script that completes this command in a shell, for `source`.
    ///
    /// kubectl itself completes `kubectl vm` if a link kubectl_complete-vm to this program is in the PATH.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages.
    #[command(hide = true)]
    Man {
        /// The folder.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}

/// The table of exit codes, for the help text.
fn exit_codes() -> String {
    let lines = Exit::ALL.map(|exit| format!("\n  {}  {}", exit as u8, exit.meaning()));
    format!("Exit codes:{}\nssh and scp end with the exit code of OpenSSH.", lines.concat())
}

/// Runs the program.
pub fn main() -> ExitCode {
    if complete::answer(Arguments::command) {
        return Exit::Success.into();
    }
    let command = Arguments::parse().command;
    // It removes colours where nobody sees them.
    let mut stdout = anstream::stdout();
    let mut output = Output::new(&mut stdout);
    let result = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            let result = runtime.block_on(run(&command, &mut output));
            // Without waiting for who reads standard input, which may never end.
            runtime.shutdown_background();
            result
        }
        Err(error) => Err(Failure::new(format!("there is no runtime: {error}"))),
    };
    result.unwrap_or_else(Failure::report).into()
}

/// Runs a command and returns its exit code.
async fn run(command: &Command, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let exit = match command {
        Command::Version => print_version(output)?,
        Command::Crds { out } => crds(out.as_deref(), output)?,
        Command::Completion { shell } => completion(*shell, output)?,
        Command::Man { out } => man(out)?,
        Command::Create(options) => create::run(options, output).await?,
        Command::Import(options) => import::run(options, output)?,
        Command::Upload(options) => upload::run(options, output).await?,
        Command::List(options) => list::run(options, output).await?,
        Command::Start(options) => power::start(options, output).await?,
        Command::Stop(options) => power::stop(options, output).await?,
        Command::Restart(options) => power::run(actions::power::Command::Restart, options, output).await?,
        Command::Rollout(options) => rollout::run(options, output).await?,
        Command::Reset(options) => power::run(actions::power::Command::Reset, options, output).await?,
        Command::Reboot(options) => power::run(actions::power::Command::Reboot, options, output).await?,
        Command::Pause(options) => power::run(actions::power::Command::Pause, options, output).await?,
        Command::Resume(options) => power::run(actions::power::Command::Resume, options, output).await?,
        Command::Set(command) => edit::set(command, output).await?,
        Command::Add(command) => edit::add(command, output).await?,
        Command::Grow(command) => edit::grow(command, output).await?,
        Command::Console(options) => console::run(options, output).await?,
        Command::View(options) => view::run(options, output).await?,
        Command::Status(options) => explain::status(options, output).await?,
        Command::Explain(options) => explain::run(options, output).await?,
        Command::Events(options) => events::run(options, output).await?,
        Command::Export(options) => export::run(options, output).await?,
        Command::Dump(options) => dump::run(options, output).await?,
        Command::Pool(command) => pool::run(command, output).await?,
        Command::Password(options) => password::run(options, output).await?,
        Command::Top(options) => top::run(options, output).await?,
        Command::Guest(options) => guest::run(options, output).await?,
        Command::Logs(options) => in_pod::logs(options, output).await?,
        Command::PortForward(options) => in_pod::port_forward(options, output).await?,
        Command::Expose(options) => expose::run(options, output).await?,
        Command::Ssh(options) => ssh::login(options, output).await?,
        Command::Scp(options) => ssh::copy(options, output).await?,
        Command::SshConfig(options) => ssh::config(options, output).await?,
        Command::Screenshot(options) => in_pod::screenshot(options, output).await?,
        Command::SendKey(options) => in_pod::send_key(options, output).await?,
        Command::Wait(options) => wait::run(options, output).await?,
        Command::Render(options) => render::run(options, output).await?,
        Command::Diff(options) => diff::run(options, output).await?,
        Command::MigrateCheck(options) => migrate_check::run(options, output).await?,
        Command::Plan(options) => plan::run(options, output).await?,
        Command::Display(options) => display::run(options, output).await?,
        Command::Lint(options) => lint::run(options, output).await?,
        Command::Templates(command) => templates::run(command, output).await?,
    };
    output.flush()?;
    Ok(exit)
}

fn print_version(output: &mut Output<'_>) -> Result<Exit, Failure> {
    writeln!(output, concat!("kubectl-vm ", env!("CARGO_PKG_VERSION")))?;
    Ok(Exit::Success)
}

fn crds(folder: Option<&Path>, output: &mut Output<'_>) -> Result<Exit, Failure> {
    for (name, text) in crd::files().map_err(|error| Failure::new(error.to_string()))? {
        match folder.map(|folder| folder.join(&name)) {
            Some(file) => fs::write(&file, text).map_err(FileError::io(&file))?,
            None => write!(output, "---\n{text}")?,
        }
    }
    Ok(Exit::Success)
}

fn completion(shell: clap_complete::Shell, output: &mut Output<'_>) -> Result<Exit, Failure> {
    write!(output, "{}", complete::script(shell)?)?;
    Ok(Exit::Success)
}

/// Writes a page for the command and one for each subcommand.
fn man(folder: &Path) -> Result<Exit, Failure> {
    fs::create_dir_all(folder).map_err(FileError::io(folder))?;
    // The pages are called kubectl-vm-stop.1, as man(1) finds them.
    let command = Arguments::command().bin_name("kubectl-vm");
    clap_mangen::generate_to(command, folder).map_err(FileError::io(folder))?;
    Ok(Exit::Success)
}

/// The options of a command, as words on its command line.
#[cfg(test)]
fn parsed<T: clap::Args>(line: &str) -> Result<T, clap::Error> {
    let mut matches = T::augment_args(clap::Command::new("test"))
        .try_get_matches_from(std::iter::once("test").chain(line.split_whitespace()))?;
    T::from_arg_matches_mut(&mut matches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_wrong_command_line_has_its_exit_code() {
        let error = Arguments::try_parse_from(["kubectl-vm", "nonsense"]).err().unwrap();
        assert_eq!(error.exit_code(), Exit::Usage as i32);
    }

    #[test]
    fn the_help_lists_the_exit_codes() {
        let help = Arguments::command().render_help().to_string();
        for exit in Exit::ALL {
            assert!(help.contains(&format!("\n  {}  {}", exit as u8, exit.meaning())), "{help}");
        }
    }

    /// The blocks of the pages that a test records on a node.
    fn recorded() -> String {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let files = files.filter(|file| file.extension().is_some_and(|end| end == "md"));
        let pages: Vec<String> = files.map(|file| std::fs::read_to_string(file).unwrap()).collect();
        let blocks = pages.iter().flat_map(|page| page.split("<!-- recorded: ").skip(1));
        blocks.filter_map(|block| block.split("```").nth(1)).collect()
    }

    #[test]
    fn every_command_is_recorded_on_a_node() {
        // Those that ask no cluster: docs/templates.md has them. `diff` is tried by the tests of templates.
        let elsewhere = ["version", "render", "diff", "lint", "templates", "crds", "completion", "help", "man"];
        let recorded = recorded();
        let typed = |words: &str| {
            let mut lines = recorded.lines().filter(|line| line.starts_with("$ "));
            lines.any(|line| {
                line.contains(&format!("kubectl vm {words} ")) || line.ends_with(&format!("kubectl vm {words}"))
            })
        };
        let commands = Arguments::command();
        for command in commands.get_subcommands().filter(|command| !elsewhere.contains(&command.get_name())) {
            let (name, parts) = (command.get_name(), command.get_subcommands().collect::<Vec<_>>());
            assert!(!parts.is_empty() || typed(name), "no recorded block has `kubectl vm {name}`");
            for part in parts {
                let words = format!("{name} {}", part.get_name());
                assert!(typed(&words), "no recorded block has `kubectl vm {words}`");
            }
        }
    }

    #[tokio::test]
    async fn a_closed_pipe_ends_a_command_successfully() {
        struct Full(usize);

        impl std::io::Write for Full {
            fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
                self.0 = self.0.checked_sub(1).ok_or(std::io::ErrorKind::BrokenPipe)?;
                Ok(text.len())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }

        for arguments in [&["version"] as &[&str], &["crds"], &["templates", "blocks"], &["completion", "bash"]] {
            let command = Arguments::parse_from([&["kubectl-vm"], arguments].concat()).command;
            let failure = run(&command, &mut Output::new(&mut Full(0))).await.unwrap_err();
            assert_eq!(failure.report(), Exit::Success, "{arguments:?}");
        }
    }
}
