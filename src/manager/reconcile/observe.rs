//! The step *observe*: the newest known VM, its objects, and what its templates make of it.

use std::{collections::BTreeSet, sync::Arc};

use super::{Inputs, ReconcileError, Reconciler, Turn};
use crate::{
    api::VirtualMachine,
    cluster::watch::{UnknownKind, WatchError},
    manager::{
        random::random_input,
        renderer::{Input, Renderer},
    },
    object::{Rendered, pods, reports as report_kind},
    observed::Observed,
    plan::{instances, kinds},
    process::clock,
    render::{TemplateError, TemplateSet},
    status::{UsedTemplates, reports},
};

/// The result of the step.
pub(super) struct View {
    /// The VM with what its runner has reported in its status. Everything is decided by it; what is written is compared with the VM itself.
    pub vm: Arc<VirtualMachine>,
    pub observed: Observed,
    /// Whether all Pods were known when the objects were read: only then one that was not read does not exist.
    pub knows_pods: bool,
    pub rendered: Result<Vec<Rendered>, TemplateError>,
    /// Why the VM keeps a former version of its templates.
    pub kept_back: Option<TemplateError>,
    /// A rendered kind that can't be watched.
    pub unwatched: Option<WatchError>,
    /// The kinds in `status.objectKinds` that are not watched.
    pub unknown: Vec<UnknownKind>,
}

/// A rendered VM.
struct Rendering {
    rendered: Result<Vec<Rendered>, TemplateError>,
    kept_back: Option<TemplateError>,
}

impl View {
    /// The objects to plan with; `None` while a rendered kind is not watched. The plan then follows only the VM's power.
    pub fn plannable(&self) -> Option<&[Rendered]> {
        self.rendered.as_deref().ok().filter(|_| self.unwatched.is_none())
    }
}

impl Reconciler {
    /// Reads the VM's objects and renders its templates. A kind that is rendered for the first time is listed and watched from now on; when
    /// it is listed, all is read anew.
    pub(super) async fn observe(&self, turn: &Turn) -> Result<View, ReconcileError> {
        let children = &self.cluster.children;
        // Without them the manager would take the status for all that a runner has reported.
        children.look_for(vec![report_kind()], true).await;
        let view = loop {
            let complete = children.complete();
            let knows_pods = children.knows(&pods());
            let observed = children.observe(&turn.stored, clock::now());
            let vm = folded(&turn.stored, &observed);
            let Rendering { rendered, kept_back } = turn.inputs.render(&self.renderer, &vm, &observed).await?;
            let Ok(objects) = &rendered else {
                let unknown = kinds::from_status(&vm, &[]).into_iter().map(UnknownKind::from).collect();
                break View { vm, observed, knows_pods, rendered, kept_back, unwatched: None, unknown };
            };
            let unwatched = children.watch(kinds::needed(objects)).await.err();
            if let Some(error) = unwatched.as_ref().filter(|_| !children.knows(&pods())) {
                return Err(error.clone().into());
            }
            let unknown = self.watch_former_kinds(&vm, objects, &turn.inputs).await;
            // If a list has completed meanwhile, also of another reconcile, its last objects were not read.
            if children.complete() == complete {
                break View { vm, observed, knows_pods, rendered, kept_back, unwatched, unknown };
            }
        };
        let observed = self.with_others(&view.vm, view.observed, view.rendered.as_deref().ok()).await;
        self.agents.observe(&turn.name, || instances::active(&view.vm, &observed).map(AsRef::as_ref));
        Ok(View { observed, ..view })
    }

    /// Adds the Pods of others that mount the VM's claims, and what makes the VM's Pods. Only a Pod that was made by something that is not
    /// watched costs requests.
    pub(super) async fn with_others(
        &self,
        vm: &VirtualMachine,
        observed: Observed,
        rendered: Option<&[Rendered]>,
    ) -> Observed {
        let pod_names = rendered.map(|rendered| {
            let pods = rendered.iter().filter(|object| object.key.is_pod());
            pods.map(|pod| pod.key.name.clone()).collect()
        });
        let rendered = rendered.unwrap_or_default();
        let of_vm = observed.objects.iter().map(|object| &object.key).chain(rendered.iter().map(|object| &object.key));
        let claims = of_vm.filter(|key| key.is_claim()).map(|key| key.name.clone()).collect::<BTreeSet<_>>();
        let mut others = self.cluster.children.mounting(vm, claims.into_iter());
        others.retain(|other| observed.objects.iter().all(|known| known.uid != other.uid));
        let makers = self.cluster.makers(vm, &observed).await;
        Observed { others, makers, pod_names, ..observed }
    }

    /// Watches the kinds of which earlier templates may have left objects. Only a VM without a Pod waits for their lists, because such an
    /// object may be a controller that creates a Pod. Returns the kinds that are not watched.
    async fn watch_former_kinds(&self, vm: &VirtualMachine, objects: &[Rendered], inputs: &Inputs) -> Vec<UnknownKind> {
        let kinds = kinds::from_status(vm, objects);
        if kinds.is_empty() {
            return Vec::new();
        }
        let children = &self.cluster.children;
        let allowed = &inputs.config.allowed_kinds;
        let (allowed, refused): (Vec<_>, Vec<_>) =
            kinds.into_iter().partition(|kind| allowed.allow(&kind.api_version, &kind.kind));
        let has_pod = instances::active(vm, &children.observe(vm, clock::now())).is_some();
        let unknown = children.look_for(allowed, !has_pod).await;
        unknown.into_iter().chain(refused.into_iter().map(UnknownKind::from)).collect()
    }
}

/// The VM with what its runner has reported in its status.
fn folded(stored: &Arc<VirtualMachine>, observed: &Observed) -> Arc<VirtualMachine> {
    reports::fold(stored, observed).map_or_else(|| stored.clone(), Arc::new)
}

impl Inputs {
    /// Renders a VM. If its values do not match the schema of its templates, it keeps the version from which it was rendered last.
    async fn render(
        &self,
        renderer: &Renderer,
        vm: &VirtualMachine,
        observed: &Observed,
    ) -> Result<Rendering, ReconcileError> {
        let random = random_input(vm, observed, &self.config);
        let input = Input { vm, observed, config: &self.config };
        let with = async |set: &TemplateSet| renderer.render(input, &random, set).await.map_err(ReconcileError::Render);
        let rendered = match self.templates.of(vm) {
            Ok(set) => with(set).await?,
            Err(error) => Err(error),
        };
        if let (Err(error), Some(former)) = (&rendered, self.templates.former(vm))
            && error.of_values
            && let Ok(objects) = with(former).await?
        {
            return Ok(Rendering { rendered: Ok(objects), kept_back: Some(error.clone()) });
        }
        Ok(Rendering { rendered, kept_back: None })
    }

    /// Where a VM's objects come from.
    pub(super) fn source<'a>(&'a self, vm: &VirtualMachine, kept_back: Option<&'a TemplateError>) -> UsedTemplates<'a> {
        match kept_back {
            Some(error) => UsedTemplates { set: self.templates.former(vm), refused: Some(error) },
            None => UsedTemplates { set: self.templates.of(vm).ok(), refused: self.templates.refusal(vm) },
        }
    }
}
