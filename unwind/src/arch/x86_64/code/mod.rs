//! Finds what the instructions of a function do to its frame, and makes rules from that. For code
//! that has no call frame information.
//!
//! Follows every path from the first instruction and keeps what is certain on all of them: which
//! registers and which slots of the stack hold an address in this frame, and where the caller's
//! registers are. A function that goes to another stack keeps the way back in a register or on the
//! new stack; that is then the rule. What is not certain has no rule.
//!
//! Relies on this. A function is entered with its return address on top of the stack. The functions
//! it calls come back, with rsp, rbx, rbp and r12 to r15 as they were (System V ABI 3.2.1; Go's
//! assembly relies on it where it calls C). What a function writes through pointers of others is
//! not in its own frame. Nothing is known of a jump table, and so nothing of a function that has
//! one.
//!
//! Pure. Called for Go's assembly, the C linked into Go programs, and what GCC adds to programs;
//! knows none of them.

mod follow;
mod state;

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic};
use stackwire_collector_ebpf::arch::RSP;
use stackwire_collector_ebpf::{Rule, cfa, fp};

use self::follow::{Analysis, Leave, Node};
use self::state::{ENTERED, Value, by};

/// A function.
#[derive(Clone, Copy, Debug)]
pub struct Function<'a> {
    /// Address of its first instruction.
    pub start: u64,
    /// Its instructions.
    pub bytes: &'a [u8],
    /// A function that changes none of the registers its callers use, against the rules for
    /// functions.
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

/// The rules of a function, in order of addresses. Instructions that no path leads to are left out.
/// `kept`: one more register to be followed. `left`: how many instructions may be followed; those
/// in loops are followed again until nothing changes. A function that needs more has no rules.
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

/// Where a stack pointer that came from elsewhere is followed by `ret`, the frame is what is popped
/// until then.
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
            // Who goes on with the caller's rbp has it from there.
            (Leave::SetFramePointer(at), Some(rule)) if rule.fp == fp::SAME => Some(match at {
                Some(at) => {
                    Rule { fp: fp::AT_CFA, fp_offset: at.wrapping_sub(rule.offset), ..rule }
                }
                None => Rule { fp: fp::LOST, ..rule },
            }),
            (Leave::SetFramePointer(_), Some(rule)) => Some(rule),
            (Leave::PopFramePointer, Some(rule)) if rule.fp == fp::SAME => {
                let offset = rule.offset.checked_add(8);
                offset.map(|offset| Rule { offset, fp: fp::AT_CFA, fp_offset: -offset, ..rule })
            }
            _ => None,
        };
        // By rbp it may be on a stack that others have moved meanwhile; what follows in a line is
        // certain.
        found[index].rule = rule.or(found[index].rule);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stackwire_collector_ebpf::arch::{R12, RBP, RBX};

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
        // As Go 1.20's functions end: mov (%rdi),%rsp; mov %eax,8(%rsp); mov 0x18(%rsp),%rbp; add
        // $0x20,%rsp; ret
        let code = [
            0x48, 0x8b, 0x27, 0x89, 0x44, 0x24, 8, 0x48, 0x8b, 0x6c, 0x24, 0x18, 0x48, 0x83, 0xc4,
            0x20, 0xc3,
        ];
        let (framed, bare) = (framed(at_rsp(40)), at_rsp(40));
        assert_eq!(of(&code, None)[1..4], [(3, framed), (7, framed), (12, bare)]);
        // Where the way back is on the new stack: mov %rsp,%rdx; and $-16,%rsp; push %rdx; call
        // *%rax; pop %rsp
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
