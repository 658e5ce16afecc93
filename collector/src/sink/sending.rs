//! A file on its way: pieces in order, or the reason why there are none. Used by both sinks.

use stackwire_proto::v1::CollectorMessage;

use crate::artifact::Hash;
use crate::handover::{Content, FileId, Handover};
use crate::wire;

/// What is left to be said of a file.
#[derive(Debug)]
pub(super) struct Sending {
    id: FileId,
    content: Result<Content, String>,
    /// Where the next piece starts; `None` when all was said.
    at: Option<u64>,
}

impl Sending {
    /// Opens a file, to send it from `offset` on. Blocks.
    pub(super) fn start(handover: &Handover, id: FileId, offset: u64) -> Self {
        let content = handover.open(&id);
        // What is there of a longer one is of another file: from the beginning.
        let fits = content.as_ref().is_ok_and(|content| offset <= content.length);
        Self { id, content, at: Some(if fits { offset } else { 0 }) }
    }

    /// The next message.
    pub(super) fn next(&mut self) -> Option<CollectorMessage> {
        let at = self.at?;
        let read = self.content.as_ref().map_err(Clone::clone).and_then(|content| {
            let piece = content.piece(at).map_err(|error| error.to_string())?;
            Ok((content, piece))
        });
        match read {
            Ok((content, piece)) => {
                let next = at + piece.len() as u64;
                self.at = (next < content.length).then_some(next);
                let whole = (&content.hash, content.length);
                Some(wire::file_piece(&self.id, whole, Ok((at, &piece))))
            }
            Err(reason) => {
                self.at = None;
                Some(wire::file_piece(&self.id, (&Hash([0; 32]), 0), Err(&reason)))
            }
        }
    }
}
