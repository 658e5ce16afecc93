//! CPython that is asked to name its functions while it is sampled: names come and go, the program
//! computes what it would have, and whoever dies leaves it running and untraced.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::privileges::public_binaries;
use crate::support::interpreters::pythons;
use crate::support::pprof::Sample;
use crate::support::{
    Pprof, Ran, Running, alone, binary, build, of_debian, privileged, record, recorded, report,
};

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

/// A Python that adds up.
struct Adding {
    child: Child,
    said: BufReader<ChildStdout>,
}

/// What it says.
#[derive(Debug)]
struct Said {
    rounds: u64,
    bad: u64,
    ticks: u64,
    is_active: bool,
}

impl Adding {
    fn start(python: &mut Command, arguments: &[&str]) -> Self {
        python.args(["-c", ADDS_UP]).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = python.spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "ready");
        Self { child, said }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn ask(&mut self) -> Said {
        self.child.stdin.as_mut().unwrap().write_all(b"?\n").unwrap();
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|it| it.parse().unwrap()).collect();
        let [rounds, bad, ticks, active] = numbers[..] else { panic!("{line:?}") };
        Said { rounds, bad, ticks, is_active: active == 1 }
    }

    /// Waits until its trampoline is on, or off.
    #[track_caller]
    fn await_active(&mut self, is_active: bool) {
        let started = Instant::now();
        while self.ask().is_active != is_active {
            assert!(started.elapsed() < Duration::from_secs(10), "it is not {is_active}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Nobody traces it, it has no signal blocked, and what it computes is right.
    #[track_caller]
    fn assert_well(&mut self) {
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
fn with_trampolines() -> Vec<(String, Command)> {
    let mut found: Vec<_> = pythons().into_iter().collect();
    found.extend(of_debian("sid", "python3.14").map(|it| ("python of Debian sid".to_owned(), it)));
    found.retain_mut(|(_, python)| {
        let ask = "import sys; sys.exit(not hasattr(sys, 'activate_stack_trampoline'))";
        like(python).args(["-c", ask]).status().unwrap().success()
    });
    assert!(found.len() >= 2 && found.iter().any(|(name, _)| name.contains("sid")), "{found:?}");
    found
}

/// Percent of the samples that are in the function which adds.
fn share_through_step(profile: &Pprof) -> f64 {
    let is_in_it = |sample: &&Sample| profile.functions(sample).contains(&"py::step:<string>");
    let count: u64 = profile.samples.iter().filter(is_in_it).map(|sample| sample.count).sum();
    count as f64 * 100.0 / profile.count() as f64
}

/// The same command, once more.
fn like(command: &Command) -> Command {
    let mut like = Command::new(command.get_program());
    like.args(command.get_args());
    like.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    like
}

/// Whether its trampoline can be switched on a second time, by its version.
fn is_switched_on_again(python: &Command) -> bool {
    let ask = "import sys; v = sys.version_info[:3]\n\
        sys.exit(v >= (3, 14, 3) or (3, 13, 12) <= v < (3, 14))";
    like(python).args(["-c", ask]).status().unwrap().success()
}

fn collector() -> Command {
    Command::new(binary("stackwire-collector"))
}

/// What a capture says, of which nobody asks for names.
#[track_caller]
fn collected(pid: &str, duration: &str, directory: &Path) -> String {
    let capture = directory.join("x.stackwire");
    let mut command = collector();
    command.args([pid, "--inject-python", "--duration", duration, "-o"]).arg(&capture);
    Ran::of(&mut command).succeeded();
    report(&capture)
}

/// Starts a collector that switches the trampoline on and samples until it is stopped.
fn sampling(pid: u32, directory: &Path) -> Child {
    let mut command = collector();
    command.arg(format!("--pid={pid}")).args(["--inject-python", "-o"]);
    command.arg(directory.join("x.stackwire")).stdin(Stdio::null()).spawn().unwrap()
}

fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Children of a process with this name.
fn children(of: u32, name: &str) -> Vec<u32> {
    let found = Command::new("pgrep").args(["-P", &of.to_string(), "-x", name]).output().unwrap();
    let text = String::from_utf8(found.stdout).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn functions_have_names_while_they_are_sampled() {
    if !privileged() {
        return;
    }
    for (name, python) in with_trampolines() {
        let mut adding = Adding::start(&mut like(&python), &[]);
        let share = |more: &[&str]| share_through_step(&record(adding.pid(), 1, more));
        let (before, during) = (share(&[]), share(&["--inject-python"]));
        eprintln!("{name}: {before} % before, {during} % meanwhile");
        assert!(before == 0.0 && during > 20.0, "{name}: {before} % before, {during} % meanwhile");
        let after = adding.ask();
        assert!(!after.is_active && after.bad == 0, "{name}: {after:?}");
        adding.assert_well();
        if !is_switched_on_again(&python) {
            let directory = tempfile::tempdir().unwrap();
            let pid = format!("--pid={}", adding.pid());
            recorded(directory.path(), &[&pid, "--inject-python", "--duration=100ms"])
                .failed(1, "it was on once");
            adding.assert_well();
        }
    }
}

/// A thousand times at random moments, signals among them. CPython takes 254 of one process, some
/// versions one; those after it are refused.
#[test]
fn a_python_computes_what_it_would_have() {
    if !privileged() {
        return;
    }
    let all = with_trampolines();
    let again = all.iter().filter(|(_, python)| is_switched_on_again(python)).count();
    let processes = 1000usize.div_ceil(again * 250);
    let each = 1000usize.div_ceil(again * processes);
    let done: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = all
            .iter()
            .map(|(name, python)| {
                let often = is_switched_on_again(python);
                let (processes, each) = if often { (processes, each) } else { (20, 1) };
                scope.spawn(move || {
                    (0..processes).map(|_| switched_on(name, python, each)).sum::<usize>()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(done >= 1000, "{done}");
}

/// Switches one on and off so many times.
fn switched_on(name: &str, python: &Command, times: usize) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let mut adding = Adding::start(&mut like(python), &["signals"]);
    for round in 0..times {
        let mut command = collector();
        command.args(["--source=perf", "--unwind=fp", "--duration=1ms", "--inject-python"]);
        command.arg(format!("--pid={}", adding.pid()));
        let ran = Ran::of(command.arg("-o").arg(directory.path().join("x.stackwire")));
        assert_eq!(ran.code, Some(0), "{name}, {round}: {}", ran.stderr);
    }
    // Code that was freed too early would be missed now.
    let said = (adding.ask(), adding.ask()).1;
    eprintln!("{name}: {times} times, {said:?}");
    assert!(said.bad == 0 && !said.is_active && said.ticks > 0, "{name}: {said:?}");
    adding.assert_well();
    times
}

#[test]
fn whoever_dies_leaves_it_running() {
    if !privileged() {
        return;
    }
    for (name, python) in with_trampolines() {
        let directory = tempfile::tempdir().unwrap();
        for (who, signal) in [
            ("collector", Signal::KILL),
            ("collector", Signal::INT),
            ("collector", Signal::TERM),
            ("broker", Signal::KILL),
        ] {
            let mut adding = Adding::start(&mut like(&python), &["signals"]);
            let mut collector = sampling(adding.pid(), directory.path());
            adding.await_active(true);
            match who {
                "broker" => {
                    let [broker] = children(collector.id(), "sw-broker")[..] else { panic!() };
                    kill(broker, signal);
                }
                _ => kill(collector.id(), signal),
            }
            adding.await_active(false);
            adding.assert_well();
            let _ = collector.kill();
            collector.wait().unwrap();
            eprintln!("{name}: killed {who}");
        }
        // Who keeps it switched on is the broker's child: nobody switches it off then.
        let mut adding = Adding::start(&mut like(&python), &["signals"]);
        let mut collector = sampling(adding.pid(), directory.path());
        adding.await_active(true);
        let [broker] = children(collector.id(), "sw-broker")[..] else { panic!() };
        let [keeper] = children(broker, "sw-broker")[..] else { panic!() };
        kill(keeper, Signal::KILL);
        kill(collector.id(), Signal::INT);
        assert!(collector.wait().unwrap().success());
        adding.assert_well();
        assert!(adding.ask().is_active);
    }
}

#[test]
fn one_that_is_on_stays_on() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, mut python) in with_trampolines() {
        let mut adding = Adding::start(python.args(["-X", "perf"]), &[]);
        let pid = format!("--pid={}", adding.pid());
        let arguments = [&pid, "--inject-python", "--duration=200ms", "--capture=x.stackwire"];
        recorded(directory.path(), &arguments).succeeded();
        let report = report(&directory.path().join("x.stackwire"));
        assert!(report.contains("1  was on before and stays on"), "{name}:\n{report}");
        assert!(adding.ask().is_active, "{name}");
    }
}

/// Its line of Python is run when the main thread comes to it, and not at all when the capture has
/// ended by then.
#[test]
fn a_main_thread_that_waits_is_not_disturbed() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, mut python) in with_trampolines() {
        let waits = "import sys, os, threading\n\
            def spin():\n  while True: pass\n\
            threading.Thread(target=spin, daemon=True).start()\n\
            print('ready', flush=True)\nword = os.read(0, 1)\n\
            for _ in range(1000): pass\nprint(word, sys.is_stack_trampoline_active(), flush=True)";
        let mut running = Running::start(python.args(["-c", waits]).stdin(Stdio::piped()));
        let pid = format!("--pid={}", running.pid());
        let report = collected(&pid, "200ms", directory.path());
        assert!(report.contains("1  not on yet: the main thread sleeps"), "{name}:\n{report}");
        running.0.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        let mut said = String::new();
        running.0.stdout.as_mut().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said, "b'!' False\n", "{name}");
        assert!(running.0.wait().unwrap().success());
    }
}

/// One that sleeps when the capture ends goes on with it: 3.14 has forgotten what was asked, older
/// ones switch it off when they wake.
#[test]
fn one_that_sleeps_at_the_end_comes_to_no_harm() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, mut python) in with_trampolines() {
        let sleeps = "import sys, os, threading\n\
            def spin():\n  while True: pass\n\
            threading.Thread(target=spin, daemon=True).start()\n\
            print('ready', flush=True)\nwhile not sys.is_stack_trampoline_active(): pass\nword = os.read(0, 1)\n\
            for _ in range(1000): pass\nprint(word, flush=True)";
        let mut running = Running::start(
            python.args(["-c", sleeps]).stdin(Stdio::piped()).stderr(Stdio::piped()),
        );
        let pid = format!("--pid={}", running.pid());
        let report = collected(&pid, "500ms", directory.path());
        assert!(report.contains("1  switched on, and still on at the end"), "{name}:\n{report}");
        running.0.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        let [mut said, mut errors] = [String::new(), String::new()];
        running.0.stdout.as_mut().unwrap().read_to_string(&mut said).unwrap();
        running.0.stderr.as_mut().unwrap().read_to_string(&mut errors).unwrap();
        assert_eq!((said.as_str(), errors.as_str()), ("b'!'\n", ""), "{name}");
        assert!(running.0.wait().unwrap().success());
    }
}

/// A child that is forked meanwhile has it on as well, and goes off as well when it is sampled.
#[test]
fn children_that_are_forked_meanwhile_go_off_as_well() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, mut python) in with_trampolines() {
        let forks = "import os, sys, time\nprint('ready', flush=True)\n\
            while not sys.is_stack_trampoline_active(): pass\n\
            child = os.fork()\nended = time.monotonic() + 6\n\
            while time.monotonic() < ended: sum(range(1000))\n\
            if child: os.waitpid(child, 0)\n\
            print('child'[bool(child):], sys.is_stack_trampoline_active(), flush=True)";
        let mut running = Running::start(python.args(["-c", forks]));
        let pid = format!("--pid={}", running.pid());
        let arguments =
            [&pid, "--follow", "--inject-python", "--duration=4s", "--capture=x.stackwire"];
        recorded(directory.path(), &arguments).succeeded();
        let mut said = String::new();
        running.0.stdout.as_mut().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said, "child False\nhild False\n", "{name}");
    }
}

/// Each moment of its start and its end is one at which it is not harmed.
#[test]
fn processes_that_begin_and_end_are_not_harmed() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, python) in with_trampolines() {
        for round in 0..20u64 {
            let mut child = like(&python).args(["-c", "sum(range(300000))"]).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(round * 4));
            let mut command = collector();
            command.args(["--source=perf", "--unwind=fp", "--duration=1ms", "--inject-python"]);
            command.arg(format!("--pid={}", child.id()));
            // It may have ended before.
            Ran::of(command.arg("-o").arg(directory.path().join("x.stackwire")));
            let status = child.wait().unwrap();
            assert!(status.success(), "{name}, {round}: {status}");
        }
    }
}

/// Its files are others by now than those it runs.
#[test]
fn one_whose_interpreter_was_replaced_is_left_alone() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let Some(found) = of_debian("trixie", "python3.13") else { return };
    // Linked into one file, whatever the host's is.
    let root = Path::new(found.get_program()).parent().unwrap();
    let own = directory.path().join("python3.13");
    std::fs::copy(root.join("usr/bin/python3.13"), &own).unwrap();
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let mut python = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    python.arg("--library-path").arg(&libraries).arg(&own).env("PYTHONHOME", root.join("usr"));
    let mut adding = Adding::start(&mut python, &[]);
    std::fs::remove_file(&own).unwrap();
    let mut other = std::fs::read(root.join("usr/bin/python3.13")).unwrap();
    let at = place_of(&other, "Py_AddPendingCall");
    other[at] ^= 0xff;
    std::fs::write(&own, other).unwrap();
    let public = public_binaries(false);
    let pid = format!("--pid={}", adding.pid());
    // Without CAP_CHECKPOINT_RESTORE files are opened by their paths.
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-checkpoint_restore", "--inh-caps=-checkpoint_restore"]);
    command.arg(public.path().join("stackwire-collector"));
    command.args([&pid, "--inject-python", "--duration=100ms", "-o"]);
    let ran = Ran::of(command.arg(directory.path().join("x.stackwire")));
    ran.failed(1, "its files were replaced");
    adding.assert_well();
}

/// Where a function is in an ELF file.
fn place_of(file: &[u8], function: &str) -> usize {
    use object::{Object, ObjectSegment, ObjectSymbol};
    let elf = object::File::parse(file).unwrap();
    let symbol = elf.dynamic_symbols().find(|it| it.name() == Ok(function)).unwrap();
    let inside = |segment: &object::Segment<'_, '_>| {
        let range = segment.address()..segment.address() + segment.size();
        range.contains(&symbol.address())
    };
    let segment = elf.segments().find(inside).unwrap();
    (symbol.address() - segment.address() + segment.file_range().0) as usize
}

/// One that may not open its own memory, as a daemon that has changed its user, is not switched on.
#[test]
fn one_that_cannot_answer_is_not_switched_on() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, mut python) in with_trampolines() {
        let changes = "import os, sys\nos.setuid(65534)\nprint('ready', flush=True)\n\
            while True:\n  for _ in range(1000000): pass\n\
            \x20 print(sys.is_stack_trampoline_active(), flush=True)";
        let mut running = Running::start(python.args(["-c", changes]));
        let pid = format!("--pid={}", running.pid());
        let arguments = [&pid, "--inject-python", "--duration=500ms", "--capture=x.stackwire"];
        recorded(directory.path(), &arguments).succeeded();
        let report = report(&directory.path().join("x.stackwire"));
        assert!(report.contains("1  not on yet:"), "{name}:\n{report}");
        running.0.kill().unwrap();
        let mut said = String::new();
        running.0.stdout.as_mut().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("False") && !said.contains("True"), "{name}: {said}");
    }
}

/// In a pid namespace with a `/proc` and a `/tmp` of its own, as containers have it.
#[test]
fn functions_in_a_container_have_names() {
    if !privileged() {
        return;
    }
    for (name, python) in with_trampolines() {
        let mut inside = Command::new("unshare");
        inside.args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
        inside.args(["sh", "-c", "mount -t tmpfs tmp /tmp && exec \"$@\"", "sh"]);
        inside.arg(python.get_program()).args(python.get_args());
        for (variable, value) in python.get_envs() {
            inside.env(variable, value.unwrap_or_default());
        }
        let mut adding = Adding::start(&mut inside, &[]);
        let profile = record(only_child(adding.pid()), 1, &["--inject-python"]);
        let share = share_through_step(&profile);
        assert!(share > 20.0, "{name}: {share} %");
        assert!(!adding.ask().is_active, "{name}");
    }
}

fn only_child(of: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap();
    children.trim().parse().unwrap()
}

/// Each with its sentence, and nothing touched.
#[test]
fn what_cannot_be_asked_says_why() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let ask = |pid: u32| {
        let pid = format!("--pid={pid}");
        recorded(directory.path(), &[&pid, "--inject-python", "--duration=100ms"])
    };
    let sleep = Running::start(Command::new("sh").args(["-c", "echo ready; exec sleep 60"]));
    ask(sleep.pid()).failed(1, "runs no Python that could name its functions");

    let old = pythons().into_iter().find(|(name, _)| name.starts_with("python 3.11"));
    let (_, mut old) = old.unwrap();
    let old = Running::start(old.args(["-c", "print('ready', flush=True)\nwhile True: pass"]));
    ask(old.pid()).failed(1, "Python before 3.12 has no perf trampoline");

    for (name, mut python) in with_trampolines() {
        let mut adding = Adding::start(&mut python, &[]);
        if !name.contains("sid") {
            kill(adding.pid(), Signal::STOP);
            ask(adding.pid()).failed(1, "it is stopped; let it go on with kill -CONT");
            let state = std::fs::read_to_string(format!("/proc/{}/stat", adding.pid())).unwrap();
            assert!(state.contains(") T "), "{state}");
            kill(adding.pid(), Signal::CONT);
            let tracer = build::tracer();
            let tracing = Running::start(Command::new(tracer).arg(adding.pid().to_string()));
            ask(adding.pid()).failed(1, "a debugger or strace traces it");
            drop(tracing);
        }
        adding.assert_well();
        assert!(!adding.ask().is_active);
    }
}

/// Processes that were not chosen one by one cost the capture nothing, those that start later among
/// them.
#[test]
fn of_all_processes_the_report_counts_what_came_of_it() {
    if !privileged() {
        return;
    }
    // It switches on those of other tests as well.
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let mut new = with_trampolines();
    let mut early = Adding::start(&mut new[0].1, &[]);
    let old = pythons().into_iter().find(|(name, _)| name.starts_with("python 3.11"));
    let (_, mut old) = old.unwrap();
    let _old = Running::start(old.args(["-c", "print('ready', flush=True)\nwhile True: pass"]));
    let mut command = Command::new(binary("stackwire"));
    command.args(["record", "-a", "--inject-python", "--duration=5s", "--capture=x.stackwire"]);
    let recording = command.current_dir(directory.path()).stderr(Stdio::null()).spawn();
    let mut recording = recording.unwrap();
    early.await_active(true);
    let mut late = Adding::start(&mut new[1].1, &[]);
    late.await_active(true);
    assert!(recording.wait().unwrap().success());
    assert!(!early.ask().is_active && !late.ask().is_active);
    let report = report(&directory.path().join("x.stackwire"));
    assert!(report.contains("2  switched on, and off again at the end"), "{report}");
    assert!(report.contains("1  Python before 3.12 has no perf trampoline"), "{report}");
}

#[test]
fn a_command_has_names_from_its_start() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (name, python) = with_trampolines().remove(0);
    let program = python.get_program().to_str().unwrap();
    let brief = "def busy():\n  return sum(i * i for i in range(3000000))\nbusy()";
    let arguments =
        ["--inject-python", "-F", "997", "--folded=x.folded", "--", program, "-c", brief];
    recorded(directory.path(), &arguments).succeeded();
    let folded = std::fs::read_to_string(directory.path().join("x.folded")).unwrap();
    assert!(folded.contains("py::busy:<string>"), "{name}:\n{folded}");
}
