#!/usr/bin/env bash
# Profiles real processes, a program with three threads and a dd full of system calls, and shows what
# they did.
set -euo pipefail
cd "$(dirname "$0")"
out=$1
if [ "$(id -u)" != 0 ] && ! "$out/stackwire" doctor >/dev/null 2>&1; then
  echo "make demo: sampling needs root or a collector with capabilities; this is what is missing:" >&2
  "$out/stackwire" doctor >&2 || true
  exit 1
fi
mkdir -p demo
flags="-O1 -g -falign-functions=64 -fno-omit-frame-pointer -fno-optimize-sibling-calls -fno-inline"
gcc $flags -fPIC -shared tests/fixtures/libwork.c -o demo/libwork.so
gcc $flags tests/fixtures/work.c -o demo/work -Ldemo -Wl,-rpath,"$PWD/demo" -lwork -ldl -lpthread

"$out/stackwire" record --profile --sample-rate 499 \
  --profile-output demo/demo.pb.gz --flamegraph demo/demo.svg --capture demo/demo.stackwire \
  -- sh -c 'demo/work threads 6 >/dev/null & timeout 6 dd if=/dev/zero of=/dev/null bs=64; wait'
echo
"$out/stackwire" report demo/demo.stackwire
echo
echo "flame graph: demo/demo.svg (open it in a browser)"
echo "profile:     demo/demo.pb.gz (go tool pprof -http=: demo/demo.pb.gz)"
