#!/usr/bin/env bash
# Compiles everything but the eBPF programs for arm64; tests/counters.sh runs it. Installs what that takes where it may: Rust's
# library for it, and a C compiler for SQLite, zstd and ring.
set -euo pipefail
target=aarch64-unknown-linux-gnu
if ! rustup target add "$target" 2>/dev/null; then
  missing="Rust's $target (rustup target add)"
elif ! command -v aarch64-linux-gnu-gcc >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "tests/aarch64.sh: installing gcc-aarch64-linux-gnu"
    apt-get -o DPkg::Lock::Timeout=600 -q update >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -qy --no-install-recommends \
      gcc-aarch64-linux-gnu libc6-dev-arm64-cross >/dev/null || true
  fi
  command -v aarch64-linux-gnu-gcc >/dev/null || missing=gcc-aarch64-linux-gnu
fi
if [ -n "${missing:-}" ]; then
  echo "tests/aarch64.sh: no $missing: whether the workspace compiles for arm64 is not checked" >&2
  [ -z "${STACKWIRE_NO_SKIP:-}" ]
  exit
fi
# Unoptimized and without debug information: it takes half as long.
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
CARGO_PROFILE_DEV_DEBUG=0 cargo build --locked --workspace --exclude stackwire-collector-ebpf --exclude stackwire-fuzz --features stackwire-e2e/bench --target "$target"
