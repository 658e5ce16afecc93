//! What processes were before: the programs they ran in this epoch and run no more, and those that
//! do not count yet. Kept for sums that come at the end of an epoch, as `--pmu` has them. Called by
//! `scheduling.rs` and `batch.rs`.

use std::collections::HashMap;

use super::{Mappings, Process, Processes};
use crate::sched::Scheduled;
use crate::sources::record::comm_text;

/// A program that another has taken the place of.
#[derive(Clone, Debug)]
pub struct Before {
    until_ns: u64,
    program: Process,
    /// What it did counts.
    pub counts: bool,
}

impl Processes {
    /// Keeps what processes were before they became another program, until the epoch ends.
    pub fn keep_before(&mut self) {
        self.before = Some(HashMap::new());
    }

    /// What had this number at this time, if something else has it by now. Needs
    /// [`Processes::keep_before`].
    #[must_use]
    pub fn before(&self, pid: u32, time_ns: u64) -> Option<&Before> {
        let programs = self.before.as_ref()?.get(&pid)?;
        programs.iter().find(|before| time_ns < before.until_ns)
    }

    /// The program that somebody was when met. It is made up where nobody knows it any more.
    pub fn program_of(&mut self, of: &Scheduled) -> Process {
        let (pid, start_ns, time_ns) = (of.pid, of.start_boottime_ns, of.since_ns);
        let is_it = |process: &Process| process.start_ns == 0 || process.start_ns == start_ns;
        let now = self.by_pid.get(&pid);
        // It has taken the number since. Of one that was never sampled the start is not known.
        let is_later = now.is_some_and(|now| {
            now.start_ns == 0 && now.witnessed && now.generation == 0 && time_ns < now.since_ns
        });
        let mut program = match self.before(pid, time_ns) {
            Some(before) if is_it(&before.program) => before.program.clone(),
            None if !is_later => self.sampled(pid, start_ns, of.cgroup_id).clone(),
            _ => {
                self.next_image += 1;
                Process::new(self.next_image, pid, String::new(), Mappings::Gone)
            }
        };
        program.start_ns = start_ns;
        if of.host_pid != 0 {
            program.host_pid = of.host_pid;
        }
        // One that ended before anybody read its name.
        if program.comm.is_empty() {
            program.comm = comm_text(&of.comm);
        }
        program
    }

    /// Keeps what a process was until this time, if it was something and somebody asks.
    pub(super) fn keep(&mut self, pid: u32, time_ns: u64) {
        if let Some(before) = &mut self.before
            && let Some(process) = self.by_pid.get(&pid)
        {
            let counts = !self.unborn.contains(&pid);
            let program = process.clone();
            before.entry(pid).or_default().push(Before { until_ns: time_ns, program, counts });
        }
    }
}
