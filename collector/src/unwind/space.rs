//! Which parts of a map are used. Pure.

use std::collections::BTreeMap;

/// Entries of a map, handed out in runs.
///
/// What is given back is handed out again only after [`Space::reclaim`]: until then the kernel side
/// may be reading it.
#[derive(Debug)]
pub struct Space {
    /// First entry → entries, no two of them next to each other.
    free: BTreeMap<u32, u32>,
    limbo: Vec<(u32, u32)>,
}

impl Space {
    /// All of a map but its first `reserved` entries.
    #[must_use]
    pub fn new(entries: u32, reserved: u32) -> Self {
        Self { free: BTreeMap::from([(reserved, entries - reserved)]), limbo: Vec::new() }
    }

    /// Whether there is a run of `count` entries.
    #[must_use]
    pub fn fits(&self, count: u32) -> bool {
        self.free.values().any(|&length| length >= count)
    }

    /// A run of `count` entries, the lowest there is.
    pub fn take(&mut self, count: u32) -> Option<u32> {
        let (&first, &length) = self.free.iter().find(|(_, length)| **length >= count)?;
        self.free.remove(&first);
        if length > count {
            self.free.insert(first + count, length - count);
        }
        Some(first)
    }

    /// Gives a run back.
    pub fn give_back(&mut self, first: u32, count: u32) {
        if count > 0 {
            self.limbo.push((first, count));
        }
    }

    /// Whether [`Space::reclaim`] would bring anything.
    #[must_use]
    pub fn has_limbo(&self) -> bool {
        !self.limbo.is_empty()
    }

    /// Makes what was given back available; the kernel side knows by now that what it reads there
    /// is not to be trusted.
    pub fn reclaim(&mut self) {
        for (mut first, mut count) in std::mem::take(&mut self.limbo) {
            if let Some((&before, &length)) = self.free.range(..first).next_back()
                && before + length == first
            {
                self.free.remove(&before);
                (first, count) = (before, length + count);
            }
            if let Some(length) = self.free.remove(&(first + count)) {
                count += length;
            }
            self.free.insert(first, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_used_again_only_after_reclaim() {
        let mut space = Space::new(10, 1);
        let runs: Vec<u32> = (0..3).map(|_| space.take(3).unwrap()).collect();
        assert_eq!((runs.as_slice(), space.take(1)), (&[1, 4, 7][..], None));
        space.give_back(4, 3);
        space.give_back(1, 3);
        assert!(space.has_limbo() && space.take(1).is_none());
        space.reclaim();
        assert_eq!((space.take(6), space.take(1)), (Some(1), None), "they are one run again");
        space.give_back(7, 3);
        space.give_back(1, 6);
        space.reclaim();
        assert_eq!(space.free, BTreeMap::from([(1, 9)]));
    }
}
