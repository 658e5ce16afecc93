//! Programs whose answer is known: 60/30/10, however the process got there.

use std::process::Command;

use crate::support::build::{library, work};
use crate::support::{Pprof, Running, assert_shares, has_share, privileged, record};

const SHARES: [(&str, f64); 3] = [("alpha", 60.0), ("beta", 30.0), ("gamma_", 10.0)];
const LIBRARY: [(&str, f64); 3] = [("lib_alpha", 60.0), ("lib_beta", 30.0), ("lib_gamma", 10.0)];

fn start(mode: &str, seconds: u32) -> Running {
    Running::start(Command::new(work()).args([mode, &seconds.to_string()]))
}

/// Each sample in alpha, beta or gamma has exactly the callers the source has, leaf first: no frame
/// is missing, none invented. Until the kernel side has heard of a new program its stacks end after
/// one frame.
#[track_caller]
fn assert_stacks(profile: &Pprof, callers: &[&str]) {
    // Of those: an interrupt, which has the kernel's functions on top, is no stack of this program
    // that is cut.
    let (mut whole, mut all) = (0, 0);
    for sample in &profile.samples {
        let functions = profile.functions(sample);
        let Some(leaf) =
            functions.first().filter(|leaf| SHARES.iter().any(|(name, _)| name == *leaf))
        else {
            continue;
        };
        let expected: Vec<&str> =
            [leaf].into_iter().copied().chain(callers.iter().copied()).collect();
        all += sample.count;
        if functions.starts_with(&expected) {
            whole += sample.count;
        } else {
            assert!(expected.starts_with(&functions), "{functions:?} is no stack of this program");
        }
    }
    let share = whole as f64 / all as f64;
    assert!(share > 0.995, "only {share} of the stacks are whole");
}

#[test]
fn one_thread() {
    if !privileged() {
        return;
    }
    let program = start("plain", 30);
    let profile = record(program.pid(), 10, &[]);
    assert_shares(&profile, &SHARES);
    assert_stacks(&profile, &["all", "run", "main"]);
    profile.assert_addresses_in_mappings();
    // One thread on a CPU of its own or shared: never more samples than the rate allows.
    assert!((1000..=10_100).contains(&profile.count()), "{}", profile.count());
}

#[test]
fn threads_have_their_names_and_shares() {
    if !privileged() {
        return;
    }
    // Three busy threads on few CPUs would leave the programs of other tests too few samples.
    let _alone = crate::support::alone();
    let program = start("threads", 30);
    let profile = record(program.pid(), 10, &[]);
    assert_shares(&profile, &SHARES);
    for name in ["first", "second", "third"] {
        let of_thread: u64 =
            profile.samples.iter().filter(|s| s.labels["thread"] == name).map(|s| s.count).sum();
        let share = of_thread as f64 / profile.count() as f64;
        assert!((0.2..0.47).contains(&share), "thread {name} has {share}");
    }
    assert_stacks(&profile, &["all", "run", "thread"]);
}

#[test]
fn a_shared_library() {
    if !privileged() {
        return;
    }
    let program = start("library", 30);
    let profile = record(program.pid(), 10, &[]);
    assert_shares(&profile, &LIBRARY);
    let leaf = profile.samples.iter().max_by_key(|sample| sample.count).unwrap().locations[0];
    assert!(profile.file_of(leaf).ends_with("/libwork.so"));
}

#[test]
fn five_hundred_calls_deep() {
    if !privileged() {
        return;
    }
    let program = start("deep", 30);
    let profile = record(program.pid(), 10, &[]);
    assert_shares(&profile, &SHARES);
    let mut cut = 0;
    for sample in &profile.samples {
        let deep = profile.functions(sample).iter().filter(|function| **function == "deep").count();
        // A sample in the prologue of run lacks its caller, the last deep.
        let names = profile.functions(sample);
        // On a busy machine tables come a moment after the first sample: the walk ends before the
        // first caller.
        if deep == 0 && names.len() < 5 {
            cut += sample.count;
            continue;
        }
        assert!(deep == 501 || deep == 500, "{deep} calls of deep: {names:?}");
    }
    assert!(cut * 100 <= profile.count(), "{cut} of {} stacks are cut", profile.count());
}

#[test]
fn a_child_started_during_the_capture() {
    if !privileged() {
        return;
    }
    let program = start("child", 30);
    let profile = record(program.pid(), 10, &["--follow"]);
    assert_shares(&profile, &SHARES);
    // The parent forks and waits, which may cost it a sample.
    let parent = program.pid().to_string();
    let of_child = profile.samples.iter().filter(|sample| sample.labels["pid"] != parent);
    let of_child: u64 = of_child.map(|sample| sample.count).sum();
    assert!(of_child as f64 / profile.count() as f64 > 0.99);
}

#[test]
fn without_follow_a_child_is_not_sampled() {
    if !privileged() {
        return;
    }
    let program = start("child", 6);
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    let ran = crate::support::stackwire([
        "record",
        "--profile",
        &format!("--pid={}", program.pid()),
        "--duration=3s",
        &format!("--profile-output={}", output.display()),
    ]);
    // The parent sleeps and waits; its one fork may cost it a sample or two.
    if ran.code == Some(1) {
        return ran.failed(1, "no samples");
    }
    let profile = Pprof::read(&output);
    let parent = program.pid().to_string();
    assert!(profile.samples.iter().all(|sample| sample.labels["pid"] == parent));
    assert!(profile.count() < 10, "{} samples of a process that waits", profile.count());
}

#[test]
fn a_process_that_does_nothing_has_no_profile() {
    if !privileged() {
        return;
    }
    let sleeping = Running(Command::new("sleep").arg("30").spawn().unwrap());
    std::thread::sleep(std::time::Duration::from_millis(300));
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    crate::support::stackwire([
        "record",
        "--profile",
        &format!("--pid={}", sleeping.pid()),
        "--duration=2s",
        &format!("--profile-output={}", output.display()),
    ])
    .failed(1, "no samples");
    assert!(!output.exists(), "an empty profile was written");
}

#[test]
fn a_process_that_ends_during_the_capture() {
    if !privileged() {
        return;
    }
    let program = start("plain", 12);
    let started = std::time::Instant::now();
    let profile = record(program.pid(), 60, &[]);
    assert!(started.elapsed().as_secs() < 40, "the capture goes on without the process");
    assert_shares(&profile, &SHARES);
}

#[test]
fn after_an_exec() {
    if !privileged() {
        return;
    }
    let program = start("exec", 30);
    let profile = record(program.pid(), 10, &[]);
    assert_shares(&profile, &SHARES);
    assert_stacks(&profile, &["all", "run", "main"]);
    let last = profile.samples.iter().max_by_key(|sample| sample.count).unwrap();
    assert_eq!(last.labels["comm"], "work");
}

#[test]
fn a_deleted_binary() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("work");
    std::fs::copy(work(), &copy).unwrap();
    let program = Running::start(Command::new(&copy).args(["deleted", "30"]));
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(!copy.exists());
    let profile = record(program.pid(), 10, &[]);
    assert_shares(&profile, &SHARES);
}

/// A profile, or if its shares are wrong another: a neighbour of this machine that takes its CPU
/// for seconds shifts shares once; what is wrong is so twice.
fn with_shares(take: impl Fn() -> Pprof, expected: &[(&str, f64)]) -> Pprof {
    let profile = take();
    let good = expected.iter().all(|&expected| has_share(&profile, expected));
    if good { profile } else { take() }
}

#[test]
fn code_loaded_by_a_second_thread() {
    if !privileged() {
        return;
    }
    let library = library().to_str().unwrap();
    // A copy: the program is linked with the original.
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("libloaded.so");
    std::fs::copy(library, &copy).unwrap();
    let take = || {
        let program = Running::start(Command::new(work()).args(["dlopen", "30"]).arg(&copy));
        record(program.pid(), 10, &[])
    };
    let profile = with_shares(take, &LIBRARY);
    assert_shares(&profile, &LIBRARY);
    let leaf = profile.samples.iter().max_by_key(|sample| sample.count).unwrap().locations[0];
    assert_eq!(profile.file_of(leaf), copy.to_str().unwrap());
}

#[test]
fn libraries_unloaded_and_loaded_where_others_were() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (directory.path().join("one.so"), directory.path().join("two.so"));
    std::fs::copy(library(), &one).unwrap();
    std::fs::copy(crate::support::build::other_library(), &two).unwrap();
    let take = || {
        let program =
            Running::start(Command::new(work()).args(["reload", "30"]).arg(&one).arg(&two));
        record(program.pid(), 10, &[])
    };
    let profile = with_shares(take, &LIBRARY.map(|(function, share)| (function, share / 2.0)));
    for (prefix, file) in [("lib_", &one), ("other_", &two)] {
        assert_shares(
            &profile,
            &[
                (&format!("{prefix}alpha"), 30.0),
                (&format!("{prefix}beta"), 15.0),
                (&format!("{prefix}gamma"), 5.0),
            ],
        );
        for sample in &profile.samples {
            let leaf = sample.locations[0];
            if profile.functions(sample)[0].starts_with(prefix) {
                assert_eq!(profile.file_of(leaf), file.to_str().unwrap());
            }
        }
    }
}

#[test]
fn deeper_than_is_recorded_is_said() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(work()).args(["deep", "20", "5000"]));
    let directory = tempfile::tempdir().unwrap();
    let capture = directory.path().join("out.stackwire");
    crate::support::Ran::of(Command::new(crate::support::binary("stackwire-collector")).args([
        format!("--pid={}", program.pid()),
        "--duration=2s".to_owned(),
        format!("--output={}", capture.display()),
    ]))
    .succeeded();
    // On a busy machine its table may come after the first sample.
    let report = ["report".as_ref(), capture.as_os_str(), "--time=1..".as_ref()];
    let report = crate::support::stackwire(report).succeeded().stdout;
    assert!(report.contains("100.0 %  deeper than is recorded"), "{report}");
}

#[test]
fn a_program_in_a_root_directory_of_its_own() {
    if !privileged() {
        return;
    }
    // As in a container: the path the process knows leads nowhere on the host.
    let root = tempfile::tempdir().unwrap();
    let inside = "/only-in-there";
    std::fs::copy(crate::support::build::inlined_static(), root.path().join(&inside[1..])).unwrap();
    assert!(!std::path::Path::new(inside).exists());
    let output = root.path().join("out.pb.gz");
    crate::support::stackwire([
        "record".to_owned(),
        "--profile".to_owned(),
        "--sample-rate=997".to_owned(),
        format!("--profile-output={}", output.display()),
        "--".to_owned(),
        "chroot".to_owned(),
        root.path().display().to_string(),
        inside.to_owned(),
        "4".to_owned(),
    ])
    .succeeded();
    let profile = Pprof::read(&output);
    let hot = profile.samples.iter().max_by_key(|sample| sample.count).unwrap();
    assert_eq!(profile.file_of(hot.locations[0]), inside);
    assert!(profile.share_of("inner") > 90.0, "{}", profile.share_of("inner"));
}
