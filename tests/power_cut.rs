//! `stackwire serve`, ended at each of its steps on the disk: killed, or with the power cut. The
//! next start has all that was acknowledged, and writes it once, with its names.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use stackwire_proto::v1;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::v1::symbolizer_message::Body as Answer;

use crate::support::build::{library_named, offset_of_function};
use crate::support::client;
use crate::support::disk::{CALLS, Disk, Files, steps};
use crate::support::server::{Server, profiles};
use crate::support::{Pprof, binary};

const CAPTURES: u8 = 2;
const EPOCHS: u64 = 5;

/// A library that the samples are in; what is known of it is in the cache.
struct Library {
    path: String,
    offset: u64,
}

const BUILD_ID: [u8; 20] = [0xcd; 20];
const FUNCTION: &str = "known_name";

/// One sample of a thread that is called as the capture and the epoch.
fn epoch(capture: u8, number: u64, library: &Library) -> v1::CollectorMessage {
    let mut epoch = client::epoch(number, &library.path, &BUILD_ID, library.offset, 1);
    epoch.threads[0].comm = epoch.strings.len() as u32;
    epoch.strings.push(format!("c{capture}e{number}"));
    client::sealed(&epoch)
}

/// Sends a capture from where the server wants it. What it wanted first, and when it acknowledged
/// each epoch.
fn send(address: &str, capture: u8, library: &Library) -> (u64, BTreeMap<u64, f64>) {
    let hello = client::hello(capture);
    let message = |body| v1::CollectorMessage { body: Some(body) };
    let mut acknowledged = BTreeMap::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let wanted = runtime.block_on(async {
        let mut client = SymbolizerClient::connect(format!("http://{address}")).await.unwrap();
        let (out, outgoing) = tokio::sync::mpsc::unbounded_channel();
        out.send(message(Body::Hello(hello))).unwrap();
        let outgoing = tokio_stream::wrappers::UnboundedReceiverStream::new(outgoing);
        let mut answers = client.capture(outgoing).await.unwrap().into_inner();
        let Some(Answer::Welcome(welcome)) = answers.message().await.unwrap().unwrap().body else {
            panic!("no welcome")
        };
        for number in welcome.next_epoch..EPOCHS {
            out.send(epoch(capture, number, library)).unwrap();
            // One after the other, so that each has a sync of its own.
            while let Some(answer) = answers.message().await.unwrap() {
                if let Some(Answer::Ack(ack)) = answer.body {
                    assert_eq!(ack.epoch, number);
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                    acknowledged.insert(number, now.as_secs_f64());
                    break;
                }
            }
        }
        let end = v1::End { epochs: EPOCHS, taken: EPOCHS, ..v1::End::default() };
        out.send(message(Body::End(end))).unwrap();
        drop(out);
        while answers.message().await.unwrap().is_some() {}
        welcome.next_epoch
    });
    (wanted, acknowledged)
}

/// How often each epoch is in the profiles.
fn written(directory: &Path) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for path in profiles(directory) {
        let profile = Pprof::read(&path);
        for location in profile.locations.values() {
            // Of a table that is whole, or made again.
            assert_eq!(location.lines[0].0, FUNCTION, "{}", path.display());
        }
        for sample in profile.samples {
            *found.entry(sample.labels["thread"].clone()).or_default() += sample.count;
        }
    }
    found
}

fn all() -> BTreeMap<String, u64> {
    let names =
        (0..CAPTURES).flat_map(|capture| (0..EPOCHS).map(move |e| format!("c{capture}e{e}")));
    names.map(|name| (name, 1)).collect()
}

#[test]
fn what_was_acknowledged_is_in_one_profile_wherever_the_power_is_cut() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    // The cache makes its own by descriptors, which are not followed here.
    std::fs::create_dir_all(root.join("cache")).unwrap();
    let library = library_named(directory.path(), FUNCTION, BUILD_ID);
    let offset = offset_of_function(&library);
    let library = Library { path: library.to_str().unwrap().to_owned(), offset };
    let trace = directory.path().join("trace");
    let mut command = Command::new("strace");
    command.args(["-D", "-f", "-ttt", "-xx", "-s", "100000000", "-e", CALLS, "-o"]).arg(&trace);
    command.arg(binary("stackwire")).args(["serve", "--listen=127.0.0.1:0", "--window=2s"]);
    let cache = |root: &Path| format!("--symbol-cache-dir={}", root.join("cache").display());
    let server = Server::of(command.arg(cache(&root)).arg("--output-dir").arg(&root));
    let mut acknowledged = BTreeMap::new();
    for capture in 0..CAPTURES {
        let (first, times) = send(&server.address, capture, &library);
        assert_eq!((first, times.len() as u64), (0, EPOCHS));
        acknowledged.extend(times.into_iter().map(|(number, at)| ((capture, number), at)));
    }
    server.terminate();
    assert_eq!(written(&root), all());
    // The tracer goes on for a moment after its child.
    let mut text = std::fs::read_to_string(&trace).unwrap();
    while !text.trim_end().ends_with("+++") {
        std::thread::sleep(std::time::Duration::from_millis(20));
        text = std::fs::read_to_string(&trace).unwrap();
    }
    let steps = steps(&text);

    let mut disk = Disk::new(&root, &root.join("cache"));
    let mut states: BTreeMap<Files, (usize, &str)> = BTreeMap::new();
    for (number, step) in steps.iter().enumerate() {
        disk.apply(step);
        for (how, files) in [
            ("a kill", disk.after_a_kill()),
            ("a power cut", disk.after_a_power_cut(false)),
            ("a power cut in the middle of writes", disk.after_a_power_cut(true)),
        ] {
            // The last step that leaves it like this: most was acknowledged by then.
            states.insert(files, (number, how));
        }
    }
    // At the end all is synced but the index of the cache, which is made again; names that are gone
    // may come back.
    let (now, synced) = (disk.after_a_kill(), disk.after_a_power_cut(false));
    let is_index = |path: &Path| path.parent() == Some(&root.join("cache"));
    for (path, content) in now.iter().filter(|(path, _)| !is_index(path)) {
        assert!(synced.get(path) == Some(content), "{} is not synced", path.display());
    }
    // All of them take minutes: `STACKWIRE_CRASHES=all`.
    let every = if std::env::var_os("STACKWIRE_CRASHES").is_some() { 1 } else { states.len() / 60 };
    let mut tried = 0;
    for (files, (number, how)) in states.iter().step_by(every.max(1)) {
        let step = &steps[*number];
        let what = format!("{how} after step {number}, {}", step.text);
        let after = tempfile::tempdir().unwrap();
        disk.lay_out(files, after.path());
        let server =
            Server::start(after.path(), "127.0.0.1:0", &["--window=2s", &cache(after.path())]);
        for capture in 0..CAPTURES {
            let (wanted, _) = send(&server.address, capture, &library);
            // Acknowledged for certain: what the client had heard of when the next step was done.
            let until = steps.get(number + 1).map_or(f64::MAX, |next| next.at);
            let heard = acknowledged.iter().filter(|((of, _), at)| *of == capture && **at < until);
            let heard = heard.map(|((_, number), _)| number + 1).max().unwrap_or(0);
            assert!(wanted >= heard, "{what}: {heard} were acknowledged, {wanted} is wanted");
        }
        server.terminate();
        assert_eq!(written(after.path()), all(), "{what}");
        tried += 1;
    }
    eprintln!("{tried} of {} states of the disk, from {} steps", states.len(), steps.len());
    assert!(tried > 40);
}
