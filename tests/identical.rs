//! One stream, three ways to a profile: live, from its capture, through a server.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::v1::symbolizer_message::Body as Answer;
use stackwire_proto::{FrameReader, v1};

use crate::support::{Running, binary, build::work, privileged, stackwire};

/// A `stackwire serve` on a port of its own.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    /// Lines it said since it listens.
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub(crate) fn start(output: &Path, listen: &str, more: &[&str]) -> Self {
        Self::of(
            Command::new(binary("stackwire"))
                .args(["serve", "--listen", listen, "--output-dir"])
                .arg(output)
                .args(more),
        )
    }

    pub(crate) fn of(command: &mut Command) -> Self {
        Self::and_what_it_said(command).0
    }

    /// The same, with the lines before the one that says where it listens.
    pub(crate) fn and_what_it_said(command: &mut Command) -> (Self, Vec<String>) {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let (mut address, mut said) = (String::new(), Vec::new());
        while address.is_empty() {
            let mut line = String::new();
            assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "the server ended");
            if let Some((_, found)) = line.trim().split_once("listening on ") {
                let end = found.find('"').unwrap_or(found.len());
                found[..end].clone_into(&mut address);
            }
            said.push(line.trim().to_owned());
        }
        // Read on, so that it never blocks on a full pipe.
        let log = Arc::<Mutex<Vec<String>>>::default();
        let lines = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                lines.lock().unwrap().push(line);
            }
        });
        (Self { child, address, log }, said)
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Ends it as an operator would, and waits for its last profiles.
    pub(crate) fn terminate(mut self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

/// Profiles in a directory.
pub(crate) fn profiles(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "gz")).collect();
    found.sort();
    found
}

/// Sends a saved capture as a collector would; artifacts only when wanted.
fn replay(capture: &Path, address: &str) {
    let mut reader = FrameReader::new(BufReader::new(File::open(capture).unwrap()));
    let (mut stream, mut artifacts) = (Vec::new(), Vec::new());
    while let Some(message) = reader.next_message().unwrap() {
        match &message.body {
            Some(Body::Artifact(_)) => artifacts.push(message),
            _ => stream.push(message),
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = SymbolizerClient::connect(format!("http://{address}")).await.unwrap();
        let (send, outgoing) = tokio::sync::mpsc::unbounded_channel();
        stream.into_iter().for_each(|message| send.send(message).unwrap());
        let outgoing = tokio_stream::wrappers::UnboundedReceiverStream::new(outgoing);
        let mut answers = client.capture(outgoing).await.unwrap().into_inner();
        let last = last_epoch(capture);
        let mut sending = Some(send);
        while let Some(v1::SymbolizerMessage { body }) = answers.message().await.unwrap() {
            match body {
                Some(Answer::Want(want)) => {
                    let wanted = |message: &&v1::CollectorMessage| {
                        matches!(&message.body, Some(Body::Artifact(chunk)) if chunk.hash == want.hash)
                    };
                    for message in artifacts.iter().filter(wanted) {
                        sending.as_ref().unwrap().send(message.clone()).unwrap();
                    }
                }
                Some(Answer::Ack(ack)) if ack.epoch == last => sending = None,
                _ => {}
            }
        }
    });
}

fn last_epoch(capture: &Path) -> u64 {
    let mut reader = FrameReader::new(BufReader::new(File::open(capture).unwrap()));
    let mut last = 0;
    while let Some(message) = reader.next_message().unwrap() {
        if let Some(Body::Epoch(epoch)) = message.body {
            last = epoch.number;
        }
    }
    last
}

#[test]
fn live_resolved_and_served_profiles_are_the_same_bytes() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let program = Running::start(Command::new(work()).args(["threads", "30"]));
    stackwire([
        "record",
        "--profile",
        &format!("--pid={}", program.pid()),
        "--duration=5s",
        "--sample-rate=499",
        &format!("--profile-output={}", at("live.pb.gz")),
        &format!("--capture={}", at("live.stackwire")),
    ])
    .succeeded();
    stackwire(["resolve", &at("live.stackwire"), "--output", &at("resolved.pb.gz")]).succeeded();

    let served = directory.path().join("served");
    let server = Server::start(&served, "127.0.0.1:0", &[]);
    replay(Path::new(&at("live.stackwire")), &server.address);
    server.terminate();

    let live = std::fs::read(at("live.pb.gz")).unwrap();
    assert!(live.len() > 500);
    assert!(live == std::fs::read(at("resolved.pb.gz")).unwrap(), "live and resolved differ");
    let served = profiles(&served);
    assert_eq!(served.len(), 1, "{served:?}");
    assert!(live == std::fs::read(&served[0]).unwrap(), "live and served differ");
}
