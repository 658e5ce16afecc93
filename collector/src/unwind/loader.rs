//! A loading thread: brings the tables that are wanted, the hottest first, from disk or from its compiler.
//!
//! Opens files through the broker and holds no capability; content goes from descriptor to compiler unread.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use stackwire_collector_ebpf::vma::FileKey;
use stackwire_rights::capabilities;
use stackwire_unwind::Table;

use super::catalog::{ASKED_AGAIN, Catalog, Job};
use super::compiler::Compiler;
use super::disk::Disk;
use super::known::{Key, Keys, VDSO_KEY};
use super::owner::{Owner, is_everyones};
use crate::broker::{Broker, HANGS, LIMIT, Wanted};
use crate::host::vdso;
use crate::process::executable::Kind;

/// Between two looks at what is wanted.
const PAUSE: Duration = Duration::from_millis(10);
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
    pub cools: bool,
    /// Ends the thread.
    pub stop: Arc<AtomicBool>,
}

impl Loader {
    /// Runs until told to stop. `warmed`: brings the tables of all that is mapped, used or not, and says when it has those
    /// of the beginning.
    pub fn run(self, mut warmed: Option<Sender<()>>) {
        // Started with the privileges of the caller, of which it needs none.
        let _ = capabilities::drop_all();
        let disk = self.cache.as_deref().and_then(Disk::open);
        let all = warmed.is_some();
        let mut cooled = Instant::now();
        while self.running() {
            match self.catalog.next(all) {
                Some(job) => self.bring(&job, disk.as_ref()),
                None if self.bring_idle(disk.as_ref()) => {}
                None => {
                    if self.catalog.is_settled()
                        && let Some(warmed) = warmed.take()
                    {
                        // Who waits may have begun without.
                        let _ = warmed.send(());
                    }
                    if !self.name_next() {
                        self.catalog.wait(PAUSE);
                    }
                }
            }
            if self.cools && cooled.elapsed() > Duration::from_secs(1) {
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
        match disk.get(job.build_id()) {
            Some(table) => self.catalog.install(job.number, &table, true, None),
            None => self.catalog.put_back(job.number),
        }
        true
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
                Err(why) if why.starts_with(HANGS) => return true,
                Err(_) => continue,
            };
            found = true;
            let everyones = is_everyones(&file).unwrap_or(false);
            if !everyones && !theirs {
                continue;
            }
            // Of file systems that may not answer there is no key: nothing is read of their files here.
            let key = match self.keys.of(&file) {
                Some(Key::Known(key)) => key,
                Some(Key::TooNew(wait)) => {
                    self.catalog.ask_again(&job, wait, Some(file));
                    return true;
                }
                None => continue,
            };
            // Another file may have been found than the one that was mapped, and read for the table.
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
        if let Some(table) = disk.and_then(|disk| disk.get(build_id)) {
            self.catalog.install(job.number, &table, true, None);
            return;
        }
        let started = Instant::now();
        let compiled = self.compile(job);
        let took = started.elapsed();
        if !job.slow && compiled.as_ref().is_err_and(|why| why.starts_with(HANGS)) {
            self.catalog.postpone(job.number);
            return;
        }
        self.catalog.count_compiled(took, compiled.is_ok());
        match compiled {
            Ok(Compiled { bytes, table, everyones, key, held }) => {
                if let Some(disk) = disk.filter(|_| everyones) {
                    // Without it the next run compiles again.
                    let _ = disk.put(build_id, &bytes);
                }
                self.catalog.install(job.number, &table, everyones, key);
                if let Some((file, wait)) = held.filter(|_| !build_id.is_empty()) {
                    self.catalog.ask_again(job, wait, Some(file));
                }
            }
            Err(why) => self.catalog.fail(job.number, why),
        }
    }

    fn compile(&self, job: &Job) -> Result<Compiled, String> {
        let mut reason = "no process has it mapped any more".to_owned();
        if job.kind == Kind::Vdso {
            let compiled = self.compile_file(vdso_file()?)?;
            // The kernel's own, whose image this process has.
            return Ok(Compiled { everyones: true, key: Some(VDSO_KEY), ..compiled });
        }
        let limit = if job.slow { LIMIT } else { AT_FIRST };
        for wanted in &job.wanted {
            let compiled = self
                .broker
                .open_within(wanted, limit)
                .and_then(|file| {
                    is_of(&job.kind, &file)?;
                    self.compile_file(file)
                })
                // By a path another file may have been found.
                .and_then(|compiled| match &job.kind {
                    Kind::File { build_id, .. }
                        if !build_id.is_empty() && *build_id != compiled.table.build_id =>
                    {
                        Err("its file has been replaced".to_owned())
                    }
                    // Whoever comes later may have mapped another, with its path and build-id.
                    Kind::File { .. } if !compiled.everyones && !is_still(job.owner, wanted) => {
                        Err("its file is another user's by now".to_owned())
                    }
                    _ => Ok(compiled),
                });
            match compiled {
                Ok(compiled) => return Ok(compiled),
                // It is the file that hangs, whoever has it mapped.
                Err(why) if why.starts_with(HANGS) => return Err(why),
                Err(why) => reason = why,
            }
        }
        Err(reason)
    }

    fn compile_file(&self, file: File) -> Result<Compiled, String> {
        // Who can have written it is not known then.
        let everyones = is_everyones(&file).unwrap_or(false);
        // Before it is read: what is written to it later makes it another.
        let key = self.keys.of(&file);
        let bytes = self.compiler.compile(&file)?;
        let table = Table::parse(&bytes).map_err(|error| error.to_string())?;
        let (key, held) = match key {
            Some(Key::Known(key)) => (Some(key), None),
            Some(Key::TooNew(wait)) => (None, Some((Arc::new(file), wait))),
            None => (None, None),
        };
        Ok(Compiled { bytes, table, everyones, key, held })
    }
}

struct Compiled {
    bytes: Vec<u8>,
    table: Table,
    /// May be used for all users, and kept for later runs.
    everyones: bool,
    key: Option<FileKey>,
    /// The file, where it was too early to ask for the key, and how long to wait.
    held: Option<(Arc<File>, Duration)>,
}

/// Whether a file that is a user's was opened for a process of that user: the pid may have become another's.
fn is_still(owner: Owner, wanted: &Wanted) -> bool {
    let (Wanted::Mapped { pid, .. } | Wanted::Own { pid, .. }) = wanted;
    !owner.takes_everyones_only() && Owner::of_process(*pid) == owner
}

/// Whether a file without a build-id is the one that was mapped.
fn is_of(kind: &Kind, file: &File) -> Result<(), String> {
    let Kind::File { build_id, inode, .. } = kind else { return Ok(()) };
    let found = file.metadata().map_err(|error| error.to_string())?;
    if build_id.is_empty() && found.ino() != *inode {
        return Err("its file has been replaced".to_owned());
    }
    Ok(())
}

fn vdso_file() -> Result<File, String> {
    let image = vdso::image().ok_or("this process has none")?;
    let memory = memfd_create(c"vdso", MemfdFlags::CLOEXEC).map_err(|error| error.to_string())?;
    let mut file = File::from(memory);
    file.write_all(&image).map_err(|error| error.to_string())?;
    Ok(file)
}
