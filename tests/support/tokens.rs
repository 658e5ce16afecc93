//! Servers over TLS whose clients are known by tokens.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::authority::Authority;
use super::binary;
use super::client::Client;
use super::server::Server;

/// Clients there are; each has its token in a file of its name.
const CLIENTS: [&str; 4] = ["alice", "bob", "mallory", "ops"];

/// What servers and clients of a test are given.
pub(crate) struct Tokens {
    directory: tempfile::TempDir,
    pub(crate) authority: Authority,
}

impl Tokens {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(&directory.path().join("ca"));
        authority.server("server");
        let lines = CLIENTS.map(|name| format!("{name} {}\n", token(name)));
        std::fs::write(directory.path().join("tokens"), lines.concat()).unwrap();
        for name in CLIENTS.into_iter().chain(["nobody"]) {
            std::fs::write(directory.path().join(name), token(name)).unwrap();
        }
        Self { directory, authority }
    }

    /// Where a file is; the directory is removed when this is dropped.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// What a client of this name needs, of the collector and of `ps` and `fetch`.
    pub(crate) fn proofs(&self, name: &str) -> [String; 2] {
        let ca = self.authority.file("ca.pem");
        [format!("--tls-ca={ca}"), format!("--token-file={}", self.path(name).display())]
    }

    /// Starts a server.
    pub(crate) fn server(&self, output: &Path, listen: &str, more: &[&str]) -> Server {
        Server::of(&mut self.command(output, listen, more))
    }

    pub(crate) fn command(&self, output: &Path, listen: &str, more: &[&str]) -> Command {
        let arguments = [
            format!("--tls-cert={}", self.authority.file("server.pem")),
            format!("--tls-key={}", self.authority.file("server.key")),
            format!("--token-file={}", self.path("tokens").display()),
            format!("--symbol-cache-dir={}", self.path("cache").display()),
            "--reader=token:ops".to_owned(),
        ];
        let mut command = Command::new(binary("stackwire"));
        command.args(["serve", "--listen", listen, "--output-dir"]).arg(output);
        command.args(arguments).args(more);
        command
    }

    /// A client of a test's own. One whose name is not known has a token that is not, either.
    pub(crate) fn client(&self, server: &Server, name: &str) -> Client {
        Client::with_token(&server.address, &self.authority, &token(name))
    }
}

fn token(name: &str) -> String {
    format!("{name}-1")
}
