//! Both crates without the binaries' command lines: the examples of their documentation, run.

use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stackwire::{Sources, formats, profile::unite, read_capture, resolve};

use crate::support::build::{sched, work};
use crate::support::{Pprof, Running, binary, privileged};

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
fn sessions_record_waits_and_counters_and_hand_snapshots_out() {
    if !privileged() {
        return;
    }
    let states = vec![stackwire::WaitState::Sleep];
    let off_cpu = || stackwire::OffCpu {
        states: states.clone(),
        threshold: Duration::ZERO,
        ..Default::default()
    };
    let program = Running(Command::new(sched()).arg("20").stdout(Stdio::null()).spawn().unwrap());
    // An exporter of one's own, beside one of ours.
    struct Own(Arc<Mutex<Vec<u64>>>, stackwire::WriteExporter<std::fs::File>);
    impl stackwire::MetricsExporter for Own {
        fn export(&mut self, profile: &stackwire::Profile) -> std::io::Result<()> {
            let switches = profile.sched.values().map(|it| it.switches.all()).sum();
            self.0.lock().unwrap().push(switches);
            self.1.export(profile)
        }
    }
    let (seen, file) = (Arc::<Mutex<Vec<u64>>>::default(), tempfile::NamedTempFile::new().unwrap());
    let format = formats::pmu::Format::Prometheus;
    let options = formats::pmu::Options { format, per_pid: false };
    let ours = stackwire::WriteExporter::new(file.reopen().unwrap(), options);
    let session = stackwire::Session::builder()
        .pid(program.pid())
        .profile()
        .off_cpu(off_cpu())
        .counters(stackwire::AddUp::Processes)
        .export(Own(Arc::clone(&seen), ours), Duration::from_secs(1))
        .collector(binary("stackwire-collector"))
        .start()
        .unwrap();
    std::thread::sleep(Duration::from_millis(3500));
    let (profile, _) = session.stop().unwrap();
    let seen = seen.lock().unwrap().clone();
    assert!(seen.len() >= 3 && seen.is_sorted() && seen[0] > 0, "{seen:?}");
    let all: u64 = profile.sched.values().map(|it| it.switches.all()).sum();
    assert_eq!(seen.last(), Some(&all));
    let text = std::fs::read_to_string(file.path()).unwrap();
    let line = format!("stackwire_migrations_total{{pid=\"{}\",comm=\"sched\"}} ", program.pid());
    assert_eq!(text.matches(&line).count(), seen.len(), "{text}");
    assert!(profile.series.iter().any(|series| series.event.name == "off-cpu"));

    // The collector's own.
    let file = tempfile::NamedTempFile::new().unwrap();
    let session = stackwire_collector::Session::builder()
        .pid(program.pid())
        .off_cpu(off_cpu())
        .counters(stackwire::AddUp::Threads)
        .start(file.reopen().unwrap())
        .unwrap();
    std::thread::sleep(Duration::from_secs(1));
    session.stop().unwrap();
    let (profile, _) = read_capture(file.reopen().unwrap()).unwrap();
    let names: Vec<_> = profile.series.iter().map(|it| it.event.name.as_str()).collect();
    assert_eq!(names, ["off-cpu", "run-queue"]);
    assert!(profile.sample_count() > 1_000 && profile.sched.len() >= 7, "{}", profile.sched.len());
}

#[test]
fn without_something_to_sample_a_session_does_not_start() {
    assert!(stackwire::Session::builder().pid(1).start().is_err());
    assert!(stackwire_collector::Session::builder().pid(1).start(Vec::new()).is_err());
}
