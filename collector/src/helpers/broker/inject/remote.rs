//! The way to Python 3.14: its own interface for debuggers, PEP 768. A file is named to the main
//! thread, which runs it between two instructions of Python. No thread is stopped.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, fstat, openat, openat2, unlinkat};
use stackwire_model::PythonOutcome;

use super::Places;
use super::process::Process;
use crate::helpers::interpreter::RemoteOffsets;

/// `_PY_EVAL_PLEASE_STOP_BIT` of Include/internal/pycore_ceval.h.
const PLEASE_STOP: u8 = 1 << 5;
/// Bytes of a place for what is said; its second half names who has it.
const ROOM: u64 = 32;
/// Directories of a process where its user finds a file of ours.
const DIRECTORIES: [&str; 3] = ["tmp", "var/tmp", "dev/shm"];

/// The thread that is asked.
pub(super) struct Remote<'p> {
    process: &'p Process,
    offsets: &'p RemoteOffsets,
    /// Its `PyThreadState`.
    thread: u64,
}

/// A file in a process's root that is removed when it is dropped.
pub(super) struct Script {
    directory: File,
    name: String,
    /// As the process has it.
    path: String,
}

impl<'p> Remote<'p> {
    /// Finds the main thread of the first interpreter.
    ///
    /// # Errors
    /// [`PythonOutcome::Refused`] when this is switched off.
    pub(super) fn find(process: &'p Process, places: &'p Places) -> Result<Self, PythonOutcome> {
        let offsets = &places.remote;
        let runtime = places.runtime;
        let pointer = |at: u64| {
            let read = process.read(at).map(u64::from_ne_bytes);
            read.filter(|&to| to != 0).ok_or(PythonOutcome::Unknown)
        };
        let interpreter = pointer(runtime.wrapping_add(offsets.interpreters))?;
        let is_enabled = process.read::<4>(interpreter.wrapping_add(offsets.enabled));
        if is_enabled == Some([0; 4]) {
            return Err(PythonOutcome::Refused);
        }
        if process.state(process.pid()) == Some('T') {
            return Err(PythonOutcome::Stopped);
        }
        let thread = pointer(interpreter.wrapping_add(offsets.main_thread))?;
        Ok(Self { process, offsets, thread })
    }

    /// Where in its memory is room for what is said, which lives as long as the thread: behind the
    /// path. None: other captures have all places.
    pub(super) fn room(&self) -> Option<u64> {
        let half = self.offsets.path_size / 2;
        let places = (0..half / ROOM).map(|place| half + place * ROOM);
        places
            .map(|offset| self.path().wrapping_add(offset))
            .find(|at| self.process.read(at.wrapping_add(ROOM / 2)) == Some([0; 16]))
    }

    /// Has it run a file.
    ///
    /// # Errors
    /// When it has ended.
    pub(super) fn run(&self, script: &Script) -> Result<(), PythonOutcome> {
        self.process.write(&[script.path.as_bytes(), &[0]].concat(), self.path())?;
        self.process.write(&1i32.to_ne_bytes(), self.pending())?;
        // A bit that another thread sets at this very moment is lost, as with Python's own
        // sys.remote_exec(): a signal is then handled when the next one comes. Above the lowest
        // byte there is a version, which must not be written back.
        let breaker = self.thread.wrapping_add(self.offsets.eval_breaker);
        let [bits] = self.process.read(breaker).ok_or(PythonOutcome::Ended)?;
        self.process.write(&[bits | PLEASE_STOP], breaker)
    }

    /// Has it run nothing, if it has not begun.
    pub(super) fn cancel(&self) {
        // It may have ended.
        let _ = self.process.write(&0i32.to_ne_bytes(), self.pending());
    }

    /// Whether what it is to run is still to be run.
    pub(super) fn is_pending(&self) -> bool {
        self.process.read(self.pending()).is_some_and(|it| it != [0; 4])
    }

    fn pending(&self) -> u64 {
        self.thread.wrapping_add(self.offsets.support).wrapping_add(self.offsets.pending)
    }

    fn path(&self) -> u64 {
        self.thread.wrapping_add(self.offsets.support).wrapping_add(self.offsets.path)
    }
}

impl Script {
    /// Writes one where the process finds it. `random` makes its name.
    ///
    /// # Errors
    /// [`PythonOutcome::NoScript`]: it can be written in none of the directories.
    pub(super) fn write(
        process: &Process,
        random: &[u8; 16],
        text: &str,
    ) -> Result<Self, PythonOutcome> {
        let root = process.root().map_err(|_error| PythonOutcome::Ended)?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let name = format!("stackwire-{:032x}.py", u128::from_ne_bytes(*random));
        for directory in DIRECTORIES {
            let path = format!("/{directory}/{name}");
            let made = openat2(
                &root,
                directory,
                flags | OFlags::DIRECTORY,
                Mode::empty(),
                ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
            )
            .map_err(io::Error::from)
            .and_then(|directory| Self::write_in(directory.into(), &name, path, text));
            if let Ok(script) = made {
                return Ok(script);
            }
        }
        Err(PythonOutcome::NoScript)
    }

    fn write_in(directory: File, name: &str, path: String, text: &str) -> io::Result<Self> {
        // What a process has mounted there may be a directory of others. Where the sticky bit is
        // missing, they may put another file in its place.
        let mode = Mode::from_raw_mode(fstat(&directory)?.st_mode);
        if !mode.contains(Mode::WOTH | Mode::SVTX) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        let file = openat(directory.as_fd(), name, flags, mode)?;
        let script = Self { directory, name: name.to_owned(), path };
        // Whatever our umask is, its user reads it.
        rustix::fs::fchmod(&file, mode)?;
        File::from(file).write_all(text.as_bytes())?;
        Ok(script)
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        // Somebody may have tidied up.
        let _ = unlinkat(self.directory.as_fd(), &self.name, AtFlags::empty());
    }
}
