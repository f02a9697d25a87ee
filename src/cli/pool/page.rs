//! What `kubectl vm pool status` shows of a pool. Pure.

use std::fmt;

use k8s_openapi::jiff::Timestamp;
use kube::{ResourceExt, core::DynamicObject};
use serde::Serialize;
use serde_json::Value;

use crate::{
    actions::pool::View,
    api::{pool::SCALED, status::whole_seconds},
    assignment::{
        Member,
        upkeep::{Counts, counts},
    },
};

/// A pool and its VMs.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Page {
    namespace: String,
    name: String,
    retention: String,
    login_on_assignment: bool,
    /// What is wrong with its retention.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// How many VMs the manager makes for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted: Option<u64>,
    /// Why they are not as its template wants them.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_scaled: Option<String>,
    members: u32,
    free: u32,
    /// Those that nobody gets before they are replaced or their disks are made.
    #[serde(skip_serializing_if = "Option::is_none")]
    renewing: Option<u32>,
    assigned: u32,
    expired: u32,
    vms: Vec<Row>,
}

/// A VM that belongs to the pool, or was assigned from it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    vm: String,
    state: State,
    /// QEMU runs.
    runs: bool,
    /// Somebody is at the console.
    console_connected: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_used: Option<String>,
    /// From when on others may get it.
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_until: Option<String>,
}

#[derive(Clone, Copy, Serialize, PartialEq, Eq)]
enum State {
    Free,
    /// Nobody gets it: it is replaced by a new one, or its disks are not made yet.
    Renewing,
    Assigned,
    Expired,
    /// It is assigned from another pool.
    Elsewhere,
    Deleted,
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            Self::Free => "Free",
            Self::Renewing => "Renewing",
            Self::Assigned => "Assigned",
            Self::Expired => "Expired",
            Self::Elsewhere => "Elsewhere",
            Self::Deleted => "Deleted",
        }
    }
}

impl Page {
    pub(super) fn new(pool: &DynamicObject, view: &View, now: Timestamp) -> Self {
        let name = pool.name_any();
        let Counts { members, free, renewing, assigned, expired } =
            counts(&view.pools, &view.members, now).get(&name).copied().unwrap_or_default();
        let spec = |field: &str| pool.data.pointer(&format!("/spec/{field}"));
        let from = |member: &&Member| member.held.as_ref().and_then(|held| held.pool.as_deref()) == Some(&name);
        let of_pool = view.members.iter().filter(|member| member.pools.contains(&name) || from(member));
        let mut vms: Vec<_> = of_pool.map(|member| Row::new(member, &name, view, now)).collect();
        vms.sort_by(|a, b| a.vm.cmp(&b.vm));
        Self {
            namespace: pool.namespace().unwrap_or_default(),
            retention: spec("retention").and_then(|text| text.as_str()).unwrap_or_default().to_owned(),
            login_on_assignment: spec("loginOnAssignment").is_some_and(|login| *login == true),
            problem: view.pools.get(&name).and_then(|pool| pool.retention.as_ref().err()).map(ToString::to_string),
            wanted: spec("replicas").and_then(Value::as_u64),
            not_scaled: not_scaled(pool),
            name,
            members,
            free,
            renewing: view.pools.get(&pool.name_any()).and_then(|pool| pool.reset).map(|_| renewing),
            assigned,
            expired,
            vms,
        }
    }
}

/// What the pool's condition Scaled says, unless all is as wanted.
fn not_scaled(pool: &DynamicObject) -> Option<String> {
    let mut conditions = pool.data.pointer("/status/conditions")?.as_array()?.iter();
    let scaled = conditions.find(|condition| condition["type"] == SCALED && condition["status"] != "True")?;
    Some(scaled["message"].as_str()?.to_owned())
}

impl Row {
    fn new(member: &Member, pool: &str, view: &View, now: Timestamp) -> Self {
        let kept_until = member.taken_from(&view.pools);
        let state = match &member.held {
            _ if member.is_deleted => State::Deleted,
            None if !member.is_clean(&view.pools) => State::Renewing,
            None => State::Free,
            Some(held) if held.pool.as_deref() != Some(pool) => State::Elsewhere,
            Some(_) if kept_until.is_some_and(|end| end <= now) && !member.console.is_connected => State::Expired,
            Some(_) => State::Assigned,
        };
        let held = member.held.as_ref();
        Self {
            vm: member.name.clone(),
            state,
            runs: member.runs,
            console_connected: member.console.is_connected,
            pool: held.and_then(|held| held.pool.clone()),
            user: held.map(|held| held.user.clone()),
            last_used: held.and_then(|held| held.last_used).map(whole_seconds),
            kept_until: kept_until.map(whole_seconds),
        }
    }
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, name, retention, members, free, assigned, expired, .. } = self;
        let renewing = self.renewing.map(|renewing| format!(", {renewing} renewing")).unwrap_or_default();
        let login = if self.login_on_assignment { ", logs its users in" } else { "" };
        writeln!(
            f,
            "pool/{name} in {namespace}: {members} VMs, {free} free{renewing}, {assigned} assigned, {expired} expired"
        )?;
        let wanted = self.wanted.map(|wanted| format!(", wants {wanted} VMs")).unwrap_or_default();
        writeln!(f, "retention {retention}{login}{wanted}")?;
        if let Some(why) = &self.not_scaled {
            writeln!(f, "not as wanted yet: {why}")?;
        }
        if let Some(problem) = &self.problem {
            writeln!(f, "no assignment ends by time: {problem}")?;
        }
        if self.vms.is_empty() {
            return writeln!(f, "no VM names it in spec.pools");
        }
        let head = ["VM", "STATE", "USER", "LAST USED", "KEPT UNTIL", "RUNS", "CONSOLE"];
        let yes = |is: bool| if is { "yes" } else { "no" };
        let dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        let rows = self.vms.iter().map(|row| {
            let console = if row.console_connected { "connected" } else { "-" };
            [
                row.vm.clone(),
                row.state.as_str().to_owned(),
                dash(&row.user),
                dash(&row.last_used),
                dash(&row.kept_until),
                yes(row.runs).to_owned(),
                console.to_owned(),
            ]
        });
        let rows: Vec<_> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
        let widths: Vec<usize> = (0..head.len())
            .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        for row in &rows {
            let cells: Vec<_> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            writeln!(f, "{}", cells.join("   ").trim_end())?;
        }
        Ok(())
    }
}
