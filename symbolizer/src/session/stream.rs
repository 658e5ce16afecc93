//! The one stream of a session: into its log, and the profile it becomes. Called by the server.

use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use stackwire_cache::Cache;
use stackwire_elf::Scratch;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{open_epoch, v1};
use tokio::sync::{Semaphore, watch};

use super::Kept;
use super::exporter::Exporting;
use crate::capture::Assembler;
use crate::receive::grpc::{Accept, Accepted, Keep, NotAdmitted, NotKept, Stopped, Taken};
use crate::receive::handed::Handed;
use crate::receive::log::{Batch, Log, LogError, Tally};
use crate::receive::peer::Caller;
use crate::receive::tenant::Tenant;
use crate::receive::wants::{Place, Wanted, Wants};
use crate::resolve::Pins;

/// The log to be, and who is told that the collector has greeted and that its stream is over.
pub(super) type Ends = (File, Option<Kept>, Sender<Result<(), NotKept>>, Sender<Finished>);

/// What a stream has left.
#[derive(Debug)]
pub(super) struct Finished {
    /// All that came.
    pub assembler: Assembler,
    /// Files that its processes ran.
    pub pins: Pins,
    /// It had an end.
    pub ended: bool,
}

/// Accepts the one stream of a session.
pub(super) struct OneStream {
    pub cache: Option<Arc<Cache>>,
    pub timeline: bool,
    pub exporting: Option<Exporting>,
    pub state: Mutex<Option<Ends>>,
}

impl Accept for OneStream {
    type Name = ();

    /// Its socket is in a directory of its user's own.
    fn admit(&self, _caller: Option<&Caller>) -> Result<(), NotAdmitted> {
        Ok(())
    }

    async fn accept(&self, (): (), hello: v1::Hello) -> Result<Accepted, NotKept> {
        let taken = self.state.lock().ok().and_then(|mut state| state.take());
        let (file, kept, greeted, finished) =
            taken.ok_or_else(|| NotKept::Failed("a collector is connected already".to_owned()))?;
        let keeper = self.begin(hello, file, kept, finished);
        // The session may have given up waiting, and then needs no answer.
        let _ = greeted.send(keeper.as_ref().map(|_| ()).map_err(Clone::clone));
        // There is no other stream that this one could make room for.
        static NEVER: std::sync::OnceLock<watch::Sender<bool>> = std::sync::OnceLock::new();
        let replaced = NEVER.get_or_init(|| watch::channel(false).0).subscribe();
        let turns = Arc::new(Semaphore::new(1));
        Ok(Accepted { keeper: Box::new(keeper?), replaced, turns })
    }
}

impl OneStream {
    fn begin(
        &self,
        hello: v1::Hello,
        file: File,
        kept: Option<Kept>,
        finished: Sender<Finished>,
    ) -> Result<KeepOne, NotKept> {
        let failed = |error: &dyn std::fmt::Display| NotKept::Failed(error.to_string());
        let path = kept.as_ref().map_or(PathBuf::from("(temporary)"), |kept| kept.path.clone());
        let assembler =
            if self.timeline { Assembler::with_timeline() } else { Assembler::default() };
        let tenant = Tenant { owner: String::new(), cache: self.cache.clone() };
        let mut assembler = assembler.beside(Arc::new(Handed::new(Scratch::default(), tenant)));
        let place = Place {
            is_here: true,
            share_all: hello.share_all,
            cache: self.cache.clone(),
            trust_executables: false,
            allowance: None,
        };
        let hello = v1::CollectorMessage { body: Some(Body::Hello(hello)) };
        let log = Log::start(path, file, &hello).map_err(|error| failed(&error))?;
        assembler.add(&hello).map_err(|error| failed(&error))?;
        if let Some(Kept { file, path, put }) = kept {
            put(file)
                .map_err(|error| failed(&format!("cannot write {}: {error}", path.display())))?;
        }
        let wants = Wants::new(Arc::new(place), Arc::clone(assembler.handed()));
        let exporting = self.exporting.clone();
        Ok(KeepOne { log, assembler, wants, pins: Pins::default(), exporting, finished })
    }
}

struct KeepOne {
    log: Log,
    assembler: Assembler,
    wants: Wants,
    pins: Pins,
    exporting: Option<Exporting>,
    finished: Sender<Finished>,
}

impl KeepOne {
    /// Adds one message; the number of an epoch that is durable now.
    fn take(
        &mut self,
        message: &v1::CollectorMessage,
        wanted: &mut Wanted,
    ) -> Result<Option<u64>, Stopped> {
        match &message.body {
            Some(Body::Epoch(sealed)) if sealed.number >= self.log.tally().next_epoch => {
                let epoch = open_epoch(sealed)?;
                let met = self.assembler.take(&epoch)?;
                let (more, known) = self.wants.look(&self.assembler, &met, &self.pins);
                wanted.extend(more);
                let mut batch = Batch::default();
                batch
                    .epoch(message, &Tally::of(&epoch, sealed.number))
                    .and_then(|()| known.iter().try_for_each(|message| batch.other(message)))
                    .map_err(|error| LogError { path: self.log.path().to_owned(), error })?;
                self.log.append(&batch)?;
                return Ok(Some(sealed.number));
            }
            Some(Body::Artifact(chunk)) if chunk.kind() == v1::ArtifactKind::File => {
                wanted.extend(self.wants.file(chunk, &mut self.log)?);
            }
            Some(Body::Artifact(chunk)) => {
                if self.wants.artifact(chunk) {
                    self.log.append_one(message)?;
                    self.assembler.add(message)?;
                }
            }
            Some(Body::End(_)) => {
                self.log.append_one(message)?;
                self.assembler.add(message)?;
            }
            Some(Body::Epoch(_) | Body::Hello(_)) | None => {}
        }
        Ok(None)
    }
}

impl Keep for KeepOne {
    fn next_epoch(&self) -> u64 {
        0
    }

    fn add(&mut self, messages: &[v1::CollectorMessage]) -> Taken {
        let mut taken = Taken::default();
        for message in messages {
            match self.take(message, &mut taken.wanted) {
                Ok(ack) => taken.ack = ack.or(taken.ack),
                Err(stopped) => {
                    taken.stopped = Some(stopped);
                    break;
                }
            }
            taken.messages += 1;
        }
        if let (Some(exporting), Some(_)) = (&mut self.exporting, taken.ack) {
            exporting.look(self.assembler.profile(), false);
        }
        taken
    }

    fn finish(mut self: Box<Self>) {
        if let Some(exporting) = &mut self.exporting {
            exporting.look(self.assembler.profile(), true);
        }
        let ended = self.log.has_ended();
        let Self { assembler, pins, finished, .. } = *self;
        let _ = finished.send(Finished { assembler, pins, ended });
    }
}
