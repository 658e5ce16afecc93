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
# Built with instrumentation: apart from what is built without.
export CARGO_TARGET_DIR=fuzz/target
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
# The same of single sections, as fuzz/src/lib.rs takes them: length, content.
section() {
  local content=$1/section
  objcopy --dump-section "$2=$content" "$3" /dev/null 2>/dev/null || true
  touch "$content"
  local size
  size=$(stat -c %s "$content")
  # shellcheck disable=SC2059  # the escapes are the output
  printf "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((size & 255)) $((size >> 8 & 255)) $((size >> 16 & 255)) $((size >> 24 & 255)))"
  cat "$content"
  rm -f "$content"
}
mkdir -p fuzz/corpus/interpreter
# An interpreter and a C library as the linker makes them, without what they do.
printf '%s\n' 'void Py_AddPendingCall(void) {} void PyRun_SimpleString(void) {} void _PyEval_EvalFrameDefault(void) {} void mmap(void) {} void munmap(void) {}' \
  'void restore(void) { __asm__("mov $15, %rax; syscall"); } unsigned long Py_Version = 0x030e00f0; long PyCode_Type[64]; long _PyRuntime[200] = {0x7962756765646478};' \
  | gcc -shared -fPIC -w -x c -o fuzz/corpus/interpreter/python -
mkdir -p fuzz/corpus/unwind
cp "$seeds"/* fuzz/corpus/interpreter/python fuzz/corpus/unwind
scratch=$(mktemp -d)
mkdir -p fuzz/corpus/dwarf fuzz/corpus/gopclntab fuzz/corpus/links
for seed in "$seeds"/*; do
  for name in .debug_info .debug_abbrev .debug_line .debug_str .debug_line_str .debug_rnglists .debug_ranges .debug_addr .debug_str_offsets; do
    section "$scratch" "$name" "$seed"
  done >"fuzz/corpus/dwarf/$(basename "$seed")"
  gcc -x c -o "$scratch/linked" - <<<'int main(void) { return 0; }' && objcopy --add-gnu-debuglink="$seed" "$scratch/linked"
  for name in .gnu_debuglink .gnu_debugaltlink .gnu_debugdata; do
    section "$scratch" "$name" "$scratch/linked"
  done >"fuzz/corpus/links/$(basename "$seed")"
done
if command -v go >/dev/null; then
  printf 'package main\nfunc main() { println(1) }\n' >"$scratch/main.go"
  (cd "$scratch" && HOME=$scratch GO111MODULE=off go build -ldflags=-s -o go main.go) && section "$scratch" .gopclntab "$scratch/go" >fuzz/corpus/gopclntab/go
  cp "$scratch/go" fuzz/corpus/unwind/go
fi
# A jitdump with call frame information.
mkdir -p fuzz/corpus/jitdump
gcc -O2 -o "$scratch/jit" tests/fixtures/jit.c
(cd "$scratch" && { timeout 1 ./jit growing >/dev/null || true; })
for seed in "$scratch"/jit-*.dump; do
  cp "$seed" fuzz/corpus/unwind/jitdump
  cp "$seed" fuzz/corpus/jitdump/described
done
mkdir -p fuzz/corpus/perf_data fuzz/corpus/pprof fuzz/corpus/folded fuzz/corpus/gperftools
profiler=$(compgen -G '/usr/lib/x86_64-linux-gnu/libprofiler.so.*' | head -n 1 || true)
[ -z "$profiler" ] || CPUPROFILE=fuzz/corpus/gperftools/gzip LD_PRELOAD=$profiler gzip -9 -c /bin/bash >/dev/null 2>&1 || true
printf 'main;run;leaf 3\nmain;run;read_[k] 1\n' >fuzz/corpus/folded/two
# What perf writes of a command, with frame pointers, copies of stacks, to a pipe and compressed; and what Go makes of one.
if command -v perf >/dev/null; then
  for flags in "-g" "--call-graph dwarf,1024" "-z"; do
    # shellcheck disable=SC2086  # words, on purpose
    perf record -N -q -e cpu-clock -F 997 $flags -o "$scratch/perf.data" -- gzip -c /bin/sh >/dev/null 2>&1 \
      && cp "$scratch/perf.data" "fuzz/corpus/perf_data/$(echo "$flags" | tr -d ' ,=')" || true
  done
  perf record -N -q -e cpu-clock -F 997 -g -o - -- sh -c 'gzip -c /bin/sh >/dev/null' >fuzz/corpus/perf_data/pipe 2>/dev/null || true
fi
out=target/$host/release/stackwire
if [ -x "$out" ] && [ -e fuzz/corpus/perf_data/-g ]; then
  "$out" resolve fuzz/corpus/perf_data/-g -o "$scratch/x.pb.gz" 2>/dev/null && gzip -dc "$scratch/x.pb.gz" >fuzz/corpus/pprof/gzip || true
fi
rm -r "$scratch"
for target in ${FUZZ_TARGETS:-$(cargo fuzz list)}; do
  echo "== $target"
  mkdir -p "fuzz/corpus/$target"
  # linux-perf-data multiplies before it checks: with checks of ours it would end there, and not where it matters.
  checks=--debug-assertions
  [ "$target" != perf_data ] || checks=--release
  cargo fuzz run "$checks" --sanitizer=none --target "$host" "$target" -- \
    -max_total_time="${FUZZ_SECONDS:-60}" -max_len=1048576 -rss_limit_mb=4096 -timeout=20 -print_final_stats=1 -verbosity=0
done
