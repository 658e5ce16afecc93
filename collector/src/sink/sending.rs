//! A file on its way: pieces in order, or the reason why there are none. Used by both sinks.
//!
//! Read on a thread of its own: what hangs, on a file system that does not answer, must not keep epochs waiting.

use std::sync::Arc;
use std::time::Duration;

use stackwire_proto::v1::CollectorMessage;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::artifact::Hash;
use crate::handover::{FileId, Handover};
use crate::wire;

/// How long the first piece, before which all of the file is read for its hash, and each after it may take.
const LIMIT: Duration = Duration::from_secs(20);

/// A file being read.
#[derive(Debug)]
pub(super) struct Sending {
    id: FileId,
    pieces: Option<mpsc::Receiver<CollectorMessage>>,
}

impl Sending {
    /// Begins to read a file, to send it from `offset` on.
    pub(super) fn start(handover: &Arc<Handover>, id: FileId, offset: u64) -> Self {
        let (out, pieces) = mpsc::channel(1);
        let (of, handover) = (id.clone(), Arc::clone(handover));
        let thread = std::thread::Builder::new().name("handover".to_owned());
        // Without a thread the channel is closed, which is the end of it.
        let _ = thread.spawn(move || read(&handover, &of, offset, &out));
        Self { id, pieces: Some(pieces) }
    }

    /// The next message; `None` when all was said.
    pub(super) async fn next(&mut self) -> Option<CollectorMessage> {
        match timeout(LIMIT, self.pieces.as_mut()?.recv()).await {
            Ok(message) => message,
            Err(_elapsed) => {
                self.pieces = None;
                let seconds = LIMIT.as_secs();
                let reason = format!("it could not be read within {seconds} s");
                Some(wire::file_piece(&self.id, (&Hash([0; 32]), 0), Err(&reason)))
            }
        }
    }
}

/// Ends early when nobody takes what it reads.
fn read(handover: &Handover, id: &FileId, offset: u64, out: &mpsc::Sender<CollectorMessage>) {
    let refused = |reason: String| wire::file_piece(id, (&Hash([0; 32]), 0), Err(&reason));
    let content = match handover.open(id) {
        Ok(content) => content,
        Err(reason) => {
            let _ = out.blocking_send(refused(reason));
            return;
        }
    };
    // What is there of a longer one is of another file: from the beginning.
    let mut at = if offset <= content.extent.length { offset } else { 0 };
    loop {
        let (message, next) = match content.extent.piece(at) {
            Ok(piece) => {
                let whole = (&content.hash, content.extent.length);
                let next = at + piece.len() as u64;
                (wire::file_piece(id, whole, Ok((at, &piece))), next)
            }
            Err(error) => (refused(error.to_string()), content.extent.length),
        };
        if out.blocking_send(message).is_err() || next >= content.extent.length {
            return;
        }
        at = next;
    }
}
