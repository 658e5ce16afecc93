//! Which file is which executable, as the kernel tells files apart: in a process nobody has told it of yet, the kernel side
//! finds them by itself.
//!
//! [`Keys`] asks what the kernel calls a file, for the loading threads; [`KnownFiles`] is the catalog's. What a file has for
//! an inode and device in user space is something else, on overlayfs and btrfs.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use stackwire_collector_ebpf::vma::{
    self, FILE_PROBES, FILES, FileKey, Question, VDSO, file_word, first_file,
};

use crate::sampler::mapped::Mapped;

/// Bytes of a slot.
const SLOT: usize = size_of::<vma::File>();

/// What the kernel calls the vDSO.
pub const VDSO_KEY: FileKey = FileKey { inode: VDSO, device: 0, changed: 0 };

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

    /// What the kernel calls a file. `None` where it does not say: before 6.1, or when this process is not in the initial pid
    /// namespace.
    #[must_use]
    pub fn of(&self, file: &File) -> Option<FileKey> {
        let mapped = Mapped::read_only(file.as_fd(), 1).ok()?;
        let question = self.question.lock().unwrap_or_else(PoisonError::into_inner);
        question.atomic(8).store(0, Ordering::SeqCst);
        question.atomic(0).store(mapped.address(), Ordering::SeqCst);
        // The kernel side answers within this call.
        let asked = rustix::thread::set_name(c"tables");
        question.atomic(0).store(0, Ordering::SeqCst);
        let [inode, device, changed] =
            [8, 16, 24].map(|at| question.atomic(at).load(Ordering::SeqCst));
        (asked.is_ok() && inode != 0).then_some(FileKey { inode, device, changed })
    }
}

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

    /// A file is this executable, to the processes of one user or [`vma::EVERYONE`].
    pub fn insert(&mut self, key: FileKey, number: u32, user: u32) {
        let word = file_word(number, user);
        let first = first_file(key.inode, key.device);
        let mut slots = (0..FILE_PROBES).map(|probe| (first + probe) & (FILES - 1));
        let is_of = |slot: u32, inode| self.word(slot, 0) == inode;
        let same = slots.clone().find(|&slot| {
            is_of(slot, key.inode)
                && self.word(slot, 8) == key.device
                && self.word(slot, 24) as u32 == user
        });
        // Where there is no room, one of many that had to be so close goes.
        let slot = same.or_else(|| slots.find(|&slot| is_of(slot, 0))).unwrap_or(first);
        self.clear(slot);
        // The inode last: without it nothing else is read.
        for (at, word) in [(8, key.device), (16, key.changed), (24, word), (0, key.inode)] {
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

    fn clear(&mut self, slot: u32) {
        if self.word(slot, 0) == 0 {
            return;
        }
        self.table.atomic(slot as usize * SLOT).store(0, Ordering::SeqCst);
        let number = (self.word(slot, 24) >> 32) as u32;
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
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use stackwire_collector_ebpf::vma::EVERYONE;

    use super::*;
    use crate::unwind::maps::Descriptors;

    fn found(files: &KnownFiles, key: FileKey) -> Vec<(u64, u32)> {
        let all = (0..FILES).filter(|&slot| {
            [files.word(slot, 0), files.word(slot, 8), files.word(slot, 16)]
                == [key.inode, key.device, key.changed]
        });
        let words = all.map(|slot| files.word(slot, 24));
        words.map(|word| (word >> 32, word as u32)).collect()
    }

    #[test]
    fn a_file_has_one_number_for_each_user_until_the_number_is_anothers() {
        let mut files = KnownFiles::new(&Descriptors::in_memory().known_files).unwrap();
        let key = |inode| FileKey { inode, device: 3, changed: 5 };
        files.insert(key(7), 20, EVERYONE);
        files.insert(key(7), 21, 1000);
        assert_eq!(found(&files, key(7)), [(20, EVERYONE), (21, 1000)]);
        // Rewritten in its place: the inode stays.
        let rewritten = FileKey { changed: 6, ..key(7) };
        files.insert(rewritten, 22, EVERYONE);
        assert_eq!(found(&files, key(7)), [(21, 1000)]);
        files.forget(20);
        assert_eq!(found(&files, rewritten), [(22, EVERYONE)]);
        files.forget(22);
        files.forget(21);
        assert!(found(&files, rewritten).is_empty() && files.slots.is_empty());
    }

    #[test]
    fn more_files_than_slots() {
        let mut files = KnownFiles::new(&Descriptors::in_memory().known_files).unwrap();
        for inode in 1..2 * FILES {
            let key = FileKey { inode: inode.into(), device: 1, changed: 0 };
            files.insert(key, inode, EVERYONE);
            assert_eq!(found(&files, key).len(), 1, "{inode}");
            if inode > 64 {
                files.forget(inode - 64);
            }
        }
        assert!((1..=64).contains(&files.slots.len()));
    }
}
