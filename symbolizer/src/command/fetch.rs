//! `stackwire fetch`: a profile of what a server keeps.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, anyhow};
use stackwire::FetchFormat;

use super::Failure;
use super::ask::{Server, block_on};
use super::output::Output;
use super::place::Placer;
use crate::cli::ask::Fetch;
use crate::say::say;

pub fn run(arguments: &Fetch) -> Result<(), Failure> {
    let server = Server::of(&arguments.from)?;
    let placer = Placer::start()?;
    let output = Output::prepare(&arguments.output, &placer)?;
    placer.confine()?;
    let format = arguments.format.unwrap_or_else(|| format_of(&arguments.output));
    let mut query = vec![("format", format.name().to_owned())];
    let options = [
        ("last", arguments.last.map(|last| format!("{}ms", last.as_millis()))),
        ("from", arguments.since.map(|at| at.to_string())),
        ("to", arguments.until.map(|at| at.to_string())),
        ("where", arguments.labels.clone()),
        ("event", arguments.event.clone()),
    ];
    query.extend(options.into_iter().filter_map(|(name, value)| Some((name, value?))));
    let kept = block_on(async {
        let mut answer = server.get("/v1/profile", &query).await?;
        let mut kept = tempfile::tempfile().context("cannot make a temporary file")?;
        let failed = |why| anyhow!("the answer of {} broke off: {why}", arguments.from.from);
        while let Some(piece) = answer.chunk().await.map_err(failed)? {
            kept.write_all(&piece).context("cannot write a temporary file")?;
        }
        Ok(kept)
    })?;
    let bytes = kept.metadata().map_or(0, |metadata| metadata.len());
    let is_stdout = output.is_stdout();
    output.finish(|out| {
        let mut kept = &kept;
        std::io::Seek::rewind(&mut kept)?;
        std::io::copy(&mut kept, out).map(|_| ())
    })?;
    if !is_stdout {
        say(&format!("{bytes} bytes: {}", arguments.output.display()));
    }
    Ok(())
}

/// As a file is named that it goes to.
fn format_of(path: &Path) -> FetchFormat {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => FetchFormat::Flamegraph,
        Some("folded") => FetchFormat::Folded,
        Some("data") => FetchFormat::PerfData,
        Some("txt") => FetchFormat::PmuText,
        Some("json") => FetchFormat::PmuJson,
        _ => FetchFormat::Pprof,
    }
}
