//! What is run: scenarios of which every request is one at which the manager crashes, and random ones.

use std::{
    collections::BTreeMap,
    fmt,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use serde_json::Value;

use crate::{
    log, number,
    people::{self, Act, Op},
    run::{Ended, Failure, Fault, Faults, Run},
    sets::Content,
    situations,
};

/// How many random scenarios are run if nobody says how many.
const SEEDS: u64 = 8;

/// How many steps of a run that fails are printed.
const LAST: usize = 120;

/// Of how many faults at single requests one is tried if nobody says it: `make sim` tries all.
const STRIDE: u64 = 151;

/// The kinds of which watches are behind in a half of the random scenarios.
const BEHIND: [&str; 5] = ["VirtualMachine", "Pod", "PersistentVolumeClaim", "VmReport", "ConfigMap"];

type State = BTreeMap<String, Value>;

fn difference(expected: &State, found: &State) -> String {
    let mut lines = Vec::new();
    for (name, value) in expected.iter().filter(|(name, value)| found.get(*name) != Some(*value)) {
        let found = found.get(name).map_or_else(|| "nothing".to_owned(), ToString::to_string);
        lines.push(format!("{name}:\n  expected {value}\n  found    {found}"));
    }
    lines.extend(found.keys().filter(|name| !expected.contains_key(*name)).map(|name| format!("{name}: not expected")));
    lines.join("\n")
}

/// What happens if nothing goes wrong and each person waits until the last wish is fulfilled.
fn undisturbed(script: &[Op]) -> Result<Ended, Failure> {
    let ended = Run::new(0, script.to_vec(), Faults::default(), true).finish()?;
    if people::depends_on_time(script) && !people::ends_ready(script) {
        return Ok(ended);
    }
    match must_be_ready(&ended.state) {
        Ok(()) => Ok(ended),
        Err(why) => Err(Failure { why, trace: ended.trace }),
    }
}

/// Whoever waits for the end of each wish has VMs at the end that are as they should be.
fn must_be_ready(state: &State) -> Result<(), String> {
    let is_ready = |said: &Value| said["conditions"]["Ready"][0] == "True";
    let mut vms = state.iter().filter(|(name, _)| name.starts_with("VirtualMachine "));
    match vms.find(|(_, said)| !is_ready(said)) {
        Some((name, said)) => Err(format!("{name} is not Ready: {said}")),
        None => Ok(()),
    }
}

fn must_be(expected: &State, ended: Ended) -> Result<Ended, Failure> {
    if ended.state == *expected {
        return Ok(ended);
    }
    let why = format!("not the end of an undisturbed run:\n{}", difference(expected, &ended.state));
    Err(Failure { why, trace: ended.trace })
}

/// What happens in a run, all of it: the same scenario gives the same run.
#[derive(Clone)]
struct Scenario {
    /// Decides what happens next.
    seed: u64,
    script: Vec<Op>,
    faults: Faults,
}

impl Scenario {
    /// The random scenario of a seed. Those with an odd one have two VMs, and each other pair of them would have the same claim. Of 16, one is about a pool,
    /// one about vmctl, and in two managers stand for election.
    fn random(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let vms = people::VMS[usize::try_from(seed % 4).unwrap()];
        let script = people::script(&mut random, vms);
        let rate = [0, 20, 60, 150][random.usize(0..4)];
        let unseen = random.u32(0..8) == 0;
        let faults = Faults { rate, unseen, behind: BEHIND.get(random.usize(0..10)).copied(), ..Faults::default() };
        let run = random.u64(..);
        let script = match seed % 16 {
            6 => people::pool_script(&mut random),
            14 => people::vmctl_script(&mut random),
            _ => script,
        };
        let faults = Faults { election: [2, 12].contains(&(seed % 16)), ..faults };
        Self { seed: run, script, faults }
    }

    fn run(&self) -> Result<Ended, Failure> {
        let ended = Run::new(self.seed, self.script.clone(), self.faults.clone(), false).finish()?;
        if people::depends_on_time(&self.script) {
            return Ok(ended);
        }
        must_be(&undisturbed(&self.script)?.state, ended)
    }

    /// The same with less: each step leaves out what people do, or faults, as long as it still fails.
    fn shrunk(self, failure: Failure) -> (Self, Failure) {
        let mut least = (self, failure);
        loop {
            let smaller = least.0.smaller().find_map(|smaller| {
                let failure = smaller.run().err()?;
                Some((smaller, failure))
            });
            match smaller {
                Some(smaller) => least = smaller,
                None => return least,
            }
        }
    }

    fn smaller(&self) -> impl Iterator<Item = Self> + use<'_> {
        let fewer = [0, 20, 60].into_iter().filter(|rate| *rate < self.faults.rate);
        let calmer = fewer.map(|rate| Self { faults: Faults { rate, ..self.faults.clone() }, ..self.clone() });
        let in_time =
            self.faults.behind.map(|_| Self { faults: Faults { behind: None, ..self.faults.clone() }, ..self.clone() });
        let seen = self
            .faults
            .unseen
            .then(|| Self { faults: Faults { unseen: false, ..self.faults.clone() }, ..self.clone() });
        let halves = (self.script.len() >= 4).then_some(self.script.len() / 2);
        let lengths = halves.into_iter().chain([1]);
        let shorter = lengths.flat_map(move |length| {
            (0..self.script.len()).step_by(length).map(move |at| {
                let mut script = self.script.clone();
                script.drain(at..script.len().min(at + length));
                Self { script, ..self.clone() }
            })
        });
        calmer.chain(seen).chain(in_time).chain(shorter)
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of 1,000 steps are disturbances{}. People do:", self.faults.rate, self.faults)?;
        self.script.iter().try_for_each(|op| writeln!(f, "  {op}"))
    }
}

/// Runs each number on all processors, until one fails. Returns the first failure.
fn each(numbers: std::ops::Range<u64>, run: impl Fn(u64) -> Result<(), Failure> + Sync) -> Option<(u64, Failure)> {
    let next = AtomicU64::new(numbers.start);
    let failed = std::sync::Mutex::new(None::<(u64, Failure)>);
    let work = || loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= numbers.end || failed.lock().unwrap().is_some() {
            return;
        }
        if let Err(failure) = run(number) {
            let mut failed = failed.lock().unwrap();
            if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                *failed = Some((number, failure));
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    failed.into_inner().unwrap()
}

/// Says what happened in the smallest scenario that fails as that of a seed does.
fn fail(seed: u64, failure: Failure, steps: usize) -> ! {
    // To leave out what does not matter may take minutes.
    println!("seed {seed}: {}", failure.why);
    let (scenario, failure) = Scenario::random(seed).shrunk(failure);
    panic!("{}\n{scenario}found by the seed {seed} (SIM_SEED={seed} repeats it)", failure.text(steps));
}

#[test]
fn random_scenarios() {
    log();
    if let Some(seed) = number("SIM_SEED") {
        match Scenario::random(seed).run() {
            Ok(ended) => println!("{}\nseed {seed} holds", ended.trace.join("\n")),
            Err(failure) => fail(seed, failure, usize::MAX),
        }
        return;
    }
    let (first, count, began) =
        (number("SIM_FIRST").unwrap_or(0), number("SIM_SEEDS").unwrap_or(SEEDS), Instant::now());
    let requests = AtomicUsize::new(0);
    let failed = each(first..first + count, |seed| {
        let ended = Scenario::random(seed).run()?;
        requests.fetch_add(ended.requests, Ordering::Relaxed);
        Ok(())
    });
    if let Some((seed, failure)) = failed {
        fail(seed, failure, LAST);
    }
    let time = began.elapsed().as_secs_f64();
    let requests = requests.into_inner();
    println!(
        "{count} seeds, {requests} requests, in {time:.1} s: {:.1} seeds each second",
        f64::from(count as u32) / time
    );
}

#[test]
fn a_seed_gives_the_same_run_again() {
    let failed = each(0..number("SIM_SAME").unwrap_or(2), |seed| {
        // Two managers that stand for election do not always send their requests in the same order.
        if Scenario::random(seed).faults.election {
            return Ok(());
        }
        let trace = || Scenario::random(seed).run().map_or_else(|failure| failure.trace, |ended| ended.trace);
        let (one, other) = (trace(), trace());
        match one.iter().zip(&other).position(|(one, other)| one != other) {
            None if one.len() == other.len() => Ok(()),
            at => {
                let at = at.unwrap_or(one.len().min(other.len()));
                let why = format!("then {:?} in one run and {:?} in the other", one.get(at), other.get(at));
                Err(Failure { why, trace: one[..at].to_vec() })
            }
        }
    });
    if let Some((seed, failure)) = failed {
        panic!("seed {seed}\n{}", failure.text(LAST));
    }
}

/// The scenarios in which each fault happens to each request.
fn simple() -> Vec<(&'static str, Vec<Act>)> {
    vec![
        ("start", vec![Act::Make]),
        ("stop", vec![Act::Make, Act::Stop]),
        ("restart", vec![Act::Make, Act::Restart(1)]),
        ("change", vec![Act::Make, Act::Cpus(1), Act::Grow(2)]),
        ("delete and make again", vec![Act::Make, Act::Delete { orphan: false }, Act::Make]),
        ("orphan and make again", vec![Act::Make, Act::Delete { orphan: true }, Act::Make]),
        ("another name", vec![Act::Make, Act::UseSet(true), Act::Restart(1), Act::UseSet(false), Act::Restart(2)]),
        ("delete the Pod", vec![Act::Make, Act::DeletePod]),
        ("a restored VM", vec![Act::Make, Act::Delete { orphan: false }, Act::Restore]),
        (
            "a broken set",
            vec![Act::Make, Act::UseSet(true), Act::Set(Content::Broken), Act::Restart(1), Act::Set(Content::Moved)],
        ),
        ("a claim is lost", vec![Act::Make, Act::Stop, Act::DeleteClaim, Act::Start]),
        ("a claim is lost in use", vec![Act::Make, Act::DeleteClaim, Act::Stop, Act::Start]),
        ("a stranger's object", vec![Act::Squat("Secret", true), Act::Make, Act::Squat("Secret", false)]),
        (
            "a stranger's claim",
            vec![
                Act::Squat("PersistentVolumeClaim", true),
                Act::Make,
                Act::Squat("PersistentVolumeClaim", false),
                Act::Stop,
                Act::Start,
            ],
        ),
        ("a stranger's Pod", vec![Act::Make, Act::Stop, Act::Mount(true), Act::Start, Act::Mount(false)]),
        ("a copy of the Pod", vec![Act::Make, Act::CopyPod(true), Act::Stop, Act::Start, Act::CopyPod(false)]),
        ("stripped", vec![Act::Make, Act::Strip("Pod"), Act::Strip("ConfigMap"), Act::Stop, Act::Start]),
        ("orphan and restart", vec![Act::Make, Act::Delete { orphan: true }, Act::Make, Act::Restart(1), Act::Cpus(1)]),
        ("relabelled", vec![Act::Make, Act::Relabel("ConfigMap"), Act::Relabel("Pod"), Act::Restart(1)]),
        ("all power", vec![Act::Make, Act::Stop, Act::Start, Act::Restart(1), Act::DeletePod, Act::Stop]),
        ("grow and delete", vec![Act::Make, Act::Grow(2), Act::Grow(3), Act::Delete { orphan: false }]),
        (
            "the guest shuts down",
            vec![
                Act::Make,
                Act::Shutdown,
                Act::StopWithGuest(true),
                Act::Shutdown,
                Act::Start,
                Act::Shutdown,
                Act::Restart(1),
            ],
        ),
        ("evicted", [vec![Act::Make], vec![Act::Evict; 6], vec![Act::Stop]].concat()),
        ("evicted again and again", [vec![Act::Make], vec![Act::Evict; 6]].concat()),
        ("restart beside a stranger's Pod", vec![Act::Make, Act::Mount(true), Act::Restart(1), Act::Mount(false)]),
        ("restart while a claim is deleted", vec![Act::Make, Act::DeleteClaim, Act::Restart(1)]),
        ("a claim is deleted under an evicted guest", vec![Act::Make, Act::DeleteClaim, Act::Evict]),
        ("take objects away", vec![Act::Make, Act::DeleteObject("ConfigMap"), Act::EditMap, Act::Strip("ConfigMap")]),
    ]
}

#[test]
fn a_fault_at_every_request() {
    log();
    let mut runs = 0;
    let only = std::env::var("SIM_SCENARIO").unwrap_or_default();
    let simple = simple().into_iter().map(|(name, acts)| (name, Op::all("apple", acts)));
    for (name, script) in simple.chain(situations::all()).filter(|(name, _)| name.contains(&only)) {
        let calm = undisturbed(&script)
            .unwrap_or_else(|failure| panic!("{}\nfound by the scenario \"{name}\"", failure.text(LAST)));
        let at_requests = (0..calm.requests).flat_map(|at| Fault::ALL.map(|fault| (at, fault)));
        let at_requests = at_requests.map(|at| Faults { at: Some(at), ..Faults::default() });
        let unseen = Faults { unseen: true, ..Faults::default() };
        let places: Vec<Faults> = std::iter::once(unseen).chain(at_requests).collect();
        let stride = number("SIM_STRIDE").unwrap_or(STRIDE);
        let turns = u64::try_from(places.len()).unwrap().div_ceil(stride);
        let place = |turn: u64| &places[usize::try_from(turn * stride).unwrap()];
        let failed = each(0..turns, |turn| {
            let faults = place(turn);
            let ended = Run::new(0, script.clone(), faults.clone(), true).finish()?;
            // While no manager runs, people do not wait for what they wish.
            let is_away = faults.at.is_some_and(|(_, fault)| fault == Fault::Away);
            if is_away && people::depends_on_time(&script) { Ok(()) } else { must_be(&calm.state, ended).map(drop) }
        });
        if let Some((turn, failure)) = failed {
            panic!("{}\nfound by the scenario \"{name}\"{}", failure.text(LAST), place(turn));
        }
        runs += turns;
    }
    println!("{runs} faults");
}
