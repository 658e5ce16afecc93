//! Entry points for fuzzing: captures that other hosts wrote. For `fuzz/`.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use prost::Message;
use stackwire_formats::{pprof, report};

use tonic::codegen::Bytes;

use crate::profile::{Builder, Names, Profile};
use crate::receive::messages::Messages;
use crate::{ingest, read_capture};

/// Reads a capture.
pub fn capture(bytes: &[u8]) {
    if let Ok((profile, _)) = read_capture(bytes) {
        outputs(&profile);
    }
}

/// Adds an epoch as it is inside its frame, past checksum and compression.
pub fn epoch(bytes: &[u8]) {
    let Ok(epoch) = stackwire_proto::v1::Epoch::decode(bytes) else { return };
    let mut builder = Builder::new();
    // Of one event, as the greeting of format 1 has it.
    let (origin, mut context) = ingest::hello(&Default::default());
    context.begin(&mut builder, 0, origin);
    if ingest::epoch(&epoch, &context, &mut builder).is_ok() {
        outputs(&builder.build());
    }
}

/// Reads a stream of a collector, in pieces whose length the first byte says.
pub fn messages(bytes: &[u8]) {
    let Some((length, rest)) = bytes.split_first() else { return };
    let pieces = rest.chunks(usize::from(*length).max(1)).map(Bytes::copy_from_slice);
    let body = tonic::body::Body::new(Pieces(pieces.collect()));
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else {
        return;
    };
    runtime.block_on(async {
        let mut messages = Messages::new(body, None, 1 << 20);
        while let Ok(Some(message)) = messages.next().await {
            assert!(message.bytes <= bytes.len());
        }
    });
}

struct Pieces(VecDeque<Bytes>);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(http_body::Frame::data(piece))))
    }
}

/// What was accepted must be exportable.
fn outputs(profile: &Profile) {
    let names = Names::default();
    let _ = pprof::write(names.of(profile), &Default::default(), std::io::sink());
    let _ = report::write(names.of(profile), &Default::default(), std::io::sink());
}
