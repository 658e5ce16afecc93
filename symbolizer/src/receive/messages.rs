//! Messages of a stream, as they are received: the framing of gRPC, and memory for what it brings.
//!
//! Not by tonic, which keeps a buffer as large as the largest message for each stream, and decodes
//! what a few bytes make gigabytes of. Here a message has memory of its own from its first byte
//! until whoever took it is done with it; large ones wait until there is some. Called by `grpc.rs`.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body::Body as _;
use prost::Message as _;
use prost::encoding::{WireType, decode_key, decode_varint, skip_field};
use stackwire_proto::v1;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Bytes;

/// Where memory comes from: of the client, then of all. In units of [`UNIT`] bytes.
#[derive(Clone, Debug)]
pub struct Shares {
    /// Of the client.
    pub own: Arc<Semaphore>,
    /// Of all clients.
    pub all: Arc<Semaphore>,
}

/// Bytes of a permit.
pub const UNIT: u64 = 1 << 10;

/// Messages up to this size need no permit: as many bytes are read from a connection at once
/// anyway.
const FREE: u32 = 64 << 10;
/// How long a message may take once there is memory for it.
const MESSAGE: Duration = Duration::from_secs(30);
/// Bytes of a greeting, and of an end: lists of processes and of their names are in them. A list of
/// what is empty takes fifty times as much in memory.
pub const MAX_GREETING: usize = 256 << 10;

/// A message with the memory it came in.
#[derive(Debug)]
pub struct Received {
    /// It.
    pub message: v1::CollectorMessage,
    /// Bytes it had.
    pub bytes: usize,
    /// Given back when it is dropped.
    pub memory: Memory,
}

/// Memory that a message came in.
#[derive(Debug)]
pub struct Memory(#[expect(dead_code, reason = "it is held")] Option<Permits>);

type Permits = [OwnedSemaphorePermit; 2];
type Acquire = Pin<Box<dyn Future<Output = Option<Permits>> + Send>>;

/// The messages of a request.
pub struct Messages {
    body: Body,
    /// Without any, all memory is given.
    shares: Option<Shares>,
    most: u32,
    /// What has come and was not looked at.
    data: Bytes,
    header: Header,
    incoming: Option<Incoming>,
    /// How it ended, for whoever asks next.
    over: Option<Result<(), Status>>,
}

#[derive(Default)]
struct Header {
    bytes: [u8; 5],
    have: usize,
}

/// A message that is not whole.
struct Incoming {
    length: usize,
    bytes: Vec<u8>,
    memory: Option<Permits>,
    /// Until there is memory.
    acquire: Option<Acquire>,
    late: Option<Pin<Box<Sleep>>>,
}

impl Messages {
    /// Those of a body, none larger than `most` bytes.
    #[must_use]
    pub fn new(body: Body, shares: Option<Shares>, most: u32) -> Self {
        let (data, header) = (Bytes::new(), Header::default());
        Self { body, shares, most, data, header, incoming: None, over: None }
    }

    /// Waits for the next; `None` at the end. Nothing is lost when the wait is given up.
    ///
    /// # Errors
    /// What is wrong with it, for the collector to read.
    pub async fn next(&mut self) -> Result<Option<Received>, Status> {
        poll_fn(|context| self.poll(context)).await
    }

    /// The next one, if it has come already; an end and errors are left for [`Messages::next`].
    pub async fn ready(&mut self) -> Option<Received> {
        poll_fn(|context| match self.poll(context) {
            Poll::Ready(Ok(next)) => Poll::Ready(next),
            Poll::Ready(Err(_)) | Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Received>, Status>> {
        if let Some(over) = &self.over {
            return Poll::Ready(over.clone().map(|()| None));
        }
        let next = ready!(self.poll_on(context));
        self.over = match &next {
            Ok(Some(_)) => None,
            Ok(None) => Some(Ok(())),
            Err(status) => Some(Err(status.clone())),
        };
        Poll::Ready(next)
    }

    fn poll_on(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Received>, Status>> {
        loop {
            if let Some(incoming) = &mut self.incoming {
                if let Some(acquire) = &mut incoming.acquire {
                    incoming.memory = ready!(acquire.as_mut().poll(context));
                    incoming.acquire = None;
                    incoming.late = Some(Box::pin(tokio::time::sleep(MESSAGE)));
                    incoming.bytes.reserve_exact(incoming.length);
                }
                let wanted = incoming.length - incoming.bytes.len();
                let come = self.data.split_to(wanted.min(self.data.len()));
                incoming.bytes.extend_from_slice(&come);
                if incoming.bytes.len() == incoming.length
                    && let Some(whole) = self.incoming.take()
                {
                    return Poll::Ready(whole.decode().map(Some));
                }
            } else if !self.data.is_empty() {
                let wanted = self.header.bytes.len() - self.header.have;
                let come = self.data.split_to(wanted.min(self.data.len()));
                let have = self.header.have + come.len();
                self.header.bytes[self.header.have..have].copy_from_slice(&come);
                self.header.have = have;
                if have == self.header.bytes.len() {
                    let Header { bytes: [flag, length @ ..], .. } =
                        std::mem::take(&mut self.header);
                    self.incoming = Some(self.begin(flag, u32::from_be_bytes(length))?);
                }
                continue;
            }
            if let Some(late) = self.incoming.as_mut().and_then(|it| it.late.as_mut())
                && late.as_mut().poll(context).is_ready()
            {
                let why = format!("a message did not come within {} s", MESSAGE.as_secs());
                return Poll::Ready(Err(Status::deadline_exceeded(why)));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => self.data = frame.into_data().unwrap_or_default(),
                // What is not whole then was never sent.
                None => return Poll::Ready(Ok(None)),
                Some(Err(status)) => return Poll::Ready(Err(status)),
            }
        }
    }

    fn begin(&self, flag: u8, length: u32) -> Result<Incoming, Status> {
        if flag != 0 {
            return Err(Status::unimplemented("messages are not compressed here"));
        }
        if length > self.most {
            let most = self.most;
            let why = format!("a message of {length} bytes; the largest may have {most}");
            // A collector that hears this sends the message no more.
            return Err(Status::invalid_argument(why));
        }
        let acquire = match &self.shares {
            Some(Shares { own, all }) if length > FREE => {
                let (own, all) = (Arc::clone(own), Arc::clone(all));
                let units = length.div_ceil(UNIT as u32);
                let acquire = async move {
                    // Neither is ever closed.
                    let own = own.acquire_many_owned(units).await.ok()?;
                    Some([own, all.acquire_many_owned(units).await.ok()?])
                };
                Some(Box::pin(acquire) as Acquire)
            }
            _ => None,
        };
        let (bytes, length) = (Vec::new(), length as usize);
        Ok(Incoming { length, bytes, memory: None, acquire, late: None })
    }
}

impl Incoming {
    fn decode(self) -> Result<Received, Status> {
        if listed(&self.bytes) > MAX_GREETING {
            let why = format!("a greeting has {MAX_GREETING} bytes at most");
            return Err(Status::invalid_argument(why));
        }
        let message = v1::CollectorMessage::decode(self.bytes.as_slice());
        let message = message.map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Received { message, bytes: self.length, memory: Memory(self.memory) })
    }
}

/// Bytes of all that is not an epoch and not a piece of an artifact: those two have no lists.
fn listed(mut bytes: &[u8]) -> usize {
    let mut listed = 0;
    while let Ok((tag, wire_type)) = decode_key(&mut bytes) {
        let before = bytes.len();
        let skipped = match wire_type {
            WireType::LengthDelimited => decode_varint(&mut bytes)
                .ok()
                .and_then(|length| usize::try_from(length).ok())
                .and_then(|length| bytes.split_at_checked(length))
                .map(|(_, rest)| bytes = rest)
                .is_some(),
            _ => skip_field(wire_type, tag, &mut bytes, Default::default()).is_ok(),
        };
        if !skipped {
            break;
        }
        if !matches!(tag, 2 | 3) {
            listed += before - bytes.len();
        }
    }
    listed
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, Full};
    use proptest::prelude::*;
    use stackwire_proto::v1::collector_message::Body as Kind;

    use super::*;

    fn epoch(bytes: usize) -> v1::CollectorMessage {
        let sealed = v1::SealedEpoch { zstd: vec![7; bytes], ..v1::SealedEpoch::default() };
        v1::CollectorMessage { body: Some(Kind::Epoch(sealed)) }
    }

    fn framed(message: &v1::CollectorMessage) -> Vec<u8> {
        let content = message.encode_to_vec();
        [&[0][..], &(content.len() as u32).to_be_bytes(), &content].concat()
    }

    fn messages(bytes: Vec<u8>, shares: Option<Shares>) -> Messages {
        let body = Full::new(Bytes::from(bytes)).map_err(|never| match never {});
        Messages::new(Body::new(body), shares, 1 << 20)
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.unwrap().block_on(work)
    }

    proptest! {
        #[test]
        fn messages_are_found_however_they_are_cut(
            sizes in prop::collection::vec(0usize..300, 1..10),
            cuts in prop::collection::vec(1usize..90, 1..30),
        ) {
            let sent: Vec<_> = sizes.iter().map(|size| epoch(*size)).collect();
            let stream: Vec<u8> = sent.iter().flat_map(framed).collect();
            let (mut rest, mut frames) = (stream.as_slice(), Vec::new());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (frame, left) = rest.split_at((*cut).min(rest.len()));
                frames.push(Ok::<_, Status>(http_body::Frame::data(Bytes::copy_from_slice(frame))));
                rest = left;
            }
            let body = Body::new(http_body_util::StreamBody::new(tokio_stream::iter(frames)));
            let mut messages = Messages::new(body, None, 1 << 20);
            let come = run(async {
                let mut come = Vec::new();
                while let Some(received) = messages.next().await.unwrap() {
                    come.push(received.message);
                }
                come
            });
            prop_assert_eq!(come, sent);
        }
    }

    #[test]
    fn large_messages_wait_for_memory_and_give_it_back() {
        let semaphore = || Arc::new(Semaphore::new(200));
        let shares = Shares { own: semaphore(), all: semaphore() };
        run(async {
            let mut first = messages(framed(&epoch(150 << 10)), Some(shares.clone()));
            let received = first.next().await.unwrap().unwrap();
            assert_eq!(shares.all.available_permits(), 200 - 151);
            let mut second = messages(framed(&epoch(100 << 10)), Some(shares.clone()));
            let wait = Duration::from_millis(50);
            assert!(tokio::time::timeout(wait, second.next()).await.is_err());
            drop(received);
            assert!(second.next().await.unwrap().is_some());
            assert_eq!(shares.own.available_permits(), 200);
            // Small ones need none.
            let all = Arc::clone(&shares.all).acquire_many_owned(200).await.unwrap();
            let mut small = messages(framed(&epoch(1000)), Some(shares.clone()));
            assert!(small.ready().await.is_some());
            drop(all);
        });
    }

    #[test]
    fn what_is_too_large_is_refused_before_it_comes_or_is_decoded() {
        let refused = |bytes: Vec<u8>| {
            let status = run(async { messages(bytes, None).next().await.unwrap_err() });
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            status.message().to_owned()
        };
        let header = framed(&epoch(1 << 20))[..5].to_vec();
        assert!(refused(header).contains("the largest may have 1048576"));
        // Whoever looked whether there is more does not take the end from who asks next.
        let stream = [framed(&epoch(10)), framed(&epoch(1 << 20))].concat();
        run(async {
            let mut messages = messages(stream, None);
            assert!(messages.ready().await.is_some() && messages.ready().await.is_none());
            for _again in 0..2 {
                assert_eq!(messages.next().await.unwrap_err().code(), tonic::Code::InvalidArgument);
            }
        });
        // Two bytes each, and a hundred in memory; in one greeting, or in several that are merged.
        let sampling = |events: usize| v1::Sampling {
            events: vec![v1::Event::default(); events],
            ..v1::Sampling::default()
        };
        let greeting = |events| {
            let hello = v1::Hello { sampling: Some(sampling(events)), ..v1::Hello::default() };
            v1::CollectorMessage { body: Some(Kind::Hello(hello)) }.encode_to_vec()
        };
        for content in [greeting(200_000), greeting(60_000).repeat(4)] {
            let bytes = [&[0][..], &(content.len() as u32).to_be_bytes(), &content].concat();
            assert!(refused(bytes).contains("a greeting has"));
        }
    }
}
