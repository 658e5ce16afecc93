//! Samples taken in kernel mode: the user stack must be under the kernel's.

use std::process::{Command, Stdio};

use crate::support::{Pprof, Running, privileged, record};

/// Share of the samples with kernel frames that have user frames under them, and share with kernel
/// frames.
fn shares(profile: &Pprof) -> (f64, f64) {
    let mut kernel = 0;
    let mut both = 0;
    for sample in &profile.samples {
        let in_kernel = |id: &u64| profile.file_of(*id).starts_with("[kernel]");
        if sample.locations.first().is_some_and(in_kernel) {
            kernel += sample.count;
            // Leaf first: the kernel's frames come before the user's.
            if !in_kernel(sample.locations.last().unwrap()) {
                both += sample.count;
            }
        }
    }
    (both as f64 * 100.0 / kernel as f64, kernel as f64 * 100.0 / profile.count() as f64)
}

#[test]
fn dd_has_user_frames_under_its_system_calls() {
    if !privileged() {
        return;
    }
    let mut command = Command::new("dd");
    command.args(["if=/dev/zero", "of=/dev/null", "bs=64"]).stderr(Stdio::null());
    let program = Running(command.spawn().unwrap());
    let profile = record(program.pid(), 5, &[]);
    let (both, kernel) = shares(&profile);
    assert!(
        kernel > 20.0,
        "only {kernel} % of the samples in the kernel: not the load this is about"
    );
    assert!(both >= 99.0, "{both} % of kernel samples have user frames");
    let with_read = profile.samples.iter().filter(|s| profile.functions(s).contains(&"ksys_read"));
    assert!(with_read.count() > 0, "kernel functions are named");
}

#[test]
fn python_has_user_frames_under_its_system_calls() {
    if !privileged() {
        return;
    }
    let script = "print('ready', flush=True)\nf = open('/dev/zero', 'rb', buffering=0)\nwhile True: f.read(1 << 16)\n";
    let program = Running::start(Command::new("python3").args(["-c", script]));
    let profile = record(program.pid(), 5, &[]);
    let (both, kernel) = shares(&profile);
    assert!(
        kernel > 20.0,
        "only {kernel} % of the samples in the kernel: not the load this is about"
    );
    assert!(both >= 99.0, "{both} % of kernel samples have user frames");
}

#[test]
fn kernel_stacks_can_be_left_out() {
    if !privileged() {
        return;
    }
    let mut command = Command::new("dd");
    command.args(["if=/dev/zero", "of=/dev/null", "bs=64"]).stderr(Stdio::null());
    let program = Running(command.spawn().unwrap());
    let profile = record(program.pid(), 2, &["--kernel-stacks=false"]);
    assert!(profile.mappings.values().all(|mapping| mapping.file != "[kernel]"));
    assert!(profile.count() > 500);
}
