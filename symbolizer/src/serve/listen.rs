//! Where a server listens, and the way of a connection from there to the gRPC service: TLS if it is
//! to be, who is at the other end, and limits of time and number for those who are nobody yet.

use std::fmt;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tonic::transport::server::Connected;

use super::counts::{Counts, Refused};
use super::crowd::{Crowd, Full, Member};
use super::identity::Allowed;
use super::tls::{self, Certificates};
use crate::receive::peer::{self, Admitted, Peer};

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// `host:port`.
    Tcp(String),
    /// `unix:/path/to/socket`.
    Unix(PathBuf),
}

impl FromStr for Listen {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text.strip_prefix("unix:") {
            Some(path) => Self::Unix(path.strip_prefix("//").unwrap_or(path).into()),
            None => Self::Tcp(text.to_owned()),
        })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A connection with who is at its other end.
pub(super) struct Connection {
    stream: Box<dyn Stream>,
    connected: peer::Connected,
    /// When it is closed unless somebody was let in.
    deadline: Pin<Box<Sleep>>,
    /// For the log.
    from: String,
    counts: Counts,
    /// What its first bytes are, and how many came while nobody was let in.
    first: [u8; 3],
    come: usize,
    /// It is closed, and the log says why.
    is_refused: bool,
    /// Its place among the connections there may be.
    _place: OwnedSemaphorePermit,
    /// And among those of its address.
    _member: Member,
}

impl Connection {
    /// Why it is closed, if nobody was let in over it: it takes too long, or brings too much.
    fn refused(&mut self, context: &mut Context<'_>) -> Option<io::Error> {
        let gone = || io::Error::from(io::ErrorKind::TimedOut);
        if self.is_refused {
            return Some(gone());
        }
        if self.connected.admitted.get() {
            return None;
        }
        let is_late = self.deadline.as_mut().poll(context).is_ready();
        // Of HTTP/2, the windows of streams and of the connection limit what comes.
        let is_large = self.first != HTTP2 && self.come > MAX_HEADERS;
        let why = match (is_late, is_large) {
            (true, _) => "nobody was let in over it in time",
            (_, true) => "its headers are too large",
            _ => return None,
        };
        let from = &self.from;
        tracing::warn!(from, "a connection of {from} is refused: {why}");
        self.counts.refuse(Refused::Handshake);
        self.is_refused = true;
        Some(gone())
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a connection may be there until somebody is let in over it.
const ADMISSION: Duration = Duration::from_secs(15);
/// Bytes of HTTP/1 before somebody is let in.
const MAX_HEADERS: usize = 32 << 10;
/// How HTTP/2 begins.
const HTTP2: [u8; 3] = *b"PRI";
/// Handshakes at a time; more wait in the backlog of the socket.
const HANDSHAKES: usize = 256;
/// After an error of the listener, as when there are no descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Something that listens.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Listens on an address.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) async fn bind(listen: &Listen, allowed: &Allowed) -> io::Result<Self> {
        match listen {
            Listen::Unix(path) => {
                // A socket from before, that nobody listens on; anything else is not ours.
                if fs::symlink_metadata(path).is_ok_and(|found| is_socket(&found)) {
                    if UnixStream::connect(path).await.is_ok() {
                        return Err(io::Error::new(
                            io::ErrorKind::AddrInUse,
                            "another program listens there",
                        ));
                    }
                    fs::remove_file(path)?;
                }
                let listener = UnixListener::bind(path)?;
                if !allowed.is_every_user() {
                    // Everybody may connect, and is asked who it is.
                    fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
                }
                Ok(Self::Unix(listener))
            }
            Listen::Tcp(address) => Ok(Self::Tcp(TcpListener::bind(address).await?)),
        }
    }

    /// The address, with the port that was chosen.
    pub(super) fn address(&self, listen: &Listen) -> String {
        match self {
            Self::Tcp(listener) => {
                listener.local_addr().map_or(listen.to_string(), |bound| bound.to_string())
            }
            Self::Unix(_) => listen.to_string(),
        }
    }

    /// Whether other hosts can reach it.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Tcp(listener) => {
                !listener.local_addr().is_ok_and(|bound| is_loopback(bound.ip()))
            }
            Self::Unix(_) => false,
        }
    }

    /// Hands connections out until nobody takes them. `places`: how many there may be; `crowd`: of
    /// one address.
    pub(super) async fn run(
        self,
        certificates: Option<Arc<Certificates>>,
        (places, crowd): (Arc<Semaphore>, Arc<Crowd>),
        counts: Counts,
        out: mpsc::Sender<io::Result<Connection>>,
    ) {
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
        let greeting = Crowd::of(HANDSHAKES);
        loop {
            // Neither is ever closed.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            let Ok(handshake) = Arc::clone(&handshakes).acquire_owned().await else { return };
            let accepted = tokio::select! {
                accepted = self.accept() => accepted,
                () = out.closed() => return,
            };
            let raw = match accepted {
                Ok(raw) => raw,
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {error}");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let from = raw.from();
            let member = crowd.enter(raw.ip(), Full::Refuse);
            let both = member.zip(greeting.enter(raw.ip(), Full::Replace));
            let Some((member, mut greeter)) = both else {
                tracing::warn!(from, "a connection of {from} is refused: it has too many");
                counts.refuse(Refused::Handshake);
                continue;
            };
            let (certificates, counts, out) = (certificates.clone(), counts.clone(), out.clone());
            tokio::spawn(async move {
                let _handshake = handshake;
                let greeted = tokio::select! {
                    greeted = raw.greet(certificates) => greeted,
                    () = greeter.is_replaced() => Err(io::Error::other("others of its address came")),
                    () = tokio::time::sleep(HANDSHAKE) => {
                        Err(io::Error::other("no handshake in time"))
                    }
                };
                match greeted {
                    Ok((stream, peer)) => {
                        let connection = Connection {
                            stream,
                            connected: peer::Connected { peer, admitted: Admitted::default() },
                            from,
                            counts,
                            first: [0; 3],
                            come: 0,
                            is_refused: false,
                            _member: member,
                            deadline: Box::pin(tokio::time::sleep(ADMISSION)),
                            _place: place,
                        };
                        // Nobody takes it when the server stops.
                        let _ = out.send(Ok(connection)).await;
                    }
                    Err(error) => {
                        tracing::warn!(from, "a connection of {from} is refused: {error}");
                        counts.refuse(Refused::Handshake);
                    }
                }
            });
        }
    }

    async fn accept(&self) -> io::Result<Raw> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                // Acknowledgements are small, and waited for.
                let _ = stream.set_nodelay(true);
                Ok(Raw::Tcp(stream, from.ip()))
            }
            Self::Unix(listener) => Ok(Raw::Unix(listener.accept().await?.0)),
        }
    }
}

enum Raw {
    Tcp(TcpStream, IpAddr),
    Unix(UnixStream),
}

impl Raw {
    fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(_, from) => Some(*from),
            Self::Unix(_) => None,
        }
    }

    /// Where it is from, for the log.
    fn from(&self) -> String {
        match self {
            Self::Tcp(_, from) => from.to_string(),
            Self::Unix(_) => "this host".to_owned(),
        }
    }

    async fn greet(
        self,
        certificates: Option<Arc<Certificates>>,
    ) -> io::Result<(Box<dyn Stream>, Peer)> {
        match (self, certificates) {
            (Self::Unix(stream), _) => {
                let found = stream.peer_cred()?;
                let peer = Peer::Unix { uid: found.uid(), gid: found.gid() };
                Ok((Box::new(stream), peer))
            }
            (Self::Tcp(stream, from), None) => {
                let peer = if is_loopback(from) { Peer::Loopback } else { Peer::Anywhere };
                Ok((Box::new(stream), peer))
            }
            (Self::Tcp(stream, _), Some(certificates)) => {
                let stream = TlsAcceptor::from(certificates.now()).accept(stream).await?;
                let sent = stream.get_ref().1.peer_certificates();
                let peer = match sent.and_then(|sent| sent.first()) {
                    None => Peer::Tls,
                    Some(certificate) => Peer::Certificate(
                        tls::name(certificate)
                            .ok_or_else(|| io::Error::other("its certificate has no name"))?,
                    ),
                };
                Ok((Box::new(stream), peer))
            }
        }
    }
}

/// Of this host, IPv4 written as IPv6 included.
fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

fn is_socket(found: &fs::Metadata) -> bool {
    found.file_type().is_socket()
}

impl Connected for Connection {
    type ConnectInfo = peer::Connected;

    fn connect_info(&self) -> peer::Connected {
        self.connected.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(refused) = self.refused(context) {
            return Poll::Ready(Err(refused));
        }
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        let new = &into.filled()[before..];
        let (known, first) = (self.come, &mut self.first);
        for (place, byte) in first.iter_mut().skip(known).zip(new) {
            *place = *byte;
        }
        self.come = self.come.saturating_add(new.len());
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Who takes no answers is not read from.
        if let Some(refused) = self.refused(context) {
            return Poll::Ready(Err(refused));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(refused) = self.refused(context) {
            return Poll::Ready(Err(refused));
        }
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(refused) = self.refused(context) {
            return Poll::Ready(Err(refused));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
