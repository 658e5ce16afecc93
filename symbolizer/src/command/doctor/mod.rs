//! `stackwire doctor`: what works on this host, and what to do about what does not. Of one process,
//! `process.rs` says it.

mod process;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use anyhow::anyhow;
use stackwire::find_collector;

use super::{Failure, place};
use crate::cli::Doctor;

/// One finding.
struct Finding {
    level: Level,
    what: String,
    advice: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Works,
    Limits,
    Prevents,
}

pub fn run(arguments: &Doctor) -> Result<(), Failure> {
    if let Some(pid) = arguments.pid {
        return of_process(pid);
    }
    let mut findings = vec![kernel(), btf(), lockdown(), kptr_restrict(), rate_limit(), paranoid()];
    findings.extend(rights());
    findings.extend(collector(arguments.collector.as_deref()));
    print(&findings)
}

/// What to expect of a process.
fn of_process(pid: u32) -> Result<(), Failure> {
    let seen = process::look(pid);
    // What comes now is in files that others wrote.
    place::confine()?;
    print(&seen.map_or_else(|why| vec![*why], |seen| seen.findings()))
}

fn print(findings: &[Finding]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for finding in findings {
        let mark = match finding.level {
            Level::Works => "ok  ",
            Level::Limits => "warn",
            Level::Prevents => "FAIL",
        };
        writeln!(out, "{mark}  {}", finding.what)?;
        if !finding.advice.is_empty() {
            writeln!(out, "      {}", finding.advice)?;
        }
    }
    let prevented = findings.iter().filter(|finding| finding.level == Level::Prevents).count();
    if prevented > 0 {
        return Err(anyhow!("{prevented} of {} checks prevent profiling", findings.len()).into());
    }
    Ok(())
}

/// What perf events alone do not tell.
const WITHOUT_EBPF: &str = "CPU time is sampled through perf events, waits are not recorded";

fn works(what: impl Into<String>) -> Finding {
    Finding { level: Level::Works, what: what.into(), advice: String::new() }
}

fn limits(what: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { level: Level::Limits, what: what.into(), advice: advice.into() }
}

fn prevents(what: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { level: Level::Prevents, what: what.into(), advice: advice.into() }
}

/// What root is told.
fn rights() -> Option<Finding> {
    let held = !stackwire_rights::capabilities::effective().is_empty();
    let what = "stackwire gives up all capabilities before it reads what others wrote";
    held.then(|| Finding {
        level: Level::Works,
        what: what.to_owned(),
        advice: "executables that only another user may read come from the collector, or stay without names"
            .to_owned(),
    })
}

fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version {
        (0..=4, _) | (5, 0..=14) => {
            prevents(format!("kernel {release}"), "Stackwire needs kernel 5.15 or newer")
        }
        (5, _) | (6, 0..=14) => limits(
            format!("kernel {release}: profiling works"),
            "before 6.15 the mappings of other users' running processes need CAP_SYS_PTRACE at start",
        ),
        _ => works(format!("kernel {release}")),
    }
}

fn btf() -> Finding {
    if Path::new("/sys/kernel/btf/vmlinux").exists() {
        works("kernel BTF: /sys/kernel/btf/vmlinux")
    } else {
        limits(
            format!("kernel BTF: none, so no eBPF; {WITHOUT_EBPF}"),
            "use a kernel built with CONFIG_DEBUG_INFO_BTF, as distribution kernels are",
        )
    }
}

fn lockdown() -> Finding {
    let text = fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    match text.split(['[', ']']).nth(1) {
        Some("confidentiality") => limits(
            format!("kernel lockdown: confidentiality, so no eBPF; {WITHOUT_EBPF}"),
            "in this mode eBPF may not read kernel memory; boot with lockdown=integrity or none",
        ),
        Some(mode) => works(format!("kernel lockdown: {mode}")),
        None => works("kernel lockdown: not shown (securityfs is not mounted)"),
    }
}

fn sysctl(name: &str) -> Option<i64> {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn kptr_restrict() -> Finding {
    match sysctl("kernel.kptr_restrict") {
        Some(2) => limits(
            "kernel.kptr_restrict = 2: kernel functions cannot be named",
            "sysctl kernel.kptr_restrict=1 lets the collector (CAP_SYSLOG) see them, and nobody else",
        ),
        Some(value) => works(format!("kernel.kptr_restrict = {value}")),
        None => works("kernel.kptr_restrict: not shown"),
    }
}

fn rate_limit() -> Finding {
    let rate = sysctl("kernel.perf_event_max_sample_rate").unwrap_or(0);
    match rate {
        0..=98 => limits(
            format!("kernel.perf_event_max_sample_rate = {rate}: below the usual 99 Hz"),
            "the kernel lowers it when sampling took too long; sysctl kernel.perf_event_max_sample_rate=100000",
        ),
        _ => works(format!("kernel.perf_event_max_sample_rate = {rate}")),
    }
}

fn paranoid() -> Finding {
    let value = sysctl("kernel.perf_event_paranoid").unwrap_or(2);
    let what = format!("kernel.perf_event_paranoid = {value}");
    match value {
        ..=2 => works(format!("{what}: no matter with CAP_PERFMON")),
        _ if rustix::process::geteuid().is_root() => limits(
            format!(
                "{what}: only root may profile, and CPUs that come online later are not sampled"
            ),
            "Debian's and Ubuntu's kernels ask for CAP_SYS_ADMIN above 2; sysctl kernel.perf_event_paranoid=2",
        ),
        _ => prevents(
            format!("{what}: the collector's capabilities are not enough"),
            "Debian's and Ubuntu's kernels ask for CAP_SYS_ADMIN above 2; sysctl kernel.perf_event_paranoid=2",
        ),
    }
}

fn collector(named: Option<&Path>) -> Vec<Finding> {
    let Some(path) = named.map(Path::to_owned).or_else(find_collector) else {
        return vec![prevents(
            "collector: not found",
            "run `make install`, or name it with --collector",
        )];
    };
    let shown = path.display();
    let Ok(metadata) = fs::metadata(&path) else {
        return vec![prevents(format!("collector: no file {shown}"), "name it with --collector")];
    };
    let version = Command::new(&path).arg("--version").output();
    let version = match version {
        Ok(output) if output.status.success() => {
            works(format!("collector: {shown}, {}", String::from_utf8_lossy(&output.stdout).trim()))
        }
        Ok(output) => {
            prevents(format!("collector: {shown} fails with {}", output.status), "build it again")
        }
        Err(error) => prevents(
            format!("collector: {shown}: {error}"),
            "who may execute the collector may profile: ask to be put into its group",
        ),
    };
    vec![version, privilege(&path, &metadata)]
}

/// `CAP_SYSLOG`, `CAP_PERFMON`, `CAP_BPF` of include/uapi/linux/capability.h.
const WANTED: [(u32, &str); 3] = [(34, "CAP_SYSLOG"), (38, "CAP_PERFMON"), (39, "CAP_BPF")];

fn privilege(path: &Path, metadata: &fs::Metadata) -> Finding {
    let mut attribute = [0u8; 64];
    let held = rustix::fs::getxattr(path, "security.capability", &mut attribute)
        .ok()
        .and_then(|length| permitted(attribute.get(..length)?));
    let running_as_root = rustix::process::geteuid().is_root();
    match held {
        Some(held) => {
            let missing: Vec<_> = WANTED
                .iter()
                .filter(|(bit, _)| held >> bit & 1 == 0)
                .map(|(_, name)| *name)
                .collect();
            match missing.as_slice() {
                [] => {
                    let mode = metadata.permissions().mode() & 0o7777;
                    let what = format!(
                        "collector privileges: file capabilities, mode {mode:o}, group {}",
                        metadata.gid()
                    );
                    match mode & 0o001 {
                        0 => works(what),
                        _ => limits(
                            format!(
                                "{what}: everyone may execute it, and so profile every process"
                            ),
                            format!("chgrp stackwire {0} && chmod 0750 {0}", path.display()),
                        ),
                    }
                }
                ["CAP_SYSLOG"] => limits(
                    "collector privileges: no CAP_SYSLOG",
                    "kernel functions stay unnamed; run `make install`",
                ),
                _ => prevents(
                    format!("collector privileges: {} missing", missing.join(", ")),
                    "run `make install`",
                ),
            }
        }
        None if running_as_root => {
            works("collector privileges: runs as root, drops what it does not need")
        }
        None => limits(
            format!("collector privileges: none, so only your own processes; {WITHOUT_EBPF}"),
            "run `make install` as root, or: setcap cap_bpf,cap_perfmon,cap_syslog=ep on the collector",
        ),
    }
}

/// Permitted set of `struct vfs_cap_data` (include/uapi/linux/capability.h), little-endian.
fn permitted(attribute: &[u8]) -> Option<u64> {
    let word = |at: usize| {
        attribute.get(at..at + 4).and_then(|word| word.try_into().ok()).map(u32::from_le_bytes)
    };
    Some(u64::from(word(4)?) | u64::from(word(12)?) << 32)
}
