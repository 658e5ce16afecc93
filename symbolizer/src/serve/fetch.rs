//! A profile of what is kept, made when it is asked for: captures of some clients, a stretch of
//! time, samples with some labels.
//!
//! Samples that are not asked for are not added, nor their stacks, and beyond some memory there is
//! no profile. Called by `api.rs`, on threads that may block.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::ops::Range;
use std::sync::Arc;

use stackwire_formats::{flamegraph, folded, perf_data, pmu, pprof};
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, v1};

use super::answers::Format;
use super::asked::Kept;
use super::identity::Identity;
use super::keeper::Keepers;
use crate::VERSION;
use crate::capture::{Assembler, CaptureError};
use crate::profile::{Named, Only, unite};
use crate::receive::handed::Handed;
use crate::receive::tenant::Tenant;
use crate::resolve::resolve;

/// What is asked for.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// Milliseconds since the Unix epoch.
    pub time_ms: Range<u64>,
    /// For each label, one of the values given for it.
    pub labels: Vec<(String, String)>,
    /// One event of several.
    pub event: Option<String>,
    pub format: Format,
}

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoProfile {
    #[error("nothing that is kept fits what was asked for")]
    Nothing,
    #[error("no samples of {0} are among what was asked for")]
    NoEvent(String),
    #[error(
        "it would take more than {} MiB of memory: ask for less time, or for fewer processes",
        .0 >> 20
    )]
    TooLarge(u64),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Makes a profile of windows, in a file that is read from its beginning.
pub(super) fn make(
    keepers: &Keepers,
    windows: &[Kept],
    wanted: &Wanted,
) -> Result<File, NoProfile> {
    let (config, most) = (&keepers.config, keepers.ledger.limits.request());
    let sources = &config.sources;
    let assembler = match wanted.format {
        Format::PerfData => Assembler::with_timeline(),
        _ => Assembler::default(),
    };
    let owner = only_owner(windows);
    let cache = owner.as_ref().and(sources.cache.clone());
    let tenant = Tenant { owner: owner.clone().unwrap_or_default(), cache };
    let handed = Handed::new(sources.scratch.clone(), tenant);
    let mut assembler = assembler.beside(Arc::new(handed));
    let Range { start, end } = wanted.time_ms;
    let time_ns = Some(start.saturating_mul(1_000_000)..end.saturating_mul(1_000_000));
    assembler.keep_only(Only { labels: wanted.labels.clone(), time_ns });
    for window in windows {
        let log = match File::open(window.id.log(&config.log_dir)) {
            Ok(log) => log,
            // Removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error.into()),
        };
        // What grows is read as far as it is whole.
        let bytes = if window.is_open { u64::MAX } else { window.bytes };
        let mut reader = FrameReader::new(BufReader::new(log.take(bytes)));
        loop {
            let message = match reader.next_message() {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(
                        "window {} is not in a profile that was asked for: {error}",
                        window.id
                    );
                    break;
                }
            };
            let is_file = |chunk: &v1::ArtifactChunk| chunk.kind() == v1::ArtifactKind::File;
            match &message.body {
                Some(Body::Artifact(chunk)) if owner.is_none() && is_file(chunk) => continue,
                // It speaks of all of a window.
                Some(Body::End(_)) => continue,
                _ => assembler.add(&message)?,
            }
            if assembler.memory() > most {
                return Err(NoProfile::TooLarge(most));
            }
        }
        assembler.pause();
    }
    let (mut profile, artifacts) = assembler.finish();
    profile.keep_labels(&wanted.labels);
    if let Some(event) = &wanted.event
        && !profile.keep_event(event)
    {
        return Err(NoProfile::NoEvent(event.clone()));
    }
    let is_empty =
        if wanted.format.is_pmu() { profile.sched.is_empty() } else { profile.samples.is_empty() };
    if is_empty {
        return Err(NoProfile::Nothing);
    }
    let is_here = owner.as_deref().is_some_and(Identity::is_name_of_this_host);
    let pinned = keepers.shared.pins.of(&profile.executables).of_host(is_here);
    let sources = sources.with_pinned(pinned);
    let names = resolve(&profile, &artifacts, &sources);
    unite(&mut profile, &names);
    let mut out = sources.scratch.file()?;
    write(names.of(&profile), wanted.format, &mut out)?;
    out.rewind()?;
    Ok(out)
}

/// The one client that windows are of. Files that were handed over give names to a profile of one
/// client alone: there is one executable for each build-id in it, and what one handed over must not
/// name the samples of another.
fn only_owner(windows: &[Kept]) -> Option<String> {
    let first = windows.first()?;
    let is_one = windows.iter().all(|window| window.owner == first.owner);
    (is_one && !first.owner.is_empty()).then(|| first.owner.clone())
}

fn write(profile: Named<'_>, format: Format, out: &mut File) -> io::Result<()> {
    let mut buffered = BufWriter::new(out);
    match format {
        Format::Pprof => pprof::write(profile, &pprof::Options::default(), &mut buffered)?,
        Format::Folded => folded::write(profile, None, &mut buffered)?,
        Format::Flamegraph => {
            let title = flamegraph::amount(&profile);
            let flames =
                flamegraph::Flames { by: None, title: &title, icicle: false, inlined: true };
            flamegraph::write(profile, &flames, &mut buffered)?;
        }
        Format::PerfData => {
            let program = format!("stackwire {VERSION}");
            let options = perf_data::Options { program, command_line: Vec::new(), jitted: false };
            perf_data::write(&profile, &options, &mut buffered)?;
        }
        Format::PmuText | Format::PmuJson => {
            let text = format == Format::PmuText;
            let format = if text { pmu::Format::Text } else { pmu::Format::Json };
            pmu::write(&profile, pmu::Options { format, per_pid: true }, &mut buffered)?;
        }
    }
    buffered.flush()
}
