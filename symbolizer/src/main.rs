//! `stackwire`: parse → config → run → exit code.

mod cli;
mod command;
mod say;

use std::process::ExitCode;

use clap::Parser;

use self::say::say;

fn main() -> ExitCode {
    stackwire_rights::memory::give_back_large_blocks();
    say::listen();
    match command::run(cli::Args::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(command::Failure::Usage(message)) => {
            say(&format!("stackwire: {message}"));
            ExitCode::from(2)
        }
        Err(command::Failure::Command(status)) => ExitCode::from(status),
        Err(command::Failure::Run(error)) => {
            say(&format!("stackwire: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
