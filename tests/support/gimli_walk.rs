//! The oracle of the walker: call frame information interpreted by gimli, with every register,
//! every rule and every expression, on a stopped thread.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use gimli::{
    BaseAddresses, CfaRule, DebugFrame, EhFrame, EndianSlice, Evaluation, EvaluationResult,
    LittleEndian, Register, RegisterRule, UnwindContext, UnwindExpression, UnwindOffset,
    UnwindSection, Value,
};
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol};
use stackwire_unwind::{Table, compile};

use super::stopped::{Mapping, Stopped};

/// Deepest stack compared.
pub(crate) const DEPTH: usize = 1_300;
/// Functions of Go's runtime that go from one stack to another, and those that are outermost
/// (`TOPFRAME`), of which its call frame information does not say so.
const SWITCHES: [&str; 16] = [
    "runtime.rt0_go",
    "runtime.goexit",
    "runtime.systemstack",
    "runtime.asmcgocall",
    "runtime.mcall",
    "runtime.morestack",
    "runtime.mstart",
    "runtime.cgocallback",
    "runtime.nanotime1",
    "runtime.walltime",
    "time.now",
    "runtime.vgetrandom1",
    "runtime.gogo",
    "gogo",
    "racecall",
    "runtime.asyncPreempt",
];
/// DWARF number of rip.
pub(crate) const RIP: usize = 16;

/// A stack and, if it ended before the root, why.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Walked {
    pub(crate) frames: Vec<u64>,
    pub(crate) end: String,
}

/// An executable, as both unwinders want it.
pub(crate) struct Module {
    pub(crate) table: Option<Table>,
    eh_frame: Vec<u8>,
    debug_frame: Vec<u8>,
    bases: BaseAddresses,
    /// Functions: first address, end, offset of the FDE, which of the two it is in.
    functions: BTreeMap<u64, (u64, usize, bool)>,
    /// Offset in the file, bytes, address.
    segments: Vec<(u64, u64, u64)>,
    /// Functions that change stacks, which their call frame information does not tell.
    switches: Vec<std::ops::Range<u64>>,
}

/// Executables, each opened once.
#[derive(Default)]
pub(crate) struct Modules(HashMap<PathBuf, Module>);

impl Modules {
    pub(crate) fn of(&mut self, stopped: &Stopped, mapping: &Mapping) -> &Module {
        self.0.entry(mapping.path.clone()).or_insert_with(|| {
            let path = mapping.path.as_path();
            let copy = tempfile::NamedTempFile::new().unwrap();
            let length = (mapping.end - mapping.start) as usize;
            let path = if path == Path::new("[vdso]") {
                std::fs::write(&copy, stopped.read(mapping.start, length).unwrap()).unwrap();
                copy.path()
            } else {
                path
            };
            Module::open(path)
        })
    }
}

impl Module {
    fn open(path: &Path) -> Self {
        let table = compile(&File::open(path).unwrap()).ok();
        let bytes = std::fs::read(path).unwrap();
        let elf = object::File::parse(&*bytes).unwrap();
        let section = elf.section_by_name(".eh_frame");
        let eh_frame_address = section.as_ref().map_or(0, |section| section.address());
        let eh_frame = section.map_or(Vec::new(), |section| section.data().unwrap().to_vec());
        let mut bases = BaseAddresses::default().set_eh_frame(eh_frame_address);
        if let Some(text) = elf.section_by_name(".text") {
            bases = bases.set_text(text.address());
        }
        let segments = elf.segments().map(|segment| {
            let (offset, size) = segment.file_range();
            (offset, size, segment.address())
        });
        let segments = segments.collect();
        let debug_frame = elf.section_by_name(".debug_frame");
        let debug_frame =
            debug_frame.map_or(Vec::new(), |section| section.uncompressed_data().unwrap().to_vec());
        let mut functions = BTreeMap::new();
        let mut section = DebugFrame::new(&debug_frame, LittleEndian);
        section.set_address_size(8);
        add_functions(&section, &bases, false, &mut functions);
        add_functions(&EhFrame::new(&eh_frame, LittleEndian), &bases, true, &mut functions);
        let switches = elf.symbols().filter(|symbol| {
            symbol.name().is_ok_and(|name| SWITCHES.contains(&name.trim_end_matches(".abi0")))
        });
        let switches =
            switches.map(|symbol| symbol.address()..symbol.address() + symbol.size()).collect();
        Self { table, eh_frame, debug_frame, bases, functions, segments, switches }
    }

    fn address(&self, offset: u64) -> Option<u64> {
        self.segments.iter().find_map(|&(start, size, address)| {
            (start..start + size).contains(&offset).then(|| offset - start + address)
        })
    }
}

fn add_functions<'a, S: UnwindSection<EndianSlice<'a, LittleEndian>>>(
    section: &S,
    bases: &BaseAddresses,
    is_eh: bool,
    functions: &mut BTreeMap<u64, (u64, usize, bool)>,
) where
    S::Offset: UnwindOffset<usize>,
{
    let mut entries = section.entries(bases);
    while let Ok(Some(entry)) = entries.next() {
        let gimli::CieOrFde::Fde(partial) = entry else { continue };
        let Ok(fde) = partial.parse(S::cie_from_offset) else { continue };
        functions.insert(fde.initial_address(), (fde.end_address(), fde.offset(), is_eh));
    }
}

/// The walk of the oracle: every register, every rule, every expression.
pub(crate) fn theirs(stopped: &Stopped, modules: &mut Modules) -> Walked {
    let mut registers = stopped.registers.map(Some);
    let mut exact = true;
    let mut frames = vec![stopped.registers[RIP]];
    let end = loop {
        if frames.len() == DEPTH {
            break "too deep".to_owned();
        }
        let ip = registers[RIP].unwrap() - u64::from(!exact);
        let Some(mapping) = stopped.mapping(ip) else { break "not code".to_owned() };
        if mapping.path.as_os_str().is_empty() {
            // Code made at run time is walked by frame pointers: nobody knows better. Where such
            // code was interrupted, its function may have no frame yet, and nobody can know.
            if exact {
                break "no rule".to_owned();
            }
            let fp = registers[6].unwrap_or(0);
            let (Some(caller), Some(ip)) = (stopped.word(fp), stopped.word(fp.wrapping_add(8)))
            else {
                break "no frame pointer".to_owned();
            };
            registers = [None; 17];
            (registers[6], registers[7], registers[RIP]) = (Some(caller), Some(fp + 16), Some(ip));
            exact = false;
            frames.push(ip);
            continue;
        }
        let module = modules.of(stopped, mapping);
        let Some(address) = module.address(ip - mapping.start + mapping.offset) else {
            break "not in a segment".to_owned();
        };
        if module.switches.iter().any(|function| function.contains(&address)) {
            break "changes stacks".to_owned();
        }
        match step(stopped, module, address, &mut registers) {
            Ok(signal) => exact = signal,
            Err(end) => break end,
        }
        match registers[RIP] {
            Some(0) => break "root".to_owned(),
            Some(ip) => frames.push(ip),
            None => break "root".to_owned(),
        }
    };
    Walked { frames, end }
}

/// One frame up; whether the frame was a signal's.
fn step(
    stopped: &Stopped,
    module: &Module,
    address: u64,
    registers: &mut [Option<u64>; 17],
) -> Result<bool, String> {
    let found = module.functions.range(..=address).next_back();
    let (_, &(_, at, is_eh)) =
        found.filter(|(_, (end, ..))| address < *end).ok_or_else(|| "no rule".to_owned())?;
    if is_eh {
        let section = EhFrame::new(&module.eh_frame, LittleEndian);
        return step_in(&section, stopped, &module.bases, (at, address), registers);
    }
    let mut section = DebugFrame::new(&module.debug_frame, LittleEndian);
    section.set_address_size(8);
    step_in(&section, stopped, &module.bases, (at, address), registers)
}

fn step_in<'a, S: UnwindSection<EndianSlice<'a, LittleEndian>>>(
    section: &S,
    stopped: &Stopped,
    bases: &BaseAddresses,
    (at, address): (usize, u64),
    registers: &mut [Option<u64>; 17],
) -> Result<bool, String>
where
    S::Offset: UnwindOffset<usize>,
{
    let error = |error: gimli::Error| error.to_string();
    let fde =
        section.fde_from_offset(bases, S::Offset::from(at), S::cie_from_offset).map_err(error)?;
    let encoding = fde.cie().encoding();
    let mut context = UnwindContext::new();
    let row = fde.unwind_info_for_address(section, bases, &mut context, address).map_err(error)?;
    let before = *registers;
    let evaluate = |expression: UnwindExpression<usize>, first: Option<u64>| {
        evaluate(stopped, expression, section, encoding, first, &before)
    };
    let cfa = match *row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => {
            let base = before[usize::from(register.0)].ok_or("a register is lost")?;
            base.wrapping_add(offset as u64)
        }
        CfaRule::Expression(expression) => evaluate(expression, None)?,
    };
    let word = |address| stopped.word(address).ok_or_else(|| "not readable".to_owned());
    for number in 0..17 {
        registers[number] = match row.register(Register(number as u16)) {
            None if number == 7 => Some(cfa),
            // Callees keep rbx, rbp and r12 to r15.
            None => before[number].filter(|_| [3, 6, 12, 13, 14, 15].contains(&number)),
            Some(RegisterRule::Undefined) => None,
            Some(RegisterRule::SameValue) => before[number],
            Some(RegisterRule::Offset(offset)) => Some(word(cfa.wrapping_add(offset as u64))?),
            Some(RegisterRule::ValOffset(offset)) => Some(cfa.wrapping_add(offset as u64)),
            Some(RegisterRule::Register(other)) => before[usize::from(other.0)],
            Some(RegisterRule::Expression(expression)) => {
                Some(word(evaluate(expression, Some(cfa))?)?)
            }
            Some(RegisterRule::ValExpression(expression)) => Some(evaluate(expression, Some(cfa))?),
            Some(_) => None,
        };
    }
    Ok(fde.is_signal_trampoline())
}

fn evaluate<'a, S: UnwindSection<EndianSlice<'a, LittleEndian>>>(
    stopped: &Stopped,
    expression: UnwindExpression<usize>,
    section: &S,
    encoding: gimli::Encoding,
    first: Option<u64>,
    registers: &[Option<u64>; 17],
) -> Result<u64, String> {
    let error = |error: gimli::Error| error.to_string();
    let expression = expression.get(section).map_err(error)?;
    let mut evaluation: Evaluation<_> = expression.evaluation(encoding);
    if let Some(first) = first {
        evaluation.set_initial_value(first);
    }
    let mut state = evaluation.evaluate().map_err(error)?;
    loop {
        state = match state {
            EvaluationResult::Complete => break,
            EvaluationResult::RequiresMemory { address, .. } => {
                let word = stopped.word(address).ok_or("not readable")?;
                evaluation.resume_with_memory(Value::Generic(word)).map_err(error)?
            }
            EvaluationResult::RequiresRegister { register, .. } => {
                let value = registers[usize::from(register.0)].ok_or("a register is lost")?;
                evaluation.resume_with_register(Value::Generic(value)).map_err(error)?
            }
            other => return Err(format!("{other:?}")),
        };
    }
    match evaluation.as_result()[0].location {
        gimli::Location::Address { address } => Ok(address),
        ref other => Err(format!("{other:?}")),
    }
}
