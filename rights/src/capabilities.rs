//! Capabilities: what this process holds, and giving up what it no longer needs.

pub use rustix::thread::CapabilitySet;

use rustix::io;
use rustix::process::getuid;
use rustix::thread::{
    CapabilitySets, capabilities, capability_is_in_ambient_set, clear_ambient_capability_set,
    set_capabilities, set_no_new_privs,
};

/// Capabilities in force for this thread.
#[must_use]
pub fn effective() -> CapabilitySet {
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective)
}

/// Drops every capability of this thread, for good: no later exec can bring one back.
///
/// # Errors
/// See [`keep`].
pub fn drop_all() -> io::Result<()> {
    keep(CapabilitySet::empty())
}

/// Drops every capability but these, for good.
///
/// Capabilities belong to threads: call it while there is one, those started later inherit its
/// state.
///
/// # Errors
/// Those of the system calls; none is expected, since a process may always give up what it has.
pub fn keep(wanted: CapabilitySet) -> io::Result<()> {
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    let kept = capabilities(None)?.permitted & wanted;
    set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
    )
}

/// Does something without the capabilities that come from the file of this program. For what the
/// user of the program names, only that user's own rights count. Capabilities that the user had
/// before stay: those of root, and those that a service manager gave.
///
/// # Errors
/// See [`keep`].
pub fn as_user<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    let before = capabilities(None)?;
    let own = if getuid().is_root() {
        before.effective
    } else {
        CapabilitySet::from_iter(
            before.effective.iter().filter(|&one| capability_is_in_ambient_set(one) == Ok(true)),
        )
    };
    set_capabilities(None, CapabilitySets { effective: own, ..before })?;
    let done = work();
    set_capabilities(None, before)?;
    Ok(done)
}

/// Names as in capabilities(7), or "none".
#[must_use]
pub fn names(set: CapabilitySet) -> String {
    let names: Vec<_> = set.iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_manual() {
        assert_eq!(names(CapabilitySet::PERFMON | CapabilitySet::BPF), "CAP_PERFMON CAP_BPF");
        assert_eq!(names(CapabilitySet::empty()), "none");
    }

    #[test]
    fn a_thread_that_dropped_holds_at_most_what_is_kept() {
        std::thread::spawn(|| {
            assert!(keep(CapabilitySet::PERFMON).is_ok());
            assert!(CapabilitySet::PERFMON.contains(effective()));
        })
        .join()
        .unwrap_or_else(|_| panic!("the thread failed"));
    }
}
