//! What JIT compilers write about the code they make: perf-maps and jitdumps, taken in pieces as they grow.
//!
//! The files belong to the process looked at, so they may be anything: opened by the broker, read on a thread
//! that is given up when it hangs, within limits. Content is not looked at: parsing is for the symbolizer.
//! Called by `pipeline.rs` between epochs and when a process ends.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::artifact::{Artifact, Extent, Hash, Kind};
use crate::broker::{self, Broker, Wanted};
use crate::in_time::in_time;
use crate::outbox::Outbox;

/// Largest file taken.
pub const MAX_BYTES: u64 = 64 << 20;
/// Pieces a file is taken in before it is taken once more as a whole: an epoch names each of them.
const MAX_PIECES: usize = 64;
/// Time for all files of an epoch: samples wait meanwhile.
const EPOCH_LIMIT: Duration = Duration::from_secs(2);
/// Bytes in front of what is taken next that must be what they were.
const TAIL: u64 = 4096;

/// What there is of a process image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Artifacts that make up its perf-map.
    pub perf_map: Vec<Hash>,
    /// Those of its jitdump.
    pub jitdump: Vec<Hash>,
    /// Why there is neither, or not the latest.
    pub missing: Option<String>,
}

/// What was taken of all processes.
#[derive(Debug)]
pub struct Snapshots {
    broker: Arc<Broker>,
    files: HashMap<(u64, Kind), Growing>,
    taken: HashMap<u64, Taken>,
    /// Time spent in this epoch.
    spent: Duration,
}

/// A file as far as it was taken.
#[derive(Clone, Debug)]
struct Growing {
    file: Arc<File>,
    /// Device and inode.
    identity: (u64, u64),
    taken: u64,
    /// The last bytes of what was taken.
    tail: Vec<u8>,
    pieces: Vec<Hash>,
}

impl Snapshots {
    /// Nothing taken yet.
    #[must_use]
    pub fn new(broker: Arc<Broker>) -> Self {
        Self { broker, files: HashMap::new(), taken: HashMap::new(), spent: Duration::ZERO }
    }

    /// What there is of each image.
    #[must_use]
    pub fn taken(&self) -> &HashMap<u64, Taken> {
        &self.taken
    }

    /// Takes what a process has written since the last time, for an epoch. `jitdump` is where it has mapped one.
    pub fn take(
        &mut self,
        image: u64,
        pid: u32,
        jitdump: Option<Wanted>,
        epoch: u64,
        outbox: &Outbox,
    ) {
        let started = Instant::now();
        let mut taken = Taken::default();
        let own = namespace_pid(pid).unwrap_or(pid);
        // In another namespace the same path here is of another process.
        let map = Wanted::Own { pid, path: format!("/tmp/perf-{own}.map"), here: own == pid };
        let (pieces, reason) = self.grow(image, Kind::PerfMap, map, epoch, outbox);
        taken.perf_map = pieces;
        taken.missing = reason.map(|reason| match reason == broker::NONE {
            true => "the process wrote no perf-map".to_owned(),
            false => format!("its perf-map cannot be taken: {reason}"),
        });
        if let Some(wanted) = jitdump {
            let (pieces, reason) = self.grow(image, Kind::Jitdump, wanted, epoch, outbox);
            taken.jitdump = pieces;
            taken.missing = reason.map(|reason| format!("its jitdump cannot be taken: {reason}"));
        }
        self.taken.insert(image, taken);
        self.spent += started.elapsed();
    }

    /// Called between epochs.
    pub fn end_epoch(&mut self) {
        self.spent = Duration::ZERO;
    }

    /// Forgets images of which this is not true.
    pub fn retain(&mut self, mut keep: impl FnMut(u64) -> bool) {
        self.taken.retain(|&image, _| keep(image));
        self.files.retain(|&(image, _), _| self.taken.contains_key(&image));
    }

    /// All pieces of a file there are by now, and why there are none, or no newer ones.
    fn grow(
        &mut self,
        image: u64,
        kind: Kind,
        wanted: Wanted,
        epoch: u64,
        outbox: &Outbox,
    ) -> (Vec<Hash>, Option<String>) {
        let before = self.files.get(&(image, kind)).cloned();
        let kept = before.as_ref().is_none_or(|before| outbox.keep_for(&before.pieces, epoch));
        let broker = Arc::clone(&self.broker);
        let start = before.clone().filter(|before| kept && before.pieces.len() < MAX_PIECES);
        let read = match self.spent < EPOCH_LIMIT {
            true => in_time(move || read(&broker, kind, &wanted, start)).and_then(|read| read),
            false => Err("processes write more than there is time for".to_owned()),
        };
        let taken = read.and_then(|(growing, new)| {
            let fits = new.is_none_or(|new| outbox.add_artifact(new, Some(epoch)));
            fits.then_some(growing).ok_or("processes write more than can be kept".to_owned())
        });
        match taken {
            Ok(growing) => {
                let pieces = growing.pieces.clone();
                self.files.insert((image, kind), growing);
                let empty = pieces.is_empty().then(|| "it is empty".to_owned());
                (pieces, empty)
            }
            // A snapshot from before is better than none; that it is old is said.
            Err(reason) => (before.filter(|_| kept).map_or(Vec::new(), |b| b.pieces), Some(reason)),
        }
    }
}

/// Opens the file and takes what is new in it, if anything is.
fn read(
    broker: &Broker,
    kind: Kind,
    wanted: &Wanted,
    before: Option<Growing>,
) -> Result<(Growing, Option<Artifact>), String> {
    let said = |error: std::io::Error| error.to_string();
    let file = match (broker.open(wanted), &before) {
        (Ok(file), _) => Arc::new(file),
        // The process is gone, and what it wrote last is still there.
        (Err(_), Some(before)) => Arc::clone(&before.file),
        (Err(reason), None) => return Err(reason),
    };
    let metadata = file.metadata().map_err(said)?;
    let (identity, size) = ((metadata.dev(), metadata.ino()), metadata.len());
    if size > MAX_BYTES {
        return Err(format!("it has {size} bytes, more than the {MAX_BYTES} that are taken"));
    }
    let grown = before.filter(|before| {
        before.identity == identity
            && before.taken <= size
            && tail(&file, before.taken).is_ok_and(|tail| tail == before.tail)
    });
    // Pieces taken before are read again through the descriptor they were taken through.
    let mut growing =
        grown.unwrap_or(Growing { file, identity, taken: 0, tail: Vec::new(), pieces: Vec::new() });
    if growing.taken == size {
        return Ok((growing, None));
    }
    let (file, offset) = (Arc::clone(&growing.file), growing.taken);
    let extent = Extent { file, offset, length: size - offset };
    let new = Artifact::of_file(kind, extent).map_err(said)?;
    growing.taken = size;
    growing.tail = tail(&growing.file, size).map_err(said)?;
    growing.pieces.push(new.hash);
    Ok((growing, Some(new)))
}

/// The bytes before `end`, [`TAIL`] at most.
fn tail(file: &File, end: u64) -> std::io::Result<Vec<u8>> {
    let length = end.min(TAIL);
    let mut tail = vec![0; length as usize];
    file.read_exact_at(&mut tail, end - length)?;
    Ok(tail)
}

/// The pid in the innermost namespace: the last of `NSpid` in `/proc/PID/status`.
fn namespace_pid(pid: u32) -> Option<u32> {
    innermost(&crate::process::text::read(format!("/proc/{pid}/status")).ok()?)
}

fn innermost(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::outbox::Limits;

    #[test]
    fn a_file_is_taken_in_pieces_as_it_grows_and_again_when_it_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("map");
        let outbox = Outbox::new(Limits::default());
        let mut snapshots = Snapshots::new(Arc::new(Broker::none()));
        let mut take = |epoch| {
            let path = path.to_str().unwrap().to_owned();
            let wanted = Wanted::Own { pid: std::process::id(), path, here: true };
            let (pieces, reason) = snapshots.grow(1, Kind::PerfMap, wanted, epoch, &outbox);
            let whole = pieces
                .iter()
                .map(|hash| outbox.artifact(*hash).unwrap().open().unwrap().piece(0).unwrap());
            let whole = whole.collect::<Vec<_>>().concat();
            (pieces.len(), String::from_utf8(whole).unwrap(), reason)
        };
        assert_eq!(take(0), (0, String::new(), Some(broker::NONE.to_owned())));
        std::fs::write(&path, "a\n").unwrap();
        assert_eq!(take(1), (1, "a\n".to_owned(), None));
        assert_eq!(take(2), (1, "a\n".to_owned(), None), "nothing new");
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"b\n").unwrap();
        assert_eq!(take(3), (2, "a\nb\n".to_owned(), None));
        std::fs::write(&path, "another\n").unwrap();
        assert_eq!(take(4), (1, "another\n".to_owned(), None));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(take(5), (1, "another\n".to_owned(), None), "kept when it is gone");
        let large = File::create(&path).unwrap();
        large.set_len(2 << 30).unwrap();
        let (pieces, _, reason) = take(6);
        assert_eq!(pieces, 1);
        assert!(reason.unwrap().contains("2147483648 bytes"));
    }

    #[test]
    fn processes_that_write_too_much_keep_no_sample_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("map").to_str().unwrap().to_owned();
        std::fs::write(&path, "a\n").unwrap();
        let outbox = Outbox::new(Limits::default());
        let mut snapshots = Snapshots::new(Arc::new(Broker::none()));
        let wanted = || Wanted::Own { pid: std::process::id(), path: path.clone(), here: true };
        snapshots.spent = EPOCH_LIMIT;
        let (pieces, reason) = snapshots.grow(1, Kind::PerfMap, wanted(), 0, &outbox);
        assert!(pieces.is_empty() && reason.unwrap().contains("more than there is time for"));
        snapshots.end_epoch();
        assert_eq!(snapshots.grow(1, Kind::PerfMap, wanted(), 1, &outbox).1, None);
    }

    #[test]
    fn the_innermost_pid_is_the_last() {
        assert_eq!(innermost("Name:\tx\nNSpid:\t812\t7\n"), Some(7));
        assert_eq!(innermost(""), None);
    }
}
