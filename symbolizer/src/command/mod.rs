//! What each subcommand does.

mod advice;
mod ask;
mod beginning;
mod cache;
mod doctor;
mod events;
mod fetch;
mod launch;
mod output;
mod place;
mod ps;
mod record;
mod resolve;
mod run_time;
mod serve;
mod stat;
mod symbolize;
mod symbols;
mod target;

use crate::cli::Command;

/// Why a command ended badly: which exit code, and what to say.
#[derive(Debug)]
pub enum Failure {
    /// The command line is wrong (2).
    Usage(String),
    /// The run failed (1).
    Run(anyhow::Error),
    /// All went well, and the command that was recorded failed: its own exit code, as a shell has
    /// it.
    Command(u8),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Run(error.into())
    }
}

pub fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Record(arguments) => record::run(arguments),
        Command::Serve(arguments) => serve::run(arguments),
        Command::Ps(arguments) => ps::run(&arguments),
        Command::Fetch(arguments) => fetch::run(&arguments),
        Command::Resolve(arguments) => resolve::run(arguments),
        Command::Report(arguments) => resolve::report(&arguments),
        Command::Symbolize(arguments) => {
            place::confine()?;
            symbolize::run(&arguments)
        }
        Command::Cache(arguments) => {
            place::confine()?;
            cache::run(&arguments)
        }
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Stat(arguments) => stat::run(&arguments),
        Command::Events(arguments) => events::run(&arguments),
        Command::Launch(arguments) => launch::run(&arguments),
        Command::Place => place::run(),
    }
}
