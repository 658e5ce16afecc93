//! The kernel in a foreign profile: where it and its modules lay, and whose they are.
//!
//! Offsets count from `_text` and from the beginning of a module, as everywhere. Names are looked
//! up later. For the kernel that runs here, the host's list of symbols is taken along: perf has its
//! names from there too.

use std::ops::Range;

use stackwire_model::BuildId;
use stackwire_model::profile::{
    ArtifactHash, Builder, EndReason, Executable, ExecutableId, FrameKind, Full, Location, StackId,
    lookup_address,
};
use stackwire_model::{Address, KernelAddr, KernelOffset, UserAddr};

use crate::{Host, Module};

/// Kernel and modules taken note of.
const MAX_MAPS: usize = 4096;

/// Room an image of a kernel has (`KERNEL_IMAGE_SIZE` of x86-64).
const KERNEL_SPAN: u64 = 1 << 30;

#[derive(Clone, Debug)]
struct Part {
    start: KernelAddr,
    end: KernelAddr,
    /// What offsets count from.
    base: KernelAddr,
    /// Empty: the kernel itself.
    module: String,
    /// What that is, once a stack was asked for.
    executable: Option<ExecutableId>,
}

/// What lies where.
#[derive(Debug, Default)]
pub struct Kernel {
    /// By address.
    parts: Vec<Part>,
    /// It is known what they are.
    known: bool,
}

impl Kernel {
    /// A record says where the kernel or a module is, and for the kernel where its reference symbol
    /// is (0: not told).
    pub fn map(&mut self, path: &str, range: Range<KernelAddr>, reference: KernelAddr) {
        let Range { start, end } = range;
        let is_kernel =
            path.starts_with("[kernel.kallsyms]") || path.starts_with("[kernel.vmlinux]");
        let name = path.rsplit('/').next().unwrap_or(path);
        let stem = name.split(".ko").next().unwrap_or(name);
        let module = stem.trim_matches(['[', ']']).replace('-', "_");
        if self.parts.len() >= MAX_MAPS || end <= start {
            return;
        }
        let base = if is_kernel && reference != KernelAddr(0) { reference } else { start };
        let module = if is_kernel { String::new() } else { module };
        let at = self.parts.partition_point(|part| part.start <= start);
        self.parts.insert(at, Part { start, end, base, module, executable: None });
        self.known = false;
    }

    /// Finds out what the parts are, if that is not known; `build_id` knows their build-ids.
    pub fn prepare(
        &mut self,
        into: &mut Builder,
        host: &mut dyn Host,
        build_id: impl Fn(&str) -> Option<BuildId>,
    ) -> Result<(), Full> {
        if self.known {
            return Ok(());
        }
        let kallsyms: Option<ArtifactHash> =
            self.parts.iter().find(|part| part.module.is_empty()).and_then(|kernel| {
                host.kernel_symbols(build_id("")?, kernel.base, &self.modules())
            });
        for part in &mut self.parts {
            let build_id = build_id(&part.module);
            let executable = Executable::Kernel { module: part.module.clone(), build_id, kallsyms };
            part.executable = Some(into.executable(executable)?);
        }
        self.known = true;
        Ok(())
    }

    fn modules(&self) -> Vec<Module<'_>> {
        let modules = self.parts.iter().filter(|part| !part.module.is_empty());
        modules
            .map(|part| Module { start: part.start, end: part.end, name: &part.module })
            .collect()
    }

    /// The stack of these addresses, leaf first.
    pub fn stack(
        &self,
        into: &mut Builder,
        addresses: &[(KernelAddr, FrameKind)],
    ) -> Result<Option<StackId>, Full> {
        let mut locations = Vec::with_capacity(addresses.len());
        for &(address, kind) in addresses {
            let address = lookup_address(address, kind);
            let after = self.parts.partition_point(|part| part.start <= address);
            // A kernel's range may be told as all that is above it, modules included.
            let mut before = self.parts[..after].iter().rev();
            let part = before.find(|part| address < part.end && address >= part.base);
            // Code for the start alone lies behind what is mapped as the kernel's, and its callers
            // stay on the stacks of idle.
            let part = part.or_else(|| {
                let kernel = self.parts.iter().find(|part| part.module.is_empty())?;
                (kernel.base..kernel.base.saturating_add(KERNEL_SPAN))
                    .contains(&address)
                    .then_some(kernel)
            });
            let known = part.and_then(|part| {
                let offset = KernelOffset(address.since(part.base)?);
                Some((part.executable?, Address::Kernel(offset)))
            });
            let (executable, address) = match known {
                Some(known) => known,
                // Where it lies is not for others to know.
                None => (into.executable(Executable::Unmapped)?, Address::User(UserAddr(0))),
            };
            let location = Location { executable, process: None, address, seen_ns: 0 };
            locations.push(into.location(location)?);
        }
        into.stack(&locations, EndReason::NotSaid).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_before_a_kernel_that_claims_everything() {
        let (mut kernel, mut into) = (Kernel::default(), Builder::new());
        let text = KernelAddr(0xffff_ffff_8100_0000);
        kernel.map("[kernel.kallsyms]_text", text..KernelAddr(0xffff_ffff_c000_0000), text);
        let module = KernelAddr(0xffff_ffff_c000_0000)..KernelAddr(0xffff_ffff_c000_1000);
        let path = "/lib/modules/6.1/kernel/fs/ext4/ext-4.ko.xz";
        kernel.map(path, module, KernelAddr(0));
        kernel
            .prepare(&mut into, &mut crate::Elsewhere, |module| {
                BuildId::new(&[7; 20]).filter(|_| module == "ext_4")
            })
            .unwrap();
        let addresses = [
            (0xffff_ffff_c000_0010, FrameKind::Exact),
            (0xffff_ffff_8100_0011, FrameKind::Caller),
            (0xffff_ffff_0000_0000, FrameKind::Caller),
        ]
        .map(|(address, kind)| (KernelAddr(address), kind));
        assert!(kernel.stack(&mut into, &addresses).is_ok());
        let profile = into.build();
        let found: Vec<_> = profile
            .locations
            .iter()
            .map(|at| (profile.executables[at.executable.index()].name(), at.address.number()))
            .collect();
        let expected = [("[ext_4]", 0x10), ("[kernel]", 0x10), ("[unmapped]", 0)];
        assert_eq!(found, expected.map(|(name, offset)| (name.to_owned(), offset)));
    }
}
