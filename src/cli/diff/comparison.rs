//! A VM's objects as they are in the cluster and as the manager would have them.

use std::{collections::HashSet, fmt::Display, sync::Arc};

use k8s_openapi::{api::core::v1::ConfigMap, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, TypeMeta},
};

use super::super::{
    input::Settings,
    output::{Failure, chain},
};
use crate::{
    api::{Reason, VirtualMachine},
    claims,
    config::{Config, ReconcilerConfig},
    discovery::Resources,
    files::{self, FileError},
    object::{CONFIG_MAP, INSTANCE_LABEL, ObjectKey, Rendered, SET_LABEL, TEMPLATES_MAP, builtin_kinds, stateful_sets},
    observed::{Object, Observed},
    plan::{Plan, Wait, kinds, plan},
    render::{Library, RandomInput, Sources, TemplateError, TemplateSet, render},
};

/// The templates and the configuration by which the manager renders.
pub(super) struct Installed<'a> {
    settings: &'a Settings,
    library: Library,
    config: ReconcilerConfig,
    /// Where the API server serves the kinds.
    resources: Resources,
}

impl<'a> Installed<'a> {
    /// What the command line gives, and the rest from the ConfigMaps in the manager's namespace.
    pub async fn read(client: &Client, namespace: &str, settings: &'a Settings) -> Result<Self, Failure> {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let sources = match &settings.templates {
            Some(folder) => files::sources(folder)?,
            None => installed_templates(&maps).await?,
        };
        let mut config = settings.config()?;
        if settings.config.is_none()
            && let Some(installed) = installed_config(&maps).await?
        {
            config = ReconcilerConfig { template_values: config.template_values, ..installed };
        }
        Ok(Self { settings, library: Library::new(&sources), config, resources: Resources::new(client.clone()) })
    }

    fn set(&self, vm: &VirtualMachine) -> Result<&TemplateSet, Failure> {
        Ok(self.library.get(vm.template_set()).map_err(|error| self.wrong(&error))?)
    }

    /// The VM's objects, as they depend on what there is already.
    fn render(&self, vm: &VirtualMachine, observed: &Observed) -> Result<Vec<Rendered>, Failure> {
        let random = RandomInput { display_password: "(random)".into() };
        Ok(render(vm, observed, &self.config, &random, self.set(vm)?).map_err(|error| self.wrong(&error))?)
    }

    fn wrong(&self, error: &TemplateError) -> FileError {
        FileError::template(self.settings.templates.as_deref(), error)
    }
}

async fn installed_templates(maps: &Api<ConfigMap>) -> Result<Sources, Failure> {
    let base = maps.get_opt(TEMPLATES_MAP).await.map_err(unknown(format_args!("ConfigMap {TEMPLATES_MAP}")))?;
    let mut sources = files::split_sets(files::unpacked(base.and_then(|map| map.data).unwrap_or_default()));
    let sets = maps.list(&ListParams::default().labels(SET_LABEL)).await.map_err(unknown("template sets"))?;
    for map in sets {
        let name = map.labels().get(SET_LABEL).cloned().unwrap_or_default();
        sources.sets.entry(name).or_default().extend(files::unpacked(map.data.unwrap_or_default()));
    }
    Ok(sources)
}

async fn installed_config(maps: &Api<ConfigMap>) -> Result<Option<ReconcilerConfig>, Failure> {
    let map = maps.get_opt(CONFIG_MAP).await.map_err(unknown(format_args!("ConfigMap {CONFIG_MAP}")))?;
    let text = map.and_then(|map| map.data?.remove("config.yaml"));
    let config = text.map(|text| Config::parse(&text)).transpose();
    let config = config.map_err(|error| Failure::new(format!("ConfigMap vm-operator: {error}")))?;
    Ok(config.map(|config| config.reconciler))
}

/// The API server did not answer what was asked about an object.
fn unknown(object: impl Display) -> impl FnOnce(kube::Error) -> Failure {
    move |error| Failure::unknown(chain(object, &error))
}

/// What the manager would do to a VM's objects.
pub(super) struct Comparison<'a> {
    pub current: Vec<DynamicObject>,
    /// Where the API server serves the kinds.
    pub resources: &'a Resources,
    pub rendered: Vec<Rendered>,
    pub plan: Plan,
    /// What the cluster or the manager refuses, in words.
    pub refusals: Vec<String>,
    /// Kinds that the person may not list, and of which nothing is rendered.
    pub unlisted: Vec<String>,
}

impl<'a> Comparison<'a> {
    pub async fn of(client: &Client, vm: &VirtualMachine, installed: &'a Installed<'_>) -> Result<Self, Failure> {
        installed.set(vm)?;
        let mut listing = Listing::new(client, vm, &installed.resources);
        listing.add_if_possible(builtin_kinds().chain([stateful_sets()])).await?;
        listing.add_claims_without_labels().await.map_err(unknown(objects(&claim_kind())))?;
        // What there is decides what is rendered (old names of claims, Secrets of people), and that in turn which kinds there
        // are: after two rounds nothing changes any more.
        for _ in 0..2 {
            for object in installed.render(vm, &listing.observed)? {
                let kind = object.key.types();
                listing.add(&kind).await.map_err(unknown(objects(&kind)))?;
            }
        }
        let rendered = installed.render(vm, &listing.observed)?;
        // Kinds that no template renders any more.
        listing.add_if_possible(kinds::from_status(vm, &rendered)).await?;
        let Listing { observed, current, unlisted, .. } = listing;
        let plan = plan(vm, &observed, Some(&rendered));
        let refusals = refusals(vm, &observed, &rendered, &plan);
        Ok(Self { current, resources: &installed.resources, rendered, plan, refusals, unlisted })
    }

    /// Whether the manager would change anything, or could not.
    pub fn is_different(&self) -> bool {
        let is_nothing_done = self.plan.steps.iter().flatten().next().is_none();
        !is_nothing_done || !self.plan.pending.is_empty() || !self.refusals.is_empty()
    }

    /// The object as it is in the cluster.
    pub fn current(&self, key: &ObjectKey) -> Option<&DynamicObject> {
        let is_of_kind = |types: &TypeMeta| types.kind == key.kind && types.api_version == key.api_version;
        self.current
            .iter()
            .find(|object| object.types.as_ref().is_some_and(is_of_kind) && object.name_any() == key.name)
    }
}

/// Changes of claims that are refused, and objects of others that are not taken over.
fn refusals(vm: &VirtualMachine, observed: &Observed, rendered: &[Rendered], plan: &Plan) -> Vec<String> {
    let claims = claims::claims(vm, observed, rendered, &[]);
    let findings = claims.iter().flat_map(|claim| claim.findings.iter().map(move |finding| (claim, finding)));
    let refused =
        findings.filter(|(_, finding)| matches!(finding.reason, Reason::ShrinkRefused | Reason::ChangeRefused));
    let claims = refused.map(|(claim, finding)| claims::sentence(claim, finding));
    let not_ours = plan.waits.iter().filter_map(|wait| match wait {
        Wait::NotOurs(key) => Some(format!("{key} exists and is not the manager's: it is not taken over")),
        _ => None,
    });
    claims.chain(not_ours).collect()
}

/// A VM's objects, as far as they were listed.
struct Listing<'a> {
    client: &'a Client,
    vm: &'a VirtualMachine,
    resources: &'a Resources,
    kinds: HashSet<TypeMeta>,
    observed: Observed,
    current: Vec<DynamicObject>,
    unlisted: Vec<String>,
}

impl<'a> Listing<'a> {
    fn new(client: &'a Client, vm: &'a VirtualMachine, resources: &'a Resources) -> Self {
        let observed = Observed::nothing(Timestamp::now());
        Self { client, vm, resources, kinds: HashSet::new(), observed, current: Vec::new(), unlisted: Vec::new() }
    }

    /// Lists the VM's objects of a kind, if that has not been done.
    async fn add(&mut self, kind: &TypeMeta) -> kube::Result<()> {
        if self.kinds.contains(kind) {
            return Ok(());
        }
        let namespace = self.vm.namespace().unwrap_or_default();
        let resource = self.resources.of(kind).await?;
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &resource);
        let selector = format!("{INSTANCE_LABEL}={}", self.vm.name_any());
        for object in api.list(&ListParams::default().labels(&selector)).await? {
            // The objects of a list have no type.
            let object = DynamicObject { types: Some(kind.clone()), ..object };
            self.observed.objects.push(Arc::new(Object::trim(kind, object.clone())));
            self.current.push(object);
        }
        self.kinds.insert(kind.clone());
        Ok(())
    }

    /// Reads the claims that are the VM's by their names although they have lost its labels.
    async fn add_claims_without_labels(&mut self) -> kube::Result<()> {
        let (kind, namespace) = (claim_kind(), self.vm.namespace().unwrap_or_default());
        if !self.kinds.contains(&kind) {
            return Ok(());
        }
        let resource = self.resources.of(&kind).await?;
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &resource);
        for name in claims::possible_names(self.vm) {
            if self.observed.claim(&name).is_none()
                && let Some(object) =
                    api.get_opt(&name).await?.filter(|claim| !claim.labels().contains_key(INSTANCE_LABEL))
            {
                self.observed.objects.push(Arc::new(Object::trim(&kind, object.clone())));
                self.current.push(object);
            }
        }
        Ok(())
    }

    /// Lists kinds of which there may be objects. A kind that the cluster does not have has none; one that the person may not
    /// list is noted.
    async fn add_if_possible(&mut self, kinds: impl IntoIterator<Item = TypeMeta>) -> Result<(), Failure> {
        for kind in kinds {
            match self.add(&kind).await {
                Err(kube::Error::Api(answer)) if answer.is_not_found() => {}
                Err(kube::Error::Api(answer)) if answer.is_forbidden() => self.unlisted.push(kind.kind),
                result => result.map_err(unknown(objects(&kind)))?,
            }
        }
        Ok(())
    }
}

fn claim_kind() -> TypeMeta {
    TypeMeta { api_version: "v1".into(), kind: "PersistentVolumeClaim".into() }
}

fn objects(kind: &TypeMeta) -> String {
    format!("{} objects", kind.kind)
}
