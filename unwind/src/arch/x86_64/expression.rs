//! The DWARF expressions that occur in call frame information, recognized and not computed. Pure.
//!
//! Compilers and the C library write four shapes; any other makes its code one without a rule.

use gimli::{Encoding, EndianSlice, Expression, LittleEndian, Operation};

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// A shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// register + offset.
    Register(u16, i64),
    /// Memory at (register + offset), + offset.
    Memory(u16, i64, i64),
    /// rsp + offset, and 8 more from this byte of 16 on.
    Plt(i64, u64),
}

/// What an expression computes, if it is one of the shapes.
pub fn shape(expression: Expression<Bytes<'_>>, encoding: Encoding) -> Option<Shape> {
    let mut found = Vec::with_capacity(9);
    let mut operations = expression.operations(encoding);
    // The longest shape has 9.
    while let Some(operation) = operations.next().ok()? {
        if found.len() == 9 {
            return None;
        }
        found.push(operation);
    }
    let (&Operation::RegisterOffset { register, offset, .. }, rest) = found.split_first()? else {
        return None;
    };
    match rest {
        [] => Some(Shape::Register(register.0, offset)),
        [Operation::Deref { space: false, size: 8, .. }] => {
            Some(Shape::Memory(register.0, offset, 0))
        }
        [Operation::Deref { space: false, size: 8, .. }, Operation::PlusConstant { value }] => {
            Some(Shape::Memory(register.0, offset, i64::try_from(*value).ok()?))
        }
        [
            Operation::RegisterOffset { register: rip, offset: 0, .. },
            Operation::UnsignedConstant { value: 15 },
            Operation::And,
            Operation::UnsignedConstant { value: from },
            Operation::Ge,
            Operation::UnsignedConstant { value: 3 },
            Operation::Shl,
            Operation::Plus,
        ] if register.0 == 7 && rip.0 == 16 => Some(Shape::Plt(offset, *from)),
        _ => None,
    }
}
