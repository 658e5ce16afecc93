//! Puts a list of frames of an interpreter together. Called by those who walk one.

use stackwire_collector_ebpf::managed::{
    EVALUATOR, Entry, KNOWN_CODES, ListEnd, MAX_ENTRIES, MAX_EVALUATORS, MAX_NEW, NOT_FOUND,
    known_word,
};
use stackwire_collector_ebpf::masked;

use crate::maps::{KNOWN, LISTS, List, MAX_LISTS};

/// Goes on: there is more.
pub const GO_ON: u64 = u64::MAX;

/// Begins a list. There are fewer than [`MAX_LISTS`].
#[inline(always)]
pub fn begin_list(all: &mut List) {
    let list = masked::<{ MAX_LISTS as u64 - 1 }>(all.lists);
    // SAFETY: masked to less than the lengths.
    unsafe {
        *all.next.as_mut_ptr().add(list) = all.evaluators;
        *all.ends.as_mut_ptr().add(list) = all.evaluators;
    }
    all.lists += 1;
}

/// Adds a function that runs.
#[inline(always)]
pub fn push(all: &mut List, entry: Entry) {
    let at = masked::<{ MAX_ENTRIES as u64 - 1 }>(all.count);
    // SAFETY: masked to less than the length.
    unsafe {
        let to = all.entries.as_mut_ptr().add(at);
        (*to).code = entry.code;
        (*to).rest = entry.rest;
    }
    all.count += 1;
}

/// Adds the end of what an evaluator runs; [`GO_ON`], or a [`ListEnd`] as a number.
#[inline(always)]
pub fn push_evaluator(all: &mut List, address: u64) -> u64 {
    if all.evaluators >= MAX_EVALUATORS as u64 {
        return ListEnd::DepthLimit as u64;
    }
    let of = masked::<{ MAX_EVALUATORS as u64 - 1 }>(all.evaluators);
    // SAFETY: masked to less than the length.
    unsafe { *all.at.as_mut_ptr().add(of) = all.count };
    all.evaluators += 1;
    let list = masked::<{ MAX_LISTS as u64 - 1 }>(all.lists.wrapping_sub(1));
    // SAFETY: masked to less than the length.
    unsafe { *all.ends.as_mut_ptr().add(list) = all.evaluators };
    push(all, Entry { code: EVALUATOR | NOT_FOUND, rest: address });
    GO_ON
}

/// Whether the last entry is a function.
#[inline(always)]
pub fn is_open(all: &List) -> bool {
    let last = masked::<{ MAX_ENTRIES as u64 - 1 }>(all.count.wrapping_sub(1));
    // SAFETY: masked to less than the length.
    all.count > 0 && unsafe { (*all.entries.as_ptr().add(last)).code } & EVALUATOR == 0
}

/// Notes a function that was not handed over yet.
#[inline(always)]
pub fn note_new(all: &List, slot: u32, entry: Entry) {
    let word = known_word(all.start, entry.code, entry.cookie());
    let known = KNOWN.get(word as u32 & (KNOWN_CODES - 1));
    if known != Some(&word) {
        note(slot, entry.code, entry.rest);
    }
}

/// Once of one that calls itself. A global function, as `walk_frame`: the verifier looks at its
/// loop once, not for each way that leads to it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn note(slot: u32, code: u64, rest: u64) -> u64 {
    let Some(all) = LISTS.get_ptr_mut(slot) else { return 0 };
    // SAFETY: as in `found`.
    let all = unsafe { &mut *all };
    if all.new >= MAX_NEW as u64 {
        return 0;
    }
    let entry = Entry { code, rest };
    for index in 0..MAX_NEW as u64 {
        // Whether these are all, in a way that the compiler does not see through: it would make the
        // count the end of the loop, and kernel 6.1's verifier knows no end of that.
        if masked::<{ 2 * MAX_NEW as u64 - 1 }>(all.new.wrapping_sub(index)) == 0 {
            break;
        }
        // SAFETY: masked to less than the length.
        let other = unsafe { &*all.news.as_ptr().add(masked::<{ MAX_NEW as u64 - 1 }>(index)) };
        if other.code == entry.code && other.cookie() == entry.cookie() {
            return 0;
        }
    }
    let at = masked::<{ MAX_NEW as u64 - 1 }>(all.new);
    // SAFETY: masked to less than the length.
    unsafe {
        let to = all.news.as_mut_ptr().add(at);
        (*to).code = entry.code;
        (*to).rest = entry.rest;
    }
    all.new += 1;
    1
}
