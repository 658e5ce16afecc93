//! Notes: what a file, or the running kernel, says it is known by.

use object::elf::{ELF_NOTE_GNU, FileHeader64, NT_GNU_BUILD_ID};
use object::read::elf::NoteIterator;
use object::{Endianness, NativeEndian};
use stackwire_model::BuildId;

/// Type of Go's build-id note, of cmd/internal/buildid.
const NT_GO_BUILD_ID: u32 = 4;

/// What a file says it is known by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    /// `NT_GNU_BUILD_ID`.
    pub gnu: Option<BuildId>,
    /// Go's, as `go tool buildid` prints it.
    pub go: Option<String>,
}

impl Ids {
    /// The first of each kind holds.
    pub(crate) fn take(&mut self, owner: &[u8], kind: u32, content: &[u8]) {
        match (owner, kind) {
            (ELF_NOTE_GNU, NT_GNU_BUILD_ID) => {
                self.gnu = self.gnu.or_else(|| BuildId::new(content));
            }
            (b"Go", NT_GO_BUILD_ID) => {
                self.go.get_or_insert_with(|| String::from_utf8_lossy(content).into_owned());
            }
            _ => {}
        }
    }
}

/// The GNU build-id among notes of this machine's byte order, as in `/sys/kernel/notes`.
#[must_use]
pub fn gnu_build_id(notes: &[u8]) -> Option<BuildId> {
    let mut ids = Ids::default();
    let mut notes = NoteIterator::<FileHeader64<NativeEndian>>::new(NativeEndian, 4, notes).ok()?;
    while let Ok(Some(note)) = notes.next() {
        ids.take(note.name(), note.n_type(NativeEndian), note.desc());
    }
    ids.gnu
}

/// Takes all notes of a section or segment; one that cannot be read ends them.
pub(crate) fn take_all<E>(ids: &mut Ids, endian: Endianness, mut notes: NoteIterator<'_, E>)
where
    E: object::read::elf::FileHeader<Endian = Endianness>,
{
    while let Ok(Some(note)) = notes.next() {
        ids.take(note.name(), note.n_type(endian), note.desc());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_id_is_found_among_other_notes() {
        let note = |kind: u32, name: &[u8], content: &[u8]| {
            let mut note = Vec::new();
            for word in [name.len() as u32, content.len() as u32, kind] {
                note.extend(word.to_ne_bytes());
            }
            for part in [name, content] {
                note.extend(part);
                note.resize(note.len().next_multiple_of(4), 0);
            }
            note
        };
        let notes = [note(1, b"Xen\0", b"abc"), note(3, b"GNU\0", &[7; 20])].concat();
        assert_eq!(gnu_build_id(&notes), BuildId::new(&[7; 20]));
        assert_eq!(gnu_build_id(&notes[..30]), None);
        assert_eq!(gnu_build_id(&[0xff; 40]), None);
    }
}
