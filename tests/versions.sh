#!/usr/bin/env bash
# Says which versions of other people's programs the tests run with, so that a difference between machines is seen at once.
# usage: tests/versions.sh CACHE     what `tests/setup.sh` keeps
set -uo pipefail
cache=$1

# The first number with a dot in what a program says of itself.
version() { "$@" 2>&1 | grep -oE '[0-9]+\.[0-9][0-9A-Za-z.~+-]*' | head -n 1; }
each() { # a name, how to ask, programs
  local name=$1 ask=$2 program found=()
  shift 2
  for program in "$@"; do
    [ ! -x "$program" ] || found+=("$(version "$program" "$ask")")
  done
  printf '  %-8s %s\n' "$name" "$(printf '%s\n' "${found[@]:-none}" | sort -uV | xargs)"
}
of_debian() { version "$cache/$1/run" "$2" --version; }

echo "tests run with"
printf '  %-8s %s\n' kernel "$(uname -r)"
each rust --version "$(command -v rustc)"
each gcc --version "$(command -v gcc)"
each go version "$(command -v go)"
printf '  %-8s %s\n' "" "programs of $(cat "$cache"/programs/*/stamp 2>/dev/null | grep -oE 'go1[0-9.]+' | sort -V | xargs)"
each node --version "$(command -v node)"
each java -version /usr/lib/jvm/*/bin/java
each python --version "$(command -v python3)" /usr/bin/python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3
printf '  %-8s %s\n' "" "of Debian 13 $(of_debian trixie python3.13)"
each perf --version "$(command -v perf)"
printf '  %-8s %s\n' "" "of Debian 11, 13 and sid $(of_debian bullseye perf_5.10) $(of_debian trixie perf) $(of_debian sid perf)"
each ghc --version "$(command -v ghc)"
each llvm --version "$(command -v llvm-symbolizer)" "$(command -v llvm-symbolizer-22)"
