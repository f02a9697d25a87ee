//! What the person's computer has for whoever logs in to a new guest: public keys, and files with user-data.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{actions::create::login::keys_of, cli::output::Failure, files::FileError};

/// By what cloud-init, and cloudbase-init in Windows, know user-data (<https://docs.cloud-init.io/en/latest/explanation/format.html>).
const KINDS: [&str; 7] = ["#!", "#cloud-", "#include", "#part-handler", "#upstart-job", "## template:", "#ps1"];

/// The user-data of a file: as text if its first line says what it is (`#cloud-config`, `#!/bin/sh`), else as YAML with cloud-init's keys.
pub(super) fn user_data(text: &str, file: &Path) -> Result<Value, Failure> {
    let begin = text.lines().next().unwrap_or_default().to_lowercase();
    if text.starts_with("Content-Type:") || KINDS.iter().any(|kind| begin.starts_with(kind)) {
        return Ok(text.into());
    }
    match serde_yaml::from_str(text).map_err(|error| FileError::yaml(file, &error, 0))? {
        data @ Value::Object(_) => Ok(data),
        _ => Err(Failure::usage(format!(
            "{}:1:1: this is no user-data: it begins with #cloud-config, #!/bin/sh or the like, or is YAML with keys of cloud-init",
            file.display()
        ))),
    }
}

/// The public keys in a file.
pub(super) fn keys_in(file: &Path) -> Result<Vec<String>, Failure> {
    let text = fs::read_to_string(file).map_err(FileError::io(file))?;
    keys_of(&text).map_err(|what| Failure::usage(format!("{}: {what}", file.display())))
}

/// The keys of who runs this: the files in ~/.ssh, or else what the agent has.
pub(super) fn own_keys() -> Vec<String> {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let files = fs::read_dir(home.join(".ssh")).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|end| end == "pub")).collect();
    files.sort();
    let mut keys = Vec::new();
    // Certificates, and what else may be there, are no keys for a guest.
    for file in files.iter().filter(|file| !file.to_string_lossy().ends_with("-cert.pub")) {
        let text = fs::read_to_string(file).unwrap_or_default();
        keys.extend(keys_of(&text).unwrap_or_default());
    }
    if keys.is_empty() {
        let agent = Command::new("ssh-add").arg("-L").stderr(Stdio::null()).output();
        let said = agent.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        keys = keys_of(&said).unwrap_or_default();
    }
    keys
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn user_data_is_text_if_it_says_what_it_is() {
        let data = |text: &str| user_data(text, Path::new("f")).unwrap();
        for text in
            ["#cloud-config\na: 1\n", "#Cloud-Config\r\na: 1\n", "#!/bin/sh\n", "Content-Type: multipart/mixed\n\nx\n"]
        {
            assert_eq!(data(text), json!(text));
        }
        assert_eq!(data("a: [1]\n"), json!({ "a": [1] }));
        // cloud-init would not know this text.
        assert_eq!(data("# of the web servers\na: [1]\n"), json!({ "a": [1] }));
        assert!(user_data("a: [", Path::new("f")).is_err());
        for wrong in ["", "apt-get update\n", "# nothing\n", "- a\n"] {
            let failure = user_data(wrong, Path::new("f")).unwrap_err();
            assert!(failure.words().starts_with("f:"), "{}", failure.words());
        }
    }
}
