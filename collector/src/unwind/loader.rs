//! A loading thread: brings the tables that are wanted, the hottest first, from disk or from its
//! compiler.
//!
//! Opens files through the broker and holds no capability; content goes from descriptor to compiler
//! unread.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use stackwire_collector_ebpf::vma::FileKey;
use stackwire_model::ExecutableKey;
use stackwire_rights::capabilities;
use stackwire_unwind::Table;

use super::catalog::{ASKED_AGAIN, Catalog, Job};
use super::disk::Disk;
use super::known::{Key, Keys, VDSO_KEY};
use super::no_table::NoTable;
use super::owner::{Owner, is_everyones};
use crate::helpers::broker::{Broker, LIMIT};
use crate::helpers::compiler::Compiler;
use crate::host::growth::size;
use crate::host::vdso;
use crate::in_time::later;
use crate::process::Wanted;
use crate::process::executable::Kind;

/// Between two looks at what is wanted, of the first thread and of the others: those matter only
/// while it is busy.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_OF_OTHERS: Duration = Duration::from_millis(50);
/// How long a file may take to open before all others have had their turn.
const AT_FIRST: Duration = Duration::from_millis(50);

/// What the thread needs.
#[derive(Debug)]
pub struct Loader {
    /// What is wanted, and where it goes.
    pub catalog: Arc<Catalog>,
    /// Opens.
    pub broker: Arc<Broker>,
    /// Tells what the kernel calls a file.
    pub keys: Arc<Keys>,
    /// Compiles, for this thread alone.
    pub compiler: Compiler,
    /// Where tables are kept from run to run.
    pub cache: Option<PathBuf>,
    /// This one of all lets what was used long ago count less.
    pub is_first: bool,
    /// Ends the thread.
    pub stop: Arc<AtomicBool>,
}

impl Loader {
    /// Runs until told to stop. With `warmed`, brings the tables of all that is mapped, used or
    /// not, and sends a message when it has those of the beginning.
    pub fn run(self, mut warmed: Option<Sender<()>>) {
        // Started with the privileges of the caller, of which it needs none.
        let _ = capabilities::drop_all();
        let disk = self.cache.as_deref().and_then(Disk::open);
        let all = warmed.is_some();
        let mut cooled = Instant::now();
        while self.running() {
            match self.catalog.next(all) {
                Some(job) => self.bring(&job, disk.as_ref()),
                None if self.bring_again() || self.bring_idle(disk.as_ref()) => {}
                None => {
                    if self.catalog.is_settled()
                        && let Some(warmed) = warmed.take()
                    {
                        // Who waits may have begun without.
                        let _ = warmed.send(());
                    }
                    if !self.name_next() {
                        self.catalog.wait(if self.is_first { PAUSE } else { PAUSE_OF_OTHERS });
                    }
                }
            }
            if self.is_first && cooled.elapsed() > Duration::from_secs(1) {
                cooled = Instant::now();
                self.catalog.cool();
            }
        }
    }

    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Brings a table that is on disk before anybody misses it; whether one was looked for.
    fn bring_idle(&self, disk: Option<&Disk>) -> bool {
        let Some((disk, job)) = disk.and_then(|disk| Some((disk, self.catalog.next_idle()?)))
        else {
            return false;
        };
        match job.build_id().and_then(|id| disk.get(id)) {
            Some(table) => self.catalog.install(job.number, &table, true, None),
            None => self.catalog.put_back(job.number),
        }
        true
    }

    /// Makes a table again of a jitdump that has grown; whether there was one.
    fn bring_again(&self) -> bool {
        static TAKEN: AtomicUsize = AtomicUsize::new(0);
        let unused = self.catalog.take_unused();
        if !unused.is_empty() {
            // To close a file may take as long as its server likes.
            later(&TAKEN, move || drop(unused));
        }
        while let Some((job, file, before)) = self.catalog.next_growing() {
            let size = size(&file).unwrap_or(before);
            if size == before {
                self.catalog.looked(&job, size, Duration::ZERO, None);
                continue;
            }
            let started = Instant::now();
            let compiled = self.compile_file(&job.kind, file);
            let took = started.elapsed();
            self.catalog.count_compiled(took, compiled.is_ok());
            // Without a new table it keeps the one it has.
            let made = compiled.as_ref().ok().map(|made| (&made.table, made.everyones));
            self.catalog.looked(&job, size, took, made);
            return true;
        }
        false
    }

    /// Tells the kernel side which file is an executable whose table it has; whether there was one.
    fn name_next(&self) -> bool {
        let Some(job) = self.catalog.next_nameless() else { return false };
        let held = job.held.iter().map(|file| (Ok(Arc::clone(file)), true));
        let opened = job.wanted.iter().map(|wanted| {
            let opened = self.broker.open_within(wanted, AT_FIRST).map(Arc::new);
            // Nobody asks whose it is where it could not be opened.
            let theirs = opened.is_ok() && is_still(job.owner, wanted);
            (opened, theirs)
        });
        let mut found = false;
        for (opened, theirs) in held.chain(opened) {
            let file = match opened {
                Ok(file) => file,
                Err(why) if why.hangs() => return true,
                Err(_) => continue,
            };
            found = true;
            let everyones = is_everyones(&file).unwrap_or(false);
            if !everyones && !theirs {
                continue;
            }
            // Of file systems that may not answer there is no key: nothing is read of their files
            // here.
            let key = match self.keys.of(&file) {
                Some(Key::Known(key)) => key,
                Some(Key::TooNew(wait)) => {
                    self.catalog.ask_again(&job, wait, Some(file));
                    return true;
                }
                None => continue,
            };
            // Another file may have been found than the one that was mapped, and read for the
            // table.
            if self.compiler.build_id(&file).is_ok_and(|found| found == job.build_id()) {
                self.catalog.name(&job, key, everyones);
                return true;
            }
        }
        if !found {
            // All of them have ended. The next may live longer.
            self.catalog.ask_again(&job, ASKED_AGAIN, None);
        }
        true
    }

    fn bring(&self, job: &Job, disk: Option<&Disk>) {
        let build_id = job.build_id();
        let disk = disk.zip(build_id);
        if let Some(table) = disk.and_then(|(disk, id)| disk.get(id)) {
            self.catalog.install(job.number, &table, true, None);
            return;
        }
        let started = Instant::now();
        let compiled = self.compile(job);
        let took = started.elapsed();
        let is_slow = |why: &NoTable| why.hangs() && !why.others_hang();
        if !job.slow && compiled.as_ref().is_err_and(is_slow) {
            self.catalog.postpone(job.number);
            return;
        }
        self.catalog.count_compiled(took, compiled.is_ok());
        match compiled {
            Ok(compiled) => {
                if let Some((disk, id)) = disk.filter(|_| compiled.everyones) {
                    // Without it the next run compiles again.
                    let _ = disk.put(id, &compiled.bytes);
                }
                self.install(job, compiled, took);
            }
            Err(why) => self.catalog.fail(job.number, why),
        }
    }

    fn install(&self, job: &Job, compiled: Compiled, took: Duration) {
        let Compiled { table, everyones, key, held, .. } = compiled;
        self.catalog.install(job.number, &table, everyones, key);
        match held {
            Held::Nothing => {}
            Held::TooNew(file, wait) if job.build_id().is_some() => {
                self.catalog.ask_again(job, wait, Some(file));
            }
            Held::TooNew(..) => {}
            Held::Growing(file, size) => self.catalog.grows(job, file, size, took),
        }
    }

    fn compile(&self, job: &Job) -> Result<Compiled, NoTable> {
        let mut reason = NoTable::Unmapped;
        if job.kind == Kind::Vdso {
            let compiled = self.compile_file(&job.kind, vdso_file()?.into())?;
            // The kernel's own, whose image this process has.
            return Ok(Compiled { everyones: true, key: Some(VDSO_KEY), ..compiled });
        }
        let limit = if job.slow { LIMIT } else { AT_FIRST };
        for wanted in &job.wanted {
            let compiled = self
                .broker
                .open_within(wanted, limit)
                .map_err(NoTable::from)
                .and_then(|file| {
                    is_of(&job.kind, &file)?;
                    self.compile_file(&job.kind, file.into())
                })
                // By a path another file may have been found.
                .and_then(|compiled| match &job.kind {
                    Kind::File { key: Some(ExecutableKey::BuildId(id)), .. }
                        if Some(*id) != compiled.table.build_id =>
                    {
                        Err(NoTable::Replaced)
                    }
                    // Whoever comes later may have mapped another, with its path and build-id.
                    _ if !compiled.everyones && !is_still(job.owner, wanted) => {
                        Err(NoTable::OfAnotherUser)
                    }
                    _ => Ok(compiled),
                });
            match compiled {
                Ok(compiled) => return Ok(compiled),
                // It is the file that hangs, whoever has it mapped.
                Err(why) if why.hangs() => return Err(why),
                Err(why) => reason = why,
            }
        }
        Err(reason)
    }

    fn compile_file(&self, kind: &Kind, file: Arc<File>) -> Result<Compiled, NoTable> {
        // Who can have written it is not known then.
        let everyones = is_everyones(&file).unwrap_or(false);
        // Before it is read: what is written to it later makes it another.
        let (bytes, key, held) = match kind {
            Kind::Described { window, .. } => {
                let size = size(&file).unwrap_or(0);
                (self.compiler.compile_described(&file, *window)?, None, Held::Growing(file, size))
            }
            _ => {
                let key = self.keys.of(&file);
                let bytes = self.compiler.compile(&file)?;
                match key {
                    Some(Key::Known(key)) => (bytes, Some(key), Held::Nothing),
                    Some(Key::TooNew(wait)) => (bytes, None, Held::TooNew(file, wait)),
                    None => (bytes, None, Held::Nothing),
                }
            }
        };
        let table = Table::parse(&bytes)?;
        Ok(Compiled { bytes, table, everyones, key, held })
    }
}

struct Compiled {
    bytes: Vec<u8>,
    table: Table,
    /// May be used for all users, and kept for later runs.
    everyones: bool,
    key: Option<FileKey>,
    held: Held,
}

/// Why a file stays open.
enum Held {
    /// It does not.
    Nothing,
    /// It was too early to ask for the key: after this time.
    TooNew(Arc<File>, Duration),
    /// It grows, and had so many bytes.
    Growing(Arc<File>, u64),
}

/// Whether a file that is a user's was opened for a process of that user: the pid may have become
/// another's.
fn is_still(owner: Owner, wanted: &Wanted) -> bool {
    let (Wanted::Mapped { pid, .. } | Wanted::Own { pid, .. } | Wanted::Said { pid, .. }) = wanted;
    !owner.takes_everyones_only() && Owner::of_process(*pid) == owner
}

/// Whether a file without a build-id is the one that was mapped.
fn is_of(kind: &Kind, file: &File) -> Result<(), NoTable> {
    let kind = if let Kind::Described { dump, .. } = kind { dump } else { kind };
    match kind {
        Kind::File { key: Some(ExecutableKey::File(id)), .. }
            if file.metadata()?.ino() != id.inode() =>
        {
            Err(NoTable::Replaced)
        }
        Kind::File { key: None, .. } => Err(NoTable::NoIdentity),
        _ => Ok(()),
    }
}

fn vdso_file() -> Result<File, NoTable> {
    let image = vdso::image().ok_or(NoTable::NoVdso)?;
    let memory = memfd_create(c"vdso", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
    let mut file = File::from(memory);
    file.write_all(&image)?;
    Ok(file)
}
