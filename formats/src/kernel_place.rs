//! Where outputs put kernel code. Absolute addresses never leave the host. So each kernel is shown
//! where a kernel that was not moved lies, with its modules one behind the other.

use rustc_hash::FxHashMap;
use stackwire_model::profile::{Executable, Profile};

/// Where `_text` is linked on x86-64 and modules begin: kernel addresses are shown from there on,
/// which is where a debugger expects those of a kernel that was not moved.
pub const KERNEL_BASE: u64 = 0xffff_ffff_8100_0000;
const MODULE_BASE: u64 = 0xffff_ffff_c000_0000;
/// Where a kernel is shown when nothing is known of it, not even the offsets of its frames. No
/// kernel has code there.
pub const HIDDEN_KERNEL: u64 = 0xffff_ffff_7000_0000;
/// Shown for kernel code whose size is unknown.
const KERNEL_SPAN: u64 = 0x0300_0000;

/// First address and size of each kernel and module, by the index of the executable.
#[must_use]
pub fn places(profile: &Profile) -> FxHashMap<u32, (u64, u64)> {
    let mut ends: FxHashMap<u32, u64> = FxHashMap::default();
    for location in &profile.locations {
        if let Executable::Kernel { .. } = profile.executables[location.executable.index()] {
            let end = ends.entry(location.executable.0).or_default();
            *end = (*end).max(location.address.number().saturating_add(1));
        }
    }
    let mut places = FxHashMap::default();
    let mut next_module = MODULE_BASE;
    for (index, executable) in profile.executables.iter().enumerate() {
        let Executable::Kernel { module, build_id, kallsyms } = executable else { continue };
        let index = index as u32;
        // The collector may not read kallsyms, and has no offsets.
        let is_hidden = build_id.is_none() && kallsyms.is_none() && module.is_empty();
        let size = ends.get(&index).copied().unwrap_or(0).next_multiple_of(1 << 20);
        let place = if is_hidden && !profile.origin.collector.is_empty() {
            (HIDDEN_KERNEL, size)
        } else if module.is_empty() {
            (KERNEL_BASE, size.max(KERNEL_SPAN))
        } else {
            // One behind the other, though where they were is not known.
            let start = next_module;
            next_module = next_module.saturating_add(size);
            (start, size)
        };
        places.insert(index, place);
    }
    places
}
