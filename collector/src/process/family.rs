//! Which processes have come from which: the children that ran before a capture that follows
//! children.
//!
//! A child whose parent has ended belongs to init by then, and is not found.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::text;

/// These processes and all that descend from them, each once: first those given, then children
/// before grandchildren.
#[must_use]
pub fn family(pids: &[u32]) -> Vec<u32> {
    descend(pids, &parents(Path::new("/proc")))
}

/// These processes, each once.
#[must_use]
pub fn each_once(pids: &[u32]) -> Vec<u32> {
    descend(pids, &[])
}

/// (process, parent) of every process.
fn parents(proc: &Path) -> Vec<(u32, u32)> {
    let Ok(entries) = std::fs::read_dir(proc) else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: u32| {
        Some((pid, parent(&text::read(proc.join(pid.to_string()).join("stat")).ok()?)?))
    })
    .collect()
}

/// Field 4 of proc_pid_stat(5). The name before it may hold anything. Pure.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

fn descend(pids: &[u32], parents: &[(u32, u32)]) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for &(pid, parent) in parents {
        children.entry(parent).or_default().push(pid);
    }
    let mut seen = HashSet::new();
    let mut found: Vec<u32> = pids.iter().copied().filter(|&pid| seen.insert(pid)).collect();
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        let new = children.get(&pid).into_iter().flatten().copied();
        found.extend(new.filter(|&child| seen.insert(child)));
        next += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_and_grandchildren_come_once_after_those_asked_for() {
        let parents = [(1, 0), (10, 1), (11, 10), (12, 10), (20, 11), (30, 1), (31, 30)];
        assert_eq!(descend(&[10, 11], &parents), [10, 11, 12, 20]);
        // Pids are read one after the other, and one of them may be used again meanwhile.
        assert_eq!(descend(&[5], &[(5, 6), (6, 5)]), [5, 6]);
        assert_eq!(descend(&[], &parents), [0; 0]);
    }

    #[test]
    fn the_parent_is_read_behind_any_name() {
        assert_eq!(parent("7 (a) b) 1 2 3) S 5 7 7 0 -1"), Some(5));
        assert_eq!(parent("7 (sh"), None);
    }

    #[test]
    fn own_children_are_found() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = family(&[std::process::id()]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found[0], std::process::id());
        assert!(found.contains(&child.id()), "{found:?}");
    }
}
