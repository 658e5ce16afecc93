//! `stackwire`: parse → config → run → exit code.

mod cli;
mod command;
mod say;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    abort_on_panic();
    stackwire_rights::memory::give_back_large_blocks();
    say::listen();
    match command::run(cli::Args::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(command::Failure::Usage(message)) => {
            tracing::error!("{message}");
            ExitCode::from(2)
        }
        Err(command::Failure::Command(status)) => ExitCode::from(status),
        Err(command::Failure::Run(error)) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Half a program must not go on: a thread that is gone would be missed by nobody.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}
