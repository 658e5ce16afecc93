//! perf.data: what perf records is read, and what perf reads is written.

mod read;
mod write;

pub use self::read::read;
pub use self::write::interpreted::image as interpreted_image;
pub use self::write::jitted::{images as jitted_images, stand_in};
pub use self::write::{Options, write};
