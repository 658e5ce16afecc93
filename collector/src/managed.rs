//! Frames of interpreters: which function each of them is of, and their places among the native
//! frames. Pure. Called by `pipeline.rs` and `batch.rs`.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use stackwire_collector_ebpf::managed::{
    self, ANY, CodeHead, EVALUATOR, Entry, Evaluator, NOT_FOUND, OF_RUBY,
};
use stackwire_collector_ebpf::{SampleHeader, UserEnd};
use stackwire_model::{Address, Code, EndReason, ListEnd, Runtime, Text, code};

use crate::normalize::{Frame, FrameKind, Stack};
use crate::process::executable::{Executable, Executables, Kind};

/// Bytes of what names functions that are kept.
const MAX_BYTES: usize = 16 << 20;
/// What an entry takes beside that.
const OF_ENTRY: usize = 64;

const _: () = assert!(code::MAX_NAME == managed::MAX_NAME && code::MAX_PATH == managed::MAX_PATH);
// The index of a line table has its length in front of it.
const _: () = assert!(code::MAX_LINES == managed::MAX_LINES + code::INDEX_LENGTH);

/// A process: its id and its start.
type Of = (u32, u64);

/// Functions of interpreters that were met, by their process and address.
#[derive(Debug)]
pub struct Codes {
    by_process: HashMap<Of, OfProcess>,
    /// By number of the function: how many processes have it, and its bytes, which are there once.
    shared: HashMap<u64, (u32, usize)>,
    bytes: usize,
    /// What could not be read of any, of CPython and of Ruby.
    unknown: [Rc<Executable>; 2],
    /// Some were forgotten that the kernel side takes for known.
    has_forgotten: bool,
}

#[derive(Debug, Default)]
struct OfProcess {
    known: HashMap<(u64, u32), Rc<Executable>>,
    bytes: usize,
    /// It has been met since the last epoch ended.
    is_new: bool,
}

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

impl Codes {
    /// None so far.
    #[must_use]
    pub fn new(executables: &mut Executables) -> Self {
        let mut unknown = |of| executables.intern(Kind::Code(Arc::new(Code::unknown(of))));
        let unknown = [Runtime::Cpython(0), Runtime::Ruby(0)].map(&mut unknown);
        Self {
            by_process: HashMap::new(),
            shared: HashMap::new(),
            bytes: 0,
            unknown,
            has_forgotten: false,
        }
    }

    /// Keeps what the kernel side has read of a code object. Where there is no room, the process
    /// that has most loses all of its own.
    pub fn define(
        &mut self,
        of: &SampleHeader,
        head: &CodeHead,
        bytes: &[u8],
        executables: &mut Executables,
    ) {
        let Some(code) = read(head, bytes) else { return };
        let (of, key) = ((of.pid, of.start_boottime_ns), (head.code, head.cookie));
        if self.by_process.get(&of).is_some_and(|process| process.known.contains_key(&key)) {
            return;
        }
        let size = code.bytes() + OF_ENTRY;
        while self.bytes + size > MAX_BYTES {
            let largest = self.by_process.iter().max_by_key(|(_, process)| process.bytes);
            let Some((&largest, _)) = largest else { return };
            self.forget(largest);
            self.has_forgotten = true;
            executables.purge();
        }
        let code = executables.intern(Kind::Code(Arc::new(code)));
        let (processes, own) = self.shared.entry(code.id).or_insert((0, size - OF_ENTRY));
        self.bytes += OF_ENTRY + if *processes == 0 { *own } else { 0 };
        *processes += 1;
        let process = self.by_process.entry(of).or_default();
        process.is_new = true;
        process.bytes += size;
        process.known.insert(key, code);
    }

    /// An epoch is over: forgets those of processes that are gone.
    pub fn retain(&mut self, is_there: impl Fn(u32, u64) -> bool) {
        let processes = self.by_process.iter_mut();
        let gone = processes.filter_map(|(&(pid, start), process)| {
            // Its first sample may not have been looked at yet.
            let is_new = std::mem::take(&mut process.is_new);
            (!is_new && !is_there(pid, start)).then_some((pid, start))
        });
        for of in gone.collect::<Vec<_>>() {
            self.forget(of);
        }
    }

    fn forget(&mut self, of: Of) {
        for code in self.by_process.remove(&of).into_iter().flat_map(|it| it.known.into_values()) {
            self.bytes -= OF_ENTRY;
            if let Some((processes, own)) = self.shared.get_mut(&code.id) {
                *processes -= 1;
                if *processes == 0 {
                    self.bytes -= *own;
                    self.shared.remove(&code.id);
                }
            }
        }
    }

    /// Whether some were forgotten since the last call that the kernel side takes for known.
    pub fn take_has_forgotten(&mut self) -> bool {
        std::mem::take(&mut self.has_forgotten)
    }

    /// Whether what names the functions of a stack has come.
    #[must_use]
    pub fn knows(&self, of: Of, entries: &[Entry]) -> bool {
        let process = self.by_process.get(&of);
        let known = |entry: &Entry| {
            process.is_some_and(|it| it.known.contains_key(&(entry.code, entry.cookie())))
        };
        entries.iter().all(|entry| entry.code & EVALUATOR != 0 || known(entry))
    }

    /// Puts the frames of an interpreter in their places in a stack of a process.
    pub fn insert(&self, of: Of, entries: &[Entry], stack: &mut Stack) {
        let process = self.by_process.get(&of);
        let frame = |entry: &Entry| {
            let known = process.and_then(|it| it.known.get(&(entry.code, entry.cookie())));
            let executable =
                Rc::clone(known.unwrap_or(&self.unknown[usize::from(entry.code & OF_RUBY != 0)]));
            // The first instruction has not run yet.
            let position = u64::try_from(entry.position()).unwrap_or(0);
            let address = Address::Code(position);
            Frame { executable, address, kind: FrameKind::Interrupted, mapping: None }
        };
        insert(entries, stack, frame);
    }
}

/// In front of each evaluator's frame come those of the functions it runs. What was found of none
/// comes last, where the native walk has not found the root.
fn insert(entries: &[Entry], stack: &mut Stack, mut frame: impl FnMut(&Entry) -> Frame) {
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

/// None: it has fewer bytes than its head says.
fn read(head: &CodeHead, bytes: &[u8]) -> Option<Code> {
    let (name, rest) = bytes.split_at_checked(head.name_bytes as usize)?;
    let (path, rest) = rest.split_at_checked(head.path_bytes as usize)?;
    let lines = rest.get(..(head.index_bytes as usize).checked_add(head.lines_bytes as usize)?)?;
    let is_ruby = head.code & OF_RUBY != 0;
    let (runtime, index) = if is_ruby {
        (Runtime::Ruby(head.version), &head.index_bytes.to_le_bytes()[..])
    } else {
        (Runtime::Cpython(head.version), &[][..])
    };
    let text = |bytes: &[u8], state: u32, length: u64| {
        // Bits 2 to 4 of `state` (Include/cpython/unicodeobject.h). Ruby's have none: UTF-8.
        let width = (state >> 2 & 7) as u8;
        Text { width, bytes: bytes.to_vec(), is_cut: bytes.len() as u64 != length }
    };
    Some(Code {
        runtime,
        name: text(name, head.name_state, head.name_length),
        path: text(path, head.path_state, head.path_length),
        first_line: u32::try_from(head.first_line).unwrap_or(0),
        lines: [index, lines].concat(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
        insert(entries, &mut stack, |entry| frame(entry.code));
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

    #[test]
    fn functions_are_kept_while_there_is_room_and_once() {
        let mut executables = Executables::default();
        let mut codes = Codes::new(&mut executables);
        let mut define = |codes: &mut Codes, pid: u32, address: u64, name: &[u8]| {
            let of = SampleHeader { pid, start_boottime_ns: 1, ..SampleHeader::default() };
            let name_bytes = name.len() as u32;
            let head = CodeHead { code: address, name_bytes, ..CodeHead::default() };
            codes.define(&of, &head, name, &mut executables);
        };
        let entry = |address| [Entry { code: address, rest: 0 }];
        define(&mut codes, 1, 10, b"shared");
        let first = codes.bytes;
        define(&mut codes, 1, 10, b"shared");
        assert_eq!(codes.bytes, first, "it is known");
        define(&mut codes, 2, 20, b"shared");
        assert_eq!(codes.bytes, first + OF_ENTRY, "its bytes are there once");
        assert!(codes.knows((2, 1), &entry(20)) && !codes.knows((2, 1), &entry(10)));
        // One takes all the room: it loses what it has, and others keep theirs.
        for number in 0..4000u64 {
            let name = [&[0; 5000][..], &number.to_ne_bytes()].concat();
            define(&mut codes, 3, number, &name);
        }
        assert!(codes.bytes <= MAX_BYTES && codes.take_has_forgotten());
        assert!(codes.knows((1, 1), &entry(10)) && codes.knows((2, 1), &entry(20)));
        assert!(!codes.knows((3, 1), &entry(0)) && codes.knows((3, 1), &entry(3999)));
        codes.retain(|_, _| false);
        codes.retain(|_, _| false);
        assert_eq!((codes.bytes, codes.shared.len()), (0, 0));
    }

    #[test]
    fn code_has_as_many_bytes_as_it_says() {
        let head = CodeHead {
            name_bytes: 1,
            name_length: 2,
            name_state: 1 << 2,
            path_bytes: 2,
            path_length: 2,
            lines_bytes: 3,
            ..CodeHead::default()
        };
        let of = |bytes: &[u8]| read(&head, bytes);
        assert!(of(b"f/xab").is_none());
        let found = of(b"f/xabc").unwrap();
        assert_eq!((found.name.bytes, found.name.is_cut), (b"f".to_vec(), true));
        assert_eq!((found.path.is_cut, found.lines), (false, b"abc".to_vec()));
    }
}
