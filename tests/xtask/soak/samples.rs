//! What a manager holds and asks for over time, and whether that grows.

use std::fmt::Write as _;

use serde::Serialize;

/// One look at the manager that leads.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Sample {
    /// Seconds since the soak began.
    pub at_s: f64,
    /// The number of the manager: each new leader has the next one.
    pub leader: usize,
    /// Memory, MB.
    pub rss: f64,
    /// Open files.
    pub files: usize,
    /// Threads.
    pub threads: usize,
    /// CPU seconds since the last sample.
    pub cpu_s: f64,
    /// Requests of the managers since the last sample, but for GET and DELETE; a few of the harness may be among them.
    pub requests: u64,
    /// What people did since the last sample.
    pub actions: usize,
    /// How many VMs there are.
    pub vms: usize,
}

/// A figure of the first and of the last quarter, and how much it may be.
struct Row {
    name: &'static str,
    first: f64,
    last: f64,
    most: f64,
}

/// The comparison of a manager's last quarter with its first one.
pub struct Verdict {
    rows: Vec<Row>,
}

impl Verdict {
    /// Of the samples of one manager; `None` if there are too few.
    pub fn of(samples: &[Sample]) -> Option<Self> {
        let quarter = samples.len() / 4;
        let (first, last) = (samples.get(..quarter)?, samples.get(samples.len() - quarter..)?);
        if quarter < 2 {
            return None;
        }
        let row = |name, figure: fn(&[Sample]) -> f64, most: fn(f64) -> f64| {
            let (first, last) = (figure(first), figure(last));
            Row { name, first, last, most: most(first) }
        };
        // What is done at once differs by chance from one sample to the next, so does what that needs.
        let rows = vec![
            row("memory, MB (median)", |part| median(part, |sample| sample.rss), |first| first * 1.05 + 1.0),
            // Connections come and go with the work that is to be done. A file that is never closed is there at the quietest moment, too.
            row("open files (least)", |part| least(part, |sample| sample.files as f64), |first| first + 3.0),
            row("threads (median)", |part| median(part, |sample| sample.threads as f64), |first| first + 1.0),
            row("requests per action", |part| per_action(part, |sample| sample.requests as f64), |first| first * 1.2),
            row("CPU per action, ms", |part| per_action(part, |sample| sample.cpu_s * 1e3), |first| first * 1.3),
        ];
        Some(Self { rows })
    }

    /// Whether nothing grew.
    pub fn is_passed(&self) -> bool {
        self.rows.iter().all(|row| row.last <= row.most)
    }

    /// As a table of Markdown.
    pub fn table(&self) -> String {
        let mut text = "| | first quarter | last quarter | at most | |\n|---|---|---|---|---|\n".to_owned();
        for Row { name, first, last, most } in &self.rows {
            let word = if last <= most { "pass" } else { "FAIL" };
            let _ = writeln!(text, "| {name} | {first:.1} | {last:.1} | {most:.1} | {word} |");
        }
        text
    }
}

fn median(samples: &[Sample], figure: fn(&Sample) -> f64) -> f64 {
    let mut figures: Vec<f64> = samples.iter().map(figure).collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

fn least(samples: &[Sample], figure: fn(&Sample) -> f64) -> f64 {
    samples.iter().map(figure).fold(f64::INFINITY, f64::min)
}

fn per_action(samples: &[Sample], figure: fn(&Sample) -> f64) -> f64 {
    let actions: usize = samples.iter().map(|sample| sample.actions).sum();
    samples.iter().map(figure).sum::<f64>() / actions.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steady(number: usize) -> Sample {
        Sample {
            at_s: number as f64,
            leader: 0,
            rss: 30.0,
            files: 20,
            threads: 5,
            cpu_s: 0.1,
            requests: 40,
            actions: 10,
            vms: 300,
        }
    }

    fn is_passed(edit: fn(usize, &mut Sample)) -> bool {
        let samples: Vec<Sample> = (0..40)
            .map(|number| {
                let mut sample = steady(number);
                edit(number, &mut sample);
                sample
            })
            .collect();
        Verdict::of(&samples).unwrap().is_passed()
    }

    #[test]
    fn what_grows_fails() {
        assert!(is_passed(|_, _| ()));
        assert!(!is_passed(|number, sample| sample.rss += number as f64 * 0.2));
        assert!(!is_passed(|number, sample| sample.files += number / 5));
        assert!(!is_passed(|number, sample| sample.threads += number / 10));
        assert!(!is_passed(|number, sample| sample.requests += number as u64));
        assert!(!is_passed(|number, sample| sample.cpu_s += number as f64 * 0.01));
    }

    #[test]
    fn a_short_peak_and_what_is_less_later_pass() {
        assert!(is_passed(|number, sample| if number == 35 {
            sample.rss = 90.0
        }));
        assert!(is_passed(|number, sample| sample.rss -= number as f64 * 0.2));
        assert!(is_passed(|number, sample| sample.actions += number));
    }

    #[test]
    fn few_samples_say_nothing() {
        assert!(Verdict::of(&[]).is_none());
        assert!(Verdict::of(&[steady(0); 7]).is_none());
        assert!(Verdict::of(&[steady(0); 8]).is_some());
    }
}
