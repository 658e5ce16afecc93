//! How threads wait, and which part of a wait a capture saw.

use std::str::FromStr;
use std::time::Duration;

use crate::UnknownName;
use crate::sampling::by_name;

/// How a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WaitState {
    /// For an event; signals interrupt it.
    Sleep,
    /// For a disk or a lock of the kernel; nothing interrupts it.
    Disk,
    /// A signal or a debugger stopped it.
    Stopped,
    /// It could run, and another thread was given the CPU.
    Preempted,
}

impl WaitState {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Sleep, Self::Disk, Self::Stopped, Self::Preempted];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sleep => "sleep",
            Self::Disk => "disk",
            Self::Stopped => "stopped",
            Self::Preempted => "preempted",
        }
    }
}

impl FromStr for WaitState {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        by_name(Self::ALL, Self::name, name)
    }
}

/// Which waits of threads are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffCpu {
    /// Of threads that wait in these ways.
    pub states: Vec<WaitState>,
    /// Waits of at least this length are all taken; of shorter ones a share, so that totals stay
    /// as they are.
    pub threshold: Duration,
    /// Record who ended each wait, and from which stack.
    pub wakers: bool,
}

impl Default for OffCpu {
    fn default() -> Self {
        let states = vec![WaitState::Sleep, WaitState::Disk];
        Self { states, threshold: Duration::from_millis(1), wakers: false }
    }
}

/// A wait, or the part of it that a capture saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wait {
    /// How the thread waits.
    pub state: WaitState,
    /// It began before the capture did.
    pub began_before: bool,
    /// It was not over when the capture ended.
    pub goes_on: bool,
}
