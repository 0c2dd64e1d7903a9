//! How does one waiter, a thread or a task, learn that it should look again?
//!
//! A waiter listens, looks, and only then sleeps: whoever changes what it looks at rings
//! afterwards, so either the look sees the change or the sleep ends at once.
//!
//! Safety property:
//! A. The bell's own lock is held over no foreign code: a waker is cloned, run and dropped without
//!    it. A waker may poll the task, or drop it, before it returns.

use std::future::Future;
use std::pin::Pin;
use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::sync::primitives::{Arc, Condvar, Mutex, MutexGuard};

/// The bell of one waiter, and of its clones. A ring that nobody listens for is lost.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bell(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct State {
    rings: u64,
    /// Of the task that was polled last.
    waker: Option<Waker>,
    /// Threads that sleep: to wake none is a call of the system, too.
    sleepers_count: usize,
}

impl Shared {
    /// A panic elsewhere does not tear the state: every change is one assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bell {
    /// Hears every ring from here on.
    pub(crate) fn listen(&self) -> Listening {
        let heard = self.0.state().rings;
        let bell = Arc::clone(&self.0);
        Listening { bell, heard }
    }

    /// Says whether the other one is a clone of this.
    pub(crate) fn is(&self, other: &Bell) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Wakes who listens. It may run the waker of a task: call it with no lock held.
    pub(crate) fn ring(&self) {
        let (waker, sleeps) = {
            let mut state = self.0.state();
            state.rings += 1;
            (state.waker.take(), state.sleepers_count > 0)
        };
        if sleeps {
            self.0.rung.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Sleeps for a moment, for nobody's ring. Not parked: the thread may be an executor's, which is
/// told to go on by a token that a parked sleep would take.
pub(crate) fn pause(time: Duration) {
    let (nothing, never) = (std::sync::Mutex::new(()), std::sync::Condvar::new());
    let held = nothing.lock().unwrap_or_else(PoisonError::into_inner);
    drop(never.wait_timeout(held, time));
}

/// Somebody who listens, until the first ring. As a future it never blocks.
#[derive(Debug)]
pub(crate) struct Listening {
    bell: Arc<Shared>,
    /// How often the bell had rung before.
    heard: u64,
}

impl Listening {
    /// Sleeps until the bell rings or the time is over; `None`: as long as it takes. It may end
    /// early: whoever sleeps looks again.
    pub(crate) fn sleep(self, time: Option<Duration>) {
        let mut state = self.bell.state();
        state.sleepers_count += 1;
        while state.rings == self.heard {
            // Under the scheduler no time passes.
            let time = time.filter(|_| cfg!(not(all(test, idemlog_shuttle))));
            let Some(time) = time else {
                let woken = self.bell.rung.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let woken = self.bell.rung.wait_timeout(state, time);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            break;
        }
        state.sleepers_count -= 1;
    }
}

impl Future for Listening {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // Upholds A: the former waker is dropped behind the lock.
        let waker = cx.waker().clone();
        let (former, answer) = {
            let mut state = self.bell.state();
            if state.rings == self.heard {
                (state.waker.replace(waker), Poll::Pending)
            } else {
                (Some(waker), Poll::Ready(()))
            }
        };
        drop(former);
        answer
    }
}

#[cfg(all(test, not(idemlog_shuttle)))]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::sync::{Arc, Mutex};
    use std::task::Wake;

    /// A waker that polls what it wakes, and drops it when it is ready, before it returns.
    struct Inline {
        task: Mutex<Option<Listening>>,
        told: Mutex<mpsc::Sender<bool>>,
    }

    impl Wake for Inline {
        fn wake(self: Arc<Self>) {
            let task = self.task.lock().expect("no test panics here").take();
            let mut task = task.expect("one ring");
            let waker = Waker::from(Arc::clone(&self));
            let polled = Pin::new(&mut task).poll(&mut Context::from_waker(&waker));
            drop(task);
            let told = self.told.lock().expect("no test panics here");
            told.send(polled.is_ready()).unwrap_or_default();
        }
    }

    /// Story: the bell's lock was held while the waker ran, so a waker that polled its task, or
    /// dropped it, waited for itself.
    #[test]
    fn a_waker_may_poll_and_drop_its_task_at_once() {
        let (told, polled) = mpsc::channel();
        let bell = Bell::default();
        let mut listening = bell.listen();
        let inline = Arc::new(Inline {
            task: Mutex::default(),
            told: Mutex::new(told),
        });
        let waker = Waker::from(Arc::clone(&inline));
        let mut context = Context::from_waker(&waker);
        assert!(Pin::new(&mut listening).poll(&mut context).is_pending());
        *inline.task.lock().unwrap() = Some(listening);
        let ringing = std::thread::Builder::new().spawn(move || bell.ring());
        let polled = polled.recv_timeout(Duration::from_secs(20));
        assert_eq!(polled, Ok(true), "the waker is stuck");
        ringing.unwrap().join().unwrap();
    }

    #[test]
    fn a_pause_leaves_the_token_of_its_thread() {
        let (told, done) = mpsc::channel();
        let parked = std::thread::Builder::new().spawn(move || {
            std::thread::current().unpark();
            pause(Duration::from_millis(1));
            std::thread::park();
            told.send(()).unwrap();
        });
        let done = done.recv_timeout(Duration::from_secs(20));
        assert_eq!(done, Ok(()), "the token is gone");
        parked.unwrap().join().unwrap();
    }

    #[test]
    fn rings_before_the_listening_are_not_heard_and_later_ones_are() {
        let bell = Bell::default();
        bell.ring();
        let listening = bell.listen();
        let early = bell.listen();
        early.sleep(Some(Duration::from_millis(1)));
        bell.ring();
        listening.sleep(None);
    }
}
