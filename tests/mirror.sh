#!/usr/bin/env bash
# Prints the mirror of Debian that apt of this host uses, whichever that is.
set -euo pipefail
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
  awk '/^URIs:/ { print $2; exit } /^deb / { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; exit } }' || true)
[ -n "$mirror" ] || { echo "tests/mirror.sh: apt has no mirror" >&2; exit 1; }
echo "$mirror"
