//! Compiles an ELF file to its unwind table. Reads `.eh_frame`, then Go's own table, then
//! `.debug_frame` for what those leave out. A few places have known rules and need none of these.
//!
//! What cannot be read costs only the function it belongs to. What has a shape that no compiler
//! writes becomes code without a rule, never a guess. Runs in the collector's unwind compiler, and
//! in the symbolizer for copied stacks: on files of strangers.

use std::fs::File;

use gimli::{
    BaseAddresses, CfaRule, DebugFrame, EhFrame, EndianSlice, LittleEndian, Register, RegisterRule,
    UnwindContext, UnwindExpression, UnwindSection, UnwindTableRow,
};
use stackwire_collector_ebpf::arch::{R12, RBP, RBX, RSP};
use stackwire_collector_ebpf::{Rule, cfa, fp, ra};
use stackwire_model::BuildId;

use crate::arch::expression::{Shape, shape};
use crate::arch::{builtins, go, startup};
use crate::elf::Elf;
use crate::error::CompileError;
use crate::interpreter::Interpreter;
use crate::pages::Spans;
use crate::shared::Shared;
use crate::table::Table;
use crate::{cpython, ruby, v8};

pub(crate) type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// DWARF number of the return address, rip.
const RIP: Register = Register(16);
/// Bytes of the code a program begins with.
const ENTRY: u64 = 48;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes from there to where the child goes its own way.
const MAX_CLONE: u64 = 32;
/// A C library has two.
const MAX_CLONES: usize = 16;
const RBP_: Register = Register(RBP as u16);

/// The GNU build-id of an executable, if it has one.
///
/// # Errors
/// See [`CompileError`].
pub fn build_id(file: &File) -> Result<Option<BuildId>, CompileError> {
    Elf::open(file).map(|elf| elf.build_id())
}

/// Compiles the table of an executable.
///
/// # Errors
/// See [`CompileError`]. Memory: about thirty times the rows, at most a gigabyte for what is not
/// hostile.
pub fn compile(file: &File) -> Result<Table, CompileError> {
    let elf = Elf::open(file)?;
    let go = go::Table::load(&elf);
    // Seldom: one more register triples the number of rules.
    let kept = go.as_ref().is_some_and(go::Table::detects_races).then_some(R12);
    let mut spans = compile_with(&elf, go.as_ref(), kept)?;
    if kept.is_none() && spans.rules().any(|rule| u32::from(rule.register) == RBX) {
        spans = compile_with(&elf, go.as_ref(), Some(RBX))?;
    }
    let ruby = || ruby::layout(&elf).map(Interpreter::Ruby);
    let v8 = || v8::layout(&elf).map(Interpreter::V8);
    let interpreter = cpython::layout(&elf).map(Interpreter::Cpython).or_else(ruby).or_else(v8);
    let code = go.as_ref().and_then(|table| table.code(&elf)).unwrap_or_default();
    Ok(Table { interpreter, go: code, ..spans.finish(elf.build_id()) })
}

/// The rules, with where one more register is that callees keep, or without.
fn compile_with(
    elf: &Elf<'_>,
    go: Option<&go::Table>,
    kept: Option<u32>,
) -> Result<Spans, CompileError> {
    let mut spans = Spans::default();
    let mut bases = BaseAddresses::default();
    if let Some(text) = elf.section(".text") {
        bases = bases.set_text(text.address.0);
    }
    if let Some(got) = elf.section(".got") {
        bases = bases.set_got(got.address.0);
    }
    let mut found = false;
    if let Some(section) = elf.section(".eh_frame") {
        let content = elf.content(section)?;
        let mut section_ = EhFrame::new(&content, LittleEndian);
        section_.set_address_size(8);
        found = true;
        let bases = bases.clone().set_eh_frame(section.address.0);
        add_section(&section_, &bases, elf, &mut spans, &[], kept);
    }
    let covered = spans.covered();
    add_clones(elf, &mut spans);
    if let Some(table) = go {
        table.add(elf, &covered, kept, &mut spans);
    }
    let mut covered = spans.covered();
    if let Some(section) = elf.section(".debug_frame")
        && let Ok(content) = elf.content(section)
    {
        let mut section_ = DebugFrame::new(&content, LittleEndian);
        section_.set_address_size(8);
        found = true;
        add_section(&section_, &bases, elf, &mut spans, &covered, kept);
        covered = spans.covered();
    }
    if !found && covered.is_empty() {
        return Err(CompileError::Nothing);
    }
    builtins::add(elf, &covered, &mut spans);
    startup::add(elf, &covered, kept, &mut spans);
    add_stubs(elf, &covered, &mut spans);
    add_entry(elf, &covered, &mut spans);
    Ok(spans)
}

/// The first instructions of a program, where a C library does not say that nobody called them
/// (musl).
fn add_entry(elf: &Elf<'_>, covered: &[(u64, u64)], spans: &mut Spans) {
    let Some(offset) = elf.offset(elf.entry()).filter(|_| elf.entry() != 0) else { return };
    let next = covered.partition_point(|&(_, end)| end <= offset);
    let end = covered.get(next).map_or(u64::MAX, |&(start, _)| start).min(offset + ENTRY);
    spans.add(offset, end, Rule { cfa: cfa::ROOT, register: RSP as u8, ..Rule::default() });
}

/// `clone` and `clone3` of C libraries: their call frame information leaves out what runs in the
/// parent and in the child, from the system call to where the child goes its own way
/// (sysdeps/unix/sysv/linux/x86_64/clone3.S of glibc).
fn add_clones(elf: &Elf<'_>, spans: &mut Spans) {
    let at_rsp = |rule: &Rule| {
        let in_memory = rule.ra == ra::AT_CFA && rule.fp == fp::SAME;
        rule.cfa == cfa::REGISTER && u32::from(rule.register & 15) == RSP && in_memory
    };
    let gaps = spans.gaps_before_roots(MAX_CLONE).filter(|(_, _, rule)| at_rsp(rule));
    let gaps = gaps.filter(|&(start, ..)| elf.has_at(start, &SYSCALL)).take(MAX_CLONES);
    for (start, end, rule) in gaps.collect::<Vec<_>>() {
        spans.add(start, end, Rule { cfa: cfa::CLONE, ..rule });
    }
}

/// Linkage tables of functions chosen at the start of the program, of static programs and of LLVM's
/// linker: jumps and nothing else, of which linkers write no call frame information.
fn add_stubs(elf: &Elf<'_>, covered: &[(u64, u64)], spans: &mut Spans) {
    let of_static = elf.section(".plt").filter(|_| elf.section(".dynamic").is_none());
    for section in of_static.into_iter().chain(elf.section(".iplt")) {
        let Some(offset) = elf.offset(section.address.0) else { continue };
        let end = offset.saturating_add(section.size);
        let next = covered.partition_point(|&(_, end)| end <= offset);
        if covered.get(next).is_none_or(|&(start, _)| end <= start) {
            let rule = Rule { cfa: cfa::REGISTER, register: RSP as u8, ..Rule::default() };
            spans.add(offset, end, Rule { offset: 8, ra_offset: -8, ..rule });
        }
    }
}

/// Adds the functions of a section, but for those in `covered`.
fn add_section<'a, S: UnwindSection<Bytes<'a>>>(
    section: &S,
    bases: &BaseAddresses,
    elf: &Elf<'_>,
    spans: &mut Spans,
    covered: &[(u64, u64)],
    kept: Option<u32>,
) where
    S::Offset: gimli::UnwindOffset<usize>,
{
    let mut entries = section.entries(bases);
    let mut context = UnwindContext::new();
    let mut shared = Shared::default();
    // An entry that cannot be read ends the section: where the next begins is not known.
    while let Ok(Some(entry)) = entries.next() {
        let gimli::CieOrFde::Fde(partial) = entry else { continue };
        let cie = |section: &S, bases: &_, offset| shared.entry(section, bases, offset);
        let Ok(fde) = partial.parse(cie) else { continue };
        let (start, end) = (fde.initial_address(), fde.end_address());
        // Functions the linker has dropped are left at address 0.
        let Some(offset) = elf.offset(start).filter(|_| start != 0) else { continue };
        if end <= start || elf.offset(end - 1) != offset.checked_add(end - start - 1) {
            continue;
        }
        let after = covered.partition_point(|&(from, _)| from < offset + (end - start));
        if after.checked_sub(1).is_some_and(|before| covered[before].1 > offset) {
            continue;
        }
        let Ok(mut rows) = fde.rows(section, bases, &mut context) else { continue };
        while let Ok(Some(row)) = rows.next_row() {
            let (from, to) = (row.start_address().max(start), row.end_address().min(end));
            if from < to {
                let mut rule = rule(row, section, fde.cie());
                if let Some(register) = kept {
                    rule.register |= (register as u8) << 4;
                    rule.kept = kept_in(row, register);
                }
                spans.add(offset + (from - start), offset + (to - start), rule);
            }
        }
    }
}

/// The rule of a row; none when it has a shape the kernel side does not know.
pub(crate) fn rule<'a, S: UnwindSection<Bytes<'a>>>(
    row: &UnwindTableRow<usize>,
    section: &S,
    cie: &gimli::CommonInformationEntry<Bytes<'a>>,
) -> Rule {
    known_rule(row, section, cie).unwrap_or_default()
}

/// Where a register is, as [`Rule::kept`].
fn kept_in(row: &UnwindTableRow<usize>, register: u32) -> i32 {
    match row.register(Register(register as u16)) {
        None | Some(RegisterRule::SameValue) => 1,
        Some(RegisterRule::Offset(offset)) => i32::try_from(offset).map_or(0, |at| at.min(0)),
        _ => 0,
    }
}

fn known_rule<'a, S: UnwindSection<Bytes<'a>>>(
    row: &UnwindTableRow<usize>,
    section: &S,
    cie: &gimli::CommonInformationEntry<Bytes<'a>>,
) -> Option<Rule> {
    let shape_of =
        |expression: UnwindExpression<usize>| shape(expression.get(section).ok()?, cie.encoding());
    let mut rule = Rule::default();
    let small = |number: i64| i32::try_from(number).ok();
    let register = |number: u16| u8::try_from(number).ok().filter(|&number| number < 16);
    match *row.cfa() {
        CfaRule::RegisterAndOffset { register: of, offset } => {
            rule.cfa = cfa::REGISTER;
            rule.register = register(of.0)?;
            rule.offset = small(offset)?;
        }
        CfaRule::Expression(expression) => match shape_of(expression)? {
            Shape::Register(of, offset) => {
                rule.cfa = cfa::REGISTER;
                rule.register = register(of)?;
                rule.offset = small(offset)?;
            }
            Shape::Memory(of, offset, more) => {
                // As the C library writes it for where signal handlers return to:
                // uc_mcontext.gregs[REG_RSP].
                if cie.is_signal_trampoline() && (of, offset, more) == (RSP as u16, 160, 0) {
                    let (cfa, register) = (cfa::SIGNAL, RSP as u8);
                    return Some(Rule { cfa, register, ..Rule::default() });
                }
                rule.cfa = cfa::MEMORY;
                rule.register = register(of)?;
                rule.offset = small(offset)?;
                rule.offset2 = small(more)?;
            }
            Shape::Plt(offset, from) => {
                rule.cfa = cfa::PLT;
                rule.register = RSP as u8;
                rule.offset = small(offset)?;
                rule.offset2 = i32::try_from(from).ok().filter(|from| *from < 16)?;
            }
        },
    }
    match row.register(RIP) {
        // The last of its thread, as the C library marks `_start` and where threads begin.
        Some(RegisterRule::Undefined) => {
            let (cfa, register) = (cfa::ROOT, RSP as u8);
            return Some(Rule { cfa, register, ..Rule::default() });
        }
        Some(RegisterRule::Offset(offset)) => rule.ra_offset = small(offset)?,
        Some(RegisterRule::Register(of)) => {
            rule.ra = ra::REGISTER;
            rule.ra_offset = register(of.0)?.into();
        }
        _ => return None,
    }
    match row.register(RBP_) {
        // Callees keep rbp, so that no rule means what it says for others: it was not touched.
        None | Some(RegisterRule::SameValue) => rule.fp = fp::SAME,
        Some(RegisterRule::Offset(offset)) => {
            rule.fp = fp::AT_CFA;
            rule.fp_offset = small(offset)?;
        }
        Some(RegisterRule::Expression(expression)) => match shape_of(expression) {
            Some(Shape::Register(of, offset)) if u32::from(of) == RBP => {
                rule.fp = fp::AT_FP;
                rule.fp_offset = small(offset)?;
            }
            _ => rule.fp = fp::LOST,
        },
        _ => rule.fp = fp::LOST,
    }
    Some(rule)
}
