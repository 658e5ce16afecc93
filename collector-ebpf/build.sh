#!/usr/bin/env bash
# Builds the eBPF object and its digest. `make ebpf` writes them into collector/ebpf/; with a
# directory as argument they go there instead, which is how CI compares a fresh build with the one checked in.
#
# Needs a Rust compiler that accepts -Zbuild-std with its library sources, and bpf-linker:
# rustup's nightly with rust-src, or Debian's rustc-web, which is what the object checked in is built with.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-collector/ebpf}

if [ -x /usr/bin/rustc ] && [ -d /usr/lib/rustlib/src/rust/library ]; then
  export RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1
  cargo=(/usr/bin/cargo)
elif rustup toolchain list 2>/dev/null | grep -q nightly; then
  cargo=(cargo +nightly)
else
  echo "make ebpf needs rustc-web, rust-web-src and cargo-web (Debian), or rustup's nightly with rust-src" >&2
  exit 1
fi
if ! command -v bpf-linker >/dev/null; then
  echo "make ebpf needs bpf-linker: LLVM_PREFIX=/usr/lib/llvm-22 cargo install bpf-linker --version 0.13.0 --no-default-features --features llvm-22" >&2
  exit 1
fi

home=${CARGO_HOME:-$HOME/.cargo}
registry=$(echo "$home"/registry/src/*)
sysroot=$("${RUSTC:-rustc}" --print sysroot)
# Nothing of the machine that builds goes into the object.
flags=(-Clink-arg=--btf "--remap-path-prefix=$PWD=." "--remap-path-prefix=$sysroot=rust")
for directory in $registry; do flags+=("--remap-path-prefix=$directory=registry"); done
CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f'; echo "${flags[*]}")
export CARGO_ENCODED_RUSTFLAGS CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER=bpf-linker
"${cargo[@]}" build --quiet --locked --profile bpf -Zbuild-std=core --target bpfel-unknown-none \
  -p stackwire-collector-ebpf --bin stackwire-bpf

mkdir -p "$out"
objcopy=$(command -v llvm-objcopy-22 || command -v llvm-objcopy || echo /usr/lib/llvm-22/bin/llvm-objcopy)
"$objcopy" --strip-debug target/bpfel-unknown-none/bpf/stackwire-bpf "$out/stackwire.bpf.o"
collector-ebpf/digest.sh > "$out/stackwire.bpf.sources"
