//! Completion of a command line: commands, options, and the names of VMs, namespaces and contexts.
//!
//! ```text
//!  kubectl, on TAB    ─▶ kubectl_complete-vm WORD... ""   ─▶ `value<TAB>help` lines and `:DIRECTIVE`
//!  a shell, on TAB    ─▶ COMPLETE=SHELL kubectl-vm -- ... ─▶ what the script of `kubectl-vm completion SHELL` reads
//! ```
//!
//! A link with the name `kubectl_complete-vm` beside the program is what kubectl looks for
//! (<https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/#adding-completion>). Whatever goes wrong, there are no names, and nothing is
//! printed over the command line that somebody types.

use std::{
    ffi::{OsStr, OsString},
    io::Write,
    path::Path,
};

use clap_complete::{
    engine::complete,
    env::{CompleteEnv, Shells},
};

use super::output::Failure;

/// The name under which kubectl starts the program.
const FOR_KUBECTL: &str = "kubectl_complete-vm";
/// The environment variable by which the scripts of shells ask.
const VARIABLE: &str = "COMPLETE";
/// kubectl's directives (`cobra.ShellCompDirective`): no space behind the word, no file names, or what the shell would do.
const NO_SPACE: u8 = 2;
const NO_FILES: u8 = 4;
const DEFAULT: u8 = 0;

/// Answers if the program was started to complete a command line of `command`. Returns whether it was.
pub(super) fn answer(command: fn() -> clap::Command) -> bool {
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_default();
    if Path::new(&program).file_name() == Some(OsStr::new(FOR_KUBECTL)) {
        let answer = for_kubectl(&mut command(), words.collect());
        // If nobody reads it, nobody misses it.
        let _ = std::io::stdout().write_all(answer.as_bytes());
        return true;
    }
    let has_answered = CompleteEnv::with_factory(command)
        .bin("kubectl-vm")
        .try_complete(std::env::args_os(), std::env::current_dir().ok().as_deref());
    has_answered.unwrap_or(true)
}

/// The script that makes a shell ask this program.
pub(super) fn script(shell: clap_complete::Shell) -> Result<String, Failure> {
    let name = shell.to_string();
    let shells = Shells::builtins();
    let completer = shells.completer(&name).ok_or_else(|| Failure::usage(format!("there is no script for {name}")))?;
    let mut script = Vec::new();
    completer
        .write_registration(VARIABLE, "kubectl-vm", "kubectl-vm", "kubectl-vm", &mut script)
        .map_err(|error| Failure::new(error.to_string()))?;
    Ok(String::from_utf8_lossy(&script).into_owned())
}

/// The answer for kubectl: the words are those after `kubectl vm`, and the last one is completed.
fn for_kubectl(command: &mut clap::Command, words: Vec<OsString>) -> String {
    let line: Vec<OsString> = [OsString::from("kubectl-vm")].into_iter().chain(words).collect();
    let last = line.len() - 1;
    let candidates = complete(command, line, last, std::env::current_dir().ok().as_deref());
    let candidates = candidates.unwrap_or_default();
    let visible = || candidates.iter().filter(|candidate| !candidate.is_hide_set());
    let mut text = Vec::new();
    for candidate in visible() {
        let _ = text.write_all(candidate.get_value().as_encoded_bytes());
        // kubectl takes one line for each.
        if let Some(help) = candidate.get_help().map(ToString::to_string)
            && let Some(first) = help.lines().next()
        {
            let _ = write!(text, "\t{first}");
        }
        text.push(b'\n');
    }
    let goes_on = || visible().all(|candidate| candidate.get_value().as_encoded_bytes().ends_with(b":"));
    let directive = match visible().next() {
        None => DEFAULT,
        Some(_) if goes_on() => NO_FILES | NO_SPACE,
        Some(_) => NO_FILES,
    };
    let _ = writeln!(text, ":{directive}");
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, ValueEnum};

    use super::*;

    fn answer_for(words: &[&str]) -> String {
        for_kubectl(&mut super::super::Arguments::command(), words.iter().map(OsString::from).collect())
    }

    #[test]
    fn kubectl_gets_commands_and_options_with_their_help() {
        let commands = answer_for(&["st"]);
        assert!(commands.starts_with("start\tLet VMs run\n") && commands.contains("\nstop\t"), "{commands}");
        assert!(commands.ends_with(":4\n"), "{commands}");
        let options = answer_for(&["stop", "--fo"]);
        assert!(options.starts_with("--force\t"), "{options}");
        assert_eq!(answer_for(&["templates", "pa"]).lines().count(), 2);
    }

    #[test]
    fn where_nothing_is_known_the_shell_completes_file_names() {
        assert_eq!(answer_for(&["nonsense", "x"]), ":0\n");
    }

    #[test]
    fn each_shell_has_a_script() {
        for shell in clap_complete::Shell::value_variants() {
            assert!(script(*shell).unwrap().contains("kubectl-vm"), "{shell}");
        }
    }
}
