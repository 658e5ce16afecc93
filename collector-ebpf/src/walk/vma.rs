//! What lies in the kernel's own tree of a process's mappings, `struct maple_tree` of kernels 6.1
//! and newer (include/linux/maple_tree.h), and how the collector tells which file is which
//! executable.
//!
//! A program that was just executed has no mappings the collector has heard of; the kernel has them
//! all the same. Pure: who reads the nodes is `tree.rs`.

#[cfg(not(target_arch = "bpf"))]
use zerocopy::{Immutable, IntoBytes};

/// Words of a node: 256 bytes.
pub const NODE_WORDS: usize = 32;
/// A node as it lies in memory: parent, then pivots, then slots.
pub type Node = [u64; NODE_WORDS];

/// Kinds of nodes (`enum maple_type`).
mod kind {
    pub const LEAF: u64 = 1;
    pub const RANGE: u64 = 2;
    pub const RANGE_WITH_GAPS: u64 = 3;
}

/// Levels of a tree at most. Nodes have five entries and more: enough for 390,000 mappings.
pub const LEVELS: u32 = 8;
/// Pivots of a node at most.
pub const PIVOTS: usize = 15;

/// Whether a tree has nodes: one of a single entry has none (`xa_is_node`).
#[inline(always)]
#[must_use]
pub fn has_nodes(root: u64) -> bool {
    root & 3 == 2 && root > 4096
}

/// Where the node is that an entry leads to, and of which kind.
#[inline(always)]
#[must_use]
pub fn node_of(entry: u64) -> (u64, u64) {
    (entry & !0xff, entry >> 3 & 15)
}

/// Whether the entries of such a node are mappings and not nodes.
#[inline(always)]
#[must_use]
pub fn is_leaf(kind: u64) -> bool {
    kind == kind::LEAF
}

/// In which word of a node the entry of an address is; `None` for kinds of nodes that are not known
/// here.
#[inline(always)]
#[must_use]
pub fn entry_of(node: &Node, kind: u64, address: u64) -> Option<usize> {
    let (pivots, slots) = match kind {
        kind::LEAF | kind::RANGE => (PIVOTS, 16),
        kind::RANGE_WITH_GAPS => (9, 10),
        _ => return None,
    };
    let mut index = 0;
    for (at, &pivot) in node[1..=PIVOTS].iter().enumerate() {
        // A pivot is the last address of its entry; behind the last entry they are 0.
        if at >= pivots || pivot >= address || (pivot == 0 && at > 0) {
            break;
        }
        index = at + 1;
    }
    Some(slots + index)
}

/// Offsets in bytes, from the running kernel's BTF; all 0 on kernels without such a tree. Set by
/// the collector before load, as the `LAYOUT` global.
#[cfg_attr(not(target_arch = "bpf"), derive(IntoBytes, Immutable))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Layout {
    /// `mm_mt.ma_root` in `struct mm_struct`.
    pub mm_root: u32,
    /// `context.vdso` in it.
    pub mm_vdso: u32,
    /// `vm_start` in `struct vm_area_struct`.
    pub vma_start: u32,
    /// `vm_end`.
    pub vma_end: u32,
    /// `vm_mm`.
    pub vma_mm: u32,
    /// `vm_flags`.
    pub vma_flags: u32,
    /// `vm_pgoff`.
    pub vma_page: u32,
    /// `vm_file`.
    pub vma_file: u32,
    /// `f_inode` in `struct file`.
    pub file_inode: u32,
    /// `i_ino` in `struct inode`.
    pub inode_number: u32,
    /// `i_sb`.
    pub inode_device: u32,
    /// Seconds of its change time.
    pub inode_seconds: u32,
    /// Nanoseconds of it.
    pub inode_nanoseconds: u32,
    /// `i_size`.
    pub inode_size: u32,
    /// `i_generation`.
    pub inode_generation: u32,
    /// `s_dev` in `struct super_block`.
    pub device_number: u32,
    /// `s_magic`.
    pub device_magic: u32,
    /// `cred` in `struct task_struct`.
    pub task_cred: u32,
    /// `files`.
    pub task_files: u32,
    /// `suid` in `struct cred`.
    pub cred_saved: u32,
    /// `fdt` in `struct files_struct`.
    pub files_table: u32,
    /// `fd` in `struct fdtable`.
    pub table_files: u32,
    /// Zero.
    pub reserved: u32,
}

/// A file as the kernel knows it. A user can give a file the path or build-id of another, but not
/// this, where file systems keep change times. The collector decides which file systems do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct FileKey {
    /// Inode; [`VDSO`] for the vDSO, 0 for none.
    pub inode: u64,
    /// Device, as the kernel numbers it.
    pub device: u64,
    /// When content or owner last changed: [`changed`].
    pub changed: u64,
    /// Size and generation: [`size`].
    pub size: u64,
}

/// Instead of an inode.
pub const VDSO: u64 = u64::MAX;

/// A change time. Of the nanoseconds the kernel uses bit 31 as a mark of its own
/// (`I_CTIME_QUERIED`, since 6.13).
#[inline(always)]
#[must_use]
pub fn changed(seconds: u64, nanoseconds: u32) -> u64 {
    seconds << 30 | u64::from(nanoseconds & 0x3fff_ffff)
}

/// Size in bytes, mixed with the generation, which file systems change when they use an inode
/// again.
#[inline(always)]
#[must_use]
pub fn size(bytes: u64, generation: u32) -> u64 {
    bytes ^ u64::from(generation) << 32
}

/// Slots of the table of files, a power of two.
pub const FILES: u32 = 1 << 14;
/// Slots a file may be in, from its first on.
pub const FILE_PROBES: u32 = 8;

/// The slot to look at first.
#[inline(always)]
#[must_use]
pub fn first_file(inode: u64, device: u64) -> u32 {
    let mixed = (inode ^ device << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as u32 & (FILES - 1)
}

/// A file whose executable has a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct File {
    /// Which.
    pub key: FileKey,
    /// See [`file_word`].
    pub word: u64,
}

/// Number of the executable, and the user for whose processes it is: [`EVERYONE`], or one by
/// number.
#[inline(always)]
#[must_use]
pub fn file_word(executable: u32, user: u32) -> u64 {
    u64::from(executable) << 32 | u64::from(user)
}

/// All users. No user has this number: it is that of none, `(uid_t)-1`.
pub const EVERYONE: u32 = u32::MAX;

/// What a thread of the collector asks about a file that it has open or mapped. The thread renames
/// itself, which runs the program of `task_rename`. After that the answer is here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Question {
    /// The thread that asks; 0 when nobody does.
    pub thread: u64,
    /// Where it has the file mapped; 0: it is asked of a descriptor.
    pub address: u64,
    /// Its descriptor.
    pub descriptor: u64,
    /// The answer: of which kind the file system is (linux/magic.h).
    pub magic: u64,
    /// Which file it is. Its inode is 0 where there is no answer.
    pub key: FileKey,
}

#[cfg(test)]
mod tests {
    use super::{Node, changed, entry_of, has_nodes, node_of};

    fn node(pivots: &[u64]) -> Node {
        let mut node = [0; 32];
        node[1..=pivots.len()].copy_from_slice(pivots);
        node
    }

    #[test]
    fn an_address_is_in_the_first_entry_that_ends_behind_it() {
        // Free below 0x1000, two mappings, free above.
        let leaf = node(&[0xfff, 0x1fff, 0x2fff]);
        let of = |address| entry_of(&leaf, 1, address);
        assert_eq!([0, 0xfff, 0x1000, 0x2fff].map(of), [16, 16, 17, 18].map(Some));
        assert_eq!(of(0x3000), Some(19), "behind the last pivot");
        let full = node(&std::array::from_fn::<u64, 15, _>(|at| at as u64 * 10 + 10));
        assert_eq!(entry_of(&full, 1, 150), Some(30));
        assert_eq!(entry_of(&full, 2, 151), Some(31));
        // Of nine pivots; what follows are entries.
        let gaps = node(&std::array::from_fn::<u64, 15, _>(|at| at as u64 * 10 + 10));
        assert_eq!((entry_of(&gaps, 3, 90), entry_of(&gaps, 3, 9000)), (Some(18), Some(19)));
        assert_eq!(entry_of(&gaps, 4, 90), None);
    }

    #[test]
    fn entries_have_the_kind_of_their_node_in_them() {
        assert!(has_nodes(0xffff_8881_0010_201e));
        // Nothing, a mapping, `XA_ZERO_ENTRY`.
        assert!([0, 0xffff_8881_0010_2000, 0x406].iter().all(|&root| !has_nodes(root)));
        assert_eq!(node_of(0xffff_8881_0010_201e), (0xffff_8881_0010_2000, 3));
        assert_eq!(node_of(0xffff_8881_0010_200c), (0xffff_8881_0010_2000, 1));
    }

    #[test]
    fn a_mark_of_the_kernel_is_no_change() {
        assert_eq!(changed(7, 5), changed(7, 5 | 1 << 31));
        assert_ne!(changed(7, 5), changed(8, 5));
    }
}
