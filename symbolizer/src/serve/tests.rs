//! Windows on their way through a store that is opened again and again, as after kills.

use std::path::Path;
use std::time::Duration;

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{seal_epoch, v1};

use super::id::{CaptureId, WindowId};
use super::identity::Identity;
use super::index::State;
use super::store::{Keep, Places, Store, StoreError};
use crate::receive::log::{Batch, Log, Tally};

const ONE: WindowId = WindowId { capture: CaptureId([1; 16]), number: 0 };

fn open_with(directory: &Path, bytes: u64) -> Store {
    let keep = Keep { bytes, age: None };
    let (logs, profiles) = (directory.join("logs"), directory.join("profiles"));
    Store::open(Places { logs, profiles, keep_logs: keep, keep_profiles: keep, is_pushing: false })
        .unwrap()
}

fn open(directory: &Path) -> Store {
    open_with(directory, 1 << 20)
}

fn hello() -> v1::CollectorMessage {
    v1::CollectorMessage { body: Some(Body::Hello(v1::Hello::default())) }
}

/// Epochs that say that samples were lost.
fn add(log: &mut Log, numbers: std::ops::Range<u64>) {
    let mut batch = Batch::default();
    for number in numbers {
        let lost = vec![v1::Lost { reason: 1, count: 2, samples: true }];
        let epoch = v1::Epoch { number, lost, ..v1::Epoch::default() };
        let message = v1::CollectorMessage { body: Some(Body::Epoch(seal_epoch(&epoch))) };
        batch.epoch(&message, &Tally::of(&epoch, number)).unwrap();
    }
    log.append(&batch).unwrap();
}

#[test]
fn a_window_is_resolved_once_wherever_servers_end() {
    let directory = tempfile::tempdir().unwrap();
    let owner = Identity::Loopback;
    let store = open(directory.path());
    let before = store.before(ONE.capture, &owner, &v1::Hello::default()).unwrap();
    assert_eq!((before.next_epoch, before.next_window), (0, 0));
    let mut log = store.begin(ONE, &Identity::Loopback, &hello()).unwrap();
    add(&mut log, 0..3);
    drop((log, store));
    // It was open. Its collector comes back, and is told what is there.
    let store = open(directory.path());
    let before = store.before(ONE.capture, &owner, &v1::Hello::default()).unwrap();
    assert_eq!((before.next_epoch, before.next_window), (3, 1));
    assert_eq!(before.lost.values().map(|lost| lost.count).sum::<u64>(), 6);
    let due = store.next_due().unwrap();
    assert_eq!((due.id, due.interrupted), (ONE, 0));
    drop(store);
    // It was being resolved. It is not tried at once, and the log says the same as before.
    let store = open(directory.path());
    assert_eq!(store.before(ONE.capture, &owner, &v1::Hello::default()).unwrap(), before);
    assert_eq!(store.drain(Duration::ZERO), 1);
    drop(store);
    let store = open(directory.path());
    store.lock().index.postpone(ONE, 1, 0, Duration::ZERO).unwrap();
    let due = store.next_due().unwrap();
    assert_eq!(due.interrupted, 1);
    store.done(&due, State::Written, &[("profile".to_owned(), 10)]);
    assert_eq!(store.drain(Duration::ZERO), 0);
    drop(store);
    let store = open(directory.path());
    assert_eq!(store.drain(Duration::ZERO), 0);
    assert!(ONE.log(&directory.path().join("logs")).exists());
}

#[test]
fn what_the_end_says_was_lost_is_known_when_its_collector_comes_back() {
    let more = [1, 3].map(|reason| v1::Lost { reason, count: 5, samples: true });
    for is_killed in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let mut store = open(directory.path());
        let mut log = store.begin(ONE, &Identity::Loopback, &hello()).unwrap();
        add(&mut log, 0..3);
        if is_killed {
            log.end_window(&more).unwrap();
            drop((log, store));
            store = open(directory.path());
        } else {
            store.close(ONE, &mut log, &more).unwrap();
        }
        let before = store.before(ONE.capture, &Identity::Loopback, &v1::Hello::default()).unwrap();
        let lost: Vec<u64> = before.lost.values().map(|lost| lost.count).collect();
        assert_eq!(lost, [11, 5], "killed before it was closed: {is_killed}");
        assert_eq!(store.reader().unwrap().captures(None).unwrap()[0].lost, 16);
    }
}

#[test]
fn windows_without_anything_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    // Killed before the log was made, and before anything was added.
    store.lock().index.begin(ONE).unwrap();
    let two = WindowId { number: 1, ..ONE };
    drop(store.begin(two, &Identity::Loopback, &hello()).unwrap());
    drop(store);
    let store = open(directory.path());
    let before = store.before(ONE.capture, &Identity::Loopback, &v1::Hello::default()).unwrap();
    assert_eq!((before.next_epoch, before.next_window), (0, 2));
    assert_eq!(store.drain(Duration::ZERO), 0);
    assert!(!two.log(&directory.path().join("logs")).exists());
}

#[test]
fn a_window_that_ends_every_server_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let mut log = store.begin(ONE, &Identity::Loopback, &hello()).unwrap();
    add(&mut log, 0..1);
    store.close(ONE, &mut log, &[]).unwrap();
    let mut store = Some(store);
    let mut tried = 0;
    while let Some(open_now) = store.take() {
        open_now.lock().index.postpone(ONE, tried, 0, Duration::ZERO).unwrap();
        assert_eq!(open_now.next_due().unwrap().interrupted, tried);
        tried += 1;
        drop(open_now);
        store = (tried < 8).then(|| open(directory.path()));
    }
    let store = open(directory.path());
    store.lock().index.postpone(ONE, tried, 0, Duration::ZERO).unwrap();
    assert!(store.lock().take_due().unwrap().is_none());
    assert_eq!(store.drain(Duration::ZERO), 0);
    assert!(ONE.log(&directory.path().join("logs")).exists(), "it may be resolved by hand");
}

#[test]
fn logs_without_a_profile_are_never_removed_and_make_collectors_wait() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_with(directory.path(), 0);
    let mut log = store.begin(ONE, &Identity::Loopback, &hello()).unwrap();
    add(&mut log, 0..3);
    store.close(ONE, &mut log, &[]).unwrap();
    let path = ONE.log(&directory.path().join("logs"));
    assert!(matches!(store.room(), Err(StoreError::Behind { .. })));
    let due = store.next_due().unwrap();
    assert!(path.exists());
    let profiles = directory.path().join("profiles");
    std::fs::write(profiles.join("old"), "profile").unwrap();
    std::fs::write(profiles.join("another's"), "file").unwrap();
    store.done(&due, State::Written, &[("old".to_owned(), 7)]);
    assert!(!path.exists() && !profiles.join("old").exists());
    assert!(profiles.join("another's").exists());
    store.room().unwrap();
}

#[test]
fn a_capture_is_of_who_began_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    store.before(ONE.capture, &Identity::User(1), &v1::Hello::default()).unwrap();
    let theirs = store.before(ONE.capture, &Identity::User(2), &v1::Hello::default());
    assert!(matches!(theirs, Err(StoreError::NotTheirs)));
    // Of an index that is lost, nobody knows: who comes first has it.
    let mut log = store.begin(ONE, &Identity::Loopback, &hello()).unwrap();
    add(&mut log, 0..3);
    drop((log, store));
    std::fs::remove_file(directory.path().join("logs/windows.db")).unwrap();
    let store = open(directory.path());
    assert_eq!(
        store.before(ONE.capture, &Identity::User(2), &v1::Hello::default()).unwrap().next_epoch,
        3
    );
    assert!(store.before(ONE.capture, &Identity::User(1), &v1::Hello::default()).is_err());
}

#[test]
fn an_index_that_is_removed_under_a_server_costs_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let owner = Identity::Loopback;
    let two = WindowId { number: 1, ..ONE };
    let mut closed = store.begin(ONE, &Identity::Loopback, &hello()).unwrap();
    add(&mut closed, 0..2);
    store.close(ONE, &mut closed, &[]).unwrap();
    let mut growing = store.begin(two, &Identity::Loopback, &hello()).unwrap();
    add(&mut growing, 2..3);
    for name in ["windows.db", "windows.db-wal", "windows.db-shm"] {
        std::fs::remove_file(directory.path().join("logs").join(name)).unwrap();
    }
    // Made again from the logs, but for the one that still grows.
    assert_eq!(store.before(ONE.capture, &owner, &v1::Hello::default()).unwrap().next_epoch, 2);
    assert_eq!(store.next_due().unwrap().id, ONE);
    add(&mut growing, 3..4);
    store.close(two, &mut growing, &[]).unwrap();
    assert_eq!(store.next_due().unwrap().id, two);
    assert_eq!(store.before(ONE.capture, &owner, &v1::Hello::default()).unwrap().next_epoch, 4);
}

#[test]
fn what_is_old_is_removed_however_little_there_is() {
    let directory = tempfile::tempdir().unwrap();
    let keep = Keep { bytes: u64::MAX, age: Some(Duration::from_millis(1)) };
    let (logs, profiles) = (directory.path().join("logs"), directory.path().join("profiles"));
    let path = ONE.log(&logs);
    let store = Store::open(Places {
        logs,
        profiles,
        keep_logs: keep,
        keep_profiles: keep,
        is_pushing: false,
    })
    .unwrap();
    let mut log = store.begin(ONE, &Identity::Loopback, &hello()).unwrap();
    add(&mut log, 0..1);
    store.close(ONE, &mut log, &[]).unwrap();
    let due = store.next_due().unwrap();
    std::thread::sleep(Duration::from_millis(5));
    let places = store.places.clone();
    store.lock().sweep(&places);
    assert!(path.exists(), "it has no profile");
    store.done(&due, State::Written, &[]);
    std::thread::sleep(Duration::from_millis(5));
    store.lock().sweep(&places);
    assert!(!path.exists());
}
