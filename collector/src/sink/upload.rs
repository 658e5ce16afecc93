//! The gRPC sink: streams to one symbolizer after the other, until everything is delivered.
//!
//! A connection that breaks is made again, to the next address, with pauses that grow. No answer
//! ends it but one: that the format is not read there.

use std::sync::Arc;
use std::time::Duration;

use stackwire_proto::v1;
use tokio::time::{Instant, sleep};

use super::SinkError;
use super::address::{Address, chance};
use super::credentials::Credentials;
use super::stream::{Broken, Stream};
use crate::handover::Handover;
use crate::outbox::Outbox;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
/// How often an epoch is sent that is refused: the first time it may have been damaged on its way.
const MAX_REFUSALS: u32 = 3;

/// Symbolizers to send to.
#[derive(Clone, Debug)]
pub struct Target {
    /// One at least; the first that answers is used until it does not.
    pub addresses: Vec<Address>,
    /// What they are shown, and how they are known.
    pub credentials: Credentials,
    /// How long after the end of the capture to go on delivering.
    pub drain: Duration,
    /// Stop at the first broken connection: the symbolizer is ours alone.
    pub once: bool,
}

/// Sends until everything is delivered.
///
/// # Errors
/// When no symbolizer reads the format, or time is over; see [`Target`]. What is not acknowledged
/// is still in the outbox.
pub async fn run(
    outbox: Arc<Outbox>,
    handover: Arc<Handover>,
    hello: v1::CollectorMessage,
    target: Target,
) -> Result<(), SinkError> {
    tokio::select! {
        result = deliver(&outbox, &handover, &hello, &target) => result,
        // Dropped where it is: nothing is lost by it but the connection.
        () = time_is_over(&outbox, target.drain) => Err(SinkError::Undelivered {
            drain: target.drain,
            cause: outbox.trouble().unwrap_or_else(|| "it takes no more epochs".to_owned()),
        }),
    }
}

async fn deliver(
    outbox: &Outbox,
    handover: &Arc<Handover>,
    hello: &v1::CollectorMessage,
    target: &Target,
) -> Result<(), SinkError> {
    let mut backoff = FIRST_BACKOFF;
    // The address that is tried, how many in a row were no use, and how many of those read an
    // older format.
    let (mut at, mut failed, mut older) = (0, 0, 0);
    let mut refusals = Refusals::default();
    loop {
        let address = target.addresses.get(at).ok_or(SinkError::NoTarget)?;
        let began = Instant::now();
        let (welcomed, broken) =
            match attempt(address, &target.credentials, hello, outbox, handover).await {
                Ok(()) => return Ok(()),
                Err(failed) => failed,
            };
        outbox.set_trouble(Some(format!("{address}: {broken}")));
        if target.once {
            return Err(SinkError::Unreachable { target: address.to_string(), broken });
        }
        refusals.note(&broken, outbox);
        if welcomed {
            // It knows what it has: it is asked again before another is.
            (failed, older) = (0, 0);
        } else {
            at = (at + 1) % target.addresses.len();
            failed += 1;
            older += usize::from(matches!(broken, Broken::Format(_)));
        }
        if older == target.addresses.len() {
            return Err(SinkError::Refused { target: address.to_string(), broken });
        }
        if began.elapsed() > LONGEST_BACKOFF {
            backoff = FIRST_BACKOFF;
        }
        if welcomed || failed == target.addresses.len() {
            (failed, older) = (0, 0);
            // Half of it is left to chance: a thousand collectors do not come back together.
            sleep(backoff / 2 + backoff.mul_f64(chance(1000) as f64 / 2000.0)).await;
            backoff = (backoff * 2).min(LONGEST_BACKOFF);
        }
    }
}

/// One connection. Whether it was welcomed, and why it is over.
async fn attempt(
    address: &Address,
    credentials: &Credentials,
    hello: &v1::CollectorMessage,
    outbox: &Outbox,
    handover: &Arc<Handover>,
) -> Result<(), (bool, Broken)> {
    let lost = |cause: String| (false, Broken::Lost(cause));
    let channel = address.connect(credentials).await.map_err(lost)?;
    let authorization = credentials.authorization().map_err(|error| lost(error.to_string()))?;
    let stream = Stream::open(channel, authorization, hello, outbox, handover).await;
    let stream = stream.map_err(|broken| (false, broken))?;
    outbox.set_trouble(None);
    stream.run().await.map_err(|broken| (true, broken))
}

/// How often the epoch that is sent first was refused in a row.
#[derive(Debug, Default)]
struct Refusals {
    epoch: Option<u64>,
    times: u32,
}

impl Refusals {
    /// One that is refused again and again is dropped and counted: those behind it are not to wait.
    fn note(&mut self, broken: &Broken, outbox: &Outbox) {
        if !matches!(broken, Broken::EpochRefused(_)) {
            return;
        }
        let oldest = outbox.oldest();
        self.times = if self.epoch == oldest { self.times + 1 } else { 1 };
        self.epoch = oldest;
        if self.times >= MAX_REFUSALS {
            outbox.refused();
            *self = Self::default();
        }
    }
}

/// Over so long after the end of the capture.
async fn time_is_over(outbox: &Outbox, drain: Duration) {
    while !outbox.is_closed() {
        sleep(Duration::from_millis(50)).await;
    }
    sleep(drain).await;
}
