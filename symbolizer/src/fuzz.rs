//! Entry points for fuzzing: captures that other hosts wrote. For `fuzz/`.

use prost::Message;
use stackwire_formats::{pprof, report};

use crate::profile::{Builder, Names, Profile};
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

/// What was accepted must be exportable.
fn outputs(profile: &Profile) {
    let names = Names::default();
    let _ = pprof::write(names.of(profile), &Default::default(), std::io::sink());
    let _ = report::write(names.of(profile), &Default::default(), std::io::sink());
}
