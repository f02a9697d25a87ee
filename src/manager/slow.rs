//! VMs whose reconcile takes long, such as those whose objects a slow admission webhook looks at. They hold up no other VM.
//!
//! ```text
//!  queue ─▶ reconcile ─┬─ ends within a second ──────────────────────────▶ queue, after the pause that it wants
//!    ▲                 └─ takes longer: goes on beside the queue ─ ends ─┐
//!    └─ after the pause that it wants; at once if the VM changed ────────┘
//! ```
//!
//! A VM is never reconciled twice at once: what comes for one that goes on beside the queue waits for its end.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{
    FutureExt, Stream, StreamExt,
    channel::mpsc::{self, UnboundedSender},
    future::BoxFuture,
};
use kube::runtime::reflector::ObjectRef;
use tokio::time::{sleep, timeout};

use crate::{
    cluster::packed::PackedVm,
    process::{lock, slots::PATIENCE},
};

/// The VMs whose reconcile goes on beside the queue.
pub struct Slow {
    /// Whether each changed meanwhile.
    changed: Mutex<HashMap<ObjectRef<PackedVm>, bool>>,
    work: UnboundedSender<BoxFuture<'static, ()>>,
    again: UnboundedSender<(ObjectRef<PackedVm>, Duration)>,
}

/// What belongs to a [`Slow`].
pub struct Beside<Work, Again> {
    /// Starts reconciles.
    pub slow: Arc<Slow>,
    /// Does what goes on beside the queue. It ends when `slow` is gone and all are done.
    pub work: Work,
    /// The VMs that are to be reconciled again.
    pub again: Again,
}

impl Slow {
    /// No VM yet.
    pub fn start() -> Beside<impl Future<Output = ()> + Send, impl Stream<Item = ObjectRef<PackedVm>> + Send> {
        let (work, beside) = mpsc::unbounded::<BoxFuture<'static, ()>>();
        let (again, pauses) = mpsc::unbounded::<(ObjectRef<PackedVm>, Duration)>();
        Beside {
            slow: Arc::new(Self { changed: Mutex::default(), work, again }),
            work: beside.for_each_concurrent(None, |work| work),
            again: pauses.map(|(vm, pause)| sleep(pause).map(|()| vm)).buffer_unordered(usize::MAX),
        }
    }

    /// Reconciles a VM, and returns after how long it is to be reconciled again. `None` if that needs a change of something, and if the
    /// VM is or comes beside the queue.
    pub async fn run(
        self: Arc<Self>,
        vm: ObjectRef<PackedVm>,
        reconcile: impl Future<Output = Option<Duration>> + Send + 'static,
    ) -> Option<Duration> {
        if let Some(changed) = lock(&self.changed).get_mut(&vm) {
            *changed = true;
            return None;
        }
        let mut reconcile = Box::pin(reconcile);
        if let Ok(pause) = timeout(PATIENCE, &mut reconcile).await {
            return pause;
        }
        lock(&self.changed).insert(vm.clone(), false);
        let this = self.clone();
        let beside = async move {
            let pause = reconcile.await;
            let has_changed = lock(&this.changed).remove(&vm).unwrap_or_default();
            if let Some(pause) = if has_changed { Some(Duration::ZERO) } else { pause } {
                // Nobody listens when the manager ends.
                let _ = this.again.unbounded_send((vm, pause));
            }
        };
        // Who does the work lives as long as `self`.
        let _ = self.work.unbounded_send(beside.boxed());
        None
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::{join, join_all};
    use tokio::time::Instant;

    use super::*;

    fn name(number: usize) -> ObjectRef<PackedVm> {
        ObjectRef::new(&format!("vm-{number}"))
    }

    async fn hang(pause: Option<Duration>) -> Option<Duration> {
        sleep(100 * PATIENCE).await;
        pause
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_waits_a_bounded_time_and_the_reconcile_is_still_finished() {
        let Beside { slow, work, again } = Slow::start();
        let start = Instant::now();
        let queue = async move {
            let quick = slow.clone().run(name(0), async { Some(PATIENCE) }).await;
            assert_eq!((quick, start.elapsed()), (Some(PATIENCE), Duration::ZERO));
            let hanging = (1..100).map(|number| slow.clone().run(name(number), hang(Some(3 * PATIENCE))));
            assert!(join_all(hanging).await.iter().all(Option::is_none));
            assert_eq!(start.elapsed(), PATIENCE);
        };
        join(queue, work).await;
        assert_eq!(start.elapsed(), 100 * PATIENCE, "all are done before the manager ends");
        assert_eq!(again.map(|vm| vm.name).collect::<Vec<_>>().await.len(), 99);
        assert_eq!(start.elapsed(), 103 * PATIENCE, "each after the pause that it wanted");
    }

    #[tokio::test(start_paused = true)]
    async fn a_vm_that_changes_meanwhile_is_reconciled_once_more_and_never_twice_at_once() {
        let Beside { slow, work, again } = Slow::start();
        let (start, under_way) = (Instant::now(), AtomicUsize::new(0));
        let under_way = Arc::new(under_way);
        let reconcile = || {
            let under_way = under_way.clone();
            async move {
                assert_eq!(under_way.fetch_add(1, Ordering::Relaxed), 0);
                hang(None).await;
                under_way.fetch_sub(1, Ordering::Relaxed);
                None
            }
        };
        let queue = async move {
            for _ in 0..5 {
                assert_eq!(slow.clone().run(name(0), reconcile()).await, None);
            }
        };
        join(queue, work).await;
        assert_eq!(again.map(|vm| vm.name).collect::<Vec<_>>().await, ["vm-0"]);
        assert_eq!(start.elapsed(), 100 * PATIENCE);
    }
}
