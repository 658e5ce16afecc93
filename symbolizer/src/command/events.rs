//! `stackwire events`: the events of this host, as its collector finds them.

use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use stackwire::find_collector;

use super::{Failure, place};
use crate::cli::Events;

pub fn run(arguments: &Events) -> Result<(), Failure> {
    let collector = arguments.collector.clone().or_else(find_collector);
    let collector = collector.ok_or_else(|| anyhow!(stackwire::SessionError::NoCollector))?;
    let mut lists = Command::new(&collector);
    lists.arg("--list-events").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let lists = lists.spawn();
    let lists = lists.with_context(|| format!("cannot execute {}", collector.display()))?;
    // The collector keeps what it may: root alone opens events above kernel.perf_event_paranoid 2.
    place::confine()?;
    let listed = lists.wait_with_output().context("cannot read what the collector lists")?;
    if !listed.status.success() {
        let said = String::from_utf8_lossy(&listed.stderr).into_owned();
        return Err(anyhow!("{} fails: {said}", collector.display()).into());
    }
    let text = String::from_utf8_lossy(&listed.stdout);
    let pattern = arguments.pattern.as_deref().unwrap_or("");
    match show(&text, pattern, std::io::stdout().lock()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        shown => Ok(shown.context("cannot write the list")?),
    }
}

/// Those whose names have the pattern in them, by group.
fn show(text: &str, pattern: &str, mut out: impl Write) -> std::io::Result<()> {
    for group in ["software", "hardware", "hardware cache", "tracepoint"] {
        let of_group = text.lines().filter_map(|line| line.strip_prefix(group)?.strip_prefix('\t'));
        let mut names: Vec<&str> = Vec::new();
        let mut reason = None;
        for line in of_group {
            match line.strip_prefix('\t') {
                Some(why) => reason = Some(why),
                None => names.push(line),
            }
        }
        let shown: Vec<&&str> = names.iter().filter(|name| name.contains(pattern)).collect();
        match (reason, names.is_empty()) {
            (Some(why), _) => writeln!(out, "{group} events: {why}")?,
            (None, true) => writeln!(out, "{group} events: this host has none")?,
            (None, false) if shown.is_empty() => {}
            (None, false) => {
                writeln!(out, "{group} events:")?;
                shown.iter().try_for_each(|name| writeln!(out, "  {name}"))?;
            }
        }
    }
    Ok(())
}
