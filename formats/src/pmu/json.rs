//! The JSON for programs: `docs/pmu-json.md` says what is in it.

use std::io::{self, Write};

use serde_json::{Map, Value, json};
use stackwire_model::Profile;
use stackwire_model::sched::{Histogram, SchedStats};

use super::{Part, counter, counters, ratio, total};

/// 1: the first.
const VERSION: u32 = 1;

pub fn write(profile: &Profile, parts: &[Part<'_>], mut out: impl Write) -> io::Result<()> {
    let part = |part: &Part<'_>| {
        let mut value = stats(profile, &part.stats);
        if let Some(who) = &part.who {
            value.insert("pid".to_owned(), who.pid.into());
            if who.host_pid != 0 {
                value.insert("host_pid".to_owned(), who.host_pid.into());
            }
            value.insert("comm".to_owned(), who.comm.into());
            if let Some((tid, thread)) = who.thread {
                value.insert("tid".to_owned(), tid.into());
                value.insert("thread".to_owned(), thread.into());
            }
        }
        Value::Object(value)
    };
    let told_apart = parts.iter().filter(|it| it.who.is_some()).map(part);
    let others = parts.iter().find(|it| it.who.is_none()).map(part);
    let counters = profile.counters.iter();
    let counters = counters.map(|it| json!({ "name": it.name, "missing": it.missing }));
    let all = json!({
        "version": VERSION,
        "hostname": profile.origin.hostname,
        "start_ns": profile.start_ns,
        "duration_ns": profile.observed_ns,
        "counters": counters.collect::<Vec<_>>(),
        "total": stats(profile, &total(parts)),
        "processes": told_apart.collect::<Vec<_>>(),
        "others": others,
        "notes": profile.notes,
    });
    serde_json::to_writer_pretty(&mut out, &all)?;
    writeln!(out)
}

fn stats(profile: &Profile, stats: &SchedStats) -> Map<String, Value> {
    let counters: Map<String, Value> = counters(profile, stats)
        .map(|(counter, sum)| {
            let value = json!({
                "value": sum.scaled(),
                "counted": sum.value,
                "enabled_ns": sum.enabled_ns,
                "running_ns": sum.running_ns,
            });
            (counter.name.clone(), value)
        })
        .collect();
    let of = |name| counter(profile, stats, name);
    let all = json!({
        "slices": times(&stats.slices),
        "run_queue": times(&stats.run_queue),
        "switches": {
            "preempted": stats.switches.preempted,
            "voluntary": stats.switches.voluntary,
            "io": stats.switches.io,
            "stopped": stats.switches.stopped,
            "exited": stats.switches.exited,
        },
        "migrations": stats.migrations,
        "counters": counters,
        "instructions_per_cycle": ratio(of("instructions"), of("cycles")),
    });
    match all {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn times(times: &Histogram) -> Value {
    let buckets = times.buckets().map(|(bucket, count)| {
        json!([Histogram::start_of(bucket), Histogram::end_of(bucket), count])
    });
    json!({
        "count": times.count(),
        "sum_ns": times.sum_ns(),
        "min_ns": times.lowest_ns(),
        "max_ns": times.quantile_ns(1.0),
        "mean_ns": times.mean_ns(),
        "p50_ns": times.quantile_ns(0.5),
        "p95_ns": times.quantile_ns(0.95),
        "p99_ns": times.quantile_ns(0.99),
        "p99_9_ns": times.quantile_ns(0.999),
        "buckets": buckets.collect::<Vec<_>>(),
    })
}
