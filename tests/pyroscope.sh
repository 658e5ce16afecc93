#!/usr/bin/env bash
# A receiver of what is pushed to Pyroscope, of Pyroscope's own code for its API.
# usage: tests/pyroscope.sh CACHE    CACHE/sid holds a Go (tests/debian.sh); the receiver is CACHE/pyroscope
set -euo pipefail
cache=$1
cd "$(dirname "$0")/fixtures/pyroscope"
stamp=$(cat ./* | sha256sum)
[ "$(cat "$cache/pyroscope.stamp" 2>/dev/null)" != "$stamp" ] || exit 0
GOROOT=$(echo "$cache"/sid/usr/lib/go-1.*)
export GOROOT GOTOOLCHAIN=local GOPATH="$cache/gopath" GOCACHE="$cache/gocache/sid" GOFLAGS='-buildvcs=false -modcacherw -mod=readonly'
"$GOROOT/bin/go" build -o "$cache/pyroscope" .
echo "$stamp" > "$cache/pyroscope.stamp"
