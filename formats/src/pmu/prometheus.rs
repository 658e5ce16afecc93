//! The text Prometheus reads: sums of each process, histograms of all.

use std::io::{self, Write};

use stackwire_model::Profile;
use stackwire_model::sched::{CounterSum, Histogram, PerfCounter, SchedStats};

use super::{Part, counters, merged, total};

/// Bounds of buckets: powers of two of nanoseconds, a microsecond to 17 seconds.
const POWERS: std::ops::RangeInclusive<u32> = 10..=34;

pub fn write(profile: &Profile, parts: &[Part<'_>], mut out: impl Write) -> io::Result<()> {
    let out = &mut out;
    let all = total(parts);
    // It takes no two rows with the same labels.
    let parts = &merged(parts.iter().cloned(), labels);
    histogram(out, "stackwire_time_slice_seconds", "How long threads ran in one go.", &all.slices)?;
    let help = "How long threads could run and had no CPU.";
    histogram(out, "stackwire_run_queue_seconds", help, &all.run_queue)?;
    let seconds = |ns: u64| vec![(String::new(), format!("{}", ns as f64 / 1e9))];
    let metric = "stackwire_on_cpu_seconds_total";
    counter(out, parts, metric, "Time on a CPU.", |of| seconds(of.slices.sum_ns()))?;
    let metric = "stackwire_waiting_for_cpu_seconds_total";
    let help = "Time able to run and without a CPU.";
    counter(out, parts, metric, help, |of| seconds(of.run_queue.sum_ns()))?;
    let (metric, help) = ("stackwire_context_switches_total", "How often threads left their CPU.");
    counter(out, parts, metric, help, |of| {
        let reasons = [
            ("preempted", of.switches.preempted),
            ("voluntary", of.switches.voluntary),
            ("io", of.switches.io),
            ("stopped", of.switches.stopped),
            ("exited", of.switches.exited),
        ];
        reasons.map(|(name, count)| (format!(",reason=\"{name}\""), count.to_string())).to_vec()
    })?;
    let (metric, help) =
        ("stackwire_migrations_total", "How often threads went on to another CPU.");
    counter(out, parts, metric, help, |of| vec![(String::new(), of.migrations.to_string())])?;
    counter(out, parts, "stackwire_counter_total", "What a counter counted.", |of| {
        let row = |(it, sum): (&PerfCounter, CounterSum)| {
            (format!(",counter=\"{}\"", escaped(&it.name)), sum.scaled().to_string())
        };
        counters(profile, of).map(row).collect()
    })?;
    out.flush()
}

/// A counter of each process, as `rows` has it: more labels, and the value.
fn counter(
    out: &mut impl Write,
    parts: &[Part<'_>],
    name: &str,
    help: &str,
    rows: impl Fn(&SchedStats) -> Vec<(String, String)>,
) -> io::Result<()> {
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter")?;
    for part in parts {
        let who = labels(part);
        for (more, value) in rows(&part.stats) {
            writeln!(out, "{name}{{{who}{more}}} {value}")?;
        }
    }
    Ok(())
}

fn labels(part: &Part<'_>) -> String {
    let Some(who) = &part.who else { return "pid=\"\",comm=\"\"".to_owned() };
    let process = format!("pid=\"{}\",comm=\"{}\"", who.pid, escaped(who.comm));
    match who.thread {
        None => process,
        Some((tid, thread)) => format!("{process},tid=\"{tid}\",thread=\"{}\"", escaped(thread)),
    }
}

/// As the format has it: a backslash before backslashes, quotes and ends of lines.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn histogram(out: &mut impl Write, name: &str, help: &str, times: &Histogram) -> io::Result<()> {
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram")?;
    for power in POWERS {
        // Buckets end at powers of two less one.
        let inside = times.buckets().filter(|&(bucket, _)| Histogram::end_of(bucket) < 1 << power);
        let count = inside.fold(0, |sum: u64, (_, count)| sum.saturating_add(count));
        let bound = (1u64 << power) as f64 / 1e9;
        writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {count}")?;
    }
    writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {}", times.count())?;
    writeln!(out, "{name}_sum {}\n{name}_count {}", times.sum_ns() as f64 / 1e9, times.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up_and_names_are_escaped() {
        let mut out = Vec::new();
        // 3 of 16 to 17 ns, 2 of about a millisecond.
        let times = Histogram::new(2_000_060, [(16, 3), (272, 2)]);
        histogram(&mut out, "x", "y", &times).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("x_bucket{le=\"0.000001024\"} 3\n"), "{text}");
        assert!(text.contains("x_bucket{le=\"+Inf\"} 5\nx_sum 0.00200006\nx_count 5\n"), "{text}");
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
