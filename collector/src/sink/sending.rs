//! A file or an artifact on its way: pieces in order, or the reason why there are none. Used by
//! both sinks.
//!
//! Read on a thread of its own: what hangs, on a file system that does not answer, must not keep
//! epochs waiting.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use stackwire_model::ExecutableKey;
use stackwire_proto::ARTIFACT_PIECE_BYTES;
use stackwire_proto::v1::CollectorMessage;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::artifact::{Artifact, Hash};
use crate::handover::{Handover, NotSent};
use crate::in_time::Slot;
use crate::wire;

/// How long each piece of a file may take. Before the first piece, all of the file is read for its
/// hash.
const FILE_LIMIT: Duration = Duration::from_secs(20);
/// How long all of an artifact may take to be read: its process wrote it to a file system of its
/// choice.
const ARTIFACT_LIMIT: Duration = Duration::from_secs(5);

/// What is asked of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Its hash and length.
    Hash,
    /// Its bytes from this one on.
    From(u64),
}

/// Something being read.
pub(super) struct Sending {
    what: What,
    pieces: Pieces,
    /// Since when a caller waits for the next piece. Several calls may do so, because a call may be
    /// dropped before it is done.
    since: Option<Instant>,
}

enum Pieces {
    /// Of what is in memory.
    Ready(Box<dyn Iterator<Item = CollectorMessage> + Send>),
    /// On a thread.
    Read(mpsc::Receiver<CollectorMessage>),
    /// It took too long.
    GivenUp,
}

#[derive(Debug)]
enum What {
    File(ExecutableKey),
    Artifact {
        hash: Hash,
        /// Pieces still to come.
        pieces: u64,
        /// Time left to wait for them.
        time: Duration,
    },
}

impl Sending {
    /// Begins to read a file, to send a part of it.
    pub(super) fn file(handover: &Arc<Handover>, key: ExecutableKey, part: Part) -> Self {
        static HANGING: AtomicUsize = AtomicUsize::new(0);
        let handover = Arc::clone(handover);
        let pieces = on_a_thread(&HANGING, move |out| read(&handover, key, part, out));
        Self { what: What::File(key), pieces: Pieces::Read(pieces), since: None }
    }

    /// Begins to read an artifact.
    pub(super) fn artifact(artifact: Artifact) -> Self {
        static HANGING: AtomicUsize = AtomicUsize::new(0);
        let what = What::Artifact {
            hash: artifact.hash,
            pieces: artifact.length.div_ceil(ARTIFACT_PIECE_BYTES as u64),
            time: ARTIFACT_LIMIT,
        };
        let pieces = if artifact.is_in_memory() {
            // Needs no slot: files of others that hang must not cost the kernel's names.
            Pieces::Ready(Box::new(wire::pieces(artifact)))
        } else {
            Pieces::Read(on_a_thread(&HANGING, move |out| {
                // Until nobody takes them.
                let _ = wire::pieces(artifact).all(|piece| out.blocking_send(piece).is_ok());
            }))
        };
        Self { what, pieces, since: None }
    }

    /// The next message; `None` when all was said.
    pub(super) async fn next(&mut self) -> Option<CollectorMessage> {
        let limit = match &self.what {
            What::File(_) => FILE_LIMIT,
            What::Artifact { time, .. } => *time,
        };
        let since = *self.since.get_or_insert_with(Instant::now);
        let next = match &mut self.pieces {
            Pieces::Ready(pieces) => Ok(pieces.next()),
            Pieces::Read(pieces) => timeout_at(since + limit, pieces.recv()).await,
            Pieces::GivenUp => return None,
        };
        self.since = None;
        match (&mut self.what, next) {
            (What::Artifact { pieces, time, .. }, Ok(Some(message))) => {
                *pieces = pieces.saturating_sub(1);
                *time = time.saturating_sub(since.elapsed());
                Some(message)
            }
            (What::File(_), Ok(message)) => message,
            (What::Artifact { .. }, Ok(None) | Err(_)) => {
                self.pieces = Pieces::GivenUp;
                None
            }
            (What::File(key), Err(_elapsed)) => {
                self.pieces = Pieces::GivenUp;
                Some(wire::file_piece(*key, (&Hash([0; 32]), 0), Err(&NotSent::Late(FILE_LIMIT))))
            }
        }
    }

    /// The artifact of which not all could be read.
    pub(super) fn failed(&self) -> Option<Hash> {
        match self.what {
            What::Artifact { hash, pieces, .. } => (pieces > 0).then_some(hash),
            What::File(_) => None,
        }
    }
}

/// What a thread reads. Without a thread, or when too many hang, the channel is closed, which is
/// the end of it.
fn on_a_thread(
    hanging: &'static AtomicUsize,
    read: impl FnOnce(&mpsc::Sender<CollectorMessage>) + Send + 'static,
) -> mpsc::Receiver<CollectorMessage> {
    let (out, pieces) = mpsc::channel(1);
    if let Some(slot) = Slot::of(hanging) {
        let thread = std::thread::Builder::new().name("handover".to_owned());
        let _ = thread.spawn(move || {
            let _slot = slot;
            read(&out);
        });
    }
    pieces
}

/// Ends early when nobody takes what it reads.
fn read(handover: &Handover, key: ExecutableKey, part: Part, out: &mpsc::Sender<CollectorMessage>) {
    let refused = |reason: NotSent| wire::file_piece(key, (&Hash([0; 32]), 0), Err(&reason));
    let content = match handover.open(key) {
        Ok(content) => content,
        Err(reason) => {
            let _ = out.blocking_send(refused(reason));
            return;
        }
    };
    let mut at = match part {
        Part::Hash => {
            let whole = (&content.hash, content.extent.length);
            let _ = out.blocking_send(wire::file_piece(key, whole, Ok((0, &[]))));
            return;
        }
        // What is there of a longer one is of another file: from the beginning.
        Part::From(offset) => Some(offset).filter(|at| *at <= content.extent.length).unwrap_or(0),
    };
    loop {
        let (message, next) = match content.extent.piece(at) {
            Ok(piece) => {
                let whole = (&content.hash, content.extent.length);
                let next = at + piece.len() as u64;
                (wire::file_piece(key, whole, Ok((at, &piece))), next)
            }
            Err(error) => (refused(error.into()), content.extent.length),
        };
        if out.blocking_send(message).is_err() || next >= content.extent.length {
            return;
        }
        at = next;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::artifact::{Extent, Kind};

    fn sent(artifact: Artifact) -> (u32, Option<Hash>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut sending = Sending::artifact(artifact);
            let mut pieces = 0;
            while sending.next().await.is_some() {
                pieces += 1;
            }
            (pieces, sending.failed())
        })
    }

    #[test]
    fn an_artifact_comes_whole_or_is_said_to_have_failed() {
        assert_eq!(sent(Artifact::new(Kind::Vdso, vec![1; 9])), (1, None));
        let length = 2 * ARTIFACT_PIECE_BYTES as u64 + 1;
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(length).unwrap();
        let extent = Extent { file: Arc::clone(&file), offset: 0, length };
        let artifact = Artifact::of_file(Kind::PerfMap, extent).unwrap();
        assert_eq!(sent(artifact.clone()), (3, None));
        file.write_all_at(b"other", 0).unwrap();
        assert_eq!(sent(artifact.clone()), (0, Some(artifact.hash)), "it was written anew");
    }
}
