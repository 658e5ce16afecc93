//! What the instructions of a function do to its frame: rules for code of which no call frame information speaks.
//!
//! Follows every path from the first instruction and keeps what is certain on all of them: which registers and which
//! slots of the stack hold an address in this frame, and where the caller's registers are. Functions that go to another
//! stack keep the way back in a register or on the new one; that is then the rule. What is not certain has no rule. Relies
//! on this: a function is entered with its return address on top of the stack; those it calls come back, with rsp, rbx, rbp
//! and r12 to r15 as they were (System V ABI 3.2.1; Go's assembly relies on it where it calls C); what it writes through
//! pointers of others is not in its own frame. Of a jump table nothing is known, and so nothing of a function that has one.
//!
//! Pure. Called for Go's assembly and the C linked into Go programs; knows neither.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};
use stackwire_collector_ebpf::unwind::{R12, RBP, RBX, REGISTERS, RSP, Rule, cfa, fp};

/// Slots of the stack remembered at once.
const MAX_SLOTS: usize = 32;

/// A function.
#[derive(Clone, Copy, Debug)]
pub struct Function<'a> {
    /// Address of its first instruction.
    pub start: u64,
    /// Its instructions.
    pub bytes: &'a [u8],
    /// A function that changes none of the registers its callers use, against the rules for functions.
    pub keeps_all: Option<u64>,
}

/// An instruction that can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Address of the instruction.
    pub from: u64,
    /// Address of the next.
    pub to: u64,
    /// How to leave the frame, where that is certain.
    pub rule: Option<Rule>,
    /// The stack pointer is on another stack than the function was entered with.
    pub left: bool,
}

/// The rules of a function, in order of addresses; of instructions no path leads to, nothing. `kept`: one more register to
/// be followed. `left`: how many instructions may be followed, those in loops again until nothing changes; what that is not
/// enough for has no rules.
#[must_use]
pub fn rules(function: &Function<'_>, kept: Option<u32>, left: &mut usize) -> Vec<Found> {
    let nodes = Analysis::new(function).run(left);
    let mut reached: Vec<&Node> = nodes.iter().filter(|node| node.length > 0).collect();
    reached.sort_unstable_by_key(|node| node.offset);
    let found = reached.iter().map(|node| {
        let from = function.start.wrapping_add(node.offset.into());
        let left = matches!(node.state.rsp(), Value::Address(stack, _) if stack != ENTERED);
        Found {
            from,
            to: from.saturating_add(node.length.into()),
            rule: node.state.rule(kept),
            left,
        }
    });
    let mut found: Vec<Found> = found.collect();
    if has_jump_table(&reached, function.bytes) {
        return Vec::new();
    }
    let leaves: Vec<Leave> = reached.iter().map(|node| node.leave).collect();
    before_return(&mut found, &leaves, kept);
    found
}

/// Whether it jumps to where a register says, and has code that nothing else leads to.
fn has_jump_table(reached: &[&Node], bytes: &[u8]) -> bool {
    let mut at = 0;
    let mut unreached = false;
    for node in reached {
        unreached |= bytes.get(at..node.offset as usize).is_some_and(|gap| !is_padding(gap));
        at = (node.offset + u32::from(node.length)) as usize;
    }
    unreached |= bytes.get(at..).is_some_and(|gap| !is_padding(gap));
    unreached && reached.iter().any(|node| matches!(node.leave, Leave::Table))
}

/// Code that never runs: between functions and before loops.
fn is_padding(bytes: &[u8]) -> bool {
    let decoder = Decoder::new(64, bytes, DecoderOptions::NONE);
    let fills = |one: Instruction| {
        matches!(one.mnemonic(), Mnemonic::Nop | Mnemonic::Int3 | Mnemonic::Ud2) || one.is_invalid()
    };
    bytes.iter().all(|&byte| byte == 0) || decoder.into_iter().all(fills)
}

/// Where a stack pointer that came from elsewhere is followed by `ret`, the frame is what is popped until then.
fn before_return(found: &mut [Found], leaves: &[Leave], kept: Option<u32>) {
    for index in (0..found.len()).rev() {
        let at_rsp =
            |rule: &Rule| rule.cfa == cfa::REGISTER && u32::from(rule.register & 15) == RSP;
        if found[index].rule.as_ref().is_some_and(at_rsp) {
            continue;
        }
        let next = found.get(index + 1).filter(|next| next.from == found[index].to);
        let next = next.and_then(|next| next.rule).filter(at_rsp);
        let rule = match (leaves[index], next) {
            // Whoever returns has given back what callees keep.
            (Leave::Return, _) => {
                let mut rule = by(cfa::REGISTER, RSP, 8);
                rule.ra_offset = -8;
                if let Some(register) = kept {
                    rule.register |= (register as u8) << 4;
                    rule.kept = 1;
                }
                Some(rule)
            }
            (Leave::Next(popped), Some(rule)) => {
                let offset = rule.offset.checked_add(popped).filter(|&offset| offset >= 8);
                offset.map(|offset| Rule { offset, ..rule })
            }
            (Leave::PopFramePointer, Some(rule)) if rule.fp == fp::SAME => {
                let offset = rule.offset.checked_add(8);
                offset.map(|offset| Rule { offset, fp: fp::AT_CFA, fp_offset: -offset, ..rule })
            }
            _ => None,
        };
        // By rbp it may be on a stack that others have moved meanwhile; what follows in a line is certain.
        found[index].rule = rule.or(found[index].rule);
    }
}

/// How an instruction goes on.
#[derive(Clone, Copy, Debug)]
enum Leave {
    /// To the next, with so many bytes taken off the stack.
    Next(i32),
    /// `pop %rbp`
    PopFramePointer,
    /// `ret`
    Return,
    /// To where a register or memory says.
    Table,
    /// Elsewhere, or with another stack pointer.
    Other,
}

/// What a register or a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Unknown,
    /// What the caller had in a register, by DWARF number.
    Callers(u32),
    /// An address on a stack: which, and how far from where that was begun with.
    Address(Stack, i32),
}

/// Where a stack pointer came from: what the function was entered with; or the instruction, by its offset, that set it to
/// what is not known, or rounded it.
type Stack = u32;

const ENTERED: Stack = u32::MAX;

#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    registers: [Value; REGISTERS],
    /// Slots of 8 bytes, where they are and what they hold; those not here are not known.
    slots: Vec<(Stack, i32, Value)>,
}

impl State {
    fn entered() -> Self {
        let mut registers = std::array::from_fn(|number| Value::Callers(number as u32));
        registers[RSP as usize] = Value::Address(ENTERED, 0);
        Self { registers, slots: Vec::new() }
    }

    /// Keeps what holds in both; whether that is less than before.
    fn join(&mut self, other: &Self) -> bool {
        let mut changed = false;
        for (mine, theirs) in self.registers.iter_mut().zip(&other.registers) {
            if mine != theirs && *mine != Value::Unknown {
                *mine = Value::Unknown;
                changed = true;
            }
        }
        let before = self.slots.len();
        self.slots.retain(|slot| other.slots.contains(slot));
        changed || self.slots.len() < before
    }

    fn of(&self, register: Register) -> Value {
        number(register).map_or(Value::Unknown, |number| self.registers[number])
    }

    fn set(&mut self, register: Register, value: Value) {
        if let Some(number) = number(register) {
            self.registers[number] = value;
        }
    }

    fn rsp(&self) -> Value {
        self.registers[RSP as usize]
    }

    /// Whatever is below the stack pointer may be overwritten, by who is called or by a signal.
    fn forget_below(&mut self) {
        if let Value::Address(stack, top) = self.rsp() {
            self.slots.retain(|&(of, at, _)| of != stack || at >= top);
        }
    }

    /// Remembers 8 bytes at an address, and forgets what they overwrite.
    fn store(&mut self, at: Value, value: Value) {
        let Value::Address(stack, offset) = at else { return };
        self.forget(stack, offset, 8);
        if value != Value::Unknown && self.slots.len() < MAX_SLOTS {
            self.slots.push((stack, offset, value));
        }
    }

    fn forget(&mut self, stack: Stack, offset: i32, size: i32) {
        let (from, to) = (offset.saturating_sub(7), offset.saturating_add(size));
        self.slots.retain(|&(of, at, _)| of != stack || at < from || at >= to);
    }

    fn load(&self, at: Value) -> Value {
        let Value::Address(stack, offset) = at else { return Value::Unknown };
        let mut slots = self.slots.iter();
        let slot = slots.find(|&&(of, at, _)| (of, at) == (stack, offset));
        slot.map_or(Value::Unknown, |&(.., value)| value)
    }

    /// Where an operand in memory is; not known when it has an index or another segment.
    fn address(&self, instruction: &Instruction) -> Value {
        if instruction.memory_index() != Register::None
            || instruction.segment_prefix() != Register::None
        {
            return Value::Unknown;
        }
        moved(self.of(instruction.memory_base()), instruction.memory_displacement64() as i64)
    }

    /// How to leave the frame from here.
    fn rule(&self, kept: Option<u32>) -> Option<Rule> {
        let mut rule = self.frame()?;
        rule.ra_offset = -8;
        (rule.fp, rule.fp_offset) = match self.place_of(RBP) {
            Place::Same => (fp::SAME, 0),
            Place::AtCfa(offset) => (fp::AT_CFA, offset),
            Place::Nowhere => (fp::LOST, 0),
        };
        if let Some(register) = kept {
            rule.register |= (register as u8) << 4;
            rule.kept = match self.place_of(register) {
                Place::Same => 1,
                Place::AtCfa(offset) => offset,
                Place::Nowhere => 0,
            };
        }
        Some(rule)
    }

    /// Where the frame address is: 8 above where the stack pointer was on entry.
    fn frame(&self) -> Option<Rule> {
        let to_frame = |offset: i32| 8i32.checked_sub(offset).filter(|&to_frame| to_frame >= 8);
        if let Value::Address(ENTERED, offset) = self.rsp() {
            return to_frame(offset).map(|offset| by(cfa::REGISTER, RSP, offset));
        }
        // What callees keep comes first: it can be used of a caller, too.
        let callee_saved = [RBP, RBX, R12];
        let others = (0..REGISTERS as u32).filter(|number| !callee_saved.contains(number));
        for number in callee_saved.into_iter().chain(others) {
            if let Value::Address(ENTERED, offset) = self.registers[number as usize]
                && let Some(offset) = to_frame(offset)
            {
                return Some(by(cfa::OTHER_STACK, number, offset));
            }
        }
        let Value::Address(stack, top) = self.rsp() else { return None };
        self.slots.iter().find_map(|&(of, at, value)| {
            let Value::Address(ENTERED, offset) = value else { return None };
            let place = at.checked_sub(top)?;
            (of == stack && place >= 0)
                .then(|| Some(Rule { offset2: to_frame(offset)?, ..by(cfa::MEMORY, RSP, place) }))?
        })
    }

    fn place_of(&self, register: u32) -> Place {
        let original = Value::Callers(register);
        if self.registers[register as usize] == original {
            return Place::Same;
        }
        let mut slots = self.slots.iter();
        let slot = slots.find(|&&(stack, _, value)| stack == ENTERED && value == original);
        let offset = slot.and_then(|&(_, at, _)| at.checked_sub(8));
        offset.filter(|&offset| offset < 0).map_or(Place::Nowhere, Place::AtCfa)
    }
}

fn by(cfa: u8, register: u32, offset: i32) -> Rule {
    Rule { cfa, register: register as u8, offset, ..Rule::default() }
}

/// Where a register of the caller is.
enum Place {
    Same,
    AtCfa(i32),
    Nowhere,
}

fn moved(value: Value, by: i64) -> Value {
    match value {
        Value::Address(stack, offset) => {
            let offset = i32::try_from(by).ok().and_then(|by| offset.checked_add(by));
            offset.map_or(Value::Unknown, |offset| Value::Address(stack, offset))
        }
        _ => Value::Unknown,
    }
}

/// DWARF's numbers, of 64-bit registers.
fn number(register: Register) -> Option<usize> {
    const ORDER: [Register; REGISTERS] = [
        Register::RAX,
        Register::RDX,
        Register::RCX,
        Register::RBX,
        Register::RSI,
        Register::RDI,
        Register::RBP,
        Register::RSP,
        Register::R8,
        Register::R9,
        Register::R10,
        Register::R11,
        Register::R12,
        Register::R13,
        Register::R14,
        Register::R15,
    ];
    ORDER.iter().position(|&one| one == register)
}

/// Those a callee need not keep: rax, rdx, rcx, rsi, rdi, r8 to r11.
const SCRATCH: [usize; 9] = [0, 1, 2, 4, 5, 8, 9, 10, 11];

/// An instruction.
struct Node {
    /// From the beginning of the function.
    offset: u32,
    /// Bytes; 0: not decoded.
    length: u8,
    leave: Leave,
    /// What holds before it.
    state: State,
}

struct Analysis<'a> {
    function: &'a Function<'a>,
    info: InstructionInfoFactory,
    nodes: Vec<Node>,
    /// Number of the node at each offset.
    numbers: Vec<u32>,
}

const NO_NODE: u32 = u32::MAX;

impl<'a> Analysis<'a> {
    fn new(function: &'a Function<'a>) -> Self {
        let info = InstructionInfoFactory::new();
        Self { function, info, nodes: Vec::new(), numbers: vec![NO_NODE; function.bytes.len()] }
    }

    fn run(mut self, left: &mut usize) -> Vec<Node> {
        let Function { start, bytes, .. } = *self.function;
        let mut waiting = Vec::new();
        if !bytes.is_empty() {
            waiting.extend(self.reach(0, &State::entered()));
        }
        while let Some(number) = waiting.pop() {
            if *left == 0 {
                // What has been found so far may not hold on paths not yet followed.
                return Vec::new();
            }
            *left -= 1;
            let at = self.nodes[number].offset as usize;
            let ip = start.wrapping_add(at as u64);
            let instruction = Decoder::with_ip(64, &bytes[at..], ip, DecoderOptions::NONE).decode();
            if instruction.is_invalid() {
                continue;
            }
            let mut state = self.nodes[number].state.clone();
            self.nodes[number].length = instruction.len() as u8;
            self.nodes[number].leave = self.leave(&instruction);
            let before = state.rsp();
            self.execute(&instruction, &mut state);
            state.forget_below();
            let next = instruction.next_ip();
            let target = || Some(instruction.near_branch_target());
            let (next, target) = match instruction.flow_control() {
                FlowControl::Call => {
                    // A call of a place inside it pushes an address and goes there (retpolines).
                    let inside = instruction.near_branch_target().wrapping_sub(start);
                    if inside > 0 && inside < bytes.len() as u64 {
                        let mut pushed = state.clone();
                        pushed.set(Register::RSP, moved(before, -8));
                        waiting.extend(self.reach(inside as usize, &pushed));
                    }
                    (Some(next), None)
                }
                FlowControl::Next | FlowControl::IndirectCall => (Some(next), None),
                FlowControl::ConditionalBranch => (Some(next), target()),
                FlowControl::UnconditionalBranch => (None, target()),
                _ => (None, None),
            };
            for to in [target, next].into_iter().flatten() {
                let to = to.wrapping_sub(start);
                if to < bytes.len() as u64 {
                    waiting.extend(self.reach(to as usize, &state));
                }
            }
        }
        self.nodes
    }

    /// A path leads to an offset with this state: the node's number, when that is news.
    fn reach(&mut self, offset: usize, state: &State) -> Option<usize> {
        if self.numbers[offset] == NO_NODE {
            self.numbers[offset] = self.nodes.len() as u32;
            let (state, offset) = (state.clone(), offset as u32);
            self.nodes.push(Node { offset, length: 0, leave: Leave::Other, state });
            return Some(self.nodes.len() - 1);
        }
        let number = self.numbers[offset] as usize;
        self.nodes[number].state.join(state).then_some(number)
    }

    fn leave(&mut self, instruction: &Instruction) -> Leave {
        match instruction.flow_control() {
            FlowControl::Return if instruction.code() == Code::Retnq => return Leave::Return,
            FlowControl::Next => {}
            FlowControl::Call | FlowControl::IndirectCall => return Leave::Next(0),
            FlowControl::IndirectBranch => return Leave::Table,
            _ => return Leave::Other,
        }
        let popped = instruction.stack_pointer_increment();
        let to = instruction.op0_register();
        let used = self.info.info(instruction).used_registers().iter();
        let writes = |register| {
            used.clone()
                .any(|used| used.register().full_register() == register && is_write(used.access()))
        };
        match instruction.mnemonic() {
            Mnemonic::Pop if to == Register::RBP => Leave::PopFramePointer,
            // The frame pointer of this frame or of the caller: `pop %rbp` or `ret` tells.
            _ if !writes(Register::RSP) => Leave::Next(0),
            Mnemonic::Add if to == Register::RSP && instruction.op1_kind() != OpKind::Register => {
                i32::try_from(instruction.immediate(1) as i64).map_or(Leave::Other, Leave::Next)
            }
            _ if instruction.is_stack_instruction() && popped != 0 => Leave::Next(popped),
            _ => Leave::Other,
        }
    }

    fn execute(&mut self, instruction: &Instruction, state: &mut State) {
        let operand = |index: u32| instruction.op_kind(index) == OpKind::Register;
        let wide = |index: u32| operand(index) && instruction.op_register(index).is_gpr64();
        let to = instruction.op0_register();
        let rsp = state.rsp();
        match instruction.mnemonic() {
            Mnemonic::Call => {
                if self.function.keeps_all != Some(instruction.near_branch_target()) {
                    SCRATCH.iter().for_each(|&number| state.registers[number] = Value::Unknown);
                }
            }
            Mnemonic::Push if wide(0) => {
                let value = state.of(to);
                let below = moved(rsp, -8);
                state.set(Register::RSP, below);
                state.store(below, value);
            }
            Mnemonic::Pop if wide(0) && to != Register::RSP => {
                let value = state.load(rsp);
                state.set(Register::RSP, moved(rsp, 8));
                state.set(to, value);
            }
            Mnemonic::Leave if instruction.code() == Code::Leaveq => {
                let frame = state.of(Register::RBP);
                state.set(Register::RBP, state.load(frame));
                self.set_stack(instruction, moved(frame, 8), state);
            }
            Mnemonic::Mov if wide(0) && wide(1) => {
                let value = state.of(instruction.op1_register());
                self.assign(instruction, to, value, state);
            }
            Mnemonic::Mov if wide(0) && instruction.op1_kind() == OpKind::Memory => {
                let value = state.load(state.address(instruction));
                self.assign(instruction, to, value, state);
            }
            Mnemonic::Mov if instruction.op0_kind() == OpKind::Memory && wide(1) => {
                let value = state.of(instruction.op1_register());
                state.store(state.address(instruction), value);
            }
            Mnemonic::Lea if wide(0) => {
                let value = state.address(instruction);
                self.assign(instruction, to, value, state);
            }
            Mnemonic::Add | Mnemonic::Sub
                if wide(0) && !operand(1) && instruction.op1_kind() != OpKind::Memory =>
            {
                let by = instruction.immediate(1) as i64;
                let by = if instruction.mnemonic() == Mnemonic::Sub {
                    by.checked_neg()
                } else {
                    Some(by)
                };
                let value = by.map_or(Value::Unknown, |by| moved(state.of(to), by));
                self.assign(instruction, to, value, state);
            }
            _ => self.clobber(instruction, state),
        }
    }

    /// A register has a new value.
    fn assign(&self, instruction: &Instruction, to: Register, value: Value, state: &mut State) {
        if to == Register::RSP {
            self.set_stack(instruction, value, state);
        } else {
            state.set(to, value);
        }
    }

    /// Of a stack pointer that is not known, what is put on that stack is known all the same.
    fn set_stack(&self, instruction: &Instruction, value: Value, state: &mut State) {
        let here = instruction.ip().wrapping_sub(self.function.start) as Stack;
        let value = match value {
            Value::Address(..) => value,
            _ => {
                // Another stack each time round.
                let is_it = |value: &Value| matches!(value, Value::Address(of, _) if *of == here);
                state.slots.retain(|(of, _, value)| *of != here && !is_it(value));
                let registers = state.registers.iter_mut().filter(|value| is_it(value));
                registers.for_each(|value| *value = Value::Unknown);
                Value::Address(here, 0)
            }
        };
        state.set(Register::RSP, value);
    }

    /// Any other instruction: what it writes is not known afterwards.
    fn clobber(&mut self, instruction: &Instruction, state: &mut State) {
        let rsp = state.rsp();
        let increment = instruction.stack_pointer_increment();
        let address = state.address(instruction);
        let info = self.info.info(instruction);
        let mut stack_is_set = false;
        for used in info.used_registers().iter().filter(|used| is_write(used.access())) {
            let register = used.register().full_register();
            if register == Register::RSP {
                stack_is_set = true;
            } else {
                state.set(register, Value::Unknown);
            }
        }
        for used in info.used_memory().iter().filter(|used| is_write(used.access())) {
            let size = used.memory_size().size().max(8) as i32;
            if let Value::Address(stack, offset) = address
                && !instruction.is_stack_instruction()
            {
                state.forget(stack, offset, size);
            }
        }
        if instruction.is_stack_instruction() && increment != 0 {
            let top = moved(rsp, increment.into());
            if increment < 0
                && let Value::Address(stack, offset) = top
            {
                state.forget(stack, offset, -increment);
            }
            state.set(Register::RSP, top);
        } else if stack_is_set {
            self.set_stack(instruction, Value::Unknown, state);
        }
    }
}

fn is_write(access: OpAccess) -> bool {
    !matches!(access, OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Rules by offset of the instruction.
    fn of(bytes: &[u8], kept: Option<u32>) -> Vec<(u64, Option<Rule>)> {
        let mut left = 1000;
        let found = rules(&Function { start: 0x1000, bytes, keeps_all: None }, kept, &mut left);
        found.into_iter().map(|one| (one.from - 0x1000, one.rule)).collect()
    }

    fn at_rsp(offset: i32) -> Option<Rule> {
        Some(Rule { ra_offset: -8, ..by(cfa::REGISTER, RSP, offset) })
    }

    fn framed(rule: Option<Rule>) -> Option<Rule> {
        rule.map(|rule| Rule { fp: fp::AT_CFA, fp_offset: -16, ..rule })
    }

    fn by_rbp() -> Option<Rule> {
        Some(Rule { ra_offset: -8, ..by(cfa::OTHER_STACK, RBP, 16) })
    }

    #[test]
    fn the_way_back_from_another_stack_is_in_rbp() {
        // As runtime.nanotime1 of Go 1.26.
        let code = [
            0x55, // 0: push %rbp
            0x48, 0x89, 0xe5, // 1: mov %rsp,%rbp
            0x48, 0x83, 0xec, 0x10, // 4: sub $16,%rsp
            0x49, 0x89, 0xe4, // 8: mov %rsp,%r12
            0x75, 0x04, // 11: jne 17
            0x48, 0x8b, 0x62, 0x38, // 13: mov 0x38(%rdx),%rsp
            0x48, 0x83, 0xe4, 0xf0, // 17: and $-16,%rsp
            0xff, 0xd0, // 21: call *%rax
            0x4c, 0x89, 0xe4, // 23: mov %r12,%rsp
            0x48, 0x83, 0xc4, 0x10, // 26: add $16,%rsp
            0x5d, // 30: pop %rbp
            0xc3, // 31: ret
        ];
        let framed_by_rbp = framed(by_rbp());
        let expected = [
            (0, at_rsp(8)),
            (1, at_rsp(16)),
            (4, framed(at_rsp(16))),
            (8, framed(at_rsp(32))),
            (11, framed(at_rsp(32))),
            (13, framed(at_rsp(32))),
            (17, framed_by_rbp),
            (21, framed_by_rbp),
            (23, framed_by_rbp),
            (26, framed(at_rsp(32))),
            (30, framed(at_rsp(16))),
            (31, at_rsp(8)),
        ];
        assert_eq!(of(&code, None), expected);
    }

    #[test]
    fn the_way_back_is_in_a_register_that_callees_keep() {
        // As racecall.
        let code = [
            0x49, 0x89, 0xe4, // 0: mov %rsp,%r12
            0x49, 0x8b, 0x62, 0x38, // 3: mov 0x38(%r10),%rsp
            0xff, 0xd0, // 7: call *%rax
            0x4c, 0x89, 0xe4, // 9: mov %r12,%rsp
            0xc3, // 12: ret
        ];
        let found = of(&code, Some(R12));
        let r12 = (R12 << 4) as u8;
        let rule = |at: usize| found[at].1.unwrap_or_default();
        let other = by(cfa::OTHER_STACK, R12, 8);
        assert_eq!(rule(2), Rule { register: r12 | R12 as u8, ra_offset: -8, ..other });
        assert_eq!((rule(0).register, rule(0).kept), (r12 | RSP as u8, 1));
        assert_eq!(rule(4).cfa, cfa::REGISTER);
        // In C, where it is pushed: push %r12; push %rbx; xor %r12d,%r12d; ret
        let pushed = of(&[0x41, 0x54, 0x53, 0x45, 0x31, 0xe4, 0xc3], Some(R12));
        assert_eq!(pushed[2].1.map(|rule| (rule.offset, rule.kept)), Some((24, 1)));
        assert_eq!(pushed[3].1.map(|rule| (rule.offset, rule.kept)), Some((24, -16)));
    }

    #[test]
    fn before_a_return_the_stack_is_what_is_popped() {
        // As runtime.systemstack ends: mov 0x38(%rax),%rsp; mov 0x60(%rax),%rbp; pop %rbp; ret
        let code = [0x48, 0x8b, 0x60, 0x38, 0x48, 0x8b, 0x68, 0x60, 0x5d, 0xc3];
        let found = of(&code, None);
        assert_eq!(found[1..], [(4, framed(at_rsp(16))), (8, framed(at_rsp(16))), (9, at_rsp(8))]);
        // Where the way back is on the new stack: mov %rsp,%rdx; and $-16,%rsp; push %rdx; call *%rax; pop %rsp
        let found = of(&[0x48, 0x89, 0xe2, 0x48, 0x83, 0xe4, 0xf0, 0x52, 0xff, 0xd0, 0x90], None);
        let rule = Rule { offset2: 8, ra_offset: -8, ..by(cfa::MEMORY, RSP, 0) };
        assert_eq!(found[4], (10, Some(rule)));
    }

    #[test]
    fn what_differs_by_path_is_not_known() {
        // je 3; push %rax; nop
        let found = of(&[0x74, 0x01, 0x50, 0x90], None);
        assert_eq!(found, [(0, at_rsp(8)), (2, at_rsp(8)), (3, None)]);
        // Nor is anything when there was no time to follow every path.
        let function = Function { start: 0, bytes: &[0x90, 0x90, 0x90], keeps_all: None };
        assert_eq!(rules(&function, None, &mut 2), []);
    }

    #[test]
    fn of_a_function_with_a_jump_table_nothing_is_known() {
        // push %rax; jmp *%rcx; pop %rax; ret: who jumps to the third is not seen.
        assert_eq!(of(&[0x50, 0xff, 0xe1, 0x58, 0xc3], None), []);
        // Called on at its end, and filled up: mov %rdi,%rax; jmp *%rax; nopl 0(%rax)
        let found = of(&[0x48, 0x89, 0xf8, 0xff, 0xe0, 0x0f, 0x1f, 0x40, 0x00], None);
        assert_eq!(found, [(0, at_rsp(8)), (3, at_rsp(8))]);
    }

    #[test]
    fn a_call_of_a_place_inside_pushes_an_address() {
        // As runtime.retpolineAX: call 1f; 0: pause; jmp 0b; 1: mov %rax,(%rsp); ret
        let code = [0xe8, 4, 0, 0, 0, 0xf3, 0x90, 0xeb, 0xfc, 0x48, 0x89, 0x04, 0x24, 0xc3];
        let found = of(&code, None);
        assert_eq!(found.last(), Some(&(13, at_rsp(16))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_followed_in_bounded_time(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
            start in prop_oneof![Just(0), Just(0x40_1000), (u64::MAX - 500)..],
        ) {
            let mut left = 10_000;
            let found = rules(&Function { start, bytes: &bytes, keeps_all: None }, Some(RBX), &mut left);
            prop_assert!(found.len() <= bytes.len());
            for one in found.iter().filter_map(|one| one.rule) {
                prop_assert!(one.cfa != cfa::REGISTER || one.offset >= 8);
            }
        }
    }
}
