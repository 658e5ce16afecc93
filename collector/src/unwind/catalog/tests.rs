//! Numbers, tables and shares of the catalog, with maps in memory.

use stackwire_collector_ebpf::tables::row;
use stackwire_collector_ebpf::{Rule, cfa};
use stackwire_model::UserAddr;

use super::*;
use crate::helpers::broker::OpenError;
use crate::unwind::maps;

pub(super) fn catalog() -> Catalog {
    Catalog::new(maps::open(maps::Descriptors::in_memory().unwrap()).unwrap().1)
}

pub(super) fn file(number: u32) -> Kind {
    let key = BuildId::new(&number.to_le_bytes()).map(Into::into);
    Kind::File { path: String::new(), key }
}

/// Of this many rows, one page of 64 KiB for each thousand, and rules of its own.
pub(super) fn table(rows: u32, rules: i32, seed: i32) -> Table {
    let rule = |at| Rule { cfa: cfa::REGISTER, offset: seed * 100_000 + at, ..Rule::default() };
    let rules = std::iter::once(Rule::default()).chain((1..=rules).map(rule)).collect();
    let pages = vec![1000; (rows / 1000) as usize];
    let rows = (0..rows / 1000 * 1000).map(|at| row((at % 1000) as u16, 1)).collect();
    Table { rules, pages, rows, ..Table::default() }
}

fn wanted() -> Option<Wanted> {
    Some(Wanted::Mapped { pid: 1, start: UserAddr(0), end: UserAddr(1), path: String::new() })
}

/// The number of a file that root has mapped.
pub(super) fn of_root(catalog: &Catalog, file: &Kind) -> u32 {
    catalog.number(file, wanted(), || Owner::User(0))
}

/// Of a file this user has mapped.
pub(super) fn of(catalog: &Catalog, user: u32, file: &Kind) -> u32 {
    catalog.number(file, wanted(), || Owner::User(user))
}

#[test]
fn the_coldest_tables_go_when_rows_or_rules_run_out() {
    let catalog = catalog();
    let mut before = None;
    // Nine million rows of ten, three times; then thirty thousand rules of 32, likewise.
    for (number, (rows, rules)) in
        [(3_000_000, 1); 9].into_iter().chain([(1000, 8000); 9]).enumerate()
    {
        let number = of_root(&catalog, &file(number as u32));
        catalog.release(&before.replace(number).into_iter().collect::<Vec<_>>());
        catalog.install(number, &table(rows, rules, number as i32), true, None);
    }
    let stats = catalog.stats();
    assert_eq!((stats.loaded, stats.failed), (18, 0));
    assert!((6..=17).contains(&stats.evicted), "{stats:?}");
    let number = of_root(&catalog, &file(100));
    catalog.install(number, &table(6_000_000, 1, 0), true, None);
    assert!(matches!(*catalog.missing(&file(100)).unwrap(), NoTable::TooLarge));
    assert_eq!(catalog.stats().evicted, stats.evicted, "for nothing");
}

#[test]
fn numbers_are_used_again_and_those_of_no_file_never() {
    let catalog = catalog();
    for number in 0..EXECUTABLES * 2 {
        let number = of_root(&catalog, &file(number));
        assert!(number > UNLISTED);
        // As areas give back what they have, code without a file among it.
        catalog.release(&[number, 0, UNLISTED]);
    }
    let held: Vec<u32> =
        (0..EXECUTABLES * 2).map(|number| of_root(&catalog, &file(number))).collect();
    assert_eq!(held.iter().filter(|&&number| number == UNLISTED).count(), EXECUTABLES as usize + 2);
    assert!(held.iter().all(|&number| number != 0));
}

#[test]
fn what_failed_is_tried_again_for_another_process_but_not_for_ever() {
    let catalog = catalog();
    let mut tries = 0;
    for _ in 0..9 {
        let number = of_root(&catalog, &file(1));
        if let Some(job) = catalog.next(true) {
            assert_eq!(job.number, number);
            catalog.fail(number, NoTable::Unmapped);
            tries += 1;
        }
    }
    assert_eq!((tries, catalog.stats().failed), (u64::from(MAX_FAILURES), 1));
}

#[test]
fn what_hangs_is_tried_again_after_a_while() {
    let catalog = catalog();
    let number = of_root(&catalog, &file(1));
    let own = OpenError::Hangs(Duration::from_secs(1));
    for (why, seconds) in
        [(OpenError::OthersHang, 1), (OpenError::OthersHang, 1), (own, 2), (own, 4), (own, 8)]
    {
        assert_eq!(catalog.next(true).unwrap().number, number);
        catalog.fail(number, NoTable::Open(why));
        assert!(matches!(*catalog.missing(&file(1)).unwrap(), NoTable::Open(told) if told == why));
        assert!(catalog.next(true).is_none(), "at once");
        let again = &mut catalog.lock().slots[number as usize].again;
        assert!(again.unwrap() > Instant::now() + Duration::from_secs(seconds - 1));
        assert!(again.unwrap() <= Instant::now() + Duration::from_secs(seconds));
        *again = Some(Instant::now());
    }
    assert_eq!(catalog.next(true).unwrap().number, number);
    assert_eq!(catalog.stats().failed, 1);
    catalog.fail(number, NoTable::Unmapped);
    assert!(catalog.next(true).is_none());
}

#[test]
fn a_users_file_stands_for_nobody_elses() {
    let catalog = catalog();
    let (roots, theirs) = (of_root(&catalog, &file(1)), of(&catalog, 1000, &file(1)));
    assert_ne!(roots, theirs);
    catalog.install(theirs, &table(1000, 1, 1), false, None);
    assert_eq!(of(&catalog, 1000, &file(1)), theirs);
    assert_eq!(of(&catalog, 1001, &file(1)), theirs + 1);
    assert_eq!(catalog.next(true).unwrap().number, roots, "it has none yet");
    // Root's, once there, is for those who have none, and for all who come.
    catalog.install(roots, &table(1000, 1, 2), true, None);
    assert!(catalog.next(true).is_none() && catalog.is_settled());
    assert_eq!(of(&catalog, 1002, &file(1)), roots);
    assert_eq!(of(&catalog, 1000, &file(1)), roots);
    // Where it is looked for again, roots comes first of all that were ever mapped, and last of
    // those that are tried.
    for pid in 2..20 {
        let forged =
            Wanted::Mapped { pid, start: UserAddr(0), end: UserAddr(1), path: String::new() };
        catalog.number(&file(1), Some(forged), || Owner::User(1000));
    }
    catalog.lock().drop_table(roots);
    let job = catalog.next(true).unwrap();
    assert_eq!((job.owner, job.wanted.last()), (Owner::Everyone, wanted().as_ref()));
}

#[test]
fn one_user_cannot_take_the_tables_of_others() {
    let catalog = catalog();
    let roots = of_root(&catalog, &file(0));
    catalog.install(roots, &table(1000, 8000, 0), true, None);
    let over = |number: u32| {
        let inner = catalog.lock();
        let state = &inner.slots[number as usize].state;
        matches!(state, State::Failed(why) if matches!(**why, NoTable::OverShare))
    };
    // As much as is free, and no more: neither root's nor, mapped as they are, their own make
    // room.
    let theirs: Vec<u32> = (1..60)
        .map(|at| {
            let number = of(&catalog, 1000, &file(at));
            catalog.install(number, &table(1000, 8000, at as i32), false, None);
            number
        })
        .collect();
    assert_eq!(theirs.iter().filter(|&&number| over(number)).count(), 56);
    assert_eq!(catalog.stats().evicted, 0);
    // Who has less than a share gets it from who has more.
    for (at, user) in [(100, 1001), (101, 0)] {
        let number = of(&catalog, user, &file(at));
        catalog.install(number, &table(1000, 8000, at as i32), false, None);
        assert!(!over(number), "user {user}");
    }
    assert_eq!((catalog.stats().loaded, catalog.stats().evicted), (6, 2));
    assert!(matches!(catalog.lock().slots[roots as usize].state, State::Ready(_)));
}

#[test]
fn one_file_at_many_paths_has_its_table_once() {
    let catalog = catalog();
    let all: Vec<u32> = (0..20)
        .map(|path| {
            let number = number_of_file(&catalog, &format!("/usr/{path}"));
            catalog.install(number, &table(3_000_000, 1, 1), true, None);
            number
        })
        .collect();
    assert_eq!((catalog.stats().loaded, catalog.stats().evicted), (20, 0));
    // Another file with its build-id, of other segments, has one of its own.
    let other = number_of_file(&catalog, "/other");
    catalog.install(other, &table(1000, 1, 1), true, None);
    catalog.lock().drop_table(all[3]);
    let ready =
        |number: u32| matches!(catalog.lock().slots[number as usize].state, State::Ready(_));
    assert!(all.iter().all(|&number| !ready(number)) && ready(other));
}

fn number_of_file(catalog: &Catalog, path: &str) -> u32 {
    let path = path.to_owned();
    let kind = Kind::File { path, key: BuildId::new(&[7; 20]).map(Into::into) };
    of_root(catalog, &kind)
}

#[test]
fn what_brief_processes_map_again_and_again_is_wanted() {
    let catalog = catalog();
    // By many before the capture began.
    for _ in 0..20 {
        of_root(&catalog, &file(1));
    }
    catalog.begin();
    for _ in 1..OFTEN {
        of_root(&catalog, &file(2));
    }
    assert!(catalog.next(false).is_none());
    let number = of_root(&catalog, &file(2));
    assert_eq!(catalog.next(false).map(|job| job.number), Some(number));
}

#[test]
fn one_user_has_a_quarter_of_the_numbers() {
    let catalog = catalog();
    let given = |user: u32| {
        let all = (0..EXECUTABLES).map(|at| of(&catalog, user, &file(at)));
        all.filter(|&number| number != UNLISTED).count()
    };
    assert_eq!(given(1000), (EXECUTABLES / SHARES) as usize);
    assert_eq!(given(1001), (EXECUTABLES / SHARES) as usize);
}
