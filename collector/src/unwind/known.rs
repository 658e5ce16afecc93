//! Which file is which executable, by what the kernel calls files. With this the kernel side finds
//! the executables of a process by itself when nobody has told it of the process yet.
//!
//! The loading threads use [`Keys`] to ask what the kernel calls a file; the catalog keeps the
//! answers in [`KnownFiles`]. On overlayfs and btrfs, the inode and device that user space sees are
//! not those of the kernel.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use stackwire_collector_ebpf::vma::{
    self, EVERYONE, FILE_PROBES, FILES, FileKey, Question, VDSO, file_word, first_file,
};

use crate::sampler::mapped::Mapped;

/// Bytes of a slot.
const SLOT: usize = size_of::<vma::File>();

/// What the kernel calls the vDSO.
pub const VDSO_KEY: FileKey = FileKey { inode: VDSO, device: 0, changed: 0, size: 0 };

/// File systems whose change times tell files apart, and that answer by themselves (linux/magic.h):
/// ext4, XFS, btrfs, bcachefs, f2fs, ZFS, tmpfs, ramfs. Images made to be the same byte by byte
/// (squashfs, erofs) have the same times for different files.
const LOCAL: [u64; 8] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xca45_1a4e,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0x0102_1994,
    0x8584_58f6,
];
const OVERLAYFS: u64 = 0x794c_7630;
/// A file may change again within one tick of its file system's clock, and keep the time of its
/// change: those of the kernel take 10 ms at most.
const TICK: Duration = Duration::from_millis(50);
/// Likewise, where a file system keeps whole seconds.
const WHOLE_SECONDS: Duration = Duration::from_secs(2);

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// What the kernel calls it.
    Known(FileKey),
    /// It was changed a moment ago, and may be asked of in so long.
    TooNew(Duration),
}

/// Asks the kernel side. Shared between threads.
#[derive(Debug)]
pub struct Keys {
    question: Mutex<Mapped>,
}

impl Keys {
    /// One that asks through this map.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub fn new(question: &OwnedFd) -> io::Result<Self> {
        let question = Mapped::read_write(question.as_fd(), size_of::<Question>())?;
        Ok(Self { question: Mutex::new(question) })
    }

    /// What the kernel calls a file that somebody maps. `None` where the kernel does not say it
    /// (before 6.1), or where the answer would not tell the file from others.
    #[must_use]
    pub fn of(&self, file: &File) -> Option<Key> {
        let (magic, key) = self.ask(file, 0)?;
        let (magic, key) = match magic {
            // Who maps it has the file of the layer below. To map one of a server that is gone
            // would hold up all memory of this process: no others are mapped.
            OVERLAYFS => {
                let mapped = Mapped::read_only(file.as_fd(), 1).ok()?;
                self.ask(file, mapped.address())?
            }
            _ => (magic, key),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        let nanoseconds = (key.changed & 0x3fff_ffff) as u32;
        let tick = if nanoseconds == 0 { WHOLE_SECONDS } else { TICK };
        let is_new = Duration::new(key.changed >> 30, nanoseconds) + tick >= now;
        LOCAL.contains(&magic).then_some(if is_new { Key::TooNew(tick) } else { Key::Known(key) })
    }

    /// Of a file that is mapped there, or at 0: as it is open.
    fn ask(&self, file: &File, address: u64) -> Option<(u64, FileKey)> {
        let question = self.question.lock().unwrap_or_else(PoisonError::into_inner);
        let set = |at, word| question.atomic(at).store(word, Ordering::SeqCst);
        set(offset_of!(Question, key.inode), 0);
        set(offset_of!(Question, address), address);
        set(offset_of!(Question, descriptor), file.as_raw_fd() as u64);
        set(offset_of!(Question, thread), rustix::thread::gettid().as_raw_nonzero().get() as u64);
        // The kernel side answers within this call.
        let asked = rustix::thread::set_name(c"tables");
        set(offset_of!(Question, thread), 0);
        let word = |at| question.atomic(at).load(Ordering::SeqCst);
        let key = FileKey {
            inode: word(offset_of!(Question, key.inode)),
            device: word(offset_of!(Question, key.device)),
            changed: word(offset_of!(Question, key.changed)),
            size: word(offset_of!(Question, key.size)),
        };
        (asked.is_ok() && key.inode != 0).then_some((word(offset_of!(Question, magic)), key))
    }
}

// Where the parts of a slot are.
const INODE: usize = offset_of!(vma::File, key.inode);
const DEVICE: usize = offset_of!(vma::File, key.device);
const CHANGED: usize = offset_of!(vma::File, key.changed);
const SIZE: usize = offset_of!(vma::File, key.size);
const WORD: usize = offset_of!(vma::File, word);

/// The kernel side's table of files.
#[derive(Debug)]
pub struct KnownFiles {
    table: Mapped,
    /// Slots, by the number of their executable.
    slots: HashMap<u32, Vec<u32>>,
}

impl KnownFiles {
    /// The table in this map, all of it empty.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub fn new(files: &OwnedFd) -> io::Result<Self> {
        let table = Mapped::read_write(files.as_fd(), FILES as usize * SLOT)?;
        Ok(Self { table, slots: HashMap::new() })
    }

    /// Notes that a file is this executable, for the processes of one user or of [`EVERYONE`]. When
    /// there is no room, a user's file replaces another file of that user, and a file for everyone
    /// replaces a file of any user.
    pub fn insert(&mut self, key: FileKey, number: u32, user: u32) {
        let first = first_file(key.inode, key.device);
        let slots = || (0..FILE_PROBES).map(|probe| (first + probe) & (FILES - 1));
        let user_of = |slot| self.word(slot, WORD) as u32;
        let same = slots().find(|&slot| {
            self.word(slot, INODE) == key.inode
                && self.word(slot, DEVICE) == key.device
                && user_of(slot) == user
        });
        let free = || slots().find(|&slot| self.word(slot, INODE) == 0);
        let of_users = || slots().find(|&slot| user == EVERYONE && user_of(slot) != EVERYONE);
        let theirs = || slots().find(|&slot| user_of(slot) == user);
        let Some(slot) = same.or_else(free).or_else(of_users).or_else(theirs) else { return };
        self.clear(slot);
        let word = file_word(number, user);
        // The inode last: without it nothing else is read.
        for (at, word) in [
            (DEVICE, key.device),
            (CHANGED, key.changed),
            (SIZE, key.size),
            (WORD, word),
            (INODE, key.inode),
        ] {
            self.table.atomic(slot as usize * SLOT + at).store(word, Ordering::SeqCst);
        }
        self.slots.entry(number).or_default().push(slot);
    }

    /// The number is another executable's.
    pub fn forget(&mut self, number: u32) {
        for slot in self.slots.get(&number).cloned().unwrap_or_default() {
            self.clear(slot);
        }
    }

    /// Whether a file has this number.
    #[cfg(test)]
    pub fn has(&self, number: u32) -> bool {
        self.slots.contains_key(&number)
    }

    fn clear(&mut self, slot: u32) {
        if self.word(slot, INODE) == 0 {
            return;
        }
        self.table.atomic(slot as usize * SLOT + INODE).store(0, Ordering::SeqCst);
        let number = (self.word(slot, WORD) >> 32) as u32;
        if let Some(slots) = self.slots.get_mut(&number) {
            slots.retain(|&other| other != slot);
            if slots.is_empty() {
                self.slots.remove(&number);
            }
        }
    }

    fn word(&self, slot: u32, at: usize) -> u64 {
        self.table.atomic(slot as usize * SLOT + at).load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::maps::Descriptors;

    fn files() -> KnownFiles {
        KnownFiles::new(&Descriptors::in_memory().unwrap().known_files).unwrap()
    }

    fn found(files: &KnownFiles, key: FileKey) -> Vec<(u64, u32)> {
        let all = (0..FILES).filter(|&slot| {
            [INODE, DEVICE, CHANGED, SIZE].map(|at| files.word(slot, at))
                == [key.inode, key.device, key.changed, key.size]
        });
        let words = all.map(|slot| files.word(slot, WORD));
        words.map(|word| (word >> 32, word as u32)).collect()
    }

    #[test]
    fn a_file_has_one_number_for_each_user_until_the_number_is_anothers() {
        let mut files = files();
        let key = FileKey { inode: 7, device: 3, changed: 5, size: 100 };
        files.insert(key, 20, EVERYONE);
        files.insert(key, 21, 1000);
        assert_eq!(found(&files, key), [(20, EVERYONE), (21, 1000)]);
        // Rewritten in its place: the inode stays.
        let rewritten = FileKey { changed: 6, ..key };
        files.insert(rewritten, 22, EVERYONE);
        assert_eq!(found(&files, key), [(21, 1000)]);
        files.forget(20);
        assert_eq!(found(&files, rewritten), [(22, EVERYONE)]);
        files.forget(22);
        files.forget(21);
        assert!(found(&files, rewritten).is_empty() && files.slots.is_empty());
    }

    #[test]
    fn more_files_than_slots_and_no_users_in_the_place_of_everyones() {
        let mut files = files();
        let key = |inode: u32| FileKey { inode: inode.into(), device: 1, ..FileKey::default() };
        for inode in 1..2 * FILES {
            files.insert(key(inode), inode, EVERYONE);
            assert_eq!(found(&files, key(inode)).len(), 1, "{inode}");
        }
        let full = files.slots.len();
        assert!(full > FILES as usize * 3 / 4, "{full}");
        let users = (1..200).filter(|&inode| {
            files.insert(key(inode), 1_000_000 + inode, 1000);
            found(&files, key(inode)).iter().any(|(_, user)| *user == 1000)
        });
        assert!(users.count() < 50);
        assert!(files.slots.values().map(Vec::len).sum::<usize>() >= full);
    }
}
