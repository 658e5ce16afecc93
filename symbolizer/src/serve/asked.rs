//! What the index says of captures and windows to those who ask: `ps` and `fetch`.

use rusqlite::{Row, params};

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
    pub windows: [u64; 4],
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
    /// All captures, by host and time.
    pub(super) fn captures(&self) -> Result<Vec<Known>> {
        let sql = "SELECT id, coalesce(owner, ''), hostname, collector, kernel, begun_ms, seen_ms,
                          coalesce(sum(samples), 0), coalesce(sum(lost), 0),
                          coalesce(sum(stacks), 0), coalesce(sum(whole), 0),
                          count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),
                          count(*) FILTER (WHERE state = 2), count(*) FILTER (WHERE state = 3)
                   FROM captures LEFT JOIN windows ON capture = id
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
                windows: [number(row, 11)?, number(row, 12)?, number(row, 13)?, number(row, 14)?],
            })
        };
        statement.query_map([], known)?.collect()
    }

    /// Windows with something of a stretch of time, milliseconds since the Unix epoch: in the order
    /// of captures and time. Of an open one nobody knows where it ends.
    pub(super) fn windows_of(&self, from_ms: u64, to_ms: u64) -> Result<Vec<Kept>> {
        let sql = "SELECT capture, number, coalesce(owner, ''), hostname, state, bytes
                   FROM windows JOIN captures ON id = capture
                   WHERE state = ?1 OR (end_ms >= ?2 AND start_ms < ?3)
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
        let values = params![State::Open as u8, time(from_ms), time(to_ms)];
        statement.query_map(values, kept)?.collect()
    }
}
