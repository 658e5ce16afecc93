//! Sampling through perf events alone: by a user without any capability, and beside eBPF.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::build::{
    attack, handlers, inlined_cc_release, inlined_rs_release, spread, unwind_corpus,
};
use crate::support::nobody::{NOBODY, public_binaries};
use crate::support::pprof::Sample;
use crate::support::whole::ended;
use crate::support::{Pprof, Ran, Running, binary, can, privileged, recorded, report, stackwire};

/// A user without capabilities, and a directory of theirs with the binaries in it.
struct Nobody {
    binaries: tempfile::TempDir,
    directory: tempfile::TempDir,
}

impl Nobody {
    fn new() -> Self {
        let directory =
            tempfile::Builder::new().prefix("stackwire-nobody-").tempdir_in("/tmp").unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777)).unwrap();
        Self { binaries: public_binaries(None), directory }
    }

    /// Runs something as that user, there.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command.args(NOBODY).args(["--bounding-set=-all", "--inh-caps=-all"]);
        command.arg(program).current_dir(self.directory.path());
        command.env("HOME", self.directory.path());
        for name in ["TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "CACHE_DIRECTORY"] {
            command.env_remove(name);
        }
        command
    }

    fn record(&self, arguments: &[&str]) -> Ran {
        let mut command = self.command(&self.binaries.path().join("stackwire"));
        command.args(["record", "--profile", "--profile-output=x.pb.gz"]);
        Ran::of(command.args(arguments))
    }

    fn profile(&self) -> Pprof {
        Pprof::read(&self.directory.path().join("x.pb.gz"))
    }

    /// A copy of a program that everybody may read.
    fn copy(&self, program: &Path) -> PathBuf {
        let copy = self.directory.path().join(program.file_name().unwrap());
        std::fs::copy(program, &copy).unwrap();
        copy
    }
}

/// The share of stacks that are whole, from what `record` says in the end.
#[track_caller]
fn whole(said: &str) -> f64 {
    let before = said.split(" % of stacks whole").next().unwrap();
    let number = before.rsplit([' ', ',']).next().unwrap();
    number.parse().unwrap_or_else(|_| panic!("no share of whole stacks in: {said}"))
}

const PYTHON: &str = "
def leaf(n):
    x = 0
    for i in range(n): x += i * i
    return x
def caller(n): return [leaf(n) for _ in range(3)]
while True: caller(20000)
";

/// Functions of user mode, leaf first.
fn stack<'a>(profile: &'a Pprof, sample: &'a Sample) -> Vec<&'a str> {
    let user = sample.locations.iter().filter(|id| profile.file_of(**id) != "[kernel]");
    let lines = user.flat_map(|id| &profile.locations[id].lines);
    lines.map(|(function, ..)| function.as_str()).collect()
}

/// Leaf functions with their shares, in percent, kernel frames apart.
fn shares(profile: &Pprof) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for sample in &profile.samples {
        let leaf = stack(profile, sample).first().map_or("", |leaf| leaf);
        *found.entry(leaf.to_owned()).or_default() += sample.count as f64;
    }
    let all: f64 = found.values().sum();
    found.values_mut().for_each(|count| *count *= 100.0 / all);
    found
}

/// Stacks by the address of their leaf in its file.
fn by_leaf(profile: &Pprof) -> BTreeMap<(String, u64), Vec<Vec<&str>>> {
    let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for sample in &profile.samples {
        let Some(leaf) = sample.locations.first() else { continue };
        let location = &profile.locations[leaf];
        let Some(mapping) = profile.mappings.get(&location.mapping) else { continue };
        if mapping.file == "[kernel]" {
            continue;
        }
        let offset = location.address - mapping.start + mapping.offset;
        found.entry((mapping.file.clone(), offset)).or_default().push(stack(profile, sample));
    }
    found
}

/// A Python, a Rust and a C++ release build, a C program without frame pointers: no capability
/// anywhere, and the profile is that of eBPF.
#[test]
fn nobody_profiles_without_a_capability_what_ebpf_sees() {
    if !privileged() {
        return;
    }
    let nobody = Nobody::new();
    let mut programs: Vec<(&str, Vec<String>)> = vec![("python", Vec::new())];
    programs[0].1 = ["/usr/bin/python3", "-c", PYTHON].map(str::to_owned).into();
    let released = [inlined_rs_release(), inlined_cc_release(), unwind_corpus()[0].1.as_path()];
    for program in released {
        let copy = nobody.copy(program).to_str().unwrap().to_owned();
        programs
            .push((program.file_name().unwrap().to_str().unwrap(), vec![copy, "60".to_owned()]));
    }
    for (name, command) in programs {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let running = nobody.command(Path::new(command[0])).args(&command[1..]).spawn();
        let running = Running(running.unwrap());
        let pid = format!("--pid={}", running.pid());
        // At the same time: a program may do more of one thing now and of another later.
        let directory = tempfile::tempdir().unwrap();
        let (perf, ebpf) = std::thread::scope(|scope| {
            let ebpf = scope.spawn(|| {
                let options = ["--profile", "--sample-rate=997", "--duration=6s", "--source=bpf"];
                let output = ["--profile-output=x.pb.gz", &pid];
                recorded(directory.path(), &[&options[..], &output].concat()).succeeded()
            });
            let perf = nobody.record(&[&pid, "--duration=6s", "--sample-rate=997"]).succeeded();
            (perf, ebpf.join().unwrap())
        });
        let says = "note: sampled through perf events, not with eBPF: the collector has no CAP_BPF";
        assert!(perf.stderr.contains(says), "{}", perf.stderr);
        assert!(perf.stderr.contains("note: time in the kernel is not sampled"), "{}", perf.stderr);
        assert!(whole(&perf.stderr) >= 99.0, "{name}: {}", perf.stderr);
        assert!(!ebpf.stderr.contains("note: sampled"), "{}", ebpf.stderr);
        // Functions of Python take eBPF: what runs them is compared.
        let native = directory.path().join("native.pb.gz");
        let capture = directory.path().join("x.stackwire");
        let options = ["--native-only", "-o"].map(OsStr::new);
        let arguments = [&["resolve".as_ref(), capture.as_os_str()], &options[..]].concat();
        stackwire(arguments.into_iter().chain([native.as_os_str()])).succeeded();
        let (perf, ebpf) = (nobody.profile(), Pprof::read(&native));
        let (theirs, ours) = (shares(&ebpf), shares(&perf));
        for (function, share) in theirs.iter().filter(|(_, share)| **share >= 1.0) {
            let found = ours.get(function).copied().unwrap_or(0.0);
            // Both are samples.
            let deviation = (2.0 * share * (100.0 - share) / ebpf.count() as f64).sqrt();
            let allowed = f64::max(2.0, 4.0 * deviation);
            assert!(
                (found - share).abs() <= allowed,
                "{name}: {function} has {found:.1} %, with eBPF {share:.1} %"
            );
        }
        let (theirs, ours) = (by_leaf(&ebpf), by_leaf(&perf));
        let both: Vec<_> = ours.iter().filter_map(|(at, it)| Some((it, theirs.get(at)?))).collect();
        let same = |(ours, theirs): &&(&Vec<Vec<&str>>, &Vec<Vec<&str>>)| {
            ours.iter().any(|stack| theirs.contains(stack))
        };
        let equal = both.iter().filter(same).count();
        eprintln!("{name}: {equal} of {} leaf addresses have equal stacks", both.len());
        assert!(both.len() >= 5 && equal * 100 >= both.len() * 99, "{name}");
    }
}

/// Nanoseconds between two samples at 997 Hz.
const PERIOD_NS: u64 = 1_003_009;

/// Nanoseconds that were sampled, and how many samples were lost, from what `record` says.
fn taken(profile: &Pprof, said: &str) -> (u64, u64) {
    let lost = said.split(" lost").next().unwrap().rsplit(' ').next().unwrap();
    (profile.samples.iter().map(|sample| sample.values[1]).sum(), lost.parse().unwrap())
}

/// Threads and children that come while events are opened, and after that, each sampled once.
#[test]
fn threads_and_children_are_sampled_once() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let options = ["--profile", "--source=perf", "--sample-rate=997", "--profile-output=x.pb.gz"];
    // Sampled and lost, beside the CPU time there was: at least, at most.
    let judge = |profile: &Pprof, said: &str, least: u64, most: u64| {
        let (sampled, lost) = taken(profile, said);
        let found = (sampled + lost * PERIOD_NS) as f64;
        let (least, most) = (least as f64, most as f64);
        eprintln!("{:.3} of {:.3} to {:.3} s, {lost} lost", found / 1e9, least / 1e9, most / 1e9);
        // A hundred threads and processes want two CPUs, the collector among them.
        assert!(lost * 5 < profile.count(), "{said}");
        assert!(found > least * 0.97 && found < most * 1.03, "{said}");
    };
    let record = |more: &[&str]| {
        let ran = recorded(directory.path(), &[&options[..], more].concat()).succeeded();
        (ran, Pprof::read(&directory.path().join("x.pb.gz")))
    };
    let (ran, profile) = record(&["--", spread().to_str().unwrap(), "60", "40", "50"]);
    let spent = ran.stdout.lines().find_map(|line| line.parse().ok()).unwrap();
    judge(&profile, &ran.stderr, spent, spent);

    // Attached to while it starts threads: what it did before all events were open need not be
    // there.
    let log = directory.path().join("log");
    let mut program = Command::new(spread());
    program.args(["60", "40", "100", "0"]).arg(&log).stdout(Stdio::piped());
    let mut running = Running::start(&mut program);
    let pid = format!("--pid={}", running.pid());
    let (ran, profile) = record(&[&pid, "--follow", "--duration=60s"]);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut running.0.stdout.take().unwrap(), &mut said).unwrap();
    let spent: u64 = said.trim().parse().unwrap();
    let log = std::fs::read_to_string(log).unwrap();
    let lines = log.lines().map(|line| line.split_once(' ').unwrap());
    let before = lines
        .filter(|(time, _)| time.parse::<i64>().unwrap() < profile.start)
        .map(|(_, spent)| spent.parse::<u64>().unwrap())
        .max();
    let before = before.unwrap_or(0);
    assert!(before < spent / 2, "attached too late: after {before} of {spent} ns");
    judge(&profile, &ran.stderr, spent - before, spent);
}

/// Copies grow until stacks fit; one that may not grow says what it cuts.
#[test]
fn deep_stacks_are_copied_whole_and_cut_ones_say_so() {
    if !privileged() {
        return;
    }
    let nobody = Nobody::new();
    let program = nobody.copy(spread());
    let rate = "--sample-rate=199";
    let command = [rate, "--", program.to_str().unwrap(), "2", "0", "3000", "500"];
    let deepest = |profile: &Pprof| {
        let below = |sample: &Sample| {
            stack(profile, sample).into_iter().filter(|function| *function == "below").count()
        };
        profile.samples.iter().map(below).max().unwrap_or(0)
    };
    let ran = nobody.record(&[&["--stack-bytes=64512"], &command[..]].concat()).succeeded();
    assert!(whole(&ran.stderr) >= 99.0, "{}", ran.stderr);
    assert_eq!(deepest(&nobody.profile()), 500);
    // From 8 KiB on, within half a second.
    let ran = nobody.record(&command).succeeded();
    assert!(whole(&ran.stderr) >= 80.0, "{}", ran.stderr);
    assert_eq!(deepest(&nobody.profile()), 500);
    let ran =
        nobody.record(&[&["--stack-bytes=8192", "--capture=x.stackwire"], &command[..]].concat());
    let ran = ran.succeeded();
    assert!(whole(&ran.stderr) <= 2.0, "{}", ran.stderr);
    assert!(ran.stderr.contains("--stack-bytes 64512"), "{}", ran.stderr);
    assert!(deepest(&nobody.profile()) < 150);
    let text = report(&nobody.directory.path().join("x.stackwire"));
    assert!(text.contains("deeper than the copy of the stack"), "{text}");
}

/// A signal handler has a stack of its own: what it interrupted is not in the copy.
#[test]
fn stacks_that_are_not_copied_say_so() {
    if !privileged() {
        return;
    }
    let nobody = Nobody::new();
    // Far from the other stack, and right below it.
    for program in [&unwind_corpus()[0].1, handlers()] {
        let running = Running::start(&mut nobody.command(&nobody.copy(program)));
        let pid = format!("--pid={}", running.pid());
        let options = [&pid, "--duration=6s", "--sample-rate=499", "--capture=x.stackwire"];
        nobody.record(&options).succeeded();
        let profile = nobody.profile();
        let handled = |sample: &&Sample| stack(&profile, sample).contains(&"handler");
        let count: u64 = profile.samples.iter().filter(handled).map(|sample| sample.count).sum();
        let share = 100.0 * count as f64 / profile.count() as f64;
        assert!(share > 2.0, "{share}");
        let report = report(&nobody.directory.path().join("x.stackwire"));
        let says = ended(&report, "next frame in memory that was not copied");
        assert!((says - share).abs() < 0.5, "{share} % interrupted\n{report}");
    }
}

/// With the rights to do so, the kernel's part is there, and all processes can be sampled.
#[test]
fn with_rights_the_kernel_and_all_processes_are_sampled() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut reading = Command::new("dd");
    reading.args(["if=/dev/zero", "of=/dev/null", "bs=64"]).stderr(Stdio::null());
    let reading = Running(reading.spawn().unwrap());
    let options = ["--profile", "--source=perf", "--duration=2s", "--profile-output=x.pb.gz"];
    for scope in ["--all".to_owned(), format!("--pid={}", reading.pid())] {
        let ran = recorded(directory.path(), &[&options[..], &[&scope]].concat()).succeeded();
        assert!(!ran.stderr.contains("note:"), "{}", ran.stderr);
        let profile = Pprof::read(&directory.path().join("x.pb.gz"));
        let of_dd = profile.samples.iter().filter(|sample| sample.labels["comm"] == "dd");
        let kernel = of_dd
            .clone()
            .filter(|sample| sample.locations.iter().any(|id| profile.file_of(*id) == "[kernel]"));
        let (of_dd, kernel) = (of_dd.count(), kernel.count());
        assert!(of_dd > 0 && kernel * 2 > of_dd, "{kernel} of {of_dd} stacks have kernel frames");
        let named = |sample: &Sample| {
            let functions = profile.functions(sample);
            functions.iter().any(|function| function.contains("read") || function.contains("write"))
        };
        assert!(profile.samples.iter().any(named));
        assert!(profile.samples.iter().all(|sample| !sample.labels["thread"].is_empty()));
    }
}

/// Its main thread has ended, and takes no events.
#[test]
fn nobody_profiles_a_process_whose_main_thread_has_ended() {
    if !privileged() {
        return;
    }
    let nobody = Nobody::new();
    let mut leader = nobody.command(&nobody.copy(&attack("leader")));
    let leader = Running(leader.stdout(Stdio::null()).spawn().unwrap());
    std::thread::sleep(Duration::from_millis(500));
    let pid = format!("--pid={}", leader.pid());
    // Where the kernel walks by frame pointers, nobody says why a stack ends.
    let ran = nobody.record(&[&pid, "--duration=1s", "--unwind=fp"]).succeeded();
    assert!(!ran.stderr.contains("does not know"), "{}", ran.stderr);
    let profile = nobody.profile();
    let taken: u64 = profile.samples.iter().map(|sample| sample.count).sum();
    assert!(taken > 50, "{taken} samples of a thread that runs for a second");
}

/// What cannot be sampled without capabilities says so.
#[test]
fn what_nobody_may_not_sample() {
    if !can("root, to become nobody", rustix::process::geteuid().is_root()) {
        return;
    }
    let nobody = Nobody::new();
    let root = Running(Command::new("sleep").arg("30").spawn().unwrap());
    let pid = format!("--pid={}", root.pid());
    nobody.record(&[&pid, "--duration=1s"]).failed(1, "it is of another user");
    nobody.record(&["--all", "--duration=1s"]).failed(1, "give the collector CAP_BPF");
    let own = Running(nobody.command(Path::new("sleep")).arg("30").spawn().unwrap());
    let pid = format!("--pid={}", own.pid());
    nobody.record(&[&pid, "--duration=1s", "--source=bpf"]).failed(1, "give the collector CAP_BPF");
    nobody.record(&[&pid, "--duration=1s", "--stack-bytes=100"]).failed(2, "multiples of 8");
    let mut offcpu = nobody.command(&nobody.binaries.path().join("stackwire"));
    offcpu.args(["record", "--offcpu", "--source=perf", "--duration=1s", &pid]);
    Ran::of(&mut offcpu).failed(2, "with eBPF alone");
    // As root it would not be there either.
    let mut cycles = nobody.command(&nobody.binaries.path().join("stackwire"));
    cycles.args(["stat", "--event=cycles", "--", "true"]);
    if Ran::of(&mut cycles).stderr.contains("<not supported>") {
        let said = "this machine has no counter for it";
        nobody.record(&[&pid, "--duration=1s", "--event=cycles"]).failed(1, said);
    }
    // The kernel gives no events of it.
    let unreadable = nobody.copy(spread());
    std::fs::set_permissions(&unreadable, PermissionsExt::from_mode(0o711)).unwrap();
    let unreadable = unreadable.display().to_string();
    let said = "that it may not read";
    nobody.record(&["--", &unreadable, "1", "0", "300"]).failed(0, said);
    std::fs::remove_file(&unreadable).unwrap();
    // An event for each thread on each CPU.
    let mut many = nobody.command(&nobody.copy(spread()));
    let many = Running::start(many.args(["100", "0", "3000"]));
    std::thread::sleep(std::time::Duration::from_secs(2));
    let mut limited = nobody.command(Path::new("prlimit"));
    limited.arg("--nofile=64").arg(nobody.binaries.path().join("stackwire"));
    limited.args(["record", "--profile", "--profile-output=x.pb.gz", "--duration=1s"]);
    Ran::of(limited.arg(format!("--pid={}", many.pid()))).failed(1, "raise `ulimit -n`");
    drop(many);
    // No memory may be locked: what perf allows each user is enough.
    let mut unlocked = nobody.command(Path::new("prlimit"));
    unlocked.arg("--memlock=0").arg(nobody.binaries.path().join("stackwire"));
    unlocked.args(["record", "--profile", "--profile-output=y.pb.gz", "--"]);
    unlocked.arg(nobody.copy(spread())).args(["1", "0", "300"]);
    Ran::of(&mut unlocked).succeeded();
}

/// A collector that does not come to read loses samples, and each is counted.
#[test]
fn a_full_ring_is_counted() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let capture = directory.path().join("x.stackwire");
    let busy = Running::start(Command::new(unwind_corpus()[0].1.as_path()).stdout(Stdio::piped()));
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["--source=perf", "--sample-rate=997", "--stack-bytes=32768", "--duration=4s"]);
    collector.arg(format!("--pid={}", busy.pid())).arg("--output").arg(&capture);
    let mut collector = collector.spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let pid = rustix::process::Pid::from_child(&collector);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert!(collector.wait().unwrap().success());
    let text = report(&capture);
    assert!(text.contains("samples: ring buffer full"), "{text}");
    assert!(!text.contains("unaccounted"), "{text}");
}

/// The kernel tells a ring of what it had no room for when the next record fits. Of what is lost
/// last it tells the event alone.
#[test]
fn what_is_lost_last_is_counted() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut record = Command::new(binary("stackwire"));
    record.args(["record", "--profile", "--source=perf", "--sample-rate=997"]);
    record.args(["--profile-output=x.pb.gz", "--"]).arg(spread()).args(["1", "0", "2000"]);
    record.current_dir(directory.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let recording = record.spawn().unwrap();
    // The name of a process has 15 bytes.
    let collector = child_of(recording.id(), "stackwire-colle");
    child_of(recording.id(), "spread");
    std::thread::sleep(Duration::from_millis(500));
    rustix::process::kill_process(collector, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    rustix::process::kill_process(collector, rustix::process::Signal::CONT).unwrap();
    let ran = recording.wait_with_output().unwrap();
    let (stdout, stderr) =
        (String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap());
    let spent: u64 = stdout.lines().find_map(|line| line.parse().ok()).unwrap();
    let (sampled, lost) = taken(&Pprof::read(&directory.path().join("x.pb.gz")), &stderr);
    assert!(lost > 1000, "{stderr}");
    let share = (sampled + lost * PERIOD_NS) as f64 / spent as f64;
    assert!(share > 0.97 && share < 1.03, "{share}: {stderr}");
}

/// Waits for a child of a process.
#[track_caller]
fn child_of(pid: u32, name: &str) -> rustix::process::Pid {
    let mut look = Command::new("pgrep");
    look.args(["-x", name, "-P"]).arg(pid.to_string());
    for _ in 0..1000 {
        if let Ok(found) = Ran::of(&mut look).stdout.trim().parse() {
            return rustix::process::Pid::from_raw(found).unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{pid} has no child {name}");
}
