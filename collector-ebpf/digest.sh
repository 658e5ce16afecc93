#!/usr/bin/env bash
# Digest of everything the eBPF object is made of. Compared by a test with the one checked in beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
{
  find collector-ebpf/src collector-ebpf/Cargo.toml collector-ebpf/build.sh -type f | LC_ALL=C sort | xargs sha256sum
  grep -A1 -E '^name = "aya-ebpf' Cargo.lock
} | sha256sum | cut -d' ' -f1
