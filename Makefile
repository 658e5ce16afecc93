# What a checkout can do. CI calls these and nothing else.

CARGO ?= cargo
HOST := $(shell rustc -vV | sed -n 's/^host: //p')
OUT := target/$(HOST)/release
PREFIX ?= /usr/local
DESTDIR ?=
# What is fetched or built for tests, kept between checkouts.
export STACKWIRE_TEST_CACHE ?= $(HOME)/.cache/stackwire-tests
GROUP ?= stackwire
CAPS ?= cap_bpf,cap_perfmon,cap_syslog

.PHONY: build demo test test-kernels chaos lint bench ebpf fuzz install dist

build:
	$(CARGO) build --release --locked -p stackwire -p stackwire-collector

# Profile a real process and show the result.
demo: build
	./demo.sh $(OUT)

# All set-up and all tests: first those that may run beside each other (tests/main.rs), then one at a time those that judge
# shares of CPU time. All is built before: the first pass alone would build no examples, which tests run.
TEST := $(CARGO) test --release --locked --workspace --exclude stackwire-fuzz --no-fail-fast
test: build
	tests/setup.sh
	tests/versions.sh $(STACKWIRE_TEST_CACHE)
	$(TEST) --no-run
	cache=$$(mktemp -d) && trap 'rm -r "$$cache"' EXIT && export XDG_CACHE_HOME=$$cache DEBUGINFOD_URLS= && \
	{ $(TEST) --test e2e -- --test-threads=2 together:: || failed=1; } && \
	$(TEST) -- --test-threads=1 --skip together:: && [ -z "$$failed" ]

# Other kernels, in QEMU.
test-kernels: build
	tests/kernels.sh $(OUT)
	tests/counters.sh

# A server and twenty collectors, killed, cut off and filled up for CHAOS_SECONDS. STACKWIRE_CHAOS_SEED repeats a run.
CHAOS_SECONDS ?= 600
chaos: build
	$(CARGO) build --release --locked -p stackwire-collector --example replay
	STACKWIRE_CHAOS_SECONDS=$(CHAOS_SECONDS) $(CARGO) test --release --locked -p stackwire-e2e -- --nocapture chaos::

lint:
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --release --locked --workspace --all-targets --features stackwire-e2e/bench -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --locked --workspace --no-deps
	tests/aarch64.sh
	tests/deny.sh

# The collector's budgets beside perf on the same load; writes target/bench.json.
bench: build
	tests/setup.sh
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench -- $(OUT)
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench-watched -- $(OUT)
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench-switches -- $(OUT)
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench-serve -- $(OUT)
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench-unwind -- $(OUT)
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench-workloads -- $(OUT)
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench-whole -- $(OUT)
	tests/corpus.sh $(STACKWIRE_TEST_CACHE)/corpus
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench-symbols -- $(OUT)
	$(CARGO) bench --locked -q -p stackwire --bench lookup
	$(CARGO) run --release --locked -q -p stackwire-e2e --features bench --bin bench-export -- $(OUT)

# Rebuild the eBPF object that is checked in.
ebpf:
	tests/setup.sh ebpf
	collector-ebpf/build.sh

# Each fuzz target for FUZZ_SECONDS.
fuzz:
	fuzz/run.sh

# Tarball, .deb, .rpm, list of parts and checksums, in target/dist.
dist: build
	packaging/dist.sh target/dist

# Programs without symbols, and their debug files by build-id (debuggers look there with PREFIX=/usr). On this system the collector is for its group
# only: who may execute it may profile every process. In a DESTDIR, which needs no root, that is left to the package.
# Not for cargo: another PATH makes it build anew.
SBIN := PATH="$$PATH:/usr/sbin:/sbin"
DEBUG := $(DESTDIR)$(PREFIX)/lib/debug/.build-id
install: build
	$(if $(DESTDIR),,getent group $(GROUP) >/dev/null || $(SBIN) groupadd --system $(GROUP))
	install -D -m 0755 -s $(OUT)/stackwire $(DESTDIR)$(PREFIX)/bin/stackwire
	install -D $(if $(DESTDIR),,-o root -g $(GROUP)) -m 0750 -s $(OUT)/stackwire-collector $(DESTDIR)$(PREFIX)/bin/stackwire-collector
	@for program in stackwire stackwire-collector; do \
	  id=$$(readelf -n $(OUT)/$$program | sed -n 's/.*Build ID: //p'); \
	  directory=$(DEBUG)/$$(printf %.2s $$id); \
	  install -d $$directory && objcopy --only-keep-debug $(OUT)/$$program $$directory/$${id#??}.debug || exit 1; \
	  chmod 0644 $$directory/$${id#??}.debug; \
	done
	$(CARGO) build --release --locked -q -p stackwire -p stackwire-collector --examples
	$(OUT)/examples/manual-symbolizer target/manual
	$(OUT)/examples/manual-collector target/manual
	install -D -m 0644 -t $(DESTDIR)$(PREFIX)/share/man/man1 target/manual/*.1
	install -D -m 0644 -t $(DESTDIR)$(PREFIX)/share/bash-completion/completions target/manual/*.bash
	install -D -m 0644 -t $(DESTDIR)$(PREFIX)/share/zsh/site-functions target/manual/_*
	install -D -m 0644 -t $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d target/manual/*.fish
	$(if $(DESTDIR),,$(SBIN) setcap $(CAPS)=ep $(PREFIX)/bin/stackwire-collector)
	@echo "$(if $(DESTDIR),give $(PREFIX)/bin/stackwire-collector to a group and run: setcap $(CAPS)=ep on it,members of group $(GROUP) may profile: usermod -aG $(GROUP) NAME)"
