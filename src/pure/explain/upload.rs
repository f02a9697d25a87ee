//! A disk that waits for a file of a person's computer.
//!
//! The template set `import-disk` has a container that waits in the VM's Pod until the whole file is there.

use serde_json::Value;

use super::{Cause, Facts, Finding, instant};
use crate::{api::VirtualMachine, observed::Object};

/// The container of the template set `import-disk`, which fills a disk before QEMU starts.
pub const IMPORT_CONTAINER: &str = "import";

/// The size in bytes and the SHA-256 of the file for which a VM's disk waits.
pub fn awaited(vm: &VirtualMachine) -> Option<(u64, &str)> {
    let upload = vm.spec.template_values.as_ref()?.get("import")?.get("upload")?;
    Some((upload.get("size")?.as_u64()?, upload.get("sha256")?.as_str()?))
}

/// The container in the Pod waits for the file. How much of it is there only the container knows.
pub(super) fn missing(facts: &Facts, pod: &Object) -> Option<Finding> {
    let (size, sum) = awaited(&facts.vm)?;
    let status = pod.container_statuses().find(|status| status["name"] == IMPORT_CONTAINER)?;
    let running = status["state"].get("running").filter(|running| !running.is_null())?;
    let (name, place) = (&facts.vm.metadata.name, facts.on_command_line());
    let ended = &status["lastState"]["terminated"];
    let last = ended["message"].as_str().and_then(|message| message.trim().lines().last());
    let last = last.filter(|_| ended["exitCode"] != 0).map(|last| format!("; the last one was not used: {last}"));
    let text = format!(
        "its disk waits for a file of {size} bytes with the SHA-256 {sum}, and not all of it is there{}",
        last.unwrap_or_default()
    );
    let todo = format!("kubectl vm upload {} FILE {place}", name.as_deref().unwrap_or_default());
    let since = instant(running.get("startedAt").unwrap_or(&Value::Null));
    Some(Finding::new(Cause::UploadMissing, text, todo).at("spec.templateValues.import.upload").since(since))
}
