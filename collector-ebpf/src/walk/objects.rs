//! Reads the memory of the process that runs, which may hold anything. Called by those who walk an
//! interpreter's frames and read what names its functions; [`List`] has the room.

use aya_ebpf::helpers::bpf_probe_read_user as read_user;
use aya_ebpf::helpers::generated::bpf_probe_read_user;
use stackwire_collector_ebpf::cpython::Layout;
use stackwire_collector_ebpf::masked;
use stackwire_collector_ebpf::v8::{TAG, TYPE};

use crate::maps::{CODE_ROOM, List};

/// A word of the process.
#[inline(always)]
pub fn word(address: u64, offset: u16) -> Option<u64> {
    let at = address.wrapping_add(u64::from(offset)) as *const u64;
    // SAFETY: the helper checks the address and fails rather than fault.
    unsafe { read_user(at) }.ok()
}

/// A word of what was read.
#[inline(always)]
pub fn word_in(bytes: &[u8; 264], offset: u16) -> u64 {
    let at = masked::<0xff>(u64::from(offset));
    // SAFETY: masked to less than the length less a word.
    unsafe { bytes.as_ptr().add(at).cast::<u64>().read_unaligned() }
}

/// Reads the first bytes of an object.
#[inline(always)]
pub fn read(all: &mut List, address: u64, bytes: usize) -> Option<()> {
    let to = all.bytes.as_mut_ptr().cast();
    // SAFETY: there is room for as many bytes; the helper checks the address and fails rather than
    // fault.
    let failed = unsafe { bpf_probe_read_user(to, bytes as u32, address as *const _) };
    (failed == 0).then_some(())
}

/// Whether the object of CPython whose head was read is of this type.
#[inline(always)]
pub fn is_a(all: &List, layout: &Layout, of: u64) -> bool {
    word_in(&all.bytes, layout.object_type) == all.base.wrapping_add(of)
}

/// The type of an object of V8; none: it is no object.
#[inline(always)]
pub fn type_of(object: u64) -> Option<u16> {
    if object & TAG == 0 {
        return None;
    }
    let map = word(object - TAG, 0)?;
    Some(word(map.wrapping_sub(TAG), TYPE)? as u16)
}

/// Copies so many bytes; whether they could be read.
#[inline(always)]
pub fn copy_into<const N: usize>(to: &mut [u8; N], from: u64, bytes: u32) -> bool {
    let bytes = if bytes as usize > N { N as u32 } else { bytes };
    // SAFETY: there is room for as many. The helper checks the address and fails rather than fault.
    unsafe { bpf_probe_read_user(to.as_mut_ptr().cast(), bytes, from as *const _) == 0 }
}

/// Copies the first `length` bytes, at most `MOST`, behind `before` others; returns how many.
#[inline(always)]
pub fn copy<const MOST: u64, const MASK: u64>(
    to: &mut [u8; CODE_ROOM],
    before: u64,
    from: u64,
    length: u64,
) -> u64 {
    let length = if length < MOST { length } else { MOST };
    let place = masked::<4095>(before);
    let bytes = masked::<MASK>(length) as u32;
    // SAFETY: the place is less than 4096, the length at most MASK, and the array has more than
    // both together. The helper checks the address and fails rather than fault.
    let failed =
        unsafe { bpf_probe_read_user(to.as_mut_ptr().add(place).cast(), bytes, from as *const _) };
    if failed == 0 { u64::from(bytes) } else { 0 }
}
