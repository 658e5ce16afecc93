//! One stream at a time for each capture: the newest. A collector that comes back does not wait for
//! its old connection to be given up.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, watch};

use super::id::CaptureId;
use super::identity::Identity;

/// How long the old stream may take to put away what it holds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who streams.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<HashMap<Key, Place>>);

/// A capture, and who says that it is theirs.
type Key = (Identity, CaptureId);

/// Of a capture.
#[derive(Debug)]
struct Place {
    stream: Arc<tokio::sync::Mutex<()>>,
    /// Tells the newest that there is a newer one.
    newest: watch::Sender<bool>,
    /// Streams that have a turn or wait for it.
    streams: usize,
}

/// The right to write the logs of a capture.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    key: Key,
    /// Free for the next as soon as this is dropped.
    guard: Option<OwnedMutexGuard<()>>,
}

impl Turns {
    /// Waits until no other stream of the capture is there, and tells those that they are replaced.
    /// `None` when the old one does not end, or a newer one has come. The receiver turns true when
    /// this one is replaced.
    pub(super) async fn take(self: &Arc<Self>, key: Key) -> Option<(Turn, watch::Receiver<bool>)> {
        let (newest, mut replaced) = watch::channel(false);
        let stream = {
            let mut all = self.lock();
            let place = all.entry(key.clone()).or_insert_with(|| Place {
                stream: Arc::default(),
                newest: watch::channel(false).0,
                streams: 0,
            });
            place.streams += 1;
            let _ = std::mem::replace(&mut place.newest, newest).send(true);
            Arc::clone(&place.stream)
        };
        // From here on, dropped with its count if this wait is given up.
        let mut turn = Turn { turns: Arc::clone(self), key, guard: None };
        tokio::select! {
            biased;
            _ = replaced.wait_for(|replaced| *replaced) => return None,
            guard = stream.lock_owned() => turn.guard = Some(guard),
            () = tokio::time::sleep(PATIENCE) => return None,
        }
        Some((turn, replaced))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Place>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.guard = None;
        let mut all = self.turns.lock();
        if let Some(place) = all.get_mut(&self.key) {
            place.streams -= 1;
            if place.streams == 0 {
                all.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_stream_of_a_capture_has_the_turn() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let turns = Arc::<Turns>::default();
            let id = (Identity::Loopback, CaptureId([1; 16]));
            let other = (Identity::Anyone, CaptureId([1; 16]));
            let (first, mut replaced) = turns.take(id.clone()).await.unwrap();
            let _other = turns.take(other).await.unwrap();
            // A thousand come; all but the last are sent away, and none keeps a thread.
            let waiting: Vec<_> = (0..1000)
                .map(|_| {
                    let (turns, id) = (Arc::clone(&turns), id.clone());
                    tokio::spawn(async move { turns.take(id).await })
                })
                .collect();
            replaced.wait_for(|replaced| *replaced).await.unwrap();
            tokio::task::yield_now().await;
            drop(first);
            let mut got = 0;
            for stream in waiting {
                if let Some(turn) = stream.await.unwrap() {
                    got += 1;
                    drop(turn);
                }
            }
            assert_eq!(got, 1);
            assert_eq!(turns.lock().len(), 1, "the other's");
        });
    }
}
