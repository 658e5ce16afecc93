//! The whole host, with processes that come and go: labels, names, and no sample unaccounted for.

use std::collections::HashMap;
use std::process::Command;

use crate::support::{Pprof, Ran, binary, privileged, report, stackwire};

#[test]
fn two_thousand_short_processes() {
    if !privileged() {
        return;
    }
    let _alone = crate::support::alone();
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("out.pb.gz");
    let capture = directory.path().join("out.stackwire");
    // /bin/true and a program of our own with symbols, that lives for some 5 ms.
    let work = crate::support::build::work().to_str().unwrap();
    let script = format!(
        "i=0; while [ $i -lt 1000 ]; do /bin/true; {work} plain 0.005 >/dev/null; i=$((i+1)); done"
    );
    let mut shell = Command::new("sh").args(["-c", &script]).spawn().unwrap();
    let arguments = [
        "record".to_owned(),
        "--profile".to_owned(),
        "--all".to_owned(),
        "--duration=20s".to_owned(),
        "--sample-rate=499".to_owned(),
        format!("--profile-output={}", output.display()),
        format!("--capture={}", capture.display()),
    ];
    stackwire(arguments).succeeded();
    let _ = shell.kill();
    let _ = shell.wait();

    let profile = Pprof::read(&output);
    for sample in &profile.samples {
        for label in ["pid", "tid", "comm", "thread"] {
            assert!(sample.labels.contains_key(label), "{sample:?} has no {label}");
        }
    }
    profile.assert_addresses_in_mappings();
    let ours = profile.samples.iter().filter(|sample| sample.labels["comm"] == "work");
    let pids: std::collections::HashSet<_> =
        ours.map(|sample| sample.labels["pid"].clone()).collect();
    assert!(pids.len() > 300, "only {} of the short processes were seen", pids.len());

    let (mut frames, mut named) = (0, 0);
    for sample in &profile.samples {
        for id in &sample.locations {
            let file = profile.file_of(*id);
            if file == work
                || file.ends_with("/libc.so.6")
                || file.ends_with("/ld-linux-x86-64.so.2")
            {
                frames += sample.count;
                named += sample.count * u64::from(!profile.locations[id].lines.is_empty());
            }
        }
    }
    let share = named as f64 * 100.0 / frames as f64;
    assert!(share >= 99.0, "{share} % of {frames} frames with symbols are named");

    // "samples taken 123 = 120 in the profile + 3 lost", counted by the kernel and by Go.
    let text = report(&capture);
    let line = text.lines().find(|line| line.starts_with("samples taken")).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [taken, delivered, lost] = numbers[..] else { panic!("{line}") };
    assert_eq!(taken, delivered + lost);
    assert_eq!(delivered, profile.count());
    assert!(!text.contains("unaccounted"), "{text}");
}

/// When a kernel thread began; none when it is none. Flags, of which PF_KTHREAD is one, and start
/// time are the ninth field and the 22nd (proc_pid_stat(5)).
fn kernel_thread(pid: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit(") ").next()?.split(' ').skip(6);
    let flags: u64 = fields.next()?.parse().ok()?;
    fields.nth(12).filter(|_| flags & 0x20_0000 != 0).map(str::to_owned)
}

/// Tables come and go with processes, and a sample without a user walk must not have the frame of
/// the one before it. Ten minutes of it: `STACKWIRE_LONG=600s`.
#[test]
fn kernel_threads_have_no_user_frames() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let script = format!(
        "while :; do /bin/true; {work} plain 0.002; dd if=/dev/zero of=x bs=64k count=20 oflag=dsync; done >/dev/null 2>&1",
        work = crate::support::build::work().display()
    );
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().into_string().ok());
    let mut kernel_threads: HashMap<String, String> =
        pids.filter_map(|pid| Some((pid.clone(), kernel_thread(&pid)?))).collect();
    let mut shell =
        Command::new("sh").args(["-c", &script]).current_dir(&directory).spawn().unwrap();
    let duration = std::env::var("STACKWIRE_LONG").unwrap_or("15s".to_owned());
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["-a", "--sample-rate=4999", &format!("--duration={duration}")]);
    Ran::of(collector.arg("--output").arg(at("x.stackwire"))).succeeded();
    let _ = shell.kill();
    let _ = shell.wait();
    let resolve = ["resolve".into(), at("x.stackwire").into_os_string(), "-o".into()];
    stackwire(resolve.into_iter().chain([at("x.pb.gz").into_os_string()])).succeeded();
    let profile = Pprof::read(&at("x.pb.gz"));
    // Numbers are used again within minutes: those of before that are still there.
    kernel_threads.retain(|pid, began| kernel_thread(pid).as_ref() == Some(began));
    let (mut all, mut with) = (0, Vec::new());
    for sample in &profile.samples {
        if kernel_threads.contains_key(&sample.labels["pid"]) {
            all += sample.count;
            let files = sample.locations.iter().map(|&id| profile.file_of(id));
            let kernel = |file: &str| {
                file.starts_with('[') && !["[unmapped]", "[jit]", "[vdso]"].contains(&file)
            };
            let user = files.filter(|file| !kernel(file)).collect::<Vec<_>>();
            with.extend(user.first().map(|file| format!("{} in {file}", sample.labels["comm"])));
        }
    }
    eprintln!("{} of {all} samples of kernel threads have user frames", with.len());
    assert!(all > 50 && with.is_empty(), "{with:?} of {all}");
}

#[test]
fn a_full_ring_is_counted_and_told() {
    if !privileged() {
        return;
    }
    // Stopped for a while, the collector cannot keep up with deep stacks at a high rate.
    let directory = tempfile::tempdir().unwrap();
    let capture = directory.path().join("out.stackwire");
    let program = crate::support::Running::start(
        Command::new(crate::support::build::work()).args(["deep", "40"]),
    );
    let mut collector = Command::new(binary("stackwire-collector"))
        .args([format!("--pid={}", program.pid()), "--sample-rate=20000".to_owned()])
        .args(["--duration=6s".to_owned(), format!("--output={}", capture.display())])
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2500));
    let pid = rustix::process::Pid::from_raw(collector.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2000));
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert!(collector.wait().unwrap().success());
    let text = report(&capture);
    assert!(text.contains("ring buffer full"), "{text}");
    assert!(!text.contains("unaccounted"), "{text}");
}

#[test]
fn a_cgroup_and_those_below_it() {
    if !privileged() {
        return;
    }
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let root = mounts.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(' ').collect();
        (fields[2] == "cgroup2").then(|| fields[1].to_owned())
    });
    if !crate::support::can("a cgroup v2 hierarchy", root.is_some()) {
        return;
    }
    let outer = format!("{}/stackwire-test-{}", root.unwrap(), std::process::id());
    let inner = format!("{outer}/inner");
    std::fs::create_dir(&outer).unwrap();
    std::fs::create_dir(&inner).unwrap();
    let work = crate::support::build::work();
    let start = || crate::support::Running::start(Command::new(work).args(["plain", "30"]));
    let (member, stranger) = (start(), start());
    std::fs::write(format!("{inner}/cgroup.procs"), member.pid().to_string()).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let capture = directory.path().join("out.stackwire");
    let status = Command::new(binary("stackwire-collector"))
        .args(["--cgroup", &outer, "--duration=2s", "--sample-rate=499", "--output"])
        .arg(&capture)
        .status();
    let output = directory.path().join("out.pb.gz");
    let resolved =
        stackwire(["resolve".as_ref(), capture.as_os_str(), "-o".as_ref(), output.as_os_str()]);
    let (pid, other) = (member.pid().to_string(), stranger.pid().to_string());
    drop((member, stranger));
    let _ = std::fs::remove_dir(&inner);
    let _ = std::fs::remove_dir(&outer);
    assert!(status.unwrap().success());
    resolved.succeeded();
    let profile = Pprof::read(&output);
    assert!(profile.count() > 100, "{} samples", profile.count());
    assert!(
        profile.samples.iter().all(|sample| sample.labels["pid"] == pid),
        "{other} was sampled too"
    );
}

#[test]
fn a_cpu_that_goes_and_comes_back_is_sampled_again() {
    if !privileged() {
        return;
    }
    let _alone = crate::support::alone();
    let online = std::path::Path::new("/sys/devices/system/cpu/cpu1/online");
    let writable = std::fs::OpenOptions::new().write(true).open(online).is_ok();
    if !crate::support::can("a second CPU that can be taken offline", writable) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let capture = directory.path().join("out.stackwire");
    let work = crate::support::build::work();
    let _load: Vec<_> = (0..3)
        .map(|_| crate::support::Running::start(Command::new(work).args(["plain", "30"])))
        .collect();
    let mut collector = Command::new(binary("stackwire-collector"))
        .args(["--all", "--duration=12s", "--sample-rate=499", "--epoch=1s"])
        .args(["--profile", "--pmu", "--output"])
        .arg(&capture)
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2500));
    // Faster than the collector looks.
    std::fs::write(online, "0").unwrap();
    std::fs::write(online, "1").unwrap();
    // Slower.
    std::thread::sleep(std::time::Duration::from_secs(1));
    std::fs::write(online, "0").unwrap();
    std::thread::sleep(std::time::Duration::from_secs(2));
    std::fs::write(online, "1").unwrap();
    assert!(collector.wait().unwrap().success());

    use stackwire_proto::v1::collector_message::Body;
    let mut reader = stackwire_proto::FrameReader::new(std::fs::File::open(&capture).unwrap());
    let mut by_epoch = Vec::new();
    while let Some(message) = reader.next_message().unwrap() {
        if let Some(Body::Epoch(sealed)) = message.body {
            let samples = stackwire_proto::open_epoch(&sealed).unwrap().samples;
            let samples = &samples[0];
            by_epoch.push(samples.cpu.iter().filter(|&&cpu| cpu == 1).count());
        }
    }
    let after = &by_epoch[by_epoch.len() - 4..by_epoch.len() - 1];
    assert!(after.iter().all(|&samples| samples > 100), "samples on CPU 1 by second: {by_epoch:?}");
    // Counters of the CPU begin anew with it.
    let path = capture.to_str().unwrap();
    let sums = stackwire(["report", "--pmu", "--pmu-format=json", path]).succeeded().stdout;
    let sums: serde_json::Value = serde_json::from_str(&sums).unwrap();
    let faults = &sums["total"]["counters"]["page-faults"];
    let (counted, enabled_ns) = (faults["counted"].as_f64(), faults["enabled_ns"].as_f64());
    assert!(counted.is_some_and(|it| it > 0.0 && it < 1e9), "{faults}");
    assert!(enabled_ns.is_some_and(|it| it > 1e9 && it < 25e9), "{faults}");
}
