//! `stackwire doctor --pid`: what names and stacks to expect of a process, and which option of its
//! run-time would make them better.
//!
//! Reads `/proc` with the rights it has, gives them up, then looks at the executable.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use stackwire_elf::Headers;
use stackwire_formats::plain;
use stackwire_model::MapsLine;

use super::{Finding, limits, prevents, works};
use crate::command::advice::debug_package;
use crate::command::run_time::RunTime;

/// What there is to see of a process.
pub struct Seen {
    pid: u32,
    comm: String,
    executable: String,
    /// Paths of the files whose code it has mapped.
    code: Vec<String>,
    /// Its arguments, and options its run-time takes from the environment.
    options: Vec<String>,
    wrote_perf_map: bool,
    /// Its paths are those of this host, and not of a container.
    is_of_host: bool,
    file: Option<File>,
}

/// Variables with options of run-times.
const VARIABLES: [&str; 7] = [
    "NODE_OPTIONS=",
    "JAVA_TOOL_OPTIONS=",
    "JDK_JAVA_OPTIONS=",
    "RUBYOPT=",
    "PYTHONPERFSUPPORT=",
    "DOTNET_PerfMapEnabled=",
    "COMPlus_PerfMapEnabled=",
];

/// Looks at a process.
///
/// # Errors
/// A finding that says why not.
pub fn look(pid: u32) -> Result<Seen, Box<Finding>> {
    let at = |name: &str| format!("/proc/{pid}/{name}");
    let failed = |error: io::Error| {
        Box::new(match error.kind() {
            ErrorKind::NotFound => prevents(
                format!("pid {pid}: there is no such process"),
                "`ps -e` lists those that run",
            ),
            ErrorKind::PermissionDenied => prevents(
                format!("pid {pid}: it may not be looked at: permission denied"),
                "ask as its user, or as root",
            ),
            _ => prevents(format!("pid {pid}: {error}"), ""),
        })
    };
    let comm = fs::read(at("comm")).map_err(failed)?;
    let maps = fs::read(at("maps")).map_err(failed)?;
    let Ok(executable) = fs::read_link(at("exe")) else {
        return Err(Box::new(prevents(
            format!("pid {pid}: it runs no program: a kernel thread, or it has ended"),
            "kernel threads are sampled with -a",
        )));
    };
    let words = |name: &str| {
        let text = fs::read(at(name)).unwrap_or_default();
        let words = text.split(|&byte| byte == 0);
        words.map(|word| String::from_utf8_lossy(word).into_owned()).collect::<Vec<_>>()
    };
    let environment = words("environ");
    let is_option = |word: &&String| VARIABLES.iter().any(|name| word.starts_with(name));
    let in_environment = environment.iter().filter(is_option);
    let of_environment = in_environment.flat_map(|word| word.split([' ', '=']).map(str::to_owned));
    let mut options = words("cmdline");
    options.extend(of_environment);
    // The pid that it has itself is the last.
    let status = fs::read_to_string(at("status")).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    let own = numbers.split_whitespace().last().unwrap_or_default();
    let wrote_perf_map = Path::new(&at(&format!("root/tmp/perf-{own}.map"))).exists();
    Ok(Seen {
        pid,
        comm: plain(&String::from_utf8_lossy(comm.trim_ascii_end())),
        executable: plain(&executable.to_string_lossy()),
        code: code(&maps),
        options,
        wrote_perf_map,
        is_of_host: root(&at("root")).is_some_and(|of_it| Some(of_it) == root("/")),
        file: File::open(at("exe")).ok(),
    })
}

/// What a root directory is known by.
fn root(path: &str) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Paths of executable mappings. Pure.
fn code(maps: &[u8]) -> Vec<String> {
    let is_code = |line: &MapsLine<'_>| line.is_executable && line.path.starts_with(b"/");
    let code = MapsLine::all(maps).filter(is_code);
    let mut paths: Vec<_> =
        code.map(|line| String::from_utf8_lossy(line.path).into_owned()).collect();
    paths.dedup();
    paths
}

impl Seen {
    /// What to expect.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings =
            vec![works(format!("pid {}: {}, {}", self.pid, self.comm, self.executable))];
        let headers = self.file.as_ref().and_then(|file| Headers::read(file).ok());
        let is_go = headers.as_ref().is_some_and(|it| it.has(".go.buildinfo"));
        let run_time = RunTime::of(&self.code);
        findings.extend(match run_time {
            Some(run_time) => self.of_run_time(run_time),
            None if is_go => vec![
                works("names: with lines and inlined functions, from Go's own table"),
                works("stacks: whole, of Go 1.19 and later"),
            ],
            None if headers.as_ref().is_some_and(|it| !it.is_64) => vec![limits(
                "stacks: end in their first function, as of every 32-bit program",
                "follow frame pointers with --source perf --unwind fp",
            )],
            None => vec![works("stacks: whole, where code has unwind tables")],
        });
        if !is_go && let Some(headers) = headers {
            findings.push(self.of_executable(&headers));
        }
        findings
    }

    fn has_option(&self, option: &str) -> bool {
        self.options.iter().any(|word| word == option || word.starts_with(&format!("{option}=")))
    }

    /// Whether it runs code of a file with a name that begins so.
    fn runs(&self, start: &str) -> bool {
        let base = |path: &String| path.rsplit('/').next().is_some_and(|it| it.starts_with(start));
        self.code.iter().any(base)
    }

    /// Whether a variable is there, and not to say no.
    fn has_variable(&self, name: &str) -> bool {
        self.options.windows(2).any(|two| two[0] == name && two[1] != "0")
    }

    fn of_run_time(&self, run_time: RunTime) -> Vec<Finding> {
        let whole = || works("stacks: whole, by unwind tables");
        let named = || works("names of what it compiles: in its perf-map");
        let how = run_time.names().replace("PID", &self.pid.to_string());
        match run_time {
            RunTime::Python => vec![self.python(&how), whole()],
            RunTime::Node => {
                vec![works("names: of JavaScript functions, of Node 18 to 24"), whole()]
            }
            RunTime::Java => {
                let names = if self.wrote_perf_map {
                    works("names of Java methods: of those compiled before it wrote its perf-map")
                } else {
                    limits("names: none of Java methods", how)
                };
                let stacks = if self.has_option("-XX:+PreserveFramePointer") {
                    works("stacks: whole, compiled methods keep frame pointers")
                } else {
                    limits(
                        "stacks: end in the first Java method",
                        "start java with -XX:+PreserveFramePointer",
                    )
                };
                vec![names, stacks]
            }
            RunTime::Ruby => {
                let names = if self.runs("libruby") {
                    works("names: of Ruby methods, of Ruby 3.0 to 4.0")
                } else {
                    limits(
                        "names: none of Ruby methods, only those of its interpreter",
                        "run a Ruby that is linked with libruby",
                    )
                };
                let compiles = ["--yjit", "--jit"].iter().any(|it| self.has_option(it));
                let stacks = if compiles && !self.has_option("--yjit-perf") {
                    limits("stacks: end in compiled methods", how)
                } else {
                    whole()
                };
                vec![names, stacks]
            }
            RunTime::DotNet => {
                let stacks = works("stacks: whole, compiled methods keep frame pointers");
                let asked = ["DOTNET_PerfMapEnabled", "COMPlus_PerfMapEnabled"];
                if self.wrote_perf_map || asked.iter().any(|it| self.has_variable(it)) {
                    vec![named(), stacks]
                } else {
                    vec![limits("names: none of .NET methods", how), stacks]
                }
            }
            RunTime::Php | RunTime::Beam | RunTime::Wasmtime => {
                if self.wrote_perf_map {
                    vec![named(), whole()]
                } else {
                    vec![limits("names: none of what it compiles", how), whole()]
                }
            }
        }
    }

    fn python(&self, how: &str) -> Finding {
        let only = "names: none of Python functions, only those of its interpreter";
        let version = self.code.iter().find_map(|path| minor_of_python(path));
        let has_no_lock = self.code.iter().any(|path| path.contains("python3.14t"));
        if version.is_some_and(|minor| (8..=15).contains(&minor)) && !has_no_lock {
            return works("names: of Python functions, with files and lines");
        }
        let asked = self.options.windows(2).any(|two| two[0] == "-X" && two[1] == "perf")
            || self.has_option("-Xperf")
            || self.has_variable("PYTHONPERFSUPPORT");
        match version {
            Some(..12) => limits(only, "Python 3.12 or later names them, with -X perf"),
            _ if asked || self.wrote_perf_map => {
                works("names of Python functions: in its perf-map")
            }
            _ => limits(only, how),
        }
    }

    /// Names in the executable itself.
    fn of_executable(&self, headers: &Headers) -> Finding {
        let path = &self.executable;
        if headers.has(".debug_info") {
            return works(format!("names of {path}: with lines and inlined functions"));
        }
        let package = self.is_of_host.then(|| debug_package(Path::new(path))).flatten();
        let package = package.map_or(String::new(), |package| format!("install {package}, or "));
        let how = format!("{package}name a server that has its debug file with --debuginfod-url");
        if headers.has(".symtab") {
            let what = format!("names of {path}: without lines and inlined functions");
            return limits(what, how);
        }
        limits(format!("names of {path}: of functions it exports, it is stripped"), how)
    }
}

/// 12 for `python3.12` and `libpython3.12.so.1.0`. Pure.
fn minor_of_python(path: &str) -> Option<u32> {
    let (_, after) = path.rsplit('/').next()?.split_once("python3.")?;
    after.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::doctor::Level;

    fn seen(code: &[&str], options: &[&str]) -> Seen {
        let texts = |all: &[&str]| all.iter().map(|it| (*it).to_owned()).collect();
        Seen {
            pid: 7,
            comm: "x".to_owned(),
            executable: code[0].to_owned(),
            code: texts(code),
            options: texts(options),
            wrote_perf_map: false,
            is_of_host: true,
            file: None,
        }
    }

    fn levels(code: &[&str], options: &[&str]) -> Vec<Level> {
        seen(code, options).findings()[1..].iter().map(|it| it.level).collect()
    }

    #[test]
    fn options_of_run_times_decide() {
        use Level::{Limits, Works};
        let python = ["/usr/bin/python3.12"];
        assert_eq!(levels(&python, &[]), [Works, Works]);
        assert_eq!(levels(&python, &["python3", "-X", "perf", "a.py"]), [Works, Works]);
        assert_eq!(levels(&python, &["PYTHONPERFSUPPORT", "1"]), [Works, Works]);
        let newer = ["/usr/bin/python3.16"];
        assert_eq!(levels(&newer, &["PYTHONPERFSUPPORT", "1"]), [Works, Works]);
        assert_eq!(levels(&newer, &["PYTHONPERFSUPPORT", "0"]), [Limits, Works]);
        assert_eq!(levels(&["/usr/bin/python3.14t"], &[]), [Limits, Works]);
        assert_eq!(levels(&["/usr/bin/python3.7"], &["-X", "perf"]), [Limits, Works]);
        assert_eq!(levels(&["/usr/bin/node"], &["node", "--perf-basic-prof"]), [Works, Works]);
        assert_eq!(levels(&["/usr/bin/node"], &["node", "a.js"]), [Works, Works]);
        let java = ["/usr/bin/java", "/usr/lib/libjvm.so"];
        assert_eq!(levels(&java, &["-XX:+PreserveFramePointer"]), [Limits, Works]);
        assert_eq!(levels(&java, &[]), [Limits, Limits]);
        let ruby = ["/usr/bin/ruby3.1", "/usr/lib/libruby-3.1.so.3.1"];
        assert_eq!(levels(&ruby, &["ruby"]), [Works, Works]);
        assert_eq!(levels(&ruby, &["ruby", "--yjit"]), [Works, Limits]);
        assert_eq!(levels(&["/usr/bin/ruby3.1"], &["ruby"]), [Limits, Works]);
        assert_eq!(
            levels(&["/a", "/b/libcoreclr.so"], &["DOTNET_PerfMapEnabled", "1"]),
            [Works, Works]
        );
        assert_eq!(levels(&["/usr/bin/gzip"], &[]), [Works]);
    }

    #[test]
    fn code_is_in_executable_mappings_of_files() {
        let maps = b"1000-2000 r-xp 00000000 08:01 7   /usr/bin/a b\n2000-3000 r--p 0 08:01 7 /x\n3000-4000 r-xp 0 00:00 0 [vdso]\n";
        assert_eq!(code(maps), ["/usr/bin/a b"]);
        assert_eq!(minor_of_python("/opt/libpython3.13t.so.1.0"), Some(13));
        assert_eq!(minor_of_python("/opt/python"), None);
    }
}
