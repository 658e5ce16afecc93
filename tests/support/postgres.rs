//! PostgreSQL in a directory of its own, on a unix socket, under pgbench.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::can;

pub(crate) struct Postgres {
    /// Its programs.
    bin: PathBuf,
    directory: tempfile::TempDir,
}

impl Postgres {
    /// None where it is not installed, which is said.
    pub(crate) fn start() -> Option<Self> {
        let installed = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let bin = installed.map(|version| version.path().join("bin")).max();
        if !can("PostgreSQL", bin.is_some()) {
            return None;
        }
        let postgres = Self { bin: bin.unwrap(), directory: tempfile::tempdir().unwrap() };
        let data = postgres.data();
        std::fs::create_dir(&data).unwrap();
        let directory = postgres.directory.path();
        run(Command::new("chown").arg("postgres").args([data.as_path(), directory]));
        let place = data.to_str().unwrap();
        run(&mut postgres.command(&["initdb", "-D", place, "-A", "trust", "--no-sync"]));
        let options = format!(
            "-c listen_addresses= -c unix_socket_directories={} -c fsync=off",
            directory.display()
        );
        run(&mut postgres.command(&["pg_ctl", "-D", place, "-w", "-o", &options, "start"]));
        let socket = directory.to_str().unwrap();
        run(&mut postgres.command(&["pgbench", "-h", socket, "-i", "-s", "3", "postgres"]));
        Some(postgres)
    }

    /// The server itself.
    pub(crate) fn program(&self) -> PathBuf {
        self.bin.join("postgres")
    }

    /// Two clients, for so many seconds.
    pub(crate) fn under_pgbench(&self, seconds: u32) -> Load<'_> {
        let socket = self.directory.path().to_str().unwrap();
        let seconds = seconds.to_string();
        let client = ["pgbench", "-h", socket, "-c", "2", "-T", &seconds, "postgres"];
        let client = self.command(&client).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(500));
        Load { postgres: self, client }
    }

    /// So many transactions a second of two clients, for four seconds.
    pub(crate) fn transactions(&self, a_second: u32) {
        let socket = self.directory.path().to_str().unwrap();
        let rate = a_second.to_string();
        let client = ["pgbench", "-h", socket, "-n", "-c", "2", "-T", "4", "-R", &rate, "postgres"];
        run(&mut self.command(&client));
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// It refuses to be root's.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "env", "LC_ALL=C"]);
        command.arg(format!("PATH={}:/usr/bin:/bin", self.bin.display()));
        command.args(arguments).current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let data = self.data();
        let data = data.to_str().unwrap();
        let _ = self.command(&["pg_ctl", "-D", data, "-m", "immediate", "stop"]).status();
    }
}

/// pgbench while it runs.
pub(crate) struct Load<'a> {
    postgres: &'a Postgres,
    client: Child,
}

impl Load<'_> {
    /// The process the server was started as.
    pub(crate) fn master(&self) -> u32 {
        let server = std::fs::read_to_string(self.postgres.data().join("postmaster.pid")).unwrap();
        server.lines().next().unwrap().parse().unwrap()
    }

    /// Processes of the server.
    pub(crate) fn servers(&self) -> Vec<u32> {
        let master = self.master().to_string();
        let output = Command::new("pgrep").args(["-P", &master]).output().unwrap();
        let pids = String::from_utf8(output.stdout).unwrap();
        pids.lines().map(|pid| pid.parse().unwrap()).collect()
    }
}

impl Drop for Load<'_> {
    fn drop(&mut self) {
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

#[track_caller]
fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}
