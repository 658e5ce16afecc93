//! Every CPython, Ruby, Node and Java that is here: the host's, those of an interpreter manager,
//! the vendor's, and another Debian's.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{of_debian, run, test_cache};

/// A CPython of each version, by that.
pub(crate) fn pythons() -> BTreeMap<String, Command> {
    let version = |python: &mut Command| {
        let ask = "import sys; print('%d.%d.%d' % sys.version_info[:3])";
        run(python.args(["-c", ask])).0.trim().to_owned()
    };
    let managed = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let managed = managed.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
    let managed = managed.map(|root| programs(&root.join("versions"), "bin/python3"));
    let mut programs = vec![PathBuf::from("python3"), PathBuf::from("/usr/bin/python3")];
    programs.extend(managed.into_iter().flatten());
    let mut found = BTreeMap::new();
    for program in programs {
        let version = version(&mut Command::new(&program));
        found.entry(format!("python {version}")).or_insert_with(|| Command::new(program));
    }
    if let Some(python) = of_debian("trixie", "python3.13") {
        found.insert("python of Debian 13".to_owned(), python);
    }
    found
}

/// A Ruby of each Debian that has one of its own.
pub(crate) fn rubies() -> BTreeMap<String, Command> {
    let of = |suite: &str| {
        let mut ruby = of_debian(suite, "ruby")?;
        // What it comes with is not where it looks for it.
        ruby.arg("--disable-gems");
        Some((format!("ruby of Debian {suite}"), ruby))
    };
    let mut all: BTreeMap<_, _> =
        ["bookworm", "trixie", "sid"].into_iter().filter_map(of).collect();
    assert!(!all.is_empty(), "no Ruby of a Debian; tests/setup.sh gets them");
    // Debian's later ones have none.
    if let Some((name, mut ruby)) = of("bookworm") {
        ruby.arg("--yjit");
        all.insert(format!("{name} with its JIT"), ruby);
    }
    all
}

/// A Node of each line, by its version.
pub(crate) fn nodes() -> BTreeMap<String, Command> {
    let root = test_cache().join("node");
    let of_vendor = programs(&root, "bin/node").into_iter();
    let mut all: BTreeMap<_, _> = of_vendor
        .map(|node| {
            let version = node.iter().rev().nth(2).unwrap().to_string_lossy();
            (format!("node {version}"), Command::new(&node))
        })
        .collect();
    assert!(all.len() >= 4, "{:?}: tests/node.sh gets them", all.keys());
    // Its library has no symbols, and looks for a part of Node where Debian has it.
    let debian = root.join("trixie");
    let mut node = Command::new("unshare");
    let mounted = format!("mount --bind {0}/usr/share /usr/share && exec \"$@\"", debian.display());
    node.args(["--mount", "sh", "-c", &mounted, "sh"]).arg(debian.join("run")).arg("node");
    all.insert("node of Debian 13".to_owned(), node);
    all
}

/// The `java` of each JDK.
pub(crate) fn javas() -> Vec<PathBuf> {
    let found = programs(Path::new("/usr/lib/jvm"), "bin/jcmd");
    assert!(!found.is_empty(), "no JDK in /usr/lib/jvm; tests/setup.sh installs one");
    found.into_iter().map(|jcmd| jcmd.with_file_name("java")).collect()
}

/// Programs in subdirectories, each once.
fn programs(directory: &Path, program: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| entry.path().join(program).canonicalize().ok());
    let mut found: Vec<PathBuf> = found.collect();
    found.sort();
    found.dedup();
    found
}
