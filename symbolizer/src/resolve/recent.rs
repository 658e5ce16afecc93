//! Recent answers, by table and address. A server meets the same addresses in every window. Looking
//! an address up and making its names readable costs ten times what finding the answer does.
//!
//! An answer belongs to the content of a table. Another table, better or not, has other answers.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;
use rustc_hash::FxBuildHasher;
use stackwire_model::VirtAddr;
use stackwire_symbols::table::{Frame, Table};

use crate::profile::{Line, Quality};

/// Answers kept. They keep the cached tables mapped that their names are in. Where names had to be
/// copied, they take some 10 MB.
const ANSWERS: NonZeroUsize = NonZeroUsize::new(1 << 14).expect("not zero");
/// Addresses looked up together: what is found for them stays in the processor's caches.
const AT_ONCE: usize = 64;
/// Longer chains than this are not kept: those of hostile files have a thousand names.
const MAX_LINES: usize = 64;

/// Names at an address, innermost first, and how good they are; nothing covers it when there are
/// none.
pub type Named = Option<(Arc<[Line]>, Quality)>;

/// The answers. Shared by threads.
#[derive(Debug)]
pub struct Recent(Mutex<LruCache<Key, Named, FxBuildHasher>>);

/// Checksum of the table, address, whether names are readable.
type Key = (u64, VirtAddr, bool);

impl Default for Recent {
    fn default() -> Self {
        Self(Mutex::new(LruCache::with_hasher(ANSWERS, FxBuildHasher)))
    }
}

impl Recent {
    /// What a table says of each address, in their order.
    pub fn named(&self, table: &Table, addresses: &[VirtAddr], readable: bool) -> Vec<Named> {
        self.get(table.checksum(), readable, addresses, |addresses, answers| {
            // One loop for each step: the processor fetches the memory of several addresses at
            // once, where one loop with all steps would wait for each.
            let chains: Vec<_> = addresses.iter().map(|&address| table.lookup(address)).collect();
            let quality = |frame: Frame<'_>| super::quality(frame.kind);
            let found: Vec<_> = chains
                .iter()
                .map(|chain| Some((chain.clone().count(), chain.clone().next().map(quality)?)))
                .collect();
            answers.extend(chains.into_iter().zip(found).map(|(mut chain, found)| {
                let (count, quality) = found?;
                // An iterator of known length is collected without a `Vec` in between.
                let lines = (0..count).map(|_| {
                    chain.next().map_or_else(Line::default, |frame| line(frame, readable))
                });
                Some((lines.collect(), quality))
            }));
        })
    }

    /// The answers from before; for addresses without one, those that `look_up` adds.
    fn get(
        &self,
        table: u64,
        readable: bool,
        addresses: &[VirtAddr],
        look_up: impl Fn(&[VirtAddr], &mut Vec<Named>),
    ) -> Vec<Named> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut answers = vec![None; addresses.len()];
        let mut unknown = Vec::new();
        {
            let mut known = lock();
            for (index, (&address, answer)) in addresses.iter().zip(&mut answers).enumerate() {
                match known.get(&(table, address, readable)) {
                    Some(found) => answer.clone_from(found),
                    None => unknown.push((address, index)),
                }
            }
        }
        // In the order of addresses: neighbours share cache lines and pages of the table.
        unknown.sort_unstable();
        let mut found = Vec::with_capacity(AT_ONCE);
        let mut rest = unknown.chunk_by(|one, next| one.0 == next.0).peekable();
        while rest.peek().is_some() {
            let equal: Vec<_> = rest.by_ref().take(AT_ONCE).collect();
            let addresses: Vec<VirtAddr> = equal.iter().map(|equal| equal[0].0).collect();
            // Not under the lock, since it takes longer than all the rest.
            look_up(&addresses, &mut found);
            let mut known = lock();
            for (equal, answer) in equal.into_iter().zip(found.drain(..)) {
                if answer.as_ref().is_none_or(|(lines, _)| lines.len() <= MAX_LINES) {
                    known.put((table, equal[0].0, readable), answer.clone());
                }
                for &(_, index) in equal {
                    answers[index].clone_from(&answer);
                }
            }
        }
        answers
    }
}

/// A frame of a table as a line of a profile.
fn line(frame: Frame<'_>, readable: bool) -> Line {
    let function = if readable { frame.readable_name() } else { frame.raw_name() };
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
            recent.get(1, true, &[VirtAddr(address)], |_, answers| {
                asked.set(asked.get() + 1);
                answers.push(None);
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

    #[test]
    fn answers_are_in_the_order_of_their_addresses() {
        let recent = Recent::default();
        let of = |VirtAddr(address): VirtAddr| {
            let line = Line { line: address as u32, ..Line::default() };
            (address != 7).then(|| (Arc::from([line]), Quality::Symtab))
        };
        let look_up = |addresses: &[VirtAddr], answers: &mut Vec<Named>| {
            answers.extend(addresses.iter().map(|&address| of(address)));
        };
        let ask = |addresses: &[VirtAddr]| recent.get(1, true, addresses, look_up);
        ask(&[5, 2].map(VirtAddr));
        // Some are known, one is asked for twice, one has no name.
        let addresses = [9, 5, 7, 2, 9, 1].into_iter().chain(20..300).map(VirtAddr);
        let addresses: Vec<VirtAddr> = addresses.collect();
        let expected: Vec<Named> = addresses.iter().map(|&address| of(address)).collect();
        assert_eq!(ask(&addresses), expected);
        assert_eq!(ask(&addresses), expected);
    }
}
