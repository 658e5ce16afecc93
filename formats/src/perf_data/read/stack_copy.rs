//! Stacks from copies of memory (`perf record --call-graph dwarf`): registers and the top of the
//! stack, walked by the same tables and the same code as on the collector's kernel side.

use std::fs::File;
use std::os::unix::fs::FileExt;

use linux_perf_data::linux_perf_event_reader::Regs;
use rustc_hash::FxHashMap;
use stackwire_collector_ebpf::arch::{PERF_IP, PERF_REGISTERS, RSP, SignalFrame, follows_call};
use stackwire_collector_ebpf::unwind::{self, Cursor, GO_ON};
use stackwire_collector_ebpf::{CopiedStack, Memory, Rule, UserEnd, cfa};
use stackwire_model::profile::{Builder, EndReason, ExecutableId, FrameKind, UserAddr};
use stackwire_unwind::Table;

use crate::Host;
use crate::tasks::Tasks;

/// Frames of one stack, as the collector's.
const DEPTH: usize = 1024;

/// Executables kept open with their tables; a process may open 1,024 files.
const MAX_MODULES: usize = 512;
/// Bytes of tables kept; libLLVM's has 4.5 MB.
const MAX_TABLES: usize = 256 << 20;

const UNREADABLE: u64 = UserEnd::Unreadable as u64;

/// What a sample has of its thread.
#[derive(Clone, Copy, Debug)]
pub struct Copied<'a> {
    /// Registers.
    pub registers: &'a Regs<'a>,
    /// Memory from the stack pointer on.
    pub stack: &'a [u8],
}

/// Walks them; keeps the tables of executables.
#[derive(Debug, Default)]
pub struct Walker {
    modules: FxHashMap<ExecutableId, Option<Module>>,
    /// Bytes of their tables.
    bytes: usize,
}

#[derive(Debug)]
struct Module {
    table: Table,
    file: File,
}

impl Walker {
    /// The frames of a stack, leaf first, and why it ends.
    pub fn walk(
        &mut self,
        copied: &Copied<'_>,
        pid: u32,
        tasks: &Tasks,
        into: &Builder,
        host: &mut dyn Host,
    ) -> (Vec<(UserAddr, FrameKind)>, EndReason) {
        let mut frames = Vec::new();
        let end = self.frames(copied, pid, tasks, into, host, &mut frames);
        (frames, end)
    }

    fn frames(
        &mut self,
        copied: &Copied<'_>,
        pid: u32,
        tasks: &Tasks,
        into: &Builder,
        host: &mut dyn Host,
        frames: &mut Vec<(UserAddr, FrameKind)>,
    ) -> EndReason {
        let mut cursor = Cursor { exact: 1, ..Cursor::default() };
        for (number, register) in PERF_REGISTERS.into_iter().enumerate() {
            if let Some(value) = copied.registers.get(register.into()) {
                cursor.registers[number] = value;
                cursor.known |= 1 << number;
            }
        }
        let Some(ip) = copied.registers.get(PERF_IP.into()) else { return EndReason::Failed };
        cursor.ip = ip;
        let copy = CopiedStack::new(copied.stack, cursor.registers[RSP as usize]);
        let mut signal = SignalFrame::default();
        loop {
            let kind = if cursor.exact != 0 { FrameKind::Exact } else { FrameKind::Caller };
            frames.push((UserAddr(cursor.ip), kind));
            if frames.len() == DEPTH {
                return EndReason::DepthLimit;
            }
            let address = cursor.lookup_ip();
            let Some(map) = tasks.find(pid, UserAddr(address)).copied() else {
                // Drop a return address outside every mapping.
                if cursor.exact == 0 {
                    frames.pop();
                }
                return EndReason::NotCode;
            };
            let rule = if map.private {
                Rule { cfa: cfa::FRAME_POINTER, ..Rule::default() }
            } else {
                self.load(map.executable, into, host);
                let modules = &self.modules;
                let mut code = Copy { stack: CopiedStack::new(&[], 0), pid, tasks, modules };
                let module = modules.get(&map.executable).and_then(Option::as_ref);
                let rule = |address| module?.table.rule(map.offset(UserAddr(address))).copied();
                let found = rule(address);
                if !unwind::may_be_called(&mut code, &cursor, found.as_ref()) {
                    frames.pop();
                    return EndReason::NoFramePointer;
                }
                if module.is_none() {
                    return EndReason::NoTable;
                }
                if found.is_none()
                    && cursor.exact == 0
                    && !follows_call(&mut code, cursor.ip, false)
                {
                    // A stack made up to return to the beginning of a function.
                    cursor.exact = 1;
                }
                match found.or_else(|| rule(cursor.lookup_ip())) {
                    Some(rule) => rule,
                    None => return EndReason::NoUnwindRule,
                }
            };
            let modules = &self.modules;
            let mut memory = Copy { stack: copy, pid, tasks, modules };
            if rule.kept == 0 {
                memory.stack.leaves(&cursor);
            }
            let end = unwind::step(&mut memory, &mut signal, &mut cursor, &rule);
            let cut = memory.stack.cut;
            if map.private {
                cursor.guessed <<= 1;
            }
            match end {
                GO_ON => {}
                UNREADABLE if cut => return EndReason::CopyEnded,
                UNREADABLE => return EndReason::NotCopied,
                end => return end_reason(end),
            }
        }
    }

    fn load(&mut self, id: ExecutableId, into: &Builder, host: &mut dyn Host) {
        if self.modules.contains_key(&id) {
            return;
        }
        // Begun anew: more are not in use together.
        if self.modules.len() >= MAX_MODULES || self.bytes > MAX_TABLES {
            self.modules.clear();
            self.bytes = 0;
        }
        let module = host.open(into.executable_of(id)).and_then(|file| {
            let table = stackwire_unwind::compile(&file).ok()?;
            Some(Module { table, file })
        });
        let table = module.as_ref().map(|module| &module.table);
        self.bytes +=
            table.map_or(0, |table| size_of_val(&*table.rows) + size_of_val(&*table.rules));
        self.modules.insert(id, module);
    }
}

/// The copied piece of the stack, and code as it is in files.
struct Copy<'a> {
    stack: CopiedStack<'a>,
    pid: u32,
    tasks: &'a Tasks,
    modules: &'a FxHashMap<ExecutableId, Option<Module>>,
}

impl Copy<'_> {
    /// Eight bytes of a file that is mapped there.
    fn code(&self, address: u64) -> Option<u64> {
        let map = self.tasks.find(self.pid, UserAddr(address)).filter(|map| !map.private)?;
        let module = self.modules.get(&map.executable)?.as_ref()?;
        let mut bytes = [0; 8];
        module.file.read_exact_at(&mut bytes, map.offset(UserAddr(address)).0).ok()?;
        Some(u64::from_le_bytes(bytes))
    }
}

impl Memory for Copy<'_> {
    fn word(&mut self, address: u64) -> Option<u64> {
        let word = self.stack.word(address).or_else(|| self.code(address));
        if word.is_none() {
            self.stack.missed(address);
        }
        word
    }

    fn words<const N: usize>(&mut self, address: u64, to: &mut [u64; N]) -> bool {
        self.stack.words(address, to)
    }
}

fn end_reason(end: u64) -> EndReason {
    const ROOT: u64 = UserEnd::Root as u64;
    const NO_FRAME_POINTER: u64 = UserEnd::NoFramePointer as u64;
    const NO_RULE: u64 = UserEnd::NoRule as u64;
    const REGISTER_LOST: u64 = UserEnd::RegisterLost as u64;
    const BAD_STACK: u64 = UserEnd::BadStack as u64;
    const UNKNOWN_SWITCH: u64 = UserEnd::UnknownSwitch as u64;
    match end {
        ROOT => EndReason::Root,
        NO_FRAME_POINTER => EndReason::NoFramePointer,
        NO_RULE => EndReason::NoUnwindRule,
        REGISTER_LOST => EndReason::RegisterLost,
        BAD_STACK => EndReason::BadStack,
        UNKNOWN_SWITCH => EndReason::UnknownSwitch,
        _ => EndReason::Failed,
    }
}
