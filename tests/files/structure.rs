//! Who imports whom: the table in ARCHITECTURE.md is the rule, and the sources keep to it.
//!
//! Tests may import anything, because fixtures come from the real parsing and rendering.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::root;

/// Modules, each with those that it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The Rust files of a folder, to its depth, without those that are only tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            if !["bin", "tests", "snapshots"].contains(&name.as_str()) {
                found.extend(sources(&path));
            }
        } else if name.ends_with(".rs") && !["lib.rs", "tests.rs", "test_support.rs"].contains(&name.as_str()) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The code of a file without comments and without the unit tests at its end.
fn code(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    let lines = text[..end].lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// The names that follow `prefix` in paths, such as `a` and `b` for `crate::` in `crate::{a::X, b}` and in `crate::a::f()`.
fn names_after(prefix: &str, code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices(prefix) {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':';
        if at > 0 && is_word(code.as_bytes()[at - 1]) {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            names.extend(first_name(rest));
            continue;
        };
        let (mut depth, mut begin) = (1, 0);
        for (index, byte) in group.bytes().enumerate() {
            match byte {
                b'{' => depth += 1,
                b'}' => depth -= 1,
                _ => {}
            }
            if depth == 0 || depth == 1 && byte == b',' {
                names.extend(first_name(&group[begin..index]));
                begin = index + 1;
            }
            if depth == 0 {
                break;
            }
        }
    }
    names
}

fn first_name(path: &str) -> Option<String> {
    let path = path.trim_start();
    let end = path.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').unwrap_or(path.len());
    (end > 0).then(|| path[..end].to_owned())
}

/// The folder of the pure modules, which the crate has under their own names.
const PURE: &str = "pure";

/// The module of a file: the first part of its path, or the second one in the folder of the pure modules. The file that lists them is none.
fn module_of(file: &Path) -> Option<String> {
    let path = file.strip_prefix(root().join("src")).unwrap().with_extension("");
    let name = path.iter().find(|part| *part != PURE)?;
    Some(name.to_str().unwrap().to_owned())
}

/// The folder in which the files of a module are.
fn folder_of(module: &str) -> PathBuf {
    let pure = root().join("src").join(PURE).join(module);
    if pure.with_extension("rs").is_file() { pure } else { root().join("src").join(module) }
}

/// The modules of the library, by their sources.
fn modules() -> Imports {
    let mut imports = Imports::new();
    for file in sources(&root().join("src")) {
        let Some(module) = module_of(&file) else { continue };
        let mut names = names_after("crate::", &code(&fs::read_to_string(&file).unwrap()));
        names.remove(&module);
        imports.entry(module).or_default().extend(names);
    }
    imports
}

/// A row of the table in ARCHITECTURE.md.
struct Row {
    module: String,
    imports: BTreeSet<String>,
    is_pure: bool,
}

/// The rows `| module | imports | what it does | pure |`, from the ground up.
fn table() -> Vec<Row> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, table) = text.split_once("| module | imports | what it does | pure |").unwrap();
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|')).map(|line| {
        let mut cells = line.split('|').skip(1);
        let module = quoted(cells.next().unwrap()).remove(0);
        let imports = quoted(cells.next().unwrap()).into_iter().collect();
        Row { module, imports, is_pure: line.ends_with("| yes |") }
    });
    rows.collect()
}

#[test]
fn modules_import_what_the_table_says_and_only_downwards() {
    let (modules, table) = (modules(), table());
    let mut below = BTreeSet::new();
    for Row { module, imports: allowed, .. } in &table {
        let imports =
            modules.get(module).unwrap_or_else(|| panic!("ARCHITECTURE.md names {module}, which is no module"));
        assert_eq!(imports, allowed, "what {module} imports, and what ARCHITECTURE.md says");
        let upwards: Vec<_> = allowed.difference(&below).collect();
        assert!(upwards.is_empty(), "{module} imports {upwards:?}, which stand below it in the table");
        below.insert(module.clone());
    }
    let known: BTreeSet<_> = table.into_iter().map(|row| row.module).collect();
    assert_eq!(modules.into_keys().collect::<BTreeSet<_>>(), known, "every module has its row");
}

#[test]
fn what_is_pure_is_in_its_folder_and_imports_nothing_else() {
    let mut pure = BTreeSet::new();
    for Row { module, imports, is_pure } in table() {
        assert_eq!(folder_of(&module).starts_with(root().join("src").join(PURE)), is_pure, "where {module} is");
        if is_pure {
            assert!(imports.is_subset(&pure), "{module} imports {:?}", imports.difference(&pure).collect::<Vec<_>>());
            pure.insert(module);
        }
    }
    assert!(pure.len() > 20, "{pure:?}");
}

/// The files within a module, by their imports of each other. What a file takes from the module's own file is left out: that is the
/// frame in which they stand.
fn files_within(module: &str) -> Imports {
    let folder = folder_of(module);
    let stem = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let files: Vec<PathBuf> = if folder.is_dir() { sources(&folder) } else { Vec::new() };
    let files: Vec<PathBuf> = files.into_iter().filter(|file| file.parent() == Some(&folder)).collect();
    let names: BTreeSet<String> = files.iter().map(|file| stem(file)).collect();
    let imports = files.iter().map(|file| {
        let code = code(&fs::read_to_string(file).unwrap());
        let mut found = names_after("super::", &code);
        found.extend(names_after(&format!("crate::{module}::"), &code));
        (stem(file), found.intersection(&names).cloned().collect())
    });
    imports.collect()
}

/// A circle, as the names on the way around it.
fn circle(imports: &Imports) -> Option<Vec<String>> {
    fn visit(at: &str, imports: &Imports, way: &mut Vec<String>, done: &mut BTreeSet<String>) -> Option<Vec<String>> {
        if let Some(begin) = way.iter().position(|name| name == at) {
            return Some(way[begin..].to_vec());
        }
        if !done.insert(at.to_owned()) {
            return None;
        }
        way.push(at.to_owned());
        let found = imports.get(at)?.iter().find_map(|next| visit(next, imports, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|name| visit(name, imports, &mut Vec::new(), &mut done))
}

#[test]
fn no_files_of_a_module_import_each_other_in_a_circle() {
    let mut count = 0;
    for module in modules().into_keys() {
        let files = files_within(&module);
        count += files.len();
        assert_eq!(circle(&files), None, "src/{module}/");
    }
    assert!(count > 40, "only {count} files were found");
}

#[test]
fn the_test_of_circles_finds_one() {
    let imports = |edges: &[(&str, &[&str])]| {
        let edge =
            |(from, to): &(&str, &[&str])| ((*from).to_owned(), to.iter().map(|name| (*name).to_owned()).collect());
        edges.iter().map(edge).collect::<Imports>()
    };
    assert_eq!(circle(&imports(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])), None);
    let found = circle(&imports(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"])])).unwrap();
    assert_eq!(found, ["b", "c"]);
    let code = "use crate::{a::{X, y}, b};\nuse super::c::Z;\nfn f() { crate::d::g() }\nlet x = not_crate::e::h();";
    assert_eq!(names_after("crate::", code).into_iter().collect::<Vec<_>>(), ["a", "b", "d"]);
    assert_eq!(names_after("super::", code).into_iter().collect::<Vec<_>>(), ["c"]);
}
