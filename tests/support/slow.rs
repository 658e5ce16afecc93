//! A disk and files that are slow: a loop device on a file of bindfs, which limits its rate, and
//! two more such files.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::mounted::Mounted;
use super::{can, run};

/// 4 KiB take 10 ms.
const RATE: &str = "--read-rate=400k";

/// Gone when dropped.
pub(crate) struct Slow {
    device: Device,
    _mounted: [Mounted; 2],
    directory: tempfile::TempDir,
}

/// A loop device.
struct Device(String);

impl Slow {
    /// None where there are no loop devices or no FUSE, which is said.
    pub(crate) fn start() -> Option<Self> {
        if !can("loop devices", Path::new("/dev/loop-control").exists()) || !Mounted::can() {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["files", "direct", "cached"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        for name in ["disk", "file", "mapped"] {
            let file = std::fs::File::create(at("files").join(name)).unwrap();
            file.set_len(64 << 20).unwrap();
        }
        // Through the page cache the kernel reads ahead, but nobody can map a file past it.
        let mounted = [
            Mounted::new(&at("files"), &at("direct"), &[RATE, "-o", "direct_io"]),
            Mounted::new(&at("files"), &at("cached"), &[RATE]),
        ];
        let mut command = Command::new("/usr/sbin/losetup");
        command.args(["--find", "--show", "--read-only"]).arg(at("direct/disk"));
        let device = Device(run(&mut command).0.trim().to_owned());
        Some(Self { device, _mounted: mounted, directory })
    }

    /// The device, a file, and a file to be mapped.
    pub(crate) fn paths(&self) -> [PathBuf; 3] {
        let at = |name: &str| self.directory.path().join(name);
        [PathBuf::from(&self.device.0), at("direct/file"), at("cached/mapped")]
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("/usr/sbin/losetup").args(["-d", &self.0]).status();
    }
}
