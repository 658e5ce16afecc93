//! Where threads wait: adds waits to the epoch as they end, and at the end those that go on. How a
//! record and its stacks become a wait, `waits.rs` says. Called by `adding.rs`, at the end by
//! `pipeline.rs`.

use rustc_hash::FxHashMap;
use stackwire_collector_ebpf::{RecordKind, SampleHeader, Waiting};

use crate::context::Context;
use crate::late::Late;
use crate::process::Process;
use crate::sampler::{Batch, RawSample, Sampler};
use crate::waits::{self, Over, Stacks, Waits};

/// What is known of waits.
#[derive(Debug)]
pub struct OffCpu {
    waits: Waits,
    /// User stacks that are being walked, by process and number, and the waits they are of.
    walked: FxHashMap<(u32, u64), Vec<Held>>,
    /// Parts of waits that were not over.
    going_on: u64,
    /// Taken, and of no process that counts.
    uncounted: u64,
}

/// A wait whose user stack is being walked.
#[derive(Debug)]
enum Held {
    /// It is over.
    Over {
        /// The record.
        header: SampleHeader,
        words: Vec<u64>,
        /// The image of the process of who ended it, if it was known then.
        waker: Option<u64>,
    },
    /// It goes on.
    GoesOn { tid: u32, waiting: Waiting, end_ns: u64 },
}

impl OffCpu {
    /// Knows of none. `event` is the place of the series of blocked time; behind it is that of
    /// runnable time.
    #[must_use]
    pub fn new(event: u8) -> Self {
        Self { waits: Waits::new(event), walked: FxHashMap::default(), going_on: 0, uncounted: 0 }
    }

    /// Parts of waits that were added though they are not over.
    #[must_use]
    pub fn going_on(&self) -> u64 {
        self.going_on
    }

    /// Parts of waits that the kernel side counted and that are of no process that counts.
    #[must_use]
    pub fn uncounted(&self) -> u64 {
        self.uncounted
    }

    /// Waits whose stacks did not come.
    #[must_use]
    pub fn without_stacks(&self) -> u64 {
        self.waits.without_stacks()
    }

    /// Whether so much was learned in this epoch that it is to end early.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.waits.is_full()
    }

    /// Learns of a stack, or adds a wait that is over.
    pub fn take(&mut self, record: &RawSample, batch: &Batch, context: &mut Context<'_>) {
        let (header, user) = (&record.header, batch.user(record));
        if header.kind == RecordKind::Stack as u8 {
            let (list, kernel) = (batch.list(record), batch.kernel(record));
            self.waits.learn(header, Stacks { user, list, kernel });
            return;
        }
        if let Some(held) = self.walked.get_mut(&(header.pid, waits::user_stack(user)))
            && context.processes.counts(header)
        {
            let waker = waits::waker(user).and_then(|it| context.processes.image(it.pid));
            held.push(Held::Over { header: *header, words: user.to_vec(), waker });
            self.waits.use_other_stacks(user);
            return;
        }
        let Some(mut over) = self.waits.over(header, user) else { return };
        if !context.processes.counts(header) {
            let parts = over.parts.iter().map(|part| u64::from(part.taken.count));
            self.uncounted += parts.sum::<u64>();
            return;
        }
        add(&mut over, None, context);
        self.waits.forget_copied(header.pid, waits::user_stack(user));
    }

    /// A user stack is being walked: waits that refer to it are held until it is learned.
    pub fn expect(&mut self, stack: &SampleHeader) {
        self.walked.entry((stack.pid, stack.period)).or_default();
    }

    /// Learns of a user stack that has been walked, and adds the waits that were held for it.
    pub fn learn_late(&mut self, stack: &Late, user: &[u64], context: &mut Context<'_>) {
        let stacks = Stacks { user, list: &stack.list.entries, kernel: &[] };
        self.waits.learn_copied(&stack.header, stacks);
        let SampleHeader { pid, period: number, .. } = stack.header;
        for held in self.walked.remove(&(pid, number)).into_iter().flatten() {
            match held {
                Held::Over { header, words, waker } => {
                    let Some(mut over) = self.waits.over(&header, &words) else { continue };
                    // Of a program that its process has been since, addresses mean something else.
                    if let Some(it) = &mut over.waker
                        && let Some((then, now)) = waker.zip(context.processes.image(it.header.pid))
                        && then != now
                    {
                        it.header.start_boottime_ns = 0;
                    }
                    add(&mut over, Some(&stack.process), context);
                    self.waits.forget_copied(pid, number);
                }
                Held::GoesOn { tid, waiting, end_ns } => {
                    self.add_one_going_on(tid, &waiting, end_ns, Some(&stack.process), context);
                }
            }
        }
    }

    /// Adds the waits that are not over, up to when watching ended.
    pub fn add_going_on(
        &mut self,
        sampler: &mut dyn Sampler,
        end_ns: u64,
        context: &mut Context<'_>,
    ) {
        for (tid, mut waiting) in sampler.waiting() {
            if waiting.start_boottime_ns == 0 {
                let process = context.processes.get(waiting.pid);
                waiting.start_boottime_ns = process.map_or(0, |process| process.start_ns);
            }
            let header = waits::header(tid, &waiting, end_ns);
            if !context.processes.counts(&header) {
                continue;
            }
            if let Some(held) = self.walked.get_mut(&(waiting.pid, waiting.user_stack)) {
                held.push(Held::GoesOn { tid, waiting, end_ns });
                continue;
            }
            self.add_one_going_on(tid, &waiting, end_ns, None, context);
        }
    }

    fn add_one_going_on(
        &mut self,
        tid: u32,
        waiting: &Waiting,
        end_ns: u64,
        then: Option<&Process>,
        context: &mut Context<'_>,
    ) {
        let (parts, stacks) = self.waits.going_on(tid, waiting, end_ns);
        self.going_on += parts.len() as u64;
        add(&mut Over { parts, stacks, waker: None }, then, context);
    }

    /// Begins the next epoch: forgets stacks that nobody refers to, when there are too many.
    pub fn end_epoch(&mut self, sampler: &dyn Sampler) {
        self.waits.end_epoch(|place, number| sampler.forget(place, number), || sampler.waiting());
    }
}

/// Adds a wait.
fn add(over: &mut Over<'_>, then: Option<&Process>, context: &mut Context<'_>) {
    let Context { codes, processes, layout, epoch } = context;
    // Of another process's thread there is its name alone.
    if let Some(waker) = &mut over.waker
        && waker.header.start_boottime_ns != 0
        && !processes.counts(&waker.header)
    {
        waker.header.start_boottime_ns = 0;
    }
    epoch.add_wait(over, then, codes, processes, layout);
}
