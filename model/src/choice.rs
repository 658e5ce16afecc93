//! Processes chosen by what they are and not by number: by name, by container, by pod. Both
//! programs read it from their command lines; the collector asks of each process whether it fits.

use std::fmt;
use std::str::FromStr;

use crate::profile::labels::{container_id, pod_uid};

/// Bytes of a name that the kernel keeps: `TASK_COMM_LEN` of include/linux/sched.h, less the zero.
const COMM_BYTES: usize = 15;

/// Which processes count. An empty list asks for nothing; a process has to fit one of each other
/// list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Names of processes, as `ps -o comm` shows them.
    pub comms: Vec<String>,
    /// Their containers.
    pub containers: Vec<ContainerId>,
    /// Their pods.
    pub pods: Vec<PodUid>,
}

impl Choice {
    /// Whether every process fits.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.comms.is_empty() && self.containers.is_empty() && self.pods.is_empty()
    }

    /// Whether a process with this name fits, in a cgroup with this path.
    #[must_use]
    pub fn fits(&self, comm: &str, cgroup_path: &str) -> bool {
        // Those of kernel threads are longer where /proc tells them.
        let kept = |name: &str| name.as_bytes()[..name.len().min(COMM_BYTES)].to_owned();
        let called = |name: &String| kept(comm) == kept(name);
        let in_container = || {
            container_id(cgroup_path)
                .is_some_and(|id| self.containers.iter().any(|asked| id.starts_with(&asked.0)))
        };
        let in_pod =
            || pod_uid(cgroup_path).is_some_and(|uid| self.pods.iter().any(|pod| pod.is(&uid)));
        (self.comms.is_empty() || self.comms.iter().any(called))
            && (self.containers.is_empty() || in_container())
            && (self.pods.is_empty() || in_pod())
    }
}

/// For people: `called postgres or psql, in container 0123456789ab`.
impl fmt::Display for Choice {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("called", either(&self.comms)),
            ("in container", either(&self.containers)),
            ("in pod", either(&self.pods)),
        ];
        let given = parts.iter().filter(|(_, names)| !names.is_empty());
        let given: Vec<String> = given.map(|(how, names)| format!("{how} {names}")).collect();
        to.write_str(&given.join(", "))
    }
}

fn either(all: &[impl ToString]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
}

/// Not what a container or a pod is known by.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadChoice {
    /// No container has it.
    #[error(
        "{0:?} is no id of a container: give the hexadecimal digits that `docker ps` or `crictl ps` shows, or the first of them"
    )]
    Container(String),
    /// No pod has it.
    #[error(
        "{0:?} is no uid of a pod: give the 32 hexadecimal digits that `kubectl get pod NAME -o jsonpath={{.metadata.uid}}` shows"
    )]
    Pod(String),
}

/// The id of a container, or how it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerId(String);

impl fmt::Display for ContainerId {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl FromStr for ContainerId {
    type Err = BadChoice;

    fn from_str(text: &str) -> Result<Self, BadChoice> {
        // As `kubectl get pod -o yaml` has it: containerd://0123…
        let id = text.rsplit_once("://").map_or(text, |(_, id)| id);
        // ECS on Fargate has a dash in it.
        let fits = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-');
        if id.is_empty() || id.len() > 64 || !id.bytes().all(fits) {
            return Err(BadChoice::Container(text.to_owned()));
        }
        Ok(Self(id.to_owned()))
    }
}

/// The uid of a pod, with the dashes that its runtime writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodUid(String);

impl fmt::Display for PodUid {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl PodUid {
    /// Some write it without dashes.
    fn is(&self, uid: &str) -> bool {
        self.0.replace('-', "") == uid.replace('-', "")
    }
}

impl FromStr for PodUid {
    type Err = BadChoice;

    fn from_str(text: &str) -> Result<Self, BadChoice> {
        let uid = text.to_ascii_lowercase();
        let hex = uid.bytes().filter(u8::is_ascii_hexdigit).count();
        let dashes = uid.bytes().filter(|&byte| byte == b'-').count();
        if hex != 32 || hex + dashes != uid.len() {
            return Err(BadChoice::Pod(text.to_owned()));
        }
        Ok(Self(uid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "01234567-89ab-cdef-0123-456789abcdef";

    #[test]
    fn a_process_fits_one_of_each_list() {
        let path =
            format!("/kubepods.slice/kubepods-pod{}.slice/crio-{ID}.scope", UID.replace('-', "_"));
        let mut choice = Choice::default();
        assert!(choice.is_everything() && choice.fits("a", ""));
        choice.comms = vec!["a".to_owned(), "a name of 20 letters".to_owned()];
        assert!(
            choice.fits("a", "") && choice.fits("a name of 20 le", "") && !choice.fits("b", "")
        );
        choice.containers = vec![ID[..12].parse().unwrap()];
        assert!(choice.fits("a", &path) && !choice.fits("a", "") && !choice.fits("b", &path));
        choice.pods = vec![UID.parse().unwrap()];
        assert!(choice.fits("a", &path) && !choice.fits("a", &format!("/docker/{ID}")));
        choice.pods = vec![UID.replace('-', "").parse().unwrap()];
        assert!(choice.fits("a", &path));
        choice.pods = vec![UID.parse().unwrap()];
        let text =
            format!("called a or a name of 20 letters, in container 0123456789ab, in pod {UID}");
        assert_eq!(choice.to_string(), text);
    }

    #[test]
    fn ids_are_those_that_runtimes_show() {
        assert_eq!("containerd://0123ab".parse(), Ok(ContainerId("0123ab".to_owned())));
        assert_eq!("ABC".parse::<ContainerId>(), Err(BadChoice::Container("ABC".to_owned())));
        assert!("".parse::<ContainerId>().is_err() && "nginx".parse::<ContainerId>().is_err());
        assert_eq!(UID.to_uppercase().parse(), Ok(PodUid(UID.to_owned())));
        assert_eq!("web-0".parse::<PodUid>(), Err(BadChoice::Pod("web-0".to_owned())));
    }
}
