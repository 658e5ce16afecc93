//! How many connections come from one address: the last quarter of all is for others, so that one
//! host keeps nobody out. Called by `listen.rs`.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Those there are, by address, of which each has a share.
#[derive(Debug)]
pub(super) struct Crowd {
    most: usize,
    all: Mutex<All>,
}

#[derive(Debug, Default)]
struct All {
    next: u64,
    /// The oldest first.
    there: HashMap<IpAddr, VecDeque<Place>>,
}

#[derive(Debug)]
struct Place {
    number: u64,
    /// Dropped, it tells the member to leave.
    _stay: oneshot::Sender<()>,
}

/// What becomes of one that comes when its address has its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// It does not come in.
    Refuse,
    /// The oldest of the address leaves: who is honest needs milliseconds, and is not the oldest.
    Replace,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Member {
    crowd: Arc<Crowd>,
    place: Option<(IpAddr, u64)>,
    leave: Option<oneshot::Receiver<()>>,
}

impl Crowd {
    /// `all`: how many there may be together.
    pub(super) fn of(all: usize) -> Arc<Self> {
        Arc::new(Self { most: all - all / 4, all: Mutex::default() })
    }

    /// Adds one. Those without an address are not counted.
    pub(super) fn enter(self: &Arc<Self>, from: Option<IpAddr>, full: Full) -> Option<Member> {
        let Some(from) = from.map(network) else {
            return Some(Member { crowd: Arc::clone(self), place: None, leave: None });
        };
        let mut all = self.lock();
        let number = all.next;
        all.next += 1;
        let of_address = all.there.entry(from).or_default();
        if of_address.len() >= self.most {
            if full == Full::Refuse {
                return None;
            }
            of_address.pop_front();
        }
        let (stay, leave) = oneshot::channel();
        of_address.push_back(Place { number, _stay: stay });
        let place = Some((from, number));
        Some(Member { crowd: Arc::clone(self), place, leave: Some(leave) })
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    /// Waits until another takes its place.
    pub(super) async fn is_replaced(&mut self) {
        match &mut self.leave {
            Some(leave) => _ = leave.await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let Some((from, number)) = self.place else { return };
        let mut all = self.crowd.lock();
        if let Some(of_address) = all.there.get_mut(&from) {
            of_address.retain(|place| place.number != number);
            if of_address.is_empty() {
                all.there.remove(&from);
            }
        }
    }
}

/// A host has as many addresses of IPv6 as it likes in its /64.
fn network(from: IpAddr) -> IpAddr {
    match from.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> Option<IpAddr> {
        Some(text.parse().unwrap())
    }

    #[test]
    fn one_address_leaves_a_quarter_to_others() {
        let crowd = Crowd::of(100);
        let enter = |from| crowd.enter(from, Full::Refuse);
        let (first, second) = (ip("2001:db8::1"), ip("2001:db8::2:1"));
        let mut there: Vec<Member> = (0..75).map(|_| enter(first).unwrap()).collect();
        assert!(enter(first).is_none() && enter(second).is_none());
        assert!(enter(ip("192.0.2.1")).is_some() && enter(None).is_some());
        there.pop();
        assert!(enter(second).is_some());
        drop(there);
        assert!(crowd.lock().there.is_empty());
    }

    #[test]
    fn the_oldest_leaves_for_the_newest() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let crowd = Crowd::of(4);
            let mut there: Vec<Member> =
                (0..4).map(|_| crowd.enter(ip("192.0.2.1"), Full::Replace).unwrap()).collect();
            there[0].is_replaced().await;
            tokio::select! {
                biased;
                () = there[1].is_replaced() => panic!("it may stay"),
                () = std::future::ready(()) => {}
            }
            assert_eq!(crowd.lock().there.values().map(VecDeque::len).sum::<usize>(), 3);
        });
    }
}
