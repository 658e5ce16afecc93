//! The kernel's clocks as nanoseconds.
//!
//! Sample and event times come from the kernel, which knows no time namespaces. A collector inside
//! one (`unshare -T`, a container that CRIU restored) reads clocks with an offset, so the offset is
//! taken off here.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use rustix::time::{ClockId, clock_gettime};

/// `CLOCK_MONOTONIC` of the initial time namespace, nanoseconds: the clock of sample times.
#[must_use]
pub fn now_ns() -> u64 {
    static OFFSET: OnceLock<i64> = OnceLock::new();
    let offset = *OFFSET.get_or_init(|| own_offset(Path::new("/proc/self"), "monotonic"));
    nanoseconds(ClockId::Monotonic).wrapping_sub(offset as u64)
}

/// `CLOCK_REALTIME`, nanoseconds. Time namespaces do not change it.
#[must_use]
pub fn realtime_ns() -> u64 {
    nanoseconds(ClockId::Realtime)
}

/// What `CLOCK_BOOTTIME` is ahead of `CLOCK_MONOTONIC`, nanoseconds: the time the host was
/// suspended.
#[must_use]
pub fn boottime_offset_ns() -> i64 {
    nanoseconds(ClockId::Boottime).wrapping_sub(nanoseconds(ClockId::Monotonic)) as i64
}

/// `CLOCK_BOOTTIME` of the initial time namespace, nanoseconds: the clock of starts of processes.
#[must_use]
pub fn boottime_ns() -> u64 {
    nanoseconds(ClockId::Boottime).saturating_add_signed(-boottime_of_namespace_ns())
}

/// CPU time that the threads of a process have used, those that have ended among them, nanoseconds.
/// None where it is gone. Of a thread that runs now, what it used since the last tick is missing.
#[must_use]
pub fn cpu_time_ns(pid: u32) -> Option<u64> {
    // The clock of a process, that of its scheduling: CPUCLOCK_SCHED of
    // include/linux/posix-timers_types.h. clock_getcpuclockid(3) makes the same number.
    let clock = (!pid as i32) << 3 | 2;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes to `time` alone.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (result == 0).then(|| time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// What this process's time namespace adds to `CLOCK_BOOTTIME`, nanoseconds.
#[must_use]
pub fn boottime_of_namespace_ns() -> i64 {
    static OFFSET: OnceLock<i64> = OnceLock::new();
    *OFFSET.get_or_init(|| own_offset(Path::new("/proc/self"), "boottime"))
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// What this process's time namespace adds to a clock, nanoseconds; 0 on kernels without time
/// namespaces (before 5.6).
///
/// `timens_offsets` describes the time namespace of the children. After `unshare` without a fork,
/// this is not the process's own time namespace (time_namespaces(7)). The process itself is then
/// still in the initial namespace, unless namespaces are nested.
fn own_offset(process: &Path, clock: &str) -> i64 {
    let namespace = |name| fs::read_link(process.join("ns").join(name)).ok();
    if namespace("time") != namespace("time_for_children") {
        return 0;
    }
    fs::read_to_string(process.join("timens_offsets")).map_or(0, |text| offset_of(&text, clock))
}

/// The line `CLOCK SECONDS NANOSECONDS` of `/proc/PID/timens_offsets`, in nanoseconds; 0 if
/// there is none.
fn offset_of(text: &str, clock: &str) -> i64 {
    let fields = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut offsets = fields.filter_map(|fields| match fields[..] {
        [name, seconds, nanoseconds] if name == clock => Some(
            seconds
                .parse::<i64>()
                .ok()?
                .checked_mul(1_000_000_000)?
                .checked_add(nanoseconds.parse().ok()?)?,
        ),
        _ => None,
    });
    offsets.next().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn offsets_of_a_time_namespace_are_read() {
        // From `unshare -T --monotonic=-100 cat /proc/self/timens_offsets`.
        assert_eq!(
            offset_of(
                "monotonic        -100         0\nboottime            5         0\n",
                "monotonic"
            ),
            -100_000_000_000
        );
        // The kernel keeps nanoseconds positive.
        assert_eq!(offset_of("monotonic -1 999999999\nboottime 0 0\n", "monotonic"), -1);
        assert_eq!(offset_of("", "monotonic"), 0);
        assert_eq!(offset_of("monotonic x y", "monotonic"), 0);
        assert_eq!(offset_of("monotonic 99999999999999999 0", "monotonic"), 0);
    }

    #[test]
    fn offsets_of_children_are_not_the_own() {
        let process = tempfile::tempdir().unwrap();
        let links = process.path().join("ns");
        fs::create_dir(&links).unwrap();
        fs::write(process.path().join("timens_offsets"), "monotonic 7 1\nboottime 0 0\n").unwrap();
        symlink("time:[4026531834]", links.join("time")).unwrap();
        symlink("time:[4026532345]", links.join("time_for_children")).unwrap();
        assert_eq!(own_offset(process.path(), "monotonic"), 0);
        fs::remove_file(links.join("time")).unwrap();
        symlink("time:[4026532345]", links.join("time")).unwrap();
        assert_eq!(own_offset(process.path(), "monotonic"), 7_000_000_001);
    }
}
