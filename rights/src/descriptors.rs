//! How many files a process may have open.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Takes what the system allows at most, instead of what it gives at first.
///
/// # Errors
/// Those of setrlimit(2).
pub fn raise_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?)
}
