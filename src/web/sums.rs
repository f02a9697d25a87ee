//! What all VMs together have had in the last day: noted each minute, in memory alone, for who looks at the list; monitoring has the rest.

use std::{collections::VecDeque, sync::Mutex, time::Duration};

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use super::rows::{cpus, ram};
use crate::{
    api::{Quantity, VirtualMachine},
    process::lock,
};

/// How often it is noted, and for how long.
pub(super) const NOTED_EVERY: Duration = Duration::from_mins(1);
const NOTED: usize = 24 * 60;
/// The most points of a line.
const POINTS: usize = 240;

/// What all VMs have at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Sum {
    /// How many run.
    running: usize,
    /// The CPUs of those that run.
    cpus: u64,
    /// The bytes of memory of those that run.
    ram: u64,
}

impl Sum {
    /// Of these VMs.
    pub fn of<'a>(vms: impl Iterator<Item = &'a VirtualMachine>) -> Self {
        vms.filter(|vm| vm.runs()).fold(Self::default(), |sum, vm| {
            // What a runner has reported is read as foreign.
            let ram = Quantity::parse(&ram(vm)).map_or_else(|_| vm.spec.vm.ram().bytes(), |ram| ram.bytes());
            Self { running: sum.running + 1, cpus: sum.cpus + u64::from(cpus(vm)), ram: sum.ram.saturating_add(ram) }
        })
    }
}

/// What all VMs have had in the last day.
#[derive(Default)]
pub(super) struct History(Mutex<VecDeque<(Timestamp, Sum)>>);

/// A line of a page.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Line {
    /// The end of the name of its text.
    name: &'static str,
    /// The last value.
    value: u64,
    /// The corners of a line in a field of 240 by 40, as SVG has them: `x,y x,y`.
    points: String,
}

impl History {
    /// Notes the sum.
    pub fn note(&self, now: Timestamp, sum: Sum) {
        let mut noted = lock(&self.0);
        noted.push_back((now, sum));
        let surplus = noted.len().saturating_sub(NOTED);
        noted.drain(..surplus);
    }

    /// The lines, with the sum of now as their last points, and since when they are.
    pub fn lines(&self, now: Timestamp, sum: Sum) -> (Timestamp, Vec<Line>) {
        let mut noted: Vec<_> = lock(&self.0).iter().copied().collect();
        noted.push((now, sum));
        let begin = noted.first().map_or(now, |(at, _)| *at);
        let step = noted.len().div_ceil(POINTS);
        // From the end, so that the last one is among them.
        let seen: Vec<_> = noted.iter().rev().step_by(step).rev().collect();
        let line = |name, value: fn(&Sum) -> u64| {
            let most = seen.iter().map(|(_, sum)| value(sum)).max().unwrap_or_default().max(1);
            let span = now.duration_since(begin).as_secs_f64().max(1.0);
            let point = |(at, sum): &&(Timestamp, Sum)| {
                let x = 240.0 * at.duration_since(begin).as_secs_f64() / span;
                #[allow(clippy::cast_precision_loss, reason = "a point of a picture")]
                let y = 40.0 - 38.0 * value(sum) as f64 / most as f64;
                format!("{x:.1},{y:.1}")
            };
            Line { name, value: value(&sum), points: seen.iter().map(point).collect::<Vec<_>>().join(" ") }
        };
        let lines =
            vec![line("running", |sum| sum.running as u64), line("cpus", |sum| sum.cpus), line("ram", |sum| sum.ram)];
        (begin, lines)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::{noon, vm};

    #[test]
    fn the_sum_is_of_what_the_running_vms_have() {
        let running = json!([{ "type": "Running", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" }]);
        let with = vm(|vm| vm["status"] = json!({ "cpus": 3, "ram": "2Gi", "conditions": running }));
        let wanted = vm(|vm| {
            vm["spec"]["vm"]["currentCpus"] = json!(1);
            vm["spec"]["vm"]["maximumRam"] = json!("4Gi");
            vm["spec"]["vm"]["currentRam"] = json!("1Gi");
            vm["status"] = json!({ "conditions": running });
        });
        let stopped = vm(|vm| vm["status"] = json!({ "cpus": 9, "ram": "9Gi" }));
        let sum = Sum::of([&with, &wanted, &stopped].into_iter());
        assert_eq!(sum, Sum { running: 2, cpus: 4, ram: 3 << 30 });
    }

    #[test]
    fn a_day_is_a_line_of_few_points_that_ends_now() {
        let history = History::default();
        let begin = noon();
        let sum = |running| Sum { running, cpus: 2, ram: 0 };
        for minute in 0..3000_i64 {
            history.note(begin + Duration::from_secs(60 * minute.unsigned_abs()), sum(1));
        }
        let now = begin + Duration::from_secs(60 * 3000);
        let (since, lines) = history.lines(now, sum(4));
        assert_eq!(since, begin + Duration::from_secs(60 * (3000 - 1440)), "no longer than a day");
        let points: Vec<&str> = lines[0].points.split(' ').collect();
        assert!(points.len() <= POINTS && points.len() > POINTS / 2, "{}", points.len());
        assert_eq!((lines[0].value, *points.last().unwrap()), (4, "240.0,2.0"));
        assert!(points[..points.len() - 1].iter().all(|point| point.ends_with(",30.5")), "{points:?}");
        let (_, lines) = History::default().lines(now, Sum::default());
        assert_eq!(lines[2].points, "0.0,40.0", "nothing is known yet");
    }
}
