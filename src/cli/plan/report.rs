//! What is printed: a line for each VM, and how many there are of each sort.

use std::fmt::{self, Write as _};

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
    /// What else there is to know.
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
        match self {
            Self { is_incomplete: true, .. } => Exit::Unknown,
            _ => Exit::negative_if(self.vms.iter().any(|vm| vm.effect.class != Class::Nothing)),
        }
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
        let counts = Class::ALL.into_iter().map(|class| (class, self.count(class))).filter(|(_, count)| *count > 0);
        let counts: Vec<String> = counts.map(|(class, count)| format!("{count} {}", class.word())).collect();
        let all = counted(self.vms.len(), "VM");
        text += &if counts.is_empty() { format!("{all}\n") } else { format!("{all}: {}\n", counts.join(", ")) };
        plain(&text)
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
    }
}
