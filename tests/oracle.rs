//! The walker against another unwinder: the lines the kernel side runs, compiled for user space, on stopped threads of
//! real programs, frame by frame against call frame information interpreted by gimli; and against `eu-stack`.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EndianSlice, Evaluation, EvaluationResult, LittleEndian,
    Register, RegisterRule, UnwindContext, UnwindExpression, UnwindSection, Value,
};
use object::{Object, ObjectSection, ObjectSegment};
use stackwire_collector_ebpf::UserEnd;
use stackwire_collector_ebpf::unwind::{self, Cursor, GO_ON, Memory, Rule, SignalFrame, cfa};
use stackwire_unwind::{Table, compile};

use crate::support::build;
use crate::support::stopped::{Mapping, Stopped};
use crate::support::{Running, can};

/// Deepest stack compared.
const DEPTH: usize = 700;
/// DWARF number of rip.
const RIP: usize = 16;

impl Memory for &Stopped {
    fn word(&mut self, address: u64) -> Option<u64> {
        Stopped::word(self, address)
    }

    fn signal_frame(&mut self, address: u64, to: &mut SignalFrame) -> bool {
        let Some(bytes) = self.read(address, size_of::<SignalFrame>()) else { return false };
        for (word, bytes) in to.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap());
        }
        true
    }
}

/// A stack and, if it ended before the root, why.
#[derive(Debug, PartialEq, Eq)]
struct Walked {
    frames: Vec<u64>,
    end: String,
}

/// An executable, as both unwinders want it.
struct Module {
    table: Option<Table>,
    eh_frame: Vec<u8>,
    bases: BaseAddresses,
    /// Functions: first address, end, offset of the FDE.
    functions: BTreeMap<u64, (u64, gimli::EhFrameOffset)>,
    /// Offset in the file, bytes, address.
    segments: Vec<(u64, u64, u64)>,
}

#[derive(Default)]
struct Modules(HashMap<PathBuf, Module>);

impl Modules {
    fn of(&mut self, stopped: &Stopped, mapping: &Mapping) -> &Module {
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
        let mut functions = BTreeMap::new();
        let section = EhFrame::new(&eh_frame, LittleEndian);
        let mut entries = section.entries(&bases);
        while let Ok(Some(entry)) = entries.next() {
            let gimli::CieOrFde::Fde(partial) = entry else { continue };
            let Ok(fde) = partial.parse(EhFrame::cie_from_offset) else { continue };
            let at = gimli::EhFrameOffset(fde.offset());
            functions.insert(fde.initial_address(), (fde.end_address(), at));
        }
        Self { table, eh_frame, bases, functions, segments }
    }

    fn address(&self, offset: u64) -> Option<u64> {
        self.segments.iter().find_map(|&(start, size, address)| {
            (start..start + size).contains(&offset).then(|| offset - start + address)
        })
    }
}

/// The walk of the kernel side.
fn ours(stopped: &Stopped, modules: &mut Modules) -> Walked {
    let mut cursor =
        Cursor { ip: stopped.registers[RIP], known: 0xffff, exact: 1, ..Cursor::default() };
    cursor.registers.copy_from_slice(&stopped.registers[..16]);
    let mut signal = SignalFrame::default();
    let mut frames = vec![cursor.ip];
    let mut memory = stopped;
    let end = loop {
        if frames.len() == DEPTH {
            break "too deep".to_owned();
        }
        let ip = cursor.lookup_ip();
        let Some(mapping) = stopped.mapping(ip) else { break "not code".to_owned() };
        let found = if mapping.path.as_os_str().is_empty() {
            Rule { cfa: cfa::FRAME_POINTER, ..Rule::default() }
        } else {
            let offset = ip - mapping.start + mapping.offset;
            let table = modules.of(stopped, mapping).table.as_ref();
            let Some(table) = table else { break "no table".to_owned() };
            match table.rule(offset) {
                Some(rule) => *rule,
                None => break format!("no rule in {}", mapping.path.display()),
            }
        };
        match unwind::step(&mut memory, &mut signal, &mut cursor, &found) {
            GO_ON => frames.push(cursor.ip),
            end if end == UserEnd::Root as u64 => break "root".to_owned(),
            end => break format!("end {end} in {}", mapping.path.display()),
        }
    };
    Walked { frames, end }
}

/// The walk of the oracle: every register, every rule, every expression.
fn theirs(stopped: &Stopped, modules: &mut Modules) -> Walked {
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
            // Nobody knows better of code made at run time.
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
    let section = EhFrame::new(&module.eh_frame, LittleEndian);
    let found = module.functions.range(..=address).next_back();
    let (_, &(_, at)) =
        found.filter(|(_, (end, _))| address < *end).ok_or_else(|| "no rule".to_owned())?;
    let error = |error: gimli::Error| error.to_string();
    let fde =
        section.fde_from_offset(&module.bases, at, EhFrame::cie_from_offset).map_err(error)?;
    let encoding = fde.cie().encoding();
    let mut context = UnwindContext::new();
    let row = fde
        .unwind_info_for_address(&section, &module.bases, &mut context, address)
        .map_err(error)?;
    let before = *registers;
    let evaluate = |expression: UnwindExpression<usize>, first: Option<u64>| {
        evaluate(stopped, expression, &section, encoding, first, &before)
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

fn evaluate<'a>(
    stopped: &Stopped,
    expression: UnwindExpression<usize>,
    section: &EhFrame<EndianSlice<'a, LittleEndian>>,
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

/// What comparing came to.
#[derive(Default)]
struct Tally {
    snapshots: u64,
    frames: u64,
    equal: u64,
    roots: u64,
    /// What differed, with how often.
    others: BTreeMap<String, u64>,
}

impl Tally {
    fn compare(&mut self, name: &str, ours: &Walked, theirs: &Walked) {
        self.snapshots += 1;
        self.roots += u64::from(ours.end == "root");
        let equal = ours.frames.iter().zip(&theirs.frames).take_while(|(a, b)| a == b).count();
        let all = ours.frames.len().max(theirs.frames.len());
        self.frames += all as u64;
        self.equal += equal as u64;
        if equal < all || ours.end != "root" {
            let text =
                format!("{name}: ours {}, theirs {}, at {equal} of {all}", ours.end, theirs.end);
            *self.others.entry(text).or_default() += 1;
        }
    }
}

/// Stops a program again and again, at moments that have nothing to do with what it does.
fn compare(name: &str, pid: u32, count: u64, tally: &mut Tally, modules: &mut Modules) {
    let mut state = u64::from(pid) | 1;
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut taken = 0;
    while taken < count && Instant::now() < deadline {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros(state >> 40 & 0x3ff));
        let Some(stopped) = Stopped::stop(pid) else { continue };
        let (ours, theirs) = (ours(&stopped, modules), theirs(&stopped, modules));
        tally.compare(name, &ours, &theirs);
        taken += 1;
    }
    assert!(taken > 0, "{name} could not be stopped");
}

#[test]
fn ten_thousand_stacks_are_those_of_gimli() {
    if !can("root, to trace", rustix::process::geteuid().is_root()) {
        return;
    }
    let mut tally = Tally::default();
    let mut modules = Modules::default();
    for (name, program) in build::unwind_corpus() {
        let running = Running::start(&mut Command::new(program));
        compare(name, running.pid(), 2_600, &mut tally, &mut modules);
    }
    let python = "import hashlib, json, re, zlib\nprint('ready', flush=True)\n\
        def work():\n  data = json.dumps([{'k%d' % i: [i] * 9} for i in range(300)]).encode()\n  hashlib.sha512(data * 9).digest()\n\
        \x20 zlib.compress(data)\n  re.findall(rb'k(\\d+)', data)\n  sorted(data, key=lambda b: -b)\nwhile True: work()\n";
    let running = Running::start(Command::new("python3").args(["-c", python]));
    compare("python3", running.pid(), 2_000, &mut tally, &mut modules);
    for (what, count) in &tally.others {
        eprintln!("{count:6} {what}");
    }
    let share = 100.0 * tally.equal as f64 / tally.frames as f64;
    let roots = 100.0 * tally.roots as f64 / tally.snapshots as f64;
    eprintln!(
        "{} snapshots, {} frames, {share:.3} % equal, {roots:.2} % to the root",
        tally.snapshots, tally.frames
    );
    assert!(tally.snapshots >= 10_000);
    assert!(share >= 99.9 && roots >= 99.5);
}
