//! A profile in pieces, for receivers that take labels with a profile instead of with its samples,
//! and no large ones: a piece for each service and process, or several where it would be too large.
//!
//! Pieces of equal profiles are equal, so that a piece that was sent can be told from others.
//! Called by who pushes profiles.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};

use flate2::{Compression, GzBuilder};
use prost::Message;
use rustc_hash::{FxHashMap, FxHashSet};

use super::mappings::Strings;
use super::proto;
use super::read::open;
use crate::ReadError;

/// A piece of a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What all its samples have in common, by name; `service_name` is always there.
    pub labels: Vec<(String, String)>,
    /// A pprof, with gzip, whose samples have no labels.
    pub pprof: Vec<u8>,
}

/// How large a piece may be.
#[derive(Clone, Copy, Debug)]
pub struct Largest {
    /// Bytes, not compressed. One sample alone may be more.
    pub bytes: usize,
    /// Samples.
    pub samples: usize,
}

/// Labels that a receiver keeps a series for: those of a service, of what it runs in, and the name
/// of the process. One for each thread or process would be too many.
const COMMON: [&str; 7] = [
    "comm",
    "container_id",
    "deployment_environment",
    "pod_uid",
    "service_name",
    "service_namespace",
    "service_version",
];
/// What every piece has.
const SERVICE: &str = "service_name";
/// Where no process is known.
const NO_SERVICE: &str = "unknown";
/// Most series of a profile: names are chosen by who is sampled, and each is a request and an entry
/// of an index. The rest are one.
const MOST_SERIES: usize = 2000;
/// The service of that one.
const OTHERS: &str = "other";
/// A receiver takes two profiles of a series with the same time for one: each further piece is so
/// much later, in nanoseconds.
const LATER: i64 = 1_000_000;

/// Version of how profiles are split. Pieces of different versions are not the same.
pub const SPLIT: u32 = 1;

/// Takes a pprof with gzip to pieces. Labels of threads and comments are left out, samples that
/// differ in nothing else are added up.
///
/// # Errors
/// When it cannot be read, or refers to something that is not in it.
pub fn split(pprof: impl Read, largest: Largest) -> Result<Vec<Piece>, ReadError> {
    let whole = open(pprof, true)?;
    let mut groups: BTreeMap<Labels, Stacks<'_>> = BTreeMap::new();
    let common: Vec<i64> =
        COMMON.iter().filter_map(|name| position(&whole.string_table, name)).collect();
    for sample in &whole.sample {
        let labels = sample.label.iter().filter(|label| common.contains(&label.key));
        let mut labels: Vec<_> = labels.map(|label| (label.key, label.str)).collect();
        labels.sort_unstable();
        let stacks = groups.entry(labels).or_default();
        add(stacks.entry(&sample.location_id).or_default(), &sample.value);
    }
    let parts = Parts::of(&whole);
    let mut series = Vec::new();
    for (labels, samples) in few(groups) {
        let labels = match labels {
            Some(labels) => parts.labels(&labels)?,
            None => vec![(SERVICE.to_owned(), OTHERS.to_owned())],
        };
        series.push((labels, samples));
    }
    let mut pieces = Vec::new();
    for (labels, samples) in series {
        let mut piece = Writer::new(&parts)?;
        for (stack, values) in samples {
            if !piece.has_room(stack, largest)? {
                let next = Writer::after(&piece)?;
                pieces.push(piece.end(&labels));
                piece = next;
            }
            piece.add(stack, values)?;
        }
        pieces.push(piece.end(&labels));
    }
    Ok(pieces)
}

/// Samples by their stacks.
type Stacks<'a> = BTreeMap<&'a [u64], Vec<i64>>;
/// Keys and values of labels, as indices of texts.
type Labels = Vec<(i64, i64)>;

/// The series with the most samples, and the others together, without labels.
fn few<'a>(groups: BTreeMap<Labels, Stacks<'a>>) -> Vec<(Option<Labels>, Stacks<'a>)> {
    if groups.len() <= MOST_SERIES {
        return groups.into_iter().map(|(labels, stacks)| (Some(labels), stacks)).collect();
    }
    let weight = |stacks: &Stacks<'_>| {
        let firsts = stacks.values().filter_map(|values| values.first());
        firsts.fold(0_i64, |sum, value| sum.saturating_add(*value))
    };
    let mut by_weight: Vec<_> = groups.into_iter().collect();
    // Those of the same weight stay in order.
    by_weight.sort_by_key(|(_, stacks)| std::cmp::Reverse(weight(stacks)));
    let rest = by_weight.split_off(MOST_SERIES - 1);
    let mut others = Stacks::new();
    for (stack, values) in rest.into_iter().flat_map(|(_, stacks)| stacks) {
        add(others.entry(stack).or_default(), &values);
    }
    let mut all: Vec<_> =
        by_weight.into_iter().map(|(labels, stacks)| (Some(labels), stacks)).collect();
    all.push((None, others));
    all
}

fn add(sums: &mut Vec<i64>, values: &[i64]) {
    sums.resize(sums.len().max(values.len()), 0);
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = sum.saturating_add(*value);
    }
}

fn position(table: &[String], text: &str) -> Option<i64> {
    table.iter().position(|known| known == text).map(|at| at as i64)
}

fn dangling(what: &str) -> ReadError {
    ReadError::Pprof(format!("it refers to a {what} that is not in it"))
}

/// What the pieces take parts of.
struct Parts<'a> {
    whole: &'a proto::Profile,
    locations: FxHashMap<u64, &'a proto::Location>,
    functions: FxHashMap<u64, &'a proto::Function>,
    mappings: FxHashMap<u64, &'a proto::Mapping>,
}

impl<'a> Parts<'a> {
    fn of(whole: &'a proto::Profile) -> Self {
        Self {
            whole,
            locations: whole.location.iter().map(|it| (it.id, it)).collect(),
            functions: whole.function.iter().map(|it| (it.id, it)).collect(),
            mappings: whole.mapping.iter().map(|it| (it.id, it)).collect(),
        }
    }

    fn text(&self, index: i64) -> Result<&'a str, ReadError> {
        let at = usize::try_from(index).ok();
        let text = at.and_then(|at| self.whole.string_table.get(at));
        text.map(String::as_str).ok_or_else(|| dangling("string"))
    }

    fn labels(&self, pairs: &[(i64, i64)]) -> Result<Vec<(String, String)>, ReadError> {
        let mut labels = BTreeMap::new();
        for &(key, value) in pairs {
            let (key, value) = (self.text(key)?.to_owned(), self.text(value)?);
            labels.entry(key).or_insert_with(|| value.to_owned());
        }
        if !labels.contains_key(SERVICE) {
            let name = labels.get("comm").map_or(NO_SERVICE, String::as_str).to_owned();
            labels.insert(SERVICE.to_owned(), name);
        }
        Ok(labels.into_iter().collect())
    }
}

/// Makes a piece.
struct Writer<'a, 'p> {
    parts: &'p Parts<'a>,
    piece: proto::Profile,
    strings: Strings,
    locations: FxHashSet<u64>,
    functions: FxHashSet<u64>,
    mappings: FxHashSet<u64>,
    /// Bytes it takes, as protobuf.
    bytes: usize,
}

/// Tag and length of a message, or a string, beside its content.
const AROUND: usize = 6;

impl<'a, 'p> Writer<'a, 'p> {
    fn new(parts: &'p Parts<'a>) -> Result<Self, ReadError> {
        let whole = parts.whole;
        let mut strings = Strings::default();
        strings.index("");
        let mut sample_type = Vec::new();
        let mut used = BTreeSet::new();
        for of in &whole.sample_type {
            let (mut kind, unit) = (word(parts.text(of.r#type)?), word(parts.text(of.unit)?));
            while !used.insert(kind.clone()) {
                kind.push('_');
            }
            let (r#type, unit) = (strings.index(&kind), strings.index(&unit));
            sample_type.push(proto::ValueType { r#type, unit });
        }
        let mut word = |index| Ok::<_, ReadError>(strings.index(&word(parts.text(index)?)));
        let period_type = match &whole.period_type {
            Some(of) => Some(proto::ValueType { r#type: word(of.r#type)?, unit: word(of.unit)? }),
            None => None,
        };
        let default_sample_type = word(whole.default_sample_type)?;
        let piece = proto::Profile {
            sample_type,
            period_type,
            default_sample_type,
            time_nanos: whole.time_nanos,
            duration_nanos: whole.duration_nanos,
            period: whole.period,
            ..proto::Profile::default()
        };
        let texts = strings.table.iter().map(|text| text.len() + AROUND).sum::<usize>();
        Ok(Self {
            parts,
            bytes: piece.encoded_len() + texts,
            piece,
            strings,
            locations: FxHashSet::default(),
            functions: FxHashSet::default(),
            mappings: FxHashSet::default(),
        })
    }

    /// The next piece of the same series.
    fn after(before: &Self) -> Result<Self, ReadError> {
        let mut next = Self::new(before.parts)?;
        next.piece.time_nanos = before.piece.time_nanos.saturating_add(LATER);
        Ok(next)
    }

    /// Whether a sample fits. The first one always does.
    fn has_room(&self, stack: &[u64], largest: Largest) -> Result<bool, ReadError> {
        if self.piece.sample.is_empty() {
            return Ok(true);
        }
        let mut bytes = self.bytes + size_of_sample(stack, self.piece.sample_type.len());
        for id in stack.iter().filter(|id| !self.locations.contains(id)) {
            let location = self.parts.locations.get(id).ok_or_else(|| dangling("location"))?;
            bytes += location.encoded_len() + AROUND;
            for line in
                location.line.iter().filter(|line| !self.functions.contains(&line.function_id))
            {
                let function = self.parts.functions.get(&line.function_id);
                let function = function.ok_or_else(|| dangling("function"))?;
                bytes += function.encoded_len() + AROUND;
                for text in [function.name, function.system_name, function.filename] {
                    bytes += self.parts.text(text)?.len() + AROUND;
                }
            }
            if let Some(mapping) = self.parts.mappings.get(&location.mapping_id)
                && !self.mappings.contains(&location.mapping_id)
            {
                bytes += mapping.encoded_len() + AROUND;
                for text in [mapping.filename, mapping.build_id] {
                    bytes += self.parts.text(text)?.len() + AROUND;
                }
            }
        }
        Ok(bytes <= largest.bytes && self.piece.sample.len() < largest.samples)
    }

    fn add(&mut self, stack: &[u64], value: Vec<i64>) -> Result<(), ReadError> {
        self.bytes += size_of_sample(stack, value.len());
        for id in stack {
            if self.locations.insert(*id) {
                self.location(*id)?;
            }
        }
        let location_id = stack.to_vec();
        self.piece.sample.push(proto::Sample { location_id, value, label: Vec::new() });
        Ok(())
    }

    fn location(&mut self, id: u64) -> Result<(), ReadError> {
        let parts = self.parts;
        let location = *parts.locations.get(&id).ok_or_else(|| dangling("location"))?;
        for line in &location.line {
            if self.functions.insert(line.function_id) {
                let function = parts.functions.get(&line.function_id);
                let mut function = **function.ok_or_else(|| dangling("function"))?;
                for text in [&mut function.name, &mut function.system_name, &mut function.filename]
                {
                    *text = self.text(*text)?;
                }
                self.bytes += function.encoded_len() + AROUND;
                self.piece.function.push(function);
            }
        }
        // 0 is none.
        if location.mapping_id != 0 && self.mappings.insert(location.mapping_id) {
            let mapping = parts.mappings.get(&location.mapping_id);
            let mut mapping = **mapping.ok_or_else(|| dangling("mapping"))?;
            for text in [&mut mapping.filename, &mut mapping.build_id] {
                *text = self.text(*text)?;
            }
            self.bytes += mapping.encoded_len() + AROUND;
            self.piece.mapping.push(mapping);
        }
        self.bytes += location.encoded_len() + AROUND;
        self.piece.location.push(location.clone());
        Ok(())
    }

    fn text(&mut self, index: i64) -> Result<i64, ReadError> {
        let text = self.parts.text(index)?;
        let known = self.strings.table.len();
        let index = self.strings.index(text);
        if index as usize == known {
            self.bytes += text.len() + AROUND;
        }
        Ok(index)
    }

    fn end(mut self, labels: &[(String, String)]) -> Piece {
        self.piece.string_table = self.strings.table;
        let mut out = GzBuilder::new().mtime(0).write(Vec::new(), Compression::new(2));
        // Neither fails, into memory.
        let _ = out.write_all(&self.piece.encode_to_vec());
        let pprof = out.finish().unwrap_or_default();
        Piece { labels: labels.to_vec(), pprof }
    }
}

/// As Pyroscope takes types of samples: without a `-`, as in `off-cpu`.
fn word(text: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    text.chars().map(safe).collect()
}

/// No more than this: numbers of ten bytes are rare.
fn size_of_sample(stack: &[u64], values: usize) -> usize {
    AROUND
        + 2 * AROUND
        + stack.iter().map(|id| prost::length_delimiter_len(*id as usize)).sum::<usize>()
        + values * 10
}

#[cfg(test)]
mod tests {
    use flate2::read::GzDecoder;

    use super::*;

    fn gzip(profile: &proto::Profile) -> Vec<u8> {
        let mut out = GzBuilder::new().write(Vec::new(), Compression::new(1));
        out.write_all(&profile.encode_to_vec()).unwrap();
        out.finish().unwrap()
    }

    fn opened(piece: &Piece) -> proto::Profile {
        let mut bytes = Vec::new();
        GzDecoder::new(&*piece.pprof).read_to_end(&mut bytes).unwrap();
        proto::Profile::decode(&*bytes).unwrap()
    }

    /// Two processes, of which each thread has samples; each function has a name of its own.
    fn profile(functions: u64) -> proto::Profile {
        let mut strings = Strings::default();
        for text in ["", "comm", "thread", "samples", "count", "a", "b", "worker", "file"] {
            strings.index(text);
        }
        let mut profile = proto::Profile {
            sample_type: vec![proto::ValueType { r#type: 3, unit: 4 }],
            mapping: vec![proto::Mapping { id: 1, filename: 8, ..Default::default() }],
            time_nanos: 5,
            ..Default::default()
        };
        let label = |key, str| proto::Label { key, str, ..Default::default() };
        for id in 1..=functions {
            let name = strings.index(&format!("function_{id}"));
            profile.function.push(proto::Function { id, name, ..Default::default() });
            let line = vec![proto::Line { function_id: id, ..Default::default() }];
            let location = proto::Location { id, mapping_id: 1, line, ..Default::default() };
            profile.location.push(location);
            for (comm, thread) in [(5, 5), (5, 7), (6, 6)] {
                profile.sample.push(proto::Sample {
                    location_id: vec![id],
                    value: vec![1],
                    label: vec![label(1, comm), label(2, thread)],
                });
            }
        }
        profile.string_table = strings.table;
        profile
    }

    fn samples(pieces: &[Piece], comm: &str) -> i64 {
        let of = pieces.iter().filter(|piece| piece.labels.contains(&("comm".into(), comm.into())));
        of.flat_map(|piece| opened(piece).sample).map(|sample| sample.value[0]).sum()
    }

    #[test]
    fn a_piece_has_the_samples_of_one_process_name_and_what_they_need() {
        let whole = gzip(&profile(10));
        let pieces = split(&*whole, Largest { bytes: 1 << 20, samples: 1000 }).unwrap();
        assert_eq!(pieces.len(), 2);
        assert_eq!((samples(&pieces, "a"), samples(&pieces, "b")), (20, 10));
        let first = opened(&pieces[0]);
        assert_eq!((first.sample.len(), first.time_nanos), (10, 5), "threads are added up");
        assert!(!first.string_table.contains(&"worker".to_owned()));
        let service = ("service_name".to_owned(), "a".to_owned());
        assert!(pieces[0].labels.contains(&service));
        assert_eq!(pieces, split(&*whole, Largest { bytes: 1 << 20, samples: 1000 }).unwrap());
    }

    #[test]
    fn no_piece_is_larger_than_it_may_be() {
        let whole = gzip(&profile(5000));
        for largest in
            [Largest { bytes: 20_000, samples: 1000 }, Largest { bytes: 1 << 20, samples: 77 }]
        {
            let pieces = split(&*whole, largest).unwrap();
            assert!(pieces.len() > 10);
            assert_eq!((samples(&pieces, "a"), samples(&pieces, "b")), (10_000, 5000));
            for piece in &pieces {
                let piece = opened(piece);
                assert!(piece.encoded_len() <= largest.bytes, "{}", piece.encoded_len());
                assert!(piece.sample.len() <= largest.samples);
                assert!(piece.sample.len() > 20, "{}", piece.sample.len());
                let known: Vec<u64> = piece.location.iter().map(|it| it.id).collect();
                assert!(piece.sample.iter().all(|it| known.contains(&it.location_id[0])));
            }
        }
    }

    #[test]
    fn pieces_of_a_series_have_times_of_their_own_and_types_without_dashes() {
        let mut whole = profile(100);
        whole.string_table[3] = "run-queue_sample".to_owned();
        let pieces = split(&*gzip(&whole), Largest { bytes: 1 << 20, samples: 30 }).unwrap();
        let mut seen = BTreeSet::new();
        for piece in &pieces {
            let opened = opened(piece);
            assert!(seen.insert((piece.labels.clone(), opened.time_nanos)), "{:?}", piece.labels);
            let kind = opened.sample_type[0].r#type as usize;
            assert_eq!(opened.string_table[kind], "run_queue_sample");
        }
        assert_eq!(pieces.len(), 8);
    }

    #[test]
    fn the_smallest_of_very_many_series_are_one() {
        let mut whole = profile(1);
        let location_id = vec![1];
        whole.sample = (0..5000)
            .map(|number| {
                whole.string_table.push(format!("comm{number}"));
                let str = whole.string_table.len() as i64 - 1;
                let label = vec![proto::Label { key: 1, str, ..Default::default() }];
                let value = vec![if number == 4321 { 9 } else { 1 }];
                proto::Sample { location_id: location_id.clone(), value, label }
            })
            .collect();
        let pieces = split(&*gzip(&whole), Largest { bytes: 1 << 20, samples: 1000 }).unwrap();
        assert_eq!(pieces.len(), MOST_SERIES);
        let of = |piece: &Piece| opened(piece).sample.iter().map(|it| it.value[0]).sum::<i64>();
        assert_eq!(pieces.iter().map(of).sum::<i64>(), 5008);
        assert_eq!(samples(&pieces, "comm4321"), 9);
        let others = ("service_name".to_owned(), OTHERS.to_owned());
        let others: Vec<&Piece> = pieces.iter().filter(|it| it.labels.contains(&others)).collect();
        let named = MOST_SERIES as i64 - 1;
        assert_eq!(others.iter().map(|piece| of(piece)).sum::<i64>(), 5000 - named);
    }

    #[test]
    fn what_refers_to_nothing_is_refused() {
        let damages: [fn(&mut proto::Profile); 5] = [
            |it| it.sample[0].location_id = vec![99],
            |it| it.location[0].line[0].function_id = 99,
            |it| it.location[0].mapping_id = 99,
            |it| it.function[0].name = -1,
            |it| it.sample[0].label[0].str = 1 << 40,
        ];
        for damage in damages {
            let mut damaged = profile(3);
            damage(&mut damaged);
            assert!(split(&*gzip(&damaged), Largest { bytes: 9999, samples: 99 }).is_err());
        }
        assert!(split(&b"none"[..], Largest { bytes: 9999, samples: 99 }).is_err());
    }
}
