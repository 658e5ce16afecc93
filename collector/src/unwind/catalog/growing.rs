//! Tables of code made at run time. A table is made again when the JIT compiler has described more
//! code.
//!
//! The jitdump stays open, and its size is looked at a hundred times a second while samples are
//! taken of its code.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stackwire_unwind::Table;

use super::{Catalog, Inner, Job};
use crate::unwind::owner::{Owner, SHARES};

/// Between two looks at a size.
const LOOK: Duration = Duration::from_millis(10);
/// Making the tables of one user again may take one part in this many of a CPU.
const PART: u32 = 20;
/// Jitdumps held open, and of one user.
const MAX_OPEN: usize = 256;
const MAX_OPEN_OF_ONE: usize = MAX_OPEN / SHARES as usize;

/// A jitdump a table was made of.
#[derive(Debug)]
pub(super) struct Growing {
    file: Arc<File>,
    /// Bytes it had then.
    size: u64,
    /// A loading thread is at it.
    pub looked_at: bool,
    /// Not looked at before this.
    again: Instant,
    /// Lookups at the last look: who runs none of its code needs no table of it.
    uses: u64,
}

impl Catalog {
    /// A table was made of this jitdump, which had so many bytes, and took so long.
    pub fn grows(&self, job: &Job, file: Arc<File>, size: u64, took: Duration) {
        let mut inner = self.lock();
        let payer = inner.slots[job.number as usize].payer;
        let open = inner.slots.iter().filter(|slot| slot.growing.is_some());
        let of_one = open.clone().filter(|slot| slot.payer == payer).count();
        let room = open.count() < MAX_OPEN && (of_one < MAX_OPEN_OF_ONE || !payer.is_limited());
        let uses = inner.maps.uses(job.number);
        let slot = &mut inner.slots[job.number as usize];
        if slot.kind == job.kind && slot.refs > 0 && (room || slot.growing.is_some()) {
            let again = Instant::now() + LOOK;
            let now = Growing { file, size, looked_at: false, again, uses };
            let before = slot.growing.replace(now);
            inner.unused.extend(before.map(|before| before.file));
            inner.rests(payer, took);
        } else {
            inner.unused.push(file);
        }
    }

    /// Jitdumps nobody needs any more, to be closed.
    pub fn take_unused(&self) -> Vec<Arc<File>> {
        std::mem::take(&mut self.lock().unused)
    }

    /// A table that may have to be made again: its jitdump, open, and how many bytes it had. To be
    /// followed by [`Catalog::looked`].
    pub fn next_growing(&self) -> Option<(Job, Arc<File>, u64)> {
        let mut inner = self.lock();
        let now = Instant::now();
        let inner = &mut *inner;
        let busy = inner.busy();
        let rests = |payer| inner.resting.get(&payer).is_some_and(|until| *until > now);
        let due = inner.slots.iter().enumerate().filter_map(|(number, slot)| {
            let growing = slot.growing.as_ref()?;
            let is_due = !growing.looked_at
                && growing.again <= now
                && growing.uses != inner.maps.uses(number as u32)
                && !busy.contains(&slot.payer)
                && !rests(slot.payer);
            is_due.then_some((growing.again, number))
        });
        let (_, number) = due.min()?;
        let slot = &mut inner.slots[number];
        let growing = slot.growing.as_mut()?;
        (growing.looked_at, growing.uses) = (true, inner.maps.uses(number as u32));
        let (kind, owner, number) = (slot.kind.clone(), slot.owner, number as u32);
        let job = Job { number, kind, owner, wanted: Vec::new(), slow: false, held: None };
        Some((job, Arc::clone(&growing.file), growing.size))
    }

    /// Notes that a thread has looked at a jitdump, how many bytes it had, and how long that took.
    /// `made`: the table that replaces the present one, and whether it is for everyone.
    pub fn looked(&self, job: &Job, size: u64, took: Duration, made: Option<(&Table, bool)>) {
        let mut inner = self.lock();
        let slot = &mut inner.slots[job.number as usize];
        // Meanwhile the number may be another's.
        if slot.kind != job.kind || slot.owner != job.owner {
            return;
        }
        let Some(growing) = &mut slot.growing else { return };
        (growing.looked_at, growing.size, growing.again) = (false, size, Instant::now() + LOOK);
        let (owner, payer) = (slot.owner, slot.payer);
        inner.rests(payer, took);
        if let Some((table, everyones)) = made
            && (everyones || owner != Owner::Everyone)
        {
            inner.replace(job.number, table);
        }
    }
}

impl Inner {
    /// Nobody has it mapped any more.
    pub(super) fn grows_no_more(&mut self, number: u32) {
        let growing = self.slots[number as usize].growing.take();
        self.unused.extend(growing.map(|growing| growing.file));
    }

    fn rests(&mut self, payer: Owner, took: Duration) {
        let now = Instant::now();
        self.resting.retain(|_, until| *until > now);
        if !took.is_zero() {
            self.resting.insert(payer, now + took * PART);
        }
    }
}

#[cfg(test)]
mod tests {
    use stackwire_collector_ebpf::tables::EXECUTABLES;

    use super::super::State;
    use super::super::tests::{catalog, file, of, of_root, table};
    use super::*;
    use crate::process::executable::Kind;

    fn described(number: u32) -> Kind {
        Kind::Described { dump: Box::new(file(number)), window: 0 }
    }

    /// Whose table was looked up since, and is due.
    fn due(catalog: &Catalog) -> Option<(Job, Arc<File>, u64)> {
        catalog.lock().resting.clear();
        for slot in &mut catalog.lock().slots {
            if let Some(growing) = &mut slot.growing {
                (growing.again, growing.uses) = (Instant::now(), u64::MAX);
            }
        }
        catalog.next_growing()
    }

    fn made(catalog: &Catalog, kind: &Kind) -> u32 {
        let number = of_root(catalog, kind);
        let job = catalog.next(true).unwrap();
        assert_eq!(job.number, number);
        catalog.install(number, &table(1000, 1, 1), true, None);
        let dump = Arc::new(tempfile::tempfile().unwrap());
        catalog.grows(&job, dump, 10, Duration::ZERO);
        number
    }

    #[test]
    fn a_table_is_made_again_by_one_thread_and_takes_the_place_of_the_old() {
        let catalog = catalog();
        let number = made(&catalog, &described(1));
        assert!(catalog.next_growing().is_none(), "nobody has looked it up");
        let (job, _, size) = due(&catalog).unwrap();
        assert_eq!((job.number, size), (number, 10));
        assert!(due(&catalog).is_none(), "it is being looked at");
        let pages = |catalog: &Catalog| match &catalog.lock().slots[number as usize].state {
            State::Ready(place) => place.word,
            _ => 0,
        };
        let before = pages(&catalog);
        catalog.looked(&job, 20, Duration::ZERO, Some((&table(3000, 1, 2), true)));
        assert!(pages(&catalog) != before && pages(&catalog) != 0);
        let (job, _, size) = due(&catalog).unwrap();
        assert_eq!(size, 20);
        let now = pages(&catalog);
        catalog.looked(&job, 5, Duration::ZERO, None);
        assert_eq!(pages(&catalog), now, "it keeps the one it has");
        let (job, ..) = due(&catalog).unwrap();
        catalog.looked(&job, 5, Duration::ZERO, Some((&table(6_000_000, 1, 2), true)));
        assert_eq!(pages(&catalog), now, "likewise, where there is no room");
        // As often as it is made again, there is room.
        for seed in 0..20 {
            let (job, ..) = due(&catalog).unwrap();
            catalog.looked(&job, 5, Duration::ZERO, Some((&table(2_000_000, 2000, seed), true)));
        }
        assert_eq!((catalog.stats().failed, catalog.stats().evicted), (0, 0));
        assert!(pages(&catalog) != 0);
    }

    #[test]
    fn of_a_user_one_at_a_time_and_a_part_of_the_time() {
        let catalog = catalog();
        for number in 1..=2 {
            let of_user = of(&catalog, 1000, &described(number));
            let job = catalog.next(true).unwrap();
            catalog.install(of_user, &table(1000, 1, 1), false, None);
            let dump = Arc::new(tempfile::tempfile().unwrap());
            catalog.grows(&job, dump, 10, Duration::ZERO);
        }
        let (job, ..) = due(&catalog).unwrap();
        assert!(due(&catalog).is_none(), "one of theirs is being looked at");
        catalog.looked(&job, 11, Duration::from_secs(9), None);
        let resting = catalog.lock().resting.clone();
        assert!(due(&catalog).is_some());
        catalog.lock().resting = resting;
        assert!(catalog.next_growing().is_none());
        let file = described(1);
        let number = of(&catalog, 1000, &file);
        catalog.release(&[number, number]);
        assert_eq!(catalog.take_unused().len(), 1, "nobody has it mapped");
        assert!(catalog.next(true).is_none());
        of(&catalog, 1000, &file);
        assert!(matches!(catalog.lock().slots[number as usize].state, State::Wanting));
    }

    #[test]
    fn a_number_that_is_anothers_by_now_gets_no_table_of_a_jitdump() {
        let catalog = catalog();
        let number = made(&catalog, &described(1));
        let (job, ..) = due(&catalog).unwrap();
        catalog.release(&[number]);
        // All numbers are wanted.
        for at in 2..=EXECUTABLES {
            of_root(&catalog, &file(at));
        }
        assert!(catalog.lock().slots[number as usize].kind != job.kind);
        catalog.looked(&job, 20, Duration::ZERO, Some((&table(1000, 1, 2), true)));
        assert!(!matches!(catalog.lock().slots[number as usize].state, State::Ready(_)));
    }
}
