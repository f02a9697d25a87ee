//! The command lines of the programs that QEMU connects to: passt and swtpm. Pure.

use std::path::Path;

use super::runtime_dir::RuntimeDir;
use crate::{render::command_line::PodLink, runner_config::VmSection};

/// The number of open files that passt needs for itself and for connections.
const PASST_FILES: u64 = 1000;

/// The last port that passt can forward to the guest, at most `desired`. passt needs two open files for each port, and it does not
/// start if it cannot open all of them. `open_files` is the limit of open files; `None`: there is no limit.
pub fn last_port(desired: u16, open_files: Option<u64>) -> u16 {
    let possible = open_files.map_or(u64::MAX, |limit| limit.saturating_sub(PASST_FILES) / 2);
    desired.min(u16::try_from(possible).unwrap_or(u16::MAX)).max(1)
}

/// A user and a group, as numbers.
#[derive(Clone, Copy, Debug)]
pub struct UserAndGroup {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// The ports on which QEMU itself listens.
pub fn own_ports(vm: &VmSection) -> Vec<u16> {
    let display = &vm.display;
    let ports = display.spice.iter().map(|spice| spice.port).chain(display.vnc.iter().map(|vnc| vnc.port));
    ports.filter(|port| *port != 0).collect()
}

/// The arguments of passt (passt(1)). passt gives the guest the Pod's own address, and forwards connections to the ports from 1 to
/// `last_port` to the guest, but not those to the ports `kept`. With `one_off` it ends when QEMU closes the connection. `run_as` is the user
/// that passt runs as.
pub fn passt(kept: &[u16], last_port: u16, run_as: UserAndGroup, link: &PodLink, one_off: bool) -> Vec<String> {
    let ports = kept.iter().fold(format!("1-{last_port}"), |ports, port| format!("{ports},~{port}"));
    let protocol = match link {
        PodLink::Stream(_) => None,
        PodLink::VhostUser(_) => Some("--vhost-user"),
    };
    let words = [Some("--foreground"), one_off.then_some("--one-off"), protocol, Some("--quiet")];
    let mut arguments: Vec<String> = words.into_iter().flatten().map(str::to_owned).collect();
    arguments.extend([
        // As root, passt would become the user nobody by default, for which it needs capabilities. It drops all rights in any case.
        "--runas".into(),
        format!("{}:{}", run_as.uid, run_as.gid),
        "--socket".into(),
        link.socket().display().to_string(),
        // By default passt would forward the guest's connections to its gateway to programs that listen on localhost in the Pod.
        "--no-map-gw".into(),
        "--tcp-ports".into(),
        ports.clone(),
        "--udp-ports".into(),
        ports,
    ]);
    arguments
}

/// The arguments of the TPM emulator (swtpm(8)). It ends when QEMU closes the connection.
pub fn swtpm(state_dir: &Path, runtime: &RuntimeDir) -> Vec<String> {
    vec![
        "socket".into(),
        "--tpm2".into(),
        "--tpmstate".into(),
        format!("dir={}", state_dir.display()),
        "--ctrl".into(),
        format!("type=unixio,path={},mode=0600", runtime.tpm().display()),
        "--terminate".into(),
        "--flags".into(),
        "startup-clear".into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner_config::RunnerConfig;

    fn config(vm: &str) -> RunnerConfig {
        RunnerConfig::parse(&format!("/Runner:\n  namespace: ns1\n  vm:\n    name: vm1\n{vm}")).unwrap()
    }

    /// The arguments with one line for each option and its value.
    fn lines(arguments: &[String]) -> String {
        arguments.join(" ").replace(" --", "\n--")
    }

    #[test]
    fn passt_forwards_all_ports_except_that_of_the_display() {
        let root = UserAndGroup { uid: 0, gid: 0 };
        let link = PodLink::Stream("RUN/passt.sock".into());
        let arguments = |vm: &str| lines(&passt(&own_ports(&config(vm).vm), 9999, root, &link, true));
        insta::assert_snapshot!(arguments(""), @"
        --foreground
        --one-off
        --quiet
        --runas 0:0
        --socket RUN/passt.sock
        --no-map-gw
        --tcp-ports 1-9999
        --udp-ports 1-9999
        ");
        let ports =
            |vm: &str| arguments(vm).lines().filter(|line| line.contains("-ports")).collect::<Vec<_>>().join(" ");
        assert_eq!(
            ports("    display: { vnc: { port: 5905 } }\n"),
            "--tcp-ports 1-9999,~5905 --udp-ports 1-9999,~5905"
        );
        assert_eq!(ports("    display: { spice: { port: 80 } }\n"), "--tcp-ports 1-9999,~80 --udp-ports 1-9999,~80");
    }

    #[test]
    fn the_limit_of_open_files_limits_the_forwarded_ports() {
        assert_eq!(last_port(9999, None), 9999);
        assert_eq!(last_port(9999, Some(1 << 20)), 9999);
        assert_eq!(last_port(u16::MAX, Some(1 << 20)), u16::MAX);
        assert_eq!(last_port(9999, Some(20_000)), 9500);
        assert_eq!(last_port(9999, Some(1024)), 12);
        assert_eq!(last_port(9999, Some(0)), 1);
    }
}
