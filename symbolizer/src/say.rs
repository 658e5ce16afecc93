//! Messages to the person at the terminal. The terminal may be closed: nothing depends on the
//! messages being read.
//!
//! Messages of the libraries are printed here, too: libraries emit them as events of `tracing` and
//! never print.

use std::fmt::{self, Write as _};
use std::io::Write;

use stackwire::formats::plain;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Writes lines to standard error. Characters in names of strangers that could control the terminal
/// are replaced. `eprintln!` would panic when nobody listens any more.
pub fn say(text: &str) {
    for line in text.lines() {
        // See above.
        let _ = writeln!(std::io::stderr(), "{}", plain(line));
    }
}

/// Says from now on what our libraries tell.
pub fn listen() {
    // Fails where it was done before.
    let _ = tracing::subscriber::set_global_default(Listener);
}

/// Knows no spans: there is nothing to be told about them.
struct Listener;

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event()
            && *metadata.level() <= Level::INFO
            && metadata.target().starts_with("stackwire")
    }

    fn event(&self, event: &Event<'_>) {
        let mut words = Words("stackwire: ".to_owned());
        event.record(&mut words);
        say(&words.0);
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// The message of an event.
struct Words(String);

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            // A String takes everything.
            let _ = write!(self.0, "{value:?}");
        }
    }
}
