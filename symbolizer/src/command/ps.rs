//! `stackwire ps`: the captures of a server.

use std::io::Write as _;

use anyhow::Context;
use stackwire::formats::plain;
use stackwire::{Capture, Captures, Windows};

use super::Failure;
use super::ask::{Server, block_on};
use super::place::confine;
use crate::cli::ask::{Ps, PsFormat};

const HEAD: [&str; 10] = [
    "HOST",
    "CLIENT",
    "COLLECTOR",
    "LAST",
    "SAMPLES/S",
    "SAMPLES",
    "LOST",
    "WHOLE",
    "WINDOWS",
    "CAPTURE",
];

pub fn run(arguments: &Ps) -> Result<(), Failure> {
    let server = Server::of(&arguments.from)?;
    confine()?;
    let said = block_on(async {
        let live = arguments.live.then(|| ("live", "true".to_owned()));
        let answer = server.get("/v1/captures", live.as_slice()).await?;
        Ok(answer.bytes().await?)
    })?;
    let text = match arguments.format {
        PsFormat::Json => format!("{}\n", String::from_utf8_lossy(&said).trim_end()),
        PsFormat::Text => {
            let listed: Captures =
                serde_json::from_slice(&said).context("the server is of another version")?;
            table(&listed.captures)
        }
    };
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        // `ps | head` has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other.context("cannot print")?),
    }
}

fn table(captures: &[Capture]) -> String {
    let now = jiff::Timestamp::now();
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(captures.iter().map(|capture| row(capture, now)));
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: [usize; 10] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| {
            // Numbers to the right.
            if (4..8).contains(&column) {
                format!("{cell:>width$}")
            } else {
                format!("{cell:width$}")
            }
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn row(capture: &Capture, now: jiff::Timestamp) -> [String; 10] {
    let whole = match capture.stacks {
        0 => "-".to_owned(),
        all => format!("{:.1} %", 100.0 * capture.whole_stacks as f64 / all as f64),
    };
    let rate =
        if capture.live { format!("{:.1}", capture.samples_per_second) } else { "-".to_owned() };
    let Windows { open, waiting, written, given_up, pushed, not_pushed } = capture.windows;
    let states = [
        (open, "open"),
        (waiting, "waiting"),
        (written, "written"),
        (pushed, "pushed"),
        (not_pushed, "not pushed"),
        (given_up, "given up"),
    ];
    let states = states.into_iter().filter(|(count, _)| *count > 0);
    let states = states.map(|(count, state)| format!("{count} {state}"));
    let client = if capture.client.is_empty() { "-" } else { capture.client.as_str() };
    [
        plain(&capture.host).to_string(),
        plain(client).to_string(),
        plain(&capture.collector).to_string(),
        if capture.live { "now".to_owned() } else { ago(now, capture.last) },
        rate,
        capture.samples.to_string(),
        capture.lost_samples.to_string(),
        whole,
        states.collect::<Vec<_>>().join(", "),
        capture.capture.clone(),
    ]
}

/// How long ago, in its largest unit.
fn ago(now: jiff::Timestamp, then: jiff::Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs().max(0);
    match seconds {
        0..60 => format!("{seconds} s ago"),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}
