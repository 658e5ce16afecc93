//! Where everything lies in the one address space of a pprof, and the table of its texts. Called by
//! `write.rs`.

use std::collections::HashMap;

use stackwire_model::profile::{Executable, LocationId, Profile};

use super::proto;
use crate::kernel_place;

/// pprof has one address space, and a profile of a whole host has many. So each distinct mapping of
/// an executable is written once, where the first process had it. Mappings may overlap: pprof goes
/// by id.
pub(super) struct Mappings {
    pub list: Vec<proto::Mapping>,
    /// By executable, and process where that matters: (file offset, length, id).
    by_owner: HashMap<Owner, Vec<Part>>,
}

/// An executable, and the process where that matters.
type Owner = (u32, Option<u32>);
/// First offset, length, mapping id.
type Part = (u64, u64, u64);

impl Mappings {
    pub fn plan(profile: &Profile, strings: &mut Strings) -> Self {
        let mut planned = Self { list: Vec::new(), by_owner: HashMap::new() };
        let mut mappings: Vec<_> = profile.mappings.iter().collect();
        // The first mapping stands for the main binary: of the first process, the file lowest in
        // memory, which is where the kernel puts the program.
        let is_file = |m: &&&stackwire_model::profile::Mapping| {
            matches!(profile.executables[m.executable.index()], Executable::File { .. })
        };
        let first_process = mappings.first().map(|mapping| mapping.process);
        let main = mappings
            .iter()
            .filter(|mapping| Some(mapping.process) == first_process)
            .filter(is_file)
            .min_by_key(|mapping| mapping.start)
            .map(|mapping| mapping.executable);
        mappings.sort_by_key(|mapping| Some(mapping.executable) != main);
        for mapping in mappings {
            let executable = &profile.executables[mapping.executable.index()];
            let private = matches!(executable, Executable::Anonymous);
            let owner = (mapping.executable.0, private.then_some(mapping.process.0));
            // Anonymous memory has no file to be an offset into: its addresses are what is looked
            // up.
            let first = match executable {
                Executable::Anonymous => mapping.start.0,
                Executable::Vdso { .. } => 0,
                _ => mapping.file_offset.0,
            };
            let file_offset = if private { 0 } else { first };
            planned.add(
                owner,
                first,
                mapping.start.0,
                mapping.length,
                file_offset,
                executable,
                strings,
            );
        }
        let places = kernel_place::places(profile);
        for (index, executable) in profile.executables.iter().enumerate() {
            if let Some(&(start, length)) = places.get(&(index as u32)) {
                planned.add((index as u32, None), 0, start, length, 0, executable, strings);
            }
        }
        planned
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of a mapping, at its two call sites")]
    fn add(
        &mut self,
        owner: Owner,
        first: u64,
        start: u64,
        length: u64,
        file_offset: u64,
        executable: &Executable,
        strings: &mut Strings,
    ) {
        let known = self.by_owner.entry(owner).or_default();
        if known.iter().any(|&(offset, size, _)| offset == first && size == length) {
            return;
        }
        let id = self.list.len() as u64 + 1;
        known.push((first, length, id));
        self.list.push(proto::Mapping {
            id,
            memory_start: start,
            memory_limit: start.saturating_add(length),
            file_offset,
            filename: strings.index(&executable.name()),
            build_id: strings
                .index(&executable.build_id().map_or(String::new(), |id| id.to_string())),
            ..proto::Mapping::default()
        });
    }

    /// The mapping of a location and its address there.
    pub fn place(&self, profile: &Profile, id: LocationId) -> (Option<u64>, u64) {
        let location = &profile.locations[id.index()];
        let executable = &profile.executables[location.executable.index()];
        if matches!(executable, Executable::Names { .. } | Executable::Code(_)) {
            return (None, 0);
        }
        let owner = (location.executable.0, location.process.map(|process| process.0));
        let number = location.address.number();
        let found = self.by_owner.get(&owner).and_then(|known| {
            let inside = |first, length| number.checked_sub(first).is_some_and(|at| at < length);
            known.iter().find(|&&(first, length, _)| inside(first, length))
        });
        match found {
            Some(&(first, _, id)) => {
                let mapping = &self.list[id as usize - 1];
                let address = mapping.memory_start.saturating_add(number - first);
                (Some(id), address.min(mapping.memory_limit - 1))
            }
            None => (None, number),
        }
    }
}

#[derive(Default)]
pub(super) struct Strings {
    pub table: Vec<String>,
    index: HashMap<String, i64>,
}

impl Strings {
    pub fn index(&mut self, text: &str) -> i64 {
        if let Some(&index) = self.index.get(text) {
            return index;
        }
        let index = self.table.len() as i64;
        self.table.push(text.to_owned());
        self.index.insert(text.to_owned(), index);
        index
    }
}
