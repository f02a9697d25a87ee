//! Takes secrets out of what people get to see: a bug report, and the page with a VM's objects.
//!
//! | what | becomes |
//! |---|---|
//! | `data` and `stringData` of Secrets | the number of bytes |
//! | `cloudInit.userData` and `vendorData`, also in a ConfigMap's `config.yaml`; keys `user-data` and `vendor-data` of a ConfigMap | masked |
//! | texts under a key that sounds like a secret (`password`, `token`, ...), and such variables of containers | masked |
//! | names and passwords in URLs, and parameters that sound like a secret or a signature | masked |
//! | what a client-side apply has kept of an object | left out |
//! | what a Secret of the VM contains, wherever it stands | masked |

use std::collections::BTreeSet;

use serde_json::Value;

/// What stands in place of a secret.
pub const MASK: &str = "(masked)";
/// A text of a Secret that is shorter may be a word that is no secret.
const SHORTEST: usize = 6;
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Parts of keys whose texts are secrets, and ends of keys that only name one.
const SECRET: [&str; 8] = ["password", "passwd", "passphrase", "token", "secret", "apikey", "privatekey", "credential"];
const NAMES: [&str; 7] = ["name", "path", "expiry", "class", "ref", "kind", "file"];

/// The secrets that are known by their text.
#[derive(Default)]
pub struct KnownSecrets(BTreeSet<String>);

impl KnownSecrets {
    /// Remembers what a Secret contains.
    pub fn add(&mut self, secret: &k8s_openapi::api::core::v1::Secret) {
        // When a password ends is no secret, and is in the status too.
        let entries = secret.data.iter().flatten().filter(|(key, _)| !key.ends_with("expiry"));
        let values = entries.filter_map(|(_, value)| std::str::from_utf8(&value.0).ok());
        self.0.extend(values.map(str::trim).filter(|text| text.len() >= SHORTEST).map(str::to_owned));
    }

    /// The text without them, and without names and passwords in URLs.
    pub fn mask(&self, text: &str) -> String {
        // The longest first: one may be a part of another.
        let mut known: Vec<&String> = self.0.iter().collect();
        known.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        let text = known.into_iter().fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), MASK));
        without_logins(&text)
    }
}

/// `https://user:password@host/?token=x` without what is before the `@`, and without the values of parameters that let somebody in.
fn without_logins(text: &str) -> String {
    let mut parts = text.split("://");
    let mut masked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        masked.push_str("://");
        let end = part.find(|char: char| char == '/' || char == '?' || char.is_whitespace() || "\"'<>".contains(char));
        let (authority, rest) = part.split_at(end.unwrap_or(part.len()));
        match authority.rsplit_once('@') {
            Some((_, host)) => masked.push_str(&format!("{MASK}@{host}")),
            None => masked.push_str(authority),
        }
        masked.push_str(&without_signatures(rest));
    }
    masked
}

/// What stands behind the host of a URL, up to the next URL. Who has a signed URL may do what it says.
fn without_signatures(text: &str) -> String {
    let end = text.find(|char: char| char.is_whitespace() || "\"'<>".contains(char)).unwrap_or(text.len());
    let (url, after) = text.split_at(end);
    let Some((path, query)) = url.split_once('?') else { return text.to_owned() };
    let is_secret = |name: &str| {
        let lower = name.to_lowercase();
        is_secret_key(name) || lower == "sig" || lower.ends_with("signature")
    };
    let parameters = query.split('&').map(|parameter| match parameter.split_once('=') {
        Some((name, value)) if !value.is_empty() && is_secret(name) => format!("{name}={MASK}"),
        _ => parameter.to_owned(),
    });
    format!("{path}?{}{after}", parameters.collect::<Vec<_>>().join("&"))
}

/// An object without its secrets.
pub fn object(mut object: Value) -> Value {
    let is_secret = object["kind"] == "Secret";
    let is_map = object["kind"] == "ConfigMap";
    if let Some(annotations) = object["metadata"]["annotations"].as_object_mut() {
        annotations.remove(LAST_APPLIED);
    }
    let mut masked = Vec::new();
    for part in ["data", "stringData"] {
        let Some(Value::Object(mut entries)) = object.get_mut(part).map(Value::take) else { continue };
        for (key, value) in &mut entries {
            let text = value.as_str().unwrap_or_default();
            if is_secret {
                *value = format!("{MASK} {} characters", text.len()).into();
            } else if is_map {
                *value = file_of_map(key, text).into();
            }
        }
        masked.push((part, entries));
    }
    below(&mut object);
    for (part, entries) in masked {
        object[part] = Value::Object(entries);
    }
    object
}

/// A file in a ConfigMap.
fn file_of_map(name: &str, text: &str) -> String {
    if name.contains("user-data") || name.contains("vendor-data") || is_secret_key(name) {
        return MASK.into();
    }
    if name.ends_with(".j2") {
        return template(text);
    }
    if !USER_DATA.iter().any(|key| text.contains(key)) && !sounds_secret(text) {
        return text.to_owned();
    }
    // It has a secret somewhere: all comes out anew.
    let Ok(mut value) = crate::yaml::from_str::<Value>(text) else { return MASK.into() };
    below(&mut value);
    match value {
        // No YAML with fields, such as a template.
        Value::String(_) | Value::Null => text.to_owned(),
        value => serde_saphyr::to_string(&value).unwrap_or_else(|_| MASK.into()),
    }
}

/// A template, which is no YAML before it is rendered, without the texts of keys that sound like a secret.
fn template(text: &str) -> String {
    let mut seen = Seen::default();
    let lines: Vec<String> =
        text.split('\n').map(|line| seen.masked(line).unwrap_or_else(|| line.to_owned())).collect();
    lines.join("\n")
}

/// What the lines of a template so far say of the next one. A place is that of a key in its line.
#[derive(Default)]
struct Seen {
    /// Of the last key with a secret: what is indented more belongs to its text.
    secret: Option<usize>,
    /// Of the keys beside a `name` that is that of a secret.
    named: Option<usize>,
}

impl Seen {
    /// The line without its secret; `None`: it has none.
    fn masked(&mut self, line: &str) -> Option<String> {
        let content = line.trim();
        // Statements and comments of the template stand where they like.
        let ends = |begin: &str, end: &str| content.starts_with(begin) && content.find(end) == Some(content.len() - 2);
        if content.is_empty() || ends("{%", "%}") || ends("{#", "#}") {
            let (key, value) = line.split_once(':')?;
            return (is_secret_key(name_in(key)) && is_text(value)).then(|| format!("{key}: {MASK}"));
        }
        let indent = line.len() - line.trim_start().len();
        if self.secret.is_some_and(|place| indent > place || content.starts_with("{%") || content.starts_with("{#")) {
            return Some(format!("{}{MASK}", &line[..indent]));
        }
        self.secret = None;
        let place = line.len() - line.trim_start_matches([' ', '-']).len();
        let is_next_item = content.starts_with('-') && self.named == Some(place);
        if is_next_item || self.named.is_some_and(|named| place < named) {
            self.named = None;
        }
        let (key, value) = line.split_once(':')?;
        let (name, value) = (name_in(key), value.trim());
        if name == "name" && is_secret_key(value.trim_matches(['"', '\''])) {
            self.named = Some(place);
        }
        let is_secret = is_secret_key(name) || (name == "value" && self.named == Some(place));
        self.secret = Some(place).filter(|_| is_secret && is_text(value));
        // The text of a block is in the next lines.
        let is_here = self.secret.is_some() && !value.starts_with(['|', '>']);
        is_here.then(|| format!("{key}: {MASK}"))
    }
}

/// The key before a colon.
fn name_in(key: &str) -> &str {
    key.trim_start_matches([' ', '-']).trim_matches(['"', '\''])
}

/// Whether what is behind a colon is a text, or the begin of one.
fn is_text(value: &str) -> bool {
    let value = value.trim_start();
    !value.is_empty() && !value.starts_with(['{', '[', '&', '*'])
}

fn sounds_secret(text: &str) -> bool {
    let text = text.to_lowercase().replace(['-', '_'], "");
    SECRET.iter().any(|word| text.contains(word))
}

/// The keys under which data for cloud-init stand.
const USER_DATA: [&str; 4] = ["userData", "user-data", "vendorData", "vendor-data"];

fn is_secret_key(key: &str) -> bool {
    let lower = key.to_lowercase();
    sounds_secret(key) && !NAMES.iter().any(|end| lower.ends_with(end))
}

/// Masks what stands below a value, by its keys.
fn below(value: &mut Value) {
    match value {
        Value::Object(map) => {
            let names_secret = map.get("name").and_then(Value::as_str).is_some_and(is_secret_key);
            for (key, value) in map.iter_mut() {
                let is_variable = names_secret && key == "value";
                let is_user_data = USER_DATA.contains(&key.as_str());
                if is_user_data || (value.is_string() && (is_variable || is_secret_key(key))) {
                    *value = MASK.into();
                } else {
                    below(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(below),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_are_masked_wherever_their_keys_say_so() {
        let vm = json!({
            "kind": "VirtualMachine", "metadata": { "annotations": { LAST_APPLIED: "{}", "note": "n" } },
            "spec": {
                "cloudInit": { "userData": { "password": "p" }, "metaData": { "local-hostname": "h" } },
                "templateValues": { "apiKey": "k", "tokens": { "registryToken": "t", "tokenPath": "/run/t" }, "size": 1 },
                "vm": { "display": { "spice": { "generateSecret": false } } },
            },
            "status": { "displayPasswordExpiry": "never", "displayPasswordSerial": 3 },
        });
        let masked = object(vm);
        assert_eq!(masked["metadata"]["annotations"], json!({ "note": "n" }));
        let spec = &masked["spec"];
        assert_eq!(spec["cloudInit"], json!({ "userData": MASK, "metaData": { "local-hostname": "h" } }));
        let values = json!({ "apiKey": MASK, "tokens": { "registryToken": MASK, "tokenPath": "/run/t" }, "size": 1 });
        assert_eq!(spec["templateValues"], values);
        assert_eq!(spec["vm"]["display"]["spice"]["generateSecret"], false);
        assert_eq!(masked["status"], json!({ "displayPasswordExpiry": "never", "displayPasswordSerial": 3 }));
        let env = json!([{ "name": "DB_PASSWORD", "value": "x" }, { "name": "URL", "value": "y" }]);
        let pod = object(json!({ "kind": "Pod", "spec": { "containers": [{ "env": env }] } }));
        let env = json!([{ "name": "DB_PASSWORD", "value": MASK }, { "name": "URL", "value": "y" }]);
        assert_eq!(pod["spec"]["containers"][0]["env"], env);
    }

    #[test]
    fn secrets_and_config_maps_lose_what_is_in_them() {
        let secret =
            object(json!({ "kind": "Secret", "data": { "display-password": "aGVsbG8=" }, "stringData": { "a": "b" } }));
        assert_eq!(secret["data"]["display-password"], "(masked) 8 characters");
        let config = "vm:\n  cloudInit:\n    userData:\n      password: hello\n  maximumCpus: 2\n";
        let map = object(json!({ "kind": "ConfigMap", "data": {
            "config.yaml": config, "user-data": "#cloud-config", "other": "plain: 1 # kept\n", "broken": "password: [",
            "pod.yaml.j2": "{% if secret %}\nsecret: {{ secret }}\n- password: hello\nsecretName: s\n{% endif %}\n",
        } }));
        let config: Value = serde_yaml::from_str(map["data"]["config.yaml"].as_str().unwrap()).unwrap();
        assert_eq!(config, json!({ "vm": { "cloudInit": { "userData": MASK }, "maximumCpus": 2 } }));
        assert_eq!((&map["data"]["user-data"], &map["data"]["broken"]), (&json!(MASK), &json!(MASK)));
        assert_eq!(map["data"]["other"], "plain: 1 # kept\n");
        let template = "{% if secret %}\nsecret: {{ secret }}\n- password: (masked)\nsecretName: s\n{% endif %}\n";
        assert_eq!(map["data"]["pod.yaml.j2"], template);
    }

    #[test]
    fn a_template_loses_the_texts_of_secrets_and_nothing_else() {
        for (text, expected) in [
            ("password: hello", "password: (masked)"),
            ("  - \"password\": hello", "  - \"password\": (masked)"),
            ("{% set a = {'password': 'x'} %}\nb: c", "{% set a = {'password': (masked)\nb: c"),
            ("password: {{ p }}\nuser: ann", "password: {{ p }}\nuser: ann"),
            // A text of several lines ends where the next key is.
            ("password: hel\n  lo\nuser: ann", "password: (masked)\n  (masked)\nuser: ann"),
            ("a:\n  token: |\n    x\n\n      y: z\n  b: c", "a:\n  token: |\n    (masked)\n\n      (masked)\n  b: c"),
            ("- token: >-\n    x\n  b: c\n", "- token: >-\n    (masked)\n  b: c\n"),
            (
                "token: |\n  x\n{% if a %}\n  y\n{% endif %}\n{# more #}\n  z\nb: c",
                "token: |\n  (masked)\n{% if a %}\n  (masked)\n{% endif %}\n{# more #}\n  (masked)\nb: c",
            ),
            ("token: |\n{% if a %}x{% endif %}\n  y\nb: c", "token: |\n(masked)\n  (masked)\nb: c"),
            ("secret:\n  secretName: s\n  items: [a]", "secret:\n  secretName: s\n  items: [a]"),
            // Variables of containers.
            (
                "env:\n- name: DB_PASSWORD\n  value: hello\n- name: URL\n  value: there",
                "env:\n- name: DB_PASSWORD\n  value: (masked)\n- name: URL\n  value: there",
            ),
            (
                "  - name: 'API_TOKEN'\n{% if a %}\n    value: |\n      x\n{% endif %}\n  image: i",
                "  - name: 'API_TOKEN'\n{% if a %}\n    value: |\n      (masked)\n{% endif %}\n  image: i",
            ),
            (
                "- name: token-maker\n  image: i\n  env:\n  - name: A\n    value: b\n",
                "- name: token-maker\n  image: i\n  env:\n  - name: A\n    value: b\n",
            ),
            ("- name: DB_PASSWORD\n  valueFrom: x\nvalue: y", "- name: DB_PASSWORD\n  valueFrom: x\nvalue: y"),
        ] {
            assert_eq!(template(text), expected, "{text}");
        }
    }

    #[test]
    fn what_a_secret_contains_is_masked_in_texts() {
        let mut known = KnownSecrets::default();
        let secret = json!({ "data": { "a": "aGVsbG8gd29ybGQK", "b": "aGVsbG8=", "short": "YWI=", "password-expiry": "MTgwMDAwMDAwMA==", "long": "aGVsbG8gd29ybGQgYW5kIG1vcmU=" } });
        known.add(&serde_json::from_value(secret).unwrap());
        let text = "hello world and more; hello world; hello; ab; 1800000000; https://ann:x@example.org/a@b http://example.org/?q=a@b";
        assert_eq!(
            known.mask(text),
            format!("{MASK}; {MASK}; hello; ab; 1800000000; https://{MASK}@example.org/a@b http://example.org/?q=a@b")
        );
        for (text, expected) in [
            (
                "get https://a/b.img?X-Amz-Expires=60&X-Amz-Signature=ab12 done",
                "get https://a/b.img?X-Amz-Expires=60&X-Amz-Signature=(masked) done",
            ),
            ("url: 'https://a/b?sv=1&sig=z%3D'\nc: d?e=f", "url: 'https://a/b?sv=1&sig=(masked)'\nc: d?e=f"),
            ("https://a?token=x https://b/?token=&page=2", "https://a?token=(masked) https://b/?token=&page=2"),
            ("https://a/b is it?token=x", "https://a/b is it?token=x"),
        ] {
            assert_eq!(known.mask(text), expected);
        }
    }
}
