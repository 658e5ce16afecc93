//! `stackwire resolve` and `report`: captures from files.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use stackwire::{Assembler, Profile, Sources, export, read_into, resolve};

use super::Failure;
use super::output::{Outputs, check_distinct};
use crate::cli::{Report, Resolve};

pub fn run(arguments: Resolve) -> Result<(), Failure> {
    let first = arguments.captures.first().map_or(Path::new(""), PathBuf::as_path);
    let pprof = arguments.output.clone().unwrap_or_else(|| first.with_extension("pb.gz"));
    let outputs =
        [Some(&pprof), arguments.outputs.flamegraph.as_ref(), arguments.outputs.folded.as_ref()];
    let outputs = outputs.into_iter().flatten();
    for capture in &arguments.captures {
        // A capture may be named twice, but not as an output.
        let paths: Vec<&Path> = outputs.clone().chain([capture]).map(PathBuf::as_path).collect();
        check_distinct(&paths).map_err(Failure::Usage)?;
    }
    let outputs = Outputs::prepare(&pprof, &arguments.outputs)?;
    let profile = load(&arguments.captures, &arguments.symbols.sources()?)?;
    if profile.samples.is_empty() {
        return Err(no_samples(&profile).into());
    }
    outputs.write(&profile)?;
    arguments.symbols.check(&profile)
}

pub fn report(arguments: &Report) -> Result<(), Failure> {
    let profile = load(&arguments.captures, &arguments.symbols.sources()?)?;
    if profile.samples.is_empty() {
        return Err(no_samples(&profile).into());
    }
    match export::report(&profile, std::io::stdout().lock()) {
        // `report | head` has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other.context("cannot print the report")?),
    }
}

fn load(captures: &[PathBuf], sources: &Sources) -> anyhow::Result<Profile> {
    let mut assembler = Assembler::default();
    for path in captures {
        let cannot = || format!("cannot read {}", path.display());
        let file = File::open(path).with_context(cannot)?;
        read_into(BufReader::new(file), &mut assembler).with_context(cannot)?;
    }
    let (mut profile, artifacts) = assembler.finish();
    resolve(&mut profile, &artifacts, sources);
    Ok(profile)
}

fn no_samples(profile: &Profile) -> anyhow::Error {
    let notes: String = profile.notes.iter().map(|note| format!("; {note}")).collect();
    anyhow!("no samples in the capture, so there is no profile to write{notes}")
}
