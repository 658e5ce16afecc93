#!/usr/bin/env bash
# Installs what the tests need besides Rust and gcc, where it may; says so where it may not.
# usage: tests/setup.sh [ebpf]   with `ebpf`, the toolchain that rebuilds the eBPF object as well
set -uo pipefail
# What is fetched or built for the tests, kept between checkouts.
cache=${STACKWIRE_TEST_CACHE:-$HOME/.cache/stackwire-tests}

declare -A packages=(
  [go]=golang-go [llvm-symbolizer]=llvm [perf]=linux-perf [node]=nodejs [python3]=python3
  [setcap]=libcap2-bin [setpriv]=util-linux [git]=git [gzip]=gzip [g++]=g++ [readelf]=binutils
  [llvm-symbolizer-22]=llvm-22 [debuginfod]=debuginfod [eu-addr2line]=elfutils [javac]=default-jdk-headless
  [npm]=npm [unshare]=util-linux [sqlite3]=sqlite3 [openssl]=openssl [pgrep]=procps [bindfs]=bindfs [hotspot]=hotspot [runqlat]=libbpf-tools [create_llvm_prof]=autofdo [clang-22]=clang-22 [ghc]=ghc
  [debootstrap]=debootstrap [rpmbuild]=rpm [jq]=jq [wrk]=wrk [losetup]=mount [strace]=strace [curl]=curl [systemd-analyze]=systemd
)
wanted=()
for command in "${!packages[@]}"; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$command" >/dev/null || wanted+=("${packages[$command]}")
done
python3 -c 'import ensurepip' 2>/dev/null || wanted+=(python3-venv)
compgen -G '/usr/lib/debug/.build-id/*' >/dev/null || wanted+=(libc6-dbg)
compgen -G '/usr/lib/x86_64-linux-gnu/libprofiler.so.*' >/dev/null || wanted+=(libgoogle-perftools4)
[ -x /usr/lib/go-1.19/bin/go ] || wanted+=(golang-1.19-go)
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || wanted+=(postgresql)
if [ "${1:-}" = ebpf ]; then
  [ -d /usr/lib/rustlib/src/rust/library ] || wanted+=(rustc-web rust-web-src cargo-web)
  [ -e /usr/lib/llvm-22/lib/libLLVM.so ] || wanted+=(llvm-22-dev)
fi
if [ ${#wanted[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "tests/setup.sh: installing ${wanted[*]}"
    apt-get -o DPkg::Lock::Timeout=600 -q update >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -qy --no-install-recommends "${wanted[@]}" >/dev/null \
      || echo "tests/setup.sh: could not install ${wanted[*]}" >&2
  else
    echo "tests/setup.sh: not installed, and not allowed to install: ${wanted[*]}; tests that need them fail" >&2
  fi
fi
if [ "${1:-}" != ebpf ]; then
  # An older perf; a newer CPython, perf and Go; samply, which Debian 12 has not, and the newest perf and Go; servers and interpreters that are
  # not installed, so that nothing is started.
  { tests/debian.sh bullseye "$cache/bullseye" linux-perf-5.10 \
      && tests/debian.sh trixie "$cache/trixie" python3.13-minimal libpython3.13-stdlib linux-perf golang-1.24-go ruby \
      && tests/debian.sh bookworm "$cache/bookworm" nginx-light ruby php-cli \
      && tests/debian.sh sid "$cache/sid" samply golang-go linux-perf python3.14 python3.15 ruby; } \
    || echo "tests/setup.sh: could not get packages of other Debians; tests that need them fail" >&2
  { tests/clean.sh bookworm "$cache/clean-bookworm.tar" && tests/clean.sh trixie "$cache/clean-trixie.tar"; } \
    || echo "tests/setup.sh: could not make clean Debians; the test of packages fails" >&2
  tests/deploy.sh "$cache" || echo "tests/setup.sh: could not get what checks deploy/; its tests fail" >&2
  tests/free_threaded.sh "$cache" || echo "tests/setup.sh: could not build a CPython without its lock; tests of it fail" >&2
  tests/node.sh "$cache" || echo "tests/setup.sh: could not get every Node; tests of them fail" >&2
  tests/go.sh "$cache" || echo "tests/setup.sh: could not build with every Go; tests of those programs fail" >&2
  tests/pyroscope.sh "$cache" || echo "tests/setup.sh: could not build a receiver of Pyroscope; tests of what is pushed fail" >&2
fi
if [ "${1:-}" = ebpf ] && ! command -v bpf-linker >/dev/null; then
  LLVM_PREFIX=/usr/lib/llvm-22 cargo install -q bpf-linker --version 0.13.0 --no-default-features --features llvm-22 --locked
fi
exit 0
