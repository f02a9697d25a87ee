//! A limit of how much is done at once, which what hangs does not use up.

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::{sync::Semaphore, time::timeout};

/// How long work keeps its slot. After that it does nothing itself but waits for something else (such as a slow admission webhook), so the
/// next may begin. Others are thus held up for a bounded time, however many hang.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// A number of slots for work. Clones share them.
#[derive(Clone)]
pub struct Slots(Arc<Semaphore>);

impl Slots {
    /// As many slots.
    pub fn new(number: usize) -> Self {
        Self(Arc::new(Semaphore::new(number)))
    }

    /// Does the work when there is a free slot. Who came first begins first.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        // An error would mean that the semaphore is closed, which nobody does.
        let slot = self.0.acquire().await;
        let mut work = pin!(work);
        match timeout(PATIENCE, &mut work).await {
            Ok(result) => result,
            Err(_) => {
                drop(slot);
                work.await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt as _, future::join_all};
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn at_most_as_many_work_at_once_as_there_are_slots() {
        let (slots, start) = (Slots::new(2), Instant::now());
        let work = (0..6).map(|_| slots.run(async { sleep(PATIENCE / 2).await }).map(|()| start.elapsed()));
        let half = PATIENCE.as_millis() / 2;
        let ended: Vec<_> = join_all(work).await.iter().map(|ended| ended.as_millis() / half).collect();
        assert_eq!(ended, [1, 1, 2, 2, 3, 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_hangs_gives_up_its_slot_and_is_still_finished() {
        let (slots, start) = (Slots::new(2), Instant::now());
        let hanging = join_all((0..4).map(|_| slots.run(sleep(100 * PATIENCE).map(|()| start.elapsed()))));
        let quick = async {
            // Those that hang came first.
            tokio::task::yield_now().await;
            slots.run(async { start.elapsed() }).await
        };
        let (hanging, quick) = futures::future::join(hanging, quick).await;
        assert_eq!(quick.as_secs_f64().round() as u64, 2 * PATIENCE.as_secs());
        assert!(hanging.iter().all(|ended| *ended >= 100 * PATIENCE), "{hanging:?}");
    }
}
