//! `stackwire resolve` and `report`: captures from files.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use stackwire::{Inputs, Profile, Sources, export, resolve};

use super::Failure;
use super::output::{Outputs, check_distinct};
use crate::cli::{Report, Resolve};

pub fn run(arguments: Resolve) -> Result<(), Failure> {
    let first = arguments.captures.first().map_or(Path::new(""), PathBuf::as_path);
    let pprof = arguments.output.clone().unwrap_or_else(|| first.with_extension("pb.gz"));
    let wanted = &arguments.outputs;
    let others = [&wanted.flamegraph, &wanted.folded, &wanted.perf_data_output];
    let outputs = [&pprof].into_iter().chain(others.into_iter().flatten());
    for capture in &arguments.captures {
        // A capture may be named twice, but not as an output.
        let paths: Vec<&Path> = outputs.clone().chain([capture]).map(PathBuf::as_path).collect();
        check_distinct(&paths).map_err(Failure::Usage)?;
    }
    let outputs = Outputs::prepare(&pprof, &arguments.outputs)?;
    let timeline = arguments.outputs.perf_data_output.is_some();
    let profile = load(&arguments.captures, &arguments.symbols.sources()?, timeline)?;
    if profile.samples.is_empty() {
        return Err(no_samples(&profile).into());
    }
    outputs.write(&profile)?;
    arguments.symbols.check(&profile)
}

pub fn report(arguments: &Report) -> Result<(), Failure> {
    let profile = load(&arguments.captures, &arguments.symbols.sources()?, false)?;
    if profile.samples.is_empty() {
        return Err(no_samples(&profile).into());
    }
    match export::report(&profile, std::io::stdout().lock()) {
        // `report | head` has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other.context("cannot print the report")?),
    }
}

fn load(captures: &[PathBuf], sources: &Sources, timeline: bool) -> anyhow::Result<Profile> {
    let mut inputs = Inputs::new(timeline);
    for path in captures {
        let cannot = || format!("cannot read {}", path.display());
        let file = File::open(path).with_context(cannot)?;
        inputs.add(file, sources).with_context(cannot)?;
    }
    let (mut profile, artifacts) = inputs.finish();
    resolve(&mut profile, &artifacts, sources);
    Ok(profile)
}

fn no_samples(profile: &Profile) -> anyhow::Error {
    let notes: String = profile.notes.iter().map(|note| format!("; {note}")).collect();
    anyhow!("no samples in the capture, so there is no profile to write{notes}")
}
