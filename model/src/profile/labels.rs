//! Labels that say where a sample belongs: its thread, its process and the container of that
//! process. Pure.
//!
//! The path of a cgroup tells the container and the pod. Each runtime makes this path in its own
//! way. The forms known here are those of containerd, CRI-O, Docker, Podman and nerdctl under
//! either cgroup driver, and of systemd.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};

use super::{Profile, SampleKey, StackId};

/// A label of single samples: of a wait, or one that another profiler gave.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Label {
    /// Its key.
    pub key: String,
    /// What it says.
    pub value: LabelValue,
}

/// What a label says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum LabelValue {
    /// A text.
    Text(String),
    /// A number with its unit, which may be empty.
    Number(i64, String),
    /// A stack, of another thread for example. It is no text before it has names.
    Stack {
        /// Its user part.
        user: Option<StackId>,
        /// Its kernel part, which the user part called.
        kernel: Option<StackId>,
    },
}

/// As a label: the kind of the innermost frame, see
/// [`Profile::frame_type`]. It is in the stack, unless another
/// profiler has given a label of this name.
pub const KIND: &str = "kind";

/// The container and the pod in a cgroup's path, as labels.
#[must_use]
pub fn of_cgroup(path: &str) -> Vec<(&'static str, String)> {
    let mut labels = Vec::new();
    if path.is_empty() {
        return labels;
    }
    labels.push(("cgroup_path", path.to_owned()));
    labels.extend(container_id(path).map(|id| ("container_id", id.to_owned())));
    labels.extend(pod_uid(path).map(|uid| ("pod_uid", uid)));
    labels
}

/// Prefixes that runtimes put before the id. The prefixes of monitors (`crio-conmon-`,
/// `libpod-conmon-`) are not in this list: monitors run outside the container.
const RUNTIMES: [&str; 7] = [
    "cri-containerd-",
    "crio-",
    "docker-",
    // `--cgroups=split`, as quadlets have it.
    "libpod-payload-",
    "libpod-",
    "nerdctl-",
    "containerd-",
];

/// The id of the innermost container.
#[must_use]
pub fn container_id(path: &str) -> Option<&str> {
    path.rsplit('/').find_map(|component| {
        let component = component.strip_suffix(".scope").unwrap_or(component);
        // A systemd-style path under the cgroupfs driver: slice:runtime:id.
        let id = component.rsplit(':').next().unwrap_or(component);
        let named = RUNTIMES.iter().find_map(|runtime| id.strip_prefix(runtime));
        let is_hex = |id: &str| id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        // ECS on Fargate: the id of the task and a number.
        let of_task = id.split_once('-').is_some_and(|(task, number)| {
            task.len() == 32
                && is_hex(task)
                && (8..=10).contains(&number.len())
                && number.bytes().all(|byte| byte.is_ascii_digit())
        });
        match named {
            _ if of_task => Some(id),
            Some(id) => (id.len() >= 12 && is_hex(id)).then_some(id),
            // Bare, as under the cgroupfs driver: then nothing shorter is one for certain.
            None => (id.len() == 64 && is_hex(id)).then_some(id),
        }
    })
}

/// The uid of the pod, with dashes.
#[must_use]
pub fn pod_uid(path: &str) -> Option<String> {
    path.split(['/', ':']).rev().find_map(|component| {
        let component = component.strip_suffix(".slice").unwrap_or(component);
        let (before, uid) = component.rsplit_once("pod")?;
        // `pod…` under `kubepods`, or `kubepods-burstable-pod…` as systemd nests slices by name.
        // The kubelet may have a slice of its own before that: `kubelet-kubepods-…`, as kind has.
        if !(before.is_empty() && path.contains("kubepods") || before.contains("kubepods")) {
            return None;
        }
        let uid = uid.replace('_', "-");
        let hex = uid.bytes().filter(u8::is_ascii_hexdigit).count();
        let dashes = uid.bytes().filter(|&byte| byte == b'-').count();
        // Of a static pod it is the hash of its manifest.
        let fits = hex == 32 && hex + dashes == uid.len() && matches!(dashes, 0 | 4);
        fits.then_some(uid)
    })
}

/// Whether two processes are in the same pod, by their cgroups. The uid of the pod has to be the
/// same. Inside a cgroup namespace there is no uid; then the cgroups have to be the same or
/// neighbours.
#[must_use]
pub fn same_pod(own: &str, other: &str) -> bool {
    match (pod_uid(own), pod_uid(other)) {
        (Some(own), Some(other)) => own == other,
        (None, None) if own == "/" => {
            other == "/" || other.strip_prefix("/../").is_some_and(|name| !name.starts_with(".."))
        }
        _ => false,
    }
}

impl Profile {
    /// Keys and values of all labels of samples with this key, without those that are stacks.
    pub fn labels(&self, key: SampleKey) -> impl Iterator<Item = (&str, Cow<'_, str>)> {
        let thread = &self.threads[key.thread.index()];
        let process = &self.processes[thread.process.index()];
        let number = |number: u32| (number != 0).then(|| Cow::Owned(number.to_string()));
        let own = [
            ("comm", said(&process.comm)),
            ("pid", number(process.pid)),
            ("host_pid", number(process.host_pid)),
            ("thread", said(&thread.comm)),
            ("tid", number(thread.tid)),
        ];
        let own = own.into_iter().filter_map(|(key, value)| Some((key, value?)));
        let of_process =
            process.labels.iter().map(|(key, value)| (*key, Cow::Borrowed(value.as_str())));
        let given = key.labels.checked_sub(1).and_then(|at| self.label_sets.get(at as usize));
        let given = given.into_iter().flatten();
        let given = given.filter_map(|label| {
            let value = match &label.value {
                LabelValue::Text(text) => Cow::Borrowed(text.as_str()),
                LabelValue::Number(number, unit) => Cow::Owned(format!("{number}{unit}")),
                LabelValue::Stack { .. } => return None,
            };
            Some((label.key.as_str(), value))
        });
        own.chain(of_process).chain(given)
    }

    /// Keys of all labels some sample has, and [`KIND`].
    #[must_use]
    pub fn label_keys(&self) -> BTreeSet<String> {
        let mut keys = BTreeSet::from([KIND.to_owned()]);
        let mut seen = HashSet::new();
        for sample in &self.samples {
            // What labels a sample has is the matter of its thread, and of what came with it.
            if seen.insert((sample.key.thread, sample.key.labels)) {
                for (key, _) in self.labels(sample.key) {
                    if !keys.contains(key) {
                        keys.insert(key.to_owned());
                    }
                }
            }
        }
        keys
    }

    /// The value of one label.
    #[must_use]
    pub fn label(&self, sample: SampleKey, wanted: &str) -> Option<Cow<'_, str>> {
        let found = self.labels(sample).find(|(key, _)| *key == wanted).map(|(_, value)| value);
        if wanted == KIND && found.is_none() {
            return Some(self.frame_type(self.frames(sample).next()?).text().into());
        }
        found
    }
}

fn said(text: &str) -> Option<Cow<'_, str>> {
    (!text.is_empty()).then_some(Cow::Borrowed(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f4e0d4c6a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5";
    const UID: &str = "2c9f1c5e-6f4e-4b6b-9a53-5c1f0d2f7a11";

    #[test]
    fn containers_of_every_runtime_are_found() {
        let under = UID.replace('-', "_");
        for (path, container, pod) in [
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                true,
                true,
            ),
            (format!("/kubepods.slice/kubepods-pod{under}.slice/crio-{ID}.scope"), true, true),
            (
                format!("/kubepods.slice/kubepods-pod{under}.slice/crio-conmon-{ID}.scope"),
                false,
                true,
            ),
            (format!("/kubepods/besteffort/pod{UID}/{ID}"), true, true),
            (format!("/kubepods/besteffort/pod{UID}/{ID}/init.scope"), true, true),
            (format!("/kubelet/kubepods/pod{UID}/{ID}"), true, true),
            (
                format!(
                    "/system.slice/containerd.service/kubepods-burstable-pod{under}.slice:cri-containerd:{ID}"
                ),
                true,
                true,
            ),
            (format!("/docker/{ID}"), true, false),
            (format!("/system.slice/docker-{ID}.scope"), true, false),
            (format!("/machine.slice/libpod-{ID}.scope/container"), true, false),
            (format!("/machine.slice/libpod-conmon-{ID}.scope"), false, false),
            (
                format!(
                    "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"
                ),
                true,
                false,
            ),
            (format!("/default/{ID}"), true, false),
            (format!("/system.slice/web.service/libpod-payload-{ID}"), true, false),
            (
                format!(
                    "/docker/{ID}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                true,
                true,
            ),
            ("/system.slice/ssh.service".to_owned(), false, false),
            ("/user.slice/user-0.slice/session-1.scope".to_owned(), false, false),
            ("/".to_owned(), false, false),
            ("/pods/podrick".to_owned(), false, false),
            (format!("/build/pod{UID}"), false, false),
        ] {
            assert_eq!(container_id(&path), container.then_some(ID), "{path}");
            assert_eq!(pod_uid(&path).as_deref(), pod.then_some(UID), "{path}");
        }
        let task = "0123456789abcdef0123456789abcdef-4294967295";
        assert_eq!(
            container_id(&format!("/ecs/0123456789abcdef0123456789abcdef/{task}")),
            Some(task)
        );
        let nested = format!("/docker/{}/docker/{ID}", "0".repeat(64));
        assert_eq!(container_id(&nested), Some(ID));
        assert_eq!(pod_uid(&format!("/kubepods/pod{}/x", "a".repeat(32))), Some("a".repeat(32)));
        assert_eq!(of_cgroup(""), []);
    }

    #[test]
    fn names_of_the_own_pod_are_for_processes_in_it() {
        let pod = |uid: &str, id: &str| format!("/kubepods/pod{uid}/{id}");
        let other = UID.replace('2', "3");
        assert!(same_pod(&pod(UID, "a"), &pod(UID, "b")));
        assert!(!same_pod(&pod(UID, "a"), &pod(&other, "b")));
        assert!(!same_pod(&pod(UID, "a"), "/system.slice/ssh.service"));
        assert!(same_pod("/", "/") && same_pod("/", "/../cri-containerd-1.scope"));
        assert!(!same_pod("/", "/../../pod2/x") && !same_pod("/", "/system.slice/ssh.service"));
    }

    proptest::proptest! {
        #[test]
        fn no_path_is_too_odd(path in ".{0,200}") {
            let _ = of_cgroup(&path);
        }
    }
}
