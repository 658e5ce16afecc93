//! The store as its users see it: whole or not there, whatever happens in between.

use std::fs;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::{Absent, Cache, CacheError, Key, Kind, Meta, Negative, Pending, Tier};

fn key(id: &str) -> Key {
    Key::new(id.parse().unwrap(), Kind::Debuginfo)
}

fn read(cache: &Cache, key: &Key) -> Option<Vec<u8>> {
    let mut blob = cache.get(key).unwrap()?;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut blob.file, &mut bytes).unwrap();
    Some(bytes)
}

#[test]
fn what_was_put_is_got_where_other_tools_look_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    let meta = Meta { quality: 3, origin: "http://x".into() };
    cache.put(&key("deadbeef00"), b"content", meta.clone()).unwrap();
    assert_eq!(read(&cache, &key("deadbeef00")).unwrap(), b"content");
    assert_eq!(cache.get(&key("deadbeef00")).unwrap().unwrap().meta, meta);
    assert_eq!(fs::read(directory.path().join(".build-id/de/adbeef00.debug")).unwrap(), b"content");
    assert!(read(&cache, &key("deadbeef01")).is_none());
    assert!(
        cache.remove(&key("deadbeef00")).unwrap() && !cache.remove(&key("deadbeef00")).unwrap()
    );
}

#[test]
fn damage_is_found_when_a_blob_is_opened_and_by_verify() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    for id in ["deadbeef00", "deadbeef01"] {
        let blob = cache.put(&key(id), b"content", Meta::default()).unwrap();
        fs::write(blob.path, b"c0ntent").unwrap();
    }
    assert!(read(&cache, &key("deadbeef00")).is_none());
    let found = cache.verify().unwrap();
    assert_eq!((found.good, found.damaged), (0, vec![key("deadbeef01")]));
    assert_eq!(cache.verify().unwrap(), crate::Verified::default());
}

#[test]
fn a_lost_or_damaged_index_is_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let put = |id| {
        let cache = Cache::open(directory.path(), 1 << 20).unwrap();
        cache.put(&key(id), b"content", Meta::default()).unwrap();
    };
    put("deadbeef00");
    for name in ["index.db", "index.db-wal", "index.db-shm"] {
        let _ = fs::remove_file(directory.path().join(name));
    }
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    assert_eq!(cache.stats().unwrap().blobs, 1);
    assert_eq!(read(&cache, &key("deadbeef00")).unwrap(), b"content");
    drop(cache);
    for garbage in [&b"not a database at all, though it is long enough to be one"[..], b"x"] {
        let _ = fs::remove_file(directory.path().join("index.db-wal"));
        fs::write(directory.path().join("index.db"), garbage).unwrap();
        let cache = Cache::open(directory.path(), 1 << 20).unwrap();
        assert_eq!(read(&cache, &key("deadbeef00")).unwrap(), b"content");
    }
}

#[test]
fn what_a_kill_leaves_is_put_right() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    // Killed between rename and index; between unlink and index; while writing.
    let orphan = directory.path().join(".build-id/de/adbeef00.debug");
    fs::create_dir_all(orphan.parent().unwrap()).unwrap();
    fs::write(&orphan, b"content").unwrap();
    let gone = cache.put(&key("deadbeef01"), b"content", Meta::default()).unwrap();
    fs::remove_file(gone.path).unwrap();
    let left = directory.path().join("tmp/99999-0");
    fs::write(&left, b"half").unwrap();
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(60);
    fs::File::options().write(true).open(&left).unwrap().set_modified(long_ago).unwrap();
    let found = cache.verify().unwrap();
    assert_eq!((found.good, found.repaired, found.damaged.len()), (1, 2, 0));
    assert_eq!(read(&cache, &key("deadbeef00")).unwrap(), b"content");
    drop(cache);
    Cache::open(directory.path(), 1 << 20).unwrap();
    assert!(!left.exists(), "a temporary file without a writer stays");
}

#[test]
fn a_pending_blob_leaves_nothing_when_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    let mut pending = cache.begin().unwrap();
    pending.write_all(b"half").unwrap();
    drop(pending);
    assert_eq!(fs::read_dir(cache.scratch()).unwrap().count(), 0);
    assert_eq!(cache.stats().unwrap().blobs, 0);
}

#[test]
fn the_least_recently_used_goes_first() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 2500).unwrap();
    let ids = ["deadbeef00", "deadbeef01", "deadbeef02"];
    for id in &ids[..2] {
        cache.put(&key(id), &[7; 1000], Meta::default()).unwrap();
        std::thread::sleep(Duration::from_millis(3));
    }
    assert!(read(&cache, &key(ids[0])).is_some());
    std::thread::sleep(Duration::from_millis(3));
    cache.put(&key(ids[2]), &[7; 1000], Meta::default()).unwrap();
    let left = ids.map(|id| read(&cache, &key(id)).is_some());
    assert_eq!(left, [true, false, true]);
    assert_eq!(cache.prune(0).unwrap().len(), 2);
    assert_eq!(cache.stats().unwrap().bytes, 0);
}

#[test]
fn negatives_end_with_their_lifetime_or_when_the_blob_comes() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    let missing = Negative::Missing("no server had it".into());
    let malformed = Negative::Malformed("not an ELF file".into());
    cache.put_negative(&key("deadbeef00"), &missing, Duration::from_secs(60)).unwrap();
    cache.put_negative(&key("deadbeef01"), &malformed, Duration::ZERO).unwrap();
    assert_eq!(cache.negative(&key("deadbeef00")).unwrap(), Some(missing));
    assert_eq!(cache.negative(&key("deadbeef01")).unwrap(), None);
    cache.put(&key("deadbeef00"), b"content", Meta::default()).unwrap();
    assert_eq!(cache.negative(&key("deadbeef00")).unwrap(), None);
}

#[test]
fn one_at_a_time_holds_a_key() {
    let directory = tempfile::tempdir().unwrap();
    let (inside, made) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let cache = Cache::open(directory.path(), 1 << 20).unwrap();
                let _lock =
                    cache.lock(&key("deadbeef00"), Duration::from_secs(30)).unwrap().unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                if cache.get(&key("deadbeef00")).unwrap().is_none() {
                    made.fetch_add(1, Ordering::SeqCst);
                    cache.put(&key("deadbeef00"), b"content", Meta::default()).unwrap();
                }
                inside.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    assert_eq!(made.load(Ordering::SeqCst), 1);
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    let _held = cache.lock(&key("deadbeef00"), Duration::ZERO).unwrap().unwrap();
    assert!(cache.lock(&key("deadbeef00"), Duration::from_millis(20)).unwrap().is_none());
}

/// Processes that compile the same table put it at the same time, and others read it then.
#[test]
fn a_blob_never_loses_where_it_is_from() {
    let directory = tempfile::tempdir().unwrap();
    let open = || Cache::open(directory.path(), 1 << 20).unwrap();
    let origin = |content: &str| Meta { quality: 1, origin: format!("origin of {content}") };
    let asked = key("deadbeef00");
    let put = |cache: &Cache, content: &str| {
        cache.put(&asked, content.as_bytes(), origin(content)).unwrap();
    };
    open();
    std::thread::scope(|scope| {
        for content in ["one", "one", "another"] {
            scope.spawn(move || {
                let cache = open();
                (0..100).for_each(|_| put(&cache, content));
            });
        }
        scope.spawn(|| {
            let cache = open();
            (0..100).for_each(|_| _ = cache.remove(&asked).unwrap());
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let cache = open();
                for _ in 0..500 {
                    let Some(blob) = cache.get(&asked).unwrap() else { continue };
                    let content = std::io::read_to_string(blob.file).unwrap();
                    assert_eq!(blob.meta, origin(&content));
                }
            });
        }
    });
    put(&open(), "one");
    assert_eq!(open().get(&asked).unwrap().unwrap().meta, origin("one"));
    assert_eq!(open().verify().unwrap(), crate::Verified { good: 1, ..Default::default() });
}

#[test]
fn a_directory_others_can_write_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(directory.path(), mode).unwrap();
    let refused = Cache::open(directory.path(), 1 << 20).unwrap_err();
    assert!(matches!(refused, CacheError::Directory(_)), "{refused}");
}

/// Has one blob, and counts how often it is asked.
struct Shelf {
    name: &'static str,
    has: Option<&'static [u8]>,
    asked: AtomicUsize,
}

impl Shelf {
    fn new(name: &'static str, has: Option<&'static [u8]>) -> Self {
        Self { name, has, asked: AtomicUsize::new(0) }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Tier for Shelf {
    type Wanted = Key;

    fn key(&self, wanted: &Key) -> Key {
        wanted.clone()
    }

    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn get<'s>(
        &self,
        _wanted: &Key,
        store: &'s Cache,
        _deadline: Instant,
    ) -> Result<(Pending<'s>, Meta), Absent> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let bytes = self.has.ok_or_else(|| Absent::Missing("not on the shelf".into()))?;
        let mut pending = store.begin()?;
        pending.write_all(bytes).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        Ok((pending, Meta { quality: 0, origin: self.name.to_owned() }))
    }

    fn negative(&self, _absent: &Absent) -> Option<Duration> {
        Some(Duration::from_secs(60))
    }
}

#[test]
fn what_is_not_here_is_asked_of_the_tier_behind_once() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let shelf = Shelf::new("shelf", Some(b"content"));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let blob = cache.get_through(&shelf, &key("deadbeef00"), deadline).unwrap();
                assert_eq!(blob.meta.origin, "shelf");
            });
        }
    });
    assert_eq!(shelf.asked(), 1);
    assert_eq!(read(&cache, &key("deadbeef00")).unwrap(), b"content");
}

#[test]
fn that_a_tier_does_not_have_a_blob_is_remembered_of_this_tier_alone() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let missing = Absent::Missing("not on the shelf".into());
    let empty = Shelf::new("empty", None);
    for _ in 0..3 {
        let answer = cache.get_through(&empty, &key("deadbeef00"), deadline);
        assert_eq!(answer.map(|blob| blob.meta).unwrap_err(), missing);
    }
    assert_eq!(empty.asked(), 1);
    let full = Shelf::new("full", Some(b"content"));
    cache.get_through(&full, &key("deadbeef00"), deadline).unwrap();
    assert_eq!(full.asked(), 1);
}

#[test]
fn nobody_waits_for_another_beyond_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), 1 << 20).unwrap();
    let _held = cache.lock(&key("deadbeef00"), Duration::ZERO).unwrap().unwrap();
    let shelf = Shelf::new("shelf", Some(b"content"));
    let answer = cache.get_through(&shelf, &key("deadbeef00"), Instant::now());
    assert!(matches!(answer, Err(Absent::Failed(_))), "{answer:?}");
    assert_eq!(shelf.asked(), 0);
}
