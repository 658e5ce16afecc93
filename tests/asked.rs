//! What people ask a server: `ps`, `fetch`, and the same over HTTP.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use stackwire_proto::v1;

use crate::support::build::work;
use crate::support::client::{epoch, hello, sealed};
use crate::support::server::Server;
use crate::support::tokens::Tokens;
use crate::support::{Pprof, Ran, Running, binary, privileged, stackwire, test_cache};

/// A server with three clients, one of whom reads everything.
struct Setting {
    tokens: Tokens,
    server: Server,
}

impl Setting {
    fn new() -> Self {
        let tokens = Tokens::new();
        let server = tokens.server(&tokens.path("out"), "127.0.0.1:0", &["--window=1h"]);
        Self { tokens, server }
    }

    /// Epochs of a second each, 10 samples in each.
    fn send(&self, name: &str, capture: u8, path: &str, epochs: u64) {
        let client = self.tokens.client(&self.server, name);
        let epochs: Vec<v1::CollectorMessage> =
            (0..epochs).map(|number| sealed(&epoch(number, path, &[1; 20], 0x1000, 10))).collect();
        let heard = client.send(hello(capture), epochs, |_| Vec::new());
        assert!(heard.acked.is_some() && heard.status.is_none(), "{heard:?}");
    }

    fn ask(&self, name: &str, arguments: &[&str]) -> Ran {
        let (command, rest) = arguments.split_first().unwrap();
        let from = [(*command).to_owned(), format!("--from=https://{}", self.server.address)];
        let proofs = self.tokens.proofs(name);
        stackwire(from.iter().chain(&proofs).map(String::as_str).chain(rest.iter().copied()))
    }

    fn file(&self, name: &str) -> String {
        self.tokens.path(name).to_str().unwrap().to_owned()
    }
}

#[test]
fn everybody_sees_what_they_sent_and_readers_see_all() {
    let setting = Setting::new();
    setting.send("alice", 1, "/bin/first", 3);
    setting.send("alice", 2, "/bin/second", 2);
    setting.send("bob", 3, "/bin/third", 1);
    let hosts = |name: &str| {
        let listed = setting.ask(name, &["ps"]).succeeded().stdout;
        let hosts = listed.lines().skip(1).map(|line| line.split(' ').next().unwrap().to_owned());
        hosts.collect::<Vec<_>>()
    };
    assert_eq!(hosts("alice"), ["host1", "host2"]);
    assert_eq!(hosts("bob"), ["host3"]);
    assert_eq!(hosts("ops"), ["host1", "host2", "host3"]);
    setting.ask("nobody", &["ps"]).failed(1, "the token is not one of --token-file");

    // Profiles, likewise. Their times are of the collectors.
    let samples = |name: &str, more: &[&str]| {
        let out = setting.file("out.pb.gz");
        let arguments = [&["fetch", "-o", &out], more].concat();
        setting.ask(name, &arguments).succeeded();
        Pprof::read(Path::new(&out)).count()
    };
    assert_eq!(samples("alice", &[]), 50);
    assert_eq!(samples("ops", &[]), 60);
    assert_eq!(samples("ops", &["--where=client=token:bob"]), 10);
    assert_eq!(samples("ops", &["--where=host=host1,host=host3"]), 40);
    setting
        .ask("bob", &["fetch", "-o", "-", "--where=host=host1"])
        .failed(1, "nothing that is kept");
    setting.ask("bob", &["fetch", "-o", "-", "--last=1m"]).failed(1, "nothing that is kept");
    // The second epoch of each: the greeting is at one second, the first epoch at two.
    let second = ["--since=2023-11-14T22:13:22Z", "--until=2023-11-14T22:13:23Z"];
    assert_eq!(samples("alice", &second), 20);
    let profile = Pprof::read(Path::new(&setting.file("out.pb.gz")));
    assert_eq!(profile.duration, 1_000_000_000, "it is of that second");
    assert_eq!(samples("alice", &["--where=comm=program"]), 50);
    setting
        .ask("alice", &["fetch", "-o", "-", "--where=comm=other"])
        .failed(1, "nothing that is kept");
    setting.ask("alice", &["fetch", "-o", "-", "--event=faults"]).failed(1, "no samples of faults");
    setting.ask("alice", &["fetch", "-o", "-", "--where=comm"]).failed(2, "LABEL=VALUE");
    let arguments = ["serve", "--output-dir=x", "--reader=tokens:ops"];
    stackwire(arguments).failed(2, "write token:NAME");
    setting.server.terminate();
}

#[test]
fn a_live_host_shows_its_rate_and_its_samples_in_every_format() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let outputs = directory.path().join("out");
    let socket = directory.path().join("socket");
    let listen = format!("unix:{}", socket.display());
    let server = Server::start(&outputs, &listen, &["--window=1h"]);
    let program = Running::start(Command::new(work()).args(["threads", "60"]));
    let mut collector = Command::new(binary("stackwire-collector"))
        .arg(format!("--pid={}", program.pid()))
        .args(["--sample-rate=199", "--epoch=500ms", "--pmu", "--profile"])
        .arg(format!("--to={listen}"))
        .spawn()
        .unwrap();
    let from = format!("--from={listen}");
    let mut listed = String::new();
    for _attempt in 0..100 {
        std::thread::sleep(Duration::from_millis(200));
        listed = stackwire(["ps", &from, "--live", "--format=json"]).succeeded().stdout;
        let found: serde_json::Value = serde_json::from_str(&listed).unwrap();
        if found["captures"][0]["samples"].as_u64().is_some_and(|samples| samples > 400) {
            break;
        }
    }
    let found: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let capture = &found["captures"][0];
    let (samples, rate) = (capture["samples"].as_u64(), capture["samples_per_second"].as_f64());
    assert!(samples.unwrap() > 400 && rate.unwrap() > 50.0, "{listed}");
    assert!(capture["whole_stacks"].as_u64() > capture["stacks"].as_u64().map(|all| all / 2));
    assert_eq!((&capture["live"], &capture["windows"]["open"]), (&true.into(), &1.into()));

    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let fetch = |name: &str, more: &[&str]| {
        let out = at(name);
        stackwire([&["fetch", &from, "--last=1h", "-o", &out], more].concat()).succeeded();
        std::fs::read(out).unwrap()
    };
    fetch("x.pb.gz", &["--where=comm=work"]);
    let profile = Pprof::read(Path::new(&at("x.pb.gz")));
    assert!(profile.count() > 400, "{}", profile.count());
    let lines = profile.locations.values().flat_map(|location| &location.lines);
    let lines: Vec<_> = lines.collect();
    let of_source =
        |(_, file, line): &&(String, String, u64)| file.ends_with("work.c") && *line > 0;
    assert!(lines.iter().any(of_source), "no function has its line: {lines:?}");
    let folded = String::from_utf8(fetch("x.folded", &[])).unwrap();
    assert!(folded.lines().all(|line| line.rsplit(' ').next().unwrap().parse::<u64>().is_ok()));
    let svg = String::from_utf8(fetch("x.svg", &[])).unwrap();
    assert!(svg.starts_with("<?xml") && svg.trim_end().ends_with("</svg>"));
    let pmu: serde_json::Value = serde_json::from_slice(&fetch("x.json", &[])).unwrap();
    assert!(pmu.is_object());
    let other = ["fetch", &from, "--format=pmu-json", "--where=comm=other", "-o", "-"];
    stackwire(other).failed(1, "nothing that is kept");
    assert!(String::from_utf8(fetch("x.txt", &[])).unwrap().contains("work"));
    fetch("x.data", &[]);
    let perf = Ran::of(Command::new("perf").args(["script", "-i", &at("x.data")])).succeeded();
    assert!(perf.stdout.contains("work"), "perf reads it");
    collector.kill().unwrap();
    collector.wait().unwrap();
    server.terminate();
}

#[test]
fn who_knows_no_stackwire_asks_over_http() {
    let setting = Setting::new();
    setting.send("alice", 1, "/bin/first", 3);
    let ca = setting.tokens.path("ca/ca.pem").to_str().unwrap().to_owned();
    let curl = |arguments: &[&str], path: &str| {
        let url = format!("https://{}{path}", setting.server.address);
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--cacert", &ca, "-w", "\n%{http_code} %{content_type}"]);
        let said = Ran::of(curl.args(arguments).arg(url)).succeeded().stdout;
        let (body, end) = said.rsplit_once('\n').unwrap();
        (end.to_owned(), body.to_owned())
    };
    let bearer = ["-H", "authorization: Bearer alice-1"];
    for protocol in ["--http1.1", "--http2"] {
        let (end, body) = curl(&[&bearer[..], &[protocol]].concat(), "/v1/captures");
        assert_eq!(end, "200 application/json");
        let found: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(found["captures"][0]["host"], "host1");
        assert_eq!(found["captures"][0]["samples"], 30);
    }
    let (end, body) = curl(&[], "/v1/captures");
    assert_eq!(end, "401 application/json");
    assert!(body.contains("give a client certificate, or a token"), "{body}");
    for (path, code, why) in [
        ("/v1/captures?lives=true", 400, "lives"),
        ("/v1/profile?last=15m&from=2026-01-01T00:00:00Z", 400, "ask for `last`, or for"),
        ("/v1/profile?from=yesterday", 400, "yesterday"),
        ("/v1/profile?format=gif", 400, "there are pprof, folded"),
        ("/v1/profile?where=comm=other", 404, "nothing that is kept"),
        ("/v1/nothing", 404, "/v1/openapi.json"),
    ] {
        let (end, body) = curl(&bearer, path);
        assert!(end.starts_with(&code.to_string()), "{path}: {end} {body}");
        assert!(body.contains(why), "{path}: {body}");
    }
    let (end, folded) = curl(&bearer, "/v1/profile?format=folded");
    assert!(end.starts_with("200 text/plain"), "{end}");
    assert!(folded.trim_end().ends_with(" 30"), "{folded}");
    let (_, document) = curl(&[], "/v1/openapi.json");
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    for path in ["/v1/captures", "/v1/profile", "/v1/openapi.json"] {
        assert!(document["paths"][path]["get"].is_object(), "{path}");
    }
    setting.server.terminate();
}

#[test]
fn probes_are_told_whether_collectors_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary("stackwire"));
    command.args(["serve", "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--output-dir"]);
    let (server, said) = Server::and_what_it_said(command.arg(directory.path()));
    let metrics = said.iter().find_map(|line| line.strip_prefix("stackwire: metrics on http://"));
    let metrics = metrics.unwrap().trim_end_matches("/metrics").to_owned();
    let get = |path: &str, more: &[&str]| {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "-w", "%{http_code}"]).args(more);
        Ran::of(curl.arg(format!("http://{metrics}{path}"))).succeeded().stdout
    };
    assert_eq!(get("/healthz", &[]), "ok\n200");
    for _attempt in 0..50 {
        if get("/readyz", &[]) == "ready\n200" {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(get("/readyz", &[]), "ready\n200");
    let text = get("/metrics", &[]);
    for line in [
        "stackwire_serve_ready 1",
        "# TYPE stackwire_serve_epochs_total counter",
        "stackwire_serve_windows{state=\"waiting\"} 0",
    ] {
        assert!(text.lines().any(|it| it == line), "no {line} in {text}");
    }
    let open = get("/metrics", &["-H", "accept: application/openmetrics-text"]);
    assert!(open.contains("# EOF"));
    // As grpcurl and Kubernetes ask.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        use tonic_health::pb::HealthCheckRequest;
        use tonic_health::pb::health_client::HealthClient;
        use tonic_reflection::pb::v1::ServerReflectionRequest;
        use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
        use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
        let channel = tonic::transport::Endpoint::try_from(format!("http://{}", server.address));
        let channel = channel.unwrap().connect().await.unwrap();
        for service in ["", "stackwire.v1.Symbolizer"] {
            let request = HealthCheckRequest { service: service.to_owned() };
            let health = HealthClient::new(channel.clone()).check(request).await.unwrap();
            assert_eq!(health.into_inner().status, 1, "{service} serves");
        }
        let message_request = Some(MessageRequest::ListServices(String::new()));
        let request = ServerReflectionRequest { message_request, ..<_>::default() };
        let asked = tokio_stream::once(request);
        let mut answers = ServerReflectionClient::new(channel)
            .server_reflection_info(asked)
            .await
            .unwrap()
            .into_inner();
        let answer = answers.message().await.unwrap().unwrap().message_response.unwrap();
        let MessageResponse::ListServicesResponse(listed) = answer else { panic!("{answer:?}") };
        let names: Vec<String> = listed.service.into_iter().map(|service| service.name).collect();
        assert!(names.contains(&"stackwire.v1.Symbolizer".to_owned()), "{names:?}");
    });
    server.terminate();
}

#[test]
fn answers_are_what_the_openapi_document_says() {
    let setting = Setting::new();
    setting.send("alice", 1, "/bin/first", 3);
    let [ca, document, captures, refusal] =
        ["ca/ca.pem", "openapi.json", "captures.json", "refusal.json"].map(|it| setting.file(it));
    for (path, to) in
        [("openapi.json", &document), ("captures", &captures), ("captures?live=maybe", &refusal)]
    {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--cacert", &ca, "-H", "authorization: Bearer alice-1", "-o", to]);
        Ran::of(curl.arg(format!("https://{}/v1/{path}", setting.server.address))).succeeded();
    }
    let validator = test_cache().join("validators/bin/openapi-spec-validator");
    Ran::of(Command::new(validator).arg(&document)).succeeded();
    // The schemas of an OpenAPI 3.1 document are JSON Schema of 2020-12.
    let script = "
import json, sys, jsonschema
document, captures, refusal = [json.load(open(path)) for path in sys.argv[1:]]
assert captures['captures'] and refusal['error']
def check(answer, schema):
    schema = {'$ref': schema, 'components': document['components']}
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=formats).validate(answer)
check(captures, '#/components/schemas/Captures')
error = document['components']['responses']['Error']['content']['application/json']['schema']
jsonschema.Draft202012Validator({**error, 'components': document['components']}).validate(refusal)
";
    let mut python = Command::new(test_cache().join("validators/bin/python"));
    Ran::of(python.args(["-c", script, &document, &captures, &refusal])).succeeded();
}
