//! What the kernel calls the files of executables. Chooses the executable to ask about, and when to
//! ask again.
//!
//! The kernel is asked once the table is there, and again when somebody has mapped the executable
//! since: by then another file may have the same path and build-id. The answers are in `known.rs`;
//! the loading threads ask.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stackwire_collector_ebpf::vma::{EVERYONE, FileKey};

use super::{Catalog, Inner, Job, Slot, State, build_id};
use crate::unwind::owner::Owner;

/// Files held open.
const MAX_HELD: usize = 64;
/// How long to wait before asking again what the kernel calls a file. The wait is doubled each
/// time, at most `DOUBLED` times.
pub const ASKED_AGAIN: Duration = Duration::from_secs(1);
const DOUBLED: u32 = 6;

impl Catalog {
    /// An executable that has its table, but the kernel was not yet asked about its file, or not
    /// since somebody else has mapped it. The one used most comes first.
    pub fn next_nameless(&self) -> Option<Job> {
        let mut inner = self.lock();
        let Inner { slots, maps, .. } = &mut *inner;
        let now = Instant::now();
        let nameless = slots.iter_mut().enumerate().filter(|(_, slot)| {
            let is_due = slot.asked == 0 || slot.mapped_since && slot.ask_again <= now;
            // Without a build-id nobody could tell whether it is the file its table was made of.
            is_due && matches!(slot.state, State::Ready(_)) && build_id(&slot.kind).is_some()
        });
        let (number, slot) =
            nameless.max_by_key(|(number, slot)| (maps.uses(*number as u32), slot.refs))?;
        slot.was_asked();
        let held = slot.held.take();
        let wanted = slot.wanted.iter().rev().cloned().collect();
        let (kind, owner) = (slot.kind.clone(), slot.owner);
        Some(Job { number: number as u32, kind, owner, wanted, slow: false, held })
    }

    /// What the kernel calls the file of an executable, `everyones` as for its table.
    pub fn name(&self, job: &Job, key: FileKey, everyones: bool) {
        let mut inner = self.lock();
        let slot = &inner.slots[job.number as usize];
        // Meanwhile the number may be another's.
        if slot.kind == job.kind && slot.owner == job.owner {
            inner.name(job.number, key, everyones);
        }
    }

    /// The kernel could not be asked what it calls the file. It is asked after this time: about the
    /// open file `held`, or else when somebody has mapped the executable.
    pub fn ask_again(&self, job: &Job, after: Duration, held: Option<Arc<File>>) {
        let mut inner = self.lock();
        let all = inner.slots.iter().filter(|slot| slot.held.is_some()).count();
        let held = held.filter(|_| all < MAX_HELD);
        let slot = &mut inner.slots[job.number as usize];
        if slot.kind == job.kind {
            slot.ask_again = Instant::now() + after;
            (slot.asked, slot.mapped_since) = (1, slot.mapped_since || held.is_some());
            slot.held = held;
        }
    }
}

impl Slot {
    pub(super) fn was_asked(&mut self) {
        self.ask_again = Instant::now() + ASKED_AGAIN * (1 << self.asked.min(DOUBLED));
        (self.asked, self.mapped_since) = (self.asked + 1, false);
    }
}

impl Inner {
    pub(super) fn name(&mut self, number: u32, key: FileKey, everyones: bool) {
        let user = match self.slots[number as usize].owner {
            Owner::Everyone if everyones => EVERYONE,
            Owner::User(user) => user,
            _ => return,
        };
        self.maps.files.insert(key, number, user);
    }
}

#[cfg(test)]
mod tests {
    use stackwire_collector_ebpf::tables::EXECUTABLES;

    use super::super::tests::{catalog, file, of, of_root, table};
    use super::*;

    #[test]
    fn a_number_that_is_anothers_by_now_is_not_named() {
        let catalog = catalog();
        let key = FileKey { inode: 7, device: 1, ..FileKey::default() };
        let named = |number: u32| catalog.lock().maps.files.has(number);
        let other = of(&catalog, 1000, &file(1));
        catalog.install(other, &table(1000, 1, 1), false, Some(key));
        assert!(named(other), "for its user");
        let first = of_root(&catalog, &file(1));
        catalog.install(first, &table(1000, 1, 1), true, None);
        let job = catalog.next_nameless().unwrap();
        assert!(job.number == first && catalog.next_nameless().is_none(), "asked once");
        // While its file is looked at, all numbers are wanted.
        catalog.release(&[first]);
        for at in 2..EXECUTABLES {
            of_root(&catalog, &file(at));
        }
        catalog.name(&job, key, true);
        assert!(!named(first) && named(other));
        let now = Job { kind: catalog.lock().slots[first as usize].kind.clone(), ..job };
        catalog.name(&Job { owner: Owner::User(0), ..now }, key, false);
        assert!(named(first));
    }
}
