//! Programs that benches run: built here, or fetched by `tests/setup.sh`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// Killed when dropped.
pub(crate) struct Started(pub(crate) Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Compiles a fixture into a directory.
pub(crate) fn built(
    directory: &Path,
    name: &str,
    compiler: &[&str],
    source: &str,
    more: &[&str],
) -> PathBuf {
    let out = directory.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(source);
    let mut command = Command::new(compiler[0]);
    command.args(&compiler[1..]).arg(source).arg("-o").arg(&out).args(more);
    assert!(command.status().unwrap().success(), "{command:?}");
    out
}

/// A server of the newest Go.
pub(crate) fn go_server() -> PathBuf {
    let releases = std::fs::read_dir(cache().join("programs")).unwrap().flatten();
    let servers = releases.map(|release| release.path().join("server"));
    servers.filter(|path| path.is_file()).max().unwrap()
}

/// A program of another Debian, which `tests/debian.sh` has unpacked.
pub(crate) fn of_debian(suite: &str, program: &str) -> Command {
    let root = cache().join(suite);
    let mut command = Command::new(root.join("run"));
    command.arg(program).env("PYTHONHOME", root.join("usr"));
    command
}

/// What `tests/setup.sh` has fetched and built.
fn cache() -> PathBuf {
    let kept = || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/stackwire-tests");
    std::env::var_os("STACKWIRE_TEST_CACHE").map_or_else(kept, PathBuf::from)
}
