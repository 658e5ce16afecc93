//! What JIT compilers write about the code they make: perf-maps and jitdumps, taken in pieces as
//! they grow.
//!
//! The files belong to the process looked at, so they may be anything: opened by the broker, read
//! on a thread that is given up when it hangs, within limits. Content is not looked at: parsing is
//! for the symbolizer. Called by `pipeline.rs` between epochs and when a process ends.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::artifact::{Artifact, Extent, Hash, Kind};
use crate::helpers::broker::{Broker, OpenError};
use crate::host::growth::{Growth, LOOK};
use crate::in_time::{NotInTime, in_time, later};
use crate::outbox::Outbox;
use crate::process::Wanted;

/// Largest file taken.
pub const MAX_BYTES: u64 = 64 << 20;
/// Pieces a file is taken in before it is taken once more as a whole: an epoch names each of them.
const MAX_PIECES: usize = 64;
/// Time for all files of an epoch: samples wait meanwhile.
const EPOCH_LIMIT: Duration = Duration::from_secs(2);
/// How long a file that was not there is not looked for, at first; each time twice as long.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long a file may take to open that nobody waits for: others wait for the broker.
const AT_ONCE: Duration = Duration::from_millis(50);
/// How many bytes before the next piece must be unchanged since the last piece was taken.
const TAIL: u64 = 4096;

/// What there is of a process image.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// Artifacts that make up its perf-map.
    pub perf_map: Vec<Hash>,
    /// Those of its jitdump.
    pub jitdump: Vec<Hash>,
    /// How the perf-map grew in this epoch.
    pub perf_map_growth: Growth,
    /// And the jitdump.
    pub jitdump_growth: Growth,
    /// Why there is neither, or not the latest.
    pub missing: Option<Missing>,
}

/// Why there is nothing of a process, or not the latest.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Missing {
    /// Nothing is where its perf-map would be, and it has mapped no jitdump.
    #[error("the process wrote no perf-map")]
    NotWritten,
    /// There is a perf-map.
    #[error("its perf-map cannot be taken: {0}")]
    PerfMap(NotTaken),
    /// It has mapped a jitdump.
    #[error("its jitdump cannot be taken: {0}")]
    Jitdump(NotTaken),
}

/// Why a file is not taken.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NotTaken {
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// It does not answer.
    #[error(transparent)]
    InTime(#[from] NotInTime),
    /// It cannot be read.
    #[error(transparent)]
    Read(Arc<io::Error>),
    /// There is nothing in it.
    #[error("it is empty")]
    Empty,
    /// No file may be that large.
    #[error("it has {0} bytes, more than the {MAX_BYTES} that are taken")]
    TooLarge(u64),
    /// Samples would wait too long.
    #[error("processes write more than there is time for")]
    NoTime,
    /// They would take too much memory.
    #[error("processes write more than can be kept")]
    NoRoom,
}

impl From<io::Error> for NotTaken {
    fn from(error: io::Error) -> Self {
        Self::Read(Arc::new(error))
    }
}

/// What was taken of all processes.
#[derive(Debug)]
pub struct Snapshots {
    broker: Arc<Broker>,
    files: HashMap<(u64, Kind), Growing>,
    taken: HashMap<u64, Taken>,
    /// Images whose files are looked for.
    watched: HashMap<u64, Watch>,
    looked: Instant,
    /// Time spent in this epoch.
    spent: Duration,
}

/// When to look for the files of an image.
#[derive(Debug)]
struct Watch {
    /// Those being opened.
    opening: Option<mpsc::Receiver<Vec<(Kind, Growing)>>>,
    /// And if there were none, when to look again and how much later than the last time.
    again: Instant,
    after: Duration,
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
    growth: Growth,
}

impl Snapshots {
    /// Nothing taken yet.
    #[must_use]
    pub fn new(broker: Arc<Broker>) -> Self {
        Self {
            broker,
            files: HashMap::new(),
            taken: HashMap::new(),
            watched: HashMap::new(),
            looked: Instant::now(),
            spent: Duration::ZERO,
        }
    }

    /// What there is of each image.
    #[must_use]
    pub fn taken(&self) -> &HashMap<u64, Taken> {
        &self.taken
    }

    /// Takes what a process has written since the last time, for an epoch. `jitdump` is where it
    /// has mapped one.
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
        let (pieces, reason) = self.grow(image, Kind::PerfMap, perf_map(pid), epoch, outbox);
        taken.perf_map = pieces;
        taken.missing = reason.map(|reason| match reason {
            NotTaken::Open(OpenError::NotFound) => Missing::NotWritten,
            other => Missing::PerfMap(other),
        });
        if let Some(wanted) = jitdump {
            let (pieces, reason) = self.grow(image, Kind::Jitdump, wanted, epoch, outbox);
            taken.jitdump = pieces;
            taken.missing = reason.map(Missing::Jitdump);
        }
        let growth = |kind| self.files.get(&(image, kind)).map(|file| file.growth.clone());
        taken.perf_map_growth = growth(Kind::PerfMap).unwrap_or_default();
        taken.jitdump_growth = growth(Kind::Jitdump).unwrap_or_default();
        self.taken.insert(image, taken);
        self.spent += started.elapsed();
    }

    /// Whether it is time to look at what grows.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.looked.elapsed() >= LOOK
    }

    /// Looks for the files of an image that runs code without a file, so that their growth is seen.
    /// The files are opened in the background. `jitdump` is called to learn where the process has
    /// mapped a jitdump.
    pub fn watch(&mut self, image: u64, pid: u32, jitdump: impl FnOnce() -> Option<Wanted>) {
        let now = Instant::now();
        let new = || Watch { opening: None, again: now, after: LOOK_AGAIN };
        let watch = self.watched.entry(image).or_insert_with(new);
        let known = self.files.contains_key(&(image, Kind::PerfMap))
            || self.files.contains_key(&(image, Kind::Jitdump));
        if known || watch.opening.is_some() || watch.again > now {
            return;
        }
        static TAKEN: AtomicUsize = AtomicUsize::new(0);
        let broker = Arc::clone(&self.broker);
        let jitdump = jitdump().map(|wanted| (Kind::Jitdump, wanted));
        let wanted = [Some((Kind::PerfMap, perf_map(pid))), jitdump];
        watch.opening = later(&TAKEN, move || {
            // What cannot be opened now is tried again at the end of the epoch, which says why.
            let opened = wanted.into_iter().flatten().filter_map(|(kind, wanted)| {
                let file = broker.open_within(&wanted, AT_ONCE).ok()?;
                Some((kind, Growing::of(file).ok()?))
            });
            opened.collect()
        });
        if watch.opening.is_some() {
            watch.again = now + watch.after;
            watch.after *= 2;
        }
    }

    /// Looks at what grows.
    pub fn look(&mut self) {
        self.looked = Instant::now();
        for (&image, watch) in &mut self.watched {
            let Some(opened) = watch.opening.as_ref().map(mpsc::Receiver::try_recv) else {
                continue;
            };
            match opened {
                Err(mpsc::TryRecvError::Empty) => {}
                opened => {
                    watch.opening = None;
                    for (kind, growing) in opened.into_iter().flatten() {
                        self.files.entry((image, kind)).or_insert(growing);
                    }
                }
            }
        }
        for Growing { file, growth, .. } in self.files.values_mut() {
            growth.look(file);
        }
    }

    /// Called between epochs.
    pub fn end_epoch(&mut self) {
        self.spent = Duration::ZERO;
        self.files.values_mut().for_each(|file| file.growth.end_epoch());
        for taken in self.taken.values_mut() {
            (taken.perf_map_growth, taken.jitdump_growth) = Default::default();
        }
    }

    /// Forgets images of which this is not true.
    pub fn retain(&mut self, mut keep: impl FnMut(u64) -> bool) {
        self.watched.retain(|&image, _| keep(image));
        self.taken.retain(|&image, _| keep(image));
        self.files.retain(|&(image, _), _| keep(image));
    }

    /// All pieces of a file there are by now, and why there are none, or no newer ones.
    fn grow(
        &mut self,
        image: u64,
        kind: Kind,
        wanted: Wanted,
        epoch: u64,
        outbox: &Outbox,
    ) -> (Vec<Hash>, Option<NotTaken>) {
        let before = self.files.get(&(image, kind)).cloned();
        let kept = before.as_ref().is_none_or(|before| outbox.keep_for(&before.pieces, epoch));
        let broker = Arc::clone(&self.broker);
        let start = before.clone();
        let anew = !kept || start.as_ref().is_some_and(|start| start.pieces.len() >= MAX_PIECES);
        let read = if self.spent < EPOCH_LIMIT {
            in_time(move || read(&broker, kind, &wanted, start, anew))
                .map_err(NotTaken::from)
                .and_then(|read| read)
        } else {
            Err(NotTaken::NoTime)
        };
        let taken = read.and_then(|(growing, new)| {
            let fits = new.is_none_or(|new| outbox.add_artifact(new, Some(epoch)));
            fits.then_some(growing).ok_or(NotTaken::NoRoom)
        });
        match taken {
            Ok(growing) => {
                let pieces = growing.pieces.clone();
                self.files.insert((image, kind), growing);
                let empty = pieces.is_empty().then_some(NotTaken::Empty);
                (pieces, empty)
            }
            // A snapshot from before is better than none; that it is old is said.
            Err(reason) => (before.filter(|_| kept).map_or(Vec::new(), |b| b.pieces), Some(reason)),
        }
    }
}

impl Growing {
    /// A file of which nothing was taken yet.
    fn of(file: File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let mut growing = Self::with(Arc::new(file), (metadata.dev(), metadata.ino()));
        growing.growth.now(metadata.len());
        Ok(growing)
    }

    fn with(file: Arc<File>, identity: (u64, u64)) -> Self {
        let growth = Growth::default();
        Self { file, identity, taken: 0, tail: Vec::new(), pieces: Vec::new(), growth }
    }
}

/// Where a process writes its perf-map.
fn perf_map(pid: u32) -> Wanted {
    let own = namespace_pid(pid).unwrap_or(pid);
    // In another namespace the same path here is of another process.
    Wanted::Own { pid, path: format!("/tmp/perf-{own}.map"), here: own == pid }
}

/// Opens the file and takes what is new in it, if anything is, or all of it `anew`.
fn read(
    broker: &Broker,
    kind: Kind,
    wanted: &Wanted,
    before: Option<Growing>,
    anew: bool,
) -> Result<(Growing, Option<Artifact>), NotTaken> {
    let file = match (broker.open(wanted), &before) {
        (Ok(file), _) => Arc::new(file),
        // The process is gone, and what it wrote last is still there.
        (Err(_), Some(before)) => Arc::clone(&before.file),
        (Err(reason), None) => return Err(reason.into()),
    };
    let metadata = file.metadata()?;
    let (identity, size) = ((metadata.dev(), metadata.ino()), metadata.len());
    if size > MAX_BYTES {
        return Err(NotTaken::TooLarge(size));
    }
    let is_same = |before: &Growing| {
        before.identity == identity
            && before.taken <= size
            && tail(&file, before.taken).is_ok_and(|tail| tail == before.tail)
    };
    let same = before.as_ref().is_none_or(is_same);
    let mut growth = before.as_ref().map(|before| before.growth.clone()).unwrap_or_default();
    if !same {
        growth.restart();
    }
    // Pieces taken before are read again through the descriptor they were taken through.
    let mut growing = match before.filter(|_| same && !anew) {
        Some(grown) => grown,
        None => Growing { growth, ..Growing::with(file, identity) },
    };
    growing.growth.now(size);
    if growing.taken == size {
        return Ok((growing, None));
    }
    let (file, offset) = (Arc::clone(&growing.file), growing.taken);
    let extent = Extent { file, offset, length: size - offset };
    let new = Artifact::of_file(kind, extent)?;
    growing.taken = size;
    growing.tail = tail(&growing.file, size)?;
    growing.pieces.push(new.hash);
    Ok((growing, Some(new)))
}

/// The bytes before `end`, [`TAIL`] at most.
fn tail(file: &File, end: u64) -> io::Result<Vec<u8>> {
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
            (pieces.len(), String::from_utf8(whole).unwrap(), reason.map(|why| why.to_string()))
        };
        assert_eq!(take(0), (0, String::new(), Some(OpenError::NotFound.to_string())));
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
        assert!(pieces.is_empty() && matches!(reason, Some(NotTaken::NoTime)));
        snapshots.end_epoch();
        assert!(snapshots.grow(1, Kind::PerfMap, wanted(), 1, &outbox).1.is_none());
    }

    #[test]
    fn the_innermost_pid_is_the_last() {
        assert_eq!(innermost("Name:\tx\nNSpid:\t812\t7\n"), Some(7));
        assert_eq!(innermost(""), None);
    }
}
