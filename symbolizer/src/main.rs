//! `stackwire`: parse → config → run → exit code.

mod cli;
mod command;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match command::run(cli::Args::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(command::Failure::Usage(message)) => {
            eprintln!("stackwire: {message}");
            ExitCode::from(2)
        }
        Err(command::Failure::Run(error)) => {
            eprintln!("stackwire: {error:#}");
            ExitCode::FAILURE
        }
    }
}
