//! What the agent changes on the running machine: the wanted state and the machine's own go in, commands come out. Pure.

use serde_json::{Map, Value};

use super::config::{Configuration, Password};

/// What the configuration wants of a running machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// CPUs.
    pub cpus: usize,
    /// Memory in bytes.
    pub ram: u64,
    /// The display's protocol (`spice` or `vnc`) and password.
    pub password: Option<(&'static str, Password)>,
    /// When it grows, the machine is reset.
    pub reset_counter: u64,
}

impl From<&Configuration> for Wanted {
    fn from(Configuration { config, password }: &Configuration) -> Self {
        let vm = &config.vm;
        let protocol = if vm.display.vnc.is_some() {
            Some("vnc")
        } else if vm.display.spice.is_some() {
            Some("spice")
        } else {
            None
        };
        Self {
            cpus: usize::try_from(vm.current_cpus).unwrap_or(usize::MAX),
            ram: vm.current_ram.as_ref().unwrap_or(&vm.maximum_ram).bytes(),
            password: protocol.zip(password.clone()),
            reset_counter: config.reset_counter,
        }
    }
}

/// A place for a CPU, as `query-hotpluggable-cpus` tells.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// The CPU's type.
    pub type_: String,
    /// Where it is: socket, die, core, thread.
    pub properties: Map<String, Value>,
    /// The CPU in it, as a path in QEMU's object tree.
    pub occupant: Option<String>,
}

/// The machine, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Places for CPUs.
    pub slots: Vec<Slot>,
    /// The memory that the guest was told to have; `None`: not told by this agent.
    pub ram: Option<u64>,
    /// The password that was set by this agent.
    pub password: Option<Password>,
    /// The counter as it was when this agent saw it first, or reset the machine last.
    pub reset_counter: Option<u64>,
}

/// A command to QEMU.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// `device_add` of a CPU.
    Plug {
        /// The CPU's name.
        id: String,
        /// Where.
        slot: Slot,
    },
    /// `device_del` of a CPU. The guest has to agree, so this is a request.
    Unplug {
        /// The CPU's name.
        id: String,
    },
    /// `balloon`.
    Balloon(u64),
    /// `set_password` and `expire_password`.
    Password(&'static str, Password),
    /// `system_reset`.
    Reset,
}

/// CPUs that were plugged while the machine runs are named so, which is also how they can be unplugged: those that the
/// machine was started with have no name.
const CPU_PREFIX: &str = "vmop-cpu-";
/// Named devices are below this in QEMU's object tree.
const NAMED: &str = "/machine/peripheral/";

/// What has to be changed, in order. Reset comes last, so that the guest starts anew with all the rest.
pub fn changes(wanted: &Wanted, known: &Known) -> Vec<Change> {
    let mut changes = cpu_changes(wanted.cpus, &known.slots);
    if known.ram != Some(wanted.ram) {
        changes.push(Change::Balloon(wanted.ram));
    }
    if let Some((protocol, password)) = &wanted.password
        && known.password.as_ref() != Some(password)
    {
        changes.push(Change::Password(protocol, password.clone()));
    }
    if known.reset_counter.is_some_and(|known| wanted.reset_counter > known) {
        changes.push(Change::Reset);
    }
    changes
}

/// `query-hotpluggable-cpus` lists the highest place first; CPUs come and go at the high end.
fn cpu_changes(wanted: usize, slots: &[Slot]) -> Vec<Change> {
    let present = slots.iter().filter(|slot| slot.occupant.is_some()).count();
    let numbered = || slots.iter().rev().enumerate();
    if wanted >= present {
        numbered()
            .filter(|(_, slot)| slot.occupant.is_none())
            .take(wanted - present)
            .map(|(number, slot)| Change::Plug { id: format!("{CPU_PREFIX}{number}"), slot: slot.clone() })
            .collect()
    } else {
        slots
            .iter()
            .filter_map(|slot| slot.occupant.as_deref()?.strip_prefix(NAMED))
            .filter(|id| id.starts_with(CPU_PREFIX))
            .take(present - wanted)
            .map(|id| Change::Unplug { id: id.to_owned() })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Places 0.. from the lowest; each has its occupant's name, `-` for one without a name, or nothing.
    fn slots(occupants: &[&str]) -> Vec<Slot> {
        let slot = |(number, occupant): (usize, &&str)| Slot {
            type_: "max-x86_64-cpu".into(),
            properties: json!({ "core-id": number }).as_object().unwrap().clone(),
            occupant: match *occupant {
                "" => None,
                "-" => Some(format!("/machine/unattached/device[{number}]")),
                id => Some(format!("{NAMED}{id}")),
            },
        };
        occupants.iter().enumerate().map(slot).rev().collect()
    }

    fn cpus(wanted: usize, occupants: &[&str]) -> Vec<String> {
        cpu_changes(wanted, &slots(occupants))
            .into_iter()
            .map(|change| match change {
                Change::Plug { id, slot } => format!("+{id}@{}", slot.properties["core-id"]),
                Change::Unplug { id } => format!("-{id}"),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn cpus_come_and_go_at_the_high_end() {
        assert_eq!(cpus(2, &["-", "-", "", ""]), [""; 0]);
        assert_eq!(cpus(4, &["-", "-", "", ""]), ["+vmop-cpu-2@2", "+vmop-cpu-3@3"]);
        assert_eq!(cpus(3, &["-", "-", "", "vmop-cpu-3"]), [""; 0]);
        assert_eq!(cpus(2, &["-", "-", "vmop-cpu-2", "vmop-cpu-3"]), ["-vmop-cpu-3", "-vmop-cpu-2"]);
        assert_eq!(cpus(1, &["-", "-", "vmop-cpu-2", ""]), ["-vmop-cpu-2"], "those of the start stay");
        assert_eq!(cpus(9, &["-", ""]), ["+vmop-cpu-1@1"], "no more than there are places");
    }

    fn wanted() -> Wanted {
        let password = Password { secret: "s".into(), expiry: "now".into() };
        Wanted { cpus: 1, ram: 1 << 30, password: Some(("spice", password)), reset_counter: 3 }
    }

    #[test]
    fn a_new_agent_sets_everything_and_then_only_what_changes() {
        let mut known = Known { slots: slots(&["-", ""]), ..Known::default() };
        let password = wanted().password.unwrap().1;
        assert_eq!(changes(&wanted(), &known), [Change::Balloon(1 << 30), Change::Password("spice", password.clone())]);
        known = Known { ram: Some(1 << 30), password: Some(password), reset_counter: Some(3), ..known };
        assert_eq!(changes(&wanted(), &known), []);
        let mut wanted = wanted();
        wanted.reset_counter = 4;
        wanted.ram = 1 << 29;
        assert_eq!(changes(&wanted, &known), [Change::Balloon(1 << 29), Change::Reset]);
        let expiry = Password { secret: "s".into(), expiry: "+10".into() };
        wanted.password = Some(("spice", expiry.clone()));
        assert!(changes(&wanted, &known).contains(&Change::Password("spice", expiry)));
    }
}
