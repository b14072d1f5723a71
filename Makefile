# Two commands do everything on a fresh Debian or Ubuntu machine:
#
#   make demo   build limb and watch it train, stop, resume and bring results home (no cloud)
#   make test   every test, each lane with its time
#
# Both install what they need (tests/setup says what, and asks apt only for what is missing).

# Where rustup puts cargo: a shell that was open before its installation does not look there.
export PATH := $(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

.PHONY: demo test test-long lint bench bench-read build setup clean

build: setup
	cargo build --workspace --bins

demo:
	tests/setup demo
	cargo build --bins -p limb -p limb-agent
	tests/demo

test:
	tests/setup test
	tests/run

# The long suites whole: thousands of seeds instead of a sample, and every kill point.
test-long:
	tests/setup test
	LIMB_TEST_LONG=1 tests/run

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

# Figures over a simulated 1 Gbit/s, 40 ms link, beside sshfs in the same run. Needs root.
bench:
	tests/setup bench
	cargo build --release --bins -p limb -p limb-agent
	bench/link.py

# Every kind of read beside sshfs, rclone, s3fs, rsync and tar over ssh, and the link's ceiling: about
# an hour and a half. Needs root; writes target/bench/read.json and read.svg.
bench-read:
	tests/setup bench-read
	cargo build --release --bins -p limb -p limb-agent
	bench/read.py

setup:
	tests/setup build

clean:
	cargo clean
