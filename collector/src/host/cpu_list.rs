//! Lists of CPUs as the kernel writes them: `0-3,8`. Pure.

use std::ops::RangeInclusive;

/// The CPUs in a list, by number; parts that do not parse are passed over.
pub fn parse(list: &str) -> impl Iterator<Item = u32> {
    list.trim().split(',').filter_map(range).flatten()
}

fn range(part: &str) -> Option<RangeInclusive<u32>> {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_single_ones() {
        let cpus = |list| parse(list).collect::<Vec<_>>();
        assert_eq!(cpus("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(cpus("0\n"), [0]);
        assert!(cpus("").is_empty() && cpus("3-0,x").is_empty());
    }
}
