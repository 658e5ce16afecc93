//! What this host knows of a profile that was taken on it: kallsyms and vDSO of its kernel,
//! perf-maps of its processes, executables.
//!
//! Each is used only when it is the same: a kernel is compared by its build-id. A file that is not
//! there is no error. The readers of the crate `formats` use this, and `input.rs` calls it.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Instant;

use stackwire_elf::gnu_build_id;
use stackwire_formats::{Host, Module};
use stackwire_model::{BuildId, KernelAddr, MapsLine};
use stackwire_proto::kallsyms::{Symbol, symbols};

use crate::artifacts::Artifacts;
use crate::profile::{ArtifactHash, Executable};
use crate::resolve::{Sources, open_executable, open_regular};

/// Most bytes of a perf-map.
const MAX_PERF_MAP: u64 = 256 << 20;

/// The kernel's list of its symbols, with the addresses that its opener may see.
#[derive(Debug, Default)]
pub struct Kallsyms(Option<File>);

impl Kallsyms {
    /// Opens it: from then on it does not matter which rights are given up.
    #[must_use]
    pub fn open() -> Self {
        Self(File::open("/proc/kallsyms").ok())
    }

    /// Symbols of the kernel that runs here, if its build-id is this one, as lines `module TAB
    /// offset TAB name`.
    fn of(&self, build_id: BuildId, text: KernelAddr, modules: &[Module<'_>]) -> Option<Vec<u8>> {
        if running_kernel()? != build_id {
            return None;
        }
        let mut file = self.0.as_ref()?;
        file.rewind().ok()?;
        let mut symbols = String::new();
        file.read_to_string(&mut symbols).ok()?;
        rebase(&symbols, text, modules)
    }
}

/// This host, for reading one input.
#[derive(Debug)]
pub struct Here<'a> {
    kallsyms: &'a Kallsyms,
    sources: &'a Sources,
    artifacts: &'a mut Artifacts,
    /// How long servers are waited for, all together; since the first was asked.
    deadline: Option<Instant>,
}

impl<'a> Here<'a> {
    /// Executables are looked for in `sources`; content is kept in `artifacts`.
    pub fn new(kallsyms: &'a Kallsyms, sources: &'a Sources, artifacts: &'a mut Artifacts) -> Self {
        Self { kallsyms, sources, artifacts, deadline: None }
    }
}

impl Host for Here<'_> {
    fn kernel_symbols(
        &mut self,
        kernel: BuildId,
        text: KernelAddr,
        modules: &[Module<'_>],
    ) -> Option<ArtifactHash> {
        self.artifacts.add_whole(self.kallsyms.of(kernel, text, modules)?)
    }

    fn vdso(&mut self, kernel: BuildId) -> Option<ArtifactHash> {
        self.artifacts.add_whole(vdso(kernel)?)
    }

    fn perf_map(&mut self, pid: u32) -> Option<ArtifactHash> {
        self.artifacts.add_whole(perf_map(pid)?)
    }

    fn open(&mut self, executable: &Executable) -> Option<File> {
        let patience = self.sources.debuginfod.as_deref().map(|server| server.timeout());
        let deadline =
            *self.deadline.get_or_insert_with(|| Instant::now() + patience.unwrap_or_default());
        open_executable(executable, self.artifacts, self.sources, deadline).ok()
    }
}

fn rebase(kallsyms: &str, text: KernelAddr, modules: &[Module<'_>]) -> Option<Vec<u8>> {
    let is_base = |it: &Symbol<'_>| it.name == "_text" && it.module.is_empty();
    let here = symbols(kallsyms).find(is_base)?.address;
    let mut snapshot = String::new();
    for Symbol { address, name, module } in symbols(kallsyms) {
        let (module, base) = match module {
            "" => ("", here),
            // Modules lie where they lay only until the next boot, which moves the kernel as well.
            module if here == text => {
                let is_it =
                    |it: &&Module<'_>| it.name == module && (it.start..it.end).contains(&address);
                match modules.iter().find(is_it) {
                    Some(it) => (module, it.start),
                    None => continue,
                }
            }
            _ => continue,
        };
        if let Some(offset) = address.since(base) {
            // Writing to a String cannot fail.
            let _ = writeln!(snapshot, "{module}\t{offset:x}\t{name}");
        }
    }
    Some(snapshot.into_bytes())
}

/// The vDSO of the kernel that runs here, if its build-id is this one.
fn vdso(kernel: BuildId) -> Option<Vec<u8>> {
    if running_kernel()? != kernel {
        return None;
    }
    let maps = std::fs::read("/proc/self/maps").ok()?;
    let mapped = MapsLine::all(&maps).find(|line| line.path == b"[vdso]")?;
    let (start, size) = (mapped.start.0, mapped.end.0 - mapped.start.0);
    let mut image = vec![0; usize::try_from(size).ok()?];
    let memory = File::open("/proc/self/mem").ok()?;
    memory.read_exact_at(&mut image, start).ok()?;
    Some(image)
}

/// What a process of this host wrote of its code. As in perf, the file has to belong to root, to
/// our own user or to the user of the process: others may write there, too.
fn perf_map(pid: u32) -> Option<Vec<u8>> {
    let file = open_regular(&format!("/tmp/perf-{pid}.map")).ok()?;
    let metadata = file.metadata().ok()?;
    let own = rustix::process::geteuid().as_raw();
    // For root, who may be asked about anybody's, it has to be the process's.
    let of_process = || {
        own == 0
            && std::fs::metadata(format!("/proc/{pid}")).is_ok_and(|it| it.uid() == metadata.uid())
    };
    if !(metadata.uid() == own || metadata.uid() == 0 || of_process()) {
        return None;
    }
    let mut content = Vec::new();
    file.take(MAX_PERF_MAP).read_to_end(&mut content).ok()?;
    Some(content)
}

/// Build-id of the kernel that runs.
fn running_kernel() -> Option<BuildId> {
    gnu_build_id(&std::fs::read("/sys/kernel/notes").ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_was_moved_keeps_its_symbols_and_loses_its_modules() {
        let kallsyms = "\
ffffffff81000000 T _text
ffffffff81000100 t do_syscall
ffffffff81000200 D data
ffffffffc0000080 t second\t[ext4]
ffffffffc0900080 t third\t[xfs]
";
        let (start, end) = (0xffff_ffff_c000_0000, 0xffff_ffff_c000_1000);
        let (start, end) = (KernelAddr(start), KernelAddr(end));
        let modules = [Module { start, end, name: "ext4" }];
        let text = |at| {
            String::from_utf8(rebase(kallsyms, at, &modules).unwrap_or_default())
                .unwrap_or_default()
        };
        assert_eq!(
            text(KernelAddr(0xffff_ffff_8100_0000)),
            "\t0\t_text\n\t100\tdo_syscall\next4\t80\tsecond\n"
        );
        assert_eq!(text(KernelAddr(0xffff_ffff_9100_0000)), "\t0\t_text\n\t100\tdo_syscall\n");
        assert!(rebase("0000000000000000 T _text\n", KernelAddr(0), &modules).is_none());
    }
}
