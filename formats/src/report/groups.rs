//! Under which executable the report tells of a frame: under its own. Of functions of one version
//! of an interpreter, under the first of them. Pure. Called by `write.rs` and `unwinding.rs`.

use std::collections::HashMap;

use stackwire_model::profile::{Executable, ExecutableId, Named};

/// Executables, each with that under which it is told of.
pub struct Groups<'a> {
    profile: Named<'a>,
    /// By the name of an interpreter.
    first: HashMap<String, ExecutableId>,
    by_executable: HashMap<ExecutableId, ExecutableId>,
}

impl<'a> Groups<'a> {
    /// Those of a profile.
    pub fn new(profile: Named<'a>) -> Self {
        Self { profile, first: HashMap::new(), by_executable: HashMap::new() }
    }

    /// The one under which this is told of.
    pub fn of(&mut self, executable: ExecutableId) -> ExecutableId {
        *self.by_executable.entry(executable).or_insert_with(|| {
            match &self.profile.executables[executable.index()] {
                Executable::Code(code) => {
                    *self.first.entry(code.runtime.to_string()).or_insert(executable)
                }
                _ => executable,
            }
        })
    }
}

/// What the report calls an executable.
pub fn name(executable: &Executable) -> String {
    match executable {
        Executable::Code(code) => code.runtime.to_string(),
        other => other.name(),
    }
}
