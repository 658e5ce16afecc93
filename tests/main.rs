//! End-to-end tests: the real binaries on real programs, judged by tools we did not write.
//!
//! Run by `make test`, which installs what they need. Most need root to load eBPF programs; one
//! that cannot run says `SKIPPED`, and fails where `STACKWIRE_NO_SKIP` is set, as in CI.

#![allow(clippy::print_stderr, clippy::print_stdout, reason = "tests say what they skip")]
#![expect(clippy::unwrap_used, reason = "tests")]

/// Those that bear others beside them, which `make test` runs two at a time. Those outside judge
/// shares of CPU time, how long things take, or how much of brief processes is seen.
#[path = "."]
mod together {
    /// Names, files, lines and inlined calls against llvm-symbolizer, in many real binaries.
    mod agreement;
    /// `ps` and `fetch`, and the same over HTTP; probes.
    mod asked;
    /// Attacks on a server are refused, logged and counted.
    mod attacked;
    /// What cannot work says so: processes, options, outputs, captures, perf-maps, permissions.
    mod bad_input;
    /// Everything fails at once, and what was acknowledged is in the windows once.
    mod chaos;
    /// The checkout: eBPF object and sources, help, version.
    mod checkout;
    /// Servers of debug files, good and bad, and the cache.
    mod debuginfod;
    /// Collectors whose symbolizers are away, refuse, or do not answer.
    mod delivery;
    /// What `doctor` says of a host and of processes.
    mod doctor;
    /// Executables the symbolizer cannot see, handed over by the collector and its broker.
    mod handover;
    /// Live, resolved and served profiles of one stream are the same bytes.
    mod identical;
    /// Inlined chains against llvm-symbolizer, for every sampled address.
    mod inlined;
    /// Hosts as they are: packages, no certificates, collectors for everyone, odd compilers.
    mod installed;
    /// Code made at run time: Node, Java, containers, maps that grow.
    mod jit;
    /// The kernel's own debug information.
    mod kernel_debug;
    /// Which crates and files may use which.
    mod layout;
    /// Both crates as libraries.
    mod library;
    /// What a client of a server may take, and what it is told beyond.
    mod limits;
    /// The unwinder's walker against gimli and eu-stack, on stopped threads of real programs.
    mod oracle;
    /// Descriptors, links and pipes as outputs.
    mod outputs;
    /// What `make dist` makes installs and records on clean Debians.
    mod packages;
    /// perf.data for perf of three ages, hotspot, samply and autofdo.
    mod perf_data;
    /// `serve`, ended at each of its steps on the disk.
    mod power_cut;
    /// `go tool pprof` in every view, flame graph and folded stacks.
    mod pprof_reads;
    /// Capabilities, other users, what is dropped, linked and sent.
    mod privileges;
    /// Python, Node, release builds, gzip, git.
    mod programs;
    /// Profiles that `serve` pushes to Pyroscope.
    mod pushed;
    /// CPython that is asked to name its functions.
    mod python;
    /// CPython in states that it is seldom in, and asked by two at once.
    mod python_odd;
    /// What `report` shows, and how it is asked for.
    mod reports;
    /// Who may talk to `serve`: certificates, tokens, users.
    mod secure;
    /// Servers: many collectors, windows, kills in the middle.
    mod serving;
    /// `symbolize` and `cache` as they are typed.
    mod symbolize;
    /// Clients of one server that share nothing: files handed over.
    mod tenants;
}

/// Waits of servers beside offcputime.
mod beside;
/// Processes chosen by name, container and pod.
mod chosen;
/// CPU time that programs used, beside their samples.
mod cpu_time;
/// Functions of CPython among native ones, with their lines.
mod cpython;
/// Manifests, units, images and alerts of `deploy/`.
mod deploy;
/// Events by perf's names, beside perf.
mod events;
/// Shares of time in programs whose answer is known.
mod ground_truth;
/// Frame pointers that are data, return addresses made up, threads that are gone: nothing guessed.
mod guesses;
/// Processes that lie with all they have, beside an honest one.
mod hostile;
/// Profiles of perf, Go, gperftools and our own read back in, divided and compared.
mod inputs;
/// User stacks under kernel stacks.
mod kernel_stacks;
/// Containers, pods and services of samples, by real cgroups.
mod labels;
/// The first samples of programs nobody has met before, and copies of stacks, which go nowhere.
mod late;
/// Pid namespaces: from inside, from outside, nested.
mod namespaces;
/// Processes that have just begun, of programs met before.
mod newborn;
/// Whom `record` samples, what it says in the end and leaves behind, code without names.
mod newcomers;
/// Functions of Node among native frames.
mod node;
/// Signal handlers, execve, io_uring workers: registers that are not where they usually are.
mod odd_registers;
/// Methods of Ruby among native frames, with their lines.
mod ruby;
/// How threads are scheduled, beside what the kernel counts and runqlat.
mod scheduling;
/// Several events at once, and captures of before there were several.
mod series;
/// The whole host: short processes, labels, accounting, a full ring.
mod system_wide;
/// Perf events without eBPF: no capability at all, copies of stacks, what is lost.
mod unprivileged;
/// Unwinding in the kernel: whole stacks, mappings that change, executables that lie.
mod unwinding;
/// Users of one host: forged files, many rules, many mappings.
mod users;
/// Where threads wait, and for how long, in a program whose answer is known.
mod waits;

mod support;
