//! Who may talk to a server, and under which name.
//!
//! A name is kept with what was sent under it; what one sent, no other may go on with. Pure but for
//! the file of tokens, which is read again when it changes.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

use super::changed::{Files, Watched};
use crate::receive::peer::{Caller, CertificateName, Peer};

/// Who sent something.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Identity {
    /// A user of this host, over a unix socket.
    User(u32),
    /// Whoever is on this host, over loopback in clear text.
    Loopback,
    /// Whoever can reach the server: `--insecure`.
    Anyone,
    /// Who has a certificate with this name.
    Certificate(CertificateName),
    /// Who knows the token with this name.
    Token(String),
}

impl Identity {
    /// The same, by its name.
    pub(super) fn is_name_of_this_host(name: &str) -> bool {
        name.starts_with("uid:") || name == "loopback"
    }

    /// It is a process of this host, beyond doubt.
    pub(super) fn is_of_this_host(&self) -> bool {
        matches!(self, Self::User(_) | Self::Loopback)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(uid) => write!(f, "uid:{uid}"),
            Self::Loopback => f.write_str("loopback"),
            Self::Anyone => f.write_str("anyone"),
            Self::Certificate(name) => write!(f, "certificate:{name}"),
            Self::Token(name) => write!(f, "token:{name}"),
        }
    }
}

/// Whom a server lets in.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Users who may use the unix socket. If there are neither users nor groups, all who can open
    /// it.
    pub uids: Vec<u32>,
    /// Groups whose processes may.
    pub gids: Vec<u32>,
    /// Tokens, one a line: a name, white space, the token.
    pub tokens: Option<PathBuf>,
}

impl Allowed {
    /// Every user who can open the unix socket may use it.
    pub(super) fn is_every_user(&self) -> bool {
        self.uids.is_empty() && self.gids.is_empty()
    }
}

/// Why somebody is not let in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Denied {
    #[error("uid {uid} and gid {gid} are not among those of --allow-uid and --allow-gid")]
    User { uid: u32, gid: u32 },
    #[error("give a client certificate, or a token as `authorization: Bearer TOKEN`")]
    NoName,
    #[error("the token is not one of --token-file")]
    UnknownToken,
}

/// Lets callers in.
#[derive(Debug)]
pub(super) struct Door {
    allowed: Allowed,
    tokens: Option<Mutex<Watched<Tokens>>>,
}

/// Names by the hashes of tokens: to look one up takes no longer for one that is nearly right.
type Tokens = HashMap<[u8; 32], String>;

impl Door {
    /// One for these.
    ///
    /// # Errors
    /// When the tokens cannot be read.
    pub(super) fn new(allowed: Allowed) -> io::Result<Self> {
        let tokens = allowed.tokens.clone();
        let tokens =
            tokens.map(|path| Watched::new(Files::new([path]), read_tokens)).transpose()?;
        Ok(Self { allowed, tokens: tokens.map(Mutex::new) })
    }

    /// The name of a caller.
    ///
    /// # Errors
    /// Why it is not let in.
    pub(super) fn name(&self, caller: &Caller) -> Result<Identity, Denied> {
        match (&caller.peer, &caller.token) {
            (Peer::Unix { uid, gid }, _) => self.user(*uid, *gid),
            (Peer::Loopback, _) => Ok(Identity::Loopback),
            (Peer::Anywhere, _) => Ok(Identity::Anyone),
            (Peer::Certificate(name), _) => Ok(Identity::Certificate(name.clone())),
            (Peer::Tls, Some(token)) => self.token(token),
            (Peer::Tls, None) => Err(Denied::NoName),
        }
    }

    fn user(&self, uid: u32, gid: u32) -> Result<Identity, Denied> {
        let Allowed { uids, gids, .. } = &self.allowed;
        if self.allowed.is_every_user() || uids.contains(&uid) || gids.contains(&gid) {
            return Ok(Identity::User(uid));
        }
        Err(Denied::User { uid, gid })
    }

    fn token(&self, token: &str) -> Result<Identity, Denied> {
        let tokens = self.tokens.as_ref().ok_or(Denied::NoName)?;
        let mut tokens = tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let hash = <[u8; 32]>::from(Sha256::digest(token));
        let name = tokens.now(read_tokens).get(&hash).ok_or(Denied::UnknownToken)?;
        Ok(Identity::Token(name.clone()))
    }
}

/// Lines of a name and a token; empty ones and those that begin with `#` mean nothing.
fn read_tokens(paths: &[PathBuf]) -> io::Result<Tokens> {
    let mut tokens = Tokens::new();
    for path in paths {
        let text = fs::read_to_string(path).map_err(|error| at(path, &error))?;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            let (Some(name), Some(token), None) = (words.next(), words.next(), words.next()) else {
                let wrong = format!("line {} is not a name and a token", number + 1);
                return Err(at(path, &io::Error::new(io::ErrorKind::InvalidData, wrong)));
            };
            if !token.is_ascii() {
                let wrong = format!("line {}: a token has only ASCII characters", number + 1);
                return Err(at(path, &io::Error::new(io::ErrorKind::InvalidData, wrong)));
            }
            tokens.insert(Sha256::digest(token).into(), name.to_owned());
        }
    }
    Ok(tokens)
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(peer: Peer, token: Option<&str>) -> Caller {
        Caller { peer, token: token.map(str::to_owned), is_page: false }
    }

    #[test]
    fn callers_have_the_name_they_can_prove() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        fs::write(&path, "# names\nnode secret-1\n\n other\tsecret-2 \n").unwrap();
        let tokens = Some(path.clone());
        let door = Door::new(Allowed { uids: vec![7], gids: vec![8], tokens }).unwrap();
        let name = |peer: &Peer, token| door.name(&caller(peer.clone(), token));
        let token = |name: &str| Ok(Identity::Token(name.to_owned()));
        assert_eq!(name(&Peer::Tls, Some("secret-2")), token("other"));
        assert_eq!(name(&Peer::Tls, Some("secret-")), Err(Denied::UnknownToken));
        assert_eq!(name(&Peer::Tls, None), Err(Denied::NoName));
        assert_eq!(name(&Peer::Unix { uid: 7, gid: 1 }, None), Ok(Identity::User(7)));
        assert_eq!(name(&Peer::Unix { uid: 1, gid: 8 }, None), Ok(Identity::User(1)));
        assert!(name(&Peer::Unix { uid: 1, gid: 1 }, None).is_err());
        // A certificate is proof enough.
        let certificate = CertificateName("spiffe://x/node".to_owned());
        let with = name(&Peer::Certificate(certificate.clone()), Some("wrong"));
        assert_eq!(with, Ok(Identity::Certificate(certificate)));
        // Read again when it changes; what cannot be read changes nothing.
        fs::write(&path, "node another-1\n").unwrap();
        assert_eq!(name(&Peer::Tls, Some("another-1")), token("node"));
        assert_eq!(name(&Peer::Tls, Some("secret-1")), Err(Denied::UnknownToken));
        fs::write(&path, "node gehe\u{ef}m\n").unwrap();
        assert!(
            read_tokens(std::slice::from_ref(&path)).unwrap_err().to_string().contains("ASCII")
        );
        fs::write(&path, "node\n").unwrap();
        assert_eq!(name(&Peer::Tls, Some("another-1")), token("node"));
    }
}
