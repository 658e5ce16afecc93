//! What holds for a whole capture or profile: where it is from, its times, what was lost.

use super::{Builder, Full, MAX_SERIES};
use crate::profile::cpu_time::{COMM, is_of_process};
use crate::profile::{
    ArtifactHash, ExecutableId, FileOffset, ListEnd, LostReason, Origin, ProcessId, Series,
    SeriesId, UnwindTables, Who,
};
use crate::{Event, PythonOutcome};

/// Bytes of an entry that has a name, without that.
const NAMED_ENTRY: u64 = 64;

impl Builder {
    /// Begins capture number `capture` of several; how and where the first was taken stands for
    /// all. `clock_zero_ns`: the wall clock when the clock of its times was zero.
    pub fn capture(&mut self, capture: usize, origin: Origin, clock_zero_ns: u64) {
        self.capture = capture;
        self.timeline_start = self.profile.timeline.len();
        self.mapping_start = self.profile.mappings.len();
        self.knows_cpu_times = false;
        let first = &mut self.profile.origin;
        if *first == Origin::default() {
            *first = origin;
            self.first = capture;
            self.profile.clock_zero_ns = clock_zero_ns;
        } else {
            first.all_processes |= origin.all_processes;
        }
    }

    /// The series for the events of this capture, each with its samples a second and CPU. An event
    /// of another capture that weighs the same is added to the same series. Two events of one
    /// capture are never added up.
    pub fn series(&mut self, events: Vec<(Event, u32)>) -> Result<Vec<SeriesId>, Full> {
        let mut found: Vec<Option<usize>> = vec![None; events.len()];
        // First those of the same name: another must not take their place.
        for same_name in [true, false] {
            for (index, (event, _)) in events.iter().enumerate() {
                if found[index].is_none() {
                    let fits = |(at, known): &(usize, &Series)| {
                        known.types.is_none()
                            && known.event.weight == event.weight
                            && (!same_name || known.event.name == event.name)
                            && !found.contains(&Some(*at))
                    };
                    let fitting = self.profile.series.iter().enumerate().find(fits);
                    found[index] = fitting.map(|(at, _)| at);
                }
            }
        }
        let mut ids = Vec::with_capacity(events.len());
        for ((event, frequency), found) in events.into_iter().zip(found) {
            let id = match found {
                Some(id) => {
                    let (one, other) = (&self.profile.series[id].event.name, &event.name);
                    if one != other && !one.is_empty() && !other.is_empty() {
                        let note = format!("captures of {one} and of {other} are added up");
                        self.note(note);
                    }
                    id
                }
                None if self.profile.series.len() >= MAX_SERIES => return Err(Full("events")),
                None => {
                    self.profile.series.push(Series { event, frequency, types: None });
                    self.profile.series.len() - 1
                }
            };
            ids.push(SeriesId(id as u32));
        }
        Ok(ids)
    }

    /// Widens the span to include `start..end`, nanoseconds since the Unix epoch.
    pub fn span(&mut self, start: u64, end: u64) {
        self.observe(start, end.max(start));
        let profile = &mut self.profile;
        let old_end = profile.start_ns + profile.duration_ns;
        if profile.start_ns == 0 || start < profile.start_ns {
            profile.start_ns = start;
        }
        profile.duration_ns = end.max(old_end).saturating_sub(profile.start_ns);
    }

    /// Adds to the stretches of time that captures are of, which may overlap.
    fn observe(&mut self, mut start: u64, mut end: u64) {
        let before = self.observed.range(..=start).next_back();
        if let Some((&from, _)) = before.filter(|(_, until)| **until >= start) {
            start = from;
        }
        while let Some((&from, &until)) = self.observed.range(start..=end).next() {
            self.observed.remove(&from);
            self.profile.observed_ns -= until - from;
            end = end.max(until);
        }
        self.observed.insert(start, end);
        self.profile.observed_ns += end - start;
    }

    /// Moves the times of this capture's samples to the wall clock: their own clock was zero at
    /// `zero_ns`, in nanoseconds since the Unix epoch.
    pub fn shift_times(&mut self, zero_ns: u64) {
        if self.capture == self.first {
            self.profile.clock_zero_ns = zero_ns;
        }
        for moment in &mut self.profile.timeline[self.timeline_start..] {
            moment.time_ns = moment.time_ns.saturating_add(zero_ns);
        }
        for mapping in &mut self.profile.mappings[self.mapping_start..] {
            if mapping.since_ns != 0 {
                mapping.since_ns = mapping.since_ns.saturating_add(zero_ns);
            }
        }
    }

    /// Adds to what the kernel took; a capture without an end makes the total unknown.
    pub fn taken(&mut self, taken: Option<u64>) {
        self.profile.taken = match (self.profile.taken, taken) {
            (Some(before), Some(taken)) => Some(before.saturating_add(taken)),
            _ => None,
        };
    }

    /// Adds to what was lost.
    pub fn lost(&mut self, reason: LostReason, count: u64, samples: bool) {
        let entry = self.profile.lost.entry(reason).or_insert((0, samples));
        entry.0 = entry.0.saturating_add(count);
    }

    /// Adds samples whose frames of an interpreter end for one reason.
    pub fn list_ends(&mut self, end: ListEnd, samples: u64) {
        let all = self.profile.list_ends.entry(end).or_default();
        *all = all.saturating_add(samples);
    }

    /// Adds CPU time that processes without samples used, before the samples of the same time: by
    /// their names. `None`: nobody asked how much processes used.
    pub fn unsampled_cpu(&mut self, used: Option<impl IntoIterator<Item = (String, u64)>>) {
        self.knows_cpu_times = used.is_some();
        let labels = &self.only.labels;
        // Of a part of the time, or of one thread, nobody knows it.
        self.lacks_cpu_times |= used.is_none()
            || self.only.time_ns.is_some()
            || !labels.iter().all(|(label, _)| is_of_process(label));
        let all = self.profile.unsampled_cpu_ns.get_or_insert_default();
        for (comm, used_ns) in used.into_iter().flatten() {
            if labels.is_empty() || labels.contains(&(COMM.to_owned(), comm.clone())) {
                let is_new = !all.contains_key(&comm);
                self.name_bytes += if is_new { NAMED_ENTRY + comm.len() as u64 } else { 0 };
                let sum = all.entry(comm).or_default();
                *sum = sum.saturating_add(used_ns);
            }
        }
    }

    /// Adds CPU time that a process used.
    pub fn cpu_time(&mut self, process: ProcessId, used_ns: u64) {
        if self.takes(Who::Process(process)) {
            let all = &mut self.profile.processes[process.index()].cpu_ns;
            *all = all.saturating_add(used_ns);
        }
    }

    /// Adds to what became of unwind tables.
    pub fn unwind_tables(&mut self, more: UnwindTables) {
        let all = &mut self.profile.unwind_tables;
        for (all, more) in [
            (&mut all.loaded, more.loaded),
            (&mut all.compiled, more.compiled),
            (&mut all.compile_ns, more.compile_ns),
            (&mut all.failed, more.failed),
            (&mut all.evicted, more.evicted),
        ] {
            *all = all.saturating_add(more);
        }
    }

    /// Adds Python processes with one outcome.
    pub fn python(&mut self, outcome: PythonOutcome, processes: u64) {
        let all = self.profile.python.entry(outcome).or_default();
        *all = all.saturating_add(processes);
    }

    /// Says why an executable has no unwind table, or that nothing speaks against one.
    pub fn unwind_missing(&mut self, executable: ExecutableId, why: Option<String>) {
        match why {
            Some(why) => self.profile.unwind_missing.insert(executable, why),
            None => self.profile.unwind_missing.remove(&executable),
        };
    }

    /// Says why functions of the interpreter in an executable are not among the frames.
    pub fn functions_missing(&mut self, executable: ExecutableId, why: String) {
        self.profile.functions_missing.insert(executable, why);
    }

    /// Says where in an executable the code is that Go compiled: offset and bytes.
    pub fn go_code(&mut self, executable: ExecutableId, start: u64, length: u64) {
        let range = FileOffset(start)..FileOffset(start.saturating_add(length));
        self.profile.go_code.insert(executable, range);
    }

    /// A file that its collector could not tell from others at its path.
    pub fn ambiguous(&mut self, executable: ExecutableId) {
        self.profile.ambiguous.insert(executable);
    }

    /// Notes artifacts that name functions of a kernel or module.
    pub fn kernel_symbols(&mut self, of: ArtifactHash, pieces: &[ArtifactHash]) {
        if !pieces.is_empty() {
            self.profile.kernel_symbols.entry(of).or_default().extend(pieces);
        }
    }

    /// What another profiler had to say.
    pub fn comment(&mut self, comment: String) {
        if !self.profile.comments.contains(&comment) {
            self.profile.comments.push(comment);
        }
    }

    /// Says something in the report.
    pub fn note(&mut self, note: String) {
        self.profile.notes.push(note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_observed_has_no_gaps_and_nothing_twice() {
        let mut builder = Builder::new();
        for (start, end, observed) in
            [(10, 20, 10), (30, 40, 20), (35, 50, 30), (20, 25, 35), (5, 60, 55), (6, 7, 55)]
        {
            builder.span(start, end);
            assert_eq!(builder.profile.observed_ns, observed, "{start} to {end}");
        }
        assert_eq!((builder.profile.start_ns, builder.profile.duration_ns), (5, 55));
    }
}
