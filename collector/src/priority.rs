//! Raises the priority of a thread. Until sampling begins, whatever runs beside the collector is
//! not seen; until samples are taken out of their rings, those that come are lost.
//!
//! Needs CAP_SYS_NICE; without it nothing changes. `session/prepare.rs` uses it while the programs
//! are loaded, which takes 50 ms of CPU time. On a host with busy CPUs, three times as long went
//! by. The thread of `sampler/rings.rs` has it for good.

use rustix::process::{getpriority_process, setpriority_process};

/// The calling thread runs before others while this lives. So do threads it starts meanwhile, for
/// as long as they live.
#[derive(Debug)]
pub struct Raised {
    /// The nice value to go back to; `None`: it was not changed.
    before: Option<i32>,
}

/// The nice value that weighs most: sched(7).
const HIGHEST: i32 = -20;

impl Raised {
    /// Raises the priority of the calling thread.
    #[must_use]
    pub fn for_now() -> Self {
        // Of no process: of the calling thread, as Linux has it (setpriority(2), "C library/kernel
        // differences").
        let before = getpriority_process(None).ok();
        Self { before: before.filter(|_| setpriority_process(None, HIGHEST).is_ok()) }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // To lower it takes no capability.
            let _ = setpriority_process(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_priority_is_what_it_was_afterwards() {
        let before = getpriority_process(None).unwrap();
        let raised = Raised::for_now();
        let meanwhile = getpriority_process(None).unwrap();
        assert_eq!(meanwhile, if raised.before.is_some() { HIGHEST } else { before });
        drop(raised);
        assert_eq!(getpriority_process(None).unwrap(), before);
    }
}
