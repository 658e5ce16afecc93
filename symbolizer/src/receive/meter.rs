//! Memory of messages that are on their way: taken before a message is received, so that many
//! streams with large messages wait for each other and do not add up.
//!
//! Reads the framing of gRPC and nothing else: a byte, four bytes of length, the message.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Bytes, Service, http};
use tonic::server::NamedService;

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

/// Messages up to this size need no permit: as many are read from a connection at once anyway.
const FREE: u32 = 64 << 10;
/// How long a message may take from its first byte to its last.
const MESSAGE: Duration = Duration::from_secs(30);

/// Finds the shares of a request.
pub trait Share: Send + Sync + 'static {
    /// Those of whoever sends it; none: it is refused before it is read.
    fn of(&self, extensions: &http::Extensions, headers: &http::HeaderMap) -> Option<Shares>;
}

/// A service whose requests are metered.
#[derive(Debug)]
pub struct Metered<S, M> {
    inner: S,
    shares: Arc<M>,
    most: u32,
}

impl<S, M> Metered<S, M> {
    /// Messages have at most `most` bytes.
    pub fn new(inner: S, shares: Arc<M>, most: u32) -> Self {
        Self { inner, shares, most }
    }
}

impl<S: Clone, M> Clone for Metered<S, M> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shares: Arc::clone(&self.shares), most: self.most }
    }
}

impl<S: NamedService, M> NamedService for Metered<S, M> {
    const NAME: &'static str = S::NAME;
}

impl<S, M> Service<http::Request<Body>> for Metered<S, M>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    M: Share,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> S::Future {
        let (parts, body) = request.into_parts();
        let shares = self.shares.of(&parts.extensions, &parts.headers);
        let body = match shares {
            Some(shares) => Body::new(Metering::new(body, shares, self.most)),
            None => body,
        };
        self.inner.call(http::Request::from_parts(parts, body))
    }
}

/// A body as it is received.
struct Metering {
    body: Body,
    shares: Shares,
    most: u32,
    framing: Framing,
    /// For the message that is being received.
    held: Option<Permits>,
    /// What waits for its permits.
    waiting: Option<(Pin<Box<Acquire>>, Bytes)>,
    /// When the message has to be there.
    late: Option<Pin<Box<Sleep>>>,
}

type Permits = [OwnedSemaphorePermit; 2];
type Acquire = dyn Future<Output = Option<Permits>> + Send;

impl Metering {
    fn new(body: Body, shares: Shares, most: u32) -> Self {
        let framing = Framing::default();
        Self { body, shares, most, framing, held: None, waiting: None, late: None }
    }

    /// Takes what a message needs, once a frame has its beginning.
    fn begin(&mut self, length: u32, frame: Bytes) {
        let Shares { own, all } = self.shares.clone();
        let units = length.div_ceil(UNIT as u32);
        self.waiting = Some((
            Box::pin(async move {
                // Neither is ever closed.
                let own = own.acquire_many_owned(units).await.ok()?;
                Some([own, all.acquire_many_owned(units).await.ok()?])
            }),
            frame,
        ));
        self.late = Some(Box::pin(tokio::time::sleep(MESSAGE)));
    }

    fn is_late(&mut self, context: &mut Context<'_>) -> bool {
        self.late.as_mut().is_some_and(|late| late.as_mut().poll(context).is_ready())
    }
}

impl http_body::Body for Metering {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.framing.is_between() && this.waiting.is_none() {
            // The message before is decoded, and somebody else's concern.
            (this.held, this.late) = (None, None);
        }
        if this.is_late(context) {
            let why = format!("a message did not come within {} s", MESSAGE.as_secs());
            return Poll::Ready(Some(Err(Status::deadline_exceeded(why))));
        }
        if let Some((acquire, frame)) = &mut this.waiting {
            let Poll::Ready(permits) = acquire.as_mut().poll(context) else { return Poll::Pending };
            let frame = std::mem::take(frame);
            (this.held, this.waiting) = (permits, None);
            return Poll::Ready(Some(Ok(Frame::data(frame))));
        }
        match Pin::new(&mut this.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => match this.framing.read(&data, this.most) {
                    Ok(Some(length)) if length > FREE => {
                        this.begin(length, data);
                        self.poll_frame(context)
                    }
                    Ok(_) => Poll::Ready(Some(Ok(Frame::data(data)))),
                    Err(length) => {
                        let most = this.most;
                        let why =
                            format!("a message of {length} bytes; the largest may have {most}");
                        Poll::Ready(Some(Err(Status::resource_exhausted(why))))
                    }
                },
                Err(frame) => Poll::Ready(Some(Ok(frame))),
            },
            other => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Where a stream of bytes is, in messages.
#[derive(Debug, Default)]
struct Framing {
    /// Bytes of the header that have come.
    header: [u8; 5],
    have: usize,
    /// Bytes of the message to come.
    left: u32,
}

impl Framing {
    /// No part of a message has come and not all of it.
    fn is_between(&self) -> bool {
        self.have == 0 && self.left == 0
    }

    /// Goes on by some bytes. The length of the message that is not whole then, if it began in
    /// them; or that of one that is longer than `most`.
    fn read(&mut self, mut bytes: &[u8], most: u32) -> Result<Option<u32>, u32> {
        let mut begun = None;
        while !bytes.is_empty() {
            if self.left > 0 {
                let taken = bytes.len().min(self.left as usize);
                self.left -= taken as u32;
                bytes = &bytes[taken..];
                continue;
            }
            begun = None;
            let taken = bytes.len().min(self.header.len() - self.have);
            self.header[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == self.header.len() {
                let [_, length @ ..] = self.header;
                (self.have, self.left) = (0, u32::from_be_bytes(length));
                if self.left > most {
                    return Err(self.left);
                }
                begun = Some(self.left);
            }
        }
        Ok(begun.filter(|_| self.left > 0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(length: u32) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend(length.to_be_bytes());
        bytes.extend(vec![7; length as usize]);
        bytes
    }

    proptest! {
        #[test]
        fn messages_are_found_however_they_are_cut(
            lengths in prop::collection::vec(0u32..200, 1..20),
            cuts in prop::collection::vec(1usize..50, 1..200),
        ) {
            let stream: Vec<u8> = lengths.iter().flat_map(|length| message(*length)).collect();
            let mut framing = Framing::default();
            let (mut rest, mut cuts) = (stream.as_slice(), cuts.iter().cycle());
            let mut at = 0;
            while !rest.is_empty() {
                let cut = (*cuts.next().unwrap()).min(rest.len());
                let begun = framing.read(&rest[..cut], 1000).unwrap();
                (rest, at) = (&rest[cut..], at + cut);
                // Where the messages really end.
                let mut end = 0;
                let inside = lengths.iter().find_map(|length| {
                    let begin = end;
                    end += 5 + *length as usize;
                    (at > begin && at < end).then_some((begin, *length))
                });
                prop_assert_eq!(framing.is_between(), inside.is_none());
                let is_begun = inside.filter(|(begin, _)| begin + 5 > at - cut && begin + 5 <= at);
                prop_assert_eq!(begun, is_begun.map(|(_, length)| length));
            }
        }
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_by_its_header() {
        assert_eq!(Framing::default().read(&message(11)[..5], 10), Err(11));
        assert_eq!(Framing::default().read(&message(10)[..5], 10), Ok(Some(10)));
    }

    #[tokio::test]
    async fn messages_wait_for_memory() {
        use http_body_util::BodyExt as _;
        let shares =
            Shares { own: Arc::new(Semaphore::new(200)), all: Arc::new(Semaphore::new(200)) };
        let metering = |bytes: Vec<u8>| {
            let body =
                Body::new(http_body_util::Full::new(Bytes::from(bytes)).map_err(|e| match e {}));
            Metering::new(body, shares.clone(), 1 << 20)
        };
        // Not all of a message of 150 KiB.
        let mut first = metering(message(150 << 10)[..1000].to_vec());
        assert!(first.frame().await.unwrap().is_ok());
        assert_eq!(shares.all.available_permits(), 50);
        let mut second = metering(message(100 << 10)[..1000].to_vec());
        let waits = tokio::time::timeout(Duration::from_millis(50), second.frame()).await;
        assert!(waits.is_err());
        drop(first);
        assert!(second.frame().await.unwrap().is_ok());
        drop(second);
        assert_eq!(shares.own.available_permits(), 200);
        // Small ones do not.
        let all = Arc::clone(&shares.all).acquire_many_owned(200).await.unwrap();
        assert!(metering(message(1000)).frame().await.unwrap().is_ok());
        drop(all);
    }
}
