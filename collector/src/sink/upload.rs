//! The gRPC sink: one bidirectional stream, epochs sent as they come and kept until acknowledged,
//! artifacts and files sent when wanted, a new connection when one breaks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use stackwire_model::ExecutableKey;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::v1::symbolizer_message::Body as Answer;
use stackwire_proto::{FORMAT, v1};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use super::SinkError;
use super::sending::Sending;
use crate::artifact::{Artifact, Hash};
use crate::handover::Handover;
use crate::outbox::{Next, Outbox};
use crate::wire;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A symbolizer to send to.
#[derive(Clone, Debug)]
pub struct Target {
    /// As given: `unix:/path` or `http://host:port`.
    pub address: String,
    /// How long after the end of the capture to go on trying to deliver it.
    pub patience: Duration,
    /// Stop at the first broken connection: the symbolizer is ours alone.
    pub once: bool,
}

impl Target {
    /// Whether the address is one.
    ///
    /// # Errors
    /// When it is not.
    pub fn check(&self) -> Result<(), SinkError> {
        self.endpoint().map(|_| ())
    }

    fn endpoint(&self) -> Result<Endpoint, SinkError> {
        Endpoint::try_from(self.address.clone())
            .map_err(|_invalid| SinkError::Target(self.address.clone()))
    }
}

/// Sends until everything is delivered.
///
/// # Errors
/// When the address is none, the symbolizer refuses, or patience is over; see [`Target`].
pub async fn run(
    outbox: Arc<Outbox>,
    handover: Arc<Handover>,
    hello: v1::CollectorMessage,
    target: Target,
) -> Result<(), SinkError> {
    let endpoint = target
        .endpoint()?
        .connect_timeout(CONNECT_TIMEOUT)
        .keep_alive_while_idle(true)
        .http2_keep_alive_interval(Duration::from_secs(20));
    let mut backoff = FIRST_BACKOFF;
    let mut deadline: Option<Instant> = None;
    loop {
        let sent = connect_and_send(&endpoint, &outbox, &handover, &hello, &target, &mut backoff);
        let sent = tokio::select! {
            sent = sent => sent,
            () = outlast(&outbox, target.patience) => {
                return Err(SinkError::Unreachable {
                    target: target.address.clone(),
                    cause: "it takes no more epochs".to_owned(),
                });
            }
        };
        let failure = match sent {
            Ok(()) => return Ok(()),
            Err(error @ (SinkError::Unreachable { .. } | SinkError::Spool(_))) => error,
            Err(fatal) => return Err(fatal),
        };
        if target.once {
            return Err(failure);
        }
        if outbox.is_closed() {
            let end = *deadline.get_or_insert_with(|| Instant::now() + target.patience);
            if Instant::now() >= end {
                return Err(failure);
            }
        }
        sleep(backoff).await;
        backoff = (backoff * 2).min(LONGEST_BACKOFF);
    }
}

/// Over once nothing has been acknowledged for `patience` after the end of the capture.
async fn outlast(outbox: &Outbox, patience: Duration) {
    let mut waiting = outbox.unacknowledged();
    let mut since = Instant::now();
    loop {
        sleep(Duration::from_millis(200)).await;
        let now = outbox.unacknowledged();
        if !outbox.is_closed() || now != waiting {
            since = Instant::now();
        }
        waiting = now;
        if since.elapsed() >= patience {
            return;
        }
    }
}

async fn connect_and_send(
    endpoint: &Endpoint,
    outbox: &Outbox,
    handover: &Arc<Handover>,
    hello: &v1::CollectorMessage,
    target: &Target,
    backoff: &mut Duration,
) -> Result<(), SinkError> {
    let unreachable =
        |cause: String| SinkError::Unreachable { target: target.address.clone(), cause };
    let refused = |status: tonic::Status| match status.code() {
        tonic::Code::InvalidArgument
        | tonic::Code::FailedPrecondition
        | tonic::Code::Unimplemented => SinkError::Refused {
            target: target.address.clone(),
            cause: status.message().to_owned(),
        },
        _ => unreachable(format!("{}: {}", status.code(), status.message())),
    };
    let channel: Channel =
        endpoint.connect().await.map_err(|error| unreachable(with_causes(&error)))?;
    let (to_send, outgoing) = mpsc::channel(4);
    // The channel was just made and is empty: there is room for one.
    let _ = to_send.try_send(hello.clone());
    let mut answers = SymbolizerClient::new(channel)
        .capture(ReceiverStream::new(outgoing))
        .await
        .map_err(refused)?
        .into_inner();

    let first = timeout_at(Instant::now() + CONNECT_TIMEOUT, answers.message())
        .await
        .map_err(|_cause| unreachable("no answer to the greeting".to_owned()))?
        .map_err(refused)?;
    let Some(v1::SymbolizerMessage { body: Some(Answer::Welcome(welcome)) }) = first else {
        return Err(unreachable("it does not speak this protocol".to_owned()));
    };
    if welcome.format < FORMAT {
        let cause = format!("it reads format {}, this collector writes {FORMAT}", welcome.format);
        return Err(SinkError::Refused { target: target.address.clone(), cause });
    }
    *backoff = FIRST_BACKOFF;
    if let Some(durable) = welcome.next_epoch.checked_sub(1) {
        outbox.acknowledge(durable);
    }

    let mut sending = Some(to_send);
    let mut from = welcome.next_epoch;
    let mut last: Option<u64> = None;
    let mut pause: Option<Instant> = None;
    // Files and artifacts asked for, in turn; the first of each is being sent, a piece between
    // epochs.
    let mut files: VecDeque<(ExecutableKey, u64)> = VecDeque::new();
    let mut file: Option<Sending> = None;
    let mut artifacts: VecDeque<Artifact> = VecDeque::new();
    let mut artifact: Option<Sending> = None;
    loop {
        // Everything sent and durable, every want answered before the acknowledgement that
        // followed it: nothing is left to say.
        let nothing_wanted = files.is_empty() && artifacts.is_empty();
        let nothing_sent = file.is_none() && artifact.is_none();
        if last.is_some() && outbox.unacknowledged() == 0 && nothing_wanted && nothing_sent {
            sending = None;
        }
        if artifact.is_none() {
            artifact = artifacts.pop_front().map(Sending::artifact);
        }
        if file.is_none()
            && let Some((id, offset)) = files.pop_front()
        {
            file = Some(Sending::file(handover, id, offset));
        }
        let may_send = sending.is_some() && last.is_none();
        tokio::select! {
            next = outbox.next(from), if may_send && pause.is_none() => {
                let Some(out) = &sending else { continue };
                let message = match next.map_err(SinkError::Spool)? {
                    Next::Epoch(epoch) => {
                        from = epoch.number + 1;
                        Body::Epoch(epoch)
                    }
                    Next::End(end) => {
                        last = Some(end.epochs);
                        Body::End(end)
                    }
                };
                if out.send(wire::message(message)).await.is_err() {
                    return Err(unreachable("it closed the stream".to_owned()));
                }
            }
            piece = next_piece(&mut file), if file.is_some() && sending.is_some() && pause.is_none() => {
                let (Some(piece), Some(out)) = (piece, &sending) else {
                    file = None;
                    continue;
                };
                if out.send(piece).await.is_err() {
                    return Err(unreachable("it closed the stream".to_owned()));
                }
            }
            piece = next_piece(&mut artifact), if artifact.is_some() && sending.is_some() => {
                let (Some(piece), Some(out)) = (piece, &sending) else {
                    if let Some(hash) = artifact.take().and_then(|artifact| artifact.failed()) {
                        outbox.forget(hash);
                    }
                    continue;
                };
                if out.send(piece).await.is_err() {
                    return Err(unreachable("it closed the stream".to_owned()));
                }
            }
            () = tokio::time::sleep_until(pause.unwrap_or_else(Instant::now)), if pause.is_some() => {
                pause = None;
            }
            answer = answers.message() => match answer.map_err(refused)?.map(|answer| answer.body) {
                None if sending.is_none() => return Ok(()),
                None => return Err(unreachable("it closed the stream".to_owned())),
                Some(Some(Answer::Ack(ack))) => outbox.acknowledge(ack.epoch),
                Some(Some(Answer::Slow(slow))) => {
                    pause = Some(Instant::now() + Duration::from_millis(slow.milliseconds.min(10_000).into()));
                }
                Some(Some(Answer::Want(v1::Want { file: Some(wanted), offset, .. }))) => {
                    // One that does not say which cannot be answered.
                    files.extend(wanted.key().map(|key| (key, offset)));
                }
                Some(Some(Answer::Want(want))) => {
                    let hash = <[u8; 32]>::try_from(want.hash.as_slice()).ok().map(Hash);
                    artifacts.extend(hash.and_then(|hash| outbox.artifact(hash)));
                }
                Some(Some(Answer::Welcome(_)) | None) => {}
            },
        }
    }
}

async fn next_piece(what: &mut Option<Sending>) -> Option<v1::CollectorMessage> {
    what.as_mut()?.next().await
}

/// tonic's errors say "transport error" and keep the reason below.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
