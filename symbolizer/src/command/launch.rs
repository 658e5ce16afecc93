//! `stackwire launch SOCKET -- COMMAND`: waits until sampling has started, then becomes the
//! command, so that nothing of it goes unsampled. Its environment and descriptors are those
//! `record` was given. And [`Launched`], who says the word.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};

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

/// A command that waits for a word before it starts.
pub struct Launched {
    child: Child,
    listener: UnixListener,
    _directory: tempfile::TempDir,
}

impl Launched {
    /// Starts it. `python`: CPython in it names its functions from the start on.
    pub fn start(command: &[std::ffi::OsString], python: bool) -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new().prefix("stackwire-").tempdir()?;
        let socket = directory.path().join("launch.sock");
        let listener =
            UnixListener::bind(&socket).context("cannot set up the launch of the command")?;
        let child = Command::new(std::env::current_exe()?)
            .envs(python.then_some(("PYTHONPERFSUPPORT", "1")))
            .arg("launch")
            .arg(&socket)
            .arg("--")
            .args(command)
            .spawn()
            .context("cannot start the command")?;
        Ok(Self { child, listener, _directory: directory })
    }

    /// Its process, which becomes the command.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Lets the command run.
    pub fn release(self) -> anyhow::Result<(Child, UnixStream)> {
        let (mut stream, _) = self.listener.accept().context("the command did not start")?;
        stream.write_all(b"!").context("the command did not start")?;
        Ok((self.child, stream))
    }

    /// Ends the process that waits.
    pub fn abandon(self) {
        let Self { mut child, listener, _directory } = self;
        // Before the socket closes, of which it would tell. Reaped either way.
        let _ = child.kill();
        let _ = child.wait();
        drop(listener);
    }
}

/// The exit of the command is ours: 128 and the number of the signal that ended it, as shells have
/// it.
pub fn exit(status: ExitStatus) -> Result<(), Failure> {
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    match u8::try_from(code).unwrap_or(1) {
        0 => Ok(()),
        code => Err(Failure::Command(code)),
    }
}
