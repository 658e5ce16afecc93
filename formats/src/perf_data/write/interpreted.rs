//! Functions of interpreters in perf.data, which knows addresses alone. Each is given one in a file
//! of their own, which all processes that run such functions have mapped. Pure.

use std::collections::BTreeMap;
use std::io;

use rustc_hash::FxHashSet;
use sha2::{Digest, Sha256};
use stackwire_model::profile::{Executable, ExecutableId, Location, Named, ProcessId, Profile};

use super::jitted::{self, Image, SHA_1, Sampled, TEXT};

/// Where it is mapped: between a heap and what is mapped from the top of memory on.
pub const BASE: u64 = 0x6000_0000_0000;
/// Most bytes of a function.
const MOST: u64 = 1 << 20;

/// Where functions are in the file.
#[derive(Debug, Default)]
pub struct Places {
    starts: BTreeMap<ExecutableId, u64>,
    /// Bytes of all.
    pub length: u64,
}

impl Places {
    /// Those of a profile, one behind the other.
    pub fn new(profile: &Profile) -> Self {
        let is_code =
            |id: ExecutableId| matches!(profile.executables[id.index()], Executable::Code(_));
        let mut starts = BTreeMap::new();
        for location in profile.locations.iter().filter(|at| is_code(at.executable)) {
            let bytes: &mut u64 = starts.entry(location.executable).or_default();
            *bytes = (*bytes).max(inside(location) + 1);
        }
        let mut length = 0;
        for start in starts.values_mut() {
            length += std::mem::replace(start, length);
        }
        Self { starts, length }
    }

    /// The address of a location; none: it is in no such function.
    pub fn address(&self, location: &Location) -> Option<u64> {
        self.starts.get(&location.executable).map(|start| BASE + start + inside(location))
    }

    /// Processes that run such functions.
    pub fn run_by(&self, profile: &Profile) -> FxHashSet<ProcessId> {
        let mut run_by = FxHashSet::default();
        if self.starts.is_empty() {
            return run_by;
        }
        for sample in &profile.samples {
            let process = profile.threads[sample.key.thread.index()].process;
            let mut frames = sample.key.user.into_iter().flat_map(|stack| profile.stack(stack));
            let executable =
                |at: stackwire_model::profile::LocationId| profile.locations[at.index()].executable;
            if !run_by.contains(&process)
                && frames.any(|at| self.starts.contains_key(&executable(at)))
            {
                run_by.insert(process);
            }
        }
        run_by
    }
}

fn inside(location: &Location) -> u64 {
    location.address.number().min(MOST - 1)
}

/// Name and build-id of the file. Another part of the same capture has other places.
pub fn identity(profile: &Profile, places: &Places) -> (String, [u8; SHA_1]) {
    let mut hash = Sha256::new();
    for (executable, start) in &places.starts {
        hash.update(start.to_le_bytes());
        if let Executable::Code(code) = &profile.executables[executable.index()] {
            for text in [&code.name, &code.path] {
                hash.update([text.width]);
                hash.update((text.bytes.len() as u64).to_le_bytes());
                hash.update(&text.bytes);
            }
        }
    }
    hash.update(places.length.to_le_bytes());
    let mut id = [0; SHA_1];
    id.copy_from_slice(&hash.finalize()[..SHA_1]);
    ("interpreted.so".to_owned(), id)
}

/// The file; none where no such function was sampled.
pub fn image(named: Named<'_>) -> Option<io::Result<Image>> {
    let Named { profile, names } = named;
    let places = Places::new(profile);
    let mut symbols = Sampled::new();
    for (location, resolution) in profile.locations.iter().zip(&names.resolutions) {
        if let Some(start) = places.starts.get(&location.executable) {
            let name = symbols.entry(*start).or_default();
            *name = name.or(jitted::name(resolution));
        }
    }
    if symbols.is_empty() {
        return None;
    }
    // The last function ends here.
    symbols.insert(places.length, None);
    let (name, id) = identity(profile, &places);
    let image = jitted::image(&symbols, TEXT, places.length, &id, jitted::machine(profile));
    Some(image.map(|image| (name, id, image)).map_err(io::Error::other))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object::{Object, ObjectSymbol};
    use stackwire_model::profile::{Builder, Line, Names, Quality, Resolution};
    use stackwire_model::{Address, Code, Runtime, Text};

    use super::*;

    /// Functions, each with how far into it samples are.
    fn profile(functions: &[(&str, u64)]) -> Profile {
        let mut into = Builder::new();
        for &(name, position) in functions {
            let name = Text { width: 1, bytes: name.into(), is_cut: false };
            let code = Code { name, ..Code::unknown(Runtime::Cpython(0x030d_0000)) };
            let executable = into.executable(Executable::Code(Arc::new(code))).unwrap();
            let address = Address::Code(position);
            into.location(Location { executable, process: None, address, seen_ns: 0 }).unwrap();
        }
        into.build()
    }

    #[test]
    fn each_function_has_its_bytes_and_another_part_another_name() {
        let profile_of_two = profile(&[("first", 10), ("second", 20)]);
        let places = Places::new(&profile_of_two);
        let addresses: Vec<_> =
            profile_of_two.locations.iter().map(|it| places.address(it)).collect();
        assert_eq!(addresses, [Some(BASE + 10), Some(BASE + 11 + 20)]);
        let found = |name: &str| Resolution::Found {
            lines: [Line { function: name.into(), ..Line::default() }].into(),
            quality: Quality::Interpreter,
        };
        let names =
            Names { resolutions: vec![found("first"), found("second")], ..Names::default() };
        let named = Named { profile: &profile_of_two, names: &names };
        let (_, id, bytes) = image(named).unwrap().unwrap();
        let elf = object::File::parse(&*bytes).unwrap();
        let symbols: Vec<_> = elf.symbols().map(|it| (it.address(), it.size())).collect();
        assert_eq!(symbols, [(TEXT, 11), (TEXT + 11, 21)]);
        let further = profile(&[("first", 11), ("second", 20)]);
        assert_ne!(identity(&further, &Places::new(&further)).1, id);
        assert_eq!(identity(&profile_of_two, &places).1, id);
    }
}
