//! Text symbols as `/proc/kallsyms` lists them: `address type name[ TAB [module]]`. Pure.
//!
//! Both sides make the same snapshot of them: the collector of the host it samples, the symbolizer
//! of its own for profiles by other programs.

use stackwire_model::KernelAddr;

/// A function of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Where it begins; never 0, which stands for all addresses where they are hidden.
    pub address: KernelAddr,
    /// Its name.
    pub name: &'a str,
    /// Its module; empty for the kernel itself.
    pub module: &'a str,
}

/// Text symbols, in the order of the lines; data and lines that do not parse are passed over.
pub fn symbols(text: &str) -> impl Iterator<Item = Symbol<'_>> {
    text.lines().filter_map(parse_line)
}

fn parse_line(line: &str) -> Option<Symbol<'_>> {
    let mut fields = line.split([' ', '\t']);
    let address = u64::from_str_radix(fields.next()?, 16).ok().filter(|&address| address != 0);
    let address = KernelAddr(address?);
    let kind = fields.next()?;
    let name = fields.next()?;
    let module = fields.next().map_or("", |module| module.trim_matches(['[', ']']));
    matches!(kind, "t" | "T" | "w" | "W").then_some(Symbol { address, name, module })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_taken_and_nothing_else() {
        let text = "\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _text
ffffffff81000800 D not_code
ffffffffc0000080 w second\t[ext4]
zz T no_address
ffffffff81000900
";
        let found: Vec<_> = symbols(text).map(|it| (it.address.0, it.name, it.module)).collect();
        let expected =
            [(0xffff_ffff_8100_0000, "_text", ""), (0xffff_ffff_c000_0080, "second", "ext4")];
        assert_eq!(found, expected);
    }
}
