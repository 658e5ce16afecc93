//! Whose processes are, by what they say of themselves. The broker copies it, on a thread that
//! nobody waits for: once for each process, and again when it has published a context since. What
//! the bytes mean is for the symbolizer to see. Called by `pipeline.rs`.

use std::collections::HashMap;
use std::io::Read;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::helpers::broker::Broker;
use crate::in_time::later;
use crate::process::{Wanted, maps};

/// How long a process may keep the broker busy.
const AT_ONCE: Duration = Duration::from_millis(50);
/// When to look at one again that says nothing yet; each time twice as much later.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Processes asked in one go: samples wait while their mappings are looked through, and others wait
/// for the broker.
const MAX_ASKED: usize = 32;
/// Bytes kept of what all say: each epoch has what its processes said.
const MAX_KEPT: usize = 4 << 20;
/// When to ask one again that has said something, or has made the broker hang.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long to wait for those that are being asked when a capture ends.
const PATIENCE: Duration = Duration::from_millis(500);

/// What a process says, byte by byte; what it does not say is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// The OpenTelemetry process context.
    pub context: Vec<u8>,
    /// `OTEL_SERVICE_NAME`.
    pub service_name: Vec<u8>,
    /// `OTEL_RESOURCE_ATTRIBUTES`.
    pub resource_attributes: Vec<u8>,
}

impl Said {
    /// As the broker writes it.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let mut part = || {
            let (length, after) = rest.split_first_chunk()?;
            let (part, after) = after.split_at_checked(u32::from_ne_bytes(*length) as usize)?;
            rest = after;
            Some(part.to_vec())
        };
        Some(Self { context: part()?, service_name: part()?, resource_attributes: part()? })
    }

    fn bytes(&self) -> usize {
        self.context.len() + self.service_name.len() + self.resource_attributes.len()
    }
}

/// What came of asking.
enum Answer {
    Said(Said),
    Nothing,
    Hangs,
}

/// What is known of process images.
#[derive(Debug)]
pub struct Whose {
    broker: Arc<Broker>,
    said: HashMap<u64, Said>,
    /// When to ask again, and how much later than the last time.
    asked: HashMap<u64, (Instant, Duration)>,
    asking: Option<mpsc::Receiver<Vec<(u64, Answer)>>>,
}

impl Whose {
    /// Nobody was asked yet.
    #[must_use]
    pub fn new(broker: Arc<Broker>) -> Self {
        Self { broker, said: HashMap::new(), asked: HashMap::new(), asking: None }
    }

    /// What each image said.
    #[must_use]
    pub fn said(&self) -> &HashMap<u64, Said> {
        &self.said
    }

    /// Asks those of these that are to be asked: images, each with its pid.
    pub fn ask(&mut self, processes: impl Iterator<Item = (u64, u32)>) {
        if !self.learn(Duration::ZERO) {
            return;
        }
        let now = Instant::now();
        let is_new = |(image, _): &(u64, u32)| !self.asked.contains_key(image);
        // First those that were never asked.
        let (mut due, known): (Vec<_>, Vec<_>) = processes.partition(is_new);
        let new = due.len();
        let is_due = |(image, _): &(u64, u32)| self.asked[image].0 <= now;
        due.extend(known.into_iter().filter(is_due));
        due.truncate(MAX_ASKED);
        if due.is_empty() {
            return;
        }
        for (image, _) in &due {
            let (again, after) = self.asked.entry(*image).or_insert((now, ASK_AGAIN));
            *again = now + *after;
            *after = after.saturating_mul(2).min(NEVER);
        }
        let wanted = |(place, (image, pid))| {
            // Here, where the right to read mappings is.
            let context = maps::context(pid);
            // An environment stays as it is.
            (place < new || context.is_some()).then_some((image, Wanted::Said { pid, context }))
        };
        let due: Vec<_> = due.into_iter().enumerate().filter_map(wanted).collect();
        if due.is_empty() {
            return;
        }
        static TAKEN: AtomicUsize = AtomicUsize::new(0);
        let broker = Arc::clone(&self.broker);
        self.asking = later(&TAKEN, move || {
            due.into_iter().map(|(image, wanted)| (image, ask(&broker, &wanted))).collect()
        });
    }

    /// Asks these, and waits a moment for what they say: the capture ends.
    pub fn ask_last(&mut self, processes: impl Iterator<Item = (u64, u32)>) {
        self.learn(PATIENCE);
        self.ask(processes);
        self.learn(PATIENCE);
    }

    /// Forgets images of which this is not true.
    pub fn retain(&mut self, mut keep: impl FnMut(u64) -> bool) {
        self.said.retain(|&image, _| keep(image));
        self.asked.retain(|&image, _| keep(image));
    }

    /// Takes what was said by now. False: somebody is still being asked.
    fn learn(&mut self, patience: Duration) -> bool {
        let Some(asking) = &self.asking else { return true };
        match asking.recv_timeout(patience) {
            Err(mpsc::RecvTimeoutError::Timeout) => return false,
            Err(mpsc::RecvTimeoutError::Disconnected) => {}
            Ok(answers) => {
                for (image, answer) in answers {
                    if !matches!(answer, Answer::Nothing) {
                        self.asked.insert(image, (Instant::now() + NEVER, NEVER));
                    }
                    let kept: usize = self.said.values().map(Said::bytes).sum();
                    if let Answer::Said(said) = answer
                        && kept + said.bytes() <= MAX_KEPT
                    {
                        self.said.insert(image, said);
                    }
                }
            }
        }
        self.asking = None;
        true
    }
}

fn ask(broker: &Broker, wanted: &Wanted) -> Answer {
    let mut bytes = Vec::new();
    match broker.open_within(wanted, AT_ONCE) {
        Ok(mut file) => drop(file.read_to_end(&mut bytes)),
        Err(reason) if reason.hangs() => return Answer::Hangs,
        Err(_) => return Answer::Nothing,
    }
    Said::parse(&bytes)
        .filter(|said| *said != Said::default())
        .map_or(Answer::Nothing, Answer::Said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_says_is_learnt() {
        // What has capabilities may not be looked at by who has none.
        let mut command = std::process::Command::new("setpriv");
        if rustix::process::geteuid().is_root() {
            command.args(["--bounding-set=-all", "--inh-caps=-all"]);
        }
        command.args(["sleep", "60"]).env("OTEL_SERVICE_NAME", "shop");
        let mut child = command.spawn().unwrap();
        let mut whose = Whose::new(Arc::new(Broker::none()));
        // It may not have its environment yet; then it is another image.
        let mut image = 0;
        let deadline = Instant::now() + Duration::from_secs(10);
        while whose.said().is_empty() && Instant::now() < deadline {
            image += 1;
            whose.ask_last([(image, child.id())].into_iter());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(whose.said()[&image].service_name, b"shop");
        whose.retain(|other| other != image);
        assert!(whose.said().is_empty());
    }
}
