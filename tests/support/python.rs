//! CPython with perf trampolines, of each version: one that adds up and says how that went, and the
//! collector that switches it on.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::interpreters::pythons;
use super::{Ran, binary, of_debian, report};

/// Adds up, and looks whether the sum is what it was; says how that went, and whether its
/// trampoline is on, when it is asked.
const ADDS_UP: &str = r#"
import select, signal, sys, time
ticks = bad = rounds = 0
def tick(*_):
    global ticks
    ticks += 1
def step(total, number):
    return (total * 31 + number) % 1000000007
def adds_up():
    total = 0
    for number in range(5000):
        total = step(total, number)
    return total
if len(sys.argv) > 1:
    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
wanted = adds_up()
print('ready', flush=True)
while True:
    bad += adds_up() != wanted
    rounds += 1
    if rounds % 20 == 0 and select.select([0], [], [], 0)[0]:
        if not sys.stdin.readline():
            break
        print(rounds, bad, ticks, int(sys.is_stack_trampoline_active()), flush=True)
"#;

/// A Python that adds up, or another that is asked.
pub(crate) struct Adding {
    child: Child,
    said: BufReader<ChildStdout>,
}

/// What it says.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) rounds: u64,
    pub(crate) bad: u64,
    pub(crate) ticks: u64,
    pub(crate) is_active: bool,
}

impl Adding {
    pub(crate) fn start(python: &mut Command, arguments: &[&str]) -> Self {
        Self::running(python, ADDS_UP, arguments)
    }

    /// Of another program, that says its numbers in the same way.
    pub(crate) fn running(python: &mut Command, program: &str, arguments: &[&str]) -> Self {
        python.args(["-c", program]).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = python.spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "ready");
        Self { child, said }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn ask(&mut self) -> Said {
        self.child.stdin.as_mut().unwrap().write_all(b"?\n").unwrap();
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|it| it.parse().unwrap()).collect();
        let [rounds, bad, ticks, active] = numbers[..] else { panic!("{line:?}") };
        Said { rounds, bad, ticks, is_active: active == 1 }
    }

    /// Waits until its trampoline is on, or off.
    #[track_caller]
    pub(crate) fn await_active(&mut self, is_active: bool) {
        let started = Instant::now();
        while self.ask().is_active != is_active {
            assert!(started.elapsed() < Duration::from_secs(10), "it is not {is_active}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Nobody traces it, it has no signal blocked, and what it computes is right.
    #[track_caller]
    pub(crate) fn assert_well(&mut self) {
        let started = Instant::now();
        loop {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
            let is_free = ["TracerPid:\t0\n", "SigBlk:\t0000000000000000\n"];
            if is_free.iter().all(|line| status.contains(line)) {
                break;
            }
            // A page is given back after the trampoline is off.
            assert!(started.elapsed() < Duration::from_secs(5), "{status}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let (before, after) = (self.ask(), self.ask());
        assert!(after.rounds > before.rounds && after.bad == 0, "{before:?} {after:?}");
    }
}

impl Drop for Adding {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", self.child.id()));
    }
}

/// Those with a trampoline, by name.
pub(crate) fn with_trampolines() -> Vec<(String, Command)> {
    let mut found: Vec<_> = pythons().into_iter().collect();
    found.extend(of_debian("sid", "python3.14").map(|it| ("python of Debian sid".to_owned(), it)));
    found.retain_mut(|(_, python)| {
        let ask = "import sys; sys.exit(not hasattr(sys, 'activate_stack_trampoline'))";
        like(python).args(["-c", ask]).status().unwrap().success()
    });
    assert!(found.len() >= 2 && found.iter().any(|(name, _)| name.contains("sid")), "{found:?}");
    found
}

/// The same command, once more.
pub(crate) fn like(command: &Command) -> Command {
    let mut like = Command::new(command.get_program());
    like.args(command.get_args());
    like.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    like
}

/// Whether its trampoline can be switched on a second time, by its version.
pub(crate) fn is_switched_on_again(python: &Command) -> bool {
    let ask = "import sys; v = sys.version_info[:3]\n\
        sys.exit(v >= (3, 14, 3) or (3, 13, 12) <= v < (3, 14))";
    like(python).args(["-c", ask]).status().unwrap().success()
}

pub(crate) fn collector() -> Command {
    Command::new(binary("stackwire-collector"))
}

/// What a capture says, of which nobody asks for names.
#[track_caller]
pub(crate) fn collected(pid: &str, duration: &str, directory: &Path) -> String {
    let capture = directory.join("x.stackwire");
    let mut command = collector();
    command.args([pid, "--inject-python", "--duration", duration, "-o"]).arg(&capture);
    Ran::of(&mut command).succeeded();
    report(&capture)
}

/// Starts a collector that switches the trampoline on and samples until it is stopped.
pub(crate) fn sampling(pid: u32, directory: &Path) -> Child {
    let mut command = collector();
    command.arg(format!("--pid={pid}")).args(["--inject-python", "-o"]);
    command.arg(directory.join("x.stackwire")).stdin(Stdio::null()).spawn().unwrap()
}

pub(crate) fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Children of a process with this name.
pub(crate) fn children(of: u32, name: &str) -> Vec<u32> {
    let found = Command::new("pgrep").args(["-P", &of.to_string(), "-x", name]).output().unwrap();
    let text = String::from_utf8(found.stdout).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

/// A copy of the Python of a Debian and a version, which is in one file, and what runs it.
pub(crate) fn copied_from_debian(
    [suite, version]: [&str; 2],
    directory: &Path,
) -> Option<(PathBuf, Command)> {
    let name = format!("python{version}");
    let found = of_debian(suite, &name)?;
    let root = Path::new(found.get_program()).parent().unwrap();
    let own = directory.join(&name);
    std::fs::copy(root.join("usr/bin").join(&name), &own).unwrap();
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let mut python = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    python.arg("--library-path").arg(&libraries).arg(&own).env("PYTHONHOME", root.join("usr"));
    Some((own, python))
}

/// Where what has a name begins in an ELF file.
pub(crate) fn place_of(file: &[u8], name: &str) -> usize {
    use object::{Object, ObjectSegment, ObjectSymbol};
    let elf = object::File::parse(file).unwrap();
    let symbol = elf.dynamic_symbols().find(|it| it.name() == Ok(name)).unwrap();
    let inside = |segment: &object::Segment<'_, '_>| {
        let range = segment.address()..segment.address() + segment.size();
        range.contains(&symbol.address())
    };
    let segment = elf.segments().find(inside).unwrap();
    (symbol.address() - segment.address() + segment.file_range().0) as usize
}
