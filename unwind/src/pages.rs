//! Spans of addresses with their rules, in any order, become pages of rows. Pure.

use std::collections::HashMap;

use stackwire_collector_ebpf::tables::{RULES, row};
use stackwire_collector_ebpf::{NO_RULE, Rule, cfa};
use stackwire_model::BuildId;

use crate::table::{MAX_PAGES, Table, none};

/// Offsets beyond it have no pages.
const MAX_OFFSET: u64 = (MAX_PAGES as u64) << 16;

/// Spans in the making.
#[derive(Debug)]
pub struct Spans {
    rules: Vec<Rule>,
    numbers: HashMap<Rule, u16>,
    spans: Vec<Span>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    end: u64,
    rule: u16,
}

impl Default for Spans {
    fn default() -> Self {
        Self { rules: vec![none()], numbers: HashMap::from([(none(), NO_RULE)]), spans: Vec::new() }
    }
}

impl Spans {
    /// Adds a rule that holds from offset `start` to `end`. Once there are as many rules as the
    /// kernel side has room for, a further rule counts as no rule.
    pub fn add(&mut self, start: u64, end: u64, rule: Rule) {
        if start >= end || end > MAX_OFFSET {
            return;
        }
        let number = match self.numbers.get(&rule) {
            Some(&number) => number,
            None if self.rules.len() >= RULES as usize => NO_RULE,
            None => {
                let number = self.rules.len() as u16;
                self.rules.push(rule);
                self.numbers.insert(rule, number);
                number
            }
        };
        self.spans.push(Span { start, end, rule: number });
    }

    /// Spans so far.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// The rules so far.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter()
    }

    /// Ends one source of spans: what is added later holds only where nothing is known yet.
    #[must_use]
    pub fn covered(&mut self) -> Vec<(u64, u64)> {
        self.spans.sort_by_key(|span| (span.start, span.end));
        let mut covered: Vec<(u64, u64)> = Vec::new();
        for span in &self.spans {
            match covered.last_mut() {
                Some((_, end)) if span.start <= *end => *end = (*end).max(span.end),
                _ => covered.push((span.start, span.end)),
            }
        }
        covered
    }

    /// Gaps of at most this length in front of code without a caller: start, end, the rule before.
    /// After [`Spans::covered`].
    pub fn gaps_before_roots(&self, most: u64) -> impl Iterator<Item = (u64, u64, Rule)> {
        self.spans.windows(2).filter_map(move |two| {
            let [before, after] = [&two[0], &two[1]];
            let is_root = self.rules[usize::from(after.rule)].cfa == cfa::ROOT;
            let is_gap = before.end < after.start && after.start - before.end <= most;
            let rule = self.rules[usize::from(before.rule)];
            (is_root && is_gap).then_some((before.end, after.start, rule))
        })
    }

    /// The table, of the file with this build-id.
    #[must_use]
    pub fn finish(mut self, build_id: Option<BuildId>) -> Table {
        self.spans.sort_by_key(|span| (span.start, span.end));
        let mut pages = Pages::default();
        let mut end = 0u64;
        for span in &self.spans {
            // What lies between functions has none: a return address made up, as that of
            // `makecontext`, is the first byte of a function, and looked up in front of it.
            if span.start > end {
                pages.row(end, NO_RULE);
            }
            pages.row(span.start, span.rule);
            end = end.max(span.end);
        }
        pages.row(end, NO_RULE);
        let (base, rules, counts) = (pages.base, self.rules, pages.counts);
        Table { build_id, base, rules, pages: counts, rows: pages.rows, ..Table::default() }
    }
}

#[derive(Debug, Default)]
struct Pages {
    base: u32,
    counts: Vec<u32>,
    rows: Vec<u32>,
    /// The rule in force.
    now: u16,
}

impl Pages {
    /// From `offset` on `rule` holds. Offsets come in order; of two at one place the later counts.
    fn row(&mut self, offset: u64, rule: u16) {
        if rule == self.now {
            return;
        }
        let page = (offset >> 16) as u32;
        if self.counts.is_empty() {
            self.base = page;
            self.counts.push(0);
        }
        while self.base + (self.counts.len() as u32) <= page {
            self.counts.push(0);
            // Each page is searched alone: what still holds is said again.
            if self.now != NO_RULE {
                self.push(row(0, self.now));
            }
        }
        self.now = rule;
        self.push(row(offset as u16, rule));
    }

    fn push(&mut self, new: u32) {
        let Some(count) = self.counts.last_mut() else { return };
        match self.rows.last_mut().filter(|_| *count > 0) {
            Some(last) if *last >> 16 == new >> 16 => *last = new,
            _ => {
                self.rows.push(new);
                *count += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use stackwire_model::FileOffset;

    fn rule(offset: i32) -> Rule {
        Rule { cfa: cfa::REGISTER, register: 7, offset, ..Rule::default() }
    }

    fn table(spans: &[(u64, u64, i32)]) -> Table {
        let mut all = Spans::default();
        for &(start, end, offset) in spans {
            all.add(start, end, rule(offset));
        }
        all.finish(None)
    }

    #[test]
    fn long_functions_hold_in_every_page_they_reach() {
        let table = table(&[(0x1_fff0, 0x4_0010, 8)]);
        assert_eq!((table.base, table.pages.as_slice()), (1, &[1, 1, 1, 2][..]));
        assert!(
            table.rule(FileOffset(0x3_8000)).is_some()
                && table.rule(FileOffset(0x4_0010)).is_none()
        );
    }

    #[test]
    fn gaps_have_no_rule() {
        let table =
            table(&[(0x100, 0x10f, 8), (0x110, 0x120, 8), (0x120, 0x130, 8), (0x140, 0x150, 16)]);
        assert_eq!(table.rows.len(), 6);
        assert!(table.rule(FileOffset(0x10e)).is_some() && table.rule(FileOffset(0x110)).is_some());
        assert!(table.rule(FileOffset(0x10f)).is_none() && table.rule(FileOffset(0x130)).is_none());
        assert_eq!(table.rule(FileOffset(0x140)).map(|rule| rule.offset), Some(16));
    }

    proptest! {
        #[test]
        fn every_offset_has_the_rule_of_its_span(
            spans in proptest::collection::btree_map(0u64..4000, 0i32..6, 1..60)
        ) {
            let spans: Vec<_> =
                spans.into_iter().map(|(at, offset)| (at * 128, at * 128 + 64, offset)).collect();
            let table = table(&spans);
            let again = Table::parse(&table.to_bytes());
            prop_assert_eq!(again.as_ref(), Ok(&table));
            for &(start, end, offset) in &spans {
                for at in [start, start + 1, end - 1] {
                    prop_assert_eq!(table.rule(FileOffset(at)).map(|rule| rule.offset), Some(offset));
                }
                prop_assert!(table.rule(FileOffset(end)).is_none());
                prop_assert!(start == 0 || table.rule(FileOffset(start - 1)).is_none());
            }
        }
    }
}
