//! Waits: puts the stacks a thread waited with beside how long it waited. Pure.
//!
//! The kernel side tells of each stack once, by a number, and of each wait when it is over. Called
//! by `off_cpu.rs`, in the order of time.

use rustc_hash::FxHashMap;
use stackwire_collector_ebpf::managed::{Entry, ListEnd};
use stackwire_collector_ebpf::{
    KernelEnd, SampleHeader, TOLD_STACKS, UserEnd, WAIT_WORDS, WaitState as KernelState, Waiting,
    Waker as KernelWaker,
};
use stackwire_model::{Wait, WaitState};
use zerocopy::{FromBytes, IntoBytes};

/// Words of stacks that may be kept: 8 MiB.
const MAX_WORDS: usize = 1 << 20;

/// A stack that threads wait with, raw, leaf first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Stack {
    frames: Vec<u64>,
    /// Frames of an interpreter, the innermost first.
    list: Vec<Entry>,
    end: u8,
    /// [`SampleHeader::list_end`].
    list_end: u8,
    /// The last epoch that referred to it.
    used: u64,
    /// One wait has it: its number is no hash.
    is_copied: bool,
}

/// What a thread waited with: raw frames, leaf first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stacks<'a> {
    /// User frames.
    pub user: &'a [u64],
    /// Frames of an interpreter, the innermost first.
    pub list: &'a [Entry],
    /// Kernel frames.
    pub kernel: &'a [u64],
}

/// What a sample is of, beside its header.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// How many events it stands for.
    pub count: u32,
    /// The wait it is a part of, if it is of one.
    pub wait: Option<Wait>,
    /// Who ended that: 0 = unknown, else 1 + index into `Epoch::wakers`.
    pub waker: u32,
}

impl Taken {
    /// One of an event that is sampled.
    pub const ONE: Self = Self { count: 1, wait: None, waker: 0 };
}

/// Who ended a wait, and from where.
#[derive(Clone, Copy, Debug)]
pub struct Waker<'a> {
    /// The thread, and how its stacks ended; `start_boottime_ns` is 0 if the capture is not of its
    /// process.
    pub header: SampleHeader,
    /// Its stacks.
    pub stacks: Stacks<'a>,
}

/// A wait that is over.
#[derive(Clone, Debug)]
pub struct Over<'a> {
    /// Its parts.
    pub parts: Vec<Part>,
    /// What the thread waited with.
    pub stacks: Stacks<'a>,
    /// Who ended it, if that was recorded.
    pub waker: Option<Waker<'a>>,
}

/// A part of a wait, as a sample.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Of the series, with the weight.
    pub header: SampleHeader,
    /// What it is a part of.
    pub taken: Taken,
}

/// Which stacks there are.
#[derive(Debug)]
pub struct Waits {
    by_number: FxHashMap<Key, Stack>,
    words: usize,
    /// Of those, learned in this epoch.
    learned: usize,
    epoch: u64,
    /// Place of the series of blocked time; behind it is that of runnable time.
    event: u8,
    /// Waits whose stacks did not come.
    without_stacks: u64,
}

/// A user stack's addresses mean something in its process alone; a kernel stack is of no process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    pid: u32,
    number: u64,
}

impl Stack {
    /// Of a user stack and a kernel stack with these numbers.
    fn keys(pid: u32, user: u64, kernel: u64) -> [Key; 2] {
        [Key { pid, number: user }, Key { pid: 0, number: kernel }]
    }
}

/// How long a thread waited, in the two ways there are, and how often.
struct Times {
    blocked_ns: u64,
    runnable_ns: u64,
    count: u64,
}

impl Waits {
    /// Knows none.
    #[must_use]
    pub fn new(event: u8) -> Self {
        let by_number = FxHashMap::default();
        Self { by_number, words: 0, learned: 0, epoch: 0, event, without_stacks: 0 }
    }

    /// Waits whose stacks did not come.
    #[must_use]
    pub fn without_stacks(&self) -> u64 {
        self.without_stacks
    }

    /// Whether so much was learned in this epoch that it is to end early: what nobody uses is
    /// forgotten between epochs.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.learned > MAX_WORDS
    }

    /// Learns of a stack.
    pub fn learn(&mut self, header: &SampleHeader, stacks: Stacks<'_>) {
        self.learn_one(header, stacks, false);
    }

    /// Learns of a user stack that was walked from a copy: one wait has it.
    pub fn learn_copied(&mut self, header: &SampleHeader, stacks: Stacks<'_>) {
        self.learn_one(header, stacks, true);
    }

    /// Forgets such a stack: its wait is over.
    pub fn forget_copied(&mut self, pid: u32, number: u64) {
        let key = Key { pid, number };
        if self.by_number.get(&key).is_some_and(|stack| stack.is_copied)
            && let Some(stack) = self.by_number.remove(&key)
        {
            self.words -= words(&stack);
            self.learned = self.learned.saturating_sub(words(&stack));
        }
    }

    fn learn_one(&mut self, header: &SampleHeader, stacks: Stacks<'_>, is_copied: bool) {
        let Stacks { user, list, kernel } = stacks;
        let key = Key { pid: header.pid, number: header.period };
        let (frames, end) =
            if key.pid == 0 { (kernel, header.kernel_end) } else { (user, header.user_end) };
        let list_end = header.list_end;
        // Told again because its place was taken, and now without room for all of it.
        let had_no_room = list_end == 1 + ListEnd::RingFull as u8;
        if had_no_room && self.by_number.contains_key(&key) {
            return;
        }
        let (frames, list, used) = (frames.into(), list.into(), self.epoch);
        let stack = Stack { frames, list, end, list_end, used, is_copied };
        self.words += words(&stack);
        self.learned += words(&stack);
        if let Some(before) = self.by_number.insert(key, stack) {
            self.words -= words(&before);
        }
    }

    /// The parts of a wait that is over, with its stacks. `None`: the record is not one.
    pub fn over(&mut self, header: &SampleHeader, of: &[u64]) -> Option<Over<'_>> {
        let waker = waker(of);
        let of = of.first_chunk::<WAIT_WORDS>()?;
        let &[user, kernel, blocked_ns, runnable_ns, count] = of;
        let wait = Wait { state: state(header.state), began_before: user == 0, goes_on: false };
        let times = Times { blocked_ns, runnable_ns, count };
        let of_wait = Stack::keys(header.pid, user, kernel);
        let of_waker = waker.map(|it| Stack::keys(it.pid, it.user_stack, it.kernel_stack));
        self.use_all(of_wait.iter().chain(of_waker.iter().flatten()));
        let (parts, stacks) = self.parts(header, of_wait, times, wait);
        let waker =
            waker.zip(of_waker).map(|(waker, keys)| self.waker(header.time_ns, &waker, keys));
        Some(Over { parts, stacks, waker })
    }

    /// The parts of a wait that was not over when watching ended.
    pub fn going_on(
        &mut self,
        tid: u32,
        waiting: &Waiting,
        end_ns: u64,
    ) -> (Vec<Part>, Stacks<'_>) {
        let woken_ns = if waiting.woken_ns == 0 { end_ns } else { waiting.woken_ns.min(end_ns) };
        let blocked_ns = woken_ns.saturating_sub(waiting.since_ns);
        let runnable_ns = end_ns.saturating_sub(woken_ns);
        let state = state(waiting.state as u8);
        let wait = Wait { state, began_before: waiting.user_stack == 0, goes_on: true };
        let header = header(tid, waiting, end_ns);
        // Looked at before the last wait ended, it is of another.
        let is_of_this = waiting.kernel_stack_of == waiting.since_ns;
        let kernel = if is_of_this { waiting.kernel_stack } else { 0 };
        let times = Times { blocked_ns, runnable_ns, count: 1 };
        let keys = Stack::keys(waiting.pid, waiting.user_stack, kernel);
        self.use_all(keys.iter());
        self.parts(&header, keys, times, wait)
    }

    /// Notes that the stacks of a wait that is over are in use, other than its user stack, which is
    /// being walked.
    pub fn use_other_stacks(&mut self, of: &[u64]) {
        let waker = waker(of).map(|it| Stack::keys(it.pid, it.user_stack, it.kernel_stack));
        let kernel = Key { pid: 0, number: of.get(1).copied().unwrap_or(0) };
        self.has_all([kernel].iter().chain(waker.iter().flatten()));
    }

    /// Notes that these stacks are in use.
    fn use_all<'k>(&mut self, keys: impl Iterator<Item = &'k Key>) {
        let has_all = self.has_all(keys);
        self.without_stacks += u64::from(!has_all);
    }

    fn has_all<'k>(&mut self, keys: impl Iterator<Item = &'k Key>) -> bool {
        let mut has_all = true;
        for key in keys.filter(|key| key.number != 0) {
            match self.by_number.get_mut(key) {
                Some(stack) => stack.used = self.epoch,
                None => has_all = false,
            }
        }
        has_all
    }

    fn parts(
        &self,
        header: &SampleHeader,
        keys: [Key; 2],
        times: Times,
        wait: Wait,
    ) -> (Vec<Part>, Stacks<'_>) {
        let (header, stacks) = self.with_stacks(header, keys);
        let count = u32::try_from(times.count).unwrap_or(u32::MAX);
        let taken = Taken { count, wait: Some(wait), waker: 0 };
        let parts = [times.blocked_ns, times.runnable_ns].into_iter().zip(self.event..);
        let parts = parts.filter(|&(time_ns, _)| time_ns > 0).map(|(period, event)| {
            let header = SampleHeader { period, event, ..header };
            Part { header, taken }
        });
        (parts.collect(), stacks)
    }

    fn waker(&self, time_ns: u64, waker: &KernelWaker, keys: [Key; 2]) -> Waker<'_> {
        let &KernelWaker { start_boottime_ns, pid, tid, comm, .. } = waker;
        let thread =
            SampleHeader { time_ns, start_boottime_ns, pid, tid, comm, ..SampleHeader::default() };
        let (header, stacks) = self.with_stacks(&thread, keys);
        Waker { header, stacks }
    }

    /// The stacks with these keys, and a header that says how they ended.
    fn with_stacks(&self, header: &SampleHeader, keys: [Key; 2]) -> (SampleHeader, Stacks<'_>) {
        let [user, kernel] = keys.map(|key| self.by_number.get(&key));
        let user_end = user.map_or(UserEnd::NoUserStack as u8, |user| user.end);
        let kernel_end = kernel.map_or(KernelEnd::None as u8, |kernel| kernel.end);
        let list_end = user.map_or(0, |user| user.list_end);
        let list = user.map_or(&[][..], |stack| &stack.list);
        let [user, kernel] = [user, kernel].map(|it| it.map_or(&[][..], |stack| &stack.frames));
        (SampleHeader { user_end, kernel_end, list_end, ..*header }, Stacks { user, list, kernel })
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
        self.learned = 0;
        if self.words <= MAX_WORDS {
            return;
        }
        let last = self.epoch - 1;
        for (key, _) in self.by_number.iter().filter(|(_, stacks)| stacks.used < last) {
            forget(place(key.number), key.number);
        }
        let user = |(_, of): (u32, Waiting)| Key { pid: of.pid, number: of.user_stack };
        let needed: rustc_hash::FxHashSet<Key> = waiting().into_iter().map(user).collect();
        self.by_number.retain(|key, stacks| stacks.used >= last || needed.contains(key));
        self.words = self.by_number.values().map(words).sum();
    }
}

/// The number of the user stack of a wait that is over; 0: it has none.
#[must_use]
pub fn user_stack(of: &[u64]) -> u64 {
    of.first().copied().unwrap_or(0)
}

/// Who ended a wait, if that was recorded.
#[must_use]
pub fn waker(of: &[u64]) -> Option<KernelWaker> {
    KernelWaker::read_from_bytes(of.get(WAIT_WORDS..)?.as_bytes()).ok()
}

/// Of which thread a wait is that was not over when watching ended.
#[must_use]
pub fn header(tid: u32, waiting: &Waiting, end_ns: u64) -> SampleHeader {
    SampleHeader {
        time_ns: end_ns,
        start_boottime_ns: waiting.start_boottime_ns,
        cgroup_id: waiting.cgroup_id,
        pid: waiting.pid,
        tid,
        comm: waiting.comm,
        ..SampleHeader::default()
    }
}

/// Where the kernel side notes that it told of a number: see `tell` in its `told.rs`.
fn place(number: u64) -> u32 {
    (number >> 8) as u32 & (TOLD_STACKS - 1)
}

fn words(stack: &Stack) -> usize {
    stack.frames.len() + 2 * stack.list.len() + 8
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
    fn a_wait_has_the_stacks_its_numbers_name() {
        let mut waits = Waits::new(3);
        waits.learn(&header(7, 99), Stacks { user: &[1, 2], ..Stacks::default() });
        waits.learn(&header(0, 98), Stacks { kernel: &[3], ..Stacks::default() });
        let Over { parts, stacks, waker } =
            waits.over(&header(7, 50), &[99, 98, 40, 10, 5]).unwrap();
        assert!(waker.is_none());
        assert_eq!(stacks, Stacks { user: &[1, 2], list: &[], kernel: &[3] });
        let said = |it: &Part| (it.header.event, it.header.period, it.taken.count);
        let parts: Vec<_> = parts.iter().map(said).collect();
        assert_eq!(parts, [(3, 40, 5), (4, 10, 5)]);
        // Another process's user stacks are not its.
        let Over { parts, stacks, .. } = waits.over(&header(8, 50), &[99, 98, 40, 0, 1]).unwrap();
        assert_eq!((parts.len(), stacks), (1, Stacks { user: &[], list: &[], kernel: &[3] }));
        assert_eq!(waits.without_stacks(), 1);
        assert!(waits.over(&header(8, 50), &[99, 98, 40]).is_none());
    }

    #[test]
    fn whoever_woke_a_thread_has_stacks_of_its_own() {
        let mut waits = Waits::new(3);
        waits.learn(&header(7, 99), Stacks { user: &[1, 2], ..Stacks::default() });
        waits.learn(&header(8, 97), Stacks { user: &[4], ..Stacks::default() });
        waits.learn(&header(0, 96), Stacks { kernel: &[5], ..Stacks::default() });
        let comm = *b"baker\0\0\0\0\0\0\0\0\0\0\0";
        let waker = KernelWaker {
            user_stack: 97,
            kernel_stack: 96,
            pid: 8,
            tid: 9,
            comm,
            of: 1,
            start_boottime_ns: 5,
        };
        let mut words = vec![99, 0, 40, 0, 1];
        words.extend(zerocopy::transmute_ref!(&waker) as &[u64; 7]);
        let over = waits.over(&header(7, 50), &words).unwrap();
        let found = over.waker.unwrap();
        assert_eq!(found.stacks, Stacks { user: &[4], list: &[], kernel: &[5] });
        assert_eq!((found.header.pid, found.header.tid, found.header.comm), (8, 9, comm));
        assert_eq!(over.stacks.user, [1, 2]);
        assert_eq!(waits.without_stacks(), 0);
    }

    #[test]
    fn a_stack_keeps_its_list_when_there_is_no_room_to_tell_it_again() {
        let mut waits = Waits::new(0);
        let list = [Entry { code: 1, rest: 2 }];
        let whole = SampleHeader { list_end: 1, ..header(7, 99) };
        waits.learn(&whole, Stacks { user: &[1], list: &list, kernel: &[] });
        let cut = SampleHeader { list_end: 1 + ListEnd::RingFull as u8, ..whole };
        waits.learn(&cut, Stacks { user: &[1], ..Stacks::default() });
        let over = waits.over(&header(7, 50), &[99, 0, 40, 0, 1]).unwrap();
        assert_eq!((over.stacks.list, over.parts[0].header.list_end), (&list[..], 1));
    }

    #[test]
    fn a_kernel_stack_is_of_the_wait_it_was_looked_at_in() {
        let mut waits = Waits::new(0);
        waits.learn(&header(0, 98), Stacks { kernel: &[3], ..Stacks::default() });
        for (kernel_stack_of, expected) in [(20, &[3][..]), (10, &[][..])] {
            let waiting =
                Waiting { since_ns: 20, kernel_stack: 98, kernel_stack_of, ..Waiting::default() };
            assert_eq!(waits.going_on(9, &waiting, 30).1.kernel, expected);
        }
    }

    #[test]
    fn what_goes_on_is_told_up_to_the_end() {
        let mut waits = Waits::new(3);
        for (since_ns, woken_ns, expected) in [
            (20, 0, &[(3, 10)][..]),
            (20, 24, &[(3, 4), (4, 6)]),
            // Woken, and put to sleep, after the end and before it was no longer watched.
            (20, 31, &[(3, 10)]),
            (31, 0, &[]),
        ] {
            let waiting = Waiting { since_ns, woken_ns, ..Waiting::default() };
            let (parts, _) = waits.going_on(9, &waiting, 30);
            let parts: Vec<_> =
                parts.iter().map(|part| (part.header.event, part.header.period)).collect();
            assert_eq!(parts, expected);
        }
    }

    #[test]
    fn stacks_are_kept_while_somebody_waits_with_them() {
        let mut waits = Waits::new(0);
        let frames = vec![5; MAX_WORDS / 2 + 1];
        for number in [0x100, 0x200, 0x300] {
            waits.learn(&header(7, number), Stacks { user: &frames, ..Stacks::default() });
        }
        assert!(waits.is_full());
        let told = std::cell::RefCell::new(Vec::new());
        let waiting = || vec![(9, Waiting { pid: 7, user_stack: 0x200, ..Waiting::default() })];
        waits.end_epoch(|place, _| told.borrow_mut().push(place), waiting);
        assert_eq!(waits.by_number.len(), 3, "used in the epoch that ended");
        assert!(!waits.is_full(), "epochs do not end early for what stays");
        waits.over(&header(7, 1), &[0x300, 0, 1, 0, 1]);
        waits.end_epoch(|place, _| told.borrow_mut().push(place), waiting);
        assert_eq!(waits.by_number.len(), 2);
        let mut told = told.take();
        told.sort_unstable();
        assert_eq!(told, [1, 2]);
    }
}
