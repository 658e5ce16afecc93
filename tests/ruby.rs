//! Methods of Ruby, with no flag and no agent: in their places among the native frames, with their
//! lines; those of a process that lies cost its own frames alone.

use std::process::Command;

use crate::support::build::{self, source};
use crate::support::forged::assert_cost_themselves_alone;
use crate::support::functions::{Lines, Shares, Waits, assert_frames, frames_it_knows};
use crate::support::interpreters::rubies;
use crate::support::pprof::Sample;
use crate::support::python::{like, place_of};
use crate::support::secret::{assert_no_secret, ruby_with_a_secret};
use crate::support::whole::ended;
use crate::support::{Ran, Running, binary, privileged, record, report};

/// What `shares.rb` has on its stack while it burns time, and its part of that. A fiber has a
/// stack of its own.
const SHARES: [(&[&str], f64); 7] = [
    (&["burn", "twice", "main"], 6.0 / 24.0),
    (
        &["burn", "recursive", "recursive", "recursive", "recursive", "recursive", "main"],
        3.0 / 24.0,
    ),
    (&["burn", "block in by_block", "by_block", "main"], 3.0 / 24.0),
    (&["burn", "block in called_back", "called_back", "main"], 3.0 / 24.0),
    (&["burn", "rescue in rescues", "rescues", "main"], 3.0 / 24.0),
    (&["burn", "block in <class:Thing>", "main"], 3.0 / 24.0),
    (&["burn", "block in main"], 3.0 / 24.0),
];

#[test]
fn methods_and_lines_have_their_shares_and_no_false_caller() {
    if !privileged() {
        return;
    }
    let program = &source("shares.rb");
    let lines = ["burn(0.004)", "burn(0.002)"];
    // What burns time asks for the time.
    let shares = Shares { program, known: &SHARES, lines: &lines, leaf: "used", root: "<main>" };
    for (name, ruby) in rubies() {
        let running = Running::start(like(&ruby).arg(program));
        let profile = record(running.pid(), 4, &[]);
        shares.assert_are_in(&name, &profile, &profile.samples);
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
        let known = frames_it_knows(&text);
        assert_eq!(known.len(), 3, "{text}");
        let equal = assert_frames(&name, &profile, &known, ".rb", Lines::All);
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
    let program = &source("blocked.rb");
    let (lines, root) = (["nap(0.02)", "nap(0.01)"], Some("block in <main>"));
    let waits = Waits { program, known: &WAITS, lines, root, main: "<main>" };
    for (name, ruby) in rubies() {
        let running = Running::start(like(&ruby).arg(program));
        waits.assert_are_of(&name, running.pid());
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
