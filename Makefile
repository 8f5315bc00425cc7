# The front door. Every target installs what is missing (tools/packages.txt) and builds first; all of it lands in build/.
#
#   make run       train the example language model on real text for about 90 s, and draw its loss curve
#   make test      every test, in the normal build and again under AddressSanitizer and UndefinedBehaviorSanitizer
#   make bench     measure every op beside the machine's own ceilings
#   make format    lay out the C files by .clang-format
#   make lint      layout, direction of the includes, exported symbols
#   make faults    plant faults in copies of the kernels, one at a time, and see that check catches each
#   make tables    write the READMEs' tables from bench/results
#   make build     the library, the program, the examples, the tests
#   make clean     remove build/

BUILD = build
.DEFAULT_GOAL = build
.NOTPARALLEL:
.PHONY: setup build asan run test bench format lint faults tables clean

setup:
	@tools/setup.sh

# ninja runs cmake again by itself when a CMakeLists.txt has changed.
build: setup
	@test -f $(BUILD)/build.ninja || cmake --log-level=WARNING -G Ninja -S . -B $(BUILD)
	@cmake --build $(BUILD)

asan: setup
	@test -f $(BUILD)/asan/build.ninja || cmake --log-level=WARNING -G Ninja -S . -B $(BUILD)/asan -DCOT_SANITIZE=ON
	@cmake --build $(BUILD)/asan

run: build
	@$(BUILD)/train_lm --out $(BUILD)/run

test: build asan
	@tools/run_tests.sh $(BUILD) $(BUILD)/asan

bench: build
	@$(BUILD)/cotangent bench

format: setup
	@tools/format.sh

lint: build
	@tools/format.sh --check
	@tools/check_includes.sh
	@tools/check_exports.sh $(BUILD)

faults: setup
	@tools/plant_faults.sh $(BUILD)/faults

tables: setup
	@tools/make_tables.py

clean:
	rm -rf $(BUILD)
