//! Artifacts that a symbolizer may ask for, as long as epochs that refer to them are not delivered.
//! Called by `outbox.rs`.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};

use crate::artifact::{Artifact, Hash};

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Kept {
    artifacts: HashMap<Hash, Artifact>,
    /// Those that may be forgotten, with the last epoch that refers to them; oldest first.
    evictable: VecDeque<(Hash, u64)>,
}

impl Kept {
    /// Keeps an artifact. Without `epoch` it is kept for good. With `epoch`, the epoch that refers
    /// to it, it may be dropped to make room for artifacts of later epochs. False when there is no
    /// room: all may take `most` bytes.
    pub fn add(&mut self, artifact: Artifact, epoch: Option<u64>, most: u64) -> bool {
        if let Some(epoch) = epoch {
            self.evictable.retain(|(hash, _)| *hash != artifact.hash);
            let mut bytes = self.evictable_bytes() + artifact.length;
            while bytes > most {
                // Those of this very epoch have not been sent yet.
                let Some((oldest, _)) = self.evictable.pop_front_if(|(_, of)| *of < epoch) else {
                    self.artifacts.remove(&artifact.hash);
                    return false;
                };
                bytes -= self.artifacts.remove(&oldest).map_or(0, |gone| gone.length);
            }
            self.evictable.push_back((artifact.hash, epoch));
        }
        match self.artifacts.entry(artifact.hash) {
            Entry::Occupied(mut known) => known.get_mut().merge(artifact),
            Entry::Vacant(new) => drop(new.insert(artifact)),
        }
        true
    }

    /// Artifacts of earlier epochs that this one refers to as well; false when one is not there any
    /// more.
    pub fn keep_for(&mut self, hashes: &[Hash], epoch: u64) -> bool {
        let Self { evictable, artifacts } = self;
        for (hash, last) in evictable.iter_mut().filter(|(hash, _)| hashes.contains(hash)) {
            *last = epoch;
            if let Some(artifact) = artifacts.get_mut(hash) {
                artifact.needed();
            }
        }
        // The oldest first, as making room expects them.
        evictable.make_contiguous().sort_by_key(|&(_, epoch)| epoch);
        hashes.iter().all(|hash| artifacts.contains_key(hash))
    }

    /// An artifact cannot be read any more, or is not what it was: epochs to come do not refer to
    /// it.
    pub fn forget(&mut self, hash: Hash) {
        self.evictable.retain(|(kept, _)| *kept != hash);
        self.artifacts.remove(&hash);
    }

    /// One, if it is still there.
    pub fn get(&self, hash: Hash) -> Option<Artifact> {
        self.artifacts.get(&hash).cloned()
    }

    /// All but these, in no order.
    pub fn beside(&self, known: &HashSet<Hash>) -> Vec<Artifact> {
        self.artifacts.values().filter(|kept| !known.contains(&kept.hash)).cloned().collect()
    }

    /// Epochs up to and including `number` are durable elsewhere. Whoever asks later for what they
    /// refer to has an epoch that refers to it again.
    pub fn delivered(&mut self, number: u64) {
        let Self { evictable, artifacts } = self;
        evictable.retain(|(hash, last)| {
            let Some(artifact) = artifacts.get_mut(hash) else { return false };
            if *last <= number {
                artifact.delivered();
            }
            let gone = artifact.is_gone();
            if gone {
                artifacts.remove(hash);
            }
            !gone
        });
    }

    fn evictable_bytes(&self) -> u64 {
        let kept = self.evictable.iter().filter_map(|(hash, _)| self.artifacts.get(hash));
        kept.map(|artifact| artifact.length).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;

    use super::*;
    use crate::artifact::{Extent, Kind};

    const MOST: u64 = 250;

    #[test]
    fn artifacts_of_files_are_kept_until_they_are_delivered() {
        let mut kept = Kept::default();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"f8000 10 work\n").unwrap();
        let extent = Extent { file: Arc::new(file), offset: 0, length: 14 };
        let artifact = Artifact::of_file(Kind::PerfMap, extent.clone()).unwrap();
        let (hash, file) = (artifact.hash, extent.file);
        assert!(kept.add(artifact, Some(3), MOST));
        let is_there = |kept: &Kept| kept.get(hash).is_some_and(|it| it.open().is_some());
        assert!(kept.keep_for(&[hash], 4));
        kept.delivered(3);
        drop(file);
        assert!(
            is_there(&kept),
            "its process is gone, and an epoch that is on its way refers to it"
        );
        kept.delivered(4);
        assert!(!is_there(&kept) && !kept.keep_for(&[hash], 5));
    }

    #[test]
    fn what_is_not_what_it_was_is_taken_anew() {
        let mut kept = Kept::default();
        let artifact = Artifact::new(Kind::PerfMap, vec![1]);
        let hash = artifact.hash;
        assert!(kept.add(artifact, Some(1), MOST) && kept.keep_for(&[hash], 2));
        kept.forget(hash);
        assert!(!kept.keep_for(&[hash], 3));
    }

    #[test]
    fn artifacts_of_older_epochs_make_room_pinned_ones_never() {
        let mut kept = Kept::default();
        let make = |byte: u8| Artifact::new(Kind::PerfMap, vec![byte; 100]);
        assert!(kept.add(make(0), None, MOST));
        for byte in 1..5 {
            assert!(kept.add(make(byte), Some(byte.into()), MOST));
        }
        let there = |kept: &Kept, byte: u8| kept.get(make(byte).hash).is_some();
        assert_eq!(
            [0, 1, 2, 3, 4].map(|byte| there(&kept, byte)),
            [true, false, false, true, true]
        );
        assert!(kept.add(make(3), Some(5), MOST), "the same again takes no room");
        assert!(kept.add(make(6), Some(5), MOST));
        assert!(!kept.add(make(7), Some(5), MOST), "all the others are of this epoch");
        assert!(kept.keep_for(&[make(3).hash], 6));
        assert!(kept.add(make(8), Some(6), MOST));
        assert!(there(&kept, 3) && !there(&kept, 6), "what an epoch refers to again stays");
        assert!(!kept.keep_for(&[make(6).hash], 6));
    }
}
