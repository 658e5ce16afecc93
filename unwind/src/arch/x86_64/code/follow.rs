//! Every path through a function, until nothing changes any more: what holds before each
//! instruction. Pure.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};

use super::Function;
use super::state::{Stack, State, Value, moved};

/// How an instruction goes on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Leave {
    /// To the next, with so many bytes taken off the stack.
    Next(i32),
    /// `pop %rbp`
    PopFramePointer,
    /// To the next, with another rbp, from so far above the stack pointer or from elsewhere.
    SetFramePointer(Option<i32>),
    /// `ret`
    Return,
    /// To where a register or memory says.
    Table,
    /// Elsewhere, or with another stack pointer.
    Other,
}

/// Those a callee need not keep: rax, rdx, rcx, rsi, rdi, r8 to r11.
pub(super) const SCRATCH: [usize; 9] = [0, 1, 2, 4, 5, 8, 9, 10, 11];

/// An instruction.
pub(super) struct Node {
    /// From the beginning of the function.
    pub(super) offset: u32,
    /// Bytes; 0: not decoded.
    pub(super) length: u8,
    pub(super) leave: Leave,
    /// What holds before it.
    pub(super) state: State,
}

pub(super) struct Analysis<'a> {
    function: &'a Function<'a>,
    info: InstructionInfoFactory,
    nodes: Vec<Node>,
    /// Number of the node at each offset.
    numbers: Vec<u32>,
}

pub(super) const NO_NODE: u32 = u32::MAX;

impl<'a> Analysis<'a> {
    pub(super) fn new(function: &'a Function<'a>) -> Self {
        let info = InstructionInfoFactory::new();
        Self { function, info, nodes: Vec::new(), numbers: vec![NO_NODE; function.bytes.len()] }
    }

    pub(super) fn run(mut self, left: &mut usize) -> Vec<Node> {
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
    pub(super) fn reach(&mut self, offset: usize, state: &State) -> Option<usize> {
        if self.numbers[offset] == NO_NODE {
            self.numbers[offset] = self.nodes.len() as u32;
            let (state, offset) = (state.clone(), offset as u32);
            self.nodes.push(Node { offset, length: 0, leave: Leave::Other, state });
            return Some(self.nodes.len() - 1);
        }
        let number = self.numbers[offset] as usize;
        self.nodes[number].state.join(state).then_some(number)
    }

    pub(super) fn leave(&mut self, instruction: &Instruction) -> Leave {
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
            _ if writes(Register::RBP) && !writes(Register::RSP) => {
                let from_stack = instruction.mnemonic() == Mnemonic::Mov
                    && instruction.memory_base() == Register::RSP
                    && instruction.memory_index() == Register::None;
                let at = i32::try_from(instruction.memory_displacement64() as i64).ok();
                Leave::SetFramePointer(at.filter(|_| from_stack))
            }
            _ if !writes(Register::RSP) => Leave::Next(0),
            Mnemonic::Add if to == Register::RSP && instruction.op1_kind() != OpKind::Register => {
                i32::try_from(instruction.immediate(1) as i64).map_or(Leave::Other, Leave::Next)
            }
            _ if instruction.is_stack_instruction() && popped != 0 => Leave::Next(popped),
            _ => Leave::Other,
        }
    }

    pub(super) fn execute(&mut self, instruction: &Instruction, state: &mut State) {
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
    pub(super) fn assign(
        &self,
        instruction: &Instruction,
        to: Register,
        value: Value,
        state: &mut State,
    ) {
        if to == Register::RSP {
            self.set_stack(instruction, value, state);
        } else {
            state.set(to, value);
        }
    }

    /// Of a stack pointer that is not known, what is put on that stack is known all the same.
    pub(super) fn set_stack(&self, instruction: &Instruction, value: Value, state: &mut State) {
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
    pub(super) fn clobber(&mut self, instruction: &Instruction, state: &mut State) {
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

pub(super) fn is_write(access: OpAccess) -> bool {
    !matches!(access, OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess)
}
