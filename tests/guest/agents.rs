//! Agents that are killed and replaced under a guest, as their container is when its image changes.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::Command,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::runner::{RUNNER, Vm, wait_for};

/// When each count of the guest was on the console.
type Counts = Arc<Mutex<Vec<(u64, Instant)>>>;

/// Reads what the guest counts, over the console as a person would join it.
fn follow_counts(vm: &Vm) -> Counts {
    let counts = Counts::default();
    let seen = Arc::clone(&counts);
    let console = BufReader::new(UnixStream::connect(vm.path("run/console.sock")).unwrap());
    thread::spawn(move || {
        for line in console.split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if let Some(count) = line.trim_end().rsplit_once("guest: count ").and_then(|(_, count)| count.parse().ok())
            {
                seen.lock().unwrap().push((count, Instant::now()));
            }
        }
    });
    counts
}

/// What identifies a process: its ID, and when it was started (proc_pid_stat(5), field 22).
fn process(vm: &Vm) -> (u64, String) {
    let pid = vm.machine()["pid"].as_u64().unwrap();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    (pid, stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().to_owned())
}

/// The resident memory of a process in MiB.
pub fn resident(pid: u64) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1024.0
}

/// The largest time, and the one that 99 of 100 do not exceed.
fn worst(mut times: Vec<Duration>) -> String {
    times.sort();
    let most = |percent: usize| times[(times.len() - 1) * percent / 100].as_millis();
    format!("median {} ms, 99 % up to {} ms, at most {} ms", most(50), most(99), most(100))
}

/// `VM_OPERATOR_TEST_AGENT_KILLS` says how many, and `VM_OPERATOR_TEST_OTHER_RUNNER` names another build of the runner, which every second agent
/// is. Times are printed and not compared, because they are those of this computer.
#[test]
fn agents_are_killed_and_replaced_by_another_binary_while_the_guest_counts() {
    let kills = std::env::var("VM_OPERATOR_TEST_AGENT_KILLS").map_or(10, |text| text.parse().unwrap());
    let vm = Vm::new(json!({}), json!({ "count-on-console": true }));
    let other = vm.path("another-runner");
    fs::copy(std::env::var("VM_OPERATOR_TEST_OTHER_RUNNER").unwrap_or(RUNNER.into()), &other).unwrap();
    let binaries = [PathBuf::from(RUNNER), other];
    // Memory is that of the other build.
    let mut machine = vm.start_by(Command::new(&binaries[1]), "machine");
    let agent = vm.start("agent");
    agent.logs("condition=\"Booted\" status=true");
    let counts = follow_counts(&vm);
    let count = || counts.lock().unwrap().len();
    wait_for("counts", || (count() > 20).then_some(()), || machine.state());
    let qemu = process(&vm);
    drop(agent);
    let (mut running, mut booted, mut denied) = (Vec::new(), Vec::new(), 0);
    for number in 0..kills {
        let begin = Instant::now();
        let agent = vm.start_by(Command::new(&binaries[number % 2]), "agent");
        agent.logs("condition=\"Running\" status=true");
        running.push(begin.elapsed());
        agent.logs("condition=\"Booted\" status=true");
        booted.push(begin.elapsed());
        let log = agent.log();
        assert!(!log.contains("condition=\"Running\" status=false"), "{log}");
        denied += usize::from(log.contains("condition=\"Booted\" status=false"));
        assert_eq!(process(&vm), qemu, "the same QEMU");
        // The next one is killed in some other moment.
        let counted = count() + number % 5;
        wait_for("counts", || (count() > counted).then_some(()), || machine.state());
    }
    let agent = vm.start_by(Command::new(&binaries[1]), "agent");
    agent.logs("condition=\"Booted\" status=true");
    let memory = [resident(machine.child.id().into()), resident(agent.child.id().into())];
    let counts = std::mem::take(&mut *counts.lock().unwrap());
    assert!(counts.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1), "the guest lost a line");
    // The first lines are those of before, which come at once.
    let gaps = counts.windows(2).skip(20).map(|pair| pair[1].1 - pair[0].1).collect();
    println!("{kills} agents killed; {} counts", counts.len());
    println!("| | |\n|---|---|");
    println!("| between two counts of the guest | {} |", worst(gaps));
    println!("| from an agent's start to Running in its status | {} |", worst(running));
    println!("| ... to Booted | {} ({denied} said before that the guest had not booted) |", worst(booted));
    println!("| memory of the machine role, of the agent | {:.1} MiB, {:.1} MiB |", memory[0], memory[1]);
    machine.signal("TERM");
    machine.ends_well("PoweredDown");
}
