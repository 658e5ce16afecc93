//! The kernel and its modules by their debug information: inlined calls, files and lines as
//! llvm-symbolizer has them, where distributions put such files and on a debuginfod server.
//!
//! Kernels of this size: linked as one is, at its address, with a module of the shape modules have.
//! Captures are written by hand, since no kernel with debug information runs here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FORMAT, FrameWriter, seal_epoch, seal_piece, v1};

use super::inlined::oracle;
use super::perf_data::perfs;
use crate::support::{Pprof, stackwire};

const RELEASE: &str = "9.9.9-test";
const KERNEL: &str = "
    #define SECTION(name) __attribute__((section(name), used))
    SECTION(\"__ksymtab\") long ksymtab[2] = {1, 2};
    volatile int sink;
    static inline __attribute__((always_inline)) int innermost(int x) { sink += x; return x * 3; }
    static inline __attribute__((always_inline)) int inner(int x) { return innermost(x) + sink; }
    __attribute__((noinline)) int schedule(int x) { return inner(x) + 1; }
    SECTION(\".init.text\") int setup(int x) { return schedule(x) + inner(x); }
    void startup(void) { for (;;) schedule(sink); }
";
const MODULE: [&str; 2] = [
    "
    __attribute__((section(\".gnu.linkonce.this_module\"), used)) long this_module[8] = {1};
    volatile int state;
    static inline __attribute__((always_inline)) int lowest(int x) { state ^= x; return x + 7; }
    static __attribute__((noinline)) int helper(int x) { return lowest(x) * 2; }
    __attribute__((cold, noinline)) int unlikely_path(int x) { return lowest(x) - state; }
    int first_entry(int x) { return x > 3 ? helper(x) : unlikely_path(x); }
    ",
    "
    extern volatile int state;
    static inline __attribute__((always_inline)) int lower(int x) { state += x; return x ^ 5; }
    static __attribute__((noinline)) int helper(int x) { return lower(x) + 9; }
    int second_entry(int x) { return helper(x) + lower(x); }
    __attribute__((section(\".exit.text\"), used)) int leave(int x) { return second_entry(x); }
    ",
];

fn run(program: &str, directory: &Path, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).current_dir(directory).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}");
}

/// Address, size, name of each function.
fn nm(path: &Path) -> Vec<(u64, u64, String)> {
    let output =
        Command::new("nm").args(["-n", "-S", "--defined-only"]).arg(path).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let code = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let mut hex = || u64::from_str_radix(words.next()?, 16).ok();
        let (address, size) = (hex()?, hex()?);
        matches!(words.next()?, "t" | "T")
            .then(|| (address, size, words.next().unwrap().to_owned()))
    });
    code.collect()
}

fn build_id(path: &Path) -> Vec<u8> {
    let notes = Command::new("readelf").arg("-n").arg(path).output().unwrap();
    let notes = String::from_utf8_lossy(&notes.stdout).into_owned();
    let id =
        notes.split("Build ID: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    (0..id.len()).step_by(2).map(|at| u8::from_str_radix(&id[at..at + 2], 16).unwrap()).collect()
}

/// A kernel and a module of it: as their debug files are, and linked where they would be loaded.
struct Kernel {
    directory: tempfile::TempDir,
    /// Below it are `boot/vmlinux-RELEASE` and `lib/modules/RELEASE`.
    debug_dir: PathBuf,
    vmlinux: PathBuf,
    module: PathBuf,
    loaded_module: PathBuf,
}

const TEXT: u64 = 0xffff_ffff_8100_0000;
const MODULE_TEXT: u64 = 0xffff_ffff_c000_0000;

impl Kernel {
    fn build() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("kernel.c"), KERNEL).unwrap();
        let flags = ["-g", "-O2", "-ffreestanding", "-fno-pie", "-mcmodel=kernel", "-nostdlib"];
        let text = format!("-Wl,-Ttext={TEXT:#x}");
        let link = ["-static", "-no-pie", "-Wl,--build-id", "-Wl,-e,startup", &text];
        run("gcc", directory.path(), &[&flags[..], &link, &["kernel.c", "-o", "vmlinux"]].concat());
        for (number, source) in MODULE.iter().enumerate() {
            std::fs::write(at(&format!("m{number}.c")), source).unwrap();
            let (c, o) = (format!("m{number}.c"), format!("m{number}.o"));
            run("gcc", directory.path(), &[&flags[..], &["-c", &c, "-o", &o]].concat());
        }
        let objects = ["m0.o", "m1.o"];
        let relocatable = ["-r", "--build-id", "-o", "test-mod.ko"];
        run("ld", directory.path(), &[&relocatable[..], &objects].concat());
        let text = format!("-Ttext={MODULE_TEXT:#x}");
        let linked = ["-e", "0", &text, "--unresolved-symbols=ignore-all", "-o", "loaded"];
        run("ld", directory.path(), &[&linked[..], &["test-mod.ko"]].concat());
        let debug_dir = at("debug");
        let modules = debug_dir.join("lib/modules").join(RELEASE).join("kernel/drivers/test");
        std::fs::create_dir_all(&modules).unwrap();
        std::fs::create_dir(debug_dir.join("boot")).unwrap();
        let vmlinux = debug_dir.join("boot").join(format!("vmlinux-{RELEASE}"));
        std::fs::copy(at("vmlinux"), &vmlinux).unwrap();
        let module = modules.join("test-mod.ko");
        std::fs::copy(at("test-mod.ko"), &module).unwrap();
        let loaded_module = at("loaded");
        Self { directory, debug_dir, vmlinux, module, loaded_module }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Every byte of every function: offsets from `_text` and from the module's lowest symbol, with
    /// addresses.
    fn places(&self) -> [BTreeMap<u64, u64>; 2] {
        [&self.vmlinux, &self.loaded_module].map(|path| {
            let symbols = nm(path);
            let lowest = symbols[0].0;
            let mut places = BTreeMap::new();
            for (start, size, _) in symbols {
                places.extend((start..start + size).map(|address| (address - lowest, address)));
            }
            places
        })
    }

    /// A capture with a sample at each place, told from the others by its weight.
    fn capture(&self, build_ids: [Vec<u8>; 2]) -> PathBuf {
        let mut kallsyms = String::from("\t0\t_text\n");
        for (module, path) in [("", &self.vmlinux), ("test_mod", &self.loaded_module)] {
            let symbols = nm(path);
            for (address, _, name) in &symbols {
                kallsyms += &format!("{module}\t{:x}\t{name}\n", address - symbols[0].0);
            }
        }
        let hash: [u8; 32] = sha2::Digest::finalize(sha2::Digest::chain_update(
            <sha2::Sha256 as sha2::Digest>::new(),
            kallsyms.as_bytes(),
        ))
        .into();
        let mut epoch = v1::Epoch {
            strings: vec![String::new(), "test_mod".into(), "x".into()],
            processes: vec![v1::Process { pid: 7, comm: 2, ..Default::default() }],
            threads: vec![v1::Thread { process: 0, tid: 7, comm: 2 }],
            end_ns: 1000,
            ..Default::default()
        };
        let kinds = [v1::ExecutableKind::Kernel, v1::ExecutableKind::Module];
        for (number, (kind, build_id)) in kinds.into_iter().zip(build_ids).enumerate() {
            let mut executable = v1::Executable {
                path: number as u32,
                build_id,
                artifact: hash.to_vec(),
                ..Default::default()
            };
            executable.set_kind(kind);
            epoch.executables.push(executable);
        }
        let (mut nodes, mut samples) = (v1::StackNodes::default(), v1::Samples::default());
        let mut before = 0;
        for (executable, places) in self.places().iter().enumerate() {
            for &offset in places.keys() {
                nodes.parent.push(0);
                nodes.executable.push(executable as u32);
                nodes.offset_delta.push(offset.wrapping_sub(before) as i64);
                nodes.kind.push(v1::FrameKind::Leaf as u32);
                before = offset;
                let number = nodes.parent.len() as u32;
                let mut stack = v1::Stack { node: number, ..Default::default() };
                stack.set_end(v1::EndReason::Root);
                epoch.stacks.push(stack);
                samples.time_delta.push(1);
                samples.thread.push(0);
                samples.cpu.push(0);
                samples.user_stack.push(0);
                samples.kernel_stack.push(number);
                samples.value.push(value(executable, offset));
            }
        }
        let taken = samples.value.len() as u64;
        (epoch.nodes, epoch.samples) = (Some(nodes), vec![samples]);
        let path = self.at("capture.stackwire");
        let mut out = FrameWriter::new(std::fs::File::create(&path).unwrap());
        let hello = v1::Hello {
            format: FORMAT,
            capture_id: vec![1; 16],
            kernel_release: RELEASE.into(),
            machine: "x86_64".into(),
            sampling: Some(v1::Sampling {
                event: "cpu-clock".into(),
                frequency: 99,
                ..Default::default()
            }),
            ..Default::default()
        };
        let (kind, length) = (v1::ArtifactKind::Kallsyms, kallsyms.len() as u64);
        let piece = seal_piece(&hash, kind, length, 0, kallsyms.as_bytes());
        let end = v1::End { epochs: 1, taken, ..Default::default() };
        let bodies = [Body::Hello(hello)].into_iter().chain([
            Body::Artifact(piece),
            Body::Epoch(seal_epoch(&epoch)),
            Body::End(end),
        ]);
        bodies.for_each(|body| out.write(&v1::CollectorMessage { body: Some(body) }).unwrap());
        path
    }

    /// Function, line of every frame at each place; innermost first.
    fn resolve(&self, capture: &Path, more: &[&str]) -> BTreeMap<u64, Vec<(String, u64)>> {
        let out = self.at("out.pb.gz");
        let [capture, written] = [capture, &out].map(|path| path.display().to_string());
        let arguments = ["resolve", &capture, "-o", &written];
        stackwire(arguments.iter().chain(more)).succeeded();
        let profile = Pprof::read(&out);
        let chains = profile.samples.iter().map(|sample| {
            assert_eq!(sample.locations.len(), 1);
            let lines = profile.locations[&sample.locations[0]].lines.iter();
            (sample.value, lines.map(|(function, _, line)| (function.clone(), *line)).collect())
        });
        chains.collect()
    }
}

fn value(executable: usize, offset: u64) -> u64 {
    (executable as u64 + 1) << 32 | offset
}

#[test]
fn the_kernel_and_a_module_have_inlined_calls_and_lines() {
    let kernel = Kernel::build();
    let capture = kernel.capture([build_id(&kernel.vmlinux), build_id(&kernel.module)]);
    let debug_dir = format!("--debug-dir={}", kernel.debug_dir.display());
    let cache = format!("--symbol-cache-dir={}", kernel.at("cache").display());
    let cold = kernel.resolve(&capture, &[&debug_dir, &cache]);
    let (mut deepest, mut compared) = (0, 0);
    for (number, (places, linked)) in
        kernel.places().iter().zip([&kernel.vmlinux, &kernel.loaded_module]).enumerate()
    {
        let addresses: Vec<u64> = places.values().copied().collect();
        for ((offset, address), theirs) in places.iter().zip(oracle(linked, &addresses)) {
            let ours = &cold[&value(number, *offset)];
            assert_eq!(*ours, theirs, "{} at {address:#x}", linked.display());
            deepest = deepest.max(ours.len());
            compared += 1;
        }
    }
    assert!(compared > 100 && deepest == 3, "{compared} places, chains of {deepest}");
    assert_eq!(kernel.resolve(&capture, &[&debug_dir, &cache]), cold, "from the cache");

    // Without debug files, and with those of another kernel: kallsyms.
    let elsewhere = format!("--debug-dir={}", kernel.at("none").display());
    let empty = format!("--symbol-cache-dir={}", kernel.at("empty").display());
    let plain = kernel.resolve(&capture, &[&elsewhere, &empty]);
    let other = kernel.capture([vec![1; 20], vec![2; 20]]);
    assert_eq!(kernel.resolve(&other, &[&debug_dir, &empty]), plain);
    for (place, chain) in &plain {
        let function = &cold[place].last().unwrap().0;
        assert_eq!(chain, &[(function.clone(), 0)], "{place:#x}");
    }
}

/// perf on a host with another kernel, which has what was laid out and nothing else.
#[test]
fn perf_names_another_hosts_kernel_and_module_from_what_was_laid_out() {
    let kernel = Kernel::build();
    let capture = kernel.capture([vec![1; 20], vec![2; 20]]);
    let [file, laid] = ["perf.data", "laid"].map(|name| kernel.at(name).display().to_string());
    let empty = format!("--symbol-cache-dir={}", kernel.at("empty").display());
    let into = format!("--perf-buildid-dir={laid}");
    let ours = kernel.resolve(&capture, &[&empty, &format!("--perf-data-output={file}"), &into]);
    // The newest, 7.2, opens what was laid out and then takes the symbols of the kernel it runs on.
    for (version, mut perf) in perfs().into_iter().filter(|(version, _)| version.starts_with("6."))
    {
        let fields = ["--buildid-dir", &laid, "script", "-F", "period,ip,sym", "-i", &file];
        let (text, said) = crate::support::run(perf.args(fields));
        assert_eq!(said, "", "perf {version}");
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words.len(), ours.len() * 3, "perf {version}: {text}");
        for sample in words.chunks(3) {
            let [period, _, symbol] = sample else { panic!("{sample:?}") };
            let chain = &ours[&period.parse().unwrap()];
            assert_eq!(chain, &[((*symbol).to_owned(), 0)], "perf {version}");
        }
    }
}
