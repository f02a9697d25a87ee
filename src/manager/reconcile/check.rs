//! The step *check*: is true what the plan presumes ([`crate::plan::Precondition`])?

use std::time::Duration;

use tracing::debug;

use super::{Reconciler, Turn, observe::View};
use crate::{
    cluster::ActionError,
    plan::{Fact, Otherwise, Part, Plan, Precondition, instances},
    process::lock,
};

/// What becomes of a plan.
pub(super) enum Verdict {
    /// It is executed, but for what was left out. With an error, a person must know why.
    Execute(Option<ActionError>),
    /// Nothing is done now. The VM is reconciled again when something changes, or after this time.
    Wait(Option<Duration>),
}

impl Reconciler {
    /// Asks for each fact that the plan presumes, and takes out of the plan what can't be done without.
    ///
    /// # Errors
    /// If something that decides whether anything is done can't be asked now.
    pub(super) async fn check(&self, turn: &Turn, view: &View, plan: &mut Plan) -> Result<Verdict, ActionError> {
        let (mut left_out, mut why) = (Vec::<Part>::new(), None);
        for Precondition { fact, otherwise } in plan.preconditions.clone() {
            // What is left out already presumes nothing.
            if matches!(otherwise, Otherwise::LeaveOut(part) if left_out.contains(&part)) {
                continue;
            }
            let error = match self.holds(turn, view, &fact).await {
                Ok(true) => continue,
                Ok(false) => {
                    debug!("{}", fact.refutation());
                    None
                }
                Err(error) => Some(error),
            };
            match otherwise {
                Otherwise::Wait(pause) => return error.map_or(Ok(Verdict::Wait(pause)), Err),
                Otherwise::LeaveOut(part) => {
                    plan.leave_out(part);
                    left_out.push(part);
                    why = error.or(why);
                }
            }
        }
        Ok(Verdict::Execute(why))
    }

    /// Whether a fact is true. An error says why it is not, or that it can't be asked now.
    async fn holds(&self, turn: &Turn, view: &View, fact: &Fact) -> Result<bool, ActionError> {
        let (cluster, vm) = (&self.cluster, &*view.vm);
        match fact {
            Fact::AgentsTurn => {
                Ok(instances::active(vm, &view.observed).is_some_and(|pod| self.agents.may_begin(&turn.name, pod)))
            }
            Fact::SourcesAllowed { is_restart } => {
                let label = &turn.inputs.config.cloud_init_label;
                cluster.check_sources(vm, label, *is_restart).await.map(|()| true)
            }
            Fact::RestartPossible => {
                cluster.check_restart(vm, view.plannable().unwrap_or_default()).await.map(|()| true)
            }
            Fact::StatusFails => Ok(lock(&self.unnamed).contains(&turn.name)),
            Fact::VmCurrent => cluster.is_current(vm).await,
            Fact::ReportsCurrent => cluster.are_reports_current(vm, &view.observed).await,
            Fact::ClaimsStay(claims) => Ok(cluster.deleted_claim(vm, claims).await?.is_none()),
            Fact::ClaimsAbsent(claims) => Ok(!cluster.has_unseen_claim(vm, claims, turn.arrived).await?),
        }
    }
}
