//! Code of processes, for walks of copied stacks: what is in front of return addresses is looked at
//! where frame pointers are followed. Read from the process, if that is allowed and it lives, else
//! from the file. Called by `copied.rs`.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use stackwire_model::UserAddr;

use crate::helpers::broker::Broker;
use crate::process::executable::Kind;
use crate::process::{Process, Wanted};

/// Files whose code is read, kept open.
const MAX_FILES: usize = 64;
/// How long a file may take to open.
const AT_MOST: Duration = Duration::from_millis(50);

/// Reads code.
#[derive(Debug)]
pub struct Code {
    broker: Arc<Broker>,
    /// Of the process asked about last.
    memory: Option<(u64, Option<File>)>,
    /// By the number of the executable.
    files: HashMap<u64, Option<File>>,
}

impl Code {
    /// Has read none so far.
    #[must_use]
    pub fn new(broker: Arc<Broker>) -> Self {
        Self { broker, memory: None, files: HashMap::new() }
    }

    /// Eight bytes of a process's code.
    pub fn word(&mut self, process: &Process, address: u64) -> Option<u64> {
        let mapping = process.mapping(UserAddr(address))?;
        if self.memory.as_ref().is_none_or(|(image, _)| *image != process.image) {
            let memory = File::open(format!("/proc/{}/mem", process.pid)).ok();
            self.memory = Some((process.image, memory));
        }
        let mut bytes = [0; 8];
        if let Some((_, Some(memory))) = &self.memory
            && memory.read_exact_at(&mut bytes, address).is_ok()
        {
            return Some(u64::from_le_bytes(bytes));
        }
        let Kind::File { path, .. } = &mapping.executable.kind else { return None };
        if self.files.len() >= MAX_FILES {
            self.files.clear();
        }
        let file = self.files.entry(mapping.executable.id).or_insert_with(|| {
            let (pid, path) = (process.pid, path.clone());
            let wanted = Wanted::Mapped { pid, start: mapping.start, end: mapping.end, path };
            self.broker.open_within(&wanted, AT_MOST).ok()
        });
        let at = mapping.offset(UserAddr(address)).0;
        file.as_ref()?.read_exact_at(&mut bytes, at).ok()?;
        Some(u64::from_le_bytes(bytes))
    }
}
