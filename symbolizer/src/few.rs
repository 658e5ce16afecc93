//! A listener for who asks now and then, as Prometheus and probes do: few connections at a time,
//! none for long. What else the process does keeps its descriptors. Used by `metrics.rs`.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

/// Connections at a time; more wait in the backlog of the socket.
const MOST: usize = 64;
/// How long a connection may be there.
const LONGEST: Duration = Duration::from_secs(15);
/// After an error, as when there are no descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// See the top of this file.
pub struct Few {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl Few {
    /// Of a listener.
    pub fn of(listener: TcpListener) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(MOST)) }
    }
}

impl axum::serve::Listener for Few {
    type Io = Brief;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Brief, SocketAddr) {
        loop {
            // Never closed.
            let Ok(place) = Arc::clone(&self.places).acquire_owned().await else { continue };
            match self.listener.accept().await {
                Ok((stream, from)) => {
                    let end = Box::pin(tokio::time::sleep(LONGEST));
                    return (Brief { stream, end, _place: place }, from);
                }
                Err(error) => {
                    tracing::debug!("cannot accept a connection: {error}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that ends after a while.
pub struct Brief {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Brief {
    fn is_over(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Brief {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.is_over(context)?;
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Brief {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.is_over(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_over(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
