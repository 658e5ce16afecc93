//! A symbolizer that does what a test wants of it: refuses, withholds acknowledgements, cuts.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prost::Message;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_message::Body as Answer;
use stackwire_proto::v1::symbolizer_server::{Symbolizer, SymbolizerServer};
use stackwire_proto::{FORMAT, open_epoch, v1};
use tokio_stream::Stream;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

/// What it does with streams.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Does {
    /// Refuses them.
    Refuse(tonic::Code),
    /// Takes them, acknowledges nothing, and refuses the first epoch.
    RefuseEpochs(tonic::Code),
    /// Takes epochs and acknowledges none.
    Withhold,
    /// Reads an older format.
    Older,
}

/// What it was sent.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) streams: usize,
    /// Numbers of epochs and how many samples they have, each once.
    pub(crate) epochs: std::collections::BTreeMap<u64, u64>,
    /// The messages, as they were before they were compressed.
    pub(crate) messages: Vec<Vec<u8>>,
}

/// One on a port of its own, until it is dropped.
pub(crate) struct Peer {
    pub(crate) address: String,
    pub(crate) seen: Arc<Mutex<Seen>>,
    _runtime: tokio::runtime::Runtime,
}

struct Service(Does, Arc<Mutex<Seen>>);

type Answers = Pin<Box<dyn Stream<Item = Result<v1::SymbolizerMessage, Status>> + Send>>;

impl Peer {
    /// `listen`: `127.0.0.1:0`, or an address that was used before.
    pub(crate) fn start(listen: &str, does: Does) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(listen)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Arc::<Mutex<Seen>>::default();
        let service = SymbolizerServer::new(Service(does, Arc::clone(&seen)));
        let server = tonic::transport::Server::builder().add_service(service);
        runtime.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Self { address, seen, _runtime: runtime }
    }
}

#[tonic::async_trait]
impl Symbolizer for Service {
    type CaptureStream = Answers;

    async fn capture(
        &self,
        request: Request<Streaming<v1::CollectorMessage>>,
    ) -> Result<Response<Answers>, Status> {
        let Self(does, seen) = self;
        seen.lock().unwrap().streams += 1;
        if let Does::Refuse(code) = does {
            return Err(Status::new(*code, "not here"));
        }
        let format = if let Does::Older = does { FORMAT - 1 } else { FORMAT };
        let (answers, outgoing) = tokio::sync::mpsc::unbounded_channel();
        let answer = |body| Ok(v1::SymbolizerMessage { body: Some(body) });
        let welcome = v1::Welcome { format, ..v1::Welcome::default() };
        answers.send(answer(Answer::Welcome(welcome))).unwrap();
        let (does, seen, mut incoming) = (*does, Arc::clone(seen), request.into_inner());
        tokio::spawn(async move {
            while let Ok(Some(message)) = incoming.message().await {
                let Some(Body::Epoch(sealed)) = message.body else {
                    seen.lock().unwrap().messages.push(message.encode_to_vec());
                    continue;
                };
                let epoch = open_epoch(&sealed).unwrap();
                let samples = epoch.samples.iter().map(|samples| samples.thread.len() as u64).sum();
                let mut seen_now = seen.lock().unwrap();
                seen_now.messages.push(epoch.encode_to_vec());
                seen_now.epochs.insert(sealed.number, samples);
                drop(seen_now);
                if let Does::RefuseEpochs(code) = does {
                    let _ = answers.send(Err(Status::new(code, "not this")));
                    return;
                }
            }
            // Nothing is said of what has come.
            tokio::time::sleep(Duration::from_millis(10)).await;
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(outgoing))))
    }
}
