//! Frame pointers that the native walk notes of the frames it left by them, for who looks at those
//! frames afterwards (`by_frames_of_v8.rs`). Called by `by_tables.rs`. Pure.

/// Words of a frame below its pointer: its context and its function are the first two, what the
/// interpreter keeps the next three.
const OF_FUNCTION: u64 = 16;
const OF_INTERPRETER: u64 = 40;
/// In a pointer: the frame does not have all of those words yet.
const IS_SHORT: u64 = 1;

/// What is noted of a frame with this pointer and this stack pointer; 0: its function is not there
/// yet.
#[inline(always)]
pub fn noted(pointer: u64, sp: u64) -> u64 {
    if pointer & 7 != 0 || sp > pointer.wrapping_sub(OF_FUNCTION) {
        return 0;
    }
    if sp > pointer.wrapping_sub(OF_INTERPRETER) { pointer | IS_SHORT } else { pointer }
}

/// The pointer, and whether the frame has what the interpreter keeps.
#[inline(always)]
pub fn read(noted: u64) -> (u64, bool) {
    (noted & !IS_SHORT, noted & IS_SHORT == 0)
}
