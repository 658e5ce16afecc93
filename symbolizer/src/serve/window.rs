//! The end of a window: resolved, its profile written, its log kept as a capture like any other.
//!
//! Also knows the names of logs, and removes the oldest. Called by `keeper.rs`.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use stackwire_formats::{pmu, pprof};

use super::Config;
use crate::capture::{self, Artifacts};
use crate::profile::{Profile, unite};
use crate::receive::log::Closed;
use crate::resolve::{Pinned, resolve};

/// Resolves a window, writes its profiles, and keeps its log as a capture like any other.
pub(super) fn finish(config: &Config, closed: Closed) {
    let Closed { path, pinned, assembler } = closed;
    keep(config, &path, write_profile(config, &path, assembler.finish(), pinned));
}

/// The same of a log that an earlier server left.
pub(super) fn finish_old(config: &Config, path: &Path) {
    let captured = fs::File::open(path).map_err(anyhow::Error::from);
    let captured = captured.and_then(|file| Ok(capture::read(io::BufReader::new(file))?));
    let written =
        captured.and_then(|captured| write_profile(config, path, captured, Pinned::default()));
    keep(config, path, written);
}

fn keep(config: &Config, path: &Path, written: anyhow::Result<Vec<PathBuf>>) {
    match written {
        Ok(written) => {
            for written in written {
                tracing::info!("wrote {}", written.display());
            }
        }
        Err(error) => {
            tracing::warn!("cannot write the profile of {}: {error}", path.display());
        }
    }
    let kept = path.with_extension("stackwire");
    if let Err(error) = fs::rename(path, &kept) {
        let (from, to) = (path.display(), kept.display());
        tracing::warn!("cannot keep {from} as {to}: {error}");
    }
    prune(&config.log_dir, config.log_max);
}

/// Extension of a log a server was killed with, and which the next one is resolving.
pub(super) const TRIED: &str = "tried";

/// Keeps a log as a capture, without a profile.
pub(super) fn give_up(path: &Path) {
    let kept = path.with_extension("stackwire");
    let (from, to) = (path.display(), kept.display());
    match fs::rename(path, &kept) {
        Ok(()) => tracing::warn!(
            "the server ended twice while it resolved a window: kept as {to}, without a profile"
        ),
        Err(error) => tracing::warn!("cannot keep {from} as {to}: {error}"),
    }
}

fn write_profile(
    config: &Config,
    path: &Path,
    (mut profile, artifacts): (Profile, Artifacts),
    pinned: Pinned,
) -> anyhow::Result<Vec<PathBuf>> {
    if profile.samples.is_empty() && profile.sched.is_empty() {
        for (reason, (count, _)) in &profile.lost {
            tracing::warn!("{}: no samples, lost {count} {}", path.display(), reason.text());
        }
        return Ok(Vec::new());
    }
    let start = jiff::Timestamp::from_nanosecond(i128::from(profile.start_ns))?;
    let host: String = profile
        .origin
        .hostname
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' })
        .collect();
    // To the millisecond and with the capture: windows may be short, collectors many on a host.
    let id = path
        .file_stem()
        .and_then(|stem| stem.to_str())
        .and_then(|stem| stem.get(..8))
        .unwrap_or("capture");
    let name = format!("{host}-{}-{id}", start.strftime("%Y%m%d%H%M%S%3f"));
    let mut written = Vec::new();
    let mut write = |part: &str, write: &dyn Fn(&mut dyn io::Write) -> io::Result<()>| {
        let path = config.output_dir.join(format!("{name}-{part}"));
        let out = tempfile::NamedTempFile::new_in(&config.output_dir)?;
        let mut buffered = io::BufWriter::new(&out);
        write(&mut buffered)?;
        buffered.flush()?;
        drop(buffered);
        out.persist(&path)?;
        written.push(path);
        anyhow::Ok(())
    };
    if !profile.sched.is_empty() {
        let options = pmu::Options { format: pmu::Format::Json, per_pid: true };
        write("pmu.json", &|out| pmu::write(&profile, options, out))?;
    }
    if !profile.samples.is_empty() {
        let names = resolve(&profile, &artifacts, &config.sources.with_pinned(pinned));
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
    Ok(written)
}

/// Removes the oldest finished logs beyond `most` bytes.
fn prune(directory: &Path, most: u64) {
    let mut logs: Vec<_> = files(directory, "stackwire")
        .into_iter()
        .filter_map(|path| {
            let metadata = fs::metadata(&path).ok()?;
            Some((metadata.modified().ok()?, metadata.len(), path))
        })
        .collect();
    logs.sort();
    let mut bytes: u64 = logs.iter().map(|(_, length, _)| length).sum();
    for (_, length, path) in logs {
        if bytes <= most {
            break;
        }
        if fs::remove_file(&path).is_ok() {
            bytes -= length;
        }
    }
}

/// Logs in a directory with this extension, by name; nothing else that may lie there.
pub(super) fn files(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .filter(|path| parts(path).is_some())
        .collect();
    paths.sort();
    paths
}

/// Capture and window a log is of: its name is 32 hex digits, a dash, six digits.
pub(super) fn parts(path: &Path) -> Option<(&str, u64)> {
    let (capture, window) = path.file_stem()?.to_str()?.split_once('-')?;
    let is_id = capture.len() == 32 && capture.bytes().all(|byte| byte.is_ascii_hexdigit());
    let window = window.parse().ok().filter(|_| window.len() >= 6)?;
    is_id.then_some((capture, window))
}
