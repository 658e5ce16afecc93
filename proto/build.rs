//! Generates the messages from `stackwire/v1/stackwire.proto`, without protoc.

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let descriptors = protox::compile(["stackwire/v1/stackwire.proto"], ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=stackwire");
    Ok(())
}
