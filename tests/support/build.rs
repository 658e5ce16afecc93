//! Fixtures, compiled once a run into the target directory.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn output(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn run(command: &mut Command) {
    let status = command.status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}

/// Functions at the beginning of a cache line each: a loop that straddles two is slower on some
/// CPUs, and then equal work is not equal time.
const C: [&str; 6] = [
    "-O1",
    "-g",
    "-falign-functions=64",
    "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-fno-inline",
];

/// `libwork.so`.
pub(crate) fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("libwork.so");
        run(Command::new("gcc")
            .args(C)
            .args(["-fPIC", "-shared", "-Wl,-Bsymbolic"])
            .arg(source("libwork.c"))
            .arg("-o")
            .arg(&out));
        out
    })
}

/// `libother.so`: the library under other names.
pub(crate) fn other_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("libother.so");
        run(Command::new("gcc")
            .args(C)
            .args(["-fPIC", "-shared", "-Wl,-Bsymbolic", "-DOTHER"])
            .arg(source("libwork.c"))
            .arg("-o")
            .arg(&out));
        out
    })
}

/// The C++ program, linked statically.
pub(crate) fn inlined_static() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("inlined_static");
        run(Command::new("g++")
            .args(["-O2", "-g", "-fno-omit-frame-pointer", "-static"])
            .arg(source("inlined.cc"))
            .arg("-o")
            .arg(&out));
        out
    })
}

/// `secret`.
pub(crate) fn secret() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("secret");
        run(Command::new("gcc").args(C).arg(source("secret.c")).arg("-o").arg(&out));
        out
    })
}

/// `forged_python`.
pub(crate) fn forged_python() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("forged_python");
        let mut build = Command::new("gcc");
        build.args(C).args(["-rdynamic", "-pthread"]).arg(source("forged_python.c"));
        run(build.arg("-o").arg(&out));
        out
    })
}

/// `forged_ruby`.
pub(crate) fn forged_ruby() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| forged("forged_ruby"))
}

/// `forged_v8`.
pub(crate) fn forged_v8() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| forged("forged_v8"))
}

/// A program that runs what a library of the same name has.
fn forged(name: &str) -> PathBuf {
    let (library, out) = (output(&format!("lib{name}.so")), output(name));
    let directory = out.parent().unwrap().display().to_string();
    let mut build = Command::new("gcc");
    build.args(C).args(["-fPIC", "-shared", "-pthread"]).arg(source(&format!("{name}.c")));
    run(build.arg("-o").arg(&library));
    // Where another of the same name is put in its place, that is found first.
    let mut build = Command::new("gcc");
    build.args(C).arg(source("forged_main.c")).arg(format!("-l{name}")).arg("-o").arg(&out);
    run(build.args([format!("-L{directory}"), format!("-Wl,-rpath,{directory}")]));
    out
}

/// `faults`.
pub(crate) fn faults() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("faults");
        run(Command::new("gcc").args(C).arg(source("faults.c")).arg("-o").arg(&out));
        out
    })
}

/// `work`, linked with the library.
pub(crate) fn work() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("work");
        let directory = library().parent().unwrap().display().to_string();
        run(Command::new("gcc")
            .args(C)
            .arg(source("work.c"))
            .arg("-o")
            .arg(&out)
            .args([format!("-L{directory}"), format!("-Wl,-rpath,{directory}")])
            .args(["-lwork", "-ldl", "-lpthread"]));
        out
    })
}

/// `waits`.
pub(crate) fn waits() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| with_threads("waits"))
}

/// `sched`.
pub(crate) fn sched() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| with_threads("sched"))
}

/// `once`.
pub(crate) fn once() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| with_threads("once"))
}

/// `context`.
pub(crate) fn context() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| with_threads("context"))
}

/// `handover`.
pub(crate) fn handover() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| with_threads("handover"))
}

/// `spread`, without frame pointers.
pub(crate) fn spread() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let (out, source) = (output("spread"), source("spread.c"));
        run(Command::new("gcc")
            .args(["-O2", "-g"])
            .arg(source)
            .arg("-o")
            .arg(&out)
            .arg("-lpthread"));
        out
    })
}

/// `handlers`, without frame pointers.
pub(crate) fn handlers() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let (out, source) = (output("handlers"), source("handlers.c"));
        let mut gcc = Command::new("gcc");
        run(gcc.args(["-O2", "-g"]).arg(source).arg("-o").arg(&out).arg("-lpthread"));
        out
    })
}

/// `crowd`.
pub(crate) fn crowd() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| with_threads("crowd"))
}

fn with_threads(name: &str) -> PathBuf {
    let out = output(name);
    let source = source(&format!("{name}.c"));
    run(Command::new("gcc").args(C).arg(source).arg("-o").arg(&out).arg("-lpthread"));
    out
}

/// `odd`.
pub(crate) fn odd() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("odd");
        run(Command::new("gcc").args(C).arg(source("odd.c")).arg("-o").arg(&out));
        out
    })
}

/// `hostile`.
pub(crate) fn hostile() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("hostile");
        run(Command::new("gcc")
            .args(C)
            .arg(source("hostile.c"))
            .arg("-o")
            .arg(&out)
            .arg("-lpthread"));
        out
    })
}

/// The C++ program with inlined functions.
pub(crate) fn inlined_cc() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("inlined_cc");
        run(Command::new("g++")
            .args(["-O2", "-g", "-fno-omit-frame-pointer"])
            .arg(source("inlined.cc"))
            .arg("-o")
            .arg(&out));
        out
    })
}

/// The Rust program with inlined functions.
pub(crate) fn inlined_rs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("inlined_rs");
        run(Command::new("rustc")
            .args(["-O", "-g", "-Cforce-frame-pointers=yes", "--edition=2024"])
            .arg(source("inlined.rs"))
            .arg("-o")
            .arg(&out));
        out
    })
}

/// `unwind.c` and the inlined programs without frame pointers, each as a compiler would by default:
/// name and program.
pub(crate) fn unwind_corpus() -> &'static [(&'static str, PathBuf)] {
    static BUILT: OnceLock<Vec<(&str, PathBuf)>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let build = |name: &'static str, compiler: &str, arguments: &[&str], file: &str| {
            let out = output(name);
            run(Command::new(compiler).args(arguments).arg(source(file)).arg("-o").arg(&out));
            (name, out)
        };
        vec![
            build("unwind_o2", "gcc", &["-O2", "-g"], "unwind.c"),
            build("unwind_o3", "gcc", &["-O3", "-fno-plt", "-flto", "-g"], "unwind.c"),
            build("unwind_static", "gcc", &["-O2", "-static", "-g"], "unwind.c"),
            build(
                "unwind_lazy",
                "gcc",
                &["-O2", "-Wl,-z,lazy", "-fcf-protection=none", "-g"],
                "unwind.c",
            ),
        ]
    })
}

/// The C++ program as a release is built: without frame pointers.
pub(crate) fn inlined_cc_release() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("release_cc");
        run(Command::new("g++").args(["-O2", "-g"]).arg(source("inlined.cc")).arg("-o").arg(&out));
        out
    })
}

/// The Rust program, likewise.
pub(crate) fn inlined_rs_release() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("release_rs");
        run(Command::new("rustc")
            .args(["-O", "-g", "--edition=2024"])
            .arg(source("inlined.rs"))
            .arg("-o")
            .arg(&out));
        out
    })
}

/// `many`.
pub(crate) fn many() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("many");
        run(Command::new("gcc")
            .args(["-O2", "-g", "-no-pie", "-Wl,-z,noseparate-code"])
            .arg(source("many.c"))
            .arg("-o")
            .arg(&out));
        out
    })
}

/// `hop`, both of them.
pub(crate) fn hops() -> &'static [PathBuf; 2] {
    static BUILT: OnceLock<[PathBuf; 2]> = OnceLock::new();
    BUILT.get_or_init(|| {
        [("one", 40), ("two", 200)].map(|(name, frame)| {
            let out = output(&format!("hop_{name}"));
            run(Command::new("gcc")
                .args(["-O2", "-g", "-static", "-no-pie", "-fno-optimize-sibling-calls"])
                .arg(format!("-DFRAME={frame}"))
                .args(
                    [("LEAF", "leaf"), ("MIDDLE", "middle"), ("TOP", "top")]
                        .map(|(macro_, function)| format!("-D{macro_}={name}_{function}")),
                )
                .arg(source("hop.c"))
                .arg("-o")
                .arg(&out));
            out
        })
    })
}

/// `brief`, with frames of two sizes.
pub(crate) fn briefs() -> &'static [PathBuf; 2] {
    static BUILT: OnceLock<[PathBuf; 2]> = OnceLock::new();
    BUILT.get_or_init(|| {
        [("small", 40), ("large", 400)].map(|(name, frame)| {
            let out = output(&format!("brief_{name}"));
            run(Command::new("gcc")
                .args(["-O2", "-g", &format!("-DFRAME={frame}")])
                .arg(source("brief.c"))
                .arg("-o")
                .arg(&out)
                .arg("-lm"));
            out
        })
    })
}

/// `large_map`.
pub(crate) fn large_map() -> PathBuf {
    let out = output("large_map");
    run(Command::new("gcc").args(["-O2", "-g"]).arg(source("large_map.c")).arg("-o").arg(&out));
    out
}

/// `jit`.
pub(crate) fn jit() -> PathBuf {
    let out = output("jit");
    run(Command::new("gcc").args(["-O2", "-g"]).arg(source("jit.c")).arg("-o").arg(&out));
    out
}

/// `spawn`, linked with these options.
pub(crate) fn spawn(name: &str, options: &[&str]) -> PathBuf {
    let out = output(&format!("spawn_{name}"));
    run(Command::new("gcc")
        .args(["-O2", "-g"])
        .args(options)
        .arg(source("spawn.c"))
        .arg("-o")
        .arg(&out));
    out
}

/// `tracer`.
pub(crate) fn tracer() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("tracer");
        run(Command::new("gcc").args(["-O2", "-g"]).arg(source("tracer.c")).arg("-o").arg(&out));
        out
    })
}

/// A 32-bit program.
pub(crate) fn narrow() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("narrow");
        run(Command::new("gcc")
            .args(["-m32", "-O1", "-fno-omit-frame-pointer", "-nostdlib", "-static", "-no-pie"])
            .args(["-fno-pic", "-fno-stack-protector", "-fno-ipa-pure-const"])
            .arg(source("narrow.c"))
            .arg("-o")
            .arg(&out));
        out
    })
}

/// A program of `fixtures/attacks`.
pub(crate) fn attack(name: &str) -> PathBuf {
    static BUILT: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _turn = BUILT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let out = output(&format!("attack_{name}"));
    run(Command::new("gcc")
        .args(["-O2", "-g"])
        .arg(source(&format!("attacks/{name}.c")))
        .arg("-o")
        .arg(&out)
        .args(["-lpthread", "-ldl"]));
    out
}

/// `work` without its symbols.
pub(crate) fn stripped_work() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = output("stripped_work");
        run(Command::new("strip").arg(work()).arg("-o").arg(&out));
        out
    })
}

/// A library with one function, `name`, and this build-id. Whatever the name, the function lies at
/// the same place.
pub(crate) fn library_named(directory: &Path, name: &str, build_id: [u8; 20]) -> PathBuf {
    let (source, built) =
        (directory.join(format!("{name}.c")), directory.join(format!("{name}.so")));
    std::fs::write(&source, format!("int {name}(int x) {{ return x * 2 + 1; }}\n")).unwrap();
    let hex = build_id.map(|byte| format!("{byte:02x}")).concat();
    run(Command::new("gcc")
        .args(["-g", "-O1", "-shared", "-fPIC", "-nostdlib"])
        .arg(format!("-Wl,--build-id=0x{hex}"))
        .arg("-o")
        .args([&built, &source]));
    built
}

/// Where its function lies in the file.
pub(crate) fn offset_of_function(library: &Path) -> u64 {
    let listed = Command::new("nm").arg(library).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let line = listed.lines().find(|line| line.contains(" T ")).unwrap();
    // Of the segment with code the address is the offset, in a file of four pages.
    u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap()
}
