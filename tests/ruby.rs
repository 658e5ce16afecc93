//! Methods of Ruby, with no flag and no agent: in their places among the native frames, with their
//! lines; those of a process that lies cost its own frames alone.

use std::collections::BTreeMap;
use std::process::Command;

use crate::support::build::{self, source};
use crate::support::forged::assert_cost_themselves_alone;
use crate::support::interpreters::rubies;
use crate::support::pprof::Sample;
use crate::support::python::{like, place_of};
use crate::support::secret::{assert_no_secret, ruby_with_a_secret};
use crate::support::shares::is_about;
use crate::support::whole::ended;
use crate::support::{Pprof, Ran, Running, binary, privileged, record, report};

/// Frames in a file, leaf first: method and line.
fn in_file<'a>(profile: &'a Pprof, sample: &Sample, file: &str) -> Vec<(&'a str, u64)> {
    let lines = sample.locations.iter().flat_map(|id| &profile.locations[id].lines);
    let lines = lines.filter(|(_, path, _)| path == file);
    lines.map(|(method, _, line)| (method.as_str(), *line)).collect()
}

/// What `shares.rb` has on its stack while it burns time, and its part of the time. A fiber has a
/// stack of its own.
const SHARES: [(&[&str], f64); 7] = [
    (&["burn", "twice", "main", "<main>"], 6.0 / 24.0),
    (
        &[
            "burn",
            "recursive",
            "recursive",
            "recursive",
            "recursive",
            "recursive",
            "main",
            "<main>",
        ],
        3.0 / 24.0,
    ),
    (&["burn", "block in by_block", "by_block", "main", "<main>"], 3.0 / 24.0),
    (&["burn", "block in called_back", "called_back", "main", "<main>"], 3.0 / 24.0),
    (&["burn", "rescue in rescues", "rescues", "main", "<main>"], 3.0 / 24.0),
    (&["burn", "block in <class:Thing>", "main", "<main>"], 3.0 / 24.0),
    (&["burn", "block in main"], 3.0 / 24.0),
];

#[test]
fn methods_and_lines_have_their_shares_and_no_false_caller() {
    if !privileged() {
        return;
    }
    let program = source("shares.rb");
    let text = std::fs::read_to_string(&program).unwrap();
    let line_of = |wanted: &str| 1 + text.lines().position(|line| line.trim() == wanted).unwrap();
    let [first, second] = ["burn(0.004)", "burn(0.002)"].map(|it| line_of(it) as u64);
    for (name, ruby) in rubies() {
        let running = Running::start(like(&ruby).arg(&program));
        let profile = record(running.pid(), 4, &[]);
        let file = program.to_str().unwrap();
        let mut counts = BTreeMap::new();
        let (mut lines, mut without, mut total) = (BTreeMap::new(), 0, 0);
        for sample in &profile.samples {
            let frames = in_file(&profile, sample, file);
            let methods: Vec<&str> = frames.iter().map(|(method, _)| *method).collect();
            total += sample.count;
            if methods.is_empty() {
                without += sample.count;
                continue;
            }
            // What burns time asks for the time.
            let called = methods.strip_prefix(&["used"]).unwrap_or(&methods);
            // On its way there or back.
            let is_known = SHARES.iter().any(|(all, _)| all.ends_with(called));
            assert!(is_known, "{name}: {methods:?}");
            if called == SHARES[0].0 {
                *lines.entry(frames[frames.len() - 3].1).or_insert(0) += sample.count;
            }
            *counts.entry(called.to_vec()).or_insert(0) += sample.count;
        }
        eprintln!("{name}: {total} samples, {without} without its methods, {counts:?}, {lines:?}");
        assert!(total > 300 && without * 100 <= total * 2, "{name}: {without} of {total}");
        for (methods, share) in SHARES {
            is_about(&name, methods, counts[methods], total, share);
        }
        let of_lines = [first, second].map(|line| lines[&line]);
        assert_eq!(lines.len(), 2, "{name}: {lines:?}");
        is_about(&name, &["line"], of_lines[0], of_lines[0] + of_lines[1], 2.0 / 3.0);
    }
}

#[test]
fn frames_are_those_that_ruby_knows() {
    if !privileged() {
        return;
    }
    let directory = tempfile::Builder::new().prefix("frames").tempdir_in("/var/tmp").unwrap();
    for (name, ruby) in rubies() {
        let said = directory.path().join("frames");
        let program = source("backtraces.rb");
        let running = Running::start(like(&ruby).arg(&program).arg(&said));
        let profile = record(running.pid(), 2, &[]);
        drop(running);
        let text = std::fs::read_to_string(&said).unwrap();
        let mut threads: BTreeMap<&str, Vec<(&str, &str, u64)>> = BTreeMap::new();
        let mut thread = "";
        for line in text.lines() {
            match line.split('\t').collect::<Vec<_>>()[..] {
                [method, file, line] => {
                    let frame = (method, file, line.parse().unwrap());
                    threads.entry(thread).or_default().push(frame);
                }
                _ => thread = line,
            }
        }
        assert_eq!(threads.len(), 3, "{text}");
        let mut equal = BTreeMap::new();
        for sample in &profile.samples {
            let thread = sample.labels["tid"].as_str();
            let Some(known) = threads.get(thread) else { continue };
            let lines = sample.locations.iter().flat_map(|id| &profile.locations[id].lines);
            let lines = lines.filter(|(_, path, _)| path.ends_with(".rb"));
            let found: Vec<_> =
                lines.map(|(method, file, line)| (&**method, &**file, *line)).collect();
            assert_eq!(&found, known, "{name}");
            *equal.entry(thread).or_insert(0) += sample.count;
        }
        eprintln!("{name}: {equal:?} stacks are those of Thread#backtrace_locations");
        assert!(equal.len() == 3 && equal.values().all(|&count| count > 30), "{name}: {equal:?}");
    }
}

/// What each thread of `blocked.rb` waits in, the innermost first.
const WAITS: [(&str, &[&str]); 4] = [
    ("sleeps", &["nap", "twice", "sleeps"]),
    ("in_blocks", &["block in in_blocks", "in_blocks"]),
    ("called_back", &["block in called_back", "called_back"]),
    ("takes", &["takes"]),
];

#[test]
fn waits_are_in_the_methods_and_lines_that_wait() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("off.pb.gz");
    let program = source("blocked.rb");
    let file = program.to_str().unwrap();
    let text = std::fs::read_to_string(&program).unwrap();
    let line_of = |wanted: &str| 1 + text.lines().position(|line| line.trim() == wanted).unwrap();
    let [first, second] = ["nap(0.02)", "nap(0.01)"].map(|it| line_of(it) as u64);
    for (name, ruby) in rubies() {
        let running = Running::start(like(&ruby).arg(&program));
        let mut collector = Command::new(binary("stackwire"));
        collector.current_dir(directory.path());
        collector.args(["record", "--offcpu", "--no-capture", "--duration=3s"]);
        collector.arg(format!("--pid={}", running.pid()));
        collector.arg(format!("--offcpu-output={}", output.display()));
        Ran::of(&mut collector).succeeded();
        let profile = Pprof::read(&output);
        let off_cpu = profile.kinds.iter().position(|kind| kind == "off_cpu/nanoseconds").unwrap();
        let mut found = BTreeMap::<&str, f64>::new();
        let mut lines = BTreeMap::<u64, f64>::new();
        for sample in &profile.samples {
            let seconds = sample.values[off_cpu] as f64 / 1e9;
            let frames = in_file(&profile, sample, file);
            let methods: Vec<&str> = frames.iter().map(|(method, _)| *method).collect();
            // The main thread waits from before to after.
            let Some(methods) = methods.strip_suffix(&["block in <main>"]) else { continue };
            let thread = methods.last().unwrap_or(&"");
            let Some((thread, known)) = WAITS.iter().find(|(of, _)| of == thread) else {
                panic!("{name}: {methods:?}");
            };
            // On its way from one wait to the next it may wait for the interpreter's lock.
            assert!(known.ends_with(methods), "{name}: {methods:?}");
            if methods == *known {
                *found.entry(thread).or_default() += seconds;
            }
            if methods == WAITS[0].1 {
                *lines.entry(frames[1].1).or_default() += seconds;
            }
        }
        eprintln!("{name}: {found:?}, {lines:?}");
        for (thread, _) in &WAITS[..3] {
            let seconds = found[thread];
            assert!((2.7..3.1).contains(&seconds), "{name}: {thread}: {seconds} s");
        }
        assert_eq!(lines.len(), 2, "{name}: {lines:?}");
        let share = lines[&first] / (lines[&first] + lines[&second]);
        assert!((share - 2.0 / 3.0).abs() < 0.02, "{name}: {share} of the time on the first line");
    }
}

#[test]
fn the_report_says_how_frames_ended_and_shows_methods_with_files() {
    if !privileged() {
        return;
    }
    let deep = "def deep(left)\n  deep(left - 1) if left > 0\n  puts 'ready'\n  $stdout.flush\n  \
        nil while true\nend\ndeep(700)";
    let flat = "def spin\n  nil while true\nend\nputs 'ready'\n$stdout.flush\nspin";
    for (name, ruby) in rubies() {
        for (program, method, end) in [
            (flat, "spin [-e]", "reached the thread's first function"),
            (deep, "deep [-e]", "deeper than is recorded"),
        ] {
            // The native walk ends in code that its JIT made, before it has come by Ruby.
            if name.ends_with("JIT") && program == deep {
                continue;
            }
            let running = Running::start(like(&ruby).args(["-e", program]));
            let directory = tempfile::tempdir().unwrap();
            let capture = directory.path().join("x.stackwire");
            let mut collector = Command::new(binary("stackwire-collector"));
            collector.arg(format!("--pid={}", running.pid()));
            collector.args(["--duration=1500ms", "--sample-rate=499"]);
            Ran::of(collector.arg("--output").arg(&capture)).succeeded();
            let text = report(&capture);
            let ends = text.split("frames of interpreters ended\n").nth(1).unwrap_or_default();
            assert!(ended(ends, end) > 95.0, "{name}: {end}: {text}");
            assert!(text.contains(method) && text.contains("  Ruby 3."), "{name}: {text}");
            let line = format!(" in {}\n", method.split(' ').next().unwrap());
            assert!(text.contains("  -e:") && text.contains(&line), "{name}: {text}");
        }
    }
}

/// Of each method and each block in it there are two entries, and one that ends them.
#[test]
fn of_many_blocks_the_innermost_are_shown_wherever_the_list_is_cut() {
    if !privileged() {
        return;
    }
    let (name, ruby) = rubies().pop_first().unwrap();
    for more in 0..3 {
        let program = format!(
            "def spin(left)\n  spin(left - 1) if left > 0\n  puts 'ready'\n  $stdout.flush\n  \
             nil while true\nend\n\
             def nest(left)\n  spin({more}) if left == 0\n  [1].each {{ nest(left - 1) }}\nend\n\
             nest(300)"
        );
        let running = Running::start(like(&ruby).args(["-e", &program]));
        let profile = record(running.pid(), 1, &[]);
        let nested = |it: &Sample| profile.functions(it).iter().filter(|it| **it == "nest").count();
        let least = profile.samples.iter().map(nested).min().unwrap();
        assert!((150..300).contains(&least), "{name}, {more} more: {least}");
    }
}

#[test]
fn what_a_program_computes_with_is_in_no_capture() {
    if !privileged() {
        return;
    }
    for (name, ruby) in rubies() {
        let running = ruby_with_a_secret(ruby);
        let directory = tempfile::tempdir().unwrap();
        let capture = directory.path().join("x.stackwire");
        let mut collector = Command::new(binary("stackwire-collector"));
        collector.arg(format!("--pid={}", running.pid()));
        collector.args(["--duration=2s", "--sample-rate=997"]);
        Ran::of(collector.arg("--output").arg(&capture)).succeeded();
        assert_no_secret(&capture);
        let text = report(&capture);
        assert!(text.contains("spends [-e]"), "{name}: {text}");
    }
}

/// What it says of itself beside that is in `fixtures/forged_ruby.c`.
#[test]
fn a_forged_ruby_costs_its_own_frames_alone() {
    if !privileged() {
        return;
    }
    // Without a lie it is taken for what it claims to be.
    let running = Running::start(&mut Command::new(build::forged_ruby()));
    let profile = record(running.pid(), 1, &[]);
    let is_named = |it: &&Sample| profile.functions(it).contains(&"forged");
    let named: u64 = profile.samples.iter().filter(is_named).map(|it| it.count).sum();
    assert!(named * 100 >= profile.count() * 95, "{named} of {}", profile.count());
    drop(running);
    let lies = ["wild", "environment", "giant", "table", "evaluators", "stack", "deep", "changing"];
    assert_cost_themselves_alone(build::forged_ruby(), &lies);
}

/// What came after this version of ours, and what came before.
#[test]
fn a_ruby_that_is_not_known_has_native_frames_and_a_sentence() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for (version, sentence) in [("4.1.0", "Ruby 4.1"), ("2.7.4", "Ruby 2.7"), ("3.3.x", "Ruby")] {
        let library = std::fs::read(build::forged_ruby().with_file_name("libforged_ruby.so"));
        let mut library = library.unwrap();
        let offset = place_of(&library, "ruby_version");
        library[offset..offset + version.len()].copy_from_slice(version.as_bytes());
        std::fs::write(at("libforged_ruby.so"), library).unwrap();
        let mut forged = Command::new(build::forged_ruby());
        let running = Running::start(forged.env("LD_LIBRARY_PATH", directory.path()));
        let mut collector = Command::new(binary("stackwire-collector"));
        collector.arg(format!("--pid={}", running.pid()));
        collector.args(["--duration=1500ms", "--sample-rate=499"]);
        // Its build-id is that of the one which is known.
        collector.arg(format!("--unwind-cache-dir={}", at(version).display()));
        Ran::of(collector.arg("--output").arg(at("x.stackwire"))).succeeded();
        let text = report(&at("x.stackwire"));
        let sentence =
            format!("its functions are not shown: {sentence}: not known to this version\n");
        assert!(text.contains(&sentence) && !text.contains(" forged "), "{sentence}: {text}");
    }
}
