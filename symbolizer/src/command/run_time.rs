//! Run-times that make code while they run, known by the names of their files, and how each names
//! it. Asked by `advice.rs` of what was recorded, and by `doctor/process.rs` of what runs.

/// Who makes code at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunTime {
    Java,
    Node,
    Python,
    DotNet,
    Ruby,
    Php,
    Beam,
    Wasmtime,
}

impl RunTime {
    /// Beginnings of file names.
    const FILES: [(&str, Self); 11] = [
        ("libjvm.so", Self::Java),
        ("libnode.so", Self::Node),
        ("node", Self::Node),
        ("libpython3", Self::Python),
        ("python3", Self::Python),
        ("libcoreclr.so", Self::DotNet),
        ("libruby", Self::Ruby),
        ("ruby", Self::Ruby),
        ("php", Self::Php),
        ("beam.", Self::Beam),
        ("wasmtime", Self::Wasmtime),
    ];

    /// That of a process which runs code of these files.
    pub fn of(paths: &[String]) -> Option<Self> {
        let base = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        let has = |start: &str| paths.iter().any(|path| base(path).starts_with(start));
        Self::FILES.into_iter().find(|(start, _)| has(start)).map(|(_, found)| found)
    }

    /// How it names its code, with PID for the process.
    pub fn names(self) -> &'static str {
        match self {
            Self::Java => "run `jcmd PID Compiler.perfmap` before the capture ends",
            Self::Node => "start node with --perf-basic-prof",
            Self::Python => {
                "record with --inject-python, or start python with -X perf (3.12 or later)"
            }
            Self::DotNet => "start it with DOTNET_PerfMapEnabled=1",
            Self::Ruby => "start ruby with --yjit-perf",
            Self::Php => "start php with -d opcache.jit_debug=16",
            Self::Beam => "start erl with +JPperf true",
            Self::Wasmtime => "start wasmtime with --profile perfmap",
        }
    }
}
