//! Brings the disks of a VM back to what they are made from before somebody else gets it: `spec.reset` of its pools. Pure.
//!
//! A disk gets a new claim under a new name ([`crate::claims::number`]), which storage fills from the disk's dataSource. Until the new claims exist,
//! nobody gets the VM ([`Member::is_clean`]).
//!
//! ```text
//!            assigned          stopped, new numbers          the claims exist
//!  Fresh ────────────▶ (no state) ────────────▶ Renewing ────────────▶ Fresh
//! ```
//!
//! **The first line that fits a VM**
//!
//! | the VM | what follows |
//! |---|---|
//! | is being deleted | nothing |
//! | is assigned, and its status has a state of the reset | [`Step::Mark`]: the state is removed, because a program that does not know resets has assigned it |
//! | is assigned, or no pool of its resets it, or the pool that made it wants fewer | nothing |
//! | has a disk that can't be reset ([`Obstacle`]) | nothing, and nobody gets it |
//! | is Fresh, and that covers all disks | nothing |
//! | somebody is at its console | nothing until that person leaves ([`Wait::Console`]) |
//! | should not run, and has no Pod | |
//! | … is Renewing, that covers all disks, and the claims exist | [`Step::Finish`]: it is Fresh |
//! | … is Renewing, and that covers all disks | nothing until the claims exist ([`Wait::Claims`]) |
//! | … all others | [`Step::Renew`]: the numbers of its disks grow, and it is Renewing |
//! | should run | [`Step::Stop`], or nothing if Git says that it runs ([`Obstacle::Git`]) |
//! | is being stopped | nothing until its Pod is gone ([`Wait::Stop`]) |
//!
//! If nothing else follows, the claims that a reset has replaced are deleted if the pools want that ([`Step::Delete`]).
//!
//! **Which disks.** Those that `spec.reset.disks` names, or all. A VM of several pools is reset as all of them want together, and old claims are deleted
//! only if all that reset it want that. A disk without a source comes back empty, so it must be named: a disk that a person has installed would be gone.
//!
//! **Why nobody gets a claim that somebody else has used.** Fresh is written only after a reconcile of the VM has seen the new numbers and found no Pod
//! (`status.claims` has the new names), so every later Pod has the new claims. It is removed by the write that assigns the VM. A VM without a state is
//! not Fresh, whatever the reason: it is older than `spec.reset`, was made again, or came back from a backup. A new VM whose claims are not older, and whose
//! guest has never run, keeps them.

use std::{collections::BTreeSet, fmt};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use kube::ResourceExt;
use serde_json::Value;

use super::{Member, Pool, Pools};
use crate::{
    api::{
        VirtualMachine, conditions,
        pool::{RESET, reasons},
        status::{DiskNumber, DiskReset, ReplacedClaim, ResetState},
    },
    claims::{self, number},
};

/// How many VMs a message names.
const NAMED: usize = 5;

/// What a pool resets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The names of the disks; `None`: all.
    pub disks: Option<BTreeSet<String>>,
    /// Whether old claims are deleted.
    pub deletes: bool,
}

impl Rule {
    /// The `spec.reset` of a pool as the API server has it. What can't be read is as if it were not there: all disks, and claims are kept.
    pub fn read(reset: &Value) -> Option<Self> {
        let disks = reset.get("disks").and_then(Value::as_array);
        let disks = disks.map(|names| names.iter().filter_map(Value::as_str).map(str::to_owned).collect());
        let deletes = reset.get("oldClaims").and_then(Value::as_str) == Some("Delete");
        reset.is_object().then_some(Self { disks, deletes })
    }
}

/// What decides of the reset of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// What earlier resets have done.
    pub done: DiskReset,
    /// Its disks; `None`: its spec can't be read.
    pub disks: Option<Vec<MemberDisk>>,
    /// What stopping it takes.
    pub down: Down,
    /// Whether a guest of it may have run.
    pub has_run: bool,
    /// When it was created.
    pub created: Option<Timestamp>,
}

/// A disk of a VM that has a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberDisk {
    /// The name in `spec.reset.disks`.
    pub name: String,
    /// The name of its volume in the Pod.
    pub volume: String,
    /// Whether a new claim is filled from a snapshot or another claim.
    pub has_source: bool,
    /// Whether it is on a volume that its claim names: a second claim can't have that.
    pub is_pinned: bool,
    /// Whether the manager has seen the claim of the number that the status has.
    pub is_made: bool,
}

/// What stopping a VM takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Down {
    /// Nothing: it should not run, and the manager has seen since that it has no Pod.
    #[default]
    Yes,
    /// Time.
    Stopping,
    /// A write.
    Needed,
    /// Git says that it runs.
    Refused,
}

/// What the manager does with a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the head of the module says what they are")]
pub enum Step {
    Mark,
    Stop,
    Renew,
    Finish,
    Delete,
}

/// What a reset waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the head of the module says what they are")]
pub enum Wait {
    Console,
    Stop,
    Claims,
}

/// Why a VM can't be reset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// The pool names a disk that the VM does not have.
    #[error("it has no disk {0}")]
    NoDisk(String),
    /// The pool names no disks, and this one comes from nowhere.
    #[error(
        "its disk {0} has no dataSource: give it one, or name in spec.reset.disks the disks to reset, of which one without a dataSource comes back empty"
    )]
    NoSource(String),
    /// The claim's spec names the volume.
    #[error("its disk {0} is on a volume that its claim names (volumeName), and a new claim can't have that")]
    Pinned(String),
    /// The VM's spec can't be read.
    #[error("its spec can't be read")]
    Unreadable,
    /// It can't be stopped.
    #[error("Git says that it runs, so it can't be stopped: remove spec.vm.state there")]
    Git,
}

/// What follows for a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing.
    Rest,
    /// This is to be done.
    Do(Step),
    /// Nothing until that is over.
    Waits(Wait),
    /// It can't be reset.
    Cannot(Obstacle),
}

/// A claim of the VM's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// When it was created.
    pub created: Option<Timestamp>,
    /// The VM that its labels name, if the manager has made or adopted it.
    pub vm: Option<String>,
}

impl Facts {
    /// What decides of the reset of a VM. `down`: what stopping it takes.
    pub fn read(vm: &VirtualMachine, down: Down) -> Self {
        let done = vm.status.as_ref().and_then(|status| status.disk_reset.clone()).unwrap_or_default();
        let known = |claim: &str| {
            let mut known = vm.status.iter().flat_map(|status| &status.claims);
            known.any(|known| known.name == claim && known.uid.is_some() && !known.unused && !known.is_missing())
        };
        let disk = |volume: String, template: &crate::api::VolumeClaimTemplate| {
            let spec = |field: &str| template.spec.as_ref().and_then(|spec| spec.get(field)).filter(|it| !it.is_null());
            let name = template.metadata.as_ref().and_then(|metadata| metadata.name.clone());
            let is_made = match done.number(&volume) {
                0 => claims::disk_names(&vm.name_any(), &volume).iter().any(|name| known(name)),
                number => known(&number::name(&vm.name_any(), &volume, number)),
            };
            MemberDisk {
                name: name.unwrap_or_else(|| volume.clone()),
                has_source: spec("dataSource").or(spec("dataSourceRef")).is_some(),
                is_pinned: spec("volumeName").is_some_and(|name| name != ""),
                is_made,
                volume,
            }
        };
        let disks = &vm.spec.vm.disks;
        let of_claims = disks.iter().zip(claims::volumes(disks));
        let of_claims = of_claims.filter_map(|(it, volume)| Some(disk(volume?, it.volume_claim_template.as_ref()?)));
        Self {
            disks: vm.spec.invalid.is_none().then(|| of_claims.collect()),
            has_run: claims::has_run(vm),
            created: vm.metadata.creation_timestamp.as_ref().map(|time| time.0),
            down,
            done,
        }
    }

    /// Whether nobody has used these disks since they were made.
    fn is(&self, state: ResetState, wanted: &BTreeSet<&str>) -> bool {
        let covers = |volume: &&str| self.done.covers.iter().any(|covered| covered == volume);
        self.done.state == Some(state) && wanted.iter().all(covers)
    }
}

impl Member {
    /// The rules of the pools that reset it.
    fn rules<'a>(&self, pools: &'a Pools) -> Vec<&'a Rule> {
        self.pools.iter().filter_map(|pool| pools.get(pool)?.reset.as_ref()).collect()
    }

    /// Whether the pools want old claims to be deleted.
    pub fn deletes_claims(&self, pools: &Pools) -> bool {
        let rules = self.rules(pools);
        !rules.is_empty() && rules.iter().all(|rule| rule.deletes)
    }

    /// The volumes of the disks that are reset; `None`: no pool resets the VM.
    ///
    /// # Errors
    /// Why that can't be done.
    pub fn disks_to_reset(&self, pools: &Pools) -> Result<Option<BTreeSet<&str>>, Obstacle> {
        let rules = self.rules(pools);
        if rules.is_empty() {
            return Ok(None);
        }
        let disks = self.reset.disks.as_ref().ok_or(Obstacle::Unreadable)?;
        let mut wanted: Vec<&MemberDisk> = Vec::new();
        for rule in &rules {
            match &rule.disks {
                None => {
                    if let Some(disk) = disks.iter().find(|disk| !disk.has_source && !is_named(disk, &rules)) {
                        return Err(Obstacle::NoSource(disk.name.clone()));
                    }
                    wanted.extend(disks);
                }
                Some(names) => {
                    for name in names {
                        let disk = disks.iter().find(|disk| disk.name == *name);
                        wanted.push(disk.ok_or_else(|| Obstacle::NoDisk(name.clone()))?);
                    }
                }
            }
        }
        match wanted.iter().find(|disk| disk.is_pinned) {
            Some(disk) => Err(Obstacle::Pinned(disk.name.clone())),
            None => Ok(Some(wanted.into_iter().map(|disk| disk.volume.as_str()).collect())),
        }
    }

    /// Whether its disks are those that the next user may get.
    pub fn is_clean(&self, pools: &Pools) -> bool {
        match self.disks_to_reset(pools) {
            Ok(None) => true,
            Ok(Some(wanted)) => self.held.is_none() && self.reset.is(ResetState::Fresh, &wanted),
            Err(_) => false,
        }
    }

    /// Whether it is assigned to nobody, and nobody gets it before it is reset.
    pub fn is_resetting(&self, pools: &Pools) -> bool {
        self.held.is_none() && !self.is_deleted && !self.is_clean(pools)
    }
}

/// Whether a pool names this disk, and so takes it empty.
fn is_named(disk: &MemberDisk, rules: &[&Rule]) -> bool {
    rules.iter().any(|rule| rule.disks.as_ref().is_some_and(|names| names.contains(&disk.name)))
}

/// What follows for a VM, by the table at the head of this module.
pub fn look(member: &Member, pools: &Pools) -> Standing {
    let facts = &member.reset;
    if member.is_deleted {
        return Standing::Rest;
    }
    let rest = match facts.done.replaced.is_empty() || !member.deletes_claims(pools) {
        true => Standing::Rest,
        false => Standing::Do(Step::Delete),
    };
    if member.held.is_some() {
        return if facts.done.state.is_some() { Standing::Do(Step::Mark) } else { rest };
    }
    let wanted = match member.disks_to_reset(pools) {
        _ if member.is_surplus(pools) => return rest,
        Ok(None) => return rest,
        Ok(Some(wanted)) => wanted,
        Err(obstacle) => return Standing::Cannot(obstacle),
    };
    if facts.is(ResetState::Fresh, &wanted) {
        return rest;
    }
    if member.console.is_connected {
        return Standing::Waits(Wait::Console);
    }
    let is_made = |disk: &MemberDisk| disk.is_made || !wanted.contains(disk.volume.as_str());
    match facts.down {
        Down::Refused => Standing::Cannot(Obstacle::Git),
        Down::Needed => Standing::Do(Step::Stop),
        Down::Stopping => Standing::Waits(Wait::Stop),
        Down::Yes if !facts.is(ResetState::Renewing, &wanted) => Standing::Do(Step::Renew),
        Down::Yes if facts.disks.iter().flatten().all(is_made) => Standing::Do(Step::Finish),
        Down::Yes => Standing::Waits(Wait::Claims),
    }
}

/// The new `status.diskReset` of a VM for [`Step::Renew`]. `claims` are all claims of the namespace, as they are now.
pub fn renewed(member: &Member, pools: &Pools, claims: &[Claim]) -> DiskReset {
    let facts = &member.reset;
    let wanted = member.disks_to_reset(pools).ok().flatten().unwrap_or_default();
    let mut done = DiskReset { state: Some(ResetState::Renewing), ..facts.done.clone() };
    done.covers = wanted.iter().map(|volume| (*volume).to_owned()).collect();
    for volume in wanted {
        let of_disk =
            claims.iter().filter_map(|claim| Some((number::of_name(&member.name, volume, &claim.name)?, claim)));
        let of_disk: Vec<_> = of_disk.collect();
        let is_own = |claim: &Claim| claim.vm.as_ref() == Some(&member.name);
        let is_new = |claim: &Claim| is_own(claim) && claim.created.is_some() && claim.created >= facts.created;
        let recorded = done.number(volume);
        if !facts.has_run && of_disk.iter().all(|(number, claim)| is_new(claim) && *number <= recorded) {
            continue;
        }
        let own = of_disk.iter().filter(|(_, claim)| is_own(claim)).map(|(number, _)| *number).max();
        let current = recorded.max(own.unwrap_or_default());
        if member.deletes_claims(pools) {
            let old = of_disk.iter().filter(|(number, claim)| *number == current && is_own(claim));
            done.replaced.extend(old.map(|(_, it)| ReplacedClaim { name: it.name.clone(), uid: it.uid.clone() }));
        }
        let highest = of_disk.iter().map(|(number, _)| *number).max().unwrap_or_default().max(current);
        done.disks.retain(|disk| disk.volume != volume);
        done.disks.push(DiskNumber { volume: volume.to_owned(), number: highest.saturating_add(1) });
    }
    done.disks.sort_by(|one, other| one.volume.cmp(&other.volume));
    done.replaced.sort();
    done.replaced.dedup();
    done
}

/// Whether a claim is one that a reset has replaced, and that the VM does not use: only then it is deleted.
pub fn may_be_deleted(member: &Member, claim: &Claim) -> bool {
    let mut replaced = member.reset.done.replaced.iter();
    let is_replaced = replaced.any(|it| (&it.name, &it.uid) == (&claim.name, &claim.uid));
    let is_in_force = |disk: &MemberDisk| {
        number::of_name(&member.name, &disk.volume, &claim.name) == Some(member.reset.done.number(&disk.volume))
    };
    let is_used = member.reset.disks.as_ref().is_none_or(|disks| disks.iter().any(is_in_force));
    is_replaced && !is_used && claim.vm.as_ref() == Some(&member.name)
}

/// The condition [`RESET`] of a pool: the first line that fits. `None`: it resets nothing.
///
/// | | reason |
/// |---|---|
/// | a disk can't be reset | `CannotReset` |
/// | a VM can't be stopped | `CannotStop` |
/// | the API server refused a write (`refusal`) | `Refused` |
/// | somebody is at the console of a VM to reset | `InUse` |
/// | a VM is being reset | `Progressing` |
/// | | `Fresh` |
pub fn condition(
    pool: &Pool,
    pools: &Pools,
    members: &[Member],
    refusal: Option<&str>,
    current: &[Condition],
    now: Timestamp,
) -> Option<Condition> {
    pool.reset.as_ref()?;
    let (mut cannot, mut git, mut at_console, mut progressing) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for member in members.iter().filter(|member| member.pools.contains(&pool.name)) {
        match look(member, pools) {
            Standing::Cannot(obstacle @ Obstacle::Git) => git.push(format!("{}: {obstacle}", member.name)),
            Standing::Cannot(obstacle) => cannot.push(format!("{}: {obstacle}", member.name)),
            Standing::Waits(Wait::Console) => at_console.push(member.name.clone()),
            Standing::Waits(Wait::Stop | Wait::Claims) | Standing::Do(Step::Stop | Step::Renew | Step::Finish) => {
                progressing.push(member.name.clone());
            }
            Standing::Do(Step::Mark | Step::Delete) | Standing::Rest => {}
        }
    }
    let named = |names: Vec<String>, what: &str| (!names.is_empty()).then(|| format!("{what}{}", Names(&names)));
    let sentences = [
        named(cannot, "nobody gets these VMs, because their disks can't be reset: ")
            .map(|it| (reasons::CANNOT_RESET, it)),
        named(git, "nobody gets these VMs: ").map(|it| (reasons::CANNOT_STOP, it)),
        refusal.map(|answer| (reasons::REFUSED, answer.to_owned())),
        named(at_console, "reset when nobody is at their consoles: ").map(|it| (reasons::IN_USE, it)),
        named(progressing, "being reset: ").map(|it| (reasons::PROGRESSING, it)),
    ];
    let sentences: Vec<_> = sentences.into_iter().flatten().collect();
    let (status, reason, message) = match sentences.first() {
        None => ("True", reasons::FRESH, "the VMs that are assigned to nobody have fresh disks".to_owned()),
        Some((reason, _)) => {
            let texts: Vec<_> = sentences.iter().map(|(_, text)| text.as_str()).collect();
            ("False", *reason, texts.join("; "))
        }
    };
    let former = conditions::find(current, RESET).filter(|former| former.status == status);
    Some(Condition {
        type_: RESET.into(),
        status: status.into(),
        reason: reason.into(),
        message,
        last_transition_time: Time(former.map_or(now, |former| former.last_transition_time.0)),
        observed_generation: pool.generation,
    })
}

/// Some texts, and how many more there are.
struct Names<'a>(&'a [String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> = self.0.iter().take(NAMED).map(String::as_str).collect();
        f.write_str(&shown.join(", "))?;
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests;
