//! Parts of a whole, as the report prints them.

/// In percent; 0 of nothing.
pub fn share(part: u64, total: u64) -> f64 {
    if total == 0 { 0.0 } else { part as f64 * 100.0 / total as f64 }
}
