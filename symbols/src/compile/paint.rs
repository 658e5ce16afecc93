//! Intervals painted over each other: at every address the one painted last shows. Pure.

use std::collections::BTreeSet;

/// An interval of addresses with what it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub start: u64,
    /// Address behind the last.
    pub end: u64,
    /// What for; the caller's number.
    pub what: u32,
}

/// The spans that show, sorted and without overlaps. Where spans overlap, the later one in the
/// input is on top.
///
/// Any overlap is allowed, since spans of hostile files need not be nested. Takes n·log n time.
#[must_use]
pub fn paint(spans: &[Span]) -> Vec<Span> {
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(spans.len() * 2);
    for (index, span) in spans.iter().enumerate().filter(|(_, span)| span.start < span.end) {
        events.push((span.start, true, index));
        events.push((span.end, false, index));
    }
    events.sort_unstable();
    let mut active = BTreeSet::new();
    let mut shown: Vec<Span> = Vec::with_capacity(spans.len());
    let mut at = 0;
    for (address, begins, index) in events {
        if let Some(&top) = active.last()
            && address > at
        {
            let span: &Span = &spans[top];
            match shown.last_mut() {
                Some(last) if last.end == at && last.what == span.what => last.end = address,
                _ => shown.push(Span { start: at, end: address, what: span.what }),
            }
        }
        at = address;
        if begins {
            active.insert(index);
        } else {
            active.remove(&index);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_last_painted_shows(
            spans in prop::collection::vec((0u64..200, 0u64..60), 0..40)
        ) {
            let spans: Vec<_> = spans
                .into_iter()
                .enumerate()
                .map(|(what, (start, length))| Span { start, end: start + length, what: what as u32 })
                .collect();
            let shown = paint(&spans);
            for address in 0..300 {
                let on_top = |spans: &[Span]| {
                    spans.iter().rfind(|s| (s.start..s.end).contains(&address)).map(|s| s.what)
                };
                prop_assert_eq!(on_top(&shown), on_top(&spans), "at {}", address);
            }
            prop_assert!(shown.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
