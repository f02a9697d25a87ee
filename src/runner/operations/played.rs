//! A played QEMU, for tests: it answers the commands of the agent and does what they say.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Value, json};

/// A CD drive.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drive {
    /// Whether its tray is open.
    pub is_open: bool,
    /// Whether the guest has locked the tray.
    pub is_locked: bool,
    /// The node of what is in it.
    pub inserted: Option<String>,
}

/// QEMU with a guest.
#[derive(Clone, Debug, PartialEq)]
pub struct PlayedQemu {
    /// What `query-status` says.
    pub status: &'static str,
    /// The CPUs in the slots, from the lowest one. `None`: the slot is empty.
    pub cpus: Vec<Option<String>>,
    /// Whether the guest releases a CPU at once.
    pub releases: bool,
    /// The guest's memory in bytes.
    pub balloon: u64,
    /// The password of the display and when it expires.
    pub password: Option<(String, String)>,
    /// The CD drives by their names.
    pub drives: BTreeMap<String, Drive>,
    /// The files that are open, by their nodes.
    pub nodes: BTreeMap<String, String>,
    /// The size of its disk in bytes.
    pub disk: u64,
    /// How often it was reset.
    pub resets: u32,
    /// Whether the display had a password whenever the guest went on.
    pub was_open: bool,
    /// The commands that it refuses.
    pub refuses: Vec<&'static str>,
    /// What it has been asked, but for questions.
    pub done: Vec<String>,
    /// The events that it has not sent yet.
    pub events: VecDeque<Value>,
}

impl PlayedQemu {
    /// A QEMU that was just started, with one CPU and four slots, and two CD drives.
    pub fn started() -> Self {
        Self {
            status: "prelaunch",
            cpus: vec![Some("/machine/unattached/device[0]".into()), None, None, None],
            releases: true,
            balloon: 4 << 30,
            password: None,
            drives: ["cd0", "cd1"].into_iter().map(|name| (name.to_owned(), Drive::default())).collect(),
            nodes: BTreeMap::new(),
            disk: 1 << 30,
            resets: 0,
            was_open: true,
            refuses: Vec::new(),
            done: Vec::new(),
            events: VecDeque::new(),
        }
    }

    /// How many CPUs the guest has.
    pub fn present(&self) -> usize {
        self.cpus.iter().flatten().count()
    }

    /// The file in a drive.
    pub fn file(&self, drive: &str) -> Option<&str> {
        self.nodes.get(self.drives[drive].inserted.as_ref()?).map(String::as_str)
    }

    /// The guest opens a tray, or is not able to lock it any more.
    pub fn open(&mut self, drive: &str) {
        let opened = self.drives.get_mut(drive).unwrap();
        (opened.is_open, opened.is_locked) = (true, false);
        self.tray(drive);
    }

    /// The guest releases the CPUs that it was asked for.
    pub fn release(&mut self, id: &str) {
        let path = format!("/machine/peripheral/{id}");
        for slot in self.cpus.iter_mut().filter(|slot| slot.as_ref() == Some(&path)) {
            *slot = None;
        }
        self.event("DEVICE_DELETED", &json!({ "device": id, "path": path }));
    }

    /// The guest stops, or goes on.
    pub fn set_status(&mut self, status: &'static str) {
        let event = if status == "running" { "RESUME" } else { "STOP" };
        if self.status != status {
            self.event(event, &Value::Null);
        }
        self.status = status;
    }

    /// The reset button, and what the guest does then.
    pub fn reset(&mut self) {
        self.resets += 1;
        if self.status != "running" {
            self.status = "prelaunch";
        }
        self.event("RESET", &json!({ "guest": false }));
    }

    /// Sends an event.
    pub fn event(&mut self, event: &str, data: &Value) {
        let mut message = json!({ "event": event });
        if !data.is_null() {
            message["data"] = data.clone();
        }
        self.events.push_back(message);
    }

    fn tray(&mut self, drive: &str) {
        let open = self.drives[drive].is_open;
        self.event("DEVICE_TRAY_MOVED", &json!({ "device": "", "id": drive, "tray-open": open }));
    }

    /// Carries out a command in the form in which it is sent.
    pub fn execute(&mut self, request: &Value) -> Result<Value, String> {
        let name = request["execute"].as_str().unwrap();
        let arguments = &request["arguments"];
        let text = |key: &str| arguments[key].as_str().unwrap_or_else(|| panic!("{request} without {key}")).to_owned();
        if self.refuses.contains(&name) {
            return Err(format!("no {name} here"));
        }
        if !name.starts_with("query-") && name != "qmp_capabilities" {
            self.done.push(name.to_owned());
        }
        match name {
            "query-status" => {
                let is_running = self.status == "running";
                return Ok(json!({ "running": is_running, "singlestep": false, "status": self.status }));
            }
            "query-hotpluggable-cpus" => {
                let slot = |(number, occupant): (usize, &Option<String>)| {
                    let mut slot = json!({ "type": "cpu", "vcpus-count": 1, "props": { "core-id": number } });
                    if let Some(path) = occupant {
                        slot["qom-path"] = json!(path);
                    }
                    slot
                };
                return Ok(self.cpus.iter().enumerate().map(slot).rev().collect());
            }
            "query-block" => {
                let io_status = if self.status == "io-error" { "nospace" } else { "ok" };
                let disk = json!({
                    "qdev": "/machine/peripheral/disk0/virtio-backend", "io-status": io_status,
                    "inserted": { "drv": "raw", "node-name": "disk0-image", "image": { "virtual-size": self.disk } },
                });
                let cds = self.drives.iter().map(|(name, drive)| self.block(name, drive));
                return Ok(cds.chain([disk]).collect());
            }
            "query-balloon" => return Ok(json!({ "actual": self.balloon })),
            "query-chardev" => return Ok(json!([])),
            "query-vnc" => return Ok(json!({ "enabled": true, "clients": [] })),
            "qmp_capabilities" => {}
            "device_add" => {
                let slot = usize::try_from(arguments["core-id"].as_u64().unwrap()).unwrap();
                if self.cpus[slot].is_some() {
                    return Err("the slot is taken".into());
                }
                self.cpus[slot] = Some(format!("/machine/peripheral/{}", text("id")));
            }
            "device_del" if self.releases => self.release(&text("id")),
            "device_del" => {}
            "balloon" => {
                self.balloon = arguments["value"].as_u64().unwrap();
                self.event("BALLOON_CHANGE", &json!({ "actual": self.balloon }));
            }
            "set_password" => self.password = Some((text("password"), "never".into())),
            "expire_password" => self.password.as_mut().unwrap().1 = text("time"),
            "block_resize" => {
                let size = arguments["size"].as_u64().unwrap();
                assert!(text("node-name") == "disk0-image" && size > self.disk, "a disk only grows: {request}");
                self.disk = size;
            }
            "blockdev-add" => {
                let file = arguments["file"]["filename"].as_str().unwrap().to_owned();
                if self.nodes.insert(text("node-name"), file).is_some() {
                    return Err("the node exists".into());
                }
            }
            "blockdev-del" => {
                let node = text("node-name");
                if self.drives.values().any(|drive| drive.inserted.as_ref() == Some(&node)) {
                    return Err("the node is in use".into());
                }
                self.nodes.remove(&node).ok_or("there is no such node")?;
            }
            "blockdev-open-tray" => {
                let id = text("id");
                // QEMU asks the guest then, and says nothing.
                if !self.drives[&id].is_locked {
                    self.open(&id);
                }
            }
            "blockdev-close-tray" => {
                self.drives.get_mut(&text("id")).unwrap().is_open = false;
                self.tray(&text("id"));
            }
            "blockdev-remove-medium" | "blockdev-insert-medium" => {
                let drive = self.drives.get_mut(&text("id")).unwrap();
                if !drive.is_open {
                    return Err("the tray is not open".into());
                }
                if name == "blockdev-remove-medium" {
                    drive.inserted = None;
                } else if drive.inserted.replace(text("node-name")).is_some() {
                    return Err("there is a medium".into());
                }
            }
            "stop" if self.status == "running" => self.set_status("paused"),
            "stop" => {}
            "cont" => {
                self.was_open &= self.password.is_some();
                self.set_status("running");
            }
            "system_reset" => self.reset(),
            other => panic!("{other}"),
        }
        Ok(json!({}))
    }

    fn block(&self, name: &str, drive: &Drive) -> Value {
        let mut block = json!({ "device": "", "qdev": name, "tray_open": drive.is_open, "io-status": "ok" });
        if let Some(node) = &drive.inserted {
            block["inserted"] = json!({ "file": self.nodes[node], "node-name": node });
        }
        block
    }
}
