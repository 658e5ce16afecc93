//! The kernel's symbols, rebased: what lies where in the kernel, and a snapshot that names it
//! without giving away where it is.
//!
//! Parsing is pure. Absolute addresses stay in [`KernelLayout`], which never leaves this process.
//! Read once at start-up, while `CAP_SYSLOG` is held. The names are for the symbolizer.

use std::fmt::Write as _;
use std::ops::Range;

use stackwire_model::{KernelAddr, KernelOffset};
use stackwire_proto::kallsyms::{Symbol, symbols as symbols_of};

use crate::arch;

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
    /// Functions that mean something in the stack of a wake-up, by address.
    marked: Vec<(Range<KernelAddr>, Mark)>,
}

/// What a function means in the stack of a wake-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    /// An interrupt of a device, a timer or another CPU enters the kernel here.
    Interrupt,
    /// It runs programs at the tracepoint: include/trace/bpf_probe.h, kernel/trace/bpf_trace.c.
    Tracing,
}

impl Mark {
    fn of(name: &str) -> Option<Self> {
        match name {
            "bpf_trace_run1" | "__bpf_trace_sched_wakeup_template" | "__traceiter_sched_waking" => {
                Some(Self::Tracing)
            }
            name => arch::is_interrupt_entry(name).then_some(Self::Interrupt),
        }
    }
}

/// From where a thread was woken, by a kernel stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WokenFrom<'a> {
    /// By an interrupt, which ran this.
    Interrupt(&'a [u64]),
    /// By the thread whose stack it is.
    Thread(&'a [u64]),
}

impl KernelLayout {
    /// Nothing is known: kallsyms could not be read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Name of the module (empty for the kernel itself) and offset from its base.
    #[must_use]
    pub fn locate(&self, address: KernelAddr) -> Option<(&str, KernelOffset)> {
        let after = self.runs.partition_point(|run| run.start <= address);
        let run = self.runs.get(after.checked_sub(1)?).filter(|run| address < run.end)?;
        let (name, base) = self.modules.get(run.module)?;
        Some((name, KernelOffset(address.since(*base)?)))
    }

    /// Takes apart a kernel stack, leaf first, that a program at `sched_waking` took.
    #[must_use]
    pub fn woken_from<'a>(&self, stack: &'a [u64]) -> WokenFrom<'a> {
        let is = |mark: Mark| move |&address: &u64| self.mark(KernelAddr(address)) == Some(mark);
        let program = stack.iter().rposition(is(Mark::Tracing)).map_or(0, |last| last + 1);
        let stack = &stack[program..];
        let Some(first) = stack.iter().position(is(Mark::Interrupt)) else {
            return WokenFrom::Thread(stack);
        };
        let is_entry = is(Mark::Interrupt);
        let entries = stack[first..].iter().take_while(|address| is_entry(address)).count();
        WokenFrom::Interrupt(&stack[..first + entries])
    }

    fn mark(&self, address: KernelAddr) -> Option<Mark> {
        let after = self.marked.partition_point(|(at, _)| at.start <= address);
        let (at, mark) = self.marked.get(after.checked_sub(1)?)?;
        at.contains(&address).then_some(*mark)
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
    let own = symbols.iter().filter(|&&(.., module)| module == KERNEL);
    let behind = own.clone().skip(1).map(|&(address, ..)| address);
    let marked = own
        .zip(behind)
        .filter_map(|(&(start, name, _), end)| Some((start..end, Mark::of(name)?)))
        .collect();

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
    (KernelLayout { modules, runs, marked }, snapshot)
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

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn what_an_interrupt_ran_ends_where_it_entered() {
        let text = TEXT.replace("do_syscall", "asm_sysvec_irq_work").replace(
            "ffffffff81000800 D not_code",
            "ffffffff81000200 t sysvec_irq_work\nffffffff81000300 t wake_up\n\
             ffffffff81000400 t bpf_trace_run1\nffffffff81000500 t other",
        );
        let (layout, _) = parse(&text);
        let stack = [0x510, 0x410, 0x345, 0x234, 0x123, 0x310].map(|at| 0xffff_ffff_8100_0000 + at);
        assert_eq!(layout.woken_from(&stack), WokenFrom::Interrupt(&stack[2..5]));
        assert_eq!(layout.woken_from(&stack[5..]), WokenFrom::Thread(&stack[5..]));
        assert_eq!(KernelLayout::default().woken_from(&stack), WokenFrom::Thread(&stack));
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
