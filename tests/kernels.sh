#!/usr/bin/env bash
# Loads the eBPF object on Debian's kernels 6.1 and 6.12 and unwinds programs there, one that runs on and one that lives
# some milliseconds; counts the page faults of a third, times the waits of a fourth and the slices of a fifth. In QEMU,
# without KVM, from an initial RAM disk. Captures come out over serial lines. A user without capabilities is told what to
# do where the kernel lets nobody sample. Where lockdown=confidentiality refuses eBPF, perf events are taken.
# usage: tests/kernels.sh DIR    DIR: where the binaries are
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(cd "$1" && pwd)
work=$here/../target/kernels
mkdir -p "$work" && work=$(cd "$work" && pwd)

skip() {
  echo "SKIPPED tests/kernels.sh: $1" >&2
  [ -z "${STACKWIRE_NO_SKIP:-}" ] || exit 1
  exit 0
}

declare -A packages=([qemu-system-x86_64]=qemu-system-x86 [busybox]=busybox-static [cpio]=cpio [jq]=jq)
missing=()
for command in "${!packages[@]}"; do command -v "$command" >/dev/null || missing+=("${packages[$command]}"); done
if [ ${#missing[@]} -gt 0 ]; then
  [ "$(id -u)" = 0 ] || skip "not installed, and not allowed to install: ${missing[*]}"
  apt-get -o DPkg::Lock::Timeout=600 -q update >/dev/null || true
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -qy --no-install-recommends "${missing[@]}" >/dev/null \
    || skip "could not install ${missing[*]}"
fi

# The newest of a series that apt knows; 6.12 is in bookworm-backports.
kernel() { # SERIES
  local image=$work/vmlinuz-$1
  if [ ! -e "$image" ]; then
    local package; package=$(apt-cache pkgnames "linux-image-$1." | grep -- '-cloud-amd64$' | sort -V | tail -1)
    [ -n "$package" ] || return 1
    local to; to=$(mktemp -d "$work/deb.XXXXXX")
    (cd "$to" && apt-get -q -o APT::Sandbox::User=root download "$package" >/dev/null && dpkg-deb -x ./*.deb .) || return 1
    mv "$to"/boot/vmlinuz-* "$image"
    rm -r "$to"
  fi
  echo "$image"
}

program=$work/unwind_static
gcc -O2 -g -static -o "$program" "$here/fixtures/unwind.c"
gcc -O2 -g -static -DFRAME=40 -o "$work/brief" "$here/fixtures/brief.c" -lm
gcc -O1 -g -static -fno-omit-frame-pointer -o "$work/faults" "$here/fixtures/faults.c"
gcc -O1 -g -static -o "$work/sched" "$here/fixtures/sched.c" -lpthread
gcc -O1 -g -static -o "$work/waits" "$here/fixtures/waits.c" -lpthread
build_id() { readelf -n "$1" | sed -n 's/.*Build ID: //p'; }
root=$(mktemp -d "$work/root.XXXXXX")
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,proc,sys,tmp,dev,etc}
chmod 755 "$root" && chmod 1777 "$root/tmp"
echo nobody:x:65534:65534::/:/bin/nobody >"$root/etc/passwd"
cp "$(command -v busybox)" "$root/bin/busybox"
cp "$out/stackwire-collector" "$root/bin/"
strip --strip-debug "$root/bin/stackwire-collector"
cp "$program" "$root/bin/unwind"
cp "$work/brief" "$work/faults" "$work/waits" "$work/sched" "$root/bin/"
cat >"$root/init" <<E2
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/unwind >/dev/null & busy=\$!
while :; do /bin/brief 30; done & busy="\$busy \$!"
/bin/busybox sleep 1
/bin/stackwire-collector -a --profile --event cpu-clock,page-faults --offcpu --offcpu-states sleep,disk,preempted --pmu \\
  --sample-rate 199 --share-executables always --unwind-cache-dir /tmp/tables --output /tmp/x.stackwire & collector=\$!
# Loading the eBPF object takes seconds here, and so do the unwind tables. The capture goes on until that of brief has
# been there for a while.
until [ -s /tmp/x.stackwire ] || ! kill -0 \$collector; do /bin/busybox sleep 0.2; done
/bin/busybox sleep 1
/bin/faults 15 >/tmp/pages & programs=\$!
{ /bin/busybox sleep 1; /bin/waits 4; } & programs="\$programs \$!"
wait \$programs
echo "pages \$(/bin/busybox cat /tmp/pages)"
for i in 1 2 3 4 5 6 7 8 9 10; do [ -e /tmp/tables/$(build_id "$work/brief").v* ] || /bin/busybox sleep 10; done
/bin/busybox sleep 18
kill -INT \$collector
wait \$collector
echo "exit code \$?"
# In a pid namespace of their own.
/bin/busybox unshare -p -f --mount-proc /bin/inside
# The kernel counts the time from a wake-up to the switch, some 100 us here, as time on the CPU. With nothing else to do
# at switches it is shortest.
kill \$busy
/bin/stackwire-collector -a --pmu --output /tmp/sched.stackwire & collector=\$!
until [ -s /tmp/sched.stackwire ] || ! kill -0 \$collector; do /bin/busybox sleep 0.2; done
echo "sched \$(/bin/sched 3)"
kill -INT \$collector
wait \$collector
echo "exit code \$?"
# Debian's kernels refuse above 2.
for level in 2 3 4; do
  echo \$level >/proc/sys/kernel/perf_event_paranoid
  echo "paranoid \$level: \$(/bin/busybox su nobody 2>&1 | /bin/busybox tr '\n' ' ')"
done
/bin/busybox mount -t securityfs security /sys/kernel/security
echo confidentiality >/sys/kernel/security/lockdown
# Debian's level, at which copies of stacks cannot grow: sort needs more than 8 KiB.
echo 3 >/proc/sys/kernel/perf_event_paranoid
/bin/unwind sort >/dev/null & program=\$!
/bin/stackwire-collector --profile --pid \$program --sample-rate 199 --duration 5s --unwind-cache-dir /tmp/tables \\
  --output /tmp/locked.stackwire
echo "exit code \$?"
/bin/busybox tar -c -C /tmp sched.stackwire locked.stackwire >/tmp/others.stackwire
for port in S1:x S2:wakers S3:others; do
  /bin/busybox stty -F /dev/tty\${port%:*} raw
  /bin/busybox cat /tmp/\${port#*:}.stackwire >/dev/tty\${port%:*}
done
/bin/busybox poweroff -f
E2
cat >"$root/bin/inside" <<E2
#!/bin/busybox sh
/bin/waits 60 >/dev/null &
/bin/stackwire-collector -a --profile --offcpu --offcpu-wakers --pmu --duration 5s --output /tmp/wakers.stackwire
echo "exit code \$?"
E2
cat >"$root/bin/nobody" <<E2
#!/bin/busybox sh
/bin/unwind >/dev/null & program=\$!
/bin/stackwire-collector --profile --pid \$program --sample-rate 199 --duration 2s --unwind-cache-dir /tmp/own --output /tmp/own.stackwire
echo "exit code \$?"
kill \$program
E2
chmod +x "$root/init" "$root/bin/inside" "$root/bin/nobody"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initrd.gz"

judge() { # SERIES PROGRAM
  local text=$work/$1-$2.txt lasted release whole
  lasted=$("$out/stackwire" report "$work/$1.stackwire" | sed -n '1s/.* over \([0-9]*\)[.0-9]* s.*/\1/p')
  # The last sixteen seconds, when the tables were there.
  "$out/stackwire" report --event cpu-clock --where "comm=$2" "--time=$((lasted > 16 ? lasted - 16 : 0)).." "$work/$1.stackwire" >"$text"
  release=$(sed -n '1s/.* on [^ ]* (\([^ ]*\) .*/\1/p' "$text")
  whole=$(awk '/^  stacks   share/ { on = 1; next } /^$/ { on = 0 }
    on && /%/ { all += $1; if (/thread.s root$/) whole = $1 }
    END { printf "%.1f %d", 100 * whole / (all ? all : 1), all }' "$text")
  echo "kernel $release: $2: ${whole% *} % of ${whole#* } user stacks are whole"
  grep -q ' [[]'"$2"']' "$text" || { cat "$text" >&2; echo "kernel $release: $2: no names" >&2; exit 1; }
  awk -v whole="${whole% *}" -v all="${whole#* }" 'BEGIN { exit !(whole >= 98 && all >= 200) }' || {
    cat "$text" >&2
    echo "kernel $release: $2: too few whole stacks" >&2
    exit 1
  }
}

faults() { # SERIES LOG
  local pages counted
  pages=$(sed -n 's/^pages \([0-9]*\).*/\1/p' "$2")
  counted=$("$out/stackwire" report --event page-faults --where comm=faults "$work/$1.stackwire" |
    sed -n '1s/^\([0-9]*\) page-faults in .*/\1/p')
  echo "kernel $1: ${counted:-no} page faults in samples, ${pages:-no} pages touched"
  awk -v pages="$pages" -v counted="$counted" 'BEGIN { exit !(pages > 10000 && counted > 0.9 * pages && counted < 1.1 * pages) }' ||
    { echo "kernel $1: page faults are not those there were" >&2; exit 1; }
}

# Threads that wait, by their own clock and by ours. Whole threads: where they are preempted is anywhere.
waits() { # SERIES LOG
  local place said tid waited
  for place in in_epoll in_pipe; do
    read -r said tid < <(sed -n "s/^$place \([0-9]*\) [0-9]* \([0-9]*\) .*/\1 \2/p" "$2")
    waited=$(for event in off-cpu run-queue; do
      "$out/stackwire" report --event $event --where "tid=$tid" "$work/$1.stackwire"
    done | sed -n 's/^\([0-9.]*\) s in .* of \(off-cpu\|run-queue\) over .*/\1/p' | paste -sd+)
    echo "kernel $1: $place: ${waited:-no} s, ${said:-no} ns by its own clock"
    awk -v said="${said:-0}" -v waited="$(echo "${waited:-0}" | tr + ' ')" \
      'BEGIN { n = split(waited, parts, " "); off = -said; for (i = 1; i <= n; i++) off += parts[i] * 1e9
               exit !(said > 3e9 && off < said / 20 && off > -said / 20) }' ||
      { echo "kernel $1: waits are not as long as they were" >&2; exit 1; }
  done
}

# In a pid namespace. A thread of the program writes into the pipe, and a timer ends what waits for events.
wakers() { # SERIES
  local place function waited
  for place in pipe_read:waits do_epoll_wait:interrupt; do
    function=${place%:*} place=${place#*:}
    "$out/stackwire" report --series off-cpu --where comm=waits --focus "$function" --by waker "$work/$1-wakers.stackwire" \
      >"$work/$1-wakers.txt"
    waited=$(sed -n "s/^ *\([0-9.]*\) %  *[0-9.]*  $place\$/\1/p" "$work/$1-wakers.txt")
    echo "kernel $1: $function: $place ended ${waited:-0} % of the waits"
    awk -v waited="${waited:-0}" 'BEGIN { exit !(waited > 90) }' ||
      { cat "$work/$1-wakers.txt" >&2; echo "kernel $1: another ended them" >&2; exit 1; }
  done
}

# Switches and time on a CPU, by the kernel's own sums and by ours.
scheduled() { # SERIES LOG
  local said found
  said=$(sed -n 's/^sched \([0-9]*\) [0-9]* [0-9]* \([0-9]*\) .*/\1 \2/p' "$2")
  found=$("$out/stackwire" report --pmu --pmu-format json "$work/$1-sched.stackwire" |
    jq -r '.processes[] | select(.comm == "sched") | "\(.switches.voluntary) \(.slices.sum_ns)"' | head -1)
  echo "kernel $1: sched: ${found:-no} switches and ns, ${said:-no} by its own count"
  awk -v said="$said" -v found="$found" 'BEGIN { split(said, s, " "); split(found, f, " ")
    for (i = 1; i <= 2; i++) if (!(s[i] > 100 && f[i] > 0.9 * s[i] && f[i] < 1.1 * s[i])) exit 1 }' ||
    { echo "kernel $1: switches are not those there were" >&2; exit 1; }
}

# What a user without capabilities is told.
nobody() { # SERIES LOG
  local level asked
  asked="sysctl kernel.perf_event_paranoid=2"
  for level in 2 3 4; do
    sed -n "s/^paranoid $level: /kernel $1: nobody at paranoid $level: /p" "$2"
    if [ $level = 2 ]; then grep -q "^paranoid 2: .*exit code 0" "$2"; else grep -q "^paranoid $level: .*$asked.*exit code [1-9]" "$2"; fi ||
      { cat "$2" >&2; echo "kernel $1: that is not what was to be said" >&2; exit 1; }
  done
}

# With lockdown=confidentiality.
locked() { # SERIES
  local said
  said=$("$out/stackwire" resolve "$work/$1-locked.stackwire" -o "$work/$1-locked.pb.gz" 2>&1) || true
  grep "not with eBPF: this kernel does not let eBPF read its memory (lockdown)" <<<"$said" ||
    { echo "kernel $1: locked down, and not said: $said" >&2; exit 1; }
  judge "$1-locked" unwind
}

for series in 6.1 6.12; do
  image=$(kernel "$series") || skip "no Debian kernel $series to be had"
  log=$work/$series.log
  # Both CPUs on one thread: on two, QEMU runs into instructions the kernel is just replacing ("Oops: int3").
  timeout 600 qemu-system-x86_64 -accel tcg,thread=single -m 768 -smp 2 -display none -monitor none -no-reboot -nic none \
    -serial "file:$log" -serial "file:$work/$series.stackwire" -serial "file:$work/$series-wakers.stackwire" -serial "file:$work/$series-others.tar" -kernel "$image" -initrd "$work/initrd.gz" \
    -append "console=ttyS0 quiet panic=-1" </dev/null || true
  [ -s "$work/$series.stackwire" ] || { cat "$log" >&2; echo "kernel $series: no capture" >&2; exit 1; }
  tar -x -C "$work" --overwrite --transform "s/^/$series-/" -f "$work/$series-others.tar" ||
    { cat "$log" >&2; echo "kernel $series: not all captures" >&2; exit 1; }
  for program in unwind brief; do judge "$series" "$program"; done
  faults "$series" "$log"
  waits "$series" "$log"
  wakers "$series"
  scheduled "$series" "$log"
  nobody "$series" "$log"
  locked "$series"
done
