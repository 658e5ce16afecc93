//! What people and programs ask of a server over HTTP, on the addresses collectors come to:
//! which captures there are, and profiles of them. Everybody sees what they sent, readers see
//! everything.
//!
//! `openapi.json` says the same for programs. Requests and answers in `stackwire ps` and
//! `stackwire fetch` are these.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::answers::{Capture, Captures, Format};
use super::asked::{Kept, Known};
use super::fetch::{self, NoProfile, Wanted};
use super::index::now_ms;
use super::keeper::Keepers;
use super::limits::Account;
use super::live::Streamed;
use crate::receive::grpc::{Accept, NotAdmitted};
use crate::receive::peer::{Caller, Connected};

/// What handlers share.
pub(super) struct Api {
    pub keepers: Arc<Keepers>,
    /// Who sees everything, by name.
    pub readers: Vec<String>,
    /// Profiles that are made at a time.
    pub turns: Arc<Semaphore>,
}

/// Profiles that are made at a time: each has an eighth of the memory.
pub(super) const FETCHES: usize = 1;
/// How long a request waits for its turn.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of an answer in one piece.
const PIECE: usize = 64 << 10;

/// The paths.
pub(super) fn router(api: Arc<Api>) -> Router {
    Router::new()
        .route("/v1/captures", get(captures))
        .route("/v1/profile", get(profile))
        .route("/v1/openapi.json", get(openapi))
        // Whatever else is asked for is answered in gRPC's way.
        .route("/v1/{*path}", get(nothing))
        .with_state(api)
}

/// What is said where there is no answer.
struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, error) = self;
        let body = serde_json::json!({ "error": error }).to_string();
        (status, [(CONTENT_TYPE, JSON)], body).into_response()
    }
}

const JSON: &str = "application/json";

/// Which captures are shown.
struct Sight<'a> {
    account: Account,
    readers: &'a [String],
}

impl Api {
    /// Lets somebody in who asks.
    fn admit(&self, request: &Request<axum::body::Body>) -> Result<Sight<'_>, Refusal> {
        let connected: Option<&Connected> = request.extensions().get();
        let line = (request.version(), request.uri());
        let caller = Caller::of(connected, line, request.headers());
        let account = self.keepers.admit(caller.as_ref()).map_err(|why| {
            let peer = Connected::from(connected);
            tracing::warn!(peer, "a request from {peer} is refused: {why}");
            let status = match &why {
                NotAdmitted::Unknown(_) => StatusCode::UNAUTHORIZED,
                NotAdmitted::Page => StatusCode::FORBIDDEN,
                NotAdmitted::TooMuch(_) => StatusCode::TOO_MANY_REQUESTS,
            };
            Refusal(status, why.to_string())
        })?;
        if let Some(connected) = connected {
            connected.admitted.set();
        }
        Ok(Sight { account, readers: &self.readers })
    }
}

impl Sight<'_> {
    /// Whose captures are seen, if not all.
    fn only(&self) -> Option<String> {
        let who = self.account.who.to_string();
        (!self.readers.contains(&who)).then_some(who)
    }
}

/// Which captures.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CapturesQuery {
    /// Only those with a stream.
    #[serde(default)]
    live: bool,
}

/// A capture as it is known, with what came since its last window was closed.
fn capture(known: Known, live: Option<Streamed>) -> Capture {
    let now = live.unwrap_or_default();
    let time = |ms: u64| {
        let at = jiff::Timestamp::from_millisecond(i64::try_from(ms).unwrap_or(0));
        at.unwrap_or_default()
    };
    Capture {
        capture: known.id.to_string(),
        client: known.owner,
        host: known.hostname,
        collector: known.collector,
        kernel: known.kernel,
        live: live.is_some(),
        since: time(known.begun_ms),
        last: time(known.seen_ms.max(now.last_ms)),
        samples_per_second: (now.samples_per_second * 10.0).round() / 10.0,
        samples: known.samples.saturating_add(now.samples),
        lost_samples: known.lost.saturating_add(now.lost),
        stacks: known.stacks.saturating_add(now.stacks),
        whole_stacks: known.whole.saturating_add(now.whole),
        windows: known.windows,
    }
}

async fn captures(
    State(api): State<Arc<Api>>,
    query: Result<Query<CapturesQuery>, axum::extract::rejection::QueryRejection>,
    request: Request<axum::body::Body>,
) -> Result<Response, Refusal> {
    let sight = api.admit(&request)?;
    let Query(query) = query.map_err(|why| Refusal(StatusCode::BAD_REQUEST, why.body_text()))?;
    // One at a time for each client, until it is taken: it may be large.
    let turn = Arc::clone(&sight.account.asking).acquire_owned();
    let turn = tokio::time::timeout(PATIENCE, turn).await.map_err(|_elapsed| busy())?;
    let owner = sight.only();
    let known = blocking(&api, move |keepers| {
        Ok(keepers.shared.store.reader()?.captures(owner.as_deref())?)
    });
    let known = known.await?;
    let captures = known.into_iter().map(|known| {
        let live = api.keepers.shared.live.of(&known.id);
        capture(known, live)
    });
    let captures = captures.filter(|capture| capture.live || !query.live).collect();
    let body = serde_json::to_string(&Captures { captures });
    let body = body.map_err(|why| Refusal(StatusCode::INTERNAL_SERVER_ERROR, why.to_string()))?;
    let body = pieces(std::io::Cursor::new(body.into_bytes()), (sight.account, turn));
    Ok(([(CONTENT_TYPE, JSON)], axum::body::Body::from_stream(body)).into_response())
}

fn busy() -> Refusal {
    let why = "other answers are being made: ask again later".to_owned();
    Refusal(StatusCode::SERVICE_UNAVAILABLE, why)
}

/// Which profile.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileQuery {
    /// As "15m"; instead of `from` and `to`.
    last: Option<String>,
    /// RFC 3339.
    from: Option<String>,
    to: Option<String>,
    /// `LABEL=VALUE,…`; the labels `host` and `client` choose captures.
    #[serde(rename = "where")]
    labels: Option<String>,
    event: Option<String>,
    format: Option<String>,
}

impl ProfileQuery {
    fn wanted(&self) -> Result<(Wanted, Chosen), String> {
        let now = u64::try_from(now_ms()).unwrap_or(0);
        let time = |text: &String| {
            let at: jiff::Timestamp = text.parse().map_err(|why| format!("{text:?}: {why}"))?;
            Ok::<u64, String>(u64::try_from(at.as_millisecond()).unwrap_or(0))
        };
        let time_ms = match (&self.last, &self.from, &self.to) {
            (Some(_), Some(_), _) | (Some(_), _, Some(_)) => {
                return Err("ask for `last`, or for `from` and `to`".to_owned());
            }
            (Some(last), None, None) => {
                let last =
                    humantime::parse_duration(last).map_err(|why| format!("{last:?}: {why}"))?;
                let last = u64::try_from(last.as_millis()).unwrap_or(u64::MAX);
                now.saturating_sub(last)..u64::MAX
            }
            (None, from, to) => {
                from.as_ref().map_or(Ok(0), time)?..to.as_ref().map_or(Ok(u64::MAX), time)?
            }
        };
        let labels = match self.labels.as_deref() {
            None | Some("") => Vec::new(),
            Some(text) => crate::labels::parse(text).map_err(|bad| bad.to_string())?,
        };
        let format = self.format.as_deref().unwrap_or("pprof");
        let format = format.parse::<Format>().map_err(|none| {
            format!("{none}: there are {}", Format::ALL.map(Format::name).join(", "))
        })?;
        let (chosen, labels) = Chosen::of(labels);
        Ok((Wanted { time_ms, labels, event: self.event.clone(), format }, chosen))
    }
}

/// Captures by what is known of all of one.
#[derive(Debug, Default)]
struct Chosen {
    hosts: Vec<String>,
    clients: Vec<String>,
}

impl Chosen {
    /// What chooses captures, and what chooses samples.
    fn of(labels: Vec<(String, String)>) -> (Self, Vec<(String, String)>) {
        let (mut chosen, mut others) = (Self::default(), Vec::new());
        for (label, value) in labels {
            match label.as_str() {
                "host" => chosen.hosts.push(value),
                "client" => chosen.clients.push(value),
                _ => others.push((label, value)),
            }
        }
        (chosen, others)
    }

    fn has(&self, window: &Kept) -> bool {
        (self.hosts.is_empty() || self.hosts.contains(&window.hostname))
            && (self.clients.is_empty() || self.clients.contains(&window.owner))
    }
}

async fn profile(
    State(api): State<Arc<Api>>,
    query: Result<Query<ProfileQuery>, axum::extract::rejection::QueryRejection>,
    request: Request<axum::body::Body>,
) -> Result<Response, Refusal> {
    let sight = api.admit(&request)?;
    let bad = |why: String| Refusal(StatusCode::BAD_REQUEST, why);
    let Query(query) = query.map_err(|why| bad(why.body_text()))?;
    let (wanted, chosen) = query.wanted().map_err(bad)?;
    // One at a time for each client, so that none keeps the others waiting with many.
    let turns = async {
        let own = Arc::clone(&sight.account.asking).acquire_owned().await;
        (own, Arc::clone(&api.turns).acquire_owned().await)
    };
    let turn = tokio::time::timeout(PATIENCE, turns).await.map_err(|_elapsed| busy())?;
    let (time, owner) = (wanted.time_ms.clone(), sight.only());
    let windows = blocking(&api, move |keepers| {
        Ok(keepers.shared.store.reader()?.windows_of(owner.as_deref(), time.start, time.end)?)
    });
    let mut windows = windows.await?;
    windows.retain(|window| chosen.has(window));
    let format = wanted.format;
    let made = blocking(&api, move |keepers| {
        // Whoever asked may be gone, and another who asks waits all the same.
        let _turn = turn;
        Ok(fetch::make(keepers, &windows, &wanted))
    });
    let made = made.await?;
    let file = made.map_err(|why| {
        let status = match why {
            NoProfile::Nothing | NoProfile::NoEvent(_) => StatusCode::NOT_FOUND,
            NoProfile::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            NoProfile::Capture(_) | NoProfile::Io(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Refusal(status, why.to_string())
    })?;
    let body = axum::body::Body::from_stream(pieces(file, sight.account));
    let nosniff = (HeaderName::from_static("x-content-type-options"), "nosniff");
    Ok(([(CONTENT_TYPE, format.content_type()), nosniff], body).into_response())
}

/// An answer piece by piece, read as fast as it is taken. No thread waits for who takes it, and who
/// takes nothing for a while gets no more. `held` until the end: it counts as a stream of the
/// client.
fn pieces(
    mut file: impl std::io::Read + Send + 'static,
    held: impl Send + 'static,
) -> impl tokio_stream::Stream<Item = std::io::Result<Vec<u8>>> {
    let (out, pieces) = tokio::sync::mpsc::channel(2);
    tokio::spawn(async move {
        let _held = held;
        loop {
            let read = tokio::task::spawn_blocking(move || {
                let mut piece = vec![0; PIECE];
                let read = file.read(&mut piece);
                piece.truncate(*read.as_ref().unwrap_or(&0));
                (file, read.map(|_| piece))
            });
            let Ok((back, piece)) = read.await else { break };
            file = back;
            let is_last = piece.as_ref().map_or(true, Vec::is_empty);
            let sent = match piece {
                Ok(piece) if piece.is_empty() => break,
                piece => out.send_timeout(piece, PATIENCE).await,
            };
            if is_last || sent.is_err() {
                break;
            }
        }
    });
    tokio_stream::wrappers::ReceiverStream::new(pieces)
}

async fn openapi() -> Response {
    ([(CONTENT_TYPE, JSON)], include_str!("openapi.json")).into_response()
}

async fn nothing() -> Refusal {
    Refusal(StatusCode::NOT_FOUND, "there is no such path; see /v1/openapi.json".to_owned())
}

/// Asks what blocks.
async fn blocking<T: Send + 'static>(
    api: &Arc<Api>,
    ask: impl FnOnce(&Keepers) -> anyhow::Result<T> + Send + 'static,
) -> Result<T, Refusal> {
    let keepers = Arc::clone(&api.keepers);
    let asked = tokio::task::spawn_blocking(move || ask(&keepers)).await;
    let failed = |why: String| Refusal(StatusCode::INTERNAL_SERVER_ERROR, why);
    let asked = asked.map_err(|why| failed(why.to_string()))?;
    asked.map_err(|why| failed(format!("{why:#}")))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tokio_stream::StreamExt;

    use super::*;
    use crate::serve::identity::Identity;
    use crate::serve::limits::{Ledger, Limits};

    #[test]
    fn a_download_that_nobody_takes_occupies_no_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(1)
            .enable_time()
            .build()
            .unwrap();
        let ledger = Arc::new(Ledger::new(Limits::default()));
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7; 10 * PIECE + 1]).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        runtime.block_on(async {
            let account = ledger.enter(Identity::Loopback).unwrap();
            let mut pieces = Box::pin(pieces(file, account));
            tokio::time::sleep(Duration::from_millis(50)).await;
            tokio::task::spawn_blocking(|| ()).await.unwrap();
            assert_eq!(ledger.present(), (1, 1), "it is a stream of the client");
            let mut bytes = 0;
            while let Some(piece) = pieces.next().await {
                bytes += piece.unwrap().len();
            }
            assert_eq!((bytes, ledger.present()), (10 * PIECE + 1, (0, 0)));
        });
    }
}
