//! Counts of events, as `perf stat` prints them: text for people, a JSON object a line for
//! programs. Pure.

use std::io::{self, Write};

use serde_json::json;
use stackwire_model::sched::CounterSum;

/// A count of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// Name of the event.
    pub event: String,
    /// Of which thread, by name and id; none: of all.
    pub thread: Option<(String, u32)>,
    /// `None`: this machine does not count it.
    pub counted: Option<CounterSum>,
}

/// All that was counted.
#[derive(Clone, Debug, Default)]
pub struct Stat {
    /// What was counted, as people call it: `'./prog'`, `process id '12'`.
    pub of: String,
    /// Counts, in the order they were asked for.
    pub counts: Vec<Count>,
    /// Seconds that passed.
    pub elapsed: f64,
    /// Seconds of CPU time of the command, in user mode and in the kernel.
    pub cpu: Option<(f64, f64)>,
}

impl Count {
    /// What it would have been, had it been counted all the time; none when it never was.
    fn scaled(&self) -> Option<f64> {
        Some(self.counted.filter(|sum| sum.running_ns > 0)?.scaled() as f64)
    }
}

/// What a count says beside another.
struct Metric {
    value: f64,
    unit: String,
}

/// Writes it for people.
///
/// # Errors
/// Those of the writer.
pub fn write_text(stat: &Stat, mut out: impl Write) -> io::Result<()> {
    writeln!(out, "\n Performance counter stats for {}:\n", stat.of)?;
    for count in &stat.counts {
        let thread = count.thread.as_ref();
        let thread = thread.map_or(String::new(), |(name, tid)| {
            format!("{:>22} ", format!("{}-{tid}", crate::plain::plain(name)))
        });
        let amount = match count.counted {
            None => "<not supported>".to_owned(),
            Some(_) => count
                .scaled()
                .map_or("<not counted>".to_owned(), |value| amount(&count.event, value)),
        };
        let unit = if is_clock(&count.event) { "msec" } else { "" };
        write!(out, "{thread}{amount:>18} {unit:<4} {:<28}", count.event)?;
        if let Some(Metric { value, unit }) = metric(stat, count) {
            write!(out, " # {value:>8.3} {unit}")?;
        }
        let counted = count.counted.filter(|sum| sum.running_ns > 0);
        let percent = counted.map_or(100.0, |sum| sum.coverage() * 100.0);
        if percent < 99.995 {
            write!(out, "  ({percent:.2}%)")?;
        }
        writeln!(out)?;
    }
    writeln!(out, "\n{:>18.9} seconds time elapsed", stat.elapsed)?;
    if let Some((user, system)) = stat.cpu {
        // Children are counted in hundredths of a second.
        writeln!(out, "\n{user:>18.2} seconds user\n{system:>18.2} seconds sys")?;
    }
    writeln!(out)
}

/// Writes it for programs, with the keys of `perf stat -j`.
///
/// # Errors
/// Those of the writer.
pub fn write_json(stat: &Stat, mut out: impl Write) -> io::Result<()> {
    for count in &stat.counts {
        let counted = count.counted.unwrap_or_default();
        let value = match count.counted {
            None => "<not supported>".to_owned(),
            Some(_) => count.scaled().map_or("<not counted>".to_owned(), |value| {
                format!("{:.6}", if is_clock(&count.event) { value / 1e6 } else { value })
            }),
        };
        let metric = metric(stat, count);
        let mut line = json!({
            "counter-value": value,
            "unit": if is_clock(&count.event) { "msec" } else { "" },
            "event": count.event,
            "event-runtime": counted.running_ns,
            "pcnt-running": (counted.coverage() * 10_000.0).round() / 100.0,
        });
        if let Some(Metric { value, unit }) = metric {
            line["metric-value"] = format!("{value:.6}").into();
            line["metric-unit"] = unit.into();
        }
        if let Some((name, tid)) = &count.thread {
            line["thread"] = format!("{name}-{tid}").into();
        }
        writeln!(out, "{line}")?;
    }
    Ok(())
}

fn plain(event: &str) -> &str {
    event.strip_suffix(":u").unwrap_or(event)
}

fn is_clock(event: &str) -> bool {
    matches!(plain(event), "task-clock" | "cpu-clock")
}

/// Nanoseconds as milliseconds, counts with a comma for each thousand.
fn amount(event: &str, value: f64) -> String {
    if is_clock(event) {
        return format!("{:.2}", value / 1e6);
    }
    let digits = format!("{value:.0}");
    let mut shown = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

/// What perf's builtin metrics say of an event (tools/perf/util/stat-shadow.c): of the same thread.
fn metric(stat: &Stat, count: &Count) -> Option<Metric> {
    let value = count.scaled()?;
    let other = |name: &str| {
        let same = |it: &&Count| plain(&it.event) == name && it.thread == count.thread;
        stat.counts.iter().find(same)?.scaled().filter(|&value| value > 0.0)
    };
    let of = |value: f64, unit: &str| Some(Metric { value, unit: unit.to_owned() });
    let event = plain(&count.event);
    match event {
        "task-clock" | "cpu-clock" if stat.elapsed > 0.0 => {
            return of(value / 1e9 / stat.elapsed, "CPUs utilized");
        }
        "instructions" => {
            if let Some(cycles) = other("cycles") {
                return of(value / cycles, "insn per cycle");
            }
        }
        "branch-misses" => {
            if let Some(branches) = other("branches") {
                return of(value * 100.0 / branches, "of all branches, percent");
            }
        }
        "cache-misses" => {
            if let Some(all) = other("cache-references") {
                return of(value * 100.0 / all, "of all cache refs, percent");
            }
        }
        _ => {}
    }
    let nanoseconds = other("task-clock").or_else(|| other("cpu-clock"))?;
    if is_clock(event) {
        return None;
    }
    if event == "cycles" {
        return of(value / nanoseconds, "GHz");
    }
    let per_second = value * 1e9 / nanoseconds;
    match per_second {
        1e9.. => of(per_second / 1e9, "G/sec"),
        1e6.. => of(per_second / 1e6, "M/sec"),
        1e3.. => of(per_second / 1e3, "K/sec"),
        _ => of(per_second, "/sec"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat() -> Stat {
        let count = |event: &str, value, enabled_ns, running_ns| Count {
            event: event.to_owned(),
            thread: None,
            counted: Some(CounterSum { value, enabled_ns, running_ns }),
        };
        let none = Count { event: "bus-cycles".to_owned(), thread: None, counted: None };
        Stat {
            of: "'./prog'".to_owned(),
            counts: vec![
                count("task-clock", 2_000_000_000, 2_000_000_000, 2_000_000_000),
                count("page-faults", 1_234_567, 2_000_000_000, 2_000_000_000),
                count("cycles:u", 3_000_000_000, 4_000, 2_000),
                count("instructions:u", 9_000_000_000, 4_000, 2_000),
                count("branches", 5, 4_000, 0),
                none,
            ],
            elapsed: 1.0,
            cpu: Some((1.5, 0.25)),
        }
    }

    #[test]
    fn people_read_it_as_perfs() {
        let mut text = Vec::new();
        write_text(&stat(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for line in [
            "           2000.00 msec task-clock                   #    2.000 CPUs utilized",
            "         1,234,567      page-faults                  #  617.284 K/sec",
            "     6,000,000,000      cycles:u                     #    3.000 GHz  (50.00%)",
            "    18,000,000,000      instructions:u               #    3.000 insn per cycle  (50.00%)",
            "     <not counted>      branches",
            "   <not supported>      bus-cycles",
            "       1.000000000 seconds time elapsed",
            "              1.50 seconds user",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn programs_read_it_as_perfs() {
        let mut text = Vec::new();
        write_json(&stat(), &mut text).unwrap();
        let lines: Vec<serde_json::Value> = String::from_utf8(text)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 6);
        assert_eq!(lines[0]["counter-value"], "2000.000000");
        assert_eq!(lines[2]["pcnt-running"], 50.0);
        assert_eq!(lines[3]["metric-unit"], "insn per cycle");
        assert_eq!(lines[5]["counter-value"], "<not supported>");
    }
}
