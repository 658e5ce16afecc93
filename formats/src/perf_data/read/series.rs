//! Events of a perf.data as those of the model. Pure.

use linux_perf_data::AttributeDescription;
use linux_perf_data::linux_perf_event_reader::{
    PerfEventType, SamplingPolicy, SoftwareCounterType,
};
use stackwire_model::{Event, ValueKind};

/// An event that was sampled.
#[derive(Debug)]
pub struct Sampled {
    /// Its index in the file.
    pub index: usize,
    /// The event.
    pub event: Event,
    /// Samples a second that were asked for; 0: each so many events.
    pub frequency: u32,
    /// What a sample weighs that does not say.
    pub period: u64,
}

/// Events that were sampled, in the order they were asked for.
pub fn sampled(attributes: &[AttributeDescription]) -> Vec<Sampled> {
    attributes.iter().enumerate().filter_map(|(index, it)| one(index, it)).collect()
}

fn one(index: usize, attribute: &AttributeDescription) -> Option<Sampled> {
    let (frequency, period) = match attribute.attr.sampling_policy {
        SamplingPolicy::Frequency(asked) => (u32::try_from(asked).unwrap_or(0), 1),
        SamplingPolicy::Period(fixed) => (0, fixed.get()),
        SamplingPolicy::NoSampling => (0, 1),
    };
    let mut event = Event::by_name(&name(attribute));
    // Whatever it is called.
    match attribute.attr.type_ {
        PerfEventType::Software(SoftwareCounterType::CpuClock | SoftwareCounterType::TaskClock) => {
            event.weight = ValueKind::cpu();
        }
        // perf adds it for what is no sample.
        PerfEventType::Software(SoftwareCounterType::Dummy) => return None,
        _ => {}
    }
    Some(Sampled { index, event, frequency, period })
}

/// Its name without modifiers: `cycles` of `cycles:P`, and all of `sched:sched_switch`.
fn name(attribute: &AttributeDescription) -> String {
    let name = attribute.name().unwrap_or("samples");
    let plain = name.rsplit_once(':').filter(|(_, modifiers)| {
        !modifiers.is_empty() && modifiers.chars().all(|letter| "ukhGHpPSDWeb".contains(letter))
    });
    plain.map_or(name, |(name, _)| name).to_owned()
}
