//! The command that creates the same VM as the form.

use crate::{
    actions::create::{NewVm, WantedNetwork, WantedUser, plain_size},
    process::shell::shell_word,
};

/// `kubectl vm create` with the options for this VM; `image` as it was typed. An option that has its default is left out, except the sizes.
pub(super) fn command(wanted: &NewVm, image: &str) -> String {
    let mut words = vec!["kubectl".to_owned(), "vm".into(), "create".into(), wanted.name.clone()];
    let mut option = |name: &str, value: &str| words.extend([format!("--{name}"), value.to_owned()]);
    if let Some(namespace) = &wanted.namespace {
        option("namespace", namespace);
    }
    option("image", image.trim());
    option("cpus", &wanted.cpus.to_string());
    option("ram", &plain_size(&wanted.ram));
    option("disk", &wanted.disk);
    match &wanted.network {
        WantedNetwork::Pod => {}
        WantedNetwork::User => option("network", "user"),
        WantedNetwork::Nothing => option("network", "none"),
        WantedNetwork::Bridge(bridge) => option("network", &format!("bridge={bridge}")),
    }
    if let WantedUser::Keys { user, keys } = &wanted.user {
        option("user", user);
        keys.iter().for_each(|key| option("ssh-key", key));
    }
    wanted.pools.iter().for_each(|pool| option("pool", pool));
    if !wanted.start {
        words.push("--stopped".into());
    }
    words.iter().map(|word| shell_word(word)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::{super::form::Form, *};

    fn command_of(form: &Form) -> String {
        command(&form.read(|_| true).0, &form.image)
    }

    #[test]
    fn the_command_has_what_the_form_has() {
        let key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc it's ann@desk";
        let form = Form { name: "web".into(), user: "ann".into(), keys: key.into(), ..Form::new("lab") };
        assert_eq!(
            command_of(&form),
            r"kubectl vm create web --namespace lab --image debian:13 --cpus 2 --ram 2Gi --disk 10Gi --user ann --ssh-key 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc it'\''s ann@desk'"
        );
        let other = Form {
            image: "oci:a/b $(id)".into(),
            network: "bridge".into(),
            bridge: "br 1".into(),
            pools: "desks".into(),
            start: None,
            ..form
        };
        let command = command_of(&other);
        assert!(
            command.contains("--image 'oci:a/b $(id)'") && command.contains(" --network 'bridge=br 1'"),
            "{command}"
        );
        assert!(command.ends_with(" --pool desks --stopped"), "{command}");
    }
}
