//! Processes that have just begun, of programs met before: whole stacks from their first
//! instructions on, and never by the table of another program.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use crate::support::whole::{complete, ended, recorded};
use crate::support::{Pprof, Ran, binary, build, privileged, stackwire};

/// What runs until it is dropped, as a shell that runs commands again and again.
pub(crate) struct Loop(pub(crate) Child);

impl Loop {
    fn start(commands: &str, directory: &Path) -> Self {
        let script = format!("while :; do {commands}; done");
        let mut shell = Command::new("sh");
        Self(shell.args(["-c", &script]).current_dir(directory).spawn().unwrap())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Captures the host for so many seconds at 997 Hz.
fn capture(directory: &Path, seconds: u32) -> PathBuf {
    captured_by(Command::new(binary("stackwire-collector")), directory, seconds)
}

fn captured_by(mut collector: Command, directory: &Path, seconds: u32) -> PathBuf {
    let file = directory.join("x.stackwire");
    let duration = format!("--duration={seconds}s");
    collector.args(["-a", "--sample-rate=997", &duration]).arg("--output").arg(&file);
    Ran::of(collector.env("XDG_CACHE_HOME", directory.join("cache"))).succeeded();
    file
}

/// User stacks of threads of this name in these seconds: how many, and the share of whole ones.
pub(crate) fn whole(capture: &Path, comm: &str, seconds: &str) -> (u64, f64, String) {
    let (comm, time) = (format!("--where=comm={comm}"), format!("--time={seconds}"));
    let report = stackwire(["report", capture.to_str().unwrap(), &comm, &time]);
    let report = report.succeeded().stdout;
    let line = report.lines().find(|line| line.ends_with("reached the thread's root"));
    let stacks = line
        .and_then(|line| line.split_whitespace().next())
        .map_or(0, |count| count.parse().unwrap());
    (stacks, ended(&report, "reached the thread's root"), report)
}

#[test]
fn stacks_of_brief_processes_are_whole() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let brief = build::briefs()[0].display();
    std::fs::write(directory.path().join("x.c"), "int main(void) { return 0; }\n").unwrap();
    // Of 50 ms; of 2 to 5 ms; a child of a child, which is gone before the collector wakes.
    let running = Loop::start(
        &format!("{brief} 50; ls -lR /usr/share/doc >/dev/null; {brief} 4; gcc -O2 -c x.c -o x.o"),
        directory.path(),
    );
    let capture = capture(directory.path(), 12);
    drop(running);
    let (mut all, mut roots) = (0.0, 0.0);
    // Of the smaller ones a single stack that ends in code without a rule may be two per cent.
    for (comm, least) in
        [("brief_small", 99.0), ("ls", 99.0), ("gcc", 90.0), ("cc1", 97.0), ("as", 90.0)]
    {
        // Their tables are made in the first seconds.
        let (stacks, share, report) = whole(&capture, comm, "5..");
        eprintln!("{comm}: {share} % of the stacks are whole, {stacks} of them");
        assert!(stacks > 10 && share >= least, "{comm}: {share} %: {report}");
        roots += stacks as f64;
        all += stacks as f64 * 100.0 / share;
    }
    let share = roots * 100.0 / all;
    assert!(share >= 99.0 && roots > 300.0, "{share} % of {all} stacks are whole");
}

/// Containers have their files on overlayfs, where user space is told other inodes than the kernel
/// maps.
#[test]
fn stacks_of_brief_processes_in_a_container_are_whole() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let inside = directory.path().join("lower/brief");
    std::fs::create_dir(inside.parent().unwrap()).unwrap();
    std::fs::copy(&build::briefs()[0], &inside).unwrap();
    // The upper layer must not be on an overlayfs itself.
    let script = "mkdir all layers && mount -t tmpfs none layers && mkdir layers/upper layers/work && \
         mount -t overlay overlay -olowerdir=lower,upperdir=layers/upper,workdir=layers/work all && \
         cp all/brief all/copied && while :; do all/brief 20; all/copied 20; done";
    let mut shell = Command::new("unshare");
    shell.args(["--mount", "sh", "-ec", script]).current_dir(directory.path());
    let running = Loop(shell.spawn().unwrap());
    let capture = capture(directory.path(), 10);
    drop(running);
    for comm in ["brief", "copied"] {
        // Their tables are made in the first seconds.
        let (stacks, share, report) = whole(&capture, comm, "6..");
        assert!(share >= 99.0 && stacks > 100, "{comm}: {share} %: {report}");
    }
}

/// The kernel's times have no offset, the collector's clocks have: as of a container that CRIU
/// restored.
#[test]
fn a_collector_in_a_time_namespace_knows_when_samples_were_taken() {
    if !privileged() {
        return;
    }
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    let uptime: u64 = uptime.split('.').next().unwrap().parse().unwrap();
    for offset in [format!("-{}", uptime / 2), "1000000".to_string()] {
        let directory = tempfile::tempdir().unwrap();
        let running =
            Loop::start(&format!("{} 20", build::briefs()[0].display()), directory.path());
        let mut collector = Command::new("unshare");
        collector.args(["--time", "--monotonic", &offset, "--fork"]);
        collector.arg(binary("stackwire-collector"));
        let capture = captured_by(collector, directory.path(), 7);
        drop(running);
        let (stacks, share, report) = whole(&capture, "brief_small", "3..5");
        eprintln!("{offset} s: {share} % of {stacks}");
        assert!((300..2_100).contains(&stacks) && share >= 99.0, "{offset}: {share} %: {report}");
    }
}

/// A program is written into the file of another, which was met before: inode and name stay, no
/// frame is where it was.
#[test]
fn a_program_in_the_file_of_another_is_another() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [small, large] = build::briefs().each_ref().map(|path| std::fs::read(path).unwrap());
    let path = directory.path().join("x");
    let write = |content: &[u8]| {
        // No new inode. Whoever runs just then is left alone.
        while std::fs::write(&path, content).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    };
    write(&small);
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let running = Loop::start("./x 9; sleep 0.005", directory.path());
    let capture = std::thread::scope(|scope| {
        // Each is there for longer than it takes to know it.
        let rewrite = scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_secs(10));
            write(&large);
        });
        let capture = capture(directory.path(), 20);
        rewrite.join().unwrap();
        capture
    });
    drop(running);
    let output = directory.path().join("x.pb.gz");
    let resolve = ["resolve", capture.to_str().unwrap(), "-o", output.to_str().unwrap()];
    stackwire(resolve.into_iter().chain(["--where=comm=x"])).succeeded();
    let profile = Pprof::read(&output);
    let (mut seen, mut wrong) = (0, 0);
    for sample in &profile.samples {
        let names = profile.functions(sample);
        let Some(spin) = names.iter().position(|&name| name == "spin") else { continue };
        seen += sample.count;
        let callers = &names[spin + 1..];
        // A walk by the other's table finds other callers.
        wrong +=
            sample.count * u64::from(!callers.is_empty() && !callers.starts_with(&["run", "main"]));
    }
    assert!(seen > 1000 && wrong == 0, "{wrong} of {seen} stacks are of another program");
    // Or none, for what is where it looks is no stack. What is not known yet says so.
    let report = stackwire(["report", capture.to_str().unwrap(), "--where=comm=x"]);
    let report = report.succeeded().stdout;
    let (whole, unknown) = (complete(&report), ended(&report, "process or mapping too young"));
    let waits = ended(&report, "no unwind table yet");
    eprintln!("{whole} % whole, {unknown} % too young, {waits} % without table yet");
    assert!(whole + unknown + waits >= 99.5 && whole > 60.0, "{report}");
}

/// From the first command on: each program is met for the first time once.
#[test]
fn a_script_of_brief_commands_is_whole() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("x.c"), "int main(void) { return 0; }\n").unwrap();
    let script = format!(
        "cd {}; i=0; while [ $i -lt 40 ]; do ls -lR /usr/share/doc; \
         grep -rc e /usr/share/common-licenses; gcc -O2 -c x.c -o x.o; i=$((i+1)); done >/dev/null",
        directory.path().display()
    );
    // Their tables are made in the first.
    recorded(&["--", "sh", "-c", &script], directory.path());
    let (report, profile) = recorded(&["--", "sh", "-c", &script], directory.path());
    let share = complete(&report);
    eprintln!("{share} % of {} stacks are whole", profile.count());
    assert!(share >= 99.0 && profile.count() > 500, "{report}");
}
