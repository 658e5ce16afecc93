//! What cannot work says so: a message that names the thing, the right exit code, no panic, no
//! empty file.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{Ran, Running, binary, build::work, privileged, stackwire};

fn record(arguments: &[&str]) -> Ran {
    let directory = tempfile::tempdir().unwrap();
    let output = format!("--profile-output={}", directory.path().join("out.pb.gz").display());
    let ran = stackwire([&["record", "--profile", &output], arguments].concat());
    assert!(!directory.path().join("out.pb.gz").exists(), "a profile was written");
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 0, "temporary files were left behind");
    ran
}

fn collector(arguments: &[&str]) -> Ran {
    Ran::of(Command::new(binary("stackwire-collector")).args(arguments))
}

#[test]
fn no_such_process() {
    record(&["--pid=4000001"]).failed(1, "no process with pid 4000001");
    collector(&["--pid=4000001", "--output=/dev/null"]).failed(1, "no process with pid 4000001");
}

#[test]
fn a_thread_is_not_a_process() {
    let mut program = Command::new(work());
    let program = Running::start(program.args(["threads", "10"]));
    std::thread::sleep(std::time::Duration::from_millis(100));
    let tasks = std::fs::read_dir(format!("/proc/{}/task", program.pid())).unwrap();
    let tids = tasks.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let tid = tids.into_iter().find(|tid| *tid != program.pid().to_string()).unwrap();
    record(&[&format!("--pid={tid}")]).failed(1, &format!("use --pid {}", program.pid()));
}

#[test]
fn a_zombie() {
    let mut child = Command::new("true").spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    record(&[&format!("--pid={}", child.id())]).failed(1, "is a zombie");
    child.wait().unwrap();
}

#[test]
fn a_kernel_thread() {
    // kthreadd is pid 2 where the kernel's own processes are visible.
    let comm = std::fs::read_to_string("/proc/2/comm").unwrap_or_default();
    if !crate::support::can("a visible kernel thread", comm.trim() == "kthreadd") {
        return;
    }
    record(&["--pid=2"]).failed(1, "kernel threads are sampled with -a");
}

#[test]
fn a_process_that_dies_at_once() {
    if !privileged() {
        return;
    }
    let mut child = Command::new("sleep").arg("0.4").spawn().unwrap();
    let pid = child.id();
    let waiter = std::thread::spawn(move || child.wait());
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    let named = format!("--profile-output={}", output.display());
    let ran = stackwire(["record", &named, &format!("--pid={pid}"), "--duration=30s"]);
    // Its end takes CPU time, too little to be sampled most of the time.
    let said = ["no samples", "no process", " samples, 0 lost"].map(|it| ran.stderr.contains(it));
    assert!(said.contains(&true), "{}", ran.stderr);
    assert_eq!(ran.code, Some(if said[2] { 0 } else { 1 }), "{}", ran.stderr);
    assert_eq!(output.exists(), said[2], "{}", ran.stderr);
    waiter.join().unwrap().unwrap();
}

#[test]
fn command_lines_that_cannot_be_meant() {
    let cases: [(&[&str], &str); 12] = [
        (&["--pid=1", "--all"], "exclude each other"),
        (&[], "what to sample"),
        (&["--pid=1", "--", "true"], "leave out"),
        (&["--all", "--follow"], "leave out --follow"),
        (&["--all", "--sample-rate=0"], "a sample rate of 0"),
        (&["--all", "--sample-rate=1000000"], "above the kernel's limit"),
        (&["--all", "--duration=0s"], "a duration of 0"),
        (&["--all", "--duration=soon"], "--duration"),
        (&["--pid=0"], "--pid"),
        (&["--pid=x"], "--pid"),
        (&["--all", "--tag=notag"], "KEY=VALUE"),
        (&["--all", "--unwind=magic"], "--unwind"),
    ];
    for (arguments, said) in cases {
        record(arguments).failed(2, said);
    }
    // CPU time is what is sampled unless told otherwise, for 3 seconds where a number has no unit.
    stackwire(["record", "--pid=4000001", "--duration", "3", "-F", "99"]).failed(1, "no process");
    stackwire(["recrod"]).failed(2, "recrod");
    collector(&["--pid=1", "--all", "--output=x"]).failed(2, "cannot be used with");
    collector(&["--all"]).failed(2, "required");
    collector(&["--all", "--sample-rate=0", "--output=/dev/null"]).failed(2, "a sample rate of 0");
}

#[test]
fn an_output_that_cannot_be_written_is_said_before_sampling() {
    let started = std::time::Instant::now();
    for option in ["--profile-output", "--flamegraph", "--folded", "--capture"] {
        let path = format!("{option}=/nonexistent/directory/out");
        stackwire(["record", "--profile", "--all", "--duration=60s", &path])
            .failed(1, "cannot write /nonexistent/directory/out");
    }
    collector(&["--all", "--duration=60s", "--output=/nonexistent/out"])
        .failed(1, "/nonexistent/out");
    assert!(started.elapsed().as_secs() < 30, "it sampled first");
}

#[test]
fn a_collector_that_is_none() {
    record(&["--all", "--collector=/nonexistent"]).failed(1, "cannot execute /nonexistent");
    record(&["--all", "--collector=/bin/true"]).failed(1, "it said nothing");
    record(&["--all", "--collector=/bin/false"]).failed(1, "it said nothing");
}

#[test]
fn a_command_that_cannot_be_run() {
    if !privileged() {
        return;
    }
    let ran = record(&["--", "/nonexistent/command"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("cannot run /nonexistent/command"), "{}", ran.stderr);
}

#[test]
fn a_target_that_is_no_address() {
    if !privileged() {
        return;
    }
    collector(&["--all", "--duration=1s", "--to=nowhere at all"])
        .failed(2, "write unix:/path/to/socket, https://host:port or http://host:port");
}

/// A capture to damage.
fn capture(directory: &Path) -> Vec<u8> {
    let path = directory.join("whole.stackwire");
    let program = Running::start(Command::new(work()).args(["plain", "30"]));
    collector(&[
        &format!("--pid={}", program.pid()),
        "--duration=3s",
        "--epoch=500ms",
        &format!("--output={}", path.display()),
    ])
    .succeeded();
    std::fs::read(path).unwrap()
}

#[test]
fn damaged_captures() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let whole = capture(directory.path());
    let path = directory.path().join("damaged.stackwire");
    let report = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        stackwire(["report".as_ref(), path.as_os_str()])
    };

    report(&[]).failed(1, "the file is empty");
    report(b"gibberish that is long enough").failed(1, "not a Stackwire capture");
    let mut newer = whole.clone();
    newer[3] = 200;
    report(&newer).failed(1, "written by a newer Stackwire: format 200");
    let mut huge = whole.clone();
    huge[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    report(&huge).failed(1, "no samples in the capture");

    let all = report(&whole).succeeded().stdout;
    let samples = |text: &str| -> u64 { text.split(' ').next().unwrap().parse().unwrap() };
    let mut before = 0;
    // The artifacts come first and are most of it: cut among the epochs.
    let epochs = whole.len() - 4000.min(whole.len() / 2);
    for cut in (epochs..whole.len()).step_by(101) {
        let ran = report(&whole[..cut]);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        if ran.code == Some(0) {
            assert!(ran.stdout.contains("note: the capture"), "{}", ran.stdout);
            assert!(ran.stdout.contains("samples taken: unknown"), "{}", ran.stdout);
            assert!((before..=samples(&all)).contains(&samples(&ran.stdout)));
            before = samples(&ran.stdout);
        }
    }
    assert!(before > 0, "no cut kept any epoch");

    for at in (0..epochs).step_by(epochs / 20).chain((epochs..whole.len()).step_by(157)) {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x10;
        let ran = report(&flipped);
        assert!(matches!(ran.code, Some(0 | 1)), "flip at {at}: {:?}", ran.code);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    }
    stackwire(["report", "/nonexistent"]).failed(1, "cannot read /nonexistent");
    stackwire(["report", "/tmp"]).failed(1, "cannot read /tmp");
}

#[test]
fn captures_one_after_the_other_are_one_profile_and_none_counts_twice() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let samples = |path: &Path| -> u64 {
        let text = crate::support::report(path);
        assert!(!text.contains("unaccounted") && !text.contains("note:"), "{text}");
        text.split(' ').next().unwrap().parse().unwrap()
    };
    let one = capture(directory.path());
    std::fs::write(at("one"), &one).unwrap();
    std::fs::write(at("two"), capture(directory.path())).unwrap();
    let two = std::fs::read(at("two")).unwrap();
    std::fs::write(at("both"), [one.as_slice(), &two].concat()).unwrap();
    std::fs::write(at("twice"), [one.as_slice(), &one].concat()).unwrap();
    assert_eq!(samples(&at("both")), samples(&at("one")) + samples(&at("two")));
    assert_eq!(samples(&at("twice")), samples(&at("one")));
}

#[test]
fn captures_are_never_destroyed() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keep.stackwire");
    std::fs::write(&path, capture(directory.path())).unwrap();
    let before = std::fs::read(&path).unwrap();
    let name = path.to_str().unwrap();
    let dotted = format!("{}/./keep.stackwire", directory.path().display());
    let other = format!("--profile-output={}/p", directory.path().display());
    stackwire(["resolve", name, "--output", &dotted]).failed(2, "are the same file");
    stackwire(["resolve", name, "--flamegraph", &dotted]).failed(2, "are the same file");
    let capture = format!("--capture={name}");
    stackwire(["record", "--profile", "--pid=4000001", &other, &capture]).failed(1, "no process");
    let same = format!("--profile-output={name}");
    stackwire(["record", "--profile", "--all", &same, &capture]).failed(2, "are the same file");
    assert!(std::fs::read(&path).unwrap() == before, "the capture was changed");
}

#[test]
fn outputs_are_written_when_nobody_listens() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.stackwire");
    std::fs::write(&path, capture(directory.path())).unwrap();
    // `2>&1 | true`: the other end of standard error is gone.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = Command::new(binary("stackwire"))
        .arg("resolve")
        .arg(&path)
        .arg(format!("--flamegraph={}", directory.path().join("a.svg").display()))
        .stderr(writer)
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    assert!(directory.path().join("a.svg").exists() && directory.path().join("a.pb.gz").exists());
}

#[test]
fn a_file_with_sizes_that_lie_costs_its_names_and_nothing_else() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("hostile");
    std::fs::copy(work(), &program).unwrap();
    let compressed =
        Command::new("objcopy").arg("--compress-debug-sections=zlib").arg(&program).status();
    assert!(compressed.unwrap().success());
    // ch_size of every compressed section, behind ch_type (1) and ch_reserved (0): 8 EiB.
    let mut bytes = std::fs::read(&program).unwrap();
    let output = Command::new("readelf").args(["-SW"]).arg(&program).output().unwrap();
    let mut changed = 0;
    for line in
        String::from_utf8_lossy(&output.stdout).lines().filter(|line| line.contains(".debug_"))
    {
        let words: Vec<&str> = line.split(']').nth(1).unwrap().split_whitespace().collect();
        let offset = usize::from_str_radix(words[3], 16).unwrap();
        if bytes[offset..offset + 8] == [1, 0, 0, 0, 0, 0, 0, 0] {
            bytes[offset + 8..offset + 16].copy_from_slice(&(1u64 << 63).to_le_bytes());
            changed += 1;
        }
    }
    assert!(changed > 0, "no section is compressed");
    std::fs::write(&program, bytes).unwrap();
    let running = Running::start(Command::new(&program).args(["plain", "20"]));
    let path = directory.path().join("out.stackwire");
    collector(&[
        &format!("--pid={}", running.pid()),
        "--duration=1s",
        &format!("--output={}", path.display()),
    ])
    .succeeded();
    // In a cache of its own: it has the build-id of the program it was made from.
    let cache = format!("--symbol-cache-dir={}", directory.path().join("cache").display());
    let report =
        stackwire(["report".as_ref(), path.as_os_str(), cache.as_ref()]).succeeded().stdout;
    assert!(report.contains("declares 9223372036854775808 bytes"), "{report}");
    assert!(report.contains("symtab 100.0 %"), "{report}");
}

/// A program that runs anonymous code and whose perf-map is whatever `make` puts there.
fn with_perf_map(make: impl FnOnce(&Path)) -> String {
    // Code in an anonymous executable mapping: an endless loop of two bytes.
    let script = "import ctypes, mmap, os, sys\n\
        m = mmap.mmap(-1, 4096, prot=7)\n\
        m.write(b'\\xeb\\xfe')\n\
        print('ready', flush=True)\n\
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n";
    let program = Running::start(Command::new("python3").args(["-c", script]));
    let map = format!("/tmp/perf-{}.map", program.pid());
    let map = Path::new(&map);
    make(map);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.stackwire");
    collector(&[
        &format!("--pid={}", program.pid()),
        "--duration=1s",
        &format!("--output={}", path.display()),
    ])
    .succeeded();
    let _ = if map.is_dir() { std::fs::remove_dir(map) } else { std::fs::remove_file(map) };
    crate::support::report(&path)
}

#[test]
fn perf_maps_of_every_kind() {
    if !privileged() {
        return;
    }
    let says =
        |report: &str, said: &str| assert!(report.contains(said), "expected {said:?} in {report}");
    says(&with_perf_map(|_| {}), "the process wrote no perf-map");
    says(
        &with_perf_map(|path| std::fs::create_dir(path).unwrap()),
        "its perf-map cannot be taken: it is not a regular file",
    );
    let fifo = |path: &Path| {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    says(&with_perf_map(fifo), "its perf-map cannot be taken: it is not a regular file");
    let large = |path: &Path| std::fs::File::create(path).unwrap().set_len(2 << 30).unwrap();
    says(&with_perf_map(large), "its perf-map cannot be taken: it has 2147483648 bytes");
    // All of memory is one function with a name that is no UTF-8.
    let bytes = |path: &Path| {
        std::fs::write(path, b"1000 7fffffff0000 j\xff\xfeit function\nnonsense\n").unwrap();
    };
    let report = with_perf_map(bytes);
    says(&report, "it function");
    says(&report, "perf-map 100.0 %");
}

#[test]
fn no_permission() {
    if !crate::support::can("root, to become nobody", rustix::process::geteuid().is_root()) {
        return;
    }
    let directory = crate::support::nobody::public_binaries(None);
    for (what, output) in [
        ("--profile", "--profile-output=/tmp/never.pb.gz"),
        ("--offcpu", "--offcpu-output=/tmp/never.pb.gz"),
        ("--pmu", "--pmu-output=/tmp/never.pb.gz"),
    ] {
        let ran = Ran::of(
            Command::new("setpriv")
                .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
                .arg(directory.path().join("stackwire"))
                .args(["record", "--all", "--duration=1s", what, output])
                .stdout(Stdio::null()),
        );
        ran.failed(1, "give the collector CAP_BPF and CAP_PERFMON");
    }
    let capture = Path::new("/tmp/stackwire-never.stackwire");
    let ran = Ran::of(
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(directory.path().join("stackwire-collector"))
            .args(["--all", "--duration=1s", "--output"])
            .arg(capture),
    );
    ran.failed(1, "give the collector CAP_BPF and CAP_PERFMON");
    assert!(!capture.exists(), "an empty capture was left behind");
    assert!(!Path::new("/tmp/never.pb.gz").exists());
}

#[test]
fn no_btf() {
    if !crate::support::can("root, to hide the kernel's BTF", rustix::process::geteuid().is_root())
    {
        return;
    }
    let record = |what: &[&str]| {
        let mut shell = Command::new("unshare");
        shell.args(["-m", "sh", "-c", "mount -t tmpfs none /sys/kernel/btf && exec \"$@\"", "sh"]);
        shell.arg(binary("stackwire-collector"));
        Ran::of(shell.args(["--all", "--duration=1s", "--output=/dev/null"]).args(what))
    };
    for what in [&["--profile", "--source=bpf"][..], &["--offcpu"], &["--pmu"]] {
        record(what).failed(1, "this kernel has no /sys/kernel/btf/vmlinux");
    }
    // Perf events need none.
    record(&["--profile"]).succeeded();
}

/// As kernels before 5.18 are: the tracepoint has fewer arguments. Here those of `sched_waking`.
#[test]
fn no_previous_state() {
    if !crate::support::can("root, to show another BTF", rustix::process::geteuid().is_root()) {
        return;
    }
    let mut btf = std::fs::read("/sys/kernel/btf/vmlinux").unwrap();
    let mut swapped = 0;
    let (switch, waking) = (b"\0btf_trace_sched_switch\0", b"\0btf_trace_sched_waking\0");
    for at in 0..btf.len() - switch.len() {
        let found = &mut btf[at..at + switch.len()];
        if found == switch || found == waking {
            let other = if found == switch { waking } else { switch };
            found.copy_from_slice(other);
            swapped += 1;
        }
    }
    assert_eq!(swapped, 2);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("btf");
    std::fs::write(&path, btf).unwrap();
    for (what, fails) in [("--profile", false), ("--offcpu", true), ("--pmu", true)] {
        let mut shell = Command::new("unshare");
        let show = "mount --bind \"$0\" /sys/kernel/btf/vmlinux && exec \"$@\"";
        shell.args(["-m", "sh", "-c", show]).arg(&path).arg(binary("stackwire-collector"));
        let ran = Ran::of(shell.args(["--all", "--duration=1s", "--output=/dev/null", what]));
        if fails {
            ran.failed(1, "waits and scheduling are recorded from kernel 5.19 on");
        } else {
            ran.succeeded();
        }
    }
}

#[test]
fn hardware_cycles_where_there_are_none() {
    if !privileged() {
        return;
    }
    let has_cycles = std::path::Path::new("/sys/bus/event_source/devices/cpu").exists();
    let ran = collector(&["--all", "--event=cycles", "--duration=1s", "--output=/dev/null"]);
    if has_cycles {
        drop(ran.succeeded())
    } else {
        ran.failed(1, "cpu-clock and page-faults are everywhere")
    }
}
