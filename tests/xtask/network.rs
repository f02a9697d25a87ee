//! The cable between the machine and the cluster's network namespace.

use std::net::IpAddr;
use std::process::Command;

use anyhow::{Result, bail};

use crate::tools::{run, run_raw};

/// Where the addresses of clusters are from.
pub const RANGE: &str = "198.18.0.0/15";

/// The addresses of one cluster, out of the range that is set aside for tests of networks (RFC 2544): it is on no
/// real network.
#[derive(Clone, Copy)]
pub struct Network {
    number: u8,
}

impl Network {
    /// Connects the network namespace of a process. The name of the interface is what keeps two clusters apart: the
    /// kernel gives it to only one. It goes when the namespace goes.
    pub fn connect(pid: u32) -> Result<Self> {
        let mut refusal = String::new();
        for number in 0..=250 {
            let network = Self { number };
            if !is_free(&network.pods())? || !is_free(&network.cable())? {
                continue;
            }
            let link = network.link();
            let pid = pid.to_string();
            let made = run_raw(
                Command::new("ip").args(["link", "add", &link, "type", "veth", "peer", "name", &link, "netns", &pid]),
            )?;
            if !made.status.success() {
                refusal = String::from_utf8_lossy(&made.stderr).trim().to_owned();
                if refusal.contains("exists") {
                    continue;
                }
                break;
            }
            let inside = ["--target", &pid, "--net", "ip"];
            run(Command::new("ip").args(["addr", "add", &format!("198.18.{number}.1/30"), "dev", &link]))?;
            run(Command::new("ip").args(["link", "set", &link, "up"]))?;
            run(Command::new("nsenter").args(inside).args([
                "addr",
                "add",
                &format!("{}/30", network.address()),
                "dev",
                &link,
            ]))?;
            run(Command::new("nsenter").args(inside).args(["link", "set", &link, "up"]))?;
            // Tests and people may speak to Pods.
            run(Command::new("ip").args(["route", "add", &network.pods(), "via", &network.address().to_string()]))?;
            return Ok(network);
        }
        bail!("no network for the cluster: all of {RANGE} is in use, or `ip link add` does not work here: {refusal}")
    }

    /// The interface's name, on both ends.
    pub fn link(self) -> String {
        format!("vmop{}", self.number)
    }

    /// The control group above the containers.
    pub fn cgroup(self) -> String {
        format!("vmop{}", self.number)
    }

    /// Where the cluster is reached.
    pub fn address(self) -> IpAddr {
        IpAddr::from([198, 18, self.number, 2])
    }

    /// The subnet of the Pods.
    pub fn pods(self) -> String {
        format!("198.19.{}.0/24", self.number)
    }

    fn cable(self) -> String {
        format!("198.18.{}.0/30", self.number)
    }
}

fn is_free(subnet: &str) -> Result<bool> {
    Ok(run(Command::new("ip").args(["-4", "route", "show", "root", subnet]))?.trim().is_empty())
}
