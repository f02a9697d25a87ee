//! The package of the login agent for guests (deploy/guest-package): it is built and unpacked, and its programs run with a played port, display
//! manager and logind. It needs Debian's dpkg-deb.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, missing_docs, reason = "this is test code")]

use std::{
    fs,
    io::{BufRead, BufReader, Lines, Write},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// The unpacked package in a guest that is a folder.
struct Guest {
    folder: tempfile::TempDir,
}

impl Guest {
    fn new(display_manager: &str) -> Self {
        let guest = Self { folder: tempfile::tempdir().unwrap() };
        let package = guest.path("vmop-agent.deb");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/guest-package/build.sh");
        let status = Command::new(script).args([env!("CARGO_PKG_VERSION")]).arg(&package).status().unwrap();
        assert!(status.success(), "{status}");
        let status = Command::new("dpkg-deb").arg("-x").arg(&package).arg(guest.path("")).status().unwrap();
        assert!(status.success(), "{status}");
        fs::create_dir_all(guest.path("etc/systemd/system")).unwrap();
        let unit = format!("/lib/systemd/system/{display_manager}.service");
        symlink(unit, guest.path("etc/systemd/system/display-manager.service")).unwrap();
        // A display manager that logs in whom its configuration names, and logind, which knows who that is.
        let root = guest.path("").display().to_string();
        guest.program("getent", "case $3 in alice|bob) echo $3:x:1000:1000::/home/$3:/bin/sh ;; root) echo root:x:0:0::/root:/bin/sh ;; *) exit 2 ;; esac");
        let configurations =
            format!("{root}/run/gdm3/custom.conf {root}/etc/*/*.conf.d/*.conf {root}/etc/*.conf.d/*.conf");
        let restart = format!(
            "echo \"$*\" >>{root}/systemctl\ncat {configurations} 2>/dev/null | sed -n 's/^\\(AutomaticLogin\\|User\\|autologin-user\\)=//p' >{root}/user\n\
             ! grep -q bob {root}/user || : >{root}/user"
        );
        guest.program("systemctl", &restart);
        let logind = format!(
            "case $1 in list-sessions) echo 1 100 greeter seat0; echo 2 1000 $(cat {root}/user) seat0 ;; show-session) [ $2 = 1 ] && echo tty || echo x11 ;;\n\
             terminate-session) : >{root}/user ;; esac"
        );
        guest.program("loginctl", &logind);
        fs::write(guest.path("user"), "").unwrap();
        guest
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn program(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path("bin")).unwrap();
        fs::write(self.path("bin").join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(self.path("bin").join(name), PermissionsExt::from_mode(0o755)).unwrap();
    }

    fn start(&self) -> Agent {
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        let mut process = Command::new(self.path("usr/sbin/vmop-agent"))
            .arg("-")
            .env("PATH", path)
            .env("VMOP_AGENT_ROOT", self.path(""))
            .env("VMOP_AGENT_SESSION", self.path("usr/lib/vmop-agent/session"))
            .env("VMOP_AGENT_INTERVAL", "0.1")
            .env("VMOP_AGENT_PAUSE", "0.01")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Agent { port: process.stdin.take(), process, lines }
    }
}

/// A running agent; the test is the runner.
struct Agent {
    process: Child,
    port: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Agent {
    fn says(&mut self, line: &str) {
        assert_eq!(self.lines.next().unwrap().unwrap(), line);
    }

    fn ask(&mut self, request: &str, answer: &str) {
        writeln!(self.port.as_mut().unwrap(), "{request}").unwrap();
        self.says(answer);
    }
}

#[test]
fn the_package_logs_users_in_and_out_with_each_display_manager() {
    for manager in ["gdm3", "sddm", "lightdm"] {
        let guest = Guest::new(manager);
        let mut agent = guest.start();
        agent.says("220 vmop-agent is ready");
        agent.ask("login alice", "201 alice is logged in");
        agent.ask("login alice", "201 alice is logged in");
        let restarts = || fs::read_to_string(guest.path("systemctl")).unwrap_or_default().lines().count();
        assert_eq!(restarts(), 1, "alice's desktop stays as it is");
        agent.ask("logout", "202 no user is logged in");
        assert_eq!(restarts(), 2);
        agent.ask("logout", "202 no user is logged in");
        agent.ask("login root", "502 root is an account of the system");
        agent.ask("login nobody at all", "501 there is no user nobody at all");
        agent.ask("login", "501 the request names no user");
        agent.ask("dance", "500 unknown request");
        agent.ask("login bob", "503 bob can't be logged in: the display manager has not logged in bob within a minute");
        // The user leaves by herself.
        agent.ask("login alice", "201 alice is logged in");
        fs::write(guest.path("user"), "").unwrap();
        agent.says("202 the user has logged out");
        // Nobody is logged in at the next boot without being asked for.
        for file in [
            "run/gdm3/custom.conf",
            "etc/sddm.conf.d/90-vmop-agent.conf",
            "etc/lightdm/lightdm.conf.d/90-vmop-agent.conf",
        ] {
            assert!(!guest.path(file).exists(), "{file}");
        }
        drop(agent.port.take());
        assert!(agent.process.wait().unwrap().success());
    }
}

#[test]
fn a_guest_without_a_display_manager_says_so() {
    let guest = Guest::new("xdm");
    let mut agent = guest.start();
    agent.says("220 vmop-agent is ready");
    let answer =
        "503 alice can't be logged in: the guest has no display manager that vmop-agent knows (GDM, SDDM, LightDM)";
    agent.ask("login alice", answer);
    // The session is somebody else's matter then.
    fs::write(guest.path("usr/lib/vmop-agent/session"), "#!/bin/sh\nexit 0\n").unwrap();
    agent.ask("login alice", "201 alice is logged in");
}

#[test]
fn the_unit_starts_the_agent_when_its_port_appears() {
    let guest = Guest::new("gdm3");
    let text = |name: &str| fs::read_to_string(guest.path(name)).unwrap();
    let unit = text("lib/systemd/system/vmop-agent.service");
    assert!(
        unit.contains("ExecStart=/usr/sbin/vmop-agent\n")
            && unit.contains("BindsTo=dev-virtio\\x2dports-org.jdrupes.vmop_agent.0.device\n")
    );
    let rule = text("lib/udev/rules.d/90-vmop-agent.rules");
    assert!(
        rule.contains("ATTR{name}==\"org.jdrupes.vmop_agent.0\"")
            && rule.contains("SYSTEMD_WANTS}=\"vmop-agent.service\"")
    );
    let template = include_str!("../templates/qemu/standard.yaml.j2");
    assert!(template.contains("name: org.jdrupes.vmop_agent.0"));
}
