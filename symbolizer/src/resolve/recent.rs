//! Answers given of late, by table and address: a server meets the same addresses in every window,
//! and looking one up and making its names readable costs ten times what finding the answer does.
//!
//! Answers are of the content of a table: another table, better or not, has other answers.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;
use rustc_hash::FxBuildHasher;
use stackwire_symbols::demangle::demangle;
use stackwire_symbols::table::{Frame, Table};

use crate::profile::{Line, Quality};

/// Answers kept: some 10 MB with names as they usually are.
const ANSWERS: NonZeroUsize = NonZeroUsize::new(1 << 14).expect("not zero");
/// Longer chains than this are not kept: those of hostile files have a thousand names.
const MAX_LINES: usize = 64;

/// Names at an address, innermost first, and how good they are; nothing covers it when there are
/// none.
pub type Named = Option<(Arc<[Line]>, Quality)>;

/// The answers. Shared by threads.
#[derive(Debug)]
pub struct Recent(Mutex<LruCache<Key, Named, FxBuildHasher>>);

/// Checksum of the table, address, whether names are readable.
type Key = (u64, u64, bool);

impl Default for Recent {
    fn default() -> Self {
        Self(Mutex::new(LruCache::with_hasher(ANSWERS, FxBuildHasher)))
    }
}

impl Recent {
    /// What a table says of an address.
    pub fn named(&self, table: &Table, address: u64, readable: bool) -> Named {
        self.get((table.checksum(), address, readable), || {
            let mut frames = table.lookup(address).peekable();
            let quality = frames.peek().map(|frame| super::quality(frame.kind))?;
            Some((frames.map(|frame| line(frame, readable)).collect(), quality))
        })
    }

    /// The answer from before, else the one `look_up` gives.
    fn get(&self, key: Key, look_up: impl FnOnce() -> Named) -> Named {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&key) {
            return known.clone();
        }
        // Not under the lock: it takes longer than all the rest.
        let named = look_up();
        if named.as_ref().is_none_or(|(lines, _)| lines.len() <= MAX_LINES) {
            lock().put(key, named.clone());
        }
        named
    }
}

/// A frame of a table as a line of a profile.
fn line(frame: Frame<'_>, readable: bool) -> Line {
    let function = match readable {
        false => frame.function().to_owned(),
        true => frame.readable().map_or_else(|| demangle(frame.function()), str::to_owned),
    };
    Line { function, file: frame.file(), line: frame.line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_looked_up_once_until_it_is_the_oldest_of_too_many() {
        let recent = Recent::default();
        let asked = std::cell::Cell::new(0);
        let ask = |address| {
            recent.get((1, address, true), || {
                asked.set(asked.get() + 1);
                None
            })
        };
        ask(1);
        ask(1);
        assert_eq!(asked.get(), 1);
        (2..2 + ANSWERS.get() as u64).for_each(|address| _ = ask(address));
        let before = asked.get();
        ask(3 + ANSWERS.get() as u64 - 2);
        assert_eq!(asked.get(), before);
        ask(1);
        assert_eq!(asked.get(), before + 1);
    }
}
