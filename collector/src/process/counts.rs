//! Which processes count, of those that are observed. What the others do is taken off the kernel
//! and recorded nowhere. Called by `pipeline.rs`.

use std::rc::Rc;

use stackwire_model::Choice;

use super::{Process, Processes};
use crate::sched::Scheduled;

impl Processes {
    /// Only processes that fit count.
    pub fn choose(&mut self, choice: Choice) {
        self.choice = Rc::new(choice);
    }

    /// Nothing that these processes do counts until they become another program.
    pub fn await_exec(&mut self, pids: &[u32]) {
        self.unborn.extend(pids);
    }

    /// Whether what a process does now counts; it began then and is in this cgroup.
    #[must_use]
    pub fn counts(&mut self, pid: u32, start_ns: u64, cgroup_id: u64) -> bool {
        if self.unborn.contains(&pid) {
            return false;
        }
        if self.choice.is_everything() {
            return true;
        }
        let choice = Rc::clone(&self.choice);
        let had_samples = self.get(pid).is_some_and(|process| process.sampled);
        let process = self.sampled(pid, start_ns, cgroup_id);
        let fits = fits(&choice, process);
        // Who has none is not in the capture.
        process.sampled = fits || had_samples;
        fits
    }

    /// Whether what somebody did counts, by the program that it was then.
    #[must_use]
    pub fn scheduled_counts(&mut self, of: &Scheduled) -> bool {
        let before = self.before(of.pid, of.since_ns);
        let counts = before.map_or(!self.unborn.contains(&of.pid), |before| before.counts);
        counts && (self.choice.is_everything() || fits(&self.choice.clone(), &self.program_of(of)))
    }
}

fn fits(choice: &Choice, process: &Process) -> bool {
    choice.fits(&process.comm, process.cgroup.path.as_deref().unwrap_or_default())
}
