//! Words of a command that a person copies into a shell.

/// A word as shells read it, fish too, for which a backslash between quotes has a meaning.
pub fn shell_word(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_-.,:/@+".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    if word.is_empty() {
        return "''".to_owned();
    }
    let mut quoted = String::new();
    let mut rest = word;
    while let Some(first) = rest.chars().next() {
        if matches!(first, '\'' | '\\') {
            quoted.push('\\');
            quoted.push(first);
            rest = &rest[1..];
        } else {
            let (text, after) = rest.split_at(rest.find(['\'', '\\']).unwrap_or(rest.len()));
            quoted += &format!("'{text}'");
            rest = after;
        }
    }
    quoted
}
