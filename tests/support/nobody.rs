//! The binaries as other users have them: where everybody may execute them, with capabilities of
//! files.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use super::binary;

/// Arguments of setpriv.
pub(crate) const NOBODY: [&str; 3] = ["--reuid=65534", "--regid=65534", "--clear-groups"];

/// Capabilities of files that `make install` may be asked for: to sample, and to open all files.
pub(crate) const SAMPLES: &str = "cap_bpf,cap_perfmon,cap_syslog=ep";
pub(crate) const OPENS_ALL: &str =
    "cap_bpf,cap_perfmon,cap_syslog,cap_sys_ptrace,cap_checkpoint_restore,cap_dac_read_search=ep";

/// Copies of the binaries where everybody may execute them; the collector with capabilities or
/// without.
pub(crate) fn public_binaries(capabilities: Option<&str>) -> tempfile::TempDir {
    let directory = tempfile::Builder::new().prefix("stackwire-bin-").tempdir_in("/tmp").unwrap();
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(directory.path(), mode).unwrap();
    for name in ["stackwire", "stackwire-collector"] {
        std::fs::copy(binary(name), directory.path().join(name)).unwrap();
    }
    if let Some(capabilities) = capabilities {
        let status = Command::new("setcap")
            .arg(capabilities)
            .arg(directory.path().join("stackwire-collector"))
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .status()
            .unwrap();
        assert!(status.success());
    }
    directory
}
