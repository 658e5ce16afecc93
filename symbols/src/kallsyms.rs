//! Names in the kernel from the collector: lines `module TAB offset TAB name`, in any order. A line
//! without a name ends the function before it. Pure.

use std::collections::HashMap;

use stackwire_model::KernelOffset;
use stackwire_model::profile::Line;

/// A module's symbols by offset.
type Module<'a> = Vec<(KernelOffset, &'a str)>;

/// The snapshot, parsed.
#[derive(Debug, Default)]
pub struct Symbols<'a> {
    modules: HashMap<&'a str, Module<'a>>,
}

impl<'a> Symbols<'a> {
    /// Parses a snapshot; lines that do not parse are passed over.
    #[must_use]
    pub fn parse(text: &'a [u8]) -> Self {
        let mut modules: HashMap<&str, Module<'a>> = HashMap::new();
        for line in text.split(|&byte| byte == b'\n') {
            let Ok(line) = std::str::from_utf8(line) else { continue };
            let mut fields = line.splitn(3, '\t');
            let (Some(module), Some(offset), Some(name)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if let Ok(offset) = u64::from_str_radix(offset, 16) {
                modules.entry(module).or_default().push((KernelOffset(offset), name));
            }
        }
        for symbols in modules.values_mut() {
            // Of several names at one place the best comes last, where the search finds it.
            symbols.sort_by(|a, b| a.0.cmp(&b.0).then_with(|| rank(a.1).cmp(&rank(b.1))));
            // Pieces of a capture may have some of the same.
            symbols.dedup();
        }
        Self { modules }
    }

    /// The function around `offset` in `module`.
    #[must_use]
    pub fn find(&self, module: &str, offset: KernelOffset) -> Option<Line> {
        let symbols = self.modules.get(module)?;
        let after = symbols.partition_point(|&(start, _)| start <= offset);
        let (_, name) = symbols.get(after.checked_sub(1)?).filter(|(_, name)| !name.is_empty())?;
        Some(Line { function: (*name).into(), ..Line::default() })
    }

    /// All symbols of a module by offset, several at one place included.
    #[must_use]
    pub fn of(&self, module: &str) -> Vec<(KernelOffset, &'a str)> {
        let symbols = self.modules.get(module).into_iter().flatten();
        symbols.filter(|(_, name)| !name.is_empty()).copied().collect()
    }
}

/// Orders the names of one address, the best last. The best has the fewest leading underscores; of
/// several such, it is the last by name, which perf takes for most. Names of padding are the worst.
/// Next come names for 32-bit and early callers, which are few.
fn rank(name: &str) -> (bool, bool, bool, usize, &str) {
    let underscores = name.len() - name.trim_start_matches('_').len();
    let padding = name.starts_with("__pfx_") || name.starts_with("__cfi_");
    let rare = name.starts_with("__ia32_") || name.starts_with("__pi_");
    (!name.is_empty(), !padding, !rare, usize::MAX - underscores, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_best_name_around_an_offset() {
        let text = b"\t0\t_text\n\t0\tstartup_64\n\t100\t__pfx_read\n\t100\tread\n\t100\t__x64_read\n\t200\t__do_sys_vfork\n\t200\t__ia32_sys_vfork\n\t200\t__x64_sys_vfork\next4\t10\tf\nbad\n";
        let symbols = Symbols::parse(text);
        let name = |module: &str, offset| {
            symbols.find(module, KernelOffset(offset)).map(|line| line.function)
        };
        assert_eq!(name("", 0x50).unwrap(), "startup_64");
        assert_eq!(name("", 0x123).unwrap(), "read");
        assert_eq!(name("", 0x200).unwrap(), "__x64_sys_vfork");
        assert_eq!(name("ext4", 0x10).unwrap(), "f");
        assert_eq!(name("ext4", 0x0f), None);
        assert_eq!(name("xfs", 0x10), None);
    }

    #[test]
    fn pieces_add_up_and_functions_end() {
        let one = "\t100\tread\n\t200\t\n";
        let two = "\t200\twrite\n\t280\t\n\t100\tread\n";
        for (text, at_200) in [(one.to_owned(), None), (format!("{one}{two}"), Some("write"))] {
            let symbols = Symbols::parse(text.as_bytes());
            let name = |offset| symbols.find("", KernelOffset(offset)).map(|line| line.function);
            assert_eq!(name(0x1ff).as_deref(), Some("read"));
            assert_eq!((name(0x200).as_deref(), name(0x280)), (at_200, None));
        }
    }
}
