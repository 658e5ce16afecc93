//! Unwinding by tables in the kernel, live: whole stacks of programs without frame pointers,
//! mappings that change under it, executables that lie.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::support::go::releases;
use crate::support::interpreters::pythons;
use crate::support::lying::{eh_frame, new_build_id, replace_eh_frame, section, write_at};
use crate::support::mounted::Mounted;
use crate::support::postgres::Postgres;
use crate::support::whole::{
    Reports, Through, collected, complete, ended, read_with_tables, recorded, through, through_file,
};
use crate::support::{Pprof, Running, binary, build, privileged, stackwire};

#[track_caller]
fn assert_complete(name: &str, report: &str) {
    let share = complete(report);
    eprintln!("{name}: {share} % of the stacks are whole");
    assert!(share >= 99.5, "{name}: only {share} % of the stacks are whole:\n{report}");
}

#[test]
fn stacks_of_running_programs_are_whole() {
    if !privileged() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut programs: Vec<(String, Command)> = Vec::new();
    for (name, path) in build::unwind_corpus() {
        programs.push((name.to_string(), Command::new(path)));
    }
    for program in [build::inlined_cc_release(), build::inlined_rs_release()] {
        let mut command = Command::new(program);
        command.arg("60");
        let name = program.file_name().unwrap().to_str().unwrap();
        programs.push((name.to_owned(), command));
    }
    for (name, mut python) in pythons() {
        python.args([
            "-c",
            "print('ready', flush=True)\nimport json\n\
            while True: json.dumps([{str(i): sorted([i] * 9)} for i in range(300)])",
        ]);
        programs.push((name, python));
    }
    let mut node = Command::new("node");
    let script = tempfile::tempdir().unwrap();
    node.current_dir(script.path());
    node.args(["-e", "console.log('ready');\n\
        function sorted(n) { return Array.from({length: n}, (_, i) => i * 7919 % 1000).sort((a, b) => a - b); }\n\
        function text() { return JSON.stringify(sorted(500).map(x => ({key: 'k' + x}))).replace(/k(\\d)/g, '$1'); }\n\
        for (;;) text();"]);
    programs.push(("node".to_owned(), node));
    for (name, mut command) in programs {
        let running = Running::start(&mut command);
        let pid = format!("--pid={}", running.pid());
        // Tables of large files are not there when the first capture begins.
        recorded(&[&pid, "--duration=500ms"], cache.path());
        // The children of vfork and fork are part of what it does.
        let (report, _) = recorded(&[&pid, "--follow", "--duration=3s"], cache.path());
        assert_complete(&name, &report);
    }
}

/// glibc says nothing of the frame in the parent of a new task, and the root of a new thread is in
/// the same function. The parent must not be taken for a thread at its root.
#[test]
fn who_starts_a_process_or_a_thread_has_callers() {
    if !privileged() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    for (name, options) in [("dynamic", &[][..]), ("static", &["-static"])] {
        let running = Running::start(&mut Command::new(build::spawn(name, options)));
        let pid = format!("--pid={}", running.pid());
        recorded(&[&pid, "--duration=500ms"], cache.path());
        let (report, profile) = recorded(&[&pid, "--duration=3s"], cache.path());
        let mut found = [("spawns", 0), ("threads", 0), ("clones", 0)];
        for sample in &profile.samples {
            let functions = profile.functions(sample);
            let inside = functions.iter().any(|name| name.contains("sys_clone"));
            if inside {
                let by = found.iter_mut().find(|(by, _)| functions.contains(by));
                let Some((_, count)) = by else { panic!("{name}: nobody called {functions:?}") };
                *count += sample.count;
                assert!(functions.contains(&"main"), "{name}: {functions:?}");
            }
        }
        eprintln!("{name}: {found:?}");
        assert!(found.iter().all(|(_, count)| *count >= 5), "{name}: {found:?}");
        assert_complete(name, &report);
        // The children spend much of their time in functions that GCC adds to every program.
        let (report, _) = recorded(&[&pid, "--follow", "--duration=3s"], cache.path());
        let without_rule = ended(&report, "no unwind rule for this code");
        assert!(without_rule <= 0.1, "{name}: {report}");
    }
}

/// Go of every release, every kind of program.
#[test]
fn stacks_of_every_go_are_whole() {
    if !privileged() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut bad = Vec::new();
    for release in releases() {
        let programs = release.start();
        let directory = tempfile::tempdir().unwrap();
        let is_asked = |path: &Path| release.of(path).is_some();
        let report = read_with_tables(directory.path(), &programs, cache.path(), is_asked).last;
        let found = through(&report);
        let mut seen = 0;
        for Through { path, stacks, share, ends } in &found {
            let Some(name) = release.of(Path::new(path)) else { continue };
            seen += 1;
            eprintln!("{} {name}: {share} % of {stacks} stacks are whole", release.name);
            if *share < 99.5 || *stacks < 200 {
                bad.push(format!("{} {name}: {share} % of {stacks}: {ends:?}", release.name));
            }
        }
        assert!(seen >= 12, "{}: {seen} executables are in the report:\n{report}", release.name);
    }
    assert!(bad.is_empty(), "{bad:#?}");
}

/// The second time, when tables are on disk: what a command is worth recording for is not its first
/// moment.
#[test]
fn stacks_of_commands_are_whole() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let mut source = String::from("#include <stdio.h>\n");
    for index in 0..2500 {
        source += &format!(
            "int f{index}(int x) {{ int s = {index}; for (int i = 0; i < x; i++) s += printf(\"%d\", i * s) ^ (s << {}); return s; }}\n",
            index % 13
        );
    }
    std::fs::write(at("large.c"), source).unwrap();
    let mut state = 1u64;
    let numbers: String = (0..2_500_000)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            format!("{}\n", state >> 33)
        })
        .collect();
    std::fs::write(at("numbers"), numbers).unwrap();
    let commands: [(&str, Vec<String>); 5] = [
        (
            "dd",
            ["dd", "if=/dev/zero", "of=/dev/null", "bs=64", "count=9000000", "status=none"]
                .map(str::to_owned)
                .into(),
        ),
        ("gzip", vec!["gzip".into(), "-9kf".into(), at("numbers")]),
        (
            "sort",
            vec![
                "sort".into(),
                "--parallel=1".into(),
                "-o".into(),
                at("sorted"),
                at("numbers"),
                at("numbers"),
            ],
        ),
        (
            "sqlite3",
            vec![
            "sqlite3".into(),
            ":memory:".into(),
            "with recursive n(i) as (select 1 union all select i + 1 from n where i < 6000000) \
             select count(distinct printf('%d', i * 7919 % 100003)) from n;".into(),
        ],
        ),
        (
            "gcc",
            vec![
                "gcc".into(),
                "-O2".into(),
                "-c".into(),
                "-o".into(),
                at("large.o"),
                at("large.c"),
            ],
        ),
    ];
    for (name, command) in commands {
        let mut arguments = vec!["--"];
        arguments.extend(command.iter().map(String::as_str));
        recorded(&arguments, directory.path());
        let (report, _) = recorded(&arguments, directory.path());
        // How many samples a child gives before its mappings are known is the machine's affair.
        let young = ended(&report, "process or mapping too young");
        let share = complete(&report) * 100.0 / (100.0 - young);
        eprintln!("{name}: {share:.1} % of the stacks are whole, but for {young} % too young");
        assert!(share >= 99.5 && young < 5.0, "{name}: {share} %, {young} %:\n{report}");
    }
}

#[test]
fn stacks_of_postgresql_under_pgbench_are_whole() {
    if !privileged() {
        return;
    }
    let Some(postgres) = Postgres::start() else { return };
    let directory = tempfile::tempdir().unwrap();
    let load = postgres.under_pgbench(8);
    // Its forty libraries get their tables one after the other.
    collected(load.servers(), "2s", directory.path());
    let (report, profile) = collected(load.servers(), "4s", directory.path());
    assert!(profile.count() > 1000, "{} samples", profile.count());
    assert_complete("postgres", &report);
}

#[test]
fn a_process_with_five_thousand_mappings() {
    if !privileged() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let program = build::many();
    // Mapped before the capture and, as a child, in it.
    let running = Running::start(Command::new(program).args(["5000", "20"]));
    let pid = format!("--pid={}", running.pid());
    let (report, profile) = recorded(&[&pid, "--duration=2s"], cache.path());
    assert_complete("5,000 mappings", &report);
    assert_stacks(&profile, "spin", &["spin", "run", "main"]);
    drop(running);
    let path = program.to_str().unwrap();
    // Where the ring of events is full, mappings are read again at once.
    for _ in 0..3 {
        let (_, profile) = recorded(&["--", path, "5000", "2"], cache.path());
        assert_stacks(&profile, "spin", &["spin", "run", "main"]);
        assert!(profile.share_of("spin") > 80.0, "{} %", profile.share_of("spin"));
    }
}

/// Stacks with this leaf begin like this; those of a process that is too young may be cut, none is
/// wrong.
#[track_caller]
fn assert_stacks(profile: &Pprof, leaf: &str, expected: &[&str]) {
    let (mut whole, mut all) = (0, 0);
    for sample in &profile.samples {
        let functions = profile.functions(sample);
        if functions.first() != Some(&leaf) {
            continue;
        }
        all += sample.count;
        whole += if functions.starts_with(expected) { sample.count } else { 0 };
        assert!(
            functions.starts_with(expected) || expected.starts_with(&functions),
            "{functions:?} is no stack of this program"
        );
    }
    assert!(all > 0 && whole * 100 >= all * 50, "{whole} of {all} stacks in {leaf} are whole");
}

#[test]
fn programs_that_become_each_other_never_share_a_stack() {
    if !privileged() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let [one, two] = build::hops().each_ref().map(|path| path.to_str().unwrap());
    let (_, profile) = recorded(&["--", one, two, "150"], cache.path());
    for name in ["one", "two"] {
        let of = |what: &str| format!("{name}_{what}");
        let expected = [of("leaf"), of("middle"), of("top"), "main".to_owned()];
        assert_stacks(&profile, &expected[0], &expected.each_ref().map(String::as_str));
    }
}

/// Copies of a program whose call frame information lies, or whose file is not what it was: each
/// costs its own frames alone, and the report says why.
#[test]
fn executables_that_lie_cost_their_own_frames_alone() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (_, honest) = &build::unwind_corpus()[0];
    let copy = |name: &str| -> PathBuf {
        let path = directory.path().join(name);
        std::fs::copy(honest, &path).unwrap();
        path
    };
    let frames = section(honest, ".eh_frame");
    // Another build-id than that of the honest one, whose table would do.
    let patch = |path: &Path, at: u64, bytes: &[u8]| {
        new_build_id(path);
        write_at(path, at, bytes);
    };
    let mut programs = vec![(copy("honest"), true)];
    // Random bytes, all of them and some of them.
    let mut state = 7u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    let path = copy("noise");
    patch(&path, frames.offset, &(0..frames.size).map(|_| random()).collect::<Vec<_>>());
    programs.push((path, false));
    for number in 0..6 {
        let path = copy(&format!("flip{number}"));
        for _ in 0..40 {
            let at = u64::from(random()) << 8 | u64::from(random());
            patch(&path, frames.offset + at % frames.size, &[random()]);
        }
        programs.push((path, false));
    }
    // The section's header: its size is the sixth field of eight bytes each, behind two of four.
    for (name, size) in [("huge", u64::MAX >> 1), ("large", 1 << 33)] {
        let path = copy(name);
        patch(&path, frames.header + 32, &size.to_le_bytes());
        programs.push((path, false));
    }
    // 60,000 functions that share a description of a megabyte, each with it to be followed from its
    // beginning.
    let path = copy("shared");
    new_build_id(&path);
    replace_eh_frame(
        &path,
        &eh_frame(1 << 20, 60_000, section(honest, ".text").address, |_| vec![]),
    );
    programs.push((path, false));
    let path = copy("sparse");
    patch(&path, 0, b"\x7f");
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10 << 30).unwrap();
    programs.push((path, true));
    for name in ["replaced", "fifo"] {
        let path = copy(name);
        patch(&path, 0, b"\x7f");
        programs.push((path, true));
    }
    // A file system that stops answering once the program runs.
    let (below, mounted) = (directory.path().join("below"), directory.path().join("mounted"));
    let fuse = Mounted::can().then(|| {
        std::fs::create_dir(&below).unwrap();
        std::fs::create_dir(&mounted).unwrap();
        patch(&copy("below/silent"), 0, b"\x7f");
        Mounted::new(&below, &mounted, &[])
    });
    if fuse.is_some() {
        programs.push((mounted.join("silent"), false));
    }
    let running: Vec<Running> =
        programs.iter().map(|(path, _)| Running::start(Command::new(path).arg("sort"))).collect();
    fuse.iter().for_each(|fuse| fuse.signal("STOP"));
    // What was mapped is found all the same: not by its path.
    let replaced = directory.path().join("replaced");
    let short = directory.path().join("short");
    std::fs::write(&short, &std::fs::read(honest).unwrap()[..3000]).unwrap();
    std::fs::rename(short, &replaced).unwrap();
    let fifo = directory.path().join("fifo");
    std::fs::remove_file(&fifo).unwrap();
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());

    let cache = directory.path().join("cache");
    let Reports { first, all, last: report } =
        read_with_tables(directory.path(), &running, &cache, |_| true);
    // pprof would wait for it.
    fuse.iter().for_each(|fuse| fuse.signal("CONT"));
    let profile = Pprof::read(&directory.path().join("x.pb.gz"));
    drop(running);
    let taken: u64 = profile.count();
    assert!(
        all.contains(&format!("samples taken {taken} = {taken} in the profile + 0 lost")),
        "{all}"
    );
    let (at_first, found) = (through(&first), through(&report));
    for (path, whole) in &programs {
        let Through { stacks, share, ends, .. } = through_file(&found, path);
        eprintln!("{}: {share} % of {stacks}", path.display());
        let what = format!("{}: {share} % of {stacks}: {ends:?}\n{report}", path.display());
        assert!(!whole || share >= 99.0 && stacks >= 100, "{what}");
        // While the liars are found out, the others wait for their tables: not for long.
        assert!(!whole || through_file(&at_first, path).share >= 50.0, "at first: {what}\n{first}");
    }
    for (name, reason) in [
        ("noise", "no unwind rule for this code"),
        ("shared", "no unwind rule for this code"),
        ("huge", "no unwind table: not a readable ELF file: its .eh_frame has"),
        ("large", "no unwind table: not a readable ELF file: its .eh_frame has"),
        ("mounted/silent", "no unwind table: its file system does not answer"),
    ] {
        if name.starts_with("mounted") && fuse.is_none() {
            continue;
        }
        let ends = through_file(&found, &directory.path().join(name)).ends;
        assert!(ends.iter().any(|end| end.contains(reason)), "{name}: {ends:?}");
    }
}

/// A disk that does not answer for seconds, to the kill of whoever asks neither, costs what is
/// sampled meanwhile.
#[test]
fn executables_on_a_disk_that_stalls_have_their_tables_afterwards() {
    if !privileged() || !Mounted::can() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [below, between, above] =
        ["below", "between", "above"].map(|name| directory.path().join(name));
    for directory in [&below, &between, &above] {
        std::fs::create_dir(directory).unwrap();
    }
    let (_, honest) = &build::unwind_corpus()[0];
    let names: Vec<String> = (0..8).map(|number| format!("program{number}")).collect();
    for name in &names {
        let path = below.join(name);
        std::fs::copy(honest, &path).unwrap();
        new_build_id(&path);
    }
    let disk = Mounted::new(&below, &between, &[]);
    // It has taken each question, so the kernel waits for its answer even after a kill.
    let _in_front = Mounted::new(&between, &above, &[]);
    let running: Vec<Running> = names
        .iter()
        .map(|name| Running::start(Command::new(above.join(name)).arg("sort")))
        .collect();
    let capture = directory.path().join("x.stackwire");
    disk.signal("STOP");
    let mut collector = Command::new(binary("stackwire-collector"))
        .args(running.iter().map(|it| format!("--pid={}", it.pid())))
        .args(["--profile", "--sample-rate=997", "--duration=12s", "--output"])
        .arg(&capture)
        .env("XDG_CACHE_HOME", directory.path().join("cache"))
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(4));
    disk.signal("CONT");
    assert!(collector.wait().unwrap().success());
    let report = |time: &str| {
        let capture = capture.to_str().unwrap();
        stackwire(["report", capture, time]).succeeded().stdout
    };
    let (during, after) = (report("--time=..3"), report("--time=8.."));
    let is_stalled = |it: &Through<'_>| it.ends.iter().any(|end| end.contains("no unwind table"));
    assert!(through(&during).iter().any(is_stalled), "nothing stalled:\n{during}");
    for name in names {
        let Through { stacks, share, ends, .. } =
            through_file(&through(&after), &above.join(&name));
        eprintln!("{name}: {share} % of {stacks}");
        assert!(share >= 99.0 && stacks >= 100, "{name}: {share} % of {stacks}: {ends:?}\n{after}");
    }
}
