//! Why the eBPF programs could not be loaded, and what to do about it.

use std::io;

use aya::programs::ProgramError;

use super::btf::BtfError;
use crate::arch;

/// Where the kernel publishes its BTF (CONFIG_DEBUG_INFO_BTF).
pub const BTF_PATH: &str = "/sys/kernel/btf/vmlinux";

/// The programs could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No programs for this processor.
    #[error(
        "there are no eBPF programs for {} yet: record on an x86_64 host; captures are resolved anywhere", arch::MACHINE.name()
    )]
    NoObject,
    /// No BTF.
    #[error(
        "cannot read {BTF_PATH}: {0}; Stackwire needs a kernel built with CONFIG_DEBUG_INFO_BTF (any distribution kernel from 5.15 on)"
    )]
    NoBtf(io::Error),
    /// BTF without what is needed.
    #[error(transparent)]
    Btf(#[from] BtfError),
    /// No capability.
    #[error(
        "cannot load eBPF programs: permission denied; give the collector CAP_BPF and CAP_PERFMON (`make install` does), or run it as root"
    )]
    Denied,
    /// Lockdown.
    #[error(
        "cannot load eBPF programs: this kernel does not let eBPF read kernel memory (lockdown=confidentiality); boot with lockdown=integrity or without lockdown"
    )]
    Lockdown,
    /// Anything else the kernel or the loader said.
    #[error("cannot load eBPF programs: {0}")]
    Kernel(String),
}

/// The object lacks something.
pub(super) fn missing(what: &str) -> LoadError {
    LoadError::Kernel(format!("the object has no {what}; it was not built from these sources"))
}

/// Tells "not allowed" from everything else, and keeps every cause in the text.
pub(super) fn load_error(error: impl std::error::Error + 'static) -> LoadError {
    let mut text = error.to_string();
    let (mut denied, mut verified) = (false, false);
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            denied |= io.kind() == std::io::ErrorKind::PermissionDenied;
        }
        // The verifier gives the same code for a program that reads where it must not.
        if let Some(ProgramError::LoadError { verifier_log, .. }) = error.downcast_ref() {
            verified |= !verifier_log.to_string().is_empty();
        }
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    let lockdown = std::fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    refusal(&text, denied && !verified, &lockdown)
}

/// What a refusal means, where `lockdown` is the state of the kernel's lockdown. Pure.
fn refusal(text: &str, denied: bool, lockdown: &str) -> LoadError {
    // The verifier then knows no helper that reads kernel memory, and names the one it was asked
    // for.
    if lockdown.contains("[confidentiality]") || text.contains("bpf_probe_read#") {
        return LoadError::Lockdown;
    }
    if denied {
        return LoadError::Denied;
    }
    // Of a verifier's log the last lines say what is wrong.
    let lines: Vec<&str> = text.lines().collect();
    match lines.as_slice() {
        [first, .., a, b, c, d] => LoadError::Kernel([*first, "…", *a, *b, *c, *d].join("\n")),
        _ => LoadError::Kernel(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let said = |text, denied, lockdown| refusal(text, denied, lockdown).to_string();
        let open = "[none] integrity confidentiality\n";
        let locked = "none integrity [confidentiality]\n";
        assert!(said("x", true, open).contains("give the collector CAP_BPF and CAP_PERFMON"));
        assert!(said("x", true, locked).contains("boot with lockdown=integrity"));
        // As kernel 6.1 puts it where securityfs is not mounted.
        let verifier = "unknown func bpf_probe_read#4";
        assert!(said(verifier, false, "").contains("boot with lockdown=integrity"));
        assert!(said("1\n2\n3\n4\n5\n6", false, open).ends_with("1\n…\n3\n4\n5\n6"));
    }
}
