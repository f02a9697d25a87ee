//! The figures of a run as tables of Markdown.

use std::fmt::Write as _;

use clap::ValueEnum as _;

use super::figures::{Figures, Measured, Report, Step};
use super::fit::exponent;

/// The highest exponent that is taken for one that grows with the number of VMs.
const LINEAR: f64 = 1.05;
/// The longest failover, in seconds after the lease's end.
const FAILOVER: f64 = 10.0;

/// The most memory with so many VMs, MB.
fn memory_goal(n: usize) -> f64 {
    20.0 + 0.015 * n as f64
}

/// What is measured of each step.
struct Quantity {
    name: &'static str,
    /// The figure of which the exponent is taken.
    figure: fn(&Measured) -> f64,
    show: fn(&Measured) -> String,
}

const QUANTITIES: [Quantity; 4] = [
    Quantity {
        name: "requests (writes)",
        figure: |measured| measured.requests() as f64,
        show: |measured| format!("{} ({})", thousands(measured.requests()), thousands(measured.writes())),
    },
    Quantity {
        name: "CPU seconds of the manager",
        figure: |measured| measured.cpu_s,
        show: |measured| format!("{:.2}", measured.cpu_s),
    },
    Quantity {
        name: "seconds",
        figure: |measured| measured.seconds,
        show: |measured| match measured.caught_up_s {
            Some(caught_up) => format!("{caught_up:.1}; {:.1}", measured.seconds),
            None => format!("{:.1}", measured.seconds),
        },
    },
    Quantity {
        name: "memory of the manager, at most, MB",
        figure: |measured| measured.peak,
        show: |measured| format!("{:.1}", measured.peak),
    },
];

/// All tables.
pub fn of(report: &Report) -> String {
    let mut text = String::new();
    let figures = &report.figures;
    for quantity in &QUANTITIES {
        head(&mut text, quantity.name, figures);
        for &step in Step::value_variants() {
            let points = points(figures, step, quantity);
            if points.is_empty() {
                continue;
            }
            let cells = figures.iter().map(|figures| figures.of(step).map_or_else(String::new, quantity.show));
            let grows = step.grows().then(|| exponent(&points)).flatten();
            row(&mut text, step.name(), cells, grows);
        }
    }
    if figures.iter().any(|figures| figures.peak().is_some()) {
        head(&mut text, "memory beyond that without VMs, kB per VM", figures);
        let per_vm = |figures: &Figures| Some((figures.peak()? - figures.rss_empty) * 1e3 / figures.n as f64);
        let cells = figures.iter().map(|figures| per_vm(figures).map_or_else(String::new, |kb| format!("{kb:.1}")));
        row(&mut text, "VMs that run, at most", cells, None);
    }
    text + &goals(figures)
}

fn points(figures: &[Figures], step: Step, quantity: &Quantity) -> Vec<(f64, f64)> {
    let of = |figures: &Figures| Some((figures.n as f64, (quantity.figure)(figures.of(step)?)));
    figures.iter().filter_map(of).collect()
}

fn head(text: &mut String, name: &str, figures: &[Figures]) {
    let numbers: String = figures.iter().map(|figures| format!(" {} VMs |", thousands(figures.n as u64))).collect();
    let _ = write!(text, "\n| {name} |{numbers} exponent |\n|---|{}---|\n", "---|".repeat(figures.len()));
}

fn row(text: &mut String, name: &str, cells: impl Iterator<Item = String>, exponent: Option<f64>) {
    let cells: String = cells.map(|cell| format!(" {cell} |")).collect();
    let exponent = exponent.map_or_else(String::new, |exponent| format!("{exponent:.2}"));
    let _ = writeln!(text, "| {name} |{cells} {exponent} |");
}

/// What is wanted, and whether it is so.
fn goals(figures: &[Figures]) -> String {
    let mut text = "\n| goal | figure | |\n|---|---|---|\n".to_owned();
    let mut goal = |name: &str, figure: String, is_met: bool| {
        let _ = writeln!(text, "| {name} | {figure} | {} |", if is_met { "met" } else { "MISSED" });
    };
    for figures in figures {
        let Some(peak) = figures.peak() else { continue };
        let most = memory_goal(figures.n);
        let name = format!("memory with {} VMs: at most {most:.1} MB", thousands(figures.n as u64));
        goal(&name, format!("{peak:.1} MB"), peak <= most);
    }
    for step in [Step::Create, Step::Update, Step::Templates, Step::Restart, Step::Failover] {
        let figure = |quantity| exponent(&points(figures, step, quantity));
        let [requests, cpu, ..] = &QUANTITIES;
        for (what, figure) in [("requests", figure(requests)), ("CPU", figure(cpu))] {
            if let Some(figure) = figure {
                goal(
                    &format!("{}: exponent of {what} at most {LINEAR}", step.name()),
                    format!("{figure:.3}"),
                    figure <= LINEAR,
                );
            }
        }
    }
    let all = |step| figures.iter().filter_map(move |figures| figures.of(step));
    if let Some(longest) = all(Step::Failover).map(|measured| measured.seconds).reduce(f64::max) {
        goal(&format!("failover: at most {FAILOVER} s"), format!("{longest:.1} s"), longest <= FAILOVER);
    }
    for (step, what) in
        [(Step::Rest, Measured::requests as fn(&Measured) -> u64), (Step::StuckRestart, Measured::writes)]
    {
        let name = if step == Step::Rest { "requests" } else { "writes" };
        if let Some(most) = all(step).map(what).max() {
            goal(&format!("{}: no {name}", step.name()), most.to_string(), most == 0);
        }
    }
    text
}

/// A number with a comma before each three digits.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let first = digits.len() % 3;
    let (head, rest) = digits.split_at(first);
    let groups = rest.as_bytes().chunks(3).map(|group| String::from_utf8_lossy(group).into_owned());
    let groups = (!head.is_empty()).then(|| head.to_owned()).into_iter().chain(groups);
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(step: Step, writes: u64, seconds: f64) -> Measured {
        Measured {
            step,
            seconds,
            caught_up_s: None,
            cpu_s: 1.0,
            control_plane_cpu_s: 1.0,
            rss: 20.0,
            peak: 21.0,
            requests: [("PATCH pods".to_owned(), writes), ("LIST pods".to_owned(), 1)].into(),
        }
    }

    fn goals_of(steps: Vec<Measured>) -> String {
        goals(&[Figures { n: 100, rss_empty: 18.0, steps }])
    }

    #[test]
    fn a_goal_that_is_missed_is_said() {
        let met = goals_of(vec![measured(Step::Failover, 0, 9.0), measured(Step::StuckRestart, 0, 1.0)]);
        assert!(!met.contains("MISSED"), "{met}");
        let stuck = goals_of(vec![measured(Step::StuckRestart, 0, 1.0)]);
        assert!(!stuck.contains("memory"), "no VM has run: {stuck}");
        for missed in
            [measured(Step::Failover, 0, 10.1), measured(Step::StuckRestart, 1, 1.0), measured(Step::Rest, 0, 60.0)]
        {
            let text = goals_of(vec![missed.clone()]);
            assert_eq!(text.matches("MISSED").count(), 1, "{missed:?}: {text}");
        }
    }

    #[test]
    fn a_step_that_was_not_done_has_no_row() {
        let report = Report {
            date: String::new(),
            version: String::new(),
            commit: String::new(),
            cores: 2,
            nodes: 500,
            rest_s: 60,
            figures: vec![Figures { n: 1000, rss_empty: 18.0, steps: vec![measured(Step::Create, 8000, 3.0)] }],
        };
        let text = of(&report);
        assert!(text.contains("| create all, until they run | 8,001 (8,000) |  |"), "{text}");
        assert!(!text.contains("failover"), "{text}");
    }

    #[test]
    fn numbers_have_commas() {
        assert_eq!([0, 999, 1000, 12_345, 1_000_000].map(thousands), ["0", "999", "1,000", "12,345", "1,000,000"]);
    }
}
