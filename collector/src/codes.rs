//! Functions of interpreters that were met: what names each, and its lines. Pure. Called by
//! `pipeline.rs`, which hears of them, and by `managed.rs`, which puts them in stacks.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

use stackwire_collector_ebpf::SampleHeader;
use stackwire_collector_ebpf::managed::{
    self, CodeHead, EVALUATOR, Entry, OF_RUBY, OF_V8, ScriptHead,
};
use stackwire_model::{Address, Code, Runtime, Text, code};

use crate::normalize::{Frame, FrameKind};
use crate::process::executable::{Executable, Executables, Kind};
use crate::scripts::Lines;

/// Bytes of what names functions that are kept.
const MAX_BYTES: usize = 16 << 20;
/// Functions of a script that wait for its source.
const MAX_WAITING: usize = 4096;
/// What an entry takes beside that.
const OF_ENTRY: usize = 64;

const _: () = assert!(code::MAX_NAME == managed::MAX_NAME && code::MAX_PATH == managed::MAX_PATH);
// The index of a line table has its length in front of it.
const _: () = assert!(code::MAX_LINES == managed::MAX_LINES + code::INDEX_LENGTH);

/// A process: its id and its start.
pub type Of = (u32, u64);

/// Functions of interpreters that were met, by their process and address.
#[derive(Debug)]
pub struct Codes {
    by_process: HashMap<Of, OfProcess>,
    /// By number of the function: how many processes have it, and its bytes, which are there once.
    shared: HashMap<u64, (u32, usize)>,
    bytes: usize,
    /// What could not be read of any: of CPython, of Ruby and of V8.
    unknown: [Rc<Executable>; 3],
    /// Some were forgotten that the kernel side takes for known.
    has_forgotten: bool,
}

/// A function in a process: by its address and what tells it from others there.
type Key = (u64, u32);

#[derive(Debug, Default)]
struct OfProcess {
    known: HashMap<Key, Rc<Executable>>,
    /// Of V8, by address: scripts, as far as their sources have come.
    scripts: HashMap<u64, Script>,
    /// Those of `known` that wait for the source of their script.
    bare: HashSet<Key>,
    bytes: usize,
    /// It has been met since the last epoch ended.
    is_new: bool,
}

/// A script of V8.
#[derive(Debug, Default)]
struct Script {
    lines: Lines,
    /// Functions whose source has not come, and from where to where they are in it.
    waiting: Vec<(Key, Code, [u32; 2])>,
    /// Bytes of those.
    waiting_bytes: usize,
}

impl Script {
    fn wait(&mut self, key: Key, code: Code, span: [u32; 2]) {
        self.waiting_bytes += code.bytes() + OF_ENTRY;
        self.waiting.push((key, code, span));
    }

    /// A function whose source has come, with its lines.
    fn take_ready(&mut self) -> Option<(Key, Code)> {
        let is_ready = |(_, _, span): &(Key, Code, [u32; 2])| self.lines.of(*span).is_some();
        let at = self.waiting.iter().position(is_ready)?;
        let (key, code, span) = self.waiting.swap_remove(at);
        self.waiting_bytes -= code.bytes() + OF_ENTRY;
        let known = self.lines.of(span)?;
        Some((key, with_line_ends(code, known, span[0])))
    }

    /// Bytes it takes.
    fn bytes(&self) -> usize {
        OF_ENTRY + self.lines.bytes() + self.waiting_bytes
    }
}

impl Codes {
    /// None so far.
    #[must_use]
    pub fn new(executables: &mut Executables) -> Self {
        let mut unknown = |of| executables.intern(Kind::Code(Arc::new(Code::unknown(of))));
        let all = [Runtime::Cpython(0), Runtime::Ruby(0), Runtime::V8(0)];
        let unknown = all.map(&mut unknown);
        Self {
            by_process: HashMap::new(),
            shared: HashMap::new(),
            bytes: 0,
            unknown,
            has_forgotten: false,
        }
    }

    /// Keeps what the kernel side has read of a code object.
    pub fn define(
        &mut self,
        of: &SampleHeader,
        head: &CodeHead,
        bytes: &[u8],
        executables: &mut Executables,
    ) {
        let Some(mut code) = read(head, bytes) else { return };
        let (of, key) = ((of.pid, of.start_boottime_ns), (head.code, head.cookie));
        if self.by_process.get(&of).is_some_and(|process| process.known.contains_key(&key)) {
            return;
        }
        if matches!(code.runtime, Runtime::V8(_)) {
            // Both it and what waits: what is kept next makes no room then.
            self.make_room(2 * (code.bytes() + OF_ENTRY), executables);
            code = self.with_lines(of, key, code, head);
        }
        self.keep(of, key, code, executables);
    }

    /// Takes a piece of the source of a script: of functions that are in it the lines are known.
    pub fn add_source(
        &mut self,
        of: &SampleHeader,
        head: &ScriptHead,
        bytes: &[u8],
        executables: &mut Executables,
    ) {
        let of = (of.pid, of.start_boottime_ns);
        let script = self.script(of, head.script);
        let before = script.bytes();
        script.lines.add(head, bytes);
        let after = script.bytes();
        self.recount(of, before, after);
        while let Some((key, code)) = self.take_ready(of, head.script) {
            self.keep(of, key, code, executables);
        }
        self.make_room(0, executables);
    }

    /// A function of a script whose source has come; it was kept without lines before.
    fn take_ready(&mut self, of: Of, script: u64) -> Option<(Key, Code)> {
        let process = self.by_process.get_mut(&of)?;
        let script = process.scripts.get_mut(&script)?;
        let before = script.bytes();
        let (key, code) = script.take_ready()?;
        let after = script.bytes();
        process.bare.remove(&key);
        let bare = process.known.remove(&key);
        if let Some(bare) = bare {
            if let Kind::Code(bare) = &bare.kind {
                process.bytes -= bare.bytes() + OF_ENTRY;
            }
            self.let_go(&bare);
        }
        self.recount(of, before, after);
        Some((key, code))
    }

    fn script(&mut self, of: Of, address: u64) -> &mut Script {
        let process = self.by_process.entry(of).or_default();
        process.is_new = true;
        process.scripts.entry(address).or_insert_with(|| {
            let script = Script::default();
            process.bytes += script.bytes();
            self.bytes += script.bytes();
            script
        })
    }

    /// A script takes another number of bytes than before.
    fn recount(&mut self, of: Of, before: usize, after: usize) {
        self.bytes = self.bytes + after - before;
        if let Some(process) = self.by_process.get_mut(&of) {
            process.bytes = process.bytes + after - before;
        }
    }

    /// A function of V8 with its lines; where its source has not come it waits for that.
    fn with_lines(&mut self, of: Of, key: Key, code: Code, head: &CodeHead) -> Code {
        let without = |code: Code| Code { lines: Vec::new(), ..code };
        if head.script == 0 {
            return without(code);
        }
        let script = self.script(of, head.script);
        if let Some(known) = script.lines.of(head.span) {
            return with_line_ends(code, known, head.span[0]);
        }
        if script.waiting.len() >= MAX_WAITING {
            return without(code);
        }
        let before = script.bytes();
        script.wait(key, code.clone(), head.span);
        let after = script.bytes();
        self.recount(of, before, after);
        if let Some(process) = self.by_process.get_mut(&of) {
            process.bare.insert(key);
        }
        without(code)
    }

    fn keep(&mut self, of: Of, key: Key, code: Code, executables: &mut Executables) {
        let size = code.bytes() + OF_ENTRY;
        self.make_room(size, executables);
        let code = executables.intern(Kind::Code(Arc::new(code)));
        let (processes, own) = self.shared.entry(code.id).or_insert((0, size - OF_ENTRY));
        self.bytes += OF_ENTRY + if *processes == 0 { *own } else { 0 };
        *processes += 1;
        let process = self.by_process.entry(of).or_default();
        process.is_new = true;
        process.bytes += size;
        process.known.insert(key, code);
    }

    /// Where there is no room, the process that has most loses all of its own.
    fn make_room(&mut self, size: usize, executables: &mut Executables) {
        while self.bytes + size > MAX_BYTES {
            let largest = self.by_process.iter().max_by_key(|(_, process)| process.bytes);
            let Some((&largest, _)) = largest else { return };
            self.forget(largest);
            self.has_forgotten = true;
            executables.purge();
        }
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
        let Some(process) = self.by_process.remove(&of) else { return };
        for script in process.scripts.into_values() {
            self.bytes -= script.bytes();
        }
        process.known.into_values().for_each(|code| self.let_go(&code));
    }

    /// A process does not have this function any more.
    fn let_go(&mut self, code: &Executable) {
        self.bytes -= OF_ENTRY;
        if let Some((processes, own)) = self.shared.get_mut(&code.id) {
            *processes -= 1;
            if *processes == 0 {
                self.bytes -= *own;
                self.shared.remove(&code.id);
            }
        }
    }

    /// Whether some were forgotten since the last call that the kernel side takes for known.
    pub fn take_has_forgotten(&mut self) -> bool {
        std::mem::take(&mut self.has_forgotten)
    }

    /// Whether all has come that says what functions of a stack are called and what lines they
    /// have.
    #[must_use]
    pub fn knows(&self, of: Of, entries: &[Entry]) -> bool {
        let process = self.by_process.get(&of);
        let known = |entry: &Entry| {
            let key = (entry.code, entry.cookie());
            process.is_some_and(|it| it.known.contains_key(&key) && !it.bare.contains(&key))
        };
        entries.iter().all(|entry| entry.code & EVALUATOR != 0 || known(entry))
    }

    /// The frame of a function in a process.
    #[must_use]
    pub fn frame(&self, of: Of, entry: &Entry) -> Frame {
        let process = self.by_process.get(&of);
        let known = process.and_then(|it| it.known.get(&(entry.code, entry.cookie())));
        let [cpython, ruby, v8] = &self.unknown;
        let unknown = match entry.code & (OF_RUBY | OF_V8) {
            OF_RUBY => ruby,
            OF_V8 => v8,
            _ => cpython,
        };
        let executable = Rc::clone(known.unwrap_or(unknown));
        // The first instruction has not run yet.
        let position = u64::try_from(entry.position()).unwrap_or(0);
        let address = Address::Code(position);
        Frame { executable, address, kind: FrameKind::Interrupted, mapping: None }
    }
}

/// A function of V8 with what is known of its lines: the first, and characters in it that end one.
/// In front of those is the length of its table, so that the symbolizer finds both. Of one with too
/// many lines none are told.
fn with_line_ends(code: Code, (first_line, ends): (u32, &[u32]), from: u32) -> Code {
    if code.lines.len() + ends.len() >= code::MAX_LINES {
        return Code { first_line, lines: Vec::new(), ..code };
    }
    let length = u32::try_from(code.lines.len()).unwrap_or(0);
    let mut lines = [&length.to_le_bytes()[..], &code.lines].concat();
    let mut before = 0;
    for end in std::iter::once(from).chain(ends.iter().copied()) {
        let mut left = end - before;
        before = end;
        while left > 0x7f {
            lines.push(left as u8 | 0x80);
            left >>= 7;
        }
        lines.push(left as u8);
    }
    if lines.len() > code::MAX_LINES {
        lines.clear();
    }
    Code { first_line, lines, ..code }
}

/// None: it has fewer bytes than its head says.
fn read(head: &CodeHead, bytes: &[u8]) -> Option<Code> {
    let (name, rest) = bytes.split_at_checked(head.name_bytes as usize)?;
    let (path, rest) = rest.split_at_checked(head.path_bytes as usize)?;
    let lines = rest.get(..(head.index_bytes as usize).checked_add(head.lines_bytes as usize)?)?;
    let (runtime, index) = match head.code & (OF_RUBY | OF_V8) {
        OF_RUBY => (Runtime::Ruby(head.version), &head.index_bytes.to_le_bytes()[..]),
        OF_V8 => (Runtime::V8(head.version), &[][..]),
        _ => (Runtime::Cpython(head.version), &[][..]),
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
    fn functions_have_lines_when_the_source_of_their_script_has_come() {
        let mut executables = Executables::default();
        let mut codes = Codes::new(&mut executables);
        let of = SampleHeader { pid: 1, start_boottime_ns: 1, ..SampleHeader::default() };
        let source = b"a\nfunction f() {\n}\n";
        let define = |codes: &mut Codes, address: u64, executables: &mut Executables| {
            let head = CodeHead {
                code: address | OF_V8,
                script: 7,
                span: [11, 18],
                name_bytes: 1,
                name_length: 1,
                lines_bytes: 2,
                lines_length: 2,
                ..CodeHead::default()
            };
            codes.define(&of, &head, b"f\x01\x02", executables);
        };
        let known = |codes: &Codes, address: u64| {
            let process = &codes.by_process[&(1, 1)];
            let Kind::Code(code) = &process.known[&(address | OF_V8, 0)].kind else { panic!() };
            (code.first_line, code.lines.clone())
        };
        let piece = |from: usize, to: usize| {
            let (length, bytes) = (source.len() as u64, (to - from) as u32);
            (
                ScriptHead { script: 7, offset: from as u64, length, width: 1, bytes },
                &source[from..to],
            )
        };
        define(&mut codes, 10, &mut executables);
        assert_eq!(known(&codes, 10), (0, Vec::new()));
        for (from, to) in [(0, 12), (12, 17)] {
            let (head, bytes) = piece(from, to);
            codes.add_source(&of, &head, bytes, &mut executables);
            assert_eq!(known(&codes, 10), (0, Vec::new()), "its end has not come");
        }
        let (head, bytes) = piece(17, source.len());
        codes.add_source(&of, &head, bytes, &mut executables);
        // The table and its length, then 11 and the line feed 5 characters behind it.
        let with_lines = (2, vec![2, 0, 0, 0, 1, 2, 11, 5]);
        assert_eq!(known(&codes, 10), with_lines);
        define(&mut codes, 20, &mut executables);
        assert_eq!(known(&codes, 20), with_lines, "it has come before");
        // Another script, which one function more waits for.
        let (head, bytes) = piece(0, 12);
        let longer = ScriptHead { length: 40, ..head };
        codes.add_source(&of, &longer, bytes, &mut executables);
        define(&mut codes, 30, &mut executables);
        assert_eq!(known(&codes, 30), (0, Vec::new()));
        let process = &codes.by_process[&(1, 1)];
        let shared: usize = process.known.values().map(|it| codes.shared[&it.id].1).sum();
        assert!(process.bytes >= shared && codes.bytes <= process.bytes);
        codes.forget((1, 1));
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
