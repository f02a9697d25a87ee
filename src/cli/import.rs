//! `kubectl vm import`: prints the manifest of a VM that another program describes. What is read is [`import`](crate::import).

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::File,
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::{
    create::check,
    format::DataFormat,
    output::{Exit, Failure, Output, counted, note, plain, yaml},
};
use crate::{
    exchange::Grade,
    files::FileError,
    import::{self, Before, Format, Imported, LARGEST, Wish, listed, shortened, source::SourceError},
    render::valid::is_dns_label,
};

#[derive(Args)]
pub(super) struct Options {
    /// The files: domain XML of libvirt, configurations of Proxmox, VirtualMachines of KubeVirt, OVF; - is standard input.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Who wrote the files. Default: their content tells it.
    #[arg(long, value_name = "FORMAT")]
    from: Option<FormatName>,
    /// The name of the VM, if there is only one.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Of several VMs only this one, by the name that it gets without --name.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// The namespace that is written into the VMs.
    #[arg(long, short, value_name = "NS")]
    namespace: Option<String>,
    /// How VMs are printed. JSON has no comments.
    #[arg(long, short, value_name = "FORMAT", default_value = "yaml")]
    output: DataFormat,
    /// Exit code 1 if something is left out.
    #[arg(long)]
    strict: bool,
    /// Also list what the guest finds the same.
    #[arg(long, short)]
    verbose: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatName {
    Libvirt,
    Proxmox,
    Kubevirt,
    Ovf,
}

impl From<FormatName> for Format {
    fn from(name: FormatName) -> Self {
        match name {
            FormatName::Libvirt => Self::Libvirt,
            FormatName::Proxmox => Self::Proxmox,
            FormatName::Kubevirt => Self::Kubevirt,
            FormatName::Ovf => Self::Ovf,
        }
    }
}

pub(super) fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let wish =
        Wish { name: options.name.as_deref(), only: options.only.as_deref(), namespace: options.namespace.as_deref() };
    if let Some(namespace) = wish.namespace.filter(|namespace| !is_dns_label(namespace)) {
        let line = format!("--namespace {namespace:?}: a namespace has up to 63 small letters, digits and hyphens");
        return Err(Failure::usage(line));
    }
    let (mut all, mut before, mut files) = (Vec::new(), Before::default(), BTreeSet::new());
    for file in &options.files {
        if !files.insert(file) {
            return Err(Failure::usage(format!("{} is given twice", file.display())));
        }
        let (format, vms) = read(file, options.from.map(Format::from), wish, &mut before)?;
        all.extend(vms.into_iter().map(|vm| (file, format, vm)));
    }
    if let Some(only) = wish.only.filter(|_| all.is_empty()) {
        return Err(match options.files.as_slice() {
            [file] => at(file, 1, before.no_vm(only, "this file")).into(),
            _ => Failure::new(before.no_vm(only, "these files")),
        });
    }
    if options.name.is_some() && all.len() > 1 {
        let (count, names) = (all.len(), listed(all.iter().map(|(_, _, vm)| vm.name.as_str())));
        let line = format!("--name is for one VM, and there are {count}: {names}. --only NAME takes one of a file");
        return Err(Failure::usage(line));
    }
    for (_, _, vm) in &all {
        check(vm.manifest["metadata"]["name"].as_str().unwrap_or_default(), &vm.manifest)?;
    }
    let mut is_left_out = false;
    for (file, _, vm) in &all {
        for finding in vm.findings.iter().filter(|it| it.grade != Grade::Same || options.verbose) {
            note(&plain(&format!("{}:{finding}", file.display())));
        }
        let [same, changed, left_out] = [Grade::Same, Grade::Changed, Grade::LeftOut].map(|grade| vm.count(grade));
        is_left_out |= left_out > 0;
        let parts = counted(same + changed + left_out, "part");
        let name = if all.len() > 1 { format!(" {}:", vm.name) } else { String::new() };
        let count = format!("{parts}: {same} the same, {changed} changed, {left_out} left out");
        note(&plain(&format!("{}:{name} {count}", file.display())));
    }
    let manifests: Vec<&Value> = all.iter().map(|(_, _, vm)| &vm.manifest).collect();
    match (&options.output, manifests.as_slice()) {
        (DataFormat::Yaml, _) => {
            for (file, format, vm) in &all {
                let between = if all.len() > 1 { "---\n" } else { "" };
                write!(output, "{between}{}{}", comments(file, *format, vm), yaml(&vm.manifest)?)?;
            }
        }
        (format, [manifest]) => format.print(manifest, output)?,
        (format, manifests) => {
            format.print(&json!({ "apiVersion": "v1", "kind": "List", "items": manifests }), output)?;
        }
    }
    Ok(Exit::negative_if(options.strict && is_left_out))
}

/// What is wrong in a line of a file.
fn at(file: &Path, line: usize, message: String) -> FileError {
    FileError { file: file.to_owned(), at: Some((line, 1)), message }
}

/// The VMs of a file.
fn read(
    file: &Path,
    format: Option<Format>,
    wish: Wish<'_>,
    before: &mut Before,
) -> Result<(Format, Vec<Imported>), Failure> {
    let wrong = |error: SourceError| {
        let message = plain(&shortened(&error.message));
        FileError { file: file.to_owned(), at: Some(error.at), message }
    };
    let text = text(file)?;
    let format = format.map_or_else(|| Format::of(&text), Ok).map_err(wrong)?;
    let vms = import::read_after(&text, format, stem(file), wish, before).map_err(wrong)?;
    Ok((format, vms))
}

/// The name of a VM that has none in its file: that of the file.
fn stem(file: &Path) -> &str {
    file.file_stem().and_then(OsStr::to_str).unwrap_or_default()
}

/// The text of a file, or of standard input (`-`).
fn text(file: &Path) -> Result<String, Failure> {
    let wrong = |line: usize, message: String| at(file, line, message);
    let mut bytes = Vec::new();
    let limit = LARGEST as u64 + 1;
    let read = if file == Path::new("-") {
        if io::stdin().is_terminal() {
            return Err(Failure::new("-: standard input is a terminal; give a file or a pipe"));
        }
        io::stdin().take(limit).read_to_end(&mut bytes)
    } else {
        File::open(file).and_then(|file| file.take(limit).read_to_end(&mut bytes))
    };
    read.map_err(FileError::io(file))?;
    if let Some(what) = no_text(&bytes) {
        return Err(wrong(1, what.into()).into());
    }
    if bytes.len() > LARGEST {
        let message = format!("this is larger than {} MiB, so it is no description of a VM", LARGEST >> 20);
        return Err(wrong(1, message).into());
    }
    String::from_utf8(bytes).map_err(|error| {
        let before = error.as_bytes().get(..error.utf8_error().valid_up_to()).unwrap_or_default();
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        wrong(line, "this is not UTF-8: `iconv -f ENCODING -t UTF-8` converts it".into()).into()
    })
}

/// What a file is that has no text, by what it begins with.
fn no_text(bytes: &[u8]) -> Option<&'static str> {
    const DISK: &str =
        "this is a disk, and not what a program says of a VM: `kubectl vm create --image` makes a VM of it";
    const PACKED: &str = "this is compressed: unpack it";
    const KINDS: [(&[u8], &str); 11] = [
        (b"\xff\xfe", "this is UTF-16: `iconv -f UTF-16 -t UTF-8` converts it"),
        (b"\xfe\xff", "this is UTF-16: `iconv -f UTF-16 -t UTF-8` converts it"),
        (b"QFI\xfb", DISK),
        (b"KDMV", DISK),
        (b"# Disk DescriptorFile", DISK),
        (b"<<< ", DISK),
        (b"vhdxfile", DISK),
        (b"\x1f\x8b", PACKED),
        (b"\xfd7zXZ\0", PACKED),
        (b"\x28\xb5\x2f\xfd", PACKED),
        (b"PK\x03\x04", PACKED),
    ];
    if bytes.get(257..262).is_some_and(|magic| magic == b"ustar") {
        return Some("this is an archive: `tar xf` it, and import the .ovf in it");
    }
    KINDS.iter().find(|(begin, _)| bytes.starts_with(begin)).map(|(_, what)| *what)
}

/// What a reader of the manifest has to know, before it.
fn comments(file: &Path, format: Format, vm: &Imported) -> String {
    let mut lines = vec![format!("From {} ({}).", file.display(), format.name())];
    for (grade, title) in [(Grade::LeftOut, "Left out:"), (Grade::Changed, "Changed:")] {
        let mut findings = vm.findings.iter().filter(|finding| finding.grade == grade).peekable();
        if findings.peek().is_some() {
            lines.push(title.to_owned());
            lines.extend(findings.map(|finding| format!("  line {finding}")));
        }
    }
    lines.extend(vm.steps.iter().cloned());
    let comment = |line: String| {
        let line = plain(&line).replace('\n', " ");
        format!("# {line}").trim_end().to_owned() + "\n"
    };
    lines.into_iter().map(comment).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use super::*;

    #[test]
    fn one_of_several_vms_gets_another_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("shop.ovf");
        let systems = "<VirtualSystem ovf:id='web'/><VirtualSystem ovf:id='db'/>";
        let text =
            format!("<Envelope xmlns:ovf='o'><VirtualSystemCollection>{systems}</VirtualSystemCollection></Envelope>");
        fs::write(&file, text).unwrap();
        let printed = |name: Option<&str>, only: Option<&str>, format: DataFormat| {
            let options = Options {
                files: vec![file.clone()],
                from: None,
                name: name.map(str::to_owned),
                only: only.map(str::to_owned),
                namespace: None,
                output: format,
                strict: false,
                verbose: false,
            };
            let mut printed = Vec::new();
            let exit = run(&options, &mut Output::new(&mut printed));
            exit.map(|_| String::from_utf8(printed).unwrap())
        };
        let names = |text: &str| -> Vec<String> {
            text.lines().filter_map(|line| line.strip_prefix("  name: ")).map(str::to_owned).collect()
        };
        let both = printed(None, None, DataFormat::Yaml).unwrap();
        assert_eq!(names(&both), ["web", "db"]);
        assert_eq!(both.lines().filter(|line| *line == "---").count(), 2);
        let list: Value = serde_json::from_str(&printed(None, None, DataFormat::Json).unwrap()).unwrap();
        assert_eq!((&list["kind"], &list["items"][1]["metadata"]["name"]), (&json!("List"), &json!("db")));
        let one = printed(Some("shop-db"), Some("db"), DataFormat::Yaml).unwrap();
        assert_eq!((names(&one), one.contains("---")), (vec!["shop-db".to_owned()], false));
        let failure = printed(Some("x"), None, DataFormat::Yaml).unwrap_err();
        assert_eq!(failure.words(), "--name is for one VM, and there are 2: web, db. --only NAME takes one of a file");
        let failure = printed(None, Some("mail"), DataFormat::Yaml).unwrap_err();
        assert!(failure.words().ends_with(": no VM of this file gets the name \"mail\": there are web, db"));
    }

    /// The exit code, and what is printed.
    fn printed(line: &str) -> Result<(Exit, String), String> {
        let options: Options = crate::cli::parsed(line).map_err(|error| error.to_string())?;
        let mut printed = Vec::new();
        let exit = run(&options, &mut Output::new(&mut printed)).map_err(|failure| failure.words())?;
        Ok((exit, String::from_utf8(printed).unwrap()))
    }

    #[test]
    fn the_vms_of_several_files_have_names_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str, text: &str| {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, text).unwrap();
            file.display().to_string()
        };
        let [a, b] = ["a.xml", "b.xml"].map(|name| path(name, "<domain type='kvm'><name>web</name></domain>"));
        let nameless = path("web.conf", "cores: 2\n");
        let names = |line: &str| printed(line).map(|(_, names)| names);
        let all = "-o jsonpath={.items[*].metadata.name}";
        assert_eq!(names(&format!("{a} {b} {nameless} {all}")).unwrap(), "web web-2 web-3");
        let (_, text) = printed(&format!("{a} {b}")).unwrap();
        let why = "#   line 1: metadata.name: changed: \"web-2\" (before: \"web\"): another VM has that name";
        assert!(text.lines().any(|line| line == why), "{text}");
        let one = "-o jsonpath={.metadata.name}";
        assert_eq!(names(&format!("{a} {b} --only web-2 --name shop {one}")).unwrap(), "shop");
        let error = names(&format!("{a} {b} --only db")).unwrap_err();
        assert_eq!(error, "no VM of these files gets the name \"db\": there are web, web-2");
        let error = names(&format!("{a} {b} --name shop")).unwrap_err();
        assert!(error.starts_with("--name is for one VM, and there are 2: web, web-2."), "{error}");
        let error = names(&format!("{a} {b} {a}")).unwrap_err();
        assert_eq!(error, format!("{a} is given twice"));
    }

    #[test]
    fn a_namespace_that_can_not_be_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.xml");
        fs::write(&file, "<domain type='kvm'/>").unwrap();
        assert!(printed(&format!("{} -n vms", file.display())).unwrap().1.contains("\n  namespace: vms\n"));
        for namespace in ["a/b", "A", "a.b", "-a"] {
            let error = printed(&format!("{} --namespace={namespace}", file.display())).unwrap_err();
            let expected =
                format!("--namespace {namespace:?}: a namespace has up to 63 small letters, digits and hyphens");
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn hostile_files_are_refused_with_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let deep = |open: &str, close: &str, head: &str, tail: &str| {
            format!("{head}{}{}{tail}", open.repeat(100_000), close.repeat(100_000)).into_bytes()
        };
        let laughs = "<!DOCTYPE d [<!ENTITY a \"ha\"><!ENTITY b \"&a;&a;&a;&a;&a;&a;&a;&a;\">]>\n<domain type='kvm'>&b;</domain>";
        let anchors = "kind: VirtualMachine\napiVersion: kubevirt.io/v1\na: &a [x, x]\nspec: [*a, *a]\n";
        let mut archive = vec![b'x'; 600];
        archive[257..262].copy_from_slice(b"ustar");
        for (content, complaint) in [
            (b"<domain>\n\xff".to_vec(), "2:1: this is not UTF-8"),
            (vec![b' '; LARGEST + 1], "1:1: this is larger than 16 MiB"),
            (archive, "1:1: this is an archive"),
            (laughs.into(), "1:1: a document type (DTD) is not read"),
            (anchors.into(), "4:8: aliases (*NAME) are not read"),
            (deep("<a>", "</a>", "<domain/>", ""), "1:"),
            (deep("<a>", "</a>", "<domain>\n", "</domain>"), "2:"),
            (deep("[", "]", "kind: VirtualMachine\napiVersion: kubevirt.io/v1\nspec: ", ""), "3:"),
            (deep("- ", "", "kind: VirtualMachine\napiVersion: kubevirt.io/v1\nspec:\n ", ""), "4:"),
            (b"<domain type='kvm'>\n<name>a</nam>".to_vec(), "2:"),
            (b"".to_vec(), "1:1: there is nothing in this file"),
            (b"\xef\xbb\xbf \n".to_vec(), "1:1: there is nothing in this file"),
            (b"\xff\xfe<\0d\0o\0".to_vec(), "1:1: this is UTF-16"),
            (b"QFI\xfb\0\0\0\x03".to_vec(), "1:1: this is a disk"),
            (b"<<< Oracle VM VirtualBox Disk Image >>>\n".to_vec(), "1:1: this is a disk"),
            (b"\x1f\x8b\x08\0".to_vec(), "1:1: this is compressed"),
            (b"<domain type='kvm'>\n<name>a\0</name></domain>".to_vec(), "2:8: a non-XML character"),
            (b"\n\nVagrant.configure('2') do |config|\nend\n".to_vec(), "3:1: a Vagrantfile is a program in Ruby"),
            (b"\n<svg/>".to_vec(), "2:1: this XML is neither"),
            (b"<?xml version='1.0'?>\n<VirtualBox version='1.16'/>".to_vec(), "1:1: this is VirtualBox's own file"),
            (
                b".encoding = 'UTF-8'\nconfig.version = '8'\nvirtualHW.version = '19'\n".to_vec(),
                "1:1: this is VMware's own",
            ),
            (b"apiVersion: v1\nkind: Pod\n".to_vec(), "1:1: these are objects of Kubernetes"),
            (b"{\"apiVersion\": \"v1\", \"kind\": \"Pod\"}".to_vec(), "1:1: these are objects of Kubernetes"),
            (
                b"apiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\n".to_vec(),
                "1:1: these are objects of vm-operator already",
            ),
            (format!("cores: {}\n", "x".repeat(100_000)).into(), "1:1: cores: \"xxx"),
            (
                b"kind: VirtualMachine\napiVersion: kubevirt.io/v1\nspec: {}\nspec: {}\n".to_vec(),
                "4:1: the key \"spec\" is there twice",
            ),
            (
                deep(
                    "- x\n",
                    "",
                    "kind: VirtualMachine\napiVersion: kubevirt.io/v1\nspec:\n",
                    &"- x\n".repeat(100_000),
                ),
                "199995:3: this is more than 200000 parts: divide the file",
            ),
            (deep("<a/>", "<b/>", "<domain type='kvm'>\n", "</domain>"), "1:1: this is more than 200000 parts"),
            (b"<domain type='xen'/>".to_vec(), "1:1: this is a domain of xen"),
            (b"cores: 2\nwhat is this\n".to_vec(), "1:1: the format can't be told"),
        ] {
            let file = folder.path().join("x");
            fs::write(&file, &content).unwrap();
            let Err(failure) = read(&file, None, Wish::default(), &mut Before::default()) else {
                panic!("{}", String::from_utf8_lossy(&content[..content.len().min(60)]))
            };
            let words = failure.words();
            let expected = format!("{}:{complaint}", file.display());
            assert!(words.starts_with(&expected), "{expected}: {words}");
            assert!(words.len() < 500, "{words}");
        }
    }

    /// Files of other projects: `IMPORT_FILES=FOLDER cargo test --lib files_of_a_folder -- --nocapture --ignored`.
    #[test]
    #[ignore = "needs a folder with files of other projects"]
    #[allow(clippy::print_stdout, reason = "what it counts is for docs/import.md")]
    fn files_of_a_folder_are_read_or_refused() {
        let folder = std::env::var("IMPORT_FILES").unwrap();
        let (mut read_ones, mut refused) = (0, BTreeMap::<String, usize>::new());
        let mut losses = BTreeMap::<String, usize>::new();
        let mut none_left_out = 0;
        let (mut same, mut changed, mut left_out) = (0, 0, 0);
        let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        for file in files {
            let Ok(text) = fs::read_to_string(&file) else {
                *refused.entry("not UTF-8, or a broken link".into()).or_default() += 1;
                continue;
            };
            let begin = std::time::Instant::now();
            let vms = Format::of(&text).and_then(|format| import::read(&text, format, "file", Wish::default()));
            assert!(begin.elapsed().as_secs() < 5, "{}", file.display());
            match vms {
                Err(error) => {
                    let message = error.message.chars().take(60).collect::<String>();
                    if std::env::var("IMPORT_SHOW").is_ok() {
                        println!("{}:{}: {}", file.display(), error.at.0, error.message);
                    }
                    *refused.entry(message).or_default() += 1;
                }
                Ok(vms) => {
                    for vm in vms {
                        if let Err(failure) = check("file", &vm.manifest) {
                            panic!("{}: {}", file.display(), failure.words());
                        }
                        read_ones += 1;
                        same += vm.count(Grade::Same);
                        changed += vm.count(Grade::Changed);
                        left_out += vm.count(Grade::LeftOut);
                        none_left_out += usize::from(vm.count(Grade::LeftOut) == 0);
                        let mut kinds: Vec<_> = vm
                            .findings
                            .iter()
                            .filter(|it| it.grade == Grade::LeftOut)
                            .map(|it| it.what.clone())
                            .collect();
                        kinds.sort();
                        kinds.dedup();
                        for kind in kinds {
                            *losses.entry(kind).or_default() += 1;
                        }
                    }
                }
            }
        }
        println!(
            "read {read_ones}, of them {none_left_out} with nothing left out; parts: {same} the same, {changed} changed, {left_out} left out"
        );
        for (message, count) in refused {
            println!("refused {count}: {message}");
        }
        let mut losses: Vec<_> = losses.into_iter().collect();
        losses.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        for (what, count) in losses.iter().take(60) {
            println!("{count} {what}");
        }
    }
}
