//! One frame of a user stack up, by unwind tables: the mapping an address lies in, the rule of its
//! executable there, and a step by that rule; by frame pointers where the code was made at run
//! time.
//!
//! Pure but for the tables and the memory it is given, so that the kernel side and whoever has a
//! copy of a stack run the same lines. Searches are loops the verifier can count.

use crate::arch::{SignalFrame, follows_call};
use crate::record::UserEnd;
use crate::walk::memory::Memory;
use crate::walk::rule::{Rule, cfa};
use crate::walk::tables::{ANONYMOUS, DESCRIBED, Mapping, mapping_of, page_of, pages_of, state};
use crate::walk::unwind::{self, Cursor, GO_ON};

/// A walk by unwind tables, half done.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TableWalk {
    /// What is known of the frame.
    pub cursor: Cursor,
    /// The mapping of the frame before: often that of the next.
    pub mapping: Mapping,
    /// First mapping of the process.
    pub first: u32,
    /// Number of its mappings.
    pub count: u32,
    /// Of the tables, when the walk began.
    pub generation: u64,
    /// Room for what the kernel saves for a signal.
    pub signal: SignalFrame,
}

/// What is looked up, by number: see `tables.rs`. None: there is no such entry.
pub trait Tables {
    /// A mapping.
    fn mapping(&mut self, number: u32) -> Option<&Mapping>;
    /// Pages and state of an executable that is looked up.
    fn executable(&mut self, number: u32) -> Option<(u64, u64)>;
    /// A page.
    fn page(&mut self, number: u32) -> Option<u64>;
    /// A row.
    fn row(&mut self, number: u32) -> Option<u32>;
    /// A rule.
    fn rule(&mut self, number: u32) -> Option<&Rule>;
}

/// What is known of an address that no mapping in the tables has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elsewhere {
    /// There is none.
    Nothing,
    /// Nobody can tell.
    Unknown,
    /// This.
    Mapped(Mapping),
}

/// As [`GO_ON`], but it is the same frame: it was taken for called, and begins there.
pub const AGAIN: u64 = GO_ON - 1;
/// The frame that was found is none: nothing calls it. The walk ends with the one before.
pub const NOT_CALLED: u64 = GO_ON - 2;

impl TableWalk {
    /// Goes to the caller: [`GO_ON`], [`AGAIN`], [`NOT_CALLED`], or a [`UserEnd`] as a number.
    /// `guesses`: frame pointers are followed through code made at run time.
    #[inline(always)]
    pub fn up(
        &mut self,
        tables: &mut impl Tables,
        memory: &mut impl Memory,
        guesses: bool,
        elsewhere: impl FnOnce(u64) -> Elsewhere,
    ) -> u64 {
        let ip = self.cursor.lookup_ip();
        let inside = ip >= self.mapping.start && ip < self.mapping.end;
        if !inside && !self.find_mapping(tables, ip) {
            // What the kernel has mapped there may change without the tables.
            memory.needs_more();
            let runs = self.cursor.exact != 0;
            match elsewhere(ip) {
                Elsewhere::Mapped(mapping) => self.mapping = mapping,
                Elsewhere::Unknown => return UserEnd::NoMappingsYet as u64,
                // What runs is code: its mapping has not been told.
                Elsewhere::Nothing if runs => return UserEnd::NoMappingsYet as u64,
                Elsewhere::Nothing => return UserEnd::NotCode as u64,
            }
        }
        let (executable, file_offset) = mapping_of(self.mapping.word);
        let offset = ip - self.mapping.start + file_offset;
        let made = executable == ANONYMOUS || executable & DESCRIBED != 0;
        if made {
            // Its compiler may describe it anew.
            memory.needs_more();
        }
        let rule = match executable {
            ANONYMOUS => Err(UserEnd::NoTable),
            _ => find_rule(tables, executable & !DESCRIBED, offset),
        };
        let rule = match rule {
            // What its compiler has not described yet.
            Ok(rule) if made && rule.cfa == cfa::NONE => Err(UserEnd::NoRule),
            rule => rule,
        };
        if made && rule.is_err() {
            if !guesses {
                return UserEnd::NoTable as u64;
            }
            let rule = Rule { cfa: cfa::FRAME_POINTER, ..Rule::default() };
            let end = unwind::step(memory, &mut self.signal, &mut self.cursor, &rule);
            // From one to two.
            self.cursor.guessed <<= 1;
            return end;
        }
        // Of a file whose table is being made nobody knows yet what keeps frame pointers in it.
        let asked = !made && !matches!(rule, Err(UserEnd::NoTableYet));
        if asked && !unwind::may_be_called(memory, &self.cursor, rule.ok()) {
            return NOT_CALLED;
        }
        match rule {
            Ok(rule) => {
                if !rule.needs_stack_alone() {
                    memory.needs_more();
                }
                unwind::step(memory, &mut self.signal, &mut self.cursor, rule)
            }
            // A stack may be made up to return to the beginning of a function, in front of which
            // nothing is: now by what is there (`makecontext` does so).
            Err(UserEnd::NoRule)
                if self.cursor.exact == 0 && !follows_call(memory, self.cursor.ip, false) =>
            {
                self.cursor.exact = 1;
                AGAIN
            }
            Err(end) => end as u64,
        }
    }

    /// The mapping an address lies in, into `mapping`.
    #[inline(always)]
    fn find_mapping(&mut self, tables: &mut impl Tables, ip: u64) -> bool {
        let (mut low, mut left) = (self.first, self.count);
        if left == 0 {
            return false;
        }
        // The last that begins at or before `ip`.
        for _ in 0..18 {
            if left <= 1 {
                break;
            }
            let half = left / 2;
            let Some(mapping) = tables.mapping(low + half) else { return false };
            if mapping.start <= ip {
                low += half;
                left -= half;
            } else {
                left = half;
            }
        }
        let Some(mapping) = tables.mapping(low) else { return false };
        self.mapping.start = mapping.start;
        self.mapping.end = mapping.end;
        self.mapping.word = mapping.word;
        ip >= mapping.start && ip < mapping.end
    }
}

/// The rule at an offset of an executable's file.
#[inline(always)]
fn find_rule<T: Tables>(tables: &mut T, executable: u32, offset: u64) -> Result<&Rule, UserEnd> {
    let Some((pages, known)) = tables.executable(executable) else { return Err(UserEnd::NoTable) };
    if known == state::NOT_YET {
        return Err(UserEnd::NoTableYet);
    }
    if known == state::OVER_SHARE {
        return Err(UserEnd::OverShare);
    }
    if known != state::READY {
        return Err(UserEnd::NoTable);
    }
    let (first, count, base) = pages_of(pages);
    let page = (offset >> 16).wrapping_sub(u64::from(base));
    if page >= u64::from(count) {
        return Err(UserEnd::NoRule);
    }
    let Some(page) = tables.page(first + page as u32) else { return Err(UserEnd::NoRule) };
    let (mut low, mut left) = page_of(page);
    let key = (offset as u32 & 0xffff) << 16 | 0xffff;
    if left == 0 {
        return Err(UserEnd::NoRule);
    }
    for _ in 0..17 {
        if left <= 1 {
            break;
        }
        let half = left / 2;
        let Some(row) = tables.row(low + half) else { return Err(UserEnd::NoRule) };
        if row <= key {
            low += half;
            left -= half;
        } else {
            left = half;
        }
    }
    let Some(row) = tables.row(low) else { return Err(UserEnd::NoRule) };
    if row > key {
        return Err(UserEnd::NoRule);
    }
    tables.rule(row & 0xffff).ok_or(UserEnd::NoRule)
}
