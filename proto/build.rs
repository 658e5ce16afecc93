//! Generates the messages from `stackwire/v1/stackwire.proto`, without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let descriptors = protox::compile(["stackwire/v1/stackwire.proto"], ["."])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=stackwire");
    Ok(())
}
