//! Which events this host has: those that the kernel lets this process open on itself, and its
//! tracepoints. For `main.rs`.

use stackwire_model::perf_events::{self, Group};

use crate::sources::perf_event::PerfEvent;
use crate::sources::tracepoint::{self, TracepointError};

/// What there is.
#[derive(Debug)]
pub struct Listed {
    /// Events with names, each with whether it is there.
    pub named: Vec<(Group, String, bool)>,
    /// Names of tracepoints, or why they are not known.
    pub tracepoints: Result<Vec<String>, TracepointError>,
}

/// Looks.
#[must_use]
pub fn list_events() -> Listed {
    let named = perf_events::all();
    let named = named.map(|event| (event.group, event.name, PerfEvent::is_there(event.perf)));
    Listed { named: named.collect(), tracepoints: tracepoint::all() }
}
