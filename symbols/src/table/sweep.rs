//! Ranges of addresses without overlaps, gaps and repetitions. Pure. Called by `write.rs`, which
//! collects them in any order.

/// Addresses with the node of their innermost frame.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// The first.
    pub start: u64,
    /// Behind the last.
    pub end: u64,
    /// Its number; 0: none.
    pub leaf: u32,
}

/// Sorted, each cut where the one before it ends.
pub fn without_overlaps(mut ranges: Vec<Range>) -> Vec<Range> {
    // Stable: of those that start together the first keeps its place.
    ranges.sort_by_key(|range| range.start);
    let mut end = 0;
    ranges.retain_mut(|range| {
        range.start = range.start.max(end);
        let keep = range.start < range.end;
        end = end.max(range.end);
        keep
    });
    ranges
}

/// `ranges` with the gaps between them filled from `fallback`; both without overlaps.
pub fn filled(ranges: &[Range], fallback: &[Range]) -> Vec<Range> {
    let mut out = Vec::with_capacity(ranges.len() + fallback.len());
    let mut fill = fallback.iter().copied().peekable();
    let mut gap = 0;
    let end = Range { start: u64::MAX, end: u64::MAX, leaf: 0 };
    for &range in ranges.iter().chain([&end]) {
        while let Some(piece) = fill.peek_mut() {
            let (start, stop) = (piece.start.max(gap), piece.end.min(range.start));
            if start < stop {
                out.push(Range { start, end: stop, leaf: piece.leaf });
            }
            if piece.end > range.start {
                break;
            }
            fill.next();
        }
        if range.start < range.end {
            out.push(range);
        }
        gap = range.end;
    }
    out
}

/// Those of `bounds` with an address that is in none of `ranges`; both without overlaps.
pub fn not_covered(ranges: &[Range], mut bounds: Vec<Range>) -> Vec<Range> {
    let mut next = 0;
    bounds.retain(|bound| {
        while ranges.get(next).is_some_and(|range| range.end <= bound.start) {
            next += 1;
        }
        // A range may reach into the next bound as well: looked at from here, not taken.
        let mut at = bound.start;
        for range in &ranges[next..] {
            if range.start > at || at >= bound.end {
                break;
            }
            at = range.end;
        }
        at < bound.end
    });
    bounds
}

/// Returns the base, and where each range starts with its node. Equal neighbours become one, and
/// gaps get node 0. When addresses lie further apart than 32 bits, the 4 GiB with most ranges are
/// taken: in a kernel that is its text, not what lies at 0.
pub fn starts(ranges: &[Range]) -> (u64, Vec<(u32, u32)>) {
    let (mut best, mut first) = (0..0, 0);
    for last in 0..ranges.len() {
        while ranges[last].end - ranges[first].start > u64::from(u32::MAX) - 1 {
            first += 1;
            if first > last {
                break;
            }
        }
        if first <= last && last + 1 - first > best.len() {
            best = first..last + 1;
        }
    }
    let ranges = &ranges[best];
    let base = ranges.first().map_or(0, |range| range.start);
    let mut out: Vec<(u32, u32)> = Vec::with_capacity(ranges.len() + ranges.len() / 4);
    let mut end = base;
    let mut push = |at: u64, leaf: u32| {
        if out.last().is_none_or(|&(_, before)| before != leaf) {
            out.push(((at - base) as u32, leaf));
        }
    };
    for range in ranges {
        if range.start > end {
            push(end, 0);
        }
        push(range.start, range.leaf);
        end = range.end;
    }
    push(end, 0);
    (base, out)
}
