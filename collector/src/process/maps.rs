//! Executable mappings of a process that already runs: `PROCMAP_QUERY`, else `/proc/PID/maps`.
//!
//! Reads what the kernel says about mappings and opens no mapped file, so
//! a kernel without `PROCMAP_QUERY` (before 6.11) gives no build-ids here. Called by
//! `process/mod.rs`, and by `pipeline.rs` for files that cannot be told by their build-ids.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;

use stackwire_model::{BuildId, Device, ExecutableKey, FileId, FileOffset, MapsLine, UserAddr};

use super::life::living_task;
use crate::sources::side_band::Mapped;

/// Executable mappings of `pid`, by address.
///
/// # Errors
/// Those of opening and reading `/proc/PID/maps`: `NotFound` when the process is gone,
/// `PermissionDenied` without `CAP_PERFMON` (kernel 6.15 and newer) or `CAP_SYS_PTRACE`.
pub fn read(pid: u32) -> io::Result<Vec<Mapped>> {
    let found = of_task(pid)?;
    if found.is_empty() { living_task(pid).map_or(Ok(found), of_task) } else { Ok(found) }
}

/// Where a process has its OpenTelemetry process context, if it has one and its mappings may be
/// read.
#[must_use]
pub fn context(pid: u32) -> Option<UserAddr> {
    let task = living_task(pid).unwrap_or(pid);
    context_in(&std::fs::read(format!("/proc/{task}/maps")).ok()?)
}

/// The mapping of one of the names that the specification has for it. Pure.
fn context_in(text: &[u8]) -> Option<UserAddr> {
    const NAMES: [&str; 4] = [
        "[anon:OTEL_CTX]",
        "[anon_shmem:OTEL_CTX]",
        "/memfd:OTEL_CTX",
        "/memfd:OTEL_CTX (deleted)",
    ];
    let is_it = |line: &MapsLine<'_>| NAMES.iter().any(|name| name.as_bytes() == line.path);
    MapsLine::all(text).find(is_it).map(|line| line.start)
}

/// The file behind a mapping the kernel told of; none when that mapping is gone, may not be looked
/// at, or the kernel does not know the ioctl: to read all mappings for one would take too long.
#[must_use]
pub fn file_of(pid: u32, told: &Mapped) -> Option<FileId> {
    let file = File::open(format!("/proc/{pid}/maps")).ok()?;
    // Without the build-id: for it the kernel would read the file, which may be of a file system
    // that does not answer.
    let found = query(&file, told.start.0, &mut []).ok()??;
    let place = |mapped: &Mapped| (mapped.start, mapped.length, mapped.file_offset);
    // By now the process may run another program. Its root directory may be another than ours.
    let same =
        place(&found) == place(told) && found.path_when_mapped().ends_with(told.path_when_mapped());
    found.key.filter(|_| same)?.file()
}

fn of_task(pid: u32) -> io::Result<Vec<Mapped>> {
    let mut file = File::open(format!("/proc/{pid}/maps"))?;
    match query_all(&file) {
        Ok(mappings) => Ok(mappings),
        // ENOTTY and EINVAL: the kernel does not know the ioctl.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
            let mut text = Vec::new();
            file.read_to_end(&mut text)?;
            Ok(parse(&text))
        }
        // The address space is gone: a zombie, or on its way there.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Executable mappings in the text of `/proc/PID/maps`. Pure.
fn parse(text: &[u8]) -> Vec<Mapped> {
    let executable = MapsLine::all(text).filter(|line| line.is_executable);
    let mapped = |line: MapsLine<'_>| Mapped {
        start: line.start,
        length: line.end.0 - line.start.0,
        file_offset: line.file_offset,
        path: String::from_utf8_lossy(line.path).into_owned(),
        key: line.file.map(Into::into),
        is_ambiguous: false,
    };
    executable.map(mapped).collect()
}

/// `struct procmap_query` of include/uapi/linux/fs.h, kernel 6.11.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: u64 =
    (3 << 30) | ((size_of::<ProcmapQuery>() as u64) << 16) | (0x66 << 8) | 17;
const VMA_EXECUTABLE: u64 = 0x04;
const COVERING_OR_NEXT_VMA: u64 = 0x10;

fn query_all(maps: &File) -> io::Result<Vec<Mapped>> {
    let mut found = Vec::new();
    let mut from = 0;
    let mut build_id = [0u8; 20];
    while let Some(mapped) = query(maps, from, &mut build_id)? {
        from = mapped.end().0;
        found.push(mapped);
    }
    Ok(found)
}

/// The first executable mapping that ends above `address`; by its build-id where there is room for
/// one.
fn query(maps: &File, address: u64, build_id: &mut [u8]) -> io::Result<Option<Mapped>> {
    let mut name = [0u8; 4096];
    let mut request = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_flags: VMA_EXECUTABLE | COVERING_OR_NEXT_VMA,
        query_addr: address,
        vma_name_size: name.len() as u32,
        build_id_size: build_id.len() as u32,
        vma_name_addr: name.as_mut_ptr() as u64,
        build_id_addr: if build_id.is_empty() { 0 } else { build_id.as_mut_ptr() as u64 },
        ..ProcmapQuery::default()
    };
    // SAFETY: the request is the struct the ioctl takes, its two buffers have the sizes it states,
    // and all three outlive the call.
    let result = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut request) };
    if result < 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ENOENT) { Ok(None) } else { Err(error) };
    }
    let path = name.get(..(request.vma_name_size as usize).saturating_sub(1)).unwrap_or(&[]);
    let build_id = BuildId::new(build_id.get(..request.build_id_size as usize).unwrap_or(&[]));
    let device = Device { major: request.dev_major, minor: request.dev_minor };
    let file = FileId::new(request.inode, device);
    Ok(Some(Mapped {
        start: UserAddr(request.vma_start),
        length: request.vma_end - request.vma_start,
        file_offset: FileOffset(request.vma_offset),
        path: String::from_utf8_lossy(path).into_owned(),
        key: ExecutableKey::of(build_id, file),
        is_ambiguous: false,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_in_a_mapping_with_its_very_name() {
        let at = |name: &str| {
            let text = format!(
                "1000-2000 r-xp 00000000 08:01 7                          /bin/x\n\
                 2000-3000 rw-p 00000000 00:00 0                          {name}\n"
            );
            context_in(text.as_bytes())
        };
        for name in ["[anon:OTEL_CTX]", "[anon_shmem:OTEL_CTX]", "/memfd:OTEL_CTX (deleted)"] {
            assert_eq!(at(name), Some(UserAddr(0x2000)), "{name}");
        }
        for name in ["[anon:OTEL_CTX_old]", "/tmp/memfd:OTEL_CTX", "OTEL_CTX", ""] {
            assert_eq!(at(name), None, "{name}");
        }
    }

    #[test]
    fn both_ways_tell_the_same_of_this_process() {
        let queried = read(std::process::id()).unwrap();
        let parsed = parse(&std::fs::read("/proc/self/maps").unwrap());
        let spans = |mappings: &[Mapped]| -> Vec<_> {
            mappings.iter().map(|m| (m.start, m.length, m.file_offset, m.path.clone())).collect()
        };
        let vsyscall = |m: &(UserAddr, u64, FileOffset, String)| m.3 != "[vsyscall]";
        let parsed: Vec<_> = spans(&parsed).into_iter().filter(vsyscall).collect();
        assert_eq!(spans(&queried), parsed);
    }

    #[test]
    fn a_file_is_told_where_nothing_else_is_mapped_by_now() {
        let pid = std::process::id();
        let maps = parse(&std::fs::read("/proc/self/maps").unwrap());
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let told = maps.into_iter().find(|mapped| exe.ends_with(&mapped.path)).unwrap();
        // Kernels before 6.11 tell nothing.
        let knows = query(&File::open("/proc/self/maps").unwrap(), 0, &mut []).is_ok();
        assert_eq!(file_of(pid, &told), told.key.and_then(ExecutableKey::file).filter(|_| knows));
        for other in [
            Mapped { length: told.length + 4096, ..told.clone() },
            Mapped { file_offset: told.file_offset.saturating_add(4096), ..told.clone() },
            Mapped { path: "/bin/other".to_owned(), ..told.clone() },
            Mapped { start: told.start.saturating_sub(4096), ..told },
        ] {
            assert_eq!(file_of(pid, &other), None);
        }
    }
}
