//! The content of sections: read or decompressed to where it does no harm, within limits.
//!
//! A section larger than [`IN_MEMORY`] goes to an unlinked temporary file and is mapped from there:
//! the system can take those pages back, which it cannot with memory of ours. The 300 MB of
//! libjvm's `.debug_info` would otherwise be more than the symbolizer may use.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use object::Endianness;
use object::elf;

use super::Bytes;
use crate::{ElfError, Section};

/// Where large sections are kept while they are read.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    directory: Option<Arc<PathBuf>>,
}

impl Scratch {
    /// A directory of ours; the system's temporary one unless told.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self { directory: Some(Arc::new(directory)) }
    }

    /// A temporary file without a name.
    ///
    /// # Errors
    /// When the directory takes none.
    pub fn file(&self) -> io::Result<File> {
        match &self.directory {
            Some(directory) => tempfile::tempfile_in(&**directory),
            None => tempfile::tempfile(),
        }
    }
}

/// Sections up to this size are kept in memory.
const IN_MEMORY: u64 = 4 << 20;
/// Most bytes a section may have. The 156 MB libjvm has one of 300 MB once decompressed; a
/// browser's 3 GB.
const MAX_SECTION: u64 = 8 << 30;
/// Most that one compressed byte can become: 1,032 with deflate, more with zstd for nothing but
/// zeros.
const MAX_RATIO: u64 = 2048;

/// A compressed section, as it is decompressed.
pub struct Stream<'a> {
    /// Bytes once decompressed, as its header has it; a stream may end before.
    pub size: u64,
    from: Box<dyn Read + Send + 'a>,
}

impl std::fmt::Debug for Stream<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, compressed", self.size)
    }
}

impl Stream<'_> {
    /// Fills a buffer, and says how many bytes there were: fewer only at the end.
    ///
    /// # Errors
    /// Those of the decompressor and of the file.
    pub fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < into.len() {
            match self.from.read(&mut into[filled..]) {
                Ok(0) => break,
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }
}

/// Reads a section, decompressed if need be.
pub(super) fn read(
    file: &File,
    section: &Section,
    is_64: bool,
    endian: Endianness,
    scratch: &Scratch,
) -> Result<Bytes, ElfError> {
    if section.is_compressed() {
        let Stream { size, from } = decompress(file, section, is_64, endian)?;
        return keep(from, size, scratch);
    }
    if section.size > MAX_SECTION {
        let (name, size) = (section.name.clone(), section.size);
        return Err(ElfError::SectionTooLarge { name, size });
    }
    keep(window(file, section), section.size, scratch)
}

/// Begins to decompress a section.
pub(super) fn decompress<'a>(
    file: &'a File,
    section: &Section,
    is_64: bool,
    endian: Endianness,
) -> Result<Stream<'a>, ElfError> {
    let (kind, size, raw) = compression_header(window(file, section), is_64, endian)?;
    if size > MAX_SECTION.min(raw.left.saturating_mul(MAX_RATIO)) {
        let name = section.name.clone();
        return Err(ElfError::Expands { name, size, compressed: raw.left });
    }
    let from: Box<dyn Read + Send> = match kind {
        elf::ELFCOMPRESS_ZLIB => Box::new(flate2::read::ZlibDecoder::new(raw)),
        elf::ELFCOMPRESS_ZSTD => {
            let mut decoder = zstd::stream::read::Decoder::new(raw)?;
            // 128 MiB: what the highest level needs.
            decoder.window_log_max(27)?;
            Box::new(decoder)
        }
        other => return Err(ElfError::UnknownCompression(other)),
    };
    Ok(Stream { size, from })
}

fn window<'a>(file: &'a File, section: &Section) -> Window<'a> {
    Window { file, at: section.offset.0, left: section.size }
}

/// Largest file taken out of another; those of Fedora have some hundred kilobytes.
const MAX_INNER: u64 = 32 << 20;
/// Memory xz may use; its highest level wants 65 MiB.
const XZ_MEMORY: u64 = 128 << 20;

/// An xz-compressed file as one of its own.
pub(super) fn unxz(compressed: &[u8], scratch: &Scratch) -> Result<File, ElfError> {
    let stream = liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, 0)
        .map_err(|error| ElfError::Xz(error.into()))?;
    let mut decoder = liblzma::read::XzDecoder::new_stream(compressed, stream).take(MAX_INNER + 1);
    let mut file = scratch.file()?;
    let taken = io::copy(&mut decoder, &mut file).map_err(ElfError::Xz)?;
    if taken > MAX_INNER {
        return Err(ElfError::InnerTooLarge(MAX_INNER));
    }
    Ok(file)
}

/// Kind, size once decompressed, and what follows the header.
fn compression_header(
    mut raw: Window<'_>,
    is_64: bool,
    endian: Endianness,
) -> Result<(u32, u64, Window<'_>), ElfError> {
    // Elf64_Chdr: type, reserved, size, alignment; Elf32_Chdr: type, size, alignment, of 4 bytes
    // each.
    let mut header = [0; 24];
    let header = &mut header[..if is_64 { 24 } else { 12 }];
    raw.read_exact(header)?;
    let word = |at: usize| -> u32 {
        let bytes = [0, 1, 2, 3].map(|byte| header[at + byte]);
        match endian {
            Endianness::Little => u32::from_le_bytes(bytes),
            Endianness::Big => u32::from_be_bytes(bytes),
        }
    };
    let size = match (is_64, endian) {
        (false, _) => u64::from(word(4)),
        (true, Endianness::Little) => u64::from(word(8)) | u64::from(word(12)) << 32,
        (true, Endianness::Big) => u64::from(word(12)) | u64::from(word(8)) << 32,
    };
    Ok((word(0), size, raw))
}

/// Takes `size` bytes into memory or a file; fewer are an error, more are not asked for.
fn keep(mut from: impl Read, size: u64, scratch: &Scratch) -> Result<Bytes, ElfError> {
    if size <= IN_MEMORY {
        let mut bytes = vec![0; size as usize];
        from.read_exact(&mut bytes)?;
        return Ok(Bytes::from(bytes));
    }
    let mut file = scratch.file()?;
    // Written by another thread: it takes a quarter of the time decompression does.
    std::thread::scope(|scope| {
        let (full, chunks) = mpsc::sync_channel::<Vec<u8>>(CHUNKS);
        let written = scope.spawn(|| chunks.into_iter().try_for_each(|it| file.write_all(&it)));
        let mut copied = 0;
        let read = loop {
            let mut chunk = Vec::with_capacity(CHUNK);
            let wanted = (size - copied).min(CHUNK as u64);
            match from.by_ref().take(wanted).read_to_end(&mut chunk) {
                Ok(0) if copied == size => break Ok(()),
                Ok(0) => break Err(ElfError::Cut { size, found: copied }),
                Ok(read) => copied += read as u64,
                Err(error) => break Err(error.into()),
            }
            if full.send(chunk).is_err() {
                break Ok(()); // The writer has failed, and says why.
            }
        };
        drop(full);
        let written = written.join().unwrap_or_else(|_panicked| Err(io::ErrorKind::Other.into()));
        read.and(written.map_err(ElfError::from))
    })?;
    Ok(Bytes::map(&file)?)
}

/// Bytes that are decompressed, and then written, at a time.
const CHUNK: usize = 1 << 18;
/// Chunks that wait to be written.
const CHUNKS: usize = 8;

/// A part of a file, read with pread.
struct Window<'a> {
    file: &'a File,
    at: u64,
    left: u64,
}

impl Read for Window<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = self.left.min(into.len() as u64) as usize;
        let read = self.file.read_at(&mut into[..length], self.at)?;
        self.at += read as u64;
        self.left -= read as u64;
        Ok(read)
    }
}
