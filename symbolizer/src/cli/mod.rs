//! The command line, as typed. `command/` turns it into what is run.

pub mod ask;
pub mod outputs;
pub mod record;
pub mod serve;
pub mod show;
pub mod symbols;
mod values;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand};
use stackwire::{Groups, VERSION};

use self::ask::{Fetch, Ps};
use self::record::Record;
use self::serve::Serve;
use self::show::{Report, Resolve};
use self::symbols::{CacheOptions, SymbolOptions};
use self::values::{bytes, time};

/// Profile Linux processes: stacks from a small privileged collector, names found here.
#[derive(Debug, Parser)]
#[command(name = "stackwire", version = VERSION, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 done, 1 the run failed, 2 the command line is wrong; of `record -- COMMAND` that of\n\
                        the command, 128 and more if a signal ended it.\n\
                        `stackwire doctor` tells what works on this host and what to do about the rest."
)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Sample a process, a command or the whole host, and write profiles.
    Record(Record),
    /// Receive captures from many collectors and write a profile for each window.
    Serve(Serve),
    /// List the captures of a server: hosts, rates, how whole stacks are, what was lost.
    Ps(Ps),
    /// Get a profile of what a server keeps: of some time, hosts, processes.
    Fetch(Fetch),
    /// Turn saved captures into profiles.
    Resolve(Resolve),
    /// Print what a capture shows: hot functions, how well they are named, what was lost.
    Report(Report),
    /// Tell what addresses of an executable are: functions with inlined callees, files, lines.
    Symbolize(Symbolize),
    /// Look into the symbol cache and change it.
    Cache(CacheCommand),
    /// Check this host: kernel, permissions, collector.
    Doctor(Doctor),
    /// List the events of this host that can be sampled.
    Events(Events),
    /// Count events of a command or of processes, as `perf stat` does.
    Stat(Stat),
    /// Wait for a word on a socket, then become a command. `record -- command` uses it.
    #[command(hide = true)]
    Launch(Launch),
    /// Put outputs in their places for a process that may not. Commands of root use it.
    #[command(hide = true)]
    Place,
}

#[derive(Debug, ClapArgs)]
pub struct CacheCommand {
    #[command(flatten)]
    pub cache: CacheOptions,
    #[command(subcommand)]
    pub action: CacheAction,
}

#[derive(Debug, Subcommand)]
pub enum CacheAction {
    /// Print how much is in it.
    Stats,
    /// List what is in it, least recently used first.
    Ls,
    /// Read everything and compare it with its checksum; remove what is damaged.
    Verify,
    /// Remove the least recently used until at most this much is left.
    Prune {
        /// As "500MB"; 0 removes everything.
        #[arg(value_name = "BYTES", value_parser = bytes)]
        to: u64,
    },
    /// Add an executable or a debug file, under its build-id.
    Add {
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Remove everything that has this build-id.
    Rm {
        #[arg(required = true, value_name = "BUILD-ID")]
        ids: Vec<String>,
    },
}

#[derive(Debug, ClapArgs)]
pub struct Symbolize {
    /// One JSON object an address instead of text.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub symbols: SymbolOptions,
    /// An executable, library or debug file; or a build-id in hex.
    #[arg(value_name = "FILE|BUILD-ID")]
    pub object: String,
    /// Addresses in hex, as in the file; without any, they are read from standard input.
    #[arg(value_name = "ADDR")]
    pub addresses: Vec<String>,
}

#[derive(Debug, ClapArgs)]
pub struct Stat {
    /// What is counted (repeatable, or as a list), in groups as "{cycles,instructions},page-faults"
    /// that are counted at the same times. `stackwire events` lists what there is.
    #[arg(long, short, value_name = "EVENTS", default_value = "task-clock,context-switches,cpu-migrations,page-faults,cycles,instructions,branches,branch-misses", value_parser = str::parse::<Groups>)]
    pub event: Vec<Groups>,
    /// Count this process with the threads and children it starts meanwhile (repeatable, or as
    /// "12,34"), for --duration or until Ctrl-C.
    #[arg(long, short, value_name = "PID", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Vec<u32>,
    /// Count each thread by itself that the processes have now.
    #[arg(long, requires = "pid")]
    pub per_thread: bool,
    /// How long, as "30s", "5m" or 30.
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "command")]
    pub duration: Option<Duration>,
    /// Print a JSON object a line, with the keys of `perf stat -j`.
    #[arg(long, short = 'j')]
    pub json: bool,
    /// The collector to start, instead of the one beside this program or in PATH.
    #[arg(long, value_name = "FILE")]
    pub collector: Option<PathBuf>,
    /// A command to run and count, with its children, until it ends.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}

#[derive(Debug, ClapArgs)]
pub struct Events {
    /// Only those with this text in their names.
    pub pattern: Option<String>,
    /// The collector that looks, instead of the one beside this program or in PATH.
    #[arg(long, value_name = "FILE")]
    pub collector: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct Doctor {
    /// Say what names and stacks to expect of this process, and which option of its run-time would
    /// make them better.
    #[arg(long, short, value_name = "PID", conflicts_with = "collector", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// The collector to check, instead of the one beside this program or in PATH.
    #[arg(long, value_name = "FILE")]
    pub collector: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub struct Launch {
    pub socket: PathBuf,
    #[arg(last = true, required = true)]
    pub command: Vec<std::ffi::OsString>,
}
