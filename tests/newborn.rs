//! Processes that have just begun, of programs met before: whole stacks from their first instructions on, and never by the
//! table of another program.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use crate::support::{Pprof, Ran, binary, build, privileged, stackwire};
use crate::unwinding::{complete, ended, recorded};

/// A shell that runs commands again and again.
struct Loop(Child);

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
    let file = directory.join("x.stackwire");
    let duration = format!("--duration={seconds}s");
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["-a", "--sample-rate=997", &duration]).arg("--output").arg(&file);
    Ran::of(collector.env("XDG_CACHE_HOME", directory.join("cache"))).succeeded();
    file
}

/// User stacks of threads of this name, from this second on: how many, and the share of whole ones.
fn whole(capture: &Path, comm: &str, from: u32) -> (u64, f64) {
    let (comm, time) = (format!("--where=comm={comm}"), format!("--time={from}.."));
    let report = stackwire(["report", capture.to_str().unwrap(), &comm, &time]);
    let report = report.succeeded().stdout;
    let line = report.lines().find(|line| line.ends_with("reached the thread's root"));
    let stacks = line
        .and_then(|line| line.split_whitespace().next())
        .map_or(0, |count| count.parse().unwrap());
    (stacks, ended(&report, "reached the thread's root"))
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
    for comm in ["brief_small", "ls", "gcc", "cc1", "as"] {
        // Their tables are made in the first seconds.
        let (stacks, share) = whole(&capture, comm, 5);
        eprintln!("{comm}: {share} % of the stacks are whole, {stacks} of them");
        roots += stacks as f64;
        all += stacks as f64 * 100.0 / share;
    }
    let share = roots * 100.0 / all;
    assert!(share >= 99.0 && roots > 300.0, "{share} % of {all} stacks are whole");
}

/// Containers have their files on overlayfs, where user space is told other inodes than the kernel maps.
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
    let capture = capture(directory.path(), 8);
    drop(running);
    for comm in ["brief", "copied"] {
        let (stacks, share) = whole(&capture, comm, 4);
        assert!(share >= 99.0 && stacks > 100, "{comm}: {share} % of {stacks} stacks are whole");
    }
}

/// A program is written into the file of another, which was met before: inode and name stay, no frame is where it was.
#[test]
fn a_program_in_the_file_of_another_is_another() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [small, large] = build::briefs();
    // `cat`: no new inode. The second program has another name, to tell the two apart.
    let script = format!(
        "for i in 1 2 3 4 5 6; do cat {} > x; chmod +x x; for j in 1 2 3 4 5 6 7 8 9 10; do ./x 9; done; \
         cat {} > x; cp --preserve=mode x y; for j in 1 2 3 4 5 6 7 8 9 10; do ./x 9; done; done",
        small.display(),
        large.display()
    );
    let running = Loop::start(&script, directory.path());
    let capture = capture(directory.path(), 10);
    drop(running);
    let output = directory.path().join("x.pb.gz");
    let resolve = ["resolve", capture.to_str().unwrap(), "-o", output.to_str().unwrap()];
    stackwire(resolve.into_iter().chain(["--where=comm=x"])).succeeded();
    let profile = Pprof::read(&output);
    let mut seen = 0;
    for sample in &profile.samples {
        let names = profile.functions(sample);
        // A walk by the other's table would find no such callers.
        let Some(spin) = names.iter().position(|&name| name == "spin") else { continue };
        let callers = &names[spin + 1..];
        let expected = ["run", "main", "__libc_start_call_main", "__libc_start_main", "_start"];
        assert!(expected.starts_with(callers) || callers.starts_with(&expected[..2]), "{names:?}");
        seen += sample.count;
    }
    assert!(seen > 1000, "{seen} samples");
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
