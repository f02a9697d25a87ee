use proptest::{collection::vec, prelude::*};
use serde_json::json;

use super::{played::PlayedQemu, *};
use crate::render::command_line::Medium;
use crate::runner::{changes::WantedDisk, config::Password, operation::DisplayPassword, qmp};

/// Why the agent stops in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The connection breaks, or the agent is killed, before the action is carried out.
    Before,
    /// The same after it: the answer is lost.
    After,
    /// QEMU does not answer in time, but does it. Files and the guest agent have done it or not.
    Late,
    /// QEMU ends, and is started again.
    End,
}

/// The agent has stopped.
#[derive(Debug)]
struct Stopped;

/// An agent with QEMU and the files that stay.
struct World {
    qemu: PlayedQemu,
    file: Orders,
    desired: Desired,
    operations: Operations,
    now: Instant,
    /// QEMU's guest agent answers, unless the guest has none.
    has_guest_agent: bool,
    reboots: u32,
    /// The CDs about which the machine role was asked, and those that it refuses.
    asked: Option<Vec<WantedCd>>,
    refused_cds: Vec<&'static str>,
    /// The files can't be written.
    is_full: bool,
    /// What the agent has told people.
    told: Vec<String>,
    /// The number of actions, without questions that change nothing.
    actions: usize,
    fault: Option<(usize, Fault)>,
    hit: Option<Action>,
}

fn desired() -> Desired {
    Desired {
        cpus: 1,
        ram: 1 << 30,
        password: password("s", "never"),
        cds: cds(["", ""]),
        disks: disk(1 << 30),
        reset_counter: 3,
        reboot_counter: 5,
        paused: false,
    }
}

fn password(secret: &str, expiry: &str) -> Option<DisplayPassword> {
    let password = Password { secret: secret.into(), expiry: expiry.into() };
    Some(DisplayPassword { protocol: "vnc", password })
}

fn cds(texts: [&str; 2]) -> Vec<WantedCd> {
    let cd = |(slot, text): (u32, &str)| WantedCd { slot, drive: format!("drive{slot}"), text: text.into() };
    (0..).zip(texts).map(cd).collect()
}

fn disk(bytes: u64) -> Vec<WantedDisk> {
    vec![WantedDisk { slot: 0, disk: "system-disk".into(), bytes }]
}

fn orders(desired: &Desired, start: &str) -> Orders {
    Orders {
        start: start.into(),
        counter: desired.reset_counter,
        reboots: desired.reboot_counter,
        paused: false,
        is_in_doubt: false,
    }
}

fn vm() -> VmSection {
    let drives = json!([{ "type": "raw", "resource": "/dev/system-disk" }]);
    serde_json::from_value(json!({ "name": "apple", "drives": drives, "maximumRam": "4 GiB" })).unwrap()
}

impl World {
    /// A QEMU that was started with a configuration, and an agent that has done nothing yet.
    fn new(desired: Desired) -> Self {
        let file = orders(&desired, "s-1");
        let operations = Operations::new(vm(), CpuRule::Any, file.clone(), desired.clone());
        Self {
            qemu: PlayedQemu::started(),
            file,
            desired,
            operations,
            now: Instant::now(),
            has_guest_agent: true,
            reboots: 0,
            asked: None,
            refused_cds: Vec::new(),
            is_full: false,
            told: Vec::new(),
            actions: 0,
            fault: None,
            hit: None,
        }
    }

    /// One in which the guest runs as a configuration wants it.
    fn running(desired: Desired) -> Self {
        let mut world = Self::new(desired);
        world.connect().unwrap();
        (world.qemu.done, world.told, world.actions) = (Vec::new(), Vec::new(), 0);
        world
    }

    /// An agent that knows only what QEMU and the files say.
    fn connect(&mut self) -> Result<(), Stopped> {
        self.qemu.events.clear();
        self.asked = None;
        self.operations = Operations::new(vm(), CpuRule::Any, self.file.clone(), self.desired.clone());
        self.input(Input::Connected)?;
        if self.has_guest_agent && self.qemu.status == "running" { self.input(Input::GuestAgent) } else { Ok(()) }
    }

    /// QEMU is started again.
    fn start(&mut self) -> Result<(), Stopped> {
        self.qemu = PlayedQemu::started();
        self.file = orders(&self.desired, "s-2");
        self.connect()
    }

    fn want(&mut self, desired: &Desired) -> Result<(), Stopped> {
        self.desired = desired.clone();
        self.input(Input::Configuration(desired.clone()))
    }

    /// Hands in what QEMU has reported.
    fn events(&mut self) -> Result<(), Stopped> {
        while let Some(event) = self.qemu.events.pop_front() {
            self.input(Input::Event(qmp::event(event)))?;
        }
        Ok(())
    }

    fn after(&mut self, time: Duration) {
        self.now += time;
        if self.operations.wake_at().is_some_and(|at| at <= self.now) {
            self.input(Input::Timer).unwrap();
        }
    }

    /// Hands in an input and whatever follows.
    fn input(&mut self, input: Input) -> Result<(), Stopped> {
        let mut inputs = VecDeque::from([input]);
        let mut count = 0;
        while let Some(input) = inputs.pop_front() {
            let mut next = self.operations.next(input, self.now);
            while let Some(action) = next {
                count += 1;
                assert!(count < 500, "it does not end: {action:?}");
                let answer = self.carry_out(action)?;
                next = self.operations.next(Input::Answer(answer), self.now);
            }
            inputs.extend(self.qemu.events.pop_front().map(|event| Input::Event(qmp::event(event))));
            if inputs.is_empty()
                && let Some(cds) = self.asked.take()
            {
                let is_refused = |cd: &WantedCd| self.refused_cds.contains(&cd.text.as_str());
                let answer = |cd: WantedCd| {
                    if is_refused(&cd) { Err("it is not there".to_owned()) } else { Ok(Medium::File(cd.text)) }
                };
                inputs.push_back(Input::Media(cds.into_iter().map(answer).collect()));
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, action: Action) -> Result<Result<Value, Failure>, Stopped> {
        let is_question = match &action {
            Action::Send(command) => LOOK.contains(command),
            Action::AskMedia(_) | Action::Ended(..) => true,
            Action::AskGuest | Action::Note(_) => false,
        };
        let fault = self.fault.filter(|(at, _)| !is_question && *at == self.actions).map(|(_, fault)| fault);
        self.actions += usize::from(!is_question);
        if fault.is_some() {
            self.hit = Some(action.clone());
        }
        if matches!(fault, Some(Fault::Before | Fault::End)) {
            return Err(Stopped);
        }
        let refused = |what: &str, reason: String| Failure::Refused { what: what.into(), reason };
        let answer = match &action {
            Action::Send(command) => self.qemu.execute(&json!(command)).map_err(|reason| refused("QEMU", reason)),
            Action::AskGuest => {
                self.reboots += 1;
                self.qemu.reset();
                Ok(Value::Null)
            }
            Action::AskMedia(cds) => {
                self.asked = Some(cds.clone());
                Ok(Value::Null)
            }
            Action::Note(_) if self.is_full => Err(refused("cannot note it", "no space".into())),
            Action::Note(orders) => {
                self.file = orders.clone();
                Ok(Value::Null)
            }
            Action::Ended(operation, outcome) => {
                let outcome = outcome.as_ref().map_or_else(ToString::to_string, |()| "done".into());
                self.told.push(format!("{operation:?}: {outcome}"));
                Ok(Value::Null)
            }
        };
        match fault {
            Some(Fault::After) => Err(Stopped),
            Some(Fault::Late) if matches!(action, Action::Send(_)) => {
                Ok(Err(Failure::Unanswered("QEMU did not answer in time".into())))
            }
            Some(Fault::Before | Fault::Late | Fault::End) | None => Ok(answer),
        }
    }

    /// Whether QEMU is as the configuration wants it.
    fn check(&self, at: &str) {
        let Desired { cpus, ram, password, cds, disks, reset_counter: _, reboot_counter: _, paused } = &self.desired;
        let Password { secret, expiry } = &password.as_ref().unwrap().password;
        assert_eq!(self.qemu.present(), *cpus, "{at}");
        assert_eq!(self.qemu.balloon, *ram, "{at}");
        assert_eq!(self.qemu.password, Some((secret.clone(), expiry.clone())), "{at}");
        assert_eq!(self.qemu.status == "running", !paused, "{at}: {}", self.qemu.status);
        assert_eq!(self.operations.executes(), Some(!paused), "{at}");
        for WantedCd { slot, text, .. } in cds {
            let file = self.qemu.file(&DeviceId::Cd(*slot).to_string()).unwrap_or_default();
            assert_eq!(file, text, "{at}");
        }
        assert!(disks.iter().all(|disk| self.qemu.disk >= disk.bytes), "{at}: {}", self.qemu.disk);
        assert!(self.qemu.was_open, "{at}: the guest ran before its display had a password");
        assert_eq!(self.operations.refused(), [""; 0], "{at}");
    }
}

/// Each operation of the agent: its name, the configuration before it, and the one that asks for it.
fn cases() -> Vec<(&'static str, Desired, Desired)> {
    let with_cds = |texts| Desired { cds: cds(texts), ..desired() };
    let paused = Desired { paused: true, ..desired() };
    vec![
        ("more CPUs", desired(), Desired { cpus: 4, ..desired() }),
        ("fewer CPUs", Desired { cpus: 4, ..desired() }, Desired { cpus: 2, ..desired() }),
        ("memory", desired(), Desired { ram: 1 << 29, ..desired() }),
        ("password", desired(), Desired { password: password("other", "4711"), ..desired() }),
        ("CD into an empty drive", desired(), with_cds(["/a.iso", ""])),
        ("another CD", with_cds(["/a.iso", "/b.iso"]), with_cds(["/a.iso", "/c.iso"])),
        ("no CD", with_cds(["/a.iso", "/b.iso"]), with_cds(["", "/b.iso"])),
        ("a larger disk", desired(), Desired { disks: disk(2 << 30), ..desired() }),
        ("pause", desired(), paused.clone()),
        ("go on", paused.clone(), desired()),
        ("reset", desired(), Desired { reset_counter: 4, ..desired() }),
        ("reset while paused", paused.clone(), Desired { reset_counter: 4, ..paused }),
        ("reboot", desired(), Desired { reboot_counter: 6, ..desired() }),
        (
            "all at once",
            with_cds(["/a.iso", ""]),
            Desired {
                cpus: 3,
                ram: 1 << 28,
                password: password("other", "never"),
                cds: cds(["/b.iso", "/c.iso"]),
                disks: disk(3 << 30),
                reset_counter: 4,
                reboot_counter: 6,
                paused: true,
            },
        ),
    ]
}

#[test]
fn a_guest_begins_to_run_when_everything_is_ready() {
    let wanted = Desired { cpus: 2, cds: cds(["/a.iso", ""]), ..desired() };
    let mut world = World::new(wanted.clone());
    world.connect().unwrap();
    world.check("start");
    let at = |name: &str| world.qemu.done.iter().position(|done| done == name).unwrap();
    assert!(at("device_add") < at("cont") && at("balloon") < at("cont") && at("expire_password") < at("cont"));
    let paused = Desired { paused: true, ..wanted };
    let mut world = World::new(paused);
    world.connect().unwrap();
    world.check("start paused");
}

/// (a) a lost answer, (c) a killed agent, (d) a QEMU that ends in the middle: at each step of each operation.
#[test]
fn an_operation_is_carried_out_whatever_happens_at_whichever_step() {
    let mut hits = 0;
    for (name, before, wanted) in cases() {
        for fault in [Fault::Before, Fault::After, Fault::Late, Fault::End] {
            for at in 0.. {
                let place = format!("{name}, {fault:?} at {at}");
                let mut world = World::running(before.clone());
                world.check(&place);
                world.fault = Some((at, fault));
                let outcome = world.want(&wanted);
                world.fault = None;
                let Some(hit) = world.hit.take() else {
                    outcome.unwrap();
                    world.check(&place);
                    break;
                };
                hits += 1;
                let place = format!("{place}: {hit:?}");
                let is_new = match (fault, outcome) {
                    (Fault::End, Err(_)) => {
                        world.start().unwrap();
                        true
                    }
                    (_, Err(_)) => {
                        world.connect().unwrap();
                        false
                    }
                    // What may be done is not done again before the configuration changes, or is read anew.
                    (_, Ok(())) => {
                        world.want(&wanted).unwrap();
                        false
                    }
                };
                world.check(&place);
                // What is asked for once is done once. In doubt it is not done: QEMU can't say whether it was.
                let is_reset = wanted.reset_counter > before.reset_counter && !is_new;
                let is_rebooted = wanted.reboot_counter > before.reboot_counter && !is_reset && !is_new;
                let is_in_doubt = match hit {
                    Action::Note(Orders { counter, reboots, .. }) => {
                        let is_noted = counter > before.reset_counter || reboots > before.reboot_counter;
                        fault == Fault::After && is_noted && world.qemu.resets == 0
                    }
                    Action::Send(Command::SystemReset) | Action::AskGuest => fault == Fault::Before,
                    Action::Send(_) | Action::AskMedia(_) | Action::Ended(..) => false,
                };
                let expected = u32::from((is_reset || is_rebooted) && !is_in_doubt);
                assert_eq!(world.qemu.resets, expected, "{place}");
            }
        }
    }
    assert!(hits > 100, "{hits}");
}

/// What was to be done is not wanted any more, and it is not known whether it was done.
#[test]
fn an_operation_in_doubt_is_taken_back() {
    for (name, before, wanted) in cases() {
        for fault in [Fault::Before, Fault::After, Fault::Late] {
            for at in 0.. {
                let mut world = World::running(before.clone());
                world.fault = Some((at, fault));
                let outcome = world.want(&wanted);
                world.fault = None;
                let Some(hit) = world.hit.take() else { break };
                if outcome.is_ok() {
                    world.want(&before).unwrap();
                } else {
                    world.desired = before.clone();
                    world.connect().unwrap();
                }
                world.check(&format!("{name}, {fault:?} at {at}: {hit:?}"));
            }
        }
    }
}

#[test]
fn what_is_as_it_should_be_is_left_alone() {
    for (name, before, wanted) in cases() {
        let mut world = World::running(before);
        world.want(&wanted).unwrap();
        world.qemu.done.clear();
        world.want(&wanted).unwrap();
        assert_eq!(world.qemu.done, [""; 0], "{name}");
        // Another agent can't know what QEMU does not say, and says it once more.
        world.connect().unwrap();
        assert_eq!(world.qemu.done, ["balloon", "set_password", "expire_password"], "{name}");
    }
}

#[test]
fn a_cd_in_a_locked_drive_waits_for_the_tray_and_nothing_waits_for_it() {
    let mut world = World::running(Desired { cds: cds(["/a.iso", ""]), ..desired() });
    world.qemu.drives.get_mut("cd0").unwrap().is_locked = true;
    let wanted = Desired { cds: cds(["/b.iso", "/c.iso"]), ram: 1 << 29, reset_counter: 4, ..desired() };
    world.want(&wanted).unwrap();
    let refused = ["/b.iso can't be inserted into the CD drive drive0: the tray is not open"];
    assert_eq!(world.operations.refused(), refused);
    assert_eq!(world.qemu.file("cd0"), Some("/a.iso"));
    assert_eq!((world.qemu.file("cd1"), world.qemu.balloon, world.qemu.resets), (Some("/c.iso"), 1 << 29, 1));
    assert_eq!(world.qemu.nodes.len(), 2, "the CD that waits is not open");
    assert_eq!(world.operations.wake_at(), None, "a guest may lock a tray for months");
    // (b) It comes late: another agent runs, and something else was done.
    world.connect().unwrap();
    assert_eq!(world.operations.refused(), refused);
    world.want(&Desired { ram: 1 << 28, ..wanted }).unwrap();
    world.qemu.open("cd1");
    world.events().unwrap();
    assert_eq!(world.operations.refused(), refused, "it was another tray");
    world.qemu.open("cd0");
    world.events().unwrap();
    world.check("opened");
    assert_eq!(world.qemu.nodes.len(), 2);
}

#[test]
fn a_cpu_that_the_guest_does_not_release_is_given_up_and_may_come_late() {
    let mut world = World::running(Desired { cpus: 3, ..desired() });
    world.qemu.releases = false;
    let wanted = Desired { cpus: 2, ram: 1 << 29, ..desired() };
    world.want(&wanted).unwrap();
    assert_eq!(world.qemu.done, ["device_del", "balloon"], "the memory does not wait for the CPU");
    assert_eq!(world.told, ["Balloon(536870912): done"]);
    world.after(RELEASE / 2);
    world.want(&Desired { ram: 1 << 28, ..wanted.clone() }).unwrap();
    assert_eq!(world.qemu.done, ["device_del", "balloon", "balloon"], "it is still being asked");
    world.after(RELEASE / 2);
    assert_eq!(world.told.last().unwrap(), "Unplug { id: \"vmop-cpu-2\" }: the guest has not released it in 60 s");
    assert_eq!((world.operations.cpus(), world.operations.wake_at()), (3, None));
    world.qemu.release("vmop-cpu-2");
    world.events().unwrap();
    assert_eq!(world.operations.cpus(), 2);
    assert_eq!(world.qemu.done.iter().filter(|name| *name == "device_del").count(), 1);
}

#[test]
fn what_qemu_refuses_is_tried_again_when_the_configuration_changes() {
    let mut world = World::running(desired());
    world.qemu.refuses = vec!["balloon", "blockdev-insert-medium", "stop"];
    let wanted = Desired { ram: 1 << 29, cds: cds(["/a.iso", ""]), paused: true, ..desired() };
    world.want(&wanted).unwrap();
    let refused = [
        "the guest can't be paused: no stop here",
        "/a.iso can't be inserted into the CD drive drive0: no blockdev-insert-medium here",
    ];
    assert_eq!(world.operations.refused(), refused);
    assert!(world.qemu.nodes.is_empty(), "what was opened for it is closed");
    let told = world.told.len();
    for _ in 0..3 {
        world.qemu.event("RTC_CHANGE", &json!({}));
        world.input(Input::Event(Event::BalloonChange { actual: 1 })).unwrap();
        world.input(Input::GuestAgent).unwrap();
    }
    assert_eq!(world.told.len(), told);
    world.qemu.refuses.clear();
    world.want(&wanted).unwrap();
    world.check("allowed");
}

#[test]
fn a_reset_that_cannot_be_noted_or_is_refused_is_not_carried_out() {
    let wanted = Desired { reset_counter: 4, reboot_counter: 6, ..desired() };
    let mut world = World::running(desired());
    world.is_full = true;
    world.want(&wanted).unwrap();
    assert_eq!((world.qemu.resets, world.told.as_slice()), (0, &["Reset: cannot note it: no space".to_owned()][..]));
    world.is_full = false;
    world.qemu.refuses = vec!["system_reset"];
    world.want(&wanted).unwrap();
    assert_eq!((world.qemu.resets, world.file.counter), (0, 3), "it is not noted as carried out");
    world.qemu.refuses.clear();
    world.want(&wanted).unwrap();
    // The guest has booted anew, so it needs no reboot.
    assert_eq!((world.qemu.resets, world.reboots), (1, 0));
    assert_eq!(world.file, Orders { counter: 4, reboots: 6, ..orders(&desired(), "s-1") });
}

#[test]
fn a_reboot_waits_for_the_guest_agent_and_for_a_guest_that_executes() {
    let wanted = Desired { reboot_counter: 6, ..desired() };
    let mut world = World::running(desired());
    world.has_guest_agent = false;
    world.connect().unwrap();
    world.want(&wanted).unwrap();
    assert!(world.operations.refused()[0].contains("guest agent does not answer"));
    world.qemu.set_status("paused");
    world.events().unwrap();
    world.input(Input::GuestAgent).unwrap();
    assert!(world.operations.refused()[0].contains("the guest is paused"), "{:?}", world.operations.refused());
    assert_eq!(world.reboots, 0);
    world.qemu.set_status("running");
    world.events().unwrap();
    assert_eq!((world.reboots, world.file.reboots), (1, 6));
    // It was taken back, and is a new order when it comes again.
    world.want(&desired()).unwrap();
    assert_eq!(world.file.reboots, 5);
    world.input(Input::GuestAgent).unwrap();
    world.want(&wanted).unwrap();
    assert_eq!(world.reboots, 2);
}

#[test]
fn a_guest_whose_disk_is_full_is_paused_when_the_disk_is_mended() {
    let mut world = World::running(desired());
    world.qemu.set_status("io-error");
    world.events().unwrap();
    assert_eq!(world.operations.failed_disks().len(), 1);
    assert_eq!(world.operations.executes(), Some(true), "nobody wanted to stop it");
    world.want(&Desired { paused: true, ..desired() }).unwrap();
    assert_eq!(world.qemu.done, [""; 0]);
    // The machine role tries, and the disk is still full.
    for status in ["running", "io-error", "running"] {
        world.qemu.set_status(status);
        world.events().unwrap();
    }
    world.after(DISK_IS_MENDED / 2);
    assert_eq!((world.operations.failed_disks().len(), world.qemu.status), (1, "running"));
    world.after(DISK_IS_MENDED / 2);
    assert_eq!((world.operations.failed_disks().len(), world.qemu.status), (0, "paused"));
    world.check("mended");
}

#[test]
fn a_guest_that_is_reset_goes_on_after_a_panic_and_not_if_somebody_has_paused_it() {
    let reset = |world: &mut World| {
        world.qemu.reset();
        world.input(Input::Connected).unwrap();
    };
    let mut world = World::running(desired());
    for _ in 0..2 {
        world.qemu.set_status("guest-panicked");
        world.events().unwrap();
        assert_eq!(world.operations.panic(), Some(Panic::Kernel));
        reset(&mut world);
        world.check("reset after a panic");
    }
    // With `vm-runner ctl pause`.
    world.qemu.set_status("paused");
    world.events().unwrap();
    reset(&mut world);
    world.want(&Desired { ram: 1 << 29, ..desired() }).unwrap();
    assert_eq!(world.qemu.status, "prelaunch");
    // As the spec has it, also with another agent.
    let mut world = World::running(Desired { paused: true, ..desired() });
    reset(&mut world);
    world.connect().unwrap();
    assert_eq!(world.qemu.status, "prelaunch");
    world.want(&desired()).unwrap();
    world.check("it may go on");
}

#[test]
fn nothing_is_decided_as_long_as_qemu_says_nothing() {
    let mut world = World::new(desired());
    world.qemu.refuses = vec!["query-block"];
    world.connect().unwrap();
    assert_eq!((world.qemu.done.as_slice(), world.qemu.status), (&[][..], "prelaunch"));
    world.qemu.refuses = vec!["query-hotpluggable-cpus", "query-balloon", "balloon"];
    world.after(LOOK_AGAIN);
    assert_eq!((world.operations.cpus(), world.operations.memory()), (0, 4 << 30), "a custom QEMU template");
    assert_eq!(world.qemu.status, "running");
}

#[test]
fn a_cd_that_the_machine_role_refuses_is_asked_about_again() {
    let mut world = World::running(desired());
    world.refused_cds = vec!["/a.iso"];
    let wanted = Desired { cds: cds(["/a.iso", "/b.iso"]), reset_counter: 4, ..desired() };
    world.want(&wanted).unwrap();
    assert_eq!(world.operations.refused(), ["/a.iso can't be inserted into the CD drive drive0: it is not there"]);
    assert_eq!((world.qemu.file("cd1"), world.qemu.resets), (Some("/b.iso"), 1));
    world.after(MEDIA_AGAIN);
    assert!(world.operations.wake_at().is_some(), "and again");
    world.refused_cds.clear();
    world.after(MEDIA_AGAIN);
    world.check("it is there");
    assert_eq!(world.operations.wake_at(), None);
}

#[test]
fn a_disk_that_qemu_does_not_make_larger_is_said_and_tried_again() {
    let mut world = World::running(desired());
    world.qemu.refuses = vec!["block_resize"];
    let larger = Desired { disks: disk(2 << 30), ..desired() };
    world.want(&larger).unwrap();
    let refused =
        "the disk system-disk can't grow to 2Gi while the guest runs, but at its next start: no block_resize here";
    assert_eq!(world.operations.refused(), [refused]);
    world.after(GROW_AGAIN);
    assert_eq!((world.operations.refused(), world.qemu.disk), (vec![refused.to_owned()], 1 << 30));
    world.qemu.refuses.clear();
    world.after(GROW_AGAIN);
    world.check("later");
    assert_eq!(world.operations.wake_at(), None);
}

/// What happens to a VM.
#[derive(Clone, Debug)]
enum Happening {
    Want(Desired),
    /// The guest locks the tray of its first drive, or opens it.
    Lock,
    Open,
    /// The guest does not release its CPUs any more, or does.
    Release(bool),
    /// QEMU, the machine role or a person stops the guest or lets it go on.
    Status(&'static str),
    /// The machine role or a person resets it.
    Reset,
    /// The agent or QEMU ends, at the next action but some.
    Fault(usize, Fault),
    Time(u64),
}

fn a_configuration() -> impl Strategy<Value = Desired> {
    let text = || prop::sample::select(vec!["", "/a.iso", "/b.iso"]);
    let secret = prop::sample::select(vec!["a", "b"]);
    (1..=4_usize, 1..5_u64, 1..5_u64, secret, [text(), text()], 3..6_u64, 5..8_u64, any::<bool>()).prop_map(
        |(cpus, quarters, size, secret, texts, reset_counter, reboot_counter, paused)| {
            let (password, cds, disks) = (password(secret, "never"), cds(texts), disk(size << 30));
            Desired { cpus, ram: quarters << 28, password, cds, disks, reset_counter, reboot_counter, paused }
        },
    )
}

fn happening() -> impl Strategy<Value = Happening> {
    let fault = prop::sample::select(vec![Fault::Before, Fault::After, Fault::Late, Fault::End]);
    let status = prop::sample::select(vec!["running", "paused", "io-error", "guest-panicked"]);
    prop_oneof![
        4 => a_configuration().prop_map(Happening::Want),
        1 => Just(Happening::Lock),
        1 => Just(Happening::Open),
        1 => any::<bool>().prop_map(Happening::Release),
        2 => status.prop_map(Happening::Status),
        1 => Just(Happening::Reset),
        2 => (0..12_usize, fault).prop_map(|(at, fault)| Happening::Fault(at, fault)),
        1 => (0..90_u64).prop_map(Happening::Time),
    ]
}

impl World {
    fn happen(&mut self, happening: Happening) -> Result<(), Stopped> {
        match happening {
            Happening::Want(desired) => self.want(&desired)?,
            Happening::Lock => {
                let drive = self.qemu.drives.get_mut("cd0").unwrap();
                drive.is_locked = !drive.is_open;
            }
            Happening::Open => self.qemu.open("cd0"),
            Happening::Release(releases) => self.qemu.releases = releases,
            Happening::Status(status) => self.qemu.set_status(status),
            Happening::Reset => self.qemu.reset(),
            Happening::Fault(at, fault) => self.fault = Some((self.actions + at, fault)),
            Happening::Time(seconds) => {
                self.now += Duration::from_secs(seconds);
                if self.operations.wake_at().is_some_and(|at| at <= self.now) {
                    self.input(Input::Timer)?;
                }
            }
        }
        self.events()
    }
}

impl World {
    /// Lets all this happen, and the agent or QEMU start again when they end.
    fn live(&mut self, happenings: Vec<Happening>, last: &Desired) {
        for happening in happenings {
            if self.happen(happening).is_err() {
                match self.fault.take() {
                    Some((_, Fault::End)) => self.start().unwrap(),
                    _ => self.connect().unwrap(),
                }
            }
        }
        // In the end the guest does its part.
        self.fault = None;
        self.qemu.releases = true;
        self.qemu.open("cd0");
        self.events().unwrap();
        self.after(RELEASE);
        self.want(last).unwrap();
    }
}

proptest! {
    #[test]
    fn whatever_happens_qemu_becomes_as_the_configuration_wants_it(
        happenings in vec(happening(), 1..30), last in a_configuration()
    ) {
        let mut world = World::running(desired());
        world.live(happenings, &last);
        prop_assert_eq!(world.qemu.present(), last.cpus);
        prop_assert_eq!(world.qemu.balloon, last.ram);
        prop_assert!(world.qemu.disk >= last.disks[0].bytes);
        let Password { secret, expiry } = last.password.unwrap().password;
        prop_assert_eq!(world.qemu.password.clone(), Some((secret, expiry)));
        for WantedCd { slot, text, .. } in &last.cds {
            prop_assert_eq!(world.qemu.file(&DeviceId::Cd(*slot).to_string()).unwrap_or_default(), text);
        }
        prop_assert_eq!(world.file.counter, last.reset_counter);
        prop_assert!(world.qemu.was_open);
    }

    /// Where nobody but the agent stops the guest, it executes as the configuration says.
    #[test]
    fn a_guest_executes_if_nobody_wants_it_paused(happenings in vec(happening(), 1..30), last in a_configuration()) {
        let of_others = |happening: &Happening| matches!(happening, Happening::Status(_) | Happening::Reset);
        let happenings = happenings.into_iter().filter(|happening| !of_others(happening)).collect();
        let mut world = World::running(desired());
        world.live(happenings, &last);
        prop_assert_eq!(world.qemu.status == "running", !last.paused);
        prop_assert_eq!(world.operations.executes(), Some(!last.paused));
    }
}
