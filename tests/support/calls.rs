//! Whether a stack is possible. The return address of each caller must follow a call. If that call
//! names its target, it must call the function below. This judge knows nothing of unwinding. It is
//! for stacks that nobody else can walk.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use iced_x86::{Decoder, DecoderOptions, FlowControl, OpKind};
use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};

use super::stopped::Stopped;

/// Where goroutines end is returned to without having called.
const NOT_CALLING: &str = "runtime.goexit";
/// Nor do those whom the kernel has signal handlers return to: mov $15,%rax; syscall
const SIGRETURN: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
/// How many functions may jump on to each other between a call and who runs.
const JUMPS: usize = 5;

/// Functions of executables.
#[derive(Default)]
pub(crate) struct Functions(HashMap<PathBuf, Executable>);

struct Executable {
    /// By address: end, name.
    functions: BTreeMap<u64, (u64, String)>,
    /// Offset in the file, bytes, address.
    segments: Vec<(u64, u64, u64)>,
}

/// A frame: the instruction that runs or is returned to, and whether it was interrupted there.
pub(crate) type Frame = (u64, bool);

impl Functions {
    /// What is wrong with a stack, leaf first.
    pub(crate) fn impossible(&mut self, stopped: &Stopped, frames: &[Frame]) -> Option<String> {
        let wrong = frames.windows(2).find_map(|two| {
            let &[callee, (address, exact)] = two else { unreachable!() };
            if exact { None } else { self.wrong_call(stopped, callee, address) }
        })?;
        let names = frames.iter().map(|&frame| self.name(stopped, frame));
        Some(format!("{wrong} in {:?}", names.take(40).collect::<Vec<_>>()))
    }

    /// Function and offset of a frame.
    pub(crate) fn name(&mut self, stopped: &Stopped, (ip, exact): Frame) -> String {
        let function = self.function(stopped, ip - u64::from(!exact));
        function.map_or(format!("{ip:#x}"), |of| format!("{}+{:#x}", of.name, ip - of.start))
    }

    fn wrong_call(&mut self, stopped: &Stopped, (ip, exact): Frame, to: u64) -> Option<String> {
        let callee = self.function(stopped, if exact { ip } else { ip - 1 });
        let at = self.function(stopped, to);
        let ends = at.as_ref().is_some_and(|at| at.name.starts_with(NOT_CALLING));
        if ends || stopped.read(to, SIGRETURN.len()).is_some_and(|code| code == SIGRETURN) {
            return None;
        }
        let code = stopped.read(to - 7, 7)?;
        let name = |of: &Option<Function>| of.as_ref().map_or("?".to_owned(), |of| of.name.clone());
        if (2..=7).any(|length| is_indirect_call(&code[7 - length..])) {
            return None;
        }
        if code[2] != 0xe8 {
            return Some(format!(
                "{} returns to {to:#x} of {}, after no call",
                name(&callee),
                name(&at)
            ));
        }
        let offset = i32::from_le_bytes(code[3..].try_into().unwrap());
        let target = to.wrapping_add(i64::from(offset) as u64);
        let callee = callee?;
        if self.leads_to(stopped, target, &callee, JUMPS) {
            return None;
        }
        let called = self.function(stopped, target);
        Some(format!("{} calls {} and not {}", name(&at), name(&called), callee.name))
    }

    /// Whether who calls `target` may be in `callee`.
    fn leads_to(
        &mut self,
        stopped: &Stopped,
        target: u64,
        callee: &Function,
        jumps: usize,
    ) -> bool {
        let Some(function) = self.function(stopped, target) else { return true };
        if function.start == callee.start {
            return true;
        }
        let Some(bytes) = stopped.read(function.start, (function.end - function.start) as usize)
        else {
            return false;
        };
        let decoder = Decoder::with_ip(64, &bytes, function.start, DecoderOptions::NONE);
        let leaving: Vec<Option<u64>> = decoder
            .into_iter()
            .filter_map(|instruction| match instruction.flow_control() {
                FlowControl::IndirectBranch => Some(None),
                FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
                    let is_near = instruction.op0_kind() == OpKind::NearBranch64;
                    let target = instruction.near_branch_target();
                    let inside = (function.start..function.end).contains(&target);
                    (is_near && !inside).then_some(Some(target))
                }
                _ => None,
            })
            .collect();
        leaving.into_iter().any(|target| match target {
            None => true,
            Some(target) => jumps > 0 && self.leads_to(stopped, target, callee, jumps - 1),
        })
    }

    /// The function an address of the process is in.
    fn function(&mut self, stopped: &Stopped, ip: u64) -> Option<Function> {
        let mapping = stopped.mapping(ip).filter(|mapping| mapping.path.is_absolute())?;
        let path = &mapping.path;
        let of = self.0.entry(path.clone()).or_insert_with(|| Executable::open(path));
        let offset = ip - mapping.start + mapping.offset;
        let inside =
            |&&(start, size, _): &&(u64, u64, u64)| (start..start + size).contains(&offset);
        let &(start, _, address) = of.segments.iter().find(inside)?;
        let address = offset - start + address;
        let (&start, (end, name)) = of.functions.range(..=address).next_back()?;
        let bias = ip - address;
        (address < *end).then(|| Function {
            start: start + bias,
            end: end + bias,
            name: name.clone(),
        })
    }
}

struct Function {
    start: u64,
    end: u64,
    name: String,
}

impl Executable {
    fn open(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let elf = object::File::parse(&*bytes).unwrap();
        let segments = elf.segments().map(|segment| {
            let (offset, size) = segment.file_range();
            (offset, size, segment.address())
        });
        let segments = segments.collect();
        let mut functions = BTreeMap::new();
        for symbol in elf.symbols().chain(elf.dynamic_symbols()) {
            if symbol.kind() == SymbolKind::Text && symbol.size() > 0 {
                let name = symbol.name().unwrap_or("?").to_owned();
                functions.insert(symbol.address(), (symbol.address() + symbol.size(), name));
            }
        }
        Self { functions, segments }
    }
}

/// `call` through a register or memory, and nothing before or after it.
fn is_indirect_call(code: &[u8]) -> bool {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let instruction = decoder.decode();
    instruction.flow_control() == FlowControl::IndirectCall && instruction.len() == code.len()
}
