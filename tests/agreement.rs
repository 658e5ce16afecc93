//! `stackwire symbolize` against llvm-symbolizer: function, file, line and the whole chain of
//! inlined calls, for 20,000 random addresses in each of 19 real binaries (`corpus.sh`).
//!
//! The oracle reads the same DWARF without a symbol table. It prints `DW_AT_linkage_name`; where we
//! print a symbol's name for the outermost function, that symbol has to cover the address (checked
//! against `readelf -s`).

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::support::{binary, test_cache};

/// Addresses of an object that may differ. All that do are in `ld_gold`, four of 20,000:
/// llvm-symbolizer follows a range list there into a unit whose entries dwz shares, and prints
/// `run` for code inlined into it, or nothing.
const MAX_DIFFERENT: usize = 20;

/// Frames, innermost first: function, file, line.
type Chain = Vec<Frame>;
type Frame = (String, String, u64);

fn corpus() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = test_cache().join("corpus");
        let status = Command::new(tests.join("corpus.sh")).arg(&directory).status().unwrap();
        assert!(status.success(), "tests/corpus.sh: {status}");
        directory
    })
}

struct Object {
    name: String,
    path: PathBuf,
    kind: String,
    debug: Option<PathBuf>,
}

fn objects() -> Vec<Object> {
    let text = std::fs::read_to_string(corpus().join("objects.tsv")).unwrap();
    let object = |line: &str| {
        let fields: Vec<_> = line.split('\t').collect();
        Object {
            name: fields[0].to_owned(),
            path: fields[1].into(),
            kind: fields[2].to_owned(),
            debug: (fields[3] != "-").then(|| fields[3].into()),
        }
    };
    text.lines().map(object).collect()
}

/// Functions as `readelf` lists them: first address, bytes, name.
fn symbols(path: &Path) -> Vec<(u64, u64, String)> {
    let output = Command::new("readelf").arg("-sW").arg(path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let symbol = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let is_function = words.len() >= 8
            && matches!(words[3], "FUNC" | "IFUNC" | "NOTYPE")
            && words[6] != "UND";
        let size = words.get(2)?;
        let size = size.strip_prefix("0x").map_or(size.parse(), |hex| u64::from_str_radix(hex, 16));
        let name = words.get(7)?.split('@').next()?.to_owned();
        is_function.then_some((u64::from_str_radix(words[1], 16).ok()?, size.ok()?, name))
    };
    text.lines().filter_map(symbol).collect()
}

/// 20,000 addresses, each in a random function at a random place; the same every time.
fn addresses(symbols: &[(u64, u64, String)]) -> Vec<u64> {
    let functions: Vec<_> = symbols.iter().filter(|(_, size, _)| *size > 0).collect();
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    (0..20_000)
        .map(|_| {
            let (start, size, _) = functions[random(functions.len() as u64) as usize];
            start + random(*size)
        })
        .collect()
}

fn ask(command: &mut Command, addresses: &[u64]) -> Vec<String> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let text: String = addresses.iter().map(|address| format!("{address:#x}\n")).collect();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// The chain in a line of JSON; names of the three fields as given.
fn chain(json: &str, frames: &str, fields: [&str; 3]) -> Chain {
    let value: serde_json::Value = serde_json::from_str(json).unwrap();
    let text =
        |frame: &serde_json::Value, field: &str| frame[field].as_str().unwrap_or("").to_owned();
    let frames = value[frames].as_array().unwrap().iter();
    frames
        .map(|f| (text(f, fields[0]), text(f, fields[1]), f[fields[2]].as_u64().unwrap_or(0)))
        .collect()
}

fn compare(object: &Object) {
    let directory = tempfile::tempdir().unwrap();
    let mut symbols = symbols(&object.path);
    symbols.extend(object.debug.iter().flat_map(|path| self::symbols(path)));
    let addresses = addresses(&symbols);

    // A symbol table would have the oracle replace names; Go's tables do not survive objcopy.
    let from = object.debug.as_ref().unwrap_or(&object.path);
    let pure = match object.name.as_str() {
        "go" => object.path.clone(),
        _ => {
            let pure = directory.path().join("pure");
            let copied = Command::new("llvm-objcopy-22")
                .args(["--only-keep-debug", "--remove-section=.symtab", "--remove-section=.strtab"])
                .args([from, &pure])
                .status();
            assert!(copied.unwrap().success());
            let package = object.path.with_extension("dwp");
            if package.exists() {
                std::os::unix::fs::symlink(package, directory.path().join("pure.dwp")).unwrap();
            }
            pure
        }
    };
    let beside = object.path.parent().unwrap();
    let ours = ask(
        Command::new(binary("stackwire"))
            .args(["symbolize", "--json", "--no-demangle", "--symbol-cache-dir"])
            .arg(directory.path().join("cache"))
            .arg("--debug-dir")
            .arg(corpus().join("root/usr/lib/debug"))
            .arg("--debug-dir=/usr/lib/debug")
            .arg(&object.path),
        &addresses,
    );
    let theirs = ask(
        Command::new("llvm-symbolizer-22")
            .args(["--no-demangle", "--output-style=JSON"])
            .arg(format!("--obj={}", pure.display()))
            .current_dir(beside),
        &addresses,
    );
    assert_eq!((ours.len(), theirs.len()), (addresses.len(), addresses.len()), "{}", object.name);

    let mut by_start: BTreeMap<u64, Vec<&(u64, u64, String)>> = BTreeMap::new();
    for symbol in &symbols {
        by_start.entry(symbol.0).or_default().push(symbol);
    }
    let covers = |address: u64, name: &str| {
        let near = by_start.range(..=address).rev().take(64).flat_map(|(_, symbols)| symbols);
        near.into_iter().any(|s| s.2 == name && (address < s.0 + s.1 || s.1 == 0))
    };
    let mut wrong = Vec::new();
    let (mut same, mut deep) = (0, 0);
    for ((&address, ours), theirs) in addresses.iter().zip(&ours).zip(&theirs) {
        let ours = chain(ours, "frames", ["function", "file", "line"]);
        let mut theirs = chain(theirs, "Symbol", ["FunctionName", "FileName", "Line"]);
        theirs.retain(|frame| *frame != Default::default());
        let is_same = |(index, (our, their)): (usize, (&Frame, &Frame))| {
            let outermost = index + 1 == ours.len();
            // Of names dwz moved to the common file it knows none, or the unmangled one.
            let unknown = object.kind == "alt" && our.0.contains(their.0.as_str());
            let name = our.0 == their.0 || unknown || outermost && covers(address, &our.0);
            name && (&our.1, our.2) == (&their.1, their.2)
        };
        let only_symbol = theirs.is_empty()
            && matches!(ours.as_slice(), [] | [_])
            && ours.iter().all(|f| (f.1.as_str(), f.2) == ("", 0) && covers(address, &f.0));
        let frames = ours.iter().zip(&theirs).enumerate();
        if only_symbol || ours.len() == theirs.len() && frames.into_iter().all(is_same) {
            same += 1;
            deep += usize::from(ours.len() > 1);
        } else {
            wrong.push(format!("{address:#x}: {ours:?}, llvm-symbolizer: {theirs:?}"));
        }
    }
    println!("{}: {same} of {} the same, {deep} with inlined calls", object.name, addresses.len());
    let some = wrong[..wrong.len().min(MAX_DIFFERENT)].join("\n");
    assert!(wrong.len() <= MAX_DIFFERENT, "{}: {} differ:\n{some}", object.name, wrong.len());
    assert!(deep > 100, "{}: hardly anything is inlined", object.name);
}

#[test]
fn twenty_thousand_addresses_in_each_of_many_binaries() {
    let objects = objects();
    for object in &objects {
        compare(object);
    }
    // What could not be fetched is said by the script.
    crate::support::can(
        "all 19 binaries, eight of them from Debian's archive",
        objects.len() >= 19,
    );
}

/// What is left of a Go program when everything is stripped says the same as its DWARF did.
#[test]
fn a_stripped_go_program() {
    let built = corpus().join("built/go");
    let symbols = symbols(&built.join("prog"));
    let go: Vec<_> = symbols.into_iter().filter(|(_, _, name)| name.contains('.')).collect();
    let addresses = addresses(&go);
    let directory = tempfile::tempdir().unwrap();
    let [stripped, whole] = ["stripped", "prog"].map(|name| {
        let cache = directory.path().join(name);
        let mut command = Command::new(binary("stackwire"));
        command
            .args(["symbolize", "--json", "--symbol-cache-dir"])
            .arg(cache)
            .arg(built.join(name));
        ask(&mut command, &addresses)
    });
    let fields = ["function", "file", "line"];
    let mut wrong = Vec::new();
    for (address, (stripped, whole)) in addresses.iter().zip(stripped.iter().zip(&whole)) {
        assert!(stripped.contains("gopclntab"), "{stripped}");
        let bare = |chain: Chain| -> Chain {
            let bare = |name: String| {
                let name = name.replace(".abi0", "");
                match (name.find('['), name.rfind(']')) {
                    (Some(from), Some(to)) => format!("{}[...]{}", &name[..from], &name[to + 1..]),
                    _ => name,
                }
            };
            chain.into_iter().map(|(name, file, line)| (bare(name), file, line)).collect()
        };
        let (ours, theirs) =
            (bare(chain(stripped, "frames", fields)), bare(chain(whole, "frames", fields)));
        // DWARF has no line for what the compiler made up.
        let made_up = ours.last().is_some_and(|frame| frame.1 == "<autogenerated>");
        if ours != theirs && !made_up {
            wrong.push(format!("{address:#x}: {ours:?}, DWARF: {theirs:?}"));
        }
    }
    assert!(
        wrong.len() <= 20,
        "{} differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(20)].join("\n")
    );
}

/// Programs of Go 1.16, 1.17 and 1.18, by their tables alone, against Go's own reader of them
/// (`debug/gosym`), which knows the function and the innermost line.
#[test]
fn go_of_every_age() {
    let corpus = corpus();
    let oracle = corpus.join("pclntab");
    let built = Command::new("go")
        .args(["build", "-o"])
        .arg(&oracle)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/corpus/pclntab.go"))
        .env("GO111MODULE", "off")
        .env("GOCACHE", corpus.join("gocache"))
        .status();
    assert!(built.unwrap().success());
    let programs =
        ["0.12.0", "0.14.0", "0.14.40"].map(|version| corpus.join("esbuild").join(version));
    if !crate::support::can(
        "programs of Go 1.16 to 1.18, from npm",
        programs.iter().all(|p| p.exists()),
    ) {
        return;
    }
    for program in programs {
        let list = Command::new(&oracle).arg(&program).arg("list").output().unwrap();
        let list = String::from_utf8(list.stdout).unwrap();
        let functions: Vec<(u64, u64)> = list
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ').map(|word| u64::from_str_radix(word, 16).ok());
                Some((words.next()??, words.next()??))
            })
            .filter(|(start, end)| start < end)
            .collect();
        // All over the code, out of order, the same every time.
        let addresses: Vec<u64> = (0..20_000usize)
            .map(|n| {
                let (start, end) = functions[n * 7_919 % functions.len()];
                start + (n as u64 * 31) % (end - start)
            })
            .collect();
        let theirs = ask(Command::new(&oracle).arg(&program), &addresses);
        let cache = tempfile::tempdir().unwrap();
        let mut command = Command::new(binary("stackwire"));
        command.args(["symbolize", "--json", "--debug-dir=/none", "--symbol-cache-dir"]);
        let ours = ask(command.arg(cache.path()).arg(&program), &addresses);
        let (mut inlined, mut wrong) = (0, Vec::new());
        for (address, (ours, theirs)) in addresses.iter().zip(ours.iter().zip(&theirs)) {
            let chain = chain(ours, "frames", ["function", "file", "line"]);
            inlined += usize::from(chain.len() > 1);
            let said = match (chain.first(), chain.last()) {
                (Some((_, file, line)), Some((function, ..))) => {
                    format!("{function}\t{file}\t{line}")
                }
                _ => "??".to_owned(),
            };
            // Of padding it says line -1, which we call none.
            if said != theirs.replace("\t-1", "\t0") {
                wrong.push(format!("{address:#x}: {said}, debug/gosym: {theirs}"));
            }
        }
        let name = program.display();
        assert!(
            wrong.is_empty(),
            "{name}: {} differ:\n{}",
            wrong.len(),
            wrong[..wrong.len().min(10)].join("\n")
        );
        assert!(inlined > 1000, "{name}: {inlined} with inlined calls");
    }
}
