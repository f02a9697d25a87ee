//! Adds keys for ssh to the user data of cloud-init. Pure.

use serde_json::{Map, Value, json};

use crate::{
    api::{CloudInit, VirtualMachine},
    user_data::Kind,
};

/// The key of cloud-config with the public keys of the image's user
/// (<https://cloudinit.readthedocs.io/en/latest/reference/modules.html#ssh>).
const KEYS: &str = "ssh_authorized_keys";
/// The first line of a cloud-config.
const CLOUD_CONFIG: &str = "#cloud-config";

/// Why the keys can't be added.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The user data come from another object.
    #[error("--ssh-key: spec.cloudInit.userDataFrom names the user data: add the key there, as {KEYS}")]
    Elsewhere,
    /// The user data are a script or an archive.
    #[error(
        "--ssh-key: spec.cloudInit.userData is no cloud-config, so no key can be added: let it begin with {CLOUD_CONFIG}, or add the key by hand"
    )]
    NotCloudConfig,
    /// The cloud-config is not YAML.
    #[error("--ssh-key: spec.cloudInit.userData is no YAML: {0}")]
    Yaml(String),
    /// The list of keys is something else.
    #[error("--ssh-key: {KEYS} in spec.cloudInit.userData is no list")]
    NoList,
    /// A file has no public key.
    #[error("--ssh-key: {0} is no public key: give the file that ends in .pub, such as ~/.ssh/id_ed25519.pub")]
    NoKey(String),
}

/// The public key in the text of the file `name`.
///
/// # Errors
/// If it is not one line that begins with the type of a key. A private key must not get into the guest.
pub fn key(name: &str, text: &str) -> Result<String, Error> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let is_key = |line: &&str| {
        let mut words = line.split_whitespace();
        let is_type = |word: &str| ["ssh-", "ecdsa-", "sk-"].iter().any(|start| word.starts_with(start));
        words.next().is_some_and(is_type) && words.next().is_some()
    };
    match (lines.next().filter(is_key), lines.next()) {
        (Some(line), None) => Ok(line.to_owned()),
        _ => Err(Error::NoKey(name.to_owned())),
    }
}

/// Adds keys to the user data, for the image's user and for each user that they name. A VM without data for cloud-init gets some.
///
/// # Errors
/// If the user data are not a cloud-config.
pub fn add_keys(vm: &mut VirtualMachine, keys: &[String]) -> Result<(), Error> {
    if keys.is_empty() {
        return Ok(());
    }
    let cloud_init = vm.spec.cloud_init.get_or_insert_with(CloudInit::default);
    if cloud_init.user_data_from.is_some() {
        return Err(Error::Elsewhere);
    }
    let mut data = match cloud_init.user_data.take() {
        None | Some(Value::Null) => json!({}),
        Some(Value::String(text)) => cloud_config(&text)?,
        Some(data) => data,
    };
    let config = data.as_object_mut().ok_or(Error::NotCloudConfig)?;
    extend(config, keys)?;
    // A list of users often leaves out the image's user, which alone has the keys above.
    for user in config.get_mut("users").and_then(Value::as_array_mut).into_iter().flatten() {
        match user.as_object_mut() {
            Some(user) if user.get("system") != Some(&Value::Bool(true)) => extend(user, keys)?,
            _ => {}
        }
    }
    cloud_init.user_data = Some(data);
    Ok(())
}

fn extend(of: &mut Map<String, Value>, keys: &[String]) -> Result<(), Error> {
    let list = of.entry(KEYS).or_insert_with(|| json!([]));
    list.as_array_mut().ok_or(Error::NoList)?.extend(keys.iter().map(|key| json!(key)));
    Ok(())
}

/// The values of a cloud-config. A text without a first line of that kind gets one from the manager.
fn cloud_config(text: &str) -> Result<Value, Error> {
    match Kind::of(text) {
        Kind::CloudConfig | Kind::Unknown => {}
        _ => return Err(Error::NotCloudConfig),
    }
    match crate::yaml::from_str(text) {
        Ok(Value::Null) => Ok(json!({})),
        Ok(value) => Ok(value),
        Err(error) => Err(Error::Yaml(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::vm;

    fn with_key(user_data: Value) -> Result<Value, Error> {
        let mut vm = vm(|vm| {
            if !user_data.is_null() {
                vm["spec"]["cloudInit"] = json!({ "userData": user_data });
            }
        });
        add_keys(&mut vm, &["ssh-ed25519 AAAA a".into()])?;
        Ok(vm.spec.cloud_init.unwrap().user_data.unwrap())
    }

    #[test]
    fn a_key_is_added_to_what_is_there() {
        let keys = json!(["ssh-ed25519 AAAA a"]);
        assert_eq!(with_key(Value::Null).unwrap(), json!({ KEYS: keys }));
        assert_eq!(with_key(json!({ "message": "x" })).unwrap(), json!({ "message": "x", KEYS: keys }));
        assert_eq!(with_key(json!({ KEYS: ["b"] })).unwrap(), json!({ KEYS: ["b", keys[0]] }));
        assert_eq!(with_key(json!("#cloud-config\na: 1\n")).unwrap(), json!({ "a": 1, KEYS: keys }));
        assert_eq!(with_key(json!("#cloud-config\n")).unwrap(), json!({ KEYS: keys }));
        let users = |ann: Value| json!({ "users": ["default", ann, { "name": "backup", "system": true }] });
        let mut expected = users(json!({ "name": "ann", KEYS: ["b", keys[0]] }));
        expected[KEYS] = keys;
        assert_eq!(with_key(users(json!({ "name": "ann", KEYS: ["b"] }))).unwrap(), expected);
    }

    #[test]
    fn user_data_that_is_no_cloud_config_is_refused() {
        assert_eq!(with_key(json!("#!/bin/sh\ntrue\n")), Err(Error::NotCloudConfig));
        assert_eq!(with_key(json!("just a text")), Err(Error::NotCloudConfig));
        assert_eq!(with_key(json!({ KEYS: "b" })), Err(Error::NoList));
        assert!(matches!(with_key(json!("#cloud-config\na: [\n")), Err(Error::Yaml(_))));
        let mut vm = vm(|vm| {
            vm["spec"]["cloudInit"] = json!({ "userDataFrom": { "secretKeyRef": { "name": "s", "key": "k" } } })
        });
        assert_eq!(add_keys(&mut vm, &["k".into()]), Err(Error::Elsewhere));
    }

    #[test]
    fn a_private_key_does_not_get_into_the_guest() {
        assert_eq!(key("a.pub", "ssh-ed25519 AAAA alice@laptop\n").unwrap(), "ssh-ed25519 AAAA alice@laptop");
        for text in ["-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n", "", "ssh-rsa", "ssh-rsa A\nssh-rsa B\n"] {
            assert_eq!(key("a", text), Err(Error::NoKey("a".into())), "{text}");
        }
    }
}
