//! Where tables are in the kernel side's maps, and which must go for another.
//!
//! A user may have what is free. When room runs out, those that have more than their share lose
//! theirs first, and take none from others.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use stackwire_collector_ebpf::Rule;
use stackwire_collector_ebpf::managed::{LAYOUTS, RUBY, V8};
use stackwire_collector_ebpf::tables::{CHUNK, CHUNKS, PAGES, page_word, pages_word, row, state};
use stackwire_unwind::{Interpreter, Table};

use super::{Inner, State};
use crate::unwind::no_layout::NoLayout;
use crate::unwind::no_table::NoTable;
use crate::unwind::owner::{Amount, Owner};

/// Rules of one table. librustc_driver has 707.
const MAX_RULES: usize = 8 << 10;

/// Where a table is.
#[derive(Debug)]
pub(super) struct Place {
    /// For whom it is.
    pub owner: Owner,
    /// Its executable's word: [`pages_word`].
    pub word: u64,
    /// The number of the layout of its interpreter; 0: it is none. Or why there is no layout.
    pub layout: Result<u32, NoLayout>,
    /// Offsets in the file of the code that Go compiled.
    pub go: Range<u64>,
    page: u32,
    chunk: u32,
    amount: Amount,
    /// By the table's own numbers.
    rules: Vec<u16>,
}

impl Place {
    /// The number that the kernel side finds the layout of its interpreter by; 0: there is none.
    pub fn layout(&self) -> u32 {
        self.layout.unwrap_or(0)
    }

    /// Whether a table of the same build-id is the one that is here: one of a file with other
    /// segments would differ.
    pub fn is_as(&self, table: &Table) -> bool {
        self.word == pages_word(self.page, table.pages.len() as u32, table.base)
            && self.amount.chunks == (table.rows.len() as u32).div_ceil(CHUNK)
            && self.rules.len() == table.rules.len()
    }
}

impl Inner {
    /// Writes a table for the owner of a number.
    pub(super) fn place(&mut self, number: u32, table: &Table) -> Result<Arc<Place>, NoTable> {
        let amount = Amount {
            pages: table.pages.len() as u32,
            chunks: (table.rows.len() as u32).div_ceil(CHUNK),
            rules: table.rules.len() as u32,
        };
        // Never all others for one.
        if amount.pages > PAGES / 2 || amount.chunks > CHUNKS / 2 || table.rules.len() > MAX_RULES {
            return Err(NoTable::TooLarge);
        }
        self.make_room(number, amount, &table.rules)?;
        let Self { maps, rules, .. } = self;
        let rules = rules.take(&table.rules, |number, rule| maps.write_rule(number, rule));
        let rules = rules.map_err(NoTable::Unwritable)?;
        // Both are there: this is what making room was about.
        let page = self.pages.take(amount.pages).unwrap_or_default();
        let chunk = self.chunks.take(amount.chunks).unwrap_or_default();
        let mut first = chunk * CHUNK;
        let words = table.pages.iter().map(|&count| {
            let word = page_word(first, count);
            first += count;
            word
        });
        let words = words.collect();
        let rows = table.rows.iter();
        let rows: Vec<u32> =
            rows.map(|&of| row((of >> 16) as u16, rules[(of & 0xffff) as usize])).collect();
        let owner = self.slots[number as usize].owner.payer();
        let word = pages_word(page, amount.pages, table.base);
        let layout = self.layout(table.interpreter, owner == Owner::Everyone);
        let place = Place { owner, word, layout, go: table.go.clone(), page, chunk, amount, rules };
        let written =
            self.maps.write_pages(page, words).and_then(|()| self.maps.write_rows(chunk, &rows));
        match written {
            Ok(()) => Ok(Arc::new(place)),
            Err(error) => {
                self.give_back(&place);
                Err(NoTable::Unwritable(error))
            }
        }
    }

    /// The number of the layout of an interpreter. Users have half of them for files of their own.
    fn layout(&mut self, of: Option<Interpreter>, everyones: bool) -> Result<u32, NoLayout> {
        let Some(of) = of else { return Ok(0) };
        NoLayout::of(&of)?;
        let (layouts, mark) = match of {
            Interpreter::Cpython(_) => (&mut self.pythons, 0),
            Interpreter::Ruby(_) => (&mut self.rubies, RUBY),
            Interpreter::V8(_) => (&mut self.v8s, V8),
        };
        if let Some(known) = layouts.iter().position(|known| *known == of) {
            return Ok(mark | (known as u32 + 1));
        }
        let number = layouts.len() as u32 + 1;
        let room = if everyones { LAYOUTS } else { LAYOUTS / 2 };
        if number >= room || self.maps.write_layout(number, &of).is_err() {
            return Err(NoLayout::NoRoom);
        }
        layouts.push(of);
        Ok(mark | number)
    }

    /// Puts a table in the place of the one a number has, for all numbers that have it; where there
    /// is no room it keeps that.
    pub(super) fn replace(&mut self, number: u32, table: &Table) {
        let State::Ready(old) = &self.slots[number as usize].state else { return };
        let old = Arc::clone(old);
        let Ok(place) = self.place(number, table) else { return };
        self.stats.loaded += 1;
        let all = 0..self.slots.len() as u32;
        let all: Vec<u32> = all.filter(|&number| self.has(number, &old)).collect();
        // What made room may have been the old one.
        if all.is_empty() {
            self.ready(number, place);
            return;
        }
        for number in all {
            self.maps.set_executable(number, place.word, place.layout(), state::READY);
            self.slots[number as usize].state = State::Ready(Arc::clone(&place));
        }
        self.give_back(&old);
    }

    /// Takes a table out of the maps, for all numbers that have it.
    pub(super) fn drop_table(&mut self, number: u32) {
        let State::Ready(place) = &self.slots[number as usize].state else { return };
        let place = Arc::clone(place);
        let all = 0..self.slots.len() as u32;
        for number in all.filter(|&number| self.has(number, &place)).collect::<Vec<_>>() {
            self.maps.set_executable(number, 0, 0, state::NOT_YET);
            let slot = &mut self.slots[number as usize];
            slot.state = State::Wanting;
            slot.seen = self.maps.uses(number);
            // That it was mapped often has brought it here once.
            slot.mapped = 0;
        }
        self.give_back(&place);
    }

    /// A number is to be that of another executable; its table stays if other numbers have it.
    pub(super) fn leave_table(&mut self, number: u32) {
        let State::Ready(place) = &self.slots[number as usize].state else { return };
        if Arc::strong_count(place) == 1 {
            self.drop_table(number);
        }
    }

    fn has(&self, number: u32, table: &Arc<Place>) -> bool {
        matches!(&self.slots[number as usize].state, State::Ready(place) if Arc::ptr_eq(place, table))
    }

    fn give_back(&mut self, place: &Place) {
        self.pages.give_back(place.page, place.amount.pages);
        self.chunks.give_back(place.chunk, place.amount.chunks);
        self.rules.give_back(&place.rules);
    }

    /// Makes room for a table, that of others if need be.
    fn make_room(&mut self, number: u32, need: Amount, rules: &[Rule]) -> Result<(), NoTable> {
        while !(self.pages.fits(need.pages)
            && self.chunks.fits(need.chunks)
            && self.rules.fit(rules))
        {
            if !(self.pages.has_limbo() || self.chunks.has_limbo() || self.rules.has_limbo()) {
                let next = self.next_to_go(number, need)?;
                self.drop_table(next);
                self.stats.evicted += 1;
            }
            self.maps.next_generation();
            self.pages.reclaim();
            self.chunks.reclaim();
            self.rules.reclaim();
        }
        Ok(())
    }

    /// The table that must go for that of a number.
    fn next_to_go(&self, number: u32, need: Amount) -> Result<u32, NoTable> {
        let slot = &self.slots[number as usize];
        let heat = self.maps.uses(number).wrapping_sub(slot.seen);
        // A table is as hot as the hottest number that has it.
        let mut ready: BTreeMap<*const Place, (bool, u64, u32, &Place)> = BTreeMap::new();
        for (number, slot) in self.slots.iter().enumerate() {
            if let State::Ready(place) = &slot.state {
                let use_of = (slot.refs > 0, slot.heat, number as u32, &**place);
                let most = ready.entry(Arc::as_ptr(place)).or_insert(use_of);
                if (use_of.0, use_of.1) > (most.0, most.1) {
                    *most = use_of;
                }
            }
        }
        let mut taken: BTreeMap<Owner, Amount> = BTreeMap::new();
        for (.., place) in ready.values() {
            let amount = taken.entry(place.owner).or_default();
            *amount = amount.and(place.amount);
        }
        let coldest_of = |owner: Option<Owner>| {
            let of = ready.values().filter(|(.., of)| owner.is_none_or(|owner| owner == of.owner));
            of.min_by_key(|(refs, heat, ..)| (*refs, *heat))
        };
        let payer = slot.owner.payer();
        let own = taken.get(&payer).copied().unwrap_or_default();
        if payer.is_limited() && own.and(need).is_over_share() {
            // Those that run keep theirs: tables that take each other's place would be compiled for
            // ever.
            let idle = coldest_of(Some(payer)).filter(|(refs, ..)| !refs);
            return idle.map(|(_, _, number, _)| *number).ok_or(NoTable::OverShare);
        }
        let over =
            taken.iter().filter(|(owner, amount)| owner.is_limited() && amount.is_over_share());
        let most = over.max_by_key(|(_, amount)| amount.part()).map(|(owner, _)| *owner);
        let next = coldest_of(most);
        let next = next.filter(|(refs, of, ..)| most.is_some() || !refs || *of <= heat);
        next.map(|(_, _, number, _)| *number).ok_or(NoTable::NoRoom)
    }
}
