//! One run: a seed decides which of the possible things happens next, and so the run can be repeated.

mod election;
mod workload;

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    time::Duration,
};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::{
    api::{
        kinds::{kind, kinds},
        request::{Answer, Request, Target, Verb},
        store::Store,
    },
    invariants::{Invariants, Written, at_rest, collected, status_is_accepted, vmctl},
    manager::{Manager, Role},
    net::{Net, Sent, Watch},
    people::{Act, Op},
    world::{NODES, Power, SHUTDOWN, Step, World, kubelet},
};

/// For how long the manager does nothing at the end.
const REST: Duration = Duration::from_mins(12);
/// How long the clock goes on at once while nothing happens.
const SLICE: Duration = Duration::from_secs(15);
/// How long the manager may work on what is at hand before the next thing happens.
const MOMENT: Duration = Duration::from_millis(1);
/// The API server ends a watch after so long (`timeoutSeconds`).
const LONGEST_WATCH: Duration = Duration::from_secs(290);
/// How many steps a request is late that is carried out after its manager has crashed.
const LATE: [usize; 4] = [0, 30, 120, 300];
/// How many steps a person waits after the one before; one who waits for long waits until nothing happens any more.
const PATIENCE: [usize; 6] = [0, 4, 15, 40, 100, 10_000];
/// After so many steps without an end something goes on for ever.
const MOST_STEPS: usize = 20_000;
/// One who waits until nothing happens waits no longer than this: a VM that needs a person is tried again each minute.
const LONGEST_CALM: Duration = Duration::from_mins(5);

/// What disturbs a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Of 1,000 steps, how many are disturbances.
    pub rate: u32,
    /// What happens to the request with this number, counted from 0.
    pub at: Option<(usize, Fault)>,
    /// Watches report nothing of what people do: they break off just then, and the API server has forgotten it.
    pub unseen: bool,
    /// Watches of this kind report only when nothing else can happen.
    pub behind: Option<&'static str>,
    /// Two managers stand for election, and take turns.
    pub election: bool,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((at, fault)) = self.at {
            write!(f, " with {fault:?} at the request {at}")?;
        }
        if let Some(behind) = self.behind {
            write!(f, ", watches of {behind} are behind")?;
        }
        if self.election {
            write!(f, ", two managers stand for election")?;
        }
        if self.unseen {
            write!(f, ", watches report nothing of what people do")?;
        }
        Ok(())
    }
}

/// What can happen to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The manager crashes before the API server sees it.
    CrashBefore,
    /// The manager crashes when it was done, and gets no answer.
    CrashAfter,
    /// The API server has an error, and does not do it.
    Refused,
    /// It is done, and the answer is lost.
    Lost,
    /// It is done, the manager crashes, and the next one starts when people have done all but the last thing that they do.
    Away,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::CrashBefore, Self::CrashAfter, Self::Refused, Self::Lost, Self::Away];
}

/// Why a run has failed, with what happened before.
#[derive(Debug)]
pub struct Failure {
    pub why: String,
    pub trace: Vec<String>,
}

impl Failure {
    /// For people: the last steps.
    pub fn text(&self, steps: usize) -> String {
        let mut text = String::new();
        let first = self.trace.len().saturating_sub(steps);
        for line in &self.trace[first..] {
            let _ = writeln!(text, "{line}");
        }
        text + &self.why
    }
}

/// How a run has ended.
pub struct Ended {
    pub state: BTreeMap<String, Value>,
    pub trace: Vec<String>,
    /// How many requests the API server has got.
    pub requests: usize,
}

/// Something that can happen next.
enum Choice {
    /// The API server gets the request with this index, of the manager with this one.
    Request(usize, usize),
    Answer(usize, usize),
    /// The watch with this index reports its next event.
    Event(usize, usize),
    Bookmark(usize, usize),
    World(Step),
    Person,
    /// The API server gets what a manager sent before it crashed.
    Left(usize),
}

/// What a manager sent before it crashed, and the API server has not seen.
struct Left {
    request: Request,
    text: String,
    /// The version that the API server had when it was sent.
    since: u64,
    /// What sent it.
    role: Role,
    /// It arrives in this step or later.
    from: usize,
}

pub struct Run {
    store: Store,
    world: World,
    /// Usually one manager. Two, if the first one does not know yet that it does not lead any more, or if they stand for election. Beside them the
    /// vmctls of people's Pods.
    managers: Vec<Manager>,
    /// How many programs were started.
    started: usize,
    /// The Pods (by their UIDs) whose vmctl has ended, how often, and when last.
    ended: BTreeMap<String, (u32, Duration)>,
    /// Whether people make Pods with vmctl.
    has_vmctls: bool,
    /// Whether people change a template set, which the manager may refuse.
    has_sets: bool,
    /// The next manager starts when people have no more than so many things to do.
    next_manager: usize,
    random: fastrand::Rng,
    faults: Faults,
    invariants: Invariants,
    /// What people will do, in this order.
    script: std::collections::VecDeque<Op>,
    /// Whether a person waits until nothing happens any more.
    is_calm: bool,
    began: Timestamp,
    elapsed: Duration,
    left: Vec<Left>,
    /// By how much the manager's clock differs from the API server's.
    skew: SignedDuration,
    /// How many steps the next person still waits.
    patience: usize,
    trace: Vec<String>,
    requests: usize,
    steps: usize,
    /// When a person has done something last.
    acted: Duration,
    /// The version of the last change that was noticed.
    changed: u64,
    /// The VM that runs, and that a person restarts.
    restarted: Option<&'static str>,
}

type Done = Result<(), String>;

impl Run {
    pub fn new(seed: u64, script: Vec<Op>, faults: Faults, is_calm: bool) -> Self {
        let mut store = Store::default();
        let began: Timestamp = "2027-01-15T08:00:00Z".parse().unwrap();
        World::furnish(&mut store, began);
        Self {
            store,
            world: World::default(),
            managers: Vec::new(),
            started: 0,
            ended: BTreeMap::new(),
            next_manager: usize::MAX,
            random: fastrand::Rng::with_seed(seed),
            faults,
            invariants: Invariants::default(),
            has_vmctls: script.iter().any(|op| matches!(op.act, Act::RunPod(_))),
            has_sets: script.iter().any(|op| matches!(op.act, Act::Set(_))),
            script: script.into(),
            is_calm,
            began,
            elapsed: Duration::ZERO,
            left: Vec::new(),
            skew: SignedDuration::ZERO,
            patience: 0,
            trace: Vec::new(),
            requests: 0,
            steps: 0,
            acted: Duration::ZERO,
            changed: 0,
            restarted: None,
        }
    }

    /// Runs until nothing happens any more.
    pub fn finish(mut self) -> Result<Ended, Failure> {
        match self.run() {
            Ok(()) => Ok(Ended { state: end_state(&self.store), trace: self.trace, requests: self.requests }),
            Err(why) => {
                if std::env::var_os("SIM_STATE").is_some() {
                    self.print_state();
                }
                Err(Failure { why, trace: self.trace })
            }
        }
    }

    /// Prints the objects that matter when a run has failed.
    fn print_state(&self) {
        let kinds = ["VirtualMachine", "Pod", "VmReport", "PersistentVolumeClaim"].map(kind);
        for (target, object) in self.store.everything().filter(|(target, _)| kinds.contains(&target.kind)) {
            let mut object = object.clone();
            object["metadata"]["managedFields"].take();
            println!("{} {}\n{object:#}", crate::api::kinds::kinds()[target.kind].name, target.name);
        }
        println!("{:#?}", self.world.guests);
    }

    fn run(&mut self) -> Done {
        let mut rested = Duration::ZERO;
        // A refused set is looked at again each 45 s, which takes most of a run's time.
        let rest = if self.has_sets { REST / 4 } else { REST };
        while rested < rest {
            self.steps += 1;
            if self.steps > MOST_STEPS {
                return Err(format!("{MOST_STEPS} steps, and still something happens"));
            }
            // In the end nothing disturbs.
            if self.script.is_empty() {
                self.skew = SignedDuration::ZERO;
                for node in NODES {
                    self.find_node(node);
                }
                self.resume();
                if self.leaders() > 1 && !self.faults.election {
                    let first = self.managers.iter().position(|manager| manager.role == Role::Manager);
                    first.into_iter().for_each(|first| self.crash(first));
                }
            }
            let is_due = self.script.len() <= self.next_manager;
            if self.faults.election {
                (self.leaders()..2).for_each(|_| self.start_manager());
            } else if self.leaders() == 0 && is_due {
                self.start_manager();
            }
            if self.has_vmctls {
                self.start_vmctls();
            }
            self.go_on(MOMENT);
            self.remove_ended();
            let choices = self.choices();
            let is_disturbed = !self.script.is_empty() && self.random.u32(0..1000) < self.faults.rate;
            if is_disturbed {
                self.disturb();
            } else if !choices.is_empty() {
                if !self.is_rest(&choices) && !self.waits_for_a_person() || self.has_changed() {
                    rested = Duration::ZERO;
                }
                let index = self.random.usize(0..choices.len());
                if let Some(choice) = choices.into_iter().nth(index) {
                    self.happen(choice)?;
                }
                self.invariants.state(&self.store, &self.world)?;
            } else if !self.script.is_empty() {
                let is_late = self.elapsed.saturating_sub(self.acted) >= LONGEST_CALM;
                let is_due = if self.is_calm { rested >= SLICE * 4 || is_late } else { self.random.bool() };
                if self.is_calm && is_due && !is_late && self.leaders() > 0 {
                    self.calm()?;
                } else if is_due {
                    // A person who does not wait for the restart may stop the guest before.
                    self.restarted = None;
                }
                if is_due {
                    self.person();
                    rested = Duration::ZERO;
                } else {
                    rested += self.rest();
                }
            } else {
                rested += self.rest();
            }
        }
        at_rest(&self.store, &self.world)
    }

    /// Nothing happens any more until a person does something: the status is true, and a guest that was to be restarted runs again.
    fn calm(&mut self) -> Done {
        let booted =
            |vm: &str| self.world.guests.values().any(|guest| guest.vm.0 == vm && guest.power == Power::Booted);
        if let Some(vm) = self.restarted.take_if(|vm| !booted(vm)) {
            return Err(format!("{vm} was to be restarted, and its guest does not run any more"));
        }
        let next = self.script.front().filter(|op| matches!(op.act, Act::Restart(_)) && booted(op.vm));
        self.restarted = next.map(|op| op.vm);
        at_rest(&self.store, &self.world)
    }

    fn now(&self) -> Timestamp {
        self.began + self.elapsed
    }

    fn note(&mut self, what: &str) {
        self.trace.push(format!("{:10.3} {what}", self.elapsed.as_secs_f64()));
    }

    fn start_manager(&mut self) {
        self.note("a manager starts");
        self.started += 1;
        let (identity, is_elected) = (format!("manager-{}", self.started), self.faults.election);
        self.managers.push(Manager::start(self.now() + self.skew, self.elapsed, identity, is_elected));
    }

    /// How many managers run.
    fn leaders(&self) -> usize {
        self.managers.iter().filter(|manager| manager.role == Role::Manager).count()
    }

    /// How long the clock goes on at once while nothing happens: a lease is renewed in time.
    fn slice(&self) -> Duration {
        if self.faults.election { Duration::from_secs(1) } else { SLICE }
    }

    fn go_on(&mut self, time: Duration) {
        for manager in &self.managers {
            manager.go_on(self.now() + self.skew, self.elapsed, time);
        }
        self.elapsed += time;
        for number in 0..self.managers.len() {
            self.net(number, |net, store| net.sort(store.version()));
        }
    }

    /// The clock goes on while nothing happens. Returns by how much.
    fn rest(&mut self) -> Duration {
        let slice = self.slice();
        self.go_on(slice);
        self.remove_ended();
        let now = self.elapsed;
        for number in 0..self.managers.len() {
            self.net(number, |net, _| net.watches.retain(|watch| now.saturating_sub(watch.began) < LONGEST_WATCH));
        }
        slice
    }

    /// What is between a manager and the API server, and the API server.
    fn net<T>(&mut self, manager: usize, with: impl FnOnce(&mut Net, &mut Store) -> T) -> T {
        let net = self.managers[manager].transport.0.clone();
        let mut net = net.lock().unwrap();
        with(&mut net, &mut self.store)
    }

    fn choices(&mut self) -> Vec<Choice> {
        let (now, step) = (self.now(), self.steps);
        let mut choices = Vec::new();
        for manager in (0..self.managers.len()).filter(|manager| !self.is_suspended(*manager)).collect::<Vec<_>>() {
            choices.extend(self.net(manager, |net, store| net_choices(manager, net, store, step)));
        }
        choices.extend(self.world.steps(&self.store, now).into_iter().map(Choice::World));
        self.put_off(&mut choices);
        let is_last = self.script.is_empty();
        let due = self.left.iter().enumerate().filter(|(_, left)| is_last || left.from <= step);
        choices.extend(due.map(|(index, _)| Choice::Left(index)));
        if choices.is_empty() && self.release_held() {
            return self.choices();
        }
        if !choices.is_empty() {
            // Only beside something else: by themselves they would go on for ever.
            for manager in (0..self.managers.len()).filter(|manager| !self.is_suspended(*manager)).collect::<Vec<_>>() {
                choices.extend(self.net(manager, |net, store| bookmark(manager, net, store, step)));
            }
        }
        if !self.is_calm && !self.script.is_empty() {
            match self.patience.checked_sub(1) {
                Some(left) => self.patience = left,
                None => choices.push(Choice::Person),
            }
        }
        choices
    }

    /// Events of the kind that is behind come only when nothing else can happen.
    fn put_off(&mut self, choices: &mut Vec<Choice>) {
        let Some(behind) = self.faults.behind.map(kind) else { return };
        let mut in_time: Vec<bool> = Vec::new();
        for choice in &*choices {
            in_time.push(match choice {
                Choice::Event(manager, index) => {
                    self.net(*manager, |net, _| net.watches[*index].request.target.kind != behind)
                }
                _ => true,
            });
        }
        if in_time.contains(&true) {
            let mut in_time = in_time.into_iter();
            choices.retain(|_| in_time.next() == Some(true));
        }
    }

    /// What is held back for long comes when nothing else happens. Returns whether there is something.
    fn release_held(&mut self) -> bool {
        let step = self.steps;
        (0..self.managers.len()).fold(false, |any, manager| {
            let is_held = |net: &mut Net, store: &mut Store| {
                let held = net.watches.iter_mut().filter(|watch| watch.held > step);
                let has_event = held.fold(false, |any, watch| {
                    watch.held = 0;
                    watch.next(store).is_some() || any
                });
                let late = net.answered.iter_mut().filter(|answered| answered.held > step);
                late.fold(has_event, |_, answered| {
                    answered.held = 0;
                    true
                })
            };
            self.net(manager, is_held) || any
        })
    }

    /// Whether a VM is not as it should be, and only a person can change that. Then the manager may look again from time to time.
    fn waits_for_a_person(&self) -> bool {
        let is_ready = |vm: &Value| {
            let mut conditions = vm["status"]["conditions"].as_array().into_iter().flatten();
            conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
        };
        self.script.is_empty() && self.store.of("VirtualMachine").any(|(_, vm)| !is_ready(vm))
    }

    /// Whether an object has changed since this was asked last. Events say that a failure goes on.
    fn has_changed(&mut self) -> bool {
        let ignored = [kind("NewEvent"), kind("Lease")];
        let last = self.store.changes.iter().rev().find(|change| !ignored.contains(&change.target.kind));
        let version = last.map_or(0, |change| change.version);
        std::mem::replace(&mut self.changed, version) != version
    }

    /// Whether nothing happens but that watches begin again, as they do every few minutes, a lease is renewed, a vmctl reads, and a set that the
    /// manager refuses is looked at again, which changes nothing.
    fn is_rest(&mut self, choices: &[Choice]) -> bool {
        let may_refuse = self.has_sets;
        choices.iter().all(|choice| match choice {
            Choice::Request(manager, index) => {
                let is_of_vmctl = self.managers[*manager].role == Role::Vmctl;
                self.net(*manager, |net, _| {
                    let sent = &net.sent[*index];
                    let verb = sent.request.as_ref().map(|request| &request.verb);
                    // A vmctl looks from time to time for VMs of Pods that are gone.
                    is_of_lease(&sent.text)
                        || may_refuse && is_look(&sent.text)
                        || matches!(verb, Ok(Verb::Watch { .. }))
                        || is_of_vmctl && matches!(verb, Ok(Verb::Get | Verb::List { .. }))
                })
            }
            Choice::Answer(manager, index) => {
                let is_of_vmctl = self.managers[*manager].role == Role::Vmctl;
                is_of_vmctl
                    || self.net(*manager, |net, _| {
                        let text = &net.answered[*index].text;
                        is_of_lease(text) || may_refuse && is_look(text)
                    })
            }
            Choice::Event(manager, index) => self.net(*manager, |net, _| is_of_lease(&net.watches[*index].text)),
            Choice::Bookmark(..) => true,
            _ => false,
        })
    }

    fn happen(&mut self, choice: Choice) -> Done {
        match choice {
            Choice::Request(manager, index) => return self.request(manager, index),
            Choice::Answer(manager, index) => {
                let text = self.net(manager, |net, _| {
                    let answered = net.answered.remove(index);
                    let text = format!("answer   {}: {}", answered.text, answered.answer.code);
                    Net::deliver(answered);
                    text
                });
                self.note(&text);
            }
            Choice::Event(manager, index) => {
                let text = self.net(manager, |net, store| {
                    let watch = &mut net.watches[index];
                    let event = watch.next(store)?;
                    watch.deliver(&event);
                    let name = event.object["metadata"]["name"].as_str().unwrap_or_default();
                    Some(format!("event    {} {} {name}", kinds()[watch.request.target.kind].name, event.type_))
                });
                self.note_some(text);
            }
            Choice::Bookmark(manager, index) => {
                self.net(manager, |net, store| net.watches[index].bookmark(store.version()));
            }
            Choice::World(step) => {
                self.note(&format!("world    {}", words(&step)));
                if let Step::Collect(target) = &step {
                    collected(target, &self.store, &self.world)?;
                }
                let now = self.now();
                self.world.take(&step, &mut self.store, now);
            }
            Choice::Person => self.person(),
            Choice::Left(index) => {
                let Left { request, text, since, role, from: _ } = self.left.remove(index);
                let (answer, checked) = self.carry_out_as(role, &request, since);
                self.note(&format!("late     {text}: {}", answer.code));
                return checked;
            }
        }
        Ok(())
    }

    fn person(&mut self) {
        if let Some(op) = self.script.pop_front() {
            self.acted = self.elapsed;
            self.patience = PATIENCE[self.random.usize(0..PATIENCE.len())];
            self.note(&format!("person   {op}"));
            let now = self.now();
            op.carry_out(&mut self.store, &mut self.world, now);
            if self.faults.unseen {
                self.forget();
            }
        }
    }

    /// The API server gets a request.
    fn request(&mut self, manager: usize, index: usize) -> Done {
        let number = self.requests;
        self.requests += 1;
        let sent = self.net(manager, |net, _| net.sent.remove(index));
        match self.faults.at.filter(|(at, _)| *at == number).map(|(_, fault)| fault) {
            None => self.answer(manager, sent),
            Some(Fault::CrashBefore) => {
                self.note(&format!("request  {} is not seen any more", sent.text));
                self.crash(manager);
                Ok(())
            }
            Some(fault @ (Fault::CrashAfter | Fault::Away)) => {
                let done = self.answer(manager, sent);
                self.next_manager = if fault == Fault::Away { 1 } else { usize::MAX };
                self.crash(manager);
                done
            }
            Some(Fault::Refused) => {
                self.refuse(manager, sent, fault(500, "InternalError"));
                Ok(())
            }
            Some(Fault::Lost) => {
                let done = match &sent.request {
                    Ok(Request { verb: Verb::Watch { .. }, .. }) | Err(_) => Ok(()),
                    Ok(request) => self.carry_out(&request.clone(), sent.since.unwrap_or_default(), manager).1,
                };
                self.note(&format!("fault    the answer to {} is lost", sent.text));
                Net::cut(sent);
                done
            }
        }
    }

    fn answer(&mut self, manager: usize, sent: Sent) -> Done {
        let request = match &sent.request {
            Ok(request) => request.clone(),
            Err(answer) => {
                let answer = answer.clone();
                self.note(&format!("request  {}: {}", sent.text, answer.code));
                self.net(manager, |net, _| net.done(sent, answer));
                return Ok(());
            }
        };
        if let Verb::Watch { .. } = request.verb {
            self.note(&format!("request  {}", sent.text));
            let now = self.elapsed;
            self.net(manager, |net, store| net.begin_watch(sent, request, store, now));
            return Ok(());
        }
        let refused = if self.faults.rate > 0 && !self.script.is_empty() { self.refusal(&request) } else { None };
        if let Some(answer) = refused {
            self.refuse(manager, sent, answer);
            return Ok(());
        }
        let (answer, checked) = self.carry_out(&request, sent.since.unwrap_or_default(), manager);
        self.note(&format!("request  {}: {}", sent.text, answer.code));
        self.net(manager, |net, _| net.done(sent, answer));
        checked
    }

    /// The API server does not do what a manager asks.
    fn refuse(&mut self, manager: usize, sent: Sent, answer: Answer) {
        self.note(&format!("request  {}: refused with {}", sent.text, answer.code));
        self.net(manager, |net, _| net.done(sent, answer));
    }

    /// The API server does what a program asked that runs.
    fn carry_out(&mut self, request: &Request, since: u64, manager: usize) -> (Answer, Done) {
        if let Err(why) = self.may_write(manager, request) {
            return (fault(500, "InternalError"), Err(why));
        }
        self.carry_out_as(self.managers[manager].role, request, since)
    }

    /// The API server does what a program asked when it had the version `since`.
    fn carry_out_as(&mut self, role: Role, request: &Request, since: u64) -> (Answer, Done) {
        let name = match &request.verb {
            Verb::Create(object) => object["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
            _ => request.target.name.clone(),
        };
        let target = Target { name, ..request.target.clone() };
        let before = self.store.shared(&target);
        let answer = self.store.answer(self.now(), request);
        let after = self.store.shared(&target);
        let written = Written { target: &target, before, after, since };
        let checked = match role {
            Role::Manager => self.invariants.written(&written, &self.store, &self.world),
            Role::Vmctl => vmctl::written(&written, &self.store),
        };
        let checked = checked.and_then(|()| status_is_accepted(request, &answer));
        (answer, checked)
    }

    /// The API server is busy, or has an error.
    fn refusal(&mut self, request: &Request) -> Option<Answer> {
        let (code, reason) = match self.random.u32(0..100) {
            0..2 => (429, "TooManyRequests"),
            2..4 => (500, "InternalError"),
            // Who names what must not exist yet gets this answer only if there is another object.
            4 if matches!(request.verb, Verb::Patch(_)) && request.target.kind != kind("VmReport") => (409, "Conflict"),
            5 if request.target.kind == kind("Pod") && matches!(request.verb, Verb::Patch(_)) => (403, "Forbidden"),
            _ => return None,
        };
        Some(fault(code, reason))
    }

    fn crash(&mut self, manager: usize) {
        self.note("the manager crashes");
        // What was sent and not seen yet may still be carried out, without anybody who waits for the answer.
        let sent = self.net(manager, |net, _| std::mem::take(&mut net.sent));
        let role = self.managers[manager].role;
        for sent in sent {
            if let Ok(request) = sent.request
                && request.target.kind != kind("Lease")
                && matches!(request.verb, Verb::Create(_) | Verb::Replace(_) | Verb::Patch(_) | Verb::Delete(_))
                && self.random.bool()
            {
                let from = self.steps + LATE[self.random.usize(0..LATE.len())];
                self.left.push(Left { request, text: sent.text, since: sent.since.unwrap_or_default(), role, from });
            }
        }
        self.managers.remove(manager);
    }

    /// Something goes wrong.
    fn disturb(&mut self) {
        let kind = self.random.u32(0..20);
        let any = self.random.usize(0..1 << 20);
        // While there is no manager, nothing else needs to go wrong.
        let Some(manager) = any.checked_rem(self.managers.len()) else { return };
        if self.faults.election && any.is_multiple_of(3) {
            return self.disturb_election(manager, any);
        }
        match kind {
            0..2 => {
                let meanwhile = [0, 0, 1, 3][any % 4];
                self.next_manager = self.script.len() - meanwhile.min(self.script.len());
                self.crash(manager);
            }
            15 => {
                if self.leaders() < 2 {
                    self.start_manager();
                }
            }
            2..4 => {
                let lost = self.net(manager, |net, _| take_any(&mut net.answered, any));
                if let Some(answered) = lost {
                    self.note(&format!("fault    the answer to {} is lost", answered.text));
                    Net::lose(answered);
                }
            }
            4 => {
                let lost = self.net(manager, |net, _| take_any(&mut net.sent, any));
                if let Some(sent) = lost {
                    self.note(&format!("fault    {} does not arrive", sent.text));
                    Net::cut(sent);
                }
            }
            5..7 => {
                let lost = self.net(manager, |net, _| take_any(&mut net.watches, any));
                if let Some(watch) = lost {
                    self.note(&format!("fault    {} is cut", watch.text));
                    watch.cut();
                }
            }
            7 => self.forget(),
            19 => {
                let (step, long) = (self.steps, 5 + any % 200);
                let text = self.net(manager, |net, _| {
                    let at = any % net.answered.len().max(1);
                    let answered = net.answered.get_mut(at)?;
                    answered.held = step + long;
                    Some(format!("fault    the answer to {} is late by {long} steps", answered.text))
                });
                self.note_some(text);
            }
            8..11 => {
                let (step, long) = (self.steps, 5 + any % 200);
                let text = self.net(manager, |net, _| {
                    let at = any % net.watches.len().max(1);
                    let watch = net.watches.get_mut(at)?;
                    watch.held = step + long;
                    Some(format!("fault    {} is behind for {long} steps", watch.text))
                });
                self.note_some(text);
            }
            16 => {
                let node = NODES[any % NODES.len()];
                if !self.find_node(node) {
                    self.note(&format!("fault    {node} is lost"));
                    let now = self.now();
                    self.world.lose(node, &mut self.store, now);
                }
            }
            17..19 => {
                let now = self.now();
                let guests = self.world.guests.iter_mut().filter(|(_, guest)| guest.is_of_vm);
                let mut guests: Vec<_> = guests.collect();
                if guests.is_empty() {
                    return;
                }
                let index = any % guests.len();
                let (pod, guest) = &mut guests[index];
                let (pod, name) = (pod.clone(), guest.pod.name.clone());
                if kind == 17 {
                    guest.power = Power::Down(if any.is_multiple_of(2) { SHUTDOWN } else { "QemuFailed" });
                    self.note(&format!("fault    the guest in the Pod {name} ends by itself"));
                } else if !self.world.lost.contains_key(&*guest.node) {
                    kubelet::fail(&mut self.world, &pod, &mut self.store, now);
                    self.note(&format!("fault    the Pod {name} is evicted"));
                }
            }
            11 => {
                self.skew = SignedDuration::from_mins([-60, -3, 0, 7, 90][any % 5]);
                self.note(&format!("fault    the manager's clock differs by {} min", self.skew.as_mins()));
            }
            _ => {
                let time = Duration::from_millis([20, 300, 1500, 6000, 40_000][any % 5]);
                self.note(&format!("fault    nothing happens for {time:?}"));
                self.go_on(time);
            }
        }
    }

    /// The API server forgets its changes. Watches that are behind begin again.
    fn forget(&mut self) {
        self.store.compacted = self.store.version();
        self.note("fault    the API server forgets all changes");
        for manager in 0..self.managers.len() {
            self.net(manager, |net, store| {
                let (old, new): (Vec<_>, Vec<_>) =
                    net.watches.drain(..).partition(|watch| watch.seen < store.compacted);
                net.watches = new;
                old.into_iter().for_each(Watch::expire);
            });
        }
    }

    /// A lost node is back. Returns whether it was lost.
    fn find_node(&mut self, node: &'static str) -> bool {
        let is_lost = self.world.lost.contains_key(node);
        if is_lost {
            self.note(&format!("world    {node} is back"));
            let now = self.now();
            self.world.find(node, &mut self.store, now);
        }
        is_lost
    }

    fn note_some(&mut self, text: Option<String>) {
        if let Some(text) = text {
            self.note(&text);
        }
    }
}

/// Whether a request, its answer or a watch is about the lease: it is renewed as long as a manager leads.
fn is_of_lease(text: &str) -> bool {
    text.split(' ').nth(1) == Some("Lease")
}

/// Whether a request or its answer is one with which the manager checks a set, or tries again to change an object of a set that can't be changed: VMs that
/// are made while a set is checked may have one.
fn is_look(text: &str) -> bool {
    let mut words = text.split([' ', ':']).skip(1);
    let (kind, name) = (words.next(), words.next());
    text.ends_with("(dry run)")
        || kind == Some("SelfSubjectAccessReview")
        || name.is_some_and(|name| name.ends_with("-fixed"))
}

/// An answer that no state of the API server explains.
fn fault(code: u16, reason: &str) -> Answer {
    Answer::failure(code, reason, "a fault of the simulation", json!({}))
}

/// Takes any of these out, if there is one.
fn take_any<T>(all: &mut Vec<T>, any: usize) -> Option<T> {
    (!all.is_empty()).then(|| all.remove(any % all.len()))
}

/// What can happen next between a manager and the API server.
fn net_choices(manager: usize, net: &mut Net, store: &Store, step: usize) -> Vec<Choice> {
    let mut choices: Vec<Choice> = (0..net.sent.len()).map(|index| Choice::Request(manager, index)).collect();
    let answered = net.answered.iter().enumerate().filter(|(_, answered)| answered.held <= step);
    choices.extend(answered.map(|(index, _)| Choice::Answer(manager, index)));
    let watches = net.watches.iter_mut().enumerate();
    choices.extend(watches.filter_map(|(index, watch)| {
        (watch.held <= step && watch.next(store).is_some()).then_some(Choice::Event(manager, index))
    }));
    choices
}

/// A watch that can say that it has reported everything.
fn bookmark(manager: usize, net: &mut Net, store: &Store, step: usize) -> Option<Choice> {
    let is_behind = |watch: &mut Watch| {
        watch.wants_bookmarks() && watch.held <= step && watch.seen < store.version() && watch.next(store).is_none()
    };
    let index = net.watches.iter_mut().position(is_behind)?;
    Some(Choice::Bookmark(manager, index))
}

fn words(step: &Step) -> String {
    let of = |target: &Target| format!("{} {}", kinds()[target.kind].name, target.name);
    match step {
        Step::Bind(target) => format!("bind {}", of(target)),
        Step::Grow(target) => format!("grow {}", of(target)),
        Step::Start(target) => format!("start {}", of(target)),
        Step::Report(pod) => format!("report {pod}"),
        Step::Refresh(pod) => format!("refresh {pod}"),
        Step::Boot(pod) => format!("boot {pod}"),
        Step::Again(target) => format!("start again {}", of(target)),
        Step::Evict(target) => format!("evict {}", of(target)),
        Step::End(target) => format!("end {}", of(target)),
        Step::Remove(target) => format!("remove {}", of(target)),
        Step::Collect(target) => format!("collect {}", of(target)),
        Step::Orphan(target) => format!("orphan {}", of(target)),
        Step::Release(target) => format!("release {}", of(target)),
    }
}

/// The objects without what differs between two runs: a Pod, for example, is made from the spec at that time.
pub fn end_state(store: &Store) -> BTreeMap<String, Value> {
    let mut state = BTreeMap::new();
    let ignored = ["Event", "NewEvent", "Lease", "Namespace", "Node", "StorageClass", "VmReport"];
    for (target, object) in store.everything() {
        let name = kinds()[target.kind].name;
        if ignored.contains(&name) {
            continue;
        }
        let said = if target.kind == kind("VirtualMachine") { said_of_vm(object) } else { said_of_object(object) };
        state.insert(format!("{name} {}", target.name), said);
    }
    state
}

fn said_of_vm(vm: &Value) -> Value {
    let status = &vm["status"];
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let is_of_history = |condition: &&Value| condition["type"] == "RestartRequired";
    let conditions: BTreeMap<String, Value> = conditions
        .filter(|condition| !is_of_history(condition))
        .map(|condition| {
            let name = condition["type"].as_str().unwrap_or_default().to_owned();
            (name, json!([condition["status"], condition["reason"]]))
        })
        .collect();
    json!({
        "spec": vm["spec"], "conditions": conditions, "phase": status["phase"], "power": status["power"],
        "observed": status["observedGeneration"] == vm["metadata"]["generation"],
    })
}

fn said_of_object(object: &Value) -> Value {
    json!({
        "labels": object["metadata"]["labels"], "owners": object["metadata"]["ownerReferences"].as_array().map(Vec::len),
        "deleting": !object["metadata"]["deletionTimestamp"].is_null(),
        "size": object["spec"]["resources"]["requests"], "phase": object["status"]["phase"],
        "keys": object["data"].as_object().map(|data| data.keys().cloned().collect::<Vec<_>>()),
    })
}
