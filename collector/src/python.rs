//! Python processes whose perf trampolines are switched on while a capture runs, so that their
//! functions have names.
//!
//! A thread finds out which processes run Python: files are opened by the broker and parsed by a
//! compiler. It tells the broker where in a process the functions are that are called; the broker
//! does the rest. Called by `session/prepare.rs` for processes that run, and by `pipeline.rs` for
//! those met later.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use stackwire_model::PythonOutcome;
use stackwire_rights::capabilities;

use crate::helpers::broker::{Broker, Function, Places};
use crate::helpers::compiler::Compiler;
use crate::helpers::interpreter::{InFile, Interpreter};
use crate::process::{Wanted, maps};
use crate::sources::side_band::Mapped;

/// Python 3.12 has the first trampoline; major and minor version of `Py_Version`.
const FIRST: u64 = 0x030c;
/// Versions that crash, as `Py_Version` has them: 3.12.0 frees trampolines that are in use when it
/// is switched off (python/cpython issue 112367), 3.13.12 and 3.14.3 crash in children that are
/// forked while it is on (issue 144766).
const BROKEN: [u64; 3] = [0x03_0c_00, 0x03_0d_0c, 0x03_0e_03];
/// How long a file may take to open.
const AT_MOST: Duration = Duration::from_millis(500);
/// How long a capture of single processes waits for what becomes of them.
const PATIENCE: Duration = Duration::from_secs(8);
/// Files whose functions are kept: several processes run the same interpreter.
const MAX_KEPT: usize = 256;
/// Files of a process that are looked into when none is called Python.
const MAX_FILES: usize = 64;
/// Processes that wait to be looked at.
const MAX_JOBS: usize = 64;

/// A process to look at.
struct Job {
    pid: u32,
    mapped: Vec<Mapped>,
    /// Its files are looked into however they are called.
    is_chosen: bool,
}

/// What was found of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    NoPython,
    /// The broker says what comes of it.
    Asked,
    /// It was not asked.
    Not(PythonOutcome),
}

type Seen = Arc<Mutex<BTreeMap<u32, Found>>>;

/// The processes.
#[derive(Debug)]
pub struct Pythons {
    broker: Arc<Broker>,
    jobs: SyncSender<Job>,
    seen: Seen,
    /// Images that were met.
    met: HashSet<u64>,
    /// Chosen, and not met since.
    chosen: HashSet<u32>,
}

impl Pythons {
    /// Starts the thread.
    ///
    /// # Errors
    /// When there is none to be had.
    pub fn start(broker: Arc<Broker>, compiler: Compiler) -> io::Result<Self> {
        let (jobs, todo) = mpsc::sync_channel(MAX_JOBS);
        let seen = Seen::default();
        let finder = Finder { broker: Arc::clone(&broker), compiler, known: HashMap::new() };
        let found = Arc::clone(&seen);
        std::thread::Builder::new()
            .name("python".to_owned())
            .spawn(move || finder.run(&todo, &found))?;
        Ok(Self { broker, jobs, seen, met: HashSet::new(), chosen: HashSet::new() })
    }

    /// Switches those on that run Python among processes that were chosen one by one, and waits for
    /// what comes of it. None: it runs no Python.
    #[must_use]
    pub fn switch_on(&mut self, pids: &[u32]) -> Vec<(u32, Option<PythonOutcome>)> {
        let deadline = Instant::now() + PATIENCE;
        for &pid in pids {
            self.chosen.insert(pid);
            while !self.look(pid, true) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        loop {
            let said: HashMap<u32, PythonOutcome> =
                self.broker.python_outcomes().unwrap_or_default().into_iter().collect();
            let seen = self.seen().clone();
            let is_late = Instant::now() >= deadline;
            let outcome = |pid| match (seen.get(pid), said.get(pid)) {
                (Some(Found::NoPython), _) => Some(None),
                (Some(Found::Not(why)), _) => Some(Some(*why)),
                (_, Some(outcome)) => Some(Some(*outcome)),
                _ => is_late.then_some(Some(PythonOutcome::NoSafePoint)),
            };
            let all = pids.iter().map(|pid| Some((*pid, outcome(pid)?)));
            if let Some(all) = all.collect() {
                return all;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Looks at those images that are new, each with its pid.
    pub fn meet(&mut self, images: impl Iterator<Item = (u64, u32)>) {
        for (image, pid) in images {
            // When too many wait already, it is met again.
            if !self.met.contains(&image) && (self.chosen.remove(&pid) || self.look(pid, false)) {
                self.met.insert(image);
            }
        }
    }

    /// Forgets images that are gone.
    pub fn retain(&mut self, is_there: impl Fn(u64) -> bool) {
        self.met.retain(|&image| is_there(image));
    }

    /// Switches all off; how many processes had each outcome.
    #[must_use]
    pub fn switch_off(&self) -> BTreeMap<PythonOutcome, u64> {
        let mut counts = BTreeMap::new();
        let mut count = |outcome| *counts.entry(outcome).or_default() += 1;
        // Without the broker nothing is known of them: it has switched them off.
        let last = self.broker.switch_pythons_off().ok();
        let mut asked = HashSet::new();
        for (pid, outcome) in last.iter().flatten() {
            asked.insert(*pid);
            count(*outcome);
        }
        for (pid, found) in self.seen().iter() {
            match found {
                Found::Not(outcome) => count(*outcome),
                Found::Asked if !asked.contains(pid) => count(match last {
                    Some(_) => PythonOutcome::TooMany,
                    None => PythonOutcome::Lost,
                }),
                Found::NoPython | Found::Asked => {}
            }
        }
        counts
    }

    /// Has the thread look at a process. False: it has too much to do.
    fn look(&self, pid: u32, is_chosen: bool) -> bool {
        // Here, where the right to read mappings is.
        let mapped = match maps::read(pid) {
            Ok(mapped) => mapped,
            Err(error) if is_chosen => {
                let why = match error.kind() {
                    io::ErrorKind::PermissionDenied => PythonOutcome::Denied,
                    _ => PythonOutcome::Ended,
                };
                self.seen().insert(pid, Found::Not(why));
                return true;
            }
            // Of others nobody can tell whether they run Python.
            Err(_) => return true,
        };
        let is_wanted = is_chosen || mapped.iter().any(|it| is_python(&it.path));
        !is_wanted || self.jobs.try_send(Job { pid, mapped, is_chosen }).is_ok()
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Found>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file as its file system knows it. A build-id would not do: a user can give a file of theirs
/// the build-id of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

/// The thread.
struct Finder {
    broker: Arc<Broker>,
    compiler: Compiler,
    known: HashMap<Identity, Interpreter>,
}

impl Finder {
    fn run(mut self, todo: &Receiver<Job>, seen: &Seen) {
        // Started with the privileges of the caller, of which it needs none.
        let _ = capabilities::drop_all();
        for job in todo {
            let found = match self.places(&job) {
                Ok(places) => match self.broker.switch_python_on(job.pid, places) {
                    Ok(()) => Found::Asked,
                    Err(_) => Found::Not(PythonOutcome::Lost),
                },
                Err(found) => found,
            };
            seen.lock().unwrap_or_else(PoisonError::into_inner).insert(job.pid, found);
        }
    }

    /// What is where in a process.
    ///
    /// # Errors
    /// What it is instead of one that is to be asked.
    fn places(&mut self, job: &Job) -> Result<Places, Found> {
        let mut files: Vec<&Mapped> = Vec::new();
        for mapped in job.mapped.iter().filter(|it| it.path.starts_with('/')) {
            let is_wanted = job.is_chosen || is_python(&mapped.path) || is_c_library(&mapped.path);
            if is_wanted && !files.iter().any(|it| it.path == mapped.path) {
                files.push(mapped);
            }
        }
        files.sort_by_key(|it| !is_python(&it.path) && !is_c_library(&it.path));
        files.truncate(MAX_FILES);
        let (mut python, mut library) = (None, None);
        for file in files {
            let found = self.interpreter(job.pid, file).unwrap_or_default();
            if python.is_none() && found.add_pending_call.offset != 0 {
                python = Some((file, found));
            }
            if library.is_none() && found.restorer.offset != 0 {
                library = Some((file, found));
            }
            if python.is_some() && library.is_some() {
                break;
            }
        }
        let unknown = Found::Not(PythonOutcome::Unknown);
        let Some((python, of_python)) = python else {
            let is_called_so = job.mapped.iter().any(|it| is_python(&it.path));
            return Err(if is_called_so { unknown } else { Found::NoPython });
        };
        if of_python.version >> 16 < FIRST {
            return Err(Found::Not(PythonOutcome::TooOld));
        }
        if BROKEN.contains(&(of_python.version >> 8)) {
            return Err(Found::Not(PythonOutcome::Broken));
        }
        let (library, of_library) = library.ok_or(unknown)?;
        if of_python.runtime == 0 || of_python.state.finalizing == 0 {
            return Err(unknown);
        }
        let at = |file: &Mapped, offset: u64| {
            address(&job.mapped, file, offset).filter(|_| offset != 0).ok_or(unknown)
        };
        let function =
            |file: &Mapped, it: InFile| Ok(Function { at: at(file, it.offset)?, head: it.head });
        let evaluator = at(python, of_python.evaluator)?;
        let add_pending_call = function(python, of_python.add_pending_call)?;
        Ok(Places {
            add_pending_call,
            run_string: function(python, of_python.run_string)?,
            map: function(library, of_library.map)?,
            unmap: function(library, of_library.unmap)?,
            restorer: function(library, of_library.restorer)?,
            evaluator,
            evaluator_end: evaluator.saturating_add(of_python.evaluator_size),
            runtime: add_pending_call.at.wrapping_add(of_python.runtime),
            state: of_python.state,
            remote: of_python.remote,
        })
    }

    /// What a file has. None: it cannot be read.
    fn interpreter(&mut self, pid: u32, file: &Mapped) -> Option<Interpreter> {
        let (start, end) = (file.start, file.end());
        let wanted = Wanted::Mapped { pid, start, end, path: file.path_when_mapped().to_owned() };
        let opened = self.broker.open_within(&wanted, AT_MOST).ok()?;
        let status = opened.metadata().ok()?;
        let identity = Identity {
            device: status.dev(),
            inode: status.ino(),
            size: status.size(),
            modified: (status.mtime(), status.mtime_nsec()),
        };
        if let Some(known) = self.known.get(&identity) {
            return Some(*known);
        }
        let found = self.compiler.interpreter(&opened).ok()?;
        if self.known.len() >= MAX_KEPT {
            self.known.clear();
        }
        self.known.insert(identity, found);
        Some(found)
    }
}

/// Where an offset in a file is in memory.
fn address(all: &[Mapped], file: &Mapped, offset: u64) -> Option<u64> {
    all.iter().filter(|it| it.path == file.path && it.key == file.key).find_map(|it| {
        let inside = offset.checked_sub(it.file_offset.0).filter(|&inside| inside < it.length)?;
        Some(it.start.0.saturating_add(inside))
    })
}

/// `python3.12`, `libpython3.12.so.1.0`, by the name of the file.
fn is_python(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    name.starts_with("python") || name.starts_with("libpython")
}

/// `libc.so.6`, `libc-2.28.so`, `ld-musl-x86_64.so.1`.
fn is_c_library(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    ["libc.so", "libc-2", "ld-musl"].iter().any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use stackwire_model::{FileOffset, UserAddr};

    use super::*;

    #[test]
    fn files_are_known_by_their_names() {
        for path in ["/usr/bin/python3.12", "/usr/lib/libpython3.13t.so.1.0", "/x/python"] {
            assert!(is_python(path), "{path}");
        }
        for path in ["/opt/python3/bin/node", "/usr/lib/python3/numpy.so", "[vdso]", ""] {
            assert!(!is_python(path), "{path}");
        }
        assert!(is_c_library("/lib/ld-musl-x86_64.so.1") && !is_c_library("/lib/libcap.so.2"));
    }

    #[test]
    fn an_offset_is_in_the_mapping_that_has_it() {
        let mapped = |start, file_offset, path: &str| Mapped {
            start: UserAddr(start),
            length: 0x1000,
            file_offset: FileOffset(file_offset),
            path: path.to_owned(),
            ..Mapped::default()
        };
        let all = [
            mapped(0x10_000, 0, "/a"),
            mapped(0x20_000, 0x1000, "/b"),
            mapped(0x30_000, 0x1000, "/a"),
        ];
        assert_eq!(address(&all, &all[0], 0x1010), Some(0x30_010));
        assert_eq!(address(&all, &all[0], 0x10), Some(0x10_010));
        assert_eq!(address(&all, &all[1], 0x10), None);
        assert_eq!(address(&all, &all[0], 0x2000), None);
    }
}
