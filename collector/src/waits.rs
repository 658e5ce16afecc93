//! Waits: puts the stacks a thread waited with beside how long it waited. Pure.
//!
//! The kernel side tells of each stack once, by a number, and of each wait when it is over. Called
//! by `pipeline.rs`, which has merged both by time.

use rustc_hash::FxHashMap;
use stackwire_collector_ebpf::{
    KernelEnd, SampleHeader, TOLD_STACKS, UserEnd, WAIT_WORDS, WaitState as KernelState, Waiting,
};
use stackwire_model::{Wait, WaitState};

/// Words of stacks that may be kept: 8 MiB.
const MAX_WORDS: usize = 1 << 20;

/// User and kernel stack of a thread that waits, raw, leaf first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stacks {
    /// User frames.
    pub user: Vec<u64>,
    /// Kernel frames.
    pub kernel: Vec<u64>,
    user_end: u8,
    kernel_end: u8,
    /// The last epoch that referred to it.
    used: u64,
}

/// A part of a wait, as a sample.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Of the series, with the weight.
    pub header: SampleHeader,
    /// What it is a part of.
    pub wait: Wait,
}

/// Which stacks there are.
#[derive(Debug)]
pub struct Waits {
    by_number: FxHashMap<Key, Stacks>,
    words: usize,
    epoch: u64,
    /// Place of the series of blocked time; behind it is that of runnable time.
    event: u8,
    /// Waits whose stacks did not come.
    without_stacks: u64,
}

/// A stack's addresses mean something in its process alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    pid: u32,
    number: u64,
}

impl Waits {
    /// Knows none.
    #[must_use]
    pub fn new(event: u8) -> Self {
        let by_number = FxHashMap::default();
        Self { by_number, words: 0, epoch: 0, event, without_stacks: 0 }
    }

    /// Waits whose stacks did not come.
    #[must_use]
    pub fn without_stacks(&self) -> u64 {
        self.without_stacks
    }

    /// Learns of stacks.
    pub fn learn(&mut self, header: &SampleHeader, user: &[u64], kernel: &[u64]) {
        let key = Key { pid: header.pid, number: header.period };
        let stacks = Stacks {
            user: user.into(),
            kernel: kernel.into(),
            user_end: header.user_end,
            kernel_end: header.kernel_end,
            used: self.epoch,
        };
        self.words += words(&stacks);
        if let Some(before) = self.by_number.insert(key, stacks) {
            self.words -= words(&before);
        }
    }

    /// The parts of a wait that is over, with its stacks. `None`: the record is not one.
    pub fn over(&mut self, header: &SampleHeader, of: &[u64]) -> Option<(Vec<Part>, &Stacks)> {
        let &[number, blocked_ns, runnable_ns] = of.first_chunk::<WAIT_WORDS>()?;
        let wait = Wait { state: state(header.state), began_before: number == 0, goes_on: false };
        Some(self.parts(header, number, [blocked_ns, runnable_ns], wait))
    }

    /// The parts of a wait that is not over, up to now.
    pub fn going_on(&mut self, tid: u32, waiting: &Waiting, now_ns: u64) -> (Vec<Part>, &Stacks) {
        let woken_ns = if waiting.woken_ns == 0 { now_ns } else { waiting.woken_ns };
        let blocked_ns = woken_ns.saturating_sub(waiting.since_ns);
        let runnable_ns = now_ns.saturating_sub(woken_ns);
        let state = state(waiting.state as u8);
        let wait = Wait { state, began_before: waiting.stack == 0, goes_on: true };
        let header = SampleHeader {
            time_ns: now_ns,
            start_boottime_ns: waiting.start_boottime_ns,
            cgroup_id: waiting.cgroup_id,
            pid: waiting.pid,
            tid,
            comm: waiting.comm,
            ..SampleHeader::default()
        };
        self.parts(&header, waiting.stack, [blocked_ns, runnable_ns], wait)
    }

    fn parts(
        &mut self,
        header: &SampleHeader,
        number: u64,
        times_ns: [u64; 2],
        wait: Wait,
    ) -> (Vec<Part>, &Stacks) {
        static NONE: Stacks = Stacks {
            user: Vec::new(),
            kernel: Vec::new(),
            user_end: UserEnd::NoUserStack as u8,
            kernel_end: KernelEnd::None as u8,
            used: 0,
        };
        let found = self.by_number.get_mut(&Key { pid: header.pid, number });
        self.without_stacks += u64::from(found.is_none() && number != 0);
        let stacks = match found {
            Some(stacks) => {
                stacks.used = self.epoch;
                &*stacks
            }
            None => &NONE,
        };
        let parts = times_ns.into_iter().zip(self.event..).filter(|&(time_ns, _)| time_ns > 0);
        let parts = parts.map(|(period, event)| {
            let (user_end, kernel_end) = (stacks.user_end, stacks.kernel_end);
            Part { header: SampleHeader { period, event, user_end, kernel_end, ..*header }, wait }
        });
        (parts.collect(), stacks)
    }

    /// Begins the next epoch. When there are too many stacks, forgets those that neither this epoch
    /// nor a thread that still waits refers to. `forget` is told the place of each in the kernel
    /// side's table of what was told, before `waiting` is asked.
    pub fn end_epoch(
        &mut self,
        forget: impl Fn(u32, u64),
        waiting: impl FnOnce() -> Vec<(u32, Waiting)>,
    ) {
        self.epoch += 1;
        if self.words <= MAX_WORDS {
            return;
        }
        let last = self.epoch - 1;
        for (key, _) in self.by_number.iter().filter(|(_, stacks)| stacks.used < last) {
            forget(place(key.number), key.number);
        }
        let key = |(_, of): (u32, Waiting)| Key { pid: of.pid, number: of.stack };
        let needed: rustc_hash::FxHashSet<Key> = waiting().into_iter().map(key).collect();
        self.by_number.retain(|key, stacks| stacks.used >= last || needed.contains(key));
        self.words = self.by_number.values().map(words).sum();
    }
}

/// Where the kernel side notes that it told of a number: see `tell` in its `off_cpu.rs`.
fn place(number: u64) -> u32 {
    (number >> 8) as u32 & (TOLD_STACKS - 1)
}

fn words(stacks: &Stacks) -> usize {
    stacks.user.len() + stacks.kernel.len() + 16
}

fn state(number: u8) -> WaitState {
    match number {
        _ if number == KernelState::Disk as u8 => WaitState::Disk,
        _ if number == KernelState::Stopped as u8 => WaitState::Stopped,
        _ if number == KernelState::Preempted as u8 => WaitState::Preempted,
        _ => WaitState::Sleep,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(pid: u32, period: u64) -> SampleHeader {
        SampleHeader { pid, period, ..SampleHeader::default() }
    }

    #[test]
    fn a_wait_has_the_stacks_its_number_names() {
        let mut waits = Waits::new(3);
        waits.learn(&header(7, 99), &[1, 2], &[3]);
        let (parts, stacks) = waits.over(&header(7, 50), &[99, 40, 10]).unwrap();
        assert_eq!((&stacks.user[..], &stacks.kernel[..]), (&[1, 2][..], &[3][..]));
        let parts: Vec<_> = parts.iter().map(|it| (it.header.event, it.header.period)).collect();
        assert_eq!(parts, [(3, 40), (4, 10)]);
        // Another process's are not its.
        let (parts, stacks) = waits.over(&header(8, 50), &[99, 40, 0]).unwrap();
        assert_eq!((parts.len(), stacks.user.len()), (1, 0));
        assert_eq!(waits.without_stacks(), 1);
        assert!(waits.over(&header(8, 50), &[99, 40]).is_none());
    }

    #[test]
    fn stacks_are_kept_while_somebody_waits_with_them() {
        let mut waits = Waits::new(0);
        let frames = vec![5; MAX_WORDS / 2 + 1];
        for number in [0x100, 0x200, 0x300] {
            waits.learn(&header(7, number), &frames, &[]);
        }
        let told = std::cell::RefCell::new(Vec::new());
        let waiting = || vec![(9, Waiting { pid: 7, stack: 0x200, ..Waiting::default() })];
        waits.end_epoch(|place, _| told.borrow_mut().push(place), waiting);
        assert_eq!(waits.by_number.len(), 3, "used in the epoch that ended");
        waits.over(&header(7, 1), &[0x300, 1, 0]);
        waits.end_epoch(|place, _| told.borrow_mut().push(place), waiting);
        assert_eq!(waits.by_number.len(), 2);
        let mut told = told.take();
        told.sort_unstable();
        assert_eq!(told, [1, 2]);
    }
}
