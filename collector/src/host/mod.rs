//! What the symbolizer cannot see from where it runs: identity of the host, kallsyms, vDSO, what JITs write.

pub mod cpu;
pub mod jit;
pub mod kallsyms;
pub mod kernel_names;
pub mod vdso;

use std::fmt::Write as _;

use crate::process::cgroup;

/// The host and kernel a capture was taken on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Host name.
    pub hostname: String,
    /// Changes with each boot.
    pub boot_id: String,
    /// `uname -r`.
    pub kernel_release: String,
    /// `uname -m`.
    pub machine: String,
    /// GNU build-id of the kernel image, empty when it has none.
    pub kernel_build_id: Vec<u8>,
    /// Where the collector itself runs.
    pub container: Container,
    /// CPUs that can be, and are, online.
    pub cpus: (u32, u32),
    /// What they are.
    pub cpu: cpu::Cpu,
}

/// What the collector's environment says of the container it runs in; what it does not say is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Container {
    /// `POD_NAME`.
    pub pod_name: String,
    /// `POD_NAMESPACE`.
    pub namespace: String,
    /// `CONTAINER_NAME`.
    pub container_name: String,
    /// Path of the cgroup.
    pub cgroup_path: String,
}

impl Container {
    /// Reads it from the environment, which the downward API of Kubernetes fills.
    #[must_use]
    pub fn read() -> Self {
        let variable = |name| std::env::var(name).unwrap_or_default();
        let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self {
            pod_name: variable("POD_NAME"),
            namespace: variable("POD_NAMESPACE"),
            container_name: variable("CONTAINER_NAME"),
            cgroup_path: cgroup::choose(&cgroup).unwrap_or_default().to_owned(),
        }
    }
}

impl Identity {
    /// Reads it from the running kernel. What cannot be read is empty.
    #[must_use]
    pub fn read() -> Self {
        let uname = rustix::system::uname();
        let text = |path| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        Self {
            hostname: uname.nodename().to_string_lossy().into_owned(),
            boot_id: text("/proc/sys/kernel/random/boot_id"),
            kernel_release: uname.release().to_string_lossy().into_owned(),
            machine: uname.machine().to_string_lossy().into_owned(),
            kernel_build_id: notes_build_id("/sys/kernel/notes"),
            container: Container::read(),
            cpus: (
                cpu_count(&text("/sys/devices/system/cpu/possible")),
                cpu_count(&text("/sys/devices/system/cpu/online")),
            ),
            cpu: cpu::parse(&text("/proc/cpuinfo")),
        }
    }
}

/// CPUs in a list as the kernel writes it, `0-3,8`.
fn cpu_count(list: &str) -> u32 {
    let of = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    list.split(',').filter_map(of).sum()
}

/// GNU build-id of a loaded module, empty when the kernel publishes none.
#[must_use]
pub fn module_build_id(module: &str) -> Vec<u8> {
    if module.contains(['/', '.']) {
        return Vec::new();
    }
    let mut path = String::from("/sys/module/");
    // Writing to a String cannot fail.
    let _ = write!(path, "{module}/notes/.note.gnu.build-id");
    notes_build_id(&path)
}

fn notes_build_id(path: &str) -> Vec<u8> {
    std::fs::read(path).ok().and_then(|notes| gnu_build_id(&notes)).unwrap_or_default()
}

/// The build-id in ELF notes: `NT_GNU_BUILD_ID` (3) of owner "GNU". Kernel notes only, never a file's.
fn gnu_build_id(mut notes: &[u8]) -> Option<Vec<u8>> {
    loop {
        let (head, rest) = notes.split_at_checked(12)?;
        let word =
            |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (name_size, size) = (word(0) as usize, word(4) as usize);
        let (name, rest) = rest.split_at_checked(name_size.next_multiple_of(4))?;
        let (content, rest) = rest.split_at_checked(size.next_multiple_of(4))?;
        if word(8) == 3 && name.starts_with(b"GNU\0") {
            return Some(content[..size].to_vec());
        }
        notes = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_build_id_among_notes() {
        let note = |kind: u32, name: &[u8], content: &[u8]| {
            let mut note = Vec::new();
            for word in [name.len() as u32, content.len() as u32, kind] {
                note.extend(word.to_ne_bytes());
            }
            note.extend(name);
            note.extend(content);
            note
        };
        let notes = [note(1, b"Linux\0\0\0", &[0; 4]), note(3, b"GNU\0", &[7; 20])].concat();
        assert_eq!(gnu_build_id(&notes), Some(vec![7; 20]));
        assert_eq!(gnu_build_id(&notes[..30]), None);
        assert_eq!(gnu_build_id(&[0xff; 40]), None);
    }

    #[test]
    fn cpus_are_counted() {
        assert_eq!(cpu_count("0-3,8"), 5);
        assert_eq!(cpu_count("0"), 1);
        assert_eq!(cpu_count(""), 0);
        assert_eq!(cpu_count("3-0,x"), 0);
    }

    #[test]
    fn this_host_has_an_identity() {
        let identity = Identity::read();
        assert_eq!(identity.boot_id.len(), 36);
        assert!(!identity.kernel_release.is_empty());
    }
}
