//! perf.data: the samples one by one, with what perf needs to name them itself. Only classic
//! records are written, in time order: perf of any age, hotspot, samply and autofdo read them.
//!
//! The address of a caller is that of the call, as everywhere in a profile; the kernel would write
//! the return address. perf looks call chains up as they are. A tool that subtracts one more still
//! finds the call.

mod header;
pub mod interpreted;
pub mod jitted;
mod play;
mod record;

use std::io::{self, Seek, SeekFrom, Write};

use stackwire_model::profile::{Executable, Moment, Profile};

use self::play::Player;
use self::record::Mode;

/// What is written besides the profile.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The program that writes the file, with its version, for `perf report --header`.
    pub program: String,
    /// Its command line, likewise.
    pub command_line: Vec<String>,
    /// Code made at run time and functions of interpreters are said to be in files that
    /// [`jitted_images`](super::jitted_images) and [`interpreted_image`](super::interpreted_image)
    /// are; otherwise perf looks for a perf-map, and the functions have no names.
    pub jitted: bool,
}

/// Writes a profile that was read with its timeline.
///
/// # Errors
/// Those of the writer; `InvalidInput` when the samples have no times.
pub fn write(profile: &Profile, options: &Options, mut out: impl Write + Seek) -> io::Result<()> {
    let with_times: u64 = profile.timeline.iter().map(Moment::count).sum();
    if with_times != profile.sample_count() {
        let message = "its samples have no times, which perf.data is made of";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    // What the head says of the rest is known at the end.
    let head_bytes = header::data_offset(profile.series.len());
    out.write_all(&vec![0; head_bytes as usize])?;
    let mut player = Player::new(profile, options.jitted, &mut out);
    player.play()?;
    let (data, times, used) = (player.bytes(), player.times(), player.into_used());
    let mut build_ids = Vec::new();
    for (index, executable) in profile.executables.iter().enumerate() {
        let (mode, name) = match executable {
            Executable::Kernel { module, .. } => (Mode::Kernel, kernel_name(module)),
            _ if !used[index] => continue,
            _ => (Mode::User, executable.name()),
        };
        build_ids.extend(executable.build_id().map(|id| (id, mode, name)));
    }
    let cpus = profile.origin.cpus;
    let highest = profile.timeline.iter().map(|moment| moment.cpu() + 1).max().unwrap_or(1);
    let head = header::Head {
        origin: &profile.origin,
        series: &profile.series,
        program: &options.program,
        command_line: &options.command_line,
        times,
        clock_zero_ns: profile.clock_zero_ns,
        cpus: (cpus.0.max(highest), cpus.1.max(1).min(cpus.0.max(highest))),
        build_ids,
    };
    let features = header::features(&head, head_bytes + data);
    out.write_all(&features)?;
    out.seek(SeekFrom::Start(0))?;
    out.write_all(&header::head(&head, data))?;
    out.flush()
}

/// What perf calls the kernel, and a module.
fn kernel_name(module: &str) -> String {
    if module.is_empty() { "[kernel.kallsyms]".to_owned() } else { format!("[{module}]") }
}
