//! A server and twenty collectors that replay a real capture, while everything fails that can:
//! either side is killed, links are cut, stalled and corrupted, the disk is full, somebody sends
//! garbage. What was acknowledged is in the windows, once; what was sent is there or counted.
//!
//! `STACKWIRE_CHAOS_SEED` repeats the faults of a run, `STACKWIRE_CHAOS_SECONDS` makes it longer
//! (`make chaos`).

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fastrand::Rng;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, open_epoch, v1};

use crate::support::build::work;
use crate::support::client::hello;
use crate::support::mounted::Tmpfs;
use crate::support::server::{Server, profiles};
use crate::support::tokens::Tokens;
use crate::support::{Pprof, Running, binary, peak_memory, privileged};

const COLLECTORS: usize = 20;
const LINKS: usize = 4;
/// MiB that the server may take for what clients send and for windows.
const SERVER_MEMORY: u64 = 256;
/// What it takes beside that.
const SERVER_AT_REST: u64 = 128;
/// KiB of epochs that a collector keeps.
const BUFFER: u64 = 12;
/// MiB of a replaying collector, which holds the capture as well.
const COLLECTOR_MEMORY: u64 = 64;

/// What a link does to who uses it.
#[derive(Default)]
struct Faults {
    /// Connections made before it grew are cut.
    cuts: AtomicU64,
    /// Pieces that are damaged.
    damages: AtomicU64,
    stalled_until: Mutex<Option<Instant>>,
}

/// A way to the server.
struct Link {
    address: SocketAddr,
    faults: Arc<Faults>,
}

impl Link {
    fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let faults = Arc::<Faults>::default();
        let of_link = Arc::clone(&faults);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // While the server is away, the connection ends at once.
                let Ok(server) = TcpStream::connect(server) else { continue };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let faults = Arc::clone(&of_link);
                    std::thread::spawn(move || carry(from, to, &faults));
                }
            }
        });
        Self { address, faults }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, faults: &Faults) {
    let begun = faults.cuts.load(Ordering::Relaxed);
    let mut piece = vec![0; 16 << 10];
    from.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    loop {
        if faults.cuts.load(Ordering::Relaxed) != begun {
            break;
        }
        let until = *faults.stalled_until.lock().unwrap();
        if until.is_some_and(|until| Instant::now() < until) {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        let read = match from.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(_) => break,
        };
        let take = |left: u64| left.checked_sub(1);
        if faults.damages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            piece[read / 2] ^= 0x10;
        }
        if to.write_all(&piece[..read]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// What a collector says of itself.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    epochs: u64,
    settled: u64,
    taken: u64,
    dropped: u64,
}

struct Collector {
    child: Child,
    name: String,
    ledger: PathBuf,
}

/// One that is over.
struct Ended {
    name: String,
    said: Said,
    /// Not killed.
    is_whole: bool,
}

impl Collector {
    fn start(setting: &Setting, name: String, id: u128, link: &Link) -> Self {
        let ledger = setting.tokens.path(&name);
        let child = Command::new(binary("examples/replay"))
            .arg(&setting.capture)
            .args([format!("--to=https://{}", link.address), format!("--id={id:032x}")])
            .args([format!("--hostname={name}"), format!("--pace={}", setting.pace)])
            .args([format!("--buffer={BUFFER}"), "--drain=60".to_owned()])
            .args(setting.tokens.proofs("alice"))
            .stdout(std::fs::File::create(&ledger).unwrap())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Self { child, name, ledger }
    }

    fn memory(&self) -> u64 {
        peak_memory(self.child.id())
    }

    fn kill(mut self) -> Ended {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.ended(false)
    }

    fn terminate(&self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    fn wait(mut self) -> Ended {
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{}: {status}", self.name);
        self.ended(true)
    }

    fn ended(self, is_whole: bool) -> Ended {
        let text = std::fs::read_to_string(&self.ledger).unwrap();
        // It may have been killed in the middle of a line, or before the first.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let last = whole.lines().last().unwrap_or("0 0 0 0");
        assert_eq!(last.starts_with("end "), is_whole, "{}: {last}", self.name);
        let numbers = last.trim_start_matches("end ").split(' ');
        let numbers: Vec<u64> = numbers.map(|number| number.parse().unwrap()).collect();
        let [epochs, settled, taken, dropped] = numbers[..] else { panic!("{last}") };
        Ended { name: self.name, said: Said { epochs, settled, taken, dropped }, is_whole }
    }
}

struct Setting {
    tokens: Tokens,
    capture: PathBuf,
    /// Milliseconds between the epochs of a collector.
    pace: u64,
}

impl Setting {
    fn server(&self, disk: &Path, listen: &str) -> Server {
        let memory = format!("--memory-max={SERVER_MEMORY}");
        let options = ["--window=15s", "--log-max=64", "--drain-timeout=100s", &memory];
        self.tokens.server(disk, listen, &options)
    }
}

/// Takes a capture, of several epochs with stacks of the kernel and of a program.
fn capture(directory: &Path) -> PathBuf {
    let path = directory.join("real.stackwire");
    let program = Running::start(Command::new(work()).args(["threads", "30"]));
    let status = Command::new(binary("stackwire-collector"))
        .args(["--profile", "--epoch=500ms", "--duration=4s", "--sample-rate=199"])
        .arg(format!("--pid={}", program.pid()))
        .arg(format!("--output={}", path.display()))
        .status();
    assert!(status.unwrap().success());
    path
}

/// Samples of each epoch of a capture.
fn sizes(capture: &Path) -> Vec<u64> {
    let file = BufReader::new(std::fs::File::open(capture).unwrap());
    let mut reader = FrameReader::new(file);
    let mut sizes = Vec::new();
    while let Some(message) = reader.next_message().unwrap() {
        if let Some(Body::Epoch(sealed)) = message.body {
            let epoch = open_epoch(&sealed).unwrap();
            sizes.push(epoch.samples.iter().map(|of| of.thread.len() as u64).sum());
        }
    }
    sizes
}

/// What windows have of a collector.
#[derive(Default)]
struct Found {
    /// How often each epoch.
    epochs: BTreeMap<u64, u64>,
    samples: u64,
    /// Said to be lost.
    lost: u64,
    /// What each window says of that.
    said: Vec<String>,
}

fn found(directory: &Path) -> BTreeMap<String, Found> {
    let mut all: BTreeMap<String, Found> = BTreeMap::new();
    for path in profiles(directory) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let host = name.split('-').next().unwrap().to_owned();
        let profile = Pprof::read(&path);
        let of_host = all.entry(host.clone()).or_default();
        of_host.samples += profile.count();
        for sample in &profile.samples {
            let marked = sample.labels["thread"].strip_prefix(&format!("{host}:"));
            if let Some(number) = marked {
                *of_host.epochs.entry(number.parse().unwrap()).or_default() += sample.count;
            }
        }
        let lost = profile.comments.iter().filter_map(|comment| {
            let (count, _) = comment.strip_prefix("lost ")?.split_once(' ')?;
            count.parse::<u64>().ok()
        });
        let lost: u64 = lost.sum();
        of_host.lost += lost;
        of_host.said.push(format!("{name}: {lost}"));
    }
    for (host, lost) in without_samples(&directory.join("captures")) {
        let of_host = all.entry(host).or_default();
        of_host.lost += lost;
        of_host.said.push(format!("a window without samples: {lost}"));
    }
    all
}

/// What windows say was lost that have no profile because they have no samples, with their hosts.
fn without_samples(captures: &Path) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(captures).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "stackwire") {
            continue;
        }
        let mut reader = FrameReader::new(BufReader::new(std::fs::File::open(&path).unwrap()));
        let mut host = String::new();
        while let Some(message) = reader.next_message().unwrap() {
            match message.body {
                Some(Body::Hello(hello)) => host = hello.hostname,
                Some(Body::End(end)) if end.epochs == 0 => {
                    found.push((host.clone(), end.lost.iter().map(|lost| lost.count).sum()));
                }
                _ => {}
            }
        }
    }
    found
}

/// Says what does not make sense as a stream, and what does until it is looked into.
fn garbage(rng: &mut Rng, server: &Server, setting: &Setting) {
    let mut noise = vec![0; 4096];
    rng.fill(&mut noise);
    if rng.bool() {
        let address = server.address.parse().unwrap();
        if let Ok(mut raw) = TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
            // Refused in the middle of it, perhaps.
            let _ = raw.write_all(&noise);
        }
        return;
    }
    let sealed = v1::SealedEpoch { number: 0, length: rng.u32(..), zstd: noise };
    let message = v1::CollectorMessage { body: Some(Body::Epoch(sealed)) };
    let client = setting.tokens.client(server, "mallory");
    let heard = client.send(hello(rng.u8(..)), vec![message], |_| Vec::new());
    assert!(heard.acked.is_none(), "{heard:?}");
}

fn number(name: &str, otherwise: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}: {text}")))
}

#[test]
fn whatever_fails_what_is_acknowledged_is_in_the_windows_once() {
    if !privileged() {
        return;
    }
    let seconds = number("STACKWIRE_CHAOS_SECONDS", 15);
    let seed = number("STACKWIRE_CHAOS_SEED", fastrand::u64(..));
    // Said now: the run may not come to its end.
    eprintln!("chaos of {seconds} s: STACKWIRE_CHAOS_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let tokens = Tokens::new();
    let capture = capture(&tokens.path(""));
    let sizes = sizes(&capture);
    assert!(sizes.len() >= 6 && sizes.iter().all(|samples| *samples > 0), "{sizes:?}");
    let setting = Setting { tokens, capture, pace: 200 };
    // Unmounted before the directory is removed.
    let disk = setting.tokens.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let _disk = Tmpfs::mount(&disk, "400m");

    let mut server = setting.server(&disk, "127.0.0.1:0");
    let address: SocketAddr = server.address.parse().unwrap();
    let links: Vec<Link> = (0..LINKS).map(|_| Link::to(address)).collect();
    let mut started = 0;
    let mut start = |rng: &mut Rng, slot: usize| {
        started += 1;
        let (name, id) = (format!("c{started}"), rng.u128(..));
        Collector::start(&setting, name, id, &links[slot % LINKS])
    };
    let mut collectors: Vec<Collector> =
        (0..COLLECTORS).map(|slot| start(&mut rng, slot)).collect();
    let mut ended = Vec::new();
    let mut faults: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut of_server, mut of_collectors) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(rng.u64(100..600)));
        of_server = of_server.max(peak_memory(server.pid()));
        let link = &links[rng.usize(..LINKS)].faults;
        let fault = match rng.u32(..10) {
            0 => {
                server.kill();
                std::thread::sleep(Duration::from_millis(rng.u64(..2000)));
                server = setting.server(&disk, &address.to_string());
                "server killed"
            }
            1 | 2 => {
                let slot = rng.usize(..COLLECTORS);
                let new = start(&mut rng, slot);
                let old = std::mem::replace(&mut collectors[slot], new);
                of_collectors = of_collectors.max(old.memory());
                ended.push(old.kill());
                "collector killed"
            }
            3 => {
                let filler = disk.join("filler");
                let mut file = std::fs::File::create(&filler).unwrap();
                while file.write_all(&[1; 1 << 16]).is_ok() {}
                std::thread::sleep(Duration::from_millis(rng.u64(200..1500)));
                std::fs::remove_file(&filler).unwrap();
                "disk full"
            }
            4 => {
                garbage(&mut rng, &server, &setting);
                "garbage"
            }
            5 | 6 => {
                link.cuts.fetch_add(1, Ordering::Relaxed);
                "links cut"
            }
            7 => {
                let until = Instant::now() + Duration::from_millis(rng.u64(500..4000));
                *link.stalled_until.lock().unwrap() = Some(until);
                "links stalled"
            }
            _ => {
                link.damages.store(rng.u64(1..4), Ordering::Relaxed);
                "links corrupted"
            }
        };
        *faults.entry(fault).or_default() += 1;
    }
    // What fails no more is to be whole.
    for Link { faults, .. } in &links {
        faults.damages.store(0, Ordering::Relaxed);
        *faults.stalled_until.lock().unwrap() = None;
    }
    for collector in &collectors {
        of_collectors = of_collectors.max(collector.memory());
        collector.terminate();
    }
    ended.extend(collectors.into_iter().map(Collector::wait));
    of_server = of_server.max(peak_memory(server.pid()));
    server.terminate();

    let found = found(&disk);
    let known: BTreeSet<&String> = ended.iter().map(|it| &it.name).collect();
    assert!(found.keys().all(|host| known.contains(host)), "{:?}", found.keys());
    let none = Found::default();
    let size = |number: u64| 1 + sizes[(number % sizes.len() as u64) as usize];
    let (mut taken, mut in_windows, mut counted, mut gone) = (0, 0, 0, 0);
    for Ended { name, said, is_whole } in &ended {
        let Said { epochs, settled, dropped, .. } = *said;
        let of_host = found.get(name).unwrap_or(&none);
        for (number, times) in &of_host.epochs {
            assert_eq!(*times, 1, "{name}: epoch {number} is in windows {times} times");
        }
        let held: u64 = of_host.epochs.keys().copied().map(size).sum();
        assert_eq!(of_host.samples, held, "{name}: samples in windows");
        let is_missing = |number: &u64| !of_host.epochs.contains_key(number);
        let missing: u64 = (0..settled).filter(is_missing).map(size).sum();
        taken += said.taken;
        in_windows += held;
        if *is_whole {
            assert_eq!((settled, missing), (epochs, dropped), "{name}: {said:?}");
            let windows = &of_host.said;
            assert_eq!(of_host.lost, dropped, "{name}: windows say so much was lost: {windows:?}");
            counted += dropped;
        } else {
            // Of a collector that was killed, what was not acknowledged may be there or not.
            assert!(missing <= dropped, "{name}: {missing} are missing, {said:?}");
            gone += said.taken.saturating_sub(held);
        }
    }
    eprintln!(
        "{} collectors, {taken} samples: {in_windows} in windows once, {counted} counted lost, \
         {gone} gone with a collector that was killed; {faults:?}; \
         server {of_server} MiB, collector {of_collectors} MiB",
        ended.len(),
    );
    assert!(in_windows > 0 && !faults.is_empty());
    assert!(of_server <= SERVER_MEMORY + SERVER_AT_REST, "{of_server} MiB");
    assert!(of_collectors <= COLLECTOR_MEMORY, "{of_collectors} MiB");
}
