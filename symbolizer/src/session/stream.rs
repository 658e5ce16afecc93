//! The one stream of a session: into its log, and the profile it becomes. Called by the server.

use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stackwire_cache::Cache;
use stackwire_proto::v1;
use stackwire_proto::v1::collector_message::Body;

use super::Kept;
use super::exporter::Exporting;
use crate::capture::Assembler;
use crate::receive::grpc::{Accept, Keep, NotKept};
use crate::receive::log::{Answer, Closed, Files, Log, LogError};
use crate::resolve::Pinned;

/// The log to be, and who is told that the collector has greeted and that its stream is over.
pub(super) type Ends = (File, Option<Kept>, Sender<Result<(), NotKept>>, Sender<(Closed, bool)>);

/// Accepts the one stream of a session.
pub(super) struct OneStream {
    pub cache: Option<Arc<Cache>>,
    pub timeline: bool,
    pub exporting: Option<Exporting>,
    pub state: Mutex<Option<Ends>>,
}

impl Accept for OneStream {
    fn accept(
        &self,
        _hello: &v1::Hello,
        message: &v1::CollectorMessage,
    ) -> Result<Box<dyn Keep>, NotKept> {
        let taken = self.state.lock().ok().and_then(|mut state| state.take());
        let (file, kept, greeted, finished) =
            taken.ok_or_else(|| NotKept::Failed("a collector is connected already".to_owned()))?;
        let files = Files { local: true, pinned: Pinned::default(), cache: self.cache.clone() };
        let path = kept.as_ref().map_or(PathBuf::from("(temporary)"), |kept| kept.path.clone());
        let assembler =
            if self.timeline { Assembler::with_timeline() } else { Assembler::default() };
        let log = Log::start(path, file, message, 0, files, assembler);
        let log = log.map_err(|error| NotKept::Failed(error.to_string()));
        let log = log.and_then(|log| {
            let Some(Kept { file, path, put }) = kept else { return Ok(log) };
            let cannot =
                |error| NotKept::Failed(format!("cannot write {}: {error}", path.display()));
            put(file).map(|()| log).map_err(cannot)
        });
        // The session may have given up waiting, and then needs no answer.
        let _ = greeted.send(log.as_ref().map(|_| ()).map_err(Clone::clone));
        let exporting = self.exporting.clone();
        Ok(Box::new(KeepOne { log: log?, exporting, finished }))
    }
}

struct KeepOne {
    log: Log,
    exporting: Option<Exporting>,
    finished: Sender<(Closed, bool)>,
}

impl Keep for KeepOne {
    fn next_epoch(&self) -> u64 {
        self.log.next_epoch
    }

    fn add(&mut self, message: &v1::CollectorMessage) -> Result<Answer, LogError> {
        let answer = self.log.add(message)?;
        if let (Some(exporting), Some(Body::Epoch(_))) = (&mut self.exporting, &message.body) {
            exporting.look(self.log.profile(), false);
        }
        Ok(answer)
    }

    fn pause(&self) -> Option<Duration> {
        None
    }

    fn finish(mut self: Box<Self>) {
        if let Some(exporting) = &mut self.exporting {
            exporting.look(self.log.profile(), true);
        }
        let ended = self.log.has_ended();
        let _ = self.finished.send((self.log.close(), ended));
    }
}
