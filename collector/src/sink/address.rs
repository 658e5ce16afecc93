//! Where symbolizers are: addresses as they are typed, and connections to them.
//!
//! A name may have many addresses. They are looked up for each connection and tried in an order
//! left to chance, so that collectors spread over the symbolizers behind a name.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::credentials::Credentials;

/// How long a connection to one address may take.
const CONNECT: Duration = Duration::from_secs(3);
/// Pings over an idle connection: one that is dead is given up after twice as long.
const PING: Duration = Duration::from_secs(10);

/// An address of symbolizers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket in the file system.
    Unix(PathBuf),
    /// A port of a host.
    Tcp {
        /// Over TLS, else in clear text.
        tls: bool,
        /// Its name or IP address; an IPv6 address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

/// Not an address.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum AddressError {
    /// Nothing that is known begins like this.
    #[error("write unix:/path/to/socket, https://host:port or http://host:port")]
    Scheme,
    /// A socket without a place.
    #[error("write the path of the socket, as unix:/run/stackwire.sock")]
    NoPath,
    /// Only a part of an address.
    #[error("write host and port, as https://host:4400")]
    NoPort,
    /// More than an address.
    #[error("what follows the port has no meaning; write https://host:port")]
    Path,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            // As URLs have it, too: unix:///run/x.
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() {
                Err(AddressError::NoPath)
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        let (tls, rest) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(AddressError::Scheme),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = rest.rsplit_once(':').ok_or(AddressError::NoPort)?;
        let host = match host.strip_prefix('[') {
            Some(host) => host.strip_suffix(']').ok_or(AddressError::NoPort)?,
            // The colons of an IPv6 address without a port.
            None if host.contains(':') => return Err(AddressError::NoPort),
            None => host,
        };
        if port.contains('/') {
            return Err(AddressError::Path);
        }
        let port = port.parse().ok().filter(|_| !host.is_empty());
        let port = port.ok_or(AddressError::NoPort)?;
        Ok(Self::Tcp { tls, host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { tls, host, port } => {
                let scheme = if *tls { "https" } else { "http" };
                if host.contains(':') {
                    write!(f, "{scheme}://[{host}]:{port}")
                } else {
                    write!(f, "{scheme}://{host}:{port}")
                }
            }
        }
    }
}

impl Address {
    /// Whether what is sent there leaves this host in clear text.
    #[must_use]
    pub fn is_clear_text(&self) -> bool {
        match self {
            Self::Unix(_) | Self::Tcp { tls: true, .. } => false,
            Self::Tcp { host, .. } => {
                let ip = host.parse::<IpAddr>().map(|ip| ip.to_canonical());
                host != "localhost" && !ip.is_ok_and(|ip| ip.is_loopback())
            }
        }
    }

    /// Whether it is reached over TLS.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        matches!(self, Self::Tcp { tls: true, .. })
    }

    /// Connects.
    ///
    /// # Errors
    /// Why none of the addresses could be reached, in words.
    pub(super) async fn connect(&self, credentials: &Credentials) -> Result<Channel, String> {
        // For headers alone: the connection is made below.
        let authority = match self {
            Self::Unix(_) => "http://localhost".to_owned(),
            Self::Tcp { .. } => self.to_string(),
        };
        let endpoint = Endpoint::try_from(authority).map_err(|error| with_causes(&error))?;
        let endpoint = endpoint
            .connect_timeout(CONNECT)
            .keep_alive_while_idle(true)
            .keep_alive_timeout(PING)
            .http2_keep_alive_interval(PING);
        let endpoint = match self {
            Self::Tcp { tls: true, host, .. } => {
                let tls = credentials.tls(host).map_err(|error| error.to_string())?;
                endpoint.tls_config(tls).map_err(|error| with_causes(&error))?
            }
            _ => endpoint,
        };
        match self {
            Self::Unix(path) => {
                let path = path.clone();
                let stream = UnixStream::connect(path).await.map_err(|error| error.to_string())?;
                over(endpoint, stream).await
            }
            Self::Tcp { host, port, .. } => {
                let mut failed = String::new();
                for address in addresses(host, *port).await? {
                    match timeout(CONNECT, TcpStream::connect(address)).await {
                        Ok(Ok(stream)) => {
                            // Small messages wait for an answer.
                            let _ = stream.set_nodelay(true);
                            match over(endpoint.clone(), stream).await {
                                Ok(channel) => return Ok(channel),
                                Err(error) => failed = format!("{address}: {error}"),
                            }
                        }
                        Ok(Err(error)) => failed = format!("{address}: {error}"),
                        Err(_elapsed) => failed = format!("{address}: no answer"),
                    }
                }
                Err(failed)
            }
        }
    }
}

async fn over<S>(endpoint: Endpoint, stream: S) -> Result<Channel, String>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let mut stream = Some(TokioIo::new(stream));
    let once = service_fn(move |_uri| {
        let stream = stream.take().ok_or_else(|| std::io::Error::other("connected once"));
        async move { stream }
    });
    endpoint.connect_with_connector(once).await.map_err(|error| with_causes(&error))
}

/// All addresses of a host, in an order left to chance.
async fn addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let found = lookup_host((host, port)).await.map_err(|error| error.to_string())?;
    let mut found: Vec<SocketAddr> = found.collect();
    for last in (1..found.len()).rev() {
        found.swap(last, chance(last as u64 + 1) as usize);
    }
    Ok(found)
}

/// A number below `end`.
pub(super) fn chance(end: u64) -> u64 {
    let mut bytes = [0; 8];
    // Without chance all do the same, which works as well.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u64::from_le_bytes(bytes) % end.max(1)
}

/// tonic's errors say "transport error" and keep the reason below.
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in
            ["unix:/run/x.sock", "http://host:1", "http://10.0.0.1:65535", "http://[::1]:4400"]
        {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("unix:///run/x".parse(), Ok(Address::Unix("/run/x".into())));
        assert_eq!("http://h:1/".parse::<Address>().unwrap().to_string(), "http://h:1");
        let wrong = |text: &str| text.parse::<Address>().unwrap_err();
        assert_eq!(wrong("host:4400"), AddressError::Scheme);
        assert_eq!(wrong("ftp://host:4400"), AddressError::Scheme);
        assert_eq!(wrong("unix:"), AddressError::NoPath);
        for text in ["http://host", "http://::1:4400", "http://:1", "http://h:70000", "http://h:"] {
            assert_eq!(wrong(text), AddressError::NoPort, "{text}");
        }
        assert_eq!(wrong("http://h:1/x"), AddressError::Path);
        let clear = |text: &str| text.parse::<Address>().unwrap().is_clear_text();
        assert!(["http://h:1", "http://10.0.0.1:1", "http://[::2]:1"].into_iter().all(clear));
        assert!(
            !["https://h:1", "http://127.0.0.9:1", "http://[::1]:1", "http://localhost:1"]
                .into_iter()
                .any(clear)
        );
    }
}
