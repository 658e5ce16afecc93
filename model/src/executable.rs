//! How an executable is identified: the file that code came from.

use crate::BuildId;

/// The number of a device, as stat(2) has it in two parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device {
    /// Which driver.
    pub major: u32,
    /// Which of its devices.
    pub minor: u32,
}

/// A file of one host, as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    inode: u64,
    device: Device,
}

impl FileId {
    /// That with this inode; inode 0 is none, as in /proc/PID/maps.
    #[must_use]
    pub fn new(inode: u64, device: Device) -> Option<Self> {
        (inode != 0).then_some(Self { inode, device })
    }

    /// Its inode.
    #[must_use]
    pub fn inode(self) -> u64 {
        self.inode
    }

    /// The device of its file system.
    #[must_use]
    pub fn device(self) -> Device {
        self.device
    }
}

/// How an executable is identified.
///
/// By the build-id where there is one: equal files can have different inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExecutableKey {
    /// Its GNU build-id.
    BuildId(BuildId),
    /// The file itself, on the host it was seen on.
    File(FileId),
}

impl ExecutableKey {
    /// The build-id if there is one, else the file, if that is known.
    #[must_use]
    pub fn of(build_id: Option<BuildId>, file: Option<FileId>) -> Option<Self> {
        build_id.map(Self::BuildId).or(file.map(Self::File))
    }

    /// The build-id, if it is known by one.
    #[must_use]
    pub fn build_id(self) -> Option<BuildId> {
        match self {
            Self::BuildId(id) => Some(id),
            Self::File(_) => None,
        }
    }

    /// The file, if it is known by nothing else.
    #[must_use]
    pub fn file(self) -> Option<FileId> {
        match self {
            Self::BuildId(_) => None,
            Self::File(id) => Some(id),
        }
    }
}

impl From<BuildId> for ExecutableKey {
    fn from(id: BuildId) -> Self {
        Self::BuildId(id)
    }
}

impl From<FileId> for ExecutableKey {
    fn from(id: FileId) -> Self {
        Self::File(id)
    }
}
