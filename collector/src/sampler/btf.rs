//! Offsets of struct members, read from the kernel's BTF.
//!
//! Pure: bytes in, numbers out. Reads structs, unions and their other names, no more; aya's own
//! reader keeps member offsets to itself, and the one published BTF crate is LGPL.
//! Format: Documentation/bpf/btf.rst. Called by `sampler/object.rs`.

/// BTF that cannot be read, or lacks what is asked for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BtfError {
    /// Not BTF, or cut.
    #[error("kernel BTF is malformed at byte {0}")]
    Malformed(usize),
    /// No such struct.
    #[error("kernel BTF has no struct {0}")]
    NoStruct(String),
    /// No such function type.
    #[error("kernel BTF has no function type {0}")]
    NoFunction(String),
    /// No such member.
    #[error("kernel BTF has no member {member} in struct {name}")]
    NoMember {
        /// Struct searched.
        name: String,
        /// Member not found.
        member: String,
    },
    /// A kernel whose tracepoint does not say why a thread leaves the CPU.
    #[error(
        "this kernel cannot tell why threads leave their CPU: its tracepoint sched_switch has no previous state; waits and scheduling are recorded from kernel 5.19 on"
    )]
    NoPreviousState,
}

const MAGIC: u16 = 0xeb9f;
/// Bytes of a header.
const HEADER: u32 = 24;
const KIND_POINTER: u32 = 2;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_FORWARD: u32 = 7;
const KIND_TYPEDEF: u32 = 8;
const KIND_FUNCTION: u32 = 12;
const KIND_FUNCTION_TYPE: u32 = 13;

/// A type with a name.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    kind: u32,
    name: &'a str,
}

impl<'a> Named<'a> {
    /// Another name of a type.
    pub fn typedef(name: &'a str) -> Self {
        Self { kind: KIND_TYPEDEF, name }
    }

    /// A function.
    pub fn function(name: &'a str) -> Self {
        Self { kind: KIND_FUNCTION, name }
    }
}

/// The types of a kernel.
pub struct Btf<'a> {
    bytes: &'a [u8],
    strings_at: usize,
    /// The byte at which each type begins, by its id. Ids count from 1. There are 127,000 in
    /// Linux 6.18: each is decoded when it is asked for.
    places: Vec<usize>,
    /// The bytes at which structs begin: one type in twelve.
    structs: Vec<usize>,
}

impl<'a> Btf<'a> {
    /// Finds where the types are, in one pass.
    ///
    /// # Errors
    /// [`BtfError::Malformed`].
    pub fn new(bytes: &'a [u8]) -> Result<Self, BtfError> {
        let magic = bytes.first_chunk::<2>().map(|two| u16::from_ne_bytes(*two));
        if magic != Some(MAGIC) {
            return Err(BtfError::Malformed(0));
        }
        let mut btf = Self { bytes, strings_at: 0, places: vec![0], structs: Vec::new() };
        let header = btf.word(4)? as usize;
        let mut at = header + btf.word(8)? as usize;
        let end = at + btf.word(12)? as usize;
        btf.strings_at = header + btf.word(16)? as usize;
        while at < end {
            let (kind, count) = btf.kind(at)?;
            btf.places.push(at);
            if kind == KIND_STRUCT {
                btf.structs.push(at);
            }
            // Bytes behind the 12 every type has, by kind: int, ptr, array, struct, union, enum, …
            at += 12
                + match kind {
                    1 | 14 | 17 => 4,
                    3 => 12,
                    KIND_STRUCT | KIND_UNION | 15 | 19 => count * 12,
                    6 | 13 => count * 8,
                    2 | 7..=12 | 16 | 18 => 0,
                    _ => return Err(BtfError::Malformed(at)),
                };
        }
        Ok(btf)
    }

    /// Byte offsets of `members` in `struct name`, members of anonymous structs and unions
    /// included; `thread.fsbase` is one of a struct within.
    ///
    /// # Errors
    /// See [`BtfError`]; a bit-field that starts inside a byte counts as missing.
    pub fn offsets<const N: usize>(
        &self,
        name: &str,
        members: [&str; N],
    ) -> Result<[u32; N], BtfError> {
        let named = |at: &&usize| self.word(**at).is_ok_and(|found| self.is_name(found, name));
        let root = self.structs.iter().find(named);
        let root = *root.ok_or_else(|| BtfError::NoStruct(name.to_owned()))?;
        let mut offsets = [0; N];
        for (slot, member) in offsets.iter_mut().zip(members) {
            let missing =
                || BtfError::NoMember { name: name.to_owned(), member: member.to_owned() };
            let (mut bits, mut within) = (0, Some(root));
            for part in member.split('.') {
                let found = self.find(within.ok_or_else(missing)?, part, 0)?;
                let (more, kind) = found.ok_or_else(missing)?;
                bits += more;
                within = self.composite(kind)?;
            }
            *slot = Some(bits).filter(|bits| bits % 8 == 0).ok_or_else(missing)? / 8;
        }
        Ok(offsets)
    }

    /// How many parameters the function has that the other name `name` is a pointer to.
    ///
    /// # Errors
    /// See [`BtfError`].
    pub fn parameters(&self, name: &str) -> Result<usize, BtfError> {
        let missing = || BtfError::NoFunction(name.to_owned());
        let mut at = self.places[self.id(Named::typedef(name))?];
        for expected in [KIND_POINTER, KIND_FUNCTION_TYPE] {
            at = *self.places.get(self.word(at + 8)? as usize).ok_or_else(missing)?;
            if at == 0 || self.kind(at)?.0 != expected {
                return Err(missing());
            }
        }
        Ok(self.kind(at)?.1)
    }

    /// A BTF in which these types alone have names, and the ids they have in this one.
    ///
    /// For aya, which asks it for their ids: it would take 70 ms to read all of a kernel's.
    ///
    /// # Errors
    /// See [`BtfError`].
    pub fn of_these(&self, types: &[Named<'_>]) -> Result<Vec<u8>, BtfError> {
        let ids = types.iter().map(|named| self.id(*named)).collect::<Result<Vec<_>, _>>()?;
        let mut strings = vec![0];
        // The others have no name and no content.
        let filler = [0, KIND_FORWARD << 24, 0];
        let mut words = vec![filler; ids.iter().max().map_or(0, |last| *last)];
        for (&Named { kind, name }, id) in types.iter().zip(&ids) {
            words[id - 1] = [strings.len() as u32, kind << 24, 0];
            strings.extend(name.bytes().chain([0]));
        }
        let length = (words.len() * 12) as u32;
        let header = [HEADER, 0, length, length, strings.len() as u32];
        let mut bytes = u32::from(MAGIC).to_ne_bytes().to_vec();
        // Version 1.
        bytes[2] = 1;
        let words = header.iter().chain(words.iter().flatten());
        bytes.extend(words.flat_map(|word| word.to_ne_bytes()));
        bytes.extend(strings);
        Ok(bytes)
    }

    fn id(&self, Named { kind, name }: Named<'_>) -> Result<usize, BtfError> {
        let is_it = |&at: &usize| {
            at > 0
                && self.kind(at).is_ok_and(|(found, _)| found == kind)
                && self.word(at).is_ok_and(|found| self.is_name(found, name))
        };
        let id = self.places.iter().position(is_it);
        id.ok_or_else(|| BtfError::NoFunction(name.to_owned()))
    }

    fn word(&self, at: usize) -> Result<u32, BtfError> {
        self.bytes
            .get(at..at + 4)
            .and_then(|word| word.try_into().ok())
            .map(u32::from_ne_bytes)
            .ok_or(BtfError::Malformed(at))
    }

    /// Kind and number of members of the type at `at`.
    fn kind(&self, at: usize) -> Result<(u32, usize), BtfError> {
        let info = self.word(at + 4)?;
        Ok(((info >> 24) & 0x1f, (info & 0xffff) as usize))
    }

    fn is_name(&self, offset: u32, name: &str) -> bool {
        let at = self.strings_at + offset as usize;
        let end = at + name.len();
        self.bytes.get(at..end) == Some(name.as_bytes()) && self.bytes.get(end) == Some(&0)
    }

    /// Where the struct or union of a type is, whatever its names; none where it is neither.
    fn composite(&self, mut id: u32) -> Result<Option<usize>, BtfError> {
        for _ in 0..8 {
            // Type 0 is void.
            let Some(&at) = self.places.get(id as usize).filter(|at| **at > 0) else { break };
            match self.kind(at)?.0 {
                KIND_STRUCT | KIND_UNION => return Ok(Some(at)),
                KIND_TYPEDEF => id = self.word(at + 8)?,
                _ => break,
            }
        }
        Ok(None)
    }

    /// Bit offset and type of `member` in the struct or union at `within`; nested anonymous
    /// structs are searched, to a depth of 8.
    fn find(
        &self,
        within: usize,
        member: &str,
        depth: usize,
    ) -> Result<Option<(u32, u32)>, BtfError> {
        // The top byte of member offsets is then the size of a bit-field (`kind_flag`).
        let bit_fields = self.word(within + 4)? >> 31 == 1;
        for index in 0..self.kind(within)?.1 {
            let at = within + 12 + index * 12;
            let (name, kind, raw) = (self.word(at)?, self.word(at + 4)?, self.word(at + 8)?);
            let offset = if bit_fields { raw & 0x00ff_ffff } else { raw };
            if name != 0 && self.is_name(name, member) {
                return Ok(Some((offset, kind)));
            }
            if name == 0
                && depth < 8
                && let Some(inner) = self.composite(kind)?
                && let Some((found, kind)) = self.find(inner, member, depth + 1)?
            {
                return Ok(Some((offset + found, kind)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `typedef union { int b; } other; struct task { int flags; union { int b; }; other of; }`,
    /// written by hand.
    fn sample() -> Vec<u8> {
        let strings = b"\0task\0flags\0b\0of\0";
        let types: Vec<u32> = [
            vec![0, 1 << 24, 4, 32],                      // 1: int
            vec![0, (KIND_UNION << 24) | 1, 4, 12, 1, 0], // 2: union { int b }
            vec![0, KIND_TYPEDEF << 24, 2],               // 3: typedef of it
            // 4: struct task
            vec![1, (KIND_STRUCT << 24) | 3, 16, 0, 2, 64, 6, 1, 32, 14, 3, 96],
        ]
        .concat();
        let mut bytes = Vec::new();
        bytes.extend(MAGIC.to_ne_bytes());
        bytes.extend([1, 0]);
        let types_bytes = types.len() as u32 * 4;
        for word in [24, 0, types_bytes, types_bytes, strings.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(types.iter().flat_map(|word| word.to_ne_bytes()));
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn finds_members_and_members_of_anonymous_unions() {
        let sample = sample();
        let btf = Btf::new(&sample).unwrap();
        assert_eq!(btf.offsets("task", ["flags", "b", "of.b"]).unwrap(), [4, 8, 12]);
        assert_eq!(
            btf.offsets("task", ["mm"]).unwrap_err().to_string(),
            "kernel BTF has no member mm in struct task"
        );
        assert!(matches!(btf.offsets("mm", ["b"]), Err(BtfError::NoStruct(_))));
    }

    #[test]
    fn the_running_kernel_has_what_the_programs_need() {
        let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else { return };
        let members = ["flags", "pid", "tgid", "thread", "thread.fsbase"];
        let btf = Btf::new(&bytes).unwrap();
        let [flags, pid, tgid, thread, fsbase] = btf.offsets("task_struct", members).unwrap();
        assert_eq!(tgid, pid + 4);
        assert!(flags < pid && thread < fsbase);
    }

    #[test]
    fn types_keep_their_ids_in_a_btf_of_few() {
        let sample = sample();
        let btf = Btf::new(&sample).unwrap();
        let few = btf.of_these(&[Named::typedef("task")]);
        assert!(matches!(few, Err(BtfError::NoFunction(_))), "task is a struct");
        let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else { return };
        let btf = Btf::new(&bytes).unwrap();
        let types = [Named::typedef("btf_trace_sched_switch"), Named::function("bpf_iter_task")];
        let few = btf.of_these(&types).unwrap();
        aya::Btf::parse(&few, Default::default()).unwrap();
        let few = Btf::new(&few).unwrap();
        assert_eq!(types.map(|it| btf.id(it).unwrap()), types.map(|it| few.id(it).unwrap()));
    }

    proptest! {
        #[test]
        fn never_panics(cut in 0usize..250, at in 0usize..150, value: u8) {
            let mut bytes = sample();
            bytes.truncate(cut);
            if let Some(byte) = bytes.get_mut(at) { *byte = value; }
            let _ = Btf::new(&bytes).and_then(|btf| btf.offsets("task", ["flags", "b", "of.b"]));
        }
    }
}
