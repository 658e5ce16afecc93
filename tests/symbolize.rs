//! `stackwire symbolize` and `stackwire cache` as they are typed.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::support::build::{inlined_cc, work};
use crate::support::{Ran, binary, stackwire};

/// First address of a function of a program, as `nm` prints it.
fn address(program: &std::path::Path, function: &str) -> String {
    let output = Command::new("nm").arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.ends_with(&format!(" {function}"))).unwrap();
    line.split(' ').next().unwrap().to_owned()
}

#[test]
fn text_is_as_addr2line_prints_it_and_json_has_every_field() {
    let alpha = address(work(), "alpha");
    let program = work().to_str().unwrap();
    let text = stackwire(["symbolize", program, &alpha, "0x1"]).succeeded().stdout;
    let theirs =
        Command::new("addr2line").args(["-f", "-i", "-e", program, &alpha]).output().unwrap();
    let theirs = String::from_utf8(theirs.stdout).unwrap();
    assert_eq!(text, format!("{theirs}??\n??:0\n"));
    let json = stackwire(["symbolize", "--json", program, &alpha]).succeeded().stdout;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["address"], format!("0x{}", alpha.trim_start_matches('0')));
    assert_eq!(json["frames"][0]["function"], "alpha");
    assert!(json["frames"][0]["file"].as_str().unwrap().ends_with("/work.c"));
    assert_eq!((&json["quality"], &json["source"]), (&"dwarf".into(), &program.into()));
}

#[test]
fn addresses_come_from_standard_input_too() {
    let work_address = address(inlined_cc(), "_Z4workm");
    for (demangle, expected) in [(true, "work(unsigned long)"), (false, "_Z4workm")] {
        let mut command = Command::new(binary("stackwire"));
        command.arg("symbolize").args((!demangle).then_some("--no-demangle")).arg(inlined_cc());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = format!("0x{work_address} {work_address}\n\n{work_address}\n");
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert_eq!(output.lines().filter(|line| *line == expected).count(), 3, "{output}");
    }
}

#[test]
fn what_cannot_be_read_says_so() {
    let program = work().to_str().unwrap();
    stackwire(["symbolize", program, "main"]).failed(2, "is not an address");
    stackwire(["symbolize", "/nonexistent", "0x1"])
        .failed(1, "cannot read symbols of /nonexistent");
    stackwire(["symbolize", "/etc/passwd", "0x1"]).failed(1, "not an ELF file");
    stackwire(["symbolize", "/dev/zero", "0x1"]).failed(1, "not a regular file");
    stackwire(["symbolize", "deadbeefdeadbeef", "0x1"]).failed(1, "deadbeefdeadbeef");
    stackwire(["symbolize", "--debuginfod-url=", program, "0x1"]).failed(2, "--debuginfod-url");
    stackwire(["symbolize", "--debuginfod-url=ftp://x", program, "0x1"])
        .failed(2, "no debuginfod server");
    stackwire(["symbolize", "--symbol-cache-max=much", program, "0x1"]).failed(2, "2GiB");
    stackwire(["cache", "rm", "../../etc"]).failed(2, "hex of 8 to 64 digits");
    stackwire(["cache", "add", "/etc/passwd"]).failed(1, "not an ELF file");
}

/// A cache that cannot be used costs the cache, and nothing else.
#[test]
fn without_a_cache_names_are_found_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let taken = directory.path().join("taken");
    std::fs::write(&taken, "a file where a directory should be").unwrap();
    let program = work().to_str().unwrap();
    let alpha = address(work(), "alpha");
    let cache = format!("--symbol-cache-dir={}", taken.display());
    let ran = stackwire(["symbolize", &cache, program, &alpha]).succeeded();
    assert!(
        ran.stdout.starts_with("alpha\n") && ran.stderr.contains("no symbol cache"),
        "{}",
        ran.stderr
    );
    let mut command = Command::new(binary("stackwire"));
    command.env_remove("HOME").env_remove("XDG_CACHE_HOME").args(["symbolize", program, &alpha]);
    let ran = Ran::of(&mut command).succeeded();
    assert!(
        ran.stdout.starts_with("alpha\n") && ran.stderr.contains("no symbol cache"),
        "{}",
        ran.stderr
    );
    let open = directory.path().join("open");
    std::fs::create_dir(&open).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&open, mode).unwrap();
    let cache = format!("--symbol-cache-dir={}", open.display());
    let ran = stackwire(["symbolize", &cache, program, &alpha]).succeeded();
    assert!(ran.stderr.contains("can be written by others"), "{}", ran.stderr);
}

/// What the cache knows of a file never hides that there is more to know now.
#[test]
fn better_files_are_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let run = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).current_dir(directory.path()).status();
        assert!(status.unwrap().success(), "{program} {arguments:?}");
    };
    let cache = format!("--symbol-cache-dir={}", at("cache"));
    let ask = |file: &str, address: &str| {
        stackwire(["symbolize", "--json", &cache, file, address]).succeeded().stdout
    };
    let source = |first: &str, second: &str| {
        let body = "{ return x * 3 + 1; }\n__attribute__((noinline)) int";
        let text = format!(
            "static inline int in(int x) {{ __asm__ volatile(\"nop\"); return x + 7; }}\n__attribute__((noinline)) int {first}(int x) {body} {second}(int x) {{ return in(x) * 5; }}\nint main(int c, char **v) {{ return alpha(c) + bravo(c); }}\n"
        );
        std::fs::write(at("x.c"), text).unwrap();
    };
    // strip keeps the build-id.
    source("alpha", "bravo");
    run("gcc", &["-O2", "-Wl,--build-id", "x.c", "-o", "whole"]);
    run("strip", &["whole", "-o", "stripped"]);
    let alpha = address(std::path::Path::new(&at("whole")), "alpha");
    assert!(ask(&at("stripped"), &alpha).contains("missing"));
    assert!(ask(&at("whole"), &alpha).contains("\"alpha\""));
    // Without a build-id all of the content tells files apart.
    run("gcc", &["-g", "-O2", "-Wl,--build-id=none", "x.c", "-o", "one"]);
    source("bravo", "alpha");
    run("gcc", &["-g", "-O2", "-Wl,--build-id=none", "x.c", "-o", "two"]);
    assert!(
        ask(&at("one"), &alpha).contains("\"alpha\"")
            && ask(&at("two"), &alpha).contains("\"bravo\"")
    );
    // A .dwo that was away comes back.
    run("gcc", &["-g", "-gsplit-dwarf", "-O2", "-c", "x.c", "-o", "x.o"]);
    run("gcc", &["x.o", "-o", "split"]);
    let alpha = address(std::path::Path::new(&at("split")), "alpha");
    std::fs::rename(at("x.dwo"), at("away")).unwrap();
    // Wherever in its first bytes the compiler put the call it inlined.
    let alpha = u64::from_str_radix(&alpha, 16).unwrap();
    let is_inlined =
        || (alpha..alpha + 12).any(|at_| ask(&at("split"), &format!("{at_:x}")).contains("\"in\""));
    assert!(!is_inlined());
    std::fs::rename(at("away"), at("x.dwo")).unwrap();
    assert!(is_inlined());
    stackwire(["symbolize", &cache, &at("x.o"), "0"]).failed(1, "an object file");
}

#[test]
fn stubs_of_the_linkage_table_are_called_as_objdump_calls_them() {
    let cache = tempfile::tempdir().unwrap();
    let mut stubs = 0;
    for program in
        [inlined_cc(), std::path::Path::new("/bin/bash"), std::path::Path::new("/usr/bin/git")]
    {
        let sections = ["-j", ".plt", "-j", ".plt.sec", "-j", ".plt.got"];
        let output =
            Command::new("objdump").arg("-d").args(sections).arg(program).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // "0000000000001030 <free@plt>:"
        let named = text.lines().filter_map(|line| {
            let (address, name) = line.strip_suffix(">:")?.split_once(" <")?;
            name.ends_with("@plt").then(|| (address.to_owned(), name.to_owned()))
        });
        let named: Vec<_> = named.collect();
        let mut command = Command::new(binary("stackwire"));
        command.args(["symbolize", "--debug-dir=/none", "--symbol-cache-dir"]).arg(cache.path());
        command.arg(program).args(named.iter().map(|(address, _)| address));
        let answers = Ran::of(&mut command).succeeded().stdout;
        let answers: Vec<&str> = answers.lines().step_by(2).collect();
        assert_eq!(answers.len(), named.len(), "{}", program.display());
        for ((address, name), ours) in named.iter().zip(answers) {
            // Versions are the linker's affair.
            let name = name.split('@').next().unwrap();
            assert_eq!(ours, format!("{name}@plt"), "{} at {address}", program.display());
        }
        stubs += named.len();
    }
    assert!(stubs > 300, "{stubs}");
}

#[test]
fn a_debug_file_whose_relocations_refer_to_themselves_costs_its_names() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let run = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).current_dir(directory.path()).status();
        assert!(status.unwrap().success(), "{program} {arguments:?}");
    };
    let source = "__attribute__((noinline)) int work(int x) { return x * 3; } int main(void) { return work(2); }";
    std::fs::write(at("x.c"), source).unwrap();
    run("gcc", &["-g", "-O1", "-c", "x.c", "-o", "evil.o"]);
    run("gcc", &["-O1", "x.c", "-o", "program"]);
    let mut object = std::fs::read(at("evil.o")).unwrap();
    let number = |bytes: &[u8], at: usize, size: usize| {
        bytes[at..at + size].iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte)) as usize
    };
    // Elf64_Ehdr: e_shoff, e_shnum; Elf64_Shdr: sh_type, sh_link, sh_info.
    let (headers, count) = (number(&object, 0x28, 8), number(&object, 0x3c, 2));
    for header in (0..count).map(|section| headers + section * 64) {
        if number(&object, header + 4, 4) == 4 {
            let info = object[header + 44..header + 48].to_vec();
            object[header + 40..header + 44].copy_from_slice(&info);
        }
    }
    std::fs::write(at("evil.o"), object).unwrap();
    let work = address(&at("program"), "work");
    run("objcopy", &["--add-gnu-debuglink=evil.o", "program"]);
    let cache = format!("--symbol-cache-dir={}", at("cache").display());
    let program = at("program").display().to_string();
    let answer = stackwire(["symbolize", &cache, &program, &work]).succeeded().stdout;
    assert!(answer.starts_with("work\n"), "{answer}");
}
