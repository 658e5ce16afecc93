//! Readable names of a table's functions, made once, when it is written: to make one takes ten
//! times as long as to look an address up.
//!
//! In a file whose readable names would be many times larger than itself, not all are made. What
//! is not made here is tried at each look-up.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::demangle;

/// Names worked out together.
const CHUNK: usize = 4096;
/// Threads that make names.
const MAX_WORKERS: usize = 4;
/// What a mangled name that is tried costs of the budget, beside its readable form.
const TRIED: usize = 64;
/// Bytes parsed of names that can only be read in part, of each chunk: 10 ms. Files of compilers
/// have a handful of such names, hostile ones could have nothing else.
const PARTS: usize = 256 << 10;
/// Bytes of readable names a chunk may have, beside four for each byte of its names.
const BUDGET: usize = 1 << 20;

/// The readable form of names, by their place in `names`; `None` for a name that has no other form.
/// The same for the same names, however many threads there are.
pub(super) fn readable(names: &[&str]) -> Vec<(usize, Option<String>)> {
    let chunks: Vec<(usize, &[&str])> = (0..).step_by(CHUNK).zip(names.chunks(CHUNK)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&(first, names)) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((first, of_chunk(first, names)));
        }
        done
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_WORKERS);
    let mut done: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers.min(chunks.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
    });
    done.sort_by_key(|&(first, _)| first);
    done.into_iter().flat_map(|(_, names)| names).collect()
}

fn of_chunk(first: usize, names: &[&str]) -> Vec<(usize, Option<String>)> {
    let mut left = BUDGET + 4 * names.iter().map(|name| name.len()).sum::<usize>();
    let mut parts_left = PARTS;
    let mut made = Vec::new();
    for (index, name) in (first..).zip(names) {
        // No mangled name begins in another way.
        if !name.starts_with('_') {
            made.push((index, None));
            continue;
        }
        let mut text = demangle::at_once(name);
        if text.is_none() {
            let Some((part, parsed)) = demangle::in_pieces(name, parts_left) else {
                parts_left = 0;
                continue;
            };
            parts_left -= parsed;
            text = part;
        }
        let cost = TRIED + text.as_ref().map_or(0, String::len);
        let Some(rest) = left.checked_sub(cost) else { break };
        left = rest;
        made.push((index, text));
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_mangled_has_another_form() {
        let names = ["main", "_Z4workm", "_start", "_ZN4core3fmt5write17h0123456789abcdefE"];
        let expected = [None, Some("work(unsigned long)"), None, Some("core::fmt::write")];
        let made = readable(&names).into_iter();
        assert!(made.eq((0..).zip(expected.map(|name| name.map(str::to_owned)))));
    }

    #[test]
    fn all_chunks_are_worked_out_in_order() {
        let names = ["_Z4workm"; 3 * CHUNK + 5];
        let made = readable(&names);
        assert!(made.iter().map(|&(index, _)| index).eq(0..names.len()));
    }

    #[test]
    fn names_of_many_parts_are_left_for_later() {
        // Never closed, so that all parts fail. All of them would take a minute.
        let name = format!("_Z7fNNNNNNI{}{}", "i".repeat(3700), "1aIiE".repeat(64));
        let names = vec![name.as_str(); CHUNK];
        let made = readable(&names);
        assert!(made.len() <= PARTS / 3700, "{}", made.len());
        // What is cheap is made all the same.
        let mut mixed = names;
        mixed.push("_Z4workm");
        assert!(
            readable(&mixed[1..])
                .iter()
                .any(|(_, text)| text.as_deref() == Some("work(unsigned long)"))
        );
    }

    #[test]
    fn names_that_grow_without_bound_are_left_for_later() {
        // Each substitution doubles what stands before it.
        let mut name = "_Z1fSt4pairIiiE".to_owned();
        for digit in "_0123456789ABCDE".chars() {
            let last = if digit == '_' { "S_".to_owned() } else { format!("S{digit}_") };
            name += &format!("St4pairI{last}{last}E");
        }
        let names = vec![name.as_str(); CHUNK];
        let made = readable(&names);
        let bytes: usize = made.iter().filter_map(|(_, text)| text.as_ref()).map(String::len).sum();
        assert!(bytes <= BUDGET + 4 * CHUNK * name.len(), "{bytes}");
    }
}
