//! Who may talk to `serve`: certificates, tokens, users; and nobody else.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::v1::symbolizer_message::Body as Answer;
use stackwire_proto::{FORMAT, seal_epoch, v1};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::support::authority::Authority;
use crate::support::build::work;
use crate::support::server::{Server, profiles};
use crate::support::{Pprof, Ran, Running, binary, privileged, stackwire};

fn collector(program: &Running, more: &[String]) -> Child {
    Command::new(binary("stackwire-collector"))
        .arg(format!("--pid={}", program.pid()))
        .args(["--epoch=300ms", "--sample-rate=199", "--drain-timeout=1s", "--verbose"])
        .args(more)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn samples(directory: &Path) -> u64 {
    profiles(directory).iter().map(|path| Pprof::read(path).count()).sum()
}

fn taken(output: &Output) -> u64 {
    let said = said(output);
    let line = said.lines().find(|line| line.contains("samples taken")).expect(&said);
    line.split_whitespace().find_map(|word| word.parse().ok()).unwrap()
}

/// A server with certificates of an authority.
fn server(outputs: &Path, authority: &Authority, more: &[&str]) -> Server {
    let tls = [
        format!("--tls-cert={}", authority.file("server.pem")),
        format!("--tls-key={}", authority.file("server.key")),
    ];
    let all: Vec<&str> = tls.iter().map(String::as_str).chain(more.iter().copied()).collect();
    Server::start(outputs, "127.0.0.1:0", &all)
}

fn client(authority: &Authority, name: &str) -> [String; 2] {
    [
        format!("--tls-cert={}", authority.file(&format!("{name}.pem"))),
        format!("--tls-key={}", authority.file(&format!("{name}.key"))),
    ]
}

/// What a collector is told that is to come in.
fn good(authority: &Authority, server: &Server, duration: &str) -> Vec<String> {
    let [certificate, key] = client(authority, "good");
    let to = format!("--to=https://{}", server.address);
    let ca = format!("--tls-ca={}", authority.file("ca.pem"));
    vec![to, ca, certificate, key, duration.to_owned()]
}

#[test]
fn collectors_with_good_certificates_come_in_and_no_others() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(&directory.path().join("ca"));
    let stranger = Authority::new(&directory.path().join("other"));
    authority.server("server");
    for (name, until) in [("good", 2100), ("expired", 2021), ("revoked", 2100)] {
        authority.client(name, until);
    }
    stranger.client("stranger", 2100);
    authority.revoke(&["revoked"]);
    let outputs = directory.path().join("out");
    let server = server(
        &outputs,
        &authority,
        &[
            &format!("--tls-client-ca={}", authority.file("ca.pem")),
            &format!("--tls-client-crl={}", authority.file("crl.pem")),
        ],
    );
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let port = server.address.rsplit(':').next().unwrap().to_owned();
    let ca = format!("--tls-ca={}", authority.file("ca.pem"));
    let to = format!("--to=https://localhost:{port}");
    let honest = |duration: &str| collector(&program, &good(&authority, &server, duration));
    let unharmed = honest("--duration=8s");
    let refused = [
        (client(&authority, "expired").to_vec(), to.clone(), ca.clone()),
        (client(&authority, "revoked").to_vec(), to.clone(), ca.clone()),
        (client(&stranger, "stranger").to_vec(), to.clone(), ca.clone()),
        (Vec::new(), to.clone(), ca.clone()),
        // It is not for the collector to talk to whoever is there.
        (
            client(&authority, "good").to_vec(),
            to.clone(),
            format!("--tls-ca={}", stranger.file("ca.pem")),
        ),
        // Nor in clear text.
        (Vec::new(), format!("--to=http://127.0.0.1:{port}"), ca.clone()),
    ];
    let refused: Vec<Child> = refused
        .into_iter()
        .map(|(mut more, to, ca)| {
            more.extend([to, ca, "--duration=1s".to_owned()]);
            collector(&program, &more)
        })
        .collect();
    for child in refused {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(said(&output).contains("0 delivered"), "{output:?}");
    }
    let unharmed = unharmed.wait_with_output().unwrap();
    assert!(unharmed.status.success(), "{unharmed:?}");
    // A certificate that is revoked while the server runs.
    authority.revoke(&["revoked", "good"]);
    let revoked = honest("--duration=1s").wait_with_output().unwrap();
    assert_eq!(revoked.status.code(), Some(1), "{revoked:?}");
    server.terminate();
    assert_eq!(samples(&outputs), taken(&unharmed));
}

#[test]
fn certificates_are_renewed_while_a_server_runs() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let old = Authority::new(&directory.path().join("old"));
    old.server("server");
    let outputs = directory.path().join("out");
    let tokens = directory.path().join("tokens");
    std::fs::write(&tokens, "node first\n").unwrap();
    let tokens_argument = format!("--token-file={}", tokens.display());
    let server = server(&outputs, &old, &[&tokens_argument]);
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let token = directory.path().join("token");
    std::fs::write(&token, "first\n").unwrap();
    let collect = |authority: &Authority| {
        let more = [
            format!("--to=https://{}", server.address),
            format!("--tls-ca={}", authority.file("ca.pem")),
            format!("--token-file={}", token.display()),
            "--duration=1s".to_owned(),
        ];
        collector(&program, &more).wait_with_output().unwrap()
    };
    assert!(collect(&old).status.success());
    let new = Authority::new(&directory.path().join("new"));
    new.server("server");
    for file in ["server.pem", "server.key"] {
        std::fs::copy(new.file(file), old.file(file)).unwrap();
    }
    std::fs::write(&tokens, "node second\n").unwrap();
    let output = collect(&new);
    assert!(said(&output).contains("the token is not one of --token-file"), "{output:?}");
    std::fs::write(&token, "second\n").unwrap();
    assert!(collect(&new).status.success());
    assert_eq!(collect(&old).status.code(), Some(1));
    server.terminate();
    assert_eq!(profiles(&outputs).len(), 2);
}

/// What is answered to a greeting that is sent with a client's certificate.
fn greet(
    server: &Server,
    authority: &Authority,
    name: &str,
    hello: &v1::Hello,
) -> Result<u64, tonic::Status> {
    let pem = |file: String| std::fs::read(file).unwrap();
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(pem(authority.file("ca.pem"))))
        .identity(Identity::from_pem(
            pem(authority.file(&format!("{name}.pem"))),
            pem(authority.file(&format!("{name}.key"))),
        ));
    let body = Some(Body::Hello(hello.clone()));
    let messages = [v1::CollectorMessage { body }].into_iter().chain(epochs());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let endpoint = Endpoint::try_from(format!("https://{}", server.address)).unwrap();
        let channel = endpoint.tls_config(tls).unwrap().connect().await.unwrap();
        let messages = tokio_stream::iter(messages);
        let mut answers = SymbolizerClient::new(channel).capture(messages).await?.into_inner();
        let mut welcome = None;
        while let Some(answer) = answers.message().await? {
            if let Some(Answer::Welcome(welcomed)) = answer.body {
                welcome = Some(welcomed.next_epoch);
            }
        }
        Ok(welcome.unwrap())
    })
}

/// Three that say that samples were lost.
fn epochs() -> impl Iterator<Item = v1::CollectorMessage> {
    (0..3).map(|number| {
        let lost = v1::Lost { reason: 1, count: 5, samples: true };
        let epoch = v1::Epoch { number, lost: vec![lost], ..v1::Epoch::default() };
        v1::CollectorMessage { body: Some(Body::Epoch(seal_epoch(&epoch))) }
    })
}

#[test]
fn a_capture_is_of_who_began_it() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(&directory.path().join("ca"));
    authority.server("server");
    authority.client("one", 2100);
    authority.client("two", 2100);
    let ca = format!("--tls-client-ca={}", authority.file("ca.pem"));
    let outputs = directory.path().join("out");
    let served = server(&outputs, &authority, &[&ca]);
    let hello = v1::Hello { format: FORMAT, capture_id: vec![7; 16], ..v1::Hello::default() };
    assert_eq!(greet(&served, &authority, "one", &hello).unwrap(), 0);
    let refused = greet(&served, &authority, "two", &hello).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
    served.terminate();
    // Nor is it after a restart.
    let served = server(&outputs, &authority, &[&ca]);
    let refused = greet(&served, &authority, "two", &hello).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
    assert_eq!(greet(&served, &authority, "one", &hello).unwrap(), 3);
    served.terminate();
}

#[test]
fn nothing_is_sent_or_taken_in_clear_text_unless_that_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let output = format!("--output-dir={}", directory.path().display());
    let refused = |more: &[&str], code: i32, why: &str| {
        let mut arguments = vec!["serve", "--listen=0.0.0.0:0", &output];
        arguments.extend(more);
        stackwire(arguments).failed(code, why);
    };
    refused(&[], 1, "give --tls-cert and --tls-key, or --insecure");
    refused(&["--tls-cert=x", "--tls-key=y"], 2, "add --tls-client-ca or --token-file");
    refused(&["--tls-cert=/nowhere", "--tls-key=y", "--tls-client-ca=z"], 1, "z: ");
    let mut collector = Command::new(binary("stackwire-collector"));
    let to = |collector: &mut Command, to: &str| {
        collector.args(["-a", "--duration=1s", to]);
    };
    to(&mut collector, "--to=http://symbolizer.example:4400");
    Ran::of(&mut collector).failed(2, "clear text");
    if !privileged() {
        return;
    }
    // Somebody who listens, and is not spoken to but in TLS.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut collector = Command::new(binary("stackwire-collector"));
    to(&mut collector, &format!("--to=https://{}", listener.local_addr().unwrap()));
    let mut child = collector.arg("--drain-timeout=0s").stderr(Stdio::null()).spawn().unwrap();
    let mut first = [0; 3];
    listener.accept().unwrap().0.read_exact(&mut first).unwrap();
    assert_eq!(first[..2], [0x16, 0x03], "a TLS handshake");
    let _ = child.wait();
}

#[test]
fn connections_over_which_nobody_is_let_in_are_closed() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(&directory.path().join("ca"));
    authority.server("server");
    authority.client("good", 2100);
    let client_ca = format!("--tls-client-ca={}", authority.file("ca.pem"));
    let served = server(&directory.path().join("out"), &authority, &[&client_ca]);
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let metrics_listen = format!("--metrics-listen={metrics}");
    let plain = Server::start(&directory.path().join("plain"), "127.0.0.1:0", &[&metrics_listen]);
    // Who takes no answers, of many that it asked for.
    let before = sockets(&plain);
    let deaf: Vec<TcpStream> = (0..20).map(|_| ask_and_take_nothing(&plain.address)).collect();
    std::thread::sleep(Duration::from_millis(300));
    assert!(sockets(&plain) >= before + deaf.len());
    // Some that say nothing, to a server with TLS and to one without, and to its metrics; one that
    // begins and stops.
    let connect = |server: &Server| TcpStream::connect(&server.address).unwrap();
    let mut idle: Vec<TcpStream> = (0..200).map(|_| connect(&served)).collect();
    let mut begun = connect(&plain);
    begun.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
    idle.extend([connect(&plain), begun]);
    idle.extend((0..50).map(|_| TcpStream::connect(metrics).unwrap()));
    // Meanwhile others come in.
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let honest = collector(&program, &good(&authority, &served, "--duration=1s"));
    assert!(honest.wait_with_output().unwrap().status.success());
    for mut stream in idle {
        stream.set_read_timeout(Some(Duration::from_secs(25))).unwrap();
        // Whatever it says before it hangs up.
        let ended = stream.read_to_end(&mut Vec::new());
        let waited = ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        assert!(!waited, "it is open after 25 s");
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while sockets(&plain) > before {
        assert!(Instant::now() < deadline, "{} are open, of {before}", sockets(&plain));
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(deaf);
    served.terminate();
    plain.terminate();
}

/// Descriptors of a server that are sockets.
fn sockets(server: &Server) -> usize {
    let open = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().flatten();
    let is_socket = |path: std::path::PathBuf| path.to_string_lossy().starts_with("socket:");
    open.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(is_socket)).count()
}

/// Asks for as much as one may who is nobody yet.
fn ask_and_take_nothing(address: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let asks = b"GET /v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(500);
    stream.write_all(&asks).unwrap();
    stream
}

#[test]
fn users_of_a_unix_socket_are_those_that_are_allowed() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let socket = format!("unix:{}", directory.path().join("socket").display());
    let outputs = directory.path().join("out");
    let server = Server::start(&outputs, &socket, &["--allow-uid=0", "--allow-gid=1234"]);
    let program = Running::start(Command::new(work()).args(["plain", "60"]));
    let to = |more: &[&str]| {
        let more = more.iter().map(|&more| more.to_owned());
        let more: Vec<String> = more.chain([format!("--to={socket}")]).collect();
        collector(&program, &more).wait_with_output().unwrap()
    };
    assert!(to(&["--duration=1s"]).status.success());
    // A user who is not: the socket says who it is, whatever is sent.
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let theirs =
        Running::start(Command::new("setpriv").args(nobody).arg(work()).args(["plain", "60"]));
    let mut stranger = Command::new("setpriv");
    stranger.args(nobody).arg(binary("stackwire-collector")).args([
        "--source=perf",
        "--duration=1s",
        "--drain-timeout=1s",
        &format!("--pid={}", theirs.pid()),
        &format!("--to={socket}"),
    ]);
    Ran::of(&mut stranger).failed(1, "uid 65534 and gid 65534 are not among");
    server.terminate();
    assert_eq!(profiles(&outputs).len(), 1);
}
