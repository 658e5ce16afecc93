//! What the symbolizer cannot see from where it runs: identity of the host, kallsyms, vDSO, what
//! JITs write.

pub mod cpu;
pub mod cpu_list;
pub mod growth;
pub mod jit;
pub mod kallsyms;
pub mod kernel_names;
pub mod vdso;
pub mod whose;

use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;

use stackwire_elf::gnu_build_id;
use stackwire_model::BuildId;

use crate::process::{cgroup, text};

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
    /// GNU build-id of the kernel image, if it has one.
    pub kernel_build_id: Option<BuildId>,
    /// Where the collector itself runs.
    pub container: Container,
    /// CPUs that can be, and are, online.
    pub cpus: (u32, u32),
    /// What they are.
    pub cpu: cpu::Cpu,
}

/// What the collector's environment says of the container it runs in; what it does not say is
/// empty.
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
        let cpus = |path| cpu_list::parse(&text(path)).count() as u32;
        Self {
            hostname: uname.nodename().to_string_lossy().into_owned(),
            boot_id: text("/proc/sys/kernel/random/boot_id"),
            kernel_release: uname.release().to_string_lossy().into_owned(),
            machine: uname.machine().to_string_lossy().into_owned(),
            kernel_build_id: notes_build_id("/sys/kernel/notes"),
            container: Container::read(),
            cpus: (
                cpus("/sys/devices/system/cpu/possible"),
                cpus("/sys/devices/system/cpu/online"),
            ),
            cpu: cpu::parse(&text("/proc/cpuinfo")),
        }
    }
}

/// The inode of the pid namespace, where it is not that of the host.
#[must_use]
pub fn pid_namespace() -> Option<u32> {
    // PROC_PID_INIT_INO of include/linux/proc_ns.h.
    let inode = std::fs::metadata("/proc/self/ns/pid").ok()?.ino();
    u32::try_from(inode).ok().filter(|&inode| inode != 0xEFFF_FFFC)
}

/// Whether the root of the cgroups is not that of the host.
#[must_use]
pub fn in_a_cgroup_namespace() -> bool {
    // PROC_CGROUP_INIT_INO of include/linux/proc_ns.h.
    let is_another = |of: std::fs::Metadata| of.ino() != 0xEFFF_FFFB;
    std::fs::metadata("/proc/self/ns/cgroup").is_ok_and(is_another)
}

/// Whether `/proc` has the numbers that processes have in the own pid namespace: it shows that
/// namespace and none above it. It may not after `unshare --pid` and `nsenter --pid`.
#[must_use]
pub fn proc_is_own() -> bool {
    // One of a namespace that this process is not in does not have it.
    text::read("/proc/self/status").is_ok_and(|status| has_one_number(&status))
}

/// proc_pid_status(5): `NSpid` has the numbers from the namespace of `/proc` down to the own. Pure.
fn has_one_number(status: &str) -> bool {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    numbers.is_none_or(|numbers| numbers.split_whitespace().count() == 1)
}

/// GNU build-id of a loaded module, if the kernel publishes one.
#[must_use]
pub fn module_build_id(module: &str) -> Option<BuildId> {
    if module.contains(['/', '.']) {
        return None;
    }
    let mut path = String::from("/sys/module/");
    // Writing to a String cannot fail.
    let _ = write!(path, "{module}/notes/.note.gnu.build-id");
    notes_build_id(&path)
}

fn notes_build_id(path: &str) -> Option<BuildId> {
    gnu_build_id(&std::fs::read(path).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_of_a_namespace_above_has_a_number_more() {
        assert!(has_one_number("Name:\tsh\nNSpid:\t7\nNSpgid:\t7\n"));
        assert!(!has_one_number("Name:\tsh\nNSpid:\t812\t7\nNSpgid:\t7\n"));
    }

    #[test]
    fn this_host_has_an_identity() {
        let identity = Identity::read();
        assert_eq!(identity.boot_id.len(), 36);
        assert!(!identity.kernel_release.is_empty());
    }
}
