//! Files the collector hands over because they cannot be seen from here, kept in the symbol cache.
//!
//! Knows what was asked for and takes nothing else. Filled by `log.rs` from streams, where a
//! transfer goes on after a broken connection, and by `capture.rs` from files; read by `resolve/`.
//!
//! Whoever hands a file over chooses its build-id. So it is kept by its content and by who sent it,
//! and its names go to the captures of that sender alone.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stackwire_cache::Id;
use stackwire_elf::Scratch;
use stackwire_model::ExecutableKey;
use stackwire_proto::{ARTIFACT_PIECE_BYTES, seal_piece, v1};

use super::tenant::Tenant;
use super::transfer::{NotTaken, Transfer};
use crate::profile::{ArtifactHash, Executable};

/// The file a piece is of, if it says.
#[must_use]
pub fn key(chunk: &v1::ArtifactChunk) -> Option<ExecutableKey> {
    chunk.file.as_ref()?.key()
}

/// A file that is here.
#[derive(Debug)]
pub struct HandedFile {
    /// Its content.
    pub file: File,
    /// What it is and whose: what is made of it is kept under this.
    pub id: Id,
}

/// What to ask the collector for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileWanted {
    /// The file.
    pub key: ExecutableKey,
    /// Bytes of it that are here.
    pub offset: u64,
    /// Its hash will do for now.
    pub hash_only: bool,
}

/// What is to be done about a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Nothing: it is on its way, or there are too many.
    Nothing,
    /// Ask the collector.
    For(FileWanted),
    /// Nothing. The log is to say what is known of it.
    Known(Box<v1::CollectorMessage>),
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
    /// The capture says which it is, and nothing more.
    #[error(
        "whoever took this part of the capture had it from before: resolve the parts before it as well"
    )]
    Before,
    /// It is here and cannot be opened.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// What a piece did.
#[derive(Clone, Debug, PartialEq)]
pub enum Taken {
    /// It was not asked for, came before, or more is to come.
    Nothing,
    /// The file is whole now.
    Whole,
    /// It was here before; the log is to say which it is.
    Known(Box<v1::CollectorMessage>),
    /// It will not come: this says so to who reads the capture again.
    Refused(Box<v1::CollectorMessage>),
    /// Ask for the file from its beginning: it is not here, or the piece is of another file than
    /// what is.
    Again,
}

/// Most files asked for in a capture.
const MAX_FILES: usize = 4096;
/// Most files that are held open, and most that come at a time: below the usual limit of 1,024
/// descriptors. A collector sends one at a time.
const MAX_OPEN: usize = 256;
const MAX_PARTIAL: usize = 4;

/// The files of a capture. Shared by its windows.
#[derive(Debug, Default)]
pub struct Handed {
    scratch: Scratch,
    tenant: Tenant,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    files: HashMap<ExecutableKey, State>,
    bytes: u64,
    open: usize,
    partial: usize,
}

#[derive(Debug)]
enum State {
    Asked,
    /// Its hash is known, and it is not here.
    Announced,
    Partial(Transfer),
    Whole(Whole),
    Refused(Arc<NotTaken>),
}

#[derive(Debug)]
struct Whole {
    hash: ArtifactHash,
    length: u64,
    /// None: it is in the cache.
    file: Option<File>,
}

/// Where a whole file goes first; to the other place when it cannot be there.
enum Place {
    /// Other captures may have it as well.
    Cache,
    /// It is read from a capture once more whenever it is needed.
    File,
}

impl Whole {
    fn open(&self, tenant: &Tenant) -> io::Result<Option<File>> {
        match &self.file {
            Some(file) => file.try_clone().map(Some),
            None => Ok(tenant.open(&self.hash)),
        }
    }
}

impl Handed {
    /// None yet; what comes goes to `scratch` until it is whole.
    #[must_use]
    pub fn new(scratch: Scratch, tenant: Tenant) -> Self {
        Self { scratch, tenant, inner: Mutex::default() }
    }

    /// Where temporary files go.
    #[must_use]
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// A file is needed by a window that has not asked for it.
    pub fn ask(&self, key: ExecutableKey) -> Ask {
        let mut inner = self.lock();
        let Inner { files, .. } = &mut *inner;
        if files.len() >= MAX_FILES && !files.contains_key(&key) {
            return Ask::Nothing;
        }
        let state = files.entry(key).or_insert(State::Asked);
        // What the cache had no room for comes again.
        if let State::Whole(whole) = &*state
            && whole.file.is_none()
            && self.tenant.size(&whole.hash).is_none()
        {
            *state = State::Announced;
        }
        let wanted = |offset, hash_only| Ask::For(FileWanted { key, offset, hash_only });
        match state {
            State::Asked => wanted(0, self.tenant.cache.is_some()),
            State::Announced => wanted(0, false),
            State::Partial(partial) => wanted(partial.at(), false),
            State::Whole(whole) => Ask::Known(Box::new(announcement(key, whole))),
            State::Refused(reason) => Ask::Known(Box::new(refusal(Some(key.into()), reason))),
        }
    }

    /// Whether a file was asked for and is not here.
    #[must_use]
    pub fn is_wanted(&self, key: ExecutableKey) -> bool {
        let inner = self.lock();
        let state = inner.files.get(&key);
        state.is_some_and(|state| !matches!(state, State::Whole(_) | State::Refused(_)))
    }

    /// A file is not to come, unless it is here: what the log is to say of it.
    pub fn refuse(&self, key: ExecutableKey, why: String) -> v1::CollectorMessage {
        let mut inner = self.lock();
        let Inner { files, partial, .. } = &mut *inner;
        let state = files.entry(key).or_insert(State::Asked);
        if let State::Whole(whole) = state {
            return announcement(key, whole);
        }
        *partial -= usize::from(matches!(state, State::Partial(_)));
        let reason = NotTaken::Said(why);
        let refused = refusal(Some(key.into()), &reason);
        *state = State::Refused(Arc::new(reason));
        refused
    }

    /// Takes a piece of a capture that is in a file: what is there was asked for.
    pub fn take_unasked(&self, chunk: &v1::ArtifactChunk) {
        let Some(key) = key(chunk) else { return };
        let mut inner = self.lock();
        if inner.files.len() < MAX_FILES || inner.files.contains_key(&key) {
            inner.files.entry(key).or_insert(State::Asked);
            drop(inner);
            self.take_to(chunk, &Place::File);
        }
    }

    /// Takes a piece.
    pub fn take(&self, chunk: &v1::ArtifactChunk) -> Taken {
        self.take_to(chunk, &Place::Cache)
    }

    fn take_to(&self, chunk: &v1::ArtifactChunk, place: &Place) -> Taken {
        let Some(key) = key(chunk) else { return Taken::Nothing };
        let mut inner = self.lock();
        let Inner { files, bytes, open, partial } = &mut *inner;
        let Some(state) = files.get_mut(&key) else { return Taken::Nothing };
        if matches!(state, State::Whole(_) | State::Refused(_)) {
            return Taken::Nothing;
        }
        let was_partial = matches!(state, State::Partial(_));
        let taken = if !chunk.refused.is_empty() {
            Err(NotTaken::Said(chunk.refused.clone()))
        } else if chunk.hash.is_empty() {
            // It had not come when the log was closed.
            return Taken::Nothing;
        } else if chunk.piece_length == 0 && chunk.length > 0 {
            self.announced(state, key, chunk)
        } else if !was_partial && *partial >= MAX_PARTIAL {
            Err(NotTaken::AtATime)
        } else {
            self.piece(state, key, chunk, (bytes, open), place)
        };
        let taken = taken.unwrap_or_else(|reason| {
            let refused = refusal(chunk.file.clone(), &reason);
            *state = State::Refused(Arc::new(reason));
            Taken::Refused(Box::new(refused))
        });
        *partial += usize::from(matches!(state, State::Partial(_)));
        *partial -= usize::from(was_partial);
        taken
    }

    /// The collector says which file it is.
    fn announced(
        &self,
        state: &mut State,
        key: ExecutableKey,
        chunk: &v1::ArtifactChunk,
    ) -> Result<Taken, NotTaken> {
        let hash = chunk.hash.as_slice().try_into().map_err(|_length| NotTaken::Damaged)?;
        if let State::Partial(_) = state {
            return Ok(Taken::Nothing);
        }
        if self.tenant.size(&hash) != Some(chunk.length) {
            *state = State::Announced;
            return Ok(Taken::Again);
        }
        let whole = Whole { hash, length: chunk.length, file: None };
        let known = Taken::Known(Box::new(announcement(key, &whole)));
        *state = State::Whole(whole);
        Ok(known)
    }

    fn piece(
        &self,
        state: &mut State,
        key: ExecutableKey,
        chunk: &v1::ArtifactChunk,
        (bytes, open): (&mut u64, &mut usize),
        place: &Place,
    ) -> Result<Taken, NotTaken> {
        let hash = chunk.hash.as_slice().try_into().map_err(|_length| NotTaken::Damaged)?;
        if let State::Partial(other) = &*state
            && other.hash() != hash
        {
            *bytes -= other.at();
            *state = State::Asked;
            if chunk.offset > 0 {
                return Ok(Taken::Again);
            }
        }
        if matches!(state, State::Asked | State::Announced) {
            *state = State::Partial(Transfer::new(hash, self.scratch.file()?));
        }
        let State::Partial(transfer) = state else { return Err(NotTaken::Damaged) };
        if !transfer.take(chunk, bytes)? {
            return Ok(Taken::Nothing);
        }
        let State::Partial(transfer) = std::mem::replace(state, State::Asked) else {
            return Err(NotTaken::Damaged);
        };
        let file = transfer.finish(key, &self.scratch)?;
        let may_open = *open < MAX_OPEN;
        let file = match place {
            Place::File if may_open => Some(file),
            _ => match self.tenant.keep(&hash, &file) {
                Some(()) => None,
                None if may_open => Some(file),
                None => return Err(NotTaken::TooMany),
            },
        };
        *open += usize::from(file.is_some());
        if file.is_none() {
            *bytes = bytes.saturating_sub(chunk.length);
        }
        *state = State::Whole(Whole { hash, length: chunk.length, file });
        Ok(Taken::Whole)
    }

    /// What the log of a window is to say that has asked for these files: which of them have not
    /// come.
    pub fn left(&self, asked: &[ExecutableKey]) -> Vec<v1::CollectorMessage> {
        let inner = self.lock();
        let has_come =
            |key| matches!(inner.files.get(key), Some(State::Whole(_) | State::Refused(_)));
        let left = asked.iter().filter(|key| !has_come(key));
        left.map(|key| message(v1::ArtifactChunk { file: Some((*key).into()), ..<_>::default() }))
            .collect()
    }

    /// Whether everything asked for has come or was refused.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let is_there = |state: &State| matches!(state, State::Whole(_) | State::Refused(_));
        self.lock().files.values().all(is_there)
    }

    /// A file that was handed over, or why it was not; `None` when it was not asked for.
    #[must_use]
    pub fn get(&self, executable: &Executable) -> Option<Result<HandedFile, NotHanded>> {
        let Executable::File { key: Some(key), .. } = executable else { return None };
        Some(match self.lock().files.get(key)? {
            State::Whole(whole) => match whole.open(&self.tenant) {
                Ok(Some(file)) => Ok(HandedFile { file, id: self.tenant.id(&whole.hash) }),
                Ok(None) => Err(NotHanded::Before),
                Err(error) => Err(error.into()),
            },
            State::Refused(reason) => Err(NotHanded::Refused(Arc::clone(reason))),
            State::Announced => Err(NotHanded::Before),
            State::Asked | State::Partial(_) => Err(NotHanded::NotYet),
        })
    }

    /// The messages that bring the file a chunk is of, which is whole.
    pub fn messages(
        &self,
        chunk: &v1::ArtifactChunk,
    ) -> impl Iterator<Item = v1::CollectorMessage> + use<> {
        let identity = chunk.file.clone().unwrap_or_default();
        let found = key(chunk).and_then(|key| match self.lock().files.get(&key)? {
            State::Whole(whole) => {
                Some((whole.open(&self.tenant).ok()??, whole.hash, whole.length))
            }
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
            Some(message(chunk))
        })
    }

    /// A panic elsewhere leaves it whole: a piece counts when its state is set.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says why a file does not come, to who reads the capture again.
fn refusal(file: Option<v1::FileIdentity>, reason: &NotTaken) -> v1::CollectorMessage {
    message(v1::ArtifactChunk { file, refused: reason.to_string(), ..<_>::default() })
}

/// Says which file it is.
fn announcement(key: ExecutableKey, whole: &Whole) -> v1::CollectorMessage {
    let mut chunk = seal_piece(&whole.hash, v1::ArtifactKind::File, whole.length, 0, &[]);
    chunk.file = Some(key.into());
    message(chunk)
}

fn message(mut chunk: v1::ArtifactChunk) -> v1::CollectorMessage {
    chunk.set_kind(v1::ArtifactKind::File);
    v1::CollectorMessage { body: Some(v1::collector_message::Body::Artifact(chunk)) }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use sha2::{Digest, Sha256};
    use stackwire_cache::Cache;
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

    fn wanted_at(key: ExecutableKey, offset: u64) -> Ask {
        Ask::For(FileWanted { key, offset, hash_only: false })
    }

    #[test]
    fn a_transfer_goes_on_where_it_stopped_and_nothing_comes_unasked() {
        let content: Vec<u8> = (0..250u8).collect();
        let chunks = chunks(&content, Sha256::digest(&content).into());
        let handed = Handed::default();
        let (executable, key) = wanted();
        assert_eq!(handed.take(&chunks[0]), Taken::Nothing);
        assert!(handed.get(&executable).is_none(), "it was not asked for");
        assert_eq!(handed.ask(key), wanted_at(key, 0));
        assert_eq!(handed.take(&chunks[0]), Taken::Nothing);
        assert!(handed.get(&executable).unwrap().is_err() && !handed.is_complete());
        assert_eq!(handed.ask(key), wanted_at(key, 100));
        assert_eq!(handed.take(&chunks[0]), Taken::Nothing, "twice is no harm");
        assert_eq!(handed.take(&chunks[1]), Taken::Nothing);
        assert_eq!(handed.take(&chunks[2]), Taken::Whole);
        assert!(matches!(handed.ask(key), Ask::Known(_)));
        let mut got = Vec::new();
        let mut file = handed.get(&executable).unwrap().unwrap().file;
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
        assert_eq!(handed.ask(key), wanted_at(key, 0));
        let taken: Vec<_> = chunks.iter().map(|chunk| handed.take(chunk)).collect();
        assert_eq!(taken.last(), Some(&Taken::Whole));
    }

    #[test]
    fn a_file_comes_once_for_each_sender_whatever_captures_it_is_in() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Arc::new(Cache::open(directory.path(), 1 << 20).unwrap());
        let of = |owner: &str| {
            let tenant = Tenant { owner: owner.to_owned(), cache: Some(Arc::clone(&cache)) };
            Handed::new(Scratch::default(), tenant)
        };
        let content: Vec<u8> = (0..250u8).collect();
        let hash = Sha256::digest(&content).into();
        let (executable, key) = wanted();
        let mut announced = seal_piece(&hash, v1::ArtifactKind::File, 250, 0, &[]);
        announced.file = chunks(&content, hash)[0].file.clone();
        let hash_first = Ask::For(FileWanted { key, offset: 0, hash_only: true });

        let first = of("a");
        assert_eq!(first.ask(key), hash_first);
        assert_eq!(first.take(&announced), Taken::Again, "it is not here");
        for chunk in chunks(&content, hash) {
            first.take(&chunk);
        }
        assert_eq!(first.get(&executable).unwrap().unwrap().file.metadata().unwrap().len(), 250);

        let second = of("a");
        assert_eq!(second.ask(key), hash_first);
        let Taken::Known(message) = second.take(&announced) else { panic!("it is here") };
        assert!(second.get(&executable).unwrap().is_ok() && second.is_complete());
        // Who knows the hash of another's file gets nothing for it.
        let other = of("b");
        other.ask(key);
        assert_eq!(other.take(&announced), Taken::Again);

        // What a log says of it is enough where it is kept, and nowhere else.
        let Some(v1::collector_message::Body::Artifact(said)) = message.body else { panic!() };
        let (again, elsewhere) = (of("a"), Handed::default());
        for handed in [&again, &elsewhere] {
            handed.take_unasked(&said);
        }
        assert!(again.get(&executable).unwrap().is_ok());
        let why = elsewhere.get(&executable).unwrap().unwrap_err().to_string();
        assert!(why.contains("resolve the parts before it"), "{why}");

        // Evicted, it comes again.
        cache.prune(0).unwrap();
        assert_eq!(again.ask(key), wanted_at(key, 0));
    }
}
