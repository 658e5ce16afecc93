//! The checkout itself: the eBPF object matches its sources, the commands say who they are.

use std::path::Path;
use std::process::Command;

use crate::support::{Ran, binary, stackwire};

#[test]
fn the_ebpf_object_was_built_from_these_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let digest =
        Ran::of(&mut Command::new(root.join("collector-ebpf/digest.sh"))).succeeded().stdout;
    let recorded =
        std::fs::read_to_string(root.join("collector/ebpf/stackwire.bpf.sources")).unwrap();
    assert_eq!(recorded.trim(), digest.trim(), "run `make ebpf` and commit the result");
}

#[test]
fn help_and_version_are_worth_reading() {
    for name in ["stackwire", "stackwire-collector"] {
        let version = Ran::of(Command::new(binary(name)).arg("--version")).succeeded().stdout;
        let expected = format!("{name} {} (", env!("CARGO_PKG_VERSION"));
        assert!(version.starts_with(&expected), "{version}");
        let help = Ran::of(Command::new(binary(name)).arg("--help")).succeeded().stdout;
        assert!(help.contains("Exit codes") && help.lines().count() > 15, "{help}");
    }
    for command in ["record", "serve", "resolve", "report", "doctor"] {
        let help = stackwire([command, "--help"]).succeeded().stdout;
        assert!(help.contains("Usage: stackwire"), "{help}");
    }
}
