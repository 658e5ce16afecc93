//! `stackwire resolve` and `report`: captures from files.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use regex::Regex;
use stackwire::formats::report::{self, Window};
use stackwire::formats::{compare, flamegraph, folded, pmu};
use stackwire::profile::{Moment, Named, Names, Profile, unite};
use stackwire::{Artifacts, Inputs, Sources, lay_out, resolve};
use stackwire_rights::capabilities;

use super::Failure;
use super::output::{Output, Outputs, Paths, check_distinct, title};
use super::place::Placer;
use crate::cli::outputs::PmuFormat;
use crate::cli::show::{Report, Resolve, Slice, Sort};

pub fn run(arguments: Resolve) -> Result<(), Failure> {
    let first = arguments.captures.first().map_or(Path::new(""), PathBuf::as_path);
    let pprof = arguments.output.clone().unwrap_or_else(|| first.with_extension("pb.gz"));
    let wanted = &arguments.outputs;
    let waits = &arguments.offcpu_output;
    let others = [
        &arguments.pmu_output,
        waits,
        &wanted.flamegraph,
        &wanted.folded,
        &wanted.perf_data_output,
    ];
    check_inputs(&arguments.captures, [&pprof].into_iter().chain(others.into_iter().flatten()))?;
    let placer = Placer::start()?;
    let pmu = arguments.pmu_output.clone();
    let paths = Paths { sampled: Some(pprof), waits: waits.clone(), pmu };
    let pmu_as = arguments.pmu_as.options();
    let outputs = Outputs::prepare(&paths, &arguments.outputs, pmu_as, &placer)?;
    let timeline = wanted.perf_data_output.is_some();
    let captures = Captures::open(&arguments.captures, &arguments.slice, timeline)?;
    placer.confine()?;
    let sources = arguments.symbols.sources()?;
    let Loaded { profile, names, artifacts } = captures.load(&sources, &arguments.slice)?;
    if profile.samples.is_empty() && (arguments.pmu_output.is_none() || profile.left_out > 0) {
        return Err(no_samples(&profile).into());
    }
    if arguments.pmu_output.is_some() && profile.sched.is_empty() {
        return Err(not_scheduled().into());
    }
    let named = names.of(&profile);
    outputs.write(named, arguments.slice.by.as_deref(), None)?;
    if let Some(directory) = &wanted.perf_buildid_dir {
        let laid = lay_out(named, &artifacts, &sources, directory);
        laid.with_context(|| format!("cannot write {}", directory.display()))?;
    }
    arguments.symbols.check(named)
}

pub fn report(arguments: &Report) -> Result<(), Failure> {
    let how = arguments.pmu_as;
    if !arguments.pmu && (how.per_pid || how.pmu_format == PmuFormat::Json) {
        let message = "--per-pid and --pmu-format say how --pmu is written: add it";
        return Err(Failure::Usage(message.to_owned()));
    }
    let (slice, by) = (&arguments.slice, arguments.slice.by.as_deref());
    let drawn = [&arguments.flamegraph, &arguments.folded];
    check_inputs(&arguments.captures, drawn.into_iter().flatten())?;
    let placer = Placer::start()?;
    let prepare = |path: &Option<PathBuf>| {
        path.as_deref().map(|path| Output::prepare(path, &placer)).transpose()
    };
    let (flamegraph, folded) = (prepare(&arguments.flamegraph)?, prepare(&arguments.folded)?);
    // Who asks for one of them there wants nothing else.
    let asked_for = [&flamegraph, &folded].into_iter().flatten().any(Output::is_stdout);
    let sides: Vec<&[PathBuf]> = match (arguments.diff, arguments.captures.as_slice()) {
        (false, captures) => vec![captures],
        (true, captures @ [_, _]) => captures.chunks(1).collect(),
        (true, others) => {
            let message = format!("--diff compares two files, not {}", others.len());
            return Err(Failure::Usage(message));
        }
    };
    let sides = sides.into_iter().map(|captures| Captures::open(captures, slice, false));
    let sides = sides.collect::<Result<Vec<_>, _>>()?;
    placer.confine()?;
    let sources = arguments.symbols.sources()?;
    let loaded = sides.into_iter().map(|side| side.load(&sources, slice));
    let loaded = loaded.collect::<Result<Vec<_>, _>>()?;
    if arguments.pmu {
        if loaded.iter().all(|side| side.profile.sched.is_empty()) {
            return Err(not_scheduled().into());
        }
        let scheduled = loaded.iter().map(|side| &side.profile).next();
        let options = arguments.pmu_as.options();
        let write = |out: &mut dyn Write, _| match scheduled {
            Some(profile) => pmu::write(profile, options, out),
            None => Ok(()),
        };
        return shown(print(write));
    }
    if let Some(empty) = loaded.iter().find(|side| side.profile.samples.is_empty()) {
        return Err(no_samples(&empty.profile).into());
    }
    let profiles: Vec<_> = loaded.iter().map(|side| side.names.of(&side.profile)).collect();
    let printed = match *profiles.as_slice() {
        [before, after] => {
            let kind = |of: Named<'_>| of.series_of(of.shown()).shown_kind().clone();
            let (one, two) = (kind(before), kind(after));
            if one != two {
                let message = anyhow!("--diff compares what is of one kind, not {one} with {two}");
                return Err(message.into());
            }
            if let Some(flamegraph) = flamegraph {
                let amount = |of: &Profile| of.amount_of(of.shown());
                let (one, two) = (title(&before, amount(&before)), title(&after, amount(&after)));
                let title = format!("{two} against {one}");
                flamegraph.finish(|out| flamegraph::diff(before, after, by, &title, out))?;
            }
            if let Some(folded) = folded {
                folded.finish(|out| compare::folded(before, after, by, out))?;
            }
            if asked_for { Ok(()) } else { print(|out, _| compare::write(before, after, by, out)) }
        }
        ref profiles => {
            let profile = profiles[0];
            if let Some(flamegraph) = flamegraph {
                let title = title(&profile, flamegraph::amount(&profile));
                let flames = arguments.flames.of(by, &title);
                flamegraph.finish(|out| flamegraph::write(profile, &flames, out))?;
            }
            if let Some(folded) = folded {
                folded.finish(|out| folded::write(profile, by, out))?;
            }
            let shown = |out: &mut dyn Write, window| {
                let window = if arguments.full { None } else { window };
                let sort = match arguments.sort {
                    Sort::Own => report::Sort::Own,
                    Sort::Total => report::Sort::Total,
                };
                let options = report::Options { by, top: arguments.top, sort, window };
                report::write(profile, &options, out)
            };
            if asked_for { Ok(()) } else { print(shown) }
        }
    };
    shown(printed)
}

/// `report | head` has seen enough.
fn shown(printed: std::io::Result<()>) -> Result<(), Failure> {
    match printed {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other.context("cannot print the report")?),
    }
}

/// To standard output, as the terminal wants it if it is one.
fn print(
    write: impl FnOnce(&mut dyn Write, Option<Window>) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let plain = std::env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty());
    match rustix::termios::tcgetwinsize(&out) {
        Ok(size) if size.ws_col > 0 && out.is_terminal() => {
            let (rows, columns) = (size.ws_row.into(), size.ws_col.into());
            write(&mut report::Terminal::new(out, columns, !plain), Some(Window { rows, columns }))
        }
        _ => write(&mut out, None),
    }
}

/// A capture may be named twice, but not as an output.
fn check_inputs<'a>(
    inputs: &'a [PathBuf],
    outputs: impl Iterator<Item = &'a PathBuf>,
) -> Result<(), Failure> {
    let outputs: Vec<&Path> = outputs.map(PathBuf::as_path).collect();
    for input in inputs {
        let paths: Vec<&Path> = outputs.iter().copied().chain([input.as_path()]).collect();
        check_distinct(&paths)?;
    }
    Ok(())
}

/// A profile with its names, and what came with it.
struct Loaded {
    profile: Profile,
    names: Names,
    artifacts: Artifacts,
}

/// Files that become one profile.
struct Captures {
    /// Opened by whoever has rights to give up; otherwise one after the other.
    files: Vec<(PathBuf, Option<File>)>,
    inputs: Inputs,
}

impl Captures {
    fn open(paths: &[PathBuf], slice: &Slice, timeline: bool) -> anyhow::Result<Self> {
        let inputs = Inputs::new(timeline || slice.time.is_some());
        let at_once = !capabilities::effective().is_empty();
        if at_once {
            // There may be one for each window of a week.
            stackwire_rights::descriptors::raise_limit()
                .context("cannot raise the limit of open files")?;
        }
        let files = paths.iter().map(|path| {
            let file = at_once.then(|| open(path)).transpose()?;
            Ok((path.clone(), file))
        });
        Ok(Self { files: files.collect::<anyhow::Result<_>>()?, inputs })
    }

    /// Reads them, takes the part that is asked for, and finds its names.
    fn load(self, sources: &Sources, slice: &Slice) -> anyhow::Result<Loaded> {
        let Self { files, mut inputs } = self;
        let wanted: Vec<_> = slice.wanted.iter().flat_map(|labels| &labels.0).cloned().collect();
        let labels = wanted.iter().map(|(key, _)| key.as_str());
        let asked: Vec<&str> = slice.by.as_deref().into_iter().chain(labels).collect();
        if slice.native_only {
            inputs.keep_native();
        }
        if asked.contains(&"cpu") {
            inputs.label_cpus();
        }
        for (path, file) in files {
            let file = file.map_or_else(|| open(&path), Ok)?;
            let cannot = || format!("cannot read {}", path.display());
            inputs.add(file, sources).with_context(cannot)?;
        }
        let (mut profile, artifacts) = inputs.finish();
        if let Some(event) = &slice.event
            && !profile.keep_event(event)
        {
            let names = profile.series.iter().map(|series| series.event.name.as_str());
            let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
            let known = if names.is_empty() { "none by name".to_owned() } else { names.join(", ") };
            return Err(anyhow!("no samples of an event {event:?}; events there are: {known}"));
        }
        if let Some(time) = &slice.time {
            let timed: u64 = profile.timeline.iter().map(Moment::count).sum();
            if timed != profile.sample_count() {
                return Err(anyhow!(
                    "--time needs samples with times, which pprof, gperftools and folded stacks lack"
                ));
            }
            profile.keep_time(time);
        }
        if !profile.samples.is_empty() {
            let known = profile.label_keys();
            if let Some(unknown) = asked.iter().find(|&&key| !known.contains(key)) {
                let known: Vec<_> = known.into_iter().collect();
                return Err(anyhow!(
                    "no sample has a label {unknown:?}; those there are: {}",
                    known.join(", ")
                ));
            }
            profile.keep_labels(&wanted);
        }
        let mut names = Names::default();
        if !profile.samples.is_empty() {
            names = resolve(&profile, &artifacts, sources);
            unite(&mut profile, &names);
            if slice.focus.is_some() || slice.ignore.is_some() {
                let matches = |regex: &Option<Regex>| {
                    regex.clone().map(|regex| move |name: &str| regex.is_match(name))
                };
                profile.keep_functions(&names, matches(&slice.focus), matches(&slice.ignore));
            }
        }
        if profile.samples.is_empty() && profile.sched.is_empty() {
            Err(no_samples(&profile))
        } else {
            Ok(Loaded { profile, names, artifacts })
        }
    }
}

fn open(path: &Path) -> anyhow::Result<File> {
    File::open(path).with_context(|| format!("cannot read {}", path.display()))
}

fn not_scheduled() -> anyhow::Error {
    anyhow!("the capture does not say how threads were scheduled: record it with --pmu")
}

fn no_samples(profile: &Profile) -> anyhow::Error {
    let notes: String = profile.notes.iter().map(|note| format!("; {note}")).collect();
    match profile.left_out {
        0 => anyhow!("no samples in the capture, so there is no profile to write{notes}"),
        others => anyhow!("none of the {others} samples is in that part of the profile{notes}"),
    }
}
