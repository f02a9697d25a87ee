//! What cloud-init takes user data for, and what is wrong with it. Pure.
//!
//! | text | what becomes of it |
//! |---|---|
//! | of a kind that cloud-init or cloudbase-init knows by its beginning, or a MIME message | it stays as it is |
//! | an Ignition configuration | it stays as it is, though the guest does not find it here |
//! | anything else: a mapping, or a text with keys of a cloud-config | it gets the first line `#cloud-config` |
//!
//! The rules are those of cloud-init: blanks and blank lines before the beginning do not count, nor do upper and lower case; a MIME message
//! has `MIME-Version:` in its first 4096 bytes (<https://docs.cloud-init.io/en/latest/explanation/format.html>). Windows guests have
//! cloudbase-init (<https://cloudbase-init.readthedocs.io/en/latest/userdata.html>).

use serde_json::{Value, json};
use serde_yaml::Value as Yaml;

/// The first line of a cloud-config.
const HEADER: &str = "#cloud-config";
/// By what cloud-init knows a MIME message, and where.
const MIME: &str = "mime-version:";
const MIME_WITHIN: usize = 4096;

/// What user data are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// YAML with a first line `#cloud-config`.
    CloudConfig,
    /// A list of such and other parts, or of patches.
    CloudConfigList,
    /// A template of any of these, which cloud-init renders first.
    Template,
    /// A script for a shell or the like.
    Script,
    /// Addresses of further user data.
    Include,
    /// A program for parts of other kinds, or a job of an older init.
    Handler,
    /// A script that runs at each boot.
    Boothook,
    /// A script for Windows.
    WindowsScript,
    /// A MIME message.
    Mime,
    /// Headers of a MIME message, without the one by which cloud-init knows it.
    MimeWithoutVersion,
    /// An Ignition configuration, which cloud-init does not read.
    Ignition,
    /// Nothing of these.
    Unknown,
}

/// How the kinds begin, in small letters. What begins as another one comes first.
const BEGINNINGS: [(&str, Kind); 13] = [
    ("#cloud-config-archive", Kind::CloudConfigList),
    ("#cloud-config-jsonp", Kind::CloudConfigList),
    ("#cloud-config", Kind::CloudConfig),
    ("#cloud-boothook", Kind::Boothook),
    ("#part-handler", Kind::Handler),
    ("#upstart-job", Kind::Handler),
    ("#include", Kind::Include),
    ("## template: jinja", Kind::Template),
    ("#!", Kind::Script),
    ("#ps1", Kind::WindowsScript),
    ("<powershell>", Kind::WindowsScript),
    ("<script>", Kind::WindowsScript),
    ("rem cmd", Kind::WindowsScript),
];

/// The headers with which messages begin.
const HEADERS: [&str; 4] = ["content-type:", "mime-version:", "from nobody", "content-transfer-encoding:"];

impl Kind {
    /// The kind of a text.
    pub fn of(text: &str) -> Self {
        let text = text.trim_start_matches('\u{feff}');
        if beginning(text, MIME_WITHIN).contains(MIME) {
            return Self::Mime;
        }
        let text = text.trim_start();
        let begins = beginning(text, 64);
        // `rem` and `cmd` may have several blanks between them.
        let begins = match begins.strip_prefix("rem") {
            Some(rest) if rest.starts_with(char::is_whitespace) => format!("rem {}", rest.trim_start()),
            _ => begins,
        };
        let known = BEGINNINGS.iter().find(|(beginning, _)| begins.starts_with(beginning)).map(|(_, kind)| *kind);
        match known {
            Some(kind) => kind,
            None if HEADERS.iter().any(|header| begins.starts_with(header)) => Self::MimeWithoutVersion,
            None if text.starts_with('{') && serde_json::from_str(text).is_ok_and(|value| is_ignition(&value)) => {
                Self::Ignition
            }
            None => Self::Unknown,
        }
    }

    /// The media type of a part of a MIME message; `None`: cloud-init knows none for it.
    pub fn media_type(text: &str) -> Option<&'static str> {
        Some(match Self::of(text) {
            Self::CloudConfig => "text/cloud-config",
            Self::CloudConfigList if beginning(text.trim_start(), 64).starts_with("#cloud-config-jsonp") => {
                "text/cloud-config-jsonp"
            }
            Self::CloudConfigList => "text/cloud-config-archive",
            Self::Template => "text/jinja2",
            // cloudbase-init runs them by their first line.
            Self::Script | Self::WindowsScript => "text/x-shellscript",
            Self::Include => "text/x-include-url",
            Self::Handler if beginning(text.trim_start(), 64).starts_with("#upstart") => "text/upstart-job",
            Self::Handler => "text/part-handler",
            Self::Boothook => "text/cloud-boothook",
            Self::Mime | Self::MimeWithoutVersion | Self::Ignition | Self::Unknown => return None,
        })
    }
}

/// The first bytes of a text in small letters.
fn beginning(text: &str, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
    text[..end].to_ascii_lowercase()
}

/// Whether a value is an Ignition configuration (<https://coreos.github.io/ignition/specs/>).
fn is_ignition(value: &Value) -> bool {
    value["ignition"]["version"].is_string()
}

/// The content of the file `user-data`, or of `vendor-data`, for the guest.
///
/// # Errors
/// If a value can't be written as YAML.
pub fn text(
    value: &Value,
    yaml: impl Fn(&Value) -> Result<String, serde_json::Error>,
) -> Result<String, serde_json::Error> {
    let Value::String(text) = value else {
        return Ok(if is_ignition(value) { value.to_string() } else { format!("{HEADER}\n{}", yaml(value)?) });
    };
    let text = text.trim_start_matches('\u{feff}');
    Ok(match Kind::of(text) {
        Kind::MimeWithoutVersion => with_version(text),
        // A word after `#` may be a kind that another program in the guest knows. What follows a blank is a comment of YAML.
        Kind::Unknown if text.trim_start().starts_with('#') && !is_commented(text) && !is_mapping(text) => text.into(),
        Kind::Unknown => format!("{HEADER}\n{text}"),
        _ => text.into(),
    })
}

/// A message with the header by which cloud-init knows it, after its own headers.
fn with_version(text: &str) -> String {
    let text = text.trim_start();
    let (ends, line) =
        if text.contains("\r\n") { ("\r\n\r\n", "\r\nMIME-Version: 1.0") } else { ("\n\n", "\nMIME-Version: 1.0") };
    match text.find(ends) {
        Some(end) => format!("{}{line}{}", &text[..end], &text[end..]),
        None => format!("{}{line}{ends}", text.trim_end()),
    }
}

fn is_commented(text: &str) -> bool {
    let rest = text.trim_start().trim_start_matches('#');
    rest.is_empty() || rest.starts_with(char::is_whitespace)
}

fn is_mapping(text: &str) -> bool {
    matches!(crate::yaml::from_str(text), Ok(Yaml::Mapping(_)))
}

/// What cloud-init will not do with user data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Line and column in the text, from 1, where it is known.
    pub at: Option<(usize, usize)>,
    /// What is wrong, what follows, and what to do. It has no values of the text, which may be secret.
    pub message: String,
    /// Whether all of it is lost.
    pub loses_all: bool,
}

impl Problem {
    fn of_all(at: Option<(usize, usize)>, message: impl Into<String>) -> Self {
        Self { at, message: message.into(), loses_all: true }
    }

    fn of_part(at: Option<(usize, usize)>, message: impl Into<String>) -> Self {
        Self { at, message: message.into(), loses_all: false }
    }
}

/// What is wrong with user data, in their order. Only a cloud-config is looked at closely.
pub fn problems(value: &Value) -> Vec<Problem> {
    let Value::String(text) = value else {
        return match value {
            Value::Null => Vec::new(),
            value if is_ignition(value) => vec![ignition()],
            Value::Object(_) => json_to_yaml(value).map(|config| of_config(&config, "")).unwrap_or_default(),
            _ => vec![Problem::of_all(
                None,
                "these are neither a text nor keys of a cloud-config: cloud-init ignores them",
            )],
        };
    };
    match Kind::of(text) {
        Kind::Ignition => vec![ignition()],
        Kind::CloudConfig | Kind::Unknown => of_text(text),
        Kind::MimeWithoutVersion
        | Kind::CloudConfigList
        | Kind::Template
        | Kind::Script
        | Kind::Include
        | Kind::Handler
        | Kind::Boothook
        | Kind::WindowsScript
        | Kind::Mime => Vec::new(),
    }
}

fn ignition() -> Problem {
    Problem::of_all(
        None,
        "this is a configuration of Ignition, which a guest does not read from a disk of cloud-init (NoCloud): give it by QEMU's -fw_cfg, in a \
         template of the runner (opt/com.coreos/config)",
    )
}

fn json_to_yaml(value: &Value) -> Option<Yaml> {
    serde_yaml::to_value(value).ok()
}

fn of_text(text: &str) -> Vec<Problem> {
    let is_config = Kind::of(text) == Kind::CloudConfig;
    match crate::yaml::from_str::<Yaml>(text) {
        Ok(config @ Yaml::Mapping(_)) => of_config(&config, text),
        Ok(Yaml::Null) if is_config || text.trim().is_empty() => Vec::new(),
        Ok(_) if is_config => {
            let what = "this cloud-config has no keys, such as `packages:`, so cloud-init ignores all of it";
            vec![Problem::of_all(first_line(text, |line| !line.trim().is_empty() && !line.starts_with('#')), what)]
        }
        Err(error) if is_config || is_like_config(text) => {
            let at = error.place();
            let words = error.to_string();
            let words = words.split(" at line ").next().unwrap_or_default();
            let what = if words.starts_with("duplicate entry") {
                return vec![Problem::of_part(at, format!("{words}: cloud-init takes the last one"))];
            } else {
                format!("this cloud-config is no YAML, so cloud-init ignores all of it: {words}")
            };
            vec![Problem::of_all(at, what)]
        }
        _ => vec![Problem::of_all(
            Some((1, 1)),
            "cloud-init does not know this kind of user data, and ignores all of it: it begins with #cloud-config, #!/bin/sh or the like, or has keys \
             of a cloud-config",
        )],
    }
}

/// Whether a text without a kind is meant as YAML: one of its lines begins with a key of cloud-config.
fn is_like_config(text: &str) -> bool {
    let key = |line: &str| line.split_once(':').is_some_and(|(key, _)| KEYS.binary_search(&key).is_ok());
    text.lines().any(key)
}

fn first_line(text: &str, is_meant: impl Fn(&str) -> bool) -> Option<(usize, usize)> {
    text.lines().position(is_meant).map(|line| (line + 1, 1))
}

/// What cloud-init does not know in a cloud-config. `text` is what it was read from, for places.
fn of_config(config: &Yaml, text: &str) -> Vec<Problem> {
    let Yaml::Mapping(map) = config else { return Vec::new() };
    let place = |key: &str| {
        first_line(text, |line| line.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with(':')))
    };
    let has = |key: &str| map.contains_key(key);
    // Talos reads its own configuration from the same file.
    if has("machine") && has("cluster") {
        return Vec::new();
    }
    if has("variant") && has("version") {
        let what = "this is a configuration of Butane: `butane` makes one of Ignition of it, which a guest does not read from a disk of cloud-init";
        return vec![Problem::of_all(place("variant"), what)];
    }
    let mut found = Vec::new();
    for (key, value) in map {
        let Some(key) = key.as_str() else { continue };
        let at = place(key);
        if KEYS.binary_search(&key).is_err() && !key.starts_with("apt_") {
            let meant = KEYS.iter().find(|known| {
                key.len() > 3 && (known.strip_suffix('s') == Some(key) || key.strip_suffix('s') == Some(known))
            });
            let meant = meant.map(|known| format!("; {known:?} is one")).unwrap_or_default();
            let key = shown(key);
            found.push(Problem::of_part(at, format!("cloud-init has no key {key:?}, and ignores it{meant}")));
        } else if LISTS.contains(&key) && !matches!(value, Yaml::Sequence(_) | Yaml::Null) {
            found.push(Problem::of_part(at, format!("{key:?} is no list, so cloud-init ignores it")));
        }
    }
    let users = map.get("users").and_then(Yaml::as_sequence).into_iter().flatten();
    for user in users.filter(|user| user.get("sudo").is_some_and(|rule| *rule == Yaml::Bool(true))) {
        let name = user.get("name").and_then(Yaml::as_str).unwrap_or_default();
        let what = format!(
            "\"sudo: true\" of the user {:?} is no rule of sudo: write \"sudo: ALL=(ALL) NOPASSWD:ALL\"",
            shown(name)
        );
        let at = first_line(text, |line| line.trim_start().trim_start_matches("- ").starts_with("sudo: true"));
        found.push(Problem::of_part(at, what));
    }
    found
}

/// A name from the text, for a message.
fn shown(name: &str) -> String {
    name.chars().filter(|letter| !letter.is_control()).take(60).collect()
}

/// Keys whose value is a list.
const LISTS: [&str; 7] =
    ["bootcmd", "mounts", "packages", "runcmd", "ssh_authorized_keys", "ssh_import_id", "write_files"];

/// The keys of a cloud-config (<https://docs.cloud-init.io/en/latest/reference/modules.html>), and those that cloudbase-init reads too. In
/// alphabetical order.
const KEYS: [&str; 111] = [
    "allow_public_ssh_keys",
    "ansible",
    "apk_repos",
    "apt",
    "authkey_hash",
    "autoinstall",
    "bootcmd",
    "byobu_by_default",
    "ca-certs",
    "ca_certs",
    "chef",
    "chpasswd",
    "cloud_config_modules",
    "cloud_dir",
    "cloud_final_modules",
    "cloud_init_modules",
    "create_hostname_file",
    "datasource",
    "datasource_list",
    "debug",
    "def_log_file",
    "device_aliases",
    "disable_ec2_metadata",
    "disable_root",
    "disable_root_opts",
    "disk_setup",
    "drivers",
    "fan",
    "final_message",
    "fqdn",
    "fs_setup",
    "groups",
    "growpart",
    "grub-dpkg",
    "grub_dpkg",
    "hostname",
    "keyboard",
    "landscape",
    "launch-index",
    "locale",
    "locale_configfile",
    "log_cfgs",
    "lxd",
    "manage-resolv-conf",
    "manage_etc_hosts",
    "manage_resolv_conf",
    "manual_cache_clean",
    "mcollective",
    "merge_how",
    "merge_type",
    "migrate",
    "mount_default_fields",
    "mounts",
    "network",
    "no_ssh_fingerprints",
    "ntp",
    "output",
    "package_reboot_if_required",
    "package_update",
    "package_upgrade",
    "packages",
    "password",
    "phone_home",
    "power_state",
    "prefer_fqdn_over_hostname",
    "preserve_hostname",
    "puppet",
    "random_seed",
    "reporting",
    "resize_rootfs",
    "resolv_conf",
    "rh_subscription",
    "rpi",
    "rsyslog",
    "rsyslog_dir",
    "rsyslog_filename",
    "runcmd",
    "salt_minion",
    "set_hostname",
    "set_timezone",
    "snap",
    "snappy",
    "spacewalk",
    "ssh",
    "ssh_authorized_keys",
    "ssh_deletekeys",
    "ssh_fp_console_blacklist",
    "ssh_genkeytypes",
    "ssh_import_id",
    "ssh_keys",
    "ssh_publish_hostkeys",
    "ssh_pwauth",
    "ssh_quiet_keygen",
    "swap",
    "syslog_fix_perms",
    "system_info",
    "timezone",
    "ubuntu_advantage",
    "ubuntu_pro",
    "unverified_modules",
    "updates",
    "user",
    "users",
    "vendor_data",
    "vendor_data2",
    "version",
    "wireguard",
    "write_files",
    "yum_repo_dir",
    "yum_repos",
    "zypper",
];

/// The user data as a value: a cloud-config read from its text. `None`: they are of another kind, or no YAML.
pub fn config(value: &Value) -> Option<Value> {
    match value {
        Value::Null => Some(json!({})),
        Value::String(text) if matches!(Kind::of(text), Kind::CloudConfig | Kind::Unknown) => {
            match crate::yaml::from_str(text).ok()? {
                Value::Null => Some(json!({})),
                value @ Value::Object(_) => Some(value),
                _ => None,
            }
        }
        value @ Value::Object(_) if !is_ignition(value) => Some(value.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
