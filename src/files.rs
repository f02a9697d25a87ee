//! Files that people write for the programs: the manager's configuration and folders of templates.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    config::{Config, ConfigError},
    render::{Files, Sources, TemplateError},
};

/// A file that can't be used, with the place of the error in it if that is known.
#[derive(Debug, thiserror::Error)]
#[error("{}{}: {message}", file.display(), place(*at))]
pub struct FileError {
    /// The file.
    pub file: PathBuf,
    /// Line and column, from 1.
    pub at: Option<(usize, usize)>,
    /// What is wrong.
    pub message: String,
}

fn place(at: Option<(usize, usize)>) -> String {
    at.map(|(line, column)| format!(":{line}:{column}")).unwrap_or_default()
}

impl FileError {
    /// A file that can't be read or written.
    pub fn io(file: &Path) -> impl Fn(io::Error) -> Self {
        move |error| Self { file: file.to_owned(), at: None, message: error.to_string() }
    }

    /// A file that is not the expected YAML. The error counts lines from the line after `lines_before`.
    pub fn yaml(file: &Path, error: &crate::yaml::Error, lines_before: usize) -> Self {
        let at = error.place().map(|(line, column)| (line + lines_before, column));
        let text = error.to_string();
        // The place is printed before the message already.
        let message = at
            .and_then(|(line, column)| text.strip_suffix(&format!(" at line {} column {column}", line - lines_before)))
            .unwrap_or(&text);
        Self { file: file.to_owned(), at, message: message.to_owned() }
    }

    /// An error in a template: in the file of the folder if it has one of that name, else in the built-in template.
    pub fn template(folder: Option<&Path>, error: &TemplateError) -> Self {
        let file = folder.map(|folder| folder.join(&error.template)).filter(|file| file.is_file());
        Self {
            file: file.unwrap_or_else(|| PathBuf::from(&error.template)),
            at: error.line.map(|line| (line, error.column.unwrap_or(1))),
            message: error.message.clone(),
        }
    }
}

impl From<&FileError> for TemplateError {
    fn from(error: &FileError) -> Self {
        Self {
            line: error.at.map(|(line, _)| line),
            column: error.at.map(|(_, column)| column),
            ..Self::refused(&error.file.display().to_string(), error.message.clone())
        }
    }
}

/// Reads the manager's configuration.
///
/// # Errors
/// If the file can't be read or used.
pub fn configuration(file: &Path) -> Result<Config, FileError> {
    let text = fs::read_to_string(file).map_err(FileError::io(file))?;
    Config::parse(&text).map_err(|ConfigError(error)| FileError::yaml(file, &error, 0))
}

/// The folder for named sets in a folder of templates: `sets/NAME`.
pub const SETS: &str = "sets";
/// The folder for the test cases of a set. It has no templates.
pub const CASES: &str = "tests";

/// Reads a folder of templates: its own files, those of its subfolders by their paths, and the named sets in `sets/`.
///
/// # Errors
/// If a file can't be read.
pub fn sources(folder: &Path) -> Result<Sources, FileError> {
    let mut sources = split_sets(files(folder)?);
    // A named set whose folder is empty exists, too: VMs that choose it get the base.
    for entry in fs::read_dir(folder.join(SETS)).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') {
            sources.sets.entry(name).or_default();
        }
    }
    Ok(sources)
}

/// The files in a ConfigMap, by their paths.
pub fn unpacked(data: Files) -> Files {
    data.into_iter().map(|(key, text)| (path(&key), text)).collect()
}

/// Separates the templates for all VMs from those of named sets, which are in `sets/NAME/`.
pub fn split_sets(files: Files) -> Sources {
    let mut sources = Sources::default();
    for (name, text) in files {
        let below = name.strip_prefix(SETS).and_then(|rest| rest.strip_prefix('/'));
        match below.and_then(|rest| rest.split_once('/')) {
            Some((set, name)) => drop(sources.sets.entry(set.to_owned()).or_default().insert(name.to_owned(), text)),
            None => drop(sources.base.insert(name, text)),
        }
    }
    sources
}

/// Reads the files of a folder of templates and of its subfolders, by their paths.
///
/// # Errors
/// If a file can't be read.
pub fn files(folder: &Path) -> Result<Files, FileError> {
    let mut files = Files::new();
    read(folder, "", &mut files)?;
    Ok(files)
}

/// Stands for `/` in the keys of a ConfigMap, which have no folders.
const SLASH: &str = "__";

/// The path of the file that a key of a ConfigMap stands for.
fn path(key: &str) -> String {
    key.replace(SLASH, "/")
}

/// The key of a ConfigMap that stands for the file of that path.
///
/// # Errors
/// If no key can stand for it: keys are of letters, digits, `-`, `_` and `.`
/// (<https://kubernetes.io/docs/concepts/configuration/configmap/#configmap-object>).
pub fn key(path: &str) -> Result<String, String> {
    let key = path.replace('/', SLASH);
    if self::path(&key) != path {
        return Err(format!("a ConfigMap can't have this file, because {SLASH} in its name would stand for a folder"));
    }
    match key.chars().find(|c| !(c.is_ascii_alphanumeric() || "-_.".contains(*c))) {
        Some(c) => Err(format!("a ConfigMap can't have this file, because of {c:?} in its name")),
        None => Ok(key),
    }
}

fn read(folder: &Path, prefix: &str, files: &mut Files) -> Result<(), FileError> {
    for entry in fs::read_dir(folder).map_err(FileError::io(folder))? {
        let path = entry.map_err(FileError::io(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // The kubelet keeps the versions of a mounted ConfigMap in folders whose names begin with a dot.
        if name.starts_with('.') {
            continue;
        }
        if !path.is_dir() {
            let name = format!("{prefix}{}", self::path(&name));
            let text = fs::read_to_string(&path).map_err(FileError::io(&path))?;
            if files.insert(name.clone(), text).is_some() {
                let message = format!("two files are {name}, because {SLASH} in a name stands for a folder");
                return Err(FileError { file: path, at: None, message });
            }
        } else if name != CASES {
            read(&path, &format!("{prefix}{name}/"), files)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stands_for_a_path() {
        for (path, expected) in [
            ("pod.yaml.j2", Ok("pod.yaml.j2")),
            ("sets/desktop/lib/a_b.j2", Ok("sets__desktop__lib__a_b.j2")),
            ("lib/a__b.j2", Err("__")),
            ("a b.j2", Err("' '")),
        ] {
            let key = key(path);
            match expected {
                Ok(expected) => assert_eq!((key.as_deref(), super::path(expected).as_str()), (Ok(expected), path)),
                Err(why) => assert!(key.as_ref().unwrap_err().contains(why), "{key:?}"),
            }
        }
    }

    #[test]
    fn a_folder_is_read_with_its_sets_but_without_cases_and_hidden_files() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            ["a.yaml.j2", "lib/b.j2", "sets/desktop/a.yaml.j2", "sets__desktop__c.j2", ".git/d", "tests/e/vm.yaml"]
        {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        fs::create_dir(folder.path().join("sets/empty")).unwrap();
        let sources = sources(folder.path()).unwrap();
        assert_eq!(sources.base.keys().collect::<Vec<_>>(), ["a.yaml.j2", "lib/b.j2"]);
        let sets: Vec<(&str, Vec<&str>)> = sources
            .sets
            .iter()
            .map(|(name, files)| (name.as_str(), files.keys().map(String::as_str).collect()))
            .collect();
        assert_eq!(sets, [("desktop", vec!["a.yaml.j2", "c.j2"]), ("empty", vec![])]);
    }

    #[test]
    fn two_files_of_one_path_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("lib")).unwrap();
        for name in ["lib/a.j2", "lib__a.j2"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let error = files(folder.path()).unwrap_err().to_string();
        assert!(error.contains("two files are lib/a.j2"), "{error}");
    }
}
