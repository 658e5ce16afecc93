#!/usr/bin/env bash
# Counts and samples by hardware counters, which few hosts of virtual machines give their guests: on arm64 in QEMU, whose
# virtual processor has them. There each instruction takes one cycle, and each cycle a nanosecond. Says what is counted
# of a program whose instructions are known, and that stacks by frame pointers reach the root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${STACKWIRE_TEST_CACHE:-$HOME/.cache/stackwire-tests}
out=$here/../target/aarch64-unknown-linux-gnu/debug
work=$here/../target/kernels
mkdir -p "$work"

skip() {
  echo "SKIPPED tests/counters.sh: $1" >&2
  [ -z "${STACKWIRE_NO_SKIP:-}" ] || exit 1
  exit 0
}

declare -A packages=([qemu-system-aarch64]=qemu-system-arm [cpio]=cpio [jq]=jq)
missing=()
for command in "${!packages[@]}"; do command -v "$command" >/dev/null || missing+=("${packages[$command]}"); done
if [ ${#missing[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || skip "not installed, and not allowed to install: ${missing[*]}"
  apt-get -o DPkg::Lock::Timeout=600 -q update >/dev/null || true
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -qy --no-install-recommends "${missing[@]}" >/dev/null \
    || skip "could not install ${missing[*]}"
fi
"$here/debian.sh" trixie:arm64 "$cache/arm64" linux-image-cloud-arm64 busybox-static || skip "no kernel of Debian 13 for arm64 to be had"
"$here/aarch64.sh"
[ -x "$out/stackwire" ] || skip "nothing compiled for arm64"

root=$(mktemp -d "$work/root.XXXXXX")
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,proc,sys,tmp,dev}
chmod 755 "$root"
cp "$(ls "$cache"/arm64/usr/bin/busybox "$cache"/arm64/bin/busybox 2>/dev/null | head -1)" "$root/bin/busybox"
aarch64-linux-gnu-gcc -O1 -g -static -o "$root/bin/counted" "$here/fixtures/counted.c"
for program in stackwire stackwire-collector; do aarch64-linux-gnu-strip -o "$root/bin/$program" "$out/$program"; done
turns=50000000
eight=$(printf 'r8,%.0s' 1 2 3 4 5 6 7 8)
cat >"$root/init" <<E2
#!/bin/busybox sh
export PATH=/bin HOME=/tmp
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
cd /tmp
echo "== few"
stackwire stat --json -e instructions,cycles,r8,r11,task-clock,cache-misses -- counted $turns
echo "== many"
stackwire stat --json -e ${eight}instructions,cycles -- counted $turns
echo "== events"
stackwire events
echo "== recorded"
stackwire record --event cycles --count 1000000 --capture x.stackwire -- counted $turns
stackwire report x.stackwire
stackwire resolve --folded x.folded --output x.pb.gz x.stackwire
echo "== folded"
busybox cat x.folded
echo "== several"
stackwire record --event cycles,instructions,cpu-clock --sample-rate 997 --capture y.stackwire -- counted $turns
echo "== absent"
stackwire record --event cache-misses -- counted $turns
stackwire stat -e r1e -- counted $turns
echo "== end"
busybox poweroff -f
E2
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/arm64.gz"
log=$work/arm64.log
timeout 600 qemu-system-aarch64 -M virt -cpu max,pauth-impdef=on -accel tcg -icount shift=0 -m 1024 -display none -monitor none \
  -no-reboot -nic none -serial "file:$log" -kernel "$(ls "$cache"/arm64/boot/vmlinuz-* | head -1)" -initrd "$work/arm64.gz" \
  -append "console=ttyAMA0 quiet panic=-1" </dev/null || true

said() { tr -d '\r' <"$log" | sed -n "/^== $1\$/,/^== /p" | grep -v '^== '; }
check() { # WHAT CONDITION OF AWK, NUMBERS AS VARIABLES...
  local what=$1 condition=$2 variable assigned=()
  shift 2
  for variable in "$@"; do assigned+=(-v "$variable"); done
  echo "arm64: $what: $*"
  awk "${assigned[@]}" "BEGIN { exit !($condition) }" || { cat "$log" >&2; echo "arm64: $what: not $condition" >&2; exit 1; }
}
counted() { # PART FIELD EVENT
  said "$1" | grep '^{' | jq -r "select(.event == \"$3\") | .[\"$2\"]" | tr '\n' ' '
}

# Two loops of two instructions a turn, and a program that begins and ends.
expected=$((4 * turns))
read -r instructions <<<"$(counted few counter-value instructions)"
read -r cycles <<<"$(counted few counter-value cycles)"
read -r clock <<<"$(counted few counter-value task-clock)"
check "stat counts instructions" "n >= e && n < 1.01 * e" "n=${instructions:-0}" "e=$expected"
check "stat counts cycles, nanoseconds of the task's clock" "n > 0.98 * ms * 1e6 && n <= ms * 1e6" "n=${cycles:-0}" "ms=${clock:-0}"
check "raw events are those with names" "r8 == n && r11 == c" "r8=$(counted few counter-value r8)" "n=$instructions" \
  "r11=$(counted few counter-value r11)" "c=$cycles"
[ "$(counted few counter-value cache-misses)" = "<not supported> " ] || { cat "$log" >&2; exit 1; }
# More events than counters.
shared=$(counted many pcnt-running r8 | wc -w)
least=$(counted many pcnt-running r8 | tr ' ' '\n' | sort -n | sed '/^$/d' | head -1)
for count in $(counted many counter-value r8); do
  check "counters that are shared are scaled" "n > 0.97 * e && n < 1.03 * e && all == 8 && least < 95" "n=$count" "e=$expected" "all=$shared" "least=$least"
done
for event in cycles instructions cpu-clock; do
  said events | grep -qx "  $event" || { cat "$log" >&2; echo "arm64: $event is not listed" >&2; exit 1; }
done
samples=$(said recorded | sed -n 's/^[0-9]* cycles in \([0-9]*\) samples.* over .*/\1/p')
# By frame pointers: a function that calls nothing has no frame, and its return address is in a register.
share=$(said folded | awk '/;main;(outer;)?inner [0-9]+$/ { in_it += $NF } { all += $NF } END { print all ? 100 * in_it / all : 0 }')
whole=$(said recorded | sed -n "s/^ *[0-9]* *\([0-9.]*\) %  reached the thread's root\$/\1/p")
check "a sample each million cycles" "n > 0.97 * e && n < 1.03 * e" "n=${samples:-0}" "e=$((expected / 1000000))"
check "samples are named and whole" "share > 98 && whole > 98" "share=$share" "whole=${whole:-0}"
several=$(said several | tr '\r' '\n' | sed -n 's/^.* \([0-9]*\) cycles in [0-9]* samples.* + \([0-9]*\) instructions in .* + .*cpu-clock, 0 lost.*/c=\1 i=\2/p' | tail -1)
check "counters beside a clock" "c > 0.97 * e && c < 1.03 * e && i > 0.9 * e && i < 1.1 * e" ${several:-c=0 i=0} "e=$expected"
said absent | grep -q "cannot open a cache-misses perf event.*this machine has no counter for it" || { cat "$log" >&2; exit 1; }
said absent | grep -q "cannot count r1e: .*" || { cat "$log" >&2; exit 1; }
