//! Why something is not done, in the words of the page's language: the refusals of [`crate::actions`], each as one or more texts whose names begin with
//! `why-`. What they quote, such as a message of the API, stays as it is. The macro `reasons` of the templates shows them.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use crate::{
    actions::{display::DisplayError, pool::PoolError, power},
    api::status::whole_seconds,
    assignment,
};

/// Why something is not done with a VM or a pool.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Why {
    /// The VM or the pool.
    about: String,
    sentences: Vec<Sentence>,
}

/// A text, and of what it speaks.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Sentence {
    /// The name of the text, after `why-`.
    text: &'static str,
    /// A name, or what is quoted.
    name: Option<String>,
    count: Option<usize>,
    /// A field of `spec.vm`.
    field: Option<&'static str>,
    /// It follows the text.
    time: Option<String>,
}

impl Sentence {
    fn of(text: &'static str) -> Self {
        Self { text, ..Self::default() }
    }

    fn with_name(text: &'static str, name: &str) -> Self {
        Self { name: Some(name.to_owned()), ..Self::of(text) }
    }

    fn with_count(text: &'static str, count: usize) -> Self {
        Self { count: Some(count), ..Self::of(text) }
    }

    fn with_time(text: &'static str, time: Timestamp) -> Self {
        Self { time: Some(whole_seconds(time)), ..Self::of(text) }
    }
}

impl Why {
    /// Why an action on a VM is refused.
    pub fn act(vm: &str, refusal: &power::PowerRefusal) -> Self {
        Self { about: vm.to_owned(), sentences: act(refusal) }
    }

    /// Why nobody gets or gives back a VM of a pool. `None`: that is no refusal, but an error.
    pub fn pool(about: &str, error: &PoolError) -> Option<Self> {
        let sentences = match error {
            PoolError::Refused(refusal) => assign(refusal),
            PoolError::Start { vm, refusal } => {
                let why = act(refusal);
                [Sentence::with_name("not-started", vm)].into_iter().chain(why).collect()
            }
            PoolError::Changed { user } => vec![Sentence::with_name("changed", user)],
            PoolError::Busy => vec![Sentence::of("busy")],
            PoolError::NoPool { .. } | PoolError::NoVm { .. } | PoolError::Api { .. } => return None,
        };
        Some(Self { about: about.to_owned(), sentences })
    }

    /// Why the display of a VM can't be opened. `None`: that is no refusal, but an error.
    pub fn display(vm: &str, error: &DisplayError) -> Option<Self> {
        let sentence = match error {
            DisplayError::NotStarted => Sentence::of("never-started"),
            DisplayError::NotRunning { message: None } => Sentence::of("no-display"),
            DisplayError::NotRunning { message: Some(message) } => Sentence::with_name("no-display-because", message),
            DisplayError::InUse { client: None } => Sentence::of("display-used"),
            DisplayError::InUse { client: Some(client) } => Sentence::with_name("display-used-from", client),
            DisplayError::NoPort => Sentence::of("no-port"),
            DisplayError::NoAddress => Sentence::of("no-address"),
            DisplayError::Deleted => Sentence::of("gone"),
            DisplayError::PasswordNotSet { .. }
            | DisplayError::PasswordExpired
            | DisplayError::Vm(_)
            | DisplayError::Watch(_)
            | DisplayError::Object { .. }
            | DisplayError::Random(_) => return None,
        };
        Some(Self { about: vm.to_owned(), sentences: vec![sentence] })
    }
}

fn act(refusal: &power::PowerRefusal) -> Vec<Sentence> {
    match refusal {
        power::PowerRefusal::Deleted => vec![Sentence::of("deleted")],
        power::PowerRefusal::Stopped => vec![Sentence::of("stopped")],
        power::PowerRefusal::NoGuest { reason: None } => vec![Sentence::of("no-guest")],
        power::PowerRefusal::NoGuest { reason: Some(reason) } => vec![Sentence::with_name("no-guest-because", reason)],
        power::PowerRefusal::WouldFail { why } => vec![Sentence::with_name("would-fail", why)],
        power::PowerRefusal::Git { applier, field } => {
            let since = applier.since.as_ref().map(|since| Sentence::with_time("git-since", since.0));
            let git = Sentence { field: Some(*field), ..Sentence::with_name("git", &applier.manager) };
            [git].into_iter().chain(since).collect()
        }
    }
}

fn assign(refusal: &assignment::NotAssigned) -> Vec<Sentence> {
    match refusal {
        assignment::NotAssigned::NoRight { user } => vec![Sentence::with_name("no-right", user)],
        assignment::NotAssigned::NoMembers => vec![Sentence::of("no-members")],
        assignment::NotAssigned::NoneFree { members, refused, renewing, next } => {
            let more = [
                (*renewing > 0).then(|| Sentence::with_count("renewing", *renewing)),
                next.map(|time| Sentence::with_time("next", time)),
                (*refused > 0).then(|| Sentence::with_count("stopped-by-git", *refused)),
            ];
            [Sentence::with_count("none-free", *members)].into_iter().chain(more.into_iter().flatten()).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use minijinja::context;

    use super::*;
    use crate::{
        ownership::Applier,
        test_support::noon,
        web::{
            app::App,
            language::Language,
            pages::{Pages, value},
            settings::Settings,
        },
    };

    fn page(language: Language, why: &Why) -> String {
        let (pages, settings) = (Pages::new().unwrap(), Settings::default());
        let frame = value(App::frame(language, &settings));
        let context = context! { frame => frame, kind => "refused", why => value(why), back => "/home", view => "" };
        pages.part(language, "message.html", context).unwrap()
    }

    /// All VMs of a pool are in use, and of the others there are so many of each kind.
    fn none_free(others: usize, next: Option<Timestamp>) -> PoolError {
        PoolError::Refused(assignment::NotAssigned::NoneFree { members: 3, refused: others, renewing: others, next })
    }

    #[test]
    fn each_refusal_has_its_words_in_each_language() {
        let git = || {
            let applier = Applier { manager: "flux".into(), since: Some(Time(noon())), is_gitops: true };
            power::PowerRefusal::Git { applier, field: "state" }
        };
        let acts = [
            power::PowerRefusal::Deleted,
            power::PowerRefusal::Stopped,
            power::PowerRefusal::NoGuest { reason: None },
            power::PowerRefusal::NoGuest { reason: Some("a reason".into()) },
            power::PowerRefusal::WouldFail { why: "a reason".into() },
            git(),
        ];
        let pools = [
            PoolError::Refused(assignment::NotAssigned::NoRight { user: "ann".into() }),
            PoolError::Refused(assignment::NotAssigned::NoMembers),
            none_free(1, None),
            none_free(2, Some(noon())),
            PoolError::Start { vm: "desk-1".into(), refusal: git() },
            PoolError::Changed { user: "bob".into() },
            PoolError::Busy,
        ];
        let displays = [
            DisplayError::NotStarted,
            DisplayError::NotRunning { message: None },
            DisplayError::NotRunning { message: Some("a message".into()) },
            DisplayError::InUse { client: None },
            DisplayError::InUse { client: Some("192.0.2.1".into()) },
            DisplayError::NoPort,
            DisplayError::NoAddress,
            DisplayError::Deleted,
        ];
        let all = acts.iter().map(|refusal| Why::act("apple", refusal));
        let all = all.chain(pools.iter().map(|error| Why::pool("desks", error).unwrap()));
        for why in all.chain(displays.iter().map(|error| Why::display("apple", error).unwrap())) {
            let [english, german] = Language::ALL.map(|language| page(language, &why));
            assert!(!english.contains("why-") && !german.contains("why-"), "{why:?}: {english} {german}");
            for sentence in &why.sentences {
                for quoted in sentence.name.iter().chain(&sentence.time) {
                    assert!(english.contains(quoted) && german.contains(quoted), "{why:?}: {english} {german}");
                }
                let field = format!("spec.vm.{}", sentence.field.unwrap_or_default());
                assert!(english.contains(&field) && german.contains(&field) || sentence.field.is_none(), "{why:?}");
            }
        }
        assert_eq!(Why::display("apple", &DisplayError::PasswordExpired), None, "the log says it");
    }

    #[test]
    fn a_time_is_an_element_that_the_page_shows_in_the_readers_zone() {
        let why = Why::pool("desks", &none_free(0, Some(noon()))).unwrap();
        let german = page(Language::German, &why);
        let time = whole_seconds(noon());
        let expected = format!(
            "desks: Alle 3 VMs des Pools sind vergeben. Die nächste wird behalten bis <time datetime=\"{time}\">{time}</time>."
        );
        assert!(german.contains(&expected), "{german}");
    }
}
