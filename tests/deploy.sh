#!/usr/bin/env bash
# What checks `deploy/`: promtool, buildah, bubblewrap, the schemas of Kubernetes and OpenAPI, kustomize; and what tests
# of Python take: py-spy, another profiler, and numpy. In a directory of their own; nothing is installed.
# usage: tests/deploy.sh CACHE    they are in CACHE/tools, CACHE/validators and CACHE/gopath
set -euo pipefail
cache=$1
cd "$(dirname "$0")/.."
tests/debian.sh bookworm "$cache/tools" prometheus buildah bubblewrap
wanted="kubernetes-validate==1.37.0 openapi-spec-validator==0.9.0 py-spy==0.4.3 numpy==2.3.4"
if [ "$(cat "$cache/validators/wanted" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$cache/validators"
  python3 -m venv "$cache/validators"
  # shellcheck disable=SC2086  # words, on purpose
  "$cache/validators/bin/pip" install -q --disable-pip-version-check $wanted
  echo "$wanted" > "$cache/validators/wanted"
fi
# kubectl has a kustomize in it.
if ! command -v kubectl >/dev/null && [ ! -x "$cache/kustomize" ]; then
  GOPATH=$cache/gopath GOBIN=$cache GOFLAGS='-buildvcs=false -trimpath -modcacherw' go install sigs.k8s.io/kustomize/kustomize/v5@v5.8.2
fi
