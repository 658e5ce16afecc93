//! Tracepoints of this host: which there are, and the number each has here. Reads tracefs. Called
//! by `config.rs` and `list.rs`.

use std::io;
use std::path::{Path, PathBuf};

use stackwire_model::perf_events::TRACEPOINT;
use stackwire_model::{Event, PerfType};

/// Where tracefs is, by habit.
const PLACES: [&str; 2] = ["/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events"];

/// A tracepoint that cannot be sampled.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TracepointError {
    /// No tracefs.
    #[error(
        "tracepoints are listed in {}, which is not there; mount it: mount -t tracefs none /sys/kernel/tracing",
        PLACES[0]
    )]
    NotMounted,
    /// No rights.
    #[error("{} may not be read by this user; run the collector as root", PLACES[0])]
    Denied,
    /// No such tracepoint.
    #[error("this kernel has no tracepoint {0}; `stackwire events` lists those there are")]
    Unknown(String),
    /// Anything else.
    #[error("cannot read the number of tracepoint {name}: {error}")]
    Unreadable {
        /// Its name.
        name: String,
        /// What the system said.
        error: String,
    },
}

/// Looks up the number that a tracepoint has on this host.
///
/// # Errors
/// See [`TracepointError`].
pub fn find(event: &Event) -> Result<Event, TracepointError> {
    let name = event.name.clone();
    let Some((system, point)) = name.split_once(':') else {
        return Err(TracepointError::Unknown(name));
    };
    let path = place()?.join(system).join(point).join("id");
    let unreadable = |error: String| TracepointError::Unreadable { name: name.clone(), error };
    let id = match std::fs::read_to_string(path) {
        Ok(text) => text.trim().parse().map_err(|_not| unreadable(format!("it is {text:?}")))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(TracepointError::Unknown(name));
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(TracepointError::Denied);
        }
        Err(error) => return Err(unreadable(error.to_string())),
    };
    Ok(Event { perf: Some(PerfType { kind: TRACEPOINT, config: id }), ..event.clone() })
}

/// Names of all tracepoints, in order.
///
/// # Errors
/// See [`TracepointError`].
pub fn all() -> Result<Vec<String>, TracepointError> {
    let mut found = Vec::new();
    for system in directories(&place()?)? {
        let events = directories(&system).unwrap_or_default();
        let with_number = events.into_iter().filter(|event| event.join("id").exists());
        found.extend(with_number.filter_map(|event| {
            let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
            Some(format!("{}:{}", name(&system)?, name(&event)?))
        }));
    }
    found.sort_unstable();
    Ok(found)
}

fn place() -> Result<PathBuf, TracepointError> {
    for place in PLACES {
        match std::fs::metadata(place) {
            Ok(_) => return Ok(place.into()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(TracepointError::Denied);
            }
            Err(_) => {}
        }
    }
    Err(TracepointError::NotMounted)
}

fn directories(of: &Path) -> Result<Vec<PathBuf>, TracepointError> {
    let entries = std::fs::read_dir(of).map_err(|_denied| TracepointError::Denied)?;
    Ok(entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
}
