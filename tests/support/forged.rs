//! Programs that claim to be an interpreter and lie.

use std::path::Path;
use std::process::Command;

use super::build::source;
use super::pprof::Sample;
use super::{Pprof, Running, stackwire};

/// Most frames that such a program and an honest one have on their stacks: the walk's limits are
/// beyond that.
const DEEPEST: usize = 600;

/// A sample of a program that tells one of these lies is as it would be without: it is in `spin`.
/// An honest Python beside it has its functions.
#[track_caller]
pub(crate) fn assert_cost_themselves_alone(program: &Path, lies: &[&str]) {
    let honest = Running::start(Command::new("/usr/bin/python3").arg(source("shares.py")));
    for how in lies {
        let forged = Running::start(Command::new(program).arg(how));
        let directory = tempfile::tempdir().unwrap();
        let output = directory.path().join("x.pb.gz");
        let ran = stackwire([
            "record".to_owned(),
            "--profile".to_owned(),
            format!("--pid={},{}", forged.pid(), honest.pid()),
            "--duration=2s".to_owned(),
            "--sample-rate=499".to_owned(),
            format!("--profile-output={}", output.display()),
        ]);
        let ran = ran.succeeded();
        let profile = Pprof::read(&output);
        let of = |pid: u32, has: &dyn Fn(&Sample) -> bool| -> u64 {
            // Of the main thread: another changes what it says.
            let samples = profile.samples.iter().filter(|it| it.labels["tid"] == pid.to_string());
            samples.filter(|it| has(it)).map(|it| it.count).sum()
        };
        let through = |function: &'static str| {
            let profile = &profile;
            move |sample: &Sample| profile.functions(sample).contains(&function)
        };
        let all = of(forged.pid(), &|_| true);
        let spins = of(forged.pid(), &through("spin"));
        let deepest = profile.samples.iter().map(|it| it.locations.len()).max().unwrap();
        let (honest, functions) = (of(honest.pid(), &|_| true), of(honest.pid(), &through("main")));
        eprintln!("{how}: {spins} of {all}, {functions} of {honest}, {deepest} frames");
        assert!(all > 100 && spins * 100 >= all * 95, "{how}: {spins} of {all}: {}", ran.stderr);
        assert!(honest > 100 && functions * 100 >= honest * 95, "{how}: {functions} of {honest}");
        assert!(deepest <= DEEPEST, "{how}: {deepest}");
    }
}
