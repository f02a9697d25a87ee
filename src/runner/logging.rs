//! What the runner logs: the levels in the file `logging.properties`, which is the VM's `spec.loggingProperties`.
//!
//! Existing users write the properties of `java.util.logging` there. Of these the levels have a meaning here: that of the
//! root, `.level`, and those of names that begin with `org.jdrupes.vmoperator`, of which the most talkative counts for the
//! runner's own messages. The environment variable `VM_RUNNER_LOG` comes before the file. (Its form is that of [`Targets`],
//! not of the richer `EnvFilter`, whose regular expressions are a megabyte in each Pod.)

use std::{fs, path::Path};

use tracing::{Level, info, level_filters::LevelFilter};
use tracing_subscriber::{Registry, filter::Targets, reload};

/// The file's name in the directory of the configuration.
const FILE: &str = "logging.properties";
/// The runner that existing users have logs under names that begin so.
const RUNNER: &str = "org.jdrupes.vmoperator";

/// Keeps what is logged as the file says.
#[derive(Debug)]
pub struct Logging {
    /// `None`: what the environment says stays.
    handle: Option<reload::Handle<Targets, Registry>>,
    current: Targets,
}

impl Logging {
    /// Begins with what `environment` says, such as `info,vm_operator=debug`, or with `info`.
    pub fn new(environment: Option<&str>) -> (Self, reload::Layer<Targets, Registry>) {
        let fixed = environment.and_then(|text| text.parse().ok());
        let is_fixed = fixed.is_some();
        let current: Targets = fixed.unwrap_or_else(|| levels(""));
        let (layer, handle) = reload::Layer::new(current.clone());
        (Self { handle: Some(handle).filter(|_| !is_fixed), current }, layer)
    }

    /// Reads the file; without one, the levels are those of an empty one.
    pub fn read(&mut self, config_dir: &Path) {
        let Some(handle) = &self.handle else { return };
        let new = levels(&fs::read_to_string(config_dir.join(FILE)).unwrap_or_default());
        if new != self.current && handle.reload(new.clone()).is_ok() {
            info!(levels = %new, "{FILE}");
            self.current = new;
        }
    }
}

/// The levels in a file. Its lines are few and simple; a library for the whole format brings regular expressions, which cost
/// a megabyte in each Pod.
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

/// <https://docs.oracle.com/en/java/javase/21/docs/api/java.logging/java/util/logging/Level.html>
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
    fn levels_of_java_are_levels_here() {
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
