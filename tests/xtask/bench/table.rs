//! The figures of a bench for people, held against the budgets.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Figures, Templates};

fn is_read(request: &str) -> bool {
    request.starts_with("GET ") || request.starts_with("LIST ")
}

fn sum(requests: &BTreeMap<String, u64>, keep: impl Fn(&str) -> bool) -> u64 {
    requests.iter().filter(|(request, _)| keep(request)).map(|(_, count)| count).sum()
}

/// How many of the requests change something.
pub fn writes_in(requests: &BTreeMap<String, u64>) -> u64 {
    sum(requests, |request| !is_read(request))
}

fn listed(requests: &BTreeMap<String, u64>) -> String {
    if requests.is_empty() {
        return "none".into();
    }
    requests.iter().map(|(request, count)| format!("{count} {request}")).collect::<Vec<_>>().join(", ")
}

fn all(figures: &[f64]) -> String {
    figures.iter().map(|figure| format!("{figure:.2}")).collect::<Vec<_>>().join(", ")
}

/// The CPU time that the API server and etcd take for a write of the raw limit on the machine for which the budgets of time are said, in
/// milliseconds.
const WRITE: f64 = 2.5;

/// That CPU time on this machine.
fn write(figures: &Figures) -> f64 {
    figures.raw_control_plane_cpu_s * 1e3 / (figures.n * figures.raw_writes_per_vm) as f64
}

/// The figures as a table of Markdown, with the budgets where there are some. On a machine that is slower than that of the budgets, those of time
/// are longer by as much.
pub fn of(figures: &Figures) -> String {
    let n = figures.n as f64;
    let mut rows: Vec<[String; 4]> = vec![];
    let mut row = |what: &str, figure: String, budget: &str, met: Option<bool>| {
        let met = met.map_or("", |met| if met { "met" } else { "MISSED" });
        rows.push([what.into(), figure, budget.into(), met.into()]);
    };
    let slowness = (write(figures) / WRITE).max(1.0);
    // What the budgets of time are said for, and of the rate: creating few VMs takes a second, in which chance decides.
    let within = |seconds: f64, limit: f64| (figures.n == 1000).then_some(seconds < limit * slowness);
    let time = |budget: &str, limit: f64, unit: &str| match slowness > 1.0 {
        true => format!("{budget}; here {:.1} {unit}", limit * slowness),
        false => budget.to_owned(),
    };
    row(
        "the machine: CPU of API server and etcd for a write of the raw limit",
        format!("{:.1} ms, so budgets of time are {slowness:.1} times as long", write(figures)),
        "",
        None,
    );
    let ratio = figures.raw_pods_s / figures.pods_s;
    row(
        "raw limit: all Pods",
        format!("{:.2} s ({} writes per VM)", figures.raw_pods_s, figures.raw_writes_per_vm),
        "",
        None,
    );
    row("manager: all Pods", format!("{:.2} s", figures.pods_s), "", None);
    row(
        "rate against the raw limit",
        format!("{ratio:.2} (of {})", all(&figures.ratios)),
        "at least 0.8 with 1,000",
        (figures.n == 1000).then_some(ratio >= 0.8),
    );
    row("manager: all done", format!("{:.2} s", figures.settled_s), "", None);
    let cpu = format!("{:.2} s, {:.1} ms per VM", figures.cpu_s, figures.cpu_s / n * 1e3);
    row("manager: CPU", cpu, &time("under 5 ms per VM", 5.0, "ms"), Some(figures.cpu_s < 0.005 * n * slowness));
    row(
        "API server and etcd: CPU",
        format!("{:.1} s (raw limit {:.1} s)", figures.control_plane_cpu_s, figures.raw_control_plane_cpu_s),
        "",
        None,
    );
    let objects = figures.objects_per_vm as f64;
    let status = sum(&figures.requests, |request| request.ends_with("vms/status")) as f64 / n;
    let events = sum(&figures.requests, |request| request.ends_with("events")) as f64 / n;
    let others = |request: &str| !is_read(request) && !request.ends_with("vms/status") && !request.ends_with("events");
    let writes = sum(&figures.requests, others) as f64 / n;
    row("writes of objects per VM", format!("{writes:.2}"), &format!("at most {objects}"), Some(writes <= objects));
    row("writes of status per VM", format!("{status:.2}"), "at most 2", Some(status <= 2.0));
    row("events per VM", format!("{events:.2}"), "", None);
    let reads = sum(&figures.requests, is_read) as f64 / n;
    row("reads per VM", format!("{reads:.2}"), "at most 1", Some(reads <= 1.0));
    row("requests", listed(&figures.requests), "", None);
    row("warnings in the log", figures.complaints.to_string(), "", None);
    let memory = |mb: f64| {
        let per_vm = (mb - figures.rss_empty) * 1e3 / n;
        (format!("{mb:.1} MB, {per_vm:.0} kB per VM"), Some(mb <= 20.0 + 0.025 * n))
    };
    let budget = format!("under {:.1} MB", 20.0 + 0.025 * n);
    row("memory without VMs", format!("{:.1} MB", figures.rss_empty), "under 20 MB", Some(figures.rss_empty < 20.0));
    let (figure, met) = memory(figures.peak);
    row("memory, at most", figure, &budget, met);
    let (figure, met) = memory(figures.rss);
    row("memory, afterwards", figure, &budget, met);
    if let Some(rest) = &figures.rest {
        let what = format!("requests at rest, {} s", rest.seconds);
        row(&what, listed(&rest.requests), "0", Some(rest.requests.is_empty()));
        row("CPU at rest", format!("{:.2} s", rest.cpu_s), "", None);
    }
    if let Some(restart) = &figures.restart {
        let writes = writes_in(&restart.requests);
        row("restart: end", format!("{:.2} s", restart.stop_s), "", None);
        let times = all(&restart.all_caught_up_s);
        let figure = format!("{:.2} s (of {times}), CPU {:.2} s", restart.caught_up_s, restart.cpu_s);
        row("restart: caught up", figure, &time("under 1 s with 1,000", 1.0, "s"), within(restart.caught_up_s, 1.0));
        let figure = format!("{:.2} s (of {})", restart.control_plane_cpu_s, all(&restart.all_control_plane_cpu_s));
        row("restart: API server and etcd: CPU until then", figure, "", None);
        row("restart: requests", listed(&restart.requests), "no write", Some(writes == 0));
        let (figure, met) = memory(restart.peak);
        row("restart: memory, at most", figure, &budget, met);
        let (figure, met) = memory(restart.rss);
        row("restart: memory, afterwards", figure, &budget, met);
    }
    if let Some(down) = &figures.down {
        let figure = format!("{:.2} s after its start", down.pod_s);
        let what = "a VM made while the manager is down: its Pod";
        row(what, figure, &time("under 1.5 s with 1,000", 1.5, "s"), within(down.pod_s, 1.5));
    }
    if let Some(Templates { first_s, pods, .. }) = &figures.templates {
        let figure = format!("{first_s:.2} s");
        let what = "changed templates: first new object";
        row(what, figure, &time("under 2 s with 1,000", 2.0, "s"), within(*first_s, 2.0));
        row("changed templates: Pods touched", pods.to_string(), "0", Some(*pods == 0));
    }
    let templates = figures.templates.as_ref().map(|templates| templates.change.clone());
    for (name, change, most) in [
        ("changed templates", &templates, None),
        ("update of all", &figures.update, Some(2.0)),
        ("deletion of all", &figures.delete, None),
    ] {
        let Some(change) = change else { continue };
        let times = format!("{:.2} s (asked for in {:.2} s), CPU {:.2} s", change.done_s, change.asked_s, change.cpu_s);
        row(name, times, "", None);
        let writes = writes_in(&change.requests) as f64 / n;
        row(
            &format!("{name}: requests"),
            format!("{} ({writes:.2} writes per VM)", listed(&change.requests)),
            &most.map(|most| format!("at most {most} writes per VM")).unwrap_or_default(),
            most.map(|most| writes <= most),
        );
        row(&format!("{name}: memory afterwards"), format!("{:.1} MB", change.rss), "", None);
    }
    let mut text = format!("\n| {} VMs | | budget | |\n|---|---|---|---|\n", figures.n);
    for [what, figure, budget, met] in rows {
        let _ = writeln!(text, "| {what} | {figure} | {budget} | {met} |");
    }
    text
}
