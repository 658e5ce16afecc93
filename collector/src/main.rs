//! `stackwire-collector`: parse → config → run → exit code.

mod cli;

use std::fmt::Display;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::event::{PollFd, PollFlags, poll};
use stackwire_collector::{
    ConfigError, Count, Counters, Counting, Helpers, Session, SessionError, Summary,
};

fn main() -> ExitCode {
    abort_on_panic();
    stackwire_rights::memory::give_back_large_blocks();
    let arguments = cli::Args::parse();
    if arguments.lists_events() {
        return list_events().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    if let Some(counting) = arguments.counting() {
        return match count(&counting) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                say(error);
                ExitCode::FAILURE
            }
        };
    }
    if let Some(mistake) = arguments.mistake() {
        say(mistake);
        return ExitCode::from(2);
    }
    let run = arguments.into_run();
    // Before there is a second thread.
    let helpers = Helpers::start(run.config.inject_python);
    match capture(run, helpers) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error);
            match error {
                SessionError::Config(
                    ConfigError::RateZero
                    | ConfigError::RateTooHigh { .. }
                    | ConfigError::Events(_)
                    | ConfigError::EventTwice(_)
                    | ConfigError::NoWaitState
                    | ConfigError::Threshold(_)
                    | ConfigError::NoDuration
                    | ConfigError::StackBytes
                    | ConfigError::CountZero
                    | ConfigError::ClockTooFast
                    | ConfigError::NothingToFilter
                    | ConfigError::NeedsPerf
                    | ConfigError::NeedsBoth
                    | ConfigError::NeedsBpf,
                ) => ExitCode::from(2),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Half a program must not go on: a thread that is gone would be missed by nobody.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// Ctrl-C, and what service managers send.
const STOPS: [i32; 2] = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM];

/// How often the same trouble is told.
const TELL_AGAIN: Duration = Duration::from_secs(60);

fn capture(run: cli::Run, helpers: Helpers) -> Result<(), SessionError> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in STOPS {
        // A second one ends it at once: delivering what is left may take long.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .map_err(|error| SessionError::Internal(format!("cannot handle signals: {error}")))?;
    }
    let session = Session::to(run.config, run.destination, helpers)?;
    // The sampling thread has dropped its own; this one needs none from here on.
    stackwire_collector::drop_capabilities()
        .map_err(|error| SessionError::Internal(format!("cannot drop capabilities: {error}")))?;
    if run.until_stdin_closes {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            // Whatever it says, its end is what counts.
            let _ = io::stdin().read_to_end(&mut Vec::new());
            stop.store(true, Ordering::Relaxed);
        });
    }
    if run.verbose {
        say(format_args!("sampling; capabilities held: {}", session.capabilities()));
    }
    // When it was told that nothing can be delivered.
    let mut told: Option<Instant> = None;
    while !stop.load(Ordering::Relaxed) && !session.is_finished() {
        match (session.trouble(), told) {
            (Some(why), _) if told.is_none_or(|at| at.elapsed() > TELL_AGAIN) => {
                say(format_args!("cannot deliver to {why}; trying again"));
                told = Some(Instant::now());
            }
            (None, Some(_)) => {
                say("delivering again");
                told = None;
            }
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let stopped = session.stop();
    match &stopped {
        Ok(summary) if run.verbose => tell(summary),
        // Whoever reads the error wants to know what it cost.
        Err(SessionError::Undelivered { summary, .. }) => tell(summary),
        _ => {}
    }
    stopped.map(drop)
}

fn tell(summary: &Summary) {
    say(format_args!(
        "{} samples taken, {} delivered in {} epochs",
        summary.taken, summary.delivered, summary.epochs
    ));
    let tables = summary.tables;
    say(format_args!(
        "unwind tables: {} loaded, {} evicted, {} executables have none",
        tables.loaded, tables.evicted, tables.failed
    ));
    for (reason, count) in &summary.lost {
        say(format_args!("lost: {count} {}", reason.text()));
    }
    if summary.denied > 0 {
        say(format_args!(
            "mappings that could not be read, permission denied: those of {} process(es); \
             give the collector CAP_PERFMON (kernel 6.15+) or CAP_SYS_PTRACE",
            summary.denied
        ));
    }
}

/// Waits until the input closes or a signal has come.
fn wait_for_the_end(input: &io::Stdin, signalled: &UnixStream) {
    loop {
        let mut fds = [PollFd::new(input, PollFlags::IN), PollFd::new(signalled, PollFlags::IN)];
        // Interrupted, it looks again.
        let _ = poll(&mut fds, None);
        let [input_ready, signal_ready] = fds.map(|fd| !fd.revents().is_empty());
        // Whatever the input says, its end is what counts.
        let is_over = || input.lock().read(&mut [0; 64]).is_ok_and(|read| read == 0);
        if signal_ready || (input_ready && is_over()) {
            return;
        }
    }
}

/// Counts until standard input closes or a signal ends it. A line says when it has begun.
fn count(counting: &Counting) -> Result<(), Box<dyn std::error::Error>> {
    // Ctrl-C reaches `stackwire stat` and this process: what was counted is wanted then.
    let (signalled, signals) = UnixStream::pair()?;
    for signal in STOPS {
        signal_hook::low_level::pipe::register(signal, signals.try_clone()?)?;
    }
    let mut counters = Counters::start(counting)?;
    // Counters that are open go on without.
    stackwire_collector::drop_capabilities()?;
    let mut out = io::stdout().lock();
    writeln!(out, "counting")?;
    out.flush()?;
    wait_for_the_end(&io::stdin(), &signalled);
    for Count { event, tid, user_only, counted } in counters.read() {
        let tid = tid.map_or("-".to_owned(), |tid| tid.to_string());
        let part = if user_only { "u" } else { "-" };
        let counted = counted.map_or("-".to_owned(), |it| {
            format!("{}\t{}\t{}", it.value, it.enabled_ns, it.running_ns)
        });
        writeln!(out, "{event}\t{tid}\t{part}\t{counted}")?;
    }
    Ok(())
}

/// Group and name of each event there is; a group whose names are not known comes with the reason.
fn list_events() -> io::Result<()> {
    let listed = stackwire_collector::list_events();
    let mut out = io::stdout().lock();
    for (group, name, is_there) in listed.named {
        if is_there {
            writeln!(out, "{}\t{name}", group.name())?;
        }
    }
    match listed.tracepoints {
        Ok(names) => names.iter().try_for_each(|name| writeln!(out, "tracepoint\t{name}")),
        Err(error) => writeln!(out, "tracepoint\t\t{error}"),
    }
}

/// Says it on standard error. `eprintln!` would panic when nobody listens any more.
fn say(what: impl Display) {
    let _ = writeln!(std::io::stderr(), "stackwire-collector: {what}");
}
