//! A stripped program and the debuginfod server that has its debug file.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Ran, Running, binary, stackwire};

/// A program without its symbols, and the debug file with them.
pub(crate) struct Stripped {
    directory: tempfile::TempDir,
    pub(crate) program: PathBuf,
    /// Alone in a directory.
    pub(crate) debug: PathBuf,
    pub(crate) build_id: String,
}

impl Stripped {
    pub(crate) fn of(program: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let [stripped, debug] =
            ["program", "served/program.debug"].map(|name| directory.path().join(name));
        std::fs::create_dir(directory.path().join("served")).unwrap();
        let run =
            |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
        run(Command::new("objcopy").arg("--only-keep-debug").arg(program).arg(&debug));
        run(Command::new("strip").arg(program).arg("-o").arg(&stripped));
        let notes = Command::new("readelf").arg("-n").arg(program).output().unwrap();
        let notes = String::from_utf8_lossy(&notes.stdout).into_owned();
        let build_id =
            notes.split("Build ID: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
        Self { directory, program: stripped, debug, build_id }
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A capture of the program, which nothing names yet.
    pub(crate) fn capture(&self) -> PathBuf {
        let path = self.at("stripped.stackwire");
        let program = Running::start(Command::new(&self.program).args(["30"]));
        Ran::of(Command::new(binary("stackwire-collector")).args([
            &format!("--pid={}", program.pid()),
            "--duration=2s",
            "--sample-rate=199",
            "--kernel-stacks=false",
            &format!("--output={}", path.display()),
        ]))
        .succeeded();
        path
    }

    pub(crate) fn resolve(&self, capture: &Path, cache: &str, more: &[&str]) -> (Ran, PathBuf) {
        let output = self.at("out.pb.gz");
        let _ = std::fs::remove_file(&output);
        let mut command = Command::new(binary("stackwire"));
        command
            .arg("resolve")
            .arg(capture)
            .arg(format!("--output={}", output.display()))
            .arg(format!("--symbol-cache-dir={}", self.at(cache).display()))
            .args(more);
        (Ran::of(&mut command), output)
    }

    pub(crate) fn verify(&self, cache: &str) {
        let cache = format!("--symbol-cache-dir={}", self.at(cache).display());
        stackwire(["cache", &cache, "verify"]).succeeded();
    }
}

/// Elfutils' own server, on a directory.
pub(crate) struct RealServer {
    child: Child,
    pub(crate) url: String,
}

impl RealServer {
    pub(crate) fn start(files: &Path, state: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Command::new("debuginfod")
            .args(["-F", "-t", "0", "-g", "0", "-p", &port.to_string(), "-d"])
            .arg(state)
            .arg(files)
            .env("DEBUGINFOD_URLS", "")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("debuginfod is installed by tests/setup.sh");
        Self { child, url: format!("http://127.0.0.1:{port}") }
    }

    /// Waits until it has found a file.
    pub(crate) fn wait_for(&self, build_id: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        let address = self.url.trim_start_matches("http://");
        while Instant::now() < deadline {
            let mut answer = String::new();
            if let Ok(mut stream) = TcpStream::connect(address) {
                let ask = format!("GET /buildid/{build_id}/section/.debug_line HTTP/1.0\r\n\r\n");
                let _ = stream.write_all(ask.as_bytes());
                let _ = stream.take(12).read_to_string(&mut answer);
            }
            if answer.ends_with(" 200") {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("debuginfod did not find {build_id}");
    }
}

impl Drop for RealServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
