//! The gRPC service, thin: greet, hand messages to a [`Keep`], pass on what it answers. Messages
//! are received by `messages.rs`.
//!
//! Decides nothing about files or profiles: `record` keeps one log and `serve` many, each with a
//! keeper.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_message::Body as Reply;
use stackwire_proto::v1::symbolizer_server::SERVICE_NAME;
use stackwire_proto::{FORMAT, MAX_FRAME_BYTES, SealError, v1};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::body::Body as HttpBody;
use tonic::codec::{Codec as _, EncodeBody, SingleMessageCompressionOverride};
use tonic::codegen::http;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use crate::capture::CaptureError;
use crate::receive::handed::FileWanted;
use crate::receive::log::LogError;
use crate::receive::messages::{Memory, Messages, Received, Shares};
use crate::receive::peer::{Caller, Connected};
use crate::receive::wants::Wanted;

/// Keeps one stream. Its methods block: they write and sync files.
pub trait Keep: Send + 'static {
    /// Number of the first epoch that is not durable.
    fn next_epoch(&self) -> u64;
    /// How long to wait, after these, before more are read.
    fn pace(&self, _messages: &[v1::CollectorMessage]) -> Duration {
        Duration::ZERO
    }
    /// Messages were acknowledged, this long after they came.
    fn acknowledged(&self, _after: Duration) {}
    /// The stream is cut.
    fn cut(&self, why: &Cut<'_>) {
        tracing::warn!("a stream is cut: {why}");
    }
    /// Takes messages, in order, as many as it can.
    fn add(&mut self, messages: &[v1::CollectorMessage]) -> Taken;
    /// The stream is over, with or without an end.
    fn finish(self: Box<Self>);
}

/// What became of messages.
#[derive(Debug, Default)]
pub struct Taken {
    /// How many of them were taken.
    pub messages: usize,
    /// What to ask for, before the acknowledgement.
    pub wanted: Wanted,
    /// Durable up to this epoch.
    pub ack: Option<u64>,
    /// Why the next one was not taken.
    pub stopped: Option<Stopped>,
}

/// Why a message is not taken.
#[derive(Debug, thiserror::Error)]
pub enum Stopped {
    /// It may be taken later: the disk is full, or more is to be done than can be.
    #[error("{0}")]
    Later(String),
    /// It cannot be written, and nobody will wait until it can be.
    #[error(transparent)]
    Write(#[from] LogError),
    /// An epoch that does not open.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// An epoch that does not hold together.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// An epoch behind a later one.
    #[error("epoch {number} came after it, or after a later one")]
    Order {
        /// Which.
        number: u64,
    },
    /// More than its sender may send.
    #[error("{0}")]
    TooMuch(String),
}

/// Why a stream is cut.
#[derive(Debug, thiserror::Error)]
pub enum Cut<'a> {
    /// Its connection broke.
    #[error("{}", .0.message())]
    Broken(&'a Status),
    /// What came is no message that is taken here.
    #[error("{}", .0.message())]
    NoMessage(&'a Status),
    /// A message is not taken.
    #[error("{0}")]
    Stopped(&'a Stopped),
}

impl<'a> Cut<'a> {
    /// By what receiving it ended with.
    fn by(status: &'a Status) -> Self {
        match status.code() {
            Code::InvalidArgument | Code::DeadlineExceeded | Code::Unimplemented => {
                Self::NoMessage(status)
            }
            _ => Self::Broken(status),
        }
    }
}

/// A stream that is accepted.
pub struct Accepted {
    /// Who keeps it.
    pub keeper: Box<dyn Keep>,
    /// Turns true, or loses its sender, when the stream is to make room for another of its capture.
    pub replaced: watch::Receiver<bool>,
    /// One is needed to keep a thread busy: other streams of the same sender have them too.
    pub turns: Arc<Semaphore>,
}

/// Why somebody is not let in, in words for the caller.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NotAdmitted {
    /// Nobody knows who it is.
    #[error("{0}")]
    Unknown(String),
    /// A web page had its browser send this.
    #[error("web pages are not served here")]
    Page,
    /// It has as much as it may have.
    #[error("{0}")]
    TooMuch(String),
}

/// Makes keepers.
pub trait Accept: Send + Sync + 'static {
    /// Who sends a stream.
    type Name: Send;

    /// Lets a caller in, before anything it sends is read; `None`: nobody knows who it is.
    ///
    /// # Errors
    /// See [`NotAdmitted`].
    fn admit(&self, caller: Option<&Caller>) -> Result<Self::Name, NotAdmitted>;

    /// Memory for what somebody sends, and how large a message may be; none: as much as comes.
    fn memory(&self, _name: &Self::Name) -> (Option<Shares>, u32) {
        (None, MAX_FRAME_BYTES + 1024)
    }

    /// A stream is over before it is accepted.
    fn cut(&self, _name: &Self::Name, why: &Cut<'_>) {
        tracing::warn!("a stream is refused: {why}");
    }

    /// Accepts a stream by its greeting.
    ///
    /// # Errors
    /// See [`NotKept`].
    fn accept(
        &self,
        name: Self::Name,
        hello: v1::Hello,
    ) -> impl Future<Output = Result<Accepted, NotKept>> + Send + '_;
}

/// Why a stream is not kept, in words for the collector.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NotKept {
    /// The greeting is none.
    #[error("{0}")]
    Malformed(&'static str),
    /// The capture is another's.
    #[error("this capture was begun by somebody else")]
    NotTheirs,
    /// Something went wrong here, or is in the way; the collector may try again.
    #[error("{0}")]
    Failed(String),
}

/// The service, ready to be served.
#[derive(Debug)]
pub struct Service<A> {
    acceptor: Arc<A>,
    closing: watch::Receiver<bool>,
}

impl<A> Clone for Service<A> {
    fn clone(&self) -> Self {
        Self { acceptor: Arc::clone(&self.acceptor), closing: self.closing.clone() }
    }
}

/// A service. Streams end when `closing` turns true or its sender is gone.
#[must_use]
pub fn service<A: Accept>(acceptor: Arc<A>, closing: watch::Receiver<bool>) -> Service<A> {
    Service { acceptor, closing }
}

impl<A> tonic::server::NamedService for Service<A> {
    const NAME: &'static str = SERVICE_NAME;
}

/// Its one method.
const CAPTURE: &str = "/stackwire.v1.Symbolizer/Capture";

impl<A: Accept> tonic::codegen::Service<http::Request<HttpBody>> for Service<A> {
    type Response = http::Response<HttpBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<HttpBody>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            if parts.uri.path() != CAPTURE {
                return Ok(Status::unimplemented("there is no such method").into_http());
            }
            // Web pages have browsers send other kinds, in HTTP/1.
            let kind = parts.headers.get(http::header::CONTENT_TYPE).map(|kind| kind.as_bytes());
            let is_grpc = kind.is_some_and(|kind| kind.starts_with(b"application/grpc"));
            if !is_grpc || parts.version != http::Version::HTTP_2 {
                let mut response = http::Response::new(HttpBody::empty());
                *response.status_mut() = http::StatusCode::UNSUPPORTED_MEDIA_TYPE;
                return Ok(response);
            }
            Ok(match service.capture(&parts, body).await {
                Ok(answers) => respond(answers),
                Err(status) => status.into_http(),
            })
        })
    }
}

/// What is answered, one after the other.
type Answers = UnboundedReceiverStream<Result<v1::SymbolizerMessage, Status>>;

fn respond(answers: Answers) -> http::Response<HttpBody> {
    let encoder = ProstCodec::<v1::SymbolizerMessage, v1::CollectorMessage>::default().encoder();
    let one_by_one = SingleMessageCompressionOverride::default();
    let body = EncodeBody::new_server(encoder, answers, None, one_by_one, None);
    let mut response = http::Response::new(HttpBody::new(body));
    let kind = http::HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response
}

/// Bytes of the name of a host and of versions.
const MAX_WORD: usize = 255;
/// Events and counters of a capture, and names that choose processes.
const MAX_CHOSEN: usize = 1024;
/// How long a collector may take to greet.
const GREETING: Duration = Duration::from_secs(10);
/// How long to wait before a message is tried again that cannot be taken now. The collector is
/// asked to pause for as long.
const LATER: Duration = Duration::from_secs(1);
/// Bytes and number of messages that are taken together, with one sync for all.
const GROUP_BYTES: usize = 1 << 20;
const GROUP_MESSAGES: usize = 64;
/// Entries of the lists of an end: one for each reason.
const MAX_LISTED: usize = 1024;

impl<A: Accept> Service<A> {
    async fn capture(
        &self,
        parts: &http::request::Parts,
        body: HttpBody,
    ) -> Result<Answers, Status> {
        let connected: Option<&Connected> = parts.extensions.get();
        let caller = Caller::of(connected, (parts.version, &parts.uri), &parts.headers);
        let name = self.acceptor.admit(caller.as_ref()).map_err(|why| {
            let peer = Connected::from(connected);
            tracing::warn!(peer, "a stream from {peer} is refused: {why}");
            match why {
                NotAdmitted::Unknown(why) => Status::unauthenticated(why),
                NotAdmitted::Page => Status::permission_denied(why.to_string()),
                NotAdmitted::TooMuch(why) => Status::resource_exhausted(why),
            }
        })?;
        if let Some(Connected { admitted, .. }) = connected {
            admitted.set();
        }
        let (shares, most) = self.acceptor.memory(&name);
        let mut incoming = Messages::new(body, shares, most);
        let hello = greeting(&mut incoming).await;
        let hello = hello.inspect_err(|why| self.acceptor.cut(&name, &Cut::by(why)))?;
        // Unbounded, but answers are few and small: one a message taken.
        let (replies, outgoing) = mpsc::unbounded_channel();
        if hello.format > FORMAT {
            // By the format in the welcome a collector knows that there is no use in coming back:
            // a status may be of whatever lies between.
            let why = Status::failed_precondition(format!(
                "the collector writes format {}, this symbolizer reads up to {FORMAT}; use a newer stackwire",
                hello.format
            ));
            self.acceptor.cut(&name, &Cut::NoMessage(&why));
            let _ = replies.send(Ok(welcome(0)));
            let _ = replies.send(Err(why));
            return Ok(UnboundedReceiverStream::new(outgoing));
        }
        let Accepted { keeper, replaced, turns } =
            self.acceptor.accept(name, hello).await.map_err(|why| {
                tracing::warn!("cannot keep a capture: {why}");
                match &why {
                    NotKept::Malformed(text) => Status::invalid_argument(*text),
                    NotKept::NotTheirs => Status::permission_denied(why.to_string()),
                    NotKept::Failed(text) => Status::unavailable(text.as_str()),
                }
            })?;
        let _ = replies.send(Ok(welcome(keeper.next_epoch())));
        let closing = self.closing.clone();
        let stream = Stream { incoming, replies, replaced, turns, closing };
        tokio::spawn(stream.keep(keeper));
        Ok(UnboundedReceiverStream::new(outgoing))
    }
}

/// Waits for what a stream begins with.
async fn greeting(incoming: &mut Messages) -> Result<v1::Hello, Status> {
    let first = tokio::time::timeout(GREETING, incoming.next())
        .await
        .map_err(|_elapsed| Status::deadline_exceeded("no greeting"))??;
    let first = first.map(|received| received.message);
    let Some(v1::CollectorMessage { body: Some(Body::Hello(hello)) }) = first else {
        return Err(Status::invalid_argument("a capture starts with a greeting"));
    };
    match too_long(&hello) {
        Some(why) => Err(Status::invalid_argument(why)),
        None => Ok(hello),
    }
}

/// What is wrong with a greeting that is kept for as long as its stream is.
fn too_long(hello: &v1::Hello) -> Option<String> {
    let words = [&hello.hostname, &hello.collector_version, &hello.kernel_release, &hello.machine];
    if words.iter().any(|word| word.len() > MAX_WORD) {
        return Some(format!("a word of its greeting has more than {MAX_WORD} bytes"));
    }
    let sampling = hello.sampling.as_ref()?;
    let lists = [
        sampling.events.len(),
        sampling.counters.len(),
        sampling.comms.len(),
        sampling.containers.len(),
        sampling.pods.len(),
    ];
    (lists.iter().any(|length| *length > MAX_CHOSEN))
        .then(|| format!("a list of its greeting has more than {MAX_CHOSEN} entries"))
}

struct Stream {
    incoming: Messages,
    replies: mpsc::UnboundedSender<Result<v1::SymbolizerMessage, Status>>,
    replaced: watch::Receiver<bool>,
    turns: Arc<Semaphore>,
    closing: watch::Receiver<bool>,
}

impl Stream {
    async fn keep(mut self, mut keeper: Box<dyn Keep>) {
        loop {
            let group = tokio::select! {
                group = group(&mut self.incoming) => group,
                () = over(&mut self.replaced, &mut self.closing) => break,
            };
            // The memory they came in is given back when they are written.
            let (mut messages, memory) = match group {
                Ok(received) => received,
                Err(status) => {
                    keeper.cut(&Cut::by(&status));
                    // Where the connection is broken, to nobody.
                    let _ = self.replies.send(Err(status));
                    break;
                }
            };
            if messages.is_empty() {
                break;
            }
            let come = Instant::now();
            let pause = keeper.pace(&messages);
            let mut failed = None;
            while !messages.is_empty() {
                // Never closed.
                let turn = Arc::clone(&self.turns).acquire_owned().await;
                let work = blocking(move || {
                    let taken = keeper.add(&messages);
                    (keeper, messages, taken)
                });
                let Ok((back, rest, taken)) = work.await else { return };
                drop(turn);
                (keeper, messages) = (back, rest);
                messages.drain(..taken.messages);
                self.answer(&taken);
                if taken.ack.is_some() {
                    keeper.acknowledged(come.elapsed());
                }
                match taken.stopped {
                    None => {}
                    Some(Stopped::Later(why)) => {
                        tracing::debug!("a collector has to wait: {why}");
                        if !self.pause(LATER).await {
                            break;
                        }
                    }
                    Some(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            drop(memory);
            if let Some(error) = failed {
                let status = match &error {
                    Stopped::Later(_) | Stopped::Write(_) => Status::unavailable,
                    Stopped::Seal(_)
                    | Stopped::Capture(_)
                    | Stopped::Order { .. }
                    | Stopped::TooMuch(_) => Status::invalid_argument,
                };
                keeper.cut(&Cut::Stopped(&error));
                let _ = self.replies.send(Err(status(error.to_string())));
                break;
            }
            if *self.replaced.borrow() || *self.closing.borrow() {
                break;
            }
            if !pause.is_zero() && !self.pause(pause).await {
                break;
            }
        }
        // Before the replies close: who waits for the end of the stream finds everything finished.
        let _ = blocking(move || keeper.finish()).await;
    }

    /// Waits, as the collector is asked to; false when the stream is over.
    async fn pause(&mut self, time: Duration) -> bool {
        let milliseconds = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        self.reply(Reply::Slow(v1::Slow { milliseconds }));
        tokio::select! {
            () = tokio::time::sleep(time) => true,
            () = over(&mut self.replaced, &mut self.closing) => false,
        }
    }

    fn answer(&self, taken: &Taken) {
        for hash in &taken.wanted.artifacts {
            self.reply(Reply::Want(v1::Want { hash: hash.to_vec(), ..v1::Want::default() }));
        }
        for &FileWanted { key, offset, hash_only } in &taken.wanted.files {
            let (hash, file) = (Vec::new(), Some(key.into()));
            self.reply(Reply::Want(v1::Want { hash, file, offset, hash_only }));
        }
        if let Some(epoch) = taken.ack {
            self.reply(Reply::Ack(v1::Ack { epoch }));
        }
    }

    /// The collector may be gone, and then needs no answer.
    fn reply(&self, body: Reply) {
        let _ = self.replies.send(Ok(v1::SymbolizerMessage { body: Some(body) }));
    }
}

/// Messages that have come, waiting for the first alone, with the memory they came in; none at the
/// end of the stream.
///
/// # Errors
/// A connection that broke, or what is refused. What came before it is kept.
async fn group(
    incoming: &mut Messages,
) -> Result<(Vec<v1::CollectorMessage>, Vec<Memory>), Status> {
    let (mut messages, mut memory) = (Vec::new(), Vec::new());
    let mut bytes = 0;
    let mut next = incoming.next().await?;
    while let Some(Received { message, bytes: more, memory: held }) = next {
        let is_odd = match &message.body {
            Some(Body::Hello(_)) => true,
            Some(Body::End(end)) => end.lost.len().max(end.python.len()) > MAX_LISTED,
            _ => false,
        };
        if is_odd {
            return Err(Status::invalid_argument("a second greeting, or an end that is none"));
        }
        messages.push(message);
        memory.push(held);
        bytes += more;
        if bytes >= GROUP_BYTES || messages.len() >= GROUP_MESSAGES {
            break;
        }
        next = incoming.ready().await;
    }
    Ok((messages, memory))
}

/// Waits until the stream is to end from this side.
async fn over(replaced: &mut watch::Receiver<bool>, closing: &mut watch::Receiver<bool>) {
    tokio::select! {
        _ = replaced.wait_for(|replaced| *replaced) => {}
        _ = closing.wait_for(|closing| *closing) => {}
    }
}

fn welcome(next_epoch: u64) -> v1::SymbolizerMessage {
    let symbolizer_version = crate::VERSION.to_owned();
    let welcome = v1::Welcome { format: FORMAT, symbolizer_version, next_epoch };
    v1::SymbolizerMessage { body: Some(Reply::Welcome(welcome)) }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| Status::internal(format!("a thread of the symbolizer failed: {error}")))
}
