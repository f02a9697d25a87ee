//! The loop of the fuzz tests: one case after the other, each with a number from which everything in it follows.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long one case may take before it counts as one that does not end. The rendering of a template alone is bounded by its steps to about a
/// second in a debug build.
const HANG: Duration = Duration::from_secs(120);

/// Does cases with the numbers from the one that is returned on, for `FUZZ_SECONDS`; without it so many as `cases` says, and always the same.
/// `case` says whether all outcomes that must be seen have been seen: until then the short test goes on, at most ten times as long. So it does
/// not depend on luck when what is fuzzed changes. `again` says how to do one case again.
pub fn fuzz(cases: u64, again: impl Fn(u64) -> String, mut case: impl FnMut(u64) -> bool) -> u64 {
    let seconds = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let first = if end.is_some() { fastrand::u64(..u64::MAX / 2) } else { 0 };
    let current = Arc::new(AtomicU64::new(first));
    let watched = current.clone();
    thread::spawn(move || {
        let mut last = u64::MAX;
        loop {
            let now = watched.load(Ordering::Relaxed);
            if now == last {
                eprintln!("case {now} does not end");
                process::abort();
            }
            last = now;
            thread::sleep(HANG);
        }
    });
    let mut all_seen = false;
    for number in first.. {
        if end.map_or(number >= cases && (all_seen || number >= 10 * cases), |end| Instant::now() > end) {
            break;
        }
        current.store(number, Ordering::Relaxed);
        match catch_unwind(AssertUnwindSafe(|| case(number))) {
            Ok(seen) => all_seen = seen,
            Err(_) => panic!("case {number} failed; {} does it again", again(number)),
        }
    }
    first
}
