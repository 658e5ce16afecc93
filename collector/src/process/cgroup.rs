//! Which cgroup a process is in, by the path its labels are made of: containers and pods are known
//! by it.
//!
//! Reads `/proc/PID/cgroup`, which asks for no capability. Takes no path apart: the symbolizer
//! does.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::rc::Rc;

/// Paths remembered by id.
const MAX_PATHS: usize = 8192;

/// Controllers a container runtime uses, those that are always on first; `""` is the unified
/// hierarchy, which on hosts with both holds services at best.
const ORDER: [&str; 8] =
    ["memory", "pids", "cpu", "devices", "freezer", "cpuset", "name=systemd", ""];

/// What is known of a process's cgroup.
#[derive(Clone, Debug, Default)]
pub struct Membership {
    /// Path below the root of its hierarchy; `None` when it was never to be had.
    pub path: Option<Rc<str>>,
    /// cgroup v2 id of the last sample.
    pub id: u64,
    /// Read of this very image, and not handed down by its parent.
    asked: bool,
}

impl Membership {
    /// What a child has until it is asked itself.
    #[must_use]
    pub fn inherited(&self) -> Self {
        Self { asked: false, ..self.clone() }
    }
}

/// Paths by cgroup v2 id, for processes that are gone when they are asked.
#[derive(Debug, Default)]
pub struct Paths {
    by_id: HashMap<u64, Rc<str>>,
    /// The host has only the unified hierarchy. Only then does an id identify a cgroup; elsewhere
    /// many containers share one id.
    unified: bool,
}

impl Paths {
    /// A process became another program: container runtimes have put it where it belongs by then.
    pub fn at_exec(&mut self, pid: u32, membership: &mut Membership) {
        self.ask(pid, membership);
    }

    /// A process was met, and in which cgroup it is does not come with it.
    pub fn at_meeting(&mut self, pid: u32, membership: &mut Membership) {
        if !membership.asked {
            self.ask(pid, membership);
        }
    }

    /// A process was sampled in the cgroup with this v2 id.
    pub fn at_sample(&mut self, pid: u32, id: u64, membership: &mut Membership) {
        if membership.asked && membership.id == id {
            return;
        }
        let moved = membership.id != 0 && membership.id != id;
        membership.id = id;
        if self.ask(pid, membership) {
            self.learn(membership);
        } else if let Some(path) = self.by_id.get(&id) {
            membership.path = Some(Rc::clone(path));
        } else if moved && self.unified {
            // What its parent had is certainly not it.
            membership.path = None;
        }
    }

    /// Remembers which path an id has, if the directory there has that id: the process may have
    /// moved in between.
    fn learn(&mut self, membership: &Membership) {
        let Some(path) = membership.path.as_ref().filter(|_| self.unified) else { return };
        if self.by_id.contains_key(&membership.id) {
            return;
        }
        let directory = std::fs::metadata(format!("/sys/fs/cgroup{path}"));
        if directory.is_ok_and(|found| found.ino() == membership.id) {
            if self.by_id.len() >= MAX_PATHS {
                self.by_id.clear();
            }
            self.by_id.insert(membership.id, Rc::clone(path));
        }
    }

    fn ask(&mut self, pid: u32, membership: &mut Membership) -> bool {
        // Asked once, whatever the answer.
        membership.asked = true;
        let text = std::fs::read(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let Some(path) = choose(&text) else { return false };
        if membership.path.as_deref() != Some(path) {
            membership.path = Some(Rc::from(path));
        }
        self.unified = text.lines().count() == 1;
        true
    }
}

/// The path in `/proc/PID/cgroup` (lines `id:controllers:path`, cgroups(7)) that says most: that of
/// the first hierarchy in which the process is not at the root.
#[must_use]
pub fn choose(text: &str) -> Option<&str> {
    let lines = || {
        text.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            // The kernel's word for a cgroup that was removed.
            Some((controllers, path.strip_suffix(" (deleted)").unwrap_or(path)))
        })
    };
    let of = |wanted: &str| {
        let mut found = lines().filter(|(list, _)| list.split(',').any(|one| one == wanted));
        found.find(|(_, path)| *path != "/").map(|(_, path)| path)
    };
    ORDER
        .iter()
        .find_map(|controller| of(controller))
        .or_else(|| lines().next().map(|(_, path)| path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hierarchy_that_says_most_is_taken() {
        assert_eq!(choose("0::/user.slice/user-0.slice\n"), Some("/user.slice/user-0.slice"));
        assert_eq!(choose("0::/\n"), Some("/"));
        let docker = "12:pids:/docker/ab\n5:cpu,cpuacct:/docker/ab\n1:name=systemd:/docker/ab\n0::/system.slice/containerd.service\n";
        assert_eq!(choose(docker), Some("/docker/ab"));
        let systemd =
            "3:memory:/\n1:name=systemd:/system.slice/a.service\n0::/system.slice/a.service\n";
        assert_eq!(choose(systemd), Some("/system.slice/a.service"));
        assert_eq!(choose("0::/a:b (deleted)\n"), Some("/a:b"));
        assert_eq!(choose(""), None);
        assert_eq!(choose("nonsense"), None);
    }

    #[test]
    fn who_is_gone_keeps_what_its_parent_had_or_what_others_of_its_cgroup_have() {
        let mut paths = Paths::default();
        let parent = Membership { path: Some("/parent".into()), id: 7, asked: true };
        let gone = 4_194_305; // above any pid_max
        let mut child = parent.inherited();
        paths.at_exec(gone, &mut child);
        assert_eq!(child.path.as_deref(), Some("/parent"));
        paths.by_id.insert(9, "/other".into());
        paths.at_sample(gone, 9, &mut child);
        assert_eq!(child.path.as_deref(), Some("/other"));
        paths.at_sample(std::process::id(), 10, &mut child);
        assert_ne!(child.path.as_deref(), Some("/other"));
    }
}
