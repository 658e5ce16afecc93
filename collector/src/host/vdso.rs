//! The image of the vDSO, one for all processes of a kernel. Read from this process's own memory.

use std::slice;

use stackwire_model::MapsLine;

/// Bytes of the vDSO's ELF image as the kernel maps it; `None` where there is none.
///
/// Needs no file: `/proc/self/mem` is not ours to open once the binary carries file capabilities.
#[must_use]
pub fn image() -> Option<Vec<u8>> {
    let maps = std::fs::read("/proc/self/maps").ok()?;
    let mapped = MapsLine::all(&maps).find(|line| line.path == b"[vdso]")?;
    let (start, end) = (mapped.start.0 as usize, mapped.end.0 as usize);
    // SAFETY: the kernel maps the vDSO readable for the life of the process and never changes it;
    // the range is the one it lists for exactly that mapping.
    let bytes = unsafe { slice::from_raw_parts(start as *const u8, end - start) };
    Some(bytes.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_is_an_elf_file() {
        let image = image().unwrap();
        assert_eq!(&image[..4], b"\x7fELF");
        assert_eq!(image.len() % rustix::param::page_size(), 0);
    }
}
