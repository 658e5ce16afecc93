//! Sends a saved capture again and again, through the same outbox and sinks as a live one.
//!
//! For tests of what receives: each epoch has a sample of its own that tells it from all others,
//! and the caller hears what was acknowledged. Nothing is sampled, and no right is needed.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use stackwire_model::{LostReason, Share};
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, ReadError, open_piece, seal_epoch, v1};

use crate::artifact::{Artifact, Kind};
use crate::handover::Handover;
use crate::helpers::broker::Broker;
use crate::outbox::{Limits, Outbox};
use crate::session::{SessionError, Sink, deliver};
use crate::sink::Target;

/// A capture that can be sent.
#[derive(Debug)]
pub struct Replay {
    hello: v1::Hello,
    epochs: Vec<v1::Epoch>,
    artifacts: Vec<Artifact>,
}

/// How a capture is sent.
#[derive(Debug)]
pub struct ReplayConfig {
    /// Where to.
    pub target: Target,
    /// How much may wait.
    pub limits: Limits,
    /// Instead of the capture's own.
    pub capture_id: [u8; 16],
    /// Likewise. The samples that mark epochs are of threads called `HOSTNAME:NUMBER`.
    pub hostname: String,
    /// From one epoch to the next.
    pub pace: Duration,
}

/// How far it is. Epochs are numbered from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Epochs begun.
    pub epochs: u64,
    /// Epochs below this are acknowledged, or were dropped.
    pub settled: u64,
    /// Samples in all epochs.
    pub taken: u64,
    /// Samples of epochs that were dropped, because too much waited or they were refused.
    pub dropped: u64,
}

impl Replay {
    /// Reads a capture.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn read(capture: impl Read) -> Result<Self, ReadError> {
        let mut reader = FrameReader::new(capture);
        let (mut hello, mut epochs) = (v1::Hello::default(), Vec::new());
        let mut contents: Vec<(Kind, Vec<u8>)> = Vec::new();
        while let Some(message) = reader.next_message()? {
            match message.body {
                Some(Body::Hello(found)) => hello = found,
                Some(Body::Epoch(sealed)) => epochs.extend(stackwire_proto::open_epoch(&sealed)),
                Some(Body::Artifact(chunk)) => {
                    let kind = match chunk.kind() {
                        v1::ArtifactKind::Kallsyms => Kind::Kallsyms,
                        v1::ArtifactKind::PerfMap => Kind::PerfMap,
                        v1::ArtifactKind::Jitdump => Kind::Jitdump,
                        v1::ArtifactKind::Vdso => Kind::Vdso,
                        _ => continue,
                    };
                    let piece = open_piece(&chunk).unwrap_or_default();
                    match contents.last_mut().filter(|_| chunk.offset > 0) {
                        Some((_, content)) => content.extend(piece),
                        None => contents.push((kind, piece)),
                    }
                }
                Some(Body::End(_)) | None => {}
            }
        }
        let artifacts = contents.into_iter().map(|(kind, content)| Artifact::new(kind, content));
        Ok(Self { hello, epochs, artifacts: artifacts.collect() })
    }

    /// Sends epochs until `goes_on`, which is told how far it is, says no. Then delivers what is
    /// left.
    ///
    /// # Errors
    /// When there is none to send, a thread cannot be started, or not all was delivered in time.
    pub fn run(
        &self,
        how: ReplayConfig,
        mut goes_on: impl FnMut(Progress) -> bool,
    ) -> Result<Progress, SessionError> {
        let (Some(first), Some(last)) = (self.epochs.first(), self.epochs.last()) else {
            return Err(SessionError::Internal("the capture has no epochs".to_owned()));
        };
        let length = last.end_ns.saturating_sub(first.start_ns);
        let outbox = Arc::new(Outbox::new(how.limits));
        for artifact in &self.artifacts {
            outbox.add_artifact(artifact.clone(), None);
        }
        let hello = v1::Hello {
            capture_id: how.capture_id.to_vec(),
            hostname: how.hostname.clone(),
            ..self.hello.clone()
        };
        let hello = v1::CollectorMessage { body: Some(Body::Hello(hello)) };
        let handover = Arc::new(Handover::new(Share::Never, Arc::new(Broker::none())));
        let delivery = {
            let (outbox, target) = (Arc::clone(&outbox), how.target);
            std::thread::Builder::new()
                .name("deliver".to_owned())
                .spawn(move || deliver(Sink::Symbolizer(target), &outbox, &handover, hello))
                .map_err(|error| SessionError::Internal(error.to_string()))?
        };
        let mut progress = Progress::default();
        // What no epoch has said.
        let mut unsaid = 0;
        while goes_on(progress) {
            // As many as there are numbers.
            let at = (progress.epochs % self.epochs.len() as u64) as usize;
            let mut epoch = self.epochs[at].clone();
            let later = length.saturating_mul(progress.epochs / self.epochs.len() as u64);
            epoch.number = progress.epochs;
            epoch.start_ns = epoch.start_ns.saturating_add(later);
            epoch.end_ns = epoch.end_ns.saturating_add(later);
            mark(&mut epoch, &how.hostname);
            epoch.lost = lost(unsaid);
            let samples = epoch.samples.iter().map(|of| of.thread.len() as u64).sum();
            let losses = vec![(LostReason::EpochDropped, unsaid)];
            outbox.push(seal_epoch(&epoch), samples, losses);
            progress.taken += samples;
            progress.epochs += 1;
            std::thread::sleep(how.pace);
            progress.settled = outbox.oldest().unwrap_or(progress.epochs);
            // After that: what is settled and dropped is counted.
            let (dropped, said) = dropped(&outbox);
            progress.dropped += dropped;
            unsaid = dropped + said;
        }
        outbox.close(v1::End {
            epochs: progress.epochs,
            taken: progress.taken,
            lost: lost(progress.dropped),
            ..v1::End::default()
        });
        let delivered = delivery.join();
        progress.dropped += outbox.samples() + outbox.take_dropped();
        progress.settled = outbox.oldest().unwrap_or(progress.epochs);
        match delivered {
            Ok(Ok(())) => Ok(progress),
            Ok(Err(error)) => Err(SessionError::Internal(error.to_string())),
            Err(_panic) => Err(SessionError::Internal("the delivering thread died".to_owned())),
        }
    }
}

/// Samples of epochs dropped since this was asked last, and what those epochs said was lost before.
fn dropped(outbox: &Outbox) -> (u64, u64) {
    let said = outbox.take_dropped_losses();
    (outbox.take_dropped(), said.iter().map(|(_, count)| count).sum())
}

fn lost(samples: u64) -> Vec<v1::Lost> {
    if samples == 0 {
        return Vec::new();
    }
    let mut lost = v1::Lost { samples: true, count: samples, ..v1::Lost::default() };
    lost.set_reason(v1::LostReason::EpochDropped);
    vec![lost]
}

/// Adds a sample without a stack, of a thread that is called as the epoch.
fn mark(epoch: &mut v1::Epoch, hostname: &str) {
    let index = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
    let (comm, process, thread) =
        (index(epoch.strings.len()), index(epoch.processes.len()), index(epoch.threads.len()));
    epoch.strings.push(format!("{hostname}:{}", epoch.number));
    let pid = i32::MAX as u32;
    epoch.processes.push(v1::Process { pid, comm, ..v1::Process::default() });
    epoch.threads.push(v1::Thread { process, tid: pid, comm });
    epoch.samples.push(v1::Samples {
        time_delta: vec![1],
        thread: vec![thread],
        cpu: vec![0],
        user_stack: vec![0],
        kernel_stack: vec![0],
        value: vec![1],
        ..v1::Samples::default()
    });
}
