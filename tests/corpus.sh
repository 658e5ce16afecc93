#!/usr/bin/env bash
# Real binaries with debug information of every shape, for tests/agreement.rs: fetched from Debian and built here.
# usage: tests/corpus.sh DIR    writes DIR/objects.tsv: name, object, kind (self, sep, alt, dwp), debug file or -
# What is fetched is left alone; what is built is built again when its sources or a compiler change. A pair that
# cannot be fetched is said and left out; the test then says so too.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"; D=$(cd "$1" && pwd); root=$D/root
export LC_ALL=C DEBUGINFOD_URLS=
done_() { [ -e "$D/.$1" ]; }

build_id() { readelf -n "$1" 2>/dev/null | sed -n 's/.*Build ID: //p'; }

# Debian's own stripped programs with their debug packages, of one version each. binutils and perl: DWARF 5 from link-time
# optimization, compressed, common parts moved out by dwz. libjvm: C++, 156 MB of debug file.
fetch() { # STEP PACKAGE...
  local step=$1; shift; done_ "$step" && return
  local to; to=$(mktemp -d "$D/deb.XXXXXX")
  if (cd "$to" && apt-get -q -o APT::Sandbox::User=root download "$@" >/dev/null); then
    for deb in "$to"/*.deb; do dpkg-deb -x "$deb" "$root"; done
    touch "$D/.$step"
  else
    echo "tests/corpus.sh: could not fetch $*" >&2
  fi
  rm -rf "$to"
}
apt-cache show binutils-x86-64-linux-gnu-dbg >/dev/null 2>&1 || apt-get -q update >/dev/null || true
fetch binutils binutils-x86-64-linux-gnu binutils-x86-64-linux-gnu-dbg libbinutils libbinutils-dbg
fetch perl perl-base perl-debug libperl5.36
fetch python python3.11-minimal libpython3.11 python3.11-dbg libpython3.11-dbg
version=$(apt-cache madison openjdk-17-dbg | awk 'NR == 1 { print $3 }')
fetch java "openjdk-17-dbg=$version" "openjdk-17-jre-headless=$version"

# Programs of Go 1.16, 1.17 and 1.18, stripped by their author: each release before 1.20 has another table.
go_of_old() {
  done_ esbuild && return
  local to; to=$(mktemp -d "$D/npm.XXXXXX")
  for version in 0.12.0 0.14.0 0.14.40; do
    if (cd "$to" && npm pack --silent "esbuild-linux-64@$version" >/dev/null && tar xzf ./*.tgz && rm ./*.tgz); then
      mkdir -p "$D/esbuild" && mv "$to/package/bin/esbuild" "$D/esbuild/$version" && rm -r "$to/package"
    else
      echo "tests/corpus.sh: could not fetch esbuild $version" >&2
    fi
  done
  rm -rf "$to"
  [ "$(ls "$D/esbuild" 2>/dev/null | wc -l)" = 3 ] && touch "$D/.esbuild"
  return 0
}
go_of_old

cpp() { # DIR FLAGS...: the C++ program
  local out=$1; shift; mkdir -p "$out"
  (cd "$out" && for unit in a b c d; do echo $unit; done |
    xargs -P2 -I{} g++ -std=c++17 -w "$@" -c "$here/fixtures/corpus/{}.cc" -o {}.o &&
    g++ -std=c++17 -w "$@" -o prog a.o b.o c.o d.o -pthread && rm -f ./*.o)
}
of=$({ cat "$here/corpus.sh" "$here"/fixtures/corpus/*; g++ --version; rustc -V; go version; } | sha256sum)
if [ "$(cat "$D/.built" 2>/dev/null)" != "$of" ]; then
  rm -f "$D/.built"
  rm -rf "$D/built"
  cpp "$D/built/cpp" -O2 -g -Wl,--build-id
  cpp "$D/built/cpp_dwarf4" -O2 -g -gdwarf-4 -ffunction-sections -Wl,--gc-sections
  cpp "$D/built/cpp_lto" -O2 -g -flto=2 -Wno-odr
  cpp "$D/built/cpp_dwo" -O2 -g -gsplit-dwarf
  # binutils' dwp takes DWARF 4 only, llvm-dwp does not end on GCC's DWARF 5.
  cpp "$D/built/cpp_dwp" -O2 -gdwarf-4 -gsplit-dwarf
  (cd "$D/built/cpp_dwp" && dwp -e prog -o prog.dwp && rm -f ./*.dwo)
  for kind in zlib zstd; do
    mkdir -p "$D/built/cpp_$kind"
    llvm-objcopy-22 --compress-debug-sections=$kind "$D/built/cpp/prog" "$D/built/cpp_$kind/prog"
  done
  mkdir -p "$D/built/rust" "$D/built/go"
  rustc --edition 2021 -g -C opt-level=3 "$here/fixtures/corpus/main.rs" -o "$D/built/rust/prog"
  rustc --edition 2021 -g -C opt-level=3 -C codegen-units=1 -C dwarf-version=5 "$here/fixtures/corpus/main.rs" -o "$D/built/rust/prog5"
  cp "$here/fixtures/corpus/main.go" "$D/built/go/"
  (cd "$D/built/go" && printf 'module example.test/corpus\n\ngo 1.19\n' >go.mod &&
    GOCACHE="$D/gocache" GOFLAGS=-mod=mod GOTOOLCHAIN=local CGO_ENABLED=0 go build -o prog . &&
    GOCACHE="$D/gocache" GOFLAGS=-mod=mod GOTOOLCHAIN=local CGO_ENABLED=0 go build -ldflags='-s -w' -o stripped .)
  rm -rf "$D/gocache"
  echo "$of" >"$D/.built"
fi

pair() { # NAME OBJECT ROOT
  [ -e "$2" ] || return 0
  local id debug kind=sep; id=$(build_id "$2"); debug=$3/usr/lib/debug/.build-id/${id:0:2}/${id:2}.debug
  [ -e "$debug" ] || { echo "tests/corpus.sh: no debug file for $2" >&2; return 0; }
  # Not `grep -q`: it would end readelf with SIGPIPE, and the pipe with an error, now and then.
  if readelf -SW "$debug" 2>/dev/null | grep gnu_debugaltlink >/dev/null; then kind=alt; fi
  printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$kind" "$debug"
}
{
  pair objdump "$root/usr/bin/x86_64-linux-gnu-objdump" "$root"
  pair ld_gold "$root/usr/bin/x86_64-linux-gnu-ld.gold" "$root"
  pair libbfd "$(ls "$root"/usr/lib/x86_64-linux-gnu/libbfd-*.so | head -1)" "$root"
  pair perl "$root/usr/bin/perl" "$root"
  pair libperl "$(ls "$root"/usr/lib/x86_64-linux-gnu/libperl.so.5.36.? | head -1)" "$root"
  pair python "$root/usr/bin/python3.11" "$root"
  pair libpython "$root/usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0" "$root"
  pair libjvm "$root/usr/lib/jvm/java-17-openjdk-amd64/lib/server/libjvm.so" "$root"
  pair libc /usr/lib/x86_64-linux-gnu/libc.so.6 ""
  for name in cpp cpp_dwarf4 cpp_lto cpp_zlib cpp_zstd; do printf '%s\t%s\tself\t-\n' $name "$D/built/$name/prog"; done
  for name in cpp_dwo cpp_dwp; do printf '%s\t%s\tdwp\t-\n' $name "$D/built/$name/prog"; done
  printf 'rust\t%s\tself\t-\nrust5\t%s\tself\t-\n' "$D/built/rust/prog" "$D/built/rust/prog5"
  printf 'go\t%s\tself\t-\n' "$D/built/go/prog"
} >"$D/objects.tsv"
