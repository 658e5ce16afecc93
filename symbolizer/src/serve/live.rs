//! What streams are doing now: since when, how fast. Filled by keepers, read by `api.rs`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::id::CaptureId;
use super::index::now_ms;
use crate::receive::log::Tally;

/// A rate is of this long, in steps of this.
const RECENT: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_secs(1);

/// Captures that have a stream.
#[derive(Debug, Default)]
pub(super) struct Live(Mutex<HashMap<CaptureId, Streaming>>);

#[derive(Debug)]
struct Streaming {
    number: u64,
    since: Instant,
    recent: VecDeque<(Instant, u64)>,
    now: Streamed,
}

/// What has come of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Streamed {
    /// When epochs came last, milliseconds since the Unix epoch.
    pub last_ms: u64,
    /// In the last minute, or since it began.
    pub samples_per_second: f64,
    /// In windows that are not closed.
    pub samples: u64,
    pub lost: u64,
    pub stacks: u64,
    pub whole: u64,
}

/// A stream while it is there.
#[derive(Debug)]
pub(super) struct OnAir {
    live: Arc<Live>,
    capture: CaptureId,
    number: u64,
}

impl Live {
    /// A stream begins; another one of the capture is over then.
    pub(super) fn begin(self: &Arc<Self>, capture: CaptureId) -> OnAir {
        let mut all = self.lock();
        let number = all.get(&capture).map_or(0, |before| before.number + 1);
        let (since, recent) = (Instant::now(), VecDeque::new());
        all.insert(capture, Streaming { number, since, recent, now: Streamed::default() });
        OnAir { live: Arc::clone(self), capture, number }
    }

    /// What a capture does now, if it has a stream.
    pub(super) fn of(&self, capture: &CaptureId) -> Option<Streamed> {
        let mut all = self.lock();
        let streaming = all.get_mut(capture)?;
        streaming.forget_old();
        let samples: u64 = streaming.recent.iter().map(|(_, samples)| samples).sum();
        let seconds = streaming.since.elapsed().min(RECENT).as_secs_f64();
        Some(Streamed { samples_per_second: samples as f64 / seconds.max(1.0), ..streaming.now })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CaptureId, Streaming>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Streaming {
    fn forget_old(&mut self) {
        while self.recent.front().is_some_and(|(at, _)| at.elapsed() > RECENT) {
            self.recent.pop_front();
        }
    }
}

impl OnAir {
    /// Epochs have come; what the windows hold that are not closed.
    pub(super) fn came(&self, samples: u64, open: impl Iterator<Item = Tally>) {
        let mut all = self.live.lock();
        let Some(streaming) = all.get_mut(&self.capture) else { return };
        streaming.forget_old();
        // Of epochs that come faster than that, one entry has several.
        match streaming.recent.back_mut() {
            Some((at, before)) if at.elapsed() < STEP => *before += samples,
            _ => streaming.recent.push_back((Instant::now(), samples)),
        }
        let last_ms = u64::try_from(now_ms()).unwrap_or(0);
        streaming.now =
            open.fold(Streamed { last_ms, ..Streamed::default() }, |sum, of| Streamed {
                samples: sum.samples.saturating_add(of.samples),
                lost: sum.lost.saturating_add(of.lost_samples),
                stacks: sum.stacks.saturating_add(of.stacks),
                whole: sum.whole.saturating_add(of.whole),
                ..sum
            });
    }
}

impl Drop for OnAir {
    fn drop(&mut self) {
        let mut all = self.live.lock();
        if all.get(&self.capture).is_some_and(|streaming| streaming.number == self.number) {
            all.remove(&self.capture);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_is_live_while_its_newest_stream_is_there() {
        let live = Arc::new(Live::default());
        let capture = CaptureId([1; 16]);
        let first = live.begin(capture);
        let second = live.begin(capture);
        let tally = Tally { samples: 30, lost_samples: 2, stacks: 20, whole: 19, ..<_>::default() };
        second.came(30, std::iter::once(tally));
        drop(first);
        let now = live.of(&capture).unwrap();
        assert_eq!((now.samples, now.lost, now.stacks, now.whole), (30, 2, 20, 19));
        assert!((29.0..=30.0).contains(&now.samples_per_second), "{now:?}");
        // Of a stream that nobody asks about.
        for _epoch in 0..10_000 {
            second.came(1, std::iter::empty());
        }
        assert!(live.lock()[&capture].recent.len() < 10);
        drop(second);
        assert_eq!(live.of(&capture), None);
    }
}
