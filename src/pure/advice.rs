//! What is wrong with the values of a VM although the API server accepts them: data that cloud-init can't use, and memory that does not
//! suffice. It is told wherever a VM is looked at: before it is created, in a folder of templates, and in its status. Pure.

use kube::ResourceExt as _;
use serde_json::Value;

use crate::{
    api::{Quantity, Reason, VirtualMachine},
    user_data::{Problem, problems},
};

/// The memory of QEMU and of the runner, beside the guest's: what they always need, and for each CPU.
const ALWAYS: u64 = 160 << 20;
const FOR_A_CPU: u64 = 8 << 20;
/// The guest's memory for each byte of its page tables.
const PAGE_TABLES: u64 = 512;
/// The most that is said in one message.
const MOST: usize = 5;

/// Something that will probably not be as it is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The reason of the condition SpecQuestionable.
    pub reason: Reason,
    /// The field, as a JSON pointer.
    pub pointer: &'static str,
    /// Line and column in the text that the field has, from 1, where it is known.
    pub at: Option<(usize, usize)>,
    /// What is wrong, what follows, and what to do.
    pub message: String,
    /// Whether the VM will certainly not be what is wanted.
    pub is_fatal: bool,
}

impl Advice {
    /// The field as people write it, with the place in its text.
    pub fn place(&self) -> String {
        let field = self.pointer.trim_start_matches('/').replace('/', ".");
        match self.at {
            Some((line, column)) => format!("{field}, line {line}, column {column}"),
            None => field,
        }
    }
}

/// All that is wrong, in the order of the spec.
pub fn advice(vm: &VirtualMachine) -> Vec<Advice> {
    let mut found: Vec<Advice> = memory_limit(vm).into_iter().collect();
    let Some(data) = &vm.spec.cloud_init else { return found };
    let mut add = |pointer: &'static str, problems: Vec<Problem>| {
        found.extend(problems.into_iter().map(|Problem { at, message, loses_all }| Advice {
            reason: Reason::CloudInitUnusable,
            pointer,
            at,
            message,
            is_fatal: loses_all,
        }));
    };
    add("/spec/cloudInit/userData", data.user_data.as_ref().map(problems).unwrap_or_default());
    add("/spec/cloudInit/vendorData", data.vendor_data.as_ref().map(problems).unwrap_or_default());
    add("/spec/cloudInit/networkConfig", data.network_config.as_ref().and_then(network_config).into_iter().collect());
    found
}

/// What a person reads of all that is wrong; `None`: nothing is.
pub fn summary(advice: &[Advice]) -> Option<String> {
    let more = advice.len().saturating_sub(MOST);
    let mut lines: Vec<String> =
        advice.iter().take(MOST).map(|advice| format!("{}: {}", advice.place(), advice.message)).collect();
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    (!lines.is_empty()).then(|| lines.join("; "))
}

fn network_config(value: &Value) -> Option<Problem> {
    let error = crate::yaml::from_str::<serde_yaml::Value>(value.as_str()?).err()?;
    let at = error.place();
    let words = error.to_string();
    let words = words.split(" at line ").next().unwrap_or_default();
    let message = format!("this is no YAML, so cloud-init configures the network by itself: {words}");
    Some(Problem { at, message, loses_all: true })
}

/// How much memory QEMU and the runner need beside a guest with so much memory and so many CPUs, in bytes, in whole MiB.
pub fn overhead(memory: u64, cpus: u64) -> u64 {
    (ALWAYS + FOR_A_CPU * cpus.min(1024) + memory / PAGE_TABLES).next_multiple_of(1 << 20)
}

fn memory_limit(vm: &VirtualMachine) -> Option<Advice> {
    let limit = vm.spec.resources.as_ref()?.limits.as_ref()?.get("memory")?;
    let text = limit.as_str().map_or_else(|| limit.to_string(), str::to_owned);
    let bytes = Quantity::parse(&text).ok()?.bytes();
    let machine = &vm.spec.vm;
    let memory = machine.ram().bytes();
    let beside = overhead(memory, u64::from(machine.cpus()));
    let needed = memory.saturating_add(beside);
    let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
    (bytes < needed).then(|| Advice {
        reason: Reason::MemoryLimitTooLow,
        pointer: "/spec/resources/limits/memory",
        at: None,
        message: format!(
            "the limit is {text}, and the guest of {} has {} of memory: QEMU needs about {}Mi beside it, so the node ends QEMU when the guest uses its \
             memory, often before it has booted; set the limit to {}Mi or more, or leave it out",
            vm.name_any(),
            machine.ram(),
            mebibytes(beside),
            mebibytes(needed),
        ),
        is_fatal: bytes <= memory,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::vm;

    #[test]
    fn a_limit_must_have_room_for_qemu() {
        let told = |limit: Value, current: Option<&str>| {
            let vm = vm(|vm| {
                vm["spec"]["resources"] = json!({ "limits": { "memory": limit } });
                vm["spec"]["vm"]["maximumRam"] = json!("4Gi");
                vm["spec"]["vm"]["maximumCpus"] = json!(2);
                vm["spec"]["vm"]["currentCpus"] = json!(2);
                if let Some(current) = current {
                    vm["spec"]["vm"]["currentRam"] = json!(current);
                }
            });
            advice(&vm).into_iter().map(|advice| (advice.reason, advice.is_fatal)).collect::<Vec<_>>()
        };
        assert_eq!(told(json!("4Gi"), None), [(Reason::MemoryLimitTooLow, true)]);
        assert_eq!(told(json!(4_294_967_296_u64), None), [(Reason::MemoryLimitTooLow, true)]);
        assert_eq!(told(json!("4200Mi"), None), [(Reason::MemoryLimitTooLow, false)]);
        assert_eq!(told(json!("4280Mi"), None), []);
        assert_eq!(told(json!("4Gi"), Some("3Gi")), []);
        assert_eq!(told(json!("no size"), None), []);
    }

    #[test]
    fn data_for_cloud_init_are_told_by_field_and_line() {
        let vm = vm(|vm| {
            vm["spec"]["cloudInit"] = json!({
                "userData": "#cloud-config\nusers:\n  - name: a\n   shell: /bin/sh\n",
                "vendorData": { "package": ["vim"] },
                "networkConfig": "version: 2\n ethernets: {}\n",
            });
        });
        let advice = advice(&vm);
        let places: Vec<String> = advice.iter().map(Advice::place).collect();
        assert_eq!(places[1], "spec.cloudInit.vendorData");
        assert!(places[0].starts_with("spec.cloudInit.userData, line 4, column "), "{places:?}");
        assert!(places[2].starts_with("spec.cloudInit.networkConfig, line 2, column "), "{places:?}");
        assert_eq!(advice.iter().map(|advice| advice.is_fatal).collect::<Vec<_>>(), [true, false, true]);
        let summary = summary(&advice).unwrap();
        assert!(
            summary.starts_with("spec.cloudInit.userData, line 4, ") && summary.contains("\"packages\" is one"),
            "{summary}"
        );
    }
}
