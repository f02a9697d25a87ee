//! Stories: what is wanted, how its checks end, what is done, and what is in force then.

use serde_json::json;

use super::*;
use crate::test_support::vm;

fn files(text: &str) -> Files {
    [("lib/x.j2".to_owned(), text.to_owned())].into()
}

/// A folder with files for all VMs, and with named sets.
fn folder(base: &str, sets: &[(&str, &str)]) -> Gathered {
    let sets = sets.iter().map(|(name, text)| ((*name).to_owned(), files(text))).collect();
    Gathered { folder: Some(Sources { base: files(base), sets }), ..Gathered::default() }
}

/// The same with templates that do not compile.
fn broken() -> Gathered {
    let base = [("pod.yaml.j2".to_owned(), "{% if".to_owned())].into();
    Gathered { folder: Some(Sources { base, ..Sources::default() }), ..Gathered::default() }
}

fn config(overcommit: u32) -> Arc<ReconcilerConfig> {
    Arc::new(ReconcilerConfig { cpu_overcommit: overcommit.into(), ..ReconcilerConfig::default() })
}

fn refused(generation: i64) -> Checked<BTreeSet<String>> {
    let vm = vm(|vm| vm["metadata"]["generation"] = json!(generation));
    Err(Some(Refused { error: TemplateError::refused("pod.yaml.j2", "no"), vm: Some(Box::new(vm)) }))
}

fn passes() -> Checked<BTreeSet<String>> {
    Ok(BTreeSet::new())
}

fn can_not_run() -> Checked<BTreeSet<String>> {
    Err(None)
}

fn name(set: Option<&str>) -> &str {
    set.unwrap_or("(all)")
}

fn names<'a>(trials: impl IntoIterator<Item = &'a Trial>) -> String {
    trials.into_iter().map(|trial| name(trial.set.as_deref())).collect::<Vec<_>>().join(", ")
}

/// An action in words, except what every look has.
fn words(action: &Action) -> Option<String> {
    Some(match action {
        Action::Limit(_) => "limit".into(),
        Action::ConfigTakenBack => "configuration taken back".into(),
        Action::TryConfig { trials, .. } => format!("try configuration with {}", text_of(trials)),
        Action::UseConfig { keys, .. } => format!("use configuration: {keys}"),
        Action::RefuseConfig { why, .. } => format!("refuse configuration: {}", why.message),
        Action::TrySets { trials, .. } if !trials.is_empty() => format!("try {}", names(trials)),
        Action::RefuseSet { set, map: _, refused } => {
            format!("refuse {}: {}", name(set.as_deref()), refused.error.message)
        }
        Action::SetGone(set) => format!("gone: {set}"),
        Action::TrySets { .. } | Action::KeepConfig(_) | Action::UseSets(_) => return None,
    })
}

fn text_of(trials: &[Trial]) -> String {
    trials.iter().map(|trial| text(&trial.templates)).collect::<Vec<_>>().join(", ")
}

fn text(set: &TemplateSet) -> String {
    let layers = set.layers();
    let files = layers.named.as_ref().map_or(&layers.base, |(_, files)| files);
    files.get("lib/x.j2").cloned().unwrap_or_default()
}

/// A manager with its templates, and a clock.
struct Story {
    state: State,
    now: Instant,
    users: BTreeMap<String, usize>,
    /// How the next checks of the configuration end; then they pass.
    config: Vec<Checked<()>>,
}

impl Story {
    /// A manager that starts with this folder, and with what was in force last.
    fn after(kept: &BTreeMap<Name, Layers>, gathered: Gathered) -> Self {
        let mut library = Library::new(&gathered.sources());
        let unchecked = restore(kept, &mut library);
        let in_force = InForce { library, refused: BTreeMap::new(), former: former(kept), config_refused: None };
        let now = Instant::now();
        let state = State::new(in_force, config(1), gathered, unchecked, now);
        Self { state, now, users: BTreeMap::new(), config: Vec::new() }
    }

    fn new(gathered: Gathered) -> Self {
        Self::after(&BTreeMap::new(), gathered)
    }

    /// What is done after an input, when each set that is tried ends so.
    fn next(&mut self, input: Input, result: fn() -> Checked<BTreeSet<String>>) -> Vec<String> {
        let mut done = Vec::new();
        let mut actions = self.state.next(input, self.now);
        while let Some(last) = actions.last() {
            done.extend(actions.iter().filter_map(words));
            let input = match last {
                Action::TryConfig { .. } => Input::ConfigTried(self.config.pop().unwrap_or(Ok(()))),
                Action::TrySets { trials, .. } => {
                    let tried = trials.iter().map(|trial| (trial.set.clone(), result())).collect();
                    Input::SetsTried { tried, users: self.users.clone() }
                }
                Action::UseSets(in_force) => {
                    assert!(Arc::ptr_eq(in_force, self.state.in_force()));
                    break;
                }
                other => panic!("nothing follows {other:?}"),
            };
            actions = self.state.next(input, self.now);
        }
        done
    }

    fn wants(&mut self, gathered: &Gathered, result: fn() -> Checked<BTreeSet<String>>) -> Vec<String> {
        let wanted = self.state.wanted.clone();
        self.next(Input::Wanted(gathered.clone(), wanted), result)
    }

    fn wants_config(&mut self, gathered: &Gathered, config: Arc<ReconcilerConfig>) -> Vec<String> {
        self.next(Input::Wanted(gathered.clone(), config), passes)
    }

    /// Time passes, and nothing changes but the VMs.
    fn waits(&mut self, seconds: u64, vm_generation: i64, result: fn() -> Checked<BTreeSet<String>>) -> Vec<String> {
        self.now += Duration::from_secs(seconds);
        let vms = || std::iter::once(vm(|vm| vm["metadata"]["generation"] = json!(vm_generation)));
        let may_pass = self.state.may_pass(vms);
        self.next(Input::Timer { may_pass }, result)
    }

    fn in_force(&self, set: Option<&str>) -> String {
        self.state.in_force().library.get(set).map_or_else(|error| error.message, text)
    }

    /// What the next manager reads.
    fn kept(&self) -> BTreeMap<Name, Layers> {
        let in_force = self.state.in_force();
        let sets = in_force
            .library
            .all()
            .filter_map(|(name, set)| Some(((name.map(str::to_owned), None), set.as_ref().ok()?.layers().clone())));
        let former = in_force
            .former
            .iter()
            .map(|former| ((former.set.clone(), Some(former.version.clone())), former.templates.layers().clone()));
        sets.chain(former).collect()
    }
}

const NOTHING: [&str; 0] = [];

#[test]
fn a_refused_set_is_looked_at_again_within_a_minute() {
    let pauses: Vec<u64> = [0, 1, 2, 3, 4, 100].map(|tries| pause(tries).as_secs()).into();
    assert_eq!(pauses, [5, 10, 20, 40, 45, 45]);
    assert!(REFUSED_AGAIN + 2 * AGAIN < Duration::from_secs(60));
}

#[test]
fn what_has_not_changed_is_not_looked_at_and_what_passes_is_in_force() {
    let mut story = Story::new(folder("one", &[("Desktop", "a")]));
    assert!(!story.state.waits());
    assert_eq!(story.wants(&folder("one", &[("Desktop", "a")]), can_not_run), NOTHING);
    // Only what has changed is tried.
    assert_eq!(story.wants(&folder("one", &[("Desktop", "b")]), passes), ["try Desktop"]);
    assert_eq!((story.in_force(None), story.in_force(Some("Desktop"))), ("one".into(), "b".into()));
    // A named set has the files for all VMs too.
    assert_eq!(story.wants(&folder("two", &[("Desktop", "b")]), passes), ["try (all), Desktop"]);
    assert_eq!(story.wants(&folder("two", &[("Desktop", "b"), ("New", "c")]), passes), ["try New"]);
    assert!(!story.state.waits());
}

#[test]
fn a_refused_set_is_reported_once_and_tried_again_when_what_refused_it_may_have_changed() {
    let mut story = Story::new(folder("one", &[]));
    assert_eq!(story.wants(&folder("two", &[]), || refused(1)), ["try (all)", "refuse (all): no"]);
    let is_refused = |story: &Story| story.in_force(None) == "one" && story.state.in_force().refused.len() == 1;
    assert!(is_refused(&story) && story.state.waits());
    type Result = fn() -> Checked<BTreeSet<String>>;
    let (with_first, with_second): (Result, Result) = (|| refused(1), || refused(2));
    for (what, seconds, vm_generation, result, expected) in [
        ("too early", 4, 1, with_first, &[][..]),
        ("the first pause is over", 1, 1, with_first, &["try (all)"]),
        ("the second one is not", 5, 1, with_first, &[]),
        ("the VM has changed", 1, 2, with_second, &["try (all)"]),
        ("it has not changed since", 5, 2, with_second, &[]),
        ("the third pause is over", 15, 2, with_second, &["try (all)"]),
        ("the next one is longer", 39, 2, with_second, &[]),
    ] {
        assert_eq!(story.waits(seconds, vm_generation, result), expected, "{what}");
        assert!(is_refused(&story), "{what}");
    }
    // Another change is another refusal, although its error is the same.
    assert_eq!(story.wants(&folder("three", &[]), || refused(1)), ["try (all)", "refuse (all): no"]);
    assert_eq!(story.waits(5, 1, passes), ["try (all)"]);
    assert_eq!((story.in_force(None), story.state.in_force().refused.len()), ("three".into(), 0));
    assert!(!story.state.waits());
    // What was in force is wanted again: nothing need be tried.
    story.wants(&folder("four", &[]), || refused(1));
    assert_eq!(story.wants(&folder("three", &[]), can_not_run), NOTHING);
    assert!(!story.state.waits());
}

#[test]
fn one_set_does_not_hold_up_another() {
    let mut story = Story::new(folder("one", &[("Desktop", "a")]));
    let both = story.wants(&folder("one", &[("Desktop", "b")]), || refused(1));
    assert_eq!(both, ["try Desktop", "refuse Desktop: no"]);
    assert_eq!(story.wants(&folder("one", &[("Desktop", "b"), ("New", "c")]), passes), ["try Desktop, New"]);
    assert_eq!(story.in_force(Some("New")), "c");
    let done = story.wants(&broken(), passes);
    assert!(done[0].starts_with("refuse (all): ") && done[1..] == ["gone: Desktop", "gone: New"], "{done:?}");
    assert_eq!(story.in_force(None), "one", "what does not compile is not tried");
}

#[test]
fn a_check_that_could_not_run_is_repeated_and_is_no_refusal() {
    let mut story = Story::new(folder("one", &[]));
    assert_eq!(story.wants(&folder("two", &[]), can_not_run), ["try (all)"]);
    assert_eq!(story.in_force(None), "one");
    assert_eq!(story.waits(5, 1, can_not_run), ["try (all)"]);
    assert_eq!(story.waits(5, 1, can_not_run), ["try (all)"], "as soon as before");
    assert_eq!(story.waits(5, 1, passes), ["try (all)"]);
    assert_eq!((story.in_force(None), story.state.waits()), ("two".into(), false));
}

#[test]
fn after_a_restart_or_with_another_leader_the_last_good_set_is_in_force_until_a_newer_one_has_passed() {
    let mut first = Story::new(folder("one", &[("Desktop", "a")]));
    let newer = folder("two", &[("Desktop", "a")]);
    first.wants(&newer, || refused(1));
    for result in [passes, can_not_run, || refused(1)] {
        let mut next = Story::after(&first.kept(), newer.clone());
        assert_eq!((next.in_force(None), next.state.is_unchecked()), ("one".into(), true));
        let mut expected = vec!["try (all), Desktop".to_owned()];
        if matches!(result(), Err(Some(_))) {
            // The former manager's report is not known.
            expected.extend(["refuse (all): no".into(), "refuse Desktop: no".into()]);
        }
        assert_eq!(next.wants(&newer, result), expected);
        let expected = if result().is_ok() { "two" } else { "one" };
        assert_eq!(next.in_force(None), expected);
    }
    // It was corrected while no manager ran.
    let next = Story::after(&first.kept(), folder("one", &[("Desktop", "a")]));
    assert_eq!((next.in_force(None), next.state.is_unchecked(), next.state.waits()), ("one".into(), false, false));
    // A set that was never in force is used at once: no VM uses it yet.
    let next = Story::after(&first.kept(), folder("one", &[("Desktop", "a"), ("New", "c")]));
    assert_eq!((next.in_force(Some("New")), next.state.is_unchecked()), ("c".into(), false));
    // After an upgrade, what was in force may not compile any more.
    let kept = ((None, None), Layers { base: broken().sources().base, named: None });
    let next = Story::after(&[kept].into(), newer);
    assert_eq!((next.in_force(None), next.state.is_unchecked()), ("two".into(), false));
}

#[test]
fn a_set_that_is_gone_stays_in_force_while_vms_use_it() {
    let mut story = Story::new(folder("one", &[("Desktop", "a")]));
    story.users = [("Desktop".to_owned(), 2)].into();
    let gone = folder("one", &[]);
    let message = "refuse Desktop: the set is gone, but 2 VMs use it; the manager keeps it until it ends";
    assert_eq!(story.wants(&gone, passes), [message]);
    assert_eq!(story.in_force(Some("Desktop")), "a");
    assert_eq!(story.waits(5, 1, passes), NOTHING, "it is reported once");
    story.users.clear();
    assert_eq!(story.waits(10, 1, passes), ["gone: Desktop"]);
    assert!(story.in_force(Some("Desktop")).starts_with("no template set is named"));
    assert!(!story.state.waits());
}

#[test]
fn vms_keep_the_versions_that_their_values_match() {
    let mut story = Story::new(folder("one", &[]));
    let first = story.state.in_force().library.get(None).unwrap().version().to_owned();
    let versions = |story: &Story| -> Vec<String> {
        story.state.in_force().former.iter().map(|former| text(&former.templates)).collect()
    };
    // The check says which; here it is asked as the sets are tried.
    let wants = |story: &mut Story, text: &str, kept: Vec<String>| {
        let wanted = story.state.wanted.clone();
        story.state.next(Input::Wanted(folder(text, &[]), wanted), story.now);
        let tried = [(None, Ok(kept.into_iter().collect()))].into();
        story.state.next(Input::SetsTried { tried, users: BTreeMap::new() }, story.now);
    };
    wants(&mut story, "two", vec![first.clone()]);
    assert_eq!(versions(&story), ["one"]);
    // A set that is refused changes nothing, and neither does one that is in force.
    story.wants(&folder("three", &[]), || refused(1));
    assert_eq!(versions(&story), ["one"]);
    story.wants(&folder("two", &[]), passes);
    assert_eq!(versions(&story), ["one"]);
    let next = Story::after(&story.kept(), folder("two", &[]));
    assert_eq!(versions(&next), ["one"]);
    wants(&mut story, "four", vec![]);
    assert_eq!(versions(&story), NOTHING);
}

#[test]
fn files_that_can_not_be_read_are_reported_and_the_last_ones_stay() {
    let mut story = Story::new(folder("one", &[]));
    let unreadable = Gathered { unreadable: Some(TemplateError::refused("x", "no folder")), ..folder("one", &[]) };
    assert_eq!(story.wants(&unreadable, passes), ["refuse (all): no folder"]);
    assert_eq!(story.waits(10, 1, passes), NOTHING, "it is reported once");
    assert!(story.state.waits() && story.in_force(None) == "one");
    assert_eq!(story.wants(&folder("one", &[]), passes), NOTHING);
    assert!(!story.state.waits(), "they can be read again");
}

#[test]
fn a_configuration_is_tried_with_the_sets_in_force_and_then_with_the_changed_ones() {
    let no = || Err(Some(Refused { error: TemplateError::refused("pod.yaml.j2", "no"), vm: None }));
    let (one, two) = (folder("one", &[]), folder("two", &[]));
    let refuse = "refuse configuration: cpuOvercommit: pod.yaml.j2: no";
    for (what, gathered, mut results, expected, in_force) in [
        ("it passes", &one, vec![Ok(())], vec!["try configuration with one", "use configuration: cpuOvercommit"], 2),
        (
            "they need each other",
            &two,
            vec![no(), Ok(())],
            vec![
                "try configuration with one",
                "try configuration with two",
                "use configuration: cpuOvercommit",
                "try (all)",
            ],
            2,
        ),
        (
            "refused with both",
            &two,
            vec![no(), no()],
            vec!["try configuration with one", "try configuration with two", refuse, "try (all)"],
            1,
        ),
        (
            "the second check could not run",
            &one,
            vec![no(), Err(None)],
            vec!["try configuration with one", "try configuration with one", refuse],
            1,
        ),
        ("the check could not run", &one, vec![Err(None)], vec!["try configuration with one"], 1),
    ] {
        let mut story = Story::new(one.clone());
        results.reverse();
        story.config = results;
        assert_eq!(story.wants_config(gathered, config(2)), expected, "{what}");
        assert_eq!(**story.state.config(), *config(in_force), "{what}");
        assert_eq!(story.state.waits(), in_force == 1, "{what}");
    }
    // It is reported once, until it passes or is taken back.
    let mut story = Story::new(one.clone());
    story.config = vec![no(), no(), no(), no()];
    assert_eq!(story.wants_config(&one, config(2)).last().unwrap(), refuse);
    let tries = ["try configuration with one"; 2];
    assert_eq!(story.waits(5, 1, passes), tries);
    assert!(story.state.in_force().refusal(&vm(|_| ())).is_some_and(TemplateError::is_of_configuration));
    assert_eq!(story.wants_config(&one, config(1)), ["configuration taken back"]);
    assert!(story.state.in_force().refusal(&vm(|_| ())).is_none() && !story.state.waits());
}

#[test]
fn what_a_configuration_does_not_allow_any_more_holds_at_once() {
    let mut story = Story::new(folder("one", &[]));
    let limited =
        ReconcilerConfig { cloud_init_label: "example.org/allowed".into(), ..ReconcilerConfig::clone(&config(1)) };
    assert_eq!(story.wants_config(&folder("one", &[]), Arc::new(limited.clone())), ["limit"]);
    assert_eq!(**story.state.config(), limited);
}
