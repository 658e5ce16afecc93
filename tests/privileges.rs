//! Who may do what: file capabilities, other users' processes, what is dropped, what is linked in.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::nobody::{NOBODY, OPENS_ALL, SAMPLES, public_binaries};
use crate::support::{Pprof, Ran, Running, binary, build::work, can, outside_cargo, privileged};

fn record_as_nobody(binaries: &Path, pid: u32, output: &Path) -> Ran {
    Ran::of(
        Command::new("setpriv")
            .args(NOBODY)
            .arg(binaries.join("stackwire"))
            .args(["record", "--profile", "--duration=2s", "--sample-rate=499"])
            .arg(format!("--pid={pid}"))
            .arg(format!("--profile-output={}", output.display()))
            .env_remove("TMPDIR")
            .env_remove("XDG_RUNTIME_DIR"),
    )
}

#[test]
fn nobody_records_its_own_and_another_users_process_with_file_capabilities() {
    if !privileged() {
        return;
    }
    let binaries = public_binaries(Some(SAMPLES));
    // A program everybody can read, so that its names can be found.
    let program = binaries.path().join("work");
    std::fs::copy(work(), &program).unwrap();
    std::fs::copy(crate::support::build::library(), binaries.path().join("libwork.so")).unwrap();
    let library = ["LD_LIBRARY_PATH", binaries.path().to_str().unwrap()];
    let outputs = tempfile::Builder::new().prefix("stackwire-out-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(outputs.path(), std::fs::Permissions::from_mode(0o777)).unwrap();

    let own = Running::start(
        Command::new("setpriv")
            .args(NOBODY)
            .arg(&program)
            .args(["plain", "30"])
            .env(library[0], library[1]),
    );
    let others =
        Running::start(Command::new(&program).args(["plain", "30"]).env(library[0], library[1]));
    for (name, pid) in [("own", own.pid()), ("others", others.pid())] {
        let output = outputs.path().join(name);
        record_as_nobody(binaries.path(), pid, &output).succeeded();
        let profile = Pprof::read(&output);
        assert!(profile.count() > 100, "{name}: {}", profile.count());
        assert!(profile.share_of("alpha") > 40.0, "{name}: {}", profile.share_of("alpha"));
        assert_eq!(profile.samples[0].labels["pid"], pid.to_string());
    }
}

#[test]
fn what_people_name_is_opened_with_their_own_rights() {
    if !privileged() {
        return;
    }
    // Open to all, in a directory that is not: only CAP_DAC_READ_SEARCH leads there.
    let hidden = tempfile::Builder::new().prefix("stackwire-hidden-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(hidden.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let victim = hidden.path().join("victim");
    std::fs::write(&victim, b"as it was").unwrap();
    std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o666)).unwrap();
    let cgroup = hidden.path().join("cgroup");
    std::os::unix::fs::symlink("/sys/fs/cgroup", &cgroup).unwrap();
    let binaries = public_binaries(Some(OPENS_ALL));
    let collector = binaries.path().join("stackwire-collector");
    let ran = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(NOBODY).arg(&collector).args(["--duration=1s"]).args(arguments);
        Ran::of(command.env("HOME", "/nonexistent"))
    };
    let output = format!("--output={}", victim.display());
    ran(&["--all", &output]).failed(1, "Permission denied");
    assert_eq!(std::fs::read(&victim).unwrap(), b"as it was");
    let cgroup = format!("--cgroup={}", cgroup.display());
    ran(&[&cgroup, "--output=/dev/null"])
        .failed(1, "is not a directory of the cgroup v2 hierarchy");
    // Nor do the capabilities stay away from what they are there for: a process that its user
    // cannot even see.
    let program = Running::start(Command::new(work()).args(["plain", "20"]));
    let script = format!(
        "mount -t proc -o hidepid=2 proc /proc && exec setpriv {} {} --duration=1s --pid={} --output=/dev/null",
        NOBODY.join(" "),
        collector.display(),
        program.pid()
    );
    Ran::of(Command::new("unshare").args(["--mount", "sh", "-c", &script])).succeeded();
}

#[test]
fn in_a_user_namespace_there_is_a_cache() {
    if !privileged() {
        return;
    }
    let home = tempfile::Builder::new().prefix("stackwire-home-").tempdir_in("/tmp").unwrap();
    std::fs::write(home.path().join("f"), "comm;main;work 3\n").unwrap();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(home.path(), Some(65534), Some(65534)).unwrap();
    let binaries = public_binaries(None);
    // The owner of `/` is nobody's number in there.
    let mut command = Command::new("setpriv");
    command.args(NOBODY).args(["unshare", "--user", "--map-user=1000", "--map-group=1000"]);
    command.arg(binaries.path().join("stackwire")).args(["report", "f"]).current_dir(&home);
    let ran = Ran::of(command.env("HOME", home.path()).env_remove("XDG_CACHE_HOME")).succeeded();
    assert_eq!(ran.stderr, "");
    assert!(home.path().join(".cache/stackwire/index.db").is_file(), "{}", ran.stdout);
}

/// Files below a directory.
fn files_below(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).unwrap().flatten();
    entries.map(|it| if it.path().is_dir() { files_below(&it.path()) } else { 1 }).sum()
}

#[test]
fn a_cache_in_somebody_elses_directory_is_not_used() {
    if !privileged() {
        return;
    }
    let place = tempfile::Builder::new().prefix("stackwire-place-").tempdir_in("/tmp").unwrap();
    let (theirs, ours) = (place.path().join("theirs"), place.path().join("ours"));
    std::fs::create_dir(&theirs).unwrap();
    std::fs::create_dir(&ours).unwrap();
    // Planted before root comes.
    std::os::unix::fs::symlink(&ours, theirs.join("stackwire")).unwrap();
    for path in [&theirs, &theirs.join("stackwire")] {
        std::os::unix::fs::lchown(path, Some(65534), Some(65534)).unwrap();
    }
    let program = Running::start(Command::new(work()).args(["plain", "20"]));
    let pid = format!("--pid={}", program.pid());
    for (home, used) in [(&theirs, false), (&ours, true)] {
        let mut command = Command::new(binary("stackwire"));
        command.args(["record", &pid, "--duration=2s", "--profile-output=/dev/null"]);
        let ran = Ran::of(command.env("XDG_CACHE_HOME", home)).succeeded();
        assert_eq!(files_below(&ours) > 0, used, "{}", ran.stderr);
        let said = "belongs to another user or can be written by others";
        assert_eq!(!ran.stderr.contains(said), used, "{}", ran.stderr);
    }
    assert!(std::fs::read_dir(ours.join("stackwire/unwind")).unwrap().count() > 0);
}

#[test]
fn an_installed_collector_is_for_its_group_only() {
    if !privileged() {
        return;
    }
    let prefix = tempfile::Builder::new().prefix("stackwire-install-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(prefix.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut make = Command::new("make");
    let status = outside_cargo(&mut make)
        .args(["-s", "install", "GROUP=nogroup"])
        .arg(format!("PREFIX={}", prefix.path().display()))
        .current_dir(root)
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    let bin = prefix.path().join("bin");
    let metadata = std::fs::metadata(bin.join("stackwire-collector")).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o7777, 0o750);
    for page in ["stackwire.1", "stackwire-record.1", "stackwire-collector.1"] {
        assert!(prefix.path().join("share/man/man1").join(page).is_file(), "no {page}");
    }
    assert!(prefix.path().join("share/bash-completion/completions/stackwire.bash").is_file());
    let as_user = |group: &str| {
        let output = prefix.path().join(format!("out-{group}"));
        std::fs::create_dir(&output).unwrap();
        std::fs::set_permissions(&output, std::fs::Permissions::from_mode(0o777)).unwrap();
        Ran::of(
            Command::new("setpriv")
                .args(["--reuid=65534", &format!("--regid={group}"), "--clear-groups"])
                .arg(bin.join("stackwire"))
                .args(["record", "--profile", "--all", "--duration=1s"])
                .arg(format!("--profile-output={}", output.join("p").display())),
        )
    };
    let busy = Running::start(Command::new(work()).args(["plain", "20"]));
    as_user("65534").succeeded();
    as_user("12345").failed(1, "who may execute the collector may profile");
    drop(busy);
}

#[test]
fn a_running_collector_holds_at_most_perfmon() {
    if !privileged() {
        return;
    }
    let mut child = Command::new(binary("stackwire-collector"))
        .args(["--all", "--output=/dev/null", "--verbose"])
        .args([
            "--profile",
            "--offcpu",
            "--offcpu-wakers",
            "--pmu",
            "--event=cpu-clock,page-faults",
        ])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stderr = std::io::BufReader::new(child.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut stderr, &mut line).unwrap();
    assert_eq!(line.trim(), "stackwire-collector: sampling; capabilities held: CAP_PERFMON");
    std::thread::sleep(std::time::Duration::from_millis(300));
    let mut threads = 0;
    for task in std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().to_owned()
        };
        let held = u64::from_str_radix(&field("CapPrm:"), 16).unwrap();
        assert_eq!(held & !(1 << 38), 0, "a thread may use {held:x}");
        assert_eq!(field("CapInh:"), "0000000000000000");
        assert_eq!(field("CapAmb:"), "0000000000000000");
        assert_eq!(field("NoNewPrivs:"), "1");
        threads += 1;
    }
    assert!(threads >= 2);
    // Its broker may open what others may not, and nothing else; its two unwind compilers may
    // nothing.
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let children = std::fs::read_to_string(children).unwrap();
    let children: Vec<u32> = children.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    let mut found = Vec::new();
    for pid in &children {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
        };
        let held = u64::from_str_radix(&field("CapPrm:"), 16).unwrap();
        assert_eq!((field("CapEff:"), field("NoNewPrivs:")), (field("CapPrm:"), "1".to_owned()));
        assert_eq!((field("CapInh:"), field("CapAmb:")), ("0".repeat(16), "0".repeat(16)));
        found.push((field("Name:"), held, field("Seccomp:")));
        // Nothing but its channel and /dev/null: not the way to another process of the collector's.
        // What it works on comes and goes.
        let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while open() != 4 {
            assert!(std::time::Instant::now() < deadline, "{} descriptors: {found:?}", open());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    found.sort();
    // CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE; a filter of system calls is mode
    // 2.
    let broker = ("sw-broker", 1 << 2 | 1 << 19 | 1 << 40, "0");
    let expected = [broker, ("sw-unwind", 0, "2"), ("sw-unwind", 0, "2")];
    assert_eq!(found, expected.map(|(name, held, seccomp)| (name.into(), held, seccomp.into())));
    let _ = child.kill();
    let _ = child.wait();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while children.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        assert!(std::time::Instant::now() < deadline, "a child outlives its collector");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn the_collector_is_static_and_light() {
    let output =
        Command::new("readelf").arg("-lW").arg(binary("stackwire-collector")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!text.contains("INTERP"), "it needs a dynamic loader");
    let tree = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--locked",
            "--offline",
            "-e",
            "normal",
            "-p",
            "stackwire-collector",
            "--prefix=none",
        ])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .unwrap();
    let tree = String::from_utf8(tree.stdout).unwrap();
    assert!(tree.lines().count() > 20, "{tree}");
    // gimli is there, for the unwind compiler alone.
    for heavy in ["reqwest", "ureq", "addr2line", "blazesym", "rusqlite", "libsqlite3-sys"] {
        let found = tree.lines().any(|line| line.starts_with(&format!("{heavy} ")));
        assert!(!found, "the collector depends on {heavy}");
    }
}

#[test]
fn no_kernel_address_leaves_the_host() {
    if !privileged() {
        return;
    }
    let symbols = std::fs::read_to_string("/proc/kallsyms").unwrap();
    let address =
        symbols.lines().find(|line| line.ends_with(" _text")).unwrap().split(' ').next().unwrap();
    let text = u64::from_str_radix(address, 16).unwrap();
    if !can("readable kallsyms", text != 0) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.stackwire");
    let mut command = Command::new("dd");
    command.args(["if=/dev/zero", "of=/dev/null", "bs=64"]).stderr(Stdio::null());
    let program = Running(command.spawn().unwrap());
    Ran::of(Command::new(binary("stackwire-collector")).args([
        format!("--pid={}", program.pid()),
        "--duration=2s".to_owned(),
        format!("--output={}", path.display()),
    ]))
    .succeeded();

    use stackwire_proto::v1::collector_message::Body;
    let mut reader = stackwire_proto::FrameReader::new(std::fs::File::open(&path).unwrap());
    let mut nodes_seen = 0;
    while let Some(message) = reader.next_message().unwrap() {
        match message.body {
            Some(Body::Epoch(sealed)) => {
                let epoch = stackwire_proto::open_epoch(&sealed).unwrap();
                let mut offset = 0i64;
                for delta in epoch.nodes.unwrap().offset_delta {
                    offset = offset.wrapping_add(delta);
                    assert!((offset as u64) < 1 << 47, "{offset:x} is a kernel address");
                    nodes_seen += 1;
                }
            }
            Some(Body::Artifact(chunk)) => {
                let piece = stackwire_proto::open_piece(&chunk).unwrap();
                let text = String::from_utf8_lossy(&piece).into_owned();
                assert!(!text.contains("ffffffff8"), "a snapshot holds absolute addresses");
            }
            _ => {}
        }
    }
    assert!(nodes_seen > 20);
}

/// Capabilities of all threads of a process that were found while it ran, and whether none may get
/// new ones.
fn rights_of(pid: u32) -> Vec<(u64, bool)> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("status")).ok();
    let rights = tasks.flatten().filter_map(status).filter_map(|status| {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let held = u64::from_str_radix(field("CapPrm:")?.trim(), 16).ok()?;
        Some((held, field("NoNewPrivs:")?.trim() == "1"))
    });
    rights.collect()
}

#[test]
fn the_symbolizer_of_root_holds_nothing_and_writes_where_root_may() {
    if !privileged() {
        return;
    }
    // Another user's directory, which a root without capabilities may not write to.
    let theirs = tempfile::Builder::new().prefix("stackwire-home-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(theirs.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    // Their program, which nobody else may read.
    let program = theirs.path().join("work");
    std::fs::copy(crate::support::build::inlined_cc(), &program).unwrap();
    let chown = Command::new("chown").args(["-R", "65534:65534"]).arg(theirs.path()).status();
    assert!(chown.unwrap().success());
    let mut started = Command::new("setpriv");
    let running = Running::start(started.args(NOBODY).arg(&program).arg("20"));
    let mut record = Command::new(binary("stackwire"))
        .args(["record", "--duration=3s", "--sample-rate=499", "--profile-output=x.pb.gz"])
        .args([&format!("--pid={}", running.pid()), "--flamegraph=x.svg"])
        // What has threads of its own.
        .args(["--debuginfod-url=http://127.0.0.1:9", "--metrics-listen=127.0.0.1:0"])
        .current_dir(&theirs)
        .spawn()
        .unwrap();
    let holds_nothing = || {
        let rights = rights_of(record.id());
        let good = rights.len() > 2 && rights.iter().all(|it| *it == (0, true));
        if good { Ok(()) } else { Err(rights) }
    };
    // Its threads are there when sampling begins, on a busy machine later than after a second.
    for _ in 0..600 {
        if holds_nothing().is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(holds_nothing(), Ok(()));
    // Beside the collector, a process that puts files in their places: CAP_DAC_OVERRIDE,
    // CAP_FOWNER.
    let children = format!("/proc/{0}/task/{0}/children", record.id());
    let children = std::fs::read_to_string(children).unwrap();
    let held: Vec<u64> = children
        .split_whitespace()
        .map(|pid| rights_of(pid.parse().unwrap()).iter().fold(0, |all, (held, _)| all | held))
        .collect();
    assert_eq!(held.len(), 2, "{held:x?}");
    assert!(held.contains(&(1 << 1 | 1 << 3)), "{held:x?}");
    assert!(record.wait().unwrap().success());
    let mut names: Vec<String> = std::fs::read_dir(&theirs)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["work", "x.pb.gz", "x.stackwire", "x.svg"]);
    // The collector handed the program over: its names are there.
    let profile = Pprof::read(&theirs.path().join("x.pb.gz"));
    let lines = profile.locations.values().flat_map(|location| &location.lines);
    let lines: Vec<&str> = lines.map(|(name, ..)| name.as_str()).collect();
    assert!(lines.contains(&"work(unsigned long)"), "{lines:?}");
    // Later, and from their files.
    let mut report = Command::new(binary("stackwire"));
    report.args(["report", "x.stackwire", "--folded=y.folded"]).current_dir(&theirs);
    Ran::of(&mut report).succeeded();
    assert!(std::fs::metadata(theirs.path().join("y.folded")).unwrap().len() > 0);
    // Where root without capabilities may not write: found out before sampling.
    let mut refused = Command::new(binary("stackwire"));
    refused.args(["record", "--all", "--perf-buildid-dir=laid", "--profile-output=z.pb.gz"]);
    Ran::of(refused.current_dir(&theirs)).failed(1, "cannot write laid: Permission denied");
    // What cannot be written leaves nothing behind.
    let mut nothing = Command::new(binary("stackwire"));
    nothing.args(["resolve", "work", "-o", "z.pb.gz"]).current_dir(&theirs);
    Ran::of(&mut nothing).failed(1, "work");
    assert_eq!(std::fs::read_dir(&theirs).unwrap().count(), 5);
}

/// Capabilities by their numbers (linux/capability.h), as capabilities(7) calls them.
fn named(held: u64) -> String {
    let known = [
        (1, "CAP_DAC_OVERRIDE"),
        (2, "CAP_DAC_READ_SEARCH"),
        (3, "CAP_FOWNER"),
        (19, "CAP_SYS_PTRACE"),
        (38, "CAP_PERFMON"),
        (40, "CAP_CHECKPOINT_RESTORE"),
    ];
    let rest = known.iter().fold(held, |rest, (bit, _)| rest & !(1 << bit));
    if rest != 0 {
        return format!("{held:x}, with one that no process may hold");
    }
    let names: Vec<&str> =
        known.iter().filter(|(bit, _)| held >> bit & 1 == 1).map(|(_, name)| *name).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(" ") }
}

/// What a process is in the table: `stackwire place` by its command line, others by their names.
fn role(pid: u32) -> Option<String> {
    let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = command.split('\0');
    let program = words.next()?.rsplit('/').next()?.to_owned();
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(match name.trim() {
        "sw-broker" | "sw-unwind" => name.trim().to_owned(),
        _ if words.next() == Some("place") => format!("{program} place"),
        _ => program,
    })
}

/// A process, and those it has started and they in turn.
fn tree(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let children = children.split_whitespace().map(|child| child.parse().unwrap());
    std::iter::once(pid).chain(children.flat_map(tree)).collect()
}

#[test]
fn the_table_of_capabilities_is_true() {
    if !privileged() {
        return;
    }
    let rows: Vec<Vec<&str>> = include_str!("../SECURITY.md")
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            line.trim_matches('|').split('|').map(|cell| cell.trim().trim_matches('`')).collect()
        })
        .collect();
    assert!(rows.len() == 5 && rows.iter().all(|row| row.len() == 4), "{rows:?}");
    let directory = tempfile::Builder::new().prefix("stackwire-table-").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let record = ["record", "--all", "--duration=4s", "--no-capture", "--profile-output=x.pb.gz"];
    // Without capabilities only processes of the same user are sampled.
    let mut busy = Command::new("setpriv");
    busy.args(NOBODY).args(["/usr/bin/python3", "-c", "while True: pass"]);
    let busy = Running(busy.spawn().unwrap());
    let pid = format!("--pid={}", busy.pid());
    let own = ["record", &pid, "--duration=4s", "--no-capture", "--profile-output=x.pb.gz"];
    for (column, caps) in [(1, None), (2, Some(Some(SAMPLES))), (3, Some(None))] {
        let binaries = caps.map(public_binaries);
        let mut command = match &binaries {
            None => Command::new(binary("stackwire")),
            Some(binaries) => {
                let mut command = Command::new("setpriv");
                command.args(NOBODY).arg(binaries.path().join("stackwire"));
                command
            }
        };
        command.args(if column == 3 { &own[..] } else { &record[..] }).current_dir(&directory);
        let cache = directory.path().join(format!("cache-{column}"));
        command.env("XDG_CACHE_HOME", cache).env_remove("TMPDIR").stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        // What each may do, and that it cannot get more.
        let expected = rows.iter().filter(|row| row[column] != "not there");
        let expected: BTreeMap<String, (String, bool)> =
            expected.map(|row| (row[0].to_owned(), (row[column].to_owned(), true))).collect();
        let held = || -> BTreeMap<String, (String, bool)> {
            // Of one role there may be several.
            let mut rights: BTreeMap<String, Vec<(u64, bool)>> = BTreeMap::new();
            for pid in tree(child.id()) {
                if let Some(role) = role(pid) {
                    rights.entry(role).or_default().extend(rights_of(pid));
                }
            }
            let of = |(role, rights): (String, Vec<(u64, bool)>)| {
                let all = rights.iter().fold(0, |all, (held, _)| all | held);
                (role, (named(all), rights.iter().all(|(_, no_new)| *no_new)))
            };
            rights.into_iter().map(of).collect()
        };
        // They begin with more, and give it up before they read.
        for _ in 0..600 {
            if held() == expected {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        std::thread::sleep(std::time::Duration::from_secs(1));
        assert_eq!(held(), expected, "column {column}");
        assert!(child.wait().unwrap().success());
    }
}
