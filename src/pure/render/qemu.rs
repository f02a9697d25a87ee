//! The QEMU templates of a set: the runner renders them, and the manager checks them and hands them over.

use serde_json::Value;

use super::{
    TemplateError, TemplateSet,
    command_line::{self, QemuFile, STANDARD, Sample},
    templates::{Layers, OfQemu, QEMU_FOLDER as FOLDER},
};
use crate::{
    object::Rendered,
    runner_config::{
        ConfigFile, RunnerConfig,
        paths::{CONFIG_FILE, QEMU_FILE},
    },
};

/// The file for the runner. Who may read the VM's ConfigMap reads only the values that the templates use.
pub(super) fn file(templates: &OfQemu, values: &Value, config: &Value) -> QemuFile {
    let mut values = values.clone();
    if let (Some(used), Some(values)) = (&templates.values, values.as_object_mut()) {
        values.retain(|key, _| used.contains(key));
    }
    QemuFile { templates: templates.layers.clone(), values, config: config.clone(), standard: None }
}

/// The template of a VM among those of its set. `None`: the set has none of that name, and the runner's image may have one.
pub fn template_of(config: &RunnerConfig, templates: &Layers) -> Option<String> {
    let name = format!("{FOLDER}{}", command_line::template_name(config));
    let of_named = templates.named.as_ref().and_then(|(_, files)| files.get(&name));
    // An empty file takes away what is below.
    let is_there = of_named.or_else(|| templates.base.get(&name)).is_some_and(|text| !text.trim().is_empty());
    (is_there && command_line::is_template(&name)).then_some(name)
}

/// QEMU's command line of a rendered VM, on a node that has what the runner asks for.
pub struct CommandLine {
    /// The template.
    pub template: String,
    /// The options, each with its value, which is JSON for an option that takes it.
    pub options: Vec<String>,
}

impl CommandLine {
    /// That of a VM with these objects. `None`: its runner is a legacy one.
    ///
    /// # Errors
    /// If the template can't be rendered, or is one of the runner's image.
    pub fn of(set: &TemplateSet, objects: &[Rendered]) -> Result<Option<Self>, TemplateError> {
        let Some((config, file)) = files(objects) else { return Ok(None) };
        let name = command_line::template_name(&config);
        let standard = || (name == STANDARD).then(|| format!("builtin/{FOLDER}{STANDARD}"));
        let Some(template) = template_of(&config, &file.templates).or_else(standard) else {
            let message = format!(
                "{FOLDER}{name} is not in the set: if the runner's image has the template, `vm-runner render-command` prints the command line"
            );
            return Err(TemplateError::of_vm("(spec)", "/spec/runnerTemplate/source", message));
        };
        Self::rendered(set, template, &config, &file).map(Some)
    }

    /// What a set's template has otherwise than the built-in one: what is gone, and what there is instead. `None`: the set has no template for the VM.
    ///
    /// # Errors
    /// If a template can't be rendered.
    pub fn changes(set: &TemplateSet, objects: &[Rendered]) -> Result<Option<(Self, Self)>, TemplateError> {
        let Some((config, file)) = files(objects) else { return Ok(None) };
        let Some(template) = template_of(&config, &file.templates) else { return Ok(None) };
        let builtin = Self::rendered(set, format!("builtin/{FOLDER}{STANDARD}"), &config, &file)?;
        let own = Self::rendered(set, template, &config, &file)?;
        let gone = without(&builtin.options, &own.options);
        let new = without(&own.options, &builtin.options);
        Ok(Some((Self { options: gone, ..builtin }, Self { options: new, ..own })))
    }

    fn rendered(
        set: &TemplateSet,
        template: String,
        config: &RunnerConfig,
        file: &QemuFile,
    ) -> Result<Self, TemplateError> {
        let set = as_the_runner_has_it(set);
        let arguments = command_line::sampled(set, &template, config, file, Sample::WithAll);
        let arguments = arguments.map_err(|error| match error {
            command_line::Error::Template(error) => error,
            command_line::Error::Unsupported(message) => TemplateError::refused("(spec)", message),
        })?;
        Ok(Self { template, options: options(&arguments) })
    }
}

/// The runner's files among the objects of a VM.
fn files(objects: &[Rendered]) -> Option<(RunnerConfig, QemuFile)> {
    let data = |name: &str| objects.iter().find_map(|object| object.value["data"][name].as_str());
    let config = crate::yaml::from_str::<ConfigFile>(data(CONFIG_FILE)?).ok()?.runner;
    let file = data(QEMU_FILE).and_then(|text| crate::yaml::from_str(text).ok());
    Some((config, file.unwrap_or_default()))
}

/// Each option with its value.
fn options(arguments: &[String]) -> Vec<String> {
    let mut options: Vec<String> = Vec::new();
    for argument in arguments {
        match options.last_mut() {
            Some(option) if !argument.starts_with('-') => *option += &format!(" {}", argument.replace('\n', "\\n")),
            _ => options.push(argument.replace('\n', "\\n")),
        }
    }
    options
}

/// The options that are not in the other list, where each counts once.
fn without(options: &[String], others: &[String]) -> Vec<String> {
    let mut others: Vec<&String> = others.iter().collect();
    let mut left = options.to_vec();
    left.retain(|option| match others.iter().position(|other| *other == option) {
        Some(at) => {
            others.swap_remove(at);
            false
        }
        None => true,
    });
    left
}

/// Checks the QEMU template of a VM.
///
/// # Errors
/// What the runner would refuse.
pub(super) fn check(config: &RunnerConfig, file: &QemuFile, set: &TemplateSet) -> Result<(), TemplateError> {
    match template_of(config, &file.templates) {
        Some(name) => command_line::check(as_the_runner_has_it(set), &name, config, file),
        None => Ok(()),
    }
}

/// The set as the runner compiles it.
fn as_the_runner_has_it(set: &TemplateSet) -> &TemplateSet {
    set.qemu().map_or(set, |of_qemu| &of_qemu.set)
}

/// Checks that an object of a VM whose set has QEMU templates hands them over: else the guest would start without them.
///
/// # Errors
/// If none has.
pub(super) fn check_is_handed_over(objects: &[Rendered]) -> Result<(), TemplateError> {
    if objects.iter().any(|object| object.value["data"][QEMU_FILE].is_string()) {
        return Ok(());
    }
    Err(TemplateError::refused(
        "config-map.yaml.j2",
        format!(
            "the set has QEMU templates in {FOLDER}, and no ConfigMap hands them over: write `{QEMU_FILE}: {{{{ qemu | to_yaml }}}}` into its \
             `data`, as the built-in template does"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        render::{Files, check::example_config, first_start},
        test_support,
    };

    const EXTENDS: &str = "{% extends 'base/qemu/standard.yaml.j2' %}";

    fn rendered(files: &[(&str, &str)]) -> Result<Vec<Rendered>, String> {
        let files: Files = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let set = TemplateSet::layered(&files, None).map_err(|error| error.to_string())?;
        let vm = test_support::vm(|vm| vm["spec"]["templateValues"] = json!({ "rack": "a,b", "secret": "s" }));
        first_start(&vm, &example_config(), &set).map_err(|error| error.to_string())
    }

    fn handed_over(objects: &[Rendered]) -> Option<QemuFile> {
        let text = objects.iter().find_map(|object| object.value["data"][QEMU_FILE].as_str())?;
        Some(crate::yaml::from_str(text).unwrap())
    }

    #[test]
    fn the_runner_gets_the_templates_and_only_the_values_that_they_use() {
        let objects = rendered(&[]).unwrap();
        assert_eq!(handed_over(&objects), None, "a set without them changes nothing");
        assert_eq!(files(&objects).unwrap().0.qemu_templates, None);
        let serial = format!(
            "{EXTENDS}{{% block extra_devices %}}\n- -smbios\n- {{{{ \"type=3,asset=\" ~ (values.rack | opt) }}}}\n{{% endblock %}}"
        );
        let file = handed_over(&rendered(&[("qemu/standard.yaml.j2", &serial)]).unwrap()).unwrap();
        assert_eq!(file.values, json!({ "rack": "a,b" }));
        assert_eq!(file.templates.base.keys().collect::<Vec<_>>(), ["qemu/standard.yaml.j2"]);
        let (config, file) = files(&rendered(&[("qemu/standard.yaml.j2", &serial)]).unwrap()).unwrap();
        assert_eq!(config.qemu_templates, Some(file.digest()), "the runner's configuration changes with the file");
        let whole =
            format!("{EXTENDS}{{% block boot %}}\n- -boot\n- menu=off\n# {{{{ values | length }}}}\n{{% endblock %}}");
        let file = handed_over(&rendered(&[("qemu/standard.yaml.j2", &whole)]).unwrap()).unwrap();
        assert_eq!(file.values["secret"], "s", "a template that uses the whole map");
    }

    #[test]
    fn a_template_that_the_runner_would_refuse_is_refused() {
        let block = |name: &str, text: &str| format!("{EXTENDS}{{% block {name} %}}\n{text}\n{{% endblock %}}");
        for (text, expected) in [
            (
                block("memory", "- {{ machine.memry }}"),
                "qemu/standard.yaml.j2:2:6: undefined value: `machine.memry` is undefined",
            ),
            (block("monitors", ""), "qemu/standard.yaml.j2: it leaves out the socket of the monitor `monitor`"),
            (block("boot", "- [a]"), "qemu/standard.yaml.j2: it renders [\"a\"] as argument"),
            (block("extra", "- x"), "qemu/standard.yaml.j2:1:52: builtin/qemu/standard.yaml.j2 has no block `extra`"),
        ] {
            let error = rendered(&[("qemu/standard.yaml.j2", &text)]).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        let good = block("boot", "");
        let lost = "{% extends 'base/config-map.yaml.j2' %}";
        assert!(rendered(&[("qemu/standard.yaml.j2", &good), ("config-map.yaml.j2", lost)]).is_ok());
        let own = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name }}}\ndata: {config.yaml: {{ runner | to_yaml }}}\n";
        let error = rendered(&[("qemu/standard.yaml.j2", &good), ("config-map.yaml.j2", own)]).unwrap_err();
        assert!(error.contains("write `qemu.yaml: {{ qemu | to_yaml }}` into its `data`"), "{error}");
        // The runner gets the folder, and nothing beside it.
        let outside = block("boot", "{% include 'lib/x.j2' %}");
        let error = rendered(&[("qemu/standard.yaml.j2", &outside), ("lib/x.j2", "")]).unwrap_err();
        assert!(
            error.starts_with("qemu/standard.yaml.j2:2:4: template not found: ") && error.contains("lib/x.j2"),
            "{error}"
        );
        let inside = block("boot", "{% include 'qemu/lib/x.j2' %}");
        rendered(&[("qemu/standard.yaml.j2", &inside), ("qemu/lib/x.j2", "# nothing")]).unwrap();
        // Another name, which this VM does not use.
        assert!(rendered(&[("qemu/other.yaml.j2", &block("monitors", ""))]).is_ok());
    }
}
