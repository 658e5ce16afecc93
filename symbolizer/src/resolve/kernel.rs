//! Names in the kernel: from the debug information of the kernel and its modules where there is
//! any, else from the collector's kallsyms.
//!
//! Offsets count from `_text`, or from the lowest symbol of a module. Only the kernel knows where
//! it put the sections of a module. They are found again by their functions: kallsyms says where
//! each function is, and the debug file has the same names.

use std::collections::HashMap;
use std::time::Instant;

use stackwire_model::{FileOffset, KernelOffset, VirtAddr};
use stackwire_symbols::kallsyms::Symbols;
use stackwire_symbols::table::Table;

use super::kernel_files::Kernel;
use super::ladder::{self, Wanted};
use super::{Nameless, Snapshots, Sources, nameless, resolutions, source};
use crate::profile::{
    Address, Executable, ExecutableId, LocationId, Missing, MissingReason, Profile, Quality,
    Resolution, Source,
};

/// Names in the kernel or a module of it.
pub(super) fn job(
    profile: &Profile,
    snapshots: &Snapshots<'_>,
    sources: &Sources,
    id: ExecutableId,
    locations: &[LocationId],
    deadline: Instant,
) -> Result<(Source, Vec<Resolution>), Nameless> {
    let executable = &profile.executables[id.index()];
    let Executable::Kernel { module, build_id, kallsyms } = executable else {
        return Err(nameless(MissingReason::UnknownKernel));
    };
    let symbols = kallsyms.and_then(|hash| snapshots.get(&hash));
    let found = build_id.map(|id| {
        let kernel =
            Kernel { release: profile.origin.kernel_release.clone(), module: module.clone() };
        let wanted =
            Wanted { build_id: Some(id), executable: None, code: None, kernel: Some(kernel) };
        ladder::find(wanted, sources, deadline)
    });
    let addresses: Vec<Address> =
        locations.iter().map(|location| profile.locations[location.index()].address).collect();
    let by_kallsyms = |address| symbols.map(|symbols| from_kallsyms(symbols, module, address));
    match found {
        Some(Ok(found)) => {
            let layout = Layout::of(&found.table, module, symbols);
            let address_of = |address: Address| layout.address(address.kernel()?);
            let named = resolutions(&found.table, address_of, &addresses, sources);
            found.table.forget_pages();
            let resolutions =
                addresses.into_iter().zip(named).map(|(address, named)| match named {
                    // What is patched in at run time is in no file.
                    Resolution::Missing(missing) => {
                        by_kallsyms(address).unwrap_or(Resolution::Missing(missing))
                    }
                    named => named,
                });
            let resolutions = resolutions.collect();
            Ok((source(found), resolutions))
        }
        missing => {
            let (notes, fetch_failed) = match missing {
                Some(Err(nothing)) => (nothing.notes, nothing.fetch_failed),
                _ => (Vec::new(), false),
            };
            let resolutions: Option<Vec<_>> = addresses.into_iter().map(by_kallsyms).collect();
            let Some(resolutions) = resolutions else {
                let reason = match kallsyms {
                    Some(_) => MissingReason::KallsymsNotSent,
                    None if !profile.origin.collector.is_empty() => MissingReason::KallsymsHidden,
                    None if build_id.is_none() => MissingReason::UnknownKernel,
                    None => MissingReason::NoKernelSymbols,
                };
                return Err(nameless(reason));
            };
            Ok((Source { notes, fetch_failed, ..Source::default() }, resolutions))
        }
    }
}

/// Names from kallsyms, or nothing.
fn from_kallsyms(symbols: &Symbols<'_>, module: &str, address: Address) -> Resolution {
    match address.kernel().and_then(|offset| symbols.find(module, offset)) {
        Some(line) => Resolution::Found { lines: [line].into(), quality: Quality::Kallsyms },
        None => Resolution::Missing(Missing::because(MissingReason::NotInKallsyms)),
    }
}

/// Offsets → addresses in a table made from debug information.
#[derive(Debug)]
enum Layout<'t> {
    /// The kernel's.
    Kernel(&'t Table),
    /// A module's: where its functions begin, as offset and address, by offset. No address: nobody
    /// can tell.
    Module(Vec<(KernelOffset, Option<VirtAddr>)>),
}

impl<'t> Layout<'t> {
    fn of(table: &'t Table, module: &str, symbols: Option<&Symbols<'_>>) -> Self {
        if module.is_empty() {
            return Self::Kernel(table);
        }
        let symbols = symbols.map_or(Vec::new(), |symbols| symbols.of(module));
        let mut addresses: HashMap<&str, Vec<VirtAddr>> = HashMap::new();
        for (address, name) in table.functions() {
            addresses.entry(name).or_default().push(address);
        }
        let mut offsets: HashMap<&str, u32> = HashMap::new();
        for (_, name) in &symbols {
            *offsets.entry(name).or_default() += 1;
        }
        let known = |name: &str| match addresses.get(name).map(Vec::as_slice) {
            Some([address]) if offsets[name] == 1 => Some(*address),
            _ => None,
        };
        let mut starts: Vec<(KernelOffset, Option<VirtAddr>)> = Vec::new();
        for (offset, name) in &symbols {
            match starts.last_mut().filter(|last| last.0 == *offset) {
                Some(last) => last.1 = last.1.or_else(|| known(name)),
                None => starts.push((*offset, known(name))),
            }
        }
        // Static functions of several files may have one name: the one that lies as far from a
        // neighbour on one side as on the other is meant, since sections are moved as a whole.
        let anchors: Vec<_> =
            starts.iter().filter_map(|&(at, address)| Some((at, address?))).collect();
        for (offset, name) in &symbols {
            let index = starts.partition_point(|(start, _)| start < offset);
            let Some((_, address @ None)) = starts.get_mut(index) else { continue };
            let after = anchors.partition_point(|(anchor, _)| anchor < offset);
            let near = after.checked_sub(1).into_iter().chain([after]);
            let near = near.filter_map(|index| anchors.get(index));
            let expected = near.filter_map(|(at, address)| {
                address.0.checked_add_signed(offset.0.wrapping_sub(at.0) as i64).map(VirtAddr)
            });
            let candidates = addresses.get(name).map_or(&[][..], Vec::as_slice);
            *address = expected.into_iter().find(|expected| candidates.contains(expected));
        }
        Self::Module(starts)
    }

    /// The address of an offset, when it can be told.
    fn address(&self, offset: KernelOffset) -> Option<VirtAddr> {
        match self {
            // The one segment of such a table begins at `_text`.
            Self::Kernel(table) => table.address_of(FileOffset(offset.0)),
            Self::Module(starts) => {
                let after = starts.partition_point(|(start, _)| *start <= offset);
                let (start, address) = starts.get(after.checked_sub(1)?)?;
                (*address)?.checked_add(offset.since(*start)?)
            }
        }
    }
}
