//! Where distributions put the debug files of kernels and their modules: by release and not by
//! build-id.

use std::path::{Path, PathBuf};

/// Which kernel, or which module.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// `uname -r`.
    pub release: String,
    /// The module's name, empty for the kernel itself.
    pub module: String,
}

/// Directories of modules looked into at most.
const MAX_DIRECTORIES: usize = 4096;

/// Files that may hold the debug information of a kernel or module.
pub(super) fn places(kernel: &Kernel, debug_dirs: &[PathBuf]) -> Vec<PathBuf> {
    let Kernel { release, module } = kernel;
    // It becomes part of paths.
    if release.is_empty() || release.contains('/') || release.starts_with('.') {
        return Vec::new();
    }
    if module.is_empty() {
        let below = debug_dirs.iter().flat_map(|dir| {
            [format!("boot/vmlinux-{release}"), format!("lib/modules/{release}/vmlinux")]
                .map(|path| dir.join(path))
        });
        let own =
            [format!("/boot/vmlinux-{release}"), format!("/lib/modules/{release}/build/vmlinux")];
        return below.chain(own.map(PathBuf::from)).collect();
    }
    let roots = debug_dirs.iter().map(|dir| dir.join("lib/modules").join(release));
    roots.flat_map(|root| modules(&root, module)).collect()
}

/// Files called `MODULE.ko` or `MODULE.ko.debug` below a directory; the kernel takes `-` for `_`.
fn modules(root: &Path, module: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![root.to_owned()];
    let mut looked = 0;
    while let Some(directory) = left.pop() {
        looked += 1;
        if looked > MAX_DIRECTORIES {
            break;
        }
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            // Of the entry itself: a link may lead back.
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => left.push(entry.path()),
                Ok(_) => {
                    let name = entry.file_name();
                    let name = name.to_string_lossy();
                    let stem = name.strip_suffix(".debug").unwrap_or(&name).strip_suffix(".ko");
                    if stem.is_some_and(|stem| stem.replace('-', "_") == module) {
                        found.push(entry.path());
                    }
                }
                Err(_) => {}
            }
        }
    }
    found
}
