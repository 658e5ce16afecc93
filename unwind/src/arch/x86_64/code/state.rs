//! What is certain at an instruction: what registers and slots of the stack hold; and the rule that
//! follows from it. Pure.

use iced_x86::{Instruction, Register};
use stackwire_collector_ebpf::arch::{R12, RBP, RBX, REGISTERS, RSP};
use stackwire_collector_ebpf::{Rule, cfa, fp};

/// Slots of the stack remembered at once.
const MAX_SLOTS: usize = 32;

/// What a register or a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Unknown,
    /// What the caller had in a register, by DWARF number.
    Callers(u32),
    /// An address on a stack: which, and how far from where that was begun with.
    Address(Stack, i32),
}

/// Where a stack pointer came from. It is the one that the function was entered with, or the offset
/// of an instruction that set it to an unknown value or rounded it.
pub(super) type Stack = u32;

pub(super) const ENTERED: Stack = u32::MAX;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) registers: [Value; REGISTERS],
    /// Slots of 8 bytes, where they are and what they hold; those not here are not known.
    pub(super) slots: Vec<(Stack, i32, Value)>,
}

impl State {
    pub(super) fn entered() -> Self {
        let mut registers = std::array::from_fn(|number| Value::Callers(number as u32));
        registers[RSP as usize] = Value::Address(ENTERED, 0);
        Self { registers, slots: Vec::new() }
    }

    /// Keeps what holds in both; whether that is less than before.
    pub(super) fn join(&mut self, other: &Self) -> bool {
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

    pub(super) fn of(&self, register: Register) -> Value {
        number(register).map_or(Value::Unknown, |number| self.registers[number])
    }

    pub(super) fn set(&mut self, register: Register, value: Value) {
        if let Some(number) = number(register) {
            self.registers[number] = value;
        }
    }

    pub(super) fn rsp(&self) -> Value {
        self.registers[RSP as usize]
    }

    /// Whatever is below the stack pointer may be overwritten, by who is called or by a signal.
    pub(super) fn forget_below(&mut self) {
        if let Value::Address(stack, top) = self.rsp() {
            self.slots.retain(|&(of, at, _)| of != stack || at >= top);
        }
    }

    /// Remembers 8 bytes at an address, and forgets what they overwrite.
    pub(super) fn store(&mut self, at: Value, value: Value) {
        let Value::Address(stack, offset) = at else { return };
        self.forget(stack, offset, 8);
        if value != Value::Unknown && self.slots.len() < MAX_SLOTS {
            self.slots.push((stack, offset, value));
        }
    }

    pub(super) fn forget(&mut self, stack: Stack, offset: i32, size: i32) {
        let (from, to) = (offset.saturating_sub(7), offset.saturating_add(size));
        self.slots.retain(|&(of, at, _)| of != stack || at < from || at >= to);
    }

    pub(super) fn load(&self, at: Value) -> Value {
        let Value::Address(stack, offset) = at else { return Value::Unknown };
        let mut slots = self.slots.iter();
        let slot = slots.find(|&&(of, at, _)| (of, at) == (stack, offset));
        slot.map_or(Value::Unknown, |&(.., value)| value)
    }

    /// Where an operand in memory is; not known when it has an index or another segment.
    pub(super) fn address(&self, instruction: &Instruction) -> Value {
        if instruction.memory_index() != Register::None
            || instruction.segment_prefix() != Register::None
        {
            return Value::Unknown;
        }
        moved(self.of(instruction.memory_base()), instruction.memory_displacement64() as i64)
    }

    /// How to leave the frame from here.
    pub(super) fn rule(&self, kept: Option<u32>) -> Option<Rule> {
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
    pub(super) fn frame(&self) -> Option<Rule> {
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

    pub(super) fn place_of(&self, register: u32) -> Place {
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

pub(super) fn by(cfa: u8, register: u32, offset: i32) -> Rule {
    Rule { cfa, register: register as u8, offset, ..Rule::default() }
}

/// Where a register of the caller is.
pub(super) enum Place {
    Same,
    AtCfa(i32),
    Nowhere,
}

pub(super) fn moved(value: Value, by: i64) -> Value {
    match value {
        Value::Address(stack, offset) => {
            let offset = i32::try_from(by).ok().and_then(|by| offset.checked_add(by));
            offset.map_or(Value::Unknown, |offset| Value::Address(stack, offset))
        }
        _ => Value::Unknown,
    }
}

/// DWARF's numbers, of 64-bit registers.
pub(super) fn number(register: Register) -> Option<usize> {
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
