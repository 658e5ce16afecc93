//! Entry points for fuzzing, a reader each. What a reader accepts must be written. For `fuzz/`.

use std::io::{Cursor, Seek, Write, sink};

use stackwire_model::profile::{Builder, Names, Profile};

use crate::Elsewhere;

/// Reads a perf.data.
pub fn perf_data(bytes: &[u8]) {
    let Ok(mut file) = tempfile::tempfile() else { return };
    let written = file.write_all(bytes).and_then(|()| file.rewind());
    let mut into = Builder::new();
    into.keep_timeline();
    if written.is_ok() && crate::perf_data::read(file, &mut into, 0, &mut Elsewhere).is_ok() {
        outputs(&into.build());
    }
}

/// Reads a pprof that is not compressed.
pub fn pprof(bytes: &[u8]) {
    let mut into = Builder::new();
    if crate::pprof::read(bytes, false, &mut into, 0, &mut Elsewhere).is_ok() {
        outputs(&into.build());
    }
    let mut zipped = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    if zipped.write_all(bytes).is_ok()
        && let Ok(zipped) = zipped.finish()
    {
        let largest = crate::pprof::Largest { bytes: 200, samples: 3 };
        let _ = crate::pprof::split(&*zipped, largest);
    }
}

/// Reads a profile of gperftools.
pub fn gperftools(bytes: &[u8]) {
    let mut into = Builder::new();
    if crate::gperftools::read(bytes, &mut into, 0).is_ok() {
        outputs(&into.build());
    }
}

/// Reads folded stacks.
pub fn folded(bytes: &[u8]) {
    let mut into = Builder::new();
    if crate::folded::read(bytes, &mut into, 0).is_ok() {
        outputs(&into.build());
    }
}

fn outputs(profile: &Profile) {
    let names = Names::default();
    let named = names.of(profile);
    let _ = crate::pprof::write(named, &Default::default(), sink());
    let options = crate::report::Options { by: Some("comm"), ..Default::default() };
    let _ = crate::report::write(named, &options, sink());
    let _ = crate::folded::write(named, None, sink());
    let _ = crate::perf_data::write(profile, &Default::default(), Cursor::new(Vec::new()));
}
