use std::collections::BTreeSet;

use proptest::{collection::vec, prelude::*};

use super::{Decision::*, *};

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn hello(user: &str, session: &str, wish: Wish) -> Hello {
    Hello { user: user.into(), session: session.into(), wish }
}

/// Joins the screen, with a session that has the connection's number.
fn join(viewers: &mut Viewers, id: Id, user: &str, wish: Wish, seconds: u64) -> Vec<Decision> {
    viewers.join(id, hello(user, &format!("s{id}"), wish), Console::Vnc, at(seconds))
}

/// Ann controls the screen since 0 s, with connection 1.
fn in_use() -> Viewers {
    let mut viewers = Viewers::default();
    assert_eq!(join(&mut viewers, 1, "ann", Wish::Control, 0), [LetIn(1)]);
    viewers
}

fn replaced(id: Id, user: &str) -> Decision {
    Replace { id, user: user.into() }
}

fn in_use_by(id: Id, user: &str) -> Decision {
    InUse { id, user: user.into() }
}

fn question(asks: Id, user: &str) -> [Decision; 2] {
    [Wait { asks, user: "ann".into() }, Question { controller: 1, asks, user: user.into() }]
}

#[test]
fn who_asks_gets_an_answer_or_control_after_its_time() {
    for (agrees, expected) in [(true, vec![replaced(1, "bob"), LetIn(2)]), (false, vec![Refuse(2)])] {
        let mut viewers = in_use();
        assert_eq!(join(&mut viewers, 2, "bob", Wish::Ask, 5), question(2, "bob"));
        assert_eq!(join(&mut viewers, 3, "eve", Wish::Ask, 6), [in_use_by(3, "ann")], "one asks at a time");
        assert_eq!(viewers.answer(2, 2, true, at(7)), [], "nobody answers for another one");
        assert_eq!(viewers.answer(1, 3, true, at(7)), [], "not to another question");
        assert_eq!(viewers.answer(1, 2, agrees, at(7)), expected);
        assert_eq!(viewers.next_time(), None);
    }
    let mut viewers = in_use();
    join(&mut viewers, 2, "bob", Wish::Ask, 5);
    assert_eq!(viewers.next_time(), Some(at(15)));
    assert_eq!(viewers.pass_time(at(14)), []);
    assert_eq!(viewers.pass_time(at(15)), [replaced(1, "bob"), LetIn(2)]);
    assert_eq!(viewers.pass_time(at(16)), []);
}

#[test]
fn who_wants_control_gets_it_only_if_no_other_user_has_it() {
    let mut viewers = in_use();
    assert_eq!(join(&mut viewers, 2, "bob", Wish::Control, 1), [in_use_by(2, "ann")]);
    assert_eq!(join(&mut viewers, 3, "ann", Wish::Control, 2), [replaced(1, "ann"), LetIn(3)], "in another window");
    assert_eq!(viewers.leave(2, at(3)), [], "it was not let in");
    assert_eq!(viewers.leave(3, at(4)), []);
    assert_eq!(join(&mut viewers, 4, "bob", Wish::Control, 5), [LetIn(4)]);
}

#[test]
fn who_leaves_frees_control_and_who_takes_over_gets_it_at_once() {
    let mut viewers = in_use();
    assert_eq!(join(&mut viewers, 2, "bob", Wish::Watch, 1), [LetIn(2)]);
    join(&mut viewers, 3, "eve", Wish::Ask, 2);
    assert_eq!(viewers.leave(1, at(3)), [LetIn(3)]);
    join(&mut viewers, 4, "joe", Wish::Ask, 4);
    let decisions = [replaced(3, "kim"), in_use_by(4, "kim"), LetIn(5)];
    assert_eq!(join(&mut viewers, 5, "kim", Wish::TakeOver, 5), decisions);
    join(&mut viewers, 6, "lea", Wish::Ask, 6);
    assert_eq!(viewers.leave(6, at(7)), [Withdraw { controller: 5, asks: 6 }]);
    assert_eq!(viewers.leave(5, at(8)), []);
    let left: Vec<_> = viewers.list(at(8)).into_iter().map(|viewer| (viewer.user, viewer.mode)).collect();
    assert_eq!(left, [("bob".to_owned(), Mode::Watches)]);
}

#[test]
fn who_is_asked_in_one_window_may_answer_in_another() {
    let mut viewers = in_use();
    join(&mut viewers, 2, "bob", Wish::Ask, 1);
    let again = Question { controller: 3, asks: 2, user: "bob".into() };
    assert_eq!(join(&mut viewers, 3, "ann", Wish::Control, 2), [replaced(1, "ann"), LetIn(3), again]);
    assert_eq!(viewers.answer(3, 2, false, at(3)), [Refuse(2)]);
}

#[test]
fn the_channels_of_a_session_are_one_viewer() {
    let mut viewers = Viewers::default();
    let ann = || hello("ann", "s", Wish::Control);
    for id in 1..=3 {
        assert_eq!(viewers.join(id, ann(), Console::Spice, at(0)), [LetIn(id)]);
    }
    assert_eq!(viewers.list(at(9)).len(), 1);
    assert_eq!(viewers.list(at(9))[0].seconds, 9);
    assert_eq!(viewers.leave(1, at(1)), []);
    assert_eq!(join(&mut viewers, 4, "bob", Wish::Control, 2), [in_use_by(4, "ann")]);
    assert_eq!(join(&mut viewers, 5, "bob", Wish::TakeOver, 2), [replaced(2, "bob"), replaced(3, "bob"), LetIn(5)]);
}

#[test]
fn several_people_use_the_serial_console_and_nobody_loses_the_screen_by_it() {
    let mut viewers = in_use();
    for (id, wish) in [(2, Wish::Control), (3, Wish::TakeOver), (4, Wish::Watch)] {
        assert_eq!(viewers.join(id, hello("bob", "s", wish), Console::Serial, at(1)), [LetIn(id)]);
    }
    join(&mut viewers, 5, "eve", Wish::Ask, 1);
    assert_eq!(viewers.leave(2, at(2)), []);
    let modes: Vec<_> = viewers.list(at(2)).into_iter().map(|viewer| (viewer.console, viewer.mode)).collect();
    let expected = [
        (Console::Vnc, Mode::Controls),
        (Console::Serial, Mode::Controls),
        (Console::Serial, Mode::Watches),
        (Console::Vnc, Mode::Asks),
    ];
    assert_eq!(modes, expected);
}

/// Only connections that are there are told something.
fn check(decision: Decision, viewers: &Viewers, connected: &mut BTreeSet<Id>) -> Result<(), TestCaseError> {
    match decision {
        LetIn(id) | Wait { asks: id, .. } => prop_assert!(viewers.all.contains_key(&id)),
        Question { controller, asks, .. } => {
            prop_assert!(viewers.all.contains_key(&controller) && viewers.all.contains_key(&asks));
        }
        Withdraw { controller, .. } => prop_assert!(viewers.all.contains_key(&controller)),
        Replace { id, .. } | InUse { id, .. } | Refuse(id) => {
            prop_assert!(connected.remove(&id) && !viewers.all.contains_key(&id));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn at_most_one_session_controls_and_nobody_asks_for_ever(
        steps in vec((0..8u8, 0..12u64, any::<bool>(), 0..8u64), 0..60),
    ) {
        let (mut viewers, mut now, mut next) = (Viewers::default(), Duration::ZERO, 0u64);
        let mut connected = BTreeSet::new();
        for (step, of, agrees, pause) in steps {
            now += Duration::from_secs(pause);
            for decision in viewers.pass_time(now) {
                check(decision, &viewers, &mut connected)?;
            }
            let id = next.saturating_sub(of);
            let decisions = match step {
                0..=3 => {
                    next += 1;
                    connected.insert(next);
                    let wish = [Wish::Watch, Wish::Ask, Wish::TakeOver, Wish::Control][usize::from(step)];
                    let (user, session) = (["ann", "bob", "eve"][(of % 3) as usize], ["s", "t"][(of % 2) as usize]);
                    viewers.join(next, hello(user, session, wish), Console::Vnc, now)
                }
                4 | 5 => {
                    connected.remove(&id);
                    viewers.leave(id, now)
                }
                _ => {
                    let asks = viewers.asks().unwrap_or_default();
                    viewers.answer(id, asks, agrees, now)
                }
            };
            for decision in decisions {
                check(decision, &viewers, &mut connected)?;
            }
            let of = |mode| viewers.list(now).into_iter().filter(|it| it.mode == mode).collect::<Vec<_>>();
            prop_assert!(of(Mode::Controls).len() <= 1 && of(Mode::Asks).len() <= of(Mode::Controls).len());
            prop_assert_eq!(viewers.next_time().is_some(), !of(Mode::Asks).is_empty());
            prop_assert!(viewers.next_time().is_none_or(|at| at > now && at <= now + ANSWER_TIME));
        }
    }
}
