//! A VM's objects as they are in the cluster and as the manager would have them.

use std::{collections::HashSet, path::Path};

use kube::{
    Client, ResourceExt,
    api::{DynamicObject, TypeMeta},
};

use super::{
    super::{
        input::{Settings, rendering_error},
        installed::{Installed, unknown},
        output::Failure,
    },
    listing::{Listing, Lists, objects},
    rights::Rights,
};
use crate::{
    api::VirtualMachine,
    client::discovery::Resources,
    config::ReconcilerConfig,
    object::{ObjectKey, Rendered, is_builtin_kind},
    observed::Observed,
    plan::{Plan, effect::refusals, kinds, plan},
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
    /// The objects.
    lists: Lists,
}

impl<'a> Renderer<'a> {
    /// What the command line gives, and the rest from the ConfigMaps in the manager's namespace.
    pub async fn read(
        client: &Client,
        namespace: &str,
        settings: &'a Settings,
        vm_file: Option<&'a Path>,
        lists: Lists,
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
        Ok(Self { settings, vm_file, library, warnings, config: installed.config, resources, rights, lists })
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
        let mut listing = Listing::new(client, vm, &renderer.resources, &renderer.lists);
        listing.add_usual().await?;
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
