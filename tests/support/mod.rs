//! What the tests share: building fixtures, running the binaries, reading profiles through `go tool
//! pprof`.

pub(crate) mod authority;
pub(crate) mod build;
pub(crate) mod calls;
pub(crate) mod cgroup;
pub(crate) mod client;
pub(crate) mod debug_files;
pub(crate) mod disk;
pub(crate) mod forged;
pub(crate) mod functions;
pub(crate) mod gimli_walk;
pub(crate) mod go;
pub(crate) mod interpreters;
pub(crate) mod lying;
pub(crate) mod mounted;
pub(crate) mod nginx;
pub(crate) mod nobody;
pub(crate) mod peer;
pub(crate) mod postgres;
pub(crate) mod pprof;
pub(crate) mod python;
pub(crate) mod secret;
pub(crate) mod server;
pub(crate) mod shares;
pub(crate) mod slow;
pub(crate) mod stopped;
pub(crate) mod tokens;
pub(crate) mod whole;

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) use self::pprof::Pprof;

/// The binary of this name, built by `make test` before the tests.
pub(crate) fn binary(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().parent().unwrap().join(name);
    assert!(path.is_file(), "{} is not built; run `make test`", path.display());
    path
}

/// Whether a test that needs `what` can run; says loudly when it cannot, and fails in CI.
pub(crate) fn can(what: &str, yes: bool) -> bool {
    if !yes {
        let name = std::thread::current().name().unwrap_or("?").to_owned();
        assert!(
            std::env::var_os("STACKWIRE_NO_SKIP").is_none(),
            "{name}: cannot run without {what}"
        );
        eprintln!("SKIPPED {name}: it needs {what}");
    }
    yes
}

/// Runs a tool that must succeed: its output and what it says.
#[track_caller]
pub(crate) fn run(command: &mut Command) -> (String, String) {
    let output = command.env("DEBUGINFOD_URLS", "").output().unwrap();
    let [out, err] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}: {err}");
    (out, err)
}

/// What `tests/setup.sh` has fetched and built.
pub(crate) fn test_cache() -> PathBuf {
    let kept = || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/stackwire-tests");
    std::env::var_os("STACKWIRE_TEST_CACHE").map_or_else(kept, PathBuf::from)
}

/// A program of another Debian, which `tests/debian.sh` has unpacked.
pub(crate) fn of_debian(suite: &str, program: &str) -> Option<Command> {
    let root = test_cache().join(suite);
    let run = root.join("run");
    can(&format!("{program} of Debian {suite}"), run.is_file()).then(|| {
        let mut command = Command::new(run);
        command.arg(program).env("PYTHONHOME", root.join("usr"));
        command
    })
}

/// Held by every test that samples, and by one that must be alone for writing.
static MACHINE: RwLock<()> = RwLock::new(());

thread_local! {
    /// Given back with the thread, of which each test has its own.
    static SHARE: RefCell<Option<RwLockReadGuard<'static, ()>>> = const { RefCell::new(None) };
}

/// Root, or what it stands for here: may load eBPF programs.
pub(crate) fn privileged() -> bool {
    SHARE.with_borrow_mut(|held| {
        held.get_or_insert_with(|| MACHINE.read().unwrap_or_else(PoisonError::into_inner));
    });
    can("root, to load eBPF programs", rustix::process::geteuid().is_root())
}

/// Waits until no other test samples, and keeps them waiting: for one that takes a CPU away, or all
/// of them.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    SHARE.with_borrow_mut(|held| *held = None);
    MACHINE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Most memory a process has had, MiB.
pub(crate) fn peak_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    // A process that is over has none.
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0 kB");
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() / 1024
}

/// A program that runs until dropped.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Starts it and waits until it says it is ready.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "ready");
        Self(child)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a `stackwire` command did.
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    pub(crate) fn of(command: &mut Command) -> Self {
        let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
        Self {
            code: status.code(),
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        }
    }

    #[track_caller]
    pub(crate) fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// Failed with this code, saying this.
    #[track_caller]
    pub(crate) fn failed(self, code: i32, said: &str) {
        assert_eq!(self.code, Some(code), "stderr: {}", self.stderr);
        assert!(self.stderr.contains(said), "expected {said:?} in: {}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
    }
}

/// Runs `stackwire record` in a directory.
pub(crate) fn recorded(directory: &Path, arguments: &[&str]) -> Ran {
    let mut command = Command::new(binary("stackwire"));
    Ran::of(command.arg("record").args(arguments).current_dir(directory))
}

/// A command that runs cargo, as people call it: with what cargo tells its tests of their package
/// (`CARGO_PKG_NAME` and the like), the build script of `ring` would run anew, and all that stands
/// on it be built twice.
pub(crate) fn outside_cargo(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let told = name.to_str().is_some_and(|name| name.starts_with("CARGO_"));
        if told && name != "CARGO_HOME" && name != "CARGO_TARGET_DIR" {
            command.env_remove(name);
        }
    }
    command
}

/// Runs `stackwire` with arguments.
pub(crate) fn stackwire<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ran {
    Ran::of(Command::new(binary("stackwire")).args(arguments))
}

/// One part in `of` apart at most, or `more`.
#[track_caller]
pub(crate) fn assert_near(what: &str, one: u64, other: u64, of: u64, more: u64) {
    let apart = one.abs_diff(other);
    assert!(apart <= other / of + more, "{what}: {one}, and {other} by the program's own count");
}

/// What the host took from all CPUs, nanoseconds in steps of 10 ms (proc(5)). Of a thread that runs
/// meanwhile it is neither CPU time nor a wait.
pub(crate) fn stolen_ns() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap();
    let steal = stat.lines().next().unwrap().split_whitespace().nth(8).unwrap();
    steal.parse::<u64>().unwrap() * 10_000_000
}

/// Records a process at 997 Hz with more arguments, and reads the profile.
#[track_caller]
pub(crate) fn record(pid: u32, seconds: u32, more: &[&str]) -> Pprof {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    let mut arguments = vec![
        "record".to_owned(),
        "--profile".to_owned(),
        format!("--pid={pid}"),
        format!("--duration={seconds}s"),
        "--sample-rate=997".to_owned(),
        format!("--profile-output={}", output.display()),
    ];
    arguments.extend(more.iter().map(|&argument| argument.to_owned()));
    stackwire(arguments).succeeded();
    Pprof::read(&output)
}

/// Text of a report of a capture.
pub(crate) fn report(capture: &Path) -> String {
    stackwire(["report".as_ref(), capture.as_os_str()]).succeeded().stdout
}

/// Whether a function has its share of the samples, to two points; beside busy neighbours a program
/// gets less of a CPU, and of few samples four standard deviations are more than that.
pub(crate) fn has_share(profile: &Pprof, (function, share): (&str, f64)) -> bool {
    let deviation = (share * (100.0 - share) / profile.count() as f64).sqrt();
    (profile.share_of(function) - share).abs() <= f64::max(2.0, 4.0 * deviation)
}

/// Asserts that functions have their shares.
#[track_caller]
pub(crate) fn assert_shares(profile: &Pprof, expected: &[(&str, f64)]) {
    let samples = profile.count();
    assert!(samples >= 1_000, "shares of {samples} samples say nothing");
    let mut text = String::new();
    let mut good = true;
    for (function, share) in expected {
        let found = profile.share_of(function);
        writeln!(text, "{function}: {found:.2} %, expected {share} %").unwrap();
        good &= has_share(profile, (function, *share));
    }
    assert!(good, "{text}of {samples} samples");
}
