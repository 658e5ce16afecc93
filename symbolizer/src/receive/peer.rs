//! Who is at the other end of a connection, as far as the connection tells.
//!
//! Facts alone: what an identity may do is decided by `serve/`. Made where connections are
//! accepted, read by the gRPC service.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How a connection came to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Over a socket in the file system, by a process of this user.
    Unix {
        /// Its user, by SO_PEERCRED of unix(7).
        uid: u32,
        /// Its group.
        gid: u32,
    },
    /// In clear text, from this host.
    Loopback,
    /// In clear text, from anywhere.
    Anywhere,
    /// Over TLS, without a certificate.
    Tls,
    /// Over TLS, with a certificate that was verified.
    Certificate(CertificateName),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { uid, gid } => write!(f, "uid {uid}, gid {gid}"),
            Self::Loopback => f.write_str("this host"),
            Self::Anywhere => f.write_str("another host, in clear text"),
            Self::Tls => f.write_str("somebody without a certificate"),
            Self::Certificate(name) => write!(f, "{name}"),
        }
    }
}

/// What a certificate is called: its first URI, else its first DNS name, else the hash of its key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CertificateName(pub String);

impl fmt::Display for CertificateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a connection tells the service of its requests.
#[derive(Clone, Debug)]
pub struct Connected {
    /// Who is at its other end.
    pub peer: Peer,
    /// Whether a request was let in.
    pub admitted: Admitted,
}

/// Set by the service once it knows who calls. A connection that nobody is let in over is closed.
#[derive(Clone, Debug, Default)]
pub struct Admitted(Arc<AtomicBool>);

impl Admitted {
    /// Somebody was let in.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody was.
    #[must_use]
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The connection.
    pub peer: Peer,
    /// What was sent as `authorization: Bearer TOKEN`.
    pub token: Option<String>,
}

/// The header of a request that has a token: `Bearer TOKEN`.
pub const TOKEN: &str = "authorization";

impl Caller {
    /// Who sends a request, if its connection tells.
    #[must_use]
    pub fn of(connected: Option<&Connected>, authorization: Option<&str>) -> Option<Self> {
        let token = authorization.and_then(|value| value.strip_prefix("Bearer "));
        Some(Self { peer: connected?.peer.clone(), token: token.map(str::to_owned) })
    }
}
