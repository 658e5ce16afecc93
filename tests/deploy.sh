#!/usr/bin/env bash
# What checks `deploy/`: promtool, buildah, bubblewrap, the schemas of Kubernetes, kustomize. In a directory of their own; nothing is installed.
# usage: tests/deploy.sh CACHE    they are in CACHE/tools, CACHE/kubernetes and CACHE/gopath
set -euo pipefail
cache=$1
cd "$(dirname "$0")/.."
tests/debian.sh bookworm "$cache/tools" prometheus buildah bubblewrap
version=1.37.0
if [ "$(cat "$cache/kubernetes/version" 2>/dev/null)" != "$version" ]; then
  rm -rf "$cache/kubernetes"
  python3 -m venv "$cache/kubernetes"
  "$cache/kubernetes/bin/pip" install -q --disable-pip-version-check "kubernetes-validate==$version"
  echo "$version" > "$cache/kubernetes/version"
fi
# kubectl has a kustomize in it.
if ! command -v kubectl >/dev/null && [ ! -x "$cache/kustomize" ]; then
  GOPATH=$cache/gopath GOBIN=$cache GOFLAGS='-buildvcs=false -trimpath -modcacherw' go install sigs.k8s.io/kustomize/kustomize/v5@v5.8.2
fi
