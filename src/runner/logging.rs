//! The runner's log levels. They come from the file `logging.properties`, which has the content of the VM's
//! `spec.loggingProperties`.
//!
//! Existing users write properties of `java.util.logging` there. The runner uses only the levels: `.level` is the level of
//! all messages. Of the levels of names that begin with `org.jdrupes.vmoperator`, the most verbose one is the level of the runner's
//! own messages.
//!
//! The environment variable `VM_RUNNER_LOG` has precedence over the file. It has the syntax of [`Targets`]. The more powerful
//! `EnvFilter` is not used, because its regular expressions need a megabyte of memory in each Pod.

use std::{fs, path::Path};

use tracing::{Level, info, level_filters::LevelFilter};
use tracing_subscriber::{Registry, filter::Targets, reload};

/// The file's name in the configuration directory.
const FILE: &str = "logging.properties";
/// The prefix of the names under which the runner of existing users logs.
const RUNNER: &str = "org.jdrupes.vmoperator";

/// Applies the file's levels whenever the file changes.
#[derive(Debug)]
pub struct Logging {
    /// `None`: the environment variable is set, so the levels never change.
    handle: Option<reload::Handle<Targets, Registry>>,
    current: Targets,
}

impl Logging {
    /// Starts with the levels in `environment`, such as `info,vm_operator=debug`, or with `info`. Returns the layer that filters
    /// the log.
    pub fn new(environment: Option<&str>) -> (Self, reload::Layer<Targets, Registry>) {
        let fixed = environment.and_then(|text| text.parse().ok());
        let is_fixed = fixed.is_some();
        let current: Targets = fixed.unwrap_or_else(|| levels(""));
        let (layer, handle) = reload::Layer::new(current.clone());
        (Self { handle: Some(handle).filter(|_| !is_fixed), current }, layer)
    }

    /// Reads the file again. A missing file is the same as an empty one.
    pub fn read(&mut self, config_dir: &Path) {
        let Some(handle) = &self.handle else { return };
        let new = levels(&fs::read_to_string(config_dir.join(FILE)).unwrap_or_default());
        if new != self.current && handle.reload(new.clone()).is_ok() {
            info!(levels = %new, "new log levels");
            self.current = new;
        }
    }
}

/// Parses the levels in a file. A library for the whole format would need regular expressions, which need a megabyte of memory
/// in each Pod.
fn levels(properties: &str) -> Targets {
    let set = |line: &str| {
        let (name, value) = line.split_once(['=', ':'])?;
        Some((name.trim().strip_suffix(".level")?.to_owned(), level(value.trim())?))
    };
    let (mut root, mut runner) = (LevelFilter::INFO, None);
    for (name, level) in properties.lines().map(str::trim).filter(|line| !line.starts_with(['#', '!'])).filter_map(set)
    {
        if name.is_empty() {
            root = level;
        } else if name.starts_with(RUNNER) {
            runner = runner.max(Some(level));
        }
    }
    let targets = Targets::new().with_default(root);
    match runner {
        Some(level) => targets.with_target(env!("CARGO_CRATE_NAME"), level),
        None => targets,
    }
}

/// Maps a level of `java.util.logging` (<https://docs.oracle.com/en/java/javase/21/docs/api/java.logging/java/util/logging/Level.html>).
fn level(name: &str) -> Option<LevelFilter> {
    Some(match name {
        "OFF" => LevelFilter::OFF,
        "SEVERE" => Level::ERROR.into(),
        "WARNING" => Level::WARN.into(),
        "INFO" | "CONFIG" => Level::INFO.into(),
        "FINE" | "FINER" => Level::DEBUG.into(),
        "FINEST" | "ALL" => Level::TRACE.into(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_levels_follow_the_file_unless_the_environment_sets_them() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), ".level=WARNING").unwrap();
        let (mut logging, _layer) = Logging::new(None);
        assert_eq!(logging.current.to_string(), "info");
        logging.read(dir.path());
        assert_eq!(logging.current.to_string(), "warn");
        fs::remove_file(dir.path().join(FILE)).unwrap();
        logging.read(dir.path());
        assert_eq!(logging.current.to_string(), "info", "no file");

        let (mut fixed, _layer) = Logging::new(Some("debug"));
        fs::write(dir.path().join(FILE), ".level=WARNING").unwrap();
        fixed.read(dir.path());
        assert_eq!(fixed.current.to_string(), "debug");
    }

    #[test]
    fn the_levels_of_java_are_mapped() {
        let levels = |text: &str| levels(text).to_string();
        assert_eq!(levels(""), "info");
        assert_eq!(levels(".level=WARNING\n"), "warn");
        assert_eq!(levels("# .level=OFF\n handlers=x\n.level : SEVERE\njava.level=ALL"), "error");
        assert_eq!(levels("org.jdrupes.vmoperator.runner.qemu.level=FINE"), "vm_operator=debug,info");
        let both = "org.jdrupes.vmoperator.level=FINEST\norg.jdrupes.vmoperator.runner.qemu.level=INFO";
        assert_eq!(levels(both), "vm_operator=trace,info");
        assert_eq!(levels(".level=LOUD"), "info");
    }
}
