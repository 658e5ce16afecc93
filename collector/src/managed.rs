//! Frames of interpreters: their places among the native frames. Pure. Which function each is of,
//! `codes.rs` knows. Called by `batch.rs`, and by those who walk stacks.

use stackwire_collector_ebpf::managed::{
    self, ANY, EVALUATOR, Entry, Evaluator, NOT_FOUND, OF_RUBY,
};
use stackwire_collector_ebpf::{SampleHeader, UserEnd};
use stackwire_model::{EndReason, ListEnd};

use crate::codes::{Codes, Of};
use crate::normalize::{Frame, Stack};

/// Frames of an interpreter, as the kernel side hands them over.
#[derive(Clone, Debug, Default)]
pub struct List {
    /// The innermost first.
    pub entries: Vec<Entry>,
    /// Where evaluators are known by their code.
    pub evaluator: Evaluator,
}

/// A user stack, before its frames are put together.
#[derive(Clone, Copy, Debug)]
pub struct UserStack<'a> {
    /// Native frames, leaf first.
    pub native: &'a [u64],
    /// Frames of an interpreter, the innermost first, and what is known of their functions.
    pub managed: Option<(&'a [Entry], &'a Codes)>,
}

impl<'a> UserStack<'a> {
    /// One without frames of an interpreter.
    #[must_use]
    pub fn native(native: &'a [u64]) -> Self {
        Self { native, managed: None }
    }
}

/// Puts the frames of an interpreter in their places in a stack of a process.
pub fn insert(codes: &Codes, of: Of, entries: &[Entry], stack: &mut Stack) {
    put(entries, stack, |entry| codes.frame(of, entry));
}

/// In front of each evaluator's frame come those of the functions it runs. What was found of none
/// comes last, where the native walk has not found the root.
fn put(entries: &[Entry], stack: &mut Stack, mut frame: impl FnMut(&Entry) -> Frame) {
    let is_whole = stack.end == EndReason::Root;
    // One of several is, and nothing tells which.
    if entries.iter().any(|entry| entry.rest == ANY && is_lost(entry, entries, is_whole)) {
        return;
    }
    let native = std::mem::take(&mut stack.frames);
    let mut native = native.into_iter();
    let (mut waiting, mut taken) = (Vec::new(), 0);
    for entry in in_order(entries).into_iter().flatten() {
        if entry.code & EVALUATOR == 0 {
            waiting.push(frame(entry));
            continue;
        }
        let at = (entry.code & NOT_FOUND) as usize;
        if at < taken || at - taken >= native.len() {
            continue;
        }
        stack.frames.extend(native.by_ref().take(at - taken));
        taken = at;
        stack.frames.append(&mut waiting);
    }
    stack.frames.extend(native);
    if stack.end != EndReason::Root {
        stack.frames.append(&mut waiting);
    }
}

/// What each evaluator runs, the innermost evaluator first: functions of several interpreters may
/// run inside each other, and each has a list of its own.
fn in_order(entries: &[Entry]) -> Vec<&[Entry]> {
    let mut runs: Vec<&[Entry]> =
        entries.split_inclusive(|entry| entry.code & EVALUATOR != 0).collect();
    let evaluator = |run: &&[Entry]| match run.last() {
        Some(last) if last.code & EVALUATOR != 0 => last.code,
        _ => u64::MAX,
    };
    runs.sort_by_key(evaluator);
    runs
}

/// A native frame that is walked.
#[derive(Clone, Copy, Debug)]
pub struct Native {
    /// Its number, the leaf's is 0.
    pub number: usize,
    /// The address to look up.
    pub ip: u64,
    /// Its stack pointer and its caller's.
    pub stack: (u64, u64),
}

impl List {
    /// Notes whether a native frame is the next evaluator's. `after_core`: see
    /// [`Evaluator::is_at`].
    pub fn come_by(&mut self, frame: Native, after_core: &mut u64) {
        let is_at = self.evaluator.is_at(frame.ip, after_core);
        let is_to_come = |entry: &&mut Entry| entry.code == EVALUATOR | NOT_FOUND;
        let to_come = self.entries.iter_mut().filter(is_to_come);
        // Of several interpreters' lists as well: stacks grow down.
        let Some(next) = to_come.min_by_key(|entry| entry.rest) else { return };
        let (sp, caller) = frame.stack;
        if if next.rest == ANY { is_at } else { (sp..caller).contains(&next.rest) } {
            next.code = EVALUATOR | frame.number as u64 & NOT_FOUND;
        }
    }

    /// Takes back what a walk that begins again has found: evaluators from this native frame on.
    pub fn forget(&mut self, native: usize) {
        for entry in self.entries.iter_mut().filter(|entry| entry.code & EVALUATOR != 0) {
            if (entry.code & NOT_FOUND) as usize >= native {
                entry.code = EVALUATOR | NOT_FOUND;
            }
        }
    }
}

/// How the frames of an interpreter ended, by what a header says of it; none: there are none.
#[must_use]
pub fn end(header: &SampleHeader, user: UserStack<'_>) -> Option<ListEnd> {
    let entries = user.managed.map_or(&[][..], |(entries, _)| entries);
    let is_whole = header.user_end == UserEnd::Root as u8;
    let is_lost = |entry: &Entry| is_lost(entry, entries, is_whole);
    Some(match managed::ListEnd::new(header.list_end.checked_sub(1)?)? {
        managed::ListEnd::Root if entries.iter().any(is_lost) => ListEnd::NoPlace,
        managed::ListEnd::Root => ListEnd::Root,
        managed::ListEnd::NoThread => return None,
        managed::ListEnd::Unreadable => ListEnd::Unreadable,
        managed::ListEnd::DepthLimit => ListEnd::DepthLimit,
        managed::ListEnd::ManyThreads => ListEnd::ManyThreads,
        managed::ListEnd::Changing => ListEnd::Changing,
        managed::ListEnd::RingFull => ListEnd::RingFull,
    })
}

/// Whether the functions that an evaluator runs have no place, in a stack that is whole or not.
/// Those known by their code are found one after the other, but CPython's: a part of that may be
/// elsewhere.
fn is_lost(entry: &Entry, entries: &[Entry], is_whole: bool) -> bool {
    let of_ruby = || entries.iter().any(|it| it.code & (EVALUATOR | OF_RUBY) == OF_RUBY);
    entry.code == EVALUATOR | NOT_FOUND && (is_whole || entry.rest == ANY && !of_ruby())
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use stackwire_model::Address;

    use super::*;
    use crate::normalize::FrameKind;
    use crate::process::executable::{Executables, Kind};

    /// Native frames are called 100 and more, those of an interpreter by their code.
    fn merged(entries: &[Entry], native: u64, end: EndReason) -> Vec<u64> {
        let mut executables = Executables::default();
        let executable = executables.intern(Kind::Unmapped);
        let frame = |number| Frame {
            executable: Rc::clone(&executable),
            address: Address::Code(number),
            kind: FrameKind::Interrupted,
            mapping: None,
        };
        let mut stack = Stack { frames: (100..100 + native).map(frame).collect(), end };
        put(entries, &mut stack, |entry| frame(entry.code));
        stack.frames.iter().map(|frame| frame.address.number()).collect()
    }

    #[test]
    fn functions_come_before_the_evaluator_that_runs_them() {
        let of = |code| Entry { code, rest: 0 };
        let evaluator = |native| Entry { code: EVALUATOR | native, rest: 0 };
        let entries = [of(1), of(2), evaluator(1), of(3), evaluator(3)];
        assert_eq!(merged(&entries, 5, EndReason::Root), [100, 1, 2, 101, 102, 3, 103, 104]);
        // The native walk has not come so far.
        let entries = [of(1), evaluator(1), of(3), evaluator(NOT_FOUND), of(4)];
        assert_eq!(merged(&entries, 2, EndReason::NoTable), [100, 1, 101, 3, 4]);
        assert_eq!(merged(&entries, 2, EndReason::Root), [100, 1, 101]);
        // Cut since, and out of order.
        assert_eq!(merged(&[of(1), evaluator(7)], 2, EndReason::NotCode), [100, 101, 1]);
        // Of two interpreters.
        let entries = [of(1), evaluator(2), of(2), evaluator(1), of(3), evaluator(3)];
        assert_eq!(merged(&entries, 4, EndReason::Root), [100, 2, 101, 1, 102, 3, 103]);
        // Known by their code alone.
        let missed = Entry { code: EVALUATOR | NOT_FOUND, rest: ANY };
        let entries = [of(1), evaluator(1), of(2), missed];
        assert_eq!(merged(&entries, 2, EndReason::NotCode), [100, 101]);
        let ruby = |code| of(OF_RUBY | code);
        let entries = [ruby(1), evaluator(1), ruby(2), missed];
        let [one, two] = [1, 2].map(|code| OF_RUBY | code);
        assert_eq!(merged(&entries, 2, EndReason::NoFramePointer), [100, one, 101, two]);
        assert_eq!(merged(&entries, 2, EndReason::Root), [100, 101]);
    }

    #[test]
    fn an_end_says_whether_frames_are_missing() {
        let mut executables = Executables::default();
        let codes = Codes::new(&mut executables);
        let ended = |end: managed::ListEnd, user_end: UserEnd, entries: &[Entry]| {
            let (list_end, user_end) = (1 + end as u8, user_end as u8);
            let header = SampleHeader { list_end, user_end, ..SampleHeader::default() };
            super::end(&header, UserStack { native: &[], managed: Some((entries, &codes)) })
        };
        let entry = |code, rest| Entry { code, rest };
        let whole = [entry(1, 0), entry(EVALUATOR | 3, 0)];
        let missed = [entry(1, 0), entry(EVALUATOR | NOT_FOUND, 0x1000)];
        let any = [entry(1, 0), entry(EVALUATOR | NOT_FOUND, ANY)];
        let root = managed::ListEnd::Root;
        assert_eq!(ended(root, UserEnd::Root, &whole), Some(ListEnd::Root));
        assert_eq!(ended(root, UserEnd::Root, &missed), Some(ListEnd::NoPlace));
        assert_eq!(ended(root, UserEnd::NoTable, &missed), Some(ListEnd::Root));
        assert_eq!(ended(root, UserEnd::NoTable, &any), Some(ListEnd::NoPlace));
        assert_eq!(ended(managed::ListEnd::NoThread, UserEnd::Root, &[]), None);
        assert_eq!(ended(managed::ListEnd::Changing, UserEnd::Root, &[]), Some(ListEnd::Changing));
    }

    #[test]
    fn evaluators_are_found_one_after_the_other_and_again() {
        let of = |rest| Entry { code: EVALUATOR | NOT_FOUND, rest };
        let mut after_core = 0;
        let mut come_by = |list: &mut List, number, ip, stack| {
            list.come_by(Native { number, ip, stack }, &mut after_core);
        };
        let found = |list: &List| -> Vec<u64> {
            list.entries.iter().map(|entry| entry.code & NOT_FOUND).collect()
        };
        let evaluator = Evaluator::default();
        let mut list = List { entries: vec![of(0x1010), of(0x1030)], evaluator };
        come_by(&mut list, 4, 1, (0x1030, 0x1040));
        assert_eq!(found(&list)[1], NOT_FOUND, "not the next");
        come_by(&mut list, 5, 1, (0x1000, 0x1020));
        come_by(&mut list, 6, 1, (0x1020, 0x1040));
        assert_eq!(found(&list), [5, 6]);
        list.forget(6);
        assert_eq!(found(&list), [5, NOT_FOUND]);
        // By code: a core and its entry are one, and an entry alone is one.
        let evaluator = Evaluator { core: 100, core_bytes: 10, entry: 200, entry_bytes: 10 };
        let mut list = List { entries: vec![of(ANY); 3], evaluator };
        for (number, ip) in [99, 105, 205, 300, 209, 109, 200].into_iter().enumerate() {
            come_by(&mut list, number, ip, (0, 0));
        }
        assert_eq!(found(&list), [1, 4, 5]);
    }
}
