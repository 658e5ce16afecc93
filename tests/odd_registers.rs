//! Samples whose user registers are not where they usually are: nothing is lost under a signal
//! handler, and nothing invented where the kernel holds registers of no program.

use std::process::Command;

use crate::support::{Pprof, Running, build::odd, can, privileged, record};

fn start(mode: &str) -> Running {
    Running::start(Command::new(odd()).args([mode, "30"]))
}

#[test]
fn a_signal_handler_is_on_top_of_its_trampoline_and_of_what_it_interrupted() {
    if !privileged() {
        return;
    }
    for mode in ["signal", "sigaltstack"] {
        let program = start(mode);
        let profile = record(program.pid(), 3, &[]);
        let (mut in_handler, mut whole) = (0, 0);
        for sample in &profile.samples {
            let functions = profile.functions(sample);
            if functions.first() == Some(&"handler") {
                in_handler += sample.count;
                // The C library's name for the code a handler returns to; the interrupted raise()
                // keeps no frame.
                let trampoline = functions.get(1).is_some_and(|name| name.contains("restore_rt"));
                whole += if trampoline && functions.contains(&"main") { sample.count } else { 0 };
            }
        }
        assert!(in_handler > 200, "{mode}: only {in_handler} of {}", profile.count());
        let share = whole as f64 / in_handler as f64;
        // The rest are in the first or last instruction of the handler, where its frame is not
        // there.
        assert!(share > 0.97, "{mode}: {share} of {in_handler} samples in the handler");
    }
}

/// Samples with this kernel function, and how many of them have user frames.
fn with_user_frames(profile: &Pprof, kernel: impl Fn(&str) -> bool) -> (u64, u64) {
    let (mut all, mut with) = (0, 0);
    for sample in &profile.samples {
        if profile.functions(sample).iter().any(|name| kernel(name)) {
            all += sample.count;
            let last = *sample.locations.last().unwrap();
            with += if profile.file_of(last) == "[kernel]" { 0 } else { sample.count };
        }
    }
    (all, with)
}

#[test]
fn inside_execve_there_is_no_user_stack() {
    if !privileged() {
        return;
    }
    let program = start("exec");
    // When other processes are busy, only a tenth of its samples are inside execve.
    let profile = record(program.pid(), 6, &[]);
    let (all, with) = with_user_frames(&profile, |name| name.starts_with("do_execve"));
    assert!(all > 200, "only {all} of {} samples are inside execve", profile.count());
    assert_eq!(with, 0, "of {all} samples inside execve");
}

#[test]
fn an_io_uring_worker_has_no_user_stack() {
    // 0: for all; 2: for nobody.
    let setting = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    if !privileged() || !can("io_uring", setting.trim() != "2") {
        return;
    }
    let program = start("ring");
    let profile = record(program.pid(), 3, &[]);
    let (all, with) = with_user_frames(&profile, |name| name.starts_with("io_wq_worker"));
    assert!(all > 200, "only {all} of {} samples are in workers", profile.count());
    assert_eq!(with, 0, "of {all} samples in workers");
    let worker = |thread: &&String| thread.starts_with("iou-wrk");
    assert!(profile.samples.iter().any(|s| s.labels.get("thread").filter(worker).is_some()));
}
