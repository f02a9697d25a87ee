//! The step *execute*: the plan's writes, and what runners are told.

use super::{Reconciler, observe::View};
use crate::{
    cluster::{ActionError, Executed},
    object::reports as report_kind,
    plan::Plan,
    process::clock,
    status::reports,
};

impl Reconciler {
    /// Executes the plan and keeps the reports of the VM's Pods. Afterwards the view has the VM's objects as they are then. `left_out` says why a
    /// part of the plan was left out, if a person must know: it counts as a failure, after those of the plan itself.
    pub(super) async fn execute<'a>(
        &self,
        view: &mut View,
        plan: &'a Plan,
        left_out: Option<ActionError>,
    ) -> Executed<'a> {
        let vm = view.vm.clone();
        let mut executed = self.cluster.execute(&vm, plan).await;
        executed.result = executed.result.and(left_out.map_or(Ok(()), Err));
        if plan.steps.iter().any(|step| !step.is_empty()) {
            let observed = self.cluster.children.observe(&vm, clock::now());
            view.observed = self.with_others(&vm, observed, view.rendered.as_deref().ok()).await;
        }
        if self.cluster.children.knows(&report_kind()) {
            let upkeep = reports::upkeep(&vm, &view.observed, plan);
            executed.beside.extend(self.cluster.keep_reports(&vm, upkeep).await.err());
        }
        executed
    }
}
