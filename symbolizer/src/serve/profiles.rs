//! The profiles of a window: resolved, and written beside each other under names of its own.
//!
//! Writing them again replaces them by the same. Called by `closing.rs`.

use std::fs::File;
use std::io::{self, Read, Write as _};

use stackwire_formats::{pmu, pprof};

use super::Config;
use super::id::WindowId;
use super::identity::Identity;
use super::index::Due;
use super::store::{make_directory, sync_directory};
use crate::capture::{self, Assembler};
use crate::profile::{Profile, unite};
use crate::resolve::{Pins, resolve};

/// Most characters of a host's name in those of files.
const MAX_HOST: usize = 64;

/// Resolves a window and writes its profiles: their names, and their bytes.
pub(super) fn write(
    config: &Config,
    due: &Due,
    assembler: Assembler,
    pins: &Pins,
) -> anyhow::Result<Vec<(String, u64)>> {
    let log = File::open(due.id.log(&config.log_dir))?;
    // What is behind was not acknowledged.
    let log = io::BufReader::new(log.take(due.bytes));
    let (mut profile, artifacts) = capture::read_with(log, assembler)?;
    if profile.samples.is_empty() && profile.sched.is_empty() {
        for (reason, (count, _)) in &profile.lost {
            tracing::warn!("window {}: no samples, lost {count} {}", due.id, reason.text());
        }
        return Ok(Vec::new());
    }
    make_directory(&config.output_dir)?;
    let name = name(&profile, due.id)?;
    let mut written = Vec::new();
    let mut write = |part: &str, write: &dyn Fn(&mut dyn io::Write) -> io::Result<()>| {
        let name = format!("{name}-{part}");
        let out = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(&config.output_dir)?;
        let mut buffered = io::BufWriter::new(out.as_file());
        write(&mut buffered)?;
        buffered.flush()?;
        drop(buffered);
        out.as_file().sync_all()?;
        let bytes = out.as_file().metadata()?.len();
        out.persist(config.output_dir.join(&name))?;
        written.push((name, bytes));
        anyhow::Ok(())
    };
    if !profile.sched.is_empty() {
        let options = pmu::Options { format: pmu::Format::Json, per_pid: true };
        write("pmu.json", &|out| pmu::write(&profile, options, out))?;
    }
    if !profile.samples.is_empty() {
        let is_here = due.owner.as_deref().is_none_or(Identity::is_name_of_this_host);
        let pinned = pins.of(&profile.executables).of_host(is_here);
        let sources = config.sources.with_pinned(pinned);
        let names = resolve(&profile, &artifacts, &sources);
        unite(&mut profile, &names);
        let is_wait = |id| profile.series_of(id).event.is_wait;
        let parts = [
            ("on-cpu.pb.gz", pprof::Part::Sampled, profile.sampled_series().any(|id| !is_wait(id))),
            ("off-cpu.pb.gz", pprof::Part::Waits, profile.sampled_series().any(is_wait)),
        ];
        for (name, part, _) in parts.into_iter().filter(|(.., is_there)| *is_there) {
            let tags = config.tags.clone();
            let options = pprof::Options { tags, part, ..pprof::Options::default() };
            write(name, &|out| pprof::write(names.of(&profile), &options, out))?;
        }
    }
    sync_directory(&config.output_dir)?;
    Ok(written)
}

/// By host and time for people; by capture and window, so that no other has it.
fn name(profile: &Profile, id: WindowId) -> anyhow::Result<String> {
    let start = jiff::Timestamp::from_nanosecond(i128::from(profile.start_ns))?;
    let safe = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let host: String = profile.origin.hostname.chars().map(safe).take(MAX_HOST).collect();
    Ok(format!("{host}-{}-{id}", start.strftime("%Y%m%d%H%M%S%3f")))
}

/// What files are called while they are written.
const TEMPORARY: &str = ".stackwire-";

/// Removes what a server before this one was writing when it was killed.
pub(super) fn remove_unfinished(config: &Config) {
    let entries = std::fs::read_dir(&config.output_dir).into_iter().flatten().flatten();
    for entry in entries
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(TEMPORARY.as_bytes()))
    {
        if let Err(error) = std::fs::remove_file(entry.path()) {
            tracing::warn!("cannot remove {}: {error}", entry.path().display());
        }
    }
}
