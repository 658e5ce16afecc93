#!/usr/bin/env bash
# Makes what is handed out of a build: a tarball, a .deb, an .rpm, a list of what is in the programs (CycloneDX), and checksums.
# usage: packaging/dist.sh OUT    OUT is new, or one from before, which is emptied; `make dist` calls this with target/dist
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
[ ! -e "$out" ] || [ -e "$out/SHA256SUMS" ] || { echo "packaging/dist.sh: $out is not from here: name another directory" >&2; exit 1; }
machine=$(uname -m)
version=$(cargo metadata --format-version 1 --no-deps | sed -n 's/.*"name":"stackwire","version":"\([^"]*\)".*/\1/p')
root=$out/root
rm -rf "$out"
mkdir -p "$out"
make -s install PREFIX=/usr DESTDIR="$root" >/dev/null
# The commit's time, so that the same commit gives the same files. Not before: builds of C begin anew when it changes.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH
# Debug files are found by build-id, on any distribution.
docs=$root/usr/share/doc/stackwire
install -d "$docs"
install -m 0644 -t "$docs" README.md SECURITY.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE
install -m 0644 proto/README.md "$docs/WIRE.md"
find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

name=stackwire-$version-$machine-linux
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --transform="s,^\./usr,$name," \
  -C "$root" -cf - ./usr | gzip -6n >"$out/$name.tar.gz"

# What is linked into the programs; build scripts, macros and tests are not. By hand: what the eBPF object is built with, and what
# everything is linked with.
{
  cargo tree --locked --offline -q -p stackwire -p stackwire-collector -e normal,no-proc-macro --prefix none --format '{p} {l}' |
    awk '/^stackwire/ { next } NF { name = $1; version = substr($2, 2); $1 = $2 = ""; sub(/^ +/, ""); sub(/ *\(\*\)$/, "")
      gsub(/ *\/ */, " OR "); if (!seen[name, version]++) printf "%s\t%s\t%s\n", name, version, $0 }'
  printf 'aya-ebpf\t%s\tMIT OR Apache-2.0\n' "$(grep -A1 '^name = "aya-ebpf"$' Cargo.lock | sed -n 's/version = "\(.*\)"/\1/p')"
  printf 'std\t%s\tMIT OR Apache-2.0\n' "$(rustc --version | cut -d' ' -f2)"
  printf 'glibc\t%s\tLGPL-2.1-or-later\n' "$(ldd --version | sed -n '1s/.* //p')"
} | sort |
  jq -Rn --arg version "$version" '
    { bomFormat: "CycloneDX", specVersion: "1.5", version: 1,
      metadata: { component: { type: "application", name: "stackwire", version: $version } },
      components: [inputs | split("\t") | { type: "library", name: .[0], version: .[1],
        purl: "pkg:cargo/\(.[0])@\(.[1])", licenses: [{ expression: .[2] }] }] }' >"$out/$name.cdx.json"

summary="Linux profiler: eBPF stacks without frame pointers, names found without privileges"
if command -v dpkg-deb >/dev/null; then
  deb=$out/deb
  cp -a "$root" "$deb"
  mkdir "$deb/DEBIAN"
  cat >"$deb/DEBIAN/control" <<CONTROL
Package: stackwire
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: The Stackwire project <stackwire@localhost>
Section: devel
Priority: optional
Depends: libcap2-bin, passwd
Description: $summary
 A privileged collector samples stacks with eBPF and reads no executable. The
 stackwire command finds names without any privilege, and writes pprof,
 perf.data, flame graphs and reports.
CONTROL
  install -m 0755 packaging/postinst "$deb/DEBIAN/postinst"
  dpkg-deb --root-owner-group -Zzstd --build "$deb" "$out/stackwire_${version}_$(dpkg --print-architecture).deb" >/dev/null
  rm -rf "$deb"
else
  echo "packaging/dist.sh: no .deb: dpkg-deb is not installed" >&2
fi
if command -v rpmbuild >/dev/null; then
  # Already stripped; and the file capabilities rpm puts in place itself.
  rpmbuild --quiet -bb --target "$machine" --define "_topdir $out/rpm" --define "_rpmdir $out" \
    --define "_rpmfilename %{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm" --define "_build_id_links none" --define "_buildhost localhost" \
    --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
    --define "version_of $version" --define "summary_of $summary" --define "root_of $root" packaging/stackwire.spec
  rm -rf "$out/rpm"
else
  echo "packaging/dist.sh: no .rpm: rpmbuild is not installed" >&2
fi
rm -rf "$root"
(cd "$out" && sha256sum ./* >SHA256SUMS)
ls -l "$out"
