//! `kubectl vm diff`: what the manager would do to a machine's objects, found by its own plan and a dry run.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use clap::Args;
use k8s_openapi::{api::core::v1::ConfigMap, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, TypeMeta},
};
use serde_json::Value;

use super::{Failure, Settings, connect, print, wait_for, yaml};
use crate::{
    api::{Reason, VirtualMachine},
    claims,
    config::{Config, ReconcilerConfig},
    files::{self, FileError},
    object::{HASH_ANNOTATION, ObjectKey, Rendered, SET_LABEL, Update, VERSION_ANNOTATION, builtin_kinds, resource},
    observed::{Object, Observed},
    ownership::OBJECT_MANAGER,
    plan::{Action, Plan, Wait, Why, kinds, plan},
    render::{Facts, Library, TemplateError, output, render},
};

#[derive(Args)]
pub struct Options {
    /// The machine in the cluster.
    #[arg(value_name = "VM", required_unless_present = "filename")]
    machine: Option<String>,
    /// A file with the machines as they shall be.
    #[arg(long, short, value_name = "FILE", conflicts_with = "machine")]
    filename: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
    /// The namespace. Default: that of the kubeconfig's context.
    #[arg(long, short, value_name = "NS")]
    namespace: Option<String>,
    /// Where the manager is, with its ConfigMaps. Default: in the machine's namespace.
    #[arg(long, value_name = "NS")]
    manager_namespace: Option<String>,
}

pub fn run(options: &Options, output: &mut Vec<u8>) -> Result<u8, Failure> {
    wait_for(diff(options, output)).map_err(failed)?
}

/// It could not be found out.
fn failed(error: anyhow::Error) -> Failure {
    Failure { lines: vec![format!("{error:#}")], code: 3 }
}

async fn diff(options: &Options, output: &mut Vec<u8>) -> Result<u8, Failure> {
    let (client, namespace) = connect(options.namespace.as_deref()).await.map_err(failed)?;
    let machines = match (&options.filename, &options.machine) {
        (Some(file), _) => super::machines(file, &namespace)?,
        (None, Some(name)) => {
            let api: Api<VirtualMachine> = Api::namespaced(client.clone(), &namespace);
            let vm = api.get(name).await;
            vec![vm.map_err(|error| failed(anyhow::Error::new(error).context(format!("vm {namespace}/{name}"))))?]
        }
        (None, None) => Vec::new(),
    };
    let mut different = false;
    for vm in machines {
        let home = options.manager_namespace.clone().or_else(|| vm.namespace()).unwrap_or_default();
        let (library, config) = installed(&client, &home, &options.settings).await?;
        let vm = as_in_cluster(&client, vm).await.map_err(failed)?;
        let seen = Seen::of(&client, &vm, &library, &config, &options.settings).await?;
        different |= show(&client, &vm, &seen, output).await?;
    }
    Ok(u8::from(different))
}

/// The templates and the configuration that the manager in that namespace has, where the command line gives none.
async fn installed(client: &Client, home: &str, settings: &Settings) -> Result<(Library, ReconcilerConfig), Failure> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), home);
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: kube::Error| Failure { lines: vec![format!("{what}: {error}")], code: 3 }
    };
    let library = match &settings.templates {
        Some(folder) => Library::new(&files::sources(folder)?),
        None => {
            let base =
                maps.get_opt("vm-operator-templates").await.map_err(failed("ConfigMap vm-operator-templates"))?;
            let mut sources = files::divided(files::unpacked(base.and_then(|map| map.data).unwrap_or_default()));
            let sets = maps.list(&ListParams::default().labels(SET_LABEL)).await.map_err(failed("template sets"))?;
            for map in sets {
                let name = map.labels().get(SET_LABEL).cloned().unwrap_or_default();
                sources.sets.entry(name).or_default().extend(files::unpacked(map.data.unwrap_or_default()));
            }
            Library::new(&sources)
        }
    };
    let mut config = settings.config()?;
    if settings.config.is_none()
        && let Some(map) = maps.get_opt("vm-operator").await.map_err(failed("ConfigMap vm-operator"))?
        && let Some(text) = map.data.unwrap_or_default().get("config.yaml")
    {
        let given = Config::parse(text).map_err(|error| Failure::plain(format!("ConfigMap vm-operator: {error}")))?;
        config = ReconcilerConfig { template_values: config.template_values, ..given.reconciler };
    }
    Ok((library, config))
}

/// A machine of a file with what the cluster knows of it: identity, status, and the API server's defaults.
async fn as_in_cluster(client: &Client, vm: VirtualMachine) -> anyhow::Result<VirtualMachine> {
    if vm.metadata.uid.is_some() {
        return Ok(vm);
    }
    let api: Api<VirtualMachine> = Api::namespaced(client.clone(), &vm.namespace().unwrap_or_default());
    let Some(there) = api.get_opt(&vm.name_any()).await? else { return Ok(vm) };
    let mut metadata = there.metadata;
    metadata.labels = vm.metadata.labels;
    metadata.annotations.get_or_insert_default().extend(vm.metadata.annotations.unwrap_or_default());
    Ok(VirtualMachine { metadata, spec: vm.spec, status: there.status })
}

/// A machine's objects, as they are and as they would be.
struct Seen {
    current: Vec<DynamicObject>,
    rendered: Vec<Rendered>,
    plan: Plan,
    /// What the cluster can't do, in words.
    forbidden: Vec<String>,
    /// Kinds that may not be listed, of which nothing is rendered.
    unseen: Vec<String>,
}

impl Seen {
    async fn of(
        client: &Client,
        vm: &VirtualMachine,
        library: &Library,
        config: &ReconcilerConfig,
        settings: &Settings,
    ) -> Result<Self, Failure> {
        let wrong = |error: TemplateError| FileError::template(settings.templates.as_deref(), &error);
        let set = library.get(vm.template_set()).map_err(wrong)?;
        let facts = Facts { display_password: "(random)".into() };
        let mut listing = Listing::of(client, vm);
        // What there is decides what is rendered (old names of claims, secrets of people): twice is enough.
        listing.look(builtin_kinds()).await?;
        for _ in 0..2 {
            let rendered = render(vm, &listing.observed, config, &facts, set).map_err(wrong)?;
            for kind in rendered.iter().map(|object| object.key.types()) {
                listing.add(&kind).await.map_err(|error| unlisted(&kind, &error))?;
            }
        }
        let rendered = render(vm, &listing.observed, config, &facts, set).map_err(wrong)?;
        // What no template makes any more.
        listing.look(kinds::from_status(vm, &rendered)).await?;
        let Listing { observed, current, unseen, .. } = listing;
        let plan = plan(vm, &observed, Some(&rendered));
        let claims = claims::claims(vm, &observed, &rendered, &[]);
        let findings = claims.iter().flat_map(|claim| claim.findings.iter().map(|finding| (&claim.name, finding)));
        let refused =
            findings.filter(|(_, finding)| matches!(finding.reason, Reason::ShrinkRefused | Reason::ChangeRefused));
        let mut forbidden: Vec<String> = refused.map(|(claim, finding)| claims::sentence(claim, finding)).collect();
        forbidden.extend(plan.waits.iter().filter_map(|wait| match wait {
            Wait::NotOurs(key) => Some(format!("{key} is there and not the manager's: it is not taken over")),
            _ => None,
        }));
        Ok(Self { current, rendered, plan, forbidden, unseen })
    }

    fn current(&self, key: &ObjectKey) -> Option<&DynamicObject> {
        self.current.iter().find(|object| {
            let types = object.types.as_ref();
            types.is_some_and(|types| types.kind == key.kind && types.api_version == key.api_version)
                && object.name_any() == key.name
        })
    }
}

/// A machine's objects, as far as they were listed.
struct Listing<'a> {
    client: &'a Client,
    vm: &'a VirtualMachine,
    kinds: HashSet<TypeMeta>,
    observed: Observed,
    current: Vec<DynamicObject>,
    unseen: Vec<String>,
}

impl<'a> Listing<'a> {
    fn of(client: &'a Client, vm: &'a VirtualMachine) -> Self {
        let observed = Observed::nothing(Timestamp::now());
        Self { client, vm, kinds: HashSet::new(), observed, current: Vec::new(), unseen: Vec::new() }
    }

    /// Lists a kind that was not listed yet.
    async fn add(&mut self, kind: &TypeMeta) -> kube::Result<()> {
        if !self.kinds.contains(kind) {
            let objects = list(self.client, self.vm, kind).await?;
            self.kinds.insert(kind.clone());
            self.observed.objects.extend(objects.iter().cloned().map(trimmed));
            self.current.extend(objects);
        }
        Ok(())
    }

    /// Lists kinds of which there may be objects; what may not be listed is noted.
    async fn look(&mut self, kinds: impl IntoIterator<Item = TypeMeta>) -> Result<(), Failure> {
        for kind in kinds {
            match self.add(&kind).await {
                Err(kube::Error::Api(answer)) if answer.code == 404 => {}
                Err(kube::Error::Api(answer)) if answer.code == 403 => self.unseen.push(kind.kind),
                result => result.map_err(|error| unlisted(&kind, &error))?,
            }
        }
        Ok(())
    }
}

async fn list(client: &Client, vm: &VirtualMachine, types: &TypeMeta) -> kube::Result<Vec<DynamicObject>> {
    let namespace = vm.namespace().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &resource(types));
    let selector = format!("app.kubernetes.io/instance={}", vm.name_any());
    let objects = api.list(&ListParams::default().labels(&selector)).await?;
    Ok(objects.items.into_iter().map(|object| DynamicObject { types: Some(types.clone()), ..object }).collect())
}

fn unlisted(types: &TypeMeta, error: &kube::Error) -> Failure {
    Failure { lines: vec![format!("{} objects: {error}", types.kind)], code: 3 }
}

/// An object of a list, which has its type.
fn trimmed(object: DynamicObject) -> Arc<Object> {
    let types = object.types.clone().unwrap_or_default();
    Arc::new(Object::trim(&types, object))
}

/// Prints what would be done. Returns whether there is anything.
async fn show(client: &Client, vm: &VirtualMachine, seen: &Seen, output: &mut Vec<u8>) -> Result<bool, Failure> {
    let mut different = false;
    for action in seen.plan.steps.iter().flatten() {
        different = true;
        match action {
            Action::Apply { object, uid } => {
                let meaning = if uid.is_some() { "changed at once" } else { "made" };
                print(output, &format!("{}: {meaning} ({})\n", object.key, object.template));
                let old =
                    seen.current(&object.key).map(|object| clean(&serde_json::to_value(object).unwrap_or_default()));
                match try_out(client, vm, object).await {
                    Ok(new) => {
                        let old = old.as_ref().map(yaml).transpose()?.unwrap_or_default();
                        print(output, &super::sets::difference(&old, &yaml(&clean(&new))?));
                    }
                    Err(error) => print(output, &format!("  the API server refuses it: {error}\n")),
                }
            }
            Action::Label { key, patch, .. } => {
                print(output, &format!("{key}: labels and annotations changed at once\n{}", indented(&yaml(patch)?)));
            }
            Action::Delete { key, why, .. } => {
                let why = match why {
                    Why::Stop => "the machine should be down",
                    Why::Restart => "a restart is asked for",
                    Why::Ended => "it has ended, and is made again",
                    Why::Force => "without waiting for the guest",
                    Why::Superfluous => "no template makes it any more",
                };
                print(output, &format!("{key}: deleted: {why}\n"));
            }
        }
    }
    for change in &seen.plan.pending {
        different = true;
        let value = |value: &Option<Value>| value.as_ref().map_or_else(|| "nothing".into(), ToString::to_string);
        print(
            output,
            &format!(
                "{}: at the next start: {} instead of {} ({})\n",
                change.path,
                value(&change.wanted),
                value(&change.current),
                change.reason
            ),
        );
    }
    for kind in &seen.unseen {
        print(
            output,
            &format!(
                "# not looked at, because you may not list them: {kind} objects that no template makes any more\n"
            ),
        );
    }
    for message in &seen.forbidden {
        different = true;
        print(output, &format!("forbidden: {message}\n"));
    }
    for object in seen.rendered.iter().filter(|object| object.update == Update::Once) {
        let kept = seen.current(&object.key).and_then(|found| found.annotations().get(HASH_ANNOTATION));
        if kept.is_some_and(|hash| *hash != object.hash) && !object.key.kind.eq("Secret") {
            print(output, &format!("{}: never: it is made once and then left alone\n", object.key));
        }
    }
    Ok(different)
}

async fn try_out(client: &Client, vm: &VirtualMachine, object: &Rendered) -> Result<Value, kube::Error> {
    let namespace = vm.namespace().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &resource(&object.key.types()));
    let how = PatchParams { dry_run: true, ..PatchParams::apply(OBJECT_MANAGER).force() };
    let applied = api.patch(&object.key.name, &how, &Patch::Apply(&object.value)).await?;
    Ok(serde_json::to_value(applied).unwrap_or_default())
}

/// Without what the API server and we note beside an object; a secret's content is not shown.
fn clean(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(map) = object.as_object_mut() {
        map.remove("status");
        if map.get("kind").is_some_and(|kind| kind == "Secret")
            && let Some(Value::Object(data)) = map.get_mut("data")
        {
            data.values_mut()
                .for_each(|value| *value = format!("(hidden, {})", output::digest(&value.to_string())).into());
        }
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        for field in ["managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink"] {
            metadata.remove(field);
        }
        if let Some(Value::Object(annotations)) = metadata.get_mut("annotations") {
            annotations.remove(HASH_ANNOTATION);
            annotations.remove(VERSION_ANNOTATION);
            if annotations.is_empty() {
                metadata.remove("annotations");
            }
        }
    }
    object
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}
