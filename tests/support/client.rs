//! A collector that says what a test wants it to say.

use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::v1::symbolizer_message::Body as Answer;
use stackwire_proto::{FORMAT, seal_epoch, v1};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

use super::authority::Authority;

/// Who it says it is, and where.
#[derive(Clone)]
pub(crate) struct Client {
    address: String,
    ca: Vec<u8>,
    token: String,
}

/// What a server answered to a stream.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) welcome: Option<u64>,
    pub(crate) acked: Option<u64>,
    pub(crate) wants: Vec<v1::Want>,
    pub(crate) slow: usize,
    /// How the server ended the stream, if it did.
    pub(crate) status: Option<tonic::Status>,
}

impl Client {
    /// One with a token.
    pub(crate) fn with_token(address: &str, authority: &Authority, token: &str) -> Self {
        let ca = std::fs::read(authority.file("ca.pem")).unwrap();
        Self { address: address.to_owned(), ca, token: token.to_owned() }
    }

    pub(crate) async fn connect(&self) -> Channel {
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.ca));
        let endpoint = Endpoint::try_from(format!("https://{}", self.address)).unwrap();
        let endpoint = endpoint.tls_config(tls).unwrap();
        endpoint.connect().await.unwrap()
    }

    /// A request that says who asks.
    pub(crate) fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        let bearer = format!("Bearer {}", self.token).parse().unwrap();
        request.metadata_mut().insert("authorization", bearer);
        request
    }

    /// Sends a greeting and epochs, and what `answer` gives for each want; ends the stream when the
    /// last epoch is acknowledged and all that was wanted is sent, or when the server ends it.
    pub(crate) fn send(
        &self,
        hello: v1::Hello,
        epochs: Vec<v1::CollectorMessage>,
        mut answer: impl FnMut(&v1::Want) -> Vec<v1::CollectorMessage>,
    ) -> Heard {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let number = |message: &v1::CollectorMessage| match &message.body {
            Some(Body::Epoch(epoch)) => Some(epoch.number),
            _ => None,
        };
        let last = epochs.iter().filter_map(number).max();
        let mut heard = Heard::default();
        runtime.block_on(async {
            let (out, outgoing) = tokio::sync::mpsc::unbounded_channel();
            out.send(v1::CollectorMessage { body: Some(Body::Hello(hello)) }).unwrap();
            epochs.into_iter().for_each(|message| out.send(message).unwrap());
            let outgoing = tokio_stream::wrappers::UnboundedReceiverStream::new(outgoing);
            let mut client =
                SymbolizerClient::new(self.connect().await).max_encoding_message_size(usize::MAX);
            let answers = client.capture(self.request(outgoing)).await;
            let mut answers = match answers {
                Ok(answers) => answers.into_inner(),
                Err(status) => {
                    heard.status = Some(status);
                    return;
                }
            };
            let mut out = Some(out);
            loop {
                let quiet = std::time::Duration::from_millis(500);
                let next = match (&out, heard.acked) {
                    // A want may follow an acknowledgement, of a piece that was not enough.
                    (Some(_), acked) if acked == last => {
                        match tokio::time::timeout(quiet, answers.message()).await {
                            Ok(next) => next,
                            Err(_quiet) => {
                                out = None;
                                continue;
                            }
                        }
                    }
                    _ => answers.message().await,
                };
                match next {
                    Ok(Some(v1::SymbolizerMessage { body })) => match body {
                        Some(Answer::Welcome(welcome)) => heard.welcome = Some(welcome.next_epoch),
                        Some(Answer::Ack(ack)) => heard.acked = Some(ack.epoch),
                        Some(Answer::Slow(_)) => heard.slow += 1,
                        Some(Answer::Want(want)) => {
                            for message in answer(&want) {
                                let Some(out) = &out else { break };
                                let _ = out.send(message);
                            }
                            heard.wants.push(want);
                        }
                        None => {}
                    },
                    Ok(None) => return,
                    Err(status) => {
                        heard.status = Some(status);
                        return;
                    }
                }
            }
        });
        heard
    }
}

/// The greeting of a capture.
pub(crate) fn hello(capture: u8) -> v1::Hello {
    v1::Hello {
        format: FORMAT,
        capture_id: vec![capture; 16],
        hostname: format!("host{capture}"),
        sampling: Some(v1::Sampling { event: "cpu-clock".into(), frequency: 99, ..<_>::default() }),
        clock_monotonic_ns: 1_000_000_000,
        clock_realtime_ns: 1_700_000_000_000_000_000,
        ..v1::Hello::default()
    }
}

/// An epoch of one process with one stack of one frame, `samples` times: `offset` in a file with
/// this path and build-id.
pub(crate) fn epoch(
    number: u64,
    path: &str,
    build_id: &[u8],
    offset: u64,
    samples: usize,
) -> v1::Epoch {
    let mut file = v1::Executable { path: 1, build_id: build_id.to_vec(), ..<_>::default() };
    file.set_kind(v1::ExecutableKind::File);
    let mut stack = v1::Stack { node: 1, ..v1::Stack::default() };
    stack.set_end(v1::EndReason::Root);
    let start_ns = 2_000_000_000 + number * 1_000_000_000;
    v1::Epoch {
        number,
        start_ns,
        end_ns: start_ns + 1_000_000_000,
        strings: vec![String::new(), path.to_owned(), "program".to_owned()],
        executables: vec![file],
        processes: vec![v1::Process { pid: 4_000_000, comm: 2, ..<_>::default() }],
        mappings: vec![v1::Mapping { start: 0x10000, length: 1 << 20, ..<_>::default() }],
        threads: vec![v1::Thread { process: 0, tid: 4_000_000, comm: 2 }],
        nodes: Some(v1::StackNodes {
            parent: vec![0],
            executable: vec![0],
            offset_delta: vec![offset as i64],
            kind: vec![v1::FrameKind::Leaf as u32],
        }),
        stacks: vec![stack],
        samples: vec![v1::Samples {
            time_delta: vec![1; samples],
            thread: vec![0; samples],
            cpu: vec![0; samples],
            user_stack: vec![1; samples],
            kernel_stack: vec![0; samples],
            value: vec![10_101_010],
            ..v1::Samples::default()
        }],
        ..v1::Epoch::default()
    }
}

/// An epoch as a message.
pub(crate) fn sealed(epoch: &v1::Epoch) -> v1::CollectorMessage {
    v1::CollectorMessage { body: Some(Body::Epoch(seal_epoch(epoch))) }
}

/// An epoch of a few KB whose columns take more memory than an epoch may.
pub(crate) fn bomb() -> v1::Epoch {
    let columns = 10 << 20;
    let nodes = v1::StackNodes {
        parent: vec![0; columns],
        executable: vec![0; columns],
        offset_delta: vec![0; columns],
        kind: vec![0; columns],
    };
    v1::Epoch { nodes: Some(nodes), ..epoch(0, "/nowhere/bomb", &[0xee; 20], 0x1000, 1) }
}
