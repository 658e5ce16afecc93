//! The first samples of programs nobody has met before: they are walked on once their tables are
//! there, from copies that go nowhere.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use prost::Message;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, open_epoch};

use crate::newborn::{Loop, whole};
use crate::support::whole::ended;
use crate::support::{Ran, binary, build, privileged};

/// Captures the host for 5 s with no table made before.
fn capture(directory: &Path, more: &[&str]) -> PathBuf {
    let file = directory.join("x.stackwire");
    let mut collector = Command::new(binary("stackwire-collector"));
    collector.args(["-a", "--sample-rate=997", "--duration=5s", "--output"]).arg(&file);
    let cache = tempfile::tempdir().unwrap();
    Ran::of(collector.args(more).env("XDG_CACHE_HOME", cache.path())).succeeded();
    file
}

/// Programs of Debian that do nothing but work, and what they are called.
fn programs() -> Vec<(&'static str, Loop)> {
    let start = |name, program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).stdin(File::open("/dev/zero").unwrap()).stdout(Stdio::null());
        (name, Loop(command.spawn().unwrap()))
    };
    vec![
        start(
            "perl",
            "perl",
            &["-e", "while (1) { $x{$i++ % 1000} .= 'a'; %x = () if $i % 1e5 == 0 }"],
        ),
        start("gzip", "gzip", &["-c"]),
        start("sha256sum", "sha256sum", &[]),
        start("python3", "python3", &["-c", "while True: sorted(str(i) for i in range(1000))"]),
    ]
}

#[test]
fn stacks_are_whole_from_the_first_sample() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let running = programs();
    std::thread::sleep(Duration::from_secs(1));
    let file = capture(directory.path(), &[]);
    for (comm, _) in &running {
        let (stacks, share, report) = whole(&file, comm, "..1");
        eprintln!("{comm}: {share} % of {stacks} in the first second");
        assert!(stacks > 100 && share >= 99.0, "{comm}: {share} % of {stacks}: {report}");
    }
}

#[test]
fn without_copies_they_end_where_tables_are_missing() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let running = programs();
    let file = capture(directory.path(), &["--stack-copies=off"]);
    let is_cut = |comm: &str| ended(&whole(&file, comm, "..1").2, "no unwind table yet") > 0.0;
    assert!(running.iter().any(|(comm, _)| is_cut(comm)), "all tables were there at once");
}

/// What is in the stack of a process while its stacks are copied is in no message of the capture.
#[test]
fn no_byte_of_a_stack_is_in_a_capture() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let running = Loop(Command::new(build::secret()).spawn().unwrap());
    let file = capture(directory.path(), &["--share-executables=always"]);
    drop(running);
    let (stacks, share, report) = whole(&file, "secret", "..1");
    assert!(stacks > 100 && share >= 99.0, "{share} % of {stacks}: {report}");
    assert_no_secret(&file);
}

/// Bytes that each are 73 more than the one before are in no message of a capture.
pub(crate) fn assert_no_secret(file: &Path) {
    let is_secret = |bytes: &[u8]| bytes.windows(2).all(|two| two[1].wrapping_sub(two[0]) == 73);
    let mut reader = FrameReader::new(File::open(file).unwrap());
    let mut messages = 0;
    while let Some(message) = reader.next_message().unwrap() {
        let bytes = match &message.body {
            Some(Body::Epoch(sealed)) => open_epoch(sealed).unwrap().encode_to_vec(),
            _ => message.encode_to_vec(),
        };
        assert!(!bytes.windows(16).any(is_secret), "in message {messages}");
        messages += 1;
    }
    assert!(messages > 2, "{messages}");
}
