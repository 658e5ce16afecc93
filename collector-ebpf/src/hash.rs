//! A hash of words, by which stacks are told apart. Called by `told.rs` and `walk/`.

/// A step of the hash: a multiplication by an odd number and a rotation, as FxHash has.
#[inline(always)]
pub fn mixed(hash: u64, word: u64) -> u64 {
    (hash.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
