//! The script of the set `import-disk`, run with other folders than those of a Pod.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use serde_json::Value;
use sha2::{Digest, Sha256};

/// A Pod's folders, and the script of a case of the set.
struct Import {
    folder: tempfile::TempDir,
    script: String,
    /// What runs before, if another container has the image's content.
    tool_script: Option<String>,
    env: Vec<(String, String)>,
}

impl Import {
    fn new(case: &str) -> Self {
        Self::of_container(case, "import")
    }

    fn of_container(case: &str, name: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/sets/import-disk/tests");
        let text = fs::read_to_string(root.join(case).join("expected.yaml")).unwrap();
        let pod = text.split("\n---\n").find(|document| document.contains("\nkind: Pod\n")).unwrap();
        let pod: Value = serde_yaml::from_str(pod).unwrap();
        let containers = pod["spec"]["initContainers"].as_array().unwrap();
        let named = |name: &str| containers.iter().find(|it| it["name"] == name);
        let container = named(name).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let places = ["/download", "/var/local/vm-data"];
        let own = |place: &str| folder.path().join(place.replace('/', "-"));
        places.iter().for_each(|place| fs::create_dir(own(place)).unwrap());
        let script = |container: &Value| {
            let text = container["command"][2].as_str().unwrap().to_owned();
            let text = places.iter().fold(text, |text, place| text.replace(place, own(place).to_str().unwrap()));
            // A file takes the place of a block device, and any program that of the runner.
            let text = text.replace("convert -n ", "convert ").replace("/usr/bin/vm-runner", "/bin/true");
            // A file is on no server.
            text.replace("--proto =http,https,ftp,ftps ", "")
        };
        let (script, tool_script) = (script(container), named("import-tool").map(script));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let env = container["env"].as_array().unwrap();
        let env = env.iter().map(|it| (text(&it["name"]), text(&it["value"]))).collect();
        Self { folder, script, tool_script, env }.with("TARGET", |folder| folder.join("target").display().to_string())
    }

    fn with(mut self, name: &str, value: impl Fn(&Path) -> String) -> Self {
        let value = value(self.folder.path());
        self.env.retain(|(other, _)| other != name);
        self.env.push((name.to_owned(), value));
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        command.args(["-ec", &self.script]).envs(self.env.iter().cloned());
        command
    }

    fn run(&self) -> Output {
        self.command().output().unwrap()
    }
}

/// What a disk may have: no zeros at its start.
fn content() -> Vec<u8> {
    (0..1 << 20).map(|number: u32| (number.wrapping_mul(2_654_435_761) >> 13) as u8 | 1).collect()
}

fn sum(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_download_is_compared_with_its_checksum() {
    let import = |sums: &str| {
        let import = Import::new("catalog").with("FORMAT", |_| "raw".into());
        fs::write(import.path("guest.img"), content()).unwrap();
        fs::write(import.path("SUMS"), sums).unwrap();
        import
            .with("URL", |folder| format!("file://{}/guest.img", folder.display()))
            .with("SUMS", |folder| format!("file://{}/SUMS", folder.display()))
    };
    let right = sum(&content());
    for sums in [format!("{right}  guest.img\n"), format!("{}  other.img\n{right} *guest.img\n", "0".repeat(64))] {
        let import = import(&sums);
        let output = import.run();
        assert!(output.status.success(), "{output:?}");
        assert!(fs::read(import.path("target")).unwrap() == content());
        assert!(!import.path("-download/image").exists(), "it takes no place any more");
        // What a guest has written is not overwritten.
        fs::write(import.path("target"), "of the guest").unwrap();
        assert!(import.run().status.success());
        assert_eq!(fs::read(import.path("target")).unwrap(), b"of the guest");
    }
    for (sums, complaint) in [
        (format!("{}  guest.img\n", "0".repeat(64)), "the image is not used: its checksum is"),
        (format!("{right}  guest.img.torrent\n"), "has no checksum of guest.img"),
        (String::new(), "has no checksum of guest.img"),
    ] {
        let import = import(&sums);
        let output = import.run();
        let talk = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.code() == Some(1) && talk.contains(complaint), "{output:?}");
        assert!(!import.path("target").exists());
    }
}

#[test]
fn what_can_t_be_downloaded_is_named() {
    let import = Import::new("catalog").with("URL", |folder| format!("file://{}/nothing.img", folder.display()));
    let script = import.script.replace("--retry 5 ", "");
    let output = Import { script, ..import }.run();
    let talk = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && talk.contains("/nothing.img can't be downloaded"), "{output:?}");
}

#[test]
fn an_upload_is_waited_for_piece_by_piece() {
    for is_right in [true, false] {
        let wanted = if is_right { sum(&content()) } else { "0".repeat(64) };
        let import = Import::new("upload")
            .with("FORMAT", |_| "raw".into())
            .with("SIZE", |_| content().len().to_string())
            .with("SUM", |_| wanted.clone());
        let mut running = import.command().spawn().unwrap();
        let image = import.path("-download/image");
        let end = Instant::now() + Duration::from_secs(60);
        while !image.exists() {
            assert!(Instant::now() < end && running.try_wait().unwrap().is_none(), "the file for the upload");
            std::thread::yield_now();
        }
        // As `kubectl vm upload` writes them; the second one begins where the first one broke off, and a bit before.
        for (from, to) in [(0, 700_000), (600_000, content().len())] {
            let part = import.path("part");
            fs::write(&part, &content()[from..to]).unwrap();
            let dd = format!(
                "dd of={} bs=1M iflag=fullblock oflag=seek_bytes seek={from} conv=notrunc status=none",
                image.display()
            );
            let dd = Command::new("sh").args(["-c", &dd]).stdin(fs::File::open(part).unwrap()).status().unwrap();
            assert!(dd.success());
            assert!(to == content().len() || running.try_wait().unwrap().is_none(), "it waits for the rest");
        }
        let status = running.wait().unwrap();
        assert_eq!(status.code(), Some(if is_right { 0 } else { 1 }));
        let written = fs::read(import.path("target")).unwrap_or_default();
        assert!(if is_right { written == content() } else { written.is_empty() });
        assert!(!image.exists(), "a wrong file is sent again from its start");
    }
}

#[test]
fn the_disk_of_a_container_image_has_its_own_format() {
    for format in ["raw", "qcow2"] {
        let import = Import::new("container");
        let (raw, handed_over) = (import.path("raw"), import.path("-download/image"));
        fs::write(&raw, content()).unwrap();
        let is_wanted = || {
            let script = import.tool_script.as_ref().unwrap();
            let status = Command::new("sh").args(["-ec", script]).envs(import.env.iter().cloned()).status().unwrap();
            assert!(status.success() && import.path("-download/tool").exists());
            import.path("-download/wanted").exists()
        };
        assert!(is_wanted(), "the disk is empty");
        // As `vm-runner hand-over` does it.
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", format]).args([&raw, &handed_over]);
        assert!(convert.status().unwrap().success());
        let output = import.run();
        assert!(output.status.success(), "{output:?}");
        assert!(fs::read(import.path("target")).unwrap() == content(), "{format}");
        assert!(!handed_over.exists() && !import.path("-download/tool").exists(), "they take no place any more");
        assert!(!is_wanted(), "the disk is filled");
        assert!(import.run().status.success());
        // The next start, after one that was interrupted.
        fs::write(import.path("-var-local-vm-data/import-has-begun"), "").unwrap();
        assert!(is_wanted());
    }
}

/// What a guest has written on one disk is kept while the import of another one is interrupted.
#[test]
fn each_disk_has_its_own_mark_of_an_interrupted_import() {
    for (container, own, others) in [
        ("import", "", ["-data", "-tools"]),
        ("import-2", "-data", ["", "-tools"]),
        ("import-3", "-tools", ["", "-data"]),
    ] {
        let import =
            Import::of_container("several", container).with("FORMAT", |_| "raw".into()).with("SUM", |_| String::new());
        let import = import.with("URL", |folder| format!("file://{}/guest.img", folder.display()));
        let mark = |end: &str| import.path(&format!("-var-local-vm-data/import-has-begun{end}"));
        // That of `oci` has its image already.
        for image in ["guest.img", "-download/image"] {
            fs::write(import.path(image), content()).unwrap();
        }
        fs::write(import.path("target"), "of the guest").unwrap();
        others.iter().for_each(|end| fs::write(mark(end), "").unwrap());
        let output = import.run();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(fs::read(import.path("target")).unwrap(), b"of the guest", "{container}");
        fs::write(mark(own), "").unwrap();
        let output = import.run();
        assert!(output.status.success(), "{output:?}");
        assert!(fs::read(import.path("target")).unwrap() == content(), "{container}: it goes on");
        assert!(!mark(own).exists() && others.iter().all(|end| mark(end).exists()), "{container}");
    }
}

#[test]
fn an_image_that_reads_other_files_is_not_used() {
    // The first bytes of qcow2: its version, the place of the name of a backing file, features.
    for (version, backing, features, is_refused) in [
        (2, 0, 4, false),
        (3, 0, 0, false),
        (3, 0, 8, false),
        (2, 72, 0, true),
        (3, 112, 0, true),
        (3, 0, 4, true),
        (3, 0, 12, true),
    ] {
        let mut image = vec![0_u8; 4096];
        image[..4].copy_from_slice(b"QFI\xfb");
        image[7] = version;
        image[15] = backing;
        image[79] = features;
        let import = Import::new("machine");
        fs::write(import.path("guest.img"), image).unwrap();
        let import = import.with("URL", |folder| format!("file://{}/guest.img", folder.display()));
        let output = import.run();
        let talk = String::from_utf8_lossy(&output.stdout);
        // What is not refused is no whole image.
        assert!(!output.status.success(), "{output:?}");
        assert_eq!(talk.contains("it reads other files"), is_refused, "{version} {backing} {features}: {output:?}");
    }
}
