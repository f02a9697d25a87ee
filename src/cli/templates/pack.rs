//! `kubectl vm templates pack`: a folder of templates as a ConfigMap.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use serde_json::json;

use super::super::{
    lint::{self, CheckOptions, Checked, report},
    output::{Exit, Failure, Output, yaml},
};
use crate::{
    actions::create::IMPORT_SET,
    files::{self, FileError},
    lint::{Severity, is_part_of_a_set},
    object::{LARGEST_CONFIG_MAP, SET_LABEL, TEMPLATES_MAP},
    render::valid::is_dns_label,
};

#[derive(Args)]
pub(in crate::cli) struct Options {
    /// The folder of templates; or import-disk, the set that fills disks, which is part of this program.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Make it the set of that name, for VMs that choose it.
    #[arg(long, value_name = "NAME")]
    set: Option<String>,
    /// The ConfigMap's name. Default: vm-operator-templates, with the set's name after it.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Print it although `kubectl vm lint` reports errors.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    check: CheckOptions,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<(), Failure> {
    let Options { folder, set, name, force, check } = options;
    let own = own_set(folder)?;
    let folder = own.as_ref().map_or(folder.as_path(), tempfile::TempDir::path);
    if let Some(text) = set.iter().chain(name).find(|text| !is_dns_label(text)) {
        return Err(Failure::new(format!(
            "{text:?} can't be used as a name: a name has up to 63 small letters, digits and -"
        )));
    }
    let sources = files::sources(folder)?;
    if set.is_some() && !sources.sets.is_empty() {
        return Err(wrong(
            folder,
            "a named set can't have sets in it: pack the folder of each, or the whole without --set",
        ));
    }
    let data = data(folder)?;
    if !force {
        refuse_errors(&lint::check(folder, check, set.is_some()).await?)?;
    }
    let default = || match set {
        Some(set) => format!("vm-operator-templates-{set}"),
        None => TEMPLATES_MAP.to_owned(),
    };
    let mut map = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": name.clone().unwrap_or_else(default) },
        "data": data,
    });
    if let Some(set) = set {
        map["metadata"]["labels"] = json!({ SET_LABEL: set });
    }
    write!(output, "{}", yaml(&map)?)
}

/// The set that is part of this program, as a folder, if that is wanted and no folder has its name.
fn own_set(folder: &Path) -> Result<Option<tempfile::TempDir>, Failure> {
    if folder != Path::new(IMPORT_SET) || folder.exists() {
        return Ok(None);
    }
    let files = [
        ("pod.yaml.j2", include_str!("../../../example/sets/import-disk/pod.yaml.j2")),
        ("values.yaml", include_str!("../../../example/sets/import-disk/values.yaml")),
        ("values.schema.json", include_str!("../../../example/sets/import-disk/values.schema.json")),
    ];
    let own = tempfile::tempdir().map_err(FileError::io(&std::env::temp_dir()))?;
    for (name, text) in files {
        let file = own.path().join(name);
        fs::write(&file, text).map_err(FileError::io(&file))?;
    }
    Ok(Some(own))
}

/// What lint calls an error, the manager would not use, or the API server would refuse.
fn refuse_errors(checked: &Checked) -> Result<(), Failure> {
    if !checked.findings.iter().any(|finding| finding.severity == Severity::Error) {
        return Ok(());
    }
    let mut lines: Vec<String> = checked.findings.iter().map(|finding| format!("{}\n", report(finding))).collect();
    lines.push(format!("nothing is packed: {}; --force packs it nevertheless", checked.summary()));
    Err(Failure::Command { lines, exit: Exit::Negative })
}

/// The files of the folder by their keys in the ConfigMap.
fn data(folder: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let mut data = BTreeMap::new();
    for (path, text) in files::files(folder)?.into_iter().filter(|(path, _)| is_part_of_a_set(path)) {
        let unusable = |why| Failure::new(format!("{}:1:1: {why}", folder.join(&path).display()));
        data.insert(files::key(&path).map_err(unusable)?, text);
    }
    if data.is_empty() {
        return Err(wrong(folder, "there is no template here"));
    }
    let size: usize = data.iter().map(|(key, text)| key.len() + text.len()).sum();
    if size > LARGEST_CONFIG_MAP {
        let folder = folder.display();
        return Err(Failure::new(format!("{folder}:1:1: a ConfigMap holds 1 MiB, and these files have {size} bytes")));
    }
    Ok(data)
}

fn wrong(folder: &Path, message: &str) -> Failure {
    Failure::new(format!("{}: {message}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_label_of_rfc_1123() {
        let longest = "a".repeat(63);
        for name in ["a", "a-1", "1a", &longest] {
            assert!(is_dns_label(name), "{name}");
        }
        let too_long = "a".repeat(64);
        for name in ["", "-a", "a-", "A", "a.b", "a b", &too_long] {
            assert!(!is_dns_label(name), "{name}");
        }
    }
}
