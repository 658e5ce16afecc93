//! Clients of one `serve` that share nothing: what one hands over names no samples of another.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{ARTIFACT_PIECE_BYTES, seal_piece, v1};

use crate::support::build::{library_named, offset_of_function};
use crate::support::client::{Heard, epoch, hello, sealed};
use crate::support::server::{Server, profiles};
use crate::support::tokens::Tokens;
use crate::support::{Pprof, stackwire};

/// What both files say they are.
const BUILD_ID: [u8; 20] = [0xab; 20];
const PATH: &str = "/nowhere/libshared.so";

/// Says what a file is.
fn announced(want: &v1::Want, content: &[u8]) -> v1::CollectorMessage {
    piece(want, content, 0, &[])
}

fn piece(want: &v1::Want, content: &[u8], at: u64, piece: &[u8]) -> v1::CollectorMessage {
    let (hash, length) = (Sha256::digest(content).into(), content.len() as u64);
    let mut chunk = seal_piece(&hash, v1::ArtifactKind::File, length, at, piece);
    chunk.file = want.file.clone();
    v1::CollectorMessage { body: Some(Body::Artifact(chunk)) }
}

/// Hands a file over when it is asked for it, as collectors do.
fn hand_over(content: &[u8]) -> impl FnMut(&v1::Want) -> Vec<v1::CollectorMessage> {
    move |want| {
        if want.hash_only {
            return vec![announced(want, content)];
        }
        let pieces = content.chunks(ARTIFACT_PIECE_BYTES).enumerate();
        let at = |number: usize| (number * ARTIFACT_PIECE_BYTES) as u64;
        pieces.map(|(number, part)| piece(want, content, at(number), part)).collect()
    }
}

struct Setting {
    tokens: Tokens,
    honest: PathBuf,
    forged: PathBuf,
}

impl Setting {
    fn new() -> Self {
        let tokens = Tokens::new();
        let honest = library_named(&tokens.path(""), "honest_name", BUILD_ID);
        let forged = library_named(&tokens.path(""), "forged_name", BUILD_ID);
        assert_eq!(offset_of_function(&honest), offset_of_function(&forged));
        Self { tokens, honest, forged }
    }

    fn server(&self, outputs: &str, more: &[&str]) -> (Server, PathBuf) {
        let outputs = self.tokens.path(outputs);
        (self.tokens.server(&outputs, "127.0.0.1:0", more), outputs)
    }

    fn cache(&self) -> PathBuf {
        self.tokens.path("cache")
    }

    /// One epoch under a token, with a file; what was asked for.
    fn send(
        &self,
        server: &Server,
        name: &str,
        capture: u8,
        answer: impl FnMut(&v1::Want) -> Vec<v1::CollectorMessage>,
    ) -> Heard {
        let client = self.tokens.client(server, name);
        let one = epoch(0, PATH, &BUILD_ID, offset_of_function(&self.honest), 9);
        let heard = client.send(hello(capture), vec![sealed(&one)], answer);
        assert_eq!((heard.acked, &heard.status.is_none()), (Some(0), &true), "{heard:?}");
        heard
    }
}

/// The name of the one function in the profile of a capture.
fn name(outputs: &Path, capture: u8) -> Option<String> {
    let of = format!("host{capture}-");
    let is_its = |path: &&PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&of);
    let profiles = profiles(outputs);
    let profile = Pprof::read(profiles.iter().find(is_its).expect("a profile"));
    assert_eq!(profile.count(), 9);
    let mut lines = profile.locations.values().flat_map(|location| &location.lines);
    lines.next().map(|(name, ..)| name.clone()).filter(|name| name.ends_with("_name"))
}

#[test]
fn what_one_hands_over_names_no_samples_of_another() {
    let setting = Setting::new();
    let [forged, honest] =
        [&setting.forged, &setting.honest].map(|path| std::fs::read(path).unwrap());
    let (server, outputs) = setting.server("first", &[]);
    setting.send(&server, "mallory", 1, hand_over(&forged));
    let asked = setting.send(&server, "alice", 2, hand_over(&honest));
    assert_eq!(asked.wants.len(), 2, "its hash, then the file: {asked:?}");
    // Its hash is enough the second time, for who sent it.
    let asked = setting.send(&server, "alice", 3, hand_over(&honest));
    assert_eq!(asked.wants.len(), 1, "{asked:?}");
    let only_its_hash =
        |want: &v1::Want| if want.hash_only { vec![announced(want, &honest)] } else { vec![] };
    let asked = setting.send(&server, "mallory", 4, only_its_hash);
    assert_eq!(asked.wants.len(), 2, "{asked:?}");
    // Nor in a profile of both.
    let out = setting.tokens.path("both.folded");
    let from = format!("--from=https://{}", server.address);
    let [ca, token] = setting.tokens.proofs("ops");
    let fetch = |choice: &str| {
        let out = out.to_str().unwrap();
        stackwire(["fetch", &from, &ca, &token, "-o", out, choice]).succeeded();
        std::fs::read_to_string(out).unwrap()
    };
    let both = fetch("--where=comm=program");
    assert!(!both.contains("_name") && both.trim_end().ends_with(" 36"), "{both}");
    assert!(fetch("--where=client=token:alice").contains("honest_name"));
    server.terminate();
    let named = [1, 2, 3, 4].map(|capture| name(&outputs, capture));
    let [forged_name, honest_name] =
        ["forged_name", "honest_name"].map(|name| Some(name.to_owned()));
    assert_eq!(named, [forged_name.clone(), honest_name.clone(), honest_name.clone(), None]);

    // Nor those of who asks by build-id.
    let hex = BUILD_ID.map(|byte| format!("{byte:02x}")).concat();
    let cache = format!("--symbol-cache-dir={}", setting.cache().display());
    let address = format!("{:#x}", offset_of_function(&setting.honest));
    stackwire(["symbolize", &hex, &cache, &address]).failed(1, &hex);

    // What is known of the build-id from elsewhere comes first, before what one hands over oneself.
    let path = setting.honest.to_str().unwrap();
    stackwire(["cache", &cache, "add", path]).succeeded();
    let (server, outputs) = setting.server("second", &[]);
    setting.send(&server, "mallory", 5, hand_over(&forged));
    server.terminate();
    assert_eq!(name(&outputs, 5), honest_name);
}

#[test]
fn a_local_file_comes_before_what_is_handed_over() {
    let setting = Setting::new();
    let forged = std::fs::read(&setting.forged).unwrap();
    let (server, outputs) = setting.server("out", &[]);
    let client = setting.tokens.client(&server, "mallory");
    let path = setting.honest.to_str().unwrap();
    // All files are shared, so it is asked for.
    let greeting = v1::Hello { share_all: true, ..hello(1) };
    let one = epoch(0, path, &BUILD_ID, offset_of_function(&setting.honest), 9);
    let heard = client.send(greeting, vec![sealed(&one)], hand_over(&forged));
    assert!(!heard.wants.is_empty(), "{heard:?}");
    server.terminate();
    assert_eq!(name(&outputs, 1).as_deref(), Some("honest_name"));
}

#[test]
fn executables_that_are_trusted_name_the_samples_of_all() {
    let setting = Setting::new();
    let forged = std::fs::read(&setting.forged).unwrap();
    let (server, outputs) = setting.server("trusting", &["--trust-executables"]);
    setting.send(&server, "mallory", 1, hand_over(&forged));
    server.terminate();
    let (server, _) = setting.server("trusting", &["--trust-executables"]);
    let asked = setting.send(&server, "alice", 2, |_| Vec::new());
    assert!(asked.wants.is_empty(), "it is in the cache: {asked:?}");
    server.terminate();
    assert_eq!(name(&outputs, 2).as_deref(), Some("forged_name"));
    // Whoever trusts no more is not misled by what is in the cache from then.
    let (server, outputs) = setting.server("careful", &[]);
    let honest = std::fs::read(&setting.honest).unwrap();
    setting.send(&server, "alice", 3, hand_over(&honest));
    server.terminate();
    assert_eq!(name(&outputs, 3).as_deref(), Some("honest_name"));
}
