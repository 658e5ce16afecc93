//! Which processes count, of those that are observed. What the others do is taken off the kernel
//! and recorded nowhere. Called by `pipeline.rs` and `scheduling.rs`.

use std::rc::Rc;

use stackwire_collector_ebpf::SampleHeader;
use stackwire_model::Choice;

use super::{Process, Processes};
use crate::sched::Scheduled;
use crate::sources::record::comm_text;

impl Processes {
    /// Only processes that fit count.
    pub fn choose(&mut self, choice: Choice) {
        self.choice = Rc::new(choice);
    }

    /// Nothing that these processes do counts until they become another program.
    pub fn await_exec(&mut self, pids: &[u32]) {
        self.unborn.extend(pids);
    }

    /// Whether what a thread does now counts: of its record the process, its start and its cgroup
    /// are looked at, and the name where that of the process is not known.
    #[must_use]
    pub fn counts(&mut self, header: &SampleHeader) -> bool {
        let pid = header.pid;
        if self.unborn.contains(&pid) {
            return false;
        }
        if self.choice.is_everything() {
            return true;
        }
        let choice = Rc::clone(&self.choice);
        // Perf events do not say it.
        let start_ns = match header.start_boottime_ns {
            0 => self.start_of(pid),
            known => known,
        };
        let had_samples = self.had_samples(pid);
        let process = self.sampled(pid, start_ns, header.cgroup_id);
        let fits = if process.comm.is_empty() {
            choice.fits(&comm_text(&header.comm), cgroup_path(process))
        } else {
            choice.fits(&process.comm, cgroup_path(process))
        };
        process.sampled = fits || had_samples == Some(process.image);
        fits
    }

    /// Whether what somebody did counts, by the program that it was then.
    #[must_use]
    pub fn scheduled_counts(&mut self, of: &Scheduled) -> bool {
        let before = self.before(of.pid, of.since_ns);
        let counts = before.map_or(!self.unborn.contains(&of.pid), |before| before.counts);
        if !counts || self.choice.is_everything() {
            return counts;
        }
        let choice = Rc::clone(&self.choice);
        let had_samples = self.had_samples(of.pid);
        let program = self.program_of(of);
        let fits = choice.fits(&program.comm, cgroup_path(&program));
        if let Some(process) = self.by_pid.get_mut(&of.pid).filter(|_| !fits) {
            process.sampled = had_samples == Some(process.image);
        }
        fits
    }

    /// Whether a process counts that nothing is known of but its name.
    #[must_use]
    pub fn counts_by_name(&self, process: &Process) -> bool {
        !self.unborn.contains(&process.pid) && self.choice.fits(&process.comm, "")
    }

    /// Whether all processes count.
    #[must_use]
    pub fn all_count(&self) -> bool {
        self.choice.is_everything()
    }

    /// The image of a process that has samples. Who has none is not in the capture.
    fn had_samples(&self, pid: u32) -> Option<u64> {
        self.get(pid).filter(|process| process.sampled).map(|process| process.image)
    }
}

fn cgroup_path(process: &Process) -> &str {
    process.cgroup.path.as_deref().unwrap_or_default()
}
