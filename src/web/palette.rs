//! What Ctrl-K finds: VMs, what the person may do with them now, and pages.
//!
//! ```text
//!  what was typed ─▶ words ─▶ entries that have all of them ─▶ HTML
//! ```
//!
//! A person finds the VMs of her pages, and no others.

use axum::{
    extract::{Query, State},
    response::{Html, IntoResponse, Response},
};
use k8s_openapi::jiff::Timestamp;
use minijinja::context;
use serde::{Deserialize, Serialize};

use super::{
    app::App,
    pages::value,
    rows::{Act, Onlooker, Row},
    signed_in::SignedIn,
    store::{Key, View},
};
use crate::people::Rights;

/// The most VMs that are shown, and the most actions.
const MOST: usize = 8;
/// The longest text that is looked at, in bytes.
const LONGEST: usize = 256;
/// Pages: the name of their text, their path, and whether they are for administrators.
const PAGES: [(&str, &str, bool); 5] = [
    ("home", "/home", false),
    ("all-vms", "/vms", true),
    ("create", "/vms/new", true),
    ("pools", "/pools", true),
    ("templates", "/templates", true),
];

/// What was typed.
#[derive(Deserialize)]
pub(super) struct Typed {
    #[serde(default)]
    q: String,
}

/// Something to do with a VM.
#[derive(Serialize)]
struct Deed<'a> {
    vm: &'a Row<'a>,
    /// The last part of the action's path, or `console`.
    what: &'static str,
    /// Its name in the person's language.
    label: &'a str,
}

/// Whether the text has all words.
fn fits(words: &[String], text: &str) -> bool {
    let text = text.to_lowercase();
    words.iter().all(|word| text.contains(word))
}

/// `GET /palette?q=TEXT`: entries for the list below the field.
pub(super) async fn found(State(app): State<App>, signed_in: SignedIn, Query(typed): Query<Typed>) -> Response {
    let typed = typed.q.get(..typed.q.floor_char_boundary(LONGEST)).unwrap_or_default();
    let words: Vec<String> = typed.split_whitespace().map(str::to_lowercase).collect();
    let word = |name: &str| app.pages.word(signed_in.language, name);
    let (administrator, user) = (signed_in.views.administrator, signed_in.views.user);
    let pages =
        PAGES.into_iter().filter(|(.., of_administrators)| if *of_administrators { administrator } else { user });
    let pages: Vec<(String, &str)> =
        pages.map(|(name, path, _)| (word(name), path)).filter(|(label, _)| fits(&words, label)).collect();

    let view = if administrator { View::List } else { View::Home };
    let all = app.store.subscribe().vms;
    // Only VMs that one of the words can mean. An action's own word names none.
    let is_meant = |(namespace, name): &Key| {
        let id = format!("{namespace}/{name}");
        words.is_empty() || words.iter().any(|word| id.contains(word))
    };
    let seen: Vec<(Rights, &_)> = all
        .iter()
        .filter(|(key, ..)| is_meant(key))
        .map(|(key, vm, _)| (view.rights(&signed_in, &key.0, vm, &app), &**vm))
        .filter(|(rights, _)| !rights.is_empty())
        .collect();
    let now = Timestamp::now();
    let rows = seen.iter().map(|(rights, vm)| {
        let onlooker = Onlooker { person: &signed_in.person, rights, is_administrator: administrator };
        Row::of(vm, onlooker, &app.store, now)
    });
    let rows: Vec<Row<'_>> = rows.collect();
    let mut vms: Vec<&Row<'_>> = rows.iter().filter(|row| fits(&words, &row.id)).collect();
    vms.sort_by_key(|row| words.first().is_some_and(|word| !row.name.starts_with(word.as_str())));
    vms.truncate(MOST);
    let open = word("console-open");
    let labels = Act::ALL.map(|act| (act.path(), word(&format!("act-{}", act.path()))));
    let deeds = rows.iter().filter(|_| !words.is_empty()).flat_map(|vm| {
        let console = vm.can_open_console.then(|| Deed { vm, what: "console", label: &open });
        let acts = labels.iter().filter(|(what, _)| vm.actions.contains(what));
        let acts = acts.map(|(what, label)| Deed { vm, what, label });
        console.into_iter().chain(acts).collect::<Vec<_>>()
    });
    let deeds: Vec<Deed<'_>> = deeds
        .filter(|Deed { vm, what, label }| fits(&words, &format!("{what} {label} {}", vm.id)))
        .take(MOST)
        .collect();
    let context = context! { pages => value(pages), vms => value(vms), deeds => value(deeds) };
    Html(app.pages.part_or_nothing(signed_in.language, "palette.html", context)).into_response()
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn an_entry_has_all_words() {
        let words = |typed: &str| typed.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(fits(&words("stop web"), "stop Herunterfahren lab/web-1"));
        assert!(fits(&words("herunter lab"), "stop Herunterfahren lab/web-1"));
        assert!(!fits(&words("stop db"), "stop Herunterfahren lab/web-1"));
        assert!(fits(&[], "anything"));
    }
}
