//! Attacks on `serve`: each is refused, logged and counted, and an honest client comes through.
//!
//! What they cost the server is in `limits.rs`, what files that are handed over do to others in
//! `tenants.rs`, who may come at all in `secure.rs`.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use stackwire_proto::v1;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::support::Ran;
use crate::support::authority::Authority;
use crate::support::client::{bomb, epoch, hello, sealed};
use crate::support::server::Server;
use crate::support::tokens::Tokens;

struct Attacked {
    tokens: Tokens,
    stranger: Authority,
    server: Server,
    metrics: String,
}

impl Attacked {
    fn new() -> Self {
        let tokens = Tokens::new();
        let stranger = Authority::new(&tokens.path("other"));
        stranger.client("stranger", 2100);
        for (name, until) in [("expired", 2021), ("revoked", 2100)] {
            tokens.authority.client(name, until);
        }
        tokens.authority.revoke(&["revoked"]);
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let options = [
            format!("--metrics-listen={free}"),
            format!("--tls-client-ca={}", tokens.authority.file("ca.pem")),
            format!("--tls-client-crl={}", tokens.authority.file("crl.pem")),
            "--log-format=json".to_owned(),
            "--executables-max=1".to_owned(),
        ];
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let mut command = tokens.command(&tokens.path("out"), "127.0.0.1:0", &options);
        let (server, said) = Server::and_what_it_said(&mut command);
        // Each line is an object, from the first.
        for line in said {
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert!(line["message"].is_string(), "{line}");
        }
        Self { tokens, stranger, server, metrics: format!("http://{free}/metrics") }
    }

    /// How much was refused, by reason.
    fn refused(&self) -> BTreeMap<String, u64> {
        let asked = Ran::of(Command::new("curl").args(["-sS", &self.metrics])).succeeded().stdout;
        let counts = asked.lines().filter_map(|line| {
            let rest = line.strip_prefix("stackwire_serve_refused_total{reason=\"")?;
            let (reason, count) = rest.split_once("\"} ")?;
            Some((reason.to_owned(), count.parse().unwrap()))
        });
        counts.collect()
    }

    /// Does something that is refused for this reason, and logged with these words.
    #[track_caller]
    fn attack(&self, what: &str, reason: &str, words: &str, attack: impl FnOnce()) {
        let (before, logged) = (self.refused(), self.server.log().len());
        attack();
        let deadline = Instant::now() + Duration::from_secs(15);
        loop {
            let (now, log) = (self.refused(), self.server.log().split_off(logged));
            let has_words = |line: &String| {
                // Each line is an object.
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                assert!(line["time"].is_string() && line["level"].is_string(), "{line}");
                line["message"].as_str().unwrap().contains(words)
            };
            let is_logged = log.iter().any(has_words);
            // Of a connection that is refused, a client may try another.
            let grown = now.iter().filter(|(reason, count)| before[*reason] < **count);
            if is_logged && grown.map(|(reason, _)| reason.as_str()).eq([reason]) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {before:?}, then {now:?}; {log:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Comes with a certificate.
    fn with_certificate(&self, authority: &Authority, name: &str) {
        let read = |path: String| std::fs::read(path).unwrap();
        let identity = Identity::from_pem(
            read(authority.file(&format!("{name}.pem"))),
            read(authority.file(&format!("{name}.key"))),
        );
        let ca = Certificate::from_pem(read(self.tokens.authority.file("ca.pem")));
        let tls = ClientTlsConfig::new().ca_certificate(ca).identity(identity);
        let endpoint = Endpoint::try_from(format!("https://{}", self.server.address)).unwrap();
        let endpoint = endpoint.tls_config(tls).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            // With TLS 1.3 a client hears of it when it reads.
            let Ok(channel) = endpoint.connect().await else { return };
            let none = tokio_stream::empty::<v1::CollectorMessage>();
            let said = SymbolizerClient::new(channel).capture(none).await;
            assert!(said.is_err(), "{name} came in");
        });
    }

    /// Sends a message under somebody's name; what they hear.
    fn send(&self, name: &str, capture: u8, message: v1::CollectorMessage) -> tonic::Code {
        let client = self.tokens.client(&self.server, name);
        let heard = client.send(hello(capture), vec![message], |_| Vec::new());
        heard.status.map_or(tonic::Code::Ok, |status| status.code())
    }
}

fn one() -> v1::Epoch {
    epoch(0, "/nowhere/honest", &[0xcd; 20], 0x1000, 9)
}

#[test]
fn each_is_refused_logged_and_counted() {
    use tonic::Code;
    let it = Attacked::new();
    assert_eq!(it.send("alice", 1, sealed(&one())), Code::Ok);

    it.attack("a stranger's certificate", "handshake", "refused", || {
        it.with_certificate(&it.stranger, "stranger");
    });
    it.attack("a certificate that has expired", "handshake", "xpired", || {
        it.with_certificate(&it.tokens.authority, "expired");
    });
    it.attack("a certificate that is revoked", "handshake", "evoked", || {
        it.with_certificate(&it.tokens.authority, "revoked");
    });
    it.attack("no TLS", "handshake", "refused", || {
        let mut raw = std::net::TcpStream::connect(&it.server.address).unwrap();
        raw.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    });
    it.attack("a token that nobody has", "unauthenticated", "token", || {
        assert_eq!(it.send("nobody", 2, sealed(&one())), Code::Unauthenticated);
    });
    it.attack("the capture of another", "not_theirs", "somebody else", || {
        assert_eq!(it.send("mallory", 1, sealed(&one())), Code::PermissionDenied);
    });
    it.attack("an epoch that is none", "malformed", "mallory", || {
        let noise = v1::SealedEpoch { number: 0, length: 99, zstd: vec![7; 500] };
        let message = v1::CollectorMessage { body: Some(Body::Epoch(noise)) };
        assert_eq!(it.send("mallory", 3, message), Code::InvalidArgument);
    });
    it.attack("a zstd bomb", "limit", "--epoch-max", || {
        assert_eq!(it.send("mallory", 4, sealed(&bomb())), Code::InvalidArgument);
    });
    it.attack("a name of a megabyte", "limit", "--label-max", || {
        let mut long = one();
        long.strings[2] = "x".repeat(1 << 20);
        assert_eq!(it.send("mallory", 5, sealed(&long)), Code::InvalidArgument);
    });
    it.attack("a message of 40 MB", "malformed", "largest", || {
        let large = v1::SealedEpoch { number: 0, length: 1, zstd: vec![0; 40 << 20] };
        let message = v1::CollectorMessage { body: Some(Body::Epoch(large)) };
        assert_eq!(it.send("mallory", 6, message), Code::InvalidArgument);
    });
    it.attack("a gzip bomb", "malformed", "compressed", || {
        let mut zeros = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        let piece = vec![0; 1 << 20];
        (0..512).for_each(|_| zeros.write_all(&piece).unwrap());
        let zeros = zeros.finish().unwrap();
        let length = u32::try_from(zeros.len()).unwrap().to_be_bytes();
        let bomb = it.tokens.path("bomb");
        std::fs::write(&bomb, [&[1][..], &length, &zeros].concat()).unwrap();
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--http2", "--cacert", &it.tokens.authority.file("ca.pem")])
            .args(["-H", "content-type: application/grpc", "-H", "te: trailers"])
            .args(["-H", "grpc-encoding: gzip", "-H", "authorization: Bearer mallory-1", "-D", "-"])
            .arg("--data-binary")
            .arg(format!("@{}", bomb.display()))
            .arg(format!("https://{}/stackwire.v1.Symbolizer/Capture", it.server.address));
        // It is hung up on before it has sent all of it, and may hear nothing.
        let _ = Ran::of(&mut curl);
    });
    it.attack("more files than may be", "limit", "--executables-max", || {
        let mut many = one();
        let file = many.executables[0].clone();
        many.executables = (0..2)
            .map(|number| v1::Executable { build_id: vec![number + 1; 20], ..file.clone() })
            .collect();
        assert_eq!(it.send("mallory", 8, sealed(&many)), Code::Ok);
    });
    it.attack("headers without an end", "handshake", "headers are too large", || {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut tls = Command::new("openssl");
        tls.args([
            "s_client",
            "-quiet",
            "-connect",
            &it.server.address,
            "-bind",
            &free.to_string(),
        ]);
        let mut tls = tls.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let tls = tls.as_mut().unwrap();
        let headers = "GET / HTTP/1.1\r\nx: ".to_owned() + &"y".repeat(100_000);
        // It may be hung up on before all is sent.
        let _ = tls.stdin.as_mut().unwrap().write_all(headers.as_bytes());
        let _ = tls.wait();
    });
    it.attack("epochs that go back", "malformed", "epoch 3 came after", || {
        let client = it.tokens.client(&it.server, "mallory");
        let epochs = [5, 3].map(|number| sealed(&epoch(number, "/nowhere/x", &[1; 20], 0x1000, 1)));
        let heard = client.send(hello(9), epochs.to_vec(), |_| Vec::new());
        assert_eq!(heard.status.unwrap().code(), Code::InvalidArgument);
    });
    it.attack("a format to come", "malformed", "writes format 99", || {
        let client = it.tokens.client(&it.server, "mallory");
        let hello = v1::Hello { format: 99, ..hello(10) };
        let heard = client.send(hello, vec![sealed(&one())], |_| Vec::new());
        assert_eq!(heard.status.unwrap().code(), Code::FailedPrecondition);
    });
    it.attack("a web page that asks", "unauthenticated", "web pages", || {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--cacert", &it.tokens.authority.file("ca.pem"), "-w", "%{http_code}"])
            .args(["-H", "authorization: Bearer alice-1", "-H", "origin: https://evil.example"])
            .arg(format!("https://{}/v1/captures", it.server.address));
        let said = Ran::of(&mut curl).succeeded().stdout;
        assert!(said.ends_with("403"), "{said}");
    });
    it.attack("no greeting", "malformed", "greeting", || {
        let client = it.tokens.client(&it.server, "mallory");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let first = client.request(tokio_stream::once(sealed(&one())));
            let said = SymbolizerClient::new(client.connect().await).capture(first).await;
            assert_eq!(said.unwrap_err().code(), Code::InvalidArgument);
        });
    });

    assert_eq!(it.send("alice", 7, sealed(&one())), Code::Ok);
    it.server.terminate();
}

#[test]
fn web_pages_neither_send_nor_read() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), "127.0.0.1:0", &[]);
    let body = directory.path().join("body");
    std::fs::write(&body, [0; 5]).unwrap();
    let curl = |path: &str, more: &[&str]| {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "-o", "/dev/null", "-w", "%{http_code}"]).args(more);
        Ran::of(curl.arg(format!("http://{}{path}", server.address))).succeeded().stdout
    };
    let capture = "/stackwire.v1.Symbolizer/Capture";
    let body = format!("@{}", body.display());
    // What a form can send; and what a script can, of a page that is from elsewhere.
    let form = ["--data-binary", &body, "-H", "content-type: text/plain"];
    assert_eq!(curl(capture, &form), "415");
    let script = ["--data-binary", &body, "-H", "content-type: application/grpc"];
    assert_eq!(curl(capture, &script), "415", "HTTP/1");
    assert_eq!(curl("/v1/captures", &[]), "200");
    assert_eq!(curl("/v1/captures", &["-H", "origin: http://evil.example"]), "403");
    // A name that was made to lead here.
    assert_eq!(curl("/v1/captures", &["-H", "host: evil.example"]), "403");
    assert_eq!(curl("/v1/captures", &["-H", "host: localhost:4400"]), "200");
    server.terminate();
}
