#!/usr/bin/env bash
# Programs of Go as every release since 1.19 builds them, into DIR/programs/VERSION: the unwinder is tested on all of them.
# Releases are those of Debian 12, 13 and sid, and between them those the module proxy has as toolchains. Kept between runs:
# a release takes a minute.
# usage: tests/go.sh DIR     DIR/trixie and DIR/sid hold other Debians' (tests/debian.sh)
set -euo pipefail
dir=$1
sources=$(cd "$(dirname "$0")/fixtures/go" && pwd)
export GO111MODULE=off GOFLAGS= GOTOOLCHAIN=local GOPATH="$dir/gopath"
# What is built depends on the sources and on this script.
stamp=$(cat "$sources"/* "$0" | sha256sum)

# A toolchain of the module proxy: a module like any other, whose programs may not be run yet.
toolchain() {
  local root="$GOPATH/pkg/mod/golang.org/toolchain@v0.0.1-go$1.linux-amd64"
  [ -d "$root" ] || (cd "$dir" && unset GOROOT && GO111MODULE=on go mod download "golang.org/toolchain@v0.0.1-go$1.linux-amd64")
  chmod -R u+w "$root"
  chmod +x "$root"/bin/* "$root"/pkg/tool/*/*
  echo "$root"
}

build() {
  local version=$1 root=$2
  local out="$dir/programs/$version"
  local go="$root/bin/go"
  export GOROOT=$root GOCACHE="$dir/gocache/$version"
  stamped="$stamp $("$go" version)"
  [ "$(cat "$out/stamp" 2>/dev/null)" != "$stamped" ] || return 0
  echo "tests/go.sh: building with $("$go" version)"
  rm -rf "$out"
  mkdir -p "$out"
  # The oracle reads no compressed sections.
  local whole=-ldflags=-compressdwarf=false bare="-ldflags=-s -w"
  # Each way to build compiles the standard library again: without HTTP where only the way matters.
  local http=("$sources/server.go" "$sources/http.go") sockets=("$sources/server.go" "$sources/sockets.go")
  CGO_ENABLED=0 "$go" build "$whole" -o "$out/server" "${http[@]}"
  CGO_ENABLED=0 "$go" build "$bare" -o "$out/server-bare" "${http[@]}"
  strip -o "$out/server-stripped" "$out/server"
  "$go" build "$whole" -o "$out/both" "$sources/both.go"
  "$go" build "$bare" -o "$out/both-bare" "$sources/both.go"
  "$go" build "$whole" -buildmode=pie -o "$out/server-pie" "${sockets[@]}"
  "$go" build "$bare" -buildmode=pie -o "$out/both-pie-bare" "$sources/both.go"
  "$go" build "$whole" -race -o "$out/server-race" "${sockets[@]}"
  "$go" build "$whole" -buildmode=c-shared -o "$out/library.so" "$sources/library.go"
  gcc -O2 -g -o "$out/library" "$sources/library.c" "$out/library.so" -Wl,-rpath,"$out" -lpthread
  "$go" build "$whole" -buildmode=plugin -o "$out/loader.so" "$sources/plugin.go"
  "$go" build "$whole" -o "$out/loader" "$sources/loader.go"
  echo "$stamped" > "$out/stamp"
}

mkdir -p "$dir"
build 1.19 /usr/lib/go-1.19
for version in 1.20.14 1.21.13 1.22.12 1.23.12 1.25.0 1.26.8; do
  root=$(PATH="$PATH:/usr/lib/go-1.19/bin" toolchain "$version")
  build "$version" "$root"
done
for suite in trixie sid; do
  root=$(echo "$dir/$suite"/usr/lib/go-1.*)
  build "$suite" "$root"
done
