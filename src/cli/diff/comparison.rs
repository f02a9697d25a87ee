//! A VM's objects as they are in the cluster and as the manager would have them.

use std::{collections::HashSet, path::Path, sync::Arc};

use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, TypeMeta},
};

use super::{
    super::{
        input::{Settings, rendering_error},
        installed::{Installed, unknown},
        output::Failure,
    },
    rights::Rights,
};
use crate::{
    api::{Reason, VirtualMachine},
    claims,
    config::ReconcilerConfig,
    discovery::Resources,
    object::{
        self, COMPONENT_LABEL, DISPLAY_SECRET, INSTANCE_LABEL, ObjectKey, Rendered, VM_ANNOTATION, builtin_kinds,
        is_builtin_kind, stateful_sets,
    },
    observed::{Object, Observed},
    plan::{Plan, Wait, kinds, plan},
    render::{Library, RandomInput, TemplateSet, hidden::hidden, render},
};

/// The compiled sets and the configuration by which the manager renders.
pub(super) struct Renderer<'a> {
    settings: &'a Settings,
    /// The file of the VMs, if they are from one.
    vm_file: Option<&'a Path>,
    library: Library,
    /// What may surprise about the sets.
    warnings: Vec<String>,
    config: ReconcilerConfig,
    /// Where the API server serves the kinds.
    resources: Resources,
    /// What the manager may do.
    rights: Rights,
}

impl<'a> Renderer<'a> {
    /// What the command line gives, and the rest from the ConfigMaps in the manager's namespace.
    pub async fn read(
        client: &Client,
        namespace: &str,
        settings: &'a Settings,
        vm_file: Option<&'a Path>,
    ) -> Result<Self, Failure> {
        let installed = Installed::read(client, namespace, settings).await?;
        let (library, mut warnings) = (installed.library(), installed.twice);
        let sets = library.all().filter_map(|(_, set)| set.as_ref().ok());
        warnings.extend(sets.flat_map(hidden).map(|hidden| {
            let at = hidden.at.map(|at| format!(":{}:{}", at.line, at.column)).unwrap_or_default();
            format!("{}{at}: {}", hidden.file, hidden.message)
        }));
        let resources = Resources::new(client.clone());
        let rights = Rights::of_manager(client, namespace).await;
        Ok(Self { settings, vm_file, library, warnings, config: installed.config, resources, rights })
    }

    /// What may surprise about the sets, in words.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn set(&self, vm: &VirtualMachine) -> Result<&TemplateSet, Failure> {
        let wrong = |error| rendering_error(self.vm_file, vm, self.settings, &error);
        Ok(self.library.get(vm.template_set()).map_err(wrong)?)
    }

    /// The VM's objects, as they depend on what there is already.
    fn render(&self, vm: &VirtualMachine, observed: &Observed) -> Result<Vec<Rendered>, Failure> {
        let random = RandomInput { display_password: "(random)".into(), ..RandomInput::default() };
        let wrong = |error| rendering_error(self.vm_file, vm, self.settings, &error);
        Ok(render(vm, observed, &self.config, &random, self.set(vm)?).map_err(wrong)?)
    }

    /// What the manager may not do with objects of the kinds that are not built in, in words.
    async fn lacking(&self, vm: &VirtualMachine, rendered: &[Rendered]) -> Vec<String> {
        let namespace = vm.namespace().unwrap_or_default();
        let kinds: HashSet<TypeMeta> = rendered.iter().map(|object| object.key.types()).collect();
        let mut lacking = Vec::new();
        for kind in kinds.into_iter().filter(|kind| !is_builtin_kind(kind)) {
            if let Ok(resource) = self.resources.of(&kind).await {
                lacking.extend(self.rights.lacking(&kind, &resource, &namespace).await);
            }
        }
        lacking.sort();
        lacking
    }
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
    pub async fn of(client: &Client, vm: &VirtualMachine, renderer: &'a Renderer<'_>) -> Result<Self, Failure> {
        renderer.set(vm)?;
        let mut listing = Listing::new(client, vm, &renderer.resources);
        listing.add_if_possible(builtin_kinds().chain([stateful_sets()])).await?;
        listing.add_claims_without_labels().await.map_err(unknown(objects(&claim_kind())))?;
        // What there is decides what is rendered (old names of claims, Secrets of people), and that in turn which kinds there
        // are: after two rounds nothing changes any more.
        for _ in 0..2 {
            for object in renderer.render(vm, &listing.observed)? {
                let kind = object.key.types();
                listing.add(&kind).await.map_err(unknown(objects(&kind)))?;
            }
        }
        let rendered = renderer.render(vm, &listing.observed)?;
        // Kinds that no template renders any more.
        listing.add_if_possible(kinds::from_status(vm, &rendered)).await?;
        let Listing { observed, current, unlisted, .. } = listing;
        let plan = plan(vm, &observed, Some(&rendered));
        let mut refusals = refusals(vm, &observed, &rendered, &plan);
        refusals.extend(renderer.lacking(vm, &rendered).await);
        Ok(Self { current, resources: &renderer.resources, rendered, plan, refusals, unlisted })
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
        let name = self.vm.name_any();
        let selector = format!("{INSTANCE_LABEL}={name}");
        let mut found = api.list(&ListParams::default().labels(&selector)).await?.items;
        if kind.kind == "Secret" {
            let selector = format!("{},{COMPONENT_LABEL}={DISPLAY_SECRET}", object::selector());
            let secrets = api.list(&ListParams::default().labels(&selector)).await?;
            let is_known = |secret: &DynamicObject| secret.labels().get(INSTANCE_LABEL) == Some(&name);
            let is_named = |secret: &DynamicObject| secret.annotations().get(VM_ANNOTATION) == Some(&name);
            found.extend(secrets.into_iter().filter(|secret| is_named(secret) && !is_known(secret)));
        }
        for object in found {
            // The objects of a list have no type.
            let object = DynamicObject { types: Some(kind.clone()), ..object };
            self.observed.objects.push(Arc::new(Object::trim(kind, object.clone())));
            self.current.push(object);
        }
        self.kinds.insert(kind.clone());
        Ok(())
    }

    /// Whether the VM uses the claim with that UID, as its status says.
    fn is_used(&self, uid: &str) -> bool {
        let mut claims = self.vm.status.iter().flat_map(|status| &status.claims);
        claims.any(|claim| !claim.unused && claim.uid.as_deref() == Some(uid))
    }

    /// Reads the claims that are the VM's by their names although their labels do not say so.
    async fn add_claims_without_labels(&mut self) -> kube::Result<()> {
        let (kind, namespace) = (claim_kind(), self.vm.namespace().unwrap_or_default());
        if !self.kinds.contains(&kind) {
            return Ok(());
        }
        let resource = self.resources.of(&kind).await?;
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &namespace, &resource);
        for name in claims::possible_names(self.vm) {
            if self.observed.claim(&name).is_none()
                && let Some(object) = api.get_opt(&name).await?
                && let claim = Object::trim(&kind, object.clone())
                && (claim.vm().is_none_or(|vm| vm == self.vm.name_any()) || self.is_used(&claim.uid))
            {
                self.observed.objects.push(Arc::new(claim));
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
