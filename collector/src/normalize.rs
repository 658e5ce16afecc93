//! Addresses become (executable, offset): the one place where they change kind. Pure.
//!
//! Return addresses are passed on unchanged: the symbolizer subtracts 1 to find the call. Here 1 is
//! subtracted only to find the mapping that the call lies in.

use std::rc::Rc;

use stackwire_collector_ebpf::{INTERRUPTED, KernelEnd, UserEnd};
use stackwire_model::{Address, EndReason, FileOffset, KernelAddr, KernelOffset, UserAddr};

use crate::host::kallsyms::KernelLayout;
use crate::process::executable::{Executable, Executables, Kind};
use crate::process::{Mapping, Mappings, Process};

/// How a frame's address is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// The instruction that was running.
    Leaf,
    /// A return address.
    Caller,
    /// Interrupted by a signal: the instruction that was running then.
    Interrupted,
}

/// A frame, independent of where its code was loaded.
#[derive(Clone, Debug)]
pub struct Frame {
    /// What the code came from.
    pub executable: Rc<Executable>,
    /// Address in it.
    pub address: Address,
    /// How to read the address.
    pub kind: FrameKind,
    /// The mapping it lies in; none for kernel frames and unmapped addresses.
    pub mapping: Option<Mapping>,
}

/// A stack, leaf first.
#[derive(Clone, Debug)]
pub struct Stack {
    /// Frames.
    pub frames: Vec<Frame>,
    /// Why it ends.
    pub end: EndReason,
}

/// Beyond it are no user addresses: five-level page tables have 57 bits.
const USER_END: u64 = 1 << 57;

/// Normalizes a user stack of `process`; `None` when there was none.
///
/// A program may jump to any address and be interrupted there. An address that no program can have
/// is not sent, because it may be a kernel address.
///
/// A return address outside executable memory ends the stack. In a walk by frame pointers, a caller
/// that keeps none leaves any number in that register, and a frame must never be a guess.
pub fn user(
    process: &Process,
    addresses: &[u64],
    end: u8,
    unmapped: &Rc<Executable>,
) -> Option<Stack> {
    if addresses.is_empty() {
        return None;
    }
    let known = matches!(process.mappings, Mappings::Known(_));
    let mut frames = Vec::with_capacity(addresses.len());
    for (index, &address) in addresses.iter().enumerate() {
        let kind = match index {
            0 => FrameKind::Leaf,
            _ if address & INTERRUPTED != 0 => FrameKind::Interrupted,
            _ => FrameKind::Caller,
        };
        let address = if index == 0 { address } else { address & !INTERRUPTED };
        if address >= USER_END {
            if index == 0 {
                let (executable, address) = (Rc::clone(unmapped), Address::User(UserAddr(0)));
                frames.push(Frame { executable, address, kind, mapping: None });
            }
            return Some(Stack { frames, end: EndReason::NotCode });
        }
        // A call may be the last instruction of a mapping, its return address just behind it.
        let inside = if kind == FrameKind::Caller { address.wrapping_sub(1) } else { address };
        match process.mapping(UserAddr(inside)) {
            Some(mapping) => frames.push(Frame {
                executable: Rc::clone(&mapping.executable),
                address: address_in(mapping, UserAddr(address)),
                kind,
                mapping: Some(mapping.clone()),
            }),
            None if index == 0 || !known => frames.push(Frame {
                executable: Rc::clone(unmapped),
                address: Address::User(UserAddr(address)),
                kind,
                mapping: None,
            }),
            None => return Some(Stack { frames, end: EndReason::NotCode }),
        }
    }
    Some(Stack { frames, end: if known { user_end(end) } else { EndReason::NoMappings } })
}

fn address_in(mapping: &Mapping, address: UserAddr) -> Address {
    match mapping.executable.kind {
        Kind::Anonymous | Kind::Described { .. } => Address::User(address),
        // The image of the vDSO starts with its mapping.
        Kind::Vdso => Address::File(FileOffset(address.0 - mapping.start.0)),
        _ => Address::File(mapping.offset(address)),
    }
}

/// Normalizes a kernel stack; `None` when there was none. No absolute address survives.
pub fn kernel(
    layout: &KernelLayout,
    addresses: &[u64],
    end: u8,
    executables: &mut Executables,
) -> Option<Stack> {
    if addresses.is_empty() && end != KernelEnd::Failed as u8 {
        return None;
    }
    let frames = addresses.iter().enumerate().map(|(index, &address)| {
        let kind = if index == 0 { FrameKind::Leaf } else { FrameKind::Caller };
        // As above: look where the call is, report where it returns.
        let back = u64::from(index != 0);
        let at = |offset: KernelOffset| Address::Kernel(offset.saturating_add(back));
        let (kind_of, address) = match layout.locate(KernelAddr(address.wrapping_sub(back))) {
            Some(("", offset)) => (Kind::Kernel, at(offset)),
            Some((module, offset)) => (Kind::Module(module.to_owned()), at(offset)),
            // Where the kernel is may not be told, so all of it is one place.
            None if layout.is_empty() => (Kind::Kernel, Address::Kernel(KernelOffset(0))),
            None => (Kind::Unmapped, Address::User(UserAddr(0))),
        };
        Frame { executable: executables.intern(kind_of), address, kind, mapping: None }
    });
    Some(Stack { frames: frames.collect(), end: kernel_end(end) })
}

fn user_end(end: u8) -> EndReason {
    const ENDS: [(UserEnd, EndReason); 17] = [
        (UserEnd::Unreadable, EndReason::Unreadable),
        (UserEnd::DepthLimit, EndReason::DepthLimit),
        (UserEnd::NoFramePointer, EndReason::NoFramePointer),
        (UserEnd::Compat, EndReason::Compat),
        (UserEnd::NotCode, EndReason::NotCode),
        (UserEnd::NoTableYet, EndReason::NoTableYet),
        (UserEnd::NoTable, EndReason::NoTable),
        (UserEnd::NoRule, EndReason::NoUnwindRule),
        (UserEnd::RegisterLost, EndReason::RegisterLost),
        (UserEnd::BadStack, EndReason::BadStack),
        (UserEnd::NoMappingsYet, EndReason::NoMappingsYet),
        (UserEnd::TablesReplaced, EndReason::TablesReplaced),
        (UserEnd::UnknownSwitch, EndReason::UnknownSwitch),
        (UserEnd::OverShare, EndReason::OverShare),
        (UserEnd::CopyEnded, EndReason::CopyEnded),
        (UserEnd::NotCopied, EndReason::NotCopied),
        (UserEnd::NotSaid, EndReason::NotSaid),
    ];
    let found = ENDS.iter().find(|(number, _)| *number as u8 == end);
    found.map_or(EndReason::Root, |&(_, end)| end)
}

fn kernel_end(end: u8) -> EndReason {
    const DEPTH: u8 = KernelEnd::DepthLimit as u8;
    const FAILED: u8 = KernelEnd::Failed as u8;
    match end {
        DEPTH => EndReason::DepthLimit,
        FAILED => EndReason::Failed,
        _ => EndReason::Root,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::kallsyms;
    use crate::process::Processes;
    use crate::sources::side_band::{Change, Event, Mapped};

    fn processes() -> Processes {
        let mut processes = Processes::new(None, false);
        let pid = 4_000_001;
        let exec = Change::Comm { tid: pid, comm: "x".into(), exec: true };
        processes.apply(&Event { time_ns: 0, pid, change: exec });
        for (path, start) in [("/bin/x", 0x1000), ("[vdso]", 0x8000), ("//anon", 0x9000)] {
            let mapped = Mapped {
                start: UserAddr(start),
                length: 0x1000,
                file_offset: FileOffset(0x500),
                path: path.into(),
                ..Mapped::default()
            };
            processes.apply(&Event { time_ns: 0, pid, change: Change::Map(mapped) });
        }
        processes
    }

    #[test]
    fn each_kind_of_mapping_counts_from_its_own_base() {
        let mut processes = processes();
        let unmapped = processes.executables().intern(Kind::Unmapped);
        let process = processes.sampled(4_000_001, 1, 1);
        let stack = user(process, &[0x1010, 0x8010, 0x9010], 0, &unmapped).unwrap();
        let offsets: Vec<u64> = stack.frames.iter().map(|frame| frame.address.number()).collect();
        assert_eq!(offsets, [0x510, 0x10, 0x9010]);
        assert_eq!(stack.end, EndReason::Root);
        assert_eq!(
            (stack.frames[0].kind, stack.frames[1].kind),
            (FrameKind::Leaf, FrameKind::Caller)
        );
    }

    #[test]
    fn a_return_address_that_is_not_code_ends_the_stack() {
        let mut processes = processes();
        let unmapped = processes.executables().intern(Kind::Unmapped);
        let process = processes.sampled(4_000_001, 1, 1);
        let stack = user(process, &[0x1010, 0x7777, 0x1020], 0, &unmapped).unwrap();
        assert_eq!((stack.frames.len(), stack.end), (1, EndReason::NotCode));
        // Behind the last byte, where a call that never returns leaves it.
        let stack = user(process, &[0x1010, 0x2000], 0, &unmapped).unwrap();
        assert_eq!((stack.frames.len(), stack.frames[1].address.number()), (2, 0x1500));
        // A leaf is where the CPU was, whatever is known of it.
        let stack = user(process, &[0x7777], 0, &unmapped).unwrap();
        assert_eq!(stack.frames[0].executable.kind, Kind::Unmapped);
    }

    #[test]
    fn an_address_no_program_can_have_is_not_sent() {
        let mut processes = processes();
        let unmapped = processes.executables().intern(Kind::Unmapped);
        let process = processes.sampled(4_000_001, 1, 1);
        let stack = user(process, &[0xffff_ffff_8100_0000], 12, &unmapped).unwrap();
        assert_eq!((stack.frames[0].address.number(), stack.end), (0, EndReason::NotCode));
        let stack = user(process, &[0x1010, INTERRUPTED | 1 << 60, 0x1020], 0, &unmapped).unwrap();
        assert_eq!((stack.frames.len(), stack.end), (1, EndReason::NotCode));
    }

    #[test]
    fn no_absolute_kernel_address_survives() {
        let text =
            "ffffffff81000000 T _text\nffffffff81000400 T _etext\nffffffffc0001000 t f\t[mod]\n";
        let (layout, _) = kallsyms::parse(text);
        let mut executables = Executables::default();
        let addresses = [0xffff_ffff_8100_0010, 0xffff_ffff_c000_1020, 0xffff_8888_0000_0000];
        let stack = kernel(&layout, &addresses, 0, &mut executables).unwrap();
        let offsets: Vec<u64> = stack.frames.iter().map(|frame| frame.address.number()).collect();
        assert_eq!(offsets, [0x10, 0x20, 0]);
        assert_eq!(stack.frames[1].executable.kind, Kind::Module("mod".into()));
        assert!(kernel(&layout, &[], KernelEnd::None as u8, &mut executables).is_none());
    }
}
