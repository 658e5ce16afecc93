//! Compression of epochs and artifacts, with the bounds a receiver enforces.
//!
//! What is sealed declares its length. If the content is longer than that, or longer than the
//! limit, this is an error, and nothing is allocated for it.

use prost::Message;

use crate::v1::{ArtifactChunk, ArtifactKind, Epoch, SealedEpoch};

/// Largest epoch before compression. Collectors cut epochs far earlier.
pub const MAX_EPOCH_BYTES: u32 = 64 << 20;
/// Most definitions in an epoch. An empty one takes two bytes on the wire and dozens in memory.
pub const MAX_EPOCH_ENTRIES: usize = 2 << 20;
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
    /// More definitions than anything a collector writes.
    #[error("epoch holds more definitions than the limit of {limit}")]
    TooMany {
        /// Definitions allowed.
        limit: usize,
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
    let bytes =
        decompress("epoch", &sealed.zstd, u64::from(sealed.length), u64::from(MAX_EPOCH_BYTES))?;
    if entries(&bytes) > MAX_EPOCH_ENTRIES {
        return Err(SealError::TooMany { limit: MAX_EPOCH_ENTRIES });
    }
    Ok(Epoch::decode(bytes.as_slice())?)
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

/// Fields at the top of an encoded message, up to where it stops making sense.
fn entries(mut bytes: &[u8]) -> usize {
    use prost::encoding::{decode_key, skip_field};
    let mut count = 0;
    while let Ok((tag, wire_type)) = decode_key(&mut bytes) {
        if skip_field(wire_type, tag, &mut bytes, Default::default()).is_err() {
            break;
        }
        count += 1;
    }
    count
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
    fn many_empty_definitions_are_refused_before_they_are_decoded() {
        let bytes = [0x2a, 0x00].repeat(MAX_EPOCH_ENTRIES + 1);
        let sealed = SealedEpoch { number: 0, length: bytes.len() as u32, zstd: compress(&bytes) };
        assert!(matches!(open_epoch(&sealed), Err(SealError::TooMany { .. })));
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
