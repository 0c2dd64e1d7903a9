//! How does one waiter, a thread or a task, learn that it should look again?
//!
//! A waiter listens, looks, and only then sleeps: whoever changes what it looks at rings
//! afterwards, so either the look sees the change or the sleep ends at once.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

#[cfg(not(all(test, idemlog_shuttle)))]
use self::events as made_of;
#[cfg(all(test, idemlog_shuttle))]
use self::scheduled as made_of;

/// The bell of one waiter. A ring that nobody listens for is lost.
#[derive(Debug, Default)]
pub(crate) struct Bell(made_of::Event);

impl Bell {
    /// Hears every ring from here on.
    pub(crate) fn listen(&self) -> Listening {
        Listening(self.0.listen())
    }

    /// Wakes who listens. It may run the waker of a task: call it with no lock held.
    pub(crate) fn ring(&self) {
        self.0.ring();
    }
}

/// Somebody who listens, until the first ring. As a future it never blocks.
#[derive(Debug)]
pub(crate) struct Listening(made_of::Listener);

impl Listening {
    /// Sleeps until the bell rings or the time is over; `None`: as long as it takes.
    pub(crate) fn sleep(self, time: Option<Duration>) {
        self.0.sleep(time);
    }
}

impl Future for Listening {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.poll(cx)
    }
}

/// The bell that ships.
#[cfg(not(all(test, idemlog_shuttle)))]
mod events {
    use super::{Context, Duration, Future, Pin, Poll};
    use event_listener::{EventListener, Listener as _};

    #[derive(Debug, Default)]
    pub(super) struct Event(event_listener::Event);

    impl Event {
        pub(super) fn listen(&self) -> Listener {
            Listener(self.0.listen())
        }

        pub(super) fn ring(&self) {
            self.0.notify(1);
        }
    }

    #[derive(Debug)]
    pub(super) struct Listener(EventListener);

    impl Listener {
        pub(super) fn sleep(self, time: Option<Duration>) {
            match time {
                Some(time) => drop(self.0.wait_timeout(time)),
                None => self.0.wait(),
            }
        }

        pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
            Pin::new(&mut self.0).poll(cx)
        }
    }
}

/// The same out of what a scheduler can interleave. Time does not pass there: whoever sleeps for a
/// time sleeps until it is rung.
#[cfg(all(test, idemlog_shuttle))]
mod scheduled {
    use super::{Context, Duration, Poll};
    use shuttle::sync::{Arc, Condvar, Mutex};
    use std::task::Waker;

    #[derive(Debug, Default)]
    struct State {
        rings: u64,
        wakers: Vec<Waker>,
    }

    #[derive(Debug, Default)]
    pub(super) struct Event(Arc<(Mutex<State>, Condvar)>);

    impl Event {
        pub(super) fn listen(&self) -> Listener {
            let heard = self.0.0.lock().unwrap().rings;
            Listener(Arc::clone(&self.0), heard)
        }

        pub(super) fn ring(&self) {
            let mut state = self.0.0.lock().unwrap();
            state.rings += 1;
            let wakers = std::mem::take(&mut state.wakers);
            drop(state);
            self.0.1.notify_all();
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    #[derive(Debug)]
    pub(super) struct Listener(Arc<(Mutex<State>, Condvar)>, u64);

    impl Listener {
        pub(super) fn sleep(self, _time: Option<Duration>) {
            let mut state = self.0.0.lock().unwrap();
            while state.rings == self.1 {
                state = self.0.1.wait(state).unwrap();
            }
        }

        pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
            let mut state = self.0.0.lock().unwrap();
            if state.rings != self.1 {
                return Poll::Ready(());
            }
            state.wakers.push(cx.waker().clone());
            Poll::Pending
        }
    }
}
