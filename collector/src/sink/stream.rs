//! One stream to a symbolizer: greeting, epochs as they come, artifacts and files when they are
//! wanted, until all is acknowledged or the connection breaks. Called by `upload.rs`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use stackwire_model::ExecutableKey;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::v1::symbolizer_message::Body as Answer;
use stackwire_proto::{FORMAT, v1};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

use super::sending::{Part, Sending};
use crate::artifact::{Artifact, Hash};
use crate::handover::Handover;
use crate::outbox::{Next, Outbox};
use crate::wire;

/// How long the answer to a greeting may take: an old stream of the capture is put away before.
const WELCOME: Duration = Duration::from_secs(15);
/// A symbolizer cannot make a collector wait for longer in one go.
const LONGEST_PAUSE_MS: u32 = 10_000;

/// Why a stream is over before all was delivered.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// It may be tried again.
    #[error("{0}")]
    Lost(String),
    /// So may this, but the epoch that was sent first is refused.
    #[error("{0}")]
    EpochRefused(String),
    /// The symbolizer reads an older format, and will not take the capture at any time.
    #[error("it reads format {0}, this collector writes {FORMAT}")]
    Format(u32),
    /// The spool cannot be read.
    #[error("cannot read the spool: {0}")]
    Spool(std::io::Error),
}

/// What is said and heard.
pub(super) struct Stream<'a> {
    outbox: &'a Outbox,
    handover: &'a Arc<Handover>,
    answers: tonic::Streaming<v1::SymbolizerMessage>,
    /// Closed when nothing is left to say.
    out: Option<mpsc::Sender<v1::CollectorMessage>>,
    /// Number of the first epoch that was not sent.
    from: u64,
    /// The end was sent.
    ended: bool,
    pause: Option<Instant>,
    /// Files and artifacts asked for, in turn; the first of each is being sent, a piece between
    /// epochs.
    files: VecDeque<(ExecutableKey, Part)>,
    file: Option<Sending>,
    artifacts: VecDeque<Artifact>,
    artifact: Option<Sending>,
}

impl<'a> Stream<'a> {
    /// Greets.
    pub(super) async fn open(
        channel: Channel,
        authorization: Option<MetadataValue<Ascii>>,
        hello: &v1::CollectorMessage,
        outbox: &'a Outbox,
        handover: &'a Arc<Handover>,
    ) -> Result<Self, Broken> {
        let (out, outgoing) = mpsc::channel(4);
        // The channel was just made and is empty: there is room for one.
        let _ = out.try_send(hello.clone());
        let greeted = async {
            let mut client = SymbolizerClient::new(channel);
            let mut request = Request::new(ReceiverStream::new(outgoing));
            if let Some(authorization) = authorization {
                request.metadata_mut().insert("authorization", authorization);
            }
            let answers = client.capture(request).await;
            let mut answers = answers.map_err(lost)?.into_inner();
            let first = answers.message().await.map_err(lost)?;
            Ok((answers, first))
        };
        let greeted = timeout(WELCOME, greeted).await;
        let (answers, first) =
            greeted.map_err(|_elapsed| Broken::Lost("no answer to the greeting".to_owned()))??;
        let Some(v1::SymbolizerMessage { body: Some(Answer::Welcome(welcome)) }) = first else {
            return Err(Broken::Lost("it does not speak this protocol".to_owned()));
        };
        if welcome.format < FORMAT {
            return Err(Broken::Format(welcome.format));
        }
        outbox.expected(welcome.next_epoch);
        Ok(Self {
            outbox,
            handover,
            answers,
            out: Some(out),
            from: welcome.next_epoch,
            ended: false,
            pause: None,
            files: VecDeque::new(),
            file: None,
            artifacts: VecDeque::new(),
            artifact: None,
        })
    }

    /// Delivers everything.
    pub(super) async fn run(mut self) -> Result<(), Broken> {
        loop {
            if self.is_all_said() {
                self.out = None;
            }
            if self.artifact.is_none() {
                self.artifact = self.artifacts.pop_front().map(Sending::artifact);
            }
            if self.file.is_none()
                && let Some((key, part)) = self.files.pop_front()
            {
                self.file = Some(Sending::file(self.handover, key, part));
            }
            let open = self.out.is_some();
            let may_send = open && self.pause.is_none();
            tokio::select! {
                next = self.outbox.next(self.from), if may_send && !self.ended => {
                    self.send_next(next.map_err(Broken::Spool)?).await?;
                }
                piece = piece_of(&mut self.file), if may_send && self.file.is_some() => match piece {
                    Some(piece) => self.send(piece).await?,
                    None => self.file = None,
                },
                piece = piece_of(&mut self.artifact), if open && self.artifact.is_some() => match piece {
                    Some(piece) => self.send(piece).await?,
                    None => {
                        let failed = self.artifact.take().and_then(|artifact| artifact.failed());
                        failed.into_iter().for_each(|hash| self.outbox.forget(hash));
                    }
                },
                () = sleep_until(self.pause.unwrap_or_else(Instant::now)), if self.pause.is_some() => {
                    self.pause = None;
                }
                answer = self.answers.message() => match answer.map_err(lost_or_refused)? {
                    Some(answer) => self.hear(answer),
                    None if open => return Err(closed()),
                    None => return Ok(()),
                },
            }
        }
    }

    /// Everything was sent and is durable, every want was answered before the acknowledgement that
    /// followed it.
    fn is_all_said(&self) -> bool {
        self.ended
            && self.outbox.unacknowledged() == 0
            && self.files.is_empty()
            && self.artifacts.is_empty()
            && self.file.is_none()
            && self.artifact.is_none()
    }

    async fn send_next(&mut self, next: Next) -> Result<(), Broken> {
        let body = match next {
            Next::Epoch(epoch) => {
                self.from = epoch.number + 1;
                Body::Epoch(epoch)
            }
            Next::End(end) => {
                self.ended = true;
                Body::End(end)
            }
        };
        self.send(wire::message(body)).await
    }

    async fn send(&self, message: v1::CollectorMessage) -> Result<(), Broken> {
        let Some(out) = &self.out else { return Ok(()) };
        out.send(message).await.map_err(|_closed| closed())
    }

    fn hear(&mut self, answer: v1::SymbolizerMessage) {
        match answer.body {
            Some(Answer::Ack(ack)) => self.outbox.acknowledge(ack.epoch),
            Some(Answer::Slow(slow)) => {
                let pause = slow.milliseconds.min(LONGEST_PAUSE_MS);
                self.pause = Some(Instant::now() + Duration::from_millis(pause.into()));
            }
            Some(Answer::Want(v1::Want { file: Some(wanted), offset, hash_only, .. })) => {
                let part = if hash_only { Part::Hash } else { Part::From(offset) };
                // One that does not say which cannot be answered.
                self.files.extend(wanted.key().map(|key| (key, part)));
            }
            Some(Answer::Want(want)) => {
                let hash = <[u8; 32]>::try_from(want.hash.as_slice()).ok().map(Hash);
                self.artifacts.extend(hash.and_then(|hash| self.outbox.artifact(hash)));
            }
            Some(Answer::Welcome(_)) | None => {}
        }
    }
}

async fn piece_of(what: &mut Option<Sending>) -> Option<v1::CollectorMessage> {
    what.as_mut()?.next().await
}

fn closed() -> Broken {
    Broken::Lost("it closed the stream".to_owned())
}

fn words(status: &tonic::Status) -> String {
    format!("{}: {}", status.code(), status.message())
}

fn lost(status: tonic::Status) -> Broken {
    Broken::Lost(words(&status))
}

/// After the welcome a status is of the symbolizer, or of a connection that broke. Before, it may
/// be of whatever lies between.
fn lost_or_refused(status: tonic::Status) -> Broken {
    match status.code() {
        tonic::Code::InvalidArgument => Broken::EpochRefused(words(&status)),
        _ => lost(status),
    }
}
