//! Stubs of the linkage table (`.plt`). No symbol covers them, and half of all calls between
//! libraries go through one. They are named `FUNCTION@plt`, as perf and objdump do.
//!
//! A stub jumps to the address in a word. A relocation fills that word with a function's address,
//! and the relocation has the name. x86-64 only: a stub has `jmp *displacement(%rip)`, and around
//! it whatever instructions hardening adds.

use std::collections::HashMap;

use object::elf::{self, Rela64, Sym64};
use object::read::elf::Rela;
use object::{LittleEndian, pod};
use stackwire_elf::Elf;
use stackwire_model::Machine;

use super::symbols::{Raw, dynamic_name};
use crate::table::{Kind, NodeKey, Writer};

/// Sections of stubs, with the bytes of one.
const STUBS: [(&str, u64); 3] = [(".plt", 16), (".plt.sec", 16), (".plt.got", 8)];
/// Most relocations looked at.
const MAX_RELOCATIONS: usize = 4 << 20;

/// Adds the stubs of a file where the table has nothing better.
pub fn write(elf: &Elf, writer: &mut Writer) {
    if !elf.is_64
        || elf.machine != Machine::X86_64.elf()
        || !STUBS.iter().any(|(name, _)| elf.has(name))
    {
        return;
    }
    let Some(names) = names(elf) else { return };
    for (section, size) in STUBS {
        let Some(header) = elf.sections.iter().find(|found| found.name == section) else {
            continue;
        };
        let Ok(content) = elf.content(header) else { continue };
        // With CET a stub of `.plt.got` has 16 bytes as well.
        let size = if content.starts_with(&ENDBR64) { 16 } else { size };
        for (index, stub) in content.chunks_exact(size as usize).enumerate() {
            let start = header.address.0.wrapping_add(index as u64 * size);
            let Some(name) = target(stub, start).and_then(|word| names.get(&word)) else {
                continue;
            };
            let function = writer.function(&format!("{name}@plt"), Kind::Dynsym);
            let leaf = writer.node(NodeKey { function, file: None, line: 0, parent: 0 });
            writer.fallback(1, start, start.saturating_add(size), leaf);
        }
    }
}

const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// Address of the word a stub jumps through: `ff 25` and a displacement from what follows.
fn target(stub: &[u8], start: u64) -> Option<u64> {
    let at = stub.windows(2).position(|pair| pair == [0xff, 0x25])?;
    let displacement = i32::from_le_bytes(*stub.get(at + 2..)?.first_chunk::<4>()?);
    start.checked_add(at as u64 + 6)?.checked_add_signed(displacement.into())
}

/// Names of functions by the address of the word that will hold theirs.
fn names(elf: &Elf) -> Option<HashMap<u64, String>> {
    let section = |name: &str| elf.sections.iter().find(|section| section.name == name);
    let symbols = section(".dynsym")?;
    let strings = elf.content(elf.sections.get(symbols.link as usize)?).ok()?;
    let symbols = elf.content(symbols).ok()?;
    let mut names = HashMap::new();
    let mut text_left = strings.len().saturating_mul(2);
    for relocations in [".rela.plt", ".rela.dyn"] {
        let Some(Ok(entries)) = section(relocations).map(|found| elf.content(found)) else {
            continue;
        };
        let (entries, _) = entries.as_chunks::<{ size_of::<Rela64<LittleEndian>>() }>();
        for entry in entries.iter().take(MAX_RELOCATIONS) {
            let Ok((entry, _)) = pod::from_bytes::<Rela64<LittleEndian>>(entry) else { continue };
            if !matches!(
                entry.r_type(LittleEndian, false),
                elf::R_X86_64_JUMP_SLOT | elf::R_X86_64_GLOB_DAT
            ) {
                continue;
            }
            let word = entry.r_offset(LittleEndian);
            let at = entry.r_sym(LittleEndian, false) as usize * size_of::<Sym64<LittleEndian>>();
            let Some(raw) = symbols.get(at..) else { continue };
            let Some(name) = Raw::of(raw, elf).and_then(|raw| dynamic_name(&strings, &raw)) else {
                continue;
            };
            // Hostile tables share one long name among all.
            text_left = text_left.checked_sub(name.len())?;
            names.insert(word, name.to_owned());
        }
    }
    Some(names)
}
