#!/usr/bin/env bash
# A CPython without the global interpreter lock, as DIR/python3.13t/bin/python3.13t: no Debian has one, so it is built from
# the source of Debian 13's. Kept between runs: it takes three minutes.
# usage: tests/free_threaded.sh DIR
set -euo pipefail
out=$1/python3.13t
[ ! -e "$out/stamp" ] || [ "$(cat "$out/stamp")" != "$(sha256sum <"$0")" ] || exit 0
rm -rf "$out"
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state/lists/partial" "$out/bin" "$out/lib/python3.13t/lib-dynload"
: >"$state/status"
mirror=$("$(dirname "$0")/mirror.sh")
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$state/sources.list"
apt=(apt-get -q -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status" -o "Dir::Cache::pkgcache="
  -o "Dir::Cache::srcpkgcache=" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
stamp=$(sha256sum <"$0")
cd "$state"
"${apt[@]}" update >/dev/null
"${apt[@]}" source --download-only python3.13 >/dev/null
tar -x -f python3.13_*.orig.tar.xz --strip-components=1
{ ./configure --disable-gil --without-ensurepip --disable-test-modules && make -j"$(nproc)" python sharedmods; } >build.log 2>&1 \
  || { tail -20 build.log >&2; exit 1; }
cp python "$out/bin/python3.13t"
rm -r Lib/test Lib/idlelib
cp -r Lib/. "$out/lib/python3.13t"
cp build/lib.*/*.so "$out/lib/python3.13t/lib-dynload"
echo "$stamp" >"$out/stamp"
