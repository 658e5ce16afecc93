//! Executable mappings of a process that already runs: `PROCMAP_QUERY`, else `/proc/PID/maps`.
//!
//! The text parser is pure. Reads what the kernel says about mappings and opens no mapped file, so
//! a kernel without `PROCMAP_QUERY` (before 6.11) gives no build-ids here. Called by
//! `process/mod.rs`, and by `pipeline.rs` for files that cannot be told by their build-ids.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;

use stackwire_model::{BuildId, Device, ExecutableKey, FileId, FileOffset, UserAddr};

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
    text.split(|&byte| byte == b'\n').find_map(|line| {
        let line = std::str::from_utf8(line).ok()?;
        let name = line.splitn(6, ' ').nth(5)?.trim_start();
        let (start, _) = line.split_once('-').filter(|_| NAMES.contains(&name))?;
        hex(start).map(UserAddr)
    })
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

/// Executable mappings in the text of `/proc/PID/maps`; lines that are none are passed over.
#[must_use]
pub fn parse(text: &[u8]) -> Vec<Mapped> {
    text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

/// `start-end perms offset major:minor inode   path`, proc_pid_maps(5).
fn parse_line(line: &[u8]) -> Option<Mapped> {
    let line = String::from_utf8_lossy(line);
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (hex(start)?, hex(end)?);
    if fields.next()?.as_bytes().get(2) != Some(&b'x') {
        return None;
    }
    let file_offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let device = Device { major: number(major)?, minor: number(minor)? };
    let key = ExecutableKey::of(None, FileId::new(fields.next()?.parse().ok()?, device));
    let path = fields.next().unwrap_or("").trim_start().to_owned();
    let length = end.checked_sub(start)?;
    let (start, file_offset) = (UserAddr(start), FileOffset(file_offset));
    Some(Mapped { start, length, file_offset, path, key, is_ambiguous: false })
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
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
    use proptest::prelude::*;

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
    fn parses_the_lines_the_kernel_writes() {
        let text = b"\
55d0-66d0 r-xp 00002000 fe:01 1234                       /usr/bin/a program (deleted)\n\
7000-8000 rw-p 00000000 00:00 0                          [heap]\n\
9000-a000 r-xp 00000000 00:00 0 \n\
nonsense\n";
        let mappings = parse(text);
        assert_eq!(mappings.len(), 2);
        assert_eq!(mappings[0].path, "/usr/bin/a program (deleted)");
        assert_eq!((mappings[0].start, mappings[0].length), (UserAddr(0x55d0), 0x1100));
        assert_eq!(mappings[0].file_offset, FileOffset(0x2000));
        let device = Device { major: 0xfe, minor: 1 };
        assert_eq!(mappings[0].key, FileId::new(1234, device).map(Into::into));
        assert_eq!(mappings[1].path, "");
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

    proptest! {
        #[test]
        fn never_panics(line in "\\PC{0,80}") {
            let _ = parse(line.as_bytes());
        }
    }
}
