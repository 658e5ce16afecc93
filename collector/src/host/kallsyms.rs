//! The kernel's symbols, rebased: what lies where in the kernel, and a snapshot that names it
//! without giving away where it is.
//!
//! Parsing is pure. Absolute addresses stay in [`KernelLayout`], which never leaves this process.
//! Read once at start-up, while `CAP_SYSLOG` is held. The names are for the symbolizer.

use std::fmt::Write as _;
use std::ops::Range;

use stackwire_model::{KernelAddr, KernelOffset};
use stackwire_proto::kallsyms::{Symbol, symbols as symbols_of};

/// Where the kernel lists its symbols.
pub const PATH: &str = "/proc/kallsyms";

/// A symbol with nothing known behind it reaches no farther than this: few functions are longer,
/// and what was loaded behind it since must not be taken for it.
const MAX_REACH: u64 = 8 << 10;

/// Where the kernel itself is among the modules.
const KERNEL: usize = 0;

/// A run of text symbols of one module.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    start: KernelAddr,
    end: KernelAddr,
    module: usize,
}

/// What lies where in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelLayout {
    /// Name and base, the kernel itself first with an empty name.
    modules: Vec<(String, KernelAddr)>,
    runs: Vec<Run>,
    /// The function that switches from one thread to another.
    scheduler: Option<Range<KernelAddr>>,
}

/// Where threads leave their CPU; a compiler may append something to the name.
const SCHEDULER: &str = "__schedule";
/// Module of BPF programs.
const PROGRAMS: &str = "bpf";
/// Frames that a tracepoint puts in front of the function it is in.
const MAX_TRACING: usize = 16;

impl KernelLayout {
    /// Nothing is known: kallsyms could not be read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The stack of a thread that leaves its CPU, leaf first, without the frames of the program
    /// that took it and of the tracepoint that called that.
    #[must_use]
    pub fn without_tracing<'a>(&self, stack: &'a [u64]) -> &'a [u64] {
        let address = |&frame: &u64| KernelAddr(frame.wrapping_sub(1));
        let inside = |frame: &u64| {
            self.scheduler.as_ref().is_some_and(|scheduler| scheduler.contains(&address(frame)))
        };
        let first = stack.iter().take(MAX_TRACING).position(inside).unwrap_or_else(|| {
            let is_program = |frame: &&u64| {
                self.locate(address(frame)).is_some_and(|(name, _)| name == PROGRAMS)
            };
            stack.iter().take_while(is_program).count()
        });
        &stack[first..]
    }

    /// Name of the module (empty for the kernel itself) and offset from its base.
    #[must_use]
    pub fn locate(&self, address: KernelAddr) -> Option<(&str, KernelOffset)> {
        let after = self.runs.partition_point(|run| run.start <= address);
        let run = self.runs.get(after.checked_sub(1)?).filter(|run| address < run.end)?;
        let (name, base) = self.modules.get(run.module)?;
        Some((name, KernelOffset(address.since(*base)?)))
    }
}

/// Parses kallsyms into the layout and the rebased snapshot, whose lines are
/// `module TAB offset TAB name`, by module and offset; text symbols only.
///
/// The kernel's base is `_text`, a module's is its lowest text symbol. Lines that do not parse,
/// data symbols and zero addresses are passed over.
#[must_use]
pub fn parse(text: &str) -> (KernelLayout, String) {
    // Names of modules are compared once per run of lines, not per line: there are 120,000 of
    // those.
    let mut names: Vec<&str> = vec![""];
    let mut symbols: Vec<(KernelAddr, &str, usize)> = Vec::with_capacity(text.len() / 64);
    let mut last = 0;
    for Symbol { address, name, module } in symbols_of(text) {
        // Two empty names are not compared: a masked load from where nothing is costs a microcode
        // assist each.
        if module.is_empty() {
            last = KERNEL;
        } else if names[last] != module {
            last = names.iter().position(|name| *name == module).unwrap_or(names.len());
            if last == names.len() {
                names.push(module);
            }
        }
        symbols.push((address, name, last));
    }
    // Stable: the kernel lists its own symbols in order, which makes this one pass.
    symbols.sort_by_key(|&(address, ..)| address);
    let kernel_base =
        symbols.iter().find(|(_, name, module)| *module == KERNEL && *name == "_text");
    let Some(&(kernel_base, ..)) = kernel_base else {
        return (KernelLayout::default(), String::new());
    };
    symbols.retain(|&(address, _, module)| module != KERNEL || address >= kernel_base);

    let is_scheduler = |name: &str| {
        let rest = name.strip_prefix(SCHEDULER);
        rest.is_some_and(|rest| {
            rest.is_empty() || rest.starts_with(".constprop") || rest.starts_with(".isra")
        })
    };
    let at = symbols.iter().position(|&(_, name, module)| module == KERNEL && is_scheduler(name));
    let scheduler = at.and_then(|at| {
        let start = symbols[at].0;
        let next = symbols[at..].iter().find(|&&(address, ..)| address > start);
        next.map(|&(end, ..)| start..end)
    });

    let mut bases: Vec<Option<KernelAddr>> = vec![None; names.len()];
    bases[KERNEL] = Some(kernel_base);
    // The kernel's own text is one run; modules and BPF programs may have others between their
    // parts.
    let mut runs: Vec<Run> = Vec::new();
    for &(address, name, module) in &symbols {
        bases[module].get_or_insert(address);
        if let Some(last) = runs.last_mut() {
            let same = last.module == module && (module == KERNEL || address < last.end);
            // A run ends where the next begins; `_etext` ends the kernel's own text.
            last.end = if same || last.end > address { address } else { last.end };
            if same {
                last.end = address.saturating_add(MAX_REACH);
                if name == "_etext" {
                    last.end = address;
                }
                continue;
            }
        }
        runs.push(Run { start: address, end: address.saturating_add(MAX_REACH), module });
    }

    let mut by_name: Vec<usize> = (0..names.len()).collect();
    by_name.sort_by_key(|&module| names[module]);
    let mut place = vec![0; names.len()];
    for (at, module) in by_name.into_iter().enumerate() {
        place[module] = at;
    }
    symbols.sort_by_key(|&(.., module)| place[module]);
    let mut snapshot = String::with_capacity(symbols.len() * 32);
    for &(address, name, module) in &symbols {
        let offset = bases[module].and_then(|base| address.since(base)).unwrap_or(0);
        // Writing to a String cannot fail.
        let _ = writeln!(snapshot, "{}\t{offset:x}\t{name}", names[module]);
    }
    snapshot.shrink_to_fit();
    let modules = names.iter().zip(bases);
    let modules =
        modules.map(|(name, base)| ((*name).to_owned(), base.unwrap_or_default())).collect();
    (KernelLayout { modules, runs, scheduler }, snapshot)
}

/// Takes a snapshot apart: the lines of BPF programs, and those before and behind them.
#[must_use]
pub fn split_programs(snapshot: &str) -> (&str, [&str; 2]) {
    let mut lines = snapshot.split_inclusive('\n');
    let is_program = |line: &&str| line.starts_with("bpf\t");
    let before: usize = lines.by_ref().take_while(|line| !is_program(line)).map(str::len).sum();
    let (before, rest) = snapshot.split_at(before);
    let programs = rest.split_inclusive('\n').take_while(is_program).map(str::len).sum();
    let (programs, behind) = rest.split_at(programs);
    (programs, [before, behind])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000100 t do_syscall
ffffffff81000800 D not_code
ffffffff81000900 T _etext
ffffffffc0000000 t first_of_module\t[ext4]
ffffffffc0000080 t second\t[ext4]
ffffffffc0400000 t bpf_prog_1\t[bpf]
nonsense
";

    #[test]
    fn locates_addresses_by_module() {
        let (layout, _) = parse(TEXT);
        let locate = |address| layout.locate(KernelAddr(address));
        let at = |module, offset| Some((module, KernelOffset(offset)));
        assert_eq!(locate(0xffff_ffff_8100_0123), at("", 0x123));
        assert_eq!(locate(0xffff_ffff_8100_0900), None);
        assert_eq!(locate(0xffff_ffff_c000_0090), at("ext4", 0x90));
        assert_eq!(locate(0xffff_ffff_c040_0010), at("bpf", 0x10));
        assert_eq!(locate(0x1000), None);
        assert_eq!(locate(u64::MAX), None);
    }

    #[test]
    fn a_switch_begins_in_the_scheduler() {
        let scheduler = "ffffffff81000200 t __schedule\nffffffff81000300 T schedule\n";
        let program = 0xffff_ffff_c040_0010;
        let stack = [program, 0xffff_ffff_8100_0110, 0xffff_ffff_8100_0280, 0xffff_ffff_8100_0310];
        let (layout, _) =
            parse(&TEXT.replace("ffffffff81000800", &format!("{scheduler}ffffffff81000800")));
        assert_eq!(layout.without_tracing(&stack), &stack[2..]);
        // Where it has another name, frames of programs alone are dropped.
        let (layout, _) = parse(TEXT);
        assert_eq!(layout.without_tracing(&stack), &stack[1..]);
        assert_eq!(KernelLayout::default().without_tracing(&stack), stack);
    }

    #[test]
    fn the_snapshot_has_offsets_only() {
        let (_, snapshot) = parse(TEXT);
        assert!(!snapshot.contains("ffffffff"), "{snapshot}");
        assert!(snapshot.contains("\t100\tdo_syscall\n"));
        assert!(snapshot.contains("ext4\t80\tsecond\n"));
        let moved = TEXT.replace("ffffffff8", "ffffffff9");
        assert_eq!(parse(&moved).1, snapshot, "the same kernel elsewhere gives the same snapshot");
    }

    #[test]
    fn programs_are_apart() {
        let (_, snapshot) = parse(TEXT);
        let (programs, kernel) = split_programs(&snapshot);
        assert_eq!(programs, "bpf\t0\tbpf_prog_1\n");
        assert!(kernel[0].contains("do_syscall") && kernel[1].starts_with("ext4\t0\t"));
        assert_eq!([kernel[0], programs, kernel[1]].concat(), snapshot);
        assert_eq!(split_programs(kernel[0]), ("", [kernel[0], ""]));
    }

    #[test]
    fn hidden_addresses_give_nothing() {
        let hidden = "0000000000000000 T _text\n0000000000000000 t do_syscall\n";
        let (layout, snapshot) = parse(hidden);
        assert!(layout == KernelLayout::default() && snapshot.is_empty());
    }

    proptest! {
        #[test]
        fn never_panics(lines in proptest::collection::vec("[0-9a-f]{1,16} [tTwWdD] [a-z_]{1,6}( \\[[a-z]{1,3}\\])?", 0..30)) {
            let (layout, _) = parse(&format!("ffffffff81000000 T _text\n{}", lines.join("\n")));
            for run in &layout.runs {
                prop_assert!(run.start <= run.end);
            }
        }
    }
}
