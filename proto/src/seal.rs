//! Compression of epochs and artifacts, with the bounds a receiver enforces.
//!
//! What is sealed declares its length. If the content is longer than that, or longer than the
//! limit, this is an error, and nothing is allocated for it.

use prost::Message;

use crate::v1::{
    ArtifactChunk, ArtifactKind, Epoch, Executable, Lost, Mapping, Process, Samples, SchedStats,
    SealedEpoch, Stack, Thread, Waker,
};

/// Largest epoch before compression. Collectors cut epochs far earlier.
pub const MAX_EPOCH_BYTES: u32 = 64 << 20;
/// Most bytes an epoch may take in memory. A definition that is empty takes two bytes on the wire
/// and hundreds in memory; the largest epochs of a collector take about as much as on the wire.
pub const MAX_EPOCH_MEMORY: u64 = 256 << 20;
/// Largest artifact that is no file.
pub const MAX_ARTIFACT_BYTES: u64 = 256 << 20;
/// Largest file that is handed over.
pub const MAX_FILE_BYTES: u64 = 2 << 30;
/// Bytes of an artifact in one piece, before compression.
pub const ARTIFACT_PIECE_BYTES: usize = 1 << 20;

/// zstd's fastest regular level: on epochs level 3 saves 4 % more bytes for twice the time.
const LEVEL: i32 = 1;

/// What was sealed does not open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// Declared larger than anything a collector writes.
    #[error("{what} declares {length} bytes, more than the limit of {limit}")]
    TooLarge {
        /// "epoch" or "artifact".
        what: &'static str,
        /// Declared bytes.
        length: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// The zstd frame is broken, or holds another number of bytes than declared.
    #[error("{what} does not decompress to the {length} bytes it declares")]
    Corrupt {
        /// "epoch" or "artifact".
        what: &'static str,
        /// Declared bytes.
        length: u64,
    },
    /// More than anything a collector writes.
    #[error("epoch would take {memory} bytes in memory, more than the limit of {limit}")]
    TooMuch {
        /// Bytes it would take.
        memory: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// The decompressed bytes are not an epoch.
    #[error("epoch does not decode: {0}")]
    Decode(#[from] prost::DecodeError),
}

/// Compresses an epoch.
#[must_use]
pub fn seal_epoch(epoch: &Epoch) -> SealedEpoch {
    let bytes = epoch.encode_to_vec();
    SealedEpoch { number: epoch.number, length: bytes.len() as u32, zstd: compress(&bytes) }
}

/// Decompresses and decodes an epoch.
///
/// # Errors
/// See [`SealError`].
pub fn open_epoch(sealed: &SealedEpoch) -> Result<Epoch, SealError> {
    Unsealed::of(sealed)?.decode(MAX_EPOCH_MEMORY)
}

/// An epoch that is decompressed and not decoded yet.
#[derive(Debug)]
pub struct Unsealed {
    bytes: Vec<u8>,
    memory: u64,
}

impl Unsealed {
    /// Decompresses an epoch.
    ///
    /// # Errors
    /// See [`SealError`].
    pub fn of(sealed: &SealedEpoch) -> Result<Self, SealError> {
        let length = u64::from(sealed.length);
        let bytes = decompress("epoch", &sealed.zstd, length, u64::from(MAX_EPOCH_BYTES))?;
        let memory = memory(&bytes);
        Ok(Self { bytes, memory })
    }

    /// Bytes it will take in memory once it is decoded, at most.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.memory
    }

    /// Decodes it, unless it would take more than `limit` bytes.
    ///
    /// # Errors
    /// See [`SealError`].
    pub fn decode(self, limit: u64) -> Result<Epoch, SealError> {
        let memory = self.memory;
        if memory > limit {
            return Err(SealError::TooMuch { memory, limit });
        }
        Ok(Epoch::decode(self.bytes.as_slice())?)
    }
}

/// A piece of an artifact of `length` bytes: where it starts, and its bytes,
/// [`ARTIFACT_PIECE_BYTES`] at most.
#[must_use]
pub fn seal_piece(
    hash: &[u8; 32],
    kind: ArtifactKind,
    length: u64,
    offset: u64,
    piece: &[u8],
) -> ArtifactChunk {
    ArtifactChunk {
        hash: hash.to_vec(),
        kind: kind.into(),
        length,
        offset,
        piece_length: piece.len() as u32,
        zstd: compress(piece),
        ..ArtifactChunk::default()
    }
}

/// Decompresses one piece of an artifact.
///
/// # Errors
/// See [`SealError`].
pub fn open_piece(chunk: &ArtifactChunk) -> Result<Vec<u8>, SealError> {
    let limit = match chunk.kind() {
        ArtifactKind::File => MAX_FILE_BYTES,
        _ => MAX_ARTIFACT_BYTES,
    };
    if chunk.length > limit {
        return Err(SealError::TooLarge { what: "artifact", length: chunk.length, limit });
    }
    let length = u64::from(chunk.piece_length);
    decompress("artifact", &chunk.zstd, length, ARTIFACT_PIECE_BYTES as u64)
}

/// What an encoded epoch takes in memory at most, found without decoding it; up to where it stops
/// making sense.
fn memory(mut bytes: &[u8]) -> u64 {
    use prost::encoding::{WireType, decode_key, decode_varint, skip_field};
    let mut memory = 0u64;
    while let Ok((tag, wire_type)) = decode_key(&mut bytes) {
        if wire_type != WireType::LengthDelimited {
            if skip_field(wire_type, tag, &mut bytes, Default::default()).is_err() {
                break;
            }
            continue;
        }
        let Ok(length) = decode_varint(&mut bytes) else { break };
        let Some(inside) = usize::try_from(length).ok().and_then(|length| bytes.get(..length))
        else {
            break;
        };
        bytes = &bytes[inside.len()..];
        // A Vec has up to twice the places it needs.
        memory += 2 * in_memory(tag, inside);
    }
    memory
}

/// The same of one field, whose content is `inside`. Numbers follow the tags of `Epoch`.
fn in_memory(tag: u32, inside: &[u8]) -> u64 {
    let bytes = inside.len();
    let held = match tag {
        // Bytes, and messages of fixed size.
        4 | 14 => size_of::<String>() + bytes,
        5 => size_of::<Executable>() + bytes,
        // They have lists: an entry of those may be empty, and takes two bytes on the wire.
        6 => size_of::<Process>() + 12 * bytes,
        15 => size_of::<SchedStats>() + 12 * bytes,
        7 => size_of::<Mapping>(),
        8 => size_of::<Thread>(),
        10 => size_of::<Stack>(),
        16 => size_of::<Waker>(),
        // Columns of numbers, packed: the last byte of each has its top bit clear.
        9 | 11 => size_of::<Samples>() + 8 * bytes_that_end_numbers(inside),
        _ => size_of::<Lost>() + bytes,
    };
    held as u64
}

fn bytes_that_end_numbers(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte < 0x80).count()
}

fn compress(bytes: &[u8]) -> Vec<u8> {
    // Compression of a slice into a Vec sized by ZSTD_compressBound has no way to fail.
    #[expect(clippy::expect_used, reason = "no failure is possible, see above")]
    zstd::bulk::compress(bytes, LEVEL).expect("zstd compresses into a buffer of its own bound")
}

fn decompress(
    what: &'static str,
    bytes: &[u8],
    length: u64,
    limit: u64,
) -> Result<Vec<u8>, SealError> {
    if length > limit {
        return Err(SealError::TooLarge { what, length, limit });
    }
    // The declared length may lie within the limit: grow with the content, stop one byte past it.
    let mut out = Vec::new();
    zstd::stream::read::Decoder::new(bytes)
        .and_then(|decoder| {
            std::io::Read::read_to_end(&mut std::io::Read::take(decoder, length + 1), &mut out)
        })
        .ok()
        .filter(|&read| read as u64 == length)
        .map(|_| out)
        .ok_or(SealError::Corrupt { what, length })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_opens_as_it_was() {
        let epoch =
            Epoch { number: 7, strings: vec![String::new(), "main".into()], ..Epoch::default() };
        assert_eq!(open_epoch(&seal_epoch(&epoch)).unwrap(), epoch);
    }

    #[test]
    fn lengths_that_lie_are_errors() {
        let mut sealed = seal_epoch(&Epoch { end_ns: 1 << 40, ..Epoch::default() });
        sealed.length -= 1;
        assert!(matches!(open_epoch(&sealed), Err(SealError::Corrupt { .. })));
        sealed.length = u32::MAX;
        assert!(matches!(open_epoch(&sealed), Err(SealError::TooLarge { .. })));
        sealed.length = 100;
        sealed.zstd.truncate(3);
        assert!(matches!(open_epoch(&sealed), Err(SealError::Corrupt { .. })));
    }

    #[test]
    fn what_is_small_on_the_wire_and_large_in_memory_is_refused_before_it_is_decoded() {
        use crate::v1::StackNodes;
        // Definitions that are empty, of each kind.
        for tag in [4u8, 5, 6, 7, 8, 10, 11, 14, 15, 16] {
            let bytes = if tag < 16 {
                [tag << 3 | 2, 0].repeat(20 << 20)
            } else {
                [0x82, 0x01, 0].repeat(20 << 20)
            };
            let (length, zstd) = (bytes.len() as u32, compress(&bytes));
            assert!(zstd.len() < 20_000, "{}", zstd.len());
            let sealed = SealedEpoch { number: 0, length, zstd };
            assert!(matches!(open_epoch(&sealed), Err(SealError::TooMuch { .. })), "{tag}");
        }
        // Columns of zeros, and lists of what is empty in one process.
        let columns = StackNodes { parent: vec![0; 40 << 20], ..StackNodes::default() };
        let lists = Process { perf_map: vec![Vec::new(); 12 << 20], ..Process::default() };
        for epoch in [
            Epoch { nodes: Some(columns), ..Epoch::default() },
            Epoch { processes: vec![lists], ..Epoch::default() },
        ] {
            let refused = open_epoch(&seal_epoch(&epoch));
            assert!(matches!(refused, Err(SealError::TooMuch { .. })));
        }
    }

    #[test]
    fn what_an_epoch_takes_is_not_underestimated() {
        let growth = vec![crate::v1::Growth::default(); 100];
        let epoch = Epoch {
            strings: vec!["x".repeat(30); 100],
            processes: vec![Process { perf_map_growth: growth, ..Process::default() }; 10],
            samples: vec![Samples { time_delta: vec![-1; 1000], ..Samples::default() }],
            ..Epoch::default()
        };
        let held = 100 * (24 + 30) + 10 * (size_of::<Process>() + 100 * 16) + 1000 * 8;
        let memory = Unsealed::of(&seal_epoch(&epoch)).unwrap().memory();
        assert!((held as u64..held as u64 * 4).contains(&memory), "{memory} of {held}");
    }

    #[test]
    fn pieces_make_up_the_artifact() {
        let content: Vec<u8> =
            (0..ARTIFACT_PIECE_BYTES as u32 + 10).map(|i| (i / 7) as u8).collect();
        let mut opened = Vec::new();
        for piece in content.chunks(ARTIFACT_PIECE_BYTES) {
            let length = content.len() as u64;
            let chunk =
                seal_piece(&[3; 32], ArtifactKind::PerfMap, length, opened.len() as u64, piece);
            opened.extend(open_piece(&chunk).unwrap());
        }
        assert_eq!(opened, content);
    }
}
