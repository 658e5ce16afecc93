#!/usr/bin/env bash
# Checks the dependencies by deny.toml. Builds cargo-deny where it is missing: a minute on two CPUs.
set -euo pipefail
cache=${STACKWIRE_TEST_CACHE:-$HOME/.cache/stackwire-tests}
version=0.20.2
tool=$cache/cargo-deny-$version/bin/cargo-deny
if [ ! -x "$tool" ]; then
  # A tool that runs for a second needs no optimization, which would take five minutes.
  CARGO_PROFILE_DEV_DEBUG=0 cargo install -q cargo-deny --version "$version" --locked --debug --root "$cache/cargo-deny-$version" || {
    echo "tests/deny.sh: could not install cargo-deny $version: dependencies are not checked" >&2
    [ -z "${STACKWIRE_NO_SKIP:-}" ]
    exit
  }
fi
"$tool" --log-level warn check bans licenses sources
