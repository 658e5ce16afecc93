//! `stackwire stat`: has the collector count, and prints what it counted.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use stackwire::formats::stat::{self, Count};
use stackwire::{Groups, find_collector};
use stackwire_model::sched::CounterSum;

use super::launch::{Launched, exit};
use super::{Failure, place};
use crate::cli::Stat;

/// Between two looks at whether the command has ended.
const TURN: Duration = Duration::from_millis(2);
/// Between two looks at whether processes have ended.
const LONG_TURN: Duration = Duration::from_millis(20);

pub fn run(arguments: &Stat) -> Result<(), Failure> {
    match (arguments.pid.is_empty(), arguments.command.is_empty()) {
        (true, true) => {
            return Err(Failure::Usage(
                "what to count? use --pid PID for a process, or -- COMMAND".to_owned(),
            ));
        }
        (false, false) => {
            return Err(Failure::Usage(
                "a command is counted by itself: leave out --pid, or the command".to_owned(),
            ));
        }
        _ => {}
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second one ends it at once: a command that was sent the first, too, may go on.
        signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)))
            .context("cannot handle signals")?;
    }
    let collector = arguments.collector.clone().or_else(find_collector);
    let collector = collector.ok_or_else(|| anyhow!(stackwire::SessionError::NoCollector))?;
    let launched = match arguments.command.as_slice() {
        [] => None,
        command => Some(Launched::start(command, false)?),
    };
    let mut counting = Command::new(&collector);
    counting.arg(format!("--stat={}", list(&arguments.event)));
    let pids = arguments.pid.iter().copied().chain(launched.as_ref().map(Launched::id));
    counting.args(pids.map(|pid| format!("--pid={pid}")));
    if launched.is_some() {
        counting.arg("--on-exec");
    }
    if arguments.per_thread {
        counting.arg("--stat-threads");
    }
    counting.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let counting = counting.spawn();
    let counting = counting.with_context(|| format!("cannot execute {}", collector.display()))?;
    place::confine()?;
    let (mut counting, mut lines) = match begin(counting) {
        Ok(begun) => begun,
        Err(error) => {
            if let Some(launched) = launched {
                launched.abandon();
            }
            return Err(error.into());
        }
    };
    let command = launched.map(Launched::release).transpose()?;
    let began = Instant::now();
    let before = cpu_of_children();
    let mut status = None;
    match command {
        Some((mut child, mut stream)) => {
            while status.is_none() {
                status = child.try_wait().context("cannot wait for the command")?;
                std::thread::sleep(TURN);
            }
            // A word, or the end of the stream when it became the command.
            if stream.read(&mut [0]).is_ok_and(|read| read > 0) {
                return status.map_or(Ok(()), exit);
            }
        }
        None => {
            let is_over = || arguments.duration.is_some_and(|duration| began.elapsed() >= duration);
            let run = || arguments.pid.iter().any(|&pid| runs(pid));
            while !stop.load(Ordering::Relaxed) && !is_over() && run() {
                std::thread::sleep(LONG_TURN);
            }
        }
    }
    let elapsed = began.elapsed().as_secs_f64();
    let cpu = status.and_then(|_| cpu_of_children()).zip(before);
    let cpu = cpu.map(|(now, before)| (now.0 - before.0, now.1 - before.1));
    drop(counting.stdin.take());
    let mut text = String::new();
    lines.read_to_string(&mut text).context("cannot read what was counted")?;
    let ended = counting.wait().context("cannot wait for the collector")?;
    if !ended.success() {
        return Err(anyhow!("the collector failed while it counted").into());
    }
    let counts =
        text.lines().map(|line| parse(line).ok_or_else(|| anyhow!("the collector said {line:?}")));
    let counts = counts.collect::<Result<_, _>>()?;
    let counted = stat::Stat { of: of(arguments), counts, elapsed, cpu };
    let out = std::io::stderr().lock();
    if arguments.json {
        stat::write_json(&counted, out)?;
    } else {
        stat::write_text(&counted, out)?;
    }
    status.map_or(Ok(()), exit)
}

/// Whether a process has a thread that has not ended: proc_pid_stat(5), the state of its main
/// thread is field 3, the number of threads field 20.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
    let mut fields = rest.split(' ');
    let main_ended = matches!(fields.next(), Some("Z" | "X"));
    let threads = fields.nth(16).and_then(|threads| threads.parse().ok());
    !main_ended || threads.is_some_and(|threads: u32| threads > 1)
}

/// Waits until it counts.
fn begin(mut counting: Child) -> anyhow::Result<(Child, impl BufRead)> {
    let out = counting.stdout.take().context("the collector has no output")?;
    let mut lines = BufReader::new(out);
    let mut line = String::new();
    lines.read_line(&mut line).context("cannot read what the collector says")?;
    if line.trim() == "counting" {
        return Ok((counting, lines));
    }
    let mut said = String::new();
    if let Some(mut errors) = counting.stderr.take() {
        // What it said until then is still worth showing.
        let _ = errors.read_to_string(&mut said);
    }
    let _ = counting.wait();
    Err(anyhow!("{}", said.trim().trim_start_matches("stackwire-collector: ")))
}

/// As it was typed.
fn list(groups: &[Groups]) -> String {
    let groups = groups.iter().flat_map(|Groups(groups)| groups);
    let texts: Vec<String> = groups
        .map(|group| {
            let names: Vec<&str> = group.iter().map(|event| event.name.as_str()).collect();
            match names.as_slice() {
                [name] => (*name).to_owned(),
                names => format!("{{{}}}", names.join(",")),
            }
        })
        .collect();
    texts.join(",")
}

fn of(arguments: &Stat) -> String {
    let words = arguments.command.iter().map(|word| word.to_string_lossy());
    let pids = arguments.pid.iter().map(u32::to_string);
    match arguments.command.as_slice() {
        [] => format!("process id '{}'", pids.collect::<Vec<_>>().join(",")),
        _ => format!("'{}'", words.collect::<Vec<_>>().join(" ")),
    }
}

/// A line of the collector: see its `--stat`.
fn parse(line: &str) -> Option<Count> {
    let mut fields = line.split('\t');
    let mut event = fields.next()?.to_owned();
    let tid: Option<u32> = fields.next()?.parse().ok();
    if fields.next()? == "u" {
        event.push_str(":u");
    }
    let mut numbers = Vec::new();
    for field in fields {
        numbers.push(field.parse::<u64>().ok());
    }
    let counted = match numbers.as_slice() {
        [None] => None,
        &[Some(value), Some(enabled_ns), Some(running_ns)] => {
            Some(CounterSum { value, enabled_ns, running_ns })
        }
        _ => return None,
    };
    let name = |tid: u32| {
        let name = std::fs::read_to_string(format!("/proc/{tid}/comm")).unwrap_or_default();
        (name.trim().to_owned(), tid)
    };
    Some(Count { event, thread: tid.map(name), counted })
}

/// Seconds of CPU time, in user mode and in the kernel, of children that were waited for:
/// proc_pid_stat(5), cutime and cstime, fields 16 and 17, in hundredths of a second.
fn cpu_of_children() -> Option<(f64, f64)> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(13);
    let mut next = || Some(fields.next()?.parse::<f64>().ok()? / 100.0);
    Some((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_collector_are_counts() {
        let counted = Some(CounterSum { value: 5, enabled_ns: 20, running_ns: 10 });
        let expected = Count { event: "cycles:u".to_owned(), thread: None, counted };
        assert_eq!(parse("cycles\t-\tu\t5\t20\t10"), Some(expected));
        assert_eq!(parse("cycles\t-\t-\t-").unwrap().counted, None);
        for bad in ["", "cycles", "cycles\t-\t-", "cycles\t-\t-\t1", "cycles\t-\t-\t1\t-\t2"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
