//! What OpenSSH is told about a VM, as pure functions: words for its shell, `Host` blocks, paths of `scp`, the user.

use std::{fmt, path::Path};

use serde_json::Value;

use crate::{api::CloudInit, process::shell::shell_word, user_data};

/// How OpenSSH reaches the guest of a VM.
pub(super) struct Route {
    /// The name under which OpenSSH knows it, also in `known_hosts`.
    pub alias: String,
    /// What connects standard input and output to it, with ssh's `%p` for the port.
    pub proxy_command: String,
    /// The user, if one is known.
    pub user: Option<String>,
}

/// Why OpenSSH can't be told something.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} has a character that can't be handed to ssh")]
pub(super) struct Unspeakable {
    word: String,
}

/// The name of a VM for OpenSSH: `vm.NAME.NAMESPACE`.
pub(super) fn alias(name: &str, namespace: &str) -> String {
    format!("vm.{name}.{namespace}")
}

/// A `ProxyCommand` of these words and the port.
///
/// ssh replaces what begins with `%` in it and has the user's shell run the rest (ssh_config(5)).
pub(super) fn proxy_command<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<String, Unspeakable> {
    let mut command = String::new();
    for word in words {
        // A line is the unit of a configuration.
        if word.contains(char::is_control) {
            return Err(Unspeakable { word: word.to_owned() });
        }
        command += &shell_word(word).replace('%', "%%");
        command.push(' ');
    }
    Ok(command + "--stdio %p")
}

/// A `Host` block of ssh_config(5).
pub(super) struct HostBlock<'a> {
    pub route: &'a Route,
    pub identities: &'a [String],
    pub port: Option<u16>,
}

impl fmt::Display for HostBlock<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Route { alias, proxy_command, user } = self.route;
        writeln!(f, "Host {alias}\n    HostKeyAlias {alias}")?;
        if let Some(user) = user {
            writeln!(f, "    User {user}")?;
        }
        for file in self.identities {
            writeln!(f, "    IdentityFile \"{}\"", file.replace('\\', "\\\\").replace('"', "\\\""))?;
        }
        if let Some(port) = self.port {
            writeln!(f, "    Port {port}")?;
        }
        writeln!(f, "    ProxyCommand {proxy_command}")
    }
}

/// A key's file for a configuration that is read in any folder. `~` and ssh's `%` stay; a `%` of the folder is one.
pub(super) fn identity(file: &str, folder: &Path) -> Result<String, Unspeakable> {
    if file.contains(char::is_control) {
        return Err(Unspeakable { word: file.to_owned() });
    }
    if file.starts_with(['~', '%', '$']) {
        return Ok(file.to_owned());
    }
    let folder = folder.to_string_lossy().replace('%', "%%");
    Ok(Path::new(&folder).join(file).to_string_lossy().into_owned())
}

/// Where somebody wants to be logged in: `[USER@]VM`.
pub(super) fn destination(argument: &str) -> (Option<&str>, &str) {
    match argument.rsplit_once('@') {
        Some((user, vm)) => (Some(user), vm),
        None => (None, argument),
    }
}

/// A path in a guest.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RemotePath<'a> {
    pub user: Option<&'a str>,
    pub vm: &'a str,
    pub path: &'a str,
}

impl<'a> RemotePath<'a> {
    /// `[USER@]VM:PATH`; `None`: a path of this computer. As for scp, that is one without a colon before its first slash.
    pub fn parse(argument: &'a str) -> Option<Self> {
        let (place, path) = argument.split_once(':')?;
        if place.is_empty() || place.contains('/') {
            return None;
        }
        let (user, vm) = destination(place);
        Some(Self { user, vm, path })
    }
}

/// The first user that the user-data names. A user of the distribution (`default`) is passed over, because its name is not in there.
pub(super) fn first_user(cloud_init: &CloudInit) -> Option<String> {
    // Other kinds, such as scripts, name no user.
    let data = user_data::config(cloud_init.user_data.as_ref()?)?;
    let name = |user: &Value| Some(user.as_str().or_else(|| user["name"].as_str())?.to_owned());
    let listed = data["users"].as_array().into_iter().flatten();
    let mut listed = listed.filter(|user| user.as_str() != Some("default") && user["system"] != true).filter_map(name);
    // `user` renames the user of the distribution.
    let default = || name(&data["user"]);
    listed.next().or_else(default).filter(|name| is_user_name(name))
}

/// Whether it is the name of a user, as useradd(8) wants it. Whoever may write a VM must not get an option of ssh into somebody's configuration.
pub(super) fn is_user_name(name: &str) -> bool {
    let is_first = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    name.starts_with(is_first) && name.chars().all(|letter| is_first(letter) || matches!(letter, '-' | '.'))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use serde_json::json;

    use super::*;

    #[test]
    fn words_reach_the_program_through_ssh_and_the_shell() {
        // What ssh, the shell and a program do with the command: the program prints each of its arguments on a line.
        let folder = tempfile::tempdir().unwrap();
        let printed = folder.path().join("it's \"100%\" done.sh");
        let seen = folder.path().join("seen");
        std::fs::write(&printed, format!("#!/bin/sh\nprintf '%s\\n' \"$@\" >'{}'\n", seen.display())).unwrap();
        std::fs::set_permissions(&printed, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let words = [
            "port-forward",
            "",
            "a b",
            "$HOME",
            "`id`",
            "it's",
            "50%p",
            "\\",
            "a\\'b\"c",
            "~",
            "*",
            "=x",
            "!1",
            "ä;#&|<>",
        ];
        let program = printed.to_str().unwrap();
        let command = proxy_command([program].into_iter().chain(words)).unwrap();
        let mut shells = vec!["/bin/sh"];
        shells.extend(
            ["/bin/bash", "/usr/bin/zsh", "/usr/bin/fish"].into_iter().filter(|shell| Path::new(shell).exists()),
        );
        for shell in shells {
            let _ = std::fs::remove_file(&seen);
            let option = format!("ProxyCommand={command}");
            let ssh = ["-F", "none", "-o", &option, "-o", "BatchMode=yes", "-p", "2222", "vm.web.vms"];
            let Ok(output) = Command::new("ssh").args(ssh).env("SHELL", shell).output() else {
                return; // There is no ssh here.
            };
            let text = std::fs::read_to_string(&seen).unwrap_or_else(|_| panic!("{shell}: {output:?}\n{command}"));
            let expected: String = words.iter().chain(&["--stdio", "2222"]).map(|word| format!("{word}\n")).collect();
            assert_eq!(text, expected, "{shell}: {command}");
        }
    }

    #[test]
    fn words_that_are_no_line_are_refused() {
        assert_eq!(proxy_command(["a\nb"]), Err(Unspeakable { word: "a\nb".into() }));
        assert!(identity("a\nProxyCommand x", Path::new("/")).is_err());
        assert_eq!(proxy_command(["kubectl-vm", "a"]).unwrap(), "kubectl-vm a --stdio %p");
    }

    #[test]
    fn a_host_block_is_what_ssh_reads() {
        let route = Route {
            alias: alias("web", "vms"),
            proxy_command: proxy_command(["/opt/my tools/kubectl-vm", "port-forward", "web"]).unwrap(),
            user: Some("ada".into()),
        };
        let identities = ["~/.ssh/id_work".to_owned(), identity("my \"key\"", Path::new("/home/ada")).unwrap()];
        let block = HostBlock { route: &route, identities: &identities, port: Some(2222) }.to_string();
        assert_eq!(
            block,
            r#"Host vm.web.vms
    HostKeyAlias vm.web.vms
    User ada
    IdentityFile "~/.ssh/id_work"
    IdentityFile "/home/ada/my \"key\""
    Port 2222
    ProxyCommand '/opt/my tools/kubectl-vm' port-forward web --stdio %p
"#
        );
        let other = Route { alias: alias("db", "vms"), proxy_command: "x".into(), user: None };
        let other = HostBlock { route: &other, identities: &[], port: None }.to_string();
        assert_eq!(other, "Host vm.db.vms\n    HostKeyAlias vm.db.vms\n    ProxyCommand x\n");

        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), other + &block).unwrap();
        let Ok(output) = Command::new("ssh").arg("-F").arg(file.path()).args(["-G", "vm.web.vms"]).output() else {
            return; // There is no ssh here.
        };
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for line in [
            "user ada",
            "port 2222",
            "hostkeyalias vm.web.vms",
            "identityfile ~/.ssh/id_work",
            "identityfile /home/ada/my \"key\"",
            "proxycommand '/opt/my tools/kubectl-vm' port-forward web --stdio %p",
        ] {
            assert!(text.lines().any(|read| read == line), "{line} in:\n{text}");
        }
    }

    #[test]
    fn a_relative_key_is_one_of_this_folder() {
        let identity = |file| identity(file, Path::new("/home/ada")).unwrap();
        for (file, expected) in [
            ("key", "/home/ada/key"),
            ("/etc/key", "/etc/key"),
            ("~/key", "~/key"),
            ("%d/key", "%d/key"),
            ("${K}", "${K}"),
        ] {
            assert_eq!(identity(file), expected);
        }
        assert_eq!(super::identity("key", Path::new("/home/100%")).unwrap(), "/home/100%%/key");
    }

    #[test]
    fn a_path_in_a_guest_has_a_colon_before_its_first_slash() {
        for (argument, expected) in [
            ("web:", Some((None, "web", ""))),
            ("web:/etc/hosts", Some((None, "web", "/etc/hosts"))),
            ("ada@web:a:b", Some((Some("ada"), "web", "a:b"))),
            ("a@b@web:x", Some((Some("a@b"), "web", "x"))),
            ("./web:x", None),
            ("/tmp/a:b", None),
            (":x", None),
            ("web", None),
        ] {
            let expected = expected.map(|(user, vm, path)| RemotePath { user, vm, path });
            assert_eq!(RemotePath::parse(argument), expected, "{argument}");
        }
    }

    #[test]
    fn the_user_is_the_first_that_the_user_data_names() {
        let user = |data: Value| first_user(&CloudInit { user_data: Some(data), ..CloudInit::default() });
        for (data, expected) in [
            (json!({ "users": ["default", { "name": "ada" }, "bob"] }), Some("ada")),
            (json!({ "users": ["bob", { "name": "ada" }] }), Some("bob")),
            (json!({ "users": [{ "name": "backup", "system": true }, { "name": "ada" }] }), Some("ada")),
            (json!({ "users": ["default"], "user": "eve" }), Some("eve")),
            (json!({ "user": { "name": "eve" } }), Some("eve")),
            (json!("#cloud-config\nusers:\n- name: ada\n"), Some("ada")),
            (json!("users: [{name: ada}]"), Some("ada")),
            (json!("#!/bin/sh\nusers: [{name: ada}]"), None),
            (json!("#cloud-config\n: ["), None),
            (json!({ "users": ["default"] }), None),
            (json!({ "users": "ada" }), None),
            (json!({ "packages": ["x"] }), None),
            (json!([]), None),
            // It would be an option for ssh, or a line of a configuration.
            (json!({ "users": ["-oProxyCommand=x"] }), None),
            (json!({ "users": ["ada\n    ProxyCommand x"] }), None),
        ] {
            assert_eq!(user(data.clone()).as_deref(), expected, "{data}");
        }
        assert_eq!(first_user(&CloudInit::default()), None);
    }
}
