//! The scripts of the web interface that are made of packages, as far as they can be checked without npm.

use std::{fs, path::Path};

use sha2::{Digest, Sha256};

#[test]
fn the_scripts_are_made_of_what_is_beside_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sums = fs::read_to_string(root.join("src/web/browser/built.sha256")).unwrap();
    assert!(sums.contains("console.min.js") && sums.contains("serial.min.js") && sums.contains("package-lock.json"));
    for line in sums.lines() {
        let (sum, path) = line.split_once("  ").unwrap();
        let content = fs::read(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        let found: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, sum, "{path} has changed: run `cargo xtask web-assets`");
    }
}
