//! Messages to the person at the terminal. The terminal may be closed: nothing depends on the
//! messages being read.
//!
//! Messages of the libraries are printed here, too: libraries emit them as events of `tracing` and
//! never print.

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, Value};
use stackwire::formats::plain;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::cli::serve::LogFormat;

/// Writes lines to standard error. Characters in names of strangers that could control the terminal
/// are replaced. `eprintln!` would panic when nobody listens any more.
pub fn say(text: &str) {
    for line in text.lines() {
        // See above.
        let _ = writeln!(std::io::stderr(), "{}", plain(line));
    }
}

static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Says from now on what our libraries tell.
pub fn listen() {
    // Fails where it was done before.
    let _ = tracing::subscriber::set_global_default(Listener);
}

/// How it is said from now on.
pub fn set_format(format: LogFormat) {
    IS_JSON.store(format == LogFormat::Json, Ordering::Relaxed);
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
        let mut fields = Fields::default();
        event.record(&mut fields);
        if IS_JSON.load(Ordering::Relaxed) {
            let level = event.metadata().level().to_string().to_lowercase();
            fields.0.insert("level".to_owned(), level.into());
            fields.0.insert("time".to_owned(), jiff::Timestamp::now().to_string().into());
            // Control characters are escaped in JSON.
            let _ = writeln!(std::io::stderr(), "{}", Value::Object(fields.0));
            return;
        }
        if let Some(Value::String(message)) = fields.0.get(MESSAGE) {
            say(&format!("stackwire: {message}"));
        }
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// What `tracing` calls the text of an event.
const MESSAGE: &str = "message";

/// What an event says, by name. The text for people has all of it in words.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}
