//! Finds the id of a table's entry by what the entry is, without a second copy of the entry.

use std::hash::Hash;

use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;

use super::{Full, MAX_ENTRIES};

/// Ids of a table's entries. The entries are in the table alone: a map with keys of its own would
/// be larger than the tables of stacks and samples are.
#[derive(Debug, Default)]
pub(super) struct Ids(HashTable<u32>);

impl Ids {
    /// The id of the entry that has this key, or of a new one. `key_of` tells the key of an entry.
    pub fn intern<K, V>(
        &mut self,
        table: &mut Vec<V>,
        key: K,
        key_of: impl Fn(&V) -> &K,
        new: impl FnOnce(K) -> V,
        what: &'static str,
    ) -> Result<u32, Full>
    where
        K: Hash + Eq,
    {
        let hash = |key: &K| std::hash::BuildHasher::hash_one(&FxBuildHasher, key);
        let of = |id: u32| &table[id as usize];
        let own = hash(&key);
        if let Some(&known) = self.0.find(own, |&id| *key_of(of(id)) == key) {
            return Ok(known);
        }
        let id = u32::try_from(table.len()).ok().filter(|_| table.len() < MAX_ENTRIES);
        let id = id.ok_or(Full(what))?;
        self.0.insert_unique(own, id, |&id| hash(key_of(of(id))));
        table.push(new(key));
        Ok(id)
    }
}
