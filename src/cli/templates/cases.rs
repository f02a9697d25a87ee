//! `kubectl vm templates test`: VMs and what a folder of templates renders them to. A case is a folder.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::json;

use super::super::{
    input::{DEFAULT_NAMESPACE, Settings, read_vms},
    output::{Exit, Failure, Output, counted, difference, yaml},
    render::{lineage, origin, remove_release},
};
use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    files::{self, CASES, FileError, SETS},
    render::{Library, first_start, qemu::CommandLine},
};

/// A test case.
struct Case {
    /// Its path without the folders `sets` and `tests`.
    name: String,
    folder: PathBuf,
}

/// How a case ended.
enum Outcome {
    AsExpected,
    Updated,
    /// With what is shown of it.
    Failed(String),
}

pub(super) fn run(folder: &Path, update: bool, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let library = Library::new(&files::sources(folder)?);
    let cases = find(folder)?;
    let mut failed = 0;
    for case in &cases {
        let name = &case.name;
        match case.run(&library, update)? {
            Outcome::AsExpected => writeln!(output, "ok      {name}")?,
            Outcome::Updated => writeln!(output, "updated {name}")?,
            Outcome::Failed(shown) => {
                failed += 1;
                write!(output, "FAILED  {name}\n{shown}")?;
            }
        }
    }
    writeln!(output, "{}, {failed} failed", counted(cases.len(), "case"))?;
    if failed > 0 {
        writeln!(output, "if that is right: --update")?;
    }
    Ok(Exit::negative_if(failed > 0))
}

/// The cases of a folder of templates and of its named sets.
fn find(folder: &Path) -> Result<Vec<Case>, Failure> {
    let homes = std::iter::once(folder.to_owned()).chain(subfolders(&folder.join(SETS)));
    let found: Vec<PathBuf> = homes.flat_map(|home| subfolders(&home.join(CASES))).collect();
    if found.is_empty() {
        let cases = folder.join(CASES);
        let message = "there is no case here: a case is a folder with a vm.yaml";
        return Err(Failure::new(format!("{}: {message}", cases.display())));
    }
    if let Some(empty) = found.iter().find(|case| !case.join("vm.yaml").exists()) {
        return Err(Failure::new(format!("{}: this case has no vm.yaml", empty.display())));
    }
    let name = |case: &Path| {
        let parts = case.strip_prefix(folder).unwrap_or(case).components();
        let parts = parts.map(|part| part.as_os_str().to_string_lossy()).filter(|part| part != CASES && part != SETS);
        parts.collect::<Vec<_>>().join("/")
    };
    Ok(found.into_iter().map(|case| Case { name: name(&case), folder: case }).collect())
}

/// The folders in a folder, sorted; none if it does not exist.
fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

impl Case {
    fn run(&self, library: &Library, update: bool) -> Result<Outcome, Failure> {
        let config = self.config()?;
        let mut found = String::new();
        for vm in read_vms(&self.folder.join("vm.yaml"), DEFAULT_NAMESPACE)? {
            found += &rendered(library, &vm, &config)?;
        }
        let file = self.folder.join("expected.yaml");
        let expected = fs::read_to_string(&file).unwrap_or_default();
        if found == expected {
            return Ok(Outcome::AsExpected);
        }
        if update {
            fs::write(&file, &found).map_err(FileError::io(&file))?;
            return Ok(Outcome::Updated);
        }
        // Where nothing could be rendered, the error says more than all expected lines as missing ones.
        let shown = if found.starts_with("# error") { found } else { difference(&expected, &found) };
        Ok(Outcome::Failed(shown))
    }

    fn config(&self) -> Result<ReconcilerConfig, FileError> {
        let config = Some(self.folder.join("config.yaml")).filter(|file| file.exists());
        let mut config = Settings { templates: None, values: None, config }.config()?;
        // The default image has the release in its name, and a case must hold for the next release.
        config.runner_image.get_or_insert_with(|| "localhost/vm-runner".into());
        Ok(config)
    }
}

/// The objects of a VM as YAML, or the error, without what each release of the manager changes.
fn rendered(library: &Library, vm: &VirtualMachine, config: &ReconcilerConfig) -> Result<String, Failure> {
    let rendered = library.get(vm.template_set()).and_then(|set| {
        let objects = first_start(vm, config, set)?;
        Ok((CommandLine::changes(set, &objects)?, set, objects))
    });
    let (changes, set, objects) = match rendered {
        Ok(rendered) => rendered,
        Err(error) => return Ok(format!("# error: {error}\n")),
    };
    let mut text = String::new();
    for mut object in objects {
        remove_release(Arc::make_mut(&mut object.value));
        text += &format!("---\n{}{}", origin(set, &object), yaml(&object.value)?);
    }
    if let Some((gone, new)) = changes {
        text += &format!(
            "---\n{}# QEMU's options that are others than those of {}\n",
            lineage(set, &new.template),
            gone.template
        );
        text += &yaml(&json!({ "without": gone.options, "with": new.options }))?;
    }
    Ok(text)
}
