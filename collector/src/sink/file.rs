//! The capture file as a sink: everything in it that reading it back needs, artifacts before the
//! epochs that refer to them, files after.

use std::collections::HashSet;
use std::io::Write;
use std::sync::Arc;

use stackwire_model::{ExecutableKey, Share};
use stackwire_proto::{FrameWriter, v1};

use super::SinkError;
use super::sending::{Part, Sending};
use crate::artifact::Hash;
use crate::handover::Handover;
use crate::outbox::{Next, Outbox};
use crate::wire;

/// Writes until the end of the capture. `name` stands for the writer in messages.
///
/// # Errors
/// The first failed write ends the capture.
pub async fn run(
    outbox: Arc<Outbox>,
    handover: Arc<Handover>,
    hello: v1::CollectorMessage,
    out: impl Write,
    name: String,
) -> Result<(), SinkError> {
    let mut out = FrameWriter::new(std::io::BufWriter::new(out));
    let failed = |error| SinkError::Write { path: name.clone(), error };
    out.write(&hello).map_err(failed)?;
    let mut written: HashSet<Hash> = HashSet::new();
    let mut files: HashSet<ExecutableKey> = HashSet::new();
    let mut from = 0;
    loop {
        match outbox.next(from).await.map_err(SinkError::Spool)? {
            Next::Epoch(epoch) => {
                for artifact in outbox.artifacts_beside(&written) {
                    written.insert(artifact.hash);
                    let mut sending = Sending::artifact(artifact);
                    while let Some(piece) = sending.next().await {
                        out.write(&piece).map_err(failed)?;
                    }
                    if let Some(hash) = sending.failed() {
                        written.remove(&hash);
                        outbox.forget(hash);
                    }
                }
                let number = epoch.number;
                out.write(&wire::message(v1::collector_message::Body::Epoch(epoch)))
                    .map_err(failed)?;
                outbox.acknowledge(number);
                // After it: a file that hangs must not cost what was sampled.
                if handover.share() == Share::Always {
                    for key in handover.files() {
                        if files.insert(key) {
                            let mut sending = Sending::file(&handover, key, Part::From(0));
                            while let Some(piece) = sending.next().await {
                                out.write(&piece).map_err(failed)?;
                            }
                        }
                    }
                }
                from = number + 1;
            }
            Next::End(end) => {
                out.write(&wire::message(v1::collector_message::Body::End(end))).map_err(failed)?;
                return Ok(());
            }
        }
    }
}
