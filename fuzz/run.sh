#!/usr/bin/env bash
# Runs every fuzz target for FUZZ_SECONDS (60). Instrumentation needs unstable flags: with a nightly toolchain as
# they come, with a stable one through RUSTC_BOOTSTRAP.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v cargo-fuzz >/dev/null || cargo install -q cargo-fuzz --locked
export RUSTC_BOOTSTRAP=1
host=$(rustc -vV | sed -n 's/^host: //p')
# Sanitizers come as shared objects, which a statically linked program cannot load.
export CARGO_BUILD_TARGET="$host" RUSTFLAGS="-Ctarget-feature=-crt-static"
for target in $(cargo fuzz list); do
  echo "== $target"
  mkdir -p "fuzz/corpus/$target"
  cargo fuzz run --sanitizer=none --target "$host" "$target" -- \
    -max_total_time="${FUZZ_SECONDS:-60}" -rss_limit_mb=4096 -timeout=20 -print_final_stats=1 -verbosity=0
done
