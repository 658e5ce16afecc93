//! `stackwire record`: start a session, wait, write.

use std::io::{IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use stackwire::{
    AddUp, Builder, Choice, Event, Kept, Names, OffCpu, Profile, Session, SessionError, Sources,
};

use super::Failure;
use super::launch::{Launched, exit};
use super::output::{Outputs, Paths, check_distinct};
use super::place::Placer;
use super::target::is_stdout;
use crate::cli;
use crate::cli::outputs::PmuFormat;
use crate::cli::record::Record;
use crate::say::say;

/// Without `--duration`, as perf-agent has it.
const DEFAULT_DURATION: Duration = Duration::from_secs(10);

pub fn run(arguments: Record) -> Result<(), Failure> {
    check(&arguments)?;
    let comm = comm(&arguments);
    let (paths, beside) = names(&arguments, comm.as_deref());
    let beside = beside.filter(|_| !arguments.no_capture && arguments.capture.is_none());
    let capture = arguments.capture.as_ref().or(beside.as_ref());
    let written = [
        paths.sampled.as_ref(),
        paths.waits.as_ref(),
        paths.pmu.as_ref(),
        capture,
        arguments.outputs.flamegraph.as_ref(),
        arguments.outputs.folded.as_ref(),
        arguments.outputs.perf_data_output.as_ref(),
    ];
    let written: Vec<&Path> = written.into_iter().flatten().map(PathBuf::as_path).collect();
    check_distinct(&written)?;
    let placer = Placer::start()?;
    let outputs =
        Outputs::prepare(&paths, &arguments.outputs, arguments.pmu_as.options(), &placer)?;
    let mut kept = capture.map(|path| Kept::at(path)).transpose()?;
    let promise = kept.as_ref().zip(capture).map(|(it, path)| placer.promise(it.first(), path));
    let promise = promise.transpose().context("cannot write the capture")?;
    if let Some(promise) = promise.clone() {
        kept = kept.map(|kept| kept.put_by(move |file| promise.put(file)));
    }
    let stop = Arc::new(AtomicBool::new(false));
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        // A second one ends it at once: names may take long.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot handle signals")?;
    }

    let launched = if arguments.command.is_empty() {
        None
    } else {
        Some(Launched::start(&arguments.command, arguments.inject_python)?)
    };
    let child = launched.as_ref().map(|launched| launched.id());
    let (session, sources) = match start(&arguments, kept, child, &placer) {
        Ok(started) => started,
        Err(error) => {
            if let Some(launched) = launched {
                launched.abandon();
            }
            return Err(error);
        }
    };
    let launched = launched.map(Launched::release).transpose()?;
    let Waited { profile, names, took, status, did_not_run } =
        wait(session, &arguments, &sources, &stop, launched)?;
    // One that was asked for by name stays, whatever is in it.
    let unasked = promise.filter(|_| beside.is_some());
    if did_not_run {
        unasked.map(|promise| promise.remove()).transpose().ok();
        return Err(anyhow!("there is no profile of a command that did not run").into());
    }
    if profile.samples.is_empty() && profile.sched.is_empty() {
        unasked.map(|promise| promise.remove()).transpose().ok();
        let nothing = no_samples(&profile, &whom(&arguments, comm.as_deref()), took);
        return match status {
            Some(status) if profile.taken == Some(0) => {
                say(&format!("stackwire: {nothing}"));
                exit(status)
            }
            _ => Err(nothing.into()),
        };
    }
    let kept = beside.map(|path| format!("capture: {}", path.display()));
    let named = names.of(&profile);
    outputs.write(named, None, kept)?;
    arguments.symbols.check(named)?;
    if profile.taken.is_none() {
        return Err(anyhow!("the capture was cut; what came until then is written").into());
    }
    status.map_or(Ok(()), exit)
}

/// Whose profile it is.
fn whom(arguments: &Record, comm: Option<&str>) -> String {
    let choice = choice(arguments);
    match (comm, arguments.pid.as_slice()) {
        _ if !choice.is_everything() => format!("each process {choice}, if there is one,"),
        (Some(comm), _) => format!("{comm:?}"),
        (None, []) => "the host".to_owned(),
        (None, pids) => {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            format!("each of the processes {}", pids.join(", "))
        }
    }
}

/// Why there is nothing to write.
fn no_samples(profile: &Profile, whom: &str, took: Duration) -> anyhow::Error {
    let lost: String = profile
        .lost
        .iter()
        .map(|(reason, (count, _))| format!("; lost {count} {}", reason.text()))
        .collect();
    let notes: String = profile.notes.iter().map(|note| format!("; {note}")).collect();
    if profile.taken == Some(0) && lost.is_empty() {
        let took = took.as_secs_f64();
        let clocks = profile.series.iter().all(|series| series.event.is_clock());
        let waits = profile.series.iter().all(|series| series.event.is_wait);
        let names = profile.series.iter().map(|it| it.event.name.as_str());
        let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
        let did = if names.is_empty() {
            "was not switched to or from".to_owned()
        } else if clocks && profile.origin.perf_events {
            "used no CPU, or less than up to the first sample of each thread; perf events also end where a process becomes a program that it may not read, or one of another user".to_owned()
        } else if clocks {
            "used no CPU".to_owned()
        } else if waits {
            "did not wait in a state that is recorded".to_owned()
        } else {
            format!("had no {}", names.join(" and no "))
        };
        return anyhow!(
            "no samples: {whom} {did} in {took:.1} s, so there is no profile to write{notes}"
        );
    }
    anyhow!("no samples, so there is no profile to write{lost}{notes}")
}

/// Combinations that cannot be meant, each with what to type instead.
fn check(arguments: &Record) -> Result<(), Failure> {
    let usage = |message: &str| Err(Failure::Usage(message.to_owned()));
    let scopes = [
        !arguments.pid.is_empty(),
        arguments.all,
        arguments.cgroup.is_some() || !choice(arguments).is_everything(),
    ];
    match (scopes.into_iter().filter(|&it| it).count(), arguments.command.is_empty()) {
        (1, true) | (0, false) => {}
        (0, true) => {
            return usage(
                "what to sample? use --pid PID, -a for every process, --comm NAME, --container ID, --pod UID, --cgroup DIRECTORY, or -- COMMAND",
            );
        }
        (_, true) => {
            return usage(
                "--pid, --all and what chooses of all (--comm, --container, --pod, --cgroup) exclude each other: use --pid PID for one process, or -a for all",
            );
        }
        _ => {
            return usage(
                "a command is sampled by itself: leave out what chooses processes, or the command",
            );
        }
    }
    if arguments.pmu_as.per_pid && !(arguments.all && arguments.pmu) {
        return usage(
            "--per-pid divides what --pmu finds of the whole host: add -a --pmu, or leave it out; with --pid every process is told apart",
        );
    }
    let of_samples = [
        ("--event", !arguments.event.is_empty()),
        ("--count", arguments.count.is_some()),
        ("--filter", arguments.filter.is_some()),
        ("--profile-output", arguments.profile_output.is_some()),
    ];
    if let Some((flag, _)) = of_samples.iter().find(|(_, given)| *given && !samples(arguments)) {
        return usage(&format!(
            "{flag} is about samples of events, of which --offcpu and --pmu take none: add --profile"
        ));
    }
    if arguments.follow && arguments.all {
        return usage("--all samples children already: leave out --follow");
    }
    if arguments.follow && !choice(arguments).is_everything() {
        return usage("processes that start later are looked at, too: leave out --follow");
    }
    if arguments.follow && arguments.cgroup.is_some() {
        return usage("children are in the cgroup of their parent: leave out --follow");
    }
    if arguments.duration.is_some_and(|duration| duration.is_zero()) {
        return usage("a duration of 0 takes no samples: use --duration 10s");
    }
    Ok(())
}

/// Starts to sample; on the way all rights are given up.
fn start(
    arguments: &Record,
    kept: Option<Kept>,
    command: Option<u32>,
    placer: &Placer,
) -> Result<(Session, Sources), Failure> {
    let mut events = arguments.event.clone();
    if events.is_empty() {
        events.push(Event::cpu_clock());
    }
    let mut builder: Builder = Session::builder()
        .buildid_dir(arguments.outputs.perf_buildid_dir.clone())
        .timeline(arguments.outputs.perf_data_output.is_some())
        .sample_rate(arguments.sample_rate)
        .count(arguments.count)
        .filter(arguments.filter.clone())
        .kernel_stacks(arguments.kernel_stacks)
        .events(events)
        .unwind(arguments.unwind)
        .source(arguments.source)
        .stack_bytes(arguments.stack_bytes)
        .stack_copies(arguments.stack_copies)
        .share_executables(arguments.share_executables)
        .choice(choice(arguments))
        .follow(arguments.follow || command.is_some())
        .inject_python(arguments.inject_python);
    if samples(arguments) {
        builder = builder.profile();
    }
    if arguments.offcpu {
        let cli::record::Waits { offcpu_states, offcpu_threshold, offcpu_wakers, .. } =
            &arguments.waits;
        let (states, threshold) = (offcpu_states.clone(), *offcpu_threshold);
        builder = builder.off_cpu(OffCpu { states, threshold, wakers: *offcpu_wakers });
    }
    builder = builder.counters(match (arguments.pmu, arguments.per_thread) {
        (false, _) => AddUp::Nothing,
        (true, false) => AddUp::Processes,
        (true, true) => AddUp::Threads,
    });
    for &pid in arguments.pid.iter().chain(&command) {
        builder = builder.pid(pid);
    }
    if command.is_some() {
        builder = builder.on_exec();
    }
    if let Some(directory) = &arguments.cgroup {
        builder = builder.cgroup(directory);
    }
    if let Some(duration) = duration(arguments) {
        builder = builder.duration(duration);
    }
    if let Some(collector) = &arguments.collector {
        builder = builder.collector(collector);
    }
    let spawned = builder.spawn(kept)?;
    placer.confine()?;
    let sources = arguments.symbols.sources()?;
    arguments.metrics.start(&sources)?;
    if let Some(directory) = &arguments.outputs.perf_buildid_dir {
        // Now, and not when all has been sampled.
        let made = std::fs::create_dir_all(directory);
        made.and_then(|()| tempfile::tempfile_in(directory))
            .with_context(|| format!("cannot write {}", directory.display()))?;
    }
    let session = spawned.start(sources.cache.clone()).map_err(|error| match error {
        SessionError::Usage(message) => Failure::Usage(message),
        other => other.into(),
    })?;
    Ok((session, sources))
}

/// Which processes count.
fn choice(arguments: &Record) -> Choice {
    let Record { comm, container, pod, .. } = arguments;
    Choice { comms: comm.clone(), containers: container.clone(), pods: pod.clone() }
}

/// A command ends its capture itself.
fn duration(arguments: &Record) -> Option<Duration> {
    if arguments.command.is_empty() {
        Some(arguments.duration.unwrap_or(DEFAULT_DURATION))
    } else {
        arguments.duration
    }
}

/// What came of it.
struct Waited {
    profile: Profile,
    names: Names,
    /// How long was sampled.
    took: Duration,
    /// How the command ended, if it did.
    status: Option<ExitStatus>,
    /// It was no command.
    did_not_run: bool,
}

/// Waits for the end of it.
fn wait(
    mut session: Session,
    arguments: &Record,
    sources: &Sources,
    stop: &AtomicBool,
    mut command: Option<(Child, UnixStream)>,
) -> Result<Waited, Failure> {
    let started = Instant::now();
    let terminal = std::io::stderr().is_terminal();
    if terminal {
        let until = duration(arguments).map_or("until the command ends".to_owned(), |duration| {
            format!("for {}", humantime::format_duration(duration))
        });
        say(&format!("sampling {until} (Ctrl-C to stop early)"));
    }
    while !stop.load(Ordering::Relaxed) && !session.is_finished() {
        if let Some((child, _)) = &mut command
            && child.try_wait().context("cannot wait for the command")?.is_some()
        {
            break;
        }
        if terminal {
            // The terminal may be gone; the capture is not.
            let _ = write!(std::io::stderr(), "\r{:>5.0} s ", started.elapsed().as_secs_f64());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let took = started.elapsed();
    if terminal {
        let _ = write!(std::io::stderr(), "\r");
    }
    let (profile, names) = session.stop_with(sources)?;
    let Some((mut child, mut stream)) = command else {
        return Ok(Waited { profile, names, took, status: None, did_not_run: false });
    };
    let status = child.try_wait().context("cannot wait for the command")?;
    if status.is_none() && !stop.load(Ordering::Relaxed) {
        // Sampled for as long as asked; it goes on, as it would without us.
        say(&format!("the command runs on as pid {}", child.id()));
    }
    // A word, or the end of the stream when it became the command.
    let did_not_run = status.is_some() && stream.read(&mut [0]).is_ok_and(|read| read > 0);
    Ok(Waited { profile, names, took, status, did_not_run })
}

/// Name of what is sampled, for messages and files.
fn comm(arguments: &Record) -> Option<String> {
    if let Some(command) = arguments.command.first() {
        let name = std::path::Path::new(command).file_name()?;
        return Some(name.to_string_lossy().into_owned());
    }
    if let Some(directory) = &arguments.cgroup {
        let name = directory.canonicalize().ok()?.file_name()?.to_string_lossy().into_owned();
        return Some(name);
    }
    if let [name] = &arguments.comm[..] {
        return Some(name.clone());
    }
    let [pid] = arguments.pid[..] else { return None };
    // A name may be any bytes.
    let comm = std::fs::read(format!("/proc/{pid}/comm"));
    let text = |comm: Vec<u8>| String::from_utf8_lossy(&comm).trim().to_owned();
    Some(comm.map_or(format!("pid{pid}"), text))
}

/// The capture of a profile named by the user: beside it, if it is a file with a name.
fn beside(pprof: &Path) -> Option<PathBuf> {
    // Not through a link, as descriptors are.
    let is_file = std::fs::symlink_metadata(pprof).map_or(true, |found| found.is_file());
    let name = pprof.file_name().filter(|_| is_file && !is_stdout(pprof))?.to_str()?;
    let stem = [".pb.gz", ".pprof", ".pb", ".gz"].iter().find_map(|end| name.strip_suffix(end));
    let stem = stem.unwrap_or(name);
    let mut path = pprof.with_file_name(format!("{stem}.stackwire"));
    let mut number = 2;
    // Nobody named it, so it replaces nothing.
    while path.symlink_metadata().is_ok() {
        path = pprof.with_file_name(format!("{stem}-{number}.stackwire"));
        number += 1;
    }
    Some(path)
}

/// Whether samples are taken of events, and not waits alone.
fn samples(arguments: &Record) -> bool {
    arguments.profile || !(arguments.offcpu || arguments.pmu)
}

/// Where outputs go, and where the capture goes unless told.
fn names(arguments: &Record, comm: Option<&str>) -> (Paths, Option<PathBuf>) {
    let samples = samples(arguments);
    let sampled = arguments.profile_output.clone().filter(|_| samples);
    let waits = arguments.waits.offcpu_output.clone();
    let pmu = arguments.pmu_output.clone().filter(|path| path != Path::new("auto"));
    let told = sampled.as_ref().or(waits.as_ref()).or(pmu.as_ref());
    let beside_told = told.map(|path| beside(path));
    let wanted = Wanted {
        sampled: samples,
        waits: arguments.offcpu,
        pmu: arguments.pmu.then_some(arguments.pmu_as.pmu_format),
    };
    let (auto, capture) = auto_names(comm, wanted);
    let paths = Paths {
        sampled: sampled.or(auto.sampled),
        waits: waits.or(auto.waits),
        pmu: pmu.or(auto.pmu),
    };
    (paths, beside_told.unwrap_or(Some(capture)))
}

/// Which outputs there are.
#[derive(Clone, Copy)]
struct Wanted {
    sampled: bool,
    waits: bool,
    pmu: Option<PmuFormat>,
}

/// `COMM-YYYYMMDDHHMM-on-cpu.pb.gz`, `….-off-cpu.pb.gz`, `….-pmu.txt` and `….stackwire`; without a
/// name when not one process is sampled; the second within a minute ends in `-2`.
fn auto_names(comm: Option<&str>, wanted: Wanted) -> (Paths, PathBuf) {
    let now = jiff::Zoned::now().strftime("%Y%m%d%H%M").to_string();
    // A thread may call itself anything, `../../etc/x` included.
    let safe = |c: char| if c.is_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' };
    // Nor may a name look like an option to the next command, or be empty.
    let comm = comm.map(|comm| {
        if comm.is_empty() || comm.starts_with('-') { format!("_{comm}") } else { comm.to_owned() }
    });
    let name = match comm {
        Some(comm) => format!("{}-{now}", comm.chars().map(safe).collect::<String>()),
        None => now,
    };
    let mut number = 1;
    loop {
        let path = |part: &str, end: &str| match number {
            1 => PathBuf::from(format!("{name}-{part}.{end}")),
            number => PathBuf::from(format!("{name}-{part}-{number}.{end}")),
        };
        let paths = Paths {
            sampled: wanted.sampled.then(|| path("on-cpu", "pb.gz")),
            waits: wanted.waits.then(|| path("off-cpu", "pb.gz")),
            pmu: wanted.pmu.map(|format| match format {
                PmuFormat::Text => path("pmu", "txt"),
                PmuFormat::Json => path("pmu", "json"),
            }),
        };
        let first = match wanted {
            Wanted { sampled: true, .. } => "on-cpu",
            Wanted { waits: true, .. } => "off-cpu",
            _ => "pmu",
        };
        let capture = path(first, "stackwire");
        let Paths { sampled, waits, pmu } = &paths;
        let all = [Some(&capture), sampled.as_ref(), waits.as_ref(), pmu.as_ref()];
        if !all.into_iter().flatten().any(|path| path.symlink_metadata().is_ok()) {
            return (paths, capture);
        }
        number += 1;
    }
}
