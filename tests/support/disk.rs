//! What a program did to a directory, from strace, and how the directory looks when it ends at any
//! of these steps: killed, or with the power cut, when nothing is there but what was synced.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// System calls that are followed.
pub(crate) const CALLS: &str = "trace=openat,close,write,pwrite64,fsync,fdatasync,rename,renameat,\
    renameat2,unlink,unlinkat,ftruncate,mkdir";

/// A step.
#[derive(Debug)]
pub(crate) struct Step {
    /// Seconds since 1970, when it was done.
    pub(crate) at: f64,
    /// As strace writes it, without the data.
    pub(crate) text: String,
    what: What,
}

#[derive(Debug)]
enum What {
    Open {
        path: PathBuf,
        fd: i32,
        create: bool,
        truncate: bool,
    },
    Close(i32),
    /// Without an offset: where the last one ended.
    Write {
        fd: i32,
        bytes: Vec<u8>,
        offset: Option<u64>,
    },
    Sync(i32),
    Rename(PathBuf, PathBuf),
    Unlink(PathBuf),
    Truncate(i32, u64),
    MakeDirectory(PathBuf),
}

/// Steps in the order in which they were done.
pub(crate) fn steps(trace: &str) -> Vec<Step> {
    let mut unfinished: BTreeMap<&str, String> = BTreeMap::new();
    let mut steps = Vec::new();
    for line in trace.lines() {
        let mut words = line.splitn(2, ' ');
        let (Some(pid), Some(rest)) = (words.next(), words.next()) else { continue };
        let Some((at, call)) = rest.trim_start().split_once(' ') else { continue };
        let call = if let Some(begun) = call.strip_suffix(" <unfinished ...>") {
            unfinished.insert(pid, begun.to_owned());
            continue;
        } else if let Some((_, end)) = call.split_once(" resumed>") {
            unfinished.remove(pid).unwrap_or_default() + end
        } else {
            call.to_owned()
        };
        if let Some(what) = what(&call) {
            let text = call.chars().take(80).collect();
            steps.push(Step { at: at.parse().unwrap(), text, what });
        }
    }
    steps
}

/// What a call did; `None` when it failed or does nothing to files.
fn what(call: &str) -> Option<What> {
    let (name, rest) = call.split_once('(')?;
    let (arguments, result) = rest.rsplit_once(" = ")?;
    let result: i64 = result.split_whitespace().next()?.parse().ok().filter(|it| *it >= 0)?;
    let arguments = arguments.trim_end().strip_suffix(')')?;
    let mut parts = arguments.split(", ");
    // None of the strings has a comma: they are all written in hexadecimal.
    let mut next = || parts.next();
    let path = |text: &str| Some(PathBuf::from(String::from_utf8(string(text)?).ok()?));
    Some(match name {
        "openat" => {
            let (_, file, flags) = (next()?, path(next()?)?, next()?);
            let has = |flag: &str| flags.split('|').any(|it| it == flag);
            What::Open {
                path: file,
                fd: result as i32,
                create: has("O_CREAT"),
                truncate: has("O_TRUNC"),
            }
        }
        "close" => What::Close(next()?.parse().ok()?),
        "write" | "pwrite64" => {
            let fd = next()?.parse().ok()?;
            let mut bytes = string(next()?)?;
            bytes.truncate(result as usize);
            let _length = next()?;
            What::Write { fd, bytes, offset: next().and_then(|offset| offset.parse().ok()) }
        }
        "fsync" | "fdatasync" => What::Sync(next()?.parse().ok()?),
        "rename" => What::Rename(path(next()?)?, path(next()?)?),
        "renameat" | "renameat2" => {
            let (_, from, _, to) = (next()?, path(next()?)?, next()?, path(next()?)?);
            What::Rename(from, to)
        }
        "unlink" => What::Unlink(path(next()?)?),
        "unlinkat" => {
            let _ = next()?;
            What::Unlink(path(next()?)?)
        }
        "ftruncate" => What::Truncate(next()?.parse().ok()?, next()?.parse().ok()?),
        "mkdir" => What::MakeDirectory(path(next()?)?),
        _ => return None,
    })
}

/// `"\x66\x6f"` as bytes.
fn string(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix('"')?.strip_suffix('"')?;
    let mut bytes = Vec::with_capacity(digits.len() / 4);
    for byte in digits.split("\\x").skip(1) {
        bytes.push(u8::from_str_radix(byte, 16).ok()?);
    }
    Some(bytes)
}

/// Files by name.
pub(crate) type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A directory on its way.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    root: PathBuf,
    inodes: Vec<Inode>,
    directories: BTreeSet<PathBuf>,
    /// Those that are there after a power cut.
    synced_directories: BTreeSet<PathBuf>,
    names: BTreeMap<PathBuf, usize>,
    /// Those that are there after a power cut.
    synced_names: BTreeMap<PathBuf, usize>,
    open: BTreeMap<i32, Open>,
}

#[derive(Debug, Default)]
struct Inode {
    bytes: Vec<u8>,
    synced: Vec<u8>,
}

#[derive(Debug)]
enum Open {
    File { inode: usize, position: u64 },
    Directory(PathBuf),
}

impl Disk {
    /// One with nothing but an empty directory in it.
    pub(crate) fn new(root: &Path, inside: &Path) -> Self {
        let directories = BTreeSet::from([root.to_owned(), inside.to_owned()]);
        let synced_directories = directories.clone();
        Self { root: root.to_owned(), directories, synced_directories, ..Self::default() }
    }

    /// Does a step.
    pub(crate) fn apply(&mut self, step: &Step) {
        match &step.what {
            What::Open { path, fd, create, truncate } => {
                if self.directories.contains(path) {
                    self.open.insert(*fd, Open::Directory(path.clone()));
                    return;
                }
                let is_ours = path.starts_with(&self.root);
                let inode = match self.names.get(path) {
                    Some(inode) => *inode,
                    None if *create && is_ours => {
                        self.inodes.push(Inode::default());
                        self.names.insert(path.clone(), self.inodes.len() - 1);
                        self.inodes.len() - 1
                    }
                    None => {
                        self.open.remove(fd);
                        return;
                    }
                };
                if *truncate {
                    self.inodes[inode].bytes.clear();
                }
                self.open.insert(*fd, Open::File { inode, position: 0 });
            }
            What::Close(fd) => drop(self.open.remove(fd)),
            What::Write { fd, bytes, offset } => {
                let Some(Open::File { inode, position }) = self.open.get_mut(fd) else { return };
                let at = offset.unwrap_or(*position) as usize;
                *position = (at + bytes.len()) as u64;
                let content = &mut self.inodes[*inode].bytes;
                content.resize(content.len().max(at + bytes.len()), 0);
                content[at..at + bytes.len()].copy_from_slice(bytes);
            }
            What::Sync(fd) => match self.open.get(fd) {
                Some(Open::File { inode, .. }) => {
                    let Inode { bytes, synced } = &mut self.inodes[*inode];
                    synced.clone_from(bytes);
                }
                Some(Open::Directory(directory)) => {
                    let is_in = |path: &Path| path.parent() == Some(directory);
                    self.synced_names.retain(|path, _| !is_in(path));
                    let now = self.names.iter().filter(|(path, _)| is_in(path));
                    self.synced_names.extend(now.map(|(path, inode)| (path.clone(), *inode)));
                    let now = self.directories.iter().filter(|path| is_in(path)).cloned();
                    self.synced_directories.extend(now);
                }
                None => {}
            },
            What::Rename(from, to) => {
                if let Some(inode) = self.names.remove(from) {
                    self.names.insert(to.clone(), inode);
                }
            }
            What::Unlink(path) => drop(self.names.remove(path)),
            What::Truncate(fd, length) => {
                if let Some(Open::File { inode, .. }) = self.open.get(fd) {
                    self.inodes[*inode].bytes.resize(*length as usize, 0);
                }
            }
            What::MakeDirectory(path) => {
                if path.starts_with(&self.root) {
                    self.directories.insert(path.clone());
                }
            }
        }
    }

    /// What is there after a kill.
    pub(crate) fn after_a_kill(&self) -> Files {
        let of =
            |(path, inode): (&PathBuf, &usize)| (path.clone(), self.inodes[*inode].bytes.clone());
        self.names.iter().map(of).collect()
    }

    /// What is there after a power cut; `torn`: half of what was not synced, at the ends of files.
    pub(crate) fn after_a_power_cut(&self, torn: bool) -> Files {
        let of = |(path, inode): (&PathBuf, &usize)| {
            let Inode { bytes, synced } = &self.inodes[*inode];
            let mut content = synced.clone();
            if torn && bytes.len() > synced.len() {
                let half = synced.len() + (bytes.len() - synced.len()) / 2;
                content.extend(&bytes[synced.len()..half]);
            }
            (path.clone(), content)
        };
        let is_there = |path: &Path| {
            let mut above = path.ancestors().skip(1).take_while(|it| it.starts_with(&self.root));
            above.all(|directory| self.synced_directories.contains(directory))
        };
        self.synced_names.iter().filter(|(path, _)| is_there(path)).map(of).collect()
    }

    /// Makes such a directory elsewhere.
    pub(crate) fn lay_out(&self, files: &Files, to: &Path) {
        for directory in &self.directories {
            std::fs::create_dir_all(to.join(directory.strip_prefix(&self.root).unwrap())).unwrap();
        }
        for (path, content) in files {
            let path = to.join(path.strip_prefix(&self.root).unwrap());
            // Some are made by descriptors, which are not followed.
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
    }
}
