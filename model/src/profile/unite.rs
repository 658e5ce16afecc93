//! Makes places that differ in nothing but their time one place, once they have names. Otherwise
//! each place of a process that writes code is there ten times for every second. Call it before a
//! resolved profile is written.

use rustc_hash::FxHashMap;

use super::labels::{Label, LabelValue};
use super::{Frame, FrameId, LocationId, Names, Profile, Sample, SampleKey, Stack, StackId};

/// Makes equal places one, then equal frames, stacks and samples. Places, frames and stacks that
/// are no longer used stay in their tables; nothing refers to them.
pub fn unite(profile: &mut Profile, names: &Names) {
    let Some(places) = places(profile, names) else { return };
    let mut known: FxHashMap<Frame, u32> = FxHashMap::default();
    let mut frames = Vec::<u32>::with_capacity(profile.tree.len());
    for (index, frame) in profile.tree.iter_mut().enumerate() {
        frame.location = LocationId(places[frame.location.index()]);
        frame.caller = frame.caller.map(|caller| FrameId(frames[caller.index()]));
        frames.push(*known.entry(*frame).or_insert(index as u32));
    }
    drop(known);
    let mut known: FxHashMap<Stack, u32> = FxHashMap::default();
    let mut stacks = Vec::with_capacity(profile.stacks.len());
    for (index, stack) in profile.stacks.iter_mut().enumerate() {
        stack.leaf = stack.leaf.map(|leaf| FrameId(frames[leaf.index()]));
        stacks.push(*known.entry(*stack).or_insert(index as u32));
    }
    drop(known);
    let united = |stack: Option<StackId>| stack.map(|stack| StackId(stacks[stack.index()]));
    let mut known: FxHashMap<Vec<Label>, u32> = FxHashMap::default();
    let mut label_sets = Vec::with_capacity(profile.label_sets.len());
    for (labels, id) in profile.label_sets.iter_mut().zip(1..) {
        for label in &mut *labels {
            if let LabelValue::Stack { user, kernel } = &mut label.value {
                (*user, *kernel) = (united(*user), united(*kernel));
            }
        }
        label_sets.push(*known.entry(labels.clone()).or_insert(id));
    }
    drop(known);
    let mut known: FxHashMap<SampleKey, u32> = FxHashMap::default();
    let mut samples: Vec<Sample> = Vec::new();
    let mut values: Vec<Vec<i64>> = Vec::new();
    let mut numbers = Vec::with_capacity(profile.samples.len());
    for (index, sample) in profile.samples.iter().enumerate() {
        let (user, kernel) = (united(sample.key.user), united(sample.key.kernel));
        let labels = sample.key.labels.checked_sub(1).map_or(0, |at| label_sets[at as usize]);
        let key = SampleKey { user, kernel, labels, ..sample.key };
        let number = *known.entry(key).or_insert(samples.len() as u32) as usize;
        numbers.push(number as u32);
        let more = profile.values.get(index);
        match samples.get_mut(number) {
            None => {
                samples.push(Sample { key, ..*sample });
                values.extend(more.cloned());
            }
            Some(first) => {
                first.count += sample.count;
                first.value += sample.value;
                let sums = values.get_mut(number).into_iter().flatten();
                for (sum, more) in sums.zip(more.into_iter().flatten()) {
                    *sum = sum.saturating_add(*more);
                }
            }
        }
    }
    for moment in &mut profile.timeline {
        moment.sample = numbers[moment.sample as usize];
    }
    (profile.samples, profile.values) = (samples, values);
}

/// For each place the first that is like it; none: there are no two such.
fn places(profile: &Profile, names: &Names) -> Option<Vec<u32>> {
    let mut like: FxHashMap<_, Vec<u32>> = FxHashMap::default();
    let mut places: Vec<u32> = (0..profile.locations.len() as u32).collect();
    let mut any = false;
    for (index, location) in profile.locations.iter().enumerate() {
        if location.seen_ns == 0 {
            continue;
        }
        // Before they were resolved no two are known to be alike.
        let resolution = names.resolutions.get(index)?;
        let firsts =
            like.entry((location.executable, location.process, location.address)).or_default();
        match firsts.iter().find(|&&first| names.resolutions[first as usize] == *resolution) {
            Some(&first) => (places[index], any) = (first, true),
            None => firsts.push(index as u32),
        }
    }
    any.then_some(places)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::profile::{
        Builder, EndReason, Executable, Line, Location, Process, Quality, Resolution, Taken, Thread,
    };
    use crate::{Address, UserAddr};

    #[test]
    fn places_of_equal_names_are_one_and_others_stay_apart() {
        let mut into = Builder::new();
        into.keep_timeline();
        let series = into.series(vec![(crate::Event::cpu_clock(), 99)]).unwrap()[0];
        let executable = into.executable(Executable::Anonymous).unwrap();
        let process = into.process(Process { pid: 7, ..Process::default() }).unwrap();
        let thread = into.thread(Thread { process, tid: 7, comm: "x".to_owned() }).unwrap();
        for seen_ns in [10, 20, 30, 20] {
            let address = Address::User(UserAddr(0x1000));
            let at = Location { executable, process: Some(process), address, seen_ns };
            let location = into.location(at).unwrap();
            let user = Some(into.stack(&[location], EndReason::Root).unwrap());
            let key = "waker_stack".to_owned();
            let labels = vec![Label { key, value: LabelValue::Stack { user, kernel: None } }];
            let labels = into.labels(labels).unwrap();
            let key = SampleKey { series, thread, user, kernel: None, labels };
            let taken = Taken { count: 1, value: 5, time_ns: Some(seen_ns), cpu: Some(0) };
            into.sample(key, taken).unwrap();
        }
        let mut profile = into.build();
        let named = |name: &str| Resolution::Found {
            lines: Arc::from([Line { function: name.into(), ..Line::default() }]),
            quality: Quality::Jitdump,
        };
        let resolutions = vec![named("old"), named("old"), named("new")];
        let names = Names { resolutions, sources: Vec::new() };
        unite(&mut profile, &names);
        let found: Vec<_> = profile.samples.iter().map(|it| (it.count, it.value)).collect();
        assert_eq!(found, [(3, 15), (1, 5)]);
        let at = |sample: &Sample| profile.frames(sample.key).next().unwrap();
        let of = |sample: &Sample| names.of(&profile).lines(at(sample));
        let names: Vec<_> = profile.samples.iter().map(|it| of(it)[0].function.clone()).collect();
        assert_eq!(names, ["old", "new"]);
        let moments: Vec<_> = profile.timeline.iter().map(|it| (it.time_ns, it.sample)).collect();
        assert_eq!(moments, [(10, 0), (20, 0), (30, 1), (20, 0)]);
    }
}
