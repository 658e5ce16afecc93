//! What a client of `serve` may take: beyond that it is refused by name, and nobody else feels it.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::{ARTIFACT_PIECE_BYTES, seal_epoch, seal_piece, v1};

use crate::support::client::{Client, bomb, epoch, hello, sealed};
use crate::support::server::{Server, profiles};
use crate::support::tokens::Tokens;
use crate::support::{Pprof, peak_memory};

/// Most MiB that a server under attack may take, over what it takes at rest.
const GROWTH: u64 = 300;

struct Setting(Tokens);

impl Setting {
    fn new() -> Self {
        Self(Tokens::new())
    }

    fn server(&self, more: &[&str]) -> Server {
        self.0.server(&self.0.path("out"), "127.0.0.1:0", more)
    }

    fn client(&self, server: &Server, name: &str) -> Client {
        self.0.client(server, name)
    }

    /// An honest stream of 9 samples, which comes through.
    fn honest(&self, server: &Server, capture: u8) {
        let one = epoch(0, "/nowhere/honest", &[0xcd; 20], 0x1000, 9);
        let begun = Instant::now();
        let client = self.client(server, "alice");
        let heard = client.send(hello(capture), vec![sealed(&one)], |_| Vec::new());
        assert_eq!(heard.acked, Some(0), "{heard:?}");
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(10), "it took {took:?}");
    }

    fn samples(&self) -> u64 {
        let profiles = profiles(&self.0.path("out"));
        profiles.iter().map(|path| Pprof::read(path).count()).sum()
    }
}

/// What `mallory` is told who sends this.
fn refused(
    setting: &Setting,
    server: &Server,
    capture: u8,
    message: v1::CollectorMessage,
) -> String {
    let client = setting.client(server, "mallory");
    let heard = client.send(hello(capture), vec![message], |_| Vec::new());
    let status = heard.status.expect("it is refused");
    assert!(heard.acked.is_none());
    format!("{:?}: {}", status.code(), status.message())
}

/// A few KB that become as much as an epoch may have.
fn bombs() -> Vec<v1::CollectorMessage> {
    let one = || epoch(0, "/nowhere/bomb", &[0xee; 20], 0x1000, 1);
    let process = one().processes[0].clone();
    let thread = one().threads[0];
    let name = "x".repeat(1 << 20);
    let bombs = [
        bomb(),
        v1::Epoch { processes: vec![process; 1 << 20], ..one() },
        // One name for a million threads.
        v1::Epoch {
            strings: vec![String::new(), name.clone(), name],
            threads: vec![v1::Thread { comm: 1, ..thread }; 1 << 20],
            ..one()
        },
    ];
    bombs.iter().map(sealed).collect()
}

#[test]
fn a_few_kilobytes_do_not_become_gigabytes() {
    let setting = Setting::new();
    let server = setting.server(&[]);
    setting.honest(&server, 200);
    let before = peak_memory(server.pid());
    let bombs = bombs();
    for (number, bomb) in bombs.iter().enumerate() {
        let bytes = prost::Message::encoded_len(bomb);
        assert!(bytes < 100_000, "bomb {number} has {bytes} bytes");
        let said = refused(&setting, &server, number as u8, bomb.clone());
        assert!(said.starts_with("InvalidArgument"), "{number}: {said}");
        let named =
            ["--epoch-max", "--label-max", "limit of"].iter().any(|name| said.contains(name));
        assert!(named, "{number}: {said}");
    }
    // All at once, and again and again.
    std::thread::scope(|scope| {
        for stream in 0..16u8 {
            let (setting, server, bombs) = (&setting, &server, &bombs);
            scope.spawn(move || {
                for round in 0..2u8 {
                    let bomb = &bombs[usize::from(stream + round) % bombs.len()];
                    refused(setting, server, 10 + stream, bomb.clone());
                }
            });
        }
        setting.honest(&server, 201);
    });
    let grown = peak_memory(server.pid()) - before;
    assert!(grown < GROWTH, "the server grew by {grown} MiB");
    println!("bombs: the server grew by {grown} MiB");
    server.terminate();
    assert_eq!(setting.samples(), 18);
}

#[test]
fn what_says_it_is_small_and_is_not_is_cut() {
    let setting = Setting::new();
    let server = setting.server(&[]);
    // zstd that goes on behind what it says, a length that is a lie, a message beyond all limits.
    let mut sealed = seal_epoch(&epoch(0, "/nowhere/x", &[1; 20], 0, 1));
    sealed.zstd =
        seal_epoch(&v1::Epoch { strings: vec!["x".repeat(50 << 20)], ..<_>::default() }).zstd;
    let message =
        |sealed: v1::SealedEpoch| v1::CollectorMessage { body: Some(Body::Epoch(sealed)) };
    let said = refused(&setting, &server, 1, message(sealed.clone()));
    assert!(said.contains("does not decompress"), "{said}");
    sealed.length = u32::MAX;
    let said = refused(&setting, &server, 2, message(sealed.clone()));
    assert!(said.contains("more than the limit"), "{said}");
    sealed.zstd = vec![0; 40 << 20];
    let said = refused(&setting, &server, 3, message(sealed));
    assert!(said.contains("the largest may have"), "{said}");
    setting.honest(&server, 200);
    server.terminate();
}

#[test]
fn names_of_a_megabyte_and_names_that_lead_elsewhere_are_harmless() {
    let setting = Setting::new();
    let server = setting.server(&[]);
    let mut long = epoch(0, "/nowhere/x", &[1; 20], 0, 1);
    long.strings[2] = "y".repeat(1 << 20);
    let said = refused(&setting, &server, 1, sealed(&long));
    assert!(said.contains("a name of 1048576 bytes") && said.contains("--label-max"), "{said}");
    // Of a host: the profile stays where it belongs.
    let greeting = v1::Hello { hostname: "../../../tmp/x\ny\0z".to_owned(), ..hello(2) };
    let mut odd = epoch(0, "../../../../etc/passwd\n\0", &[1; 20], 0, 5);
    odd.strings[2] = "a\nb\u{1b}[31m".to_owned();
    let client = setting.client(&server, "mallory");
    let heard = client.send(greeting, vec![sealed(&odd)], |_| Vec::new());
    assert_eq!(heard.acked, Some(0), "{heard:?}");
    let greeting = v1::Hello { hostname: "h".repeat(1 << 20), ..hello(3) };
    let heard = client.send(greeting, Vec::new(), |_| Vec::new());
    assert!(heard.status.is_some_and(|status| status.message().contains("greeting")));
    server.terminate();
    let written = profiles(&setting.0.path("out"));
    assert_eq!(written.len(), 1, "{written:?}");
    let name = written[0].file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("_________tmp_x_y_z-"), "{name}");
}

#[test]
fn ten_thousand_streams_are_refused_but_for_the_limit_and_others_come_in() {
    const STREAMS: usize = 10_000;
    let setting = Setting::new();
    let server = setting.server(&["--streams-max=100"]);
    let before = peak_memory(server.pid());
    let mallory = setting.client(&server, "mallory");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (open, refused) = runtime.block_on(async {
        let mut open = Vec::new();
        let mut refused = 0;
        for _connection in 0..STREAMS / 100 {
            let channel = mallory.connect().await;
            for _stream in 0..100 {
                // They say nothing, and are streams all the same.
                let (out, outgoing) = tokio::sync::mpsc::unbounded_channel();
                let stream = tokio_stream::wrappers::UnboundedReceiverStream::new(outgoing);
                let mut client = SymbolizerClient::new(channel.clone());
                let request = mallory.request(stream);
                let answer = tokio::spawn(async move { client.capture(request).await });
                open.push((out, answer));
            }
        }
        let all = Instant::now() + Duration::from_secs(60);
        while Instant::now() < all
            && open.iter().filter(|(_, answer)| answer.is_finished()).count() < STREAMS - 100
        {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // More would be too many.
        tokio::time::sleep(Duration::from_millis(500)).await;
        for (_, answer) in &mut open {
            if answer.is_finished() {
                let status = answer.await.unwrap().unwrap_err();
                assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
                assert!(status.message().contains("token:mallory has 100 streams"), "{status}");
                refused += 1;
            }
        }
        (open, refused)
    });
    assert_eq!(refused, STREAMS - 100);
    setting.honest(&server, 200);
    let grown = peak_memory(server.pid()) - before;
    assert!(grown < GROWTH, "the server grew by {grown} MiB");
    drop(open);
    server.terminate();
    assert_eq!(setting.samples(), 9);
}

/// Pieces of an artifact, whatever is asked for.
fn endless(want: &v1::Want) -> Vec<v1::CollectorMessage> {
    let piece = vec![0; ARTIFACT_PIECE_BYTES];
    let length = 200 << 20;
    let at = (0..50).map(|number| number * ARTIFACT_PIECE_BYTES as u64);
    let hash = want.hash.as_slice().try_into().unwrap_or([1; 32]);
    let pieces = at.map(|at| {
        let kind =
            if want.file.is_some() { v1::ArtifactKind::File } else { v1::ArtifactKind::PerfMap };
        let mut chunk = seal_piece(&hash, kind, length, at, &piece);
        chunk.file = want.file.clone();
        v1::CollectorMessage { body: Some(Body::Artifact(chunk)) }
    });
    pieces.collect()
}

#[test]
fn endless_artifacts_end_and_the_report_says_so() {
    let setting = Setting::new();
    let server = setting.server(&["--artifacts-max=20", "--executables-max=2"]);
    let before = peak_memory(server.pid());
    let client = setting.client(&server, "mallory");
    let mut one = epoch(0, "/nowhere/first", &[1; 20], 0x1000, 9);
    for number in 2..5u8 {
        one.strings.push(format!("/nowhere/{number}"));
        let path = one.strings.len() as u32 - 1;
        let other =
            v1::Executable { path, build_id: vec![number; 20], ..one.executables[0].clone() };
        one.executables.push(other);
    }
    one.processes[0].perf_map = vec![Sha256::digest("map").to_vec()];
    let heard = client.send(hello(1), vec![sealed(&one)], endless);
    assert_eq!(heard.acked, Some(0), "{heard:?}");
    let files = heard.wants.iter().filter(|want| want.file.is_some()).count();
    assert_eq!(files, 2, "{heard:?}");
    let grown = peak_memory(server.pid()) - before;
    assert!(grown < GROWTH, "the server grew by {grown} MiB");
    let logs = setting.0.path("out/captures");
    setting.honest(&server, 200);
    server.terminate();
    let bytes = |entry: std::fs::DirEntry| entry.metadata().unwrap().len();
    let kept: u64 = std::fs::read_dir(logs).unwrap().map(|entry| bytes(entry.unwrap())).sum();
    assert!(kept < 30 << 20, "{kept} bytes are kept");
    let log = profiles(&setting.0.path("out")).into_iter();
    let said: Vec<String> = log
        .map(|path| crate::support::pprof::go(&["-comments"], &[&path]))
        .filter(|said| said.contains("--artifacts-max") || said.contains("--executables-max"))
        .collect();
    assert_eq!(said.len(), 1, "one of the two profiles says why names are missing");
}

#[test]
fn who_sends_too_fast_has_to_wait_and_loses_nothing() {
    let setting = Setting::new();
    let server = setting.server(&["--rate-max=1"]);
    let client = setting.client(&server, "mallory");
    let epochs = (0..4).map(|number| sealed(&epoch(number, "/nowhere/x", &[1; 20], 0, 200_000)));
    let epochs: Vec<_> = epochs.collect();
    let begun = Instant::now();
    let heard = client.send(hello(1), epochs, |_| Vec::new());
    assert_eq!(heard.acked, Some(3), "{heard:?}");
    assert!(heard.slow > 0, "{heard:?}");
    assert!(begun.elapsed() > Duration::from_secs(2), "{:?}", begun.elapsed());
    server.terminate();
    assert_eq!(setting.samples(), 800_000);
}

#[test]
fn lists_that_nobody_takes_are_made_one_at_a_time() {
    const CAPTURES: u16 = 1000;
    let setting = Setting::new();
    let server = setting.server(&[]);
    let client = setting.client(&server, "mallory");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let channel = client.connect().await;
        for number in 0..CAPTURES {
            let mut capture_id = vec![0; 16];
            capture_id[..2].copy_from_slice(&number.to_be_bytes());
            // Six times as long in JSON.
            let word = || "\u{1}".repeat(255);
            let hello = v1::Hello {
                capture_id,
                hostname: word(),
                collector_version: word(),
                kernel_release: word(),
                ..hello(0)
            };
            let first = tokio_stream::once(v1::CollectorMessage { body: Some(Body::Hello(hello)) });
            let mut of_channel = SymbolizerClient::new(channel.clone());
            let answers = of_channel.capture(client.request(first)).await;
            let mut answers = answers.unwrap().into_inner();
            while answers.message().await.unwrap().is_some() {}
        }
    });
    let before = peak_memory(server.pid());
    let url = format!("https://{}/v1/captures", server.address);
    let [ca, _] = setting.0.proofs("mallory");
    let ca = ca.trim_start_matches("--tls-ca=").to_owned();
    let asking: Vec<_> = (0..40)
        .map(|_| {
            let mut curl = Command::new("curl");
            curl.args(["-sS", "--cacert", &ca, "--limit-rate", "1k", "--max-time", "5"]);
            curl.args(["-H", "authorization: Bearer mallory-1", "-o", "/dev/null", &url]);
            curl.stderr(Stdio::null()).spawn().unwrap()
        })
        .collect();
    for mut curl in asking {
        let _ = curl.wait();
    }
    let grown = peak_memory(server.pid()) - before;
    assert!(grown < 80, "the server grew by {grown} MiB");
    setting.honest(&server, 200);
    server.terminate();
}
