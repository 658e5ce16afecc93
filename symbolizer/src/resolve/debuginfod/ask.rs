//! Asking: server after server, try after try, the body piece by piece.
//!
//! Every wait has an end. Called by the tier in `mod.rs`, which says until when.

use std::io::Write;
use std::time::Duration;

use reqwest::{Response, StatusCode};
use stackwire_cache::{Absent, Cache, Meta, Pending};
use stackwire_elf::{Elf, Scratch};
use stackwire_model::BuildId;

use super::progress::Progress;
use super::server::Server;
use super::{Artifact, Debuginfod, chain};

/// Largest file taken; debug information of a browser has 5 GB.
const MAX_BYTES: u64 = 8 << 30;
/// Tries of a server that answers with 5xx or is cut off.
const TRIES: u32 = 3;
/// Before the second try; four times as long before the third.
const BACK_OFF: Duration = Duration::from_millis(100);

impl Debuginfod {
    /// What the first server sends that has it, written to a [`Pending`] of `store`.
    pub(super) async fn ask_servers<'s>(
        &self,
        build_id: BuildId,
        artifact: Artifact,
        store: &'s Cache,
    ) -> Result<(Pending<'s>, Meta), Absent> {
        let mut failures = Vec::new();
        let mut malformed = Vec::new();
        let mut too_large = None;
        for server in &self.servers {
            if let Some(why) = server.is_left_alone() {
                failures.push(format!("{}: {why}", server.shown));
                continue;
            }
            match self.ask(server, build_id, artifact, store).await {
                Ok(sent) => {
                    server.answered();
                    return Ok(sent);
                }
                Err(Absent::Missing(_)) => server.answered(),
                Err(Absent::Malformed(why)) => {
                    server.answered();
                    malformed.push(format!("{}: {why}", server.shown));
                }
                Err(Absent::TooLarge(why)) => {
                    server.answered();
                    too_large = Some(format!("{}: {why}", server.shown));
                }
                Err(error) => {
                    server.failed();
                    failures.push(format!("{}: {error}", server.shown));
                }
            }
        }
        if let Some(why) = too_large {
            return Err(Absent::TooLarge(why));
        }
        // A server that could not be asked may have it: nothing to remember.
        match (failures.is_empty(), malformed.is_empty()) {
            (false, _) => Err(Absent::Failed(failures.join("; "))),
            (true, false) => Err(Absent::Malformed(malformed.join("; "))),
            (true, true) => Err(missing(build_id)),
        }
    }

    async fn ask<'s>(
        &self,
        server: &Server,
        build_id: BuildId,
        artifact: Artifact,
        store: &'s Cache,
    ) -> Result<(Pending<'s>, Meta), Absent> {
        let path = artifact.path();
        let [url, shown] =
            [&server.url, &server.shown].map(|url| format!("{url}/buildid/{build_id}/{path}"));
        let mut tries = 1;
        loop {
            match self.ask_once(&url, &shown, store).await {
                Err(Try::Again(why)) if tries == TRIES => {
                    return Err(Absent::Failed(format!("{why}, {TRIES} times")));
                }
                Err(Try::Again(_)) => {
                    tokio::time::sleep(BACK_OFF * 4u32.pow(tries - 1)).await;
                    tries += 1;
                }
                Err(Try::Missing) => return Err(missing(build_id)),
                Err(Try::No(error)) => return Err(error),
                Ok(pending) => {
                    if !matches!(artifact, Artifact::Section(_)) {
                        verify(&pending, build_id)?;
                    }
                    return Ok((pending, Meta { quality: 0, origin: shown }));
                }
            }
        }
    }

    async fn ask_once<'s>(
        &self,
        url: &str,
        shown: &str,
        store: &'s Cache,
    ) -> Result<Pending<'s>, Try> {
        let stalled = || {
            let seconds = (self.timeout / 3).as_secs_f32();
            Try::No(Absent::Failed(format!("silent for {seconds:.1} s")))
        };
        let answer = tokio::time::timeout(self.timeout / 3, self.client.get(url).send()).await;
        let answer = answer.map_err(|_elapsed| stalled())?.map_err(|error| cut(&error))?;
        let status = answer.status();
        match status {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Err(Try::Missing),
            _ if status.is_server_error() => return Err(Try::Again(status.to_string())),
            _ => return Err(Try::No(Absent::Failed(status.to_string()))),
        }
        let declared = answer.content_length();
        if let Some(bytes) = declared.filter(|&bytes| bytes > MAX_BYTES) {
            return Err(Try::No(Absent::Malformed(format!(
                "sends {bytes} bytes, more than any debug file has"
            ))));
        }
        // What the cache would drop again at once is not fetched.
        let room = store.max_bytes().min(MAX_BYTES);
        if let Some(bytes) = declared.filter(|&bytes| bytes > room) {
            return Err(Try::No(too_large(bytes, room)));
        }
        let mut pending = store.begin().map_err(|error| Try::No(error.into()))?;
        let progress = Progress::of(shown, declared);
        self.take_body(answer, &mut pending, stalled, progress, room).await?;
        Ok(pending)
    }

    /// Writes the body as it comes: never more than a piece of it is in memory.
    async fn take_body(
        &self,
        mut answer: Response,
        to: &mut Pending<'_>,
        stalled: impl Fn() -> Try,
        mut progress: Progress,
        room: u64,
    ) -> Result<(), Try> {
        let mut taken = 0;
        loop {
            let piece = tokio::time::timeout(self.timeout / 3, answer.chunk()).await;
            let piece = piece.map_err(|_elapsed| stalled())?.map_err(|error| cut(&error))?;
            let Some(piece) = piece else { return Ok(()) };
            taken += piece.len() as u64;
            progress.show(taken);
            if taken > room {
                return Err(Try::No(too_large(taken, room)));
            }
            // A full disk is no fault of the server.
            to.write_all(&piece).map_err(|error| {
                Try::No(Absent::Failed(format!("cannot write to the cache: {error}")))
            })?;
        }
    }
}

/// How a try ended.
enum Try {
    /// Worth another.
    Again(String),
    /// The server does not have it.
    Missing,
    /// It would end the same way.
    No(Absent),
}

/// An error of the connection: cut ones are worth another try, others not.
fn cut(error: &reqwest::Error) -> Try {
    let text = chain(error);
    let again = !error.is_redirect() && !error.is_builder() && !error.is_connect();
    if again { Try::Again(text) } else { Try::No(Absent::Failed(text)) }
}

/// Whether what came is what was asked for.
fn verify(pending: &Pending<'_>, build_id: BuildId) -> Result<(), Absent> {
    let file = pending.reader().map_err(|error| Absent::Failed(error.to_string()))?;
    let elf = Elf::open(file, &Scratch::default())
        .map_err(|error| Absent::Malformed(format!("sends what is {error}")))?;
    match elf.ids.gnu {
        Some(id) if id == build_id => Ok(()),
        Some(id) => Err(Absent::Malformed(format!("sends a file with build-id {id}"))),
        None => Err(Absent::Malformed("sends a file without a build-id".to_owned())),
    }
}

fn too_large(bytes: u64, room: u64) -> Absent {
    Absent::TooLarge(format!(
        "sends {bytes} bytes, and the cache has room for {room}: raise --symbol-cache-max"
    ))
}

fn missing(build_id: BuildId) -> Absent {
    Absent::Missing(format!("no server had build-id {build_id}"))
}
