//! Finds what is mapped at an address of the current process in the kernel's own tree, when the
//! collector has not told it yet.
//!
//! Reads only, and without the tree's lock: this program may have interrupted the holder of the
//! lock. So what is found is checked. It must belong to this process, cover the address, and not
//! change while it is read. The helper that takes the lock, `bpf_find_vma`, can do so only once an
//! interrupt.

use aya_ebpf::helpers::generated::bpf_get_current_task_btf;
use aya_ebpf::helpers::{bpf_probe_read_kernel, bpf_probe_read_kernel_buf};
use stackwire_collector_ebpf::frame::Elsewhere;
use stackwire_collector_ebpf::masked;
use stackwire_collector_ebpf::tables::{ANONYMOUS, mapping_word};
use stackwire_collector_ebpf::vma::{
    EVERYONE, FILE_PROBES, FILES, FileKey, LEVELS, NODE_WORDS, Node, VDSO, changed, entry_of,
    first_file, has_nodes, is_leaf, node_of, size,
};

use crate::maps::{ANSWERS, KNOWN_FILES, LAYOUT, QUESTION, SEARCH, Search, Vma};
use crate::task::Task;

/// `VM_EXEC` of include/linux/mm.h.
const VM_EXEC: u64 = 4;

/// No code is there, or nobody can tell.
const NOTHING: u64 = 0;
/// Code of a file that has no number yet.
const UNKNOWN: u64 = 1;
/// It is in the slot.
const FOUND: u64 = 2;

macro_rules! offset {
    ($field:ident) => {
        // SAFETY: a static of plain integers; volatile because the loader, not this code, writes
        // it.
        u64::from(unsafe { core::ptr::read_volatile(&raw const LAYOUT.$field) })
    };
}

/// Whether this kernel has a tree that is known here.
#[inline(always)]
pub fn is_there() -> bool {
    offset!(mm_root) != 0
}

/// The mapping of an address, with this slot of `SEARCH` as room.
#[inline(always)]
pub fn mapping_at(address: u64, slot: u32) -> Elsewhere {
    match find_in_tree(address, slot) {
        UNKNOWN => Elsewhere::Unknown,
        FOUND => SEARCH.get_ptr(slot).map_or(Elsewhere::Nothing, |search| {
            // SAFETY: the pointer came from a successful lookup; it is this program's alone.
            Elsewhere::Mapped(unsafe { (*search).mapping })
        }),
        _ => Elsewhere::Nothing,
    }
}

/// Puts the mapping of an address into the slot: one of the three above. A global function, as
/// `walk_frame`.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn find_in_tree(address: u64, slot: u32) -> u64 {
    let Some(search) = SEARCH.get_ptr_mut(slot) else { return NOTHING };
    // SAFETY: the pointer came from a successful lookup; it is this CPU's, and of one program
    // alone.
    let search = unsafe { &mut *search };
    let Some(file) = find(search, address) else { return NOTHING };
    let Search { found: Vma { start, end, page, flags, key }, mapping, .. } = search;
    if *flags & VM_EXEC == 0 {
        return NOTHING;
    }
    if file != 0 {
        if identify(key, file).is_none() {
            return UNKNOWN;
        }
    } else if is_vdso(*start) {
        // Its image begins with its mapping.
        *page = 0;
        key.inode = VDSO;
        key.device = 0;
        key.changed = 0;
        key.size = 0;
    } else {
        mapping.start = *start;
        mapping.end = *end;
        mapping.word = mapping_word(ANONYMOUS, 0);
        return FOUND;
    }
    let Some(number) = number_of(key) else { return UNKNOWN };
    mapping.start = *start;
    mapping.end = *end;
    mapping.word = mapping_word(number, *page);
    FOUND
}

/// Answers what a thread of the collector asks.
#[inline(always)]
pub fn answer(thread: u32) {
    let (Some(question), Some(search)) = (QUESTION.get_ptr_mut(0), SEARCH.get_ptr_mut(ANSWERS))
    else {
        return;
    };
    // SAFETY: the pointers came from successful lookups; volatile because the collector writes the
    // question. One of its threads asks at a time, and the others are not answered: the room is
    // this call's alone.
    unsafe {
        if core::ptr::read_volatile(&raw const (*question).thread) != u64::from(thread) {
            return;
        }
        let address = core::ptr::read_volatile(&raw const (*question).address);
        let descriptor = core::ptr::read_volatile(&raw const (*question).descriptor);
        let search = &mut *search;
        let file = if address == 0 { opened(descriptor) } else { find(search, address) };
        let Some(magic) = file.and_then(|file| identify(&mut search.found.key, file)) else {
            return;
        };
        core::ptr::write_volatile(&raw mut (*question).magic, magic);
        core::ptr::write_volatile(&raw mut (*question).key.device, search.found.key.device);
        core::ptr::write_volatile(&raw mut (*question).key.changed, search.found.key.changed);
        core::ptr::write_volatile(&raw mut (*question).key.size, search.found.key.size);
        core::ptr::write_volatile(&raw mut (*question).key.inode, search.found.key.inode);
    }
}

/// The `struct file` of a descriptor of the current process.
#[inline(always)]
fn opened(descriptor: u64) -> Option<u64> {
    if !is_there() {
        return None;
    }
    // SAFETY: a helper without arguments.
    let task = unsafe { bpf_get_current_task_btf() } as u64;
    let files: u64 = read(task, offset!(task_files))?;
    let table: u64 = read(files, offset!(files_table))?;
    let all: u64 = read(table, offset!(table_files))?;
    read(all, descriptor << 3).filter(|&file| file != 0)
}

/// Whether the vDSO of the current process begins there.
#[inline(always)]
fn is_vdso(start: u64) -> bool {
    // SAFETY: a helper without arguments.
    let memory = Task(unsafe { bpf_get_current_task_btf() } as u64).memory();
    let vdso = memory.and_then(|memory| read::<u64>(memory, offset!(mm_vdso)));
    offset!(mm_vdso) != 0 && vdso == Some(start)
}

/// The number of a file's executable, for a process of the current user: the saved one, as for
/// tables (`unwind/owner.rs`).
#[inline(always)]
fn number_of(key: &FileKey) -> Option<u32> {
    // SAFETY: a helper without arguments.
    let task = unsafe { bpf_get_current_task_btf() } as u64;
    let rights: u64 = read(task, offset!(task_cred))?;
    let user: u32 = read(rights, offset!(cred_saved))?;
    let first = first_file(key.inode, key.device);
    for probe in 0..FILE_PROBES {
        let file = KNOWN_FILES.get_ptr((first + probe) & (FILES - 1))?;
        // SAFETY: the pointer came from a successful lookup; volatile because the collector writes
        // it: the inode last, and none while the rest is another's.
        let (before, known, word, after) = unsafe {
            let inode = &raw const (*file).key.inode;
            let before = core::ptr::read_volatile(inode);
            let device = core::ptr::read_volatile(&raw const (*file).key.device);
            let changed = core::ptr::read_volatile(&raw const (*file).key.changed);
            let size = core::ptr::read_volatile(&raw const (*file).key.size);
            let word = core::ptr::read_volatile(&raw const (*file).word);
            let known = device == key.device && changed == key.changed && size == key.size;
            (before, known, word, core::ptr::read_volatile(inode))
        };
        let is_theirs = word as u32 == EVERYONE || word as u32 == user;
        if before == key.inode && after == key.inode && known && is_theirs {
            return Some((word >> 32) as u32);
        }
    }
    None
}

/// The mapping an address of the current process lies in, into the room: its `struct file`, or 0.
#[inline(always)]
fn find(search: &mut Search, address: u64) -> Option<u64> {
    if !is_there() {
        return None;
    }
    // SAFETY: a helper without arguments.
    let memory = Task(unsafe { bpf_get_current_task_btf() } as u64).memory()?;
    let mut entry: u64 = read(memory, offset!(mm_root))?;
    if !has_nodes(entry) {
        return None;
    }
    let mut vma = 0;
    for _ in 0..LEVELS {
        let (node, kind) = node_of(entry);
        // SAFETY: bpf_probe_read_kernel checks the address and fails rather than fault; a node is
        // plain bytes.
        unsafe {
            let bytes = (&raw mut search.node).cast::<u8>();
            let bytes = core::slice::from_raw_parts_mut(bytes, size_of::<Node>());
            bpf_probe_read_kernel_buf(node as *const u8, bytes).ok()?;
        }
        let at = entry_of(&search.node, kind, address)? as u64;
        // Through memory, of which the verifier knows no value: else it would follow each entry of
        // each level, for 17 ms at every start.
        // SAFETY: the place is this search's own.
        let at = unsafe {
            core::ptr::write_volatile(&raw mut search.at, at);
            core::ptr::read_volatile(&raw const search.at)
        };
        // SAFETY: masked to less than the length.
        entry = unsafe { *search.node.as_ptr().add(masked::<{ NODE_WORDS as u64 - 1 }>(at)) };
        if is_leaf(kind) {
            vma = entry;
            break;
        }
    }
    if vma == 0 || vma & 3 != 0 {
        return None;
    }
    let (start, end): (u64, u64) = (read(vma, offset!(vma_start))?, read(vma, offset!(vma_end))?);
    let of: u64 = read(vma, offset!(vma_mm))?;
    if of != memory || address < start || address >= end {
        return None;
    }
    search.found.flags = read(vma, offset!(vma_flags))?;
    search.found.start = start;
    search.found.end = end;
    search.found.page = read(vma, offset!(vma_page))?;
    let file: u64 = read(vma, offset!(vma_file))?;
    // Another thread may be splitting it, or have given it back.
    let still: (u64, u64) = (read(vma, offset!(vma_mm))?, read(vma, offset!(vma_start))?);
    let page: u64 = read(vma, offset!(vma_page))?;
    (still == (memory, start) && page == search.found.page).then_some(file)
}

/// What the kernel knows of a file, and of which kind its file system is.
#[inline(always)]
fn identify(key: &mut FileKey, file: u64) -> Option<u64> {
    let inode: u64 = read(file, offset!(file_inode))?;
    let device: u64 = read(inode, offset!(inode_device))?;
    key.device = u64::from(read::<u32>(device, offset!(device_number))?);
    let seconds: u64 = read(inode, offset!(inode_seconds))?;
    key.changed = changed(seconds, read(inode, offset!(inode_nanoseconds))?);
    let bytes: u64 = read(inode, offset!(inode_size))?;
    key.size = size(bytes, read(inode, offset!(inode_generation))?);
    key.inode = read(inode, offset!(inode_number))?;
    // Of a file without a number nothing can be told.
    let magic: u64 = read(device, offset!(device_magic))?;
    (key.inode != 0).then_some(magic)
}

#[inline(always)]
fn read<T>(base: u64, offset: u64) -> Option<T> {
    // SAFETY: bpf_probe_read_kernel checks the address and fails rather than fault.
    unsafe { bpf_probe_read_kernel(base.wrapping_add(offset) as *const T) }.ok()
}
