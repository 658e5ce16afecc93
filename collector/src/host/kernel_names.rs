//! Names of the kernel's functions that samples lie in, in pieces: a capture of an hour touches a
//! few hundred of 60,000.
//!
//! The pipeline asks once an epoch. Functions that were not named before become a piece: an
//! artifact with lines of the snapshot (`kallsyms.rs`). A line without a name marks the end of a
//! function whose neighbour is not in the piece. An epoch refers to all pieces it needs. Pure.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;

use crate::artifact::{Artifact, Hash, Kind as ArtifactKind};
use crate::batch::Epoch;
use crate::normalize::FrameKind;
use crate::process::executable::Kind;

/// Pieces an epoch may need, of 32 bytes each.
const MAX_PIECES: usize = 16;

/// The snapshot, and which of its functions are in which piece.
#[derive(Debug, Default)]
pub struct KernelNames {
    /// Lines `module TAB offset TAB name`, by module and offset.
    snapshot: String,
    /// By the position of a function's first line.
    pieces: HashMap<usize, Hash>,
}

impl KernelNames {
    /// Of a snapshot; none has been named.
    #[must_use]
    pub fn new(snapshot: String) -> Self {
        Self { snapshot, pieces: HashMap::new() }
    }

    /// The earlier pieces are no longer available: name all functions again.
    pub fn forget(&mut self) {
        self.pieces.clear();
    }

    /// The pieces that name all kernel frames of an epoch, and the one that is new.
    pub fn of(&mut self, epoch: &Epoch) -> (Vec<Hash>, Option<Artifact>) {
        let mut seen = HashSet::new();
        let mut functions = BTreeSet::new();
        for node in &epoch.nodes {
            let module = match &epoch.executables[node.executable as usize].kind {
                Kind::Kernel => "",
                Kind::Module(name) => name,
                _ => continue,
            };
            // A return address is looked up one byte before, where the call is.
            let Some(offset) = node.address.kernel() else { continue };
            let offset = offset.saturating_sub(u64::from(node.kind == FrameKind::Caller));
            if seen.insert((node.executable, offset)) {
                functions.extend(self.function(module, offset.0));
            }
        }
        let known = functions.iter().filter_map(|function| Some(self.pieces.get(function)?.0));
        let parts = known.collect::<BTreeSet<[u8; 32]>>().len();
        // Each epoch names its pieces: rather one again of all its functions than ever more of
        // them.
        let again = parts >= MAX_PIECES;
        let new = functions.iter().filter(|at| again || !self.pieces.contains_key(at));
        let new: Vec<usize> = new.copied().collect();
        let mut lines = BTreeSet::new();
        for &function in &new {
            self.choose(function, &mut lines);
        }
        if self.pieces.is_empty() && !new.is_empty() {
            // `_text`, where perf begins to count when it reads them.
            lines.extend(self.at_place(self.first("", 0)));
        }
        let piece = (!lines.is_empty())
            .then(|| Artifact::new(ArtifactKind::Kallsyms, self.text(&lines).into_bytes()));
        if let Some(piece) = &piece {
            self.pieces.extend(new.iter().map(|&function| (function, piece.hash)));
        }
        let pieces: BTreeSet<[u8; 32]> =
            functions.iter().filter_map(|function| Some(self.pieces.get(function)?.0)).collect();
        (pieces.into_iter().map(Hash).collect(), piece)
    }

    /// The lines, and where their functions end.
    fn text(&self, lines: &BTreeSet<usize>) -> String {
        let end = |&line: &usize| {
            let (_, start, _) = fields(self.line(line));
            self.from(line).find(|&next| fields(self.line(next)).1 > start)
        };
        let ends = lines.iter().filter_map(end);
        let mut text = String::new();
        for at in ends.chain(lines.iter().copied()).collect::<BTreeSet<_>>() {
            let line = self.line(at);
            let (module, start, _) = fields(line);
            let written = if lines.contains(&at) {
                writeln!(text, "{line}")
            } else {
                writeln!(text, "{module}\t{start:x}\t")
            };
            // Writing to a String cannot fail.
            let _ = written;
        }
        text
    }

    /// Adds the lines that name a function: its own, all names at its place.
    ///
    /// Of a module of the kernel also its neighbours and all of the same name: only they tell which
    /// function of the module's debug file it is.
    fn choose(&self, function: usize, lines: &mut BTreeSet<usize>) {
        let (module, start, _) = fields(self.line(function));
        let own: Vec<usize> = self.at_place(function).collect();
        lines.extend(&own);
        if matches!(module, "" | "bpf") {
            return;
        }
        let names: HashSet<&str> = own.iter().map(|&line| fields(self.line(line)).2).collect();
        let first = self.first(module, 0);
        for line in self.from(first) {
            if names.contains(fields(self.line(line)).2) {
                lines.insert(line);
            }
        }
        let before = start.checked_sub(1).and_then(|before| self.function(module, before));
        let after = self.from(first).find(|&line| fields(self.line(line)).1 > start);
        for neighbour in before.into_iter().chain(after) {
            lines.extend(self.at_place(neighbour));
        }
    }

    /// The lines from one on that have its offset.
    fn at_place(&self, first: usize) -> impl Iterator<Item = usize> {
        let (_, offset, _) = fields(self.line(first));
        self.from(first).take_while(move |&line| fields(self.line(line)).1 == offset)
    }

    /// The first line of the function around an offset.
    fn function(&self, module: &str, offset: u64) -> Option<usize> {
        let behind = self.first(module, offset.saturating_add(1));
        let last = self.snapshot[..behind].strip_suffix('\n')?;
        let (found, start, _) = fields(&last[last.rfind('\n').map_or(0, |at| at + 1)..]);
        (found == module).then(|| self.first(module, start))
    }

    /// The first line of a module at or behind an offset; behind all of its lines, or of all, when
    /// there is none.
    fn first(&self, module: &str, offset: u64) -> usize {
        let (mut low, mut high) = (0, self.snapshot.len());
        while low < high {
            let middle = low + (high - low) / 2;
            // Bytes: the middle may be one of a character's.
            let before = self.snapshot.as_bytes()[..middle].iter();
            let line = before.rev().position(|&byte| byte == b'\n').map_or(0, |back| middle - back);
            let line = line.max(low);
            let (of, start, _) = fields(self.line(line));
            match of.cmp(module).then(start.cmp(&offset)) {
                Ordering::Less => low = line + self.line(line).len() + 1,
                _ => high = line,
            }
        }
        low
    }

    /// The lines of a module from one on.
    fn from(&self, first: usize) -> impl Iterator<Item = usize> {
        let module = self.snapshot.get(first..).map_or("", |_| fields(self.line(first)).0);
        let next = move |&at: &usize| Some(at + self.line(at).len() + 1);
        std::iter::successors(Some(first), next)
            .take_while(move |&at| at < self.snapshot.len() && fields(self.line(at)).0 == module)
    }

    fn line(&self, at: usize) -> &str {
        let rest = self.snapshot.get(at..).unwrap_or_default();
        rest.split_once('\n').map_or(rest, |(line, _)| line)
    }
}

/// Module, offset and name of a line.
fn fields(line: &str) -> (&str, u64, &str) {
    let mut fields = line.splitn(3, '\t');
    let mut next = || fields.next().unwrap_or_default();
    let (module, offset, name) = (next(), next(), next());
    (module, u64::from_str_radix(offset, 16).unwrap_or(0), name)
}

#[cfg(test)]
mod tests {
    use stackwire_model::{Address, KernelOffset};

    use super::*;
    use crate::definitions::Node;
    use crate::process::executable::Executables;

    const SNAPSHOT: &str = "\t0\t_text\n\t0\tstartup_64\n\t100\tread\n\t200\twrite\n\t300\t_etext\nbpf\t0\tprogram\n\
        ext4\t0\tfirst\next4\t10\tstatic\next4\t20\tthird\next4\t30\tfourth\next4\t40\tstatic\n";

    fn epoch(frames: &[(&str, u64, FrameKind)]) -> Epoch {
        let mut executables = Executables::default();
        let mut epoch = Epoch::default();
        for &(module, offset, kind) in frames {
            let of = if module.is_empty() { Kind::Kernel } else { Kind::Module(module.to_owned()) };
            epoch.executables.push(executables.intern(of));
            let executable = epoch.executables.len() as u32 - 1;
            let address = Address::Kernel(KernelOffset(offset));
            epoch.nodes.push(Node { parent: 0, executable, address, kind });
        }
        epoch
    }

    fn text(piece: Option<Artifact>) -> String {
        String::from_utf8(piece.unwrap().open().unwrap().piece(0).unwrap()).unwrap()
    }

    #[test]
    fn what_is_touched_is_named_once() {
        let mut names = KernelNames::new(SNAPSHOT.to_owned());
        let (leaf, caller) = (FrameKind::Leaf, FrameKind::Caller);
        let (first, piece) = names.of(&epoch(&[("", 0x50, leaf), ("", 0x200, caller)]));
        assert_eq!(text(piece), "\t0\t_text\n\t0\tstartup_64\n\t100\tread\n\t200\t\n");
        let (second, piece) = names.of(&epoch(&[("", 0x1ff, leaf), ("bpf", 7, leaf)]));
        assert_eq!(text(piece), "bpf\t0\tprogram\n");
        assert_eq!((first.len(), second.len()), (1, 2));
        assert!(second.contains(&first[0]));
        // All known, and nothing there is to be known.
        for (frames, pieces) in [(("", 0, leaf), 1), (("none", 5, leaf), 0), (("zzz", 0, leaf), 0)]
        {
            let (found, piece) = names.of(&epoch(&[frames]));
            assert!(piece.is_none() && found.len() == pieces, "{frames:?}");
        }
        assert!(KernelNames::default().of(&epoch(&[("", 1, leaf)])).0.is_empty());
    }

    #[test]
    fn an_epoch_needs_few_pieces() {
        let lines = (0..99).map(|at| format!("\t{:x}\tf{at}\n", at * 16));
        let mut names = KernelNames::new(lines.collect());
        let frames: Vec<_> = (0..99).map(|at| ("", at * 16, FrameKind::Leaf)).collect();
        let most = (1..=99).map(|count| names.of(&epoch(&frames[..count])).0.len()).max();
        assert_eq!(most, Some(MAX_PIECES));
        names.forget();
        let (pieces, piece) = names.of(&epoch(&frames));
        assert_eq!((pieces.len(), text(piece).lines().count()), (1, 99));
    }

    #[test]
    fn of_modules_what_tells_them_apart_comes_along() {
        let mut names = KernelNames::new(SNAPSHOT.to_owned());
        let (_, piece) = names.of(&epoch(&[("ext4", 0x12, FrameKind::Leaf)]));
        let lines = "\t0\t_text\n\t0\tstartup_64\n\t100\t\next4\t0\tfirst\next4\t10\tstatic\next4\t20\tthird\next4\t30\t\next4\t40\tstatic\n";
        assert_eq!(text(piece), lines);
        let (_, piece) = names.of(&epoch(&[("ext4", 0x99, FrameKind::Leaf)]));
        assert_eq!(
            text(piece),
            "ext4\t10\tstatic\next4\t20\t\next4\t30\tfourth\next4\t40\tstatic\n"
        );
    }
}
