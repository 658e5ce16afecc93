//! What the index says of captures and windows to those who ask: `ps` and `fetch`.

use rusqlite::{Row, params};

use super::answers::Windows;
use super::id::{CaptureId, WindowId};
use super::index::{Index, Result, State, number, window};

/// A capture, with what its windows hold that are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub id: CaptureId,
    /// Who sent it; empty: nobody knows any more.
    pub owner: String,
    pub hostname: String,
    pub collector: String,
    pub kernel: String,
    /// Milliseconds since the Unix epoch.
    pub begun_ms: u64,
    pub seen_ms: u64,
    pub samples: u64,
    pub lost: u64,
    pub stacks: u64,
    pub whole: u64,
    /// Windows by state.
    pub windows: Windows,
}

/// A window that something is asked of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    pub id: WindowId,
    pub owner: String,
    pub hostname: String,
    pub is_open: bool,
    /// Bytes of its log, if it is closed.
    pub bytes: u64,
}

impl Index {
    /// The captures of one client, or all, by host and time.
    pub(super) fn captures(&self, owner: Option<&str>) -> Result<Vec<Known>> {
        let sql = "SELECT id, coalesce(owner, ''), hostname, collector, kernel, begun_ms, seen_ms,
                          coalesce(sum(samples), 0), coalesce(sum(lost), 0),
                          coalesce(sum(stacks), 0), coalesce(sum(whole), 0),
                          count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),
                          count(*) FILTER (WHERE state = 2), count(*) FILTER (WHERE state = 3),
                          count(*) FILTER (WHERE state = 4), count(*) FILTER (WHERE state = 5)
                   FROM captures LEFT JOIN windows ON capture = id
                   WHERE ?1 IS NULL OR owner = ?1
                   GROUP BY id ORDER BY hostname, begun_ms";
        let mut statement = self.connection.prepare_cached(sql)?;
        let known = |row: &Row<'_>| {
            Ok(Known {
                id: CaptureId(row.get(0)?),
                owner: row.get(1)?,
                hostname: row.get(2)?,
                collector: row.get(3)?,
                kernel: row.get(4)?,
                begun_ms: number(row, 5)?,
                seen_ms: number(row, 6)?,
                samples: number(row, 7)?,
                lost: number(row, 8)?,
                stacks: number(row, 9)?,
                whole: number(row, 10)?,
                windows: Windows {
                    open: number(row, 11)?,
                    waiting: number(row, 12)?,
                    written: number(row, 13)?,
                    given_up: number(row, 14)?,
                    pushed: number(row, 15)?,
                    not_pushed: number(row, 16)?,
                },
            })
        };
        statement.query_map([owner], known)?.collect()
    }

    /// Windows of one client, or all, with something of a stretch of time, milliseconds since the
    /// Unix epoch: in the order of captures and time. Of an open one nobody knows where it ends.
    /// Windows from before an owner was known are not that owner's to see.
    pub(super) fn windows_of(
        &self,
        owner: Option<&str>,
        from_ms: u64,
        to_ms: u64,
    ) -> Result<Vec<Kept>> {
        let sql = "SELECT capture, number, coalesce(owner, ''), hostname, state, bytes
                   FROM windows JOIN captures ON id = capture
                   WHERE (state = ?1 OR (end_ms >= ?2 AND start_ms < ?3))
                   AND (?4 IS NULL OR (owner = ?4 AND number >= adopted))
                   ORDER BY hostname, capture, number";
        let mut statement = self.connection.prepare_cached(sql)?;
        let kept = |row: &Row<'_>| {
            Ok(Kept {
                id: window(row)?,
                owner: row.get(2)?,
                hostname: row.get(3)?,
                is_open: row.get::<_, u8>(4)? == State::Open as u8,
                bytes: number(row, 5)?,
            })
        };
        let time = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        let values = params![State::Open as u8, time(from_ms), time(to_ms), owner];
        statement.query_map(values, kept)?.collect()
    }
}

#[cfg(test)]
mod tests {
    use stackwire_proto::v1;

    use super::*;
    use crate::receive::log::Tally;

    const ONE: CaptureId = CaptureId([1; 16]);

    /// A window that is closed.
    fn close(index: &mut Index, number: u64, tally: &Tally) {
        let id = WindowId { capture: ONE, number };
        index.begin(id).unwrap();
        index.close(id, 10, tally, Some((5000, 6000))).unwrap();
    }

    #[test]
    fn each_sees_their_own_and_sums_that_are_lies_break_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (mut index, _) = Index::open(directory.path()).unwrap();
        let hello = v1::Hello { hostname: "host".to_owned(), ..v1::Hello::default() };
        index.claim(ONE, "token:a", &hello).unwrap();
        let lost = v1::Lost { reason: 1, count: u64::MAX, samples: true };
        let epoch = v1::Epoch { lost: vec![lost], ..v1::Epoch::default() };
        for number in 0..3 {
            close(&mut index, number, &Tally::of(&epoch, number));
        }
        // Nor do they when its collector comes back.
        let before = index.claim(ONE, "token:a", &hello).unwrap();
        assert_eq!(before.lost[&1].count, i64::MAX as u64);
        let reader = Index::reader(directory.path()).unwrap();
        let found = reader.captures(Some("token:a")).unwrap();
        assert_eq!(
            (found.len(), found[0].windows, found[0].hostname.as_str()),
            (1, Windows { waiting: 3, ..Windows::default() }, "host")
        );
        assert!(reader.captures(Some("token:b")).unwrap().is_empty());
        assert_eq!(reader.captures(None).unwrap(), found);
        let windows = |owner, from, to| reader.windows_of(owner, from, to).unwrap().len();
        assert_eq!(windows(Some("token:a"), 0, u64::MAX), 3);
        assert_eq!(windows(Some("token:b"), 0, u64::MAX), 0);
        assert_eq!((windows(None, 6001, u64::MAX), windows(None, 0, 5000)), (0, 0));
    }

    #[test]
    fn windows_of_before_an_owner_was_known_are_for_readers_alone() {
        let directory = tempfile::tempdir().unwrap();
        let (mut index, _) = Index::open(directory.path()).unwrap();
        close(&mut index, 0, &Tally::default());
        index.claim(ONE, "token:a", &v1::Hello::default()).unwrap();
        close(&mut index, 1, &Tally::default());
        index.claim(ONE, "token:a", &v1::Hello::default()).unwrap();
        let numbers = |owner| {
            let windows = index.windows_of(owner, 0, u64::MAX).unwrap();
            windows.iter().map(|window| window.id.number).collect::<Vec<_>>()
        };
        assert_eq!(numbers(Some("token:a")), [1]);
        assert_eq!(numbers(None), [0, 1]);
    }
}
