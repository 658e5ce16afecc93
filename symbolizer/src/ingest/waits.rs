//! Labels of waits: how the thread waited, and who woke it from where.
//!
//! Called by `ingest/mod.rs` for each sample that is of a wait.

use std::collections::HashMap;

use stackwire_model::Wait;
use stackwire_proto::v1;

use super::IngestError;
use super::tables::Reader;
use crate::profile::labels::{Label, LabelValue};
use crate::profile::{Builder, StackId};

/// The number of a waker in its epoch, with its user stack and its kernel stack.
pub(super) type Woken = (u32, Option<StackId>, Option<StackId>);

/// The labels of an epoch's waits.
pub(super) struct Waits<'e> {
    reader: Reader<'e>,
    /// Names of wakers.
    comms: Vec<String>,
    /// Sets of labels by what they say.
    known: HashMap<(Wait, Option<Woken>), u32>,
}

impl<'e> Waits<'e> {
    pub(super) fn new(reader: Reader<'e>) -> Result<Self, IngestError> {
        let comms = reader.epoch.wakers.iter().map(|waker| reader.string(waker.comm));
        Ok(Self { reader, comms: comms.collect::<Result<_, _>>()?, known: HashMap::new() })
    }

    /// Who ended the wait of a sample, and its number.
    pub(super) fn waker(
        &self,
        samples: &v1::Samples,
        index: usize,
    ) -> Result<Option<(u32, &'e v1::Waker)>, IngestError> {
        let number = samples.waker.get(index).or(samples.waker.first()).copied().unwrap_or(0);
        let Some(at) = number.checked_sub(1) else { return Ok(None) };
        let waker = self.reader.epoch.wakers.get(at as usize);
        Ok(Some((at, waker.ok_or_else(|| self.reader.undefined("waker", at))?)))
    }

    /// The set of labels of a wait.
    pub(super) fn labels(
        &mut self,
        wait: Wait,
        woken: Option<Woken>,
        into: &mut Builder,
    ) -> Result<u32, IngestError> {
        if let Some(&known) = self.known.get(&(wait, woken)) {
            return Ok(known);
        }
        let mut labels = of_wait(wait);
        if let Some((at, user, kernel)) = woken {
            let waker = &self.reader.epoch.wakers[at as usize];
            labels.extend(of_waker(waker, &self.comms[at as usize], [user, kernel]));
        }
        let new = into.labels(labels).map_err(|full| self.reader.invalid(full))?;
        self.known.insert((wait, woken), new);
        Ok(new)
    }
}

fn text(key: &str, value: impl Into<String>) -> Label {
    Label { key: key.to_owned(), value: LabelValue::Text(value.into()) }
}

/// How the thread waited, and which part of the wait is outside the capture.
fn of_wait(wait: Wait) -> Vec<Label> {
    let open = match (wait.began_before, wait.goes_on) {
        (false, false) => None,
        (true, false) => Some("start"),
        (false, true) => Some("end"),
        (true, true) => Some("start,end"),
    };
    let mut labels = vec![text("state", wait.state.name())];
    labels.extend(open.map(|open| text("open", open)));
    labels
}

fn of_waker(waker: &v1::Waker, comm: &str, [user, kernel]: [Option<StackId>; 2]) -> Vec<Label> {
    let mut labels = if waker.interrupt {
        vec![text("waker", "interrupt")]
    } else {
        let number = |key: &str, number: u32| Label {
            key: key.to_owned(),
            value: LabelValue::Number(number.into(), String::new()),
        };
        vec![text("waker", comm), number("waker_pid", waker.pid), number("waker_tid", waker.tid)]
    };
    if user.is_some() || kernel.is_some() {
        let value = LabelValue::Stack { user, kernel };
        labels.push(Label { key: "waker_stack".to_owned(), value });
    }
    labels
}
