//! Shares of time beside those that are known.

/// Within a point, or within four standard deviations of so few samples.
pub(crate) fn is_about(name: &str, what: &[&str], part: u64, of: u64, share: f64) {
    let found = part as f64 / of as f64;
    let deviation = (share * (1.0 - share) / of as f64).sqrt();
    let bound = f64::max(0.01, 4.0 * deviation);
    assert!((found - share).abs() <= bound, "{name}: {what:?} has {found:.3} and not {share:.3}");
}
