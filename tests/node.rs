//! Functions of Node, with no flag and no agent: each in the place of the frame that runs it,
//! interpreted and compiled; those of a process that lies cost its own frames alone.

use std::process::Command;

use crate::support::build::{self, source};
use crate::support::forged::assert_cost_themselves_alone;
use crate::support::functions::{Lines, Shares, assert_frames, frames_it_knows};
use crate::support::interpreters::nodes;
use crate::support::pprof::Sample;
use crate::support::python::{like, place_of};
use crate::support::secret::{assert_no_secret, node_with_a_secret};
use crate::support::{Ran, Running, binary, privileged, record, report};

/// What `shares.js` has on its stack while it uses time, and its part of that.
const SHARES: [(&[&str], f64); 8] = [
    (&["burn", "twice", "all"], 6.0 / 28.0),
    (&["burn", "recursive", "recursive", "recursive", "recursive", "recursive", "all"], 3.0 / 28.0),
    (&["burn", "each", "byCallback", "all"], 3.0 / 28.0),
    (&["burn", "compare", "sorted", "all"], 4.0 / 28.0),
    (&["burn", "catches", "all"], 3.0 / 28.0),
    (&["burn", "get property", "all"], 3.0 / 28.0),
    (&["burn", "generator", "all"], 3.0 / 28.0),
    (&["burn", "later"], 3.0 / 28.0),
];

/// Flags with which all runs in one way. Compiled functions have no others in them then.
const WAYS: [(&str, &[&str]); 3] = [
    ("interpreted", &["--no-opt", "--no-sparkplug", "--no-maglev"]),
    ("compiled as it is", &["--no-opt", "--always-sparkplug", "--no-maglev"]),
    ("optimized", &["--no-turbo-inlining", "--no-maglev-inlining"]),
];

/// Each Node in each of those ways, and whether lines are known.
fn in_each_way() -> impl Iterator<Item = (String, Command, bool)> {
    nodes().into_iter().flat_map(|(name, node)| {
        WAYS.map(|(way, flags)| {
            let mut node = like(&node);
            // Its V8 has no Maglev.
            let is_old = name.starts_with("node 18.");
            node.args(flags.iter().filter(|flag| !(is_old && flag.contains("maglev"))));
            (format!("{name}, {way}"), node, way == "interpreted")
        })
    })
}

/// Who meets a build first makes its unwind table: until then there are native frames alone.
fn meet(running: &Running, is_first: bool) {
    if is_first {
        record(running.pid(), 1, &[]);
    }
}

#[test]
fn functions_and_lines_have_their_shares_and_no_false_caller() {
    if !privileged() {
        return;
    }
    let program = &source("shares.js");
    // What uses time asks how much it used.
    let lines = ["burn(4);", "burn(2);"];
    for (name, mut node, has_lines) in in_each_way() {
        let lines = &lines[..if has_lines { 2 } else { 0 }];
        let shares = Shares { program, known: &SHARES, lines, leaf: "used", root: "main" };
        let running = Running::start(node.arg(program));
        meet(&running, has_lines);
        let profile = record(running.pid(), 4, &[]);
        shares.assert_are_in(&name, &profile, &profile.samples);
    }
}

#[test]
fn frames_are_those_that_v8_knows() {
    if !privileged() {
        return;
    }
    let directory = tempfile::Builder::new().prefix("frames").tempdir_in("/var/tmp").unwrap();
    for (name, mut node, has_lines) in in_each_way() {
        let said = directory.path().join("frames");
        let running = Running::start(node.arg(source("call_sites.js")).arg(&said));
        meet(&running, has_lines);
        let profile = record(running.pid(), 2, &[]);
        drop(running);
        let text = std::fs::read_to_string(&said).unwrap();
        let known = frames_it_knows(&text);
        let lines = if has_lines { Lines::OfCallers } else { Lines::OfCallersIfKnown };
        assert_eq!(known.len(), 3, "{text}");
        let equal = assert_frames(&name, &profile, &known, ".js", lines);
        eprintln!("{name}: {equal:?} stacks are those of V8's call sites");
        assert!(equal.len() == 3 && equal.values().all(|&count| count > 30), "{name}: {equal:?}");
    }
}

#[test]
fn what_a_program_computes_with_is_in_no_capture() {
    if !privileged() {
        return;
    }
    for (name, mut node) in nodes() {
        let running = node_with_a_secret(&mut node);
        let directory = tempfile::tempdir().unwrap();
        let capture = directory.path().join("x.stackwire");
        let mut collector = Command::new(binary("stackwire-collector"));
        collector.arg(format!("--pid={}", running.pid()));
        collector.args(["--duration=2s", "--sample-rate=997"]);
        Ran::of(collector.arg("--output").arg(&capture)).succeeded();
        assert_no_secret(&capture);
        let text = report(&capture);
        assert!(text.contains("spends [eval]"), "{name}: {text}");
    }
}

/// What it says of itself beside that is in `fixtures/forged_v8.c`.
#[test]
fn a_forged_v8_costs_its_own_frames_alone() {
    if !privileged() {
        return;
    }
    // Without a lie it is taken for what it claims to be.
    let running = Running::start(&mut Command::new(build::forged_v8()));
    let profile = record(running.pid(), 1, &[]);
    let is_named = |it: &&Sample| profile.functions(it).contains(&"forged");
    let named: u64 = profile.samples.iter().filter(is_named).map(|it| it.count).sum();
    assert!(named * 100 >= profile.count() * 95, "{named} of {}", profile.count());
    drop(running);
    let lies = [
        "wild",
        "type",
        "giant",
        "scope",
        "variables",
        "circle",
        "cons",
        "part",
        "external",
        "deep",
        "changing",
    ];
    assert_cost_themselves_alone(build::forged_v8(), &lies);
}

/// As where pointers are compressed (Chromium, Electron), and what is not known to us yet.
#[test]
fn a_v8_that_is_not_known_has_native_frames_and_a_sentence() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for number in ["v8dbg_TaggedSize", "v8dbg_off_fp_function", "v8dbg_scopeinfo_idx_first_vars"] {
        let library = std::fs::read(build::forged_v8().with_file_name("libforged_v8.so"));
        let mut library = library.unwrap();
        let offset = place_of(&library, number);
        library[offset..offset + 4].copy_from_slice(&20i32.to_le_bytes());
        std::fs::write(at("libforged_v8.so"), library).unwrap();
        let mut forged = Command::new(build::forged_v8());
        let running = Running::start(forged.env("LD_LIBRARY_PATH", directory.path()));
        let mut collector = Command::new(binary("stackwire-collector"));
        collector.arg(format!("--pid={}", running.pid()));
        collector.args(["--duration=1500ms", "--sample-rate=499"]);
        // Its build-id is that of the one which is known.
        collector.arg(format!("--unwind-cache-dir={}", at(number).display()));
        Ran::of(collector.arg("--output").arg(at("x.stackwire"))).succeeded();
        let text = report(&at("x.stackwire"));
        let sentence = "its functions are not shown: V8 12.4: not known to this version\n";
        assert!(text.contains(sentence) && !text.contains(" forged "), "{number}: {text}");
    }
}
