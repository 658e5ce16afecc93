//! Both crates without the binaries' command lines: the examples of their documentation, run.

use std::process::Command;

use stackwire::{Sources, formats, profile::unite, read_capture, resolve};

use crate::support::{Pprof, Running, binary, build::work, privileged};

#[test]
fn a_session_of_the_symbolizer_gives_a_profile_in_memory() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(work()).args(["plain", "30"]));
    let session = stackwire::Session::builder()
        .pid(program.pid())
        .profile()
        .sample_rate(499)
        .collector(binary("stackwire-collector"))
        .start()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_secs(2));
    let (profile, names) = session.stop().unwrap();
    assert!(profile.sample_count() > 100);
    let mut bytes = Vec::new();
    formats::pprof::write(names.of(&profile), &Default::default(), &mut bytes).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    assert!(Pprof::read(file.path()).share_of("alpha") > 50.0);
}

#[test]
fn a_session_of_the_collector_writes_a_capture_to_any_writer() {
    if !privileged() {
        return;
    }
    let program = Running::start(Command::new(work()).args(["plain", "30"]));
    let file = tempfile::NamedTempFile::new().unwrap();
    let session = stackwire_collector::Session::builder()
        .pid(program.pid())
        .profile()
        .sample_rate(499)
        .start(file.reopen().unwrap())
        .unwrap();
    std::thread::sleep(std::time::Duration::from_secs(2));
    let summary = session.stop().unwrap();
    let (mut profile, artifacts) = read_capture(file.reopen().unwrap()).unwrap();
    let names = resolve(&profile, &artifacts, &Sources::default());
    unite(&mut profile, &names);
    assert_eq!(profile.sample_count(), summary.delivered);
    assert_eq!(profile.taken, Some(summary.taken));
    let mut text = Vec::new();
    formats::report::write(names.of(&profile), &Default::default(), &mut text).unwrap();
    assert!(String::from_utf8(text).unwrap().contains("alpha [work]"));
}

#[test]
fn without_something_to_sample_a_session_does_not_start() {
    assert!(stackwire::Session::builder().pid(1).start().is_err());
    assert!(stackwire_collector::Session::builder().pid(1).start(Vec::new()).is_err());
}
