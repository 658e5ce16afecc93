//! What a JIT compiler wrote about its code, as far as it was taken, and when it wrote which part.
//! Pure.
//!
//! Kept for each process by the builder; the symbolizer's `anonymous.rs` reads it.

use std::ops::Range;

use super::ArtifactHash;

/// Snapshots kept of a file: it grows, so a later one has mostly all of those before.
const MAX_SNAPSHOTS: usize = 4;
/// Sizes kept of a file: those of two hours, if it grows all the time.
const MAX_MARKS: usize = 72_000;

/// A perf-map or a jitdump, with those that were there before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JitFile {
    /// The oldest first.
    snapshots: Vec<Snapshot>,
    /// Sizes it was seen to have, the oldest first. A size below the one before is of another file
    /// in its place.
    growth: Vec<Mark>,
}

/// A file at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Artifacts that follow each other in it.
    pub pieces: Vec<ArtifactHash>,
    /// When it was taken last, nanoseconds since the Unix epoch; 0: unknown.
    taken_ns: u64,
    /// Which sizes are of this file.
    marks: Range<usize>,
}

/// A size a file had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Nanoseconds since the Unix epoch.
    pub time_ns: u64,
    /// Bytes.
    pub size: u64,
}

impl JitFile {
    /// What an epoch says of it.
    #[must_use]
    pub fn of(pieces: Vec<ArtifactHash>, taken_ns: u64, growth: Vec<Mark>) -> Self {
        let mut file = Self { snapshots: Vec::new(), growth };
        if !pieces.is_empty() {
            let marks = file.last_file(0).unwrap_or(0)..file.growth.len();
            file.snapshots.push(Snapshot { pieces, taken_ns, marks });
        }
        file
    }

    /// There is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.snapshots.is_empty()
    }

    /// All of them, the oldest first.
    #[must_use]
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }

    /// The size it was seen to have first, if somebody looked.
    #[must_use]
    pub fn first_size(&self) -> Option<u64> {
        self.growth.first().map(|mark| mark.size)
    }

    /// Whether it was written to between the first look and the last.
    #[must_use]
    pub fn grew(&self) -> bool {
        self.growth.len() > 1
    }

    /// Adds what a later epoch says.
    pub fn add(&mut self, later: Self) {
        // An epoch begins with the mark the one before it ended with.
        let last = self.growth.last().map_or(0, |mark| mark.time_ns);
        let room = MAX_MARKS.saturating_sub(self.growth.len());
        let known = self.growth.len();
        self.growth.extend(later.growth.into_iter().filter(|mark| mark.time_ns > last).take(room));
        let another = self.last_file(known.saturating_sub(1));
        if let Some(before) = self.snapshots.last_mut() {
            before.marks.end = another.unwrap_or(self.growth.len());
        }
        for mut snapshot in later.snapshots {
            let start = another.or(self.snapshots.last().map(|before| before.marks.start));
            snapshot.marks = start.unwrap_or(0)..self.growth.len();
            self.snapshots.retain(|before| !snapshot.pieces.starts_with(&before.pieces));
            self.snapshots.push(snapshot);
            self.snapshots.drain(..self.snapshots.len().saturating_sub(MAX_SNAPSHOTS));
        }
    }

    /// The first mark of the file that was put in the place of another last, of those from `from`
    /// on.
    fn last_file(&self, from: usize) -> Option<usize> {
        let pairs = self.growth.get(from..)?.windows(2);
        pairs
            .rev()
            .position(|pair| pair[1].size < pair[0].size)
            .map(|back| self.growth.len() - 1 - back)
    }

    /// The snapshot that holds at a time (0: the newest), and its artifacts up to the first one
    /// that `has` does not find. `None`: there is no such snapshot.
    #[must_use]
    pub fn at(
        &self,
        seen_ns: u64,
        has: impl Fn(&ArtifactHash) -> bool,
    ) -> Option<(&Snapshot, &[ArtifactHash])> {
        let came =
            |snapshot: &Snapshot| snapshot.pieces.iter().take_while(|hash| has(hash)).count();
        let mut whole =
            self.snapshots.iter().filter(|snapshot| came(snapshot) == snapshot.pieces.len());
        let then = whole.clone().find(|snapshot| seen_ns != 0 && snapshot.taken_ns >= seen_ns);
        // A later one may have been cut off with the end of the capture.
        let part = || self.snapshots.iter().rfind(|snapshot| came(snapshot) > 0);
        let snapshot = then.or_else(|| whole.next_back()).or_else(part)?;
        Some((snapshot, &snapshot.pieces[..came(snapshot)]))
    }

    /// Two times, in nanoseconds since the Unix epoch. The first is when the byte at an offset of a
    /// snapshot was written: half-way between two looks, or 0 when it was there before the first
    /// look. The second is the latest time it can have been written, or 0 when nobody looked.
    #[must_use]
    pub fn written_ns(&self, snapshot: &Snapshot, offset: u64) -> (u64, u64) {
        let marks = self.growth.get(snapshot.marks.clone()).unwrap_or_default();
        let after = marks.partition_point(|mark| mark.size <= offset);
        let late = marks.get(after).or(marks.last()).map_or(0, |mark| mark.time_ns);
        // In front of the first mark is the last one of the file before, if there was one.
        let before = (snapshot.marks.start + after).checked_sub(1);
        match before.and_then(|before| self.growth.get(before)) {
            None => (0, late),
            Some(before) => (before.time_ns.midpoint(late), late),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(of: &[(u64, u64)]) -> Vec<Mark> {
        of.iter().map(|&(time_ns, size)| Mark { time_ns, size }).collect()
    }

    fn written(file: &JitFile, seen: u64, offset: u64) -> Option<(u8, u64)> {
        let (snapshot, pieces) = file.at(seen, |_| true)?;
        Some((pieces[0][0], file.written_ns(snapshot, offset).0))
    }

    #[test]
    fn a_byte_was_written_between_two_looks() {
        let mut file = JitFile::of(vec![[1; 32]], 50, marks(&[(10, 100), (20, 200)]));
        file.add(JitFile::of(vec![[1; 32], [2; 32]], 90, marks(&[(20, 200), (60, 300)])));
        assert_eq!(file.snapshots.len(), 1, "the later one has all of the one before");
        let at = |offset| written(&file, 0, offset).map(|(_, time)| time);
        assert_eq!([0, 99, 100, 199, 200, 299, 300].map(at), [0, 0, 15, 15, 40, 40, 60].map(Some));
        // Taken as a whole again: it is the same file.
        file.add(JitFile::of(vec![[3; 32]], 99, marks(&[(60, 300), (95, 400)])));
        let at = |offset| written(&file, 0, offset);
        assert_eq!([0, 150, 350].map(at), [(3, 0), (3, 15), (3, 77)].map(Some));
        // What was written when nobody said so was written between what was said.
        file.add(JitFile::of(vec![[3; 32], [4; 32]], 300, marks(&[(200, 500)])));
        assert_eq!(written(&file, 0, 450), Some((3, 147)));
    }

    #[test]
    fn another_file_begins_anew_and_the_old_one_holds_for_its_time() {
        let mut file = JitFile::of(vec![[1; 32]], 50, marks(&[(10, 100), (40, 200)]));
        file.add(JitFile::of(vec![[2; 32]], 90, marks(&[(40, 200), (60, 0), (70, 50)])));
        assert_eq!([5, 45].map(|offset| written(&file, 80, offset)), [Some((2, 65)); 2]);
        assert_eq!([5, 150].map(|offset| written(&file, 30, offset)), [(1, 0), (1, 25)].map(Some));
        let at = |seen| file.at(seen, |_| true).map(|(_, pieces)| pieces[0][0]);
        assert_eq!([0, 40, 60, 99].map(at), [Some(2), Some(1), Some(2), Some(2)]);
        assert_eq!(file.at(60, |hash| hash[0] == 1).map(|(_, pieces)| pieces[0][0]), Some(1));
        assert_eq!(file.at(60, |_| false), None);
        // Shorter at once.
        let mut file = JitFile::of(vec![[1; 32]], 50, marks(&[(10, 100)]));
        file.add(JitFile::of(vec![[2; 32]], 90, marks(&[(10, 100), (60, 50), (80, 70)])));
        assert_eq!([5, 60].map(|offset| written(&file, 99, offset)), [(2, 35), (2, 70)].map(Some));
    }

    #[test]
    fn times_that_make_no_sense_end_in_no_panic() {
        let mut file =
            JitFile::of(vec![[1; 32]], 0, marks(&[(u64::MAX, 0), (3, u64::MAX), (2, 1)]));
        file.add(JitFile::of(Vec::new(), 0, marks(&[(1, 9), (0, u64::MAX)])));
        file.add(JitFile::of(vec![[2; 32]], u64::MAX, Vec::new()));
        for offset in [0, 5, u64::MAX] {
            let _ = written(&file, 7, offset);
        }
    }
}
