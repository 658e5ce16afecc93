//! Sends a saved capture until it is told to stop: a collector for tests of what receives.
//!
//! Writes a line to standard output whenever it hears of an acknowledgement: epochs, those that are
//! settled, samples taken, samples dropped. The last line begins with `end`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use stackwire_collector::{Address, Credentials, Limits, Progress, Replay, ReplayConfig, Target};

#[derive(Debug, Parser)]
struct Arguments {
    /// The capture.
    capture: PathBuf,
    /// Symbolizers, as --to of the collector takes them.
    #[arg(long, required = true)]
    to: Vec<Address>,
    #[arg(long)]
    tls_ca: Option<PathBuf>,
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Of the capture, 32 hexadecimal digits.
    #[arg(long)]
    id: String,
    #[arg(long)]
    hostname: String,
    /// Milliseconds from one epoch to the next.
    #[arg(long, default_value_t = 1000)]
    pace: u64,
    /// KiB of epochs that may wait.
    #[arg(long, default_value_t = 16_384)]
    buffer: usize,
    /// Seconds to deliver what is left.
    #[arg(long, default_value_t = 30)]
    drain: u64,
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may listen any more.
            let _ = writeln!(std::io::stderr(), "replay: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let stop = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop))?;
    let id = u128::from_str_radix(&arguments.id, 16)?.to_be_bytes();
    let replay = Replay::read(std::io::BufReader::new(std::fs::File::open(arguments.capture)?))?;
    let how = ReplayConfig {
        target: Target {
            addresses: arguments.to,
            credentials: Credentials {
                ca: arguments.tls_ca,
                token: arguments.token_file,
                ..Credentials::default()
            },
            drain: Duration::from_secs(arguments.drain),
            once: false,
        },
        limits: Limits { memory: arguments.buffer << 10, ..Limits::default() },
        capture_id: id,
        hostname: arguments.hostname,
        pace: Duration::from_millis(arguments.pace),
    };
    let mut out = std::io::stdout();
    let line = |progress: &Progress| {
        let Progress { epochs, settled, taken, dropped } = progress;
        format!("{epochs} {settled} {taken} {dropped}\n")
    };
    let ended = replay.run(how, |progress| {
        // In one write: a kill leaves whole lines.
        let told = out.write_all(line(&progress).as_bytes());
        told.is_ok() && !stop.load(Ordering::Relaxed)
    })?;
    out.write_all(format!("end {}", line(&ended)).as_bytes())?;
    Ok(())
}
