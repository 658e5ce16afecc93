//! What a capture begins with: its clocks, its events, the container of its collector. Pure.

use stackwire_model::sched::{CounterSum, PerfCounter, SchedStats};
use stackwire_model::{Choice, Event, NoBpf};
use stackwire_proto::v1;

use crate::profile::{Builder, Origin, SeriesId, labels};

/// Most events of a capture.
const MAX_EVENTS: usize = 64;

/// The part of a greeting that is needed to read epochs: where on the wall clock the monotonic
/// times of a capture lie, and in which container the collector runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Context {
    monotonic_ns: u64,
    realtime_ns: u64,
    container: v1::Container,
    /// The processes were chosen one by one.
    chosen: bool,
    /// What was sampled; see [`Context::begin`].
    events: Vec<Event>,
    frequency: u32,
    counters: Vec<PerfCounter>,
    notes: Vec<String>,
    /// Where those that are there have their place in the profile.
    places: Vec<usize>,
    pub(super) series: Vec<SeriesId>,
}

impl Context {
    /// Begins its capture.
    pub fn begin(&mut self, into: &mut Builder, number: usize, origin: Origin) {
        into.capture(number, origin, self.wall(0));
        self.notes.iter().for_each(|note| into.note(note.clone()));
        let places = into.counters(&self.counters);
        let there = places.into_iter().zip(&self.counters).filter(|(_, it)| it.missing.is_none());
        self.places = there.map(|(place, _)| place).collect();
        let events = self.events.iter().take(MAX_EVENTS);
        let events = events
            .map(|event| {
                // Waits are not sampled by a clock.
                let frequency = if event.perf.is_some() { self.frequency } else { 0 };
                (event.clone(), frequency)
            })
            .collect();
        // Without series its epochs are refused, each with a note.
        self.series = into.series(events).unwrap_or_default();
    }

    /// Nanoseconds since the Unix epoch.
    #[must_use]
    pub fn wall(&self, monotonic_ns: u64) -> u64 {
        self.realtime_ns.saturating_add(monotonic_ns).saturating_sub(self.monotonic_ns)
    }

    /// How somebody was scheduled. The wire has sums of the counters there are.
    pub(super) fn sched(&self, wire: &v1::SchedStats) -> SchedStats {
        let mut stats = SchedStats::from(wire);
        let sums = std::mem::take(&mut stats.counters);
        let most = self.places.iter().max().map_or(0, |place| place + 1);
        stats.counters.resize(most, CounterSum::default());
        for (sum, &place) in sums.into_iter().zip(&self.places) {
            stats.counters[place] = sum;
        }
        stats
    }

    /// The same of a time that may be unknown, 0.
    pub(super) fn known(&self, monotonic_ns: u64) -> u64 {
        if monotonic_ns == 0 { 0 } else { self.wall(monotonic_ns) }
    }

    /// Labels of a process in this cgroup. The collector's own environment has the names of its
    /// pod. They hold for processes in that pod. When no cgroup tells the pods, they hold for
    /// processes that were chosen one by one.
    pub(super) fn labels(&self, cgroup: &str) -> Vec<(&'static str, String)> {
        let mut found = labels::of_cgroup(cgroup);
        let own = &self.container;
        let unknown =
            labels::pod_uid(cgroup).is_none() && labels::pod_uid(&own.cgroup_path).is_none();
        // Another container's process is not in the collector's because nobody says so.
        let other = labels::container_id(cgroup);
        let other = other.is_some() && other != labels::container_id(&own.cgroup_path);
        if labels::same_pod(&own.cgroup_path, cgroup) || self.chosen && unknown && !other {
            let names = [
                ("pod_name", &own.pod_name),
                ("namespace", &own.namespace),
                ("container_name", &own.container_name),
            ];
            let told = names.into_iter().filter(|(_, name)| !name.is_empty());
            found.extend(told.map(|(key, name)| (key, name.clone())));
        }
        found
    }
}

/// Takes a greeting apart.
#[must_use]
pub fn hello(hello: &v1::Hello) -> (Origin, Context) {
    let sampling = hello.sampling.clone().unwrap_or_default();
    let events = sampling.all_events();
    let origin = Origin {
        hostname: hello.hostname.clone(),
        kernel_release: hello.kernel_release.clone(),
        machine: hello.machine.clone(),
        all_processes: sampling.all,
        kernel_stacks: sampling.kernel_stacks,
        perf_events: Option::<NoBpf>::from(sampling.no_bpf()).is_some(),
        collector: hello.collector_version.clone(),
        cpus: (hello.cpus, hello.cpus_online),
        cpu_id: hello.cpu_id.clone(),
        cpu_description: hello.cpu_description.clone(),
    };
    let context = Context {
        monotonic_ns: hello.clock_monotonic_ns,
        realtime_ns: hello.clock_realtime_ns,
        container: hello.container.clone().unwrap_or_default(),
        chosen: !sampling.pids.is_empty(),
        events,
        frequency: sampling.frequency,
        counters: sampling.counters.iter().take(MAX_EVENTS).map(Into::into).collect(),
        notes: notes(&sampling),
        series: Vec::new(),
        places: Vec::new(),
    };
    (origin, context)
}

/// What to know of how samples were taken.
fn notes(sampling: &v1::Sampling) -> Vec<String> {
    let no_bpf = Option::<NoBpf>::from(sampling.no_bpf());
    let through = no_bpf
        .filter(|why| *why != NoBpf::NotAsked)
        .map(|why| format!("sampled through perf events, not with eBPF: {}", why.text()));
    let excluded = sampling.kernel_excluded.then(|| {
        "time in the kernel is not sampled: it takes CAP_PERFMON, or kernel.perf_event_paranoid at 1"
            .to_owned()
    });
    let v1::Sampling { comms, containers, pods, .. } = sampling;
    // What another version writes may not be one of ours; then it is as if it had asked for
    // nothing.
    let choice = Choice {
        comms: comms.clone(),
        containers: containers.iter().filter_map(|id| id.parse().ok()).collect(),
        pods: pods.iter().filter_map(|uid| uid.parse().ok()).collect(),
    };
    let chosen = (!choice.is_everything()).then(|| format!("only processes {choice}"));
    chosen.into_iter().chain(through).chain(excluded).collect()
}
