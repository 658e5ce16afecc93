#!/usr/bin/env bash
# Programs of another Debian in a directory of their own: packages with all they depend on, unpacked and not installed.
# They run through their own dynamic linker: DIR/run PROGRAM ARGUMENTS.
# Those of another ARCHITECTURE, as apt calls it, are there to be read.
# usage: tests/debian.sh SUITE[:ARCHITECTURE] DIR PACKAGE...
set -euo pipefail
suite=${1%:*}
architecture=$(dpkg --print-architecture)
[ "$suite" = "$1" ] || architecture=${1#*:}
to=$2
shift 2
[ ! -e "$to/run" ] || [ "$(cat "$to/packages" 2>/dev/null)" != "$*" ] || exit 0
rm -rf "$to"
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state"/{lists,archives}/partial "$to"
: >"$state/status"
mirror=$("$(dirname "$0")/mirror.sh")
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$state/sources.list"
apt=(apt-get -q -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status" -o "Dir::Cache::archives=$state/archives"
  -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=" -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=600
  -o Debug::NoLocking=1 -o "APT::Architecture=$architecture" -o "APT::Architectures::=$architecture")
"${apt[@]}" update >/dev/null
"${apt[@]}" install -y --download-only --no-install-recommends "$@" >/dev/null
for package in "$state"/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$to" --keep-directory-symlink --no-same-owner
done
cat >"$to/run" <<'RUN'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
program=$1
shift
# Where /lib is not yet a link to /usr/lib, that in /lib64 is one to the host's.
for linker in "$root"/usr/lib64/ld-linux-x86-64.so.2 "$root"/lib/x86_64-linux-gnu/ld-*.so*; do
  [ ! -e "$linker" ] || break
done
[ -e "$root/usr/bin/$program" ] && program=bin/$program || program=sbin/$program
exec "$linker" --library-path "$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu" "$root/usr/$program" "$@"
RUN
echo "$*" > "$to/packages"
chmod +x "$to/run"
