//! What `make dist` makes: the package installs on a clean Debian 12 and 13, and a user in its
//! group profiles there.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{can, outside_cargo, privileged, run, test_cache};

fn sources() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// `make dist`, and the one file with this ending.
fn made(directory: &Path, ending: &str) -> PathBuf {
    let found = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<_> = found.filter(|path| path.to_str().unwrap().ends_with(ending)).collect();
    let [path] = found.as_slice() else { panic!("{ending}: {found:?}") };
    path.clone()
}

/// In a mount namespace of its own, as installed on a clean system: the user may profile, others
/// may not. `$1` is the system, `$2` the package.
const IN_CLEAN_SYSTEM: &str = r#"
set -eu
chmod 0755 "$1"
mount -t proc proc "$1/proc"
mount --rbind /sys "$1/sys"
cp "$2" "$1/tmp/stackwire.deb"
chroot "$1" dpkg -i /tmp/stackwire.deb >/dev/null
chroot "$1" useradd -m -G stackwire member
chroot "$1" useradd -m stranger
chroot "$1" su stranger -s /bin/sh -c '/usr/bin/stackwire-collector --version 2>/dev/null; test $? = 126'
chroot "$1" su member -s /bin/sh -c '
  cd && stackwire record -F 499 --profile-output p.pb.gz -- sh -c "i=0; while [ \$i -lt 600000 ]; do i=\$((i+1)); done" 2>&1
  stackwire report p.stackwire --full'
"#;

#[test]
fn the_package_installs_and_records_on_clean_debians() {
    if !privileged() {
        return;
    }
    let directory = tempfile::tempdir_in(sources().join("target")).unwrap();
    let dist = directory.path().join("dist");
    run(outside_cargo(Command::new(sources().join("packaging/dist.sh")).arg(&dist)));

    let sums = run(Command::new("sha256sum").args(["-c", "SHA256SUMS"]).current_dir(&dist)).0;
    assert!(sums.lines().count() >= 4 && sums.lines().all(|line| line.ends_with(": OK")), "{sums}");
    let list = std::fs::read_to_string(made(&dist, ".cdx.json")).unwrap();
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let parts = list["components"].as_array().unwrap();
    assert!(parts.iter().any(|part| part["name"] == "aya"), "{} parts", parts.len());
    let licences = parts.iter().map(|part| part["licenses"][0]["expression"].as_str().unwrap());
    // SPDX has no other word for a choice than OR.
    let odd: Vec<_> = licences.filter(|it| it.is_empty() || it.contains('/')).collect();
    assert!(odd.is_empty(), "{odd:?}");
    let files = run(Command::new("tar").arg("-tzf").arg(made(&dist, ".tar.gz"))).0;
    assert!(files.lines().any(|file| file.ends_with("/bin/stackwire")), "{files}");
    let rpm = made(&dist, ".rpm");
    let query = "[%{FILENAMES} %{FILECAPS} %{FILEGROUPNAME}\n]";
    let held = run(Command::new("rpm").args(["-qp", "--qf", query]).arg(rpm)).0;
    let collector = held.lines().find(|line| line.starts_with("/usr/bin/stackwire-collector"));
    let collector = collector.unwrap_or_default();
    assert!(collector.contains("cap_perfmon") && collector.ends_with(" stackwire"), "{held}");

    for suite in ["bookworm", "trixie"] {
        let system = test_cache().join(format!("clean-{suite}.tar"));
        if !can(&format!("a clean Debian {suite}"), system.is_file()) {
            continue;
        }
        let root = tempfile::tempdir().unwrap();
        run(Command::new("tar").arg("-xf").arg(system).arg("-C").arg(root.path()));
        let script = ["--mount", "--propagation=private", "sh", "-c", IN_CLEAN_SYSTEM, "sh"];
        let said =
            run(Command::new("unshare").args(script).args([root.path(), &made(&dist, ".deb")])).0;
        let samples = said.split(" samples, 0 lost").next().unwrap().split_whitespace().last();
        let samples: u32 = samples.unwrap().parse().unwrap_or(0);
        assert!(samples > 50, "{suite}: {said}");
        assert!(said.contains("dash"), "{suite}: {said}");
    }
}
