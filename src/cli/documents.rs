//! The command lines that the documents show are command lines of this program.

use std::{fs, path::Path};

use clap::Parser;

use super::Arguments;

/// The words of a command line, up to what is the shell's: a pipe, a redirection, a comment, the next command. Quotes make one word.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for char in line.chars().chain([' ']) {
        match (quote, char) {
            (Some(open), char) if char == open => quote = None,
            (Some(_), char) => word.get_or_insert_default().push(char),
            (None, '\'' | '"') => {
                quote = Some(char);
                word.get_or_insert_default();
            }
            (None, '|' | '>' | ';' | '&') => break,
            (None, '#') if word.is_none() => break,
            (None, ' ') => words.extend(word.take()),
            (None, char) => word.get_or_insert_default().push(char),
        }
    }
    words.extend(word);
    words
}

/// The calls of `kubectl vm` in the blocks of a document.
fn calls(text: &str) -> Vec<String> {
    let blocks = text.split("```").skip(1).step_by(2).map(|block| block.replace("\\\n", " "));
    let lines = blocks.flat_map(|block| block.lines().map(str::to_owned).collect::<Vec<_>>());
    let commands = lines.flat_map(|line| line.split(['|', ';']).map(|part| part.trim().to_owned()).collect::<Vec<_>>());
    let own = |command: String| {
        let command = command.trim_start_matches("$ ");
        command.strip_prefix("kubectl vm ").map(str::to_owned)
    };
    commands.filter_map(own).collect()
}

#[test]
fn every_command_line_of_the_documents_is_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let documents = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let documents = documents.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let (mut count, mut wrong) = (0, Vec::new());
    for path in documents.chain([root.join("README.md")]) {
        for call in calls(&fs::read_to_string(&path).unwrap()) {
            count += 1;
            let words = std::iter::once("kubectl-vm".to_owned()).chain(words(&call));
            if let Err(error) = Arguments::try_parse_from(words) {
                wrong.push(format!("{}: kubectl vm {call}\n{error}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty() && count > 70, "{count} command lines\n{}", wrong.join("\n"));
}

#[test]
fn what_is_the_shells_is_no_word() {
    assert_eq!(words("logs apple -f    # what it says"), ["logs", "apple", "-f"]);
    assert_eq!(words("export web --to kubevirt > web.yaml"), ["export", "web", "--to", "kubevirt"]);
    assert_eq!(words("list -o jsonpath='{.items[0] .kind}' && x"), ["list", "-o", "jsonpath={.items[0] .kind}"]);
    let block = "```\n$ a | kubectl vm list \\\n  -n x\nvm/a: kubectl vm stop\n```\nkubectl vm nothing\n";
    assert_eq!(calls(block), ["list    -n x"]);
}
