//! What is printed: a line for each VM, and how many there are of each sort.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
};

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::Value;

use super::super::output::{Exit, counted, plain};
use crate::{
    api::PendingChange,
    plan::effect::{Class, Effect, Touched},
};

/// The longest value that is printed in a line.
const LONGEST: usize = 60;

/// What becomes of a VM.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::cli) struct VmReport {
    pub namespace: String,
    pub name: String,
    #[serde(flatten)]
    pub effect: Effect,
    /// What of it is not known, and why.
    pub notes: Vec<String>,
}

/// What becomes of all VMs.
#[derive(Default)]
pub(in crate::cli) struct Report {
    pub vms: Vec<VmReport>,
    /// Whether something of what was asked is not known.
    pub is_incomplete: bool,
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let counts: serde_json::Map<String, Value> =
            Class::ALL.map(|class| (class.word().to_owned(), Value::from(self.count(class)))).into_iter().collect();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("counts", &counts)?;
        map.serialize_entry("vms", &self.vms)?;
        map.end()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(true, true))
    }
}

impl Report {
    fn count(&self, class: Class) -> usize {
        self.vms.iter().filter(|vm| vm.effect.class == class).count()
    }

    pub fn exit(&self) -> Exit {
        if self.is_incomplete || self.vms.iter().any(|vm| !vm.notes.is_empty()) {
            return Exit::Unknown;
        }
        Exit::negative_if(self.vms.iter().any(|vm| vm.effect.class != Class::Nothing))
    }

    /// As text; with the details of each VM if it is `verbose`.
    pub fn text(&self, verbose: bool, with_namespace: bool) -> String {
        let heading = ["NAMESPACE", "VM", "EFFECT", "AT ONCE", "AT THE NEXT START", "REFUSED"].map(str::to_owned);
        let rows: Vec<[String; 6]> = std::iter::once(heading).chain(self.vms.iter().map(row)).collect();
        let mut text = String::new();
        for (number, row) in rows.iter().enumerate() {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate().skip(usize::from(!with_namespace)) {
                let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default() + 3;
                let _ = write!(line, "{cell:width$}");
            }
            text += line.trim_end();
            text.push('\n');
            if let Some(vm) = number.checked_sub(1).and_then(|number| self.vms.get(number)).filter(|_| verbose) {
                details(vm).iter().for_each(|detail| text += &format!("  {detail}\n"));
            }
        }
        if !verbose {
            text += &self.notes(with_namespace);
        }
        let counts = Class::ALL.into_iter().map(|class| (class, self.count(class))).filter(|(_, count)| *count > 0);
        let counts: Vec<String> = counts.map(|(class, count)| format!("{count} {}", class.word())).collect();
        let all = counted(self.vms.len(), "VM");
        text += &if counts.is_empty() { format!("{all}\n") } else { format!("{all}: {}\n", counts.join(", ")) };
        plain(&text)
    }

    /// What is not known, each once: the reasons are mostly the same for all VMs.
    fn notes(&self, with_namespace: bool) -> String {
        let mut of_vms: BTreeMap<&str, Vec<&VmReport>> = BTreeMap::new();
        for vm in &self.vms {
            vm.notes.iter().for_each(|note| of_vms.entry(note).or_default().push(vm));
        }
        let line = |(note, vms): (&str, Vec<&VmReport>)| match vms.as_slice() {
            [vm] if with_namespace => format!("note: {}/{}: {note}\n", vm.namespace, vm.name),
            [vm] => format!("note: {}: {note}\n", vm.name),
            vms => format!("note: {}: {note}\n", counted(vms.len(), "VM")),
        };
        of_vms.into_iter().map(line).collect()
    }
}

fn row(vm: &VmReport) -> [String; 6] {
    let Effect { class, at_once, at_next_start, waits_already: _, refused } = &vm.effect;
    let or_none = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let at_once = match at_once.as_slice() {
        [] => String::new(),
        [one] => format!("{} {}", one.object, one.what),
        several => counted(several.len(), "object"),
    };
    let at_next_start = match at_next_start.as_slice() {
        [] => String::new(),
        [one] => one.path.clone(),
        several => counted(several.len(), "change"),
    };
    let cells = [&at_once, &at_next_start, &refused.join("; ")].map(|text| or_none(text.clone()));
    let [at_once, at_next_start, refused] = cells;
    [vm.namespace.clone(), vm.name.clone(), class.word().into(), at_once, at_next_start, refused]
}

fn details(vm: &VmReport) -> Vec<String> {
    let Effect { class: _, at_once, at_next_start, waits_already, refused } = &vm.effect;
    let mut lines = Vec::new();
    for Touched { object, what, template, fields } in at_once {
        let template = template.as_ref().map(|template| format!(" ({template})")).unwrap_or_default();
        if fields.is_empty() {
            lines.push(format!("at once: {object} {what}{template}"));
        }
        for field in fields {
            let values = values(field.current.as_ref(), field.wanted.as_ref());
            lines.push(format!("at once: {object} {}{values}{template}", field.path));
        }
    }
    let waiting = |when: &str, change: &PendingChange| {
        format!("{when}: {}{}", change.path, values(change.current.as_ref(), change.wanted.as_ref()))
    };
    lines.extend(at_next_start.iter().map(|change| waiting("at the next start", change)));
    lines.extend(waits_already.iter().map(|change| waiting("waits already", change)));
    lines.extend(refused.iter().map(|why| format!("refused: {why}")));
    lines.extend(vm.notes.iter().map(|note| format!("note: {note}")));
    lines
}

/// `: NEW instead of OLD`, or nothing if neither may be shown.
fn values(current: Option<&Value>, wanted: Option<&Value>) -> String {
    let short = |value: Option<&Value>| match value.map(ToString::to_string) {
        None => "nothing".to_owned(),
        Some(text) if text.chars().count() > LONGEST => text.chars().take(LONGEST).collect::<String>() + "...",
        Some(text) => text,
    };
    if current.or(wanted).is_none() {
        return String::new();
    }
    format!(": {} instead of {}", short(wanted), short(current))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(name: &str, effect: Effect) -> VmReport {
        VmReport { namespace: "orchard".into(), name: name.into(), effect, notes: Vec::new() }
    }

    fn report() -> Report {
        let change = |path: &str| PendingChange {
            path: path.into(),
            subject: None,
            current: None,
            wanted: Some(json!("high")),
            reason: "r".into(),
        };
        let restart =
            Effect { class: Class::Restart, at_next_start: vec![change("objects/Pod/spec.a")], ..Effect::default() };
        let vms = vec![
            vm("apple", restart),
            vm("pear", Effect::default()),
            vm("plum", Effect::refused("x.yaml.j2:1:7: wrong".into())),
        ];
        Report { vms, is_incomplete: false }
    }

    #[test]
    fn there_is_a_line_for_each_vm_and_the_numbers() {
        assert_eq!(
            report().text(false, false),
            "VM      EFFECT    AT ONCE   AT THE NEXT START    REFUSED\n\
             apple   restart   -         objects/Pod/spec.a   -\n\
             pear    nothing   -         -                    -\n\
             plum    refused   -         -                    x.yaml.j2:1:7: wrong\n\
             3 VMs: 1 nothing, 1 restart, 1 refused\n"
        );
        let text = report().text(true, true);
        assert!(text.contains("orchard     apple"), "{text}");
        assert!(text.contains("\n  at the next start: objects/Pod/spec.a: \"high\" instead of nothing\n"), "{text}");
    }

    #[test]
    fn data_has_the_counts_and_each_vm() {
        let data = json!(report());
        assert_eq!(data["counts"], json!({ "nothing": 1, "start": 0, "live": 0, "restart": 1, "refused": 1 }));
        assert_eq!((&data["vms"][0]["name"], &data["vms"][0]["effect"]), (&json!("apple"), &json!("restart")));
        assert_eq!(data["vms"][2]["refused"][0], json!("x.yaml.j2:1:7: wrong"));
    }

    #[test]
    fn the_exit_code_tells_nothing_from_an_effect_and_from_what_is_not_known() {
        let nothing = || Report { vms: vec![vm("pear", Effect::default())], is_incomplete: false };
        assert_eq!(nothing().exit(), Exit::Success);
        assert_eq!(report().exit(), Exit::Negative);
        assert_eq!(Report { is_incomplete: true, ..nothing() }.exit(), Exit::Unknown);
        for mut partly in [nothing(), report()] {
            partly.vms[0].notes.push("not compared".into());
            assert_eq!(partly.exit(), Exit::Unknown, "an effect may be hidden");
        }
    }

    #[test]
    fn what_is_not_known_is_said_without_being_asked_for_details() {
        let mut report = report();
        let notes = |report: &mut Report, notes: &[(usize, &str)]| {
            report.vms.iter_mut().for_each(|vm| vm.notes.clear());
            notes.iter().for_each(|(at, note)| report.vms[*at].notes.push((*note).to_owned()));
        };
        let lines = |report: &Report, verbose: bool, with_namespace: bool| -> Vec<String> {
            let text = report.text(verbose, with_namespace);
            text.lines().filter(|line| line.contains("note: ")).map(str::to_owned).collect()
        };
        assert!(lines(&report, false, false).is_empty());
        notes(&mut report, &[(0, "no Secrets"), (1, "no Secrets"), (1, "not rendered")]);
        assert_eq!(lines(&report, false, false), ["note: 2 VMs: no Secrets", "note: pear: not rendered"]);
        assert_eq!(lines(&report, false, true), ["note: 2 VMs: no Secrets", "note: orchard/pear: not rendered"]);
        assert_eq!(
            lines(&report, true, false),
            ["  note: no Secrets", "  note: no Secrets", "  note: not rendered"],
            "among the details each has its VM"
        );
        assert!(report.text(false, false).ends_with("not rendered\n3 VMs: 1 nothing, 1 restart, 1 refused\n"));
    }
}
