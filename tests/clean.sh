#!/usr/bin/env bash
# A clean Debian in a tar file, as installed with the fewest packages, and with those of which ours needs anything.
# usage: tests/clean.sh SUITE TAR
set -euo pipefail
suite=$1
to=$2
[ ! -e "$to" ] || exit 0
mirror=$("$(dirname "$0")/mirror.sh")
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=libcap2-bin "$suite" "$root" "$mirror" >/dev/null
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar -C "$root" -cf "$to.part" .
mv "$to.part" "$to"
