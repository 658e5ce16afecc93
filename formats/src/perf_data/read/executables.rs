//! Which executable a mapping of a perf.data is of, by what the mapping says and by the list of
//! build-ids in the file's header. Called by `mod.rs`.

use linux_perf_data::linux_perf_event_reader::{CpuMode, Mmap2FileId};
use linux_perf_data::{DsoKey, PerfFile};
use rustc_hash::FxHashMap;
use stackwire_model::profile::{ArtifactHash, Executable};
use stackwire_model::{BuildId, Device, ExecutableKey, FileId};

use crate::Host;

/// What is known of executables.
pub(super) struct Executables {
    build_ids: FxHashMap<DsoKey, BuildId>,
    /// The vDSO, once it was looked for.
    vdso: Option<Option<ArtifactHash>>,
}

impl Executables {
    /// What the header of a file says.
    pub(super) fn of(file: &PerfFile) -> Self {
        let listed = file.build_ids().unwrap_or_default().into_iter();
        let build_ids = listed.filter_map(|(key, info)| Some((key, trimmed(&info.build_id)?)));
        Self { build_ids: build_ids.collect(), vdso: None }
    }

    /// Notes the build-id that a mapping of the kernel or of a module has.
    pub(super) fn learn_of_kernel(&mut self, path: &str, id: &[u8]) {
        let key = DsoKey::detect(path.as_bytes(), CpuMode::Kernel);
        self.build_ids.extend(key.zip(trimmed(id)));
    }

    /// Build-id of a module of the kernel, or of the kernel itself, whose name is empty.
    pub(super) fn module(&self, name: &str) -> Option<BuildId> {
        let key = match name {
            "" => DsoKey::Kernel,
            name => DsoKey::detect(format!("[{name}]").as_bytes(), CpuMode::Kernel)?,
        };
        self.build_ids.get(&key).copied()
    }

    /// What is mapped from this path.
    pub(super) fn at(
        &mut self,
        path: &str,
        id: Option<&Mmap2FileId>,
        host: &mut dyn Host,
    ) -> Executable {
        if path == "[vdso]" {
            let kernel = self.module("");
            let image = *self.vdso.get_or_insert_with(|| host.vdso(kernel?));
            return Executable::Vdso { image };
        }
        // Code that was made at run time; as perf, which looks for a perf-map then.
        if path.starts_with("//anon")
            || path.starts_with('[')
            || path.is_empty()
            || path.starts_with("anon_inode:")
        {
            return Executable::Anonymous;
        }
        let (build_id, file) = match id {
            Some(Mmap2FileId::BuildId(id)) => (trimmed(id), None),
            Some(Mmap2FileId::InodeAndVersion(id)) => {
                let device = Device { major: id.major, minor: id.minor };
                (None, FileId::new(id.inode, device))
            }
            None => (None, None),
        };
        let listed = || self.build_ids.get(&DsoKey::detect(path.as_bytes(), CpuMode::User)?);
        let build_id = build_id.or_else(|| listed().copied());
        Executable::File { path: path.to_owned(), key: ExecutableKey::of(build_id, file) }
    }
}

/// A build-id of 20 bytes whose end is padding.
fn trimmed(mut id: &[u8]) -> Option<BuildId> {
    // perf before 5.10 did not say how long it is.
    while id.len().is_multiple_of(4) && id.len() > 8 && id.ends_with(&[0; 4]) {
        id = &id[..id.len() - 4];
    }
    BuildId::new(id).filter(|_| id.iter().any(|&byte| byte != 0))
}
