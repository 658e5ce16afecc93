//! The kernel side of a capture: with eBPF, or through perf events alone. Which of them is
//! `Config::source`, or what this host allows. Called by `prepare.rs`.

use std::fs::File;
use std::sync::Arc;

use stackwire_model::{NoBpf, Source, StackCopies, Unwind as Walk};

use super::{SessionError, as_user};
use crate::config::{Config, ConfigError, Scope};
use crate::helpers::broker::Broker;
use crate::late::{Begun, LateWalks};
use crate::sampler::{
    EbpfSampler, Filter, PerfSampler, Sampler, SamplerError, Tasks, opens_events_later,
};
use crate::sources::perf_event::{Contents, Kernel, Sampled};
use crate::sources::tracepoint;
use crate::unwind::{Code, CopiedStacks, Descriptors};

/// Bytes of user stacks that are copied at first: of programs of a few dozen frames nearly all.
const STACK_BYTES: u32 = 8 << 10;
/// Where the kernel may refuse what copies grow by: to open an event later.
const LARGER_STACK_BYTES: u32 = 32 << 10;

/// The kernel side that was started.
#[derive(Debug)]
pub(super) enum Side {
    /// With eBPF.
    Ebpf(Box<EbpfSampler>),
    /// Through perf events, and why so.
    Perf(Box<PerfSampler>, NoBpf),
}

impl Side {
    /// Starts it. Through perf events, samples of processes come once they are admitted.
    pub(super) fn start(config: &Config, filter: &Filter) -> Result<Self, SessionError> {
        let ebpf =
            || EbpfSampler::start(filter, &config.events, config.frequency, config.sampled());
        if config.needs_bpf() || config.source == Source::Bpf {
            return Ok(Self::Ebpf(Box::new(ebpf()?)));
        }
        if config.source == Source::Perf || config.needs_perf() {
            return Ok(Self::Perf(Box::new(perf(config)?), NoBpf::NotAsked));
        }
        if let Some(why) = config.no_bpf() {
            return Ok(Self::Perf(Box::new(perf(config)?), why));
        }
        let refused = match ebpf() {
            Ok(sampler) => return Ok(Self::Ebpf(Box::new(sampler))),
            Err(error) => error,
        };
        let Some(why) = refused.no_bpf() else { return Err(refused.into()) };
        match perf(config) {
            Ok(sampler) => Ok(Self::Perf(Box::new(sampler), why)),
            // It takes the same capabilities to sample all processes.
            Err(SessionError::Sampler(error))
                if error.is(libc::EACCES) && config.scope == Scope::All =>
            {
                Err(refused.into())
            }
            Err(SessionError::Sampler(error)) => {
                Err(SamplerError::Neither { ebpf: Box::new(refused), perf: Box::new(error) }.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Lets samples of these processes through.
    pub(super) fn admit(&mut self, pids: &[u32]) -> Result<(), SamplerError> {
        match self {
            Self::Ebpf(sampler) => sampler.admit(pids),
            Self::Perf(sampler, _) => sampler.admit(pids),
        }
    }

    /// The maps of unwind tables, once, and what walks on in copied stacks by them.
    pub(super) fn take_tables(
        &mut self,
        config: &Config,
        broker: &Arc<Broker>,
    ) -> Result<(Descriptors, Option<LateWalks>), SessionError> {
        let failed = |error| SessionError::Internal(format!("cannot set up unwinding: {error}"));
        let (tables, begun) = match self {
            Self::Ebpf(sampler) => (sampler.take_tables()?, Begun::ByTables),
            Self::Perf(..) => (Descriptors::in_memory().map_err(failed)?, Begun::ByFramePointers),
        };
        if begun == Begun::ByTables && config.stack_copies == StackCopies::Off {
            return Ok((tables, None));
        }
        // With eBPF, whoever may read a process's memory has given that right up.
        let code = (begun == Begun::ByFramePointers).then(|| Code::new(Arc::clone(broker)));
        let walker = CopiedStacks::new(&tables, code, config.unwind == Walk::Auto);
        Ok((tables, Some(LateWalks::new(walker.map_err(failed)?, begun))))
    }

    /// For the pipeline.
    pub(super) fn into_sampler(self) -> Box<dyn Sampler> {
        match self {
            Self::Ebpf(sampler) => sampler,
            Self::Perf(sampler, _) => sampler,
        }
    }
}

fn perf(config: &Config) -> Result<PerfSampler, SessionError> {
    let tasks = match &config.scope {
        Scope::All => Tasks::All,
        Scope::Processes { follow, .. } => Tasks::Processes { follow: *follow },
        Scope::Cgroup(path) => Tasks::Cgroup(as_user(|| File::open(path))?.map_err(|error| {
            SessionError::Internal(format!("cannot open {}: {error}", path.display()))
        })?),
    };
    let stack_bytes = match config.unwind {
        Walk::FramePointers => 0,
        _ => config
            .stack_bytes
            .unwrap_or_else(|| if opens_events_later() { STACK_BYTES } else { LARGER_STACK_BYTES }),
    };
    let kernel = if config.kernel_stacks { Kernel::WithStacks } else { Kernel::WithoutStacks };
    let (sampled, filter) = (config.sampled(), config.filter.clone());
    let period = if let Sampled::EachOf(period) = sampled { Some(period) } else { None };
    let contents = Contents { kernel, stack_bytes, cgroup: true, period };
    let grows = stack_bytes > 0 && config.stack_bytes.is_none();
    let events = config.events.iter().map(|event| {
        if event.is_tracepoint() { tracepoint::find(event) } else { Ok(event.clone()) }
    });
    let events: Vec<_> = events.collect::<Result<_, _>>().map_err(ConfigError::Tracepoint)?;
    Ok(PerfSampler::start(tasks, &events, sampled, filter, contents, grows)?)
}
