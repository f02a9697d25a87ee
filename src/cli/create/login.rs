//! What the person's computer has for whoever logs in to a new guest: public keys, and files with user-data.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use flate2::read::GzDecoder;
use serde_json::Value;

use crate::{
    actions::create::login::keys_of,
    cli::{
        input::read_text,
        output::{Failure, note},
    },
    files::FileError,
    user_data::{Kind, Problem, problems},
};

/// The largest file with user-data: more does not fit into a VM.
const LARGEST: u64 = 1 << 20;
/// How a file begins that gzip has compressed.
const GZIP: &[u8] = b"\x1f\x8b";

/// The text of a file with user-data; - is standard input. cloud-init would take it compressed by gzip too, but a VM has texts.
pub(super) fn data_text(file: &Path) -> Result<String, Failure> {
    if file == Path::new("-") {
        return read_text(file);
    }
    let wrong = FileError::io(file);
    let mut begin = Vec::new();
    fs::File::open(file).and_then(|file| file.take(2).read_to_end(&mut begin)).map_err(&wrong)?;
    if begin != GZIP {
        return read_text(file);
    }
    let mut text = String::new();
    let file_of_gzip = fs::File::open(file).map_err(&wrong)?;
    GzDecoder::new(file_of_gzip).take(LARGEST).read_to_string(&mut text).map_err(&wrong)?;
    Ok(text)
}

/// The user-data of a file: as text if it is of a kind that cloud-init knows by its beginning (`#cloud-config`, `#!/bin/sh`), else as YAML with
/// cloud-init's keys. What cloud-init would ignore altogether is refused, and what else is wrong is noted.
pub(super) fn user_data(text: &str, file: &Path) -> Result<Value, Failure> {
    let data = match Kind::of(text) {
        Kind::Unknown => match crate::yaml::from_str(text).map_err(|error| FileError::yaml(file, &error, 0))? {
            data @ Value::Object(_) => data,
            _ => {
                return Err(Failure::usage(format!(
                    "{}:1:1: this is no user-data: it begins with #cloud-config, #!/bin/sh or the like, or is YAML with keys of cloud-init",
                    file.display()
                )));
            }
        },
        _ => Value::from(text),
    };
    for Problem { at, message, loses_all } in problems(&text.into()) {
        let of_file = |message| FileError { file: file.to_owned(), at: at.or(Some((1, 1))), message };
        if loses_all {
            return Err(of_file(message).into());
        }
        note(&of_file(format!("warning: {message}")).to_string());
    }
    Ok(data)
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
    fn a_compressed_file_is_read_as_its_text() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        std::io::Write::write_all(&mut gzip, b"#cloud-config\n").unwrap();
        fs::write(file.path(), gzip.finish().unwrap()).unwrap();
        assert_eq!(data_text(file.path()).unwrap(), "#cloud-config\n");
        fs::write(file.path(), "#!/bin/sh\n").unwrap();
        assert_eq!(data_text(file.path()).unwrap(), "#!/bin/sh\n");
    }

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
        for text in [
            "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"B\"\n\n--B--\n",
            "\n#!/bin/sh\n",
            "rem cmd\necho\n",
            "## template: jinja\n#cloud-config\n{% if x %}\n",
        ] {
            assert_eq!(data(text), json!(text));
        }
        let bad = "#cloud-config\nusers:\n  - name: a\n   shell: /bin/sh\n";
        let words = user_data(bad, Path::new("f")).unwrap_err().words();
        assert!(words.starts_with("f:4:") && words.contains("is no YAML"), "{words}");
        let words = user_data("{\"ignition\": {\"version\": \"3.2.0\"}}", Path::new("f")).unwrap_err().words();
        assert!(words.starts_with("f:1:1: ") && words.contains("fw_cfg"), "{words}");
        for wrong in ["", "apt-get update\n", "# nothing\n", "- a\n"] {
            let failure = user_data(wrong, Path::new("f")).unwrap_err();
            assert!(failure.words().starts_with("f:"), "{}", failure.words());
        }
    }
}
