//! What is in `deploy/`: manifests, units, images, alerts; checked by tools of their own worlds.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::support::nobody::NOBODY;
use crate::support::server::{Server, profiles};
use crate::support::{Pprof, Ran, Running, binary, outside_cargo, privileged, run, test_cache};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn deploy(path: &str) -> PathBuf {
    root().join("deploy").join(path)
}

/// A program of the tools that `tests/deploy.sh` gets.
fn tool(name: &str) -> Command {
    let tools = test_cache().join("tools/usr");
    let mut command = Command::new(tools.join("bin").join(name));
    command.env("LD_LIBRARY_PATH", tools.join("lib/x86_64-linux-gnu"));
    command
}

/// The same where everybody may run it: in `work`, with its libraries.
fn public_tool(name: &str, work: &Path) -> Command {
    let (program, libraries) = (work.join(name), work.join("lib"));
    let mut command = Command::new(&program);
    command.env("LD_LIBRARY_PATH", &libraries);
    if program.exists() {
        return command;
    }
    std::fs::create_dir_all(&libraries).unwrap();
    let original = tool(name);
    let mut ldd = Command::new("ldd");
    for (key, value) in original.get_envs() {
        ldd.env(key, value.unwrap());
    }
    for line in run(ldd.arg(original.get_program())).0.lines() {
        let found = line.split(" => ").nth(1).and_then(|it| it.split(' ').next());
        if let Some(library) = found.map(Path::new).filter(|it| it.starts_with(test_cache())) {
            std::fs::copy(library, libraries.join(library.file_name().unwrap())).unwrap();
        }
    }
    std::fs::copy(original.get_program(), &program).unwrap();
    run(Command::new("chmod").args(["-R", "a+rX"]).arg(&program).arg(&libraries));
    command
}

/// An overlay as it is applied.
fn built(overlay: &str) -> String {
    let own = test_cache().join("kustomize");
    let mut command = Command::new(if own.exists() { own.as_os_str() } else { "kubectl".as_ref() });
    command.arg(if own.exists() { "build" } else { "kustomize" });
    run(command.arg(deploy("kubernetes/overlays").join(overlay))).0
}

/// Documents of YAML.
fn parsed(yaml: &Path) -> Vec<Value> {
    let script = "import json, sys, yaml; json.dump(list(yaml.safe_load_all(open(sys.argv[1]))), sys.stdout)";
    let mut python = Command::new(test_cache().join("validators/bin/python"));
    serde_json::from_str(&run(python.args(["-c", script]).arg(yaml)).0).unwrap()
}

/// The overlays and the examples, in files.
fn manifests(directory: &Path) -> Vec<PathBuf> {
    let built = ["cluster", "cluster-pyroscope", "node"].map(|overlay| {
        let path = directory.join(format!("{overlay}.yaml"));
        std::fs::write(&path, built(overlay)).unwrap();
        path
    });
    let sidecar = deploy("kubernetes/examples/sidecar.yaml");
    built.into_iter().chain([sidecar]).collect()
}

#[test]
fn manifests_fit_two_versions_of_kubernetes() {
    let directory = tempfile::tempdir().unwrap();
    for manifest in manifests(directory.path()) {
        let mut validate = Command::new(test_cache().join("validators/bin/kubernetes-validate"));
        validate.args(["--strict", "-k", "1.30", "-k", "1.37"]).arg(&manifest);
        let checked = Ran::of(&mut validate).succeeded();
        let said = checked.stdout + &checked.stderr;
        // It does not fail for what it does not know.
        let unknown = said.lines().filter(|line| line.contains("WARN"));
        let unknown: Vec<_> = unknown.filter(|line| !line.contains("cert-manager.io/v1")).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        assert!(said.contains("1.30") && said.contains("1.37"), "{said}");
    }
    let kinds: BTreeSet<String> = parsed(&directory.path().join("cluster.yaml"))
        .iter()
        .map(|document| document["kind"].as_str().unwrap().to_owned())
        .collect();
    for kind in [
        "DaemonSet",
        "StatefulSet",
        "PodDisruptionBudget",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "Certificate",
        "Issuer",
        "Service",
    ] {
        assert!(kinds.contains(kind), "{kind} is not among {kinds:?}");
    }
}

/// Containers of collectors in the manifests: arguments and what they may.
fn collectors(directory: &Path) -> Vec<Value> {
    let mut found = Vec::new();
    for document in manifests(directory).iter().flat_map(|path| parsed(path)) {
        let pod = match document["kind"].as_str() {
            Some("Pod") => &document["spec"],
            _ => &document["spec"]["template"]["spec"],
        };
        for container in pod["containers"].as_array().into_iter().flatten() {
            let image = container["image"].as_str().unwrap();
            if !image.contains("stackwire") {
                continue;
            }
            assert_eq!(container["securityContext"]["privileged"], false, "{container}");
            assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true, "{container}");
            if image.contains("stackwire-collector") {
                found.push(container.clone());
            } else {
                let capabilities = &container["securityContext"]["capabilities"];
                assert_eq!(capabilities.to_string(), r#"{"drop":["ALL"]}"#);
            }
        }
    }
    found
}

/// What a collector that root starts has: to load its programs, as `make install` gives it to the
/// file, and what SECURITY.md says of its processes, which `privileges` compares with them.
fn needed() -> BTreeSet<String> {
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap();
    let start = makefile.lines().find_map(|line| line.strip_prefix("CAPS ?= ")).unwrap();
    let start = start.split(',').map(|name| name.to_uppercase());
    let security = include_str!("../SECURITY.md");
    let rows = security
        .lines()
        .filter(|line| line.starts_with("| `stackwire-collector`") || line.starts_with("| `sw-"));
    let of_root = rows.flat_map(|row| row.split('|').nth(2).unwrap().split_whitespace());
    let of_root = of_root.filter(|word| word.starts_with("CAP_")).map(str::to_owned);
    start.chain(of_root).collect()
}

fn names(list: &Value, prefix: &str) -> BTreeSet<String> {
    let names = list.as_array().unwrap().iter().map(|name| name.as_str().unwrap());
    names.map(|name| format!("{prefix}{name}")).collect()
}

#[test]
fn collectors_are_given_what_they_need_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let needed = needed();
    assert_eq!(needed.len(), 6, "{needed:?}");
    let collectors = collectors(directory.path());
    assert_eq!(collectors.len(), 4);
    for container in collectors {
        let capabilities = &container["securityContext"]["capabilities"];
        assert_eq!(names(&capabilities["add"], "CAP_"), needed);
        assert_eq!(names(&capabilities["drop"], ""), BTreeSet::from(["ALL".to_owned()]));
    }
    let unit = std::fs::read_to_string(deploy("systemd/stackwire-collector.service")).unwrap();
    for key in ["CapabilityBoundingSet=", "AmbientCapabilities="] {
        let given = unit.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        let given: BTreeSet<String> = given.split_whitespace().map(str::to_owned).collect();
        assert_eq!(given, needed, "{key}");
    }
}

#[test]
fn units_are_right_and_hardened() {
    let directory = tempfile::tempdir().unwrap();
    // A host that has the programs and nothing else.
    let at = |path: &str| directory.path().join(path);
    let units = at("usr/lib/systemd/system");
    std::fs::create_dir_all(units.join("stackwire-collector.service.d")).unwrap();
    std::fs::create_dir_all(at("usr/bin")).unwrap();
    for target in ["sysinit", "basic", "shutdown", "multi-user", "network"] {
        let stub = "[Unit]\nDescription=stub\n";
        std::fs::write(units.join(format!("{target}.target")), stub).unwrap();
    }
    for program in ["stackwire", "stackwire-collector"] {
        let path = at("usr/bin").join(program);
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let unit = format!("{program}.service");
        std::fs::copy(deploy("systemd").join(&unit), units.join(&unit)).unwrap();
    }
    let remote = units.join("stackwire-collector.service.d/remote.conf");
    for with_network in [false, true] {
        if with_network {
            std::fs::copy(deploy("systemd/remote.conf"), &remote).unwrap();
        }
        for unit in ["stackwire.service", "stackwire-collector.service"] {
            let mut verify = Command::new("systemd-analyze");
            verify.arg(format!("--root={}", directory.path().display())).args(["verify", unit]);
            let said = Ran::of(&mut verify).succeeded();
            // It says what it does not understand, and succeeds.
            assert_eq!((said.stdout.as_str(), said.stderr.as_str()), ("", ""), "{unit}");
            let mut security = Command::new("systemd-analyze");
            security.args(["security", "--offline=true", "--threshold=20", "--no-pager"]);
            let said = Ran::of(security.arg(units.join(unit))).succeeded().stdout;
            println!("{}", said.lines().last().unwrap());
        }
    }
}

#[test]
fn alerts_and_dashboards_ask_for_what_is_there() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary("stackwire"));
    command.args(["serve", "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]);
    // Nobody answers there, which is counted.
    command.args(["--debuginfod-url=http://127.0.0.1:1", "--output-dir"]).arg(directory.path());
    command.arg(format!("--symbol-cache-dir={}", directory.path().join("cache").display()));
    let (server, said) = Server::and_what_it_said(&mut command);
    let metrics = said.iter().find_map(|line| line.strip_prefix("stackwire: metrics on ")).unwrap();
    // A program that nobody has any more, and that is not handed over.
    let program = directory.path().join("python");
    std::fs::copy(std::fs::canonicalize("/usr/bin/python3").unwrap(), &program).unwrap();
    let busy = Running(Command::new(&program).args(["-c", "while True: pass"]).spawn().unwrap());
    std::thread::sleep(Duration::from_millis(200));
    std::fs::remove_file(&program).unwrap();
    let mut collect = Command::new(binary("stackwire-collector"));
    collect.args([&format!("--pid={}", busy.pid()), "--duration=1s", "--share-executables=never"]);
    Ran::of(collect.arg(format!("--to=http://{}", server.address))).succeeded();
    let mut text = String::new();
    for _attempt in 0..100 {
        text = run(Command::new("curl").args(["-sS", metrics])).0;
        if text.contains("stackwire_serve_windows_ended_total{outcome=\"written\"} 1") {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    server.terminate();
    let file = directory.path().join("metrics");
    std::fs::write(&file, &text).unwrap();
    let check = tool("promtool")
        .args(["check", "metrics"])
        .stdin(std::fs::File::open(&file).unwrap())
        .output()
        .unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));

    let rules = deploy("prometheus/rules.yaml");
    run(tool("promtool").args(["check", "rules", "--lint=all", "--lint-fatal"]).arg(&rules));
    run(tool("promtool").args(["test", "rules"]).arg(deploy("prometheus/rules-test.yaml")));
    let dashboard = std::fs::read_to_string(deploy("grafana/dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut asked: Vec<String> =
        targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    assert!(asked.len() > 15 && panels.len() > 10);
    let alerts = parsed(&rules);
    let alerts = alerts[0]["groups"][0]["rules"].as_array().unwrap();
    // The dashboard's expressions are PromQL.
    let recorded: String = asked
        .iter()
        .enumerate()
        .map(|(number, expression)| {
            let expression =
                expression.replace("$__rate_interval", "5m").replace("$instance", ".*");
            format!("  - record: dashboard:{number}\n    expr: {}\n", Value::from(expression))
        })
        .collect();
    let as_rules = directory.path().join("dashboard.yaml");
    std::fs::write(&as_rules, format!("groups:\n- name: dashboard\n  rules:\n{recorded}")).unwrap();
    run(tool("promtool").args(["check", "rules"]).arg(&as_rules));
    asked.extend(alerts.iter().map(|alert| alert["expr"].as_str().unwrap().to_owned()));
    // All of them are about what a server says, which has not counted everything yet.
    let known: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for expression in &asked {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for name in words.filter(|word| word.starts_with("stackwire_")) {
            let family = name.trim_end_matches("_bucket").trim_end_matches("_count");
            assert!(
                known.contains(name) || known.contains(family),
                "{name} is not among {known:?}"
            );
        }
    }
}

/// An image as it is built of a container file, by nobody, and its root.
fn image(containerfile: &str, context: &Path, work: &Path) -> (Value, PathBuf) {
    let name = containerfile.split('.').next().unwrap();
    let at = |part: &str| work.join(format!("{name}-{part}"));
    let policy = work.join("policy.json");
    std::fs::write(&policy, r#"{"default":[{"type":"insecureAcceptAnything"}]}"#).unwrap();
    let buildah = |arguments: &[&str]| {
        let tool = public_tool("buildah", work);
        let mut command = Command::new("setpriv");
        command.args(NOBODY).args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]);
        command.args(["unshare", "-Ur"]).arg(tool.get_program());
        for (key, value) in tool.get_envs() {
            command.env(key, value.unwrap());
        }
        command.arg("--root").arg(at("store")).arg("--runroot").arg(at("run"));
        command.args(["--storage-driver", "vfs"]).args(arguments);
        command.current_dir(work).env("HOME", work).env("XDG_RUNTIME_DIR", work);
        run(outside_cargo(&mut command));
    };
    let file = work.join(containerfile);
    std::fs::copy(deploy("container").join(containerfile), &file).unwrap();
    run(Command::new("chmod").arg("a+r").arg(&file).arg(&policy));
    let policy = format!("--signature-policy={}", policy.display());
    buildah(&[
        "bud",
        "--isolation=chroot",
        &policy,
        "--timestamp=0",
        "-q",
        "-t",
        "image:1",
        "-f",
        file.to_str().unwrap(),
        context.to_str().unwrap(),
    ]);
    let layout = format!("oci:{}:1", at("oci").display());
    buildah(&["push", &policy, "-q", "localhost/image:1", &layout]);

    let json =
        |path: PathBuf| -> Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let index = json(at("oci").join("index.json"));
    let blob = |digest: &Value| {
        let name = &digest.as_str().unwrap()["sha256:".len()..];
        at("oci").join("blobs/sha256").join(name)
    };
    let manifest = json(blob(&index["manifests"][0]["digest"]));
    let rootfs = at("rootfs");
    std::fs::create_dir(&rootfs).unwrap();
    for layer in manifest["layers"].as_array().unwrap() {
        run(Command::new("tar").arg("-xf").arg(blob(&layer["digest"])).arg("-C").arg(&rootfs));
    }
    // Where a runtime mounts things.
    for mounted in ["proc", "dev", "sys", "tmp", "spool", "var/lib/stackwire"] {
        std::fs::create_dir_all(rootfs.join(mounted)).unwrap();
    }
    (json(blob(&manifest["config"]["digest"]))["config"].take(), rootfs)
}

/// A symbolizer in a container without any privileges, and where it listens.
fn contained(work: &Path, rootfs: &Path, command: &[String]) -> (Child, String) {
    let mut container = Command::new("setpriv");
    container.args(NOBODY).args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]);
    let bwrap = public_tool("bwrap", work);
    container.arg(bwrap.get_program());
    for (key, value) in bwrap.get_envs() {
        container.env(key, value.unwrap());
    }
    // The network of the host stands for that of the cluster.
    container.args(["--unshare-all", "--share-net", "--uid", "65532", "--gid", "65532"]);
    container.arg("--ro-bind").arg(rootfs).arg("/");
    container.arg("--bind").arg(work.join("data")).arg("/var/lib/stackwire");
    container.args(["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--cap-drop", "ALL"]);
    // As the first process of its namespace, which it is in Kubernetes.
    container.args(["--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]);
    container.args(["--setenv", "XDG_CACHE_HOME", "/var/lib/stackwire/cache"]);
    container.args(command).stderr(Stdio::piped());
    let mut child = container.spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    let address = loop {
        let mut line = String::new();
        if stderr.read_line(&mut line).unwrap() == 0 {
            break format!("it ended: {said}");
        }
        if let Some(address) = line.trim().strip_prefix("stackwire: listening on ") {
            break address.to_owned();
        }
        said.push_str(&line);
    };
    std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
    (child, address)
}

#[test]
fn containers_of_the_container_files_profile_a_host() {
    if !privileged() {
        return;
    }
    let work = tempfile::Builder::new().prefix("stackwire-images-").tempdir_in("/tmp").unwrap();
    let data = work.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let context = work.path().join("context");
    let mut install = Command::new("make");
    install.args(["-s", "install", "PREFIX=/usr", &format!("DESTDIR={}", context.display())]);
    run(outside_cargo(install.current_dir(root())));
    run(Command::new("chmod").args(["-R", "a+rX"]).arg(&context));
    run(Command::new("chown").arg("-R").arg("65534:65534").arg(work.path()));
    let (symbolizer, symbolizer_root) = image("symbolizer.Containerfile", &context, work.path());
    let (collector, collector_root) = image("collector.Containerfile", &context, work.path());
    assert_eq!(symbolizer["User"], "65532:65532");
    assert_eq!(collector["Entrypoint"].to_string(), r#"["/usr/bin/stackwire-collector"]"#);

    // As the image says, but for the ports.
    let words = |list: &Value| -> Vec<String> {
        let words = list.as_array().unwrap().iter();
        words.map(|word| word.as_str().unwrap().replace("0.0.0.0:4400", "127.0.0.1:0")).collect()
    };
    let mut command = [words(&symbolizer["Entrypoint"]), words(&symbolizer["Cmd"])].concat();
    for word in &mut command {
        *word = word.replace("0.0.0.0:9400", "127.0.0.1:0");
    }
    let (mut server, address) = contained(work.path(), &symbolizer_root, &command);
    let elsewhere: Vec<String> =
        ["/usr/bin/stackwire", "serve", "--output-dir=/elsewhere"].map(str::to_owned).into();
    let (mut refused, why) = contained(work.path(), &symbolizer_root, &elsewhere);
    assert!(why.contains("Read-only file system"), "its root can be written to: {why}");
    assert!(!refused.wait().unwrap().success());

    let busy = Running(Command::new("python3").args(["-c", "while True: pass"]).spawn().unwrap());
    let mut container = tool("bwrap");
    // With the processes of the host, as `hostPID: true` has it.
    container.arg("--ro-bind").arg(&collector_root).args(["/", "--bind", "/proc", "/proc"]);
    container.args(["--ro-bind", "/sys", "/sys", "--dev", "/dev", "--tmpfs", "/tmp"]);
    container.args(["--tmpfs", "/spool", "--cap-drop", "ALL"]);
    for capability in needed() {
        container.args(["--cap-add", &capability]);
    }
    container.args(["--die-with-parent", "--clearenv", "/usr/bin/stackwire-collector", "--all"]);
    container.args(["--spool=/spool", "--unwind-cache-dir=/spool/unwind", "--duration=4s"]);
    container.args(["--source=bpf", "--verbose", &format!("--to=http://{address}")]);
    let collected = Ran::of(container.stdout(Stdio::null())).succeeded();
    assert!(collected.stderr.contains("samples taken"), "{}", collected.stderr);
    // It is told as Kubernetes tells it: setpriv became bwrap, whose child it is.
    let status =
        std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", server.id())).unwrap();
    let inner: i32 = status.split_whitespace().next().unwrap().parse().unwrap();
    let inner = rustix::process::Pid::from_raw(inner).unwrap();
    let _ = rustix::process::kill_process(inner, rustix::process::Signal::TERM);
    std::thread::sleep(Duration::from_millis(100));
    server.wait().unwrap();
    let written = profiles(&data.join("profiles"));
    assert_eq!(written.len(), 1, "{written:?}");
    let profile = Pprof::read(&written[0]);
    let of_busy =
        profile.samples.iter().filter(|sample| sample.labels["pid"] == busy.pid().to_string());
    let of_busy: u64 = of_busy.map(|sample| sample.count).sum();
    assert!(of_busy > 50, "{of_busy} samples of the busy process");
}
