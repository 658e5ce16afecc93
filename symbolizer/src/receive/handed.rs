//! Files the collector hands over because they cannot be seen from here: taken piece by piece,
//! verified, kept in temporary files without a name.
//!
//! Knows what was asked for and takes nothing else. Filled by `log.rs` from streams, where a
//! transfer goes on after a broken connection, and by `capture.rs` from files; read by `resolve/`.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};
use stackwire_elf::{Elf, ElfError, Scratch};
use stackwire_model::ExecutableKey;
use stackwire_proto::{ARTIFACT_PIECE_BYTES, SealError, open_piece, seal_piece, v1};

use crate::profile::{ArtifactHash, Executable};

/// The file a piece is of, if it says.
#[must_use]
pub fn key(chunk: &v1::ArtifactChunk) -> Option<ExecutableKey> {
    chunk.file.as_ref()?.key()
}

/// Why a file is not here.
#[derive(Debug, thiserror::Error)]
pub enum NotHanded {
    /// The capture ended before it was whole.
    #[error("the collector had not sent it by then")]
    NotYet,
    /// It will not come.
    #[error("it was not handed over: {0}")]
    Refused(Arc<NotTaken>),
    /// It is here and cannot be opened.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Why a file that was sent is not kept.
#[derive(Debug, thiserror::Error)]
pub enum NotTaken {
    /// The collector says so, in its own words.
    #[error("{0}")]
    Said(String),
    /// A piece is not where it belongs.
    #[error("what the collector sent of it is damaged")]
    Damaged,
    /// A piece does not decompress.
    #[error(transparent)]
    Piece(#[from] SealError),
    /// It is not what its hash says.
    #[error("the collector sent something else than it announced")]
    OtherContent,
    /// It is not what was asked for.
    #[error("the collector sent a file with another build-id")]
    OtherBuildId,
    /// It is no ELF file.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// There are as many files as can be held open.
    #[error("the collector sent more files than can be kept")]
    TooMany,
    /// All files together are too large.
    #[error("the collector sent more than the {MAX_BYTES} bytes that are kept")]
    TooLarge,
    /// It cannot be written.
    #[error("it cannot be kept: {0}")]
    NotKept(#[from] io::Error),
}

/// What a piece did.
#[derive(Clone, Debug, PartialEq)]
pub enum Taken {
    /// It was not asked for, came before, or more is to come.
    Nothing,
    /// The file is whole now.
    Whole,
    /// It will not come: this says so to who reads the capture again.
    Refused(Box<v1::CollectorMessage>),
    /// The piece is of another file than what is here. Ask for the file once more, from its
    /// beginning.
    Again,
}

/// Most bytes kept of all files of a capture.
const MAX_BYTES: u64 = 4 << 30;
/// Most files asked for in a capture.
const MAX_FILES: usize = 4096;
/// Most whole files, each with a descriptor: below the usual limit of 1,024.
const MAX_WHOLE: usize = 256;

/// The files of a capture. Shared by its windows.
#[derive(Debug, Default)]
pub struct Handed {
    scratch: Scratch,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    files: HashMap<ExecutableKey, State>,
    bytes: u64,
    whole: usize,
}

#[derive(Debug)]
enum State {
    Asked,
    Partial(Partial),
    Whole { file: File, hash: ArtifactHash, length: u64 },
    Refused(Arc<NotTaken>),
}

#[derive(Debug)]
struct Partial {
    file: File,
    hasher: Sha256,
    hash: ArtifactHash,
    at: u64,
}

impl Handed {
    /// None yet; content goes to `scratch`.
    #[must_use]
    pub fn new(scratch: Scratch) -> Self {
        Self { scratch, inner: Mutex::default() }
    }

    /// Notes that a file is asked for: how much of it is here already; `None` when it is here or
    /// was refused.
    pub fn ask(&self, key: ExecutableKey) -> Option<u64> {
        let mut inner = self.lock();
        if inner.files.len() >= MAX_FILES && !inner.files.contains_key(&key) {
            return None;
        }
        match inner.files.entry(key).or_insert(State::Asked) {
            State::Asked => Some(0),
            State::Partial(partial) => Some(partial.at),
            State::Whole { .. } | State::Refused(_) => None,
        }
    }

    /// Takes a piece.
    pub fn take(&self, chunk: &v1::ArtifactChunk) -> Taken {
        let Some(key) = key(chunk) else { return Taken::Nothing };
        let mut inner = self.lock();
        let Inner { files, bytes, whole } = &mut *inner;
        let Some(state) = files.get_mut(&key) else { return Taken::Nothing };
        if !matches!(state, State::Asked | State::Partial(_)) {
            return Taken::Nothing;
        }
        if !chunk.refused.is_empty() {
            return refuse(state, chunk, NotTaken::Said(chunk.refused.clone()));
        }
        match piece(state, chunk, &self.scratch, bytes) {
            Ok(Progress::Partial) => Taken::Nothing,
            Ok(Progress::Again) => Taken::Again,
            Ok(Progress::Whole) => {
                let State::Partial(partial) = std::mem::replace(state, State::Asked) else {
                    return Taken::Nothing;
                };
                let checked = if *whole < MAX_WHOLE {
                    check(partial, key, &self.scratch, chunk.length)
                } else {
                    Err(NotTaken::TooMany)
                };
                match checked {
                    Ok(checked) => {
                        *whole += 1;
                        *state = checked;
                        Taken::Whole
                    }
                    Err(reason) => refuse(state, chunk, reason),
                }
            }
            Err(reason) => refuse(state, chunk, reason),
        }
    }

    /// Whether everything asked for has come or was refused.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let pending = |state: &State| matches!(state, State::Asked | State::Partial(_));
        !self.lock().files.values().any(pending)
    }

    /// A file that was handed over, or why it was not; `None` when it was not asked for.
    #[must_use]
    pub fn get(&self, executable: &Executable) -> Option<Result<File, NotHanded>> {
        let Executable::File { key: Some(key), .. } = executable else { return None };
        match self.lock().files.get(key)? {
            State::Whole { file, .. } => Some(file.try_clone().map_err(NotHanded::from)),
            State::Refused(reason) => Some(Err(NotHanded::Refused(Arc::clone(reason)))),
            State::Asked | State::Partial(_) => Some(Err(NotHanded::NotYet)),
        }
    }

    /// The messages that bring the file a chunk is of, which is whole.
    pub fn messages(
        &self,
        chunk: &v1::ArtifactChunk,
    ) -> impl Iterator<Item = v1::CollectorMessage> + use<> {
        let identity = chunk.file.clone().unwrap_or_default();
        let found = key(chunk).and_then(|key| match self.lock().files.get(&key)? {
            State::Whole { file, hash, length } => Some((file.try_clone().ok()?, *hash, *length)),
            _ => None,
        });
        let mut at = 0;
        std::iter::from_fn(move || {
            let (file, hash, length) = found.as_ref()?;
            let left = length.checked_sub(at).filter(|left| *left > 0)?;
            let mut piece = vec![0; left.min(ARTIFACT_PIECE_BYTES as u64) as usize];
            file.read_exact_at(&mut piece, at).ok()?;
            let mut chunk = seal_piece(hash, v1::ArtifactKind::File, *length, at, &piece);
            chunk.file = Some(identity.clone());
            at += piece.len() as u64;
            let body = v1::collector_message::Body::Artifact(chunk);
            Some(v1::CollectorMessage { body: Some(body) })
        })
    }

    /// A panic elsewhere leaves it whole: a piece counts when its state is set.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refuse(state: &mut State, chunk: &v1::ArtifactChunk, reason: NotTaken) -> Taken {
    let mut refused = v1::ArtifactChunk {
        length: 0,
        file: chunk.file.clone(),
        refused: reason.to_string(),
        ..Default::default()
    };
    refused.set_kind(v1::ArtifactKind::File);
    *state = State::Refused(Arc::new(reason));
    let body = v1::collector_message::Body::Artifact(refused);
    Taken::Refused(Box::new(v1::CollectorMessage { body: Some(body) }))
}

enum Progress {
    Partial,
    Whole,
    Again,
}

/// Writes a piece behind those before it.
fn piece(
    state: &mut State,
    chunk: &v1::ArtifactChunk,
    scratch: &Scratch,
    bytes: &mut u64,
) -> Result<Progress, NotTaken> {
    let hash = chunk.hash.as_slice().try_into().map_err(|_length| NotTaken::Damaged)?;
    if let State::Partial(partial) = &*state
        && partial.hash != hash
    {
        *bytes -= partial.at;
        *state = State::Asked;
        if chunk.offset > 0 {
            return Ok(Progress::Again);
        }
    }
    if matches!(state, State::Asked) {
        let file = scratch.file()?;
        *state = State::Partial(Partial { file, hasher: Sha256::new(), hash, at: 0 });
    }
    let State::Partial(partial) = state else { return Err(NotTaken::Damaged) };
    let end = chunk.offset.saturating_add(chunk.piece_length.into());
    if end <= partial.at && chunk.length > 0 {
        return Ok(Progress::Partial); // came before
    }
    if chunk.offset != partial.at || end > chunk.length {
        return Err(NotTaken::Damaged);
    }
    if *bytes + u64::from(chunk.piece_length) > MAX_BYTES {
        return Err(NotTaken::TooLarge);
    }
    let content = open_piece(chunk)?;
    partial.file.write_all_at(&content, partial.at)?;
    partial.hasher.update(&content);
    partial.at += content.len() as u64;
    *bytes += content.len() as u64;
    Ok(if partial.at == chunk.length { Progress::Whole } else { Progress::Partial })
}

/// Whether it is what it was said to be, and what was asked for.
fn check(
    partial: Partial,
    key: ExecutableKey,
    scratch: &Scratch,
    length: u64,
) -> Result<State, NotTaken> {
    let Partial { file, hasher, hash, .. } = partial;
    if ArtifactHash::from(hasher.finalize()) != hash {
        return Err(NotTaken::OtherContent);
    }
    if let ExecutableKey::BuildId(id) = key {
        let elf = Elf::open(file.try_clone()?, scratch)?;
        if elf.ids.gnu != Some(id) {
            return Err(NotTaken::OtherBuildId);
        }
    }
    Ok(State::Whole { file, hash, length })
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use stackwire_model::{Device, FileId};

    use super::*;

    fn chunks(content: &[u8], hash: [u8; 32]) -> Vec<v1::ArtifactChunk> {
        let identity = v1::FileIdentity { inode: 7, ..Default::default() };
        let pieces = content.chunks(100).enumerate();
        let sealed = pieces.map(|(number, piece)| {
            let (at, length) = (number as u64 * 100, content.len() as u64);
            let mut chunk = seal_piece(&hash, v1::ArtifactKind::File, length, at, piece);
            chunk.file = Some(identity.clone());
            chunk
        });
        sealed.collect()
    }

    fn wanted() -> (Executable, ExecutableKey) {
        let key = FileId::new(7, Device::default()).unwrap().into();
        (Executable::File { path: "/x".into(), key: Some(key) }, key)
    }

    #[test]
    fn a_transfer_goes_on_where_it_stopped_and_nothing_comes_unasked() {
        let content: Vec<u8> = (0..250u8).collect();
        let chunks = chunks(&content, Sha256::digest(&content).into());
        let handed = Handed::default();
        let (executable, key) = wanted();
        assert_eq!(handed.take(&chunks[0]), Taken::Nothing);
        assert!(handed.get(&executable).is_none(), "it was not asked for");
        assert_eq!(handed.ask(key), Some(0));
        assert_eq!(handed.take(&chunks[0]), Taken::Nothing);
        assert!(handed.get(&executable).unwrap().is_err() && !handed.is_complete());
        assert_eq!(handed.ask(key), Some(100));
        assert_eq!(handed.take(&chunks[0]), Taken::Nothing, "twice is no harm");
        assert_eq!(handed.take(&chunks[1]), Taken::Nothing);
        assert_eq!(handed.take(&chunks[2]), Taken::Whole);
        assert_eq!(handed.ask(key), None);
        let mut got = Vec::new();
        let mut file = handed.get(&executable).unwrap().unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        file.read_to_end(&mut got).unwrap();
        assert_eq!(got, content);
        assert_eq!(handed.messages(&chunks[0]).count(), 1);
    }

    #[test]
    fn what_is_not_what_it_says_is_refused_with_the_reason() {
        let content: Vec<u8> = (0..250u8).collect();
        let said = |damage: fn(&mut Vec<v1::ArtifactChunk>)| {
            let mut chunks = chunks(&content, Sha256::digest(&content).into());
            damage(&mut chunks);
            let handed = Handed::default();
            let (executable, key) = wanted();
            handed.ask(key);
            for chunk in &chunks {
                assert_ne!(handed.take(chunk), Taken::Whole);
            }
            assert!(handed.is_complete());
            handed.get(&executable).unwrap().unwrap_err().to_string()
        };
        assert!(said(|c| c[1].offset = 150).contains("damaged"));
        assert!(said(|c| c[1].zstd.truncate(4)).contains("does not decompress"));
        assert!(said(|c| c[2].piece_length += 9).contains("damaged"));
        assert!(said(|c| c.iter_mut().for_each(|c| c.hash[0] ^= 1)).contains("something else"));
        assert!(said(|c| c[0].refused = "gone".into()).ends_with("not handed over: gone"));
    }

    #[test]
    fn another_file_in_the_middle_starts_again() {
        let (first, second) = (vec![1; 250], vec![2; 250]);
        let handed = Handed::default();
        let (_, key) = wanted();
        handed.ask(key);
        handed.take(&chunks(&first, Sha256::digest(&first).into())[0]);
        let chunks = chunks(&second, Sha256::digest(&second).into());
        assert_eq!(handed.take(&chunks[1]), Taken::Again);
        assert_eq!(handed.ask(key), Some(0));
        let taken: Vec<_> = chunks.iter().map(|chunk| handed.take(chunk)).collect();
        assert_eq!(taken.last(), Some(&Taken::Whole));
    }
}
