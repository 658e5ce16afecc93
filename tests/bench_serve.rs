//! `make bench`: what `stackwire serve` takes. Streams of a recorded capture, of 100 clients over
//! TLS, as fast as they are acknowledged and at the pace of real collectors; what a window costs
//! when many are kept.
//!
//! Prints tables and asserts nothing. Who sends runs on the same CPUs.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "support/authority.rs"]
#[expect(dead_code, clippy::unwrap_used, reason = "of the tests, which use more of it")]
mod authority;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use authority::Authority;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::v1::symbolizer_client::SymbolizerClient;
use stackwire_proto::v1::symbolizer_message::Body as Answer;
use stackwire_proto::{FrameReader, open_epoch, seal_epoch, v1};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Error>;

const CLIENTS: usize = 100;
/// How long each load lasts.
const SECONDS: u64 = 10;
/// Epochs that a stream sends before it waits for the first to be acknowledged.
const IN_FLIGHT: usize = 4;
/// Kept while closing windows is measured.
const HISTORY: usize = 12_000;

fn main() -> Result<()> {
    let usage = "usage: bench-serve DIRECTORY-OF-BINARIES";
    let binaries = PathBuf::from(std::env::args().nth(1).ok_or(usage)?);
    let directory = tempfile::tempdir()?;
    let setting = Arc::new(Setting::new(&binaries, directory.path())?);
    // Of a host at ten times the usual rate, and of one at that rate, with epochs of a second.
    let dense = record(&binaries, directory.path(), &["--sample-rate=999"])?;
    let usual = record(&binaries, directory.path(), &["--epoch=1s"])?;
    println!(
        "\n| recorded of this host | samples of an epoch | bytes of an epoch |\n|---|---|---|"
    );
    for (name, recorded) in [("dense", &dense), ("usual", &usual)] {
        let all = recorded.epochs.len() as u64;
        let samples = recorded.epochs.iter().map(|(_, samples)| samples).sum::<u64>() / all;
        let bytes = recorded.epochs.iter().map(|(epoch, _)| epoch.zstd.len()).sum::<usize>();
        println!("| {name} | {samples} | {} |", bytes as u64 / all);
    }
    println!(
        "\n| streams of {CLIENTS} clients | memory-max, MiB | samples a second | p50 to acknowledge, ms | p99, ms | told to be slow | CPU of the server, s/s | its peak, MiB | KiB a stream |\n|---|---|---|---|---|---|---|---|---|"
    );
    let as_fast_as_taken = Load { streams: 4, memory: 1024, pace: None };
    let real = Load { streams: 1000, memory: 1024, pace: Some(Duration::from_secs(1)) };
    for (load, recorded) in [
        (as_fast_as_taken, &dense),
        (Load { streams: 100, ..as_fast_as_taken }, &dense),
        (Load { streams: 1000, ..as_fast_as_taken }, &dense),
        (Load { streams: 1000, memory: 256, ..as_fast_as_taken }, &dense),
        (Load { streams: 100, ..real }, &usual),
        (real, &usual),
        (Load { memory: 256, ..real }, &usual),
    ] {
        println!("{}", load.run(&setting, recorded)?);
    }
    history(&setting, &usual)
}

struct Setting {
    directory: PathBuf,
    stackwire: PathBuf,
    authority: Authority,
    ca: Vec<u8>,
}

impl Setting {
    fn new(binaries: &Path, directory: &Path) -> Result<Self> {
        let authority = Authority::new(&directory.join("ca"));
        authority.server("server");
        let tokens: String = (0..CLIENTS).map(|client| format!("c{client} t{client}\n")).collect();
        std::fs::write(directory.join("tokens"), tokens)?;
        let ca = std::fs::read(authority.file("ca.pem"))?;
        let stackwire = binaries.join("stackwire");
        Ok(Self { directory: directory.to_owned(), stackwire, authority, ca })
    }

    fn server(&self, more: &[String]) -> Result<Server> {
        let output = tempfile::tempdir_in(&self.directory)?;
        let mut child = Command::new(&self.stackwire)
            .args(["serve", "--listen=127.0.0.1:0", "--output-dir"])
            .arg(output.path())
            .arg(format!("--tls-cert={}", self.authority.file("server.pem")))
            .arg(format!("--tls-key={}", self.authority.file("server.key")))
            .arg(format!("--token-file={}", self.directory.join("tokens").display()))
            .arg(format!("--symbol-cache-dir={}", self.directory.join("cache").display()))
            .args(more)
            .env("DEBUGINFOD_URLS", "")
            .stderr(Stdio::piped())
            .spawn()?;
        let mut said = BufReader::new(child.stderr.take().ok_or("no stderr")?);
        let mut address = String::new();
        while address.is_empty() {
            let mut line = String::new();
            if said.read_line(&mut line)? == 0 {
                return Err("the server ended".into());
            }
            let found = line.trim().strip_prefix("stackwire: listening on ");
            address = found.unwrap_or_default().to_owned();
        }
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        Ok(Server { child, address, output })
    }

    async fn connect(&self, server: &str) -> Result<Channel> {
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.ca));
        let endpoint = Endpoint::try_from(format!("https://{server}"))?.tls_config(tls)?;
        Ok(endpoint.connect().await?)
    }
}

struct Server {
    child: Child,
    address: String,
    output: tempfile::TempDir,
}

impl Server {
    /// Most memory it has had, MiB.
    fn peak(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).ok_or("no VmHWM")?;
        Ok(kib.parse::<u64>()? / 1024)
    }

    /// Of the CPUs, in seconds.
    fn cpu(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let (_, fields) = stat.rsplit_once(") ").ok_or("no stat")?;
        let fields: Vec<&str> = fields.split(' ').collect();
        let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
        // Fields 14 and 15 of proc(5), in hundredths of a second.
        Ok((ticks(11).ok_or("no utime")? + ticks(12).ok_or("no stime")?) / 100.0)
    }

    fn profiles(&self) -> Result<usize> {
        let entries = std::fs::read_dir(self.output.path())?.flatten();
        Ok(entries.filter(|entry| entry.path().extension().is_some_and(|it| it == "gz")).count())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A capture, whose epochs follow each other again and again.
struct Recorded {
    hello: v1::Hello,
    /// With the samples of each.
    epochs: Vec<(v1::SealedEpoch, u64)>,
}

/// Epochs that are made: a stream that sends more begins anew with their times.
const EPOCHS: usize = 512;

fn record(binaries: &Path, directory: &Path, more: &[&str]) -> Result<Arc<Recorded>> {
    let path = directory.join("recorded.stackwire");
    let load = (0..2)
        .map(|_| Command::new("gzip").arg("-c").arg("/dev/zero").stdout(Stdio::null()).spawn());
    let mut load = load.collect::<std::io::Result<Vec<Child>>>()?;
    let status = Command::new(binaries.join("stackwire-collector"))
        .args(["--all", "--duration=8s"])
        .args(more)
        .arg("--output")
        .arg(&path)
        .status()?;
    for child in &mut load {
        child.kill()?;
        child.wait()?;
    }
    if !status.success() {
        return Err("the collector failed".into());
    }
    let mut reader = FrameReader::new(BufReader::new(File::open(path)?));
    let (mut hello, mut epochs) = (v1::Hello::default(), Vec::new());
    while let Some(message) = reader.next_message()? {
        match message.body {
            Some(Body::Hello(found)) => hello = found,
            Some(Body::Epoch(sealed)) => epochs.push(open_epoch(&sealed)?),
            _ => {}
        }
    }
    let (first, last) = epochs.first().zip(epochs.last()).ok_or("no epochs")?;
    let length = last.end_ns - first.start_ns;
    let sealed = (0..EPOCHS).map(|number| {
        let mut epoch = epochs[number % epochs.len()].clone();
        let later = length * (number / epochs.len()) as u64;
        (epoch.start_ns, epoch.end_ns) = (epoch.start_ns + later, epoch.end_ns + later);
        // What they belong to is not sent.
        epoch.kernel_symbols.clear();
        let samples = epoch.samples.iter().map(|of| of.thread.len() as u64).sum();
        (seal_epoch(&epoch), samples)
    });
    Ok(Arc::new(Recorded { hello, epochs: sealed.collect() }))
}

/// What all streams measured.
#[derive(Default)]
struct Measured {
    samples: u64,
    slow: u64,
    /// From sent to acknowledged, milliseconds.
    acknowledged: Vec<f64>,
}

#[derive(Clone, Copy)]
struct Load {
    streams: usize,
    memory: u64,
    /// From one epoch of a stream to its next; none: as fast as they are acknowledged.
    pace: Option<Duration>,
}

impl Load {
    /// A row of the table.
    fn run(self, setting: &Arc<Setting>, recorded: &Arc<Recorded>) -> Result<String> {
        let server = setting.server(&[format!("--memory-max={}", self.memory)])?;
        let idle = server.peak()?;
        let measured = Arc::<Mutex<Measured>>::default();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let begun = Instant::now();
        let (_, cpu) = runtime.block_on(async {
            // Ten streams a connection.
            let mut channels = Vec::new();
            for _ in 0..self.streams.div_ceil(10) {
                channels.push(setting.connect(&server.address).await?);
            }
            let deadline = Instant::now() + Duration::from_secs(SECONDS);
            let cpu = server.cpu()?;
            let streams = (0..self.streams).map(|number| {
                let stream = Stream {
                    number,
                    channel: channels[number / 10].clone(),
                    recorded: Arc::clone(recorded),
                    pace: self.pace,
                    deadline,
                    most: u64::MAX,
                };
                tokio::spawn(stream.run(Arc::clone(&measured)))
            });
            for stream in streams.collect::<Vec<_>>() {
                stream.await??;
            }
            Ok::<_, Error>((begun.elapsed(), server.cpu()? - cpu))
        })?;
        let seconds = begun.elapsed().as_secs_f64();
        let mut measured = measured.lock().unwrap_or_else(PoisonError::into_inner);
        measured.acknowledged.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = measured.acknowledged.len().saturating_sub(1);
            measured.acknowledged.get((last as f64 * share) as usize).copied().unwrap_or(0.0)
        };
        let peak = server.peak()?;
        let pace = match self.pace {
            None => "dense, as fast as they are taken",
            Some(_) => "usual, an epoch a second each",
        };
        Ok(format!(
            "| {}, {pace} | {} | {:.0} | {:.0} | {:.0} | {} | {:.2} | {peak} | {:.0} |",
            self.streams,
            self.memory,
            measured.samples as f64 / seconds,
            at(0.5),
            at(0.99),
            measured.slow,
            cpu / seconds,
            (peak - idle) as f64 * 1024.0 / self.streams as f64,
        ))
    }
}

struct Stream {
    number: usize,
    channel: Channel,
    recorded: Arc<Recorded>,
    pace: Option<Duration>,
    deadline: Instant,
    /// Epochs.
    most: u64,
}

impl Stream {
    async fn run(self, measured: Arc<Mutex<Measured>>) -> Result<()> {
        let message = |body| v1::CollectorMessage { body: Some(body) };
        let mut id = vec![0; 16];
        id[..8].copy_from_slice(&(self.number as u64 + 1).to_be_bytes());
        let hostname = format!("host{}", self.number);
        let hello = v1::Hello { capture_id: id, hostname, ..self.recorded.hello.clone() };
        let (out, outgoing) = tokio::sync::mpsc::unbounded_channel();
        out.send(message(Body::Hello(hello)))?;
        let mut request = tonic::Request::new(UnboundedReceiverStream::new(outgoing));
        let token = format!("Bearer t{}", self.number % CLIENTS).parse()?;
        request.metadata_mut().insert("authorization", token);
        let mut client = SymbolizerClient::new(self.channel);
        let mut answers = client.capture(request).await?.into_inner();
        let mut mine = Measured::default();
        let mut sent = VecDeque::new();
        let mut number = 0;
        // Real collectors do not begin in the same moment.
        let mut next = Instant::now()
            + self
                .pace
                .map_or(Duration::ZERO, |pace| pace.mul_f64(self.number as f64 % 97.0 / 97.0));
        loop {
            let is_over = Instant::now() >= self.deadline || number >= self.most;
            if is_over && sent.is_empty() {
                break;
            }
            let may_send = !is_over && sent.len() < IN_FLIGHT;
            tokio::select! {
                () = tokio::time::sleep_until(next.into()), if may_send => {
                    let (sealed, samples) = &self.recorded.epochs[number as usize % EPOCHS];
                    let epoch = v1::SealedEpoch { number, ..sealed.clone() };
                    out.send(message(Body::Epoch(epoch)))?;
                    sent.push_back((number, *samples, Instant::now()));
                    number += 1;
                    next = self.pace.map_or(next, |pace| next + pace);
                }
                answer = answers.message() => match answer?.and_then(|answer| answer.body) {
                    Some(Answer::Ack(ack)) => {
                        while let Some((_, samples, at)) = sent.pop_front_if(|it| it.0 <= ack.epoch) {
                            mine.samples += samples;
                            mine.acknowledged.push(at.elapsed().as_secs_f64() * 1000.0);
                        }
                    }
                    Some(Answer::Slow(_)) => mine.slow += 1,
                    Some(_) => {}
                    None => return Err("the server ended a stream".into()),
                }
            }
        }
        drop(out);
        while answers.message().await?.is_some() {}
        let mut all = measured.lock().unwrap_or_else(PoisonError::into_inner);
        all.samples += mine.samples;
        all.slow += mine.slow;
        all.acknowledged.extend(mine.acknowledged);
        Ok(())
    }
}

/// What windows cost while few are kept, and while many are; and how long a collector that comes
/// back with that many waits for its welcome.
fn history(setting: &Arc<Setting>, recorded: &Arc<Recorded>) -> Result<()> {
    let server = setting.server(&["--window=1ms".to_owned(), "--log-max=1000000".to_owned()])?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let small = |epochs: usize| -> Result<Arc<Recorded>> {
        // Of one sample: what is measured is the window.
        let mut epoch = open_epoch(&recorded.epochs[0].0)?;
        epoch.samples.truncate(1);
        if let Some(samples) = epoch.samples.first_mut() {
            let columns = [&mut samples.thread, &mut samples.cpu];
            columns.into_iter().for_each(|column| column.truncate(1));
            let stacks = [&mut samples.user_stack, &mut samples.kernel_stack];
            stacks.into_iter().for_each(|column| column.truncate(1));
            samples.time_delta.truncate(1);
            samples.value.truncate(1);
        }
        let length = epoch.end_ns - epoch.start_ns;
        let sealed = (0..epochs as u64).map(|_| {
            (epoch.start_ns, epoch.end_ns) = (epoch.start_ns + length, epoch.end_ns + length);
            (seal_epoch(&epoch), 1)
        });
        Ok(Arc::new(Recorded { hello: recorded.hello.clone(), epochs: sealed.collect() }))
    };
    let small = small(EPOCHS)?;
    println!(
        "\n| windows kept | CPU of the server for a window, ms | one collector comes back after, ms |\n|---|---|---|"
    );
    let mut streams = 0;
    for step in [EPOCHS, HISTORY, EPOCHS] {
        let (cpu, before) = (server.cpu()?, server.profiles()?);
        let mut made = 0;
        while made < step {
            let stream = Stream {
                number: streams,
                channel: runtime.block_on(setting.connect(&server.address))?,
                recorded: Arc::clone(&small),
                pace: None,
                deadline: Instant::now() + Duration::from_secs(600),
                most: EPOCHS as u64,
            };
            runtime.block_on(stream.run(Arc::default()))?;
            (streams, made) = (streams + 1, made + EPOCHS);
        }
        while server.profiles()? < before + made {
            std::thread::sleep(Duration::from_millis(50));
        }
        let each = (server.cpu()? - cpu) * 1000.0 / made as f64;
        let begun = Instant::now();
        let again = Stream {
            number: 0,
            channel: runtime.block_on(setting.connect(&server.address))?,
            recorded: Arc::clone(&small),
            pace: None,
            deadline: Instant::now(),
            most: 0,
        };
        runtime.block_on(again.run(Arc::default()))?;
        let back = begun.elapsed().as_secs_f64() * 1000.0;
        println!("| {} | {each:.2} | {back:.0} |", before + made);
    }
    Ok(())
}
