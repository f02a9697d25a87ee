//! The tests that pages of the documentation name: each exists, and is a test.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::root;

fn page(name: &str) -> String {
    fs::read_to_string(root().join("docs").join(name)).unwrap()
}

/// What is in backquotes on a page, line by line.
fn code_in(page: &str) -> impl Iterator<Item = &str> {
    page.lines().flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// The test functions in a source: those with an attribute such as `#[test]` or `#[tokio::test(flavor = "...")]` above them.
fn tests_in(source: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim_start) {
        let code = line.strip_prefix("pub ").unwrap_or(line);
        let code = code.strip_prefix("async ").unwrap_or(code);
        if let Some(name) = code.strip_prefix("fn ") {
            if is_test {
                found.extend(name.split(['(', '<']).next());
            }
            is_test = false;
        } else if let Some(attribute) = line.strip_prefix("#[") {
            is_test |= attribute.starts_with("test]") || attribute.starts_with("tokio::test");
        } else if !line.starts_with("//") {
            // Other attributes and comments may stand between.
            is_test = false;
        }
    }
    found
}

/// What is wrong with the tests that a page names as `path/file.rs::function`, and how many it names.
fn wrong_names(page: &str) -> (usize, Vec<String>) {
    let named: Vec<_> = code_in(page).filter_map(|code| code.split_once(".rs::")).collect();
    let is_wrong = |(file, function): &&(&str, &str)| {
        let source = fs::read_to_string(root().join(format!("{file}.rs"))).unwrap_or_default();
        !tests_in(&source).contains(function)
    };
    let wrong = named.iter().filter(is_wrong).map(|(file, function)| format!("{file}.rs::{function}")).collect();
    (named.len(), wrong)
}

/// The rows of the threat model, and those whose last cell has neither a test nor the words "not tested".
fn rows(page: &str) -> (usize, Vec<&str>) {
    let rows: Vec<_> =
        page.lines().filter(|line| line.starts_with("| can |") || line.starts_with("| can't |")).collect();
    let says_how = |row: &&&str| {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        cell.starts_with("not tested") || code_in(cell).any(|code| code.contains(".rs::"))
    };
    (rows.len(), rows.iter().filter(|row| !says_how(row)).copied().collect())
}

#[test]
fn the_tests_that_pages_name_exist() {
    for (name, least) in [("compatibility.md", 40), ("runner-tested.md", 40), ("security.md", 80)] {
        let (number, wrong) = wrong_names(&page(name));
        assert!(
            number > least && wrong.is_empty(),
            "docs/{name} names {number} tests, of which do not exist: {wrong:#?}"
        );
    }
}

#[test]
fn each_row_of_the_threat_model_says_by_what_it_is_shown() {
    let page = page("security.md");
    let (number, without) = rows(&page);
    assert!(number > 50 && without.is_empty(), "{number} rows in docs/security.md, without a test: {without:#?}");
}

/// The promises name tests by their modules, as `cargo test` does, or after the file in which they are.
#[test]
fn the_tests_that_promises_name_exist() {
    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|end| end == "rs") {
                found.push(path);
            }
        }
    }
    let mut files = Vec::new();
    ["src", "tests"].iter().for_each(|folder| sources(&root().join(folder), &mut files));
    let texts: Vec<String> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let tests: BTreeSet<&str> = texts.iter().flat_map(|text| tests_in(text)).collect();
    let page = page("promises.md");
    let names: BTreeSet<&str> = code_in(&page)
        .filter_map(|code| code.rsplit("::").next())
        // The names of tests are sentences.
        .filter(|name| {
            name.matches('_').count() > 2
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        })
        .collect();
    let wrong: Vec<_> = names.difference(&tests).collect();
    assert!(
        names.len() > 100 && wrong.is_empty(),
        "docs/promises.md names {} tests, of which do not exist: {wrong:#?}",
        names.len()
    );
    let no_file = code_in(&page).filter(|code| code.starts_with("src/") || code.starts_with("tests/"));
    let no_file: Vec<_> = no_file.filter(|code| !root().join(code).exists()).collect();
    assert!(no_file.is_empty(), "docs/promises.md names files that do not exist: {no_file:#?}");
}

#[test]
fn a_name_of_no_test_and_a_row_without_one_are_found() {
    let here = "tests/files/named_tests.rs::the_tests_that_pages_name_exist";
    for wrong in [
        "tests/files/named_tests.rs::the_tests_that_pages_name",
        // A function, but no test.
        "tests/files/named_tests.rs::wrong_names",
        "tests/files/no_such_file.rs::the_tests_that_pages_name_exist",
    ] {
        let page = format!("| can | a | `{here}` |\n| can't | b | `{wrong}`, `{here}` |\n");
        assert_eq!(wrong_names(&page), (3, vec![wrong.to_owned()]));
    }
    let page = format!(
        "| can | a | `{here}` |\n| can't | `x` | |\n| can't | c | not tested |\n| can | `{here}` | by hand |\n"
    );
    assert_eq!(
        rows(&page),
        (4, vec!["| can't | `x` | |", "| can | `{here}` | by hand |".replace("{here}", here).as_str()])
    );
    let source = "#[test]\nfn a() {}\n#[tokio::test(flavor = \"x\")]\n/// About b.\n#[ignore]\n    async fn b() {}\nfn c() {}\n#[cfg(test)]\nfn d() {}";
    assert_eq!(tests_in(source).into_iter().collect::<Vec<_>>(), ["a", "b"]);
}
