//! One stream, three ways to a profile: live, from its capture, through a server.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::Command;

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::v1::symbolizer_message::Body as Answer;
use stackwire_proto::{FrameReader, v1};

use crate::support::server::{Server, profiles};
use crate::support::{Running, build::work, privileged, stackwire};

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
