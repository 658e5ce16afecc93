//! Pyroscope, and what takes the same: a piece of a profile is one request.
//!
//! `POST /push.v1.PusherService/Push` with a `PushRequest` of
//! <https://github.com/grafana/pyroscope/blob/main/api/push/v1/push.proto>. Called by `push.rs`,
//! which decides what is sent again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use prost::Message;
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Certificate, Client, Response, StatusCode, Url};

use crate::causes::chain;

/// Where profiles are pushed to, and who we are there.
#[derive(Clone, Debug)]
pub struct Pyroscope {
    /// Its address; the path of the service is added.
    pub url: Url,
    /// Sent as `X-Scope-OrgID`.
    pub tenant: Option<String>,
    /// User of basic authentication, whose password is the token.
    pub user: Option<String>,
    /// File with a token, read again for each request.
    pub token: Option<PathBuf>,
    /// CA that signs its certificate (PEM), instead of those of this host.
    pub ca: Option<PathBuf>,
}

/// What is sent in one request.
#[derive(Debug)]
pub(super) struct Sent<'a> {
    pub labels: &'a [(String, String)],
    /// With gzip.
    pub pprof: Vec<u8>,
    /// The same each time the piece is sent.
    pub id: String,
}

/// What became of a request.
#[derive(Debug)]
pub(super) enum Answer {
    /// It has it.
    Taken,
    /// It will not take it.
    Refused(String),
    /// It may take it later, and says when.
    Later(String, Option<Duration>),
}

const PROTO: &str = "application/proto";
const PATH: &str = "push.v1.PusherService/Push";
/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(30);
/// Longest pause that is believed.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// Most of an answer that is told.
const TOLD: usize = 300;

#[derive(Clone, PartialEq, Message)]
struct PushRequest {
    #[prost(message, repeated, tag = "1")]
    series: Vec<Series>,
}

#[derive(Clone, PartialEq, Message)]
struct Series {
    #[prost(message, repeated, tag = "1")]
    labels: Vec<LabelPair>,
    #[prost(message, repeated, tag = "2")]
    samples: Vec<RawSample>,
}

#[derive(Clone, PartialEq, Message)]
struct LabelPair {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, Message)]
struct RawSample {
    #[prost(bytes = "vec", tag = "1")]
    raw_profile: Vec<u8>,
    #[prost(string, tag = "2")]
    id: String,
}

/// A client of one.
#[derive(Debug)]
pub(super) struct Receiver {
    client: Client,
    url: Url,
    at: Pyroscope,
}

impl Receiver {
    /// # Errors
    /// When certificates cannot be read or used.
    pub(super) fn new(at: Pyroscope) -> Result<Self, std::io::Error> {
        // Whoever was first has installed the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut client = Client::builder()
            .user_agent(concat!("stackwire/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT)
            .timeout(ANSWER)
            .redirect(reqwest::redirect::Policy::none());
        if at.url.scheme() != "https" {
            // A host without any certificates of authorities needs none then.
            client = client.tls_certs_only([]);
        } else if let Some(path) = &at.ca {
            client = client.tls_certs_only(certificates(path)?);
        }
        let client = client.build().map_err(|error| std::io::Error::other(chain(&error)))?;
        let mut url = at.url.clone();
        let base = url.path().trim_end_matches('/').to_owned();
        url.set_path(&format!("{base}/{PATH}"));
        Ok(Self { client, url, at })
    }

    /// Sends a piece.
    pub(super) async fn send(&self, sent: Sent<'_>) -> Answer {
        let label = |(name, value): &(String, String)| LabelPair {
            name: name.clone(),
            value: value.clone(),
        };
        let samples = vec![RawSample { raw_profile: sent.pprof, id: sent.id }];
        let series = Series { labels: sent.labels.iter().map(label).collect(), samples };
        let body = PushRequest { series: vec![series] }.encode_to_vec();
        let mut request = self.client.post(self.url.clone()).body(body);
        request = request.header(CONTENT_TYPE, PROTO);
        if let Some(tenant) = &self.at.tenant {
            request = request.header("X-Scope-OrgID", tenant);
        }
        if let Some(path) = &self.at.token {
            let token = match std::fs::read_to_string(path) {
                Ok(token) => token,
                Err(error) => {
                    return Answer::Later(format!("cannot read {}: {error}", path.display()), None);
                }
            };
            request = match &self.at.user {
                Some(user) => request.basic_auth(user, Some(token.trim())),
                None => request.bearer_auth(token.trim()),
            };
        }
        match request.send().await {
            Ok(answer) => read(answer).await,
            // Its URL may have a key in it.
            Err(error) => Answer::Later(chain(&error.without_url()), None),
        }
    }
}

fn certificates(path: &Path) -> Result<Vec<Certificate>, std::io::Error> {
    let named = |why: String| std::io::Error::other(format!("{}: {why}", path.display()));
    let pem = std::fs::read(path).map_err(|error| named(error.to_string()))?;
    Certificate::from_pem_bundle(&pem).map_err(|error| named(chain(&error)))
}

async fn read(mut answer: Response) -> Answer {
    let status = answer.status();
    let kind = answer.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    if status.is_success() {
        // Of the Connect protocol. A page to log in is no answer.
        return match kind {
            Some(PROTO) => Answer::Taken,
            _ => Answer::Later(format!("{status}, but not as Pyroscope says it: {kind:?}"), None),
        };
    }
    let seconds = answer.headers().get(RETRY_AFTER).and_then(|it| it.to_str().ok()?.parse().ok());
    let pause = seconds.map(|seconds| Duration::from_secs(seconds).min(LONGEST_PAUSE));
    let mut said = Vec::new();
    while said.len() < TOLD
        && let Ok(Some(chunk)) = answer.chunk().await
    {
        said.extend_from_slice(&chunk[..chunk.len().min(TOLD - said.len())]);
    }
    let said = String::from_utf8_lossy(&said);
    let said = format!("{status}: {}", stackwire_formats::plain(said.trim()));
    // What else there is, a password that is not known yet or a path of a proxy, may be mended.
    match status {
        StatusCode::BAD_REQUEST
        | StatusCode::PAYLOAD_TOO_LARGE
        | StatusCode::UNSUPPORTED_MEDIA_TYPE
        | StatusCode::UNPROCESSABLE_ENTITY => Answer::Refused(said),
        _ => Answer::Later(said, pause),
    }
}
