//! What commands print, how they fail, and with which exit code.

use std::{
    fmt,
    io::{self, Write},
    process::ExitCode,
};

use anstyle::AnsiColor;
use serde_json::Value;
use similar::{ChangeTag, TextDiff};

pub(super) use crate::observed::printable as plain;
use crate::{files::FileError, process::ErrorChain};

/// The exit codes of all commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Exit {
    Success = 0,
    Negative = 1,
    Usage = 2,
    Unknown = 3,
    TimeOut = 4,
    Partly = 5,
}

impl Exit {
    pub const ALL: [Self; 6] = [Self::Success, Self::Negative, Self::Usage, Self::Unknown, Self::TimeOut, Self::Partly];

    /// For the help text.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Success => "success; diff: no difference; plan: nothing happens; lint, templates test: no error",
            Self::Negative => {
                "an error; diff: differences; plan: effects; lint, templates test: errors; explain: a cause"
            }
            Self::Usage => "the command line is wrong",
            Self::Unknown => "diff, plan: an error, so the differences are not known; others: no answer of a cluster",
            Self::TimeOut => "what was waited for did not happen in time",
            Self::Partly => "of several VMs, some succeeded and some did not",
        }
    }

    /// [`Exit::Negative`] if there are differences, errors or the like.
    pub fn negative_if(is_negative: bool) -> Self {
        if is_negative { Self::Negative } else { Self::Success }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        (exit as u8).into()
    }
}

/// Why a command ended early.
#[derive(Debug)]
pub(super) enum Failure {
    /// It could not do what it should.
    Command {
        /// What is wrong, line by line. Where a file is wrong: `FILE:LINE:COLUMN: what`, which compilers print and editors
        /// understand.
        lines: Vec<String>,
        exit: Exit,
    },
    /// Its results can't be written.
    Output(io::Error),
}

impl Failure {
    pub fn new(line: impl Into<String>) -> Self {
        Self::Command { lines: vec![line.into()], exit: Exit::Negative }
    }

    /// The command line is wrong, which only shows when it is used.
    pub fn usage(line: impl Into<String>) -> Self {
        Self::Command { lines: vec![line.into()], exit: Exit::Usage }
    }

    /// Something that a cluster did not answer, so that the result of the command is not known.
    pub fn unknown(line: impl Into<String>) -> Self {
        Self::Command { lines: vec![line.into()], exit: Exit::Unknown }
    }

    /// The same failure of a command that finds out whether something differs: it did not.
    pub fn undetermined(self) -> Self {
        match self {
            Self::Command { lines, .. } => Self::Command { lines, exit: Exit::Unknown },
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => Self::Output(error),
            Self::Output(error) => Self::unknown(format!("standard output: {error}")),
        }
    }

    /// What is wrong, in a line.
    pub fn words(&self) -> String {
        match self {
            Self::Command { lines, .. } => lines.join("; "),
            Self::Output(error) => format!("standard output: {error}"),
        }
    }

    /// Prints what is wrong on standard error and returns the exit code.
    ///
    /// A reader of the results that has seen enough (`| head`) closes the pipe: that is a success.
    pub fn report(self) -> Exit {
        let (lines, exit) = match self {
            Self::Command { lines, exit } => (lines, exit),
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return Exit::Success,
            Self::Output(error) => (vec![format!("standard output: {error}")], Exit::Negative),
        };
        for line in lines {
            note(&line);
        }
        exit
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        let (line, column) = error.at.unwrap_or((1, 1));
        Self::new(format!("{}:{line}:{column}: {}", error.file.display(), error.message))
    }
}

/// An error of the API server about an object.
pub(super) fn chain(object: impl fmt::Display, error: &(dyn std::error::Error + 'static)) -> String {
    format!("{object}: {}", ErrorChain(error))
}

/// Prints a line on standard error.
pub(super) fn note(line: &str) {
    // Nobody is there to be told that standard error is closed.
    let _ = writeln!(anstream::stderr(), "{line}");
}

/// Where a command writes its results, as they come. Colours may be in them: the writer removes them where nobody sees them.
pub(super) struct Output<'a>(&'a mut dyn Write);

impl<'a> Output<'a> {
    pub fn new(writer: &'a mut dyn Write) -> Self {
        Self(writer)
    }

    /// For `write!` and `writeln!`.
    pub fn write_fmt(&mut self, arguments: fmt::Arguments<'_>) -> Result<(), Failure> {
        self.0.write_fmt(arguments).map_err(Failure::Output)
    }

    pub fn flush(&mut self) -> Result<(), Failure> {
        self.0.flush().map_err(Failure::Output)
    }
}

/// A value as YAML.
pub(super) fn yaml(value: &Value) -> Result<String, Failure> {
    crate::yaml::unfolded(value).map_err(|error| Failure::new(error.to_string()))
}

/// `1 file`, `2 files`.
pub(super) fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// The lines that differ, with three around them, in colours.
pub(super) fn difference(old: &str, new: &str) -> String {
    let colour =
        |colour: AnsiColor, line: String| format!("{}{line}{}", colour.on_default().render(), anstyle::Reset.render());
    let diff = TextDiff::from_lines(old, new);
    let mut text = String::new();
    for hunk in diff.unified_diff().context_radius(3).iter_hunks() {
        text += &colour(AnsiColor::Cyan, hunk.header().to_string());
        text.push('\n');
        for change in hunk.iter_changes() {
            let line = change.value().trim_end_matches('\n');
            text += &match change.tag() {
                ChangeTag::Delete => colour(AnsiColor::Red, format!("-{line}")),
                ChangeTag::Insert => colour(AnsiColor::Green, format!("+{line}")),
                ChangeTag::Equal => format!(" {line}"),
            };
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Closed(io::ErrorKind);

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_has_seen_enough_is_no_error() {
        for (kind, exit) in [(io::ErrorKind::BrokenPipe, Exit::Success), (io::ErrorKind::StorageFull, Exit::Negative)] {
            let failure = write!(Output::new(&mut Closed(kind)), "text").unwrap_err();
            assert_eq!(failure.report(), exit, "{kind}");
        }
    }

    #[test]
    fn only_lines_near_a_change_are_shown() {
        let old: String = (1..=9).map(|number| format!("{number}\n")).collect();
        let text = anstream::adapter::strip_str(&difference(&old, &old.replace('5', "five"))).to_string();
        assert_eq!(text, "@@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n 8\n");
        assert_eq!(difference(&old, &old), "");
    }
}
