//! `stackwire launch SOCKET -- COMMAND`: waits until sampling has started, then becomes the
//! command, so that nothing of it goes unsampled. Its environment and descriptors are those
//! `record` was given.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;

use super::Failure;
use crate::cli::Launch;
use crate::say::say;

/// Exit code of a command that could not be run, as shells have it.
const CANNOT_RUN: i32 = 127;

pub fn run(arguments: &Launch) -> Result<(), Failure> {
    let mut stream = UnixStream::connect(&arguments.socket).context("sampling did not start")?;
    let mut word = [0];
    stream.read_exact(&mut word).context("sampling did not start")?;
    let Some((program, rest)) = arguments.command.split_first() else {
        return Err(Failure::Usage("no command".to_owned()));
    };
    let error = Command::new(program).args(rest).exec();
    // Closed without a word when it becomes the command. If nobody listens any more, nobody asks.
    let _ = stream.write_all(b"!");
    say(&format!("stackwire: cannot run {}: {error}", program.to_string_lossy()));
    std::process::exit(CANNOT_RUN)
}
