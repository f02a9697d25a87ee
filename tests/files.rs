//! What is in the repository because something else says so.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "this is test code")]

use std::{fs, path::Path, process::Command};

/// `crds/` is made from the types.
#[test]
fn the_crds_are_those_of_the_types() {
    for (name, text) in vm_operator::api::crd::files().unwrap() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("crds").join(&name);
        assert_eq!(fs::read_to_string(file).unwrap(), text, "crds/{name} is old: run `make crds`");
    }
}

/// The manifests name the images of this version.
#[test]
fn the_manifests_are_of_this_version() {
    for file in ["deploy/deployment.yaml", "example/quickstart/guest-disk.yaml"] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        let image = text.lines().find(|line| line.trim().starts_with("image: localhost/")).unwrap();
        assert!(image.ends_with(concat!(":", env!("CARGO_PKG_VERSION"))), "{file}: {image}");
    }
}

/// The runner is in every Pod: it must not bring what only the manager needs.
#[test]
fn the_runner_has_no_server_and_no_controller() {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--prefix=none", "--edges=normal", "--no-default-features", "--features=runner"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let tree = String::from_utf8(output.stdout).unwrap();
    assert!(tree.contains("kube-client "), "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["axum ", "kube-runtime ", "kube-cel ", "cel ", "rcgen ", "clap_complete "] {
        assert!(!tree.lines().any(|line| line.starts_with(name)), "the runner depends on {name}");
    }
}
