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
# Of random bytes none is an ELF file: begin with real ones, small, of each shape.
seeds=fuzz/corpus/elf
mkdir -p "$seeds"
for flags in -gdwarf-4 -gdwarf-5 "-gdwarf-5 -gz=zlib" "-g -O0 -static-pie -nostdlib" "-g -m32 -c"; do
  # shellcheck disable=SC2086  # words, on purpose
  gcc -O1 $flags -w -ffreestanding -nostartfiles -Wl,-e,run -x c -o "$seeds/$(echo "$flags" | tr -d ' =')" - <<<'
    static inline int twice(int x) { return x * 2; }
    __attribute__((noinline)) int add(int x) { return twice(x) + 1; }
    void run(void) { volatile int y = add(3); for (;;) y = add(y); }' 2>/dev/null || true
done
for target in $(cargo fuzz list); do
  echo "== $target"
  mkdir -p "fuzz/corpus/$target"
  cargo fuzz run --sanitizer=none --target "$host" "$target" -- \
    -max_total_time="${FUZZ_SECONDS:-60}" -rss_limit_mb=4096 -timeout=20 -print_final_stats=1 -verbosity=0
done
