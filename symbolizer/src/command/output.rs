//! Output files: opened before the work starts, in place only when it is done.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use stackwire::formats::{flamegraph, folded, perf_data, pmu, pprof};
use stackwire::profile::Named;
use stackwire::{Profile, VERSION};

use super::Failure;
use super::advice::advice;
use super::place::Placer;
use super::target::{Target, is_stdout};
use crate::cli;
use crate::say::say;

/// A file that will hold an output.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    file: Target,
}

impl Output {
    /// Makes sure that `path` can be written; `-` is standard output.
    pub fn prepare(path: &Path, placer: &Placer) -> anyhow::Result<Self> {
        let file = Target::open(path, placer)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// It is on standard output.
    pub fn is_stdout(&self) -> bool {
        is_stdout(&self.path)
    }

    /// Writes it.
    pub fn finish(
        self,
        write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> anyhow::Result<()> {
        self.finish_seek(|file| {
            let mut out = BufWriter::new(file);
            write(&mut out).and_then(|()| out.flush())
        })
    }

    /// Writes it, going back and forth in it.
    pub fn finish_seek(
        self,
        write: impl FnOnce(&mut File) -> std::io::Result<()>,
    ) -> anyhow::Result<()> {
        let Self { path, file } = self;
        file.fill(write).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// All outputs of a profile.
#[derive(Debug)]
pub struct Outputs {
    /// Of what is sampled; none where waits alone are recorded.
    pprof: Option<Output>,
    /// Of where threads wait.
    offcpu: Option<Output>,
    /// Of how threads were scheduled.
    pmu: Option<Output>,
    pmu_as: pmu::Options,
    flamegraph: Option<Output>,
    flames: cli::outputs::Flames,
    folded: Option<Output>,
    perf_data: Option<Output>,
    tags: Vec<String>,
    unsymbolized: bool,
    /// A directory for perf is laid out.
    jitted: bool,
}

/// Where outputs go that have names of their own.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    /// The pprof of what is sampled, and of all series where there is none of waits.
    pub sampled: Option<PathBuf>,
    /// The pprof of where threads wait.
    pub waits: Option<PathBuf>,
    /// How threads were scheduled.
    pub pmu: Option<PathBuf>,
}

impl Outputs {
    /// Makes sure that all can be written.
    pub fn prepare(
        paths: &Paths,
        outputs: &cli::outputs::Outputs,
        pmu_as: pmu::Options,
        placer: &Placer,
    ) -> anyhow::Result<Self> {
        let optional = |path: &Option<PathBuf>| {
            path.as_deref().map(|path| Output::prepare(path, placer)).transpose()
        };
        Ok(Self {
            pprof: optional(&paths.sampled)?,
            offcpu: optional(&paths.waits)?,
            pmu: optional(&paths.pmu)?,
            pmu_as,
            flamegraph: optional(&outputs.flamegraph)?,
            flames: outputs.flames,
            folded: optional(&outputs.folded)?,
            perf_data: optional(&outputs.perf_data_output)?,
            tags: outputs.tags.clone(),
            unsymbolized: outputs.pprof_unsymbolized,
            jitted: outputs.perf_buildid_dir.is_some(),
        })
    }

    /// Writes all, then tells what was written, and what is beside it (`kept`).
    pub fn write(
        self,
        profile: Named<'_>,
        by: Option<&str>,
        kept: Option<String>,
    ) -> anyhow::Result<()> {
        let mut written = Written::default();
        if let Some(pmu) = self.pmu {
            let line = format!("{}: {}", scheduled(&profile), pmu.path.display());
            written.add(line, pmu.finish(|out| pmu::write(&profile, self.pmu_as, out)));
        }
        let outputs = [&self.pprof, &self.offcpu, &self.flamegraph, &self.folded, &self.perf_data];
        let unwritten = |outputs: &[&Option<Output>]| {
            let paths = outputs.iter().filter_map(|output| output.as_ref());
            let paths: Vec<_> = paths.map(|output| output.path.display().to_string()).collect();
            format!("no samples: not written: {}", paths.join(", "))
        };
        if profile.samples.is_empty() {
            if outputs.iter().any(|output| output.is_some()) {
                written.line(unwritten(&outputs));
            }
            profile.notes.iter().for_each(|note| written.line(format!("note: {note}")));
            kept.into_iter().for_each(|kept| written.line(kept));
            return written.end();
        }
        let parts = self.offcpu.as_ref().map(|_| pprof::Part::Sampled);
        let pprofs = [(self.pprof, parts.unwrap_or_default()), (self.offcpu, pprof::Part::Waits)];
        let mut paths = Vec::new();
        let mut empty = Vec::new();
        for (output, part) in pprofs {
            let Some(output) = output else { continue };
            if !profile.sampled_series().any(|id| part.has(profile.series_of(id))) {
                empty.push(unwritten(&[&Some(output)]));
                continue;
            }
            let path = output.path.display().to_string();
            let tags = self.tags.clone();
            let options = pprof::Options { tags, unsymbolized: self.unsymbolized, part };
            match output.finish(|out| pprof::write(profile, &options, out)) {
                Ok(()) => paths.push(path),
                Err(error) => written.failed.push(error),
            }
        }
        written.line(summary(profile, self.unsymbolized, &paths));
        empty.into_iter().for_each(|line| written.line(line));
        kept.into_iter().for_each(|kept| written.line(kept));
        if let Some(flamegraph) = self.flamegraph {
            let title = title(&profile, flamegraph::amount(&profile));
            let line = format!("flame graph: {}", flamegraph.path.display());
            let flames = self.flames.of(by, &title);
            written.add(line, flamegraph.finish(|out| flamegraph::write(profile, &flames, out)));
        }
        if let Some(folded) = self.folded {
            let line = format!("folded stacks: {}", folded.path.display());
            written.add(line, folded.finish(|out| folded::write(profile, by, out)));
        }
        if let Some(perf_data) = self.perf_data {
            let line = format!("perf.data: {}", perf_data.path.display());
            let arguments = std::env::args_os().map(|it| it.to_string_lossy().into_owned());
            let command_line = arguments.collect();
            let program = format!("stackwire {VERSION}");
            let options = perf_data::Options { program, command_line, jitted: self.jitted };
            let done = perf_data.finish_seek(|file| {
                perf_data::write(&profile, &options, BufWriter::with_capacity(1 << 18, file))
            });
            written.add(line, done);
        }
        advice(profile, self.unsymbolized).into_iter().for_each(|line| written.line(line));
        written.end()
    }
}

/// What was written, a line each, and what could not be: one full disk is no reason to lose the
/// others.
#[derive(Debug, Default)]
struct Written {
    lines: Vec<String>,
    failed: Vec<anyhow::Error>,
}

impl Written {
    fn line(&mut self, line: String) {
        self.lines.push(line);
    }

    fn add(&mut self, line: String, done: anyhow::Result<()>) {
        match done {
            Ok(()) => self.line(line),
            Err(error) => self.failed.push(error),
        }
    }

    /// Tells both.
    fn end(self) -> anyhow::Result<()> {
        say(&self.lines.join("\n"));
        let mut failed = self.failed.into_iter();
        let Some(first) = failed.next() else { return Ok(()) };
        let rest: String = failed.map(|error| format!("; {error:#}")).collect();
        if rest.is_empty() { Err(first) } else { Err(anyhow!("{first:#}{rest}")) }
    }
}

impl cli::outputs::PmuAs {
    /// The same, for the library.
    pub fn options(self) -> pmu::Options {
        let format = match self.pmu_format {
            cli::outputs::PmuFormat::Text => pmu::Format::Text,
            cli::outputs::PmuFormat::Json => pmu::Format::Json,
        };
        pmu::Options { format, per_pid: self.per_pid }
    }
}

impl cli::outputs::Flames {
    /// Of stacks that begin with this label, under this title.
    pub fn of<'a>(self, by: Option<&'a str>, title: &'a str) -> flamegraph::Flames<'a> {
        let Self { icicle, no_inlines } = self;
        flamegraph::Flames { by, title, icicle, inlined: !no_inlines }
    }
}

/// Refuses two names of one file among those written and those read.
pub fn check_distinct(paths: &[&Path]) -> Result<(), Failure> {
    for (index, one) in paths.iter().enumerate() {
        for other in &paths[index + 1..] {
            let same = place(one) == place(other) || is_stdout(one) && is_stdout(other);
            if same && (is_plain(one) || is_stdout(one)) {
                return Err(Failure::Usage(format!(
                    "{} and {} are the same file: name another output",
                    one.display(),
                    other.display()
                )));
            }
        }
    }
    Ok(())
}

/// Where a path leads, though it may lead to nothing yet.
fn place(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_missing| {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let parent = parent.canonicalize().unwrap_or_else(|_missing| parent.to_owned());
        parent.join(path.file_name().unwrap_or_default())
    })
}

/// Not something like `/dev/null`, which may well be named twice.
fn is_plain(path: &Path) -> bool {
    std::fs::metadata(path).map_or(true, |found| found.is_file())
}

/// One line of how threads were scheduled.
fn scheduled(profile: &Profile) -> String {
    let switches = profile.sched.values().map(|it| it.switches.all());
    let switches = switches.fold(0, u64::saturating_add);
    let seconds = profile.observed_ns as f64 / 1e9;
    format!(
        "{switches} context switches of {} in {seconds:.1} s",
        match profile.sched.len() {
            1 => "1 process".to_owned(),
            some => format!("{some} processes or threads"),
        }
    )
}

/// One line a run: how much there is, how well it is named, how whole the stacks are, and how much
/// is missing.
fn summary(profile: Named<'_>, unsymbolized: bool, paths: &[String]) -> String {
    let amount = match profile.series.as_slice() {
        [only] if only.weighs_evenly() => format!("{} samples", profile.sample_count()),
        _ => profile.amount(),
    };
    let named = if unsymbolized {
        "without names".to_owned()
    } else {
        format!("{:.1} % of frames named", profile.named().percent())
    };
    let whole = profile.whole();
    let whole = match whole.of {
        0 => String::new(),
        _ => format!(", {:.1} % of stacks whole", whole.percent()),
    };
    let lost = profile.lost_samples();
    let mut line = format!("{amount}, {lost} lost, {named}{whole}");
    if !paths.is_empty() {
        line.push_str(": ");
        line.push_str(&paths.join(", "));
    }
    for note in &profile.notes {
        line.push_str("\nnote: ");
        line.push_str(note);
    }
    line
}

/// What stands above a flame graph that shows so much.
pub fn title(profile: &Profile, amount: String) -> String {
    let origin = &profile.origin;
    let what = match profile.sampled_processes().as_slice() {
        [process] => format!("{} ({})", process.comm, process.pid),
        processes => format!("{} processes on {}", processes.len(), origin.hostname),
    };
    format!("{what}: {amount}")
}
