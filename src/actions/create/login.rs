//! Who logs in to the guest of a new VM: names of users, and public keys.

/// Whether Linux programs take this as a user's name (useradd(8)).
pub fn is_user_name(name: &str) -> bool {
    let is_first = |char: char| char.is_ascii_lowercase() || char == '_';
    let is_other = |char: char| is_first(char) || char.is_ascii_digit() || char == '-';
    name.len() <= 32 && name.starts_with(is_first) && name.chars().all(is_other)
}

/// Whether a text is a public key as in `authorized_keys` (sshd(8)), without options.
pub fn is_key(text: &str) -> bool {
    let kinds = ["ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-"];
    kinds.iter().any(|kind| text.starts_with(kind)) && text.split_whitespace().nth(1).is_some_and(|key| key.len() > 16)
}

/// The public keys in a text, one in a line.
///
/// # Errors
/// What the text is instead.
pub fn keys_of(text: &str) -> Result<Vec<String>, &'static str> {
    if text.contains("PRIVATE KEY") {
        return Err("this is a private key, which stays here: give the file with .pub");
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    if keys.is_empty() || !keys.iter().all(|key| is_key(key)) { Err("this has no public keys") } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_keys_are_those_that_programs_take() {
        assert!(["ann", "_a", "a-1"].iter().all(|name| is_user_name(name)));
        assert!(["", "Ann", "1a", "-a", "a b", &"a".repeat(33)].iter().all(|name| !is_user_name(name)));
        let key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc ann@desk";
        assert_eq!(keys_of(&format!("# mine\n{key}\n\n {key}\n")), Ok(vec![key.to_owned(), key.to_owned()]));
        assert!(keys_of("-----BEGIN OPENSSH PRIVATE KEY-----\n").unwrap_err().contains("private key"));
        assert!(
            [keys_of(""), keys_of("ssh-ed25519"), keys_of(&format!("{key}\nsomething"))].iter().all(Result::is_err)
        );
    }
}
