//! Words both halves of Stackwire share, as types: by what executables are known, what is
//! sampled and how, why stacks end, why samples are lost; and the profile made of them.
//!
//! Pure: no I/O, no wire format, no ELF. Every other crate may use it; it uses none of them.

mod address;
mod build_id;
mod choice;
pub mod code;
mod event;
mod executable;
mod machine;
mod maps_line;
pub mod perf_events;
pub mod profile;
mod python;
mod reason;
mod sampling;
pub mod sched;
mod value;
mod wait;

pub use address::{Address, CodeAddress, FileOffset, KernelAddr, KernelOffset, UserAddr, VirtAddr};
pub use build_id::{BadBuildId, BuildId};
pub use choice::{BadChoice, Choice, ContainerId, PodUid};
pub use code::{Code, Runtime, Text};
pub use event::{BadList, Event, Groups, UnknownEvent};
pub use executable::{Device, ExecutableKey, FileId};
pub use machine::Machine;
pub use maps_line::MapsLine;
pub use perf_events::PerfType;
pub use profile::Profile;
pub use python::PythonOutcome;
pub use reason::{EndReason, ListEnd, LostReason};
pub use sampling::{NoBpf, Share, Source, StackCopies, UnknownName, Unwind};
pub use sched::{AddUp, Histogram, SchedStats};
pub use value::ValueKind;
pub use wait::{OffCpu, Wait, WaitState};
