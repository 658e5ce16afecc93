//! Who is at the other end of a connection, as far as the connection tells.
//!
//! Facts alone: what an identity may do is decided by `serve/`. Made where connections are
//! accepted, read by the gRPC service.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::Version;
use axum::http::header::{AUTHORIZATION, HOST, HeaderMap, ORIGIN};
use axum::http::uri::{Authority, Uri};

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

impl Connected {
    /// Where a request is from, for the log.
    #[must_use]
    pub fn from(connected: Option<&Self>) -> String {
        connected.map_or("nobody knows where".to_owned(), |it| it.peer.to_string())
    }
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
    /// A web page may have had its browser send this.
    pub is_page: bool,
}

impl Caller {
    /// Who sends a request, if its connection tells.
    #[must_use]
    pub fn of(
        connected: Option<&Connected>,
        (version, uri): (Version, &Uri),
        headers: &HeaderMap,
    ) -> Option<Self> {
        let peer = connected?.peer.clone();
        let authorization = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        // RFC 9110: the scheme has no case.
        let token = authorization.and_then(|value| value.split_once(' '));
        let token = token.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let token = token.map(|(_, token)| token.to_owned());
        let is_page = is_of_page(&peer, (version, uri), headers);
        Some(Self { peer, token, is_page })
    }
}

/// Whether a web page may have had its browser send this: browsers say which page it is, or were
/// led to this host by a name that is not its own (DNS rebinding). On other connections there is a
/// proof of who sends it, which a page does not have.
fn is_of_page(peer: &Peer, (version, uri): (Version, &Uri), headers: &HeaderMap) -> bool {
    if headers.contains_key(ORIGIN) {
        return true;
    }
    // Browsers speak HTTP/2 over TLS alone.
    if *peer != Peer::Loopback || version == Version::HTTP_2 {
        return false;
    }
    let of_header = headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = uri.authority().map(Authority::as_str).or(of_header).unwrap_or_default();
    !is_own_name(host)
}

/// `host` or `host:port`, by address, as `localhost`, or as this host is called.
fn is_own_name(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else { return authority.is_empty() };
    let host = authority.host().trim_matches(['[', ']']).to_ascii_lowercase();
    let first = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    let uname = rustix::system::uname();
    host.parse::<IpAddr>().is_ok()
        || host == "localhost"
        || host.ends_with(".localhost")
        || first(&host) == first(&uname.nodename().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use axum::http::header::HeaderName;

    use super::*;

    #[test]
    fn web_pages_are_known() {
        let of = |version, peer: &Peer, uri: &str, header: Option<(HeaderName, &str)>| {
            let mut headers = HeaderMap::new();
            if let Some((name, value)) = header {
                headers.insert(name, value.parse().unwrap());
            }
            is_of_page(peer, (version, &uri.parse().unwrap()), &headers)
        };
        let is = |peer: &Peer, uri: &str, header| of(Version::HTTP_11, peer, uri, header);
        let here = Peer::Loopback;
        for own in ["127.0.0.1:4400", "[::1]:4400", "localhost", "LOCALHOST:1", "a.localhost"] {
            assert!(!is(&here, "/v1/captures", Some((HOST, own))), "{own}");
            assert!(!is(&here, &format!("http://{own}/x"), None), "{own}");
        }
        assert!(!is(&here, "/v1/captures", None), "HTTP/1.0");
        for other in ["evil.example", "evil.example:4400", "127.0.0.1.evil.example", "a b"] {
            assert!(is(&here, "/v1/captures", Some((HOST, other))), "{other}");
        }
        assert!(!of(Version::HTTP_2, &here, "http://tunnel:4400/x", None));
        let tls = Peer::Tls;
        assert!(!is(&tls, "/v1/captures", Some((HOST, "stackwire.example"))));
        assert!(is(&tls, "/v1/captures", Some((ORIGIN, "https://evil.example"))));
    }
}
