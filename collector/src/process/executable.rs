//! What code came from, interned: equal executables are one [`Rc`], with one id for life.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use stackwire_model::{Code, ExecutableKey};

use crate::sources::side_band::Mapped;

/// What an address can lie in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A mapped file.
    File {
        /// Path as the process has it.
        path: String,
        /// Its build-id, or the file itself when it has none or the kernel could not read it.
        key: Option<ExecutableKey>,
    },
    /// The vDSO.
    Vdso,
    /// Anonymous executable memory.
    Anonymous,
    /// The same, as far as it is described in a jitdump: for unwind tables alone.
    Described {
        /// The jitdump.
        dump: Box<Self>,
        /// Number of the window of [`WINDOW`](stackwire_collector_ebpf::tables::WINDOW) bytes it
        /// lies in.
        window: u64,
    },
    /// A function of an interpreter.
    Code(Arc<Code>),
    /// The kernel image.
    Kernel,
    /// A kernel module, or `bpf`.
    Module(String),
    /// Nothing known.
    Unmapped,
}

/// An interned executable.
#[derive(Debug)]
pub struct Executable {
    /// Unique among all executables of this collector.
    pub id: u64,
    /// What it is.
    pub kind: Kind,
}

/// The interner. Forgets what nothing refers to any more, so it is as large as the mappings known.
#[derive(Debug, Default)]
pub struct Executables {
    by_kind: HashMap<Kind, Rc<Executable>>,
    next_id: u64,
}

impl Executables {
    /// The executable of this kind.
    pub fn intern(&mut self, kind: Kind) -> Rc<Executable> {
        if let Some(found) = self.by_kind.get(&kind) {
            return Rc::clone(found);
        }
        self.next_id += 1;
        let executable = Rc::new(Executable { id: self.next_id, kind: kind.clone() });
        self.by_kind.insert(kind, Rc::clone(&executable));
        executable
    }

    /// The executable behind a mapping.
    pub fn of_mapping(&mut self, mapped: &Mapped) -> Rc<Executable> {
        let path = mapped.path_when_mapped();
        let kind = if path == "[vdso]" {
            Kind::Vdso
        } else if !mapped.is_of_file() {
            Kind::Anonymous
        } else {
            Kind::File { path: path.to_owned(), key: mapped.key }
        };
        self.intern(kind)
    }

    /// Forgets what nothing refers to.
    pub fn purge(&mut self) {
        self.by_kind.retain(|_, executable| Rc::strong_count(executable) > 1);
    }
}

#[cfg(test)]
mod tests {
    use stackwire_model::BuildId;

    use super::*;

    #[test]
    fn equal_mappings_are_one_executable_until_forgotten() {
        let mut executables = Executables::default();
        let key = BuildId::new(&[1; 20]).map(Into::into);
        let mapped = Mapped { path: "/bin/x".into(), key, ..Mapped::default() };
        let first = executables.of_mapping(&mapped);
        let deleted = Mapped { path: "/bin/x (deleted)".into(), ..mapped.clone() };
        assert_eq!(executables.of_mapping(&deleted).id, first.id);
        let id = first.id;
        drop(first);
        executables.purge();
        assert_ne!(executables.of_mapping(&mapped).id, id);
    }

    #[test]
    fn names_that_are_not_files_are_anonymous() {
        let mut executables = Executables::default();
        for path in [
            "",
            "//anon",
            "[heap]",
            "[anon:v8]",
            "anon_inode:[perf]",
            "/memfd:doublemapper (deleted)",
        ] {
            let mapped = Mapped { path: path.into(), ..Mapped::default() };
            assert_eq!(executables.of_mapping(&mapped).kind, Kind::Anonymous, "{path}");
        }
    }
}
