//! Symbol tables as the cache has them, mapped: one mapping for each file.
//!
//! A table is checked when it is opened first, and when its file has changed since: to read all of
//! it for each window was four fifths of what a server did.
//!
//! Names share the memory of the table they are from, and answers of late keep names. Without this,
//! each window of a server would leave one more mapping of each table behind. Called by
//! `ladder.rs`.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, PoisonError};

use stackwire_cache::{Known, Stamp};
use stackwire_elf::{Bytes, WeakBytes};
use stackwire_symbols::table::Table;

/// The mappings that are in use, by device and inode. A mapped file keeps its inode, so no other
/// file has the same key.
#[derive(Debug, Default)]
pub struct MappedTables {
    mapped: Mutex<HashMap<(u64, u64), WeakBytes>>,
    /// Tables whose checksums are right.
    sound: Known<()>,
}

impl MappedTables {
    /// Opens a table of the cache; `None` when it cannot be used.
    pub fn open(&self, file: &File) -> Option<Table> {
        let metadata = file.metadata().ok()?;
        let key = (metadata.dev(), metadata.ino());
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let known = mapped.get(&key).and_then(WeakBytes::upgrade);
        let bytes = match known {
            Some(known) => known,
            None => {
                let bytes = Bytes::map(file).ok()?;
                mapped.retain(|_, bytes| bytes.upgrade().is_some());
                mapped.insert(key, bytes.downgrade());
                bytes
            }
        };
        drop(mapped);
        let stamp = Stamp::of(&metadata);
        if self.sound.get(stamp).is_some() {
            return Table::open_again(bytes).ok();
        }
        let table = Table::open(bytes).ok()?;
        self.sound.put(stamp, ());
        Some(table)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use stackwire_model::VirtAddr;
    use stackwire_symbols::table::{Kind, NodeKey, Writer};

    use super::*;

    /// How often this process has a file mapped.
    fn mappings(file: &File) -> usize {
        let inode = format!(" {} ", file.metadata().unwrap().ino());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(&inode)).count()
    }

    #[test]
    fn names_that_are_kept_do_not_add_mappings() {
        let mut writer = Writer::default();
        let function = writer.function("work", Kind::Symtab);
        let leaf = writer.node(NodeKey { function, file: None, line: 0, parent: 0 });
        writer.range(0x1000, 0x2000, leaf);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&writer.finish()).unwrap();
        let tables = MappedTables::default();
        let mut names = Vec::new();
        for _ in 0..10 {
            let table = tables.open(&file).unwrap();
            names.extend(table.lookup(VirtAddr(0x1004)).map(|frame| frame.raw_name()));
            table.forget_pages();
        }
        assert_eq!(mappings(&file), 1);
        assert_eq!(names, ["work"; 10]);
        drop(names);
        assert_eq!(mappings(&file), 0);
    }
}
