//! nginx with two workers, in a directory of its own, asked for one compressed file again and
//! again: on a unix socket, or on loopback by others.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const CONFIGURATION: &str = "\
    daemon off; worker_processes 2; user root; pid pid; error_log stderr;\n\
    events {}\n\
    http {\n\
      access_log off; gzip on; gzip_types *; gzip_http_version 1.0; gzip_comp_level 6;\n\
      client_body_temp_path t; proxy_temp_path t; fastcgi_temp_path t; uwsgi_temp_path t; scgi_temp_path t;\n\
      server { listen LISTEN; root .; }\n\
    }\n";

/// Stopped when dropped.
pub(crate) struct Nginx {
    master: Child,
    directory: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Nginx {
    /// Starts it under load. `nginx` runs the program.
    pub(crate) fn start(nginx: Command) -> Self {
        let mut nginx = Self::listening(nginx, "unix:socket", |directory| {
            UnixStream::connect(directory.join("socket")).is_ok()
        });
        let clients = (0..2).map(|_| {
            let (socket, stop) = (nginx.directory.path().join("socket"), Arc::clone(&nginx.stop));
            std::thread::spawn(move || ask(socket, &stop))
        });
        nginx.clients = clients.collect();
        nginx
    }

    /// Starts it on loopback, where nobody asks it yet; and where its file is.
    pub(crate) fn idle(nginx: Command) -> (Self, String) {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let nginx = Self::listening(nginx, &free.to_string(), |_| TcpStream::connect(free).is_ok());
        (nginx, format!("http://{free}/file.txt"))
    }

    fn listening(mut nginx: Command, at: &str, answers: impl Fn(&Path) -> bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let configuration = CONFIGURATION.replace("LISTEN", at);
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("nginx.conf"), configuration).unwrap();
        let text: String =
            (0..20_000u32).map(|n| format!("{} ", n.wrapping_mul(2_654_435_761))).collect();
        std::fs::write(at("file.txt"), text).unwrap();
        nginx.arg("-p").arg(directory.path()).args(["-c", "nginx.conf", "-e", "stderr"]);
        nginx.current_dir(directory.path()).stderr(Stdio::null());
        let master = nginx.spawn().unwrap();
        let started = Instant::now();
        while !answers(directory.path()) {
            assert!(started.elapsed() < Duration::from_secs(20), "nginx does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { master, directory, stop: Arc::default(), clients: Vec::new() }
    }

    /// Its workers.
    pub(crate) fn workers(&self) -> BTreeSet<String> {
        let master = self.master.id().to_string();
        let output = Command::new("pgrep").args(["-P", &master]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    /// The process it was started as.
    pub(crate) fn master(&self) -> u32 {
        self.master.id()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            let _ = client.join();
        }
        // The master ends its workers.
        let pid = std::fs::read_to_string(self.directory.path().join("pid")).unwrap_or_default();
        let _ = Command::new("kill").args(["-TERM", pid.trim()]).status();
        let _ = self.master.wait();
    }
}

/// Requests on one connection each, as HTTP/1.0 has them.
fn ask(socket: PathBuf, stop: &AtomicBool) {
    let mut answer = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut stream) = UnixStream::connect(&socket) else { return };
        let request = b"GET /file.txt HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n";
        answer.clear();
        if stream.write_all(request).is_err() || stream.read_to_end(&mut answer).is_err() {
            return;
        }
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer[..200]));
    }
}
