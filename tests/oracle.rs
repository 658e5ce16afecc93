//! The walker against another unwinder: the lines the kernel side runs, compiled for user space, on
//! stopped threads of real programs, frame by frame against call frame information interpreted by
//! gimli; and against `eu-stack`.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use stackwire::profile::FileOffset;
use stackwire_collector_ebpf::UserEnd;
use stackwire_collector_ebpf::arch::{SignalFrame, follows_call};
use stackwire_collector_ebpf::unwind::{self, Cursor, GO_ON};
use stackwire_collector_ebpf::{Memory, Rule, cfa};

use crate::support::build;
use crate::support::calls::{Frame, Functions};
use crate::support::gimli_walk::{DEPTH, Modules, RIP, Walked, theirs};
use crate::support::go::releases;
use crate::support::interpreters::{javas, pythons};
use crate::support::stopped::Stopped;
use crate::support::{Running, can};

impl Memory for &Stopped {
    fn word(&mut self, address: u64) -> Option<u64> {
        Stopped::word(self, address)
    }

    fn words<const N: usize>(&mut self, address: u64, to: &mut [u64; N]) -> bool {
        let Some(bytes) = self.read(address, N * 8) else { return false };
        for (word, bytes) in to.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap());
        }
        true
    }
}

/// The walk of the kernel side.
fn ours(stopped: &Stopped, modules: &mut Modules) -> Walked {
    let (frames, end) = ours_with_kinds(stopped, modules);
    Walked { frames: frames.into_iter().map(|(ip, _)| ip).collect(), end }
}

/// The same, and which frames were interrupted.
fn ours_with_kinds(stopped: &Stopped, modules: &mut Modules) -> (Vec<Frame>, String) {
    let mut cursor =
        Cursor { ip: stopped.registers[RIP], known: 0xffff, exact: 1, ..Cursor::default() };
    cursor.registers.copy_from_slice(&stopped.registers[..16]);
    cursor.thread = stopped.thread;
    let mut signal = SignalFrame::default();
    let mut frames = vec![(cursor.ip, true)];
    let mut memory = stopped;
    let end = loop {
        if frames.len() == DEPTH {
            break "too deep".to_owned();
        }
        let ip = cursor.lookup_ip();
        let Some(mapping) = stopped.mapping(ip) else { break "not code".to_owned() };
        let found = if mapping.path.as_os_str().is_empty() {
            Rule { cfa: cfa::FRAME_POINTER, ..Rule::default() }
        } else {
            let offset = ip - mapping.start + mapping.offset;
            let table = modules.of(stopped, mapping).table.as_ref();
            let Some(table) = table else { break "no table".to_owned() };
            match table.rule(FileOffset(offset)) {
                Some(rule) => *rule,
                None if cursor.exact == 0 && !follows_call(&mut memory, cursor.ip, false) => {
                    cursor.exact = 1;
                    continue;
                }
                None => break format!("no rule for {offset:#x} of {}", mapping.path.display()),
            }
        };
        let in_file = !mapping.path.as_os_str().is_empty();
        if in_file && !unwind::may_be_called(&mut memory, &cursor, Some(&found)) {
            frames.pop();
            break "not called".to_owned();
        }
        let end = unwind::step(&mut memory, &mut signal, &mut cursor, &found);
        cursor.guessed <<= u64::from(!in_file);
        match end {
            GO_ON => frames.push((cursor.ip, cursor.exact != 0)),
            end if end == UserEnd::Root as u64 => break "root".to_owned(),
            end => break format!("end {end} in {}", mapping.path.display()),
        }
    };
    (frames, end)
}

/// Where the two may differ or both end early, and why: program, end of ours, end of theirs,
/// reason.
const EXPLAINED: &[(&str, &str, &str, &str)] = &[
    (
        "node",
        "",
        "no rule",
        "V8's builtins have no call frame information; they keep frame pointers (frames.h), which ours follows",
    ),
    (
        "go",
        "",
        "changes stacks",
        "call frame information cannot say how; ours follows to the goroutine's stack, or ends at the scheduler's root",
    ),
    (
        "go",
        "",
        "no rule",
        "C that Go's own linker has put in, without its call frame information: ours follows the instructions",
    ),
    (
        "unwind_static",
        "root",
        "no rule",
        "the linkage table of a static program has no call frame information; it jumps and nothing else",
    ),
    (
        "java",
        "",
        "no rule",
        "an interrupted frame of compiled Java: frame pointers, and no word of them anywhere",
    ),
    (
        "",
        "no rule",
        "no rule",
        "assembly without call frame information: where its caller's frame is, nothing says",
    ),
];

/// What comparing came to.
#[derive(Default)]
struct Tally {
    snapshots: u64,
    frames: u64,
    equal: u64,
    roots: u64,
    /// Frames of ours where the oracle knows nothing, and there is a reason.
    beyond: u64,
    unexplained: u64,
    /// What differed, with how often.
    others: BTreeMap<String, u64>,
}

impl Tally {
    fn compare(&mut self, name: &str, ours: &Walked, theirs: &Walked) {
        self.snapshots += 1;
        self.roots += u64::from(ours.end == "root");
        let equal = ours.frames.iter().zip(&theirs.frames).take_while(|(a, b)| a == b).count();
        let mut all = ours.frames.len().max(theirs.frames.len());
        let explained = EXPLAINED.iter().find(|(program, ends, others, _)| {
            name.starts_with(program) && ours.end.starts_with(ends) && theirs.end == *others
        });
        let why = match explained {
            Some((.., why)) if equal == theirs.frames.len() => {
                self.beyond += (all - equal) as u64;
                all = equal;
                why
            }
            _ => {
                self.unexplained += u64::from(equal < all || ours.end != "root");
                "not explained"
            }
        };
        self.frames += all as u64;
        self.equal += equal as u64;
        if equal < all || ours.end != "root" {
            let whether = if equal < all { "frames differ" } else { "equal frames" };
            let text =
                format!("{name}: {whether}, ours to {}, theirs to {}: {why}", ours.end, theirs.end);
            *self.others.entry(text).or_default() += 1;
        }
    }
}

fn compare(name: &str, pid: u32, count: u64, tally: &mut Tally, modules: &mut Modules) {
    stop_often(name, pid, count, |stopped| {
        let (ours, theirs) = (ours(stopped, modules), theirs(stopped, modules));
        tally.compare(name, &ours, &theirs);
    });
}

impl Tally {
    /// Frames that are equal, percent.
    fn share(&self) -> f64 {
        100.0 * self.equal as f64 / self.frames as f64
    }

    /// Says what it came to: how many stacks reached the root, percent.
    fn say(&self) -> f64 {
        for (what, count) in &self.others {
            eprintln!("{count:6} {what}");
        }
        let roots = 100.0 * self.roots as f64 / self.snapshots as f64;
        eprintln!(
            "{} snapshots, {} frames, {:.3} % equal, {} beyond what the oracle knows, {roots:.2} % to the root",
            self.snapshots,
            self.frames,
            self.share(),
            self.beyond
        );
        roots
    }
}

/// Stops threads of a program that run again and again, at moments that have nothing to do with
/// what they do.
fn stop_often(name: &str, pid: u32, count: u64, mut look: impl FnMut(&Stopped)) {
    let mut state = u64::from(pid) | 1;
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut taken = 0;
    while taken < count && Instant::now() < deadline {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_micros(state >> 40 & 0x3ff));
        let running = running_threads(pid);
        if running.is_empty() {
            continue;
        }
        let tid = running[(state >> 33) as usize % running.len()];
        let Some(stopped) = Stopped::stop(tid) else { continue };
        look(&stopped);
        taken += 1;
    }
    assert!(taken * 2 > count, "{name} could be stopped {taken} times of {count}");
}

/// Threads of a process that are on a CPU or want one.
fn running_threads(pid: u32) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let tids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    tids.filter(|tid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat"));
        stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" R")))
    })
    .collect()
}

const PYTHON: &str = "import hashlib, json, re, zlib\nprint('ready', flush=True)\n\
    def work():\n  data = json.dumps([{'k%d' % i: [i] * 9} for i in range(300)]).encode()\n  hashlib.sha512(data * 9).digest()\n\
    \x20 zlib.compress(data)\n  re.findall(rb'k(\\d+)', data)\n  sorted(data, key=lambda b: -b)\nwhile True: work()\n";

const NODE: &str = "console.log('ready');\n\
    function sorted(n) { return Array.from({length: n}, (_, i) => i * 7919 % 1000).sort((a, b) => a - b); }\n\
    function text() { return JSON.stringify(sorted(500).map(x => ({key: 'k' + x}))).replace(/k(\\d)/g, '$1'); }\n\
    for (;;) text();";

#[test]
fn ten_thousand_stacks_are_those_of_gimli() {
    if !can("root, to trace", rustix::process::geteuid().is_root()) {
        return;
    }
    let mut tally = Tally::default();
    let mut modules = Modules::default();
    let directory = tempfile::tempdir().unwrap();
    let mut take = |name: &str, command: &mut Command, count: u64| {
        let running = Running::start(command);
        compare(name, running.pid(), count, &mut tally, &mut modules);
    };
    let corpus = build::unwind_corpus();
    for (name, program) in corpus {
        take(name, &mut Command::new(program), 1_800);
    }
    take("unwind_asm", Command::new(&corpus[0].1).arg("asm"), 200);
    take("release_cc", Command::new(build::inlined_cc_release()).arg("100"), 500);
    take("release_rs", Command::new(build::inlined_rs_release()).arg("100"), 500);
    for (name, mut python) in pythons() {
        take(&name, python.args(["-c", PYTHON]), 300);
    }
    take("node", Command::new("node").current_dir(&directory).args(["-e", NODE]), 1_000);
    let speed = "echo ready; exec openssl speed -seconds 6 -bytes 1024 sha256 aes-256-cbc rsa2048 ecdhp256 >/dev/null 2>&1";
    take("openssl", Command::new("sh").args(["-c", speed]), 1_000);
    // The compilers and the garbage collector of the JVM: what it compiles is walked by frame
    // pointers.
    let java = directory.path().join("Busy.java");
    std::fs::write(&java, JAVA).unwrap();
    let arguments = ["-XX:+PreserveFramePointer", java.to_str().unwrap()];
    for java in javas() {
        take("java", Command::new(java).args(arguments), 700);
    }
    let roots = tally.say();
    // Of the 200 in assembly that says nothing none gets to the root.
    assert!(tally.snapshots >= 10_000 && tally.share() >= 99.9 && roots >= 98.0);
    assert!(tally.unexplained * 1000 <= tally.snapshots, "{} unexplained", tally.unexplained);
}

/// Every release of Go, and every way its programs are compiled. The walk is compared with gimli's
/// as far as gimli knows its way. Beyond that, where stacks are changed and C is called, it is
/// compared with the instructions that must have called.
#[test]
fn stacks_of_every_go_are_those_of_gimli_and_its_calls() {
    if !can("root, to trace", rustix::process::geteuid().is_root()) {
        return;
    }
    let mut tally = Tally::default();
    let (mut links, mut wrong) = (0, Vec::new());
    for release in releases() {
        let (mut modules, mut functions) = (Modules::default(), Functions::default());
        for (program, running) in release.whole() {
            let name = format!("go {program} of {}", release.name);
            stop_often(&name, running.pid(), 120, |stopped| {
                let (frames, end) = ours_with_kinds(stopped, &mut modules);
                links += frames.len() - 1;
                wrong.extend(
                    functions.impossible(stopped, &frames).map(|what| format!("{name}: {what}")),
                );
                let frames = frames.into_iter().map(|(ip, _)| ip).collect();
                tally.compare(&name, &Walked { frames, end }, &theirs(stopped, &mut modules));
            });
        }
    }
    let roots = tally.say();
    eprintln!("{links} calls looked at, {} of them impossible: {wrong:#?}", wrong.len());
    // Of a few snapshots gimli's walk ends in no code: the more of them the busier the machine is.
    assert!(tally.snapshots >= 6_000 && roots >= 99.5 && tally.share() >= 99.8);
    assert!(wrong.is_empty() && tally.unexplained * 1000 <= tally.snapshots);
}

const JAVA: &str = r#"
import java.util.*;
public class Busy {
    static int work(int n) {
        Map<String, Integer> map = new TreeMap<>();
        for (int i = 0; i < n; i++) map.put("k" + i * 7919 % 1000, i);
        return map.size();
    }
    public static void main(String[] arguments) {
        System.out.println("ready");
        System.out.flush();
        long sum = 0;
        while (true) sum += work(3000);
    }
}
"#;

/// Another unwinder yet, on stopped processes: `eu-stack` of elfutils.
#[test]
fn stacks_of_stopped_processes_are_those_of_eu_stack() {
    if !can("root, to trace", rustix::process::geteuid().is_root()) {
        return;
    }
    let mut modules = Modules::default();
    let (mut frames, mut equal) = (0, 0);
    let corpus = build::unwind_corpus().iter();
    let mut commands: Vec<(String, Command)> =
        corpus.map(|(name, path)| (name.to_string(), Command::new(path))).collect();
    for (name, mut python) in pythons() {
        python.args(["-c", PYTHON]);
        commands.push((name, python));
    }
    for (name, mut command) in commands {
        let running = Running::start(&mut command);
        let pid = rustix::process::Pid::from_raw(running.pid() as i32).unwrap();
        for number in 0..25u64 {
            std::thread::sleep(Duration::from_micros(number * 7919 % 5000));
            rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
            // On a busy machine it stops when its turn comes.
            let stat = format!("/proc/{}/stat", running.pid());
            while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (ours, code) = {
                let stopped = Stopped::stop(running.pid()).unwrap();
                (ours(&stopped, &mut modules), stopped.mappings.clone())
            };
            let output = Command::new("eu-stack")
                .args(["-1", "-n", "0", "-p", &running.pid().to_string()])
                .output()
                .unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let all_of_theirs: Vec<u64> = text
                .lines()
                .filter_map(|line| line.strip_prefix('#')?.split_once("0x"))
                .map(|(_, rest)| u64::from_str_radix(&rest[..16], 16).unwrap())
                .collect();
            // The procedure linkage table of a static program says nothing: there eu-stack guesses
            // by rbp, and goes on with data. Where it left the code, ours is compared up to there.
            let in_code = |address: &&u64| code.iter().any(|it| it.contains(**address));
            let theirs: Vec<u64> = all_of_theirs.iter().take_while(in_code).copied().collect();
            let same = ours.frames.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
            let left_code = theirs.len() < all_of_theirs.len();
            let all = if left_code { theirs.len() } else { ours.frames.len().max(theirs.len()) };
            if same < all {
                eprintln!("{name}: {same} of {all} are equal; ours: {}, theirs:\n{text}", ours.end);
            }
            (frames, equal) = (frames + all, equal + same);
        }
    }
    eprintln!("{equal} of {frames} frames equal");
    assert!(frames > 1000 && equal as f64 >= frames as f64 * 0.999);
}
