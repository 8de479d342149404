# Thin front door; CMake does the work. BUILD=dir for another build folder.
BUILD ?= build
JOBS ?= $(shell nproc)

.PHONY: all deps demo test test-dist bench check-long gpu-bundle gpu-test gpu-bench install clean
all: $(BUILD)/build.ninja
	@ninja -C $(BUILD) -j $(JOBS) vla_program

deps:
	@tools/deps

# From nothing installed to a trained and examined policy; the last line names the report.
demo:
	@tools/demo $(BUILD)

$(BUILD)/build.ninja: CMakeLists.txt
	@tools/deps
	@cmake -S . -B $(BUILD) -G Ninja >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }

# Everything that CI runs, ending with a count.
test: $(BUILD)/build.ninja
	@tests/run $(BUILD)

# Several ranks: processes that meet over loopback. Part of `test`.
test-dist: $(BUILD)/build.ninja
	@ninja -C $(BUILD) -j $(JOBS)
	@ctest --test-dir $(BUILD) -L '^dist$$' --output-on-failure --no-tests=error

# What this machine reaches: kernels, the training step, the loader, statistics.
bench: $(BUILD)/build.ninja
	@tools/bench $(BUILD)

# The long forms: 10^6 fuzzer executions, every failing allocation and write, 50 killed saves.
check-long: $(BUILD)/build.ninja
	@LONG=1 tests/run $(BUILD)

# Everything that a machine with a GPU and nothing of ours needs beside a checkout, in .gpu/; then, over there, its tests
# and measurements.
gpu-bundle:
	@tools/gpu-bundle

gpu-test:
	@tools/gpu-test

gpu-bench:
	@tools/gpu-bench

install: all
	@ninja -C $(BUILD) -j $(JOBS) vla_shared
	@cmake --install $(BUILD)

clean:
	rm -rf $(BUILD) $(BUILD)-asan $(BUILD)-tsan $(BUILD)-fuzz $(BUILD)-cuda $(BUILD)-gpu $(BUILD)-examples $(BUILD)*.log .gpu
