//! The gRPC service, thin: greet, hand messages to a [`Keeper`], pass on what it answers.
//!
//! Decides nothing about files or profiles: `record` keeps one log and `serve` many, each with a
//! keeper.

use std::sync::Arc;
use std::time::Duration;

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_message::Body as Reply;
use stackwire_proto::v1::symbolizer_server::{Symbolizer, SymbolizerServer};
use stackwire_proto::{FORMAT, MAX_FRAME_BYTES, v1};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::receive::log::{Answer, LogError};

/// Keeps one stream. Its methods block: they write and sync files.
pub trait Keep: Send + 'static {
    /// Number of the first epoch that is not durable.
    fn next_epoch(&self) -> u64;
    /// Takes a message.
    ///
    /// # Errors
    /// Ends the stream with the error as its status.
    fn add(&mut self, message: &v1::CollectorMessage) -> Result<Answer, LogError>;
    /// How long the collector should wait before it sends more.
    fn pause(&self) -> Option<Duration>;
    /// The stream is over, with or without an end.
    fn finish(self: Box<Self>);
}

/// Makes keepers.
pub trait Accept: Send + Sync + 'static {
    /// Accepts a stream by its greeting.
    ///
    /// # Errors
    /// See [`NotKept`].
    fn accept(
        &self,
        hello: &v1::Hello,
        message: &v1::CollectorMessage,
    ) -> Result<Box<dyn Keep>, NotKept>;
}

/// Why a stream is not kept, in words for the collector.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NotKept {
    /// Nor will it be when the collector tries again.
    #[error("{0}")]
    Refused(String),
    /// Something went wrong here.
    #[error("{0}")]
    Failed(String),
}

/// The service.
#[derive(Debug)]
pub struct Service<A> {
    acceptor: Arc<A>,
    closing: watch::Receiver<bool>,
}

/// A tonic service ready to be served. Streams end when `closing` turns true or its sender is gone.
#[must_use]
pub fn service<A: Accept>(
    acceptor: Arc<A>,
    closing: watch::Receiver<bool>,
) -> SymbolizerServer<Service<A>> {
    SymbolizerServer::new(Service { acceptor, closing })
        .max_decoding_message_size(MAX_FRAME_BYTES as usize + 1024)
}

/// How long a collector may take to greet.
const GREETING: Duration = Duration::from_secs(10);

#[tonic::async_trait]
impl<A: Accept> Symbolizer for Service<A> {
    type CaptureStream = UnboundedReceiverStream<Result<v1::SymbolizerMessage, Status>>;

    async fn capture(
        &self,
        request: Request<Streaming<v1::CollectorMessage>>,
    ) -> Result<Response<Self::CaptureStream>, Status> {
        let mut incoming = request.into_inner();
        let first = tokio::time::timeout(GREETING, incoming.message())
            .await
            .map_err(|_elapsed| Status::deadline_exceeded("no greeting"))??;
        let Some(v1::CollectorMessage { body: Some(Body::Hello(hello)) }) = &first else {
            return Err(Status::invalid_argument("a capture starts with a greeting"));
        };
        if hello.format > FORMAT {
            return Err(Status::failed_precondition(format!(
                "the collector writes format {}, this symbolizer reads up to {FORMAT}; use a newer stackwire",
                hello.format
            )));
        }
        let hello = hello.clone();
        let greeting = first.unwrap_or_default();
        let acceptor = Arc::clone(&self.acceptor);
        let keeper =
            blocking(move || acceptor.accept(&hello, &greeting)).await?.map_err(|why| {
                tracing::warn!("cannot keep a capture: {why}");
                match why {
                    NotKept::Refused(text) => Status::failed_precondition(text),
                    NotKept::Failed(text) => Status::internal(text),
                }
            })?;
        // Unbounded, but answers are few and small: one a message taken.
        let (replies, outgoing) = mpsc::unbounded_channel();
        let welcome = v1::Welcome {
            format: FORMAT,
            symbolizer_version: crate::VERSION.to_owned(),
            next_epoch: keeper.next_epoch(),
        };
        let _ = replies.send(Ok(reply(Reply::Welcome(welcome))));
        tokio::spawn(keep(keeper, incoming, replies, self.closing.clone()));
        Ok(Response::new(UnboundedReceiverStream::new(outgoing)))
    }
}

type Replies = mpsc::UnboundedSender<Result<v1::SymbolizerMessage, Status>>;

async fn keep(
    mut keeper: Box<dyn Keep>,
    mut incoming: Streaming<v1::CollectorMessage>,
    replies: Replies,
    mut closing: watch::Receiver<bool>,
) {
    loop {
        let next = tokio::select! {
            next = incoming.message() => next,
            _ = closing.wait_for(|closing| *closing) => break,
        };
        // A broken connection ends the stream like a closed one: what came is kept.
        let Ok(Some(message)) = next else { break };
        let taken = blocking(move || {
            let answer = keeper.add(&message);
            (keeper, answer)
        });
        let Ok((back, answer)) = taken.await else { return };
        keeper = back;
        match answer {
            Ok(answer) => {
                for hash in answer.want {
                    let want = v1::Want { hash: hash.to_vec(), ..v1::Want::default() };
                    let _ = replies.send(Ok(reply(Reply::Want(want))));
                }
                for (key, offset) in answer.want_files {
                    let file = Some(key.into());
                    let want = v1::Want { file, offset, ..v1::Want::default() };
                    let _ = replies.send(Ok(reply(Reply::Want(want))));
                }
                if let Some(epoch) = answer.ack {
                    let _ = replies.send(Ok(reply(Reply::Ack(v1::Ack { epoch }))));
                }
                if let Some(pause) = keeper.pause() {
                    let milliseconds = pause.as_millis() as u32;
                    let _ = replies.send(Ok(reply(Reply::Slow(v1::Slow { milliseconds }))));
                }
            }
            Err(error) => {
                tracing::warn!("cannot keep a capture: {error}");
                let status = match &error {
                    LogError::Write { .. } => Status::unavailable(error.to_string()),
                    LogError::Seal(_) | LogError::Capture(_) => {
                        Status::invalid_argument(error.to_string())
                    }
                };
                let _ = replies.send(Err(status));
                break;
            }
        }
    }
    // Before the replies close: who waits for the end of the stream finds everything finished.
    let _ = blocking(move || keeper.finish()).await;
    drop(replies);
}

fn reply(body: Reply) -> v1::SymbolizerMessage {
    v1::SymbolizerMessage { body: Some(body) }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Status::internal(format!("a thread of the symbolizer failed: {error}")))
}
