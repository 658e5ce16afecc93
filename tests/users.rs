//! Users of one host: what one of them maps, and what is in their files, costs nobody else a frame.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::lying::{eh_frame, new_build_id, replace_eh_frame, section, write_at};
use crate::support::whole::{complete, ended};
use crate::support::{Running, binary, build, privileged, stackwire};

/// Another user, with as little as possible.
const USER: u32 = 65534;

/// A directory all users may look into.
fn directory() -> tempfile::TempDir {
    let directory = tempfile::Builder::new().prefix("stackwire-users-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o755)).unwrap();
    directory
}

/// A copy of a program in it that belongs to the other user.
fn theirs(directory: &Path, program: &Path, name: &str) -> PathBuf {
    let path = directory.join(name);
    std::fs::copy(program, &path).unwrap();
    std::os::unix::fs::chown(&path, Some(USER), Some(USER)).unwrap();
    path
}

/// What the other user runs, with little of the CPU.
fn as_user(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "nice", "-n", "19"]);
    command.arg(program);
    command
}

/// A capture of all processes, at 997 Hz, without tables from before.
struct Capture {
    collector: Child,
    directory: tempfile::TempDir,
}

impl Capture {
    fn start(duration: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut collector = Command::new(binary("stackwire-collector"));
        collector.args(["-a", "--sample-rate=997", "--duration", duration, "--output"]);
        collector.arg(directory.path().join("x.stackwire"));
        collector.env("XDG_CACHE_HOME", directory.path().join("cache")).stderr(Stdio::null());
        Self { collector: collector.spawn().unwrap(), directory }
    }

    fn end(mut self) -> Captured {
        assert!(self.collector.wait().unwrap().success());
        Captured(self.directory)
    }
}

struct Captured(tempfile::TempDir);

impl Captured {
    /// The whole report of one process.
    fn of(&self, process: &Running) -> String {
        self.report(&[&format!("--where=pid={}", process.pid())])
    }

    /// That of all.
    fn all(&self) -> String {
        self.report(&[])
    }

    fn report(&self, options: &[&str]) -> String {
        let capture = self.0.path().join("x.stackwire");
        let arguments = ["report", "--full", capture.to_str().unwrap()];
        stackwire(arguments.iter().chain(options)).succeeded().stdout
    }
}

#[track_caller]
fn assert_whole(report: &str) {
    // Until the collector has heard of it and its table is made, for which the machine takes as
    // long as it takes.
    let waited = ended(report, "no unwind table yet") + ended(report, "mapping too young");
    let share = complete(report) * 100.0 / (100.0 - waited);
    eprintln!("root's: {share:.1} % whole, {waited} % before there was a table");
    assert!(share >= 99.0 && waited < 50.0, "{share} %, {waited} %:\n{report}");
}

/// A user gives a program the path and the build-id of root's, and other call frame information.
#[test]
fn a_users_file_does_not_stand_for_roots() {
    if !privileged() {
        return;
    }
    let directory = directory();
    let (_, honest) = &build::unwind_corpus()[0];
    let tool = directory.path().join("tool");
    std::fs::copy(honest, &tool).unwrap();
    let forged = theirs(directory.path(), honest, "forged");
    let frames = section(&forged, ".eh_frame");
    let noise: Vec<u8> = (0..frames.size).map(|at| (at * 167 + at / 7) as u8).collect();
    write_at(&forged, frames.offset, &noise);
    let capture = Capture::start("8s");
    std::thread::sleep(Duration::from_secs(1));
    let in_its_place = format!(
        "mount --bind {} {tool} && exec {tool} sort",
        forged.display(),
        tool = tool.display()
    );
    let mut shell = as_user(Path::new("unshare"));
    let forger = Running::start(shell.args(["-Urm", "sh", "-c", &in_its_place]));
    // Its table is there before root's is asked for.
    std::thread::sleep(Duration::from_secs(2));
    let honest = Running::start(Command::new(&tool).arg("sort"));
    let captured = capture.end();
    let report = captured.of(&forger);
    assert!(complete(&report) < 50.0, "the forged file was not used:\n{report}");
    assert_whole(&captured.of(&honest));
}

/// Tables with as many rules as one may have, until there are no numbers left.
#[test]
fn a_user_with_many_rules_leaves_those_of_others() {
    if !privileged() {
        return;
    }
    let directory = directory();
    let (_, program) = &build::unwind_corpus()[2];
    let text = section(program, ".text");
    let liars: Vec<Running> = (0..40)
        .map(|file| {
            let path = theirs(directory.path(), program, &format!("rules{file}"));
            new_build_id(&path);
            // DW_CFA_offset of the return address; DW_CFA_def_cfa: register 7, and an offset no
            // other has.
            replace_eh_frame(
                &path,
                &eh_frame(0, 8000, text.address, |function| {
                    let mut rule = vec![0x90, 1, 0x0c, 7];
                    let mut offset = (file * 8000 + function + 2) * 8;
                    while offset >= 0x80 {
                        rule.push(offset as u8 | 0x80);
                        offset >>= 7;
                    }
                    rule.push(offset as u8);
                    rule
                }),
            );
            Running::start(as_user(&path).arg("sort"))
        })
        .collect();
    let capture = Capture::start("14s");
    std::thread::sleep(Duration::from_secs(8));
    let (_, honest) = &build::unwind_corpus()[0];
    let honest = Running::start(Command::new(honest).arg("sort"));
    let captured = capture.end();
    let over = "no unwind table: limit of its user or process";
    let cut = captured.all().matches(over).count();
    eprintln!("{cut} of {} liars have had their share", liars.len());
    assert!(cut > 5, "{cut} of {}", liars.len());
    assert_whole(&captured.of(&honest));
}

/// Processes with as many mappings as one may have.
#[test]
fn a_user_with_many_mappings_leaves_room_for_others() {
    if !privileged() {
        return;
    }
    let directory = directory();
    let many = theirs(directory.path(), build::many(), "many");
    let hoarders: Vec<Running> =
        (0..6).map(|_| Running::start(as_user(&many).args(["32000", "60"]))).collect();
    let capture = Capture::start("8s");
    std::thread::sleep(Duration::from_secs(3));
    let (_, honest) = &build::unwind_corpus()[0];
    let honest = Running::start(Command::new(honest).arg("sort"));
    let captured = capture.end();
    let over = "no unwind table: limit of its user or process";
    let reports: Vec<String> = hoarders.iter().map(|hoarder| captured.of(hoarder)).collect();
    let cut = reports.iter().filter(|report| ended(report, over) > 0.0).count();
    let whole = reports.iter().filter(|report| complete(report) > 50.0).count();
    assert_eq!((cut, whole), (5, 1), "{}", reports.join("\n"));
    assert_whole(&captured.of(&honest));
}
