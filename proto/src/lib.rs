//! The contract between collector and symbolizer: messages, and how a capture file frames them.
//!
//! No logic beyond framing, compression, the model's words (`convert.rs`) and the lines of
//! kallsyms. The collector builds these messages in `collector/src/wire.rs`; the symbolizer takes
//! them apart in `symbolizer/src/ingest/`; nothing else sees them. `proto/README.md` tells the
//! contract in prose.

mod convert;
mod frame;
pub mod kallsyms;
mod seal;

pub use convert::build_id_to_wire;
pub use frame::{
    FrameReader, FrameWriter, MAX_FRAME_BYTES, ReadError, Tail, find_frame, write_frame,
};
pub use seal::{
    ARTIFACT_PIECE_BYTES, MAX_ARTIFACT_BYTES, MAX_EPOCH_BYTES, MAX_EPOCH_MEMORY, MAX_FILE_BYTES,
    SealError, Unsealed, open_epoch, open_piece, seal_epoch, seal_piece,
};

/// Version of the contract: of the messages and of the framing. A reader takes this one and older.
pub const FORMAT: u32 = 2;

/// The same contract as a `FileDescriptorSet`, for who asks a server what it speaks.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Generated from `stackwire/v1/stackwire.proto`.
#[expect(missing_docs, clippy::all, reason = "generated; the .proto file carries the comments")]
#[allow(clippy::allow_attributes_without_reason, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("stackwire.v1");
}
