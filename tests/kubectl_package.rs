//! The package of kubectl-vm (deploy/kubectl-package): it is built of the program, twice, and unpacked. It needs Debian's dpkg-deb.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, missing_docs, reason = "this is test code")]

use std::{fs, path::Path, process::Command};

/// Stands for the program, which as the tests have it would take a minute to pack.
const PROGRAM: &str = "#!/bin/sh\ncase $1 in completion) echo \"completes in $2\" ;; man) for name in kubectl-vm kubectl-vm-list; do echo \"$name\" >\"$3/$name.1\"; done ;; esac\n";

#[test]
fn the_package_has_the_program_completion_and_manual_pages() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    fs::write(&program, PROGRAM).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o700)).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubectl-package/build.sh");
    let packages = ["first.deb", "second.deb"].map(|name| folder.path().join(name));
    for package in &packages {
        let status = Command::new(&script).arg("1.2.3-rc.1").arg(&program).arg(package).status().unwrap();
        assert!(status.success(), "{status}");
    }
    assert!(fs::read(&packages[0]).unwrap() == fs::read(&packages[1]).unwrap(), "the same program, another package");
    let field = |name: &str| {
        let output = Command::new("dpkg-deb").arg("--field").arg(&packages[0]).arg(name).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(["Package", "Version", "Architecture"].map(field), ["kubectl-vm", "1.2.3~rc.1", "amd64"]);
    let unpacked = folder.path().join("unpacked");
    let status = Command::new("dpkg-deb").arg("-x").arg(&packages[0]).arg(&unpacked).status().unwrap();
    assert!(status.success(), "{status}");
    let text = |path: &str| fs::read_to_string(unpacked.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    assert_eq!(text("usr/bin/kubectl-vm"), PROGRAM);
    // kubectl runs it under this name.
    assert_eq!(text("usr/bin/kubectl_complete-vm"), PROGRAM);
    let mode = fs::metadata(unpacked.join("usr/bin/kubectl-vm")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    for (path, shell) in [
        ("bash-completion/completions/kubectl-vm", "bash"),
        ("zsh/vendor-completions/_kubectl-vm", "zsh"),
        ("fish/vendor_completions.d/kubectl-vm.fish", "fish"),
    ] {
        assert_eq!(text(&format!("usr/share/{path}")), format!("completes in {shell}\n"));
    }
    for name in ["kubectl-vm", "kubectl-vm-list"] {
        assert!(unpacked.join(format!("usr/share/man/man1/{name}.1.gz")).is_file(), "{name}");
    }
    assert!(text("usr/share/doc/kubectl-vm/copyright").contains("Apache License"));
}
