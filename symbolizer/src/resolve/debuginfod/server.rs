//! A server: its address, and whether it is left alone for a while after failures.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::DebuginfodError;

/// Failures in a row after which a server is left alone for a while.
const MAX_FAILURES: u32 = 2;
/// How long.
const COOL_DOWN: Duration = Duration::from_secs(60);

/// One server.
#[derive(Debug)]
pub(super) struct Server {
    /// Without a slash at its end.
    pub url: String,
    /// Without a password.
    pub shown: String,
    /// Failures in a row, and when it may be asked again.
    breaker: Mutex<(u32, Option<Instant>)>,
}

impl Server {
    pub fn new(url: &str) -> Result<Self, DebuginfodError> {
        let good =
            reqwest::Url::parse(url).is_ok_and(|url| matches!(url.scheme(), "http" | "https"));
        if !good {
            return Err(DebuginfodError::NotAServer(url.to_owned()));
        }
        let url = url.trim_end_matches('/').to_owned();
        let shown =
            match url.split_once("://").map(|(scheme, rest)| (scheme, rest.rsplit_once('@'))) {
                Some((scheme, Some((_, host)))) => format!("{scheme}://{host}"),
                _ => url.clone(),
            };
        Ok(Self { url, shown, breaker: Mutex::default() })
    }

    pub fn is_left_alone(&self) -> Option<&'static str> {
        let (_, until) = *self.breaker.lock().unwrap_or_else(PoisonError::into_inner);
        until.filter(|&until| Instant::now() < until).map(|_| "not asked again after it failed")
    }

    pub fn answered(&self) {
        *self.breaker.lock().unwrap_or_else(PoisonError::into_inner) = (0, None);
    }

    pub fn failed(&self) {
        let mut breaker = self.breaker.lock().unwrap_or_else(PoisonError::into_inner);
        breaker.0 += 1;
        if breaker.0 >= MAX_FAILURES {
            *breaker = (0, Some(Instant::now() + COOL_DOWN));
        }
    }
}
